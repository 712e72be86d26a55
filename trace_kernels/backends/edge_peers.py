"""Edge log-probs by other libraries: Liger's chunked selective log-probs, and cut cross-entropy.

Both are imported when asked for, and refused where their numbers or abilities differ from the op's.
"""

from __future__ import annotations

from typing import Any

import torch

from ..edge_logprobs_op import Logits

PEERS = ("liger", "cce")


def run(
    peer: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edge_src: torch.Tensor,
    labels: torch.Tensor,
    logits: Logits,
    entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob [E], zeros [E]); ValueError where the peer cannot compute it, ImportError where it is missing."""
    reason = _why_not(peer, hidden, weight, bias, logits, entropy)
    if reason is not None:
        raise ValueError(f"backend: {peer!r} {reason}; use 'auto'")
    if not len(labels):
        # Zero, with a gradient of zeros.
        empty = (hidden[edge_src].float().sum(1) + 0.0 * weight[labels].float().sum(1)).float()
        return empty, empty.detach()
    if peer == "liger":
        from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

        compute: Any = LigerFusedLinearPPOBase.chunk_forward
        with torch.autocast(hidden.device.type, enabled=False):
            logprob = compute(hidden[edge_src][None], weight, labels[None], bias, logits.temperature)[0]
    else:
        from cut_cross_entropy import linear_cross_entropy

        # filter_eps drops gradients below a threshold unless it is None.
        with torch.autocast(hidden.device.type, enabled=False):
            logprob = -linear_cross_entropy(
                hidden[edge_src], weight, labels, softcap=logits.softcap, reduction="none", filter_eps=None
            )
    logprob = logprob.float()
    return logprob, torch.zeros_like(logprob, requires_grad=False)


def _why_not(
    peer: str,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    logits: Logits,
    entropy: bool,
) -> str | None:
    if entropy:
        return "gives no entropy: pass entropy=False"
    if peer == "liger":
        if logits.softcap is not None:
            return "has no softcap"
        if not hidden.dtype == weight.dtype == torch.float32:
            return (
                f"rounds logits to hidden's type, so takes fp32 only, got {hidden.dtype} and {weight.dtype}"
            )
        return None
    if bias is not None or logits.temperature != 1.0:
        return "has no bias and no temperature but 1"
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 or fp16, one for both, got {hidden.dtype} and {weight.dtype}"
    if hidden.device.type != "cuda":
        return f"needs an accelerator, hidden is on {hidden.device}"
    return None
