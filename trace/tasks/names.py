"""Fictional, pronounceable, single-word names."""

from __future__ import annotations

import random
from collections.abc import Collection

_ONSETS = (*"bdfghjklmnprstvz", "br", "dr", "gr", "kl", "pr", "st", "tr")
_VOWELS = tuple("aeiou")
_CODAS = tuple("klmnrstx")


def make_names(n: int, rng: random.Random, reserved: Collection[str] = ()) -> list[str]:
    """``n`` different capitalised names of two syllables ("Dovik"), none a reserved word in any case.

    Raises ValueError if there are not that many names.
    """
    possible = len(_ONSETS) ** 2 * len(_VOWELS) ** 2 * len(_CODAS)
    if n > possible // 2:
        raise ValueError(f"at most {possible // 2} names can be made, got {n}")
    forbidden = {word.lower() for word in reserved}
    names: dict[str, None] = {}
    while len(names) < n:
        parts = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS)
        name = "".join(rng.choice(part) for part in parts)
        if name not in forbidden:
            names[name.capitalize()] = None
    return list(names)
