"""Tiny random models of the real library, one per family of attention, and the stock pass over flat rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from trace_kernels import TreeLayout

from .forests import Forest

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"]


@dataclass
class Family:
    config_class: type[PretrainedConfig]
    changes: dict[str, object] = field(default_factory=dict)


FAMILIES = {
    "qwen3": Family(Qwen3Config),
    "llama": Family(LlamaConfig),
    "qwen3, sliding": Family(
        Qwen3Config, {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED}
    ),
    "gemma2": Family(
        Gemma2Config,
        {
            "sliding_window": 7,
            "layer_types": MIXED,
            "attn_logit_softcapping": 0.5,
            "query_pre_attn_scalar": 4,
        },
    ),
    "gemma3": Family(Gemma3TextConfig, {"sliding_window": 6, "layer_types": MIXED}),
    "mistral": Family(MistralConfig, {"sliding_window": 4}),
    "gpt_oss": Family(
        GptOssConfig,
        {"sliding_window": 6, "layer_types": MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "smollm3": Family(SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "olmo3": Family(Olmo3Config, {"sliding_window": 5, "layer_types": MIXED}),
    "phi3": Family(Phi3Config, {"sliding_window": 3}),
}


def tiny(config_class: type[PretrainedConfig], attention: str = "sdpa", **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_class(**{**SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, parameter in model.named_parameters():  # norms start as ones: make every gradient matter
        parameter.data.add_(0.02 * torch.randn_like(parameter))
        if name.endswith(("q_proj.weight", "k_proj.weight", "qkv_proj.weight")):
            parameter.data.mul_(10)  # scores of order one: a wrong mask, cap or sink shows
        if name.endswith("sinks"):
            parameter.data.normal_()
    return model.train()


def tiny_family(name: str, attention: str = "eager") -> PreTrainedModel:
    """Eager attention is the library's only one that computes softcap and sinks on a CPU."""
    family = FAMILIES[name]
    return tiny(family.config_class, attention, **family.changes)


def tokens_of(forest: Forest, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 61, (forest.num_tokens,), generator=torch.Generator().manual_seed(seed))


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
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        logprob = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        logprobs.append(logprob.detach())
        total = total + (number + 1) * (logprob * logprob).sum()
    total.backward()
    return logprobs, gradients(model)


def packed(
    model: PreTrainedModel, forest: Forest, tokens: torch.Tensor, **arguments: object
) -> tuple[list[torch.Tensor], dict]:
    """The same from one packed and padded call, on the layout's loss edges."""
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=8)
    ids = torch.cat([tokens, torch.zeros(layout.num_padding, dtype=torch.int64)])
    logits = model(
        input_ids=ids[None],
        position_ids=layout.depth[None],
        tree_layout=layout,
        use_cache=False,
        **arguments,
    ).logits[0]
    edge = logits.float().log_softmax(-1)[layout.predecessor.clamp_min(0), ids]
    logprobs, total = [], torch.zeros(())
    for number, rollout in enumerate(forest.rollouts()):
        logprob = edge[rollout[1:]]
        logprobs.append(logprob.detach())
        total = total + (number + 1) * (logprob * logprob).sum()
    total.backward()
    return logprobs, gradients(model)


def relative_rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp_min(1e-30))
