"""The likeliest tokens of loss edges, without logits: for diagnostics."""

from __future__ import annotations

import torch

from .backends.edge_eager import Head, Ranges
from .edge_logprobs import autocast_dtype, check_inputs
from .edge_logprobs_op import Logits
from .edges import check_range


@torch.no_grad()
def edge_top_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    edge_src: torch.Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest log-probs of each edge's source, in descending order, and their token ids; no gradient.

    Holds one tile of logits at a time. Arguments, autocast and errors as `edge_logprobs`, and `k` in [1, V].

    Returns:
        (values [E, k] at least fp32, token ids [E, k] int64).
    """
    check_inputs(hidden, weight, edge_src, bias, temperature, softcap, chunk)
    check_range("edge_src", edge_src, hidden.shape[0])
    if not 1 <= k <= weight.shape[0]:
        raise ValueError(f"k: expected 1 to {weight.shape[0]}, the vocabulary, got {k}")
    cast = autocast_dtype(hidden, weight)
    if cast is not None:
        hidden, weight = hidden.to(cast), weight.to(cast)
    sources, source_of_edge = torch.unique(edge_src, return_inverse=True)
    logits = Logits(float(temperature), softcap)
    ranges = Ranges.of(max(1, len(sources)), weight.shape[0], hidden.device, chunk)
    if not len(sources):
        ranges = ranges._replace(sources=[])
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(hidden, weight, bias, sources, logits, ranges)
        values = head.rows.new_full((len(sources), k), float("-inf"))
        tokens = source_of_edge.new_zeros((len(sources), k))
        lse = head.rows.new_full((len(sources),), float("-inf"))
        buffer = head.buffer() if len(sources) else head.buffer(0)
        for v, part in head.weights():
            for r in ranges.sources:
                z = head.tile(r, v, part, buffer)
                lse[r] = torch.logaddexp(lse[r], z.logsumexp(1))
                best, column = z.topk(min(k, z.shape[1]))
                both = torch.cat([values[r], best], 1)
                values[r], place = both.topk(k)
                tokens[r] = torch.cat([tokens[r], column + v.start], 1).gather(1, place)
    # Rounding of the lse must not lift a log-prob above 0.
    return (values - lse[:, None]).clamp_(max=0)[source_of_edge], tokens[source_of_edge]
