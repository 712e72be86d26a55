"""Predictor scores of anchors and the loss of its training, in tensor operations, a chunk of anchors at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

# Anchors whose hidden states are widened at a time: they fit into a core's cache with the first layer.
CHUNK = 512
# Channels whose squares are summed in fp32.
SHORT = 256
EPS = 1e-6


class SuccessHead(NamedTuple):
    """RMSNorm, Linear to `width`, SiLU, Linear to 1: tensors of one float type, or several."""

    norm: Tensor  # [d]
    w1: Tensor  # [width, d]
    b1: Tensor  # [width]
    w2: Tensor  # [1, width]
    b2: Tensor  # [1]


def logits(hidden: Tensor, anchor_src: Tensor, head: SuccessHead) -> Tensor:
    """[A] float64 of hidden [T, d] at anchor_src [A]; the first layer in at least fp32, autocast or not."""
    with torch.autocast(hidden.device.type, enabled=False):
        wide, folded = _widened(head)
        parts = []
        for source in anchor_src.split(CHUNK):
            x = hidden.index_select(0, source).to(folded.dtype)
            parts.append(_second(silu(_first(x, _row_scale(x), wide, folded), inplace=True), wide))
        return torch.cat(parts)


def loss(hidden: Tensor, anchor_src: Tensor, head: SuccessHead, target: Tensor, weight: Tensor) -> Tensor:
    """The mean of `weight (v - target)^2`, in w1's type, at least fp32."""
    error = torch.sigmoid(logits(hidden, anchor_src, head)) - target
    return torch.dot(weight * error, error).div_(len(error)).to(_wide(head))


def loss_and_gradients(
    hidden: Tensor, anchor_src: Tensor, head: SuccessHead, target: Tensor, weight: Tensor
) -> tuple[Tensor, SuccessHead]:
    """`loss` and its gradients in the same type, in one pass; what it keeps has the size of a chunk or the head."""
    parts = zip(*(x.split(CHUNK) for x in (anchor_src, target, weight)), strict=True)
    with torch.autocast(hidden.device.type, enabled=False):
        wide, folded = _widened(head)
        product, b1, w2, b2 = (x.new_zeros(x.shape) for x in (folded, *wide[2:]))
        total = b2.new_zeros((), dtype=torch.float64)
        for source, wanted, importance in parts:
            x = hidden.index_select(0, source).to(folded.dtype)
            scale = _row_scale(x)
            z = _first(x, scale, wide, folded)
            h = silu(z)
            v, fail = success(torch.addmv(wide.b2, h, wide.w2[0]))
            error = v - wanted
            weighted = importance * error
            total += torch.dot(weighted, error)
            d_logit = weighted.mul_(v).mul_(fail).mul_(2.0 / len(anchor_src)).to(h.dtype)
            dz = torch.ops.aten.silu_backward(wide.w2.expand_as(z), z)  # of a gradient of 1 of each logit
            b2 += d_logit.sum()
            w2[0].addmv_(h.t(), d_logit)
            b1.addmv_(dz.t(), d_logit)
            # Of w1 and norm alike: each is this product times the other.
            product.addmm_(dz.mul_((d_logit * scale)[:, None]).t(), x)
        norm = (product * wide.w1).sum(0)
    grads = SuccessHead(norm, product.mul_(wide.norm), b1, w2, b2)
    return total.div_(len(anchor_src)).to(folded.dtype), grads


def success(logit: Tensor) -> tuple[Tensor, Tensor]:
    """(v [A], 1 - v [A]) in float64, each with all its digits."""
    x = logit.double()
    return torch.sigmoid(x), torch.sigmoid(-x)


def root_gains(v: Tensor, fail: Tensor, counts: int, rho: float) -> Tensor:
    """[A, counts]; column m is the gain from m to m + 1 rollouts: P(m alike) times P(the next one differs).

    `trace_rl.allocation.contrast.root_gain_table` is the same formula in NumPy, of v alone: allocation takes
    numbers from any predictor. Here both tails come from the logit, so that no certainty costs digits.
    """
    gains = v.new_zeros((counts, len(v)))
    won, lost = v, fail
    for j in range(1, counts):
        scale = 1.0 + j * rho
        gains[j] = (won * fail + lost * v) / scale
        won, lost = won * ((v + j * rho) / scale), lost * ((fail + j * rho) / scale)
    return gains.t()


def prefix_gains(v: Tensor, fail: Tensor, rewards: Tensor, counts: int, rho: float) -> Tensor:
    """[A, counts]; column k is P(k continuations repeat the observed outcome) times P(the next one flips it).

    `trace_rl.allocation.contrast.prefix_marginal_gain` is the same formula in NumPy; see `root_gains`.
    """
    q, flip = torch.where(rewards != 0, v, fail), torch.where(rewards != 0, fail, v)
    gains = v.new_empty((counts, len(v)))
    repeated = torch.ones_like(v)
    for k in range(counts):
        scale = 1.0 + (k + 1) * rho
        gains[k] = repeated * flip / scale
        repeated = repeated * ((q + (k + 1) * rho) / scale)
    return gains.t()


def _first(x: Tensor, scale: Tensor, wide: SuccessHead, folded: Tensor) -> Tensor:
    """[n, width], the input of SiLU for rows x [n, d] with RMSNorm's factors `scale` [n]."""
    # Normalising a row scales it, so its factor may come after the first layer.
    return torch.mm(x, folded.t()).mul_(scale[:, None]).add_(wide.b1)


def _second(h: Tensor, wide: SuccessHead) -> Tensor:
    """[n] float64, the logits of activations [n, width]: a gain takes a multiple of their errors."""
    return torch.mv(h.double(), wide.w2[0].double()) + wide.b2.double()


def _row_scale(x: Tensor) -> Tensor:
    """[n], RMSNorm's factor of each row of x [n, d]."""
    return _row_norm(x).square_().div_(x.shape[1]).add_(EPS).rsqrt_().to(x.dtype)


def _row_norm(x: Tensor) -> Tensor:
    """[n] float64."""
    norm = torch.linalg.vector_norm
    if x.device.type == "cpu":
        # Widening a copy takes ten times as long; short sums in fp32 lose no digit that matters.
        parts = torch.stack([norm(part, dim=1) for part in x.split(SHORT, dim=1)])
        whole: Tensor = norm(parts, dim=0, dtype=torch.float64)
        if math.isfinite(float(whole.sum())):
            return whole
    return norm(x, dim=1, dtype=torch.float64)


def _widened(head: SuccessHead) -> tuple[SuccessHead, Tensor]:
    """The head in one type, and its w1 [width, d] times norm."""
    wide = SuccessHead(*(x.to(_wide(head)) for x in head))
    return wide, wide.w1 * wide.norm


def _wide(head: SuccessHead) -> torch.dtype:
    return torch.promote_types(head.w1.dtype, torch.float32)
