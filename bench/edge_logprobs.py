"""Edge log-probs and entropies, forward and backward, side by side with full logits and other libraries: A B A B.

`naive` is logits, log_softmax, gather and an entropy under autograd. `error` is the RMS of the difference from full
logits in fp64 over the RMS of those: of the log-probs for `forward`, the largest of dHidden and dWeight for
`backward`, on the first sources. Peers that give no entropy are compared with `naive, no entropy`. Among the
figures: `time/naive` and `memory/naive`, where lower is better, and the largest log-prob, never above 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trace_kernels.edge_logprobs import edge_logprobs
from trace_kernels.reference.edge_logprobs import edge_logprobs_reference

from .arguments import positive
from .attention_reference import rms_ratio
from .measure import PeakMemory, Phases, available_bytes, median_ratio
from .rows import Row

SUBJECT = "edge_logprobs"
FORWARD, BACKWARD, PASS = "forward", "backward", "pass"
NAIVE, NAIVE_BARE = "naive", "naive, no entropy"
CHECKED = 64  # sources of the comparison with fp64

Method = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Size(NamedTuple):
    edges: int
    hidden: int
    vocab: int


def add_arguments(group: Any) -> None:
    group.add_argument("--edges", type=positive, help="loss edges (default: 4096)")
    group.add_argument("--hidden", type=positive, help="channels (default: 1024 on the CPU, else 4096)")
    group.add_argument("--vocab", type=positive, nargs="*", help="vocabulary sizes (default: 151936)")
    group.add_argument("--methods", nargs="*", metavar="NAME", help="only these (default: all)")


def sizes(options: argparse.Namespace) -> list[Size]:
    edges, hidden, vocab = (48, 32, [1025]) if options.quick else (4096, 1024, [151_936])
    if options.device != "cpu" and not options.quick:
        hidden = 4096
    return [Size(options.edges or edges, options.hidden or hidden, v) for v in options.vocab or vocab]


def methods(device: str, dtype: torch.dtype) -> dict[str, tuple[Method, bool]]:
    """Name -> (method, whether it gives entropies)."""
    found: dict[str, tuple[Method, bool]] = {
        NAIVE: (edge_logprobs_reference if dtype == torch.float32 else _half, True),
        "eager": (partial(edge_logprobs, backend="eager"), True),
    }
    if device == "cuda":
        found["triton"] = (partial(edge_logprobs, backend="triton"), True)
    found |= {
        NAIVE_BARE: (_without_entropy, False),
        "eager, no entropy": (partial(edge_logprobs, backend="eager", entropy=False), False),
    }
    if device == "cuda":
        found["triton, no entropy"] = (partial(edge_logprobs, backend="triton", entropy=False), False)
    for peer in ("liger", "cce"):
        found[peer] = (partial(edge_logprobs, backend=peer, entropy=False), False)
    return found


def _half(h: Tensor, w: Tensor, source: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """As trainers do it in half types: logits of the type, widened."""
    logp = torch.log_softmax((h[source] @ w.T).float(), -1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def _without_entropy(h: Tensor, w: Tensor, source: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax((h[source] @ w.T).float(), -1).gather(1, labels[:, None])[:, 0]
    return logp, torch.zeros_like(logp)


def run(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device)
    dtypes = [torch.float32] if options.device == "cpu" else [torch.bfloat16]
    return [
        row
        for size in sizes(options)
        for dtype in dtypes
        for row in measure(size, dtype, device, options.runs, options.methods)
    ]


class _Inputs:
    """Hidden states, weight and edges of `size`, each source with one edge, and the gradients of the results."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        self.hidden = draw(size.edges, size.hidden).requires_grad_()
        self.weight = draw(size.vocab, size.hidden).mul_(3 * size.hidden**-0.5).requires_grad_()
        self.source = torch.arange(size.edges, device=device)
        self.labels = torch.randint(size.vocab, (size.edges,), generator=generator, device=device)
        self.grads = torch.randn(2, size.edges, generator=generator, device=device) / size.edges

    def call(self, method: Method, entropy: bool, phases: Phases, count: int | None = None) -> list[Tensor]:
        """Log-probs, entropies and both gradients of the first `count` edges."""
        with phases(FORWARD):
            pair = method(self.hidden, self.weight, self.source[:count], self.labels[:count])
        with phases(BACKWARD):
            loss = (pair[0] * self.grads[0, :count]).sum()
            if entropy:
                loss = loss + (pair[1] * self.grads[1, :count]).sum()
            gradients = torch.autograd.grad(loss, (self.hidden, self.weight))
        return [*(x.detach() for x in pair), *gradients]


