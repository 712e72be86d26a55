"""What the reductions refuse, by the argument's name; nothing is broadcast, cut short or read out of bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trace_kernels.tree_reductions import (
    LeafRanges,
    ancestor_sums,
    range_extrema,
    range_moments,
    range_sums,
    segments,
    sibling_moments,
    subtree_extrema,
    subtree_means,
    subtree_moments,
    subtree_sums,
    to_tokens,
)

FOREST = LeafRanges.of([-1, 0, 0, 0], [1, 2, 3])
PARENTS = FOREST.parents
ONES = torch.ones(4)
BELOW = [subtree_sums, subtree_means, subtree_moments, subtree_extrema]
OVER_RANGES = [range_sums, range_moments, range_extrema]


@pytest.mark.parametrize("reduction", BELOW)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones(1), r"per_leaf: expected a tensor \[3\], one per leaf, got torch.float32 \[1\]"),
        (torch.ones(4), r"per_leaf: expected a tensor \[3\], one per leaf, got torch.float32 \[4\]"),
        (torch.ones(3, 1), r"per_leaf: expected a tensor \[3\], one per leaf, got torch.float32 \[3, 1\]"),
        ([1.0, 2.0, 3.0], r"per_leaf: expected a tensor \[3\], one per leaf, got list"),
        (torch.ones(3).numpy(), r"per_leaf: expected a tensor \[3\], one per leaf, got ndarray"),
        (torch.ones(3) * 1j, "per_leaf: expected real numbers, got torch.complex64"),
        (torch.ones(3, device="meta"), "per_leaf: expected the device cpu like the forest, got meta"),
    ],
)
def test_what_is_not_one_real_number_per_leaf(reduction: Callable, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reduction(given, FOREST)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sibling_moments(torch.arange(10), FOREST), r"per_node: expected a tensor \[4\], .* \[10\]"),
        (lambda: sibling_moments([0.0] * 4, FOREST), "per_node: .* got list"),
        (lambda: sibling_moments(ONES * 1j, FOREST), "per_node: expected real"),
        (lambda: ancestor_sums(torch.ones(1), torch.ones(1), PARENTS), r"slope: expected a tensor \[4\]"),
        (lambda: ancestor_sums(ONES, torch.ones(10), PARENTS), r"centre: expected a tensor \[4\], one per"),
        (lambda: ancestor_sums(ONES, ONES * 1j, PARENTS), "centre: expected real"),
        (lambda: ancestor_sums(ONES, ONES, PARENTS.int()), r"parents: expected an int64 tensor .* torch.int32"),
        (lambda: ancestor_sums(ONES, ONES, [-1, 0, 0, 0]), r"parents: expected an int64 tensor \[N\], got list"),
        (lambda: ancestor_sums(ONES, ONES, PARENTS + 2), r"parents\[0\] = 1: a parent must come before its child"),
        (lambda: ancestor_sums(ONES, ONES, PARENTS - 1), r"parents\[0\] = -2: a parent must come before"),
        (lambda: to_tokens(ONES, torch.ones(4)), r"lengths: expected an int64 tensor \[N\], got torch.float32"),
        (lambda: to_tokens(ONES, torch.tensor([1, 2])), r"per_node: expected a tensor \[2\], one per node"),
        (lambda: to_tokens(ONES, torch.tensor([1, 2, -1, 0])), "lengths: expected 0 or more, got -1"),
        (lambda: segments(torch.tensor([1.0])), r"sizes: expected an int64 tensor \[G\], got torch.float32 \[1\]"),
        (lambda: segments(torch.tensor([1], dtype=torch.int32)), r"sizes: .* got torch.int32 \[1\]"),
        (lambda: segments(torch.tensor(3)), r"sizes: .* got torch.int64 \[\]"),
        (lambda: segments([3]), "sizes: .* got list"),
        (lambda: segments(torch.tensor([2, -1])), "sizes: expected 0 or more, got -1"),
    ],
)  # fmt: skip
def test_what_the_others_refuse(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("reduction", OVER_RANGES)
@pytest.mark.parametrize(
    ("low", "high", "owner"),
    [
        ([-1, 2], [2, 5], [0, 1]),
        ([0, 2], [2, 6], [0, 1]),
        ([0, 2], [3, 5], [0, 1]),
        ([0, 4], [2, 3], [0, 1]),
        ([0, 2], [2, 5], [0, 2]),
        ([0, 2], [2, 5], [1, 1]),
    ],
)
def test_ranges_stay_within_their_segment(
    reduction: Callable, low: list[int], high: list[int], owner: list[int]
) -> None:
    whole = segments(torch.tensor([2, 3]))
    wrong = whole._replace(low=torch.tensor(low), high=torch.tensor(high), owner=torch.tensor(owner))
    with pytest.raises(ValueError, match=r"ranges: \[.*\) of segment . is not within that segment of the 5"):
        reduction(torch.arange(5.0), wrong)


@pytest.mark.parametrize("reduction", OVER_RANGES)
def test_values_and_ranges_of_other_lengths(reduction: Callable) -> None:
    whole = segments(torch.tensor([2, 3]))
    with pytest.raises(ValueError, match=r"ranges: low, high and owner are \[\[1\], \[2\], \[2\]\]"):
        reduction(torch.arange(5.0), whole._replace(low=torch.tensor([0])))
    with pytest.raises(ValueError, match=r"values: expected a tensor \[5\], one per element of the ranges"):
        reduction(torch.ones(4), whole)
    reduction(torch.arange(5.0), whole._replace(low=torch.tensor([1, 5])))


def test_whole_numbers_and_flags_are_numbers() -> None:
    assert subtree_sums(torch.tensor([1, 2, 4]), FOREST).tolist() == [7.0, 1.0, 2.0, 4.0]
    assert subtree_means(torch.tensor([True, True, False]), FOREST)[0] == 2 / 3
    assert subtree_extrema(torch.tensor([1.5, 2.0, 4.0], dtype=torch.float16), FOREST)[1][0] == 4.0
