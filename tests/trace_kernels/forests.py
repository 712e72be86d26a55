"""Random forests described by their rollouts: the oracle that the layouts under test never touch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass
class Forest:
    """Segments in DFS pre-order; every token has an identity, its number in that order."""

    parents: list[int]
    lengths: list[int]

    def __post_init__(self) -> None:
        counter = iter(range(sum(self.lengths)))
        self.segments = [[next(counter) for _ in range(n)] for n in self.lengths]
        self.num_tokens = sum(self.lengths)

    def path(self, node: int) -> list[int]:
        """Token identities from the root down to and including a segment."""
        above = self.path(self.parents[node]) if self.parents[node] >= 0 else []
        return above + self.segments[node]

    def rollouts(self) -> list[list[int]]:
        """One token list per segment that no other segment continues."""
        return [self.path(i) for i in range(len(self.parents)) if i not in self.parents]

    def mask(self) -> torch.Tensor:
        """bool [T, T] from the rollouts alone: q sees what stands at or before it in a rollout."""
        seen = torch.zeros(self.num_tokens, self.num_tokens, dtype=torch.bool)
        for rollout in self.rollouts():
            for place, token in enumerate(rollout):
                seen[token, rollout[: place + 1]] = True
        return seen


def random_forest(rng: random.Random, segments: int, longest: int, *, shortest: int = 0) -> Forest:
    parents: list[int] = []
    path: list[int] = []
    for node in range(segments):
        path = path[: rng.randint(0, len(path))] if rng.random() < 0.5 else path
        parents.append(path[-1] if path else -1)
        path = [*path, node]
    lengths = [rng.randint(shortest, longest) for _ in parents]
    if not sum(lengths):
        lengths[rng.randrange(segments)] = 1
    return Forest(parents, lengths)


# Shapes that kernels get wrong: see design/tree_attention.md, "Tolerances".
ADVERSARIAL = {
    "one token": Forest([-1], [1]),
    "one-token segments": Forest([-1, 0, 1, 1, 0, 4], [1] * 6),
    "branches at 57..63": Forest([-1, 0, 0, 2, 2, 4, 4, 6, 6], [57, 70, 3, 5, 3, 66, 64, 1, 2]),
    "a rollout that is a prefix of another": Forest([-1, 0, 0, 2], [20, 0, 9, 4]),
    "empty suffixes": Forest([-1, 0, 0, 0, -1, 4], [33, 0, 0, 5, 7, 0]),
    "empty root": Forest([-1, 0, 0], [0, 5, 6]),
    "empty inner segment": Forest([-1, 0, 1, 1, 0], [5, 0, 3, 2, 4]),
    "duplicates": Forest([-1, 0, 0], [30, 12, 12]),
    "chain of only children": Forest([-1, 0, 1, 2, -1, 4], [3, 4, 5, 6, 2, 2]),
    "long and odd": Forest([-1, 0, 0, 0], [129, 67, 1, 131]),
    "many small trees": Forest([p for t in range(0, 45, 3) for p in (-1, t, t)], [2, 1, 3] * 15),
}
