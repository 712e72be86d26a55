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
        ({"hidden": torch.zeros(4, 0)}, r"hidden: expected floats \[T, d\], d at least 1, got .* \[4, 0\]"),
        ({"stage": "leaf"}, "stage: expected 'root' or 'prefix', got 'leaf'"),
        ({"stage": "prefix"}, "rewards: needed"),
        ({"rewards": torch.ones(2)}, "rewards: needed for the gains of prefixes"),
        (
            {"stage": "prefix", "rewards": torch.ones(3)},
            r"rewards: expected one per anchor, \[2\], got \[3\]",
        ),
        ({"stage": "prefix", "rewards": torch.tensor([0.3, 1.0])}, "outcomes 0 and 1"),
        ({"stage": "prefix", "rewards": torch.tensor([math.nan, 1.0])}, "outcomes 0 and 1"),
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


@pytest.mark.parametrize("name", ["hidden", "anchor_src", "rewards", "head", "head.w1", "target", "weight"])
def test_what_is_no_tensor_is_named(name: str) -> None:
    head = random_head()
    call: dict[str, Any] = {"hidden": torch.zeros(4, D), "anchor_src": torch.tensor([0]), "head": head}
    op: Any = score_anchors
    if name in ("target", "weight"):
        op = anchor_loss
        call |= {"target": torch.zeros(1), "weight": torch.zeros(1)}
    if name == "rewards":
        call |= {"stage": "prefix", "max_count": 1}
    wrong: Any = [1.0]
    if name.startswith("head"):
        wrong = tuple(head) if name == "head" else head._replace(w1=[1.0])  # type: ignore[arg-type]
    call[name.partition(".")[0]] = wrong
    with pytest.raises(TypeError, match=f"{name}: expected a (tensor|SuccessHead), got (list|tuple)"):
        op(**call)


@pytest.mark.parametrize("stage", ["root", "prefix"])
def test_errors_stay_below_1e_6_from_end_to_end(stage: Any) -> None:
    """At the size and with the weights of a fresh module; what the gains multiply is the logit's error."""
    d, width = 4096, 256
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(256, d, generator=g).bfloat16()
    shapes = ((width, d), (width,), (1, width), (1,))
    rest = ((2 * torch.rand(shape, generator=g) - 1) / shape[-1] ** 0.5 for shape in shapes)
    head, source = SuccessHead(torch.ones(d), *rest), torch.arange(256)
    rewards = source % 2 if stage == "prefix" else None
    got, want = (
        score_anchors(hidden, source, used, stage=stage, rewards=rewards, max_count=17, kappa=20.0)
        for used in (head, SuccessHead(*(x.double() for x in head)))
    )
    torch.testing.assert_close(got.value, want.value, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(got.gains, want.gains, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("scale", [1e25, 1e18, 1e-3, 1e-30])
def test_rows_of_any_size_keep_their_values(scale: float) -> None:
    hidden = scale * torch.randn(3, D, generator=torch.Generator().manual_seed(6))
    head, source = random_head(), torch.arange(3)
    want = module(SuccessHead(*(x.double() for x in head)))(hidden.double())[:, 0]
    torch.testing.assert_close(score_anchors(hidden, source, head).value, want, rtol=1e-6, atol=0.0)


def test_scores_compile_into_one_graph() -> None:
    hidden, head = torch.randn(5, D, generator=torch.Generator().manual_seed(7)), random_head()

    def call(source: torch.Tensor, rewards: torch.Tensor) -> Any:
        return score_anchors(hidden, source, head, stage="prefix", rewards=rewards, max_count=3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    source, rewards = torch.tensor([4, 0, 4]), torch.tensor([0, 1, 1])
    got, want = compiled(source, rewards), call(source, rewards)
    assert torch.equal(got.value, want.value)
    assert torch.equal(got.gains, want.gains)
    with pytest.raises(ValueError, match=r"anchor_src: 0\.\.5 outside the 5 rows"):
        compiled(source + source // 4, rewards)


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
