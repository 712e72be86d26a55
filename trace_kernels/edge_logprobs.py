"""Log-probs and entropies of loss edges straight from hidden states and the output weight, without logits.

An edge `(source, label)` asks for the log-prob of token `label` given the hidden state at packed position
`source`. At a branch point one source has several edges; its gradient is their sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

# Default size of the one [edges, V] fp32 tile that is alive at a time: 2^25 elements are 128 MiB.
TILE_ELEMENTS = 1 << 25
# Rows of the output weight widened to fp32 at a time where the matmul cannot accumulate half types in fp32.
VOCAB_TILE = 8192


def _widen_ranges(weight: torch.Tensor) -> list[slice]:
    step = weight.shape[0] if weight.dtype == torch.float32 else VOCAB_TILE
    return [slice(v, min(v + step, weight.shape[0])) for v in range(0, weight.shape[0], step)]


def _logits(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """fp32 [e, V] logits over the temperature, never rounded to a half type."""
    if rows.is_cuda and rows.dtype == weight.dtype and rows.dtype != torch.float32:
        logits = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:
        logits = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        wide = rows.float()
        for part in _widen_ranges(weight):
            torch.mm(wide, weight[part].float().t(), out=logits[:, part])
    if bias is not None:
        logits += bias
    return logits.div_(temperature)


class _EdgeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        edge_src: torch.Tensor,
        labels: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        edges = labels.shape[0]
        logprob = hidden.new_empty(edges, dtype=torch.float32)
        lse = torch.empty_like(logprob)
        entropy = torch.zeros_like(logprob)
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, edges, chunk):
                part = slice(first, first + chunk)
                logits = _logits(hidden[edge_src[part]], weight, bias, temperature)
                lse[part] = logits.logsumexp(-1)
                logits -= lse[part, None]
                logprob[part] = logits.gather(1, labels[part, None]).squeeze(1)
                if with_entropy:
                    entropy[part] = -logits.exp().mul_(logits).sum(-1)
        # The Parameter itself is saved: under ZeRO-3 its storage comes and goes with the module's hooks,
        # and a view or copy taken here would be stale or would keep the full weight alive.
        ctx.save_for_backward(hidden, weight, bias, edge_src, labels, lse, entropy)
        ctx.temperature, ctx.with_entropy, ctx.chunk = temperature, with_entropy, chunk
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, edge_src, labels, lse, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy = (g.float() for g in grads)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        need_bias = bias is not None and ctx.needs_input_grad[2]
        d_hidden = _zeros(hidden.shape, hidden) if need_hidden else None
        d_weight = _zeros(weight.shape, weight) if need_weight else None
        d_bias = _zeros(weight.shape[:1], weight) if need_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, labels.shape[0], ctx.chunk):
                part = slice(first, first + ctx.chunk)
                source = edge_src[part]
                rows = hidden[source]
                logprobs = _logits(rows, weight, bias, ctx.temperature).sub_(lse[part, None])
                probs = logprobs.exp()
                if ctx.with_entropy:
                    # d/dz [g logp(label) + h H] = g (onehot - p) - h p (log p + H)
                    factor = logprobs.add_(entropy[part, None]).mul_(grad_entropy[part, None])
                    d_logits = probs.mul_(factor.add_(grad_logprob[part, None])).neg_()
                else:
                    d_logits = probs.mul_(-grad_logprob[part, None])
                d_logits.scatter_add_(1, labels[part, None], grad_logprob[part, None])
                d_logits.div_(ctx.temperature)
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
                wide = rows.float() if d_weight is not None else rows
                d_rows = _zeros(rows.shape, rows)
                for v in _widen_ranges(weight):
                    if d_hidden is not None:
                        d_rows.addmm_(d_logits[:, v], weight[v].float())
                    if d_weight is not None:
                        d_weight[v].addmm_(d_logits[:, v].t(), wide)
                if d_hidden is not None:
                    _add_rows(d_hidden, source, d_rows)
        return (
            d_hidden.to(hidden.dtype) if d_hidden is not None else None,
            d_weight.to(weight.dtype) if d_weight is not None else None,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            *(None,) * 5,
        )


def _zeros(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def _add_rows(total: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    # index_add_ uses atomics on accelerators, index_put_ sorts: the same sum on every run.
    if total.device.type == "cpu":
        total.index_add_(0, index, rows)
    else:
        total.index_put_((index,), rows, accumulate=True)


def edge_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    edge_src: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    entropy: bool = True,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log softmax((hidden[edge_src] @ weight.T + bias) / temperature)` at `labels`, and its entropy.

    Never holds more than one [chunk, V] tile (the backward recomputes it, and needs a second one).

    Args:
        hidden: [T, d], floating point.
        weight: [V, d], the output embedding; its dtype may differ from hidden's.
        edge_src: [E] int64, rows of `hidden`, repeats allowed.
        labels: [E] int64 in [0, V).
        temperature: > 0, inside the softmax.
        bias: [V] or None.
        entropy: False leaves the second result zero, without gradient, and saves its work.
        chunk: edges per tile; default so that a tile holds about 2^25 elements.

    Returns:
        (logprob [E], entropy [E]), fp32, both differentiable in hidden, weight and bias. E = 0 is allowed.

    Raises:
        ValueError: shapes, dtypes, devices or indices that do not fit; the message names the argument.
            (Indices are checked on the CPU only: elsewhere the check would stall the device.)
    """
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(f"hidden: expected floating point [T, d], got {hidden.dtype} {list(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight: expected [V, {hidden.shape[1]}] as hidden, got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
    for name, index, bound in (("edge_src", edge_src, hidden.shape[0]), ("labels", labels, weight.shape[0])):
        if index.ndim != 1 or index.dtype != torch.int64:
            raise ValueError(f"{name}: expected int64 [E], got {index.dtype} {list(index.shape)}")
        if index.device.type == "cpu" and index.numel():
            low, high = (int(x) for x in index.aminmax())
            if low < 0 or high >= bound:
                raise ValueError(f"{name}: values {low}..{high} outside [0, {bound})")
    if edge_src.shape != labels.shape:
        raise ValueError(f"labels: expected {edge_src.shape[0]} entries like edge_src, got {labels.shape[0]}")
    for name, tensor in (("weight", weight), ("edge_src", edge_src), ("labels", labels), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: expected hidden's device {hidden.device}, got {tensor.device}")
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
    rows = chunk or max(1, TILE_ELEMENTS // max(1, weight.shape[0]))
    return _EdgeLogprobs.apply(hidden, weight, bias, edge_src, labels, float(temperature), entropy, rows)


class EdgeLogprobHead(nn.Linear):
    """A language model's output layer that answers with edge log-probs when it is given labels.

    The op runs inside the module's own forward, so hooks that gather a partitioned weight (ZeRO-3) see it.
    """

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        edge_src: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = True,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Without `edge_src` and `labels`: the logits of `hidden [..., d]`, like any linear layer. With both:
        `edge_logprobs` of `hidden [T, d]` or `[1, T, d]`."""
        if (edge_src is None) != (labels is None):
            raise ValueError("edge_src and labels: give both, or neither for logits")
        if edge_src is None or labels is None:
            return super().forward(hidden)
        if hidden.ndim == 3 and hidden.shape[0] == 1:
            hidden = hidden[0]
        return edge_logprobs(
            hidden, self.weight, edge_src, labels, temperature=temperature, bias=self.bias, entropy=entropy
        )

    @classmethod
    def adopt(cls, linear: nn.Linear) -> EdgeLogprobHead:
        """Turns an existing `nn.Linear` into this class in place and returns it.

        The module object and its parameters stay the same ones, so tied weights, optimisers and hooks keep
        working. TypeError for any other class (a quantised or adapter-wrapped layer computes something else).
        """
        if isinstance(linear, cls):
            return linear
        if type(linear) is not nn.Linear:
            raise TypeError(f"linear: expected exactly torch.nn.Linear, got {type(linear).__name__}")
        linear.__class__ = cls
        return linear  # type: ignore[return-value]
