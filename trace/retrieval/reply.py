"""From a server's reply to passages, whatever the server sent."""

from __future__ import annotations

import json
from typing import Any

from trace_rl.tasks.records import describe
from trace_rl.tasks.task import Passage

from .contents import split_contents


def parse_reply(body: bytes, k: int) -> list[Passage]:
    """The first ``k`` passages of a reply to one query.

    ``{"result": [[hit, ...]]}``, where a hit is ``{"document": document, "score": number}`` or the bare
    document, ``{"id": string or whole number, "contents": "title newline text"}``; other fields are ignored.

    Raises ValueError naming what is wrong.
    """
    try:
        data = json.loads(body)
    except RecursionError as error:
        raise ValueError("the reply is not JSON: too deeply nested") from error
    except ValueError as error:
        raise ValueError(f"the reply is not JSON: {error}; it starts with {body[:80]!r}") from error
    if not isinstance(data, dict) or not isinstance(data.get("result"), list):
        raise ValueError('the reply is no object with a list "result"')
    result: list[Any] = data["result"]
    if len(result) != 1:
        raise ValueError(f"one query was asked, result has {len(result)} lists")
    if not isinstance(result[0], list):
        raise ValueError(f"result[0] must be a list, got {describe(result[0])}")
    return [_passage(hit, f"result[0][{i}]") for i, hit in enumerate(result[0][:k])]


def _passage(hit: Any, at: str) -> Passage:
    if not isinstance(hit, dict):
        raise ValueError(f"{at} must be an object, got {describe(hit)}")
    if "document" in hit:
        score = hit.get("score", 0.0)
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError(f"{at}.score must be a number, got {describe(score)}")
        hit, at = hit["document"], f"{at}.document"
        if not isinstance(hit, dict):
            raise ValueError(f"{at} must be an object, got {describe(hit)}")
    passage_id, contents = hit.get("id"), hit.get("contents")
    if isinstance(passage_id, bool) or not isinstance(passage_id, str | int):
        raise ValueError(f"{at}.id must be a string or a whole number, got {describe(passage_id)}")
    if not isinstance(contents, str):
        raise ValueError(f"{at}.contents must be a string, got {describe(contents)}")
    return Passage(str(passage_id), *split_contents(contents))
