"""How a model makes its logits from its final hidden states, which the log-prob head has to repeat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trace_kernels.layout import TreeLayout

PROBE_TOKENS = 5


def logit_factor(config: Any) -> float:
    """What the model multiplies `lm_head(hidden)` by; its temperature is then that of the sampler over this."""
    if config.model_type.startswith("granite"):
        return float(1.0 / config.logits_scaling)
    if config.model_type.startswith("cohere"):
        return float(config.logit_scale)
    return 1.0


@torch.no_grad()
def head_error(policy: Any, device: torch.device) -> tuple[float, float]:
    """How far the head's log-probs are from those of the model's own logits, and how far rounding may bring them.

    In nats, the largest of five tokens. `policy` is a `TreePolicy`; of a partitioned one every rank calls this.
    """
    model = policy.model
    layout = TreeLayout.from_segments([-1], [PROBE_TOKENS], device=device)
    ids = torch.arange(PROBE_TOKENS, device=device) % model.config.get_text_config().vocab_size
    logits: Tensor = model(
        input_ids=ids[None],
        position_ids=layout.depth[None],
        tree_layout=layout,
        tree_backend=policy.attention,
        use_cache=False,
    ).logits[0]  # [T, V]
    # Of the likeliest tokens: the log-probs of others are large numbers.
    want, labels = (logits.float() / policy.temperature).log_softmax(-1).max(-1)
    sources = torch.arange(PROBE_TOKENS, device=device)
    got, _, _ = policy(ids, layout, sources, labels, sources[-1:], entropy=False)
    # The model rounds its logits to its type, twice if it softcaps them, the head does not.
    size = float(logits.amax(-1).abs().max()) / policy.temperature
    rounding = 1e-3 + 2 * torch.finfo(logits.dtype).eps * size
    return float((got - want).abs().max()), rounding
