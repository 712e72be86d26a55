"""Exact tree attention for any device: one attention block per unbranching chain, merged through the LSE.

For a chain `(s, e, end)` the rows that see any of it are exactly `[s, end)`: causally within the chain,
all of it from e on. Taking the chains in DFS order gives every row its ancestors in order, so running
outputs and log-sum-exps are updated in place: no T x T mask, and no copy of a shared prefix's K/V per branch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..attention_op import Geometry
from ..memo import once_per_layout
from ..scoring import Scoring
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


def plan(chains: list[list[int]], group_tokens: int | None = None) -> list[Step]:
    """The steps that cover every attended pair of a layout's chains exactly once, in DFS order."""
    limit = GROUP_TOKENS if group_tokens is None else group_tokens
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


def _group_mask(geometry: Geometry, step: Step, dtype: torch.dtype) -> torch.Tensor:
    """Additive [n, n] mask of a grouped step."""
    end = geometry.subtree_end[step.start : step.key_end]
    index = torch.arange(step.start, step.key_end, device=end.device)
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])
    return torch.zeros(seen.shape, dtype=dtype, device=end.device).masked_fill_(~seen, float("-inf"))


def _steps(geometry: Geometry, dtype: torch.dtype) -> list[tuple[slice, slice, bool, torch.Tensor | None]]:
    def build() -> list[tuple[slice, slice, bool, torch.Tensor | None]]:
        return [
            (
                slice(s.start, s.row_end),
                slice(s.start, s.key_end),
                s.first,
                _group_mask(geometry, s, dtype) if s.grouped else None,
            )
            for s in plan(geometry.chains.tolist())
        ]

    return once_per_layout(geometry.chains, ("segments", geometry.subtree_end.device, dtype), build)


def _grouped(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[T, H, D] seen as [G, Hk, T, D]; head h reads key head h // G."""
    return x.unflatten(1, (key_heads, -1)).permute(2, 1, 0, 3)


def _wide(x: torch.Tensor) -> torch.Tensor:
    # Half types are computed in fp32: the CPU kernels accumulate dK and dV in the input type otherwise, which
    # alone costs 0.5 % of RMS error in bf16, and are no faster for it.
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    geometry: Geometry,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention_op.Program`; out is unrounded, in at least fp32."""
    if sinks is not None or scoring.window is not None or scoring.softcap is not None:
        raise NotImplementedError("segments: window, softcap and sinks")
    heads, padding = k.shape[1], geometry.num_padding
    query, key, value = _grouped(_wide(q), heads), _wide(k).transpose(0, 1), _wide(v).transpose(0, 1)
    out = torch.empty(q.shape, dtype=query.dtype, device=q.device)
    rows_out = _grouped(out, heads)
    lse = torch.zeros(query.shape[:-1], dtype=query.dtype, device=q.device)
    block = block_ops(q.device).forward
    for rows, keys, first, mask in _steps(geometry, query.dtype):
        part, part_lse = block(query[:, :, rows], key[:, keys], value[:, keys], mask, scoring.scale)
        so_far, so_far_lse = rows_out[:, :, rows], lse[:, :, rows]
        if first:
            so_far.copy_(part)
            so_far_lse.copy_(part_lse)
        else:
            # softmax over both parts = the two outputs mixed by their shares of the summed exponentials
            so_far.lerp_(part, torch.sigmoid(part_lse - so_far_lse).unsqueeze(-1))
            torch.logaddexp(so_far_lse, part_lse, out=so_far_lse)
    if padding:
        # A padding token attends to itself alone: its output is its value.
        rows_out[:, :, -padding:] = value[:, -padding:]
        lse[:, :, -padding:] = (query[:, :, -padding:] * key[:, -padding:]).sum(-1) * scoring.scale
    return out, lse.transpose(0, 1).flatten(0, 1)


def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    geometry: Geometry,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `attention_op.Program`."""
    if grad_lse is not None:
        raise NotImplementedError("segments: gradient of the lse")
    heads, padding = k.shape[1], geometry.num_padding
    query, key, value = _grouped(_wide(q), heads), _wide(k).transpose(0, 1), _wide(v).transpose(0, 1)
    rows_out, rows_grad = _grouped(out, heads), _grouped(_wide(grad_out), heads)
    rows_lse = lse.unflatten(0, (heads, -1)).transpose(0, 1).contiguous()
    dq = torch.empty(q.shape, dtype=query.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=query.dtype, device=q.device)
    dv = torch.empty(v.shape, dtype=query.dtype, device=q.device)
    rows_dq, keys_dk, keys_dv = _grouped(dq, heads), dk.transpose(0, 1), dv.transpose(0, 1)
    block = block_ops(q.device).backward
    for rows, keys, first, mask in _steps(geometry, query.dtype):
        part_dq, part_dk, part_dv = block(
            rows_grad[:, :, rows],
            query[:, :, rows],
            key[:, keys],
            value[:, keys],
            rows_out[:, :, rows],
            rows_lse[:, :, rows],
            mask,
            scoring.scale,
        )
        if first:
            rows_dq[:, :, rows] = part_dq
        else:
            rows_dq[:, :, rows] += part_dq
        # Every key belongs to one step, which holds all the rows that see it.
        keys_dk[:, keys] = part_dk
        keys_dv[:, keys] = part_dv
    if padding:
        dq[-padding:] = 0
        dk[-padding:] = 0
        keys_dv[:, -padding:] = rows_grad[:, :, -padding:].sum(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
