"""Edge log-probs by other libraries: Liger's chunked selective log-probs, and cut cross-entropy.

Both are imported when asked for, and refused where their numbers or abilities differ from the op's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..edge_logprobs_op import Logits

PEERS = ("liger", "cce")
# Without them cut cross-entropy adds the gradients' parts up in the half type, some percent off at 152k tokens.
FP32_SUMS = ("accum_e_fp32", "accum_c_fp32")


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
    """(logprob [E] fp32, zeros [E]) of hidden [T, d], weight [V, d], bias [V] | None, edge_src and labels [E].

    ValueError where the peer cannot compute it, ImportError where it is missing.
    """
    _refuse(peer, _why_not(peer, hidden, weight, bias, logits, entropy))
    compute: Any
    if peer == "liger":
        from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

        compute = LigerFusedLinearPPOBase.chunk_forward
    else:
        from cut_cross_entropy import linear_cross_entropy

        compute = linear_cross_entropy
        _refuse(peer, _why_not_this_version(compute, hidden, weight, bias))
    if not len(labels):
        # Zero, with a gradient of zeros.
        empty = hidden[edge_src].float().sum(1) + weight[labels].float().sum(1)
        empty = empty if bias is None else empty + bias[labels].float()
        return empty, torch.zeros_like(empty, requires_grad=False)
    rows = hidden[edge_src]
    with torch.autocast(hidden.device.type, enabled=False):
        if peer == "liger":
            logprob = compute(rows[None], weight, labels[None], bias, logits.temperature)[0]
        else:
            options: dict[str, Any] = dict.fromkeys(FP32_SUMS, True) if _has(compute, *FP32_SUMS) else {}
            if bias is not None:
                options["bias"] = bias
            # filter_eps drops gradients below a threshold unless it is None.
            logprob = -compute(
                rows, weight, labels, softcap=logits.softcap, reduction="none", filter_eps=None, **options
            )
    logprob = logprob.float()
    # Label logit and log-sum-exp come from two sums: what rounding lifts above 0 is taken off, the slope is kept.
    logprob = logprob - logprob.detach().clamp(min=0)
    return logprob, torch.zeros_like(logprob, requires_grad=False)


def _refuse(peer: str, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"backend: {peer!r} {reason}; use 'auto'")


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
    if logits.temperature != 1.0:
        return f"has no temperature but 1, got {logits.temperature}"
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bf16 or fp16, one for both, got {hidden.dtype} and {weight.dtype}"
    if hidden.device.type != "cuda":
        return f"needs an accelerator, hidden is on {hidden.device}"
    return None


def _why_not_this_version(
    linear_cross_entropy: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> str | None:
    """Releases up to 25.1 have neither a bias nor sums in fp32; later sources have both."""
    if bias is not None and not _has(linear_cross_entropy, "bias"):
        return "has no bias in the installed version of cut-cross-entropy"
    needs_grad = any(x is not None and x.requires_grad for x in (hidden, weight, bias))
    if needs_grad and torch.is_grad_enabled() and not _has(linear_cross_entropy, *FP32_SUMS):
        return (
            f"adds gradients up in {hidden.dtype} in the installed version of cut-cross-entropy, which lacks "
            f"{' and '.join(FP32_SUMS)}: install a newer one, or call under torch.no_grad()"
        )
    return None


def _has(function: Callable[..., torch.Tensor], *arguments: str) -> bool:
    return inspect.signature(function).parameters.keys() >= set(arguments)
