"""Whether two episodes went the same way."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from trace_rl.environments.protocol import StepResult

from .problem import Problem, shown


def difference(
    method: str, done: str, expected: Sequence[StepResult], got: Sequence[StepResult]
) -> list[Problem]:
    """The first difference between the turns of two episodes, if there is one."""
    for turn, (one, other) in enumerate(zip(expected, got, strict=False), start=1):
        for field in fields(StepResult):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if a != b:
                where = f"{done}, turn {turn} from there"
                return [Problem(method, where, f"the same {field.name}, {shown(a)}", shown(b))]
    if len(expected) != len(got):
        return [Problem(method, done, f"as many turns as before, {len(expected)}", str(len(got)))]
    return []


def plain_json(value: Any) -> str | None:
    """`value` as JSON, or None if it is not plain data."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
