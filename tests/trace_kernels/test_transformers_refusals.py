"""Models and calls that tree attention cannot compute exactly are refused, with the reason."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    AttentionMaskInterface,
    BloomConfig,
    DogeConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)
from transformers.models.auto import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from trace_kernels import TreeLayout
from trace_kernels.integrations.attention_function import NAME, no_mask
from trace_kernels.integrations.transformers import UnsupportedModelError, enable_tree_attention

from .tiny_models import MIXED, SHAPE, relative_rms, tiny


def call(model: PreTrainedModel, layout: TreeLayout, **changes: object) -> torch.Tensor:
    tokens = layout.num_tokens
    arguments = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64), "position_ids": layout.depth[None]}
    return model(**{**arguments, "tree_layout": layout, "use_cache": False, **changes}).logits[0].detach()


ONE_EXPERT = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED}
LLAMA4 = {"intermediate_size_mlp": 48, "num_local_experts": 2}
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
        ({"indices": torch.zeros(9, 2)}, "indices given: sparse attention is not supported"),
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
        (
            lambda: tiny(Qwen3NextConfig, **ONE_EXPERT, layer_types=["linear_attention", "full_attention"]),
            r"layers of type \['linear_attention'\]",
        ),
        (lambda: tiny(MambaConfig, "eager", state_size=4), r"layers of type \['linear_attention'\]"),
        (
            lambda: tiny(Llama4TextConfig, **LLAMA4, layer_types=["chunked_attention", "full_attention"]),
            r"layers of type \['chunked_attention'\]",
        ),
        (
            lambda: tiny(
                Llama4TextConfig, **LLAMA4, layer_types=["full_attention"] * 2, no_rope_layers=[1, 0]
            ),
            "attn_temperature_tuning scales queries by their index",
        ),
        (
            lambda: tiny(Gemma3TextConfig, use_bidirectional_attention=True, sliding_window=8),
            "its own mask differs from that at a distance of -2 tokens",
        ),
        (
            lambda: tiny(
                Qwen2MoeConfig, **ONE_EXPERT, use_sliding_window=True, sliding_window=5, layer_types=MIXED
            ),
            "gives its attention no sliding_window, but its own mask differs from that at a distance of 8 tokens",
        ),
        (
            lambda: tiny(PhimoeConfig, num_local_experts=2, num_experts_per_tok=1, sliding_window=5),
            "PhimoeAttention: gives its attention no sliding_window",
        ),
        (lambda: tiny(DogeConfig, "eager"), "got an attention mask"),
        (lambda: tiny(BloomConfig, "eager", n_layer=2, n_head=4), "does not take its attention from"),
        (
            lambda: AutoModelForCausalLM.from_config(
                FalconConfig(
                    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
                )
            ),
            r"config\.alibi adds a bias",
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
    ids=[
        "dropout",
        "linear attention in some layers",
        "state space",
        "chunked attention",
        "scaling by index",
        "bidirectional",
        "window in the mask alone",
        "window in the mask alone, all layers",
        "mask made by the layer",
        "alibi outside the interface",
        "alibi",
        "encoder-decoder",
        "no transformers model",
    ],
)
def test_models_it_cannot_run_are_refused(build: Callable[[], nn.Module], message: str) -> None:
    model = build()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    with pytest.raises(UnsupportedModelError, match=message):
        enable_tree_attention(model)
    assert getattr(getattr(model, "config", None), "_attn_implementation", None) == before


def test_a_model_that_counts_positions_itself_is_refused() -> None:
    model = tiny(GPT2Config, n_layer=2, n_head=4, n_embd=32, attn_pdrop=0.0)
    enable_tree_attention(model)
    model.set_attn_implementation("eager")
    inner = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda ids: inner(torch.arange(ids.shape[-1])[None])
    with pytest.raises(UnsupportedModelError, match="depends on its place in the row"):
        enable_tree_attention(model)


def test_an_attention_given_tensors_the_op_does_not_know_is_refused() -> None:
    model = tiny(Qwen3Config)
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, inner=inner, **k: inner(*a, **k, gate=torch.ones(1))
    with pytest.raises(UnsupportedModelError, match=r"gives its attention \['gate'\]"):
        enable_tree_attention(model)
    assert AttentionMaskInterface._global_mapping[NAME] is no_mask


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "build",
    [
        lambda: tiny(LlamaConfig, max_position_embeddings=16, rope_parameters=DYNAMIC),
        lambda: tiny(
            Phi3Config, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONG
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_rotary_frequencies_that_depend_on_the_length_of_a_call(build: Callable[[], PreTrainedModel]) -> None:
    """Up to the limit packed and flat agree. One token more, and a short rollout of a batch with a long one
    would be rotated by other frequencies than alone: the stock model shows it, tree attention refuses."""
    stock, model = build().eval(), enable_tree_attention(build().eval())
    tokens = torch.arange(1, 25)
    fits = TreeLayout.from_segments([-1, 0, 0], [10, 6, 3])
    ids = tokens[: fits.num_tokens]
    logits = call(model, fits, input_ids=ids[None])
    with torch.no_grad():
        assert relative_rms(logits[:16], stock(input_ids=ids[None, :16]).logits[0]) < 1e-5
        alone = stock(input_ids=tokens[None, :16], use_cache=False).logits[0]
        beside = stock(input_ids=tokens[None, :17], use_cache=False).logits[0, :16]
    assert relative_rms(beside, alone) > 1e-3
    with pytest.raises(
        UnsupportedModelError, match="a path of 17 tokens, but from 16 on this model's rotary"
    ):
        call(model, TreeLayout.from_segments([-1, 0, 0], [10, 7, 3]))


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
