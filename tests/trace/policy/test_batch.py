"""Trees into forests, parts and packed batches, against the trees' own rollouts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels.packing import cut_forest
from trace_rl.config.schema import LossConfig
from trace_rl.policy.batch import (
    Features,
    Forest,
    LossTerms,
    PackedBatch,
    dummy_batch,
    pack,
    schedule,
)
from trace_rl.policy.loss import tree_policy_loss
from trace_rl.policy.module import ModelError, TreePolicy, load_tree_policy
from trace_rl.rollout.tree import RolloutTree

from .oracle import TEMPERATURE, flat_loss, random_tree, random_trees, score_flat, stock_model

forests = st.builds(
    lambda rng, count: [random_tree(rng) for _ in range(count)],
    st.randoms(use_true_random=False),
    st.integers(1, 4),
)
LOSS = LossConfig()


def terms_of(forest: Forest, loss: LossConfig = LOSS, old: Features | None = None) -> LossTerms:
    if old is None:
        counts = {key: sum(forest.trees[key[0]].nodes[key[1]].loss_mask) for key in forest.keys}
        old = {(t, n): np.arange(c, dtype=np.float32) - 100 * t - 10 * n for (t, n), c in counts.items()}
    return LossTerms(forest.advantages(loss), forest.leaf_weights(loss), old)


def longest_path(trees: Sequence[RolloutTree]) -> int:
    return max(len(tree.prefix_ids(leaf)) for tree in trees for leaf in tree.leaves())


@given(forests)
@settings(max_examples=60, deadline=None)
def test_the_forest_says_what_its_trees_say(trees: list[RolloutTree]) -> None:
    forest = Forest.of(trees)
    assert sorted(forest.keys) == [(t, n) for t, tree in enumerate(trees) for n in range(len(tree.nodes))]
    assert [t for t, _ in forest.keys] == sorted(t for t, _ in forest.keys)
    for row, (t, n) in enumerate(forest.keys):
        node, parent = trees[t].nodes[n], forest.parents[row]
        assert (-1 if n == 0 else forest.keys.index((t, node.parent))) == parent
        assert forest.lengths[row] == len(node.token_ids)
        subtree = [r for r, key in enumerate(forest.keys) if key[0] == t and n in trees[t].path(key[1])]
        assert subtree == list(range(row, row + len(subtree)))  # depth first
    leaves = [forest.keys[row] for row in forest.leaves]
    assert sorted(leaves) == [(t, n) for t, tree in enumerate(trees) for n in tree.leaves()]
    assert list(forest.leaves) == sorted(forest.leaves)
    for (t, n), reward, bare in zip(leaves, forest.rewards, forest.bare, strict=True):
        assert reward == trees[t].nodes[n].reward
        assert bare == (trees[t].nodes[n].kind == "bare")
    assert forest.tokens == sum(len(node.token_ids) for tree in trees for node in tree.nodes)
    assert forest.flat_tokens == sum(len(tree.prefix_ids(leaf)) for tree in trees for leaf in tree.leaves())


@given(forests, st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_batch_holds_the_sampled_tokens_and_what_predicts_them(trees: list[RolloutTree], more: int) -> None:
    forest = Forest.of(trees)
    terms = terms_of(forest)
    for part in cut_forest(forest.parents, forest.lengths, max_tokens=longest_path(trees) + more):
        batch = pack(forest, part, terms)
        keys = [forest.keys[row] for row in batch.rows]
        starts = np.cumsum([0, *(len(trees[t].nodes[n].token_ids) for t, n in keys)])
        where = {
            key: range(a, b) for key, a, b in zip(keys, starts, starts[1:], strict=False)
        }  # packed positions
        edge = 0
        for key in keys:
            t, n = key
            node = trees[t].nodes[n]
            path = [p for m in trees[t].path(n) for p in where[t, m]]
            assert batch.input_ids[where[key]].tolist() == node.token_ids
            assert batch.node_ends[keys.index(key)] == path[-1]
            sampled = [i for i, m in enumerate(node.loss_mask) if m]
            for number, i in enumerate(sampled):
                position = where[key][i]
                assert batch.edges[edge] == position
                assert batch.labels[edge] == node.token_ids[i]
                assert batch.edge_src[edge] == path[path.index(position) - 1]
                assert batch.layout.depth[position] == path.index(position)
                assert batch.sampler_logprob[edge] == np.float32(node.logprobs[i])
                assert batch.old_logprob[edge] == terms.old_logprobs[key][number]
                edge += 1
        assert edge == len(batch.edges) == sum(batch.edge_counts)


@given(
    forests,
    st.integers(0, 40),
    st.sampled_from(["per_leaf", "per_subtree"]),
    st.sampled_from(["treepo", "turn"]),
)
@settings(max_examples=60, deadline=None)
def test_weights_of_the_parts_add_up(
    trees: list[RolloutTree], more: int, weighting: Any, advantage: Any
) -> None:
    """Over all parts, a token carries the weight and the advantages of the leaves below it."""
    loss = LossConfig(leaf_weighting=weighting, advantage=advantage)
    forest = Forest.of(trees)
    terms = terms_of(forest, loss)
    found = {key: np.zeros(3) for key in forest.keys}
    for part in cut_forest(forest.parents, forest.lengths, max_tokens=longest_path(trees) + more):
        batch = pack(forest, part, terms)
        edge = 0
        for row, count in zip(batch.rows, batch.edge_counts, strict=True):
            for name, values in enumerate((batch.positive, batch.negative, batch.weight)):
                mine = values[edge : edge + count]
                assert len(set(mine.tolist())) <= 1
                found[forest.keys[row]][name] += float(mine[0]) if count else 0.0
            edge += count
    for row, (t, n) in enumerate(forest.keys):
        if not sum(trees[t].nodes[n].loss_mask):
            continue
        tree, sums = trees[t], np.zeros(3)
        for number, leaf_row in enumerate(forest.leaves):
            leaf_tree, leaf = forest.keys[leaf_row]
            if leaf_tree == t and n in tree.path(leaf):
                branch = tree.path(leaf)[1]
                siblings = sum(branch in tree.path(other) for other in tree.leaves())
                weight = 1.0 if weighting == "per_leaf" else 1.0 / siblings
                leaf_advantage, node_advantage = terms.advantages.leaf, terms.advantages.node
                a = leaf_advantage[number] if leaf_advantage is not None else node_advantage[row]  # type: ignore[index]
                sums += weight * np.array([max(a, 0), min(a, 0), 1])
        np.testing.assert_allclose(found[t, n], sums, atol=1e-5)


def test_a_scoring_pass_has_no_weights() -> None:
    forest = Forest.of(random_trees(3, 3))
    (part,) = cut_forest(forest.parents, forest.lengths, max_tokens=forest.tokens)
    batch = pack(forest, part)
    assert not batch.weight.any()
    assert torch.equal(batch.old_logprob, batch.sampler_logprob)
    assert batch.to(torch.device("cpu")).rows == batch.rows


@given(forests, st.integers(1, 80), st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_the_schedule_gives_all_ranks_the_same_number(
    trees: list[RolloutTree], limit: int, world: int
) -> None:
    forest = Forest.of(trees)
    plan = schedule(forest, limit, world)
    assert len(plan) == world
    assert len({len(parts) for parts in plan}) == 1
    parts = [part for bin in plan for part in bin if part is not None]
    assert sorted(int(leaf) for part in parts for leaf in part.leaf_nodes) == forest.leaves.tolist()
    assert all(part.tokens <= max(limit, longest_path(trees)) for part in parts)
    assert all(any(part is not None for part in turn) for turn in zip(*plan, strict=True))  # no idle round
    again = schedule(Forest.of(trees), limit, world)
    assert [[p and p.nodes.tolist() for p in bin] for bin in again] == [
        [p and p.nodes.tolist() for p in bin] for bin in plan
    ]


def test_work_is_spread_over_the_ranks() -> None:
    rng = random.Random(1)
    forest = Forest.of([random_tree(rng) for _ in range(24)])
    loads = [sum(part.tokens for part in bin if part) for bin in schedule(forest, 1 << 20, 4)]
    assert max(loads) < 1.5 * min(loads)


def load(path: Path) -> TreePolicy:
    return load_tree_policy(
        path, dtype="float32", temperature=TEMPERATURE, gradient_checkpointing=False, liger=False
    )


def batch_loss(policy: TreePolicy, batch: PackedBatch, denominator: float) -> torch.Tensor:
    logprob, _, _ = policy(batch.input_ids, batch.layout, batch.edge_src, batch.labels, batch.node_ends)
    return tree_policy_loss(
        logprob,
        batch.old_logprob,
        batch.sampler_logprob,
        batch.positive,
        batch.negative,
        batch.weight,
        denominator=denominator,
    ).loss


def test_parts_add_up_to_the_whole_and_to_flat_rollouts(models: Path) -> None:
    trees = random_trees(5, 4)
    forest = Forest.of(trees)
    stock = stock_model(models / "untied")
    old = {key: lp + 0.2 * np.float32(np.sin(key[1])) for key, lp in score_flat(stock, trees).items()}
    terms = terms_of(forest, LOSS, old)
    tokens = sum(
        sum(tree.nodes[n].loss_mask) for tree in trees for leaf in tree.leaves() for n in tree.path(leaf)
    )
    value = flat_loss(stock, trees, old, LOSS)
    value.backward()
    want = {f"model.{name}": p.grad for name, p in stock.named_parameters()}

    policy = load(models / "untied")
    shortest, counts = longest_path(trees), []
    for limit in (shortest, shortest + 9, 2 * shortest, forest.tokens):
        parts = cut_forest(forest.parents, forest.lengths, max_tokens=limit)
        counts.append(len(parts))
        total = 0.0
        policy.zero_grad()
        for part in parts:
            loss = batch_loss(policy, pack(forest, part, terms), tokens)
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(float(value.detach()), abs=1e-6)
        for name, parameter in policy.named_parameters():
            torch.testing.assert_close(parameter.grad, want[name], rtol=1e-5, atol=1e-6)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > len(trees)
    assert counts[-1] == 1


def test_a_dummy_touches_every_parameter_with_zero(models: Path) -> None:
    policy, batch = load(models / "tied"), dummy_batch()
    assert batch.is_dummy
    batch_loss(policy, batch, 1.0).backward()
    for parameter in policy.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_what_is_no_model_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere holds no config.json"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ModelError, match="as a causal language model"):
        load(tmp_path)
