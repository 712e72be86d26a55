"""The success predictor's scores of anchors, and what a further rollout there is worth (algorithm.md, 2 to 4)."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import interpreter
from .reference import score_anchors as eager
from .reference.score_anchors import SuccessHead

__all__ = ["AnchorScores", "SuccessHead", "anchor_loss", "score_anchors"]


class AnchorScores(NamedTuple):
    """Of A anchors, float64.

    Attributes:
        value: [A], predicted success v.
        gains: [A, max_count], what the next rollout adds to the contrast; the running sum is the contrast itself.
            For roots `V_root(v, m)`, column m the step from m to m + 1 rollouts; for prefixes
            `V_pref(k)`, column k the step from k to k + 1 continuations, in the plug-in form `q^k (1 - q)`.
    """

    value: Tensor
    gains: Tensor


def score_anchors(
    hidden: Tensor,
    anchor_src: Tensor,
    head: SuccessHead,
    *,
    stage: Literal["root", "prefix"] = "root",
    rewards: Tensor | None = None,
    max_count: int = 0,
    kappa: float = math.inf,
) -> AnchorScores:
    """Predicted success at A anchors and the marginal gains of rollouts there, without gradients.

    Gather, RMSNorm (eps 1e-6), Linear to `width`, SiLU, Linear to 1 and sigmoid, in fp32; the gains in float64
    from v and 1 - v, each a sigmoid of its own, by products and quotients alone. One launch on a GPU; elsewhere a
    chunk of anchors at a time.

    Args:
        hidden: [T, d], any float type.
        anchor_src: int64 [A], the row of each anchor's last token, in [0, T) (unchecked on a GPU).
        head: the predictor's tensors, any float types, on hidden's device.
        stage: "root" for bare rollouts from the prompt, "prefix" for continuations after an observed outcome.
        rewards: [A], 0 or 1, the outcome of the rollout each prefix belongs to; with stage "prefix" only.
        max_count: columns of the gains; 0 for none.
        kappa: concentration of the beta-binomial forms, above 0; inf is the paper's plug-in form.

    Raises:
        ValueError: shapes, types, devices, stage, rewards, max_count or kappa are not as above.
    """
    _check(hidden, anchor_src, head)
    if stage not in ("root", "prefix"):
        raise ValueError(f"stage: expected 'root' or 'prefix', got {stage!r}")
    if (rewards is not None) != (stage == "prefix" and max_count > 0):
        raise ValueError(f"rewards: needed for the gains of prefixes, and for nothing else (stage={stage!r})")
    if rewards is not None:
        if rewards.shape != anchor_src.shape:
            raise ValueError(
                f"rewards: expected one per anchor, {list(anchor_src.shape)}, got {list(rewards.shape)}"
            )
        if rewards.is_complex():
            raise ValueError(f"rewards: expected numbers 0 and 1, got {rewards.dtype}")
        _check_device("rewards", rewards, hidden)
    if max_count < 0:
        raise ValueError(f"max_count: expected 0 or more, got {max_count}")
    if not kappa > 0 or not math.isfinite(1.0 / kappa):
        raise ValueError(f"kappa: expected a number above 0 (inf for the plug-in form), got {kappa}")
    if rewards is not None and not rewards.is_cuda and not bool(((rewards == 0) | (rewards == 1)).all()):
        raise ValueError("rewards: the contrast is defined for outcomes 0 and 1, threshold yours first")
    with torch.no_grad():
        if _on_device(hidden):
            from .backends.anchors import scores

            outcome = None if rewards is None else rewards.long()
            _, value, gains = scores(hidden, anchor_src, head, stage, outcome, max_count, 1.0 / kappa)
            return AnchorScores(value, gains)
        v, fail = eager.success(eager.logits(hidden, anchor_src, head))
        if rewards is None:
            return AnchorScores(v, eager.root_gains(v, fail, max_count, 1.0 / kappa))
        return AnchorScores(v, eager.prefix_gains(v, fail, rewards, max_count, 1.0 / kappa))


def anchor_loss(
    hidden: Tensor, anchor_src: Tensor, head: SuccessHead, target: Tensor, weight: Tensor
) -> Tensor:
    """The mean over anchors of `weight (v - target)^2`, with gradients to the head's tensors only.

    The forward pass is that of `score_anchors`; the backward pass recomputes it, both in fp32 under autocast too.

    Args:
        hidden, anchor_src, head: as in `score_anchors`.
        target: [A], floats, the share of successes observed below each anchor.
        weight: [A], floats.

    Returns:
        A number in the head's type, at least fp32.

    Raises:
        ValueError: as `score_anchors`, or no anchor.
    """
    _check(hidden, anchor_src, head)
    if not len(anchor_src) or not target.shape == weight.shape == anchor_src.shape:
        raise ValueError(
            f"target and weight: expected one per anchor, at least one; got {list(target.shape)}, "
            f"{list(weight.shape)} for {list(anchor_src.shape)} anchors"
        )
    for name, x in (("target", target), ("weight", weight)):
        if not x.is_floating_point():
            raise ValueError(f"{name}: expected floats, got {x.dtype}")
        _check_device(name, x, hidden)
    loss: Tensor = _AnchorLoss.apply(hidden, anchor_src, target, weight, *head)
    return loss


class _AnchorLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor_src: Tensor, target: Tensor, weight: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, anchor_src, target, weight, *tensors)
        head = SuccessHead(*tensors)
        if _on_device(hidden):
            from .backends.anchors import scores

            logit, _, _ = scores(hidden, anchor_src, head)
        else:
            logit = eager.logits(hidden, anchor_src, head)
        return (weight * (torch.sigmoid(logit) - target).square()).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        hidden, anchor_src, target, weight, *tensors = ctx.saved_tensors
        parts = eager.head_gradients(hidden, anchor_src, SuccessHead(*tensors), target, weight)
        return None, None, None, None, *(part * grads[0].to(part.dtype) for part in parts)


def _on_device(hidden: Tensor) -> bool:
    return hidden.is_cuda or interpreter.is_on()


def _check_device(name: str, x: Tensor, hidden: Tensor) -> None:
    if x.device != hidden.device:
        raise ValueError(f"{name}: expected hidden's device {hidden.device}, got {x.device}")


def _check(hidden: Tensor, anchor_src: Tensor, head: SuccessHead) -> None:
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(f"hidden: expected floats [T, d], got {hidden.dtype} {list(hidden.shape)}")
    if anchor_src.ndim != 1 or anchor_src.dtype != torch.int64:
        raise ValueError(f"anchor_src: expected int64 [A], got {anchor_src.dtype} {list(anchor_src.shape)}")
    _check_device("anchor_src", anchor_src, hidden)
    if (
        not hidden.is_cuda
        and len(anchor_src)
        and not 0 <= int(anchor_src.min()) <= int(anchor_src.max()) < len(hidden)
    ):
        raise ValueError(
            f"anchor_src: {int(anchor_src.min())}..{int(anchor_src.max())} outside the {len(hidden)} rows of hidden"
        )
    d, width = hidden.shape[1], head.b1.numel()
    for name, x, shape in zip(
        head._fields, head, ((d,), (width, d), (width,), (1, width), (1,)), strict=True
    ):
        if x.shape != shape:
            raise ValueError(f"head.{name}: expected {list(shape)}, got {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"head.{name}: expected floats, got {x.dtype}")
        _check_device(f"head.{name}", x, hidden)
