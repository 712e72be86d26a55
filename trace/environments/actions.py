"""From the generated text of one turn to the action it takes."""

from __future__ import annotations

import re
from functools import cache

INVALID = ("invalid", "")


@cache
def _tags(tool: str, observation: str) -> re.Pattern[str]:
    return re.compile(rf"<(?P<closing>/?)(?P<name>think|{tool}|{observation}|answer)>")


def parse_action(
    text: str, tool: str = "search", observation: str = "information", *, code: bool = False
) -> tuple[str, str]:
    """The action of a turn, ``tool`` or ``"answer"``, and its content without surrounding white space.

    ``("invalid", "")`` if there is none. Valid is exactly one closed, non-blank ``<tool>`` or ``<answer>``
    and no other tag, where

    - closed ``<think>`` blocks do not count: what they mention is not an action. A ``</think>`` without its
      opening closes a block from the start of the turn, as templates that open the thought themselves need;
    - free text before and after is allowed: the token that completes a stop string may carry more characters;
    - an ``<observation>`` tag makes the turn invalid: observations are not the policy's to write.

    With ``code`` the tool's content is program text: tags in its strings do not count, and it comes as it
    stands, with its indentation. Takes linear time, whatever the policy wrote.
    """
    tags = _tags(tool, observation)
    opened = text.find("<think>")
    thought = text.rfind("</think>", 0, opened if opened >= 0 else len(text))
    at = thought + len("</think>") if thought >= 0 else 0
    action = INVALID
    while tag := tags.search(text, at):
        name, start = tag["name"], tag.end()
        end = text.find(f"</{name}>", start)
        if tag["closing"] or end < 0 or name == observation:
            return INVALID
        at = end + len(f"</{name}>")
        if name == "think":
            continue
        if action != INVALID:
            return INVALID
        content = text[start:end]
        if not (code and name == tool):
            content = _without_thoughts(content).strip()
            if tags.search(content):
                return INVALID
        if not content.strip():
            return INVALID
        action = (name, content)
    return action


def _without_thoughts(text: str) -> str:
    kept, at = [], 0
    while (start := text.find("<think>", at)) >= 0 and (end := text.find("</think>", start)) >= 0:
        kept.append(text[at:start])
        at = end + len("</think>")
    return "".join([*kept, text[at:]])
