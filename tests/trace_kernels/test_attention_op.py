"""The registered op under autograd, autocast, activation checkpointing and torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trace_kernels import TreeLayout, tree_attention
from trace_kernels.backends import blocks, segments, steps

from .attention_cases import inputs, rms

EVERYTHING: dict[str, Any] = {"window": 3, "softcap": 2.0}


def layout_of(*lengths: int) -> TreeLayout:
    """Two branches below the first segment, then another tree and padding."""
    return TreeLayout.from_segments([-1, 0, 0, -1], lengths, pad_to_multiple=4)


@pytest.mark.parametrize("scoring", [{}, EVERYTHING])
@pytest.mark.parametrize("ops", ["as on a CPU", "matmul"])
def test_gradcheck_in_double(scoring: dict[str, Any], ops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ops == "matmul":
        monkeypatch.setattr(segments, "block_ops", lambda device, scoring: blocks.MATMUL)
    monkeypatch.setattr(steps, "GROUP_TOKENS", 3)
    monkeypatch.setattr(steps, "LEAST_PIECE_TOKENS", 2)
    layout = layout_of(3, 2, 2, 0)
    q, k, v, _ = inputs(layout.num_tokens, (4, 2), 2, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(4, dtype=torch.float64))]

    def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
        return tree_attention(q, k, v, layout, sinks=sinks, return_lse=True, **scoring)

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize(
    ("dtype", "scoring"), [(torch.float32, {}), (torch.bfloat16, {}), (torch.float32, EVERYTHING)]
)
def test_opcheck(dtype: torch.dtype, scoring: dict[str, Any]) -> None:
    layout = layout_of(4, 2, 3, 1)
    q, k, v = (x.requires_grad_() for x in inputs(layout.num_tokens, (4, 2), 8, dtype)[:3])
    sinks = torch.randn(4, requires_grad=True) if scoring else None
    torch.library.opcheck(
        torch.ops.trace_kernels.tree_attention.default,
        (q, k, v, sinks, layout.subtree_end, layout.depth, layout.chains,
         0.3, scoring.get("window"), scoring.get("softcap"), "segments"),
    )  # fmt: skip


def test_one_graph_serves_all_layouts_and_lengths() -> None:
    def loss(q, k, v, sinks, layout):  # type: ignore[no-untyped-def]
        out, lse = tree_attention(2 * q, k, v, layout, sinks=sinks, window=6, return_lse=True)
        return out.square().sum() + lse.sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for lengths in ((4, 2, 3, 1), (9, 8, 0, 5), (3, 20, 30, 2), (70, 1, 1, 40), (1, 2, 2, 8)):
        layout = layout_of(*lengths)
        q, k, v = (x.requires_grad_() for x in inputs(layout.num_tokens, (4, 2), 8, torch.float32)[:3])
        leaves = (q, k, v, torch.randn(4, requires_grad=True))
        got, want = compiled(*leaves, layout), loss(*leaves, layout)
        assert torch.equal(got, want)
        for a, b in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
            assert torch.equal(a, b)
    assert 1 <= counter.frame_count <= 2


def test_a_second_derivative_is_refused() -> None:
    layout = layout_of(4, 2, 3, 1)
    q, k, v = (x.requires_grad_() for x in inputs(layout.num_tokens, (4, 2), 8, torch.float32)[:3])
    (dq,) = torch.autograd.grad(tree_attention(q, k, v, layout).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"tree_attention_backward.* no autograd formula"):
        dq.sum().backward()


def test_only_the_lse_is_used() -> None:
    layout = layout_of(4, 2, 3, 1)
    q, k, v = (x.requires_grad_() for x in inputs(layout.num_tokens, (4, 2), 8, torch.float64)[:3])
    backends = ("segments", "reference")
    lses = [tree_attention(q, k, v, layout, backend=name, return_lse=True)[1] for name in backends]
    grads = [torch.autograd.grad(lse.square().sum(), (q, k)) for lse in lses]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("scoring", [{}, EVERYTHING])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant: bool, scoring: dict[str, Any]) -> None:
    layout = layout_of(70, 20, 31, 5)
    q, k, v, grad = inputs(layout.num_tokens, (4, 2), 8, torch.bfloat16)

    def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
        return tree_attention(torch.sin(q), k, v, layout, sinks=sinks, **scoring)

    def grads(run):  # type: ignore[no-untyped-def]
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, torch.ones(4))]
        return torch.autograd.grad(run(*leaves), leaves, grad) if not reentrant else backward(run, leaves)

    def backward(run, leaves):  # type: ignore[no-untyped-def]
        run(*leaves).backward(grad)  # re-entrant checkpoints know no torch.autograd.grad
        return [x.grad for x in leaves]

    for a, b in zip(grads(attend), grads(partial(checkpoint, attend, use_reentrant=reentrant)), strict=True):
        assert torch.equal(a, b)


def test_autocast_casts_as_torch_does() -> None:
    layout = TreeLayout.from_segments([-1], [90])
    q, k, v, grad = inputs(90, (4, 4), 16, torch.float32)
    leaves = [q.requires_grad_(), k.requires_grad_(), v.to(torch.bfloat16).requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        ours = tree_attention(*leaves, layout)
        theirs = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in leaves), is_causal=True)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert rms(ours.float() - theirs[0].transpose(0, 1).float()) <= 5e-3 * rms(theirs)
    assert torch.equal(ours, tree_attention(*(x.to(torch.bfloat16) for x in leaves), layout))
    got = torch.autograd.grad(ours, leaves, grad.to(torch.bfloat16))
    assert [g.dtype for g in got] == [x.dtype for x in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        doubles = [x.double() for x in leaves]
        assert tree_attention(*doubles, layout).dtype == torch.float64


def test_autocast_does_not_reach_the_products() -> None:
    """The matmul path computes in fp32 under autocast too."""
    layout = layout_of(70, 20, 31, 5)
    q, k, v, _ = inputs(layout.num_tokens, (4, 2), 16, torch.bfloat16)
    plain = tree_attention(q, k, v, layout, **EVERYTHING)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(tree_attention(q, k, v, layout, **EVERYTHING), plain)
