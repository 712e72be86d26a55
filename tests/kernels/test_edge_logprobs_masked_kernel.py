"""The edge log-prob programs where tokens are masked out, labels are many, or a softcap is wide."""

from typing import Any

import pytest
import torch

from trace_kernels import edge_logprobs
from trace_kernels.backends import edge_eager, edge_triton
from trace_kernels.device.edge_tiles import EdgeTiles
from trace_kernels.device.tiles import Tile
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference

MASKED = float("-inf")
TILE = 32  # tokens of one


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = EdgeTiles(Tile(16, TILE, 4, 1), Tile(16, TILE, 4, 1), 16)
    monkeypatch.setattr(edge_triton, "edge_tiles", lambda *_: tiles)
    monkeypatch.setattr(edge_eager, "VOCAB_TILE", 80)  # the ranges of dlogits


def results(op: Any, dtype: torch.dtype, tensors: list[torch.Tensor], edges: Any, **options: Any) -> list:
    """Log-probs, entropies and the gradients of hidden, weight and bias."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    pair = op(*leaves[:2], *edges, bias=leaves[2], **options)
    weights = torch.linspace(-1, 2, len(edges[0]), dtype=dtype, device=edges[0].device)
    torch.autograd.backward(pair, (weights, 1 - weights))
    return [*(x.detach() for x in pair), *(x.grad for x in leaves)]


def check(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """-inf at the same places, and elsewhere an RMS of the difference below 1e-5 of the RMS of the truth."""
    for x, y in zip(got, want, strict=True):
        finite = y != MASKED
        assert torch.equal(x == MASKED, ~finite)
        assert (x - y)[finite].norm() <= 1e-5 * y[finite].norm()


def problem(device: torch.device, vocab: int, edges: int) -> tuple[list[torch.Tensor], Any]:
    draw = torch.Generator().manual_seed(vocab)
    tensors = [torch.randn(*shape, generator=draw).to(device) for shape in ((20, 24), (vocab, 24), (vocab,))]
    source = torch.randint(0, 20, (edges,), generator=draw)
    return tensors, (source.to(device), torch.randint(0, vocab, (edges,), generator=draw).to(device))


# The first tile, one inside, the end with part of a tile, all but one, every second token.
@pytest.mark.parametrize(
    "masked", [slice(32), slice(64, 96), slice(100, None), slice(1, None), slice(0, None, 2)]
)
@pytest.mark.parametrize(("softcap", "splits"), [(None, 100), (3.0, 1)])
def test_tokens_with_a_bias_of_minus_infinity_are_out_of_the_vocabulary(
    device: torch.device, masked: slice, softcap: float | None, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_triton, "SHARES", splits)
    tensors, edges = problem(device, 150, 40)
    tensors[2][masked] = MASKED
    got = results(edge_logprobs, torch.float32, tensors, edges, softcap=softcap, backend="triton")
    want = results(edge_logprobs_reference, torch.float64, tensors, edges, softcap=softcap)
    assert want[0].isneginf().any()
    assert not got[4][masked].any()
    check(got, want)


@pytest.mark.parametrize("softcap", [0.5, 1e3, 1e4, 1e6])
def test_a_wide_softcap_keeps_the_digits_of_small_logits(device: torch.device, softcap: float) -> None:
    (hidden, weight, _), edges = problem(device, 129, 40)
    got = edge_logprobs(hidden, weight, *edges, softcap=softcap, backend="triton")
    want = edge_logprobs_reference(hidden.double(), weight.double(), *edges, softcap=softcap)
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() < 1e-6 * y.norm()


def test_labels_are_found_in_the_tiles_they_are_in(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sources with every token, both ends, none in most tiles; 16 rows of a program walk at their own pace.
    tensors, _ = problem(device, 150, 1)
    labels = [range(150), (0, 149), (31, 32, 33), (75,), *([i, 149 - i] for i in range(14))]
    source = torch.tensor([s for s, found in enumerate(labels) for _ in found])
    edges = source.to(device), torch.tensor([label for found in labels for label in found]).to(device)
    want = results(edge_logprobs_reference, torch.float64, tensors, edges)
    for splits in (1, 2, 100):
        monkeypatch.setattr(edge_triton, "SHARES", splits)
        check(results(edge_logprobs, torch.float32, tensors, edges, backend="triton"), want)


def test_a_label_costs_nothing_in_the_tiles_it_is_not_in(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loads in the interpreter, the same for every number of tokens; on a GPU there are none to count.
    from triton.runtime.interpreter import InterpreterBuilder

    loads, load = [0], InterpreterBuilder.create_masked_load

    def counted(*arguments: Any) -> Any:
        loads[0] += 1
        return load(*arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    tensors, _ = problem(device, 32 * TILE, 1)
    seen = []
    for count in (1, 64):
        labels = torch.arange(count, device=device) * 16
        before = loads[0]
        results(edge_logprobs, torch.float32, tensors, (labels * 0, labels), backend="triton")
        seen.append(loads[0] - before)
    # Labels and their gradients are read once each; the first in a range is sought, by halves, at most once a tile.
    assert seen[1] - seen[0] <= 3 * 64 + 2 * 32 * 6
