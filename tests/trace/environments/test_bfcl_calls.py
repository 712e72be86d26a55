"""Calls as data: what is read, what is refused, and that nothing is ever run."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trace_rl.environments.calls import (
    NO_SUCH_FUNCTION,
    Call,
    CallError,
    parse_call,
    parse_calls,
    render_call,
)
from trace_rl.environments.tool_formats import Hermes, PythonCalls

from .bfcl_scripts import TASKS, environment

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["ls", "a", "file_name", "_x1"])


@given(st.lists(st.builds(Call, NAMES, st.dictionaries(NAMES, PLAIN), st.tuples(PLAIN)), max_size=3))
def test_rendered_calls_are_read_back(calls):
    assert parse_calls(f"[{', '.join(map(render_call, calls))}]") == calls


@pytest.mark.parametrize("name", ["get-weather", "a.b", "from", "", "x)(", "a\nb"])
def test_what_python_cannot_call_is_rendered_as_no_function(name):
    assert render_call(Call(name, {})) == NO_SUCH_FUNCTION
    assert render_call(Call("ls", {name: 1})) == NO_SUCH_FUNCTION


def test_tuples_negative_numbers_and_bare_words():
    call = parse_call("f((1, -2.5), word, key=[True, None], n=-3)")
    assert call == Call("f", {"key": [True, None], "n": -3}, ((1, -2.5), "word"))


HOSTILE = [
    "__import__('os').system('touch {mark}')",
    "cd(folder=__import__('os').system('touch {mark}'))",
    "cd(folder=open('{mark}', 'w'))",
    "cd(folder=ls())",
    "cd.__globals__['os'].system('touch {mark}')",
    "().__class__.__base__.__subclasses__()",
    "cd(folder=().__class__)",
    "cd(folder=[x for x in (1, 2)])",
    "cd(folder=lambda: open('{mark}', 'w'))",
    "cd(folder=f'{{open(chr(47), chr(119))}}')",
    "cd(folder=9 ** 9 ** 9)",
    "cd(folder='a' * 10 ** 9)",
    "cd(folder=1" + "0" * 5000 + ")",
    "cd(folder=99999999999999999999)",
    "cd(folder=1e999)",
    "cd(folder=" + "[" * 150 + "]" * 150 + ")",
    "cd(folder=" + "[" * 5000 + "]" * 5000 + ")",
    "cd(folder=" + "-" * 20000 + "1)",
    "cd" + "()" * 5000,
    "cd(**{{'folder': 'x'}})",
    "cd(*['x'])",
    "cd(folder={{**{{}}}})",
    "cd(folder={{[]: 1}})",
    "cd(folder=b'x')",
    "cd(folder=1j)",
    "cd(folder=...)",
    "cd(folder=(x := 1))",
    "(lambda: open('{mark}', 'w'))()",
    "cd(folder='\\ud800')",
    "cd(folder='\x00')",
    "cd(folder='x'",
    "import os",
    "x = 1",
    "cd",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_calls_are_refused_and_not_run(text, tmp_path):
    mark = tmp_path / "ran"
    text = text.format(mark=mark)
    with pytest.raises(CallError):
        parse_calls(f"[{text}]")
    assert PythonCalls().parse(f"[{text}]").calls == []
    env = environment(tool_format="python")
    env.reset(TASKS["multi_turn_base_0"])
    results = [env.step(f"[{text}]") for _ in range(4)]
    assert [r.outcome for r in results] == ["invalid"] * 4
    assert results[-1].reward == 0.0
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("__import__", {"name": "os"}),
        ("__import__('os').system('touch {mark}') or cd", {"folder": "x"}),
        ("cd", {"folder='x') or open('{mark}', 'w') or cd(folder": "x"}),
        ("open", {"file": "{mark}", "mode": "w"}),
        ("exec", {"source": "open('{mark}', 'w')"}),
        ("_load_scenario", {"scenario": {}}),
        ("__init__", {}),
        ("cd", {"folder": "') or open('{mark}', 'w') or ('"}),
    ],
)
def test_hostile_names_in_json_fail_as_calls_and_are_not_run(name, arguments, tmp_path):
    """Nor when the official checker, which evaluates strings, replays the episode."""
    mark = tmp_path / "ran"
    call = json.dumps({"name": name, "arguments": arguments}).replace("{mark}", str(mark))
    env = environment()
    env.reset(TASKS["multi_turn_base_0"])
    result = env.step(f"<tool_call>\n{call}\n</tool_call>")
    assert (result.outcome, result.tool_calls) == ("call", 1)
    assert "rror" in result.observation
    assert [env.step("Done.") for _ in range(4)][-1].reward == 0.0
    assert not mark.exists()


@given(st.text())
@example("[" * 100_000)
@example("\ud800")
@example("<tool_call>\n" + '{"a":' * 50_000 + "\n</tool_call>")
@example('<tool_call>\n{"name": "f", "arguments": {"x": NaN, "y": 1e999}}\n</tool_call>')
@example('<tool_call>\n{"name": "f", "arguments": {"x": "\\ud800"}}\n</tool_call>')
@example('<tool_call>\n{"name": "f", "arguments": {"x": ' + "[" * 500 + "]" * 500 + "}}\n</tool_call>")
def test_no_text_breaks_the_parsers(text):
    assert not PythonCalls().parse(text).calls or text
    assert Hermes().parse(text).calls == []
