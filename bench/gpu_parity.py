"""Whether the kernel is right on this device: against exact attention over paths, and bitwise equal run to run.

An error is the RMS of the difference over the RMS of the exact result (at least `LEAST`: a row that sees one key
has a dQ of 0). In half types it is also held against that of SDPA on each rollout, in the same type.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trace_kernels.layout import TreeLayout
from trace_kernels.tree_attention import tree_attention

from .attention_methods import Heads
from .attention_reference import path_attention
from .workloads import Workload

# Of every layout; in half types of at least `HALF_TOKENS` tokens, since fewer have roundings in few places.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}
LSE_TOLERANCE = 1e-5  # it is fp32, of exact products of the inputs
HALF_TOKENS = 32
LEAST = 0.05
PEER_FACTOR, PEER_NOISE = 2.0, 5e-5  # times SDPA's error; below the noise nothing is compared
RANDOM_FORESTS = 40
RESULTS = ("out", "lse", "dq", "dk", "dv")
# An element's offset past 2^31: rows this far apart.
FAR_STRIDE = 1 << 20

# What kernels get wrong: segments in DFS pre-order as (parents, lengths).
ADVERSARIAL: dict[str, tuple[list[int], list[int]]] = {
    "one token": ([-1], [1]),
    "one-token segments": ([-1, 0, 1, 1, 0, 4], [1] * 6),
    "branches at 57..63": ([-1, 0, 0, 2, 2, 4, 4, 6, 6], [57, 70, 3, 5, 3, 66, 64, 1, 2]),
    "branches at 121..126": ([-1, 0, 1, 1, 0, 0, 5], [121, 2, 40, 1, 5, 200, 3]),
    "a rollout inside another": ([-1, 0, 0, 2], [200, 0, 90, 40]),
    "empty suffixes": ([-1, 0, 0, 0, -1, 4], [133, 0, 0, 5, 7, 0]),
    "duplicates": ([-1, 0, 0], [130, 64, 64]),
    "many small trees": ([-1] * 90, [1, 2, 3, 7, 64, 9] * 15),
    "a long chain of turns": (list(range(-1, 39)), [17] * 40),
    "long and odd": ([-1, 0, 0, 0], [1029, 267, 1, 531]),
}


class Combination(NamedTuple):
    dtype: torch.dtype
    heads: Heads


COMBINATIONS = [
    Combination(torch.bfloat16, Heads(8, 2, 128)),
    Combination(torch.bfloat16, Heads(8, 2, 64)),
    Combination(torch.float32, Heads(8, 2, 64)),
    Combination(torch.float32, Heads(4, 1, 128)),
    Combination(torch.bfloat16, Heads(7, 1, 80)),
    Combination(torch.bfloat16, Heads(6, 2, 96)),
    Combination(torch.bfloat16, Heads(4, 4, 256)),
    Combination(torch.float16, Heads(8, 2, 32)),
]
SMALL = [Combination(torch.float32, Heads(2, 1, 32)), Combination(torch.bfloat16, Heads(2, 1, 32))]


class Finding(NamedTuple):
    """Of the layouts that were reached: worst errors, worst ratios to SDPA's errors, and what broke a rule."""

    name: str
    layouts: int
    errors: dict[str, float]
    ratios: dict[str, float]
    wrong: list[str]


def forests(device: torch.device, quick: bool) -> Iterator[tuple[str, Workload]]:
    """The adversarial layouts and random forests; few and small with `quick`."""
    for name, (parents, lengths) in list(ADVERSARIAL.items())[1:2] if quick else ADVERSARIAL.items():
        yield name, _workload(name, parents, lengths)
    rng = random.Random(0)
    for number in range(1 if quick else RANDOM_FORESTS):
        parents = []
        path: list[int] = []
        for node in range(rng.randint(1, 5 if quick else 40)):
            path = path[: rng.randint(0, len(path))] if rng.random() < 0.5 else path
            parents.append(path[-1] if path else -1)
            path = [*path, node]
        longest = 20 if quick else rng.choice((3, 40, 300))
        lengths = [rng.randint(0, longest) for _ in parents]
        lengths[0] = max(1, lengths[0])
        yield f"random {number}", _workload(f"random {number}", parents, lengths)


def check(combination: Combination, device: torch.device, quick: bool, ends: float) -> Finding:
    """All layouts for one type and head shape, with gradients through the output and the lse."""
    dtype, heads = combination
    name = f"{str(dtype).removeprefix('torch.')} {heads.query}:{heads.key} D{heads.size}"
    found = Finding(name, 0, {}, {}, [])
    layouts = [(name, work, False) for name, work in forests(device, quick)]
    if device.type == "cuda" and heads == Heads(8, 2, 128):
        layouts.insert(0, ("offsets past 2^31", _workload("far", [-1, 0, 0], [1029, 800, 600]), True))
    for layout_name, work, far in layouts:
        if time.monotonic() > ends:
            break
        problems = _check_one(work, combination, device, found, far)
        found.wrong.extend(f"{layout_name}: {problem}" for problem in problems)
        found = found._replace(layouts=found.layouts + 1)
    return found


