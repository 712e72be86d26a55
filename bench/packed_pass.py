"""Packed tree log-probs against per-rollout passes: forward and backward, side by side in one run.

Methods: `packed`, the trainer's own path without DeepSpeed; `flat_single`, one rollout at a time;
`flat_padded`, rollouts sorted by length in padded batches under the same token limit. `error` is the largest
log-prob difference from `flat_single`. Packing pays when the time ratio comes near the token ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_kernels.packing import Part
from trace_rl.config.schema import LossConfig
from trace_rl.policy.batch import Forest, LossTerms, NodeKey, pack, schedule
from trace_rl.policy.module import DTYPES, TreePolicy
from trace_rl.rollout.tree import RolloutTree

from . import flat
from .arguments import positive
from .measure import PeakMemory, Phases, median_ratio
from .models import two_models
from .rows import Row
from .trees import HOTPOTQA, SMALL, made_up_trees, step_trees

SUBJECT = "packed_pass"
PACKED, SINGLE, PADDED = "packed", "flat_single", "flat_padded"
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
    group.add_argument("--micro-batch-tokens", type=positive, default=4096)


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


@dataclass(frozen=True)
class Method:
    model: torch.nn.Module
    run: Callable[[Phases], list[Tensor]]  # backward over everything; the rollouts' log-probs


def run(options: argparse.Namespace) -> list[Row]:
    device = torch.device(options.device)
    policy, stock = two_models(options.model, options.dtype, device, small=options.quick)
    vocab = int(policy.model.config.vocab_size)
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
    workload = f"{options.model.name if options.model else 'tiny'}, {where}, {len(trees)} prompts"

    warm_up = made_up_trees(SMALL, 1, vocab, seed=1)
    _rounds(_methods(policy, stock, _Work.of(warm_up, options.micro_batch_tokens), device), 1, device)
    work = _Work.of(trees, options.micro_batch_tokens)
    results = _rounds(_methods(policy, stock, work, device), options.runs, device, progress=True)
    return _rows(workload, results, work.sizes())


@dataclass(frozen=True)
class _Work:
    """The same trees for both sides."""

    forest: Forest
    weights: NDArray[np.float64]  # [L] of the leaves' log-probs in the loss, told apart at every branch
    rollouts: list[flat.Rollout]
    limit: int  # tokens of a micro-batch
    groups: dict[str, list[list[int]]]  # rollouts of each flat batch, by method

    @classmethod
    def of(cls, trees: list[RolloutTree], limit: int) -> _Work:
        forest = Forest.of(trees)
        weights = np.linspace(0.5, 1.5, len(forest.leaves)) / len(forest.leaves)
        rollouts = flat.rollouts(forest, weights.tolist())
        limit = max(limit, *(len(rollout.input_ids) for rollout in rollouts))
        groups = {SINGLE: flat.single(rollouts), PADDED: flat.padded(rollouts, limit)}
        return cls(forest, weights, rollouts, limit, groups)

    def sizes(self) -> dict[str, float]:
        longest = [max(len(self.rollouts[i].input_ids) for i in group) for group in self.groups[PADDED]]
        return {
            "packed_tokens": sum(part.tokens for part in self.parts()),
            "flat_tokens": self.forest.flat_tokens,
            "padded_tokens": sum(len(g) * n for g, n in zip(self.groups[PADDED], longest, strict=True)),
            "sampled_tokens": sum(sum(node.loss_mask) for tree in self.forest.trees for node in tree.nodes),
            "flat_sampled_tokens": sum(len(rollout.sampled) for rollout in self.rollouts),
            "micro_batch_tokens": self.limit,
        }

    def parts(self) -> list[Part]:
        return [part for part in schedule(self.forest, self.limit, 1)[0] if part is not None]


def _methods(
    policy: TreePolicy, stock: flat.FlatPolicy, work: _Work, device: torch.device
) -> dict[str, Method]:
    methods = {PACKED: Method(policy, lambda phases: _packed_pass(policy, work, device, phases))}
    for name in work.groups:
        run = partial(_flat_pass, stock, work.rollouts, work.groups[name], device)
        methods[name] = Method(stock.model, run)
    return methods


def _packed_pass(policy: TreePolicy, work: _Work, device: torch.device, phases: Phases) -> list[Tensor]:
    forest = work.forest
    with phases("prepare"):
        nodes = [forest.trees[tree].nodes[node] for tree, node in forest.keys]
        no_old = [np.zeros(sum(node.loss_mask), dtype=np.float32) for node in nodes]
        terms = LossTerms(
            forest.advantages(LossConfig()), work.weights, dict(zip(forest.keys, no_old, strict=True))
        )
        parts = work.parts()
    found: dict[NodeKey, Tensor] = {}
    for part in parts:
        with phases("prepare"):
            batch = pack(forest, part, terms).to(device)
        with phases("forward"):
            logprob, _, _ = policy(
                batch.input_ids, batch.layout, batch.edge_src, batch.labels, batch.node_ends
            )
            loss = -(logprob * batch.weight).sum()
        with phases("backward"):
            loss.backward()
        keys = [forest.keys[row] for row in batch.rows]
        found |= dict(zip(keys, logprob.detach().cpu().split(batch.edge_counts), strict=True))
    leaves = [forest.keys[row] for row in forest.leaves]
    return [torch.cat([found[tree, node] for node in forest.trees[tree].path(leaf)]) for tree, leaf in leaves]


def _flat_pass(
    stock: flat.FlatPolicy,
    rollouts: list[flat.Rollout],
    groups: list[list[int]],
    device: torch.device,
    phases: Phases,
) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for group in groups:
        with phases("prepare"):
            batch = flat.pad([rollouts[index] for index in group], device)
        with phases("forward"):
            logprob = stock(batch)
            loss = -(logprob * batch.weight).sum()
        with phases("backward"):
            loss.backward()
        found |= dict(zip(group, logprob.detach().cpu().split(batch.counts), strict=True))
    return [found[index] for index in range(len(rollouts))]


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
