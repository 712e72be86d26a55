"""The program against the tensor operations, in sizes that are no multiple of its blocks."""

import math

import pytest
import torch

from trace_kernels.backends.anchors import scores
from trace_kernels.reference import score_anchors as eager
from trace_kernels.reference.score_anchors import SuccessHead
from trace_kernels.score_anchors import anchor_loss, score_anchors


def random_head(d: int, width: int, dtype: torch.dtype, device: torch.device) -> SuccessHead:
    g = torch.Generator().manual_seed(d)
    norm = 1 + 0.1 * torch.randn(d, generator=g)
    rest = [torch.randn(*shape, generator=g) for shape in ((width, d), (width,), (1, width), (1,))]
    return SuccessHead(*(x.to(device, dtype) for x in (norm, rest[0] / d**0.5, *rest[1:])))


@pytest.mark.parametrize(
    ("rows", "d", "width", "anchors", "dtype"),
    [
        (50, 40, 24, 70, torch.float32),
        (9, 130, 150, 5, torch.bfloat16),
        (1, 64, 64, 1, torch.float32),
        (200, 7, 3, 130, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("stage", ["root", "prefix"])
def test_scores(
    rows: int, d: int, width: int, anchors: int, dtype: torch.dtype, stage: str, device: torch.device
) -> None:
    g = torch.Generator().manual_seed(0)
    # Rows of a wider tensor: the stride is not the width. What no anchor points at may be anything.
    hidden = torch.randn(rows + 1, d + 3, generator=g).to(device, dtype)[:, :d]
    hidden[rows] = float("nan")
    source = torch.randint(0, rows, (anchors,), generator=g).to(device)
    rewards = torch.randint(0, 2, (anchors,), generator=g).to(device) if stage == "prefix" else None
    head = random_head(d, width, dtype, device)
    for kappa in (math.inf, 8.0):
        got = score_anchors(hidden, source, head, stage=stage, rewards=rewards, max_count=20, kappa=kappa)
        logit, _, _ = scores(hidden, source, head)
        exact = eager.logits(hidden, source, SuccessHead(*(x.double() for x in head)))
        torch.testing.assert_close(logit, exact, rtol=1e-6, atol=1e-6)
        # The gains are held to float64's digits of the program's own logit.
        v, fail = eager.success(logit)
        want = (
            eager.root_gains(v, fail, 20, 1 / kappa)
            if rewards is None
            else eager.prefix_gains(v, fail, rewards, 20, 1 / kappa)
        )
        torch.testing.assert_close(got.value, v, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(got.gains, want, rtol=1e-12, atol=1e-300)
        again = score_anchors(hidden, source, head, stage=stage, rewards=rewards, max_count=20, kappa=kappa)
        assert torch.equal(got.gains, again.gains)


@pytest.mark.parametrize("logit", [-800.0, -100.0, 0.0, 100.0, 800.0])
def test_far_logits(logit: float, device: torch.device) -> None:
    head = random_head(16, 16, torch.float32, device)
    head = head._replace(w2=torch.zeros_like(head.w2), b2=torch.tensor([logit], device=device))
    hidden, source = torch.ones(1, 16, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    got = score_anchors(hidden, source, head, max_count=65)
    v, fail = eager.success(torch.tensor([logit], device=device))
    torch.testing.assert_close(got.value, v, rtol=1e-12, atol=1e-300)
    torch.testing.assert_close(got.gains, eager.root_gains(v, fail, 65, 0.0), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("stage", ["root", "prefix"])
def test_errors_stay_below_1e_6_from_end_to_end(stage: str, device: torch.device) -> None:
    g = torch.Generator().manual_seed(5)
    d, anchors = 4096, 48
    hidden = torch.randn(anchors, d, generator=g).bfloat16().to(device)
    shapes = ((16, d), (16,), (1, 16), (1,))
    rest = ((2 * torch.rand(shape, generator=g) - 1) / shape[-1] ** 0.5 for shape in shapes)
    head = SuccessHead(torch.ones(d, device=device), *(x.to(device) for x in rest))
    source = torch.arange(anchors, device=device)
    rewards = source % 2 if stage == "prefix" else None
    got = score_anchors(hidden, source, head, stage=stage, rewards=rewards, max_count=17, kappa=20.0)
    v, fail = eager.success(eager.logits(hidden, source, SuccessHead(*(x.double() for x in head))))
    want = (
        eager.root_gains(v, fail, 17, 1 / 20)
        if rewards is None
        else eager.prefix_gains(v, fail, rewards, 17, 1 / 20)
    )
    torch.testing.assert_close(got.value, v, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(got.gains, want, rtol=1e-6, atol=0.0)


def test_huge_and_tiny_rows_keep_their_values(device: torch.device) -> None:
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(6))
    hidden = torch.cat([x, 1e18 * x, 1e25 * x, 1e-3 * x, 1e-30 * x]).to(device)
    head, source = random_head(40, 24, torch.float32, device), torch.arange(5, device=device)
    want = eager.success(eager.logits(hidden, source, SuccessHead(*(x.double() for x in head))))[0]
    torch.testing.assert_close(score_anchors(hidden, source, head).value, want, rtol=1e-6, atol=0.0)


def test_a_float64_head_is_computed_in_float64(device: torch.device) -> None:
    hidden = torch.randn(9, 20, generator=torch.Generator().manual_seed(7)).to(device)
    head, source = random_head(20, 18, torch.float64, device), torch.arange(9, device=device)
    want, _ = eager.success(eager.logits(hidden, source, head))
    torch.testing.assert_close(score_anchors(hidden, source, head).value, want, rtol=1e-12, atol=0.0)


def test_the_loss_is_that_of_the_programs_values(device: torch.device) -> None:
    hidden = torch.randn(12, 20, generator=torch.Generator().manual_seed(1)).to(device)
    source = torch.arange(12, device=device)
    head = SuccessHead(*(x.requires_grad_() for x in random_head(20, 18, torch.float32, device)))
    target, weight = torch.linspace(0, 1, 12, device=device), torch.linspace(1, 2, 12, device=device)
    loss = anchor_loss(hidden, source, head, target, weight)
    v = score_anchors(hidden, source, head).value
    torch.testing.assert_close(loss, (weight * (v - target).square()).mean().float())
    loss.backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in head)


def test_indices_and_rewards_are_checked_before_a_launch(device: torch.device) -> None:
    hidden, head = torch.ones(4, 20, device=device), random_head(20, 18, torch.float32, device)
    far, near = (torch.tensor(x, device=device) for x in ([0, 4], [0, 3]))
    with pytest.raises(ValueError, match=r"anchor_src: 0\.\.4 outside the 4 rows"):
        score_anchors(hidden, far, head)
    for wrong in ([0.7, 1.0], [float("nan"), 1.0], [2.0, 0.0]):
        rewards = torch.tensor(wrong, device=device)
        with pytest.raises(ValueError, match=r"rewards: .* outcomes 0 and 1"):
            score_anchors(hidden, near, head, stage="prefix", rewards=rewards, max_count=2)
    target = torch.zeros(2, device=device)
    with pytest.raises(ValueError, match=r"anchor_src: 0\.\.4 outside the 4 rows"):
        anchor_loss(hidden, far, head, target, target)


def test_anchors_and_rewards_of_any_stride(device: torch.device) -> None:
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, 20, generator=g).to(device)
    head = random_head(20, 18, torch.float32, device)
    table = torch.randint(0, 2, (70, 2), generator=g).to(device)
    table[:, 0] = torch.randint(0, 11, (70,), generator=g)
    source, rewards = table.unbind(1)
    assert source.stride() == rewards.stride() == (2,)
    got = score_anchors(hidden, source, head, stage="prefix", rewards=rewards, max_count=4)
    packed = source.clone(memory_format=torch.contiguous_format), rewards.clone()
    assert packed[0].is_contiguous()
    want = score_anchors(hidden, packed[0], head, stage="prefix", rewards=packed[1], max_count=4)
    assert torch.equal(got.value, want.value)
    assert torch.equal(got.gains, want.gains)
    v, fail = eager.success(eager.logits(hidden, source, head))
    torch.testing.assert_close(got.gains, eager.prefix_gains(v, fail, rewards, 4, 0.0), rtol=1e-4, atol=1e-6)
