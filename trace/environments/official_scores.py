"""Each data set's own published metric, value for value as its official scorer computes it.

They differ from the common ones of :mod:`~trace_rl.environments.scoring` in corners: two texts that
normalise to nothing are equal here, MuSiQue has no rule for yes and no. Names carry their set's, so that
figures of several sets can lie side by side and never pass for the common ones.

Sources: hotpotqa/hotpot ``hotpot_evaluate_v1.py``; Alab-NII/2wikimultihop
``2wikimultihop_evaluate_v1.1.py``; StonyBrookNLP/musique ``metrics/answer.py``; PeterGriffinJin/Search-R1
``verl/utils/reward_score/qa_em.py``; dongguanting/ARPO ``verl/utils/reward_score/deep_research.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from .scoring import normalize_answer, token_f1

Score = Callable[[str, str], float]
"""``score(prediction, gold)``, in [0, 1]."""


def official_scores(source: str, prediction: str, golds: Iterable[str]) -> dict[str, float]:
    """The published metrics of the set called ``source``, each in [0, 1]; ``{}`` for any other source.

    The best value over the golds counts, metric by metric; without golds it is 0.

    - ``"hotpotqa"``, ``"2wikimultihopqa"``: ``<source>_em`` and ``<source>_f1``; F1 is 0 for a pair that
      differs and has yes, no or noanswer on a side. 2WikiMultiHopQA's golds are the answer and its aliases.
    - ``"musique"``: ``musique_em`` and ``musique_f1``; F1 without that rule, 1 if neither side has a token.
    - ``"bamboogle"``: ``bamboogle_accuracy``. Its authors publish an accuracy without a scorer; this is
      normalised exact match, which Search-R1 and later papers report for the set.
    - ``"nq"``, ``"triviaqa"``, ``"popqa"``, ``"web_questions"``, ``"search_r1"``: ``search_r1_em`` and
      ``search_r1_sub_em`` (a normalised gold occurs in the normalised prediction).
    - ``"DR_grpo_mix"`` (ARPO's rows): ``arpo_f1``, the reward's F1, HotpotQA's by definition; of
      mathematics rows as well.
    """
    scores = _SCORES.get(source, {})
    golds = tuple(golds)
    return {name: max((score(prediction, g) for g in golds), default=0.0) for name, score in scores.items()}


def _em(prediction: str, gold: str) -> float:
    return float(normalize_answer(prediction) == normalize_answer(gold))


def _sub_em(prediction: str, gold: str) -> float:
    return float(normalize_answer(gold) in normalize_answer(prediction))


def _hotpot_f1(prediction: str, gold: str) -> float:
    return token_f1(prediction, (gold,))


def _musique_f1(prediction: str, gold: str) -> float:
    p, g = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not p or not g:
        return float(p == g)
    return 2.0 * sum((Counter(p) & Counter(g)).values()) / (len(p) + len(g))


_SEARCH_R1: dict[str, Score] = {"search_r1_em": _em, "search_r1_sub_em": _sub_em}
_SCORES: dict[str, dict[str, Score]] = {
    "hotpotqa": {"hotpotqa_em": _em, "hotpotqa_f1": _hotpot_f1},
    "2wikimultihopqa": {"2wikimultihopqa_em": _em, "2wikimultihopqa_f1": _hotpot_f1},
    "musique": {"musique_em": _em, "musique_f1": _musique_f1},
    "bamboogle": {"bamboogle_accuracy": _em},
    "DR_grpo_mix": {"arpo_f1": _hotpot_f1},
    **dict.fromkeys(("nq", "triviaqa", "popqa", "web_questions", "search_r1"), _SEARCH_R1),
}
