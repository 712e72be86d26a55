"""Whatever a server sends is passages or a ValueError that says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.retrieval.reply import parse_reply
from trace_rl.tasks.task import Passage

HIT = {"document": {"id": "7", "contents": '"T"\nx'}, "score": 0.5}
T = Passage("7", "T", "x")


@pytest.mark.parametrize(
    ("hits", "expected"),
    [
        ([], []),
        ([HIT], [T]),
        ([HIT["document"]], [T]),
        ([HIT] * 5, [T] * 3),
        ([{"document": {"id": 7, "contents": '"T"\nx', "extra": [1]}}], [T]),
        ([{"id": "7", "contents": "Only a title"}], [Passage("7", "Only a title", "")]),
        ([{"id": "7", "contents": 'T\nx\n"y"\n'}], [Passage("7", "T", 'x\n"y"')]),
        ([{"id": "7", "contents": ""}], [Passage("7", "", "")]),
    ],
)
def test_replies(hits: list[Any], expected: list[Passage]) -> None:
    assert parse_reply(json.dumps({"result": [hits]}).encode(), 3) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html><body>It works!</body></html>", "not JSON.*It works"),
        ("", "not JSON"),
        ('{"result": [[{"document": {"id": "1", "conte', "not JSON"),
        ("\xff\xfe", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ('{"result": ' + "9" * 5000 + "}", "not JSON"),
        ("[]", 'no object with a list "result"'),
        ("null", 'no object with a list "result"'),
        ('{"result": {}}', 'no object with a list "result"'),
        ('{"error": "no"}', 'no object with a list "result"'),
        ('{"result": []}', "one query was asked, result has 0 lists"),
        ('{"result": [[], []]}', "one query was asked, result has 2 lists"),
        ('{"result": [null]}', r"result\[0\] must be a list, got null"),
        ('{"result": [["text"]]}', r"result\[0\]\[0\] must be an object, got a string"),
        ('{"result": [[{"document": "text"}]]}', r"document must be an object, got a string"),
        ('{"result": [[{"id": "1"}]]}', r"result\[0\]\[0\].contents must be a string, got null"),
        ('{"result": [[{"contents": "T"}]]}', r"result\[0\]\[0\].id must be a string or a whole number"),
        ('{"result": [[{"id": true, "contents": "T"}]]}', "id must be"),
        (
            '{"result": [[{"document": {"id": "1", "contents": ["T"]}}]]}',
            "contents must be a string, got a list",
        ),
        (
            '{"result": [[{"document": {"id": "1", "contents": "T"}, "score": "high"}]]}',
            "score must be a number",
        ),
    ],
)
def test_replies_that_are_none(body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_reply(body.encode("latin-1"), 3)


KEYS = st.sampled_from(["result", "document", "id", "contents", "score"])
SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner), max_leaves=8
)


@given(JSON)
def test_any_json_is_read_or_refused(value: Any) -> None:
    for data in (value, {"result": value}, {"result": [value]}, {"result": [[value]]}):
        try:
            found = parse_reply(json.dumps(data).encode(), 2)
        except ValueError:
            continue
        assert all(isinstance(p, Passage) for p in found)
