"""The blocks `segments` works through for a layout, planned on the host once per layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..attention_op import Geometry
from ..host_tokens import host_tokens
from ..memo import once_per_layout
from .blocks import Band, Mask

# Subtrees together at most this long become one masked block: for 1 to 30-token branches the work is
# launch cost, not arithmetic.
GROUP_TOKENS = 64
# Where scores are computed explicitly, chains are cut in pieces of this length, under a window of half a window
# but not shorter than the least: what a causal mask or a window hides of a piece is computed too.
PIECE_TOKENS = 512
LEAST_PIECE_TOKENS = 64


class Step(NamedTuple):
    """Rows [start, row_end) against keys [start, key_end)."""

    start: int
    row_end: int
    key_end: int
    first: bool  # no earlier step touched these rows: write instead of merge
    grouped: bool  # several small subtrees at once: needs a mask, rows and keys are the same range


class Block(NamedTuple):
    """A step as it is computed: places along T, and what its rows see of its keys."""

    rows: slice | torch.Tensor
    keys: slice
    first: bool
    mask: Mask


def plan(chains: Sequence[Sequence[int]], group_tokens: int | None = None) -> list[Step]:
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
        # Whole sibling subtrees while they fit, of one tree only: 0 * NaN would carry a NaN into the next.
        stop = start
        j = i
        while j < len(chains) and chains[j][2] - start <= limit and chains[j][2] <= tree_end:
            stop = chains[j][2]
            j = at.get(stop, len(chains))
        if j > i + 1:
            steps.append(Step(start, stop, stop, first, True))
            i = j
        else:
            steps.append(Step(start, row_end, key_end, first, False))
            i += 1
    return steps


def blocks_of(geometry: Geometry, window: int | None, dtype: torch.dtype, *, cut: bool) -> list[Block]:
    """The blocks of a layout, of pieces of chains if `cut`, as it has to be under a window.

    Under a window no block is `first`. Each row of a block sees one of its keys or more.
    """
    if window is not None:
        return once_per_layout(
            geometry.chains,
            ("window blocks", geometry.depth.device, window, dtype),
            lambda: _window_blocks(geometry, window, dtype),
        )
    return once_per_layout(
        geometry.chains,
        ("blocks", geometry.depth.device, cut, dtype),
        lambda: _all_blocks(geometry, cut, dtype),
    )


def window_that_hides(geometry: Geometry, window: int | None) -> int | None:
    """The window, or None where no path is longer than it."""
    if window is None:
        return None
    longest = int(host_tokens(geometry.chains, geometry.num_tokens).depth.max()) + 1
    return window if window < longest else None


def _all_blocks(geometry: Geometry, cut: bool, dtype: torch.dtype) -> list[Block]:
    chains = geometry.chains.tolist()
    return [
        Block(
            slice(step.start, step.row_end),
            slice(step.start, step.key_end),
            step.first,
            _group_mask(geometry, step, None, dtype) if step.grouped else None,
        )
        for step in plan(_pieces(chains, PIECE_TOKENS) if cut else chains)
    ]


def _window_blocks(geometry: Geometry, window: int, dtype: torch.dtype) -> list[Block]:
    """Pieces of chains against the rows below that are near enough to see the last key of the piece.

    A row below a piece that sees any of its keys sees the last: no row of a block is empty.
    """
    depth = host_tokens(geometry.chains, geometry.num_tokens).depth
    blocks = []
    length = min(PIECE_TOKENS, max(LEAST_PIECE_TOKENS, window // 2))
    for step in plan(_pieces(geometry.chains.tolist(), length)):
        keys = slice(step.start, step.key_end)
        if step.grouped:
            mask: Mask = _group_mask(geometry, step, window, dtype)
            blocks.append(Block(slice(step.start, step.row_end), keys, False, mask))
        else:
            near = depth[step.start : step.row_end] < depth[step.key_end - 1] + window
            rows = _places(step.start + np.flatnonzero(near), geometry.depth.device)
            blocks.append(Block(rows, keys, False, Band(geometry.depth[rows], geometry.depth[keys], window)))
    return blocks


def _pieces(chains: list[list[int]], length: int) -> list[tuple[int, int, int]]:
    """The chains cut in pieces of at most `length` tokens, each with its subtree's end."""
    return [
        (first, min(first + length, end), subtree_end)
        for start, end, subtree_end in chains
        for first in range(start, end, length)
    ]


def _places(index: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    first, last = int(index[0]), int(index[-1])
    if last - first + 1 == len(index):
        return slice(first, last + 1)
    return torch.from_numpy(index).to(device)


def _group_mask(geometry: Geometry, step: Step, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive [n, n] mask of a grouped step."""
    places = slice(step.start, step.key_end)
    end, depth = geometry.subtree_end[places], geometry.depth[places]
    index = torch.arange(step.start, step.key_end, device=end.device)
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])
    if window is not None:
        seen &= depth[:, None] - depth[None, :] < window
    return torch.zeros(seen.shape, dtype=dtype, device=end.device).masked_fill_(~seen, float("-inf"))
