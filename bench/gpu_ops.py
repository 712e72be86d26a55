"""Whether the other ops' programs are right on this device at the sizes of real models, and repeat to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trace_kernels.backends import anchors, ranges, ranges_triton
from trace_kernels.edge_logprobs import edge_logprobs
from trace_kernels.forest import childless
from trace_kernels.reference import score_anchors as eager
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference
from trace_kernels.score_anchors import score_anchors
from trace_kernels.tree_reductions import LeafRanges

from .layout import random_parents

EDGE_LIMITS = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
KAPPA, COUNTS = 20.0, 17


class Finding(NamedTuple):
    """Errors by result, and what broke a rule; `gpu_parity` has the same of tree attention."""

    name: str
    errors: dict[str, float]
    wrong: list[str]


class Sizes(NamedTuple):
    edges: int
    hidden: int
    vocabularies: tuple[int, ...]  # one of them odd
    anchors: int
    width: int
    nodes: int


REAL = Sizes(512, 4096, (151_936, 32_003), 16_384, 256, 200_000)
SMALL = Sizes(12, 32, (67,), 20, 16, 60)


def check(device: torch.device, quick: bool, ends: float) -> Iterator[Finding]:
    """One op, type and size after the other until `ends`; one that fails says why."""
    sizes = SMALL if quick else REAL
    dtypes = (torch.bfloat16, torch.float32)
    checks: list[tuple[str, Callable[[], Finding]]] = []
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for vocab in sizes.vocabularies:
            name = f"edge_logprobs {kind} V{vocab} d{sizes.hidden}"
            checks.append((name, partial(_edges, name, sizes, vocab, dtype, device)))
        for stage in ("root", "prefix"):
            name = f"score_anchors {kind} {stage} d{sizes.hidden}"
            checks.append((name, partial(_anchors, name, sizes, stage, dtype, device)))
    checks.append(("tree_reductions", partial(_reductions, f"tree_reductions N{sizes.nodes}", sizes, device)))
    for name, run in checks:
        if time.monotonic() > ends:
            yield Finding(name, {}, ["not reached"])
            continue
        try:
            yield run()
        except Exception as problem:  # the next op may be fine
            said = (str(problem).splitlines() or [""])[0][:200]
            yield Finding(name, {}, [f"{type(problem).__name__}: {said}"])


def _edges(name: str, sizes: Sizes, vocab: int, dtype: torch.dtype, device: torch.device) -> Finding:
    """Two edges leave every fourth source; log-probs and entropies, and gradients through both."""
    generator = torch.Generator(device).manual_seed(vocab)
    draw = partial(torch.randn, generator=generator, device=device)
    hidden = draw(sizes.edges, sizes.hidden).to(dtype)
    weight = (draw(vocab, sizes.hidden) * (3 * sizes.hidden**-0.5)).to(dtype)
    source = torch.arange(sizes.edges, device=device)
    source[1::4] -= 1
    labels = torch.randint(vocab, (sizes.edges,), generator=generator, device=device)
    labels[:2] = torch.tensor([0, vocab - 1], device=device)
    grads = draw(2, sizes.edges) / sizes.edges

    def run(op: Callable[..., Any], kind: torch.dtype) -> list[Tensor]:
        leaves = [x.to(kind, copy=True).requires_grad_() for x in (hidden, weight)]
        logprob, entropy = op(*leaves, source, labels)
        loss = (logprob * grads[0].to(logprob.dtype) + entropy * grads[1].to(entropy.dtype)).sum()
        return [logprob.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]

    own = partial(edge_logprobs, backend="triton")
    first, second = run(own, dtype), run(own, dtype)
    exact = run(edge_logprobs_reference, torch.float64)
    names = ("logprob", "entropy", "dhidden", "dweight")
    limits = dict.fromkeys(names, EDGE_LIMITS[dtype])
    found = _compare(name, names, first, second, exact, limits)
    if bool((first[0] > 0).any()):
        found.wrong.append("a log-prob is above 0")
    return found


def _anchors(name: str, sizes: Sizes, stage: Any, dtype: torch.dtype, device: torch.device) -> Finding:
    """The logit against fp64; value and gains against fp64 from the program's own logit."""
    generator = torch.Generator(device).manual_seed(1)
    draw = partial(torch.randn, generator=generator, device=device)
    hidden = draw(sizes.anchors, sizes.hidden).to(dtype)
    source = torch.randint(sizes.anchors, (sizes.anchors,), generator=generator, device=device)
    rewards = torch.randint(2, (sizes.anchors,), generator=generator, device=device)
    d, width = sizes.hidden, sizes.width
    shapes = ((d,), (width, d), (width,), (1, width), (1,))
    head = eager.SuccessHead(*(draw(*shape) * shape[-1] ** -0.5 for shape in shapes))
    given = None if stage == "root" else rewards
    runs = [
        score_anchors(hidden, source, head, stage=stage, rewards=given, max_count=COUNTS, kappa=KAPPA)
        for _ in range(2)
    ]
    logit, _, _ = anchors.scores(hidden, source, head)
    wide = eager.logits(hidden, source, eager.SuccessHead(*(x.double() for x in head)))
    v, fail = eager.success(logit)
    gains = (
        eager.root_gains(v, fail, COUNTS, 1 / KAPPA)
        if given is None
        else eager.prefix_gains(v, fail, given, COUNTS, 1 / KAPPA)
    )
    names = ("logit", "value", "gains")
    first, second = ([logit, *run] for run in runs)
    limits = {"logit": 1e-5, "value": 1e-12, "gains": 1e-12}
    return _compare(name, names, first, second, [wide, v, gains], limits)


def _reductions(name: str, sizes: Sizes, device: torch.device) -> Finding:
    """Against the same sums on the CPU: to the bit, but for products that a GPU contracts."""
    parents = random_parents(sizes.nodes, max(1, sizes.nodes // 1000), np.random.default_rng(0))
    forest = LeafRanges.of(parents, childless(parents))
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(len(forest.leaf_nodes), generator=generator, dtype=torch.float64)
    here, x = forest.to(device), values.to(device)
    slope, centre = values[forest.low].abs(), values[forest.high - 1]

    def run(program: Any, values: Tensor, forest: LeafRanges, slope: Tensor, centre: Tensor) -> list[Tensor]:
        where = forest.distinct
        results = [program.sums(values, where), *program.moments(values, where)]
        results += [*program.extrema(values, where), *program.ancestor_sums(slope, centre, forest.parents)]
        return [result.cpu() for result in results]

    names = ("sums", "totals", "squares", "least", "largest", "slopes", "centres")
    device_side = (x, here, slope.to(device), centre.to(device))
    first, second = (run(ranges_triton, *device_side) for _ in range(2))
    exact = run(ranges, values, forest, slope, centre)
    limits = dict.fromkeys(names, 1e-12) | dict.fromkeys(("sums", "totals", "least", "largest"), 0.0)
    return _compare(name, names, first, second, exact, limits)


def _compare(
    name: str,
    names: tuple[str, ...],
    first: list[Tensor],
    second: list[Tensor],
    exact: list[Tensor],
    limits: dict[str, float],
) -> Finding:
    found = Finding(name, {}, [])
    for result, a, b, want in zip(names, first, second, exact, strict=True):
        # RMS of the difference over RMS of the exact result, in fp64.
        error = float((a.double() - want).norm() / want.norm().clamp_min(1e-300))
        found.errors[result] = error
        if not error <= limits[result]:
            found.wrong.append(f"{result} is off by {error:.1e}")
        if not torch.equal(a, b):
            found.wrong.append(f"{result} differs from run to run")
    return found
