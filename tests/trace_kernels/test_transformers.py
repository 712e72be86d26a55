import random

import pytest
import torch
from transformers import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)
from transformers.models.auto import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from trace_kernels import TreeLayout, advantages, cut_forest
from trace_kernels.integrations.transformers import UnsupportedModelError, enable_tree_attention

from .forests import ADVERSARIAL, Forest, random_forest

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
CONFIGS = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def tiny(config_class: type, attention: str = "sdpa", **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_class(**{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():  # norms start as ones: make every gradient matter
        parameter.data.add_(0.02 * torch.randn_like(parameter))
    return model.train()


def tokens_of(forest: Forest, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (forest.num_tokens,), generator=torch.Generator().manual_seed(seed))


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.named_parameters()))
    model.zero_grad(set_to_none=True)
    return found


def flat(model: PreTrainedModel, forest: Forest, tokens: torch.Tensor) -> tuple[list[torch.Tensor], dict]:
    """The stock model, one call per rollout: log-probs of each, and the gradients of their weighted sum."""
    logprobs, total = [], torch.zeros(())
    for number, rollout in enumerate(forest.rollouts()):
        ids = tokens[rollout][None]
        if len(rollout) < 2:
            logprobs.append(torch.zeros(0))
            continue
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        logprob = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logprobs.append(logprob.detach())
        total = total + (number + 1) * (logprob * logprob).sum()
    total.backward()
    return logprobs, gradients(model)


def packed(model: PreTrainedModel, forest: Forest, tokens: torch.Tensor) -> tuple[list[torch.Tensor], dict]:
    """The same from one packed call, on the layout's loss edges."""
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=8)
    ids = torch.cat([tokens, torch.zeros(layout.num_padding, dtype=torch.int64)])
    logits = model(
        input_ids=ids[None], position_ids=layout.depth[None], tree_layout=layout, use_cache=False
    ).logits[0]
    source = layout.predecessor.clamp_min(0)
    edge = logits.log_softmax(-1)[source, ids]
    logprobs, total = [], torch.zeros(())
    for number, rollout in enumerate(forest.rollouts()):
        logprob = edge[rollout[1:]]
        logprobs.append(logprob.detach())
        total = total + (number + 1) * (logprob * logprob).sum()
    total.backward()
    return logprobs, gradients(model)


@pytest.fixture(params=CONFIGS)
def config_class(request: pytest.FixtureRequest) -> type:
    return CONFIGS[request.param]


@pytest.mark.parametrize("checkpointing", ["off", "reentrant", "non-reentrant"])
def test_packed_equals_flat(config_class: type, checkpointing: str) -> None:
    stock, model = tiny(config_class), tiny(config_class)
    assert enable_tree_attention(model) is model
    if checkpointing != "off":
        reentrant = checkpointing == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
    rng = random.Random(1)
    cases = [random_forest(rng, rng.randint(4, 12), longest, shortest=longest // 4) for longest in (4, 9, 30)]
    cases.append(ADVERSARIAL["a rollout that is a prefix of another"])
    for forest in cases:
        tokens = tokens_of(forest)
        want, want_grads = flat(stock, forest, tokens)
        got, got_grads = packed(model, forest, tokens)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        for name, expected in want_grads.items():
            error = (got_grads[name] - expected).norm() / expected.norm().clamp_min(1.0)
            assert error < 1e-5, f"{name}: {error:.1e}"


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


def call(model: PreTrainedModel, layout: TreeLayout, **changes: object) -> None:
    tokens = layout.num_tokens
    arguments = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64), "position_ids": layout.depth[None]}
    model(**{**arguments, "tree_layout": layout, "use_cache": False, **changes})


