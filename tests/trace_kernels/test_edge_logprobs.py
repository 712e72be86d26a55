import pytest
import torch
from torch import nn

from trace_kernels import EdgeLogprobHead, edge_logprobs
from trace_kernels.edge_logprobs import _EdgeLogprobs


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


def oracle(hidden, weight, bias, source, labels, temperature):  # type: ignore[no-untyped-def]
    logits = hidden[source] @ weight.T
    if bias is not None:
        logits = logits + bias
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, labels[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


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
            pair = oracle(h, w, used, source, labels, 0.7)
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
    want, want_entropy = oracle(wide_h, wide_w, bias.double(), source, labels, 1.0)
    torch.testing.assert_close(logprob.double(), want, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-4, atol=1e-4)
    (logprob + 0.1 * entropy).sum().backward()
    (want + 0.1 * want_entropy).sum().backward()
    for got, expected in ((h.grad, wide_h.grad), (w.grad, wide_w.grad)):
        assert got.dtype == dtype
        assert (got.double() - expected).norm() <= 5e-3 * expected.norm()


def test_gradient_in_finite_differences() -> None:
    hidden, weight, bias, source, labels = problem(tokens=4, dim=3, vocab=5, edges=6)
    h, w, b = (0.5 * x for x in (hidden, weight, bias))

    def loss(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        logprob, entropy = edge_logprobs(h, w, source, labels, temperature=1.3, bias=b)
        return (logprob.square() + entropy.square()).sum()

    leaves = [x.clone().requires_grad_() for x in (h, w, b)]
    loss(*leaves).backward()
    for i, leaf in enumerate(leaves):
        direction = torch.randn(leaf.shape, generator=torch.Generator().manual_seed(i))
        moved = [
            [x + (s * 1e-2 * direction if j == i else 0) for j, x in enumerate((h, w, b))] for s in (1, -1)
        ]
        slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-2
        torch.testing.assert_close((leaf.grad * direction).sum(), slope, rtol=5e-3, atol=1e-3)


def test_without_entropy() -> None:
    hidden, weight, _, source, labels = problem()
    h = hidden.clone().requires_grad_()
    logprob, entropy = edge_logprobs(h, weight, source, labels, entropy=False)
    assert torch.equal(entropy, torch.zeros(40))
    assert not entropy.requires_grad
    torch.testing.assert_close(logprob, edge_logprobs(hidden, weight, source, labels)[0])
    logprob.sum().backward()
    reference = hidden.clone().requires_grad_()
    oracle(reference, weight, None, source, labels, 1.0)[0].sum().backward()
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


def test_never_holds_more_than_two_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from trace_kernels.edge_logprobs import _logits

    heights: list[int] = []
    monkeypatch.setitem(
        _EdgeLogprobs.forward.__globals__,
        "_logits",
        lambda h, *a: heights.append(h.shape[0]) or _logits(h, *a),
    )
    monkeypatch.setitem(_EdgeLogprobs.forward.__globals__, "TILE_ELEMENTS", 1000)
    hidden, weight, _, source, labels = problem()
    edge_logprobs(hidden.requires_grad_(), weight, source, labels)[0].sum().backward()
    assert sum(heights) == 2 * 40
    assert max(heights) == 1000 // 129


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(3)}, "hidden: expected floating point"),
        ({"weight": torch.zeros(7, 5)}, r"weight: expected \[V, 4\] as hidden, got \[7, 5\]"),
        ({"bias": torch.zeros(3)}, r"bias: expected \[7\], got \[3\]"),
        ({"labels": torch.zeros(2)}, "labels: expected int64"),
        ({"labels": torch.tensor([0, 7])}, r"labels: values 0\.\.7 outside \[0, 7\)"),
        ({"edge_src": torch.tensor([-1, 0])}, r"edge_src: values -1\.\.0 outside \[0, 3\)"),
        ({"labels": torch.tensor([0])}, "labels: expected 2 entries like edge_src, got 1"),
        ({"weight": torch.zeros(7, 4, device="meta")}, "weight: expected hidden's device cpu, got meta"),
        ({"temperature": 0.0}, "temperature: expected a number above 0, got 0.0"),
        ({"chunk": 0}, "chunk: expected at least 1, got 0"),
    ],
)
def test_errors_name_the_argument(changes: dict, message: str) -> None:
    index = torch.tensor([0, 1])
    call = {
        "hidden": torch.zeros(3, 4),
        "weight": torch.zeros(7, 4),
        "edge_src": index,
        "labels": index,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        edge_logprobs(**call)


def test_head_is_a_linear_layer_until_it_gets_labels() -> None:
    hidden, _, _, source, labels = problem()
    linear = nn.Linear(12, 129, bias=False)
    embedding = nn.Embedding(129, 12)
    linear.weight = embedding.weight
    head = EdgeLogprobHead.adopt(linear)
    assert head is linear
    assert EdgeLogprobHead.adopt(head) is head
    assert head.weight is embedding.weight
    torch.testing.assert_close(head(hidden[None]), nn.functional.linear(hidden[None], embedding.weight))
    pair = head(hidden[None], edge_src=source, labels=labels, temperature=0.5)
    want = edge_logprobs(hidden, embedding.weight, source, labels, temperature=0.5)
    assert all(torch.equal(a, b) for a, b in zip(pair, want, strict=True))
    assert pair[0].grad_fn.saved_tensors[1] is embedding.weight
    pair[0].sum().backward()
    assert embedding.weight.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="edge_src and labels: give both"):
        head(hidden, labels=labels)


def test_weight_may_leave_and_come_back_between_forward_and_backward() -> None:
    hidden, _, _, source, labels = problem()
    head = EdgeLogprobHead(12, 129)
    head(hidden, source, labels)[0].sum().backward()
    want, head.weight.grad = head.weight.grad.clone(), None
    logprob, _ = head(hidden, source, labels)
    # What ZeRO-3's hooks do: the old storage is garbage by the time the backward runs.
    values = head.weight.detach().clone()
    head.weight.data.fill_(float("nan"))
    head.weight.data = values
    logprob.sum().backward()
    assert torch.equal(head.weight.grad, want)


def test_adopts_only_plain_linear_layers() -> None:
    class Adapter(nn.Linear):
        pass

    with pytest.raises(TypeError, match=r"linear: expected exactly torch\.nn\.Linear, got Adapter"):
        EdgeLogprobHead.adopt(Adapter(2, 3))
