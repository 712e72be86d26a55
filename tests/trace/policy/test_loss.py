"""The policy loss against its expansion, one term per leaf."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trace_rl.policy.loss import tree_policy_loss

LOW, HIGH, CAP = 0.2, 0.28, 2.0
ONE = torch.ones(1)
ZERO = torch.zeros(1)


def expanded(
    logprob: Tensor, old: Tensor, sampler: Tensor, advantages: Tensor, weights: Tensor, below: Tensor
) -> Tensor:
    """`-sum_leaf w min(rho A, clip(rho) A) min(exp(old - sampler), cap)` with A, w [L] and below [L, E]."""
    total = 0.0 * logprob.sum()
    for advantage, weight, mine in zip(advantages, weights, below, strict=True):
        for edge in torch.nonzero(mine)[:, 0]:
            ratio = (logprob[edge] - old[edge]).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            total = total - weight * gain * (old[edge] - sampler[edge]).exp().clamp(max=CAP)
    return total


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_equals_the_expansion_per_leaf(seed: int, leaves: int, edges: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    old, sampler = normal(edges) - 4, normal(edges) - 4
    logprob = (old + 0.4 * normal(edges)).requires_grad_()
    advantages, weights = normal(leaves), torch.rand(leaves, generator=generator, dtype=torch.float64)
    below = torch.rand(leaves, edges, generator=generator) < 0.6
    want = expanded(logprob, old, sampler, advantages, weights, below) / 7.0
    (want_gradient,) = torch.autograd.grad(want, logprob)

    share = (weights[:, None] * below).T  # [E, L]
    out = tree_policy_loss(
        logprob,
        old,
        sampler,
        share @ advantages.clamp(min=0),
        share @ advantages.clamp(max=0),
        share.sum(1),
        denominator=7.0,
    )
    (gradient,) = torch.autograd.grad(out.loss, logprob)
    torch.testing.assert_close(out.loss, want)
    torch.testing.assert_close(
        gradient, torch.zeros_like(gradient) if want_gradient is None else want_gradient
    )
    assert out.sums["weight"] == pytest.approx(float(share.sum()))
    assert out.sums["tokens"] == int((share.sum(1) != 0).sum())


@pytest.mark.parametrize(
    ("advantage", "ratio", "moves"),
    [(1, 1.2, True), (1, 1.3, False), (1, 0.5, True), (-1, 0.9, True), (-1, 0.7, False), (-1, 1.9, True)],
)
def test_the_clip_only_stops_what_has_gone_far_enough(advantage: int, ratio: float, moves: bool) -> None:
    """A good token may not rise above 1.28 and a bad one not fall below 0.8; the way back is open."""
    logprob = torch.tensor([-2.0 + math.log(ratio)], requires_grad=True)
    good, bad = (ONE, ZERO) if advantage > 0 else (ZERO, -ONE)
    out = tree_policy_loss(logprob, ZERO - 2, ZERO - 2, good, bad, ONE, denominator=1.0)
    out.loss.backward()
    assert logprob.grad is not None
    assert logprob.grad.item() == (pytest.approx(-advantage * ratio, rel=1e-5) if moves else 0.0)
    assert out.sums["clipped"] == (not moves)
    bounded = min(ratio, 1 + HIGH) if advantage > 0 else max(ratio, 1 - LOW)
    assert out.loss.item() == pytest.approx(-advantage * bounded, rel=1e-5)


@pytest.mark.parametrize(
    ("gap", "factor"), [(0.0, 1.0), (-1.0, math.exp(-1)), (0.5, math.exp(0.5)), (5.0, CAP)]
)
def test_the_importance_weight_is_truncated_above_only(gap: float, factor: float) -> None:
    old = ZERO - 2
    logprob = old.clone().requires_grad_()
    out = tree_policy_loss(logprob, old, old - gap, ONE, ZERO, ONE, denominator=1.0, importance_cap=CAP)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-factor, rel=1e-5)
    assert logprob.grad is not None
    assert logprob.grad.item() == pytest.approx(-factor, rel=1e-5)


def test_no_advantage_no_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    old, sampler, now = (torch.randn(50, generator=generator) for _ in range(3))
    logprob = now.requires_grad_()
    zeros = torch.zeros(50)
    out = tree_policy_loss(logprob, old, sampler, zeros, zeros, torch.ones(50), denominator=50.0)
    out.loss.backward()
    assert out.loss.item() == 0
    assert logprob.grad is not None
    assert not logprob.grad.any()
    assert out.sums["clipped"] == 0  # nothing there that a clip could have held back
    assert out.sums["weight"] == 50


def test_kl_is_k3_under_the_leaf_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    now, reference = torch.randn(2, 9, generator=generator, dtype=torch.float64) - 3
    weight = torch.arange(9, dtype=torch.float64)
    logprob = now.clone().requires_grad_()
    zeros = torch.zeros(9, dtype=torch.float64)
    out = tree_policy_loss(
        logprob, now, now, zeros, zeros, weight, denominator=4.0, kl=0.3, reference_logprob=reference
    )
    out.loss.backward()
    k3 = torch.expm1(reference - now) - (reference - now)
    assert (k3 >= 0).all()
    assert out.sums["kl"] == pytest.approx(float((weight * k3).sum()))
    assert out.loss.item() == pytest.approx(0.3 * float((weight * k3).sum()) / 4.0)
    # d k3 / d logp = 1 - p_ref / p
    torch.testing.assert_close(logprob.grad, 0.3 * weight * (1 - (reference - now).exp()) / 4.0)


def test_kl_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="reference_logprob"):
        tree_policy_loss(ZERO, ZERO, ZERO, ONE, ZERO, ONE, denominator=1.0, kl=0.1)


def test_without_kl_a_reference_changes_nothing() -> None:
    out = tree_policy_loss(ZERO, ZERO, ZERO, ONE, ZERO, ONE, denominator=1.0, reference_logprob=ZERO - 9)
    assert out.loss.item() == -1
    assert out.sums["kl"] == 0
