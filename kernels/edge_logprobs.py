"""Edge log-probs: tiles of [sources, vocabulary] logits that never leave the chip, and their gradients.

Sources are S unique rows of the hidden states; a source's labels are `LABELS[STARTS[s] : STARTS[s + 1]]`. Logits
are in base 2, that is times log2(e).
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _logits(
    HIDDEN, WEIGHT, BIAS, hidden_rows, is_source, columns, V, stride_hidden, stride_weight, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDEN: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[M, N] logits, -inf past the vocabulary, and the slope of a softcap (else 1)."""
    is_token = columns < V
    h = HIDDEN + hidden_rows.to(tl.int64)[:, None] * stride_hidden
    w = WEIGHT + columns.to(tl.int64)[:, None] * stride_weight
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, HIDDEN_SIZE, BLOCK_K):
        channels = first + tl.arange(0, BLOCK_K)
        if HIDDEN_SIZE % BLOCK_K == 0:
            a = tl.load(h + channels[None, :], mask=is_source[:, None], other=0.0)
            b = tl.load(w + channels[None, :], mask=is_token[:, None], other=0.0)
        else:
            inside = channels[None, :] < HIDDEN_SIZE
            a = tl.load(h + channels[None, :], mask=is_source[:, None] & inside, other=0.0)
            b = tl.load(w + channels[None, :], mask=is_token[:, None] & inside, other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    x = acc * inner
    if HAS_BIAS:
        x += tl.load(BIAS + columns, mask=is_token, other=0.0).to(tl.float32)[None, :] * inner
    if HAS_SOFTCAP:
        tanh = 2.0 * tl.sigmoid(2.0 * x) - 1.0
        z, slope = tanh * outer, 1.0 - tanh * tanh
    else:
        z, slope = x, 1.0
    return tl.where(is_token[None, :], z, float("-inf")), slope


@triton.jit(do_not_specialize=["S", "V", "tiles_per_split"])
def edge_logprobs_forward(
    HIDDEN, WEIGHT, BIAS, SOURCES, STARTS, LABELS, TOP, TOTAL, SPREAD, LABEL_LOGIT, S, V, tiles_per_split,
    stride_hidden, stride_weight, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, WIDEN: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of each split of the vocabulary: the largest logit m, sum 2^(z - m) and sum 2^(z - m) (z - m), fp32
    [splits, S], to be combined in a fixed order; and the labels' logits, fp32 [P].

    Grid: (source blocks * splits,), the sources first, so that neighbours read the same part of the weight.
    """
    blocks = tl.cdiv(S, BLOCK_M)
    split = tl.program_id(0) // blocks
    rows = (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_source = rows < S
    hidden_rows = tl.load(SOURCES + rows, mask=is_source, other=0)
    start = tl.load(STARTS + rows, mask=is_source, other=0)
    end = tl.load(STARTS + rows + 1, mask=is_source, other=0)
    most = tl.max(end - start)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    spread = tl.zeros([BLOCK_M], dtype=tl.float32)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(V, BLOCK_N))
    for tile in range(first, last):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        z, _ = _logits(
            HIDDEN, WEIGHT, BIAS, hidden_rows, is_source, columns, V, stride_hidden, stride_weight, inner, outer,
            HAS_BIAS, HAS_SOFTCAP, WIDEN, HIDDEN_SIZE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        for i in range(most):
            label = tl.load(LABELS + start + i, mask=start + i < end, other=-1)
            # From the tile that the maximum is taken of: a log-prob is never above 0.
            at_label = tl.sum(tl.where(columns[None, :] == label[:, None], z, 0.0), 1)
            here = (label >= tile * BLOCK_N) & (label < (tile + 1) * BLOCK_N)
            tl.store(LABEL_LOGIT + start + i, at_label, mask=here)
        new_top = tl.maximum(top, tl.max(z, 1))
        fall = top - new_top
        decay = tl.exp2(fall)
        z -= new_top[:, None]
        p = tl.exp2(z)
        if HAS_ENTROPY:
            # Nothing yet, or past the vocabulary: 0 times -inf is meant to be 0.
            moved = tl.where(total == 0.0, 0.0, spread + fall * total)
            spread = moved * decay + tl.sum(tl.where(columns[None, :] < V, p * z, 0.0), 1)
        total = total * decay + tl.sum(p, 1)
        top = new_top
    part = split.to(tl.int64) * S + rows
    tl.store(TOP + part, top, mask=is_source)
    tl.store(TOTAL + part, total, mask=is_source)
    if HAS_ENTROPY:
        tl.store(SPREAD + part, spread, mask=is_source)


@triton.jit(do_not_specialize=["S", "V", "first_source", "last_source", "first_token", "last_token"])
def edge_logprobs_dlogits(
    HIDDEN, WEIGHT, BIAS, SOURCES, STARTS, LABELS, LSE, CONSTANT, GRAD_ENTROPY, GRAD_PAIR, D_LOGITS,
    V, first_source, last_source, first_token, last_token,
    stride_hidden, stride_weight, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr, WIDEN: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """D_LOGITS [sources, tokens] of ranges of both: g onehot - p (CONSTANT + h log p), times a softcap's slope.

    LSE in base 2; CONSTANT = g + h H, h = GRAD_ENTROPY, both [S]; g of each label in GRAD_PAIR [P].
    Grid: (source blocks * token blocks,).
    """
    blocks = tl.cdiv(last_source - first_source, BLOCK_M)
    rows = first_source + (tl.program_id(0) % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = first_token + (tl.program_id(0) // blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_source = rows < last_source
    hidden_rows = tl.load(SOURCES + rows, mask=is_source, other=0)
    z, slope = _logits(
        HIDDEN, WEIGHT, BIAS, hidden_rows, is_source, columns, V, stride_hidden, stride_weight, inner, outer,
        HAS_BIAS, HAS_SOFTCAP, WIDEN, HIDDEN_SIZE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    logp = z - tl.load(LSE + rows, mask=is_source, other=0.0)[:, None]
    p = tl.exp2(logp)
    factor = tl.load(CONSTANT + rows, mask=is_source, other=0.0)[:, None]
    if HAS_ENTROPY:
        factor += tl.load(GRAD_ENTROPY + rows, mask=is_source, other=0.0)[:, None] * (logp * LN_2)
    d = -p * factor
    start = tl.load(STARTS + rows, mask=is_source, other=0)
    end = tl.load(STARTS + rows + 1, mask=is_source, other=0)
    for i in range(tl.max(end - start)):
        label = tl.load(LABELS + start + i, mask=start + i < end, other=-1)
        g = tl.load(GRAD_PAIR + start + i, mask=start + i < end, other=0.0)
        d = tl.where(columns[None, :] == label[:, None], d + g[:, None], d)
    if HAS_SOFTCAP:
        d *= slope
    width = last_token - first_token
    pointers = (
        D_LOGITS + (rows - first_source).to(tl.int64)[:, None] * width + (columns - first_token)[None, :]
    )
    inside = is_source[:, None] & (columns[None, :] < last_token)
    tl.store(pointers, d.to(D_LOGITS.dtype.element_ty), mask=inside)
