"""The checks. Each plays episodes and yields what is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from trace_rl.environments.protocol import Environment, StepResult
from trace_rl.tasks.task import Task

from .actions import NO_ACTION, Policy, junk_actions, script_of
from .branches import branches, copies, garbage_states, going_back
from .comparison import difference, plain_json
from .episode import Episode, Subject
from .problem import Problem, ProblemFoundError, shown

CHEAP_SECONDS = 0.05  # to make an instance; a step of the paper's size makes thousands
THREADS = 8


def check_environment(
    make_environment: Callable[[], Environment],
    task: Task,
    actions: Sequence[str] | Policy | None = None,
    *,
    count_tokens: Callable[[str], int],
    max_turns: int = 50,
    max_observation_tokens: int | None = None,
    seconds: float = 30.0,
) -> list[Problem]:
    """Everything found wrong in episodes of `task`, each once; empty if nothing was.

    Args:
        actions: one episode's, in order, or a policy that writes them; None for `probing_actions`. With
            actions that use the tools and end the episode, the checks reach what they are meant to reach.
        count_tokens: tokens of a string, as given to the environment.
        max_turns: turns by which every episode must be over, whatever the policy does.
        max_observation_tokens: length of the longest observation; None for no limit.
        seconds: longest time of one call. One that takes longer is a problem and ends the check.
    """
    subject = Subject(make_environment, task, count_tokens, seconds, max_turns, max_observation_tokens)
    problems: dict[Problem, None] = {}
    try:
        for problem in _start(subject):
            problems[problem] = None
        script = script_of(subject, actions)
    except ProblemFoundError as found:
        return [*problems, found.problem]
    comparisons = (branches, going_back, _interleaved, _in_threads)
    chance = False
    for check in (
        _whole_episode,
        _twice,
        branches,
        copies,
        going_back,
        garbage_states,
        _interleaved,
        _in_threads,
        _junk,
        _no_answer,
    ):
        if chance and check in comparisons:
            continue  # episodes that differ by chance would differ there too, whatever else is right
        try:
            for problem in check(subject, script):
                problems[problem] = None
                chance |= check is _twice
        except ProblemFoundError as found:
            problems[found.problem] = None
            if found.hopeless:
                break
    return list(problems)


def _start(subject: Subject) -> Iterator[Problem]:
    task = subject.task
    if not isinstance(task, Task):
        raise ProblemFoundError(Problem("task", "given", "a Task", shown(task)), hopeless=True)
    if field := task.wrong_field():
        problem = Problem("task", "given", "fields of the types that Task names", f"another type: {field}")
        raise ProblemFoundError(problem, hopeless=True)
    before = _task_json(task)
    if before is None or Task.from_json(json.loads(before)) != task:
        got = "what JSON cannot hold" if before is None else shown(json.loads(before))
        yield Problem("task", "written to JSON and read back", f"it unchanged, {shown(task)}", got)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        subject.call("make_environment", "called", subject.make)
        times.append(time.perf_counter() - begun)
    if min(times) > CHEAP_SECONDS:
        what, got = f"at most {CHEAP_SECONDS * 1000:.0f} ms", f"{min(times) * 1000:.0f} ms"
        yield Problem("make_environment", "called three times", what, got, serious=False)
    new = subject.call("make_environment", "called", subject.make)
    try:
        subject.call_refused("step", "called before reset", lambda: new.step(NO_ACTION), RuntimeError)
    except ProblemFoundError as found:
        yield found.problem
    one, two = Episode(subject), Episode(subject)
    if wrong := _messages_problem(one.messages):
        raise ProblemFoundError(Problem("reset", "called on a new instance", *wrong), hopeless=True)
    if one.messages != two.messages:
        done, what = "called on two instances with one task", f"the same messages, {shown(one.messages)}"
        yield Problem("reset", done, what, shown(two.messages))
    stop = one.stop
    if not isinstance(stop, tuple) or not all(isinstance(s, str) and s for s in stop):
        problem = Problem("stop", "read after reset", "a tuple of non-empty strings", shown(stop))
        raise ProblemFoundError(problem, hopeless=True)
    if _task_json(task) != before:
        yield Problem("reset", "given the task", "the task left as it was", shown(task))


def _task_json(task: Task) -> str | None:
    """The task as JSON, or None if it is not plain data: then not even copying it may work."""
    try:
        return plain_json(task.to_json())
    except (TypeError, ValueError, RecursionError):
        return None


def _messages_problem(messages: Any) -> tuple[str, str] | None:
    if not isinstance(messages, list) or not messages:
        return "a list of messages", shown(messages)
    for message in messages:
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else []
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            return 'messages {"role": ..., "content": ...} of non-empty strings', shown(message)
    if messages[-1]["role"] != "user":
        return "a last message from the user", shown(messages[-1])
    return None


def _whole_episode(subject: Subject, script: list[str]) -> Iterator[Problem]:
    episode = Episode(subject)
    results = []
    for action in script:
        if not episode.done:
            episode.snapshot()
            results.append(episode.step(action))
    if episode.done:
        episode.step_refused()
    else:
        yield _remark("step", script, "one that ends the episode")
    if not any(result.tool_calls for result in results):
        yield _remark("step", script, "one that calls a tool")


def _twice(subject: Subject, script: list[str]) -> Iterator[Problem]:
    one, two = (Episode(subject).play(script) for _ in range(2))
    yield from difference("step", "two new instances were given the same actions", one, two)


def _remark(method: str, script: list[str], expected: str) -> Problem:
    played = f"played the actions {shown(script)}"
    return Problem(
        method, played, expected, "none: more would be checked with actions of yours", serious=False
    )


def _scripts(script: list[str]) -> list[list[str]]:
    """Different episodes, so that one that reads another's state shows it."""
    return [
        script,
        [NO_ACTION, *script],
        script[1:] or [NO_ACTION],
        [*script[:1], NO_ACTION, *script[1:]],
    ]


