"""Edge log-probs by other libraries, and the likeliest tokens."""

import sys
from types import ModuleType

import pytest
import torch

from trace_kernels import edge_logprobs
from trace_kernels.backends import edge_eager, edge_peers
from trace_kernels.edge_logprobs_op import Logits
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


def linear_cross_entropy(e, c, targets, softcap=None, reduction="mean", filter_eps="high"):  # type: ignore[no-untyped-def]
    """Cut cross-entropy's function, as far as it is used."""
    assert reduction == "none"
    assert filter_eps is None  # otherwise it drops gradients
    assert e.dtype == c.dtype
    return -oracle(e, c, torch.arange(len(e)), targets, softcap=softcap)[0]


def test_cut_cross_entropy_is_called_by_its_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cut_cross_entropy")
    module.linear_cross_entropy = linear_cross_entropy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    monkeypatch.setattr(edge_peers, "_why_not", lambda *_: None)  # of all reasons, only the CPU holds here
    hidden, weight, _, source, labels = problem(dtype=torch.bfloat16)
    logits = Logits(1.0, 2.0)
    logprob, _ = edge_peers.run("cce", hidden, weight, None, source, labels, logits, False)
    want, _ = edge_logprobs(hidden, weight, source, labels, softcap=2.0)
    torch.testing.assert_close(logprob, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("peer", "options", "reason"),
    [
        ("liger", {}, "gives no entropy: pass entropy=False"),
        ("liger", {"entropy": False, "softcap": 2.0}, "has no softcap"),
        ("liger", {"entropy": False, "dtype": torch.bfloat16}, "takes fp32 only"),
        ("cce", {"entropy": False, "temperature": 0.5}, "no temperature but 1"),
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
