"""Sums, moments and extrema over ranges, by NumPy or by the device's programs; unchecked and without gradients.

The callers are `tree_reductions.py`, which checks its arguments, and the estimators, whose rewards are checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import interpreter
from .backends import ranges as eager
from .backends.ranges import Ranges


class Moments(NamedTuple):
    """Of groups of numbers; `std` is that of the population, exactly 0 for one member, none, or equal ones."""

    mean: Tensor
    std: Tensor


def sums(values: Tensor, ranges: Ranges) -> Tensor:
    scaled, unit = _scaled(values, ranges)
    return _program(values).sums(scaled, ranges) * unit


def means(values: Tensor, ranges: Ranges) -> Tensor:
    """0 of an empty range; finite where the sum would not be."""
    scaled, unit = _scaled(values, ranges)
    return _program(values).sums(scaled, ranges).div_(_members(ranges)).mul_(unit)


def moments(values: Tensor, ranges: Ranges) -> Moments:
    scaled, unit = _scaled(values, ranges)
    mean, std = moments_in_units(scaled, ranges)
    return Moments(mean.mul_(unit), std.mul_(unit))


def moments_in_units(scaled: Tensor, ranges: Ranges) -> Moments:
    """`moments` of float64 values within [-1, 1], or nearly, in every segment."""
    total, squares = _program(scaled).moments(scaled, ranges)
    members = _members(ranges).double()
    # [k + 1]: changes between neighbours up to element k; one more at the end for empty ranges.
    changes = torch.zeros(len(scaled) + 2, dtype=torch.int64, device=scaled.device)
    torch.cumsum(scaled[1:] != scaled[:-1], 0, out=changes[2:-1])
    changes[-1] = changes[-2]
    varied = changes.index_select(0, ranges.high) > changes[1:].index_select(0, ranges.low)
    mean = total.div_(members)
    # The difference is 0, or NaN where a member is no finite number.
    std = squares.mul_(varied).div_(members).sqrt_().add_(mean - mean)
    return Moments(mean, std)


def extrema(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    least, largest = _program(values).extrema(values.detach().double(), ranges)
    return least, largest


def ancestor_sums(slope: Tensor, centre: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    total, offset = _program(slope).ancestor_sums(slope.detach(), centre.detach(), parents)
    return total, offset


def _program(values: Tensor) -> Any:
    if values.device.type != "cuda" and not interpreter.is_on():
        return eager
    from .backends import ranges_triton

    return ranges_triton


def _members(ranges: Ranges) -> Tensor:
    return (ranges.high - ranges.low).clamp_(min=1)


def _scaled(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(values [L] in units of their segment, the units [G]): powers of two, so that no square overflows."""
    wide = values.double()
    largest = torch.zeros(len(ranges.shift), dtype=torch.float64, device=wide.device)
    # A NaN or an infinity is its own ranges' affair, and sets no unit.
    largest.scatter_reduce_(0, ranges.segment, wide.abs().nan_to_num_(0.0, 0.0, 0.0), "amax")
    unit = torch.ldexp(torch.ones_like(largest), (torch.frexp(largest)[1] - 1).clamp(-1000, 1023))
    return wide / unit.index_select(0, ranges.segment), unit.index_select(0, ranges.owner)
