"""One attention block, forward and backward: what `segments` composes tree attention from.

A block is the query rows `q [G, Hk, n, D]` (G query heads share a key head) against the keys
`k, v [Hk, m, D]`, all in fp32 (or fp64). Every row sees one key at least; which, its mask says:

    None        the first key is the first row: causal, `row >= key`, so rows from m on see every key
    a tensor    added to the scores, [n, m]
    `Band`      the window, by depth
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..scoring import Scoring

# No temporary of the matmul path holds more elements than this, unless a single row already does.
MAX_ELEMENTS = 1 << 24
# On a CPU: what stays in its caches.
MAX_CPU_ELEMENTS = 1 << 20


class Band(NamedTuple):
    """Rows of one path or of branches below it: a row sees the keys 0 to window - 1 steps above it."""

    row_depth: torch.Tensor  # int64 [n]
    key_depth: torch.Tensor  # int64 [m]
    window: int

    def hidden(self, first: int, last: int) -> torch.Tensor:
        """bool [last - first, m]: what these rows do not see."""
        above = self.row_depth[first:last, None] - self.key_depth
        return (above < 0) | (above >= self.window)


Mask = torch.Tensor | Band | None
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class BlockOps(NamedTuple):
    """`forward(q, k, v, mask, scoring) -> (out, lse)` and
    `backward(grad_out, q, k, v, out, lse, mask, scoring) -> (dq, dk, dv)`.

    The backward takes the out and lse of the whole softmax, of which the block is a part, and returns exactly
    the block's share. out and dq are [G, Hk, n, D], lse [G, Hk, n], dk and dv [Hk, m, D].
    """

    forward: Forward
    backward: Backward


def block_ops(device: torch.device, scoring: Scoring) -> BlockOps:
    """The fastest implementation for a device and scoring."""
    has_flash = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    plain = scoring.window is None and scoring.softcap is None
    return CPU_FLASH if device.type == "cpu" and has_flash and plain else MATMUL


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    # The kernel wants equal head counts. With the group as the batch dimension, K and V are expanded by a
    # zero stride instead of being copied.
    shape = (q.shape[0], *k.shape)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.expand(shape), v.expand(shape), 0.0, mask is None, attn_mask=mask, scale=scoring.scale
    )


def _flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
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
        scale=scoring.scale,
    )
    if shape[0] == 1:
        return dq, dk[0], dv[0]
    return dq, dk.sum(0), dv.sum(0)


def _scores(q: torch.Tensor, k: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[Hk, G, r, m] scores without a mask; the group is folded into the rows."""
    group, heads, rows, _ = q.shape
    folded = q.transpose(0, 1).reshape(heads, group * rows, -1)
    scores = torch.bmm(folded, k.transpose(1, 2)).mul_(scoring.scale).view(heads, group, rows, -1)
    return cap(scores, scoring.softcap)


def _hide(scores: torch.Tensor, mask: Mask, first: int) -> torch.Tensor:
    """The scores [Hk, G, r, m] of the rows `first, first + 1, ...`, -inf where these see nothing; in place."""
    rows, keys = scores.shape[2:]
    if isinstance(mask, torch.Tensor):
        return scores.add_(mask[first : first + rows])
    if isinstance(mask, Band):
        return scores.masked_fill_(mask.hidden(first, first + rows), float("-inf"))
    row = torch.arange(first, first + rows, device=scores.device)
    hidden = row[:, None] < torch.arange(keys, device=scores.device)
    return scores.masked_fill_(hidden, float("-inf"))


def _row_chunks(q: torch.Tensor, keys: int) -> list[tuple[int, int]]:
    group, heads, rows, _ = q.shape
    most = min(MAX_ELEMENTS, MAX_CPU_ELEMENTS) if q.device.type == "cpu" else MAX_ELEMENTS
    step = max(1, most // (group * heads * keys))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _matmul_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    with torch.autocast(q.device.type, enabled=False):
        for first, last in _row_chunks(q, k.shape[1]):
            scores = _hide(_scores(q[:, :, first:last], k, scoring), mask, first)
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
    mask: Mask,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq = torch.empty_like(q)
    dk, dv = k.new_zeros(k.shape), v.new_zeros(v.shape)
    with torch.autocast(q.device.type, enabled=False):
        for first, last in _row_chunks(q, k.shape[1]):
            rows = slice(first, last)
            scores = _scores(q[:, :, rows], k, scoring)
            slope = None if scoring.softcap is None else softcap_slope(scores, scoring.softcap).flatten(1, 2)
            weights = _hide(scores, mask, first).sub_(lse[:, :, rows].transpose(0, 1)[..., None])
            weights = weights.exp_().flatten(1, 2)
            grad = grad_out[:, :, rows].transpose(0, 1).flatten(1, 2)
            delta = (grad_out[:, :, rows] * out[:, :, rows]).sum(-1).transpose(0, 1).flatten(1, 2)
            dv.baddbmm_(weights.transpose(1, 2), grad)
            dscores = torch.bmm(grad, v.transpose(1, 2)).sub_(delta[..., None]).mul_(weights)
            dscores.mul_(scoring.scale)
            if slope is not None:
                dscores.mul_(slope)
            dk.baddbmm_(dscores.transpose(1, 2), q[:, :, rows].transpose(0, 1).flatten(1, 2))
            dq[:, :, rows] = (
                torch.bmm(dscores, k).view(k.shape[0], q.shape[0], last - first, -1).transpose(0, 1)
            )
    return dq, dk, dv


def cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """`c tanh(s / c)`, in place."""
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def softcap_slope(capped: torch.Tensor, softcap: float) -> torch.Tensor:
    """Derivative of `c tanh(s / c)` by s, from its value: `1 - tanh^2`."""
    return 1 - (capped / softcap).square_()


CPU_FLASH = BlockOps(_flash_forward, _flash_backward)
MATMUL = BlockOps(_matmul_forward, _matmul_backward)
