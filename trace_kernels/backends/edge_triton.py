"""Edge log-probs by the Triton programs in `kernels/edge_logprobs.py`, and matrix products for their gradients."""

from __future__ import annotations

from typing import Any

import torch

from ..device.edge_logprobs import edge_logprobs_dlogits, edge_logprobs_forward
from ..device.edge_tiles import EdgeTiles, edge_tiles
from ..edge_logprobs_op import Logits, Needs
from ..edges import Edges
from ..launch import LOG2_E, launch, target, unit_channels
from .edge_eager import GONE, Ranges

LN_2 = 0.6931471805599453
# The vocabulary is split until there are about so many programs per multiprocessor.
SHARES = 4


def forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: Edges,
    logits: Logits,
    entropy: bool,
    chunk: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `edge_logprobs_op.EdgeProgram`; holds no logits, so `chunk` does not matter."""
    hidden, weight = unit_channels(hidden), unit_channels(weight)
    tiles = _tiles(hidden, weight)
    tile = tiles.forward
    count, vocab = len(edges.sources), weight.shape[0]
    blocks, vocab_tiles = -(-count // tile.block_m), -(-vocab // tile.block_n)
    splits = max(1, min(vocab_tiles, SHARES * target(hidden.device).multiprocessors // blocks))
    per_split = -(-vocab_tiles // splits)
    splits = -(-vocab_tiles // per_split)  # none is empty
    top, total, spread = hidden.new_empty((3, splits, count), dtype=torch.float32)
    label_logit = hidden.new_empty(len(edges.pair_label), dtype=torch.float32)
    launch(
        edge_logprobs_forward,
        (blocks * splits,),
        tile,
        **_inputs(hidden, weight, bias, edges, logits, tiles),
        TOP=top, TOTAL=total, SPREAD=spread, LABEL_LOGIT=label_logit,
        S=count, tiles_per_split=per_split, HAS_ENTROPY=entropy,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
    )  # fmt: skip
    highest = top.amax(0)
    fall = (top - highest).clamp_(min=GONE)
    weights = fall.exp2()
    sums = (total * weights).sum(0)
    log_sums = sums.log2()
    logprob = (label_logit - highest[edges.pair_source] - log_sums[edges.pair_source]) * LN_2
    entropies = torch.zeros_like(highest)
    if entropy:
        entropies = (log_sums - ((spread + fall * total) * weights).sum(0) / sums) * LN_2
    return logprob, (highest + log_sums) * LN_2, entropies


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
    """See `edge_logprobs_op.EdgeProgram`: the programs write one tile of dlogits, two products use it."""
    hidden, weight = unit_channels(hidden), unit_channels(weight)
    tiles = _tiles(hidden, weight)
    tile = tiles.backward
    count, vocab, size = len(lse), weight.shape[0], weight.shape[1]
    ranges = Ranges.of(count, vocab, hidden.device, chunk)
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    # Gradients of a mean over many edges are too small for fp16: for the products the largest is about 1.
    unit = _power_of_two(grad_pair, grad_source, grad_entropy)
    grad_pair, grad_source = grad_pair / unit, grad_source / unit
    constant, by_entropy = grad_source, grad_source
    if grad_entropy is not None:
        by_entropy = grad_entropy / unit
        constant = grad_source + by_entropy * entropy
    shared = {
        **_inputs(hidden, weight, bias, edges, logits, tiles),
        "LSE": lse * LOG2_E, "CONSTANT": constant, "GRAD_ENTROPY": by_entropy, "GRAD_PAIR": grad_pair,
        "HAS_ENTROPY": grad_entropy is not None, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
    }  # fmt: skip

    d_rows = hidden.new_zeros((count, size), dtype=torch.float32) if needs.hidden else None
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format) if needs.weight else None
    d_bias = hidden.new_zeros(vocab, dtype=torch.float32) if needs.bias else None
    buffer = hidden.new_empty(ranges.elements, dtype=dtype)
    scale = unit / logits.temperature
    for v in ranges.vocab:
        d_part = None
        for r in ranges.sources:
            rows, columns = r.stop - r.start, v.stop - v.start
            d = buffer[: rows * columns].view(rows, columns)
            launch(
                edge_logprobs_dlogits,
                (-(-rows // tile.block_m) * -(-columns // tile.block_n),),
                tile,
                **shared, D_LOGITS=d,
                first_source=r.start, last_source=r.stop, first_token=v.start, last_token=v.stop,
            )  # fmt: skip
            if d_bias is not None:
                d_bias[v] += d.sum(0, dtype=torch.float32)
            if d_rows is not None:
                d_rows[r] += _product(d, weight[v])
            if d_weight is not None:
                product = _product(d.t(), hidden[edges.sources[r]])
                d_part = product if d_part is None else d_part.add_(product)
        if d_weight is not None and d_part is not None:
            d_weight[v] = d_part.mul_(scale)
    return (
        None if d_rows is None else d_rows.mul_(scale),
        d_weight,
        None if d_bias is None else d_bias.mul_(scale),
    )


def _power_of_two(*grads: torch.Tensor | None) -> torch.Tensor:
    """At most the largest magnitude, and at least half of it; 1 where that is 0 or not finite."""
    largest = torch.stack([x.abs().amax() for x in grads if x is not None]).amax()
    power = largest.log2().floor().clamp(-120, 120).exp2()
    return torch.where((largest > 0) & largest.isfinite(), power, torch.ones_like(power))


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32, accumulated in fp32."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _tiles(hidden: torch.Tensor, weight: torch.Tensor) -> EdgeTiles:
    mixed = hidden.dtype != weight.dtype
    bits = 32 if mixed or hidden.dtype == torch.float32 else 16
    return edge_tiles(target(hidden.device).architecture, bits, hidden.shape[1], mixed)


def _inputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    edges: Edges,
    logits: Logits,
    tiles: EdgeTiles,
) -> dict[str, Any]:
    """What both programs take."""
    capped = logits.softcap is not None
    return {
        "HIDDEN": hidden, "WEIGHT": weight, "BIAS": weight if bias is None else bias.contiguous(),
        "SOURCES": edges.sources, "STARTS": edges.starts, "LABELS": edges.pair_label, "V": weight.shape[0],
        "stride_hidden": hidden.stride(0), "stride_weight": weight.stride(0),
        "inner": logits.inner if capped else logits.inner * LOG2_E, "outer": logits.outer * LOG2_E,
        "HAS_BIAS": bias is not None, "HAS_SOFTCAP": capped, "WIDEN": hidden.dtype != weight.dtype,
        "HIDDEN_SIZE": hidden.shape[1], "BLOCK_K": tiles.channels,
    }  # fmt: skip
