"""`TreeLayout`: where every token of a packed forest sits, and what it may attend to.

Packed in DFS pre-order, the descendants of a token are a contiguous range that starts at the token, so one
integer per token is the whole attention mask: `q sees k  <=>  k <= q < subtree_end[k]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .forest import as_int_vector, check_lengths, check_parents, node_ends

IntSequence = Sequence[int] | NDArray[np.integer]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """A forest of T tokens packed in DFS pre-order, padding at the end.

    Attributes:
        subtree_end: int32 [T], one past the last descendant of each token.
        depth: int64 [T], distance from the tree's first token; these are the position ids.
        predecessor: int64 [T], packed position of the previous token on the path, -1 at a tree's first token.
            The log-prob of token k is predicted by `hidden[predecessor[k]]`: `(predecessor[k], token k)`
            is the loss edge, exact at branch points too.
        chains: int64 [C, 3], always on the CPU: `(start, end, subtree_end)` of every maximal run of tokens
            without a branch, in DFS order, covering `[0, num_tokens - num_padding)`. Rows in
            `[end, subtree_end)` see all of the chain.
        num_padding: padding tokens at the end; each is its own tree of one token.
        longest_path: tokens on the longest root-to-leaf path.
    """

    subtree_end: torch.Tensor
    depth: torch.Tensor
    predecessor: torch.Tensor
    chains: torch.Tensor
    num_padding: int = 0
    longest_path: int = 0

    @staticmethod
    def from_segments(
        parents: IntSequence,
        lengths: IntSequence,
        *,
        pad_to_multiple: int | None = None,
        device: torch.device | str | None = None,
    ) -> TreeLayout:
        """Layout of the forest whose S segments are given in DFS pre-order.

        Args:
            parents: [S] ints, index of each segment's parent, -1 for a root.
            lengths: [S] ints >= 0, tokens in each segment. A zero-length segment adds nothing: its children
                hang on its parent (below an empty root they are trees of their own).
            pad_to_multiple: round T up to a multiple of this with padding tokens.
            device: where the tensors live (default: CPU).

        Raises:
            ValueError: a parent after its child, not DFS pre-order, a negative length, sizes that differ,
                no token at all, `pad_to_multiple` < 1. The message names the argument, the place and the
                reason.
        """
        parent = check_parents(parents)
        length = check_lengths(lengths, parent.size)
        real = int(length.sum())
        if real == 0:
            raise ValueError(
                f"lengths: the {parent.size} segments hold no token, a layout needs at least one"
            )
        stop = np.cumsum(length)
        start = stop - length
        depth_before, last_before = _walk(parent.tolist(), length.tolist(), stop.tolist())
        predecessor = np.arange(-1, real - 1, dtype=np.int64)
        filled = length > 0
        predecessor[start[filled]] = last_before[filled]
        return _padded(
            np.repeat(stop[node_ends(parent) - 1], length),
            np.arange(real, dtype=np.int64) + np.repeat(depth_before - start, length),
            predecessor,
            pad_to_multiple,
            device,
        )

    @staticmethod
    def from_cu_seqlens(
        cu_seqlens: IntSequence | torch.Tensor,
        *,
        pad_to_multiple: int | None = None,
        device: torch.device | str | None = None,
    ) -> TreeLayout:
        """Layout of B sequences laid end to end that share nothing: B trees of one chain each.

        Args:
            cu_seqlens: [B + 1] ints, 0 and then the end of each sequence, as in varlen FlashAttention. On
                another device than the CPU, reading it waits for that device.
            pad_to_multiple, device: as in `from_segments`.

        Raises:
            ValueError: no sequence, not starting at 0, an empty sequence or one of negative length,
                `pad_to_multiple` < 1.
        """
        ends = as_int_vector(on_host(cu_seqlens), "cu_seqlens")
        if ends.size < 2:
            raise ValueError(
                f"cu_seqlens: expected 0 and the end of at least one sequence, got {ends.size} entries"
            )
        if ends[0] != 0:
            raise ValueError(f"cu_seqlens[0] = {ends[0]}: expected 0, where the first sequence starts")
        length = np.diff(ends)
        if (length < 1).any():
            at = int(np.argmax(length < 1)) + 1
            raise ValueError(
                f"cu_seqlens[{at}] = {ends[at]} after {ends[at - 1]}: each end must be above the one before it"
            )
        return TreeLayout.from_segments(
            np.full(length.size, -1), length, pad_to_multiple=pad_to_multiple, device=device
        )

    @staticmethod
    def from_subtree_end(
        subtree_end: IntSequence | torch.Tensor,
        *,
        pad_to_multiple: int | None = None,
        device: torch.device | str | None = None,
    ) -> TreeLayout:
        """Layout of a packing made elsewhere, from the one array that is its whole mask.

        Args:
            subtree_end: [T] ints, one past the last descendant of each token (packed in DFS pre-order); query
                q sees key k iff `k <= q < subtree_end[k]`. On another device than the CPU, reading it waits
                for that device.
            pad_to_multiple, device: as in `from_segments`. Padding tokens already in `subtree_end` must be
                trees of one token (`subtree_end[k] = k + 1`) and are counted as tokens.

        Raises:
            ValueError: no token, `subtree_end[k]` outside (k, T], a token whose range ends after that of a
                token above it, `pad_to_multiple` < 1.
        """
        end = as_int_vector(on_host(subtree_end), "subtree_end")
        if end.size == 0:
            raise ValueError("subtree_end: no token, a layout needs at least one")
        index = np.arange(end.size, dtype=np.int64)
        outside = (end <= index) | (end > end.size)
        if outside.any():
            at = int(np.argmax(outside))
            raise ValueError(
                f"subtree_end[{at}] = {end[at]}: expected a value above the token's own position and "
                f"at most {end.size}, the number of tokens"
            )
        # Every range starts at its token, so the ranges over k are all begun before it less all ended by then.
        depth = index - np.cumsum(np.bincount(end, minlength=end.size + 1))[:-1]
        predecessor = _latest_one_higher(depth)
        above = np.where(predecessor >= 0, end[predecessor], end.size)
        crossing = end > above
        if crossing.any():
            at = int(np.argmax(crossing))
            raise ValueError(
                f"subtree_end[{at}] = {end[at]}: ends after the subtree of token {predecessor[at]}, which is "
                f"above it and ends at {above[at]}: not a DFS pre-order packing"
            )
        return _padded(end, depth, predecessor, pad_to_multiple, device)

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.subtree_end.shape[0]

    @property
    def pairs(self) -> int:
        """Attended (query, key) pairs, `sum(subtree_end[k] - k)`, counted on the host."""
        start, end, subtree_end = self.chains.unbind(1)
        length = end - start
        return int((length * (length + 1) // 2 + length * (subtree_end - end)).sum()) + self.num_padding

    @property
    def device(self) -> torch.device:
        return self.subtree_end.device

    def to(self, device: torch.device | str) -> TreeLayout:
        """The same layout with its tensors on `device`."""
        if torch.device(device) == self.device:
            return self
        return replace(
            self,
            subtree_end=self.subtree_end.to(device),
            depth=self.depth.to(device),
            predecessor=self.predecessor.to(device),
        )


def _walk(parents: list[int], lengths: list[int], stops: list[int]) -> tuple[Ints, Ints]:
    """Per segment: the depth its first token gets, and the packed position of the token before it (-1:
    none)."""
    depth_before: list[int] = []
    last_before: list[int] = []
    for parent in parents:
        if parent < 0:
            depth_before.append(0)
            last_before.append(-1)
        else:
            depth_before.append(depth_before[parent] + lengths[parent])
            # An empty parent has no last token of its own: the path continues from above it.
            last_before.append(stops[parent] - 1 if lengths[parent] else last_before[parent])
    return np.array(depth_before, dtype=np.int64), np.array(last_before, dtype=np.int64)


def on_host(values: Any) -> Any:
    """A tensor as an array (waits for its device), anything else as it is."""
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values


def _latest_one_higher(depth: Ints) -> Ints:
    """[T]: per token, the last one before it that is one level higher, -1 where depth is 0."""
    index = np.arange(depth.size, dtype=np.int64)
    found = index - 1
    # Only where a token does not go on from the one before it is there anything to look up.
    jumps = np.flatnonzero(depth != np.append(0, depth[:-1] + 1))
    order = np.argsort(depth, kind="stable")
    keys = depth[order] * depth.size + order
    found[jumps] = order[np.searchsorted(keys, (depth[jumps] - 1) * depth.size + jumps) - 1]
    found[depth == 0] = -1
    return found


def _padded(
    subtree_end: Ints,
    depth: Ints,
    predecessor: Ints,
    pad_to_multiple: int | None,
    device: torch.device | str | None,
) -> TreeLayout:
    """The layout of real tokens [t] with padding behind them."""
    if pad_to_multiple is not None and pad_to_multiple < 1:
        raise ValueError(f"pad_to_multiple: expected at least 1, got {pad_to_multiple}")
    real = subtree_end.size
    padding = -real % pad_to_multiple if pad_to_multiple else 0
    alone = np.arange(real + 1, real + padding + 1, dtype=np.int64)
    return TreeLayout(
        subtree_end=torch.from_numpy(np.append(subtree_end, alone).astype(np.int32)).to(device),
        depth=torch.from_numpy(np.append(depth, np.zeros_like(alone))).to(device),
        predecessor=torch.from_numpy(np.append(predecessor, np.full_like(alone, -1))).to(device),
        chains=_chains(subtree_end, predecessor),
        num_padding=padding,
        longest_path=int(depth.max()) + 1,
    )


def _chains(subtree_end: Ints, predecessor: Ints) -> torch.Tensor:
    # A token continues its chain when it follows the token before it and is that token's only child: then,
    # and only then, both subtrees end at the same place.
    follows = (predecessor[1:] == np.arange(len(predecessor) - 1)) & (subtree_end[1:] == subtree_end[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    ends = np.append(starts[1:], len(subtree_end))
    return torch.from_numpy(np.stack([starts, ends, subtree_end[starts]], axis=1))
