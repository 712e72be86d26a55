"""Rollout trees for tests: small ones by hand, random ones by hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from trace_rl.rollout.tree import Node, RolloutTree
from trace_rl.tasks.task import Task

TASK = Task("t", "Who?", ("Marla",), "test")


def root(tokens: int = 3) -> Node:
    return Node(-1, 0, "root", list(range(tokens)), [0] * tokens, [0.0] * tokens)


def turn(tree: RolloutTree, parent: int, kind: Any, sampled: int, observed: int = 0, **fields: Any) -> int:
    """Append a turn of `sampled` and `observed` tokens below `parent`; returns its index."""
    node = Node(
        parent=parent,
        depth=tree.nodes[parent].depth + 1,
        kind=kind,
        token_ids=list(range(10, 10 + sampled + observed)),
        loss_mask=[1] * sampled + [0] * observed,
        logprobs=[-0.5] * sampled + [0.0] * observed,
        **fields,
    )
    tree.nodes.append(node)
    return len(tree.nodes) - 1


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 12) -> RolloutTree:
    """Any tree that keeps the invariants, with arbitrary text, states and numbers in it."""
    text = st.text(max_size=8)
    task = Task(*draw(st.tuples(text, text, st.lists(text).map(tuple), text, st.lists(text).map(tuple))))
    parents = [draw(st.integers(0, i)) for i in range(draw(st.integers(0, max_nodes - 1)))]
    tree = RolloutTree(task, [root(draw(st.integers(0, 4)))])
    count = st.integers(0, 1000)
    for index, parent in enumerate(parents, start=1):
        inner = index in parents
        turn(
            tree,
            parent,
            draw(st.sampled_from(["bare", "continuation"])),
            draw(st.integers(0, 4)),
            draw(st.integers(0, 4)),
            state=draw(st.dictionaries(text, _json, max_size=3)) if inner else None,
            reward=None if inner else draw(st.sampled_from([0.0, 1.0, 0.1, 1 / 3])),
            truncation=draw(st.sampled_from([None, "generation_limit", "context_limit"])),
            outcome=draw(text),
            tool_calls=draw(count),
            prompt_tokens=draw(count),
            weight_version=draw(count),
        )
        node = tree.nodes[index]
        node.logprobs = [draw(st.floats(-50, 0)) if m else 0.0 for m in node.loss_mask]
    return tree
