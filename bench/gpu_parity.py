"""Whether the kernel is right on this device: against exact attention over paths, and bitwise equal run to run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trace_kernels.layout import TreeLayout
from trace_kernels.tree_attention import tree_attention

from .attention_methods import Heads
from .attention_reference import path_attention, rms_ratio
from .workloads import Workload

# RMS error ratios against fp32.
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 5e-3, torch.float32: 1e-5}
RANDOM_FORESTS = 50
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
SMALL = [Combination(torch.float32, Heads(2, 1, 32))]


class Finding(NamedTuple):
    """The largest error of each result over all layouts, and the layouts that broke a rule."""

    name: str
    layouts: int
    errors: dict[str, float]
    wrong: list[str]


def forests(device: torch.device, quick: bool) -> Iterator[tuple[str, Workload]]:
    """The adversarial layouts and random forests; few and small with `quick`."""
    for name, (parents, lengths) in list(ADVERSARIAL.items())[: 2 if quick else None]:
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


def check(combination: Combination, device: torch.device, quick: bool) -> Finding:
    """All layouts for one type and head shape, with gradients through the output and the lse."""
    dtype, heads = combination
    name = f"{str(dtype).removeprefix('torch.')} {heads.query}:{heads.key} D{heads.size}"
    errors: dict[str, float] = {}
    wrong: list[str] = []
    count = 0
    for layout_name, work in forests(device, quick):
        count += 1
        for problem in _check_one(work, combination, device, errors, far=False):
            wrong.append(f"{layout_name}: {problem}")
    if device.type == "cuda" and heads == Heads(8, 2, 128):
        work = _workload("far", [-1, 0, 0], [1029, 800, 600])
        count += 1
        for problem in _check_one(work, combination, device, errors, far=True):
            wrong.append(f"offsets past 2^31: {problem}")
    return Finding(name, count, errors, wrong)


def _workload(name: str, parents: list[int], lengths: list[int]) -> Workload:
    return Workload(name, tuple(parents), tuple(lengths), (True,) * len(parents))


def _check_one(
    work: Workload, combination: Combination, device: torch.device, errors: dict[str, float], far: bool
) -> list[str]:
    dtype, (query, key, size) = combination
    generator = torch.Generator(device).manual_seed(work.tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    tokens = work.tokens
    q, k, v, grad = (draw(tokens, n, size).to(dtype) for n in (query, key, key, query))
    grad_lse = draw(tokens, query)
    exact = _exact(work, q, k, v, grad, grad_lse)
    if far:
        rows = torch.empty(tokens, FAR_STRIDE, dtype=dtype, device=device)
        edges = [0, query * size, (query + key) * size, (query + 2 * key) * size]
        parts = [rows[:, first:last] for first, last in pairwise(edges)]
        for part, x in zip(parts, (q, k, v), strict=True):
            part.copy_(x.flatten(1))
        q, k, v = (part.unflatten(1, (-1, size)) for part in parts)
    layout = TreeLayout.from_segments(work.parents, work.lengths, device=device)
    runs = [_run(q, k, v, grad, grad_lse, layout) for _ in range(2)]
    problems = []
    for name, first, second, expected in zip(("out", "lse", "dq", "dk", "dv"), *runs, exact, strict=True):
        error = rms_ratio(first, expected)
        errors[name] = max(errors.get(name, 0.0), error)
        # The lse is fp32 in every type, but of scores whose factors were rounded alike.
        if not error <= TOLERANCE[dtype] and not _both_tiny(first, expected):
            problems.append(f"{name} is off by {error:.1e}")
        if not torch.equal(first, second):
            problems.append(f"{name} differs from run to run")
    return problems


def _both_tiny(found: Tensor, expected: Tensor) -> bool:
    # One token alone has a dq and dk of exactly 0, which has no ratio.
    return bool(expected.norm() < 1e-3 * expected.numel() ** 0.5) and bool(
        (found.float() - expected).abs().max() < 1e-3
    )


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
