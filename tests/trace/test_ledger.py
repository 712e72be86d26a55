"""The cost ledger against counts made by hand."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl.engines.protocol import EngineCounters
from trace_rl.ledger import Ledger, count
from trace_rl.rollout.tree import RolloutTree

from .trees import TASK, root, trees, turn


def branched() -> RolloutTree:
    """A bare rollout of three turns, one cut at once, and two continuations of the first's first turn."""
    tree = RolloutTree(TASK, [root(10)])
    first = turn(tree, 0, "bare", 5, 20, prompt_tokens=10, cached_tokens=0, tool_calls=1, state={})
    second = turn(
        tree, first, "bare", 4, 30, prompt_tokens=35, cached_tokens=8, tool_calls=1, tool_failures=1, state={}
    )
    turn(tree, second, "bare", 3, prompt_tokens=69, cached_tokens=32, reward=1.0, outcome="answer")
    turn(tree, 0, "bare", 7, prompt_tokens=10, reward=0.0, truncation="generation_limit")
    turn(tree, first, "continuation", 6, prompt_tokens=35, cached_tokens=32, reward=0.0, outcome="answer")
    turn(
        tree, first, "continuation", 2, prompt_tokens=35, cached_tokens=16, reward=0.0,
        truncation="context_limit", tool_calls=1, oversized_results=1,
    )  # fmt: skip
    tree.check()
    return tree


def test_counts_by_hand() -> None:
    ledger = count([branched()])
    assert ledger == Ledger(
        leaves=4,
        bare_rollouts=2,
        turns=6,
        generated_tokens=5 + 4 + 3 + 7 + 6 + 2,  # none of the 50 observed tokens, nor the prompt
        prompt_tokens=10 + 35 + 69 + 10 + 35 + 35,
        cached_tokens=8 + 32 + 32 + 16,
        continuation_prompt_tokens=70,
        continuation_cached_tokens=48,
        tool_calls=3,
        tool_failures=1,
        oversized_tool_results=1,
        generation_limit=1,
        context_limit=1,
    )
    assert ledger.computed_prompt_tokens == 194 - 88
    assert ledger.to_dict() == {**asdict(ledger), "computed_prompt_tokens": 106}


def test_no_trees_cost_nothing() -> None:
    assert count([]) == Ledger()
    assert count([RolloutTree(TASK, [root()])]) == Ledger()


@given(st.lists(trees(), max_size=4), st.integers(0, 4))
@settings(max_examples=40, deadline=None)
def test_ledgers_add_up(forest: list[RolloutTree], at: int) -> None:
    assert count(forest[:at]) + count(forest[at:]) == count(forest)
    assert count(forest) + Ledger() == count(forest)


def test_disagreement_is_the_engine_minus_the_ledger() -> None:
    ledger = count([branched()])
    exact = EngineCounters(prompt_tokens=194, cached_tokens=88, generated_tokens=27)
    assert ledger.disagreement(exact) == {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0}
    more = EngineCounters(prompt_tokens=204, cached_tokens=87, generated_tokens=30)
    assert ledger.disagreement(more) == {"prompt_tokens": 10, "cached_tokens": -1, "generated_tokens": 3}


@pytest.mark.parametrize("observed", [0, 1, 500])
def test_observations_are_not_generated(observed: int) -> None:
    tree = RolloutTree(TASK, [root(100)])
    first = turn(tree, 0, "bare", 5, observed, state={})
    turn(tree, first, "bare", 2, reward=1.0)
    assert count([tree]).generated_tokens == 7
