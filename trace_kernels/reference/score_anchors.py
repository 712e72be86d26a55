"""Predictor scores of anchors in tensor operations, a chunk of anchors at a time: what runs off the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

# Anchors whose hidden states are widened at a time: they fit into a core's cache with the first layer.
CHUNK = 1024
EPS = 1e-6


class SuccessHead(NamedTuple):
    """RMSNorm, Linear to `width`, SiLU, Linear to 1: tensors of one float type, or several."""

    norm: Tensor  # [d]
    w1: Tensor  # [width, d]
    b1: Tensor  # [width]
    w2: Tensor  # [1, width]
    b2: Tensor  # [1]


def logits(hidden: Tensor, anchor_src: Tensor, head: SuccessHead) -> Tensor:
    """[A] in at least fp32, under autocast too, of hidden [T, d] at anchor_src [A]."""
    with torch.autocast(hidden.device.type, enabled=False):
        return _logits(hidden, anchor_src, head)


def _logits(hidden: Tensor, anchor_src: Tensor, head: SuccessHead) -> Tensor:
    wide = _wide(head)
    # Normalising a row scales it, so its factor may come after the first layer, and the weights before.
    w1 = (head.w1.to(wide) * head.norm.to(wide)).t()
    out = torch.empty(len(anchor_src), dtype=wide, device=hidden.device)
    for rows in _chunks(len(anchor_src)):
        x = hidden.index_select(0, anchor_src[rows]).to(wide)
        scale = torch.rsqrt(torch.linalg.vector_norm(x, dim=1).square() / x.shape[1] + EPS)
        h = silu(torch.mm(x, w1).mul_(scale[:, None]).add_(head.b1), inplace=True)
        out[rows] = torch.mv(h, head.w2.to(wide)[0]) + head.b2.to(wide)
    return out


def head_gradients(
    hidden: Tensor, anchor_src: Tensor, head: SuccessHead, target: Tensor, weight: Tensor
) -> SuccessHead:
    """Gradients of the mean of `weight (v - target)^2`, recomputed chunk by chunk; in the head's own types."""
    wide = _wide(head)
    total = SuccessHead(*(torch.zeros_like(x, dtype=wide) for x in head))
    for rows in _chunks(len(anchor_src)):
        with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
            leaves = SuccessHead(*(x.detach().to(wide, copy=True).requires_grad_() for x in head))
            x = hidden.detach().index_select(0, anchor_src[rows]).to(wide)
            x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS)
            h = silu(torch.nn.functional.linear(x * leaves.norm, leaves.w1, leaves.b1))
            v = torch.sigmoid(torch.nn.functional.linear(h, leaves.w2, leaves.b2)[:, 0])
            error = (weight[rows] * (v - target[rows]).square()).sum() / len(anchor_src)
            for into, part in zip(total, torch.autograd.grad(error, tuple(leaves)), strict=True):
                into += part
    return SuccessHead(*(g.to(x.dtype) for g, x in zip(total, head, strict=True)))


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


def _wide(head: SuccessHead) -> torch.dtype:
    return torch.promote_types(head.w1.dtype, torch.float32)


def _chunks(anchors: int) -> Iterator[slice]:
    return (slice(first, min(first + CHUNK, anchors)) for first in range(0, anchors, CHUNK))
