"""The pool of a step: different prompts that fit, or one message."""

from types import SimpleNamespace
from typing import Any

import pytest

from trace_rl.config.load import ConfigError
from trace_rl.config.schema import AllocationConfig, SamplingConfig
from trace_rl.environments.protocol import ToolOutageError
from trace_rl.rollout.tree import Node, RolloutTree
from trace_rl.sampling import plant_pool, sound_trees
from trace_rl.tasks.order import TaskOrder
from trace_rl.tasks.task import Task


def run(lengths: list[int], pool: int, bare: int = 4, strategy: str = "trace") -> Any:
    """A run over one task per prompt length, with room for prompts of up to 90 tokens."""
    tasks = [Task(f"t{i}", "q", ("a",), "test", (str(n),)) for i, n in enumerate(lengths)]

    def plant(task: Task) -> RolloutTree:
        n = int(task.titles[0])
        return RolloutTree(task, [Node(-1, 0, "root", [1] * n, [0] * n, [0.0] * n)])

    return SimpleNamespace(
        config=SimpleNamespace(
            allocation=AllocationConfig(
                bare_rollouts=bare, continuations=1, pool=pool, max_per_prompt=4, strategy=strategy
            ),
            sampling=SamplingConfig(turn_tokens=10, context_tokens=100),
        ),
        tasks=tasks,
        order=TaskOrder(len(tasks), 0),
        collector=SimpleNamespace(plant=plant, fits=lambda tree: len(tree.nodes[0].token_ids) <= 90),
    )


def test_prompts_of_a_pool_differ_even_across_the_end_of_an_epoch() -> None:
    r = run([5] * 7, pool=5)
    for _ in range(6):
        trees, skipped = plant_pool(r)
        assert len({tree.task.id for tree in trees}) == 5
        assert skipped == 0


def test_prompts_longer_than_the_context_are_left_out_and_counted() -> None:
    trees, skipped = plant_pool(run([5, 500, 5, 500], pool=4))
    assert sorted(tree.task.id for tree in trees) == ["t0", "t2"]
    assert skipped == 2


@pytest.mark.parametrize("strategy", ["trace", "uniform"])
def test_a_context_shorter_than_every_prompt_is_one_message(strategy: str) -> None:
    with pytest.raises(
        ConfigError, match=r"3 prompts do not fit sampling\.context_tokens=100 .*the 0 that do"
    ):
        plant_pool(run([500] * 3, pool=3, strategy=strategy))


def test_too_few_fitting_prompts_for_the_budget_are_one_message() -> None:
    with pytest.raises(ConfigError, match=r"cannot take allocation\.bare_rollouts=8"):
        plant_pool(run([5, 500, 500], pool=3, bare=8))


def test_a_tool_that_is_down_stops_the_run_with_its_own_words() -> None:
    root = Node(-1, 0, "root", [7], [0], [0.0])
    failed = Node(0, 1, "bare", [1], [1], [0.0], reward=0.0, outcome="tool_error", error="connection refused")
    won = Node(0, 1, "bare", [2], [1], [0.0], reward=1.0, outcome="answer")
    task = Task("t", "Who?", ("x",), "test")
    down, mixed = RolloutTree(task, [root, failed]), RolloutTree(task, [root, failed, won, won, won])
    assert [len(tree.nodes) for tree in sound_trees([down, mixed], 3)] == [4]
    with pytest.raises(ToolOutageError, match=r"4 of the 7 rollouts of step 3 .* connection refused"):
        sound_trees([down, down, down, mixed], 3)
