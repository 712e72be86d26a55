"""Edge log-probs in PyTorch against full logits in fp64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels import edge_logprobs
from trace_kernels.backends import edge_eager
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference as oracle


def problem(
    tokens: int = 23, dim: int = 12, vocab: int = 129, edges: int = 40, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab + edges)
    hidden = torch.randn(tokens, dim, generator=generator).to(dtype)
    weight = torch.randn(vocab, dim, generator=generator).to(dtype)
    bias = torch.randn(vocab, generator=generator).to(dtype)
    source = torch.randint(0, tokens, (edges,), generator=generator)
    source[: edges // 2] = source[0]  # a branch point: one source, many labels
    labels = torch.randint(0, vocab, (edges,), generator=generator)
    return hidden, weight, bias, source, labels


@pytest.mark.parametrize("vocab", [1, 2, 129, 1000, 9001])
@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_log_softmax(vocab: int, chunk: int | None, with_bias: bool) -> None:
    hidden, weight, bias, source, labels = problem(vocab=vocab)
    weights = torch.randn(2, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for op in ("mine", "oracle"):
        wide = torch.float64 if op == "oracle" else torch.float32
        h, w, b = (x.to(wide).clone().requires_grad_() for x in (hidden, weight, bias))
        used = b if with_bias else None
        if op == "mine":
            pair = edge_logprobs(h, w, source, labels, temperature=0.7, bias=used, chunk=chunk)
            assert all(x.dtype == torch.float32 for x in pair)
        else:
            pair = oracle(h, w, source, labels, temperature=0.7, bias=used)
        (pair[0] * weights[0] + pair[1] * weights[1]).sum().backward()
        results.append([*(x.detach() for x in pair), h.grad, w.grad, b.grad])
    for name, got, want in zip(("logprob", "entropy", "dh", "dw", "db"), *results, strict=True):
        if want is None:
            assert got is None
            continue
        torch.testing.assert_close(
            got.double(), want, rtol=1e-5, atol=3e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_keep_fp32_logits(dtype: torch.dtype) -> None:
    hidden, weight, bias, source, labels = problem(dtype=dtype, vocab=9001, dim=64)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprob, entropy = edge_logprobs(h, w, source, labels, bias=bias, chunk=16)
    wide_h, wide_w = (x.double().requires_grad_() for x in (hidden, weight))
    want, want_entropy = oracle(wide_h, wide_w, source, labels, bias=bias)
    torch.testing.assert_close(logprob.double(), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-4, atol=1e-4)
    (logprob + 0.1 * entropy).sum().backward()
    (want + 0.1 * want_entropy).sum().backward()
    for got, expected in ((h.grad, wide_h.grad), (w.grad, wide_w.grad)):
        assert got.dtype == dtype
        assert (got.double() - expected).norm() <= 5e-3 * expected.norm()


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_edges_options_and_tiles(data: st.DataObject) -> None:
    draw = data.draw
    tokens, dim, vocab = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 70))
    # Few sources and labels: branch points, and duplicate edges of several rollouts.
    source = draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=30))
    labels = draw(st.lists(st.integers(0, vocab - 1), min_size=len(source), max_size=len(source)))
    source, labels = torch.tensor(source), torch.tensor(labels)
    options: dict[str, Any] = {
        "temperature": draw(st.sampled_from([1.0, 0.6, 2.5])),
        "softcap": draw(st.sampled_from([None, 2.0, 30.0])),
    }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    hidden, weight, bias, g, h = (
        torch.randn(*shape, generator=generator)
        for shape in ((tokens, dim), (vocab, dim), (vocab,), (len(source),), (len(source),))
    )
    with_bias = draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_eager, "CPU_TILE", draw(st.sampled_from([1, 17, 64, 1 << 22])))
        patch.setattr(edge_eager, "CPU_SOURCES", draw(st.sampled_from([1, 3, 1024])))
        results = []
        for op, dtype in ((edge_logprobs, torch.float32), (oracle, torch.float64)):
            leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight, bias)]
            pair = op(*leaves[:2], source, labels, bias=leaves[2] if with_bias else None, **options)
            (pair[0] @ g.to(dtype) + pair[1] @ h.to(dtype)).backward()
            results.append([*pair, *(x.grad for x in leaves if x.grad is not None)])
    assert (results[0][0] <= 0).all()
    for got, want in zip(*results, strict=True):
        got, want = got.detach(), want.detach()
        assert float((got - want).norm()) <= 1e-5 * float(want.norm()) + 1e-5


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_eager, "CPU_TILE", 4)
    hidden, weight, bias, source, labels = problem(tokens=4, dim=3, vocab=5, edges=6)
    leaves = [(0.5 * x).double().requires_grad_() for x in (hidden, weight, bias)]

    def op(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return edge_logprobs(h, w, source, labels, temperature=1.3, bias=b, softcap=softcap, chunk=2)

    assert torch.autograd.gradcheck(op, leaves)


@pytest.mark.parametrize("vocab", [50_257, 129_920, 151_936, 152_064])
def test_vocabularies_of_real_models(vocab: int) -> None:
    hidden, weight, _, source, labels = problem(tokens=5, dim=8, vocab=vocab, edges=12)
    labels[0] = vocab - 1
    h, w = (3 * hidden).requires_grad_(), weight.requires_grad_()
    pair = edge_logprobs(h, w, source, labels)
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    want = oracle(*wide, source, labels)
    assert (pair[0] <= 0).all()
    for got, expected in zip(pair, want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    (pair[0] + 0.1 * pair[1]).sum().backward()
    (want[0] + 0.1 * want[1]).sum().backward()
    for x, y in zip((h, w), wide, strict=True):
        assert (x.grad - y.grad).norm() <= 1e-4 * y.grad.norm()


def test_a_token_that_takes_all_probability_has_log_prob_0() -> None:
    # The label is the largest logit by far, at every place of a tile of an odd size.
    for vocab in (1023, 1025):
        weight = torch.zeros(vocab, 2)
        labels = torch.tensor([0, 511, vocab - 1])
        hidden = torch.tensor([[50.0, 0.0]])
        for label in labels:
            weight[:, 0] = 0
            weight[label, 0] = 1.7
            logprob, entropy = edge_logprobs(hidden, weight, torch.zeros(1, dtype=torch.int64), label[None])
            assert -1e-6 < logprob <= 0
            assert 0 <= entropy < 1e-6


def test_a_broken_row_breaks_its_own_edges_only() -> None:
    hidden, weight, _, source, labels = problem()
    broken = hidden.clone()
    broken[source[0], 3] = float("nan")
    hit = source == source[0]
    results = []
    for x in (hidden, broken):
        h = x.clone().requires_grad_()
        logprob, entropy = edge_logprobs(h, weight, source, labels)
        (logprob + entropy).sum().backward()
        results.append((logprob.detach(), entropy.detach(), h.grad))
    for clean, got in zip(*results, strict=True):
        rows = hit if len(got) == len(hit) else torch.arange(len(got)) == source[0]
        assert got[rows].isnan().any()
        assert torch.equal(got[~rows], clean[~rows])


def test_log_probs_do_not_depend_on_the_order_of_the_edges_and_runs_repeat() -> None:
    hidden, weight, bias, source, labels = problem()
    labels[:5] = labels[0]  # one pair five times, among the edges of one source
    generator = torch.Generator().manual_seed(3)
    g, h = torch.randn(2, 40, generator=generator)
    results = []
    for order in (torch.arange(40), torch.arange(40), torch.randperm(40, generator=generator)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        logprob, entropy = edge_logprobs(*leaves[:2], source[order], labels[order], bias=leaves[2])
        (logprob @ g[order] + entropy @ h[order]).backward()
        back = order.argsort()
        results.append(([logprob[back], entropy[back]], [x.grad for x in leaves]))
    (values, grads), again, permuted = results
    assert all(torch.equal(a, b) for a, b in zip((*values, *grads), (*again[0], *again[1]), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, permuted[0], strict=True))
    # The upstream gradients of one source are added in the order of its edges: another order, other roundings.
    wide = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    logprob, entropy = oracle(*wide[:2], source, labels, bias=wide[2])
    (logprob @ g.double() + entropy @ h.double()).backward()
    for x, *found in zip(wide, grads, permuted[1], strict=True):
        for got in found:
            assert float((got - x.grad).norm()) <= 1e-5 * float(x.grad.norm())


def test_without_repeated_sources_the_order_of_the_edges_changes_no_bit_of_the_gradients() -> None:
    hidden, weight, _, _, labels = problem()
    generator = torch.Generator().manual_seed(3)
    g, h = torch.randn(2, 23, generator=generator)
    results = []
    for order in (torch.arange(23), torch.randperm(23, generator=generator)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        logprob, entropy = edge_logprobs(*leaves, order, labels[order])
        (logprob @ g[order] + entropy @ h[order]).backward()
        results.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_differentiable_once() -> None:
    hidden, weight, _, source, labels = problem()
    h = hidden.requires_grad_()
    (grad,) = torch.autograd.grad(
        edge_logprobs(h, weight, source, labels)[0].square().sum(), h, create_graph=True
    )
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_without_entropy() -> None:
    hidden, weight, _, source, labels = problem()
    h = hidden.clone().requires_grad_()
    logprob, entropy = edge_logprobs(h, weight, source, labels, entropy=False)
    assert torch.equal(entropy, torch.zeros(40))
    assert not entropy.requires_grad
    torch.testing.assert_close(logprob, edge_logprobs(hidden, weight, source, labels)[0])
    logprob.sum().backward()
    reference = hidden.clone().requires_grad_()
    oracle(reference, weight, source, labels)[0].sum().backward()
    torch.testing.assert_close(h.grad, reference.grad, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite_and_below_zero() -> None:
    hidden, weight, _, source, labels = problem(vocab=1025)
    h = (hidden * 100).requires_grad_()
    logprob, entropy = edge_logprobs(h, weight, source, labels)
    assert (logprob <= 0).all()
    assert (entropy >= -1e-6).all()
    (logprob + entropy).sum().backward()
    assert h.grad.isfinite().all()


def test_no_edges() -> None:
    hidden, weight, _, _, _ = problem()
    h, none = hidden.requires_grad_(), torch.zeros(0, dtype=torch.int64)
    logprob, entropy = edge_logprobs(h, weight, none, none)
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert torch.equal(h.grad, torch.zeros_like(h))
