"""The programs against the NumPy of the same algorithm, on forests smaller and larger than a block."""

import random

import numpy as np
import pytest
import torch

from trace_kernels.backends import ranges, ranges_triton
from trace_kernels.forest import childless
from trace_kernels.tree_reductions import (
    LeafRanges,
    ancestor_sums,
    segments,
    sibling_moments,
    subtree_extrema,
    subtree_moments,
    subtree_sums,
)

from ..trace_kernels.forests import random_forest
from ..trace_kernels.test_reduction_gradients import plain
from ..trace_kernels.test_reductions_of_broken_values import BROKEN, check_below


def case(nodes: int, seed: int) -> tuple[LeafRanges, torch.Tensor]:
    rng = random.Random(seed)
    parents = np.array(random_forest(rng, nodes, 1).parents)
    forest = LeafRanges.of(parents, childless(parents))
    values = [rng.gauss(0.3, 10.0 ** rng.randint(-6, 6)) for _ in forest.leaf_nodes]
    return forest, torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("nodes", "seed"), [(1, 0), (2, 1), (7, 2), (60, 3), (700, 4), (1500, 5)])
def test_reductions(nodes: int, seed: int, device: torch.device) -> None:
    forest, values = case(nodes, seed)
    here = forest.to(device)
    x = values.to(device)
    got = ranges_triton.sums(x, here.distinct).cpu()
    assert torch.equal(got, ranges.sums(values, forest.distinct))
    for mine, want in zip(
        ranges_triton.extrema(x, here.distinct), ranges.extrema(values, forest.distinct), strict=True
    ):
        assert torch.equal(mine.cpu(), want)
    # The GPU may contract a product and a sum into one rounding.
    got_squares = ranges_triton.moments(x, here.distinct)[1].cpu()
    torch.testing.assert_close(
        got_squares,
        ranges.moments(values, forest.distinct)[1],
        rtol=1e-12,
        atol=1e-12 * float(values.abs().max()) ** 2,
    )
    slope, centre = values[forest.low].abs(), values[forest.high - 1]
    want = ranges.ancestor_sums(slope, centre, forest.parents)
    got = ranges_triton.ancestor_sums(slope.to(device), centre.to(device), here.parents)
    room = float(slope.sum() * centre.abs().max()) * 1e-12
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.cpu(), exact, rtol=1e-12, atol=room)


def test_the_public_functions_run_on_the_programs(device: torch.device) -> None:
    forest, values = case(300, 9)
    here, x = forest.to(device), values.to(device)
    results = [subtree_sums(x, here), *subtree_moments(x, here), *subtree_extrema(x, here)]
    results += sibling_moments(subtree_moments(x, here).mean, here)
    again = [subtree_sums(x, here), *subtree_moments(x, here), *subtree_extrema(x, here)]
    assert all(torch.equal(a, b) for a, b in zip(again, results, strict=False))
    for node in range(len(forest.parents)):
        mine = values[forest.low[node] : forest.high[node]]
        want = [mine.sum(), mine.mean(), mine.std(correction=0), mine.min(), mine.max()]
        for result, number in zip(results, want, strict=False):
            torch.testing.assert_close(
                result[node].cpu(), number, rtol=1e-9, atol=1e-12 * float(mine.abs().max())
            )


def test_empty_ranges(device: torch.device) -> None:
    where = segments(torch.tensor([0, 2, 0], device=device))
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, device=device)
    assert ranges_triton.sums(x, where).tolist() == [0.0, 3.0, 0.0]
    least, largest = ranges_triton.extrema(x, where)
    assert least.tolist() == [float("inf"), 1.0, float("inf")]
    assert largest.tolist() == [float("-inf"), 2.0, float("-inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ancestor_sums_of_any_stride_and_type(dtype: torch.dtype, device: torch.device) -> None:
    forest, values = case(60, 3)
    slope, centre = values[forest.low].abs().to(dtype), values[forest.high - 1].to(dtype)
    want = ranges.ancestor_sums(slope.double(), centre.double(), forest.parents)
    apart = [torch.stack((x, x - 3), 1).to(device)[:, 0] for x in (slope, centre, forest.parents)]
    assert all(x.stride() == (2,) for x in apart)
    room = float(slope.double().sum() * centre.abs().max()) * 1e-12
    for mine, exact in zip(ranges_triton.ancestor_sums(*apart), want, strict=True):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine.cpu(), exact, rtol=1e-12, atol=room)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("nodes", [1, 3, 40])
def test_an_infinity_or_a_nan_reaches_what_it_is_part_of(
    broken: list[float], nodes: int, device: torch.device
) -> None:
    check_below(broken, nodes, device)


def test_wrong_lengths_are_refused_before_anything_is_written(device: torch.device) -> None:
    forest = LeafRanges.of([-1, 0, 0, 0], [1, 2, 3]).to(device)
    one = torch.ones(1, device=device)
    with pytest.raises(ValueError, match=r"slope: expected a tensor \[4\], one per node"):
        ancestor_sums(one, one, forest.parents)
    with pytest.raises(ValueError, match=r"per_leaf: expected a tensor \[3\], one per leaf"):
        subtree_extrema(one, forest)


def test_a_parent_that_is_not_before_its_node_is_not_read(device: torch.device) -> None:
    parents = torch.tensor([-1, 0, 2**40, 1, 3, -7], device=device)
    ones = torch.ones(6, dtype=torch.float64, device=device)
    total, _ = ranges_triton.ancestor_sums(ones, ones, parents)
    np.testing.assert_array_equal(total.cpu(), [1, 2, np.nan, 3, 4, np.nan])


def test_gradients(device: torch.device) -> None:
    forest, _ = case(60, 3)
    generator = torch.Generator().manual_seed(0)
    x, *weights = (
        torch.randn(n, dtype=torch.float64, generator=generator) for n in (len(forest.leaf_nodes), 60, 60, 60)
    )
    here, x_here = forest.to(device), x.to(device).requires_grad_()
    x.requires_grad_()
    results = subtree_sums(x_here, here), *subtree_moments(x_here, here)
    total, want = (
        sum((y * w.to(y.device)).sum() for y, w in zip(ys, weights, strict=True))
        for ys in (results, plain(forest, x))
    )
    (got,), (exact,) = torch.autograd.grad(total, x_here), torch.autograd.grad(want, x)
    torch.testing.assert_close(got.cpu(), exact, rtol=1e-9, atol=1e-9)
