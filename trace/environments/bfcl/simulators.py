"""The simulated APIs of one entry, private to one rollout."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from trace_rl.tasks.bfcl import Entry

from ..calls import Call
from . import wheel
from .runaway import runs_away


@dataclass(frozen=True)
class Result:
    """What a call returned, as text; ``failed`` if it raised or could not be made."""

    text: str
    failed: bool = False


class Simulators:
    """Fresh instances of the APIs an entry involves. Equal sequences of calls give equal results.

    Safe to use beside other instances in other threads; one instance serves one thread at a time.
    """

    def __init__(self, entry: Entry) -> None:
        self.instances: dict[str, Any] = {}
        self._functions = entry.function_names
        with wheel.inside():
            for name in entry.classes:
                instance = wheel.simulator_class(name)()
                if not wheel.stateless(name):
                    config = copy.deepcopy(entry.config.get(name, {}))
                    instance._load_scenario(config, long_context=entry.long_context)
                # Copied once more, since long-context scenarios refer to records that all of them share.
                self.instances[name] = copy.deepcopy(instance)

    def call(self, call: Call) -> Result:
        """Calls a documented function of these APIs, and renders what it returns as BFCL's executor does."""
        if call.name not in self._functions:
            return Result(
                f"Error during execution: name '{call.name.partition('.')[0]}' is not defined", True
            )
        if runs_away(call):
            return Result("Error during execution: the numbers are too large", True)
        method = next(getattr(i, call.name) for i in self.instances.values() if hasattr(i, call.name))
        with wheel.inside():
            try:
                return Result(_render(method(*call.positional, **call.arguments)))
            except Exception as error:  # whatever a simulator raises is a result the policy gets to see
                return Result(f"Error during execution: {error}", True)


def _render(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except Exception:  # e.g. mpmath's numbers
            return str(value)
    return str(value)
