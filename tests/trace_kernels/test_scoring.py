"""Window, sinks and softcap against attention computed per rollout by torch, which knows no tree."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from trace_kernels import TreeLayout, tree_attention

from .attention_cases import HEADS, inputs, results, rms
from .forests import ADVERSARIAL, Forest, random_forest


def per_rollout(
    forest: Forest,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """[T, H, D]: every rollout on its own, a shared token's output taken from the first that holds it."""
    out: list[torch.Tensor | None] = [None] * forest.num_tokens
    for rollout in forest.rollouts():
        n = len(rollout)
        query, key, value = (x[rollout].transpose(0, 1) for x in (q, k, v))
        key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=0) for x in (key, value))
        above = torch.arange(n)[:, None] - torch.arange(n)
        seen = (above >= 0) & (above < (n if window is None else window))
        bias = torch.zeros(n, n, dtype=q.dtype).masked_fill(~seen, float("-inf")).expand(q.shape[1], n, n)
        if sinks is not None:
            # A key and a value of zeros, whose score is the sink.
            key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
            bias = torch.cat([bias, sinks.to(q.dtype)[:, None, None].expand(-1, n, 1)], dim=2)
        if softcap is None:
            rows = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=bias[None])[
                0
            ]
        else:
            scores = softcap * torch.tanh(query @ key.mT * q.shape[-1] ** -0.5 / softcap)
            rows = (scores + bias).softmax(-1) @ value
        for place, token in enumerate(rollout):
            if out[token] is None:
                out[token] = rows[:, place]
    return torch.stack([x for x in out if x is not None])


def both(
    forest: Forest, backend: str, dtype: torch.dtype, heads: tuple[int, int], options: dict[str, Any]
) -> Any:
    """Results of a backend and of torch per rollout, from the same inputs."""
    layout = TreeLayout.from_segments(forest.parents, forest.lengths)
    *qkv, grad = inputs(forest.num_tokens, heads, 16, dtype)
    sinks = options.pop("sinks", None)
    sinks = None if sinks is None else sinks.to(dtype)

    def ours(q, k, v, sinks):  # type: ignore[no-untyped-def]
        return tree_attention(q, k, v, layout, sinks=sinks, backend=backend, return_lse=True, **options)

    def theirs(q, k, v, sinks):  # type: ignore[no-untyped-def]
        out = per_rollout(forest, q, k, v, sinks, options.get("window"), options.get("softcap"))
        return out, torch.zeros(out.shape[:2])

    return results(ours, *qkv, grad, sinks), results(theirs, *qkv, grad, sinks)


@pytest.mark.parametrize("backend", ["reference", "segments"])
def test_equals_torch_per_rollout(backend: str) -> None:
    rng = random.Random(1)
    forests = [*ADVERSARIAL.values(), *(random_forest(rng, rng.randint(1, 9), 12) for _ in range(20))]
    for i, forest in enumerate(forests):
        heads = HEADS[i % 3]
        options = {"window": rng.choice([None, 1, 4, 64])}
        options |= rng.choice([{}, {"sinks": torch.randn(heads[0])}, {"softcap": 0.7}])
        got, want = both(forest, backend, torch.float64, heads, options)
        for name in want.keys() - {"lse"}:
            torch.testing.assert_close(got[name], want[name], rtol=1e-9, atol=1e-9)


def test_softcap_and_sinks_do_something() -> None:
    forest = Forest([-1, 0, 0], [9, 4, 5])
    layout = TreeLayout.from_segments(forest.parents, forest.lengths)
    q, k, v, _ = inputs(forest.num_tokens, (4, 2), 16, torch.float32)
    plain = tree_attention(q, k, v, layout)
    changes: tuple[dict[str, Any], ...] = ({"softcap": 0.5}, {"sinks": torch.zeros(4)}, {"window": 5})
    for change in changes:
        assert (tree_attention(q, k, v, layout, **change) - plain).abs().max() > 0.01
    # The limits in which they do nothing.
    none: dict[str, Any] = {"softcap": 1e4, "sinks": torch.full((4,), float("-inf")), "window": 14}
    torch.testing.assert_close(tree_attention(q, k, v, layout, **none), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 24])
def test_bf16_is_as_exact_as_torch_per_rollout(window: int | None) -> None:
    rng = random.Random(2)
    for i in range(6):
        forest = random_forest(rng, 8, 40, shortest=1)
        heads = HEADS[i % 3]
        half = both(forest, "segments", torch.bfloat16, heads, {"window": window})
        # The same rounded inputs in double precision.
        layout = TreeLayout.from_segments(forest.parents, forest.lengths)
        q, k, v, grad = (x.double() for x in inputs(forest.num_tokens, heads, 16, torch.bfloat16))

        def exact(q, k, v, sinks, layout=layout):  # type: ignore[no-untyped-def]
            return tree_attention(q, k, v, layout, window=window, backend="reference", return_lse=True)

        want = results(exact, q, k, v, grad)
        for name in ("out", "dq", "dk", "dv"):
            ours, theirs = (rms(x[name] - want[name]) for x in half)
            assert 0 < ours <= 2 * theirs, name


@pytest.mark.parametrize("first", [0, 1])
def test_one_layout_under_window_1_and_under_softcap(first: int) -> None:
    """What is kept of a layout for the one must not be taken for the other: `True == 1` once did that."""
    calls = [{"window": 1}, {"softcap": 5.0}]
    q, k, v = (torch.randn(30, heads, 16) for heads in (4, 2, 2))
    layout = TreeLayout.from_segments([-1, 0, 0], [12, 10, 8])
    tree_attention(q, k, v, layout, **calls[first])
    again = tree_attention(q, k, v, layout, **calls[1 - first])
    fresh = TreeLayout.from_segments([-1, 0, 0], [12, 10, 8])
    assert torch.equal(again, tree_attention(q, k, v, fresh, **calls[1 - first]))
