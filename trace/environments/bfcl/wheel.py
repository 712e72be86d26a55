"""The one place that imports `bfcl_eval`, and the lock under which its code runs.

Only the simulators and the multi-turn checker are imported: they need nothing but `mpmath`. The wheel's code
has state of its module (precision of `mpmath`, records shared by all long-context scenarios), so one thread at
a time may be inside.
"""

from __future__ import annotations

import copy
import decimal
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trace_rl.tasks.bfcl import bfcl_version

_EVALUATION = "bfcl_eval.eval_checker.multi_turn_eval"
_LOCK = threading.RLock()


@contextmanager
def inside() -> Iterator[None]:
    """Holds the lock, and leaves the precision of `mpmath` and `decimal` as it was."""
    with _LOCK:
        mpmath = importlib.import_module("mpmath")
        precision = mpmath.mp.prec
        try:
            with decimal.localcontext():
                yield
        finally:
            mpmath.mp.prec = precision


@contextmanager
def fresh_records() -> Iterator[None]:
    """Puts back afterwards what all scenarios share and change.

    These are the records of long-context scenarios, and the lists that are defaults of parameters.
    """
    module = _import(f"{_EVALUATION}.func_source_code.long_context")
    shared = [value for name, value in vars(module).items() if name.isupper() and isinstance(value, dict)]
    before = copy.deepcopy(shared)
    try:
        yield
    finally:
        for value, old in zip(shared, before, strict=True):
            value.clear()
            value.update(old)
        tags, mentions = simulator_class("TwitterAPI").post_tweet.__defaults__  # the only ones, both empty
        tags.clear()
        mentions.clear()


def simulator_class(name: str) -> type[Any]:
    """The class of a simulated API, e.g. ``"TravelAPI"``."""
    constants = _import("bfcl_eval.constants.executable_backend_config")
    simulator: type[Any] = getattr(_import(constants.CLASS_FILE_PATH_MAPPING[name]), name)
    return simulator


def stateless(name: str) -> bool:
    """Whether this API has no initial state to load."""
    return name in list(_import("bfcl_eval.constants.executable_backend_config").STATELESS_CLASSES)


def checker() -> Any:
    """The module with ``multi_turn_checker``."""
    return _import(f"{_EVALUATION}.multi_turn_checker")


def executor() -> Any:
    """The module with ``execute_multi_turn_func_call``; it keeps its instances among its globals."""
    return _import(f"{_EVALUATION}.multi_turn_utils")


def revelation(functions: list[dict[str, Any]]) -> str:
    """The user message with which held-back functions become available."""
    prompts = _import("bfcl_eval.constants.default_prompts")
    return str(prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING.format(functions=functions))


def _import(name: str) -> Any:
    bfcl_version()  # says what to install if the wheel is missing
    return importlib.import_module(name)
