"""The likeliest tokens of loss edges, without logits: for diagnostics."""

from __future__ import annotations

import torch

from .backends.edge_eager import Head, Ranges
from .edge_logprobs import autocast_dtype, check_inputs
from .edge_logprobs_op import Logits, wide_dtype
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
    if not len(edge_src):
        return hidden.new_empty((0, k), dtype=wide_dtype(hidden, weight)), edge_src.new_empty((0, k))
    sources, source_of_edge = torch.unique(edge_src, return_inverse=True)
    ranges = Ranges.of(len(sources), weight.shape[0], hidden.device, chunk)
    with torch.autocast(hidden.device.type, enabled=False):
        head = Head(hidden, weight, bias, sources, Logits(float(temperature), softcap), ranges)
        # Of each range of sources; no placeholders, which would tie with tokens of log-prob -inf.
        best = [(head.rows[r, :0], sources[r, None][:, :0]) for r in ranges.sources]
        lse = head.rows.new_full((len(sources),), float("-inf"))
        buffer = head.buffer()
        for v, part in head.weights():
            for i, r in enumerate(ranges.sources):
                z = head.tile(r, v, part, buffer)
                lse[r] = torch.logaddexp(lse[r], z.logsumexp(1))
                here, column = z.topk(min(k, z.shape[1]))
                both = torch.cat([best[i][0], here], 1)
                values, place = both.topk(min(k, both.shape[1]))
                best[i] = values, torch.cat([best[i][1], column + v.start], 1).gather(1, place)
    values, tokens = (torch.cat(parts) for parts in zip(*best, strict=True))
    # Rounding of the lse must not lift a log-prob above 0.
    return (values - lse[:, None]).clamp_(max=0)[source_of_edge], tokens[source_of_edge]
