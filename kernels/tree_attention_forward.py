"""Tree attention, forward: one program per block of queries and head, over the list of key blocks it meets.

Full blocks come first and need no mask. Block lists are built on the host, `trace_kernels/block_lists.py`.
`disable_licm`: see the backward.
"""

import triton
import triton.language as tl

from .tree_attention_tile import finite_or_zero, load_rows, scores, seen_by, store_rows

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _visit(
    acc, row_max, row_sum, q, rows, K, V, SUBTREE_END, DEPTH, KEY_BLOCKS, first, last, T,
    stride_kt, stride_vt, scale, softcap, window,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    for i in tl.range(first, last, disable_licm=True):
        keys = tl.load(KEY_BLOCKS + i) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = load_rows(K, keys, stride_kt, T, MASKED, HEAD_DIM, BLOCK_D)
        s, _ = scores(q, tl.trans(k), scale, softcap, HAS_SOFTCAP)  # [M, N], times log2(e)
        v = load_rows(V, keys, stride_vt, T, MASKED, HEAD_DIM, BLOCK_D)
        if MASKED:
            seen = seen_by(rows[:, None], keys[None, :], SUBTREE_END, DEPTH, window, T, HAS_WINDOW)
            # A weight of 0 does not stop a NaN or an infinity of another tree's value: they are taken out of
            # the product and put back into the scores of the rows that do see them.
            clean = finite_or_zero(v)
            broken = tl.max((clean != v).to(tl.int32), 1) > 0
            v = clean
            s = tl.where(seen, tl.where(broken[None, :], float("nan"), s), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        p = tl.exp2(s - shift[:, None])
        decay = tl.exp2(row_max - shift)
        row_sum = row_sum * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["T"])
def tree_attention_forward(
    Q, K, V, OUT, REST, LSE, SINKS, SUBTREE_END, DEPTH, ORDER, STARTS, FULL_ENDS, KEY_BLOCKS, T,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """OUT [T, H, D] and LSE [H, T] (natural logarithm) of Q [T, H, D], K and V [T, Hk, D]; channel stride 1.

    REST, if OUT is half, is what rounding took from it. Query block `m = ORDER[rank]` visits
    `KEY_BLOCKS[STARTS[m] : STARTS[m + 1]]`, without a mask up to FULL_ENDS[m]. Grid: (query blocks * HEADS,).
    """
    program = tl.program_id(0)
    head = program % HEADS
    block = tl.load(ORDER + program // HEADS)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    Q += head.to(tl.int64) * stride_qh
    K += (head // GROUP).to(tl.int64) * stride_kh
    V += (head // GROUP).to(tl.int64) * stride_vh
    q = load_rows(Q, rows, stride_qt, T, True, HEAD_DIM, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    if HAS_SINKS:
        row_max = tl.zeros([BLOCK_M], dtype=tl.float32) + tl.load(SINKS + head).to(tl.float32) * LOG2_E
        row_sum = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    else:
        row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    first = tl.load(STARTS + block)
    middle = tl.load(FULL_ENDS + block)
    last = tl.load(STARTS + block + 1)
    acc, row_max, row_sum = _visit(
        acc, row_max, row_sum, q, rows, K, V, SUBTREE_END, DEPTH, KEY_BLOCKS, first, middle, T,
        stride_kt, stride_vt, scale, softcap, window,
        False, HAS_SOFTCAP, HAS_WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    acc, row_max, row_sum = _visit(
        acc, row_max, row_sum, q, rows, K, V, SUBTREE_END, DEPTH, KEY_BLOCKS, middle, last, T,
        stride_kt, stride_vt, scale, softcap, window,
        True, HAS_SOFTCAP, HAS_WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    out = acc / row_sum[:, None]
    # Read again: addresses and masks kept from the start would occupy registers throughout the loops.
    rows = tl.load(ORDER + program // HEADS, volatile=True) * BLOCK_M + tl.arange(0, BLOCK_M)
    store_rows(OUT + head.to(tl.int64) * stride_oh, rows, stride_ot, T, out, HEAD_DIM, BLOCK_D)
    if OUT.dtype.element_ty != tl.float32:
        rest = out - out.to(OUT.dtype.element_ty).to(tl.float32)
        store_rows(REST + head.to(tl.int64) * stride_oh, rows, stride_ot, T, rest, HEAD_DIM, BLOCK_D)
    lse = (row_max + tl.log2(row_sum)) * LN_2
    tl.store(LSE + head.to(tl.int64) * T + rows, lse, mask=rows < T)
