"""Values worked out by hand; each was confirmed with the official scorer of every set it is asserted for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.environments.official_scores import official_scores
from trace_rl.environments.scoring import exact_match, token_f1

SOURCES = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "nq", "DR_grpo_mix")

ONE_GOLD = [  # prediction, gold, exact match, F1 of HotpotQA, F1 of MuSiQue, gold in prediction
    ("Rush", "Rush", 1, 1.0, 1.0, 1),
    ("rush!", "Rush", 1, 1.0, 1.0, 1),
    ("The Beatles", "Beatles", 1, 1.0, 1.0, 1),
    ("an apple", "The Apple.", 1, 1.0, 1.0, 1),
    ("Rush", "Queen", 0, 0.0, 0.0, 0),
    ("New York", "New York City", 0, 4 / 5, 4 / 5, 0),
    ("New York City", "New York", 0, 4 / 5, 4 / 5, 1),
    ("Greenwich Village, New York City", "New York City", 0, 6 / 8, 6 / 8, 1),
    ("the city of New York", "New York", 0, 4 / 6, 4 / 6, 1),
    ("York New", "New York", 0, 1.0, 1.0, 0),
    ("dog dog", "dog", 0, 2 / 3, 2 / 3, 1),
    ("dog cat dog", "dog dog bird", 0, 4 / 6, 4 / 6, 0),
    ("yes", "yes", 1, 1.0, 1.0, 1),
    ("Yes.", "yes", 1, 1.0, 1.0, 1),
    ("no", "yes", 0, 0.0, 0.0, 0),
    ("yes it is", "yes", 0, 0.0, 2 / 4, 1),
    ("no", "no way", 0, 0.0, 2 / 3, 0),
    ("no way", "no", 0, 0.0, 2 / 3, 1),
    ("I know", "no", 0, 0.0, 0.0, 1),
    ("noanswer", "noanswer", 1, 1.0, 1.0, 1),
    ("noanswer given", "noanswer", 0, 0.0, 2 / 3, 1),
    ("No answer", "noanswer", 0, 0.0, 0.0, 0),
    ("1,000", "1000", 1, 1.0, 1.0, 1),
    ("1.5 million", "15 million", 1, 1.0, 1.0, 1),
    ("-5", "5", 1, 1.0, 1.0, 1),
    ("1974", "1975", 0, 0.0, 0.0, 0),
    ("in 1974", "1974", 0, 2 / 3, 2 / 3, 1),
    ("21974", "1974", 0, 0.0, 0.0, 1),
    ("five", "5", 0, 0.0, 0.0, 0),
    ("April 30, 1789", "30 April 1789", 0, 1.0, 1.0, 0),
    ("U.S.A.", "USA", 1, 1.0, 1.0, 1),
    ("A.M.", "am", 1, 1.0, 1.0, 1),
    ("Schindler's List", "Schindlers List", 1, 1.0, 1.0, 1),
    ("Schindler’s List", "Schindler's List", 0, 2 / 4, 2 / 4, 0),
    ("Chief of Protocol", "chief-of-protocol", 0, 0.0, 0.0, 0),
    ("The-The", "thethe", 1, 1.0, 1.0, 1),
    ("theatre", "atre", 0, 0.0, 0.0, 1),
    ("Alu", "Alû", 0, 0.0, 0.0, 0),
    ("ALÛ", "alû", 1, 1.0, 1.0, 1),
    ("東京", "東京", 1, 1.0, 1.0, 1),
    ("1914–1918", "1914-1918", 0, 0.0, 0.0, 0),
    ("new\u00a0york", "New\n York", 1, 1.0, 1.0, 1),
    ("", "Rush", 0, 0.0, 0.0, 0),
    ("Rush", "The", 0, 0.0, 0.0, 1),
    ("A", "The", 1, 0.0, 1.0, 1),
    ("?", "!", 1, 0.0, 1.0, 1),
    ("a yes", "the yes", 1, 1.0, 1.0, 1),
]
MORE_GOLDS = [
    ("NYC", ("New York City", "NYC", "Big Apple"), 1, 1.0, 1.0, 1),
    ("the Big Apple", ("New York City", "NYC", "Big Apple"), 1, 1.0, 1.0, 1),
    ("New York", ("New York City", "NYC", "Big Apple"), 0, 4 / 5, 4 / 5, 0),
    ("NYC in America", ("New York City", "NYC", "Big Apple"), 0, 2 / 4, 2 / 4, 1),
    ("Boston", ("New York City", "NYC", "Big Apple"), 0, 0.0, 0.0, 0),
    ("American", ("United States", "American", "Americans"), 1, 1.0, 1.0, 1),
    ("yes", ("yes it is", "yes"), 1, 1.0, 1.0, 1),
    ("yes it was", ("yes", "yes it is"), 0, 4 / 6, 4 / 6, 1),
    ("291", ("291 episodes", "291"), 1, 1.0, 1.0, 1),
    ("about 291 episodes", ("291 episodes", "291"), 0, 4 / 5, 4 / 5, 1),
]
PAIRS = [(p, (gold,), *values) for p, gold, *values in ONE_GOLD] + MORE_GOLDS


@pytest.mark.parametrize(("prediction", "golds", "em", "hotpot_f1", "musique_f1", "sub_em"), PAIRS)
def test_by_hand(prediction, golds, em, hotpot_f1, musique_f1, sub_em):
    expected = {
        "hotpotqa": {"hotpotqa_em": em, "hotpotqa_f1": hotpot_f1},
        "2wikimultihopqa": {"2wikimultihopqa_em": em, "2wikimultihopqa_f1": hotpot_f1},
        "musique": {"musique_em": em, "musique_f1": musique_f1},
        "bamboogle": {"bamboogle_accuracy": em},
        "nq": {"search_r1_em": em, "search_r1_sub_em": sub_em},
        "DR_grpo_mix": {"arpo_f1": hotpot_f1},
    }
    for source in SOURCES:
        assert official_scores(source, prediction, golds) == pytest.approx(expected[source]), source


def test_each_metric_takes_its_own_best_gold():
    """The gold of the best F1 need not be the one that is found in the prediction."""
    golds = ("x", "a b c d")
    assert official_scores("nq", "x b c d", golds) == {"search_r1_em": 0.0, "search_r1_sub_em": 1.0}
    assert official_scores("musique", "x b c d", golds) == {"musique_em": 0.0, "musique_f1": 6 / 7}


@pytest.mark.parametrize("source", ["triviaqa", "popqa", "web_questions", "search_r1"])
def test_search_r1_scores_its_other_sets_alike(source):
    assert official_scores(source, "in NYC", ("NYC",)) == {"search_r1_em": 0.0, "search_r1_sub_em": 1.0}


@pytest.mark.parametrize("source", ["", "world", "math500", "HotpotQA"])
def test_unknown_source_has_none(source):
    assert official_scores(source, "Rush", ("Rush",)) == {}


@pytest.mark.parametrize("source", SOURCES)
def test_without_golds_nothing_is_right(source):
    assert set(official_scores(source, "Rush", ()).values()) == {0.0}


def test_golds_may_be_an_iterator():
    assert official_scores("hotpotqa", "b", iter(["a", "b"])) == {"hotpotqa_em": 1.0, "hotpotqa_f1": 1.0}


words = st.lists(
    st.sampled_from(["the", "a", "yes", "no", "Rush", "1,000", "é", "?", "noanswer"]), max_size=4
)
texts = st.one_of(words.map(" ".join), st.text(max_size=12))


@given(texts, st.lists(texts, max_size=3))
def test_relations_between_the_metrics(prediction, golds):
    scores: dict[str, float] = {}
    for source in SOURCES:
        scores |= official_scores(source, prediction, golds)
    assert all(0.0 <= value <= 1.0 for value in scores.values())
    assert scores["hotpotqa_f1"] == scores["arpo_f1"] == token_f1(prediction, golds)
    assert scores["musique_f1"] >= max(scores["musique_em"], scores["hotpotqa_f1"])
    assert scores["search_r1_sub_em"] >= scores["search_r1_em"] >= exact_match(prediction, golds)
    assert set(official_scores("musique", prediction, [*golds, prediction]).values()) == {1.0}
