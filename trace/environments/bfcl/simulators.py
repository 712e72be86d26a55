"""The simulated APIs of one entry, private to one rollout."""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import dataclass
from typing import Any

from trace_rl.tasks.bfcl import Entry

from ..calls import Call
from . import wheel
from .budget import MAX_WALK, Budget, walk_size
from .runaway import runs_away


@dataclass(frozen=True)
class Result:
    """What a call returned, as text; ``failed`` if it raised or was not ``made``, as it must not be."""

    text: str
    failed: bool = False
    made: bool = True


class Simulators:
    """Fresh instances of the APIs an entry involves. Equal sequences of calls give equal results.

    Safe to use beside other instances in other threads; one instance serves one thread at a time.
    """

    def __init__(self, entry: Entry) -> None:
        self.instances: dict[str, Any] = {}
        self._functions = entry.function_names
        self._budget = Budget()
        self._defaults: dict[tuple[str, str], list[Any]] = {}
        with wheel.inside():
            for name in entry.classes:
                instance = wheel.simulator_class(name)()
                if not wheel.stateless(name):
                    config = copy.deepcopy(entry.config.get(name, {}))
                    instance._load_scenario(config, long_context=entry.long_context)
                # Copied once more, since long-context scenarios refer to records that all of them share.
                self.instances[name] = copy.deepcopy(instance)

    def call(self, call: Call) -> Result:
        """Calls a documented function of these APIs, and renders what it returns as BFCL's executor does.

        Not made are calls of other functions, and those that would take too long (:mod:`.runaway`,
        :mod:`.budget`).
        """
        self._budget.write(call)
        problem = self._problem(call)
        if problem:
            return Result(f"Error during execution: {problem}", failed=True, made=False)
        method = next(getattr(i, call.name) for i in self.instances.values() if hasattr(i, call.name))
        arguments = {**call.arguments, **self._default_lists(method, call)}
        with wheel.inside():
            try:
                result = Result(_render(method(*call.positional, **arguments)))
            except Exception as error:  # whatever a simulator raises is a result the policy gets to see
                result = Result(f"Error during execution: {error}", failed=True)
        self._budget.read(len(result.text))
        return result

    def _problem(self, call: Call) -> str:
        if call.name not in self._functions:
            return f"name '{call.name.partition('.')[0]}' is not defined"
        if runs_away(call):
            return "the numbers are too large"
        if not self._budget.spent:
            size = walk_size(call, self.instances.get("GorillaFileSystem"))
            self._budget.read(size)
            if size > MAX_WALK:
                return "the directory tree is too large"
        return "the limit of calls or text of this conversation is reached" if self._budget.spent else ""

    def _default_lists(self, method: Any, call: Call) -> dict[str, list[Any]]:
        """Own lists for arguments left out: the wheel's defaults are changed by later calls, for everyone."""
        left_out = list(inspect.signature(method).parameters.values())[len(call.positional) :]
        return {
            p.name: self._defaults.setdefault((call.name, p.name), list(p.default))
            for p in left_out
            if isinstance(p.default, list) and p.name not in call.arguments
        }


def _render(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except Exception:  # e.g. mpmath's numbers
            return str(value)
    return str(value)
