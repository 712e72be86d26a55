"""Forests with rewards, and the estimators of algorithm.md section 5 in plain recursive Python."""

from __future__ import annotations

import random
import statistics

import numpy as np

from .forests import random_forest

EPS = 1e-6


class Case:
    """A forest with rewards, and the definitions of algorithm.md section 5 in plain recursive Python."""

    def __init__(self, parents: list[int], rewards: list[float], bare: list[bool], baseline: str) -> None:
        self.parents, self.rewards, self.bare, self.baseline = parents, rewards, bare, baseline
        self.leaf_nodes = [i for i in range(len(parents)) if i not in parents]

    def children(self, node: int) -> list[int]:
        return [i for i, p in enumerate(self.parents) if p == node]

    def below(self, node: int) -> list[int]:
        """Leaf numbers below a node."""
        if node in self.leaf_nodes:
            return [self.leaf_nodes.index(node)]
        return [leaf for child in self.children(node) for leaf in self.below(child)]

    def path(self, node: int) -> list[int]:
        return [*self.path(self.parents[node]), node] if node >= 0 else []

    def z(self, leaf: int, group: list[int], over: list[int]) -> float:
        values = [self.rewards[i] for i in over]
        if len(group) < 2 or len(values) < 2 or len(set(values)) == 1:
            return 0.0
        return (self.rewards[leaf] - statistics.fmean(values)) / (statistics.pstdev(values) + EPS)

    def baseline_of(self, root: int) -> list[int]:
        return [i for i in self.below(root) if self.baseline == "all" or self.bare[i]]

    def leaf(self, leaf: int, estimator: str) -> float:
        path = self.path(self.leaf_nodes[leaf])
        whole = self.z(leaf, self.below(path[0]), self.baseline_of(path[0]))
        if estimator == "grpo":
            return whole
        if estimator == "tree_grpo":
            return whole + (self.z(leaf, self.below(path[1]), self.below(path[1])) if len(path) > 1 else 0.0)
        terms, seen = [], []
        for node in path:
            group = self.below(node)
            if group not in seen and len(group) >= 2:
                seen.append(group)
                terms.append(whole if node == path[0] else self.z(leaf, group, group))
        return sum(terms) / len(terms) if terms else 0.0

    def value(self, node: int) -> float:
        """Bottom-up, as in section 4."""
        if node in self.leaf_nodes:
            return self.rewards[self.leaf_nodes.index(node)]
        sizes = [(len(self.below(c)), self.value(c)) for c in self.children(node)]
        return sum(n * v for n, v in sizes) / sum(n for n, _ in sizes)

    def turn(self, node: int) -> float:
        parent = self.parents[node]
        root = self.path(node)[0]
        over = [self.rewards[i] for i in self.baseline_of(root)]
        if parent < 0 or len(over) < 2 or len(set(over)) == 1:
            return 0.0
        above = statistics.fmean(over) if parent == root else self.value(parent)
        return (self.value(node) - above) / (statistics.pstdev(over) + EPS)


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    parents = random_forest(rng, rng.randint(1, 12), 1).parents
    leaves = len(parents) - len(set(parents) - {-1})
    values = rng.choice([(0.0, 1.0), (0.1, 0.3, 0.7), (-2.0, 0.0, 0.5, 1e3), (0.1,), (1e30, -1e30, 0.0)])
    rewards = [rng.choice(values) for _ in range(leaves)]
    bare = [rng.random() < 0.5 for _ in range(leaves)]
    return Case(parents, rewards, bare, rng.choice(["all", "bare"]))


def joined(batch: list[Case]) -> tuple[dict[str, list], list[int]]:
    """The forests one after the other, as arguments, and where each one's nodes end."""
    ends = np.cumsum([len(case.parents) for case in batch]).tolist()
    starts = [0, *ends[:-1]]
    arrays = {
        "parents": [p + at if p >= 0 else -1 for c, at in zip(batch, starts, strict=True) for p in c.parents],
        "leaf_nodes": [n + at for c, at in zip(batch, starts, strict=True) for n in c.leaf_nodes],
        "rewards": [r for case in batch for r in case.rewards],
        "bare": [b for case in batch for b in case.bare],
    }
    return arrays, ends
