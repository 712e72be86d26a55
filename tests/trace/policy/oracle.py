"""Small real parts, and training on them in plain torch: stock transformers, one call per rollout, one rank."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from trace_rl.config.schema import LossConfig, OptimizerConfig
from trace_rl.rollout.tree import Node, RolloutTree
from trace_rl.tasks.task import Task

VOCAB = 61
TEMPERATURE = 0.8
EPS = 1e-4  # of AdamW: with the usual 1e-8 its first steps are signs, and rounding alone flips those
TASK = Task("t", "Who?", ("Marla",), "test")

PerNode = dict[tuple[int, int], np.ndarray]  # (tree, node) -> one number per sampled token


def write_model(path: Path, *, tied: bool, seed: int) -> None:
    """A random two-layer Qwen3 with a tokenizer, as a Hugging Face directory."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=256,
                initializer_range=0.2,
                tie_word_embeddings=tied,
                bos_token_id=None,
                eos_token_id=0,
                pad_token_id=1,
            )
        )
        for parameter in model.parameters():  # norms start as ones: make every gradient matter
            parameter.data.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w0", pad_token="w1", unk_token="w2"
    ).save_pretrained(path)


def random_tree(
    rng: random.Random, most_turns: int = 9, rewards: Sequence[float] = (0.0, 1.0)
) -> RolloutTree:
    """Any tree shape, nodes in any legal order, sampled and other tokens mixed within a turn."""
    parents = [-1, *(rng.randint(0, i) for i in range(rng.randint(1, most_turns)))]
    tree = RolloutTree(TASK)
    for index, parent in enumerate(parents):
        count = rng.randint(2, 7)
        mask = [int(rng.random() < 0.7) for _ in range(count)] if index else [0] * count
        if index not in parents:
            mask[0] = 1
        tree.nodes.append(
            Node(
                parent=parent,
                depth=tree.nodes[parent].depth + 1 if index else 0,
                kind=rng.choice(["bare", "continuation"]) if index else "root",
                token_ids=[rng.randrange(VOCAB) for _ in range(count)],
                loss_mask=mask,
                logprobs=[-rng.uniform(2.5, 5.5) if m else 0.0 for m in mask],
                reward=None if index in parents else rng.choice(rewards),
            )
        )
    tree.check()
    return tree


def random_trees(seed: int, count: int) -> list[RolloutTree]:
    """`count` trees: the first holds no contrast, the second does."""
    rng = random.Random(seed)
    trees = [random_tree(rng, rewards=(1.0,))]
    while len(trees) < count:
        tree = random_tree(rng)
        if len(trees) > 1 or tree.is_mixed():
            trees.append(tree)
    return trees[:count]


def stock_model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").train()


def token_logprobs(model: Any, tree: RolloutTree, leaf: int) -> Tensor:
    """[sampled tokens on the path] of one rollout, as a sequence of its own."""
    ids = torch.tensor(tree.prefix_ids(leaf))
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
    mask = torch.tensor([m for n in tree.path(leaf) for m in tree.nodes[n].loss_mask], dtype=torch.bool)
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][mask[1:]]


@torch.no_grad()
def score_flat(model: Any, trees: Sequence[RolloutTree]) -> PerNode:
    """Log-probs of every node's sampled tokens."""
    found: PerNode = {}
    for t, tree in enumerate(trees):
        for leaf in tree.leaves():
            path = tree.path(leaf)
            counts = [sum(tree.nodes[n].loss_mask) for n in path]
            parts = np.split(token_logprobs(model, tree, leaf).numpy(), np.cumsum(counts)[:-1])
            found |= {(t, n): part for n, part in zip(path, parts, strict=True)}
    return found


def treepo(tree: RolloutTree) -> list[float]:
    """Advantages by the definition: z-scores within the groups of leaves that share an ancestor, averaged."""
    leaves, found = tree.leaves(), []
    for leaf in leaves:
        groups: list[list[int]] = []
        for ancestor in tree.path(leaf):
            group = [other for other in leaves if ancestor in tree.path(other)]
            if len(group) > 1 and group not in groups:
                groups.append(group)
        scores = []
        for group in groups:
            rewards = np.array([tree.nodes[member].reward for member in group])
            std = rewards.std() if len(set(rewards)) > 1 else 0.0
            scores.append((tree.nodes[leaf].reward - rewards.mean()) / (std + 1e-6) if std else 0.0)
        found.append(float(np.mean(scores)) if scores else 0.0)
    return found


def flat_loss(
    model: Any,
    trees: Sequence[RolloutTree],
    old: PerNode,
    loss: LossConfig,
    reference: PerNode | None = None,
) -> Tensor:
    """The policy loss, one term per rollout and sampled token, written out."""
    total, tokens = torch.zeros(()), 0
    for t, tree in enumerate(trees):
        for leaf, advantage in zip(tree.leaves(), treepo(tree), strict=True):
            path = tree.path(leaf)
            sampler = torch.tensor(
                [
                    lp
                    for n in path
                    for lp, m in zip(tree.nodes[n].logprobs, tree.nodes[n].loss_mask, strict=True)
                    if m
                ]
            )
            before = torch.from_numpy(np.concatenate([old[t, n] for n in path]))
            now = token_logprobs(model, tree, leaf)
            ratio = (now - before).exp()
            clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            gain = torch.minimum(ratio * advantage, clipped * advantage)
            total = total - (gain * (before - sampler).exp().clamp(max=loss.importance_cap)).sum()
            if reference is not None:
                gap = torch.from_numpy(np.concatenate([reference[t, n] for n in path])) - now
                total = total + loss.kl * (gap.exp() - 1 - gap).sum()
            tokens += len(now)
    return total / tokens


def train_flat(
    path: Path,
    batches: Sequence[Sequence[RolloutTree]],
    loss: LossConfig,
    optimizer: OptimizerConfig,
    *,
    reference: Any = None,
) -> dict[str, Any]:
    """One AdamW step per batch, old log-probs all taken before the first; what happened, and the weights."""
    model = stock_model(path)
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        eps=EPS,
    )
    old = [score_flat(model, trees) for trees in batches]
    losses, norms = [], []
    for trees, before in zip(batches, old, strict=True):
        adam.zero_grad()
        value = flat_loss(model, trees, before, loss, score_flat(reference, trees) if reference else None)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.gradient_clipping or 1e9)
        adam.step()
        losses.append(float(value.detach()))
        norms.append(float(norm))
    return {
        "logprobs": old[0],
        "loss": losses,
        "grad_norm": norms,
        "weights": {name: value.detach() for name, value in model.named_parameters()},
    }
