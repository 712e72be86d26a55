"""A refund desk: look an order up in a shop's table, then refund its price or refuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from trace_rl.environments.actions import parse_action
from trace_rl.environments.protocol import Environment, Message, StepResult
from trace_rl.sources import Source
from trace_rl.tasks.task import Task

RULES = """Decide about refunds. An order is refunded up to 30 days after delivery, unless it was a final sale.
Customer: I want my money back for order 7.
<order> 7 </order>
<record> order 7, normal sale, price 20, delivered 9 days ago </record>
<answer> refund 20 </answer>  (or: <answer> refuse </answer>)
Customer: """
NOT_UNDERSTOOD = "write <order> number </order> or <answer> decision </answer>"


class RefundDesk:
    stop = ("</order>", "</answer>")

    def __init__(self, orders: dict[str, str], lookups: int) -> None:
        self._orders, self._lookups = orders, lookups
        self._task: Task | None = None
        self._turns, self._done = 0, False

    def reset(self, task: Task) -> list[Message]:
        self._task, self._turns, self._done = task, 0, False
        return [{"role": "user", "content": RULES + task.question}]

    def step(self, action: str) -> StepResult:
        if self._task is None or self._done:
            raise RuntimeError("step() before reset() or after the end of the episode")
        self._turns += 1
        kind, content = parse_action(action, tool="order", observation="record")
        self._done = kind == "answer" or self._turns > self._lookups
        if kind == "answer":
            right = float(" ".join(content.lower().split()) in self._task.answers)
            return StepResult("", True, right, "answer", answer=content, scores={"accuracy": right})
        if self._done:
            return StepResult("", True, 0.0, "invalid" if kind == "invalid" else "no_answer")
        if kind == "invalid":
            return StepResult(f"\n<record> {NOT_UNDERSTOOD} </record>\n", False, None, "invalid")
        record = self._orders.get(content, "no such order")
        return StepResult(f"\n<record> {record} </record>\n", False, None, "order", tool_calls=1)

    def snapshot(self) -> dict[str, Any]:
        return {"turns": self._turns, "done": self._done}

    def restore(self, state: dict[str, Any]) -> None:
        turns, done = state.get("turns"), state.get("done")
        if type(turns) is not int or type(done) is not bool or not 0 <= turns <= self._lookups + done:
            raise ValueError(f"not a snapshot of RefundDesk(lookups={self._lookups}): {state!r}")
        self._turns, self._done = turns, done


def source(train: int = 200, test: int = 50, lookups: int = 2, seed: int = 0) -> Source:
    """Orders drawn from `seed`, each with the one right decision; every order is asked about once."""
    rng = random.Random(seed)
    orders: dict[str, str] = {}
    tasks: list[Task] = []
    for number in range(1000, 1000 + train + test):
        days, price, final = rng.randint(1, 60), rng.randint(5, 99), rng.random() < 0.2
        kind = "final sale" if final else "normal sale"
        orders[str(number)] = f"order {number}, {kind}, price {price}, delivered {days} days ago"
        decision = f"refund {price}" if days <= 30 and not final else "refuse"
        question = f"I want my money back for order {number}."
        tasks.append(Task(f"refund-{number}", question, (decision,), "refund_desk"))

    def environments(count_tokens: Callable[[str], int]) -> Callable[[], Environment]:
        return lambda: RefundDesk(orders, lookups)

    return Source(tasks[:train], tasks[train:], environments)
