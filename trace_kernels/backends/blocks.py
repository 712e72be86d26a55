"""One attention block, forward and backward: what `segments` composes tree attention from.

A block is the query rows `q [G, Hk, n, D]` (G query heads share a key head) against the keys
`k, v [Hk, m, D]`, all in fp32 (or fp64). Its first key is its first row; it is masked causally (`row >= key`,
so rows from m on see every key) or, with m == n, by an additive mask [n, n].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

# No temporary of the matmul path holds more elements than this, unless a single row already does.
MAX_ELEMENTS = 1 << 24

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class BlockOps(NamedTuple):
    """`forward(q, k, v, mask, scale) -> (out, lse)` and
    `backward(grad_out, q, k, v, out, lse, mask, scale) -> (dq, dk, dv)`.

    The backward takes the out and lse of the whole softmax, of which the block is a part, and returns exactly
    the block's share. out and dq are [G, Hk, n, D], lse [G, Hk, n], dk and dv [Hk, m, D].
    """

    forward: Forward
    backward: Backward


def block_ops(device: torch.device) -> BlockOps:
    """The fastest implementation for a device."""
    has_flash = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return CPU_FLASH if device.type == "cpu" and has_flash else MATMUL


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernel wants equal head counts. With the group as the batch dimension, K and V are expanded by a
    # zero stride instead of being copied.
    shape = (q.shape[0], *k.shape)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.expand(shape), v.expand(shape), 0.0, mask is None, attn_mask=mask, scale=scale
    )


def _flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (q.shape[0], *k.shape)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out,
        q,
        k.expand(shape),
        v.expand(shape),
        out,
        lse,
        0.0,
        mask is None,
        attn_mask=mask,
        scale=scale,
    )
    if shape[0] == 1:
        return dq, dk[0], dv[0]
    return dq, dk.sum(0), dv.sum(0)


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, first: int, scale: float
) -> torch.Tensor:
    """[Hk, G, r, m] masked scores of the rows `first, first + 1, ...`; the group is folded into the rows."""
    group, heads, rows, _ = q.shape
    folded = q.transpose(0, 1).reshape(heads, group * rows, -1)
    scores = torch.bmm(folded, k.transpose(1, 2)).mul_(scale).view(heads, group, rows, -1)
    if mask is not None:
        return scores.add_(mask[first : first + rows])
    row = torch.arange(first, first + rows, device=q.device)
    return scores.masked_fill_(row[:, None] < torch.arange(k.shape[1], device=q.device), float("-inf"))


def _row_chunks(q: torch.Tensor, keys: int) -> list[tuple[int, int]]:
    group, heads, rows, _ = q.shape
    step = max(1, MAX_ELEMENTS // (group * heads * keys))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _matmul_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    with torch.autocast(q.device.type, enabled=False):
        for first, last in _row_chunks(q, k.shape[1]):
            scores = _scores(q[:, :, first:last], k, mask, first, scale)
            part = scores.logsumexp(-1)
            weights = scores.sub_(part[..., None]).exp_()
            lse[:, :, first:last] = part.transpose(0, 1)
            rows = torch.bmm(weights.flatten(1, 2), v).view(*part.shape, -1)
            out[:, :, first:last] = rows.transpose(0, 1)
    return out, lse


def _matmul_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq = torch.empty_like(q)
    dk, dv = k.new_zeros(k.shape), v.new_zeros(v.shape)
    with torch.autocast(q.device.type, enabled=False):
        for first, last in _row_chunks(q, k.shape[1]):
            rows = slice(first, last)
            scores = _scores(q[:, :, rows], k, mask, first, scale)
            weights = scores.sub_(lse[:, :, rows].transpose(0, 1)[..., None]).exp_().flatten(1, 2)
            grad = grad_out[:, :, rows].transpose(0, 1).flatten(1, 2)
            delta = (grad_out[:, :, rows] * out[:, :, rows]).sum(-1).transpose(0, 1).flatten(1, 2)
            dv.baddbmm_(weights.transpose(1, 2), grad)
            dscores = torch.bmm(grad, v.transpose(1, 2)).sub_(delta[..., None]).mul_(weights).mul_(scale)
            dk.baddbmm_(dscores.transpose(1, 2), q[:, :, rows].transpose(0, 1).flatten(1, 2))
            dq[:, :, rows] = (
                torch.bmm(dscores, k).view(k.shape[0], q.shape[0], last - first, -1).transpose(0, 1)
            )
    return dq, dk, dv


CPU_FLASH = BlockOps(_flash_forward, _flash_backward)
MATMUL = BlockOps(_matmul_forward, _matmul_backward)
