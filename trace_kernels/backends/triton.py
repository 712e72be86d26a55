"""Tree attention by the Triton programs in `kernels/`: block lists, tiles and launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..attention_op import Geometry
from ..block_lists import KeyItems, QueryLists, key_items, query_lists
from ..device.tiles import Tile, Tiles, padded, tiles
from ..device.tree_attention_backward import (
    tree_attention_delta,
    tree_attention_dkdv,
    tree_attention_dq,
    tree_attention_sum_parts,
)
from ..device.tree_attention_forward import tree_attention_forward
from ..launch import LOG2_E, launch, target, unit_channels
from ..memo import once_per_layout
from ..scoring import Scoring

# dK/dV ranges are cut to about this many equal shares per multiprocessor.
SHARES = 4


class _Setting(NamedTuple):
    """What all programs of one call have in common."""

    heads: int
    key_heads: int
    tiles: Tiles
    constants: dict[str, Any]  # of all three large programs
    numbers: dict[str, Any]  # the scoring, as the programs take it


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    geometry: Geometry,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `attention_op.Program`; lse is fp32."""
    q, k, v = map(unit_channels, (q, k, v))
    setting = _setting(q, k, scoring)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rest = torch.empty(q.shape if q.dtype != torch.float32 else 0, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    tile = setting.tiles.forward
    lists = _query_lists(geometry, tile, scoring.window)
    launch(
        tree_attention_forward,
        (len(lists.order) * setting.heads,),
        tile,
        Q=q, K=k, V=v, OUT=out, REST=rest, LSE=lse, SINKS=lse if sinks is None else sinks.contiguous(),
        **_mask(geometry), **_lists(lists), T=q.shape[0],
        **_strides(qt=q, kt=k, vt=v, ot=out), **setting.numbers, **setting.constants,
        HEADS=setting.heads, HAS_SINKS=sinks is not None, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
    )  # fmt: skip
    return out, rest, lse


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
    q, k, v, grad_out = map(unit_channels, (q, k, v, grad_out))
    setting = _setting(q, k, scoring)
    delta = _delta(out, rest, grad_out, grad_lse, setting)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    shared = {
        "Q": q, "K": k, "V": v, "GRAD_OUT": grad_out, "LSE": lse, "DELTA": delta, "T": q.shape[0],
        **_mask(geometry), **_strides(qt=q, kt=k, vt=v, gt=grad_out),
        **setting.numbers, "grad_scale": scoring.scale, **setting.constants,
    }  # fmt: skip

    tile = setting.tiles.dq
    lists = _query_lists(geometry, tile, scoring.window)
    launch(
        tree_attention_dq,
        (len(lists.order) * setting.heads,),
        tile,
        **shared, DQ=dq, **_lists(lists), **_strides(dt=dq),
        HEADS=setting.heads, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
    )  # fmt: skip

    tile = setting.tiles.dkdv
    work = _key_items(geometry, tile, scoring.window, setting)
    channels = setting.constants["BLOCK_D"]
    partial = q.new_empty((work.slots, setting.key_heads, 2, tile.block_n, channels), dtype=torch.float32)
    launch(
        tree_attention_dkdv,
        (len(work.items) * setting.key_heads,),
        tile,
        **shared, DK=dk, DV=dv, PARTIAL=partial if work.slots else lse, ITEMS=work.items,
        **_strides(dkt=dk, dvt=dv),
        KEY_HEADS=setting.key_heads, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
    )  # fmt: skip
    if work.slots:
        rows = min(tile.block_n, 4096 // channels)
        launch(
            tree_attention_sum_parts,
            (len(work.splits), setting.key_heads, tile.block_n // rows),
            Tile(rows, tile.block_n, 4, 1),
            PARTIAL=partial, DK=dk, DV=dv, SPLITS=work.splits, T=q.shape[0], **_strides(dkt=dk, dvt=dv),
            KEY_HEADS=setting.key_heads, HEAD_DIM=q.shape[2], BLOCK_D=channels,
            BLOCK_N=tile.block_n, BLOCK_ROWS=rows,
        )  # fmt: skip
    dsinks = None
    if sinks is not None:
        dsinks = -(torch.exp(sinks.float()[:, None] - lse) * delta).sum(1).to(sinks.dtype)
    return dq, dk, dv, dsinks


def _delta(
    out: torch.Tensor,
    rest: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    setting: _Setting,
) -> torch.Tensor:
    """rowsum(dO * O) - dLSE, fp32 [H, T]."""
    tokens, heads, head_dim = out.shape
    delta = torch.empty((heads, tokens), dtype=torch.float32, device=out.device)
    given = delta if grad_lse is None else grad_lse
    channels = setting.constants["BLOCK_D"]
    rows = max(16, 4096 // channels)
    launch(
        tree_attention_delta,
        (-(-tokens // rows), heads),
        Tile(rows, rows, 4, 1),
        OUT=out, REST=rest, GRAD_OUT=grad_out, GRAD_LSE=given, DELTA=delta, T=tokens,
        **_strides(ot=out, gt=grad_out), stride_lh=given.stride(0), stride_lt=given.stride(1),
        HAS_GRAD_LSE=grad_lse is not None, HEAD_DIM=head_dim, BLOCK_D=channels, BLOCK_M=rows,
    )  # fmt: skip
    return delta


def _setting(q: torch.Tensor, k: torch.Tensor, scoring: Scoring) -> _Setting:
    heads, key_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    where = target(q.device)
    chosen = tiles(where.architecture, where.triton_version, 8 * q.element_size(), head_dim)
    softcap = scoring.softcap
    return _Setting(
        heads,
        key_heads,
        chosen,
        {
            "GROUP": heads // key_heads,
            "HAS_SOFTCAP": softcap is not None,
            "HAS_WINDOW": scoring.window is not None,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded(head_dim),
        },
        {
            "scale": scoring.scale * LOG2_E if softcap is None else scoring.scale / softcap,
            "softcap": 1.0 if softcap is None else softcap * LOG2_E,
            "window": scoring.window or 0,
        },
    )


def _strides(**tensors: torch.Tensor) -> dict[str, int]:
    """`qt=q` gives stride_qt and stride_qh, of tokens and heads."""
    found = {}
    for name, x in tensors.items():
        found[f"stride_{name}"], found[f"stride_{name[:-1]}h"] = x.stride(0), x.stride(1)
    return found


def _mask(geometry: Geometry) -> dict[str, torch.Tensor]:
    return {"SUBTREE_END": geometry.subtree_end, "DEPTH": geometry.depth}


def _lists(lists: QueryLists) -> dict[str, torch.Tensor]:
    return {
        "ORDER": lists.order,
        "STARTS": lists.starts,
        "FULL_ENDS": lists.full_ends,
        "KEY_BLOCKS": lists.key_blocks,
    }


def _query_lists(geometry: Geometry, tile: Tile, window: int | None) -> QueryLists:
    device = geometry.subtree_end.device

    def build() -> QueryLists:
        lists = query_lists(geometry.chains, geometry.num_tokens, tile.block_m, tile.block_n, window)
        return QueryLists(*(x.to(device) for x in lists))

    key = ("query lists", device, tile.block_m, tile.block_n, window)
    return once_per_layout(geometry.chains, key, build)


def _key_items(geometry: Geometry, tile: Tile, window: int | None, setting: _Setting) -> KeyItems:
    device = geometry.subtree_end.device
    # The heads are parallel already: only what they leave of the shares is cut out of the ranges.
    shares = -(-SHARES * target(device).multiprocessors // setting.key_heads)

    def build() -> KeyItems:
        work = key_items(
            geometry.chains, geometry.num_tokens, tile.block_m, tile.block_n, window, programs=shares
        )
        return work._replace(items=work.items.to(device), splits=work.splits.to(device))

    key = ("key items", device, tile.block_m, tile.block_n, window, shares)
    return once_per_layout(geometry.chains, key, build)
