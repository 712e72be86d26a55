"""Arguments of edge log-probs that do not fit are refused by name; the extremes of what fits stay finite."""

import numpy as np
import pytest
import torch

from trace_kernels import edge_logprobs
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference as oracle

from .test_edge_logprobs import problem


def arguments(**changes: object) -> dict:
    index = torch.tensor([0, 1])
    call = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(7, 4), "edge_src": index, "labels": index}
    return {**call, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(3)}, r"hidden: expected \[T, d\], got \[3\]"),
        ({"weight": torch.zeros(7, 5)}, r"weight: expected \[V, 4\] as hidden, got \[7, 5\]"),
        ({"bias": torch.zeros(3)}, r"bias: expected \[7\], got \[3\]"),
        ({"labels": torch.zeros(2)}, "labels: expected int64"),
        ({"labels": torch.tensor([0, 7])}, r"labels: values 0\.\.7 outside \[0, 7\)"),
        ({"edge_src": torch.tensor([-1, 0])}, r"edge_src: values -1\.\.0 outside \[0, 3\)"),
        ({"labels": torch.tensor([0])}, "labels: expected 2 entries like edge_src, got 1"),
        ({"weight": torch.zeros(7, 4, device="meta")}, "weight: expected hidden's device cpu, got meta"),
        ({"temperature": 0.0}, "temperature: expected a number from 1e-06 to 1e\\+06, got 0.0"),
        ({"temperature": float("inf")}, "temperature: expected a number from 1e-06 to 1e\\+06, got inf"),
        ({"softcap": -1.0}, "softcap: expected a number from 1e-06 to 1e\\+06, got -1.0"),
        ({"softcap": float("inf")}, "softcap: expected a number from 1e-06 to 1e\\+06, got inf"),
        ({"backend": "eagre"}, "backend: expected one of auto, eager, .* got 'eagre'"),
        ({"backend": "triton"}, "backend: 'triton' needs an accelerator, hidden is on cpu"),
        (
            {"backend": "triton", "weight": torch.zeros(7, 4).double()},
            "backend: 'triton' takes fp32, bf16 and fp16",
        ),
        ({"chunk": 0}, "chunk: expected at least 1, got 0"),
    ],
)
def test_errors_name_the_argument(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edge_logprobs(**arguments(**changes))


@pytest.mark.parametrize("name", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_types_that_are_no_floats_to_multiply_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    shape = {"hidden": (3, 4), "weight": (7, 4), "bias": (7,)}[name]
    with pytest.raises(ValueError, match=f"{name}: expected fp64, fp32, bf16 or fp16, got {dtype}"):
        edge_logprobs(**arguments(**{name: torch.zeros(shape, dtype=dtype)}))


@pytest.mark.parametrize("name", ["temperature", "softcap"])
@pytest.mark.parametrize("wrong", ["1", torch.ones((), requires_grad=True), 1j, True])
def test_a_number_is_a_number(name: str, wrong: object) -> None:
    with pytest.raises(TypeError, match=f"{name}: expected a number, got {type(wrong).__name__}"):
        edge_logprobs(**arguments(**{name: wrong}))


@pytest.mark.parametrize("wrong", [2.5, "2", True, torch.tensor(2)])
def test_a_chunk_is_a_whole_number(wrong: object) -> None:
    with pytest.raises(
        TypeError, match=f"chunk: expected a whole number or None, got {type(wrong).__name__}"
    ):
        edge_logprobs(**arguments(chunk=wrong))


@pytest.mark.parametrize("name", ["temperature", "softcap"])
@pytest.mark.parametrize("wrong", [1e-40, 9e-7, float("nan"), 1e40])
def test_numbers_that_fp32_loses_are_refused(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a number from 1e-06 to 1e"):
        edge_logprobs(**arguments(**{name: wrong}))


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("softcap", [1e-6, 1.0, 1e6])
def test_the_outermost_numbers_give_what_the_oracle_gives(temperature: float, softcap: float) -> None:
    hidden, weight, bias, source, labels = problem()
    results = []
    for op, dtype in ((edge_logprobs, torch.float32), (oracle, torch.float64)):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight, bias)]
        pair = op(*leaves[:2], source, labels, bias=leaves[2], temperature=temperature, softcap=softcap)
        (pair[0] + pair[1]).sum().backward()
        results.append([*(x.detach() for x in pair), *(x.grad for x in leaves)])
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        # One rounding of a logit, up to 1e7, changes the probabilities themselves where they are divided by 1e-6.
        if temperature >= 1 or softcap <= 1e-6:
            assert float((got - want).norm()) <= 1e-5 * float(want.norm()) + 1e-5


def test_numbers_of_numpy_are_numbers() -> None:
    hidden, weight, _, source, labels = problem()
    got = edge_logprobs(hidden, weight, source, labels, temperature=np.float32(0.5), chunk=np.int64(7))
    want = edge_logprobs(hidden, weight, source, labels, temperature=0.5, chunk=7)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_vocabulary_has_no_labels() -> None:
    with pytest.raises(ValueError, match=r"labels: values 0\.\.1 outside \[0, 0\)"):
        edge_logprobs(**arguments(weight=torch.zeros(0, 4)))
    none = torch.zeros(0, dtype=torch.int64)
    assert edge_logprobs(**arguments(weight=torch.zeros(0, 4), edge_src=none, labels=none))[0].shape == (0,)


@pytest.mark.parametrize("name", ["hidden", "weight", "edge_src", "labels", "bias"])
def test_what_is_no_tensor_is_refused_by_name(name: str) -> None:
    wrong = "zeros" if name == "bias" else None
    with pytest.raises(TypeError, match=f"{name}: expected a tensor, got {type(wrong).__name__}"):
        edge_logprobs(**arguments(**{name: wrong}))
