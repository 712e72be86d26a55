"""Predictor scores of anchors beside the usual way: gather, widen, the module, and the gains in NumPy on the host.

`root` gives the gains of up to 17 bare rollouts, `prefix` those of up to 17 continuations; `loss` is the forward
and backward of a training batch, beside the module and autograd. `error` is the largest relative deviation of value
and gains from a float64 run of the same tensors, on the first anchors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trace_kernels.reference import score_anchors as eager
from trace_kernels.score_anchors import AnchorScores, SuccessHead, anchor_loss, score_anchors
from trace_rl.allocation.contrast import prefix_marginal_gain, prefix_repeat_probability, root_gain_table

from .measure import PeakMemory, median_ratio
from .rows import Row

SUBJECT = "score_anchors"
HIDDEN, WIDTH, COUNTS, KAPPA, CHECKED = 4096, 256, 17, 20.0, 512
BATCHES = ((192, 512), (4096, 512), (1024, 8192))  # hidden size and anchors of a training batch

Scores = tuple[NDArray[np.float64], NDArray[np.float64]]


def add_arguments(group: Any) -> None:
    """No options of its own."""


def run(options: argparse.Namespace) -> list[Row]:
    sizes = (2_048,) if options.quick else (16_384, 32_768, 65_536)
    device = torch.device(options.device)
    scores = [
        row
        for stage in ("root", "prefix")
        for anchors in sizes
        for row in _rows(stage, anchors, device, options.runs)
    ]
    batches = BATCHES[:1] if options.quick else BATCHES
    return scores + [row for batch in batches for row in _loss_rows(*batch, device, options.runs)]


def _module(hidden_size: int, device: torch.device) -> nn.Module:
    return nn.Sequential(
        nn.RMSNorm(hidden_size, eps=eager.EPS), nn.Linear(hidden_size, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1)
    ).to(device)


def _rows(stage: str, anchors: int, device: torch.device, runs: int) -> list[Row]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(anchors, HIDDEN, generator=random).bfloat16().to(device)
    source = torch.randint(anchors, (anchors,), generator=random).to(device)
    rewards = torch.randint(2, (anchors,), generator=random).to(device) if stage == "prefix" else None
    module = _module(HIDDEN, device)
    head = SuccessHead(*(parameter.detach() for parameter in module.parameters()))

    def own() -> AnchorScores:
        return score_anchors(
            hidden, source, head, stage=stage, rewards=rewards, max_count=COUNTS, kappa=KAPPA
        )

    @torch.no_grad()
    def peer() -> Scores:
        v = torch.sigmoid(module(hidden[source].float()))[:, 0].double().cpu().numpy()
        if rewards is None:
            return v, root_gain_table(v, COUNTS, KAPPA)
        q = prefix_repeat_probability(v, rewards.cpu().numpy())
        return v, prefix_marginal_gain(q[:, None], np.arange(COUNTS), KAPPA)

    error = _error(own(), hidden, source, head, rewards)
    workload = f"{anchors} anchors, d {HIDDEN}"
    return _compared({"score_anchors": own, "module, then NumPy": peer}, workload, stage, device, runs, error)


def _loss_rows(hidden_size: int, anchors: int, device: torch.device, runs: int) -> list[Row]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(anchors, hidden_size, generator=random).to(device)
    source = torch.arange(anchors, device=device)
    target, weight = (torch.rand(anchors, generator=random).to(device) for _ in range(2))
    module = _module(hidden_size, device)
    head = SuccessHead(*module.parameters())

    def own() -> None:
        module.zero_grad()
        anchor_loss(hidden, source, head, target, weight).backward()

    def peer() -> None:
        module.zero_grad()
        v = torch.sigmoid(module(hidden[source]))[:, 0]
        (weight * (v - target).square()).mean().backward()

    # A batch takes milliseconds: more rounds cost little.
    methods = {"anchor_loss": own, "module and autograd": peer}
    return _compared(methods, f"{anchors} anchors, d {hidden_size}", "loss", device, 10 * runs, None)


def _compared(
    methods: dict[str, Callable[[], Any]],
    workload: str,
    phase: str,
    device: torch.device,
    runs: int,
    error: float | None,
) -> list[Row]:
    """The first method's row and the second's, measured in turn."""
    memory, times, peaks = PeakMemory(device), {}, {}
    for name, method in methods.items():
        memory.start()
        method()
        peaks[name], times[name] = memory.stop(), []
    for _ in range(runs):
        for name, method in methods.items():
            start = time.perf_counter()
            method()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    ours, theirs = methods
    return [
        Row(SUBJECT, workload, ours, phase, statistics.median(times[ours]), runs, peer=theirs,
            ratio=median_ratio(times[theirs], times[ours]), peak_bytes=peaks[ours], error=error),
        Row(SUBJECT, workload, theirs, phase, statistics.median(times[theirs]), runs, peak_bytes=peaks[theirs]),
    ]  # fmt: skip


def _error(
    got: AnchorScores, hidden: Tensor, source: Tensor, head: SuccessHead, rewards: Tensor | None
) -> float:
    exact = SuccessHead(*(x.double() for x in head))
    v, fail = eager.success(eager.logits(hidden, source[:CHECKED], exact))
    gains = eager.root_gains(v, fail, COUNTS, 1 / KAPPA)
    if rewards is not None:
        gains = eager.prefix_gains(v, fail, rewards[:CHECKED], COUNTS, 1 / KAPPA)
    pairs = ((got.value[:CHECKED], v), (got.gains[:CHECKED], gains))
    return max(float(((a - b).abs() / b.abs().clamp(min=1e-300)).max()) for a, b in pairs)
