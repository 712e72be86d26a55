"""The collector with a scripted engine and environment: what becomes of the tree, and in which order."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl.engines.protocol import Completion, EngineError, Sampling

from .scripted import HANG_S, ScriptedEnvironment, byte_tokenizer, collector, completion, task, wait

BYTES = byte_tokenizer()
SEARCH, YES, NO = "<search> banana </search>", "<answer> yes </answer>", "<answer> no </answer>"


def ids(text: str) -> list[int]:
    return BYTES(text)["input_ids"]


def wander(seed: int) -> str:
    """A turn that depends on the seed alone."""
    rng = random.Random(seed)
    kind = rng.choices([f"<search> {'an' * rng.randrange(5)}x </search>", YES, NO], [3, 1, 1])[0]
    return f"<think> {rng.randrange(1000)} </think> {kind}"


async def wanders(n: int, prefix: list[int], sampling: Sampling) -> Completion:
    return completion(ids(wander(sampling.seed)))


async def deterministic(n: int, prefix: list[int], sampling: Sampling) -> Completion:
    """A turn that depends on the prefix alone, answering after four searches or so."""
    turn = BYTES.decode(prefix).count("<information>")
    return completion(ids(f"<think> {sum(prefix) % 97} </think> {SEARCH if turn < 4 else YES}"))


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_trees_do_not_depend_on_who_ends_first(delays: int) -> None:
    rng = random.Random(delays)

    async def late(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        return await wanders(n, prefix, sampling)

    grown = []
    for reply in (wanders, late):
        c, _ = collector(reply)
        trees = [c.plant(task("a")), c.plant(task("b"))]
        c.bare(trees, [3, 2], seed=7, version=4)
        anchors = [{i: 1 + i % 2 for i, _ in tree.anchors()} for tree in trees]
        c.continuations(trees, anchors, seed=7, version=4)
        for tree in trees:
            tree.check()
            assert {node.weight_version for node in tree.nodes[1:]} == {4}
        grown.append([tree.to_json() for tree in trees])
    assert grown[0] == grown[1]
    assert '"kind":"continuation"' in "".join(grown[0])


def test_a_slow_branch_holds_up_nobody() -> None:
    """The first rollout's engine waits until all others have ended."""
    others_ended = asyncio.Event()

    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        if n == 0:
            await wait(others_ended)
        return await deterministic(n, prefix, sampling)

    c, _ = collector(reply)
    ended: list[int] = []

    def on_rollout(*rollout: object) -> None:
        ended.append(1)
        if len(ended) == 3:
            others_ended.set()

    tree = c.plant(task())
    replace(c, on_rollout=on_rollout).bare([tree], [4], seed=0, version=0)
    assert len(ended) == 4
    assert tree.rewards() == [1.0] * 4


def test_a_slow_tool_holds_up_nobody() -> None:
    """The first tool call returns once every other rollout has given its answer."""
    answered = threading.Semaphore(0)
    everybody = threading.Event()
    first = threading.Lock()

    def gate(action: str) -> None:
        if action == YES:
            answered.release()
        elif first.acquire(blocking=False):
            for _ in range(3):
                assert answered.acquire(timeout=HANG_S)
            everybody.set()

    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        return completion(ids(YES if "<information>" in BYTES.decode(prefix) else SEARCH))

    c, _ = collector(reply, ScriptedEnvironment(gate=gate))
    tree = c.plant(task())
    c.bare([tree], [4], seed=0, version=0)
    assert everybody.is_set()
    assert tree.rewards() == [1.0] * 4


def test_many_tools_wait_at_once() -> None:
    """Forty tool calls that each wait for all the others."""
    barrier = threading.Barrier(40)

    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        return completion(ids(YES))

    c, _ = collector(reply, ScriptedEnvironment(gate=lambda action: barrier.wait(HANG_S) and None))
    tree = c.plant(task())
    c.bare([tree], [40], seed=0, version=0)
    assert len(tree.leaves()) == 40


