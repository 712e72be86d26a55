"""Differences of two plain configurations, held against their leaves written out as paths."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.config.differences import differences, in_words

VALUES = st.none() | st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=2)
TREES = st.dictionaries(
    st.sampled_from("abc"), VALUES | st.dictionaries(st.sampled_from("xyz"), VALUES), max_size=3
)


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return {key: value for key, value in found.items() if value is not None}


@given(TREES, TREES)
def test_a_key_is_named_exactly_where_leaves_differ(before: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = leaves(before), leaves(now)
    expected = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    found = {key for key, _, _ in differences(before, now)}
    # A section that one side lacks is named as a whole.
    assert all(key in found or key.partition(".")[0] in found for key in expected)
    for key in found & (old.keys() | new.keys()):
        assert key in expected


def test_nothing_differs_from_itself() -> None:
    tree = {"a": {"b": [1, {"c": None}]}, "d": None}
    assert list(differences(tree, tree)) == []
    assert list(differences(tree, {"a": tree["a"]})) == []


SERVER = {"url": "http://one:8000", "retries": 2}


@pytest.mark.parametrize("path", [(), ("sets", "nq")])
def test_a_search_server_may_move_but_not_appear(path: tuple[str, ...]) -> None:
    def at(retriever: Any) -> dict[str, Any]:
        tree: dict[str, Any] = {"environment": {"retriever": retriever, "top_k": 3}}
        for key in reversed(path):
            tree = {key: tree}
        return tree

    assert list(differences(at(SERVER), at(SERVER | {"url": "http://two:8000", "timeout_s": 3.0}))) == []
    key = ".".join((*path, "environment", "retriever"))
    assert list(differences(at(None), at(SERVER))) == [(key, None, SERVER)]
    assert list(differences(at(SERVER), at(None))) == [(key, SERVER, None)]


def test_only_the_search_server_is_let_pass() -> None:
    for where in ("task", "options"):
        one, other = ({where: {"retriever": {"url": url}}} for url in "ab")
        assert list(differences(one, other)) == [(f"{where}.retriever.url", "a", "b")]


def test_words_are_short_and_name_every_key() -> None:
    said = in_words(differences({"a": {"b": 1}, "c": "x" * 500}, {"a": {"b": 2}, "c": "y"}))
    assert said.startswith("a.b (1, now 2), c ('xxx")
    assert said.endswith("now 'y')")
    assert len(said) < 120