def _workload(name: str, parents: list[int], lengths: list[int]) -> Workload:
    return Workload(name, tuple(parents), tuple(lengths), (True,) * len(parents))


def _check_one(
    work: Workload, combination: Combination, device: torch.device, found: Finding, far: bool
) -> list[str]:
    dtype, (query, key, size) = combination
    generator = torch.Generator(device).manual_seed(work.tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    tokens = work.tokens
    q, k, v, grad = (draw(tokens, n, size).to(dtype) for n in (query, key, key, query))
    grad_lse = draw(tokens, query)
    exact = _exact(work, q, k, v, grad, grad_lse)
    plain = (q, k, v)
    if far:
        rows = torch.empty(tokens, FAR_STRIDE, dtype=dtype, device=device)
        edges = [0, query * size, (query + key) * size, (query + 2 * key) * size]
        parts = [rows[:, first:last] for first, last in pairwise(edges)]
        for part, x in zip(parts, (q, k, v), strict=True):
            part.copy_(x.flatten(1))
        q, k, v = (part.unflatten(1, (-1, size)) for part in parts)
    layout = TreeLayout.from_segments(work.parents, work.lengths, device=device)
    runs = [_run(q, k, v, grad, grad_lse, layout) for _ in range(2)]
    problems = [] if dtype == torch.float32 else _against_sdpa(work, plain, grad, layout, found.ratios)
    for name, first, second, expected in zip(RESULTS, *runs, exact, strict=True):
        if dtype == torch.float32 or name == "lse" or tokens >= HALF_TOKENS:
            error = _error(first, expected)
            found.errors[name] = max(found.errors.get(name, 0.0), error)
            if not error <= (LSE_TOLERANCE if name == "lse" else TOLERANCE[dtype]):
                problems.append(f"{name} is off by {error:.1e}")
        if not torch.equal(first, second):
            problems.append(f"{name} differs from run to run")
    return problems


def _against_sdpa(
    work: Workload,
    plain: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
    layout: TreeLayout,
    ratios: dict[str, float],
) -> list[str]:
    """Errors beside those of SDPA, which gives no lse, so that no gradient goes through it."""
    none = torch.zeros(grad.shape[:2], device=grad.device)
    exact, mine = _exact(work, *plain, grad, none), _run(*plain, grad, none, layout)
    peer = _sdpa(work, *plain, grad)
    problems = []
    for name, own, expected in zip(RESULTS, mine, exact, strict=True):
        if name not in peer or (error := _error(own, expected)) <= PEER_NOISE:
            continue
        ratio = error / max(_error(peer[name], expected), 1e-30)
        ratios[name] = max(ratios.get(name, 0.0), ratio)
        if not ratio <= PEER_FACTOR:
            problems.append(f"{name} is off by {ratio:.1f} times SDPA's error")
    return problems


def _error(found: Tensor, expected: Tensor) -> float:
    least = LEAST * expected.numel() ** 0.5
    return float((found.float() - expected).norm() / expected.norm().clamp_min(least))


def _sdpa(work: Workload, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """out, dq, dk, dv of causal SDPA on each rollout; a shared token's gradient enters in one of them."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = torch.zeros_like(grad)
    counted = torch.zeros(len(q), dtype=torch.bool, device=q.device)
    for rollout in work.rollouts:
        path = torch.from_numpy(rollout).to(q.device)
        new = ~counted[path]
        one = [x[path].transpose(0, 1)[None] for x in (q, k, v)]
        one[1:] = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in one[1:])
        part = scaled_dot_product_attention(*one, is_causal=True)[0].transpose(0, 1)
        part.backward(grad[path] * new[:, None, None])
        out[path[new]] = part.detach()[new]
        counted[path] = True
    return {"out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}


def _exact(work: Workload, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, grad_lse: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv, one key head after the other."""
    group = q.shape[1] // k.shape[1]
    parts: list[Any] = []
    for head in range(k.shape[1]):
        mine = slice(head * group, (head + 1) * group)
        own = (q[:, mine], k[:, head : head + 1], v[:, head : head + 1], grad[:, mine], grad_lse[:, mine])
        out, dq, dk, dv, lse = path_attention(work, *own)
        parts.append((out, lse, dq, dk, dv))
    return [torch.cat(results, 1) for results in zip(*parts, strict=True)]


def _run(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, grad_lse: Tensor, layout: TreeLayout
) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = tree_attention(q, k, v, layout, backend="triton", return_lse=True)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (grad, grad_lse))
    return (out.detach(), lse.detach(), *gradients)
