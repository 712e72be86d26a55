"""Reductions over ranges of a segmented array by dyadic blocks, and sums along paths, in NumPy on CPU tensors.

Blocks of 2^k elements are counted from the start of their own segment. A range is the union of at most two blocks
of every size: what it sums to, to the bit, depends on its segment alone.

Every segment gets room for a power of two of elements, the longest first. So each starts at a multiple of its room,
and blocks of the whole array are blocks of its segments, as far as a range asks for them. For the same reason the
array can be worked off in equal pieces whose blocks fit a cache; a piece's blocks are a binary heap, the parent of
2i and 2i + 1 being i.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Fields = tuple[Floats, ...]
# merge(left, right, left count, right count); the counts are numbers or arrays. Of elements only their value.
Merge = Callable[[Fields, Fields, Any, Any], Fields]
LEVELS = 100  # of a forest that are worth a step of their own, below 256
PIECE = 15  # log2 of a piece's elements, more where a range needs more


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
    (total,) = _reduce((values.numpy(),), (0.0, 0.0), _merge_sums, ranges, _rounded)
    return torch.from_numpy(total)


def moments(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(sum [G], sum of the squared distances from the mean [G]) of values [L], float64."""
    total, squares = _reduce((values.numpy(),), (0.0, 0.0, 0.0), _merge_moments, ranges, _rounded)
    return torch.from_numpy(total), torch.from_numpy(squares)


