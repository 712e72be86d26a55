"""Exact tree attention for any device: one attention block per unbranching chain, merged through the LSE.

For a chain `(s, e, end)` the rows that see any of it are exactly `[s, end)`: causally within the chain,
all of it from e on. Taking the chains in DFS order gives every row its ancestors in order, so running
outputs and log-sum-exps are updated in place: no T x T mask, and no copy of a shared prefix's K/V per branch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..layout import TreeLayout
from .blocks import block_ops

# Subtrees together at most this long become one masked block: for 1 to 30-token branches the work is
# launch cost, not arithmetic.
GROUP_TOKENS = 64


class Step(NamedTuple):
    """Rows [start, row_end) against keys [start, key_end)."""

    start: int
    row_end: int
    key_end: int
    first: bool  # no earlier step touched these rows: write instead of merge
    grouped: bool  # several small subtrees at once: needs a mask, rows and keys are the same range


def plan(layout: TreeLayout, group_tokens: int | None = None) -> list[Step]:
    """The steps that cover every attended pair of the layout (padding aside) exactly once, in DFS order."""
    limit = GROUP_TOKENS if group_tokens is None else group_tokens
    chains = layout.chains
    at = {start: i for i, (start, _, _) in enumerate(chains)}
    steps: list[Step] = []
    tree_end = 0
    i = 0
    while i < len(chains):
        start, key_end, row_end = chains[i]
        first = start >= tree_end  # a new tree begins here
        tree_end = max(tree_end, row_end)
        # Whole sibling subtrees while they fit; grouped rows are all new trees or all inside one tree.
        stop = start
        j = i
        while j < len(chains) and chains[j][2] - start <= limit and (first or chains[j][2] <= tree_end):
            stop = chains[j][2]
            j = at.get(stop, len(chains))
        if j > i + 1:
            steps.append(Step(start, stop, stop, first, True))
            tree_end = max(tree_end, stop)
            i = j
        else:
            steps.append(Step(start, row_end, key_end, first, False))
            i += 1
    return steps


def _group_mask(layout: TreeLayout, step: Step, dtype: torch.dtype) -> torch.Tensor:
    """Additive [n, n] mask of a grouped step."""
    index = torch.arange(step.start, step.key_end, device=layout.device)
    end = layout.subtree_end[step.start : step.key_end]
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])
    return torch.zeros(seen.shape, dtype=dtype, device=layout.device).masked_fill_(~seen, float("-inf"))


def _steps(
    layout: TreeLayout, device: torch.device, dtype: torch.dtype
) -> list[tuple[slice, slice, bool, torch.Tensor | None]]:
    key = ("segments", device, dtype)
    if key not in layout._cache:
        local = layout.to(device)
        layout._cache[key] = [
            (
                slice(s.start, s.row_end),
                slice(s.start, s.key_end),
                s.first,
                _group_mask(local, s, dtype) if s.grouped else None,
            )
            for s in plan(layout)
        ]
    return layout._cache[key]


def _grouped(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[T, H, D] seen as [G, Hk, T, D]; head h reads key head h // G."""
    return x.unflatten(1, (key_heads, -1)).permute(2, 1, 0, 3)


def _wide(x: torch.Tensor) -> torch.Tensor:
    # Half types are computed in fp32: the CPU kernels accumulate dK and dV in the input type otherwise, which
    # alone costs 0.5 % of RMS error in bf16, and are no faster for it.
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


class SegmentsAttention(torch.autograd.Function):
    """`apply(q [T, H, D], k [T, Hk, D], v [T, Hk, D], layout, scale) -> [T, H, D]`."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TreeLayout, scale: float
    ) -> torch.Tensor:
        heads = k.shape[1]
        query, key, value = _grouped(_wide(q), heads), _wide(k).transpose(0, 1), _wide(v).transpose(0, 1)
        out = torch.empty(q.shape, dtype=query.dtype, device=q.device)
        rows_out = _grouped(out, heads)
        lse = torch.empty(query.shape[:-1], dtype=query.dtype, device=q.device)
        block = block_ops(q.device).forward
        for rows, keys, first, mask in _steps(layout, q.device, query.dtype):
            part, part_lse = block(query[:, :, rows], key[:, keys], value[:, keys], mask, scale)
            so_far, so_far_lse = rows_out[:, :, rows], lse[:, :, rows]
            if first:
                so_far.copy_(part)
                so_far_lse.copy_(part_lse)
            else:
                # softmax over both parts = the two outputs mixed by their shares of the summed exponentials
                so_far.lerp_(part, torch.sigmoid(part_lse - so_far_lse).unsqueeze(-1))
                torch.logaddexp(so_far_lse, part_lse, out=so_far_lse)
        if layout.num_padding:
            # A padding token attends to itself alone: its output is its value.
            rows_out[:, :, -layout.num_padding :] = value[:, -layout.num_padding :]
        # The unrounded output is kept: the backward subtracts rowsum(dO * O) from dO V^T, which cancels
        # where a row sees few keys, and a bf16 O there costs 1 % of RMS error in dQ and dK.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout: TreeLayout = ctx.layout
        heads = k.shape[1]
        query, key, value = _grouped(_wide(q), heads), _wide(k).transpose(0, 1), _wide(v).transpose(0, 1)
        rows_out, rows_grad = _grouped(out, heads), _grouped(_wide(grads[0]), heads)
        dq = torch.empty(q.shape, dtype=query.dtype, device=q.device)
        dk = torch.empty(k.shape, dtype=query.dtype, device=q.device)
        dv = torch.empty(v.shape, dtype=query.dtype, device=q.device)
        rows_dq, keys_dk, keys_dv = _grouped(dq, heads), dk.transpose(0, 1), dv.transpose(0, 1)
        block = block_ops(q.device).backward
        for rows, keys, first, mask in _steps(layout, q.device, query.dtype):
            part_dq, part_dk, part_dv = block(
                rows_grad[:, :, rows],
                query[:, :, rows],
                key[:, keys],
                value[:, keys],
                rows_out[:, :, rows],
                lse[:, :, rows],
                mask,
                ctx.scale,
            )
            if first:
                rows_dq[:, :, rows] = part_dq
            else:
                rows_dq[:, :, rows] += part_dq
            # Every key belongs to one step, which holds all the rows that see it.
            keys_dk[:, keys] = part_dk
            keys_dv[:, keys] = part_dv
        if layout.num_padding:
            dq[-layout.num_padding :] = 0
            dk[-layout.num_padding :] = 0
            keys_dv[:, -layout.num_padding :] = rows_grad[:, :, -layout.num_padding :].sum(0)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def segments_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TreeLayout, scale: float
) -> torch.Tensor:
    """Tree attention on q [T, H, D], k/v [T, Hk, D] -> [T, H, D] in q's type (fp32, bf16, fp16, fp64).

    Deterministic: the steps run in a fixed order and no key's gradient is written twice.
    """
    return SegmentsAttention.apply(q, k, v, layout, scale)
