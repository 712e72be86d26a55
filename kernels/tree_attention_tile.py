"""What the tree attention programs do with one tile: loads, scores, the mask."""

import triton
import triton.language as tl


@triton.jit
def load_rows(
    X, rows, stride, T, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """[rows, BLOCK_D] of X, 0 past T (when MASKED) and past HEAD_DIM."""
    channels = tl.arange(0, BLOCK_D)
    # Offsets past 2^31 elements: rows are int32, their product with a stride is not.
    pointers = X + rows.to(tl.int64)[:, None] * stride + channels[None, :]
    if HEAD_DIM == BLOCK_D:
        if MASKED:
            return tl.load(pointers, mask=rows[:, None] < T, other=0.0)
        return tl.load(pointers)
    if MASKED:
        return tl.load(pointers, mask=(rows[:, None] < T) & (channels[None, :] < HEAD_DIM), other=0.0)
    return tl.load(pointers, mask=channels[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def store_rows(X, rows, stride, T, value, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes [rows, BLOCK_D] into X, up to T and HEAD_DIM, in its type."""
    channels = tl.arange(0, BLOCK_D)
    pointers = X + rows.to(tl.int64)[:, None] * stride + channels[None, :]
    inside = (rows[:, None] < T) & (channels[None, :] < HEAD_DIM)
    tl.store(pointers, value.to(X.dtype.element_ty), mask=inside)


@triton.jit
def scores(a, b, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """`log2(e)` times the scores, and their slope: what a gradient of the scores is multiplied by.

    `scale` holds the factor log2(e), except with a softcap: then `scale` is 1/softcap times the usual factor and
    `softcap` is log2(e) times the bound.
    """
    s = tl.dot(a, b, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        tanh = 2.0 * tl.sigmoid(2.0 * s) - 1.0
        s = tanh * softcap
        slope = 1.0 - tanh * tanh
    else:
        slope = 1.0
    return s, slope


@triton.jit
def seen_by(rows, keys, SUBTREE_END, DEPTH, window, T, HAS_WINDOW: tl.constexpr):
    """Whether a row sees a key, for rows and keys of shapes that broadcast."""
    end = tl.load(SUBTREE_END + keys, mask=keys < T, other=0)
    seen = (keys <= rows) & (rows < end)
    if HAS_WINDOW:
        # Depths come as int64 and are less than T.
        row_depth = tl.load(DEPTH + rows, mask=rows < T, other=0).to(tl.int32)
        key_depth = tl.load(DEPTH + keys, mask=keys < T, other=0).to(tl.int32)
        seen &= row_depth - key_depth < window
    return seen


@triton.jit
def finite_or_zero(x):
    """x with its NaNs and infinities replaced by 0."""
    wide = x.to(tl.float32)
    return tl.where(wide - wide == 0.0, x, 0.0).to(x.dtype)
