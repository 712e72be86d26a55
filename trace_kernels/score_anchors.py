"""The success predictor's scores of anchors, and what a further rollout there is worth (algorithm.md, 2 to 4)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import score_anchors_op
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

    Gather, RMSNorm (eps 1e-6), Linear to `width`, SiLU, Linear to 1 and sigmoid: the first layer in w1's type, at
    least fp32, under autocast too, the rest in float64. The gains are products and quotients of v and 1 - v, each a
    sigmoid of its own. One launch on a GPU, after one wait for the checks; elsewhere a chunk of anchors at a time.
    Works under `torch.compile(fullgraph=True)`.

    Given the logit, value and gains are right to 1e-9 for every m and k. An error of the logit grows: the relative
    one of v is (1 - v) times it, that of column k up to k times it. An fp32 first layer leaves some 2e-7 in logits
    below 1 (d = 4,096): 1.2e-7 in v, and in 17 columns 1e-6 with kappa = 20, 2e-6 without. Larger logits and more
    columns need a float64 head, which a GPU then computes in tensor operations. Rows of hidden keep their digits up
    to 1e28; beyond, the first layer may overflow.

    Args:
        hidden: [T, d], any float type, d at least 1.
        anchor_src: int64 [A], the row of each anchor's last token, in [0, T).
        head: the predictor's tensors, any float types, on hidden's device.
        stage: "root" for bare rollouts from the prompt, "prefix" for continuations after an observed outcome.
        rewards: [A], 0 or 1 in any real type, the outcome of the rollout each prefix belongs to; for the gains of
            stage "prefix" only.
        max_count: columns of the gains; 0 for none.
        kappa: concentration of the beta-binomial forms, above 0; inf is the paper's plug-in form.

    Raises:
        TypeError: an argument is not a tensor, or head no `SuccessHead`.
        ValueError: shapes, types, devices, indices, stage, rewards, max_count or kappa are not as above, on every
            device.
    """
    _check(hidden, anchor_src, head)
    if stage not in ("root", "prefix"):
        raise ValueError(f"stage: expected 'root' or 'prefix', got {stage!r}")
    if (rewards is not None) != (stage == "prefix" and max_count > 0):
        raise ValueError(f"rewards: needed for the gains of prefixes, and for nothing else (stage={stage!r})")
    if rewards is not None:
        _check_tensor("rewards", rewards)
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
    with torch.no_grad():
        value, gains = score_anchors_op.scores(
            hidden, anchor_src, *head, stage, rewards, max_count, 1.0 / kappa
        )
    return AnchorScores(value, gains)


def anchor_loss(
    hidden: Tensor, anchor_src: Tensor, head: SuccessHead, target: Tensor, weight: Tensor
) -> Tensor:
    """The mean over anchors of `weight (v - target)^2`, with gradients to the head's tensors only.

    The values are those of `score_anchors`, in tensor operations on every device. The gradients come of the same
    pass, a chunk of anchors at a time, and stay in w1's type, at least fp32, until the backward multiplies them:
    fp16 heads train under a loss scaler. Differentiable once. On a GPU the products follow
    `torch.set_float32_matmul_precision`. Works under `torch.compile(fullgraph=True)`.

    Args:
        hidden, anchor_src, head: as in `score_anchors`.
        target: [A], floats, the share of successes observed below each anchor.
        weight: [A], floats.

    Returns:
        A number in w1's type, at least fp32.

    Raises:
        TypeError: as `score_anchors`.
        ValueError: as `score_anchors`, or no anchor.
    """
    _check(hidden, anchor_src, head)
    _check_tensor("target", target)
    _check_tensor("weight", weight)
    if not len(anchor_src) or not target.shape == weight.shape == anchor_src.shape:
        raise ValueError(
            f"target and weight: expected one per anchor, at least one; got {list(target.shape)}, "
            f"{list(weight.shape)} for {list(anchor_src.shape)} anchors"
        )
    for name, x in (("target", target), ("weight", weight)):
        if not x.is_floating_point():
            raise ValueError(f"{name}: expected floats, got {x.dtype}")
        _check_device(name, x, hidden)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in head)
    # Detached, so that a loss that only these could be trained with says that it has no gradient.
    values = (x.detach() for x in (hidden, anchor_src, target, weight))
    loss, *_ = score_anchors_op.loss(*values, *head, gradients)
    return loss


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")


def _check_device(name: str, x: Tensor, hidden: Tensor) -> None:
    if x.device != hidden.device:
        raise ValueError(f"{name}: expected hidden's device {hidden.device}, got {x.device}")


def _check(hidden: Tensor, anchor_src: Tensor, head: SuccessHead) -> None:
    _check_tensor("hidden", hidden)
    _check_tensor("anchor_src", anchor_src)
    if not isinstance(head, SuccessHead):
        raise TypeError(
            f"head: expected a SuccessHead, got {type(head).__name__}; SuccessHead(*yours) makes one"
        )
    if hidden.ndim != 2 or not hidden.shape[1] or not hidden.is_floating_point():
        raise ValueError(
            f"hidden: expected floats [T, d], d at least 1, got {hidden.dtype} {list(hidden.shape)}"
        )
    if anchor_src.ndim != 1 or anchor_src.dtype != torch.int64:
        raise ValueError(f"anchor_src: expected int64 [A], got {anchor_src.dtype} {list(anchor_src.shape)}")
    _check_device("anchor_src", anchor_src, hidden)
    for name, x in zip(head._fields, head, strict=True):
        _check_tensor(f"head.{name}", x)
    d, width = hidden.shape[1], head.b1.numel()
    for name, x, shape in zip(
        head._fields, head, ((d,), (width, d), (width,), (1, width), (1,)), strict=True
    ):
        if x.shape != shape:
            raise ValueError(f"head.{name}: expected {list(shape)}, got {list(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"head.{name}: expected floats, got {x.dtype}")
        _check_device(f"head.{name}", x, hidden)
