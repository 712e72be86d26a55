"""The benchmark's own verdict on an episode."""

from __future__ import annotations

from collections.abc import Sequence

from trace_rl.tasks.bfcl import Entry

from ..calls import NO_SUCH_FUNCTION, Call, parse_call, render_call
from . import wheel
from .simulators import Simulators

_OWNER = "trace_rl"  # under this name the wheel keeps the instances of a check among its globals


def official_score(entry: Entry, turns: Sequence[Sequence[Sequence[str]]]) -> tuple[bool, str]:
    """Whether the benchmark counts the entry as solved, and its error type (``""`` if it does).

    ``turns`` holds, per user turn and step, calls in Python's syntax. As in the benchmark's runner: fewer
    turns than the ground truth has means the run was ended by force; steps without calls do not count; after
    each turn that has a ground truth, the state of all APIs must equal the ground truth's and its results must
    be among those so far; a turn without ground truth is not checked itself, but its calls have their effect.

    The wheel evaluates call strings, so what reaches it is rendered anew from parsed names and literals. The
    episode is played on simulators first, and what they do not make becomes ``unknown_function()``, which
    fails alike.

    Raises ValueError if a string is no call with literal arguments.
    """
    calls = [[[parse_call(text) for text in step] for step in turn if step] for turn in turns]
    if len(calls) != len(entry.ground_truth):
        return False, "multi_turn:force_terminated"
    simulators = Simulators(entry)
    safe = [[[_safe(call, simulators) for call in step] for step in turn] for turn in calls]
    test_entry = {"id": entry.id, "initial_config": entry.config, "involved_classes": list(entry.classes)}
    truth = [list(turn) for turn in entry.ground_truth]
    with wheel.inside(), wheel.fresh_records():
        instances = vars(wheel.executor())
        try:
            verdict = wheel.checker().multi_turn_checker(safe, truth, test_entry, entry.subset, _OWNER)
        finally:
            for name in [n for n in instances if n.startswith(f"{_OWNER}_")]:
                del instances[name]
    return bool(verdict["valid"]), str(verdict.get("error_type", ""))


def _safe(call: Call, simulators: Simulators) -> str:
    text = render_call(call)  # first: simulators may keep and change arguments
    return text if simulators.call(call).made else NO_SUCH_FUNCTION
