"""The two plain records that flow out of this package: a question to answer, a passage to search."""

from __future__ import annotations

import reprlib
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One question with its gold answers.

    Attributes:
        id: unique within its source; the same file always gives the same ids.
        question: the bare question, no instructions.
        answers: accepted gold answers, aliases included; empty where the environment judges by other means.
        source: name of the reader or generator, e.g. ``"hotpotqa"``.
        titles: titles of the supporting passages, in order of use, without repetition; may be empty.
        extra: what the environment needs beyond the question, as JSON-able data.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    source: str
    titles: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False)

    def wrong_field(self) -> str | None:
        """What is wrong with the first field of another type, and what to write; None if all have theirs."""
        for name in ("id", "question", "source"):
            if not isinstance(value := getattr(self, name), str):
                return f'{name} must be a string, got {reprlib.repr(value)}; write {name}="..."'
        for name in ("answers", "titles"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(v, str) for v in value):
                instead = f'{name}=("...",), or {name}=() for none'
                if isinstance(value, dict):
                    instead = f"extra={reprlib.repr(value)} by name, as the fifth argument is titles"
                return f"{name} must be a tuple of strings, got {reprlib.repr(value)}; write {instead}"
        if not isinstance(self.extra, dict):
            return f'extra must be a dict, got {reprlib.repr(self.extra)}; write extra={{"key": ...}}'
        return None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain data, ready for ``json.dumps``."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Task:
        """Inverse of :meth:`to_json`. Raises ValueError if a field is missing or has another type."""
        for name in ("id", "question", "source"):
            if not isinstance(data.get(name), str):
                raise ValueError(f"task: field {name!r} must be a string, got {data.get(name)!r}")
        for name, value in (("answers", data.get("answers")), ("titles", data.get("titles", []))):
            if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
                raise ValueError(f"task: field {name!r} must be a list of strings, got {value!r}")
        extra = data.get("extra", {})
        if not isinstance(extra, dict):
            raise ValueError(f"task: field 'extra' must be an object, got {extra!r}")
        return cls(
            id=data["id"],
            question=data["question"],
            answers=tuple(data["answers"]),
            source=data["source"],
            titles=tuple(data.get("titles", ())),
            extra=extra,
        )


@dataclass(frozen=True)
class Passage:
    """One retrievable document: ``id`` unique in its corpus, ``title`` and ``text`` plain strings."""

    id: str
    title: str
    text: str
