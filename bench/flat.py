"""The peer of packing: every rollout a sequence of its own, through the stock model with sdpa attention.

Right padding needs no mask under causal attention, so that padded batches keep sdpa's fast causal path too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trace_kernels.edge_logprobs import EdgeLogprobHead
from trace_rl.policy.batch import Forest


@dataclass(frozen=True)
class Rollout:
    """One root-to-leaf sequence."""

    input_ids: Tensor  # int64 [L]
    sampled: Tensor  # int64 [E], positions of its sampled tokens
    weight: float  # of its log-probs in the loss


@dataclass(frozen=True)
class FlatBatch:
    input_ids: Tensor  # int64 [B, L], zeros after each sequence's end
    edge_src: Tensor  # int64 [E], rows of the flattened [B L] hidden states
    labels: Tensor  # int64 [E]
    weight: Tensor  # float32 [E]
    counts: list[int]  # [B] sampled tokens of each sequence


def rollouts(forest: Forest, weights: Sequence[float]) -> list[Rollout]:
    """The forest's rollouts in the order of its leaves, with their loss weights [L]."""
    found = []
    for row, weight in zip(forest.leaves.tolist(), weights, strict=True):
        number, leaf = forest.keys[row]
        tree = forest.trees[number]
        mask = torch.tensor([m for node in tree.path(leaf) for m in tree.nodes[node].loss_mask])
        found.append(Rollout(torch.tensor(tree.prefix_ids(leaf)), mask.nonzero()[:, 0], float(weight)))
    return found


def single(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """One sequence at a time."""
    return [[index] for index in range(len(rollouts))]


def padded(rollouts: Sequence[Rollout], max_tokens: int) -> list[list[int]]:
    """Neighbours by length, as many as fit the limit with their padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].input_ids)):
        if groups and (len(groups[-1]) + 1) * len(rollouts[groups[-1][0]].input_ids) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def pad(members: Sequence[Rollout], device: torch.device) -> FlatBatch:
    """One batch of the given rollouts."""
    ids = torch.nn.utils.rnn.pad_sequence([member.input_ids for member in members], batch_first=True)
    edges = torch.cat([i * ids.shape[1] + member.sampled for i, member in enumerate(members)])
    counts = [len(member.sampled) for member in members]
    weight = torch.tensor([member.weight for member in members]).repeat_interleave(torch.tensor(counts))
    labels = ids.flatten()[edges]
    return FlatBatch(ids.to(device), (edges - 1).to(device), labels.to(device), weight.to(device), counts)


class FlatPolicy:
    """A stock causal model; its output layer is the packed side's, so that the head is no difference."""

    def __init__(self, model: Any) -> None:
        self.model = model
        EdgeLogprobHead.adopt(model.get_output_embeddings())

    def __call__(self, batch: FlatBatch) -> Tensor:
        """Log-probs [E] of the sampled tokens."""
        hidden = self.model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return head(hidden.flatten(0, 1), edge_src=batch.edge_src, labels=batch.labels)[0]
