"""Questions into recorded rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from trace_rl.environments.official_scores import official_scores
from trace_rl.environments.protocol import ToolOutageError
from trace_rl.rollout.collector import Collector
from trace_rl.rollout.transcript import Transcript
from trace_rl.rollout.tree import Node, RolloutTree
from trace_rl.tasks.task import Task

from .records import Key, Record

OUTAGE = 32  # rollouts in a row that the tool ends: it is down, and the rest would fare no better


def ask(
    collector: Collector,
    tasks: Sequence[Task],
    keys: Sequence[Key],
    seed: int,
    keep: Callable[[Record], None],
) -> None:
    """Sample the rollouts `keys` of `tasks`; `keep` gets each as soon as it is finished.

    A rollout's sampling seed depends on `seed`, its task's id and its sample number, not on what else is asked.
    Raises ToolOutageError when `OUTAGE` rollouts in a row are ended by their tool, or whatever the engine raises.
    """
    by_id = {task.id: task for task in tasks}
    trees: dict[str, RolloutTree] = {}
    starts: list[tuple[RolloutTree, int, int]] = []
    for name, number in keys:
        if name not in trees:
            trees[name] = collector.plant(by_id[name])
        if collector.fits(trees[name]):
            starts.append((trees[name], 0, number))
        else:
            keep(record(collector.transcript, trees[name], number, []))
    failures = 0

    def finished(tree: RolloutTree, number: int, nodes: list[Node]) -> None:
        nonlocal failures
        row = record(collector.transcript, tree, number, nodes)
        keep(row)
        failures = failures + 1 if row.error else 0
        if failures == OUTAGE:
            raise ToolOutageError(
                f"the tool ended {OUTAGE} rollouts in a row, the last by: {row.error}. Mend it and start again: "
                "those rollouts are tried once more, finished ones are kept"
            )
        nodes.clear()  # what was recorded need not stay in memory for the rest of a large set

    replace(collector, on_rollout=finished).sample(starts, "bare", seed, version=0)


def record(transcript: Transcript, tree: RolloutTree, number: int, nodes: Sequence[Node]) -> Record:
    """What is kept of a finished rollout; without nodes, of one whose prompt does not fit."""
    last = nodes[-1] if nodes else None
    answer = last.answer if last else ""
    task = tree.task
    return Record(
        task=task.id,
        sample=number,
        source=task.source,
        question=task.question,
        answers=task.answers,
        answer=answer,
        reward=(last.reward or 0.0) if last else 0.0,
        outcome=last.outcome if last else "too_long",
        truncation=last.truncation if last else None,
        error=last.error if last else "",
        scores=dict(last.scores) if last else {},
        official=official_scores(task.source, answer, task.answers),
        turns=len(nodes),
        invalid_turns=sum(node.outcome == "invalid" for node in nodes),
        tool_calls=sum(node.tool_calls for node in nodes),
        tool_failures=sum(node.tool_failures for node in nodes),
        prompt_tokens=len(tree.nodes[0].token_ids),
        generated_tokens=sum(sum(node.loss_mask) for node in nodes),
        rollout=tuple(_turn(transcript, node) for node in nodes),
    )


def _turn(transcript: Transcript, node: Node) -> dict[str, str]:
    sampled = sum(node.loss_mask)  # a turn's sampled tokens come first, the observation's after them
    return {
        "action": transcript.text(node.token_ids[:sampled]),
        "observation": transcript.text(node.token_ids[sampled:]),
    }