LAYOUT = TreeLayout.from_segments([-1, 0, 0], [4, 2, 3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree_layout": None}, "Attention runs attention 'trace_tree' but got nothing as tree_layout"),
        ({"tree_layout": [1]}, "got list as tree_layout"),
        ({"position_ids": None}, "position_ids are not the layout's depths"),
        ({"position_ids": torch.arange(9)[None]}, "position_ids are not the layout's depths"),
        ({"use_cache": True, "past_key_values": "filled"}, "no key/value cache"),
        ({"attention_mask": torch.tensor([[0] + [1] * 8])}, "attention_mask hides tokens"),
        ({"attention_mask": torch.zeros(1, 1, 9, 9)}, "got an attention mask"),
        ({"input_ids": torch.zeros(2, 9, dtype=torch.int64)}, "got a batch of 2"),
        ({"tree_layout": TreeLayout.from_segments([-1], [8])}, "position_ids are not the layout's depths"),
        ({"softcap": 30.0}, "softcap given: logit soft-capping is not supported"),
        ({"s_aux": torch.zeros(4)}, "s_aux given: attention sinks is not supported"),
        ({"is_causal": False}, "its attention is not causal"),
    ],
)
def test_calls_it_cannot_compute_are_refused(changes: dict, message: str) -> None:
    model = enable_tree_attention(tiny(Qwen3Config))
    if "past_key_values" in changes:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        for layer in range(2):
            cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), layer)
        changes = {**changes, "past_key_values": cache}
    with pytest.raises(UnsupportedModelError, match=message):
        call(model, LAYOUT, **changes)
    call(model, LAYOUT)
    call(model, LAYOUT, attention_mask=torch.ones(1, 9, dtype=torch.int64))


def test_a_window_counts_only_when_a_path_is_longer() -> None:
    model = enable_tree_attention(tiny(MistralConfig, sliding_window=7))
    call(model, LAYOUT)
    longer = TreeLayout.from_segments([-1, 0, 0], [4, 2, 4])
    with pytest.raises(UnsupportedModelError, match="sliding window 7 on paths of up to 8 tokens"):
        call(model, longer)


def test_dropout_is_refused_where_it_acts() -> None:
    model = enable_tree_attention(tiny(Qwen3Config))
    model.model.layers[0].self_attn.attention_dropout = 0.1
    call(model.eval(), LAYOUT)
    with pytest.raises(UnsupportedModelError, match=r"attention dropout 0\.1"):
        call(model.train(), LAYOUT)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: tiny(Qwen3Config, attention_dropout=0.1), r"config\.attention_dropout is 0\.1"),
        (lambda: tiny(Gemma2Config), "attn_logit_softcapping is set"),
        (
            lambda: tiny(GptOssConfig, "eager", num_local_experts=2, num_experts_per_tok=1),
            "s_aux given: attention sinks",
        ),
        (
            lambda: tiny(
                Qwen3NextConfig, num_experts=2, num_experts_per_tok=1, layer_types=["linear_attention"] * 2
            ),
            "layers of type",
        ),
        (
            lambda: AutoModelForSeq2SeqLM.from_config(
                T5Config(
                    vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0
                )
            ),
            "T5ForConditionalGeneration failed on a five-token tree",
        ),
        (lambda: torch.nn.Linear(2, 2), "expected a transformers PreTrainedModel, got Linear"),
    ],
    ids=["dropout", "softcap", "sinks", "linear attention", "encoder-decoder", "no transformers model"],
)
def test_models_it_cannot_run_are_refused(build, message: str) -> None:  # type: ignore[no-untyped-def]
    model = build()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(UnsupportedModelError, match=message):
        enable_tree_attention(model)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before


def test_a_model_that_mixes_tokens_elsewhere_is_refused() -> None:
    model = tiny(Qwen3Config)
    inner = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: inner(x + x.roll(1, dims=1))
    with pytest.raises(UnsupportedModelError, match="reaches a sibling branch"):
        enable_tree_attention(model)


def test_a_layer_that_skips_the_interface_is_refused() -> None:
    model = tiny(Qwen3Config)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(UnsupportedModelError, match="1 of its 2 layers call the attention interface"):
        enable_tree_attention(model)


def test_enabling_leaves_mode_and_gradients_alone() -> None:
    model = tiny(Qwen3Config)
    model.model.layers[1].eval()
    enable_tree_attention(model)
    assert model.training
    assert not model.model.layers[1].training
    assert all(p.grad is None for p in model.parameters())
    with torch.device("meta"):
        weightless = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE))
    assert enable_tree_attention(weightless).config._attn_implementation == "trace_tree"
