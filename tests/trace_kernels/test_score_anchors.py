"""Anchor scores against the plain module and exact arithmetic; the head's gradients against differences."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trace_kernels.reference import score_anchors as eager
from trace_kernels.score_anchors import SuccessHead, anchor_loss, score_anchors

D, WIDTH = 24, 10


def random_head(
    seed: int = 0, dtype: torch.dtype = torch.float32, d: int = D, width: int = WIDTH
) -> SuccessHead:
    g = torch.Generator().manual_seed(seed)
    norm = 1 + 0.1 * torch.randn(d, generator=g)
    rest = [torch.randn(*shape, generator=g) for shape in ((width, d), (width,), (1, width), (1,))]
    return SuccessHead(*(x.to(dtype) for x in (norm, rest[0] / d**0.5, *rest[1:])))


def of_logit(logit: float) -> SuccessHead:
    """A head that says `logit` whatever it sees."""
    return random_head()._replace(w2=torch.zeros(1, WIDTH), b2=torch.tensor([logit]))


def module(head: SuccessHead) -> nn.Module:
    d, width = len(head.norm), len(head.b1)
    made = nn.Sequential(
        nn.RMSNorm(d, eps=1e-6), nn.Linear(d, width), nn.SiLU(), nn.Linear(width, 1), nn.Sigmoid()
    )
    made = made.to(head.w1.dtype)
    for parameter, value in zip(made.parameters(), head, strict=True):
        parameter.data.copy_(value)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_the_modules(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "CHUNK", 7)
    g = torch.Generator().manual_seed(1)
    hidden = (3 * torch.randn(40, D, generator=g)).to(dtype)
    source = torch.randint(0, 40, (50,), generator=g)
    head = random_head()
    got = score_anchors(hidden, source, head)
    want = module(SuccessHead(*(x.double() for x in head)))(hidden[source].double())[:, 0]
    assert got.value.dtype == torch.float64
    assert got.gains.shape == (50, 0)
    torch.testing.assert_close(got.value, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.value, score_anchors(hidden, source, head).value)


def rising(a: Fraction, m: int) -> Fraction:
    return math.prod((a + j for j in range(m)), start=Fraction(1))


def alike(chance: Fraction, m: int, kappa: float, observed: int = 0) -> Fraction:
    """P(m trials all succeed) after `observed` successes; the definition of algorithm.md, section 4."""
    if math.isinf(kappa):
        return chance**m
    k = Fraction(kappa)
    return rising(chance * k + observed, m) / rising(k + observed, m)


@pytest.mark.parametrize("kappa", [math.inf, 20.0, 0.01])
@pytest.mark.parametrize("logit", [0.0, 0.7, -3.0, 12.5, -30.0, 40.0, -100.0, 100.0])
def test_gains_keep_their_digits(logit: float, kappa: float) -> None:
    """v and 1 - v of this logit exactly, then exact fractions: at 40, v itself is 1 in float64."""
    logit = float(np.float32(logit))
    e = Fraction(math.exp(-abs(logit)))
    v, fail = (1 / (1 + e), e / (1 + e)) if logit >= 0 else (e / (1 + e), 1 / (1 + e))
    hidden, source, counts = torch.ones(1, D), torch.zeros(1, dtype=torch.int64), 65
    root = score_anchors(hidden, source, of_logit(logit), max_count=counts, kappa=kappa)
    assert_near(float(root.value), v)
    total = Fraction(0)
    for m in (1, 2, 3, 17, 64):
        contrast = [1 - alike(v, n, kappa) - alike(fail, n, kappa) for n in (m, m + 1)]
        assert_near(float(root.gains[0, m]), contrast[1] - contrast[0])
        total = contrast[0]
        assert_near(float(root.gains[0, :m].sum()), total)
    assert root.gains[0, 0] == 0.0
    for reward, q in ((1, v), (0, fail)):
        prefix = score_anchors(
            hidden, source, of_logit(logit), stage="prefix", rewards=torch.tensor([reward]),
            max_count=counts, kappa=kappa,
        )  # fmt: skip
        for k in (0, 1, 2, 17, 64):
            assert_near(
                float(prefix.gains[0, k]), alike(q, k, kappa, observed=1) - alike(q, k + 1, kappa, observed=1)
            )


def assert_near(got: float, want: Fraction) -> None:
    # Below 1e-290 doubles lose digits of their own; nothing there can matter to an allocation.
    assert abs(Fraction(got) - want) <= Fraction(1, 10**9) * abs(want) + Fraction(1, 10**290)


@pytest.mark.parametrize("logit", [-math.inf, math.inf, -1e30, 1e30])
def test_certainty_gains_nothing_and_is_no_nan(logit: float) -> None:
    hidden, source = torch.ones(1, D), torch.zeros(1, dtype=torch.int64)
    for kappa in (math.inf, 5.0):
        assert not score_anchors(hidden, source, of_logit(logit), max_count=65, kappa=kappa).gains.any()
        for reward in (0, 1):
            got = score_anchors(
                hidden, source, of_logit(logit), stage="prefix", rewards=torch.tensor([reward]),
                max_count=65, kappa=kappa,
            )  # fmt: skip
            assert got.gains.isfinite().all()
            assert got.gains[0, 0] == (float((logit > 0) != reward) / (1 + 1 / kappa))


def test_gradients_are_the_heads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "CHUNK", 4)
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(9, 6, generator=g, dtype=torch.float64, requires_grad=True)
    source = torch.randint(0, 9, (11,), generator=g)
    target, weight = torch.rand(2, 11, generator=g, dtype=torch.float64)
    head = [x.requires_grad_() for x in random_head(3, torch.float64, d=6, width=5)]

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return anchor_loss(hidden, source, SuccessHead(*tensors), target, weight)

    assert torch.autograd.gradcheck(loss, head)
    value = loss(*head)
    value.backward()
    assert hidden.grad is None
    made = module(SuccessHead(*(x.detach() for x in head)))
    plain = (weight * (made(hidden.detach()[source])[:, 0] - target).square()).mean()
    plain.backward()
    torch.testing.assert_close(value, plain)
    for mine, parameter in zip(head, made.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, parameter.grad)


def test_no_anchor_is_no_score() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    got = score_anchors(torch.zeros(0, D), nothing, random_head(), max_count=3)
    assert got.value.shape == (0,)
    assert got.gains.shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, D, dtype=torch.int64)}, r"hidden: expected floats \[T, d\]"),
        ({"anchor_src": torch.zeros(3)}, r"anchor_src: expected int64 \[A\], got torch.float32 \[3\]"),
        ({"anchor_src": torch.tensor([0, 4])}, r"anchor_src: 0\.\.4 outside the 4 rows"),
        ({"hidden": torch.zeros(4, D + 1)}, rf"head.norm: expected \[{D + 1}\], got \[{D}\]"),
        ({"stage": "leaf"}, "stage: expected 'root' or 'prefix', got 'leaf'"),
        ({"stage": "prefix"}, "rewards: needed"),
        ({"rewards": torch.ones(2)}, "rewards: needed for the gains of prefixes"),
        (
            {"stage": "prefix", "rewards": torch.ones(3)},
            r"rewards: expected one per anchor, \[2\], got \[3\]",
        ),
        ({"stage": "prefix", "rewards": torch.tensor([0.3, 1.0])}, "outcomes 0 and 1"),
        ({"max_count": -1}, "max_count: expected 0 or more, got -1"),
        ({"kappa": 0.0}, "kappa: expected a number above 0"),
        ({"anchor_src": torch.zeros(2, dtype=torch.int64, device="meta")}, "anchor_src: .* cpu, got meta"),
        ({"stage": "prefix", "rewards": torch.ones(2, device="meta")}, "rewards: .* device cpu, got meta"),
        ({"stage": "prefix", "rewards": torch.ones(2).cfloat()}, "rewards: .* got torch.complex64"),
        ({"head": random_head()._replace(b1=torch.zeros(WIDTH).long())}, "head.b1: expected floats, got"),
        (
            {"head": random_head()._replace(b1=torch.zeros(WIDTH, 1))},
            r"head.b1: expected \[10\], got \[10, 1\]",
        ),
        ({"head": random_head()._replace(w2=torch.zeros(1, WIDTH, device="meta"))}, "head.w2: .* got meta"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {
        "hidden": torch.zeros(4, D), "anchor_src": torch.tensor([0, 3]), "head": random_head(), "max_count": 2,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        score_anchors(**(call | change))


def test_the_loss_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="target and weight: expected one per anchor"):
        anchor_loss(torch.zeros(4, D), torch.tensor([0]), random_head(), torch.zeros(2), torch.zeros(1))


@pytest.mark.parametrize("name", ["target", "weight"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(1).long(), "expected floats, got"),
        (torch.zeros(1, device="meta"), "device cpu, got meta"),
    ],
)
def test_the_loss_names_the_argument_of_another_type_or_device(
    name: str, wrong: torch.Tensor, message: str
) -> None:
    call = {"target": torch.zeros(1), "weight": torch.zeros(1), name: wrong}
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        anchor_loss(torch.zeros(4, D), torch.tensor([0]), random_head(), **call)


def test_autocast_changes_no_value_and_no_gradient() -> None:
    g = torch.Generator().manual_seed(4)
    hidden, source = torch.randn(9, D, generator=g), torch.arange(9)
    target, weight = torch.rand(2, 9, generator=g)
    results = []
    for enabled in (False, True):
        head = SuccessHead(*(x.requires_grad_() for x in random_head()))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = score_anchors(hidden, source, head).value
            loss = anchor_loss(hidden, source, head, target, weight)
            loss.backward()
        results.append((value, loss.detach(), *(x.grad for x in head)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
