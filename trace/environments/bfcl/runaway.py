"""Calls of the simulated calculator that would not come back in any reasonable time."""

from __future__ import annotations

import math
from typing import Any

from ..calls import Call

_PARAMETERS = {
    "logarithm": ("value", "base", "precision"),
    "power": ("base", "exponent"),
    "round_number": ("number", "decimal_places"),
    "square_root": ("number", "precision"),
}
_MAX_DIGITS = 100  # the ground truths ask for 10
_MAX_BITS = 10_000


def runs_away(call: Call) -> bool:
    """Whether a result would have more than 10,000 bits or 100 digits: ``power(9, 10**15)``.

    The official executor would compute them; no ground truth comes near these bounds.
    """
    if call.name not in _PARAMETERS:
        return False
    values = {**dict(zip(_PARAMETERS[call.name], call.positional, strict=False)), **call.arguments}
    if call.name == "power":
        base, exponent = values.get("base"), values.get("exponent")
        if not isinstance(base, int) or not isinstance(exponent, int):
            return False  # floats overflow instead
        return base.bit_length() * abs(exponent) > _MAX_BITS
    digits = values.get("decimal_places" if call.name == "round_number" else "precision")
    if abs(_number(digits)) > _MAX_DIGITS:
        return True
    # mpmath writes the power of ten out when it reads a number from text.
    return call.name == "logarithm" and any(math.isinf(_number(v)) for v in values.values())


def _number(value: Any) -> float:
    """0 for what is no number; infinite for text that is not a finite one."""
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return math.inf
        return number if math.isfinite(number) else math.inf
    return 0.0
