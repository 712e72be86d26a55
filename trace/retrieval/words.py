"""From text to the words that both indexes count."""

from __future__ import annotations

import re
import unicodedata

MAX_QUERY_WORDS = 256
"""Of very long queries only so many words count."""

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Lower-cased words without accents; no stop words are dropped, titles like "The Who" need them."""
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return _WORD.findall(text.lower())


def document_words(title: str, text: str, title_weight: int) -> list[str]:
    """All words of a passage, those of the title ``title_weight`` times."""
    return words(title) * title_weight + words(text)
