"""Validation errors in the user's words: the key, what was given, what would do."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def explain(root: type[BaseModel], error: Any) -> str:
    """One validation error of `root` as `key: what is wrong; what would do`."""
    path, known, kinds = _place(root, error["loc"])
    where, given = ".".join(path), reprlib.repr(error["input"])
    context = error.get("ctx", {})
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{where}: unknown key; {nearest(path[-1], known, path[:-1])}"
    if kind == "invalid_key":
        return f"{where}: keys must be text, quote this one"
    if kind == "missing":
        return f"{where}: required, and missing"
    if kind == "union_tag_not_found":
        return f"{where}.kind: required, and missing; one of {', '.join(kinds)}"
    if kind == "union_tag_invalid":
        return f"{where}.kind: got {context['tag']!r}; {nearest(context['tag'], kinds)}"
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", context["expected"])
        return f"{where}: got {given}; {nearest(error['input'], names)}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{where}: got {given}; expected keys with values below it"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}: got {given}; {message[0].lower()}{message[1:]}"


def nearest(given: Any, valid: Sequence[str], section: Sequence[str] = ()) -> str:
    """The valid name that was probably meant, or all of them."""
    for name in difflib.get_close_matches(str(given), valid, n=1):
        return f"did you mean {'.'.join([*section, name])}?"
    return f"one of {', '.join(valid)}"


def _place(root: type[BaseModel], location: Sequence[Any]) -> tuple[list[str], list[str], list[str]]:
    """The path to show, the keys known beside its last part, and the kinds its section can have.

    Pydantic inserts the kind below a section that has several: the path leaves it out.
    """
    path: list[str] = []
    model: type[BaseModel] | None = root
    known: list[str] = []
    kinds: list[str] = []
    rest = list(location)
    while rest:
        path.append(str(rest.pop(0)))
        known = sorted(model.model_fields) if model else []
        field = model.model_fields.get(path[-1]) if model else None
        models = _models(field.annotation) if field else []
        kinds = _kinds(field, models)
        if field and _is_mapping(field) and rest:
            path.append(str(rest.pop(0)))
        if kinds and rest and rest[0] in kinds:
            tag = rest.pop(0)
            models = [m for m in models if tag in get_args(m.model_fields["kind"].annotation)]
        model = models[0] if models else None
    return path, known, kinds


def _kinds(field: FieldInfo | None, models: list[type[BaseModel]]) -> list[str]:
    if field is None or field.discriminator is None:
        return []
    return [kind for model in models for kind in get_args(model.model_fields["kind"].annotation)]


def _is_mapping(field: FieldInfo) -> bool:
    return getattr(field.annotation, "__origin__", None) is dict


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models(inner)]
