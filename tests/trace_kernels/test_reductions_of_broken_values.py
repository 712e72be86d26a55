"""An infinity or a NaN reaches the nodes above it as in plain sums, and no other: not even of its own tree."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from trace_kernels.forest import childless
from trace_kernels.tree_reductions import (
    LeafRanges,
    range_moments,
    segments,
    sibling_moments,
    subtree_extrema,
    subtree_means,
    subtree_moments,
    subtree_sums,
)

from .forests import random_forest

BROKEN = [[np.nan], [np.inf], [-np.inf], [np.inf, np.inf], [np.inf, -np.inf], [np.inf, np.nan]]


def check_below(broken: list[float], nodes: int, device: torch.device) -> None:
    """Against each node's own leaves; the sound ones of every magnitude."""
    rng = random.Random(nodes)
    parents = np.array(random_forest(rng, nodes, 1).parents)
    forest = LeafRanges.of(parents, childless(parents))
    values = torch.tensor([rng.gauss(0, 10.0 ** rng.randint(-3, 300)) for _ in forest.leaf_nodes]).double()
    for value in broken:
        values[rng.randrange(len(values))] = value
    here, x = forest.to(device), values.to(device)
    total, mean, (again, std) = subtree_sums(x, here), subtree_means(x, here), subtree_moments(x, here)
    least, largest = subtree_extrema(x, here)
    assert torch.equal(again.nan_to_num(0.5), mean.nan_to_num(0.5))
    for node, (low, high) in enumerate(zip(forest.low.tolist(), forest.high.tolist(), strict=True)):
        mine = values[low:high].numpy()
        if np.isfinite(mine).all():
            assert np.isfinite([float(x[node]) for x in (total, mean, std, least, largest)]).all()
            assert float(mean[node]) == pytest.approx(mine.mean(), rel=1e-12, abs=1e-14 * abs(mine).max())
            continue
        with np.errstate(invalid="ignore"):
            want = [mine.sum(), mine.mean(), np.nan, mine.min(), mine.max()]
        got = [float(x[node]) for x in (total, mean, std, least, largest)]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("nodes", [1, 3, 40])
def test_below_a_node(broken: list[float], nodes: int) -> None:
    check_below(broken, nodes, torch.device("cpu"))


def test_among_siblings() -> None:
    forest = LeafRanges.of([-1, 0, 0, 0, 3, 3], [1, 2, 4, 5])
    mean, std = sibling_moments(torch.tensor([2.0, 1.0, float("inf"), 1.0, 3.0, 5.0]), forest)
    assert mean.tolist() == [2.0, *[float("inf")] * 3, 4.0, 4.0]
    np.testing.assert_array_equal(std, [0.0, np.nan, np.nan, np.nan, 1.0, 1.0])


def test_an_empty_range_is_no_broken_one() -> None:
    mean, std = range_moments(torch.tensor([float("nan")]), segments(torch.tensor([0, 1])))
    np.testing.assert_array_equal(torch.stack([mean, std]), [[0.0, np.nan], [0.0, np.nan]])
