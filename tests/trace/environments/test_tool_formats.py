"""Tool formats against Qwen3's chat template and BFCL's own decoders, cut out of the installed wheel."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from trace_rl.environments.calls import render_call
from trace_rl.environments.tool_formats import Hermes, Parsed, PythonCalls, _blocks
from trace_rl.tasks.bfcl import bfcl_entry

ENTRY = bfcl_entry("multi_turn_base_3")
QWEN3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
HERMES, PYTHON = Hermes(), PythonCalls()


def definitions(module: str, *names: str) -> dict[str, Any]:
    """Definitions of a module of the wheel whose imports are not installed."""
    wheel = Path(importlib.util.find_spec("bfcl_eval").origin).parent
    tree = ast.parse((wheel / f"{module}.py").read_text())
    found = [node for node in ast.walk(tree) if getattr(node, "name", "") in names]
    for node in found:
        node.decorator_list = []
    scope = {"ast": ast, "json": json, "re": re, "Any": Any, "Optional": Any, "Union": Any}
    prompts = (wheel / "constants" / "default_prompts.py").read_text()
    exec(compile(prompts, "default_prompts", "exec"), scope)
    exec("class ReturnFormat: PYTHON, JAVA, JAVASCRIPT, VERBOSE_XML, CONCISE_XML, JSON = range(6)", scope)
    exec(compile(ast.Module(found, []), module, "exec"), scope)
    return scope


def qwen3(messages, tools=None):
    (text,), _ = render_jinja_template(conversations=[messages], tools=tools, chat_template=QWEN3)
    return text


@pytest.mark.parametrize("instructions", ["", "Think first."])
def test_hermes_shows_tools_as_qwen3s_template_does(instructions):
    user = {"role": "user", "content": "Hi"}
    own = [{"role": "system", "content": instructions}] if instructions else []
    ours = [{"role": "system", "content": HERMES.system(ENTRY.functions, instructions)}, user]
    assert qwen3(ours) == qwen3([*own, user], tools=list(ENTRY.functions))


def test_hermes_answers_calls_as_qwen3s_template_does():
    calls = [
        {"type": "function", "function": {"name": "cd", "arguments": {"folder": "a"}}},
        {"type": "function", "function": {"name": "ls", "arguments": {}}},
    ]
    before = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    results = ["one\nline", '{"two": 2}']
    theirs = qwen3([*before, *({"role": "tool", "content": r} for r in results)])
    ours = qwen3([*before, {"role": "user", "content": HERMES.results(["f()", "g()"], results)}])
    assert ours == theirs
    written = theirs.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    assert [render_call(c) for c in HERMES.parse(written).calls] == ["cd(folder='a')", "ls()"]


def test_python_prompt_is_bfcls_default():
    names = ["formulate_system_prompt", "parse_prompt_variation_params", "format_function_doc"]
    scope = definitions("model_handler/utils", *names)
    theirs = scope["formulate_system_prompt"](scope["DEFAULT_SYSTEM_PROMPT_FORMAT"], list(ENTRY.functions))
    assert PYTHON.system(ENTRY.functions) == theirs
    assert PYTHON.system(ENTRY.functions, "Be brief.") == f"{theirs}\n\nBe brief."


def block(value):
    return f"<tool_call>\n{value if isinstance(value, str) else json.dumps(value)}\n</tool_call>"


LS = {"name": "ls", "arguments": {"a": True}}
HERMES_ACTIONS = [
    "",
    "Hello.",
    block(LS),
    f"I look.\n{block(LS)}\nThen\n{block(LS)}",
    f"<think>\nor {block(LS)}?\n</think>\n\nNo.",
    f"<think>\nyes\n</think>\n\n{block(LS)}",
    block({"name": "ls", "arguments": "{}"}),
    block({"name": "ls", "arguments": "[]"}),
    block({"name": "ls", "arguments": [1]}),
    block({"name": "ls"}),
    block({"arguments": {}}),
    block([1]),
    block("3"),
    block('{"name": "ls", "arguments": {}'),
    block('{"name": "ls", "arguments": {}') + block(LS),
    block(LS) + block({"name": "ls"}),
    f"<tool_call>{json.dumps(LS)}</tool_call>",
    f"<tool_call>\n{json.dumps(LS)}",
    block({"name": "echo", "arguments": {"content": 'it\'s "é"\n', "n": [1, 2.5, None, {"k": "v"}]}}),
]


@pytest.mark.parametrize("action", HERMES_ACTIONS)
def test_hermes_is_decoded_as_by_bfcls_qwen3_handler(action):
    module = definitions("model_handler/local_inference/qwen_fc", "_extract_tool_calls", "decode_execute")
    convert = definitions("model_handler/utils", "convert_to_function_call")["convert_to_function_call"]
    module["convert_to_function_call"] = convert
    text = action.split("</think>")[-1].lstrip("\n")

    class Handler:
        _extract_tool_calls = staticmethod(module["_extract_tool_calls"])

    try:
        theirs = module["decode_execute"](Handler(), text, False)
    except Exception:  # the handler takes whatever its decoder raises as the end of the turn
        theirs = []
    ours = [render_call(call) for call in HERMES.parse(action).calls]
    assert [ast.dump(ast.parse(c)) for c in ours] == [ast.dump(ast.parse(c)) for c in theirs]


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "\n", "x"])).map("".join))
def test_blocks_are_those_of_the_handlers_expression(text):
    assert list(_blocks(text)) == re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)


PYTHON_ACTIONS = [
    "",
    "[]",
    "Hello.",
    "I cannot [do] that",
    "[ls(a=True)]",
    "ls(a=True), cd(folder='x')",
    "```\n[ls()]\n```",
    "```python\n[ls()]\n```",
    "[ls()], [ls()]",
    "[cd(folder=documents)]",
    "[add(a=-1, b=2.5e3)]",
    "[echo(content='it\\'s', file_name=None)]",
    "[mean(numbers=[1, 2, (3, 4)])]",
    "[ls()",
    "ls())",
    "[ls(), 3]",
    "[cd(folder='a', folder='b')]",
    "The answer is [ls()]",
    "[update(updates={'status': 'open', 'n': 1})]",
]


@pytest.mark.parametrize("action", PYTHON_ACTIONS)
def test_python_is_decoded_as_by_bfcls_default_decoder(action):
    names = (
        "default_decode_execute_prompting ast_parse resolve_ast_call resolve_ast_by_type parse_nested_value"
    )
    scope = definitions("model_handler/utils", *names.split(), "decoded_output_to_execution_list")
    try:
        theirs = scope["default_decode_execute_prompting"](action)
    except Exception:
        theirs = []
    ours = [render_call(call) for call in PYTHON.parse(action).calls]
    assert ours == theirs


@pytest.mark.parametrize(
    ("tool_format", "action", "malformed"),
    [
        (HERMES, "Hello.", False),
        (HERMES, "<tool_call>\n{", True),
        (HERMES, block([1]), True),
        (HERMES, "<think>\n<tool_call>\n</think>\n\nHello.", False),
        (PYTHON, "", False),
        (PYTHON, "[]", False),
        (PYTHON, "It is done (really).", False),
        (PYTHON, "[ls(", True),
        (PYTHON, "ls(a=", True),
        (PYTHON, "[" + "ls()," * 20_000 + "]", True),
        (HERMES, block(LS) * 2000, True),
    ],
)
def test_messages_and_malformed_calls_are_told_apart(tool_format, action, malformed):
    assert tool_format.parse(action) == Parsed([], malformed)


def test_python_calls_may_be_positional():
    assert [render_call(c) for c in PYTHON.parse("[sort('a.txt'), f(1, b=2)]").calls] == [
        "sort('a.txt')",
        "f(1, b=2)",
    ]
