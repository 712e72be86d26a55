"""The functions of `ranges.py` by the Triton programs in `kernels/tree_reductions.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device.tiles import Tile
from ..device.tree_reductions import (
    tree_reductions_ancestors,
    tree_reductions_double,
    tree_reductions_ranges,
)
from ..launch import launch
from .ranges import Ranges

TILE = Tile(256, 1, 4, 1)


def sums(values: Tensor, ranges: Ranges) -> Tensor:
    """As `ranges.sums`."""
    total, lost, _ = _reduce(values, torch.zeros_like(values), ranges, "sums")
    return _rounded(total, lost)


def moments(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """As `ranges.moments`, but for the last bits of the squares."""
    total, lost, squares = _reduce(values, torch.zeros_like(values), ranges, "moments")
    return _rounded(total, lost), squares


def extrema(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """As `ranges.extrema`."""
    least, largest, _ = _reduce(values, values, ranges, "extrema")
    return least, largest


def ancestor_sums(slope: Tensor, centre: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """As `ranges.ancestor_sums`, but for the last bits."""
    slope, centre = slope.double().contiguous(), centre.double().contiguous()
    now = slope, torch.zeros_like(slope), parents.contiguous()
    blocks = -(-len(parents) // TILE.block_m)
    # A node has at most N - 1 ancestors; rounds without any left change nothing.
    rounds = (len(parents) - 1).bit_length() if len(parents) else 0
    for _ in range(rounds):
        new = torch.empty_like(now[0]), torch.empty_like(now[1]), torch.empty_like(now[2])
        launch(
            tree_reductions_ancestors,
            (blocks,),
            TILE,
            **dict(zip(("SLOPE", "OFFSET", "ABOVE"), now, strict=True)), CENTRE=centre,
            **dict(zip(("NEW_SLOPE", "NEW_OFFSET", "NEW_ABOVE"), new, strict=True)),
            N=len(parents), BLOCK=TILE.block_m,
        )  # fmt: skip
        now = new
    return now[0], now[1]


def _rounded(total: Tensor, lost: Tensor) -> Tensor:
    rounded = total + lost
    return torch.where(rounded.isnan(), total, rounded)  # what an infinite sum has lost is no number


def _reduce(first: Tensor, second: Tensor, ranges: Ranges, kind: str) -> Tensor:
    """float64 [3, G]; the third row only of "moments"."""
    groups, room = len(ranges.low), ranges.room
    slot = torch.arange(len(first), device=first.device) + ranges.shift[ranges.segment]
    out = torch.empty((3, groups), dtype=torch.float64, device=first.device)
    # Blocks of every size, one size after the other: fewer than twice the room.
    blocks = torch.zeros((3, 2 * room), dtype=torch.float64, device=first.device)
    blocks[0, slot], blocks[1, slot] = first, second
    start, number, half = 0, room, 1
    while number > 1:
        launch(
            tree_reductions_double,
            (-(-(number // 2) // TILE.block_m),),
            TILE,
            BLOCKS=blocks, total=2 * room, start=start, next_start=start + number, pairs=number // 2, half=half,
            KIND=kind, BLOCK=TILE.block_m,
        )  # fmt: skip
        start, number, half = start + number, number // 2, 2 * half
    launch(
        tree_reductions_ranges,
        (-(-groups // TILE.block_m),),
        TILE,
        BLOCKS=blocks, LOW=ranges.low, HIGH=ranges.high, OWNER=ranges.owner, SHIFT=ranges.shift, OUT=out,
        total=2 * room, room=room, G=groups, levels=room.bit_length(), KIND=kind, BLOCK=TILE.block_m,
    )  # fmt: skip
    return out