def extrema(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """(least [G], largest [G]) of values [L], float64; (inf, -inf) of an empty range."""
    x = values.numpy()
    least, largest = _reduce((x, x), (np.inf, -np.inf), _merge_extrema, ranges, tuple)
    return torch.from_numpy(least), torch.from_numpy(largest)


def ancestor_sums(slope: Tensor, centre: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """See `tree_reductions.ancestor_sums`."""
    total, middle = slope.double().numpy().copy(), centre.double().numpy()
    offset = np.zeros_like(total)
    _take_in_ancestors(total, offset, middle, parents.numpy().copy())
    return torch.from_numpy(total), torch.from_numpy(offset)


def ancestor_sums_by_level(
    slope: Tensor, centre: Tensor, parents: Tensor, depth: Ints
) -> tuple[Tensor, Tensor]:
    """The same but for the last bits, float64, with `depth` [N] known, 0 for a root: one addition a node.

    Level by level from the roots; what is deeper than `LEVELS` takes in its ancestors as above, down to those that
    have all of theirs. Which way a node goes depends on its own path alone.
    """
    level = np.minimum(depth, LEVELS)
    order = np.argsort(level.astype(np.uint8), kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(order.size)
    above = rank.take(parents.numpy().take(order), mode="clip")  # of roots it is not looked at
    total, middle = slope.numpy().take(order), centre.numpy().take(order)
    offset = np.zeros_like(total)
    ends = np.cumsum(np.bincount(level, minlength=1)).tolist()
    for begin, end in itertools.pairwise(ends[:LEVELS]):
        at = above[begin:end]
        its = total.take(at)
        rise = middle[begin:end] - middle.take(at)
        rise *= its
        np.add(offset.take(at), rise, out=offset[begin:end])
        total[begin:end] += its
    if len(ends) > LEVELS:
        above[: ends[LEVELS - 1]] = -1
        _take_in_ancestors(total, offset, middle, above)
    return torch.from_numpy(total.take(rank)), torch.from_numpy(offset.take(rank))


def _take_in_ancestors(total: Floats, offset: Floats, middle: Floats, above: Ints) -> None:
    """Every round doubles how many ancestors a node has taken in; `above` [N] is used up."""
    active = np.flatnonzero(above >= 0)
    while active.size:
        at = above[active]
        its = total[at]
        offset[active] += offset[at] + its * (middle[active] - middle[at])
        total[active] += its
        beyond = above[at]
        above[active] = beyond
        active = active[beyond >= 0]


def _reduce(
    values: Fields, empty: tuple[float, ...], merge: Merge, ranges: Ranges, result: Callable[[Any], Any]
) -> Fields:
    """`result` of what `merge` makes of each range: fields [G].

    `empty` are the fields of no element, `values` [L] the first fields of each, also in what `result` returns.
    """
    low, high, owner, segment, shift = (x.numpy() for x in ranges[:-1])
    size = high - low
    total = tuple(np.full(size.shape, value) for value in result(empty))
    if not segment.size:
        return total
    for field, value, nothing in zip(total, values, empty, strict=False):
        value.take(low, mode="clip", out=field)  # right for ranges of one element
        field[size == 0] = nothing

    many = np.flatnonzero(size > 1)
    first = low.take(many) + shift.take(owner.take(many))
    # Every range lies within one block of 2^levels elements.
    levels = int((first ^ (first + size.take(many) - 1)).max(initial=0)).bit_length()
    bits = max(levels, min(PIECE, (ranges.room - 1).bit_length()))
    width, pieces = 1 << bits, -(-ranges.room >> bits)
    order = np.argsort(first >> bits, kind="stable")
    many, first = many.take(order), first.take(order)
    cuts = np.searchsorted(first >> bits, np.arange(1, pieces))

    slot = shift.take(segment)
    slot += np.arange(slot.size)
    placed = tuple(np.full(pieces * width, value) for value, _ in zip(empty, values, strict=False))
    for field, value in zip(placed, values, strict=True):
        field[slot] = value
    heap = tuple(np.full(2 * width, value) for value in empty)
    for piece, (here, start) in enumerate(zip(np.split(many, cuts), np.split(first, cuts), strict=True)):
        if not here.size:
            continue
        for field, value in zip(heap, placed, strict=False):
            field[width:] = value[piece * width : (piece + 1) * width]
        start += width - piece * width  # places in the heap
        with np.errstate(invalid="ignore"):  # infinities of both signs
            _fill(heap, len(values), levels, merge)
            order, fields = _add_up(heap, merge, start, start + size[here])
        here = here[order]
        for field, value in zip(total, result(fields), strict=True):
            field[here] = value
    return total


def _fill(heap: Fields, given: int, levels: int, merge: Merge) -> None:
    """The blocks of the `levels` lowest levels from the elements, which are the heap's second half.

    Only the first `given` fields of elements differ from nothing's.
    """
    end = len(heap[0])
    for half in (1 << level for level in range(levels)):
        below = tuple(field[end // 2 : end] for field in (heap[:given] if half == 1 else heap))
        merged = merge(tuple(x[0::2] for x in below), tuple(x[1::2] for x in below), half, half)
        end //= 2
        for field, value in zip(heap, merged, strict=True):
            field[end // 2 : end] = value


def _add_up(heap: Fields, merge: Merge, first: Ints, last: Ints) -> tuple[Ints, Fields]:
    """(order, fields in that order) of ranges [first, last) of elements of the heap, none empty, from their blocks.

    Blocks are taken in from the smallest up, of two of a size the left one first; `first` and `last` are then the
    ends of what is left. Ranges of more blocks come first, so that those not done yet are a slice.
    """
    # Left of the middle are blocks that grow, right of it blocks that shrink: the binary digits of both lengths.
    top = np.frexp(first ^ last)[1] - 1
    middle = last >> top << top
    blocks = np.bitwise_count(middle - first) + np.bitwise_count(last - middle)
    order = np.argsort(~blocks, kind="stable")
    first, last = first[order], last[order]
    not_done = np.cumsum(np.bincount(blocks)[:0:-1])[::-1]

    partial: Fields = ()
    count = np.empty(0)
    for active in not_done.tolist():
        begin, end = first[:active], last[:active]
        size = begin | end
        size &= -size
        left = begin & size  # the size again if the block is the leftmost, else 0
        right = size ^ left
        end -= right
        place = (begin & -left) | (end & -right)
        begin += left
        width = size.astype(np.float64)
        block = _take(heap, (place / width).astype(np.int64))
        if not partial:
            partial, count = block, width
            continue
        so_far = tuple(field[:active] for field in partial)
        for field, value in zip(so_far, merge(so_far, block, count[:active], width), strict=True):
            field[:] = value
        count[:active] += width
    return order, partial


def _take(fields: Fields, at: Ints) -> Fields:
    return tuple(field.take(at) for field in fields)


def _rounded(fields: Any) -> Any:
    """Sums with what they lost, and the other fields; what an infinite sum has lost is no number."""
    total = fields[0] + fields[1]
    return np.where(np.isnan(total), fields[0], total), *fields[2:]


def _merge_sums(left: Fields, right: Fields, left_count: Any, right_count: Any) -> Fields:
    """Sums as (rounded sum, what it lost): Knuth's error-free addition, The Art of Computer Programming 4.2.2."""
    a, b = left[0], right[0]
    total = a + b
    share = total - a
    lost = a - (total - share)
    lost += b - share
    if len(left) > 1:
        lost += left[1] + right[1]
    return total, lost


def _merge_moments(left: Fields, right: Fields, left_count: Any, right_count: Any) -> Fields:
    """Chan, Golub and LeVeque 1979: squares around the joint mean from those around each."""
    total, lost = _merge_sums(left, right, left_count, right_count)
    apart = right[0] / right_count - left[0] / left_count
    apart *= apart
    apart *= left_count * right_count / (left_count + right_count)
    if len(left) > 1:
        apart += left[2] + right[2]
    return total, lost, apart


def _merge_extrema(left: Fields, right: Fields, left_count: Any, right_count: Any) -> Fields:
    return np.minimum(left[0], right[0]), np.maximum(left[1], right[1])
