"""Packed tree log-probs against per-rollout passes: forward and backward, side by side in one run.

Methods: `packed`, the trainer's own path without DeepSpeed; `flat_single`, one rollout at a time;
`flat_padded`, rollouts sorted by length in padded batches under the same token limit. `error` is the largest
log-prob difference from `flat_single`. Packing pays when the time ratio comes near the token ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trace_rl.policy.module import DTYPES
from trace_rl.rollout.tree import RolloutTree

from .arguments import positive
from .measure import PeakMemory, Phases, available_bytes, median_ratio
from .models import activation_bytes, two_models
from .passes import PACKED, PADDED, SINGLE, Method, Work, methods
from .rows import Row
from .trees import HOTPOTQA, SMALL, made_up_trees, step_trees, workload_trees
from .workloads import asked

SUBJECT = "packed_pass"
PHASES = ("prepare", "forward", "backward")
PASS = "pass"  # all of them


def add_arguments(group: Any) -> None:
    group.add_argument(
        "--model", type=Path, metavar="DIR", help="a Hugging Face model (default: tiny, random)"
    )
    group.add_argument(
        "--trees", type=Path, metavar="FILE", help="a run's trees.jsonl (default: made-up trees)"
    )
    group.add_argument("--step", type=int, help="whose trees to take (default: the run's last step)")
    group.add_argument("--prompts", type=positive, default=4, help="made-up trees, or most trees of the step")
    group.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    group.add_argument(
        "--micro-batch-tokens", type=positive, help="default: 4096, or all of each forest of --workloads"
    )


@dataclass
class Result:
    """What one method gave over all rounds; log-probs and gradients of the first."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: list[float] = field(default_factory=list)
    peak: int | None = None
    logprobs: list[Tensor] = field(default_factory=list)  # per rollout
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def add(self, phases: Phases) -> None:
        for name, value in (phases.ms | {PASS: sum(phases.ms.values())}).items():
            self.ms.setdefault(name, []).append(value)
        self.cpu_ms.append(phases.cpu_ms)


def run(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device)
    if options.workloads is not None and options.trees is not None:
        raise ValueError("--workloads and --trees: expected one of them")
    forests = options.workloads is not None
    policy, stock = two_models(options.model, options.dtype, device, small=options.quick, qwen3=forests)
    config = policy.model.config
    vocab = int(config.vocab_size)
    warm_up = made_up_trees(SMALL, 1, vocab, seed=1)
    _rounds(methods(policy, stock, Work.of(warm_up, 4096), device), 1, device)
    rows: list[Row] = []
    for name, trees, tokens in _forests(options, vocab) if forests else [_trees(options, vocab)]:
        workload = f"{options.model.name if options.model else 'tiny'}, {name}"
        needed = activation_bytes(config, DTYPES[options.dtype].itemsize) * tokens
        free = available_bytes(device)
        if forests and free is not None and needed > 0.8 * free:
            reason = f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            rows += [
                Row(SUBJECT, workload, m, PASS, None, 0, skipped=reason) for m in (PACKED, SINGLE, PADDED)
            ]
            continue
        work = Work.of(trees, options.micro_batch_tokens or (tokens if forests else 4096))
        results = _rounds(methods(policy, stock, work, device), options.runs, device, progress=True)
        rows += _rows(workload, results, work.sizes())
    return rows


def _forests(options: argparse.Namespace, vocab: int) -> Iterator[tuple[str, list[RolloutTree], int]]:
    for work in asked(options):
        yield work.name, workload_trees(work, vocab, seed=0), work.tokens


def _trees(options: argparse.Namespace, vocab: int) -> tuple[str, list[RolloutTree], int]:
    """What is measured by default: a run's trees or those made up in a task's shape."""
    if options.trees is not None:
        trees, step = step_trees(options.trees, options.step)
        trees = [tree for tree in trees if tree.leaves()][: options.prompts]
        where = f"{options.trees.resolve().parent.name} step {step}"
        if not trees:
            raise ValueError(f"{options.trees}: no finished rollout among the trees asked for")
        if max(max(node.token_ids, default=0) for tree in trees for node in tree.nodes) >= vocab:
            raise ValueError(
                f"--trees {options.trees}: made with another vocabulary than the model's {vocab}"
            )
    else:
        trees = made_up_trees(SMALL if options.quick else HOTPOTQA, options.prompts, vocab, seed=0)
        where = "small shape" if options.quick else "hotpotqa shape"
    tokens = sum(len(node.token_ids) for tree in trees for node in tree.nodes)
    return f"{where}, {len(trees)} prompts", trees, tokens


def _rounds(
    methods: dict[str, Method], runs: int, device: torch.device, progress: bool = False
) -> dict[str, Result]:
    """Every method once per round: A B C A B C ..."""
    results = {name: Result() for name in methods}
    for number in range(runs):
        for name, method in methods.items():
            result, phases, memory = results[name], Phases(device), PeakMemory(device)
            method.model.zero_grad(set_to_none=True)
            memory.start()
            logprobs = method.run(phases)
            peak = memory.stop()
            result.peak = None if peak is None else max(result.peak or 0, peak)
            result.add(phases)
            if number == 0:
                result.logprobs = logprobs
                result.gradients = {
                    key.removeprefix("model.") if name == PACKED else key: parameter.grad
                    for key, parameter in method.model.named_parameters()
                    if parameter.grad is not None
                }
            if progress:
                took = f"{result.ms[PASS][-1]:,.0f} ms"
                print(f"{SUBJECT}: round {number + 1} of {runs}, {name}: {took}", file=sys.stderr)
    return results


def _rows(workload: str, results: dict[str, Result], sizes: dict[str, float]) -> list[Row]:
    reference = results[SINGLE]
    best = min((SINGLE, PADDED), key=lambda name: statistics.median(results[name].ms[PASS]))
    rows = []
    for name, result in results.items():
        for phase in (*PHASES, PASS):
            figures: dict[str, float] = {}
            ratio = median_ratio(results[best].ms[phase], result.ms[phase])
            error = max(
                float((a - b).abs().max()) for a, b in zip(result.logprobs, reference.logprobs, strict=True)
            )
            if phase == PASS and name != SINGLE:
                figures["gradient_error"] = _gradient_error(result.gradients, reference.gradients)
            if phase == PASS and name == PACKED:
                tokens = sizes["flat_tokens"] / sizes["packed_tokens"]
                figures |= sizes | {
                    "token_ratio": tokens,
                    "time_ratio": ratio,
                    "time/token_ratio": ratio / tokens,
                    "cpu_time_ratio": median_ratio(results[best].cpu_ms, result.cpu_ms),
                }
            rows.append(
                Row(
                    SUBJECT,
                    workload,
                    name,
                    phase,
                    statistics.median(result.ms[phase]),
                    len(result.ms[phase]),
                    peer=best if name != best else None,
                    ratio=ratio if name != best else None,
                    peak_bytes=result.peak if phase == PASS else None,
                    error=error if phase in (PASS, "forward") and name != SINGLE else None,
                    figures=figures,
                )
            )
    return rows


def _gradient_error(gradients: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest difference in any parameter's gradient, relative to that gradient's largest entry."""
    if gradients.keys() != reference.keys():
        raise ValueError(f"gradients of different parameters: {sorted(gradients.keys() ^ reference.keys())}")
    return max(
        float((gradients[key].float() - value.float()).abs().max() / value.abs().max().clamp_min(1e-30))
        for key, value in reference.items()
    )
