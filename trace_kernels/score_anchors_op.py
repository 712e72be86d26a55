"""`trace_kernels::score_anchors` and `trace_kernels::anchor_loss`, the ops that autograd and torch.compile see.

Indices and outcomes are checked inside: a compiled graph knows them only when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import interpreter
from .reference import score_anchors as eager
from .reference.score_anchors import SuccessHead


@torch.library.custom_op("trace_kernels::score_anchors", mutates_args=())
def scores(
    hidden: Tensor,
    anchor_src: Tensor,
    norm: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    stage: str,
    rewards: Tensor | None,
    max_count: int,
    rho: float,
) -> tuple[Tensor, Tensor]:
    """(value [A], gains [A, max_count]), float64; rho is 1 / kappa. ValueError: an index or reward out of range."""
    _check_values(len(hidden), anchor_src, rewards)
    head = SuccessHead(norm, w1, b1, w2, b2)
    # The program computes the first layer in fp32.
    if w1.dtype != torch.float64 and (hidden.is_cuda or interpreter.is_on()):
        from .backends import anchors

        outcome = None if rewards is None else rewards.long()
        _, value, gains = anchors.scores(hidden, anchor_src, head, stage, outcome, max_count, rho)
        return value, gains
    v, fail = eager.success(eager.logits(hidden, anchor_src, head))
    if rewards is None:
        return v, eager.root_gains(v, fail, max_count, rho)
    return v, eager.prefix_gains(v, fail, rewards, max_count, rho)


@scores.register_fake
def _(hidden, anchor_src, norm, w1, b1, w2, b2, stage, rewards, max_count, rho):  # type: ignore[no-untyped-def]
    anchors = anchor_src.shape[0]
    value = hidden.new_empty(anchors, dtype=torch.float64)
    return value, value.new_empty((max_count, anchors)).t()


@torch.library.custom_op("trace_kernels::anchor_loss", mutates_args=())
def loss(
    hidden: Tensor,
    anchor_src: Tensor,
    target: Tensor,
    weight: Tensor,
    norm: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, and its gradients if asked for (else empty), all in w1's type, at least fp32.

    The gradients are made here: a loss is one number, so the backward is a multiplication by another.
    """
    _check_values(len(hidden), anchor_src, None)
    head = SuccessHead(norm, w1, b1, w2, b2)
    if gradients:
        value, parts = eager.loss_and_gradients(hidden, anchor_src, head, target, weight)
        return value, *parts
    value = eager.loss(hidden, anchor_src, head, target, weight)
    return value, *(value.new_empty(0) for _ in range(5))  # type: ignore[return-value]


@loss.register_fake
def _(hidden, anchor_src, target, weight, norm, w1, b1, w2, b2, gradients):  # type: ignore[no-untyped-def]
    wide = torch.promote_types(w1.dtype, torch.float32)
    parts = (w1.new_empty(x.shape if gradients else (0,), dtype=wide) for x in (norm, w1, b1, w2, b2))
    return w1.new_empty((), dtype=wide), *parts


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    parts = output[1:]
    ctx.mark_non_differentiable(*parts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*parts)
    ctx.dtypes = [x.dtype for x in inputs[4:9]]


def _differentiate(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    if grad is None:
        return (None,) * 10
    if torch.is_grad_enabled():
        raise RuntimeError("anchor_loss is differentiable once: call backward or grad without create_graph")
    # Multiplied before it is narrowed: what a loss scaler's factor lifts into fp16's range may not fit before.
    parts = (
        (part * grad).to(dtype) if needed else None
        for part, dtype, needed in zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[4:9], strict=True)
    )
    return None, None, None, None, *parts, None


loss.register_autograd(_differentiate, setup_context=_setup_context)


def _check_values(rows: int, anchor_src: Tensor, rewards: Tensor | None) -> None:
    """Waits for an accelerator once."""
    if not len(anchor_src):
        return
    facts = [*anchor_src.aminmax()]
    if rewards is not None:
        facts.append(((rewards != 0) & (rewards != 1)).any().long())
    low, high, *wrong = torch.stack(facts).tolist()
    if low < 0 or high >= rows:
        raise ValueError(f"anchor_src: {low}..{high} outside the {rows} rows of hidden")
    if any(wrong):
        raise ValueError("rewards: the contrast is defined for outcomes 0 and 1, threshold yours first")
