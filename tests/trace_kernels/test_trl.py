"""Rows packed by the real TRL, its trainer's own loss, against the same rollouts one by one through sdpa."""

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer, DataCollatorForRollout
from trl.experimental.async_grpo.packing import TreeRow
from trl.trainer.utils import add_fused_lm_head

from trace_kernels.integrations.transformers import UnsupportedModelError, enable_tree_attention
from trace_kernels.integrations.trl import NAME, enable_tree_rows, pack_row, row_layout
from trace_kernels.reference.tree_attention import dense_mask

Samples = list[dict[str, Any]]
TEMPERATURE = 0.7
TREE_KEYS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


def sample(ids: list[int], mask: list[bool], rng: random.Random, group: int = 0) -> dict[str, Any]:
    """One item of TRL's planner."""
    return {
        "input_ids": torch.tensor(ids),
        "completion_mask": torch.tensor(mask, dtype=torch.int64),
        "old_log_probs": torch.tensor([-rng.uniform(3, 5) for _ in ids]),
        "advantage": rng.uniform(-1, 1),
        "group_id": group,
        "metrics": {},
    }


def multi_turn_samples() -> Samples:
    """Two prompts with a common system prompt; branches at the prompt, inside and at the end of turns, a rollout
    that is a prefix of another and a duplicate; shared tokens that are in the loss of one rollout only."""
    rng = random.Random(0)

    def some(count: int) -> list[int]:
        return [rng.randrange(61) for _ in range(count)]

    samples = []
    system = some(5)
    for group in range(2):
        prompt, turn, reply = system + some(4), some(6), some(3)
        answers = [
            turn + reply + some(5),
            turn + reply + some(2),
            turn + some(4),
            turn,
            turn[:3] + some(3),
            some(1),
        ]
        for answer in [*answers, answers[0]]:
            mask = [False] * len(prompt) + [rng.random() < 0.8 for _ in answer]
            mask[len(prompt)] = True
            samples.append(sample(prompt + answer, mask, rng, group))
    return samples


def row_of(samples: Samples) -> TreeRow:
    row = TreeRow()
    for one in samples:
        row.add(one)
    return row


