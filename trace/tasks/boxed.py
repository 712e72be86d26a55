r"""Finding ``\boxed{...}``, the place where mathematical answers stand in solutions and in generated text."""

from __future__ import annotations

import re

# An escaped pair is one piece: the braces of "\{1, 2\}" are text, and "\\boxed" is a line break and a word.
_PIECE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What stands in the ``\boxed{...}`` that opens last, stripped; None without a closed one.

    Of nested boxes that is the inner one. Takes time linear in the text, whatever it is.
    """
    boxes: list[
        int | None
    ] = []  # per brace open here: where its box's content starts, None for a plain brace
    found: tuple[int, int] | None = None
    for piece in _PIECE.finditer(text):
        if piece[0].startswith("\\boxed"):
            boxes.append(piece.end())
        elif piece[0] == "{":
            boxes.append(None)
        elif piece[0] == "}" and boxes:
            start = boxes.pop()
            if start is not None and (found is None or start > found[0]):
                found = start, piece.start()
    return None if found is None else text[slice(*found)].strip()
