"""The rollout tree: orders and paths against brute force, the JSON line, the invariants."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl.rollout.tree import Node, RolloutTree, read_trees
from trace_rl.tasks.task import Task

from ..trees import TASK, root, trees, turn


@given(trees())
@settings(max_examples=150, deadline=None)
def test_json_round_trip(tree: RolloutTree) -> None:
    tree.check()
    line = tree.to_json()
    assert "\n" not in line
    assert RolloutTree.from_json(line) == tree
    assert RolloutTree.from_json(line).to_json() == line


@given(trees())
@settings(max_examples=100, deadline=None)
def test_orders_and_paths(tree: RolloutTree) -> None:
    nodes = tree.nodes
    below = {i: [c for c in range(1, len(nodes)) if nodes[c].parent == i] for i in range(len(nodes))}
    assert tree.children() == [below[i] for i in range(len(nodes))]

    def preorder(index: int) -> list[int]:
        return [index, *(i for child in below[index] for i in preorder(child))]

    assert tree.dfs_order() == preorder(0)
    for i, node in enumerate(nodes):
        path = tree.path(i)
        assert path[0] == 0
        assert path[-1] == i
        assert len(path) == node.depth + 1
        assert all(nodes[child].parent == parent for parent, child in pairwise(path))
        assert tree.prefix_ids(i) == [token for j in path for token in nodes[j].token_ids]
    childless = [i for i in range(1, len(nodes)) if not below[i]]
    assert tree.leaves() == childless
    assert tree.rewards() == [nodes[i].reward for i in childless]
    assert tree.is_mixed() == (len(set(tree.rewards())) >= 2)


def grown() -> RolloutTree:
    """Two bare rollouts of three turns and one, and a continuation of the first's first turn."""
    tree = RolloutTree(TASK, [root()])
    first = turn(tree, 0, "bare", 2, 3, state={"turns": 1})
    second = turn(tree, first, "bare", 2, 1, state={"turns": 2})
    turn(tree, second, "bare", 2, reward=1.0)
    turn(tree, 0, "bare", 4, reward=0.0)
    turn(tree, first, "continuation", 2, reward=0.0)
    tree.check()
    return tree


def test_anchors_are_the_inner_turns_of_bare_rollouts_with_their_observed_reward() -> None:
    tree = grown()
    assert tree.anchors() == [(1, 1.0), (2, 1.0)]  # no root, no leaf, nothing of the continuation
    tree.nodes[3].reward = 0.0
    assert tree.anchors() == [(1, 0.0), (2, 0.0)]
    alone = RolloutTree(TASK, [root()])
    turn(alone, 0, "bare", 2, reward=1.0)
    assert alone.anchors() == []
    assert RolloutTree(TASK, [root()]).anchors() == []


BROKEN: dict[str, tuple[int, dict[str, Any], str]] = {
    "a root with a parent": (0, {"parent": 0}, "root first"),
    "a second root": (4, {"parent": -1}, "root first"),
    "a parent after its child": (1, {"parent": 2}, "must come before it"),
    "its own parent": (2, {"parent": 2}, "must come before it"),
    "a skipped depth": (2, {"depth": 3}, "depth 3, expected 2"),
    "a root of depth one": (0, {"depth": 1}, "depth 1, expected 0"),
    "a missing token": (1, {"token_ids": [10] * 4}, "differ in length"),
    "a missing mask": (1, {"loss_mask": [1, 1, 0, 0]}, "differ in length"),
    "a missing log-prob": (1, {"logprobs": []}, "differ in length"),
    "a reward inside": (1, {"reward": 0.0}, "an inner node carries a reward"),
    "a leaf without a reward": (5, {"reward": None}, "a leaf without a reward"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_check_names_the_node_that_breaks_an_invariant(name: str) -> None:
    index, changes, reason = BROKEN[name]
    tree = grown()
    for field, value in changes.items():
        setattr(tree.nodes[index], field, value)
    with pytest.raises(ValueError, match=rf"'t', node {index}: .*{reason}"):
        tree.check()
    with pytest.raises(ValueError, match=reason):
        RolloutTree.from_json(tree.to_json())


def test_a_tree_has_a_root() -> None:
    with pytest.raises(ValueError, match="not even a root"):
        RolloutTree(TASK).check()


TASK_JSON = '{"id":"t","question":"q","answers":[],"source":"s"}'


@pytest.mark.parametrize(
    "line",
    [
        "", "{", "[]", "null", "3", '"tree"', "{}", '{"task":[],"nodes":[]}', '{"task":{},"nodes":[]}',
        f'{{"task":{TASK_JSON}}}',
        f'{{"task":{TASK_JSON},"nodes":[]}}',
        f'{{"task":{TASK_JSON},"nodes":7}}',
        f'{{"task":{TASK_JSON},"nodes":[{{}}]}}',
        f'{{"task":{TASK_JSON},"nodes":[{{"parent":-1,"depth":0,"kind":"root","token_ids":null,'
        '"loss_mask":[],"logprobs":[]}]}',
        f'{{"task":{TASK_JSON},"nodes":[{{"colour":1}}]}}',
    ],
)  # fmt: skip
def test_anything_else_is_refused_as_a_value_error(line: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        RolloutTree.from_json(line)


@given(st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_a_torn_line_is_refused(length: int) -> None:
    line = grown().to_json()
    with pytest.raises(ValueError, match="not a rollout tree"):
        RolloutTree.from_json(line[: min(length, len(line) - 1)])


def test_read_trees_names_the_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "trees.jsonl"
    good = grown()
    path.write_text(f"{good.to_json()}\n{good.to_json()}\n{good.to_json()[:50]}\n")
    reader = read_trees(path)
    assert [next(reader), next(reader)] == [good, good]
    with pytest.raises(ValueError, match=r"trees\.jsonl, line 3: not a rollout tree"):
        next(reader)


def test_rollouts_that_a_tool_ended_have_no_reward_and_go() -> None:
    def bare(parent: int, depth: int, **fields: Any) -> Node:
        return Node(parent, depth, "bare", [parent], [1], [-0.5], **fields)

    prompt = Node(-1, 0, "root", [7], [0], [0.0])
    failed = {"reward": 0.0, "outcome": "tool_error", "error": "the server is down"}
    nodes = [
        prompt,
        bare(0, 1),
        bare(1, 2, **failed),
        bare(0, 1),
        bare(3, 2, reward=1.0),
        bare(3, 2, **failed),
    ]
    tree = RolloutTree(Task("t", "Who?", ("x",), "test"), nodes)
    tree.check()
    assert tree.leaves() == [2, 4, 5]
    assert tree.rewards() == tree.bare_rewards() == [1.0]
    assert tree.anchors() == [(3, 1.0)]
    assert not tree.is_mixed()
    sound = tree.without_errors()
    sound.check()
    assert [(n.parent, n.token_ids) for n in sound.nodes] == [(-1, [7]), (0, [0]), (1, [3])]
    assert tree.nodes[4].parent == 3  # the tree itself is left as it was
    assert sound.without_errors() is sound
    assert RolloutTree.from_json(tree.to_json()) == tree
