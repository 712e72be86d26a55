"""Engines with one thing wrong, and what a sync and a probe make of them on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from oracle import TEMPERATURE

from trace_rl.engines.protocol import Completion, EngineError, Sampling
from trace_rl.engines.transformers_engine import TransformersEngine
from trace_rl.policy.sync import probe, sync_weights
from trace_rl.policy.zero3 import Zero3Policy


class Odd:
    """The engine, with one thing wrong."""

    def __init__(self, engine: TransformersEngine, wrong: str) -> None:
        self.engine, self.wrong = engine, wrong

    async def generate(self, prefix: Sequence[int], sampling: Sampling) -> Completion:
        if self.wrong == "dies":
            raise EngineError("the engine died of thirst")
        completion = await self.engine.generate(prefix, sampling)
        shift = {"stale": 0.5, "nan": float("nan")}.get(self.wrong, 0.0)
        logprobs = [lp + shift for lp in completion.logprobs]
        return Completion(completion.token_ids, logprobs, completion.truncated, completion.cached_tokens)

    def load_weights(self, source: Path, version: int) -> None:
        if self.wrong == "does not load":
            raise EngineError("no room for the weights")
        self.engine.load_weights(source, version)

    def sleep(self) -> None: ...

    def counters(self) -> None: ...

    def close(self) -> None: ...


def outcomes(policy: Zero3Policy, path: Path) -> dict[str, list[Any]]:
    """Each case: for every rank, the probe's figures or (type, message) of what it raised.

    Whatever is wrong is wrong on the last rank only. `path` holds the weights from before the policy moved.
    """
    last = policy.ranks.rank == policy.ranks.world - 1
    engine = TransformersEngine(path, dtype=torch.float32)

    def check(wrong: str, tolerance: float | None = None) -> Any:
        return probe(
            policy,
            Odd(engine, wrong if last else ""),
            [5, 6, 7],
            temperature=TEMPERATURE,
            dtype="float32",
            tolerance=tolerance,
            max_tokens=16,
            version=7,
        )

    def outcome(act: Callable[[], Any]) -> list[Any]:
        try:
            result: Any = act()
        except Exception as error:
            result = (type(error).__name__, str(error))
        return policy.ranks.gather(result)

    return {
        "never loaded": outcome(lambda: check("")),
        "load": outcome(lambda: sync_weights(policy, Odd(engine, ""), 1)),
        "good": outcome(lambda: check("")),
        "stale": outcome(lambda: check("stale")),
        "nan": outcome(lambda: check("nan")),
        "dies": outcome(lambda: check("dies")),
        "tolerated": outcome(lambda: check("stale", tolerance=0.6)),
        "does not load": outcome(
            lambda: sync_weights(policy, Odd(engine, "does not load" if last else ""), 2)
        ),
    }
