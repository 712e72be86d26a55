"""From the generated text of one turn to the action it takes."""

from __future__ import annotations

import re
from typing import Literal

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_ACTION = re.compile(r"<(search|answer)>(.*?)</(search|answer)>", re.DOTALL)
_TAG = re.compile(r"</?(?:think|search|information|answer)>")


def parse_action(text: str) -> tuple[Literal["search", "answer", "invalid"], str]:
    """The action of a turn and its content without surrounding white space; ``("invalid", "")`` if none.

    Valid is exactly one closed, non-blank ``<search>`` or ``<answer>`` and no other tag, where

    - closed ``<think>`` blocks do not count: what they mention is not an action. A ``</think>`` without its
      opening closes a block from the start of the turn, as templates that open the thought themselves need;
    - free text before and after is allowed: the token that completes a stop string may carry more characters;
    - an ``<information>`` tag makes the turn invalid: observations are not the policy's to write.
    """
    rest = _THOUGHT.sub("", text)
    if "</think>" in rest and "<think>" not in rest:
        rest = rest.rpartition("</think>")[2]
    match = _ACTION.search(rest)
    if match is None or match[1] != match[3] or len(_TAG.findall(rest)) != 2 or not match[2].strip():
        return "invalid", ""
    return ("search" if match[1] == "search" else "answer"), match[2].strip()
