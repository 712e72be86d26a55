"""Inputs of tree attention, an oracle mask made of the rollouts alone, and the comparison with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from trace_kernels import TreeLayout, tree_attention
from trace_kernels.reference.tree_attention import masked_attention
from trace_kernels.scoring import Scoring

from .forests import Forest

HEADS = [(8, 2), (6, 2), (7, 1)]
# RMS error over the RMS of what is expected.
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def inputs(
    tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, n, dim, generator=generator).to(dtype)
        for n in (heads[0], heads[1], heads[1], heads[0])
    ]


def random_scoring(rng: random.Random, heads: int) -> dict[str, Any]:
    """Some of window, softcap and sinks, as arguments of `tree_attention`."""
    options: dict[str, Any] = {
        "window": rng.choice([None, 1, 2, 7, 20, 60]),
        "softcap": rng.choice([None, 1.5]),
    }
    if rng.random() < 0.5:
        options["sinks"] = torch.tensor([rng.gauss(0, 2) for _ in range(heads)])
    return options


def oracle_mask(forest: Forest, tokens: int, window: int | None = None) -> torch.Tensor:
    """bool [tokens, tokens]: what stands at or before a token in a rollout, fewer than `window` places before."""
    seen = torch.eye(tokens, dtype=torch.bool)  # padding sees itself
    for rollout in forest.rollouts():
        for place, token in enumerate(rollout):
            oldest = 0 if window is None else max(0, place + 1 - window)
            seen[token, rollout[oldest : place + 1]] = True
    return seen


def results(
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    sinks: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The outputs of `attend(q, k, v, sinks) -> (out, lse [T, H])` and all gradients."""
    given = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    out, lse = attend(leaves["q"], leaves["k"], leaves["v"], leaves.get("sinks"))
    loss = (out.double() * grad.double()).sum()
    if grad_lse is not None:
        loss = loss + (lse.double() * grad_lse.double()).sum()
    loss.backward()
    return {"out": out.detach(), "lse": lse.detach(), **{f"d{name}": x.grad for name, x in leaves.items()}}


def rms(x: torch.Tensor) -> torch.Tensor:
    return x.double().pow(2).mean().sqrt()


def compare(
    forest: Forest,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    *,
    pad: int | None = None,
    with_lse: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """The "segments" backend against the oracle in double precision, results and gradients."""
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=pad)
    mask = oracle_mask(forest, layout.num_tokens, window)
    *qkv, grad = inputs(layout.num_tokens, heads, dim, dtype)
    grad_lse = grad[..., 0] if with_lse else None
    at_least = torch.promote_types(dtype, torch.float32)
    sinks = None if sinks is None else sinks.to(at_least)

    def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
        options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
        return tree_attention(q, k, v, layout, backend="segments", return_lse=True, **options)

    def oracle(q, k, v, sinks):  # type: ignore[no-untyped-def]
        out, lse = masked_attention(q, k, v, mask, Scoring(dim**-0.5, softcap=softcap), sinks)
        return out, lse.t()

    got = results(attend, *qkv, grad, sinks, grad_lse)
    wide = [x.double() for x in qkv]
    want = results(oracle, *wide, grad, None if sinks is None else sinks.double(), grad_lse)
    for name, expected in want.items():
        assert got[name].dtype == (at_least if name in ("lse", "dsinks") else dtype)
        # Where every row sees one key the true dq and dk are 0: an absolute floor for the ratio.
        error = rms(got[name] - expected) / rms(expected).clamp_min(0.05)
        assert error <= LIMITS[dtype], f"{name}: {error:.2e}"
        if dtype == torch.float32:
            torch.testing.assert_close(got[name].double(), expected, rtol=1e-5, atol=2e-5)
