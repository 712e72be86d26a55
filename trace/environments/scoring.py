"""Answer scoring: SQuAD normalisation, exact match, token F1, and the two binary rewards made of them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str) -> str:
    """SQuAD normalisation: lower case, ASCII punctuation, articles, white space, in that order."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, golds: Iterable[str]) -> float:
    """1.0 if the normalised prediction equals a normalised gold, else 0.0.

    Where both sides normalise to nothing ("The" and "A", "?" and "!") SQuAD's rule would call them equal;
    here such pairs are compared as lower-cased text.
    """
    return float(any(_same(prediction, gold) for gold in golds))


def _same(prediction: str, gold: str) -> bool:
    p, g = normalize_answer(prediction), normalize_answer(gold)
    if not p and not g:
        p, g = prediction.strip().lower(), gold.strip().lower()
    return p == g


def token_f1(prediction: str, golds: Iterable[str]) -> float:
    """Largest token F1 over the golds, in [0, 1].

    HotpotQA's rule holds: when exactly one side is yes / no / noanswer, or they differ, that pair counts 0.
    """
    return max((_f1(prediction, gold) for gold in golds), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    p, g = normalize_answer(prediction), normalize_answer(gold)
    if p != g and (p in _CLOSED_ANSWERS or g in _CLOSED_ANSWERS):
        return 0.0
    p_tokens, g_tokens = p.split(), g.split()
    common = sum((Counter(p_tokens) & Counter(g_tokens)).values())
    return 2.0 * common / (len(p_tokens) + len(g_tokens)) if common else 0.0


def em_or_f1_reward(prediction: str, golds: Iterable[str], f1_threshold: float = 0.3) -> float:
    """1.0 if exact match or token F1 >= ``f1_threshold`` with any gold, else 0.0 (the paper's QA reward)."""
    golds = tuple(golds)
    return float(exact_match(prediction, golds) == 1.0 or token_f1(prediction, golds) >= f1_threshold)


def reward_function(name: str, f1_threshold: float = 0.3) -> Callable[[str, Iterable[str]], float]:
    """The reward called ``name``: ``"em_or_f1"`` or ``"exact_match"``.

    Raises ValueError for another name or a threshold outside (0, 1]: at 0 every answer would be right.
    """
    if not 0.0 < f1_threshold <= 1.0:
        raise ValueError(f"f1_threshold must be in (0, 1], got {f1_threshold}")
    if name == "exact_match":
        return exact_match
    if name == "em_or_f1":
        return lambda prediction, golds: em_or_f1_reward(prediction, golds, f1_threshold)
    raise ValueError(f"unknown reward {name!r}: choose 'em_or_f1' or 'exact_match'")
