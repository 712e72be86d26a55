"""Tree attention, backward: rowsum(dO * O), dQ over the lists of key blocks, dK and dV over ranges of query rows.

No atomics: every element is written by one program, or is a sum of partial results in a fixed order.

`disable_licm`: the compiler would lift the descriptors of k and v, one for each matrix instruction, out of the
loops and keep them in registers, which then spill.
"""

import triton
import triton.language as tl

from .tree_attention_tile import finite_or_zero, load_rows, scores, seen_by, store_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["T"])
def tree_attention_delta(
    OUT, REST, GRAD_OUT, GRAD_LSE, DELTA, T, stride_ot, stride_oh, stride_gt, stride_gh, stride_lh, stride_lt,
    HAS_GRAD_LSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """DELTA [H, T] = rowsum(dO * (OUT + REST)) - dLSE; REST only if OUT is half. Grid: (row blocks, H)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    out = load_rows(OUT + head * stride_oh, rows, stride_ot, T, True, HEAD_DIM, BLOCK_D)
    grad = load_rows(GRAD_OUT + head * stride_gh, rows, stride_gt, T, True, HEAD_DIM, BLOCK_D)
    out = out.to(tl.float32)
    if OUT.dtype.element_ty != tl.float32:
        out += load_rows(REST + head * stride_oh, rows, stride_ot, T, True, HEAD_DIM, BLOCK_D).to(tl.float32)
    delta = tl.sum(out * grad.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        offsets = head * stride_lh + rows.to(tl.int64) * stride_lt
        delta -= tl.load(GRAD_LSE + offsets, mask=rows < T, other=0.0)
    tl.store(DELTA + head * T + rows, delta, mask=rows < T)


@triton.jit
def _add_dq(
    dq, q, grad, lse, delta, rows, K, V, SUBTREE_END, DEPTH, KEY_BLOCKS, first, last, T,
    stride_kt, stride_vt, scale, softcap, window,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    for i in tl.range(first, last, disable_licm=True):
        keys = tl.load(KEY_BLOCKS + i) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = load_rows(K, keys, stride_kt, T, MASKED, HEAD_DIM, BLOCK_D)
        v = load_rows(V, keys, stride_vt, T, MASKED, HEAD_DIM, BLOCK_D)
        s, slope = scores(q, tl.trans(k), scale, softcap, HAS_SOFTCAP)  # [M, N]
        p = tl.exp2(s - lse[:, None])
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * slope
        if MASKED:
            seen = seen_by(rows[:, None], keys[None, :], SUBTREE_END, DEPTH, window, T, HAS_WINDOW)
            ds = tl.where(seen, ds, 0.0)
            # A NaN of a key that a row sees is in ds already; one of another tree must not meet ds = 0.
            k = finite_or_zero(k)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["T"])
def tree_attention_dq(
    Q, K, V, GRAD_OUT, LSE, DELTA, DQ, SUBTREE_END, DEPTH, ORDER, STARTS, FULL_ENDS, KEY_BLOCKS, T,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    stride_dt, stride_dh, scale, softcap, window, grad_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DQ [T, H, D]; the lists are those of `tree_attention_forward`. Grid: (query blocks * HEADS,)."""
    program = tl.program_id(0)
    head = program % HEADS
    block = tl.load(ORDER + program // HEADS)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    wide_head = head.to(tl.int64)
    K += (head // GROUP).to(tl.int64) * stride_kh
    V += (head // GROUP).to(tl.int64) * stride_vh
    q = load_rows(Q + wide_head * stride_qh, rows, stride_qt, T, True, HEAD_DIM, BLOCK_D)
    grad = load_rows(GRAD_OUT + wide_head * stride_gh, rows, stride_gt, T, True, HEAD_DIM, BLOCK_D)
    lse = tl.load(LSE + wide_head * T + rows, mask=rows < T, other=0.0) * LOG2_E
    delta = tl.load(DELTA + wide_head * T + rows, mask=rows < T, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    first = tl.load(STARTS + block)
    middle = tl.load(FULL_ENDS + block)
    last = tl.load(STARTS + block + 1)
    dq = _add_dq(
        dq, q, grad, lse, delta, rows, K, V, SUBTREE_END, DEPTH, KEY_BLOCKS, first, middle, T,
        stride_kt, stride_vt, scale, softcap, window,
        False, HAS_SOFTCAP, HAS_WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    dq = _add_dq(
        dq, q, grad, lse, delta, rows, K, V, SUBTREE_END, DEPTH, KEY_BLOCKS, middle, last, T,
        stride_kt, stride_vt, scale, softcap, window,
        True, HAS_SOFTCAP, HAS_WINDOW, HEAD_DIM, BLOCK_D, BLOCK_N,
    )  # fmt: skip
    # Read again: addresses and masks kept from the start would occupy registers throughout the loops.
    rows = tl.load(ORDER + program // HEADS, volatile=True) * BLOCK_M + tl.arange(0, BLOCK_M)
    store_rows(DQ + wide_head * stride_dh, rows, stride_dt, T, dq * grad_scale, HEAD_DIM, BLOCK_D)


@triton.jit
def _add_dkdv(
    dk, dv, k, v, keys, Q, GRAD_OUT, LSE, DELTA, SUBTREE_END, DEPTH, first, last, gap, gap_length, T,
    stride_qt, stride_gt, scale, softcap, window,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Rows [first, last); from `gap` on they stand `gap_length` further down.
    for start in tl.range(first, last, BLOCK_M, disable_licm=True):
        if MASKED:
            start += tl.where(start < gap, 0, gap_length)
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(Q, rows, stride_qt, T, MASKED, HEAD_DIM, BLOCK_D)
        grad = load_rows(GRAD_OUT, rows, stride_gt, T, MASKED, HEAD_DIM, BLOCK_D)
        if MASKED:
            lse = tl.load(LSE + rows, mask=rows < T, other=0.0) * LOG2_E
            delta = tl.load(DELTA + rows, mask=rows < T, other=0.0)
        else:
            lse = tl.load(LSE + rows) * LOG2_E
            delta = tl.load(DELTA + rows)
        s, slope = scores(k, tl.trans(q), scale, softcap, HAS_SOFTCAP)  # [N, M]
        p = tl.exp2(s - lse[None, :])
        dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
        ds = p * (dp - delta[None, :]) * slope
        if MASKED:
            seen = seen_by(rows[None, :], keys[:, None], SUBTREE_END, DEPTH, window, T, HAS_WINDOW)
            # As in the forward: what is broken in another tree's rows is taken out of the products, and put
            # back through p and ds, which hold it already but for dO: that is told by delta.
            p = tl.where(seen, tl.where((delta - delta == 0.0)[None, :], p, float("nan")), 0.0)
            ds = tl.where(seen, ds, 0.0)
            q = finite_or_zero(q)
            grad = finite_or_zero(grad)
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["T"])
def tree_attention_dkdv(
    Q, K, V, GRAD_OUT, LSE, DELTA, DK, DV, PARTIAL, SUBTREE_END, DEPTH, ITEMS, T,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_gt, stride_gh,
    stride_dkt, stride_dkh, stride_dvt, stride_dvh, scale, softcap, window, grad_scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """DK and DV [T, Hk, D], or their parts PARTIAL [slots, Hk, 2, BLOCK_N, BLOCK_D] fp32 of a long range.

    ITEMS [items, 6] int32: key block, then the query rows `first <= full_first <= full_last <= last`, of which
    those in [full_first, full_last) see the whole block, then the slot of the partial result or -1. Rows are
    multiples of BLOCK_M away from the block's start. Grid: (items * KEY_HEADS,).
    """
    program = tl.program_id(0)
    key_head = program % KEY_HEADS
    ITEMS += program // KEY_HEADS * 6
    block = tl.load(ITEMS)
    first = tl.load(ITEMS + 1)
    full_first = tl.load(ITEMS + 2)
    full_last = tl.load(ITEMS + 3)
    last = tl.load(ITEMS + 4)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    wide_head = key_head.to(tl.int64)
    k = load_rows(K + wide_head * stride_kh, keys, stride_kt, T, True, HEAD_DIM, BLOCK_D)
    v = load_rows(V + wide_head * stride_vh, keys, stride_vt, T, True, HEAD_DIM, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    full = full_last - full_first
    # Two loops over the heads: what the compiler lifts out of one is not kept in registers during the other.
    for member in tl.range(GROUP, disable_licm=True):
        head = wide_head * GROUP + member
        q_head = Q + head * stride_qh
        grad_head = GRAD_OUT + head * stride_gh
        lse_head = LSE + head * T
        delta_head = DELTA + head * T
        dk, dv = _add_dkdv(
            dk, dv, k, v, keys, q_head, grad_head, lse_head, delta_head, SUBTREE_END, DEPTH,
            first, last - full, full_first, full, T, stride_qt, stride_gt, scale, softcap, window,
            True, HAS_SOFTCAP, HAS_WINDOW, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    for member in tl.range(GROUP, disable_licm=True):
        head = wide_head * GROUP + member
        q_head = Q + head * stride_qh
        grad_head = GRAD_OUT + head * stride_gh
        lse_head = LSE + head * T
        delta_head = DELTA + head * T
        dk, dv = _add_dkdv(
            dk, dv, k, v, keys, q_head, grad_head, lse_head, delta_head, SUBTREE_END, DEPTH,
            full_first, full_last, 0, 0, T, stride_qt, stride_gt, scale, softcap, window,
            False, HAS_SOFTCAP, HAS_WINDOW, HEAD_DIM, BLOCK_D, BLOCK_M,
        )  # fmt: skip
    dk *= grad_scale
    # Read again, as in dQ.
    keys = tl.load(ITEMS, volatile=True) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.load(ITEMS + 5, volatile=True)
    if slot < 0:
        store_rows(DK + wide_head * stride_dkh, keys, stride_dkt, T, dk, HEAD_DIM, BLOCK_D)
        store_rows(DV + wide_head * stride_dvh, keys, stride_dvt, T, dv, HEAD_DIM, BLOCK_D)
    else:
        PARTIAL += (slot.to(tl.int64) * KEY_HEADS + key_head) * (2 * BLOCK_N * BLOCK_D)
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        tl.store(PARTIAL + inside, dk)
        tl.store(PARTIAL + BLOCK_N * BLOCK_D + inside, dv)


@triton.jit(do_not_specialize=["T"])
def tree_attention_sum_parts(
    PARTIAL, DK, DV, SPLITS, T, stride_dkt, stride_dkh, stride_dvt, stride_dvh,
    KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """DK and DV of the key blocks that were split, their parts added in order.

    SPLITS [blocks, 3] int32: key block, first slot, one past the last.
    Grid: (blocks, KEY_HEADS, BLOCK_N / BLOCK_ROWS).
    """
    SPLITS += tl.program_id(0) * 3
    block = tl.load(SPLITS)
    head = tl.program_id(1).to(tl.int64)
    part_rows = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = part_rows[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    dk = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_ROWS, BLOCK_D], dtype=tl.float32)
    first = tl.load(SPLITS + 1)
    last = tl.load(SPLITS + 2)
    part = PARTIAL + (first.to(tl.int64) * KEY_HEADS + head) * (2 * BLOCK_N * BLOCK_D) + inside
    for _ in range(first, last):
        dk += tl.load(part)
        dv += tl.load(part + BLOCK_N * BLOCK_D)
        part += KEY_HEADS * 2 * BLOCK_N * BLOCK_D
    rows = block * BLOCK_N + part_rows
    store_rows(DK + head * stride_dkh, rows, stride_dkt, T, dk, HEAD_DIM, BLOCK_D)
    store_rows(DV + head * stride_dvh, rows, stride_dvt, T, dv, HEAD_DIM, BLOCK_D)