def test_nodes_hold_what_was_sampled_and_observed() -> None:
    """Ids that do not survive a trip through text survive here, and the engine sees exactly them again."""
    spelled = [token for letter in SEARCH for token in ids(letter)]
    assert spelled != ids(SEARCH)
    assert BYTES.decode(spelled) == SEARCH

    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        return completion(spelled if n == 0 else [*ids(YES), BYTES.eos_token_id])

    environment = ScriptedEnvironment()
    c, engine = collector(reply, environment)
    tree = c.plant(task())
    c.bare([tree], [1], seed=0, version=9)
    root, first, last = tree.nodes
    observation = ids("\n<information>1 25</information>\n")
    assert root.token_ids == ids("<|im_start|>user\nquestion t?<|im_end|>\n<|im_start|>assistant\n")
    assert first.token_ids == spelled + observation
    assert first.loss_mask == [1] * len(spelled) + [0] * len(observation)
    assert first.logprobs == completion(spelled).logprobs + [0.0] * len(observation)
    assert (first.state, first.reward, first.outcome) == ({"actions": [SEARCH]}, None, "search")
    assert last.token_ids == [*ids(YES), BYTES.eos_token_id]
    assert (last.state, last.reward, last.outcome) == (None, 1.0, "answer")
    prefixes = [prefix for prefix, _ in engine.requests]
    assert prefixes == [root.token_ids, root.token_ids + spelled + observation]
    assert [node.prompt_tokens for node in (first, last)] == [len(prefix) for prefix in prefixes]
    assert [node.cached_tokens for node in (first, last)] == [len(spelled) // 2, (len(ids(YES)) + 1) // 2]
    assert environment.heard == [SEARCH, YES]  # without EOS
    assert {s.stop for _, s in engine.requests} == {environment.stop}


def test_a_continuation_goes_on_like_the_unbroken_run() -> None:
    environment = ScriptedEnvironment()
    c, _ = collector(deterministic, environment)
    tree = c.plant(task())
    c.bare([tree], [1], seed=0, version=0)
    assert len(tree.nodes) == 6
    unbroken = [(n.token_ids, n.loss_mask, n.state, n.reward, n.outcome, n.depth) for n in tree.nodes]
    heard = list(environment.heard)
    for anchor in (0, 1, 2, 3, 4):
        before = len(tree.nodes)
        environment.heard.clear()
        c.continuations([tree], [{anchor: 1}], seed=0, version=0)
        new = tree.nodes[before:]
        fields = [(n.token_ids, n.loss_mask, n.state, n.reward, n.outcome, n.depth) for n in new]
        assert fields == unbroken[anchor + 1 :]
        assert environment.heard == heard[anchor:]
        assert new[0].parent == anchor
        assert {n.kind for n in new} == {"continuation"}
    tree.check()


def seeds_of(names: list[str], counts: list[int]) -> dict[str, set[int]]:
    """Sampling seeds by the question they were used for."""
    c, engine = collector(deterministic)
    trees = [c.plant(task(name)) for name in names]
    c.bare(trees, counts, seed=3, version=0)
    c.continuations(trees, [{1: 2, 2: 1} for _ in trees], seed=3, version=0)
    seeds: dict[str, set[int]] = {}
    for prefix, sampling in engine.requests:
        question = BYTES.decode(prefix).split("question ")[1].split("?")[0]
        seeds.setdefault(question, set()).add(sampling.seed)
    assert len(engine.requests) == sum(map(len, seeds.values()))  # no two requests share a seed
    assert all(0 <= sampling.seed < 2**31 for _, sampling in engine.requests)
    return seeds


def test_seeds_differ_and_depend_on_nothing_but_the_rollout() -> None:
    together = seeds_of(["a", "b", "c"], [2, 3, 2])
    assert {**seeds_of(["c"], [2]), **seeds_of(["b", "a"], [3, 2])} == together
    assert seeds_of(["a"], [3])["a"] > together["a"]  # one more rollout changes no seed of the others
    c, engine = collector(deterministic)
    c.bare([c.plant(task("a"))], [2], seed=4, version=0)
    assert not together["a"] & {sampling.seed for _, sampling in engine.requests}


class FailingEnvironment(ScriptedEnvironment):
    def another(self) -> FailingEnvironment:
        return FailingEnvironment(heard=self.heard)

    def step(self, action: str) -> Any:
        raise OSError("the tool's disk is gone")


@pytest.mark.parametrize("culprit", ["engine", "environment"])
def test_a_failure_cancels_the_others_and_surfaces(culprit: str) -> None:
    cancelled: list[int] = []

    async def reply(n: int, prefix: list[int], sampling: Sampling) -> Completion:
        if n == 1:
            if culprit == "engine":
                raise EngineError("the engine is gone")
            return completion(ids(SEARCH))
        try:
            await wait(asyncio.Event())  # for ever
        except asyncio.CancelledError:
            cancelled.append(n)
            raise
        raise AssertionError

    environment = FailingEnvironment() if culprit == "environment" else None
    c, _ = collector(reply, environment)
    tree = c.plant(task())
    error = EngineError if culprit == "engine" else OSError
    with pytest.raises(error, match="is gone"):
        c.bare([tree], [5], seed=0, version=0)
    assert sorted(cancelled) == [0, 2, 3, 4]
    assert len(tree.nodes) == 1  # nothing half-done joins the tree


def test_nothing_to_do() -> None:
    c, engine = collector(deterministic)
    tree = c.plant(task())
    c.bare([tree], [0], seed=0, version=0)
    c.bare([], [], seed=0, version=0)
    c.continuations([tree], [{}], seed=0, version=0)
    assert engine.requests == []
    assert len(tree.nodes) == 1
