"""`trace_kernels::edge_logprobs`, the op that autograd and torch.compile see.

Lengths are data: edges are grouped inside the op, so that a compiled graph serves every number of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .edges import Edges, packed_width

# Modules with `forward` and `backward` of the signatures in `EdgeProgram`, imported when first used.
PROGRAMS = {"eager": ".backends.edge_eager", "triton": ".backends.edge_triton"}


class Logits(NamedTuple):
    """How logits are made of z = hidden W^T + bias: z / temperature, or softcap tanh(z / softcap) / temperature."""

    temperature: float
    softcap: float | None

    @property
    def inner(self) -> float:
        """What z is multiplied by first."""
        return 1.0 / (self.temperature if self.softcap is None else self.softcap)

    @property
    def outer(self) -> float:
        """What the tanh of it is multiplied by; meant for logits with a softcap."""
        return 1.0 if self.softcap is None else self.softcap / self.temperature


class Needs(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class EdgeProgram(NamedTuple):
    """One way to compute the op.

    forward(hidden [T, d], weight [V, d], bias [V] | None, edges, logits, entropy: bool, chunk: int | None)
        -> (label log-probs [P], lse [S], entropy [S]) of the pairs and sources of `edges`, at least fp32.
    backward(grad_pair [P], grad_source [S], grad_entropy [S] | None, lse [S], entropy [S],
             hidden, weight, bias, edges, logits, needs, chunk)
        -> (dhidden [S, d], of the sources' rows, dweight [V, d], dbias [V]), each None unless needed; in at
        least fp32, but dweight in weight's dtype. `grad_source` holds the pairs' sums.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]


def _program(name: str) -> EdgeProgram:
    module = importlib.import_module(PROGRAMS[name], __package__)
    return EdgeProgram(module.forward, module.backward)


def wide_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Of logits, sums and results: fp32, or fp64 where an input has it."""
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edge_src: torch.Tensor,
    labels: torch.Tensor,
    logits: Logits,
    entropy: bool,
    chunk: int | None,
    program: str,
    cast: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob [E], entropy [E]), differentiable in hidden [T, d], weight [V, d] and bias [V].

    `cast`: the type that hidden and weight are multiplied in, None for their own. ValueError: indices out of range.
    """
    logprob, entropies, *_ = _forward(
        hidden, weight, bias, edge_src, labels, *logits, entropy, chunk, program, cast
    )
    return logprob, entropies


@torch.library.custom_op("trace_kernels::edge_logprobs", mutates_args=())
def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edge_src: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    softcap: float | None,
    entropy: bool,
    chunk: int | None,
    program: str,
    cast: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """And what the backward needs: the lse [E] and the packed edges."""
    if not len(labels):
        first, second, third = (hidden.new_zeros(0, dtype=wide_dtype(hidden, weight)) for _ in range(3))
        return first, second, third, labels.new_zeros((len(Edges._fields), packed_width(0))), _no_lengths()
    # Indices are checked here and not in the public function: a compiled graph knows them only when it runs.
    edges = Edges.of(edge_src, labels, hidden.shape[0], weight.shape[0])
    hidden, weight = _cast(hidden, cast), _cast(weight, cast)
    with torch.autocast(hidden.device.type, enabled=False):
        logprob, lse, entropies = _program(program).forward(
            hidden, weight, bias, edges, Logits(temperature, softcap), entropy, chunk
        )
    of_edge = edges.source_of_edge
    return logprob[edges.pair_of_edge], entropies[of_edge], lse[of_edge], *edges.packed()


def _cast(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x if dtype is None else x.to(dtype)


def _no_lengths() -> torch.Tensor:
    return torch.zeros(len(Edges._fields), dtype=torch.int64, device="cpu")


@_forward.register_fake
def _(hidden, weight, bias, edge_src, *rest):  # type: ignore[no-untyped-def]
    numbers = (edge_src.new_empty(edge_src.shape, dtype=wide_dtype(hidden, weight)) for _ in range(3))
    table = edge_src.new_empty((len(Edges._fields), packed_width(edge_src.shape[0])))
    return *numbers, table, _no_lengths()


@torch.library.custom_op("trace_kernels::edge_logprobs_backward", mutates_args=())
def _backward(
    grad_logprob: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lse: torch.Tensor,
    entropies: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    temperature: float,
    softcap: float | None,
    chunk: int | None,
    program: str,
    cast: torch.dtype | None,
    needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    needed = Needs(*needs)
    if not len(lse):
        zeros = [x.new_zeros(x.shape) if x is not None else None for x in (hidden, weight, bias)]
        return _given(*(x if n else None for x, n in zip(zeros, needed, strict=True)), like=lse)
    edges = Edges.unpacked(table, lengths)
    by_edge = torch.zeros_like(lse) if grad_logprob is None else grad_logprob.to(lse.dtype)
    by_source = None if grad_entropy is None else edges.sum_by_source(grad_entropy.to(lse.dtype))
    with torch.autocast(hidden.device.type, enabled=False):
        d_rows, d_weight, d_bias = _program(program).backward(
            edges.sum_by_pair(by_edge), edges.sum_by_source(by_edge), by_source,
            edges.one_per_source(lse), edges.one_per_source(entropies),
            _cast(hidden, cast), _cast(weight, cast), bias, edges, Logits(temperature, softcap), needed, chunk,
        )  # fmt: skip
    d_hidden = None
    if d_rows is not None:
        d_hidden = hidden.new_zeros(hidden.shape).index_copy_(0, edges.sources, d_rows.to(hidden.dtype))
    d_weight = None if d_weight is None else d_weight.to(weight.dtype)
    return _given(
        d_hidden, d_weight, None if d_bias is None or bias is None else d_bias.to(bias.dtype), like=lse
    )


def _given(
    *grads: torch.Tensor | None, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An op returns tensors only: an empty one for each gradient that nobody needs."""
    first, second, third = (like.new_empty(0) if grad is None else grad for grad in grads)
    return first, second, third


@_backward.register_fake
def _(grad_logprob, grad_entropy, hidden, weight, bias, lse, *rest):  # type: ignore[no-untyped-def]
    like, needs = (hidden, weight, bias), rest[-1]
    return tuple(
        x.new_empty(x.shape) if needed else lse.new_empty(0) for x, needed in zip(like, needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    hidden, weight, bias, _, _, temperature, softcap, entropy, chunk, program, cast = inputs
    _, entropies, *saved = output
    ctx.mark_non_differentiable(*(saved if entropy else [*saved, entropies]))
    # An entropy that is only looked at costs its backward nothing.
    ctx.set_materialize_grads(False)
    # The Parameter itself is saved: under ZeRO-3 its storage comes and goes with the module's hooks,
    # and a view or copy taken here would be stale or would keep the full weight alive.
    lse, *edges = saved
    ctx.save_for_backward(hidden, weight, bias, lse, entropies, *edges)
    ctx.numbers = (temperature, softcap, chunk, program, cast)


def _differentiate(
    ctx: Any, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None, *_: None
) -> Any:
    needs = list(ctx.needs_input_grad[:3])
    grads = _backward(grad_logprob, grad_entropy, *ctx.saved_tensors, *ctx.numbers, needs)
    return *(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *[None] * 8


_forward.register_autograd(_differentiate, setup_context=_setup_context)
