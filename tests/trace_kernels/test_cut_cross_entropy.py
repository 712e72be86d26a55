"""Cut cross-entropy as a backend, by the two signatures it has had: the release's, and the later sources'.

Its programs need a GPU, so doubles with its arguments, and its way of adding gradients up, stand in for it; tensors
that call themselves CUDA's reach it by the public function.
"""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from trace_kernels import edge_logprobs
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference as oracle

from .test_edge_logprobs import problem

BLOCK = 128  # tokens and edges whose part of a gradient is added at a time


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on an accelerator."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


class Loss(torch.autograd.Function):
    """Gradients as there: blocks of a product in fp32, added up in the half type unless fp32 is asked for."""

    @staticmethod
    def forward(ctx: Any, e, c, bias, targets, softcap, wide_e, wide_c):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(e, c, bias, targets)
        ctx.options = (softcap, wide_e, wide_c)
        return -oracle(e, c, torch.arange(len(e)), targets, bias=bias, softcap=softcap)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        e, c, bias, targets = ctx.saved_tensors
        softcap, wide_e, wide_c = ctx.options
        with torch.enable_grad():
            z = torch.nn.functional.linear(e.float(), c.float(), None if bias is None else bias.float())
            z = z.detach().requires_grad_()
            capped = z if softcap is None else softcap * torch.tanh(z / softcap)
            loss = torch.nn.functional.cross_entropy(capped, targets, reduction="none")
        (dz,) = torch.autograd.grad(loss, z, grad)
        narrow = dz.to(e.dtype).float()
        de = torch.zeros_like(e, dtype=torch.float32 if wide_e else None)
        dc = torch.zeros_like(c, dtype=torch.float32 if wide_c else None)
        for first in range(0, len(c), BLOCK):
            tokens = slice(first, first + BLOCK)
            de += (narrow[:, tokens] @ c[tokens].float()).to(de.dtype)
        for first in range(0, len(e), BLOCK):
            edges = slice(first, first + BLOCK)
            dc += (narrow[edges].T @ e[edges].float()).to(dc.dtype)
        db = None if bias is None else dz.sum(0).to(bias.dtype)
        return de.to(e.dtype), dc.to(c.dtype), db, None, None, None, None


def released(  # type: ignore[no-untyped-def]
    e,
    c,
    targets,
    ignore_index=-100,
    softcap=None,
    reduction="mean",
    shift=False,
    filter_eps="high",
    impl="cce",
):
    assert (ignore_index, reduction, shift, filter_eps, impl) == (-100, "none", False, None, "cce")
    return Loss.apply(e, c, None, targets, softcap, False, False)


def later(  # type: ignore[no-untyped-def]
    e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0, filter_eps="auto",
    accum_e_fp32=False, accum_c_fp32=False, filter_e_grad=True, filter_c_grad=True, impl="cce",
    vocab_parallel_options=None,
):  # fmt: skip
    assert (ignore_index, reduction, shift, filter_eps, impl) == (-100, "none", 0, None, "cce")
    return Loss.apply(e, c, bias, targets, softcap, accum_e_fp32, accum_c_fp32)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(function: Any) -> None:
        module = ModuleType("cut_cross_entropy")
        module.linear_cross_entropy = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)

    return put


def call(
    hidden: torch.Tensor, weight: torch.Tensor, source: Any, labels: Any, **options: Any
) -> torch.Tensor:
    tensors = [x.as_subclass(OnCuda) for x in (hidden, weight, source, labels)]
    if options.get("bias") is not None:
        options["bias"] = options["bias"].as_subclass(OnCuda)
    logprob, entropy = edge_logprobs(*tensors, entropy=False, backend="cce", **options)
    assert logprob.dtype == torch.float32
    assert not entropy.requires_grad
    assert (logprob <= 0).all()
    return logprob.as_subclass(torch.Tensor)


@pytest.mark.parametrize("function", [released, later])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_log_probs_are_the_same_with_both_versions(
    function: Any, softcap: float | None, install: Any
) -> None:
    install(function)
    hidden, weight, _, source, labels = problem(dtype=torch.bfloat16)
    got = call(hidden, weight, source, labels, softcap=softcap)
    want, _ = edge_logprobs(hidden, weight, source, labels, softcap=softcap)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    weight.requires_grad_()
    with torch.no_grad():
        assert torch.equal(call(hidden, weight, source, labels, softcap=softcap), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_later_version_are_added_up_in_fp32(dtype: torch.dtype, install: Any) -> None:
    install(later)
    hidden, weight, bias, source, labels = problem(tokens=9, dim=16, vocab=50_257, edges=12, dtype=dtype)
    g = torch.randn(12, generator=torch.Generator().manual_seed(5))
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    (call(*leaves[:2], source, labels, bias=leaves[2]) @ g).backward()
    wide = [x.detach().double().requires_grad_() for x in leaves]
    (oracle(*wide[:2], source, labels, bias=wide[2])[0] @ g.double()).backward()
    for x, exact in zip(leaves, wide, strict=True):
        assert (x.grad.double() - exact.grad).norm() <= 5e-3 * exact.grad.norm()


def test_the_release_adds_gradients_up_in_the_half_type_and_is_refused_for_them(install: Any) -> None:
    hidden, weight, _, _, _ = problem(tokens=12, dim=16, vocab=50_257, edges=12, dtype=torch.bfloat16)
    labels = torch.arange(12)
    h = hidden.clone().requires_grad_()
    released(h, weight, labels, reduction="none", filter_eps=None).sum().backward()
    wide = hidden.double().requires_grad_()
    (-oracle(wide, weight.double(), torch.arange(12), labels)[0]).sum().backward()
    assert (h.grad.double() - wide.grad).norm() > 5e-3 * wide.grad.norm()  # why it is refused
    install(released)
    for leaves in ((hidden.clone().requires_grad_(), weight), (hidden, weight.clone().requires_grad_())):
        with pytest.raises(
            ValueError,
            match=r"'cce' adds gradients up in torch.bfloat16 .* lacks accum_e_fp32 and accum_c_fp32",
        ):
            call(*leaves, torch.arange(12), labels)


def test_a_bias_needs_the_later_version(install: Any) -> None:
    hidden, weight, bias, source, labels = problem(dtype=torch.bfloat16)
    install(released)
    with pytest.raises(ValueError, match="'cce' has no bias in the installed version of cut-cross-entropy"):
        call(hidden, weight, source, labels, bias=bias)
    install(later)
    want, _ = edge_logprobs(hidden, weight, source, labels, bias=bias)
    got = call(hidden, weight, source, labels, bias=bias)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_not_installed_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    hidden, weight, _, source, labels = problem(dtype=torch.bfloat16)
    with pytest.raises(ImportError, match="cut_cross_entropy"):
        call(hidden, weight, source, labels)