class _Result(NamedTuple):
    method: Method
    entropy: bool
    errors: dict[str, float]
    ms: dict[str, list[float]]
    peaks: list[int]
    highest: list[float]  # log-prob of each run


def measure(
    size: Size, dtype: torch.dtype, device: torch.device, runs: int, only: list[str] | None = None
) -> list[Row]:
    """All methods on one size, or the named ones."""
    kind = str(dtype).removeprefix("torch.")
    name = f"E{size.edges} d{size.hidden} V{size.vocab} {kind}"
    inputs = _Inputs(size, dtype, device)
    results: dict[str, _Result] = {}
    skipped: dict[str, str] = {}
    for method_name, (method, entropy) in methods(device.type, dtype).items():
        if only and method_name not in only:
            continue
        # Logits, log-probs and what their gradients need beside them.
        needed = 4 * 4 * size.edges * size.vocab if method_name in (NAIVE, NAIVE_BARE) else 0
        free = available_bytes(device)
        if free is not None and needed > 0.9 * free:
            skipped[method_name] = f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            continue
        try:
            results[method_name] = _first(inputs, method, entropy, device)
        except (RuntimeError, ImportError, ValueError) as problem:  # a peer may fail, and must be listed
            skipped[method_name] = f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"
    for number in range(runs):
        for result in results.values():
            phases, memory = Phases(device), PeakMemory(device)
            memory.start()
            found = inputs.call(result.method, result.entropy, phases)
            peak = memory.stop()
            result.highest.append(float(found[0].max()))
            del found
            if peak is not None:
                result.peaks.append(peak)
            for phase, value in (phases.ms | {PASS: sum(phases.ms.values())}).items():
                result.ms[phase].append(value)
        print(f"{SUBJECT}: {name}, round {number + 1} of {runs}", file=sys.stderr)
    return _rows(name, results) + [
        Row(SUBJECT, name, method_name, PASS, None, 0, skipped=reason)
        for method_name, reason in skipped.items()
    ]


def _first(inputs: _Inputs, method: Method, entropy: bool, device: torch.device) -> _Result:
    """A run that is not counted: few sources, against fp64."""
    count = min(CHECKED, len(inputs.source))
    got = inputs.call(method, entropy, Phases(device), count)
    leaves = [x.detach()[: count if x is inputs.hidden else None] for x in (inputs.hidden, inputs.weight)]
    wide = [x.double().requires_grad_() for x in leaves]
    exact = edge_logprobs_reference(*wide, inputs.source[:count], inputs.labels[:count])
    loss = (exact[0] * inputs.grads[0, :count]).sum()
    if entropy:
        loss = loss + (exact[1] * inputs.grads[1, :count]).sum()
    gradients = torch.autograd.grad(loss, wide)
    forward = rms_ratio(got[0], exact[0].detach())
    backward = max(rms_ratio(got[2][:count], gradients[0]), rms_ratio(got[3], gradients[1]))
    errors = {FORWARD: forward, BACKWARD: backward, PASS: max(forward, backward)}
    return _Result(method, entropy, errors, {FORWARD: [], BACKWARD: [], PASS: []}, [], [])


def _rows(name: str, results: dict[str, _Result]) -> list[Row]:
    rows = []
    for phase in (FORWARD, BACKWARD, PASS):
        for method, result in results.items():
            naive = NAIVE if result.entropy else NAIVE_BARE
            peer = results.get(naive) if naive != method else None
            ratio = median_ratio(peer.ms[phase], result.ms[phase]) if peer else None
            peak = max(result.peaks, default=None)
            figures = {"highest_logprob": max(result.highest)}
            if ratio is not None:
                figures["time/naive"] = 1 / ratio
            if peer is not None and peer.peaks and peak is not None:
                figures["memory/naive"] = peak / max(1, max(peer.peaks))
            rows.append(
                Row(
                    SUBJECT,
                    name,
                    method,
                    phase,
                    statistics.median(result.ms[phase]),
                    len(result.ms[phase]),
                    peer=naive if peer else None,
                    ratio=ratio,
                    peak_bytes=peak if phase == PASS else None,
                    error=result.errors[phase],
                    figures=figures if phase == PASS else {},
                )
            )
    return rows
