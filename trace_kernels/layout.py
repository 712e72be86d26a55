"""`TreeLayout`: where every token of a packed forest sits, and what it may attend to.

Packed in DFS pre-order, the descendants of a token are a contiguous range that starts at the token, so one
integer per token is the whole attention mask: `q sees k  <=>  k <= q < subtree_end[k]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from .forest import check_lengths, check_parents, node_ends

IntSequence = Sequence[int] | NDArray[np.integer]


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
        if pad_to_multiple is not None and pad_to_multiple < 1:
            raise ValueError(f"pad_to_multiple: expected at least 1, got {pad_to_multiple}")
        real = int(length.sum())
        if real == 0:
            raise ValueError(
                f"lengths: the {parent.size} segments hold no token, a layout needs at least one"
            )
        padding = -real % pad_to_multiple if pad_to_multiple else 0

        stop = np.cumsum(length)
        end = stop[node_ends(parent) - 1]
        depth_before, last_before = _walk(parent.tolist(), length.tolist(), stop.tolist())
        start = stop - length
        index = np.arange(real + padding, dtype=np.int64)

        subtree_end = np.concatenate([np.repeat(end, length), index[real:] + 1]).astype(np.int32)
        depth = np.zeros(real + padding, dtype=np.int64)
        depth[:real] = index[:real] + np.repeat(depth_before - start, length)
        predecessor = index - 1
        predecessor[real:] = -1
        filled = length > 0
        predecessor[start[filled]] = last_before[filled]

        return TreeLayout(
            subtree_end=torch.from_numpy(subtree_end).to(device),
            depth=torch.from_numpy(depth).to(device),
            predecessor=torch.from_numpy(predecessor).to(device),
            chains=_chains(subtree_end[:real], predecessor[:real]),
            num_padding=padding,
            longest_path=int(depth.max()) + 1,
        )

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


def _walk(parents: list[int], lengths: list[int], stops: list[int]) -> tuple[np.ndarray, np.ndarray]:
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


def _chains(subtree_end: np.ndarray, predecessor: np.ndarray) -> torch.Tensor:
    # A token continues its chain when it follows the token before it and is that token's only child: then,
    # and only then, both subtrees end at the same place.
    follows = (predecessor[1:] == np.arange(len(predecessor) - 1)) & (subtree_end[1:] == subtree_end[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    ends = np.append(starts[1:], len(subtree_end))
    return torch.from_numpy(np.stack([starts, ends, subtree_end[starts]], axis=1))
