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
    def of(cls, edge_src: torch.Tensor, labels: torch.Tensor, rows: int, vocab: int) -> Edges:
        """From sources in [0, rows) and labels in [0, vocab), int64 [E] with E >= 1.

        Waits for an accelerator once, for the numbers of unique ones. ValueError: an index out of its range.
        """
        width = max(vocab, 1)  # without a vocabulary every label is refused below
        keys, order = (edge_src * width + labels).sort(stable=True)
        source = keys // width
        number, pair = _numbers(source), _numbers(keys)  # of every sorted edge
        # Everything that the host has to know, at once.
        facts = torch.stack((number[-1], pair[-1], *edge_src.aminmax(), *labels.aminmax())).tolist()
        last_source, last_pair, *extrema = facts
        _refuse("edge_src", extrema[:2], rows)
        _refuse("labels", extrema[2:], vocab)
        pair_source = _put(number, pair, last_pair + 1)
        bounds = torch.arange(last_source + 2, device=keys.device)
        return cls(
            sources=_put(source, number, last_source + 1),
            source_of_edge=_put(number, order, len(order)),
            starts=torch.searchsorted(pair_source, bounds),
            pair_source=pair_source,
            pair_label=_put(keys % width, pair, last_pair + 1),
            pair_of_edge=_put(pair, order, len(order)),
        )

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [6, width] of the fields' values, their lengths [6] on the CPU): shapes that depend on E alone."""
        width = packed_width(len(self.source_of_edge))
        table = self.sources.new_zeros((len(self), width))
        for row, field in zip(table, self, strict=True):
            row[: len(field)] = field
        return table, torch.tensor([len(field) for field in self], device="cpu")

    @classmethod
    def unpacked(cls, table: torch.Tensor, lengths: torch.Tensor) -> Edges:
        """The inverse of `packed`: views, and no wait."""
        return cls(*(row[:length] for row, length in zip(table, lengths.tolist(), strict=True)))

    def sum_by_source(self, x: torch.Tensor) -> torch.Tensor:
        """[E] -> [S], added in the order of the edges: the same bits on every run, not for every order."""
        return _sums(x, self.source_of_edge, len(self.sources))

    def sum_by_pair(self, x: torch.Tensor) -> torch.Tensor:
        """[E] -> [P], likewise."""
        return _sums(x, self.pair_of_edge, len(self.pair_label))

    def one_per_source(self, x: torch.Tensor) -> torch.Tensor:
        """[E] -> [S] of values that all edges of a source share."""
        return x.new_empty(len(self.sources)).index_put_((self.source_of_edge,), x)


def packed_width(edges: int) -> int:
    """E + 1 and even: rows of int64 then start at multiples of 16 bytes, for which programs are compiled."""
    return (edges + 2) // 2 * 2


def check_range(name: str, index: torch.Tensor, bound: int) -> None:
    """ValueError where an index is outside [0, bound); waits for an accelerator."""
    if index.numel():
        _refuse(name, torch.stack(index.aminmax()).tolist(), bound)


def _refuse(name: str, extrema: list[int], bound: int) -> None:
    low, high = extrema
    if low < 0 or high >= bound:
        raise ValueError(f"{name}: values {low}..{high} outside [0, {bound})")


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """[E] sorted -> [E]: 0 for the least value, 1 for the next larger, and so on."""
    return (x.diff(prepend=x[:1]) != 0).cumsum(0)


def _put(x: torch.Tensor, place: torch.Tensor, count: int) -> torch.Tensor:
    """[E] -> [count]; what shares a place is equal."""
    return x.new_empty(count).scatter_(0, place, x)


def _sums(x: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    total = x.new_zeros(count)
    # index_add_ uses atomics on accelerators and none on the CPU; index_put_ the other way round.
    if x.device.type == "cpu":
        return total.index_add_(0, index, x)
    return total.index_put_((index,), x, accumulate=True)
