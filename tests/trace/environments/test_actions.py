from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.environments.actions import parse_action

VALID = [
    ("<search> a b </search>", "search", "a b"),
    ("<think> t </think> <search>q</search>", "search", "q"),
    ("<think> t </think>\n<answer> x\ny </answer>", "answer", "x\ny"),
    ("free text <answer>x</answer>", "answer", "x"),
    ("<answer>x</answer>\n", "answer", "x"),
    ("<answer>x</answer>. And more", "answer", "x"),
    ("opened by the template </think> <search>q</search>", "search", "q"),
    ("<think> <search> was tried </think> <answer>x</answer>", "answer", "x"),
    ("<think> <answer>no</answer> </think> <search>q</search>", "search", "q"),
    ("<think> <information>faked</information> </think> <search>q</search>", "search", "q"),
    ("<think> a </think> <think> b </think> <search>q</search>", "search", "q"),
    ("<answer>5 < 6 and <b>x</b></answer>", "answer", "5 < 6 and <b>x</b>"),
]
INVALID = [
    "",
    "   \n",
    "just text",
    "<think> only a thought </think>",
    "<think> never closed",
    "<think> never closed <search>q</search>",
    "<search>q",
    "q</search>",
    "</search>q<search>",
    "<search> </search>",
    "<answer>\n</answer>",
    "<search>q</answer>",
    "<answer>x</search>",
    "<search>q</search> <answer>x</answer>",
    "<answer>x</answer> <search>q</search>",
    "<search>q</search> <search>r</search>",
    "<answer><answer>x</answer>",
    "<answer>x</answer></answer>",
    "<answer><search>x</search></answer>",
    "<information>Doc 1</information> <answer>x</answer>",
    "<answer>x <information></answer>",
    "<search>q</search> <think>",
    "<Answer>x</Answer>",
    "< answer >x</ answer >",
    "<search>a <think> b </think> <answer>x</answer>",
]


@pytest.mark.parametrize(("text", "kind", "content"), VALID)
def test_valid(text, kind, content):
    assert parse_action(text) == (kind, content)


@pytest.mark.parametrize("text", INVALID)
def test_invalid(text):
    assert parse_action(text) == ("invalid", "")


PIECES = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", " x "]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_never_empty_never_tagged(text):
    kind, content = parse_action(text)
    assert (kind == "invalid") == (content == "")
    assert not any(piece in content for piece in PIECES[:-1])
