"""Reductions over ranges of a segmented array, and sums along paths; the algorithms are `backends/ranges.py`'s.

Every element or range is one lane; a launch reads what the one before it wrote, never what it writes itself.
"""

import triton
import triton.language as tl


@triton.jit
def _merge(a0, a1, a2, b0, b1, b2, a_count, b_count, KIND: tl.constexpr):
    """Of two blocks (sum, what it lost, squares around the mean), or (least, largest, -) with KIND "extrema"."""
    if KIND == "extrema":
        least = tl.minimum(a0, b0, propagate_nan=tl.PropagateNan.ALL)
        return least, tl.maximum(a1, b1, propagate_nan=tl.PropagateNan.ALL), a2
    else:
        total = a0 + b0
        share = total - a0
        lost = (a0 - (total - share)) + (b0 - share) + (a1 + b1)
        if KIND == "moments":
            apart = b0 / b_count - a0 / tl.maximum(a_count, 1.0)
            a2 = a2 + b2 + apart * apart * (a_count * b_count / (a_count + b_count))
        return total, lost, a2


@triton.jit
def _load(X, stride, at, mask, KIND: tl.constexpr):
    """The fields of X, float64 [3, stride], at some places; the third one only where it is of use."""
    x0 = tl.load(X + at, mask=mask, other=0.0)
    x1 = tl.load(X + stride.to(tl.int64) + at, mask=mask, other=0.0)
    x2 = x1
    if KIND == "moments":
        x2 = tl.load(X + 2 * stride.to(tl.int64) + at, mask=mask, other=0.0)
    return x0, x1, x2


@triton.jit
def _store(X, stride, at, mask, x0, x1, x2, KIND: tl.constexpr):
    tl.store(X + at, x0, mask=mask)
    tl.store(X + stride.to(tl.int64) + at, x1, mask=mask)
    if KIND == "moments":
        tl.store(X + 2 * stride.to(tl.int64) + at, x2, mask=mask)


@triton.jit(do_not_specialize=["total", "start", "next_start", "pairs", "half"])
def tree_reductions_double(
    BLOCKS, total, start, next_start, pairs, half, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The blocks of 2 half elements from those of half: from `next_start` and from `start` on in BLOCKS [3, total].

    Grid: (pairs / BLOCK,).
    """
    pair = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    a0, a1, a2 = _load(BLOCKS, total, start + 2 * pair, inside, KIND)
    b0, b1, b2 = _load(BLOCKS, total, start + 2 * pair + 1, inside, KIND)
    count = half.to(tl.float64)
    c0, c1, c2 = _merge(a0, a1, a2, b0, b1, b2, count, count, KIND)
    _store(BLOCKS, total, next_start + pair, inside, c0, c1, c2, KIND)


@triton.jit(do_not_specialize=["total", "room", "G", "levels"])
def tree_reductions_ranges(
    BLOCKS, LOW, HIGH, OWNER, SHIFT, OUT, total, room, G, levels, KIND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """OUT, float64 [3, G], of the ranges [LOW, HIGH) from the blocks of all sizes. Grid: (G / BLOCK,)."""
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < G
    low = tl.load(LOW + group, mask=inside, other=0)
    high = tl.load(HIGH + group, mask=inside, other=0)
    shift = tl.load(SHIFT + tl.load(OWNER + group, mask=inside, other=0), mask=inside, other=0)
    first = low + shift
    last = high + shift
    a0 = tl.zeros([BLOCK], dtype=tl.float64)
    a1 = tl.zeros([BLOCK], dtype=tl.float64)
    if KIND == "extrema":
        a0 += float("inf")
        a1 -= float("inf")
    a2 = tl.zeros([BLOCK], dtype=tl.float64)
    count = tl.zeros([BLOCK], dtype=tl.float64)
    half = tl.full([BLOCK], 1.0, dtype=tl.float64)
    start = tl.zeros([BLOCK], dtype=tl.int64)
    number = tl.zeros([BLOCK], dtype=tl.int64) + room  # of blocks of the present size
    for _ in range(levels):
        takes = (first < last) & ((first & 1) > 0)
        b0, b1, b2 = _load(BLOCKS, total, start + first, takes, KIND)
        c0, c1, c2 = _merge(a0, a1, a2, b0, b1, b2, count, half, KIND)
        a0, a1, a2 = tl.where(takes, c0, a0), tl.where(takes, c1, a1), tl.where(takes, c2, a2)
        count += tl.where(takes, half, 0.0)
        first += takes.to(tl.int64)
        takes = (first < last) & ((last & 1) > 0)
        last -= takes.to(tl.int64)
        b0, b1, b2 = _load(BLOCKS, total, start + last, takes, KIND)
        c0, c1, c2 = _merge(a0, a1, a2, b0, b1, b2, count, half, KIND)
        a0, a1, a2 = tl.where(takes, c0, a0), tl.where(takes, c1, a1), tl.where(takes, c2, a2)
        count += tl.where(takes, half, 0.0)
        half *= 2.0
        first = first >> 1
        last = last >> 1
        start += number
        number = number >> 1
    _store(OUT, G, group, inside, a0, a1, a2, KIND)


@triton.jit(do_not_specialize=["N"])
def tree_reductions_ancestors(
    SLOPE, OFFSET, ABOVE, CENTRE, NEW_SLOPE, NEW_OFFSET, NEW_ABOVE, N, BLOCK: tl.constexpr
):  # fmt: skip
    """One round: every node takes in the ancestors that the node ABOVE it has taken in. Grid: (N / BLOCK,).

    What stands in ABOVE and is not before the node is not read: the node becomes NaN.
    """
    node = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = node < N
    slope = tl.load(SLOPE + node, mask=inside, other=0.0)
    offset = tl.load(OFFSET + node, mask=inside, other=0.0)
    above = tl.load(ABOVE + node, mask=inside, other=-1)
    takes = (above >= 0) & (above < node)
    slope += tl.where(takes | (above == -1), 0.0, float("nan"))
    its_slope = tl.load(SLOPE + above, mask=takes, other=0.0)
    its_offset = tl.load(OFFSET + above, mask=takes, other=0.0)
    rise = tl.load(CENTRE + node, mask=takes, other=0.0) - tl.load(CENTRE + above, mask=takes, other=0.0)
    tl.store(NEW_SLOPE + node, tl.where(takes, slope + its_slope, slope), mask=inside)
    tl.store(
        NEW_OFFSET + node, tl.where(takes, offset + (its_offset + its_slope * rise), offset), mask=inside
    )
    tl.store(NEW_ABOVE + node, tl.load(ABOVE + above, mask=takes, other=-1), mask=inside)
