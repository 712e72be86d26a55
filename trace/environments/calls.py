"""Function calls as data: names with literal arguments, read with `ast` and never evaluated."""

from __future__ import annotations

import ast
import keyword
import math
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 32
MAX_INTEGER = 2**63

NO_SUCH_FUNCTION = "unknown_function()"
"""What a call is rendered as that could not be written in Python, so that no function can have run."""


class CallError(ValueError):
    """Text that is no list of calls with literal arguments."""


@dataclass(frozen=True)
class Call:
    """A call as the policy wrote it; the function need not exist nor take these arguments."""

    name: str
    arguments: dict[str, Any]
    positional: tuple[Any, ...] = field(default=())


def render_call(call: Call) -> str:
    """The call in Python's syntax: ``cd(folder='document')``.

    Names must be ASCII: Python takes ``ｌs`` in full width for ``ls``, which is another name in JSON.
    """
    names = (call.name, *call.arguments)
    if not all(name.isascii() and name.isidentifier() and not keyword.iskeyword(name) for name in names):
        return NO_SUCH_FUNCTION
    parts = [repr(value) for value in call.positional]
    parts += [f"{name}={value!r}" for name, value in call.arguments.items()]
    return f"{call.name}({', '.join(parts)})"


def parse_calls(text: str) -> list[Call]:
    """Reads ``[f(a=1), g('x')]``; a bare word as an argument stands for a string, as in BFCL's decoder.

    Raises CallError for everything else: other callees than a plain name, arguments that are not literals
    (calls, attributes, operators, comprehensions, f-strings, unpacking), and literals out of bounds.
    """
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise CallError(f"not Python: {error}") from error
    if not isinstance(body, ast.List):
        raise CallError("not a list of calls")
    return [_call(element) for element in body.elts]


def parse_call(text: str) -> Call:
    """The inverse of :func:`render_call`. Raises CallError as :func:`parse_calls`, and for several calls."""
    calls = parse_calls(f"[{text}]")
    if len(calls) != 1:
        raise CallError(f"expected one call, got {len(calls)}")
    return calls[0]


def check_literal(value: Any, depth: int = 0) -> None:
    """Raises CallError unless ``value`` is plain data within bounds: depth, size of integers, finite, UTF-8."""
    if depth > MAX_DEPTH:
        raise CallError(f"nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        for key, item in value.items():
            check_literal(key, depth + 1)
            check_literal(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            check_literal(item, depth + 1)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CallError("a string with half a character (lone surrogate)") from error
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise CallError("a number that is not finite")
    elif isinstance(value, int):
        if abs(value) >= MAX_INTEGER:
            raise CallError("an integer of more than 64 bits")
    elif value is not None:
        raise CallError(f"{type(value).__name__} is no plain data")


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise CallError("an element is no call of a plain name")
    arguments: dict[str, Any] = {}
    for argument in node.keywords:
        if argument.arg is None:
            raise CallError("** in a call")
        arguments[argument.arg] = _literal(argument.value)
    positional = tuple(_literal(value) for value in node.args)
    check_literal([arguments, positional])
    return Call(node.func.id, arguments, positional)


def _literal(node: ast.expr, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise CallError(f"nested deeper than {MAX_DEPTH}")
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=word):
            return word
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=elements):
            return [_literal(element, depth + 1) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple(_literal(element, depth + 1) for element in elements)
        case ast.Dict(keys=keys, values=values):
            try:
                return {_key(k, depth + 1): _literal(v, depth + 1) for k, v in zip(keys, values, strict=True)}
            except TypeError as error:
                raise CallError(f"a dictionary key: {error}") from error
    raise CallError(f"an argument is no literal but {type(node).__name__}")


def _key(node: ast.expr | None, depth: int) -> Any:
    if node is None:
        raise CallError("** in a dictionary")
    return _literal(node, depth)
