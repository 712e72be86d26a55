"""Edges grouped by source and label against torch.unique; grouped once for both passes; indices refused by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels import edge_logprobs, edge_top_logprobs
from trace_kernels.edges import Edges, packed_width

from .test_edge_logprobs import problem

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=25)


@settings(deadline=None, max_examples=60)
@given(pairs=PAIRS)
def test_groups_are_those_of_unique(pairs: list[tuple[int, int]]) -> None:
    source, labels = torch.tensor(pairs).unbind(1)
    edges = Edges.of(source, labels, 7, 5)
    sources, source_of_edge = torch.unique(source, return_inverse=True)
    both, pair_of_edge, counts = torch.unique(
        torch.tensor(pairs), dim=0, return_inverse=True, return_counts=True
    )
    assert edges.sources.tolist() == sources.tolist()
    assert edges.source_of_edge.tolist() == source_of_edge.tolist()
    assert edges.pair_of_edge.tolist() == pair_of_edge.tolist()
    assert sources[edges.pair_source].tolist() == both[:, 0].tolist()
    assert edges.pair_label.tolist() == both[:, 1].tolist()
    assert edges.starts.tolist() == [0, *(int((both[:, 0] <= s).sum()) for s in sources)]
    assert int(counts.sum()) == len(pairs)


@settings(deadline=None, max_examples=30)
@given(pairs=PAIRS)
def test_packing_loses_nothing_and_its_shape_depends_on_the_edges_alone(pairs: list[tuple[int, int]]) -> None:
    edges = Edges.of(*torch.tensor(pairs).unbind(1), 7, 5)
    table, lengths = edges.packed()
    assert table.shape == (6, packed_width(len(pairs)))
    assert table.shape[1] % 2 == 0
    assert lengths.device.type == "cpu"
    for field, back in zip(edges, Edges.unpacked(table, lengths), strict=True):
        assert torch.equal(field, back)
        assert back.is_contiguous()


def test_the_backward_groups_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, source, labels = problem()
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    logprob, entropy = edge_logprobs(h, w, source, labels)
    loss = (logprob + entropy).sum()
    want = torch.autograd.grad(loss, (h, w), retain_graph=True)

    def refuse(*_: object) -> None:
        raise AssertionError("edges were grouped twice")

    monkeypatch.setattr(Edges, "of", refuse)
    got = torch.autograd.grad(loss, (h, w))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(AssertionError, match="grouped twice"):
        edge_logprobs(h, w, source, labels)


@pytest.mark.parametrize(
    ("source", "labels", "message"),
    [
        # Source 0 with label 5 would have been the pair (1, 0), another edge of this call.
        ([0, 1], [5, 0], r"labels: values 0\.\.5 outside \[0, 5\)"),
        ([0, 1], [0, -1], r"labels: values -1\.\.0 outside \[0, 5\)"),
        ([0, 7], [0, 0], r"edge_src: values 0\.\.7 outside \[0, 7\)"),
        ([-1, 0], [0, 0], r"edge_src: values -1\.\.0 outside \[0, 7\)"),
    ],
)
def test_indices_out_of_range_are_refused_where_they_are_grouped(
    source: list[int], labels: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Edges.of(torch.tensor(source), torch.tensor(labels), 7, 5)


def test_top_logprobs_refuse_indices_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"edge_src: values 0\.\.7 outside \[0, 7\)"):
        edge_top_logprobs(torch.zeros(7, 4), torch.zeros(5, 4), torch.tensor([0, 7]), 2)
