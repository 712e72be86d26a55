"""Edge log-probs in PyTorch: one tile of [sources, vocabulary] logits at a time, kept in the processor's cache.

The vocabulary is the outer loop: a range of the weight is widened once, and its gradient is finished, in fp32,
before the next range. Log-sum-exps and entropies are carried over the ranges by the online softmax (Milakov and
Gimelshein, 2018): with m the largest logit so far, s = sum exp(z - m) and u = sum exp(z - m) (z - m), the entropy
is log s - u / s. All buffers are made once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..edge_logprobs_op import Logits, Needs, wide_dtype
from ..edges import Edges

# Logits of one tile, and the most sources in it: 16 MiB in fp32 stay in a processor's last cache.
CPU_TILE, CPU_SOURCES = 1 << 22, 1024
# On accelerators: at most so many logits exist at a time, here in fp32 twice (three times under a softcap whose
# entropies have gradients), with triton once in the inputs' type.
TILE_ELEMENTS, SOURCES = 1 << 25, 4096
# Most rows of the weight in a tile: what is widened to fp32 at a time.
VOCAB_TILE = 8192
# exp of this is 0 in fp64 too; where an infinite difference of logits is to be multiplied, it is this instead.
GONE = -1000.0


class Ranges(NamedTuple):
    """The tiles of one call: every range of the vocabulary with every range of sources."""

    vocab: list[slice]
    sources: list[slice]

    @classmethod
    def of(cls, sources: int, vocab: int, device: torch.device, chunk: int | None) -> Ranges:
        on_cpu = device.type == "cpu"
        rows = min(sources, chunk or (CPU_SOURCES if on_cpu else SOURCES))
        columns = min(vocab, VOCAB_TILE, max(1, (CPU_TILE if on_cpu else TILE_ELEMENTS) // rows))
        return cls(cut(vocab, columns), cut(sources, rows))

    @property
    def elements(self) -> int:
        """Of the largest tile."""
        return self.vocab[0].stop * self.sources[0].stop


def cut(length: int, step: int) -> list[slice]:
    """[0, length) in ranges of at most `step`."""
    return [slice(first, min(first + step, length)) for first in range(0, length, step)]


class Head:
    """The sources' hidden states against the weight, tile by tile; `rows` carries the inner factor of `logits`."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sources: torch.Tensor,
        logits: Logits,
        ranges: Ranges,
    ) -> None:
        self.dtype = wide_dtype(hidden, weight)
        self.weight, self.logits, self.ranges = weight, logits, ranges
        self.rows = hidden[sources].to(self.dtype).mul_(logits.inner)  # [S, d]
        self.bias = None if bias is None else bias.to(self.dtype) * logits.inner
        masked = None if bias is None else bias == float("-inf")
        # [V], the tokens that are out of the vocabulary; None: there are none.
        self.masked = masked if masked is not None and bool(masked.any()) else None

    def buffer(self, elements: int | None = None) -> torch.Tensor:
        return self.rows.new_empty(self.ranges.elements if elements is None else elements)

    def weights(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Each range of the vocabulary and its part of the weight [n, d], at least fp32, until the next one."""
        widens = self.weight.dtype != self.dtype
        wide = self.buffer(self.ranges.vocab[0].stop * self.weight.shape[1] if widens else 0)
        for v in self.ranges.vocab:
            part = self.weight[v]
            yield v, wide[: part.numel()].view(part.shape).copy_(part) if widens else part

    def tile(self, r: slice, v: slice, part: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Logits [sources of r, vocabulary of v] in `buffer`, -inf of masked tokens."""
        z = buffer[: (r.stop - r.start) * (v.stop - v.start)].view(r.stop - r.start, v.stop - v.start)
        torch.mm(self.rows[r], part.t(), out=z)
        if self.bias is not None:
            z.add_(self.bias[v])
        if self.logits.softcap is not None:
            z.tanh_().mul_(self.logits.outer)
        if self.masked is not None:
            z.masked_fill_(self.masked[v], float("-inf"))
        return z


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: Edges,
    logits: Logits,
    entropy: bool,
    chunk: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `edge_logprobs_op.EdgeProgram`."""
    count = len(edges.sources)
    head = Head(
        hidden, weight, bias, edges.sources, logits,
        Ranges.of(count, weight.shape[0], hidden.device, chunk),
    )  # fmt: skip
    pairs = _Pairs(edges, head.ranges)
    first, second = head.buffer(), head.buffer(None if entropy else 0)
    # Not -inf: its difference from a masked token's logit must not be NaN.
    top = head.rows.new_full((count,), torch.finfo(head.dtype).min)
    total, spread = torch.zeros_like(top), torch.zeros_like(top)
    label_logit = head.rows.new_empty(len(edges.pair_label))
    for v, part in head.weights():
        for r in head.ranges.sources:
            z = head.tile(r, v, part, first)
            hit, row, column = pairs.inside(r, v)
            # From the tile that the maximum is taken of: a log-prob is never above 0.
            label_logit[hit] = z[row, column]
            new_top = torch.maximum(top[r], z.amax(1))
            z.sub_(new_top[:, None])
            fall = (top[r] - new_top).clamp_(min=GONE)
            decay = fall.exp()
            if entropy:
                e = torch.exp(z, out=second[: z.numel()].view(z.shape))
                added = e.sum(1)
                # NaN is 0 times -inf and meant to be 0; a broken row's is in `added` too.
                spread[r] = fall.mul_(total[r]).add_(spread[r]).mul_(decay).add_(z.mul_(e).nansum(1))
            else:
                added = z.exp_().sum(1)
            total[r] = decay.mul_(total[r]).add_(added)
            top[r] = new_top
    log_total = total.log()
    logprob = (label_logit - top[edges.pair_source]).sub_(log_total[edges.pair_source])
    entropies = log_total - spread / total if entropy else torch.zeros_like(top)
    return logprob, top + log_total, entropies


def backward(
    grad_pair: torch.Tensor,
    grad_source: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: Edges,
    logits: Logits,
    needs: Needs,
    chunk: int | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """See `edge_logprobs_op.EdgeProgram`.

    dz = g onehot - p (g + h (log p + H)) for the gradients g of the log-prob and h of the entropy; 0 for masked
    tokens, whose logits are constants: a masked label's edge has the gradient of its -lse only.
    """
    head = Head(
        hidden, weight, bias, edges.sources, logits,
        Ranges.of(len(lse), weight.shape[0], hidden.device, chunk),
    )  # fmt: skip
    pairs = _Pairs(edges, head.ranges)
    capped = logits.softcap is not None
    first = head.buffer()
    second = head.buffer(None if capped else 0) if grad_entropy is None else head.buffer()
    third = head.buffer(None if capped and grad_entropy is not None else 0)
    constant = grad_source if grad_entropy is None else grad_source + grad_entropy * entropy

    d_rows = torch.zeros_like(head.rows) if needs.hidden else None
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs.weight else None
    d_bias = head.rows.new_zeros(weight.shape[0]) if needs.bias else None
    in_place = weight.dtype == head.dtype
    narrow = head.buffer(0 if in_place else head.ranges.vocab[0].stop * weight.shape[1])
    for v, part in head.weights():
        if d_weight is not None:
            d_part = d_weight[v] if in_place else narrow[: part.numel()].view(part.shape)
        for r in head.ranges.sources:
            z = head.tile(r, v, part, first)
            shaped = [buffer[: z.numel()].view(z.shape) for buffer in (second, third) if buffer.numel()]
            # Without a softcap the logits are no longer needed once their log-probs are known.
            logp = torch.sub(z, lse[r, None], out=shaped.pop() if capped else z)
            if grad_entropy is None:
                d = logp.exp_().mul_(constant[r, None])
            else:
                d = torch.exp(logp, out=shaped.pop())
                # 0 times -inf, of a logit that overflowed, is meant to be 0.
                d.mul_(logp.clamp_(min=GONE).mul_(grad_entropy[r, None]).add_(constant[r, None]))
            hit, row, column = pairs.inside(r, v)
            d[row, column] -= grad_pair[hit]  # d is -dz; every pair is there once
            if capped:
                # The slope of the tanh, from its value: outer (1 - tanh^2).
                d.mul_(z.square_().mul_(-1.0 / logits.outer).add_(logits.outer))
            if head.masked is not None:
                d.masked_fill_(head.masked[v], 0.0)  # of a label, and of 0 times -inf
            if d_bias is not None:
                d_bias[v].sub_(d.sum(0))
            if d_rows is not None:
                d_rows[r].addmm_(d, part, alpha=-1)
            if d_weight is not None:
                # The first sources write: nothing is read of what was there before.
                d_part.addmm_(d.t(), head.rows[r], beta=0 if r.start == 0 else 1, alpha=-1)
        if d_weight is not None and not in_place:
            d_weight[v] = d_part
    if d_rows is not None:
        d_rows.mul_(logits.inner)
    if d_bias is not None:
        d_bias.mul_(logits.inner)
    return d_rows, d_weight, d_bias


class _Pairs:
    """Which (source, label) pairs are inside a tile."""

    def __init__(self, edges: Edges, ranges: Ranges) -> None:
        self._edges = edges
        starts = edges.starts[[0, *(r.stop for r in ranges.sources)]].tolist()
        self._of = {r.start: slice(*starts[i : i + 2]) for i, r in enumerate(ranges.sources)}

    def inside(self, r: slice, v: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Their indices, and their rows and columns in the tile."""
        mine = self._of[r.start]
        label = self._edges.pair_label[mine]
        hit = ((label >= v.start) & (label < v.stop)).nonzero()[:, 0].add_(mine.start)
        return hit, self._edges.pair_source[hit] - r.start, self._edges.pair_label[hit] - v.start
