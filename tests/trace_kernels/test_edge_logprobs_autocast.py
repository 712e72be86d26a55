"""Under autocast hidden states and weight are multiplied in its type, as in a linear layer; results stay fp32."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trace_kernels import edge_logprobs, edge_top_logprobs
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference as oracle

from .test_edge_logprobs import problem

TYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("hidden_type", TYPES)
@pytest.mark.parametrize("weight_type", TYPES)
def test_operands_are_rounded_as_a_linear_layers_are(
    hidden_type: torch.dtype, weight_type: torch.dtype
) -> None:
    hidden, weight, _, source, labels = problem()
    h, w = hidden.to(hidden_type).requires_grad_(), weight.to(weight_type).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.nn.functional.linear(h, w)
        logprob, entropy = edge_logprobs(h, w, source, labels)
    assert logits.dtype == torch.bfloat16
    assert logprob.dtype == entropy.dtype == torch.float32
    rounded = [x.detach().bfloat16().double().requires_grad_() for x in (h, w)]
    want = oracle(*rounded, source, labels)
    for got, exact in zip((logprob, entropy), want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=3e-5)
    (logprob + 0.1 * entropy).sum().backward()
    (want[0] + 0.1 * want[1]).sum().backward()
    for x, exact in zip((h, w), rounded, strict=True):
        assert x.grad.dtype == x.dtype
        assert (x.grad.double() - exact.grad).norm() <= 5e-3 * exact.grad.norm()


def test_products_take_one_type_so_that_kernels_of_half_types_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from trace_kernels.backends import edge_eager

    seen = []
    for name in ("forward", "backward"):
        inner = getattr(edge_eager, name)

        def spy(*args, inner=inner, first=0 if name == "forward" else 5):  # type: ignore[no-untyped-def]
            seen.append((args[first].dtype, args[first + 1].dtype))
            return inner(*args)

        monkeypatch.setattr(edge_eager, name, spy)
    hidden, weight, _, source, labels = problem()
    h = hidden.requires_grad_()
    with torch.autocast("cpu", torch.float16):
        logprob, _ = edge_logprobs(h, weight.bfloat16(), source, labels)
    logprob.sum().backward()
    assert seen == [(torch.float16, torch.float16)] * 2


def test_double_precision_is_left_alone_and_so_is_a_disabled_autocast() -> None:
    hidden, weight, _, source, labels = problem()
    want = edge_logprobs(hidden, weight, source, labels)
    wide = edge_logprobs(hidden.double(), weight.double(), source, labels)
    with torch.autocast("cpu", torch.bfloat16):
        got = edge_logprobs(hidden.double(), weight.double(), source, labels)
        with torch.autocast("cpu", enabled=False):
            off = edge_logprobs(hidden, weight, source, labels)
    assert all(torch.equal(a, b) for a, b in zip((*got, *off), (*wide, *want), strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_checkpointing_changes_nothing(reentrant: bool, autocast: bool) -> None:
    hidden, weight, _, source, labels = problem()
    results = []
    for recompute in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if recompute:
                pair = checkpoint(edge_logprobs, h, w, source, labels, use_reentrant=reentrant)
            else:
                pair = edge_logprobs(h, w, source, labels)
        (pair[0] + pair[1]).sum().backward()
        results.append((*pair, h.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_likeliest_tokens_are_of_the_same_logits() -> None:
    hidden, weight, _, source, _ = problem()
    want = edge_top_logprobs(hidden.bfloat16(), weight.bfloat16(), source, 3)
    with torch.autocast("cpu", torch.bfloat16):
        got = edge_top_logprobs(hidden, weight, source, 3)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_peer_gets_the_same_types() -> None:
    hidden, weight, _, source, labels = problem()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"takes fp32 only, got torch\.bfloat16 and torch\.bfloat16"),
    ):
        edge_logprobs(hidden, weight, source, labels, entropy=False, backend="liger")
