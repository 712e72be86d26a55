"""Edge log-probs: tiles of [sources, vocabulary] logits that never leave the chip, and their gradients.

Sources are S unique rows of the hidden states; a source's labels are `LABELS[STARTS[s] : STARTS[s + 1]]`, in
ascending order. Logits are in base 2, that is times log2(e). A token whose bias is -inf is out of the vocabulary:
its logit is the constant -inf, without a gradient.
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
# Of the maximum before there is one: -inf minus a masked token's -inf would be NaN.
LEAST = tl.constexpr(-3.4028234663852886e38)
# exp2 of this is 0; where an infinite difference of logits is to be multiplied, it is this instead.
GONE = tl.constexpr(-1000.0)
NO_LABEL = tl.constexpr(1 << 62)


@triton.jit
def _tanh(x):
    """To about 3e-7 of its value: near 0 a sigmoid's difference from 1/2 would have lost most digits."""
    t = x * x
    # Fitted to tanh(x) / x on [0, 1/2] for the least relative error, 1.5e-8.
    near = x + x * t * (-0.333331439 + t * (0.133258789 + t * (-0.0530454931 + t * 0.0172414891)))
    return tl.where(t < 0.25, near, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def _first_label(LABELS, start, end, column):
    """[M]: of each row's `LABELS[start:end]` the place of the first that is at least `column`, else `end`."""
    low, high = start, end
    while tl.max(high - low) > 0:
        middle = (low + high) // 2
        below = tl.load(LABELS + middle, mask=low < high, other=column) < column
        high = tl.where(below, high, tl.minimum(middle, high))
        low = tl.where(below, middle + 1, low)
    return low


@triton.jit
def _logits(
    HIDDEN, WEIGHT, BIAS, hidden_rows, is_source, columns, V, stride_hidden, stride_weight, inner, outer,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDEN: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[M, N] logits, -inf past the vocabulary and of masked tokens."""
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
        bias = tl.load(BIAS + columns, mask=is_token, other=float("-inf")).to(tl.float32)
        x += bias[None, :] * inner
        is_token = bias != float("-inf")
    if HAS_SOFTCAP:
        x = _tanh(x) * outer
    return tl.where(is_token[None, :], x, float("-inf"))


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
    top = tl.full([BLOCK_M], LEAST, dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    spread = tl.zeros([BLOCK_M], dtype=tl.float32)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(V, BLOCK_N))
    place = _first_label(LABELS, start, end, first * BLOCK_N)
    label = tl.load(LABELS + place, mask=place < end, other=NO_LABEL)
    for tile in range(first, last):
        columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        z = _logits(
            HIDDEN, WEIGHT, BIAS, hidden_rows, is_source, columns, V, stride_hidden, stride_weight, inner, outer,
            HAS_BIAS, HAS_SOFTCAP, WIDEN, HIDDEN_SIZE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        # From the tile that the maximum is taken of: a log-prob is never above 0.
        while tl.min(label) < (tile + 1) * BLOCK_N:
            at_label = tl.sum(tl.where(columns[None, :] == label[:, None], z, 0.0), 1)
            here = label < (tile + 1) * BLOCK_N
            tl.store(LABEL_LOGIT + place, at_label, mask=here)
            place += here.to(tl.int64)
            label = tl.load(LABELS + place, mask=place < end, other=NO_LABEL)
        new_top = tl.maximum(top, tl.max(z, 1))
        fall = tl.maximum(top - new_top, GONE)
        decay = tl.exp2(fall)
        z -= new_top[:, None]
        p = tl.exp2(z)
        if HAS_ENTROPY:
            # 0 times -inf is meant to be 0.
            spread = (spread + fall * total) * decay + tl.sum(tl.where(p == 0.0, 0.0, p * z), 1)
        total = total * decay + tl.sum(p, 1)
        top = new_top
    part = split.to(tl.int64) * S + rows
    tl.store(TOP + part, top, mask=is_source)
    tl.store(TOTAL + part, total, mask=is_source)
    if HAS_ENTROPY:
        tl.store(SPREAD + part, spread, mask=is_source)


@triton.jit
def _dlogits(z, g, lse, constant, by_entropy, outer, HAS_SOFTCAP: tl.constexpr, HAS_ENTROPY: tl.constexpr):
    """g - p (constant + h log p), times a softcap's slope; 0 of a masked token, a label or not."""
    logp = z - lse
    factor = constant
    if HAS_ENTROPY:
        factor += by_entropy * (tl.maximum(logp, GONE) * LN_2)
    d = g - tl.exp2(logp) * factor
    if HAS_SOFTCAP:
        tanh = z * (1.0 / outer)
        d *= 1.0 - tanh * tanh
    return tl.where(z == float("-inf"), 0.0, d)


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
    z = _logits(
        HIDDEN, WEIGHT, BIAS, hidden_rows, is_source, columns, V, stride_hidden, stride_weight, inner, outer,
        HAS_BIAS, HAS_SOFTCAP, WIDEN, HIDDEN_SIZE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    lse = tl.load(LSE + rows, mask=is_source, other=0.0)
    constant = tl.load(CONSTANT + rows, mask=is_source, other=0.0)
    by_entropy = tl.load(GRAD_ENTROPY + rows, mask=is_source, other=0.0)
    d = _dlogits(
        z, 0.0, lse[:, None], constant[:, None], by_entropy[:, None], outer, HAS_SOFTCAP, HAS_ENTROPY
    )
    d_rows = D_LOGITS + (rows - first_source).to(tl.int64) * (last_token - first_token)
    pointers = d_rows[:, None] + (columns - first_token)[None, :]
    inside = is_source[:, None] & (columns[None, :] < last_token)
    tl.store(pointers, d.to(D_LOGITS.dtype.element_ty), mask=inside)
    # The labels' gradients replace what was stored.
    tl.debug_barrier()
    start = tl.load(STARTS + rows, mask=is_source, other=0)
    end = tl.load(STARTS + rows + 1, mask=is_source, other=0)
    first = first_token + (tl.program_id(0) // blocks) * BLOCK_N
    past = tl.minimum(first + BLOCK_N, last_token)
    place = _first_label(LABELS, start, end, first)
    label = tl.load(LABELS + place, mask=place < end, other=NO_LABEL)
    while tl.min(label) < past:
        here = label < past
        g = tl.load(GRAD_PAIR + place, mask=here, other=0.0)
        at_label = tl.sum(tl.where(columns[None, :] == label[:, None], z, 0.0), 1)
        at_label = _dlogits(at_label, g, lse, constant, by_entropy, outer, HAS_SOFTCAP, HAS_ENTROPY)
        tl.store(d_rows + (label - first_token), at_label.to(D_LOGITS.dtype.element_ty), mask=here)
        place += here.to(tl.int64)
        label = tl.load(LABELS + place, mask=place < end, other=NO_LABEL)
