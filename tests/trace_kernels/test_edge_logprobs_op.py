"""Edge log-probs as an op of PyTorch: under torch.compile, its memory, the gradients it is asked for."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from trace_kernels import edge_logprobs, edge_logprobs_op
from trace_kernels.backends import edge_eager
from trace_kernels.edge_logprobs_op import Logits, Needs
from trace_kernels.edges import Edges

from .test_edge_logprobs import problem


@pytest.mark.parametrize("entropy", [True, False])
def test_opcheck(entropy: bool) -> None:
    hidden, weight, bias, source, labels = problem()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    torch.library.opcheck(
        torch.ops.trace_kernels.edge_logprobs, (*leaves, source, labels, 0.7, 30.0, entropy, 7, "eager", None)
    )


def test_one_compilation_serves_every_number_of_edges() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    _, weight, _, _, _ = problem()
    w = weight.requires_grad_()

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def loss(h: torch.Tensor, w: torch.Tensor, source: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logprob, entropy = edge_logprobs(h, w, source, labels, temperature=0.7)
        return (logprob + 0.1 * entropy).sum()

    for tokens, edges in ((23, 40), (7, 5), (31, 61)):
        hidden, _, _, source, labels = problem(tokens=tokens, edges=edges)
        grads = []
        for call in (loss, loss._torchdynamo_orig_callable):
            h = hidden.clone().requires_grad_()
            grads.append(torch.autograd.grad(call(h, w, source, labels), (h, w)))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert counter.frame_count == 1


class Allocations(TorchDispatchMode):
    """Elements of every new storage."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []  # no address is used twice

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.kept.append(x)
                self.sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tiles_are_all_the_logits_there_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tile, columns = 2048, 64
    monkeypatch.setattr(edge_eager, "CPU_TILE", tile)
    monkeypatch.setattr(edge_eager, "VOCAB_TILE", columns)
    hidden, weight, _, source, labels = problem(tokens=200, dim=8, vocab=5000, edges=300, dtype=dtype)
    edges, logits = Edges.of(source, labels, 200, 5000), Logits(1.0, None)
    ones = torch.ones(300)
    with Allocations() as forward:
        _, lse, entropy = edge_eager.forward(hidden, weight, None, edges, logits, True, None)
    with Allocations() as backward:
        edge_eager.backward(
            edges.sum_by_pair(ones), edges.sum_by_source(ones), edges.sum_by_source(ones), lse, entropy,
            hidden, weight, None, edges, logits, Needs(True, True, False), None,
        )  # fmt: skip
    rows = len(edges.sources) * 8
    for found in (forward, backward):
        large = sorted(size for size in found.sizes.values() if size > max(rows, 16 * columns))
        weights = [size for size in large if size >= weight.numel()]
        assert len(weights) <= 2  # the weight itself, and its gradient in its own type
        assert all(size <= tile for size in large[: len(large) - len(weights)])
        assert len(large) - len(weights) == 2


def test_the_backward_gives_only_what_is_needed() -> None:
    hidden, weight, bias, source, labels = problem()
    for frozen in (0, 1, 2):
        leaves = [x.clone().requires_grad_(i != frozen) for i, x in enumerate((hidden, weight, bias))]
        logprob, _ = edge_logprobs(leaves[0], leaves[1], source, labels, bias=leaves[2])
        logprob.sum().backward()
        assert [x.grad is None for x in leaves] == [i == frozen for i in range(3)]


def test_an_entropy_that_is_only_looked_at_costs_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    program = edge_logprobs_op.EdgeProgram(
        edge_eager.forward, lambda *a: given.append(a[2]) or edge_eager.backward(*a)
    )
    monkeypatch.setattr(edge_logprobs_op, "_program", lambda name: program)
    hidden, weight, _, source, labels = problem()
    logprob, entropy = edge_logprobs(hidden.requires_grad_(), weight, source, labels)
    assert entropy.requires_grad
    logprob.sum().backward()
    assert given == [None]
