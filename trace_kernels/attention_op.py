"""`trace_kernels::tree_attention`, the op that autograd and torch.compile see.

Its arguments are tensors and numbers alone, so a compiled graph serves every layout: what a backend derives from a
layout is rebuilt from `chains` inside the op, once per layout (see `memo`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .layout import TreeLayout
from .memo import once_per_layout
from .scoring import Scoring

# Modules with `forward` and `backward` of the signatures in `Program`, imported when first used.
PROGRAMS = {"segments": ".backends.segments", "triton": ".backends.triton"}


class Geometry(NamedTuple):
    """A layout as the op carries it; see `TreeLayout` for the fields."""

    subtree_end: torch.Tensor
    depth: torch.Tensor
    chains: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.subtree_end.shape[0]

    @property
    def num_padding(self) -> int:
        return self.num_tokens - int(self.chains[-1, 1])


class Program(NamedTuple):
    """One way to compute the op.

    forward(q [T, H, D], k, v [T, Hk, D], sinks [H] | None, geometry, scoring)
        -> (out [T, H, D], rest [T, H, D], lse [H, T]); lse in at least fp32 and with the sinks. For half types
        `rest` is what rounding took from out, else it is empty: the backward subtracts rowsum(dO * O) from
        dO V^T, which cancels where a row sees few keys: a bf16 O alone costs 1 % of RMS error in dQ and dK.
    backward(grad_out [T, H, D], grad_lse [H, T] | None, q, k, v, sinks, out, rest, lse, geometry, scoring)
        -> (dq, dk, dv, dsinks | None) in the dtypes of q, k, v and sinks.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]


def _program(name: str) -> Program:
    module = importlib.import_module(PROGRAMS[name], __package__)
    return Program(module.forward, module.backward)


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    scoring: Scoring,
    sinks: torch.Tensor | None,
    program: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, D], lse [H, T]) on q [T, H, D] and k, v [T, Hk, D]; differentiable in q, k, v and sinks."""
    if layout.device != q.device:
        layout = once_per_layout(layout.chains, ("layout", q.device), lambda: layout.to(q.device))
    out, _, lse = _forward(
        q, k, v, sinks, layout.subtree_end, layout.depth, layout.chains,
        scoring.scale, scoring.window, scoring.softcap, program,
    )  # fmt: skip
    return out, lse


@torch.library.custom_op("trace_kernels::tree_attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    subtree_end: torch.Tensor,
    depth: torch.Tensor,
    chains: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    program: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    geometry, scoring = Geometry(subtree_end, depth, chains), Scoring(scale, window, softcap)
    return _program(program).forward(q, k, v, sinks, geometry, scoring)


@_forward.register_fake
def _(q, k, v, sinks, subtree_end, depth, chains, scale, window, softcap, program):  # type: ignore[no-untyped-def]
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=wide)
    return q.new_empty(q.shape), q.new_empty(q.shape if q.dtype != wide else (0,)), lse


@torch.library.custom_op("trace_kernels::tree_attention_backward", mutates_args=())
def _backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    rest: torch.Tensor,
    lse: torch.Tensor,
    subtree_end: torch.Tensor,
    depth: torch.Tensor,
    chains: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    program: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    geometry, scoring = Geometry(subtree_end, depth, chains), Scoring(scale, window, softcap)
    dq, dk, dv, dsinks = _program(program).backward(
        grad_out, grad_lse, q, k, v, sinks, out, rest, lse, geometry, scoring
    )
    return dq, dk, dv, lse.new_empty(0) if dsinks is None else dsinks


@_backward.register_fake
def _(grad_out, grad_lse, q, k, v, sinks, out, rest, lse, *geometry_and_scoring):  # type: ignore[no-untyped-def]
    dsinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, sinks, subtree_end, depth, chains, *numbers = inputs
    out, rest, lse = output
    ctx.mark_non_differentiable(rest)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, sinks, out, rest, lse, subtree_end, depth, chains)
    ctx.numbers = numbers


def _differentiate(ctx: Any, grad_out: torch.Tensor | None, _: None, grad_lse: torch.Tensor | None) -> Any:
    q, k, v, sinks, out, rest, lse, *geometry = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(q)
    dq, dk, dv, dsinks = _backward(
        grad_out, grad_lse, q, k, v, sinks, out, rest, lse, *geometry, *ctx.numbers
    )
    return dq, dk, dv, None if sinks is None else dsinks, *[None] * 7


_forward.register_autograd(_differentiate, setup_context=_setup_context)
