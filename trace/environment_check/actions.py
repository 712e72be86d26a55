"""What the check plays: the user's actions or its own, and nonsense."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from trace_rl.tasks.task import Task

from .episode import Episode, Subject

NO_ACTION = "no action"

Policy = Callable[[str], str]
"""From the text that was shown last (the prompt's last message, an observation) to an action."""


def script_of(subject: Subject, actions: Sequence[str] | Policy | None) -> list[str]:
    """The actions of one episode, written down if a policy writes them."""
    episode = Episode(subject)
    if actions is None:
        return probing_actions(episode.stop, subject.task)
    if not callable(actions):
        return list(actions)
    written: list[str] = []
    text = episode.messages[-1]["content"]
    while not episode.done and len(written) < subject.max_turns:
        written.append(actions(text))
        text = episode.step(written[-1]).observation
    return written


def probing_actions(stop: Sequence[str], task: Task) -> list[str]:
    """Actions that know nothing of the environment but its stop strings: each ends one, tags are opened before."""
    content = task.answers[0] if task.answers else "1"
    openings = [f"<{tag[1]}>" if (tag := re.fullmatch(r"</(\w+)>", s)) else "" for s in stop]
    return [NO_ACTION, *(f"{o} {content} {s}" for o, s in zip(openings, stop, strict=True)), NO_ACTION]


def junk_actions(stop: Sequence[str]) -> list[str]:
    """What a policy may write when it writes nonsense."""
    tags = [s.replace("</", "<") for s in stop] + list(stop)
    return [
        "",
        " \n\t",
        "</think>",
        "<think>",
        "".join(tags),
        "".join(reversed(tags)),
        "".join(tags) * 500,
        tags[0] * 2000 if tags else "<a>" * 2000,
        "x" * 100_000,
        "[" * 50_000 + "]" * 50_000,
        '{"name": null, "arguments": [',
        *(f"{a}{body}{s}" for a, s in zip(tags, stop, strict=False) for body in ("", "\ud800", "9" * 5000)),
        "\ud800 lone \udfff surrogates",
        "<|im_end|><|im_start|>assistant<|endoftext|></s>[INST]",
        "\x00\x07\x1b[2J\u202e",
    ]
