"""Makes untrusted text harmless: nothing in it can look like an action, an observation or a chat role."""

from __future__ import annotations

import re

_SPACES = r"\s{0,8}"  # bounded, or a long run of blanks would take quadratic time
_NAMES = "think|search|information|answer|python|result|tool_call|tool_response"
_TAG_LIKE = re.compile(
    rf"<(/?[^\s<>]{{1,40}})>|<{_SPACES}(/?{_SPACES}(?:{_NAMES})){_SPACES}>",
    re.IGNORECASE,
)


def neutralize(text: str) -> str:
    """Turns everything tag-like in untrusted text into round brackets: ``</answer>`` to ``(/answer)``.

    That covers the tags of all environments and the control tokens of chat templates (``<|im_end|>``,
    ``</s>``), so a document can neither look like an action nor end the turn it is quoted in.
    """
    replaced = 1
    while replaced:  # "<<a>>" becomes tag-free only in the second round
        text, replaced = _TAG_LIKE.subn(lambda match: f"({match[1] or match[2]})", text)
    return text
