"""Models whose logits are more than their output layer of the hidden states, through the policy's log-prob head."""

from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    PreTrainedModel,
)

from trace_kernels.layout import TreeLayout
from trace_rl.policy.logits import head_error
from trace_rl.policy.module import TreePolicy

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.5, "attn_implementation": "eager",
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
MODELS = {
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(final_logit_softcapping=0.5, **SIZES)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(logits_scaling=8.0, **SIZES)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(logit_scale=0.0625, **SIZES)),
}


def scaled_otherwise() -> PreTrainedModel:
    """HyperCLOVA X multiplies by the number that Granite, under the same name, divides by."""
    return HyperCLOVAXForCausalLM(HyperCLOVAXConfig(logits_scaling=0.125, **SIZES))


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_the_models_own(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(61, (9,))
    with torch.no_grad():
        want = (model(input_ids=ids[None]).logits[0, :-1].float() / 0.7).log_softmax(-1)
        hidden = model.model(input_ids=ids[None]).last_hidden_state
        bare = (model.lm_head(hidden)[0, :-1] / 0.7).log_softmax(-1)
    want, bare = (x.gather(1, ids[1:, None])[:, 0] for x in (want, bare))
    policy = TreePolicy(model, temperature=0.7)
    layout = TreeLayout.from_segments([-1], [9])
    got, _, _ = policy(ids, layout, torch.arange(8), ids[1:], torch.tensor([8]))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, bare, atol=1e-2)
    error, rounding = head_error(policy, torch.device("cpu"))
    assert error < 1e-5 < rounding < 0.01


def test_other_logits_are_noticed() -> None:
    torch.manual_seed(0)
    error, rounding = head_error(TreePolicy(scaled_otherwise().eval(), temperature=0.7), torch.device("cpu"))
    assert error > 10 * rounding


def test_masked_tokens_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = HyperCLOVAXForCausalLM.forward

    def masking(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits[..., 5:9] = torch.finfo(torch.float32).min
        return out

    torch.manual_seed(0)
    policy = TreePolicy(scaled_otherwise().eval(), temperature=0.7)
    monkeypatch.setattr(HyperCLOVAXForCausalLM, "forward", masking)
    error, rounding = head_error(policy, torch.device("cpu"))
    assert error > 10 * rounding


def test_half_types_are_no_reason_to_refuse() -> None:
    torch.manual_seed(0)
    model = MODELS["softcap"]().eval().to(torch.bfloat16)
    error, rounding = head_error(TreePolicy(model, temperature=0.7), torch.device("cpu"))
    assert error <= rounding < 0.1
