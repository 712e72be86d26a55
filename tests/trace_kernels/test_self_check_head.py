"""The self-check holds what edge log-probs see, the output layer, against the model's own logits."""

import pytest
import torch
from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen3Config,
)

from trace_kernels import EdgeLogprobHead
from trace_kernels.integrations.self_check import SelfCheckError, check_against_unpacked
from trace_kernels.integrations.transformers import enable_tree_attention

from .test_self_check import batch
from .tiny_models import tiny

SCALED = {
    "granite": (GraniteConfig, {"logits_scaling": 8.0}, 8.0),
    "cohere": (CohereConfig, {"logit_scale": 0.25}, 4.0),
    "cohere2": (Cohere2Config, {"logit_scale": 0.25, "sliding_window": 5}, 4.0),
}


def with_large_logits(config: type, **changes: object) -> PreTrainedModel:
    """So that scaling them is no rounding error."""
    model = enable_tree_attention(tiny(config, "eager", **changes))
    model.get_output_embeddings().weight.data.mul_(20)
    return model


@pytest.mark.parametrize(("config", "changes", "divisor"), SCALED.values(), ids=SCALED)
def test_a_model_that_scales_its_logits_passes_only_with_its_temperature(
    config: type, changes: dict, divisor: float
) -> None:
    model = with_large_logits(config, **changes)
    with pytest.raises(SelfCheckError, match=r"its own packed logits agree: .* head_temperature=1\.0"):
        check_against_unpacked(model, *batch())
    assert check_against_unpacked(model, *batch(), head_temperature=divisor).agrees
    with pytest.warns(UserWarning, match="its own packed logits agree"):
        found = check_against_unpacked(model, *batch(), on_mismatch="fall_back")
    assert not found.agrees


@pytest.mark.parametrize("config", [PhiConfig, Gemma2Config])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_and_a_softcap_are_seen(config: type, dtype: torch.dtype) -> None:
    model = with_large_logits(config).to(dtype)
    head = EdgeLogprobHead.adopt(model.get_output_embeddings())
    if config is PhiConfig:
        head.bias.data.normal_()
    assert check_against_unpacked(model, *batch()).agrees
    with pytest.raises(SelfCheckError, match=r"its own packed logits agree: .* head_temperature=2\.0"):
        check_against_unpacked(model, *batch(), head_temperature=2.0)


def test_a_head_that_is_no_module_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_large_logits(Qwen3Config)
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda self: None)
    with pytest.warns(UserWarning, match="Qwen3ForCausalLM does not call its output layer as a module"):
        assert check_against_unpacked(model, *batch()).agrees


def test_the_hook_is_gone_afterwards() -> None:
    model = with_large_logits(Qwen3Config)
    check_against_unpacked(model, *batch())
    assert not model.get_output_embeddings()._forward_hooks


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_is_above_0(wrong: float) -> None:
    with pytest.raises(ValueError, match="head_temperature: expected a finite number above 0"):
        check_against_unpacked(tiny(Qwen3Config), *batch(), head_temperature=wrong)
