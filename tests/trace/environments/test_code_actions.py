"""Actions whose content is program text."""

from __future__ import annotations

import pytest

from trace_rl.environments.actions import parse_action

PROGRAMS = [
    "print('<think>a</think>')",
    "s = '<answer> 5'",
    "s = '</answer>'",
    "s = '<result>5</result>'",
    "\n    x = 1\n    y = 2\n",
    "s = '</think>'",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_tags_in_code_are_text_and_indentation_stays(program):
    text = f"<think> hm </think> <python>{program}</python>"
    assert parse_action(text, "python", "result", code=True) == ("python", program)


@pytest.mark.parametrize(
    "text",
    [
        "<python>print('</answer>",
        "<python> </python>",
        "<python>1</python><python>2</python>",
        "<python>1</python><result>1</result>",
        "<answer><python>1</python></answer>",
        "<think> <python>1</python>",
        "hm </think> <python>print('</think>')</python>",  # whose thought ends where?
    ],
)
def test_no_action(text):
    assert parse_action(text, "python", "result", code=True) == ("invalid", "")


def test_an_answer_is_no_code():
    assert parse_action("<answer> 5 </answer>", "python", "result", code=True) == ("answer", "5")
    assert parse_action("<answer> <b> <result> </answer>", "python", "result", code=True) == ("invalid", "")
