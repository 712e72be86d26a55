"""Edge log-probs where logits are -inf or huge: tokens masked out by their bias, and every finite logit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels import edge_logprobs
from trace_kernels.backends import edge_eager
from trace_kernels.edge_top_logprobs import edge_top_logprobs
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference

MASKED = float("-inf")


def by_hand(hidden, weight, bias, source, labels, g, h, softcap=None):  # type: ignore[no-untyped-def]
    """In fp64 without the masked tokens: log-probs [E], entropies [E], gradients of hidden, weight and bias."""
    kept = bias != MASKED
    place = kept.cumsum(0) - 1
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight[kept], bias[kept])]
    z = leaves[0][source] @ leaves[1].T + leaves[2]
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    lse = z.logsumexp(1)
    at_label = z.gather(1, place[labels].clamp(min=0)[:, None])[:, 0]
    # The logit of a masked label is a constant: only the lse has a gradient.
    logprob = torch.where(kept[labels], at_label, 0.0) - lse
    entropy = lse - (torch.exp(z - lse[:, None]) * z).sum(1)
    (logprob @ g.double() + entropy @ h.double()).backward()
    grads = [leaves[0].grad]
    for leaf, like in zip(leaves[1:], (weight, bias), strict=True):
        grads.append(torch.zeros_like(like, dtype=torch.float64).masked_scatter_(
            kept.view(-1, *[1] * (like.ndim - 1)).expand_as(like), leaf.grad))  # fmt: skip
    return [torch.where(kept[labels], logprob.detach(), MASKED), entropy.detach(), *grads]


def problem(vocab: int, seed: int, edges: int = 30):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias, both = (
        torch.randn(*shape, generator=generator) for shape in ((7, 5), (vocab, 5), (vocab,), (2, edges))
    )
    source = torch.randint(0, 7, (edges,), generator=generator)
    return hidden, weight, bias, source, torch.randint(0, vocab, (edges,), generator=generator), *both


@pytest.mark.parametrize("op", [edge_logprobs, edge_logprobs_reference])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_bias_of_minus_infinity_takes_its_token_out_of_the_vocabulary(op, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    vocab = data.draw(st.integers(2, 40))
    hidden, weight, bias, source, labels, g, h = problem(vocab, data.draw(st.integers(0, 99)))
    bias[data.draw(st.lists(st.integers(0, vocab - 1), max_size=vocab - 1, unique=True))] = MASKED
    softcap = data.draw(st.sampled_from([None, 3.0]))
    want = by_hand(hidden, weight, bias, source, labels, g, h, softcap)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(edge_eager, "CPU_TILE", data.draw(st.sampled_from([1, 17, 1 << 22])))
        logprob, entropy = op(*leaves[:2], source, labels, bias=leaves[2], softcap=softcap)
        torch.autograd.backward((logprob, entropy), (g, h))
    for got, expected in zip([logprob, entropy, *(x.grad for x in leaves)], want, strict=True):
        torch.testing.assert_close(got.detach().double(), expected, rtol=1e-5, atol=1e-5)


def test_top_tokens_are_distinct_where_some_are_masked() -> None:
    hidden, weight, bias, source, _, *_ = problem(37, 0)
    bias[3:20] = MASKED
    values, tokens = edge_top_logprobs(hidden, weight, source, 37, bias=bias)
    want = (hidden[source] @ weight.T + bias).double().log_softmax(1)
    assert torch.equal(tokens.sort(1).values, torch.arange(37).expand(30, 37))
    torch.testing.assert_close(values.double(), want.sort(1, descending=True).values, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values.double(), want.gather(1, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e5, 1e30, 2e31, 3e38])
@pytest.mark.parametrize("tile", [1, 3, 1 << 22])
def test_every_finite_logit(size: float, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_eager, "CPU_TILE", tile)
    # Ties, both signs, and either order of the largest and the least.
    signs = torch.tensor([[0.0, 1, 1, -1], [-1.0, -1, -1, -1], [1.0, -1, 0, 1], [-1.0, -0.5, 0, 0.5]])
    hidden, weight = (signs * size).requires_grad_(), torch.eye(4)
    source = torch.arange(4).repeat_interleave(4)
    logprob, entropy = edge_logprobs(hidden, weight, source, torch.arange(4).repeat(4))
    z = hidden.detach().double()
    logp = z.log_softmax(1)
    torch.testing.assert_close(logprob.detach(), logp.float().flatten(), rtol=1e-6, atol=1e-6)
    want = -(logp.exp() * logp).sum(1).repeat_interleave(4)
    torch.testing.assert_close(entropy.detach().double(), want, rtol=1e-6, atol=1e-6)
    entropy.sum().backward()
    assert hidden.grad.isfinite().all()


def test_the_lowest_finite_bias_masks_like_minus_infinity() -> None:
    # Over a temperature below 1 it overflows, so that a finite bias makes an infinite logit.
    hidden, weight, bias, source, labels, g, h = problem(37, 0)
    labels = labels % 3
    found = []
    for mask in (MASKED, torch.finfo(torch.float32).min):
        bias[3:20] = mask
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        both = edge_logprobs(*leaves[:2], source, labels, bias=leaves[2], temperature=0.7)
        torch.autograd.backward(both, (g, h))
        found.append([*(x.detach() for x in both), *(x.grad for x in leaves)])
    for masked, lowest in zip(*found, strict=True):
        torch.testing.assert_close(lowest, masked, rtol=1e-6, atol=1e-6)
        assert masked.isfinite().all()