def _interleaved(subject: Subject, script: list[str]) -> Iterator[Problem]:
    one, two = _scripts(script)[:2]
    alone = [Episode(subject).play(s) for s in (one, two)]
    episodes = [Episode(subject), Episode(subject)]
    together: list[list[StepResult]] = [[], []]
    for turn in range(max(len(one), len(two))):
        for results, episode, actions in zip(together, episodes, (one, two), strict=True):
            results += episode.play(actions[turn : turn + 1])
    done = "two instances played turn by turn beside each other"
    for expected, got in zip(alone, together, strict=True):
        yield from difference("step", done, expected, got)


def _in_threads(subject: Subject, script: list[str]) -> Iterator[Problem]:
    scripts = _scripts(script)
    alone = [Episode(subject).play(s) for s in scripts]

    def play(actions: list[str]) -> list[StepResult]:
        return Episode(subject).play(actions)

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(play, s) for s in scripts * 4]
    done = f"{THREADS} instances played in as many threads"
    for number, future in enumerate(futures):
        if found := difference("step", done, alone[number % len(scripts)], future.result()):
            yield found[0]
            return


def _junk(subject: Subject, script: list[str]) -> Iterator[Problem]:
    for action in junk_actions(Episode(subject).stop):
        episode = Episode(subject)
        try:
            if not episode.step(action).done:
                episode.snapshot()
        except ProblemFoundError as found:
            if found.hopeless:
                raise
            yield found.problem


def _no_answer(subject: Subject, script: list[str]) -> Iterator[Problem]:
    for action in dict.fromkeys([NO_ACTION, *script[:2]]):
        episode = Episode(subject)
        episode.play([action] * subject.max_turns)
        if not episode.done:
            done = f"{subject.max_turns} times the action {shown(action, 80)}"
            yield Problem("step", done, "the episode to be over", "an observation")
        else:
            episode.step_refused()
