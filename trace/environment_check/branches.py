"""Checks of snapshots: going on from them elsewhere, going back to them, and what is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .actions import NO_ACTION
from .comparison import difference, plain_json
from .episode import Episode, Subject
from .problem import Problem, ProblemFoundError, shown

BRANCHED_TURNS = 8  # of a long episode, about so many have their snapshots tried


def branches(subject: Subject, script: list[str]) -> Iterator[Problem]:
    """New instances restored at each turn go on as the first did; so does the first."""
    for actions in _scripts(subject, script):
        results = Episode(subject).play(actions)
        over = bool(results) and results[-1].done
        for turn in _some(range(len(results) + (not over))):
            original = Episode(subject)
            original.play(actions[:turn])
            state = json.loads(json.dumps(original.snapshot()))
            rest, still = results[turn:], actions[turn:]
            at = f"the snapshot after turn {turn}"
            first, second = (Episode(subject, state, turn).play(still) for _ in range(2))
            same = original.play(still)
            found = [
                *difference("restore", f"a new instance restored {at}", rest, first),
                *difference("restore", f"a second new instance restored {at}", rest, second),
                *difference("restore", f"the first instance went on after others restored {at}", rest, same),
            ]
            if found:
                yield found[0]
                return


def going_back(subject: Subject, script: list[str]) -> Iterator[Problem]:
    """An instance that has played on can be restored to each of its turns."""
    episode = Episode(subject)
    states, results = [], []
    for action in script:
        if not episode.done:
            states.append(json.dumps(episode.snapshot()))
            results.append(episode.step(action))
    for turn in _some(range(len(states))):
        episode.restore(json.loads(states[turn]), turn)
        done = f"an instance that had played on went back to the snapshot after turn {turn}"
        if found := difference("restore", done, results[turn:], episode.play(script[turn:])):
            yield found[0]
            return


def copies(subject: Subject, script: list[str]) -> Iterator[Problem]:
    """Neither a snapshot nor a state given to `restore` changes when the episode goes on."""
    original = Episode(subject)
    original.play(script[:1])
    if original.done:
        return
    taken = original.snapshot()
    text = plain_json(taken)
    state = json.loads(text or "{}")
    Episode(subject, state, 1).play(script[1:])
    if plain_json(state) != text:
        yield Problem("restore", "went on from the state given", f"it untouched, {text}", shown(state))
    original.play(script[1:])
    if plain_json(taken) != text:
        yield Problem(
            "snapshot", "went on after it was taken", f"a copy that stays as it was, {text}", shown(taken)
        )


def garbage_states(subject: Subject, script: list[str]) -> Iterator[Problem]:
    """States that this environment cannot have written are refused."""
    episode = Episode(subject)
    state = episode.snapshot()
    garbage: list[dict[str, Any]] = [{"no such key": 1}]
    for key, value in state.items():
        garbage.append({k: v for k, v in state.items() if k != key})
        if value is not None:
            garbage.append(state | {key: 0.5 if isinstance(value, str) else "not a state"})
    for wrong in garbage:
        try:
            Episode(subject).restore_refused(wrong)
        except ProblemFoundError as found:
            yield found.problem


def _scripts(subject: Subject, script: list[str]) -> list[list[str]]:
    """The script, and one that runs into the limit of turns, which the state must know."""
    return [script, [*script[:1], *[NO_ACTION] * subject.max_turns]]


def _some(turns: range) -> range:
    return turns[:: max(1, len(turns) // BRANCHED_TURNS)]
