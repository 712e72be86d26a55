"""Forests to measure on: made up in the shapes that trainers meet, or read from recorded rollouts (`recorded`)."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trace_kernels.layout import TreeLayout

# Tiles of a typical kernel: what part of the touched ones is attended says how much masking costs.
BLOCK_QUERIES, BLOCK_KEYS = 128, 64
QUICK_DIVISOR = 64


@dataclass(frozen=True)
class Workload:
    """Segments in DFS pre-order; a rollout ends at every segment that no other continues.

    Attributes:
        parents: index of each segment's parent, -1 for a root.
        lengths: tokens of each segment, 0 where a rollout ends inside another.
        sampled: whether the model wrote the segment: its tokens are the loss edges.
    """

    name: str
    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    sampled: tuple[bool, ...]

    @cached_property
    def layout(self) -> TreeLayout:
        return TreeLayout.from_segments(self.parents, self.lengths)

    @cached_property
    def paths(self) -> list[NDArray[np.int64]]:
        """Packed positions from the root to each segment's last token, by segment."""
        stops = np.cumsum(self.lengths)
        found: list[NDArray[np.int64]] = []
        for parent, length, stop in zip(self.parents, self.lengths, stops.tolist(), strict=True):
            own = np.arange(stop - length, stop)
            found.append(np.concatenate([found[parent], own]) if parent >= 0 else own)
        return found

    @property
    def rollouts(self) -> list[NDArray[np.int64]]:
        """Packed positions of every rollout's tokens."""
        inner = set(self.parents)
        return [path for segment, path in enumerate(self.paths) if segment not in inner]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def flat_tokens(self) -> int:
        return sum(len(rollout) for rollout in self.rollouts)

    @property
    def pairs(self) -> int:
        """Attended (query, key) pairs of the packed forest."""
        return self.layout.pairs

    @property
    def flat_pairs(self) -> int:
        """The same when every rollout is a sequence of its own."""
        return sum(len(rollout) * (len(rollout) + 1) // 2 for rollout in self.rollouts)

    @property
    def one_level(self) -> bool:
        """Whether every tree is a prefix with suffixes."""
        roots = {i for i, parent in enumerate(self.parents) if parent < 0}
        return roots == {parent for parent in self.parents if parent >= 0}

    def figures(self) -> dict[str, float]:
        """Sizes and both sharing ratios (flat / packed), and the attended part of all touched tiles."""
        return {
            "tokens": self.tokens,
            "rollouts": len(self.rollouts),
            "token_ratio": self.flat_tokens / self.tokens,
            "pair_ratio": self.flat_pairs / self.pairs,
            "block_efficiency": block_efficiency(self.layout),
        }

    def shrunk(self, divisor: int) -> Workload:
        """Every segment's length divided, at least one token where there was one."""
        if divisor == 1:
            return self
        lengths = tuple(max(1, length // divisor) if length else 0 for length in self.lengths)
        return replace(self, name=f"{self.name} /{divisor}", lengths=lengths)


def block_efficiency(layout: TreeLayout, queries: int = BLOCK_QUERIES, keys: int = BLOCK_KEYS) -> float:
    """Attended pairs over all pairs of the tiles that hold one; tile (m, n) does iff `n0 < m1 and max_end > m0`."""
    end = layout.subtree_end.cpu().numpy().astype(np.int64)
    first = np.arange(0, len(end), keys)
    last = np.maximum.reduceat(end, first)
    # The query tiles of a key tile are contiguous: from its own to that of the last row that sees it.
    touched = -(-last // queries) - first // queries
    return layout.pairs / (int(touched.sum()) * queries * keys)


def star(name: str, prefix: int, suffixes: Sequence[int]) -> Workload:
    """One prefix, one suffix per rollout."""
    count = len(suffixes)
    return Workload(name, (-1, *[0] * count), (prefix, *suffixes), (False, *[True] * count))


def full_tree(name: str, children: int, levels: int, length: int) -> Workload:
    """A full tree of equal segments."""
    parents: list[int] = []

    def add(parent: int, level: int) -> None:
        segment = len(parents)
        parents.append(parent)
        for _ in range(children if level < levels else 0):
            add(segment, level + 1)

    add(-1, 1)
    count = len(parents)
    return Workload(name, tuple(parents), (length,) * count, tuple(parent >= 0 for parent in parents))


def turns(
    name: str, prefix: int, groups: int, count: int, observed: int, dropped: int, kept: int
) -> Workload:
    """Conversations below one system prompt; each turn's reasoning is dropped from the later turns' context.

    A turn is an observation, then two branches: the reasoning, which ends there, and the answer, which goes on.
    """
    parents, lengths, sampled = [-1], [prefix], [False]
    for _ in range(groups):
        last = 0
        for _ in range(count):
            seen = len(parents)
            parents += [last, seen, seen]
            lengths += [observed, dropped, kept]
            sampled += [False, True, True]
            last = seen + 2
    return Workload(name, tuple(parents), tuple(lengths), tuple(sampled))


def made_up() -> list[Workload]:
    """The workloads of the design note, most sharing first."""
    draw = random.Random(19)
    return [
        star("P16384 N28 R2048", 16_384, [2048] * 28),
        star("P8192 N32 R2048", 8192, [2048] * 32),
        star("P512 N16 R512", 512, [512] * 16),
        star("P512 N16 R64-512", 512, [draw.randint(64, 512) for _ in range(16)]),
        star("P128 N8 R2048", 128, [2048] * 8),
        full_tree("binary depth 6 L512", 2, 6, 512),
        full_tree("binary depth 8 L100", 2, 8, 100),
        full_tree("4-ary depth 4 L256", 4, 4, 256),
        turns("tau2-like", 4800, groups=4, count=12, observed=300, dropped=500, kept=200),
    ]


def asked(options: argparse.Namespace) -> list[Workload]:
    """Those that `--workloads`, `--data`, `--shrink` and `--quick` ask for; ValueError: a name that fits none."""
    known = made_up()
    if options.data is not None:
        from .recorded import recorded

        known += recorded(options.data)
    names = options.workloads or [""]
    for name in names:
        if not any(name in work.name for work in known):
            raise ValueError(f"--workloads {name!r}: expected part of one of {[w.name for w in known]}")
    divisor = options.shrink * (QUICK_DIVISOR if options.quick else 1)
    return [work.shrunk(divisor) for work in known if any(name in work.name for name in names)]
