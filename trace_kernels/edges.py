"""Loss edges grouped for the output head: each source's logits once, each (source, label) pair once."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Edges(NamedTuple):
    """S unique sources and P unique (source, label) pairs of E edges, both in ascending order.

    `starts[s] : starts[s + 1]` are the pairs of source s. Built from edges in any order, always the same.
    """

    sources: torch.Tensor  # int64 [S], rows of the hidden states
    source_of_edge: torch.Tensor  # int64 [E], into sources
    starts: torch.Tensor  # int64 [S + 1], into the pairs
    pair_source: torch.Tensor  # int64 [P], into sources
    pair_label: torch.Tensor  # int64 [P]
    pair_of_edge: torch.Tensor  # int64 [E], into the pairs

    @classmethod
    def of(cls, edge_src: torch.Tensor, labels: torch.Tensor, vocab: int) -> Edges:
        """From sources and labels, int64 [E]. On an accelerator this waits for the number of unique ones."""
        sources, source_of_edge = torch.unique(edge_src, return_inverse=True)
        pairs, pair_of_edge = torch.unique(source_of_edge * vocab + labels, return_inverse=True)
        pair_source = pairs // vocab
        bounds = torch.arange(len(sources) + 1, device=pairs.device)
        starts = torch.searchsorted(pair_source, bounds)
        return cls(sources, source_of_edge, starts, pair_source, pairs % vocab, pair_of_edge)

    def sum_by_source(self, x: torch.Tensor) -> torch.Tensor:
        """[E] -> [S], in the order of the edges: the same sum on every run."""
        return _sums(x, self.source_of_edge, len(self.sources))

    def sum_by_pair(self, x: torch.Tensor) -> torch.Tensor:
        """[E] -> [P], likewise."""
        return _sums(x, self.pair_of_edge, len(self.pair_label))

    def one_per_source(self, x: torch.Tensor) -> torch.Tensor:
        """[E] -> [S] of values that all edges of a source share."""
        return x.new_empty(len(self.sources)).index_put_((self.source_of_edge,), x)


def _sums(x: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    total = x.new_zeros(count)
    # index_add_ uses atomics on accelerators and none on the CPU; index_put_ the other way round.
    if x.device.type == "cpu":
        return total.index_add_(0, index, x)
    return total.index_put_((index,), x, accumulate=True)
