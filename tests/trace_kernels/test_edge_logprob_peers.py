"""Edge log-probs by other libraries, and the likeliest tokens."""

import pytest
import torch

from trace_kernels import edge_logprobs
from trace_kernels.backends import edge_eager
from trace_kernels.edge_top_logprobs import edge_top_logprobs
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference as oracle

from .test_edge_logprobs import problem


@pytest.mark.parametrize("with_bias", [False, True])
def test_liger_gives_the_same_numbers(with_bias: bool) -> None:
    hidden, weight, bias, source, labels = problem()
    results = []
    for backend in ("liger", "eager"):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        used = leaves[2] if with_bias else None
        logprob, entropy = edge_logprobs(
            leaves[0], leaves[1], source, labels, bias=used, temperature=0.7, entropy=False, backend=backend
        )
        assert torch.equal(entropy, torch.zeros(40))
        (logprob * torch.linspace(-1, 1, 40)).sum().backward()
        results.append([logprob.detach(), *(x.grad for x in leaves if x.grad is not None)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("peer", "options", "reason"),
    [
        ("liger", {}, "gives no entropy: pass entropy=False"),
        ("liger", {"entropy": False, "softcap": 2.0}, "has no softcap"),
        ("liger", {"entropy": False, "dtype": torch.bfloat16}, "takes fp32 only"),
        ("cce", {}, "gives no entropy: pass entropy=False"),
        ("cce", {"entropy": False, "temperature": 0.5}, "has no temperature but 1, got 0.5"),
        ("cce", {"entropy": False}, "takes bf16 or fp16"),
        ("cce", {"entropy": False, "dtype": torch.bfloat16}, "needs an accelerator, hidden is on cpu"),
    ],
)
def test_a_peer_that_would_give_something_else_is_refused(peer: str, options: dict, reason: str) -> None:
    hidden, weight, _, source, labels = problem(dtype=options.pop("dtype", torch.float32))
    with pytest.raises(ValueError, match=f"backend: '{peer}' .*{reason}"):
        edge_logprobs(hidden, weight, source, labels, backend=peer, **options)


def test_peers_check_indices_too() -> None:
    hidden, weight, _, source, labels = problem()
    with pytest.raises(ValueError, match=r"labels: values .* outside \[0, 129\)"):
        edge_logprobs(hidden, weight, source, labels + 200, entropy=False, backend="liger")


@pytest.mark.parametrize("with_bias", [False, True])
def test_without_edges_a_peer_gives_zero_gradients(with_bias: bool) -> None:
    hidden, weight, bias, _, _ = problem()
    leaves, none = [x.requires_grad_() for x in (hidden, weight, bias)], torch.zeros(0, dtype=torch.int64)
    used = leaves[2] if with_bias else None
    logprob, entropy = edge_logprobs(*leaves[:2], none, none, bias=used, entropy=False, backend="liger")
    assert logprob.shape == entropy.shape == (0,)
    assert not entropy.requires_grad
    logprob.sum().backward()
    for x in leaves if with_bias else leaves[:2]:
        assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("lift", [0.0, 1e-6])
def test_a_peers_log_prob_is_never_above_0(lift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(rows, weight, labels, bias, temperature):  # type: ignore[no-untyped-def]
        return rows.sum(2) * 0 + lift - torch.arange(rows.shape[1]) * 0.5

    monkeypatch.setattr(
        "liger_kernel.chunked_loss.fused_linear_ppo.LigerFusedLinearPPOBase.chunk_forward", forward
    )
    hidden, weight, _, source, labels = problem()
    h = hidden.requires_grad_()
    logprob, _ = edge_logprobs(h, weight, source, labels, entropy=False, backend="liger")
    assert logprob[0] == 0
    assert (logprob <= 0).all()
    assert logprob[1] == lift - 0.5


@pytest.mark.parametrize("k", [1, 5, 129])
@pytest.mark.parametrize("chunk", [None, 3])
def test_top_logprobs(k: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_eager, "CPU_TILE", 50)
    hidden, weight, bias, source, _ = problem()
    options = {"temperature": 0.7, "softcap": 4.0, "bias": bias}
    values, tokens = edge_top_logprobs(hidden.requires_grad_(), weight, source, k, chunk=chunk, **options)
    assert values.shape == tokens.shape == (40, k)
    assert not values.requires_grad
    for column in range(k):
        want, _ = oracle(hidden, weight, source, tokens[:, column], **options)
        torch.testing.assert_close(values[:, column], want, rtol=1e-5, atol=1e-5)
    z = 4 * torch.tanh((hidden[source] @ weight.T + bias) / 4) / 0.7
    assert torch.equal(tokens.sort(1).values, z.topk(k).indices.sort(1).values)
    assert (values <= 0).all()
    assert (values.diff(dim=1) <= 0).all()


def test_top_logprobs_of_no_edges_and_of_too_many_tokens() -> None:
    hidden, weight, _, source, _ = problem()
    values, tokens = edge_top_logprobs(hidden, weight, source[:0], 3)
    assert values.shape == tokens.shape == (0, 3)
    with pytest.raises(ValueError, match="k: expected 1 to 129, the vocabulary, got 130"):
        edge_top_logprobs(hidden, weight, source, 130)
    with pytest.raises(ValueError, match=r"edge_src: values 23\.\.23 outside"):
        edge_top_logprobs(hidden, weight, torch.tensor([23]), 1)
