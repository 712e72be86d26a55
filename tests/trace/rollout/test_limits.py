"""Where rollouts end early: generation limit, context limit, prompts that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trace_rl.engines.protocol import Completion, Sampling
from trace_rl.rollout.collector import Limits

from .scripted import ScriptedEnvironment, byte_tokenizer, collector, completion, task

BYTES = byte_tokenizer()
SEARCH, YES = "<search> banana </search>", "<answer> yes </answer>"


def ids(text: str) -> list[int]:
    return BYTES(text)["input_ids"]


async def never(n: int, prefix: list[int], sampling: Sampling) -> Completion:
    raise AssertionError("nothing was to be sampled")


def test_a_turn_cut_at_its_own_limit() -> None:
    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        if n == 0:
            return completion(ids(SEARCH))
        return completion((ids(YES) + ids(" and on") * 9)[: sampling.max_tokens], truncated=True)

    environment = ScriptedEnvironment()
    c, engine = collector(reply, environment, turn=40)
    tree = c.plant(task())
    c.bare([tree], [1], seed=0, version=0)
    leaf = tree.nodes[2]
    assert [sampling.max_tokens for _, sampling in engine.requests] == [40, 40]
    assert (leaf.truncation, leaf.outcome, leaf.reward, leaf.state) == (
        "generation_limit",
        "truncated",
        0.0,
        None,
    )
    assert environment.heard == [SEARCH]  # the cut turn's answer is never acted upon
    assert leaf.loss_mask == [1] * 40
    tree.check()


def test_a_turn_cut_by_the_context() -> None:
    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        if n == 0:
            return completion(ids(SEARCH))
        return completion((ids(YES) * 9)[: sampling.max_tokens], truncated=True)

    environment = ScriptedEnvironment()
    wide, engine = collector(reply, environment, turn=40)
    tree = wide.plant(task())
    used = len(tree.nodes[0].token_ids) + len(ids(SEARCH + "\n<information>1 25</information>\n"))
    c = replace(wide, limits=Limits(1.0, turn_tokens=40, context_tokens=used + 17))
    assert c.fits(tree)
    c.bare([tree], [1], seed=0, version=0)
    leaf = tree.nodes[2]
    assert [sampling.max_tokens for _, sampling in engine.requests] == [40, 17]
    assert (leaf.truncation, leaf.outcome, leaf.reward) == ("context_limit", "truncated", 0.0)
    assert len(tree.prefix_ids(2)) == used + 17
    assert environment.heard == [SEARCH]
    tree.check()


@pytest.mark.parametrize(("room", "ended"), [(0, True), (-5, True), (1, False)])
def test_an_observation_that_leaves_no_room(room: int, ended: bool) -> None:
    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        return completion(ids(SEARCH) if n == 0 else ids("x"), truncated=n > 0)

    wide, engine = collector(reply, ScriptedEnvironment(filler=100), turn=30)
    tree = wide.plant(task())
    used = len(tree.nodes[0].token_ids) + len(ids(SEARCH + f"\n<information>1 25{'x' * 100}</information>\n"))
    c = replace(wide, limits=Limits(1.0, turn_tokens=30, context_tokens=used + room))
    c.bare([tree], [1], seed=0, version=0)
    assert [sampling.max_tokens for _, sampling in engine.requests] == ([30] if ended else [30, room])
    leaf = tree.nodes[-1]
    assert leaf.truncation == "context_limit"
    assert leaf.reward == 0.0
    if ended:  # the observation is left out whole, the tool call still counts
        assert leaf.token_ids == ids(SEARCH)
        assert leaf.loss_mask == [1] * len(ids(SEARCH))
        assert (leaf.outcome, leaf.tool_calls, leaf.state) == ("search", 1, None)
        assert tree.anchors() == []
    tree.check()


def test_a_prompt_that_leaves_no_room_for_a_turn_does_not_fit() -> None:
    c, _ = collector(never)
    tree = c.plant(task())
    needed = len(tree.nodes[0].token_ids) + 200
    assert replace(c, limits=Limits(1.0, 200, needed)).fits(tree)
    assert not replace(c, limits=Limits(1.0, 200, needed - 1)).fits(tree)
