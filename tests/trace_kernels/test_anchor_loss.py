"""The loss of the head's training against plain autograd in float64: types, scales, memory, repeats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear, rms_norm, silu
from torch.utils._python_dispatch import TorchDispatchMode

from trace_kernels.reference import score_anchors as eager
from trace_kernels.score_anchors import SuccessHead, anchor_loss

D, WIDTH = 24, 10
Call = tuple[torch.Tensor, torch.Tensor, SuccessHead, torch.Tensor, torch.Tensor]


def make(anchors: int = 11, dtype: torch.dtype = torch.float32, d: int = D, width: int = WIDTH) -> Call:
    g = torch.Generator().manual_seed(anchors)
    hidden = torch.randn(9, d, generator=g)
    source = torch.randint(0, 9, (anchors,), generator=g)
    shapes = ((d,), (width, d), (width,), (1, width), (1,))
    tensors = (torch.randn(shape, generator=g) / shape[-1] ** 0.5 for shape in shapes)
    head = SuccessHead(*(x.to(dtype).requires_grad_() for x in tensors))
    return hidden, source, head, *torch.rand(2, anchors, generator=g)


def plain(hidden: torch.Tensor, source: torch.Tensor, head: SuccessHead, *rest: torch.Tensor) -> torch.Tensor:
    target, weight = rest
    h = rms_norm(hidden[source], (hidden.shape[1],), head.norm, 1e-6)
    v = torch.sigmoid(linear(silu(linear(h, head.w1, head.b1)), head.w2, head.b2)[:, 0])
    return (weight * (v - target).square()).mean()


def exact(call: Call) -> list[torch.Tensor]:
    """The loss and the five gradients in float64."""
    hidden, source, head, target, weight = call
    wide = SuccessHead(*(x.detach().double().requires_grad_() for x in head))
    value = plain(hidden.double(), source, wide, target.double(), weight.double())
    return [value.detach(), *torch.autograd.grad(value, list(wide))]


def sizes(call: Call) -> list[torch.Tensor]:
    """The norms of what is summed over anchors, in fp32 at best: a sum that cancels keeps their rounding."""
    hidden, source, head, target, weight = call
    parts = [
        [x.norm() for x in exact((hidden, source[i : i + 1], head, target[i : i + 1], weight[i : i + 1]))]
        for i in range(len(source))
    ]
    return [torch.stack(x).mean() for x in zip(*parts, strict=True)]


@settings(max_examples=12, deadline=None)
@given(anchors=st.integers(1, 40), chunk=st.integers(1, 50))
def test_loss_and_gradients_are_those_of_plain_autograd(anchors: int, chunk: int) -> None:
    call = make(anchors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "CHUNK", chunk)
        value = anchor_loss(*call)
        grads = torch.autograd.grad(value, list(call[2]))
        without = anchor_loss(call[0], call[1], SuccessHead(*(x.detach() for x in call[2])), *call[3:])
    torch.testing.assert_close(without, value.detach(), rtol=1e-6, atol=0.0)
    for got, want, size in zip((value.detach(), *grads), exact(call), sizes(call), strict=True):
        assert (got.double() - want).norm() <= 1e-6 * size


@pytest.mark.parametrize("weight", [1.0, 1e-5])
@pytest.mark.parametrize("scale", [1024.0, 2.0**16])
def test_an_fp16_head_trains_under_a_loss_scaler(weight: float, scale: float) -> None:
    """2^16 is no fp16 number, and gradients rounded to fp16 before they are scaled keep no digits."""
    hidden, source, head, target, _ = make(dtype=torch.float16)
    call = (hidden, source, head, target, torch.full_like(target, weight))
    (anchor_loss(*call) * scale).backward()
    for x, want in zip(head, exact(call)[1:], strict=True):
        assert x.grad is not None
        assert x.grad.dtype == torch.float16
        # One rounding, to what fp16 can hold.
        torch.testing.assert_close(x.grad, (want * scale).half(), rtol=1e-3, atol=2.0**-24)


def test_a_float64_target_does_not_widen_the_loss() -> None:
    hidden, source, head, target, weight = make()
    assert anchor_loss(hidden, source, head, target.double(), weight).dtype == torch.float32
    assert anchor_loss(hidden, source, head, target, weight.bfloat16()).dtype == torch.float32


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    hidden, source, head, target, weight = make()
    for frozen in (head.norm, head.w1):
        frozen.requires_grad_(False)
    anchor_loss(hidden, source, head, target, weight).backward()
    assert [x.grad is not None for x in head] == [False, False, True, True, True]
    alone = SuccessHead(*(x.detach() for x in head))
    assert not anchor_loss(
        hidden.requires_grad_(), source, alone, target.requires_grad_(), weight
    ).requires_grad


def test_repeats_are_the_same_to_the_bit() -> None:
    call = make(40)
    first, second = (torch.autograd.grad(anchor_loss(*call), list(call[2])) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_graph_of_the_gradients_is_refused() -> None:
    call = make()
    with pytest.raises(RuntimeError, match="anchor_loss is differentiable once"):
        torch.autograd.grad(anchor_loss(*call), list(call[2]), create_graph=True)


def test_memory_does_not_grow_with_the_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "CHUNK", 8)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.numel = max(self.numel, out.numel())
            return out

    hidden, source, head, target, weight = make(1000)
    head = SuccessHead(*(x.detach() for x in head))
    with Largest() as largest:
        eager.loss_and_gradients(hidden, source, head, target, weight)
    assert largest.numel <= max(1000, 8 * D, WIDTH * D)


def test_it_compiles_into_one_graph() -> None:
    call = make()
    hidden, source, head, target, weight = call
    compiled = torch.compile(
        lambda *x: anchor_loss(hidden, source, SuccessHead(*x), target, weight),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    results = [(f, *torch.autograd.grad(f, list(head))) for f in (compiled(*head), anchor_loss(*call))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    source[3] = 9
    with pytest.raises(ValueError, match=r"anchor_src: .*\.\.9 outside the 9 rows"):
        compiled(*head)


def test_the_ops_registrations_hold() -> None:
    hidden, source, head, target, weight = make()
    ops = torch.ops.trace_kernels
    torch.library.opcheck(ops.anchor_loss.default, (hidden, source, target, weight, *head, True))
    alone = tuple(x.detach() for x in head)
    torch.library.opcheck(ops.anchor_loss.default, (hidden, source, target, weight, *alone, False))
    torch.library.opcheck(
        ops.score_anchors.default, (hidden, source, *alone, "prefix", (target > 0.5).float(), 3, 0.1)
    )
