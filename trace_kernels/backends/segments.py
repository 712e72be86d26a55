"""Exact tree attention for any device: one attention block per unbranching chain, merged through the LSE.

For a chain `(s, e, end)` the rows that see any of it are exactly `[s, end)`: causally within the chain,
all of it from e on. Taking the chains in DFS order gives every row its ancestors in order, so running
outputs and log-sum-exps are updated in place: no T x T mask, and no copy of a shared prefix's K/V per branch.
"""

from __future__ import annotations

import torch

from ..attention_op import Geometry
from ..scoring import Scoring
from .blocks import MATMUL, block_ops, cap, softcap_slope
from .steps import blocks_of, window_that_hides


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    geometry: Geometry,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `attention_op.Program`."""
    heads, padding = k.shape[1], geometry.num_padding
    scoring = scoring._replace(window=window_that_hides(geometry, scoring.window))
    query, key, value = _grouped(_wide(q), heads), _wide(k).transpose(0, 1), _wide(v).transpose(0, 1)
    out = torch.empty(q.shape, dtype=query.dtype, device=q.device)
    rows_out = _grouped(out, heads)
    lse = torch.zeros(query.shape[:-1], dtype=query.dtype, device=q.device)
    if scoring.window is not None:
        # The identity of merging: the first block that reaches a row is not known beforehand.
        out.zero_()
        lse.fill_(float("-inf"))
    ops = block_ops(q.device, scoring)
    blocks = blocks_of(geometry, scoring.window, query.dtype, cut=ops is MATMUL)
    for rows, keys, first, mask in blocks:
        part, part_lse = ops.forward(query[:, :, rows], key[:, keys], value[:, keys], mask, scoring)
        if first:
            rows_out[:, :, rows], lse[:, :, rows] = part, part_lse
            continue
        # softmax over both parts = the two outputs mixed by their shares of the summed exponentials
        so_far, so_far_lse = rows_out[:, :, rows], lse[:, :, rows]
        so_far.lerp_(part, torch.sigmoid(part_lse - so_far_lse).unsqueeze(-1))
        torch.logaddexp(so_far_lse, part_lse, out=so_far_lse)
        if isinstance(rows, torch.Tensor):  # gathered copies, not views
            rows_out[:, :, rows], lse[:, :, rows] = so_far, so_far_lse
    if padding:
        # A padding token attends to itself alone: its output is its value.
        rows_out[:, :, -padding:] = value[:, -padding:]
        scores = (query[:, :, -padding:] * key[:, -padding:]).sum(-1) * scoring.scale
        lse[:, :, -padding:] = cap(scores, scoring.softcap)
    if sinks is not None:
        sink = _per_row_head(sinks, heads, lse.dtype)
        rows_out.mul_(torch.sigmoid(lse - sink).unsqueeze(-1))
        lse = torch.logaddexp(lse, sink)
    rounded = out.to(q.dtype)
    rest = out.new_empty(0) if out.dtype == q.dtype else (out - rounded).to(q.dtype)
    return rounded, rest, lse.transpose(0, 1).flatten(0, 1)


def backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    rest: torch.Tensor,
    lse: torch.Tensor,
    geometry: Geometry,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See `attention_op.Program`."""
    out = _wide(out) + rest if rest.numel() else out
    heads, padding, dim = k.shape[1], geometry.num_padding, q.shape[-1]
    scoring = scoring._replace(window=window_that_hides(geometry, scoring.window))
    wide_q, wide_k, wide_v, wide_grad = (_wide(x) for x in (q, k, v, grad_out))
    if grad_lse is not None:
        # dS = P (dO V^T - rowsum(dO O) + dlse): one more channel carries dlse through the row sum, and adds
        # nothing to the other products as it is 0 in q, k and v.
        wide_q, wide_k, wide_v = (_with_channel(x, 0.0) for x in (wide_q, wide_k, wide_v))
        out = torch.cat([out, grad_lse.t().unsqueeze(-1).to(out.dtype)], dim=-1)
        wide_grad = _with_channel(wide_grad, -1.0)
    query, key, value = _grouped(wide_q, heads), wide_k.transpose(0, 1), wide_v.transpose(0, 1)
    rows_out, rows_grad = _grouped(out, heads), _grouped(wide_grad, heads)
    rows_lse = lse.unflatten(0, (heads, -1)).transpose(0, 1).contiguous()
    start = torch.empty if scoring.window is None else torch.zeros
    dq = start(wide_q.shape, dtype=query.dtype, device=q.device)
    dk, dv = torch.empty_like(wide_k), torch.empty_like(wide_v)
    rows_dq, keys_dk, keys_dv = _grouped(dq, heads), dk.transpose(0, 1), dv.transpose(0, 1)
    ops = block_ops(q.device, scoring)
    blocks = blocks_of(geometry, scoring.window, query.dtype, cut=ops is MATMUL)
    for rows, keys, first, mask in blocks:
        part_dq, part_dk, part_dv = ops.backward(
            rows_grad[:, :, rows],
            query[:, :, rows],
            key[:, keys],
            value[:, keys],
            rows_out[:, :, rows],
            rows_lse[:, :, rows],
            mask,
            scoring,
        )
        if first:
            rows_dq[:, :, rows] = part_dq
        else:
            rows_dq[:, :, rows] += part_dq
        # Every key belongs to one block, which holds all the rows that see it.
        keys_dk[:, keys] = part_dk
        keys_dv[:, keys] = part_dv
    if padding:
        own = slice(q.shape[0] - padding, None)
        rows_dq[:, :, own], keys_dk[:, own], keys_dv[:, own] = _padding_backward(
            rows_grad[:, :, own],
            query[:, :, own],
            key[:, own],
            value[:, own],
            rows_out[:, :, own],
            rows_lse[:, :, own],
            scoring,
        )
    dsinks = None
    if sinks is not None:
        # A sink is a key without a value: dS = P (0 - delta).
        share = (_per_row_head(sinks, heads, lse.dtype) - rows_lse).exp_()
        dsinks = -(share * (rows_grad * rows_out).sum(-1)).sum(-1).t().flatten().to(sinks.dtype)
    dq, dk, dv = (x[..., :dim].contiguous() for x in (dq, dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _padding_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of rows [G, Hk, n, D] that see only the key [Hk, n, D] of their own place."""
    scores = cap((query * key).sum(-1) * scoring.scale, scoring.softcap)
    weights = (scores - lse).exp()
    dscores = weights * ((grad * value).sum(-1) - (grad * out).sum(-1)) * scoring.scale
    if scoring.softcap is not None:
        dscores = dscores * softcap_slope(scores, scoring.softcap)
    dscores = dscores.unsqueeze(-1)
    return dscores * key, (dscores * query).sum(0), (weights.unsqueeze(-1) * grad).sum(0)


def _grouped(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[T, H, D] seen as [G, Hk, T, D]; head h reads key head h // G."""
    return x.unflatten(1, (key_heads, -1)).permute(2, 1, 0, 3)


def _per_row_head(sinks: torch.Tensor, key_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[H] as [G, Hk, 1], to go with lse [G, Hk, T]."""
    return sinks.to(dtype).unflatten(0, (key_heads, -1)).t().unsqueeze(-1)


def _with_channel(x: torch.Tensor, fill: float) -> torch.Tensor:
    return torch.cat([x, x.new_full((*x.shape[:-1], 1), fill)], dim=-1)


def _wide(x: torch.Tensor) -> torch.Tensor:
    # Half types are computed in fp32: the CPU kernels accumulate dK and dV in the input type otherwise, which
    # alone costs 0.5 % of RMS error in bf16, and are no faster for it.
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()
