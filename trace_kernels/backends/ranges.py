"""Reductions over ranges of a segmented array by dyadic blocks, and sums along paths, in NumPy on CPU tensors.

Blocks of 2^k elements are counted from the start of their own segment. A range is the union of at most two blocks
of every size: what it sums to, to the bit, depends on its segment alone.

Every segment gets room for a power of two of elements, the longest first. So each starts at a multiple of its room,
and blocks of the whole array are blocks of its segments, as far as a range asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Fields = tuple[NDArray[np.float64], ...]
# merge(left, right, left count, right count); the counts are numbers or arrays.
Merge = Callable[[Fields, Fields, Any, Any], Fields]


class Ranges(NamedTuple):
    """G ranges `[low, high)` of an array of L elements that is cut into S segments; none crosses a cut."""

    low: Tensor  # int64 [G]
    high: Tensor  # int64 [G]
    owner: Tensor  # int64 [G], the range's segment
    segment: Tensor  # int64 [L], each element's segment
    shift: Tensor  # int64 [S], from an element's place to its place with every segment's room
    room: int  # of all segments

    def to(self, device: torch.device | str) -> Ranges:
        tensors = (self.low, self.high, self.owner, self.segment, self.shift)
        low, high, owner, segment, shift = (x.to(device) for x in tensors)
        return Ranges(low, high, owner, segment, shift, self.room)


def sums(values: Tensor, ranges: Ranges) -> Tensor:
    """[G]: compensated sums of values [L], float64."""
    total, lost = _reduce((values.numpy(),), (0.0, 0.0), _merge_sums, ranges)
    return torch.from_numpy(total + lost)


def moments(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(sum [G], sum of the squared distances from the mean [G]) of values [L], float64."""
    total, lost, squares = _reduce((values.numpy(),), (0.0, 0.0, 0.0), _merge_moments, ranges)
    return torch.from_numpy(total + lost), torch.from_numpy(squares)


def extrema(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(least [G], largest [G]) of values [L], float64; (inf, -inf) of an empty range."""
    x = values.numpy()
    least, largest = _reduce((x, x), (np.inf, -np.inf), _merge_extrema, ranges)
    return torch.from_numpy(least), torch.from_numpy(largest)


def ancestor_sums(slope: Tensor, centre: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """See `tree_reductions.ancestor_sums`; every round doubles how many ancestors a node has taken in."""
    total, middle, above = slope.double().numpy().copy(), centre.double().numpy(), parents.numpy().copy()
    offset = np.zeros_like(total)
    active = np.flatnonzero(above >= 0)
    while active.size:
        at = above[active]
        its = total[at]
        offset[active] += offset[at] + its * (middle[active] - middle[at])
        total[active] += its
        beyond = above[at]
        above[active] = beyond
        active = active[beyond >= 0]
    return torch.from_numpy(total), torch.from_numpy(offset)


def _reduce(values: Fields, empty: tuple[float, ...], merge: Merge, ranges: Ranges) -> Fields:
    """What `merge` makes of each range: the fields [G]. `empty` is of no element, `values` [L] an item's first."""
    low, high, owner, segment, shift = (x.numpy() for x in ranges[:-1])
    size = high - low
    total = tuple(np.full(size.shape, value) for value in empty)
    alone = np.flatnonzero(size == 1)
    for field, value in zip(total, values, strict=False):
        field[alone] = value[low[alone]]

    slot = np.arange(segment.size) + shift[segment]
    blocks = tuple(np.full(ranges.room, value) for value in empty)
    for field, value in zip(blocks, values, strict=False):
        field[slot] = value
    todo = np.flatnonzero(size > 1)
    first = low[todo] + shift[owner[todo]]  # both in blocks of the present size
    last = first + size[todo]
    partial = tuple(np.full(todo.shape, value) for value in empty)
    count, half = np.zeros(todo.shape), 1
    while todo.size:
        left = np.flatnonzero(first & 1)
        _add(partial, count, left, merge, _take(blocks, first[left]), half)
        first[left] += 1
        right = np.flatnonzero(last & 1)
        last[right] -= 1
        _add(partial, count, right, merge, _take(blocks, last[right]), half)
        is_open = first < last
        done, still = np.flatnonzero(~is_open), np.flatnonzero(is_open)
        for field, value in zip(total, partial, strict=True):
            field[todo[done]] = value[done]
        todo, count, *partial_left = _take((todo, count, *partial), still)
        partial = tuple(partial_left)
        first, last = first[still] >> 1, last[still] >> 1
        if todo.size:
            pairs = 2 * (len(blocks[0]) // 2)
            blocks = merge(
                tuple(x[0:pairs:2] for x in blocks), tuple(x[1:pairs:2] for x in blocks), half, half
            )
        half *= 2
    return total


def _add(partial: Fields, count: Any, here: Ints, merge: Merge, blocks: Fields, half: int) -> None:
    merged = merge(_take(partial, here), blocks, count[here], half)
    for field, value in zip(partial, merged, strict=True):
        field[here] = value
    count[here] += half


def _take(fields: tuple[Any, ...], at: Ints) -> tuple[Any, ...]:
    return tuple(field.take(at) for field in fields)


def _merge_sums(left: Fields, right: Fields, left_count: Any, right_count: Any) -> Fields:
    """Sums as (rounded sum, what it lost): Knuth's error-free addition, The Art of Computer Programming 4.2.2."""
    (a, a_lost), (b, b_lost) = left[:2], right[:2]
    total = a + b
    share = total - a
    return total, (a - (total - share)) + (b - share) + (a_lost + b_lost)


def _merge_moments(left: Fields, right: Fields, left_count: Any, right_count: Any) -> Fields:
    """Chan, Golub and LeVeque 1979: squares around the joint mean from those around each."""
    total, lost = _merge_sums(left, right, left_count, right_count)
    apart = right[0] / right_count - left[0] / np.maximum(left_count, 1)
    weight = left_count * right_count / (left_count + right_count)
    return total, lost, left[2] + right[2] + apart * apart * weight


def _merge_extrema(left: Fields, right: Fields, left_count: Any, right_count: Any) -> Fields:
    return np.minimum(left[0], right[0]), np.maximum(left[1], right[1])
