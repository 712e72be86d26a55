"""How tools are shown to the policy and how it writes calls: two formats, the same four functions each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .calls import Call, CallError, check_literal, parse_calls

MAX_CHARACTERS = 65_536  # of an action that is read; longer ones are malformed
MAX_CALLS_PER_ACTION = 64  # of an action; the ground truths make 34 in a whole turn

Function = dict[str, Any]
"""Documentation of one function: ``name``, ``description``, ``parameters`` (JSON schema)."""


@dataclass(frozen=True)
class Parsed:
    """The calls of an action. Without calls the action is a message, or ``malformed``: a call gone wrong."""

    calls: list[Call] = field(default_factory=list)
    malformed: bool = False


class ToolFormat(Protocol):
    """What a format must do; all functions are pure."""

    def system(self, functions: Sequence[Function], instructions: str = "") -> str:
        """Text of the system message."""
        ...

    def parse(self, action: str) -> Parsed:
        """Reads an action; what stands before the last ``</think>`` is not read."""
        ...

    def results(self, calls: Sequence[str], results: Sequence[str]) -> str:
        """The results of ``calls`` (in Python's syntax) as one user message."""
        ...


class Hermes:
    """Hermes' format as Qwen3's chat template renders it; decoding follows BFCL's handler for Qwen3.

    A ``<tool_call>`` block that is no JSON is left out; one without name or arguments, or with arguments out
    of bounds (see :mod:`.calls`), makes the whole action malformed, and so do more than 64 calls.
    """

    def system(self, functions: Sequence[Function], instructions: str = "") -> str:
        """``instructions``, then the tools in the words of Qwen3's template."""
        tools = "".join(f"\n{json.dumps(f, ensure_ascii=False)}" for f in functions)
        text = (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}"
            "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
            'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
            '"arguments": <args-json-object>}\n</tool_call>'
        )
        return f"{instructions}\n\n{text}" if instructions else text

    def parse(self, action: str) -> Parsed:
        """See the class."""
        text = _spoken(action)
        if len(text) > MAX_CHARACTERS:
            return Parsed(malformed=True)
        calls = []
        for block in _blocks(text):
            try:
                value = json.loads(block)
            except (ValueError, RecursionError):
                continue
            try:
                calls.append(_hermes_call(value))
            except (ValueError, RecursionError):
                return Parsed(malformed=True)
        if len(calls) > MAX_CALLS_PER_ACTION:
            return Parsed(malformed=True)
        return Parsed(calls, malformed=not calls and "<tool_call>" in text)

    def results(self, calls: Sequence[str], results: Sequence[str]) -> str:
        """One ``<tool_response>`` per call."""
        return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


class PythonCalls:
    """BFCL's prompting format: ``[f(a=1), g(b='x')]`` and nothing else in the action.

    Positional arguments are accepted, as the benchmark's own answers use them. More than 64 calls are malformed.
    """

    def system(self, functions: Sequence[Function], instructions: str = "") -> str:
        """BFCL's default system prompt, put together from the installed wheel, then ``instructions``."""
        from bfcl_eval.constants import default_prompts as prompts

        style = prompts.PROMPT_STYLE_TEMPLATES["classic"]
        text = prompts.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
            persona=style["persona"],
            task=style["task"],
            tool_call_format=style["tool_call_no_tag"].format(
                output_format=prompts.OUTPUT_FORMAT_MAPPING["python"],
                param_types=prompts.PARAM_TYPE_MAPPING["python"],
            ),
            multiturn_behavior=style["multiturn_behavior"],
            available_tools=style["available_tools"].format(
                format="json", functions=json.dumps(list(functions), indent=4)
            ),
        )
        return f"{text}\n\n{instructions}" if instructions else str(text)

    def parse(self, action: str) -> Parsed:
        """Brackets may be missing and backticks may surround the list, as in BFCL's decoder."""
        text = _spoken(action).strip("`\n ")
        if len(text) > MAX_CHARACTERS:
            return Parsed(malformed=True)
        wrapped = ("" if text.startswith("[") else "[") + text + ("" if text.endswith("]") else "]")
        try:
            calls = parse_calls(wrapped)
        except CallError:
            return Parsed(malformed=re.match(r"\[|\w+\(", text) is not None)
        return Parsed(malformed=True) if len(calls) > MAX_CALLS_PER_ACTION else Parsed(calls)

    def results(self, calls: Sequence[str], results: Sequence[str]) -> str:
        """BFCL's list of tool messages."""
        pairs = zip(calls, results, strict=True)
        return repr([{"role": "tool", "name": call, "content": result} for call, result in pairs])


def _spoken(action: str) -> str:
    return action.rpartition("</think>")[2]


def _blocks(text: str) -> Iterator[str]:
    """What stands between tags with line breaks inside; as a regular expression it takes quadratic time."""
    opening, closing = "<tool_call>\n", "\n</tool_call>"
    end = 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            return
        yield text[start:end]
        end += len(closing)


def _hermes_call(value: Any) -> Call:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError("a tool call must be an object with a name")
    arguments = value.get("arguments")
    if isinstance(arguments, str):  # some models write the object as a string
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise CallError("the arguments of a tool call must be an object")
    check_literal([value["name"], arguments])
    return Call(value["name"], arguments)
