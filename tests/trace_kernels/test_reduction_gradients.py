"""Gradients of the reductions against finite differences and against autograd through plain tensor operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels.forest import childless
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

from .drawn_forests import forests


@st.composite
def cases(draw: st.DrawFn) -> tuple[LeafRanges, torch.Generator]:
    """With leaves at inner nodes and several at a node besides."""
    parents = torch.tensor(draw(forests(max_nodes=8)).parents).numpy()
    more = draw(st.lists(st.integers(0, len(parents) - 1), max_size=4))
    forest = LeafRanges.of(parents, sorted([*childless(parents).tolist(), *more]))
    return forest, torch.Generator().manual_seed(draw(st.integers(0, 2**32)))


def drawn(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=generator).requires_grad_()


def plain(forest: LeafRanges, x: torch.Tensor) -> list[torch.Tensor]:
    """Sums, means and stds of nodes, each from its own leaves."""
    mine = [x[low:high] for low, high in zip(forest.low.tolist(), forest.high.tolist(), strict=True)]
    return [
        torch.stack([v.sum() for v in mine]),
        torch.stack([v.mean() for v in mine]),
        torch.stack([v.std(correction=0) if len(v) > 1 else v.sum() * 0 for v in mine]),
    ]


@settings(max_examples=8, deadline=None)
@given(case=cases())
def test_finite_differences(case: tuple[LeafRanges, torch.Generator]) -> None:
    forest, generator = case
    per_leaf = drawn(len(forest.leaf_nodes), generator)
    slope, centre, per_node = (drawn(len(forest.parents), generator) for _ in range(3))
    lengths = forest.count % 3
    assert torch.autograd.gradcheck(lambda x: subtree_sums(x, forest), per_leaf)
    assert torch.autograd.gradcheck(lambda x: subtree_means(x, forest), per_leaf)
    assert torch.autograd.gradcheck(lambda x: subtree_moments(x, forest), per_leaf)
    assert torch.autograd.gradcheck(lambda x: sibling_moments(x, forest), per_node)
    assert torch.autograd.gradcheck(lambda s, c: ancestor_sums(s, c, forest.parents), (slope, centre))
    assert torch.autograd.gradcheck(lambda x: to_tokens(x, lengths), per_node)


@settings(max_examples=40, deadline=None)
@given(case=cases(), offset=st.sampled_from([0.0, 1e6]))
def test_the_same_as_through_plain_operations(
    case: tuple[LeafRanges, torch.Generator], offset: float
) -> None:
    forest, generator = case
    x = (drawn(len(forest.leaf_nodes), generator).detach() + offset).requires_grad_()
    weights = [torch.randn(len(forest.parents), dtype=torch.float64, generator=generator) for _ in range(3)]
    mean, std = subtree_moments(x, forest)
    for mine, other in zip((subtree_sums(x, forest), mean, std), plain(forest, x), strict=True):
        weight = weights.pop()
        got, want = (torch.autograd.grad((y * weight).sum(), x, retain_graph=True)[0] for y in (mine, other))
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)


def test_no_spread_gives_no_gradient() -> None:
    forest = LeafRanges.of([-1, 0, 0, -1], [1, 2, 3])
    x = torch.full((3,), 0.1, requires_grad=True)
    (grad,) = torch.autograd.grad(subtree_moments(x, forest).std.sum(), x)
    assert grad.tolist() == [0.0, 0.0, 0.0]
    assert grad.dtype == torch.float32


def test_a_gradient_stays_in_its_tree() -> None:
    forest = LeafRanges.of([-1, 0, 0, -1, 3, 3], [1, 2, 4, 5])
    x = torch.tensor([1.0, 2.0, 3.0, 5.0], requires_grad=True)
    weight = torch.tensor([float("nan"), 1, 1, 1, 1, 1])
    for result in (subtree_sums(x, forest), *subtree_moments(x, forest)):
        (grad,) = torch.autograd.grad((result * weight).sum(), x, retain_graph=True)
        assert grad.isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: subtree_extrema(x, LeafRanges.of([-1, 0, 0], [1, 2])),
        lambda x: range_sums(x, segments(torch.tensor([2]))),
        lambda x: range_moments(x, segments(torch.tensor([2]))),
        lambda x: range_extrema(x, segments(torch.tensor([2]))),
    ],
)
def test_what_has_no_gradient_says_so(call: Callable) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(ValueError, match=r"has no gradient, pass (per_leaf|values)\.detach\(\)"):
        call(x)
    call(x.detach())
    with torch.no_grad():
        call(x)
