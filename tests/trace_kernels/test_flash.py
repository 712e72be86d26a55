"""The gathered-path backend against the dense oracle, under FlashAttention's varlen contract."""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels import TreeLayout, tree_attention
from trace_kernels.backends import flash
from trace_kernels.reference.tree_attention import masked_attention, tree_attention_reference
from trace_kernels.scoring import Scoring

from .attention_cases import inputs, oracle_mask
from .drawn_forests import forests


def varlen(
    q, k, v, cu_q, cu_k, max_q, max_k, *,
    softmax_scale, causal, deterministic=False, window_size=(-1, -1), softcap=0.0,
):  # fmt: skip
    """`flash_attn_varlen_func`: sequence i's queries are aligned with the END of its keys."""
    assert causal
    assert deterministic  # its backward adds with atomics otherwise
    assert cu_q.dtype == cu_k.dtype == torch.int32
    group = q.shape[1] // k.shape[1]
    outs = []
    for i in range(len(cu_q) - 1):
        qi = q[cu_q[i] : cu_q[i + 1]].float().transpose(0, 1)
        ki, vi = (
            x[cu_k[i] : cu_k[i + 1]].float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v)
        )
        n, m = qi.shape[1], ki.shape[1]
        assert n <= max_q
        assert m <= max_k
        # How far a key is left of the query's own place; -1 means no bound on that side.
        left = torch.arange(n)[:, None] + m - n - torch.arange(m)
        mask = (left >= 0) & ((left <= window_size[0]) | (window_size[0] < 0))
        scores = qi @ ki.transpose(1, 2) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        outs.append((scores.softmax(-1) @ vi).transpose(0, 1))
    return torch.cat(outs).to(q.dtype)


@pytest.fixture(autouse=True)
def fake_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(flash, "is_available", lambda: True)


@settings(deadline=None, max_examples=500)
@given(
    forest=forests(max_nodes=9, max_length=5),
    pad=st.integers(1, 8),
    window=st.none() | st.integers(1, 12),
    softcap=st.none() | st.floats(0.5, 4),
)
def test_equals_the_oracle(forest, pad, window, softcap):
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=pad)
    *qkv, weights = inputs(layout.num_tokens, (4, 2), 16, torch.bfloat16, seed=forest.num_tokens)
    q, k, v = (x.requires_grad_() for x in qkv)
    out = tree_attention(q, k, v, layout, window=window, softcap=softcap, backend="flash")
    mask = oracle_mask(forest, layout.num_tokens, window)
    expected = masked_attention(q.float(), k.float(), v.float(), mask, Scoring(0.25, softcap=softcap))[0]
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    grads = torch.autograd.grad((out.float() * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for got, want in zip(grads, wanted, strict=True):
        assert (got - want).float().norm() <= 0.02 * want.float().norm() + 1e-6


def test_gradients_of_a_prefix_with_many_copies_keep_their_bits():
    """Below one prefix, 64 branches of one token: 65 copies of its keys and values, whose gradients all point the
    same way. Summed in bf16, the later ones are lost against the sum so far."""
    branches, prefix = 64, 8
    layout = TreeLayout.from_segments([-1] + [0] * branches, [prefix] + [1] * branches)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 16, generator=generator).expand(layout.num_tokens, -1, -1)
    q = (q + 0.1 * torch.randn(q.shape, generator=generator)).to(torch.bfloat16).requires_grad_()
    k, v = (
        torch.randn(layout.num_tokens, 2, 16, generator=generator).to(torch.bfloat16).requires_grad_()
        for _ in range(2)
    )
    weights = torch.rand(2, 16, generator=generator).expand(q.shape)
    out = tree_attention(q, k, v, layout, backend="flash")
    grads = torch.autograd.grad((out.float() * weights).sum(), (k, v))
    expected = tree_attention_reference(q.float(), k.float(), v.float(), layout, Scoring(0.25))[0]
    wanted = torch.autograd.grad((expected * weights).sum(), (k, v))
    assert all(got.dtype == torch.bfloat16 for got in grads)
    for got, want in zip(grads, wanted, strict=True):
        got, want = got[:prefix].float(), want[:prefix].float()
        assert (got - want).norm() <= 3e-3 * want.norm()  # bf16 in and out; 8e-3 when summed in bf16


def test_gradients_are_summed_in_pieces(monkeypatch):
    layout = TreeLayout.from_segments([-1, 0, 0], [5, 3, 4])
    x = torch.randn(12, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    gather = flash.path_gather(layout)[0]
    grad = torch.randn(len(gather), 2, 16).to(torch.bfloat16)
    (whole,) = torch.autograd.grad(flash._Gather.apply(x, gather), x, grad)
    monkeypatch.setattr(flash, "SUM_ELEMENTS", 2 * 16 * 3)
    (pieces,) = torch.autograd.grad(flash._Gather.apply(x, gather), x, grad)
    (exact,) = torch.autograd.grad(x.float()[gather], x, grad.float())
    assert torch.equal(whole, pieces)
    torch.testing.assert_close(whole.float(), exact.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "options", "reason"),
    [
        (torch.float32, {}, "computes in bfloat16 and float16, not torch.float32"),
        (torch.bfloat16, {"sinks": torch.zeros(2)}, "has no sinks"),
        (torch.bfloat16, {"return_lse": True}, "has no lse"),
    ],
)
def test_refuses_what_it_cannot(dtype, options, reason):
    q = torch.randn(3, 2, 16, dtype=dtype)
    with pytest.raises(ValueError, match=f"backend: 'flash' {reason}; use backend='auto'"):
        tree_attention(q, q, q, TreeLayout.from_segments([-1], [3]), backend="flash", **options)


def test_names_the_missing_package(monkeypatch):
    monkeypatch.setattr(flash, "is_available", lambda: False)
    q = torch.randn(3, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ImportError, match="pip install --no-build-isolation flash-attn"):
        tree_attention(q, q, q, TreeLayout.from_segments([-1], [3]), backend="flash")
