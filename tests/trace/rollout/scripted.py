"""A byte-level tokenizer, an engine and an environment that do as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from trace_rl.engines.protocol import Completion, Sampling
from trace_rl.environments.protocol import Message, StepResult
from trace_rl.rollout.collector import Collector, Limits
from trace_rl.rollout.transcript import Transcript
from trace_rl.tasks.task import Task

HANG_S = 60  # only how long a test that hangs takes to fail

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>", "[INST]")


def byte_tokenizer(template: str | None = CHATML, eos: str | None = "<|im_end|>") -> Any:
    """One token per byte but for "an" (so that ids need not survive a trip through text), the tags of
    the environment as ordinary added tokens, and `CONTROL` as special ones."""
    vocabulary = {letter: i for i, letter in enumerate([*sorted(ByteLevel.alphabet()), "an"])}
    tokenizer = Tokenizer(BPE(vocabulary, [("a", "n")]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<information>", "</information>"])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, chat_template=template, clean_up_tokenization_spaces=False
    )


Reply = Callable[[int, list[int], Sampling], Awaitable[Completion]]


@dataclass
class ScriptedEngine:
    """Answers the n-th request with `reply(n, prefix_ids, sampling)` and remembers all of them."""

    reply: Reply
    requests: list[tuple[list[int], Sampling]] = field(default_factory=list)

    async def generate(self, prefix_ids: Any, sampling: Sampling) -> Completion:
        self.requests.append((list(prefix_ids), sampling))
        return await self.reply(len(self.requests) - 1, list(prefix_ids), sampling)

    def load_weights(self, source: Path, version: int) -> None: ...

    def sleep(self) -> None: ...

    def counters(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class ScriptedEnvironment:
    """Repeats its turn's number and how many letters it has heard so far; an answer "yes" wins."""

    turns: int = 6
    filler: int = 0  # letters added to each observation
    heard: list[str] = field(default_factory=list)  # over all instances, in order of arrival
    gate: Callable[[str], None] = lambda action: None
    stop: tuple[str, ...] = ("</search>", "</answer>")
    actions: list[str] = field(default_factory=list)

    def another(self) -> ScriptedEnvironment:
        return ScriptedEnvironment(self.turns, self.filler, self.heard, self.gate)

    def reset(self, task: Task) -> list[Message]:
        self.actions = []
        return [{"role": "user", "content": task.question}]

    def step(self, action: str) -> StepResult:
        self.gate(action)
        self.heard.append(action)
        self.actions.append(action)
        if "</answer>" in action:
            return StepResult("", True, float("yes" in action), "answer")
        if len(self.actions) == self.turns:
            return StepResult("", True, 0.0, "no_answer")
        letters = sum(map(len, self.actions))
        text = f"\n<information>{len(self.actions)} {letters}{'x' * self.filler}</information>\n"
        return StepResult(text, False, None, "search", tool_calls=1)

    def snapshot(self) -> dict[str, Any]:
        return {"actions": list(self.actions)}

    def restore(self, state: dict[str, Any]) -> None:
        self.actions = list(state["actions"])


def completion(ids: list[int], truncated: bool = False) -> Completion:
    return Completion(ids, [-(token % 7) / 8 for token in ids], truncated, cached_tokens=len(ids) // 2)


def collector(
    reply: Reply, environment: ScriptedEnvironment | None = None, *, turn: int = 200, context: int = 4000
) -> tuple[Collector, ScriptedEngine]:
    engine = ScriptedEngine(reply)
    make = (environment or ScriptedEnvironment()).another
    return Collector(engine, Transcript(byte_tokenizer()), make, Limits(1.0, turn, context)), engine


def task(name: str = "t") -> Task:
    return Task(name, f"question {name}?", ("yes",), "test")


async def wait(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), HANG_S)
