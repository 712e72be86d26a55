"""What the trainer asks of a generation engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How to sample one completion. Nothing here truncates the distribution: top-p, top-k and min-p
    would bias every importance ratio by the probability mass they drop."""

    temperature: float  # 0 is greedy
    max_tokens: int
    stop: tuple[str, ...] = ()  # a completion ends after the first of these, which it includes
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """Token ids exactly as sampled, with the log-prob (nats) of each under the sampling distribution."""

    token_ids: list[int]
    logprobs: list[float]
    truncated: bool  # max_tokens was reached before EOS or a stop string
    cached_tokens: int  # prompt tokens served from the engine's prefix cache


@dataclass(frozen=True)
class EngineCounters:
    """The engine's own totals since its start, to hold the ledger against."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class EngineError(RuntimeError):
    """The engine cannot go on; the message carries the last lines of its log."""


class Engine(Protocol):
    """A sampler. `generate` is a coroutine so that every rollout advances by itself: calls made by
    concurrent rollouts share the engine's batch, and a slow branch holds up nobody else."""

    async def generate(self, prefix_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One completion of `prefix_ids`; raises EngineError when the engine died."""
        ...

    def load_weights(self, source: Path, version: int) -> None:
        """Take the safetensors in directory `source`, forget every cached prefix, and wake up."""
        ...

    def sleep(self) -> None:
        """Give accelerator memory back to the trainer until the next `load_weights`."""
        ...

    def counters(self) -> EngineCounters | None:
        """Totals by the engine's own count; None for an engine that keeps none."""
        ...

    def close(self) -> None:
        """Stop the engine and its process; safe to call twice."""
        ...
