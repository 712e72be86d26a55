"""Rules of a rollout: one section for each kind of environment, which follows from `task.kind`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from .section import Section


class RetrieverConfig(Section):
    """A search server that speaks `POST /retrieve` (docs/retrieval.md)."""

    url: str
    """Address of the server, for instance `http://127.0.0.1:8000`; `/retrieve` is added if it is missing."""
    timeout_s: PositiveFloat = 10.0
    """Seconds for one try, from the first byte sent to the last received."""
    retries: NonNegativeInt = 2
    """Further tries after a failure that may pass; then the one rollout ends as a tool error."""
    connections: PositiveInt = 64
    """Most connections at a time, of each rank."""


class SearchConfig(Section):
    """Question answering with a search tool."""

    kind: Literal["search"] = "search"
    """Follows from `task.kind`."""
    max_searches: PositiveInt = 4
    """Searches allowed before the last turn, in which only an answer counts."""
    top_k: PositiveInt = 3
    """Documents a search returns."""
    max_observation_tokens: PositiveInt = 500
    """Documents are dropped whole until the observation fits; tokens."""
    reward: Literal["em_or_f1", "exact_match"] = "em_or_f1"
    """Success is an exact match or a token F1 of at least `f1_threshold`, or an exact match alone."""
    f1_threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3
    """Token F1 that counts as success."""
    retriever: RetrieverConfig | None = None
    """Search with a server instead of an index of this process."""
    instructions: str | None = None
    """Text before the question, in the same user message, that explains the tags; null takes the built-in one,
    empty leaves it out."""

    @property
    def tool_turns(self) -> int:
        return self.max_searches


class PythonConfig(Section):
    """Mathematics with a Python tool."""

    kind: Literal["python"] = "python"
    """Follows from `task.kind`."""
    max_calls: PositiveInt = 4
    """Turns in which code may run, before the last one, in which only an answer counts."""
    max_observation_tokens: PositiveInt = 512
    """Longer output keeps its head and tail; tokens."""
    call_seconds: PositiveFloat = 10.0
    """Processor time of one call, rounded up to whole seconds, and as much again spent waiting; a busy machine
    does not count."""
    memory_mib: PositiveInt = 1024
    """Memory of one call."""
    check_seconds: PositiveFloat = 5.0
    """Processor time to compare one answer with the gold answers, seconds; beyond it the answer is wrong."""
    instructions: str | None = None
    """Text before the problem that explains the tags; null takes the built-in one, empty leaves it out."""

    @property
    def tool_turns(self) -> int:
        return self.max_calls


class FunctionsConfig(Section):
    """Function calling by BFCL's rules."""

    kind: Literal["functions"] = "functions"
    """Follows from `task.kind`."""
    tool_format: Literal["hermes", "python"] = "hermes"
    """How calls are written: `<tool_call>` JSON as Qwen3 and Hermes do, or BFCL's `[name(key=value)]`."""
    max_steps: PositiveInt = 20
    """Steps allowed for one user message; one more ends the episode as a failure, as in BFCL."""
    max_observation_tokens: PositiveInt = 16384
    """The longest tool results of a step are replaced whole by a notice until they fit; tokens."""

    instructions: str | None = None
    """Text added to the system message; null leaves the prompt as it is in BFCL."""

    @property
    def tool_turns(self) -> int:
        return self.max_steps


class CustomConfig(Section):
    """One's own environment; its settings are `task.options`. These two only tell the plan what to expect."""

    kind: Literal["custom"] = "custom"
    """Follows from `task.kind`."""
    tool_turns: PositiveInt = 4
    """Most turns that are answered by an observation."""
    max_observation_tokens: PositiveInt = 500
    """Length of the longest observation, tokens."""


EnvironmentConfig = Annotated[
    SearchConfig | PythonConfig | FunctionsConfig | CustomConfig, Field(discriminator="kind")
]
_KINDS = {"math": "python", "bfcl": "functions", "custom": "custom"}


def environment_kind(task_kind: Any) -> str:
    """The kind of environment that tasks of this kind are played in."""
    return _KINDS.get(task_kind, "search") if isinstance(task_kind, str) else "search"


def with_environment_kind(raw: Any) -> Any:
    """A raw section that holds `task` and `environment`, the latter with its kind filled in from the former.

    Raises ValueError if a kind is given that does not belong to the task.
    """
    task = raw.get("task") if isinstance(raw, dict) else None
    task_kind = task.get("kind") if isinstance(task, dict) else getattr(task, "kind", None)
    if task_kind is None:
        # The missing task is the error to report, not an environment that follows from it.
        return {"environment": {"kind": "search"}} | raw if isinstance(raw, dict) else raw
    kind = environment_kind(task_kind)
    environment = raw.get("environment") or {}
    if not isinstance(environment, dict):
        return raw
    given = environment.get("kind", kind)
    if given != kind:
        raise ValueError(f"environment.kind={given} does not go with task.kind={task_kind}: leave it out")
    return raw | {"environment": environment | {"kind": kind}}
