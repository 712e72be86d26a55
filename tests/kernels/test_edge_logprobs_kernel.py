"""The edge log-prob programs against full logits in fp64, on tiles so small that every loop runs."""

import pytest
import torch

from trace_kernels import edge_logprobs
from trace_kernels.backends import edge_eager, edge_triton
from trace_kernels.device.edge_tiles import EdgeTiles
from trace_kernels.device.tiles import Tile
from trace_kernels.edge_logprobs_op import Logits, Needs
from trace_kernels.edges import Edges
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference

# Log-probs, entropies and gradients: RMS of the difference over RMS of the truth.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = EdgeTiles(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), 16)
    monkeypatch.setattr(edge_triton, "edge_tiles", lambda *_: tiles)
    monkeypatch.setattr(edge_eager, "VOCAB_TILE", 80)


def problem(device, dtype=torch.float32, vocab=129, dim=24, edges=40, weight_dtype=None):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(29, dim, generator=generator).to(device, dtype)
    weight = torch.randn(vocab, dim, generator=generator).to(device, weight_dtype or dtype)
    bias = torch.randn(vocab, generator=generator).to(device)
    source = torch.randint(0, 29, (edges,), generator=generator)
    source[: edges // 3] = 5  # a branch point
    labels = torch.randint(0, vocab, (edges,), generator=generator)
    labels[:2], labels[2:3] = vocab - 1, 0  # a duplicate edge; both ends of the vocabulary
    return hidden, weight, bias, source.to(device), labels.to(device)


def check(device, dtype, numbers, with_bias=False, size=1.0, chunk=None, **sizes):  # type: ignore[no-untyped-def]
    hidden, weight, bias, source, labels = problem(device, dtype, **sizes)
    generator = torch.Generator().manual_seed(1)
    g, h = (size * torch.randn(2, len(source), generator=generator, dtype=torch.float64)).to(device)
    results = []
    for wide in (None, torch.float64):
        leaves = [x.to(wide or x.dtype).clone().requires_grad_() for x in (hidden, weight, bias)]
        used = leaves[2] if with_bias else None
        op = edge_logprobs_reference if wide else edge_logprobs
        options = {} if wide else {"backend": "triton", "chunk": chunk}
        logprob, entropy = op(leaves[0], leaves[1], source, labels, bias=used, **numbers, **options)
        (logprob.double() @ g + entropy.double() @ h).backward()
        grads = [x.grad for x in leaves if x.grad is not None]
        results.append([logprob.detach(), entropy.detach(), *grads])
    assert (results[0][0] <= 0).all()
    names = ("logprob", "entropy", "dhidden", "dweight", "dbias")
    for name, got, want in zip(names, *results, strict=False):
        error = float((got.double() - want).norm() / want.norm())
        assert error < LIMITS[dtype], (name, error)
    assert results[0][2].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numbers", [{}, {"temperature": 0.7, "softcap": 3.0}])
def test_equals_full_logits(device: torch.device, dtype: torch.dtype, numbers: dict[str, float]) -> None:
    check(device, dtype, numbers, with_bias=bool(numbers), chunk=7)


@pytest.mark.parametrize(("vocab", "dim", "edges"), [(1, 16, 3), (32, 32, 1), (31, 7, 50), (257, 40, 17)])
def test_sizes_that_are_multiples_of_nothing(device: torch.device, vocab: int, dim: int, edges: int) -> None:
    hidden, weight, bias, source, labels = problem(device, vocab=vocab, dim=dim, edges=edges)
    got = edge_logprobs(hidden, weight, source, labels, bias=bias, backend="triton")
    want = edge_logprobs_reference(hidden.double(), weight.double(), source, labels, bias=bias)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert (got[0] <= 0).all()


def test_types_that_differ_are_multiplied_in_fp32(device: torch.device) -> None:
    hidden, weight, _, source, labels = problem(device, torch.float32, weight_dtype=torch.bfloat16)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    logprob, entropy = edge_logprobs(h, w, source, labels, backend="triton")
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    want = edge_logprobs_reference(*wide, source, labels)
    torch.testing.assert_close(logprob.double(), want[0], rtol=1e-5, atol=1e-5)
    (logprob + entropy).sum().backward()
    (want[0] + want[1]).sum().backward()
    torch.testing.assert_close(h.grad.double(), wide[0].grad, rtol=1e-4, atol=1e-4)
    assert w.grad.dtype == torch.bfloat16
    assert (w.grad.double() - wide[1].grad).norm() < 5e-3 * wide[1].grad.norm()


def test_gradients_too_small_for_fp16_keep_their_precision(device: torch.device) -> None:
    # Of a mean over 10^5 edges: most dlogits are far below fp16's smallest number, their products are not.
    hidden, weight, _, source, labels = problem(device, torch.float16, vocab=65)
    edges, logits = Edges.of(source, labels, 29, 65), Logits(1.0, None)
    g = torch.full((len(source),), 1e-5, device=device)
    _, lse, entropy = edge_triton.forward(hidden, weight, None, edges, logits, False, None)
    d_rows, _, _ = edge_triton.backward(
        edges.sum_by_pair(g), edges.sum_by_source(g), None, lse, entropy,
        hidden, weight, None, edges, logits, Needs(True, False, False), None,
    )  # fmt: skip
    exact = hidden.double().requires_grad_()
    (edge_logprobs_reference(exact, weight.double(), source, labels)[0] * 1e-5).sum().backward()
    want = exact.grad[edges.sources]
    assert (d_rows.double() - want).norm() < 2e-3 * want.norm()


def test_a_broken_row_breaks_its_own_edges_only(device: torch.device) -> None:
    hidden, weight, _, source, labels = problem(device)
    broken = hidden.clone()
    broken[5, 3] = float("nan")
    got = edge_logprobs(broken, weight, source, labels, backend="triton")
    want = edge_logprobs(hidden, weight, source, labels, backend="triton")
    hit = source == 5
    for x, y in zip(got, want, strict=True):
        assert x[hit].isnan().all()
        assert torch.equal(x[~hit], y[~hit])


def test_strides_and_repeats(device: torch.device) -> None:
    hidden, weight, _, source, labels = problem(device)
    wide = torch.full((29, 50), float("nan"), device=device)
    wide[:, :24] = hidden
    turned = weight.t().contiguous().t()
    results = []
    for h, w in ((hidden, weight), (wide[:, :24], turned), (hidden, weight)):
        h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
        logprob, entropy = edge_logprobs(h, w, source, labels, backend="triton")
        (logprob + entropy).sum().backward()
        results.append([logprob, entropy, h.grad, w.grad])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_indices_out_of_range_are_refused_on_the_device(device: torch.device) -> None:
    hidden, weight, _, source, labels = problem(device)
    for name, place, bound in (("labels", labels, 129), ("edge_src", source, 29)):
        wrong = place.clone()
        wrong[4] = bound
        edges = {"edge_src": source, "labels": labels, name: wrong}
        with pytest.raises(ValueError, match=rf"{name}: values \d+\.\.{bound} outside \[0, {bound}\)"):
            edge_logprobs(hidden, weight, **edges, backend="triton")


def test_autocast_runs_the_program_of_half_types(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, _, source, labels = problem(device)
    want = edge_logprobs(hidden.bfloat16(), weight.bfloat16(), source, labels, backend="triton")
    seen, inner = [], edge_triton._tiles

    def spy(*operands: torch.Tensor) -> EdgeTiles:
        seen.append({x.dtype for x in operands})
        return inner(*operands)

    monkeypatch.setattr(edge_triton, "_tiles", spy)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        got = edge_logprobs(h, w, source, labels, backend="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    (got[0] + got[1]).sum().backward()
    assert seen == [{torch.bfloat16}] * 2
    assert h.grad.dtype == w.grad.dtype == torch.float32
