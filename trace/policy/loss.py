"""The policy loss: a pure function of log-probs and per-token advantage sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """`loss` is this batch's share of the step's loss; `sums` are per-token sums for the metrics."""

    loss: Tensor  # scalar, differentiable
    sums: dict[str, float]


def tree_policy_loss(
    logprob: Tensor,  # [E]
    old_logprob: Tensor,  # [E]
    sampler_logprob: Tensor,  # [E]
    positive: Tensor,  # [E] sum over descendant leaves of w_i * max(A_i, 0)
    negative: Tensor,  # [E] sum over descendant leaves of w_i * min(A_i, 0)
    weight: Tensor,  # [E] sum over descendant leaves of w_i
    *,
    denominator: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    importance_cap: float = 2.0,
    kl: float = 0.0,
    reference_logprob: Tensor | None = None,  # [E]
) -> LossOutput:
    """PPO-clip loss over shared tokens, one term per descendant leaf (algorithm.md, section 5).

    `sum_i w_i min(rho A_i, clip(rho) A_i)` depends on the leaves only through the sums of their positive and of
    their negative advantages, since the clip acts on each sign alike: the expansion per leaf is exact and free.
    Each term is scaled by the truncated importance weight `min(exp(old - sampler), cap)` between trainer and
    sampler. `denominator` is the weight of all sampled tokens of the optimiser step, over all ranks.

    Raises ValueError when `kl` is asked for without `reference_logprob`.
    """
    ratio = (logprob - old_logprob).exp()
    gain = positive * ratio.clamp(max=1 + clip_high) + negative * ratio.clamp(min=1 - clip_low)
    importance = (old_logprob - sampler_logprob).exp().clamp(max=importance_cap)
    total = -(importance * gain).sum()
    kl_sum = logprob.new_zeros(())
    if kl:
        if reference_logprob is None:
            raise ValueError("kl > 0 needs reference_logprob")
        difference = reference_logprob - logprob
        k3 = difference.exp() - difference - 1
        kl_sum = (weight * k3).sum()
        total = total + kl * kl_sum
    with torch.no_grad():
        clipped = ((ratio > 1 + clip_high) & (positive > 0)) | ((ratio < 1 - clip_low) & (negative < 0))
        sums = {
            "tokens": float(weight.ne(0).sum()),
            "weight": float(weight.sum()),
            "kl": float(kl_sum),
            "clipped": float((clipped & weight.ne(0)).sum()),
        }
    return LossOutput(total / denominator, sums)
