"""The order in which tasks are drawn: endless, shuffled, and resumable from a few plain numbers."""

from __future__ import annotations

import random


class TaskOrder:
    """Task indices in shuffled epochs; no index repeats within an epoch.

    One ``take`` that crosses the end of an epoch may hold an index twice.

    Args:
        n: number of tasks, at least 1.
        seed: the order depends on ``n`` and ``seed`` alone, never on the global generators.
    """

    def __init__(self, n: int, seed: int) -> None:
        if n < 1:
            raise ValueError(f"an order needs at least one task, got n = {n}")
        self._n, self._seed = n, seed
        self._epoch = self._position = 0
        self._permutation = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(self._n))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def take(self, k: int) -> list[int]:
        """The next ``k >= 0`` indices, each in ``[0, n)``."""
        if k < 0:
            raise ValueError(f"cannot take {k} tasks")
        taken: list[int] = []
        while len(taken) < k:
            if self._position == self._n:
                self._epoch, self._position = self._epoch + 1, 0
                self._permutation = self._shuffled()
            part = self._permutation[self._position : self._position + k - len(taken)]
            self._position += len(part)
            taken += part
        return taken

    def state_dict(self) -> dict[str, int]:
        """Four integers; enough for the exact continuation."""
        return {"n": self._n, "seed": self._seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues where ``state`` was taken; ValueError if that was with other tasks or another seed."""
        for name, mine in (("n", self._n), ("seed", self._seed)):
            if state.get(name) != mine:
                raise ValueError(f"task order saved with {name} = {state.get(name)}, this one has {mine}")
        epoch, position = state["epoch"], state["position"]
        if epoch < 0 or not 0 <= position <= self._n:
            raise ValueError(f"impossible task order state {state}")
        self._epoch, self._position = epoch, position
        self._permutation = self._shuffled()
