"""One forward and backward pass over the same trees: packed as the trainer does it, and rollout by rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_kernels.packing import Part
from trace_rl.config.schema import LossConfig
from trace_rl.policy.batch import Forest, LossTerms, NodeKey, pack, schedule
from trace_rl.policy.module import TreePolicy
from trace_rl.rollout.tree import RolloutTree

from . import flat
from .measure import Phases

PACKED, SINGLE, PADDED = "packed", "flat_single", "flat_padded"


@dataclass(frozen=True)
class Method:
    model: torch.nn.Module
    run: Callable[[Phases], list[Tensor]]  # backward over everything; the rollouts' log-probs


@dataclass(frozen=True)
class Work:
    """The same trees for both sides."""

    forest: Forest
    weights: NDArray[np.float64]  # [L] of the leaves' log-probs in the loss, told apart at every branch
    rollouts: list[flat.Rollout]
    limit: int  # tokens of a micro-batch
    groups: dict[str, list[list[int]]]  # rollouts of each flat batch, by method

    @classmethod
    def of(cls, trees: list[RolloutTree], limit: int) -> Work:
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


def methods(
    policy: TreePolicy, stock: flat.FlatPolicy, work: Work, device: torch.device
) -> dict[str, Method]:
    methods = {PACKED: Method(policy, lambda phases: _packed_pass(policy, work, device, phases))}
    for name in work.groups:
        run = partial(_flat_pass, stock, work.rollouts, work.groups[name], device)
        methods[name] = Method(stock.model, run)
    return methods


def _packed_pass(policy: TreePolicy, work: Work, device: torch.device, phases: Phases) -> list[Tensor]:
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
