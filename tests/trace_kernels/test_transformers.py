"""Packed passes of real transformers models equal their own stock passes over flat rollouts."""

import random

import pytest
import torch
from transformers import Qwen3Config

from trace_kernels import TreeLayout, advantages, cut_forest
from trace_kernels.integrations.transformers import enable_tree_attention

from .forests import ADVERSARIAL, Forest, random_forest
from .tiny_models import FAMILIES, flat, gradients, packed, relative_rms, tiny, tiny_family, tokens_of

# Paths of up to 24 tokens, longer than every window; branches of one token; three trees; with padding to 64.
SEVERAL = Forest([-1, 0, 0, 2, 2, 0, -1, 6, 6, -1], [9, 1, 8, 1, 6, 12, 10, 4, 1, 3])


def assert_equal(got: tuple, want: tuple, tolerance: float = 1e-5) -> None:
    (got_logprobs, got_grads), (want_logprobs, want_grads) = got, want
    error = relative_rms(torch.cat(got_logprobs), torch.cat(want_logprobs))
    assert error <= tolerance, f"log-probs: {error:.1e}"
    for name, expected in want_grads.items():
        error = relative_rms(got_grads[name], expected)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_flat(family: str) -> None:
    stock, model = tiny_family(family), tiny_family(family)
    assert enable_tree_attention(model) is model
    rng = random.Random(1)
    cases = [
        SEVERAL,
        random_forest(rng, 8, 16, shortest=4),
        ADVERSARIAL["a rollout that is a prefix of another"],
    ]
    for forest in cases:
        tokens = tokens_of(forest)
        assert_equal(packed(model, forest, tokens), flat(stock, forest, tokens))


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_gradient_checkpointing_changes_nothing(family: str, reentrant: bool) -> None:
    stock, model = tiny_family(family), enable_tree_attention(tiny_family(family))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    tokens = tokens_of(SEVERAL)
    assert_equal(packed(model, SEVERAL, tokens), flat(stock, SEVERAL, tokens))


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_bf16_is_as_close_to_fp32_as_the_stock_pass(family: str) -> None:
    tokens = tokens_of(SEVERAL)
    exact = torch.cat(flat(tiny_family(family), SEVERAL, tokens)[0])
    stock = torch.cat(flat(tiny_family(family).bfloat16(), SEVERAL, tokens)[0])
    model = enable_tree_attention(tiny_family(family).bfloat16())
    got = torch.cat(packed(model, SEVERAL, tokens)[0])
    assert relative_rms(got, exact) <= 2 * relative_rms(stock, exact)


@pytest.mark.parametrize(
    ("family", "keyword", "value"),
    [
        ("mistral", "sliding_window", 5),  # one token more than the model's window
        ("gemma2", "softcap", None),
        ("gpt_oss", "s_aux", None),
    ],
)
def test_every_keyword_of_the_attention_matters(
    monkeypatch: pytest.MonkeyPatch, family: str, keyword: str, value: int | None
) -> None:
    """The comparison above would see a window off by one, and a cap or sinks left out."""
    from transformers import AttentionInterface

    from trace_kernels.integrations import attention_function

    model = enable_tree_attention(tiny_family(family))
    layout = TreeLayout.from_segments(SEVERAL.parents, SEVERAL.lengths)

    def logprobs() -> torch.Tensor:
        ids, depth = tokens_of(SEVERAL)[None], layout.depth[None]
        with torch.no_grad():
            logits = model(input_ids=ids, position_ids=depth, tree_layout=layout, use_cache=False).logits
        return logits.log_softmax(-1)

    right = logprobs()

    def wrong(*args: object, **kwargs: object) -> object:
        return attention_function.tree_attention_forward(*args, **{**kwargs, keyword: value})

    monkeypatch.setitem(AttentionInterface._global_mapping, attention_function.NAME, wrong)
    assert relative_rms(logprobs(), right) > 1e-4


def test_the_parts_of_a_cut_tree_give_the_whole_gradient() -> None:
    model = enable_tree_attention(tiny(Qwen3Config))
    forest = Forest([-1, 0, 1, 1, 0, 4, 4, 6, 6], [20, 5, 7, 3, 6, 8, 2, 5, 9])
    tokens = tokens_of(forest)
    leaf_nodes = [i for i in range(9) if i not in forest.parents]
    adv = advantages(forest.parents, leaf_nodes, [1.0, 0.0, 1.0, 0.0, 1.0], "treepo")
    old = torch.randn(forest.num_tokens, generator=torch.Generator().manual_seed(5)) * 0.3 - 4.0

    def backward(nodes: list[int], parents: list[int], leaves: list[int] | None) -> None:
        lengths = [forest.lengths[n] for n in nodes]
        layout = TreeLayout.from_segments(parents, lengths)
        place = torch.tensor([t for n in nodes for t in forest.segments[n]])
        node_of = torch.tensor([n for n in nodes for _ in forest.segments[n]])
        positive, negative, _ = (torch.from_numpy(x).float()[node_of] for x in adv.terms(leaves))
        ids = tokens[place]
        logits = model(
            input_ids=ids[None], position_ids=layout.depth[None], tree_layout=layout, use_cache=False
        ).logits[0]
        logprob = logits.log_softmax(-1)[layout.predecessor.clamp_min(0), ids]
        rho = (logprob - old[place]).exp()
        clipped = rho.clamp(0.8, 1.28)
        terms = positive * torch.minimum(rho, clipped) + negative * torch.maximum(rho, clipped)
        terms[layout.predecessor >= 0].sum().backward()

    backward(list(range(9)), forest.parents, None)
    whole = gradients(model)
    parts = cut_forest(forest.parents, forest.lengths, max_tokens=45)
    assert len(parts) > 1
    for part in parts:
        backward(part.nodes.tolist(), part.local_parents(forest.parents).tolist(), part.leaves.tolist())
    for name, expected in gradients(model).items():
        assert (whole[name] - expected).norm() <= 1e-5 * expected.norm().clamp_min(1.0), name
