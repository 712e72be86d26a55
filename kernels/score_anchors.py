"""Predictor scores of anchors: gather, RMSNorm, two layers, sigmoid and the contrast gains, in one program."""

import triton
import triton.language as tl

# Squares of hidden states times this, a power of 2, neither overflow (to 1e28) nor vanish beside eps.
SHRINK = tl.constexpr(2.0**-32)


@triton.jit
def _logits(
    HIDDEN, NORM, W1, B1, W2, source, inside, stride, eps, D, WIDTH,
    PRECISION: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_A] float64, without the last bias. The norm's factor of a row is applied after the first layer."""
    logit = tl.zeros([BLOCK_A], dtype=tl.float64)
    for start in range(0, WIDTH, BLOCK_W):
        unit = start + tl.arange(0, BLOCK_W)
        acc = tl.zeros([BLOCK_A, BLOCK_W], dtype=tl.float32)
        squares = tl.zeros([BLOCK_A], dtype=tl.float64)
        for first in range(0, D, BLOCK_D):
            channel = first + tl.arange(0, BLOCK_D)
            real = channel < D
            x = tl.load(
                HIDDEN + source[:, None] * stride + channel[None, :],
                mask=inside[:, None] & real[None, :],
                other=0.0,
            ).to(tl.float32)
            # A long sum in fp32 would lose digits.
            squares += tl.sum((x * SHRINK) * (x * SHRINK), 1).to(tl.float64)
            x *= tl.load(NORM + channel, mask=real, other=0.0).to(tl.float32)[None, :]
            w = tl.load(
                W1 + unit.to(tl.int64)[:, None] * D + channel[None, :],
                mask=(unit < WIDTH)[:, None] & real[None, :],
                other=0.0,
            ).to(tl.float32)
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
        scale = (1.0 / tl.sqrt(squares / D / (SHRINK * SHRINK) + eps)).to(tl.float32)
        bias = tl.load(B1 + unit, mask=unit < WIDTH, other=0.0).to(tl.float32)
        h = acc * scale[:, None] + bias[None, :]
        # SiLU, whose exponential would overflow on the far left.
        h = tl.where(h < -80.0, 0.0, h / (1.0 + tl.exp(-tl.maximum(h, -80.0))))
        out = tl.load(W2 + unit, mask=unit < WIDTH, other=0.0).to(tl.float32)
        logit += tl.sum(h * out[None, :], 1).to(tl.float64)
    return logit


@triton.jit(do_not_specialize=["A", "counts"])
def score_anchors(
    HIDDEN, SOURCE, REWARD, NORM, W1, B1, W2, B2, RHO, LOGIT, VALUE, GAINS, A, counts, stride, eps, D, WIDTH,
    STAGE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """LOGIT [A], VALUE [A] and GAINS [counts, A], float64, of HIDDEN [T, D] at SOURCE [A]. Grid: (A / BLOCK_A,).

    W1 [WIDTH, D] and the vectors beside it are contiguous; RHO is 1 / kappa, float64 [1]. The second layer's sums
    over blocks and all that follows are float64, the gains made of v and 1 - v by products alone.
    """
    anchor = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    inside = anchor < A
    source = tl.load(SOURCE + anchor, mask=inside, other=0)
    logit = _logits(
        HIDDEN, NORM, W1, B1, W2, source, inside, stride, eps, D, WIDTH, PRECISION, BLOCK_A, BLOCK_W, BLOCK_D
    )  # fmt: skip
    logit += tl.load(B2).to(tl.float64)
    tl.store(LOGIT + anchor, logit, mask=inside)

    small = tl.exp(-tl.abs(logit))
    likely, unlikely = 1.0 / (1.0 + small), small / (1.0 + small)
    v = tl.where(logit < 0, unlikely, likely)
    fail = tl.where(logit < 0, likely, unlikely)
    tl.store(VALUE + anchor, v, mask=inside)

    rho = tl.load(RHO)
    one = tl.full([BLOCK_A], 1.0, dtype=tl.float64)
    step = tl.zeros([BLOCK_A], dtype=tl.float64)
    place = GAINS + anchor.to(tl.int64)
    if STAGE == "root":
        won, lost = one, one  # P(all rollouts so far won), P(all lost)
        for _ in range(counts):
            seen = step * rho
            gain = tl.where(step == 0.0, 0.0, (won * fail + lost * v) / (1.0 + seen))
            tl.store(place, gain, mask=inside)
            won *= (v + seen) / (1.0 + seen)
            lost *= (fail + seen) / (1.0 + seen)
            step += 1.0
            place += A
    else:
        reward = tl.load(REWARD + anchor, mask=inside, other=0) != 0
        q = tl.where(reward, v, fail)
        flip = tl.where(reward, fail, v)
        repeated = one  # P(all continuations so far repeat)
        for _ in range(counts):
            step += 1.0
            seen = step * rho
            tl.store(place, repeated * flip / (1.0 + seen), mask=inside)
            repeated *= (q + seen) / (1.0 + seen)
            place += A
