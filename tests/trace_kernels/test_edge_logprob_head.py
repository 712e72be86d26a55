"""The output layer that answers with edge log-probs, also where its weight is there in its own forward only."""

from typing import Any

import pytest
import torch
from torch import nn

from trace_kernels import EdgeLogprobHead, edge_logprobs, edge_top_logprobs
from trace_kernels.backends import edge_eager

from .test_edge_logprobs import problem


class Partitioned:
    """What ZeRO-3's hooks do to one module: outside its forward and backward its parameters are empty.

    The storage of the forward is gone by the time of the backward, which gets another.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = [(p, p.detach().clone()) for p in module.parameters()]
        self.gathered = 0
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(lambda _, __, out: self.leave(out))
        self.release()

    def gather(self) -> None:
        self.gathered += 1
        for p, values in self.parts:
            p.data = values.clone()

    def release(self) -> None:
        for p, _ in self.parts:
            p.data.fill_(float("nan"))
            p.data = torch.empty(0)

    def leave(self, out: Any) -> None:
        for x in out if isinstance(out, tuple) else (out,):
            if x.requires_grad:
                x.register_hook(lambda _: self.gather())
        self.release()


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


@pytest.mark.parametrize(
    "given",
    [
        ("edge_src",),
        ("labels",),
        ("top_k",),
        ("labels", "top_k"),
        ("edge_src", "labels", "top_k"),
    ],
)
def test_any_other_mixture_of_questions_is_refused(given: tuple[str, ...]) -> None:
    hidden, _, _, source, labels = problem()
    everything = {"edge_src": source, "labels": labels, "top_k": 3}
    with pytest.raises(ValueError, match="edge_src, labels, top_k: give edge_src with one of the others"):
        EdgeLogprobHead(12, 129)(hidden, **{name: everything[name] for name in given})


@pytest.mark.parametrize("bias", [True, False])
def test_a_partitioned_weight_answers_all_three_questions_with_the_same_gradients(bias: bool) -> None:
    hidden, _, _, source, labels = problem()
    head = EdgeLogprobHead(12, 129, bias=bias)
    parameters = list(head.parameters())
    options = {"temperature": 0.7, "softcap": 3.0, "chunk": 5}
    results = []
    for partitioned in (False, True):
        hooks = Partitioned(head) if partitioned else None
        h = hidden.clone().requires_grad_()
        top = head(h, source, top_k=4, **options)
        assert not any(x.requires_grad for x in top)
        logits = head(h[None]).detach()
        logprob, entropy = head(h, source, labels, **options)
        if hooks:
            assert hooks.gathered == 3
            assert all(p.numel() == 0 for p in parameters)
        (logprob + 0.1 * entropy).sum().backward()
        results.append(
            [*top, logits, logprob.detach(), entropy.detach(), h.grad, *(p.grad for p in parameters)]
        )
        for p in parameters:
            p.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_adopts_only_plain_linear_layers() -> None:
    class Adapter(nn.Linear):
        pass

    with pytest.raises(TypeError, match=r"linear: expected exactly torch\.nn\.Linear, got Adapter"):
        EdgeLogprobHead.adopt(Adapter(2, 3))


def test_the_head_takes_a_softcap() -> None:
    hidden, _, _, source, labels = problem()
    head = EdgeLogprobHead(12, 129)
    got = head(hidden, source, labels, softcap=0.5)
    want = edge_logprobs(hidden, head.weight, source, labels, bias=head.bias, softcap=0.5)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not torch.allclose(got[0], head(hidden, source, labels)[0], atol=1e-3)


def test_the_head_gives_the_likeliest_tokens() -> None:
    hidden, _, _, source, _ = problem()
    head = EdgeLogprobHead(12, 129)
    got = head(hidden[None], source, top_k=3, temperature=0.7, softcap=2.0)
    want = edge_top_logprobs(hidden, head.weight, source, 3, temperature=0.7, bias=head.bias, softcap=2.0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    values, tokens = got
    torch.testing.assert_close(
        values[:, 0], head(hidden, source, tokens[:, 0], temperature=0.7, softcap=2.0)[0]
    )


def test_the_head_hands_chunk_and_backend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    inner = edge_eager.forward
    monkeypatch.setattr(edge_eager, "forward", lambda *args: seen.append(args[-1]) or inner(*args))
    hidden, _, _, source, labels = problem()
    head = EdgeLogprobHead(12, 129)
    head(hidden, source, labels, chunk=7, backend="eager")
    assert seen == [7]
    got = head(hidden, source, labels, entropy=False, backend="liger")
    assert seen == [7]
    torch.testing.assert_close(got[0], head(hidden, source, labels)[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"backend: expected one of auto, eager, .* got 'eagre'"):
        head(hidden, source, labels, backend="eagre")
