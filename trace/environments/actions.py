"""From the generated text of one turn to the action it takes."""

from __future__ import annotations

import re
from functools import cache

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


@cache
def _patterns(tool: str, observation: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    action = rf"<({tool}|answer)>(.*?)</({tool}|answer)>"
    return re.compile(action, re.DOTALL), re.compile(rf"</?(?:think|{tool}|{observation}|answer)>")


def parse_action(text: str, tool: str = "search", observation: str = "information") -> tuple[str, str]:
    """The action of a turn, ``tool`` or ``"answer"``, and its content without surrounding white space.

    ``("invalid", "")`` if there is none. Valid is exactly one closed, non-blank ``<tool>`` or ``<answer>``
    and no other tag, where

    - closed ``<think>`` blocks do not count: what they mention is not an action. A ``</think>`` without its
      opening closes a block from the start of the turn, as templates that open the thought themselves need;
    - free text before and after is allowed: the token that completes a stop string may carry more characters;
    - an ``<observation>`` tag makes the turn invalid: observations are not the policy's to write.
    """
    rest = _THOUGHT.sub("", text)
    if "</think>" in rest and "<think>" not in rest:
        rest = rest.rpartition("</think>")[2]
    action, tags = _patterns(tool, observation)
    match = action.search(rest)
    if match is None or match[1] != match[3] or len(tags.findall(rest)) != 2 or not match[2].strip():
        return "invalid", ""
    return match[1], match[2].strip()
