"""The pieces that ranges are worked off in on the CPU: none shows in a result."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels.backends import ranges as eager
from trace_kernels.tree_reductions import (
    LeafRanges,
    range_extrema,
    range_moments,
    range_sums,
    segments,
    subtree_extrema,
    subtree_moments,
    subtree_sums,
)

from .test_tree_reductions import batch, cases, joined, tensor


@settings(max_examples=50, deadline=None)
@given(case=cases(), piece=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_the_pieces_of_an_array_do_not_show(
    case: tuple[list[int], list[int], list[float]], piece: int, seed: int
) -> None:
    parents, leaf_nodes, values = joined([case, *batch(3, seed)])
    forest, x = LeafRanges.of(parents, leaf_nodes), tensor(values)

    def below() -> torch.Tensor:
        return torch.stack(
            [subtree_sums(x, forest), *subtree_moments(x, forest), *subtree_extrema(x, forest)]
        )

    in_one = below()
    with mock.patch.object(eager, "PIECE", piece):
        assert torch.equal(below(), in_one)


def test_segments_longer_and_shorter_than_a_piece_against_exact_arithmetic() -> None:
    sizes = [3, 2**eager.PIECE + 5, 1, 700, 0, *[60] * 1000, 2**eager.PIECE, 2]
    rng = np.random.default_rng(3)
    values = rng.normal(1.0, 10.0 ** rng.integers(-6, 7, sum(sizes)))
    whole = segments(torch.tensor(sizes))
    # Parts of the segments besides: one in each, of any size from none.
    first = whole.low + torch.from_numpy(rng.integers(0, np.array(sizes) + 1))
    ranges = whole._replace(
        low=torch.cat([whole.low, first]),
        high=torch.cat([whole.high, whole.high]),
        owner=torch.cat([whole.owner, whole.owner]),
    )
    total, (mean, std) = range_sums(tensor(values), ranges), range_moments(tensor(values), ranges)
    least, largest = range_extrema(tensor(values), ranges)
    for at, (low, high) in enumerate(zip(ranges.low.tolist(), ranges.high.tolist(), strict=True)):
        mine = values[low:high]
        assert least[at] == mine.min(initial=np.inf)
        assert largest[at] == mine.max(initial=-np.inf)
        assert float(total[at]) == pytest.approx(math.fsum(mine), rel=1e-15, abs=1e-18 * np.abs(mine).sum())
        centre = math.fsum(mine) / max(len(mine), 1)
        spread = math.sqrt(math.fsum((mine - centre) ** 2) / max(len(mine), 1)) if len(mine) > 1 else 0.0
        assert float(mean[at]) == pytest.approx(centre, rel=1e-15, abs=1e-18 * np.abs(mine).sum())
        assert float(std[at]) == pytest.approx(spread, rel=1e-12)


def test_every_range_on_its_own() -> None:
    values = np.random.default_rng(5).normal(size=20)
    whole = segments(torch.tensor([20]))
    for low in range(20):
        for high in range(low, 21):
            alone = whole._replace(low=torch.tensor([low]), high=torch.tensor([high]))
            with mock.patch.object(eager, "PIECE", 0):
                total, std = range_sums(tensor(values), alone), range_moments(tensor(values), alone).std
            mine = values[low:high]
            assert float(total) == pytest.approx(math.fsum(mine), rel=1e-15, abs=1e-18)
            assert float(std) == pytest.approx(np.std(mine) if mine.size else 0.0, rel=1e-12, abs=1e-15)
