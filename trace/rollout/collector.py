"""Grows rollout trees: every rollout is a coroutine that alternates engine and environment."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..engines.protocol import Engine, Sampling
from ..environments.protocol import Environment
from ..tasks.task import Task
from .transcript import Transcript
from .tree import Kind, Node, RolloutTree, Truncation

TOOL_THREADS = 64  # tool calls under way at once


@dataclass(frozen=True)
class Limits:
    """Sampling limits of a rollout, in tokens; temperature 0 is greedy."""

    temperature: float
    turn_tokens: int
    context_tokens: int


@dataclass(frozen=True)
class Collector:
    """Samples rollouts from one engine.

    `on_rollout(tree, number, nodes)` is called once per finished rollout, with its number at its anchor and
    the turns it adds to the tree.
    """

    engine: Engine
    transcript: Transcript
    make_environment: Callable[[], Environment]
    limits: Limits
    on_rollout: Callable[[RolloutTree, int, list[Node]], None] = lambda tree, number, nodes: None

    def plant(self, task: Task) -> RolloutTree:
        """A tree that holds only the prompt."""
        messages = self.make_environment().reset(task)
        ids = self.transcript.prompt_ids(messages)
        root = Node(-1, 0, "root", ids, [0] * len(ids), [0.0] * len(ids))
        return RolloutTree(task, [root])

    def fits(self, tree: RolloutTree) -> bool:
        """Whether the prompt leaves room for at least one turn in the context."""
        return len(tree.nodes[0].token_ids) + self.limits.turn_tokens <= self.limits.context_tokens

    def bare(self, trees: list[RolloutTree], counts: list[int], seed: int, version: int) -> None:
        """Sample `counts[i]` rollouts from the root of `trees[i]`, to their ends, in place (stage 1)."""
        starts = [(tree, 0, k) for tree, n in zip(trees, counts, strict=True) for k in range(n)]
        self.sample(starts, "bare", seed, version)

    def continuations(
        self, trees: list[RolloutTree], counts: list[dict[int, int]], seed: int, version: int
    ) -> None:
        """Sample `counts[i][node]` continuations from each anchor of `trees[i]`, in place (stage 2)."""
        starts = [
            (tree, anchor, k)
            for tree, per_anchor in zip(trees, counts, strict=True)
            for anchor, n in sorted(per_anchor.items())
            for k in range(n)
        ]
        self.sample(starts, "continuation", seed, version)

    def sample(self, starts: list[tuple[RolloutTree, int, int]], kind: Kind, seed: int, version: int) -> None:
        """Sample the rollouts `(tree, anchor, number)` to their ends, in place. A rollout's sampling seed depends
        on these three and `seed`, not on what is sampled beside it."""

        async def grow() -> list[list[Node]]:
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(TOOL_THREADS))
            return await _gather(self._rollout(t, a, k, kind, seed, version) for t, a, k in starts)

        for (tree, anchor, _), nodes in zip(starts, asyncio.run(grow()), strict=True):
            parent = anchor  # nodes join in the order of `starts`, whichever rollout ended first
            for node in nodes:
                node.parent = parent
                tree.nodes.append(node)
                parent = len(tree.nodes) - 1

    async def _rollout(
        self, tree: RolloutTree, anchor: int, number: int, kind: Kind, seed: int, version: int
    ) -> list[Node]:
        environment = self.make_environment()
        messages = environment.reset(tree.task)
        state = tree.nodes[anchor].state
        if state is not None:
            environment.restore(state)
        prefix, depth = tree.prefix_ids(anchor), tree.nodes[anchor].depth
        nodes: list[Node] = []
        while True:
            room = min(self.limits.turn_tokens, self.limits.context_tokens - len(prefix))
            turn_seed = _seed(seed, tree.task.id, anchor, number, kind, depth)
            sampling = Sampling(self.limits.temperature, room, environment.stop, turn_seed)
            completion = await self.engine.generate(prefix, sampling)
            depth += 1
            node = Node(
                parent=-1,
                depth=depth,
                kind=kind,
                token_ids=list(completion.token_ids),
                loss_mask=[1] * len(completion.token_ids),
                logprobs=list(completion.logprobs),
                prompt_tokens=len(prefix),
                cached_tokens=completion.cached_tokens,
                weight_version=version,
            )
            nodes.append(node)
            if completion.truncated:
                # A cut turn is not an action: the environment never sees it.
                limit: Truncation = "generation_limit" if room == self.limits.turn_tokens else "context_limit"
                _end(node, 0.0, "truncated", limit)
                break
            # A slow tool runs in a thread of its own and holds up no other rollout.
            result = await asyncio.to_thread(environment.step, self.transcript.text(completion.token_ids))
            node.outcome = result.outcome
            node.tool_calls = result.tool_calls
            node.tool_failures = result.tool_failures
            node.oversized_results = int(result.oversized)
            node.answer, node.scores, node.error = result.answer, dict(result.scores), result.error
            if result.done:
                _end(node, result.reward or 0.0, result.outcome, None)
                break
            observation = self.transcript.observation_ids(messages, result.observation, node.token_ids)
            prefix = prefix + node.token_ids + observation
            if len(prefix) >= self.limits.context_tokens:
                _end(node, 0.0, result.outcome, "context_limit")
                break
            node.token_ids += observation
            node.loss_mask += [0] * len(observation)
            node.logprobs += [0.0] * len(observation)
            node.state = environment.snapshot()
        self.on_rollout(tree, number, nodes)
        return nodes


def _end(node: Node, reward: float, outcome: str, truncation: Truncation | None) -> None:
    node.reward, node.outcome, node.truncation = reward, outcome, truncation


def _seed(*parts: object) -> int:
    """A sampling seed that depends on what is sampled, never on which rank samples it or when."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big") >> 1


async def _gather(rollouts: Iterable[Awaitable[list[Node]]]) -> list[list[Node]]:
    """All results in order; the first failure cancels the rest instead of leaving them to run on."""
    tasks = [asyncio.ensure_future(r) for r in rollouts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