def tiny(attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # norms start as ones: make every gradient matter
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return model.train()


def collected(model: PreTrainedModel, values: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [values.detach(), *gradients]


def unpacked_logprobs(model: PreTrainedModel, samples: Samples) -> torch.Tensor:
    """[M] of the trained tokens, sample by sample, each predicted in its own call."""
    found = []
    for one in samples:
        ids = one["input_ids"]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        found.append(logprobs[one["completion_mask"][1:].bool()])
    return torch.cat(found)


def weighted(logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs * torch.linspace(-1, 2, logprobs.numel())).sum()


def assert_close(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert float((a - b).norm()) <= 1e-5 * float(b.norm())


@pytest.fixture(scope="module")
def samples() -> Samples:
    return multi_turn_samples()


@pytest.fixture(scope="module")
def wanted(samples: Samples) -> list[torch.Tensor]:
    model = tiny("sdpa")
    logprobs = unpacked_logprobs(model, samples)
    return collected(model, logprobs, weighted(logprobs))


def test_rows_as_trl_packed_them(samples: Samples, wanted: list[torch.Tensor]) -> None:
    packed = row_of(samples).pack()
    layout = row_layout(packed)
    model = enable_tree_attention(tiny("sdpa"))
    logits = model(
        input_ids=packed["input_ids"][None],
        position_ids=layout.depth[None],
        tree_layout=layout,
        use_cache=False,
    ).logits[0]
    source = packed["token_index"]
    logprobs = (logits[source] / TEMPERATURE).log_softmax(-1)
    logprobs = logprobs.gather(1, packed["shift_labels"][source][:, None])[:, 0]
    assert_close(collected(model, logprobs, weighted(logprobs)), wanted)


def test_rows_without_the_extra_tokens(samples: Samples, wanted: list[torch.Tensor]) -> None:
    row = row_of(samples)
    packed, theirs = pack_row(row, pad_to_multiple=8), row.pack()
    assert packed.layout.num_tokens - packed.layout.num_padding < len(row.tokens)
    assert torch.equal(packed.edge_rollout, theirs["segment_id"])
    assert torch.equal(packed.edge_labels, theirs["shift_labels"][theirs["token_index"]])
    model = enable_tree_attention(tiny("sdpa"))
    logits = model(
        input_ids=packed.input_ids[None],
        position_ids=packed.layout.depth[None],
        tree_layout=packed.layout,
        use_cache=False,
    ).logits[0]
    logprobs = (logits[packed.edge_src] / TEMPERATURE).log_softmax(-1)
    logprobs = logprobs.gather(1, packed.edge_labels[:, None])[:, 0]
    assert_close(collected(model, logprobs, weighted(logprobs)), wanted)


def stub_trainer() -> SimpleNamespace:
    """What `AsyncGRPOTrainer.compute_loss` reads and writes of its trainer."""
    return SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        epsilon_low=0.2,
        epsilon_high=0.3,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0.0,
        _step_trained_tokens=0.0,
        _step_seq_len_weighted=0.0,
        _step_samples=0.0,
        _step_forward_s=0.0,
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainers_own_loss(samples: Samples, checkpointing: bool) -> None:
    # Two rows of different size, so that the collator pads the second.
    inputs = DataCollatorForRollout(pad_token_id=0, num_processes=2).torch_call(
        [[row_of(samples), row_of(samples[:3])]]
    )
    for number, of_row in enumerate((samples, samples[:3])):
        model = tiny("sdpa")
        logprobs = unpacked_logprobs(model, of_row)
        old, advantages = (
            torch.cat([value(one)[1:][one["completion_mask"][1:].bool()] for one in of_row])
            for value in (
                lambda one: one["old_log_probs"],
                lambda one: torch.full(one["input_ids"].shape, one["advantage"]),
            )
        )
        ratio = (logprobs - old).exp()
        objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
        loss = -objective.sum() / inputs["global_n_tokens"][0]
        wanted = collected(model, loss, loss)

        model = tiny("sdpa")
        add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
        enable_tree_rows(model)
        if checkpointing:
            model.gradient_checkpointing_enable()
        of_rank = {key: value[number : number + 1] for key, value in inputs.items()}
        loss = AsyncGRPOTrainer.compute_loss(stub_trainer(), model, of_rank)
        assert_close(collected(model, loss, loss), wanted)


ROLLOUTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9)


@settings(deadline=None)
@given(ROLLOUTS)
def test_layout_is_the_mask_of_the_gathered_paths(rollouts: list[list[int]]) -> None:
    rng = random.Random(0)
    packed = row_of([sample(ids, [True] * len(ids), rng) for ids in rollouts]).pack()
    index, queries, keys = (packed[key].tolist() for key in TREE_KEYS)
    mask = torch.zeros(queries[-1], queries[-1], dtype=torch.bool)
    for segment in range(len(queries) - 1):
        path = index[keys[segment] : keys[segment + 1]]
        for row in range(queries[segment], queries[segment + 1]):
            # Varlen FlashAttention aligns the causal mask at the last query and the last key.
            mask[row, path[: len(path) - (queries[segment + 1] - 1 - row)]] = True
    layout = row_layout(packed)
    assert torch.equal(dense_mask(layout), mask)
    assert torch.equal(layout.depth, packed["position_ids"])


def test_malformed_rows_are_refused() -> None:
    rng = random.Random(0)
    packed = row_of([sample(ids, [True] * 4, rng) for ids in ([1, 2, 3, 4], [1, 2, 5, 6])]).pack()
    with pytest.raises(ValueError, match=r"\['tree_cu_seqlens_k'\] missing"):
        row_layout({key: value for key, value in packed.items() if key != "tree_cu_seqlens_k"})
    padded = torch.cat([packed["tree_kv_index"], torch.tensor([-1])])
    with pytest.raises(ValueError, match="collator's padding still there"):
        row_layout({**packed, "tree_kv_index": padded})
    # Segments [0, 1), [1, 4) and [4, 7) with the paths 0 | 0 123 | 0 456: the last two get a wrong parent.
    for entry, token in ((1, 1), (1, 4), (5, 3)):
        moved = packed["tree_kv_index"].clone()
        assert moved[entry] == 0
        moved[entry] = token
        with pytest.raises(ValueError, match="not those of its segments"):
            row_layout({**packed, "tree_kv_index": moved})


def test_a_call_without_a_row_is_refused() -> None:
    model = enable_tree_rows(tiny("sdpa"))
    assert model.config._attn_implementation == NAME
    with pytest.raises(UnsupportedModelError, match="got no tree_kv_index"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
