"""Scores worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.environments.scoring import (
    em_or_f1_reward,
    exact_match,
    normalize_answer,
    reward_function,
    token_f1,
)

PAIRS = [  # prediction, golds, exact match, F1, reward at 0.3
    ("Rush", ("Rush",), 1, 1.0, 1),
    ("rush", ("Rush",), 1, 1.0, 1),
    ("  Rush. ", ("Rush",), 1, 1.0, 1),
    ("The Rush", ("Rush",), 1, 1.0, 1),
    ("an apple", ("the apple",), 1, 1.0, 1),
    ("a", ("the",), 0, 0.0, 0),
    ("A", ("A",), 1, 0.0, 1),
    ("?", ("!",), 0, 0.0, 0),
    ("Rush", ("Queen",), 0, 0.0, 0),
    ("Queen", ("Rush", "Queen"), 1, 1.0, 1),
    ("NYC", ("New York City", "NYC", "New York"), 1, 1.0, 1),
    ("New York", ("New York City",), 0, 0.8, 1),
    ("New York City", ("Greenwich Village, New York City",), 0, 0.75, 1),
    ("the city of New York", ("New York",), 0, 2 * 2 / 6, 1),
    ("one two three four five six gold", ("gold",), 0, 2 / 8, 0),
    ("one two three four five gold", ("gold",), 0, 2 / 7, 0),
    ("one two three four gold", ("gold",), 0, 2 / 6, 1),
    ("yes", ("yes",), 1, 1.0, 1),
    ("Yes.", ("yes",), 1, 1.0, 1),
    ("no", ("yes",), 0, 0.0, 0),
    ("yes it is", ("yes",), 0, 0.0, 0),
    ("no", ("no way",), 0, 0.0, 0),
    ("no way", ("no",), 0, 0.0, 0),
    ("noanswer", ("noanswer",), 1, 1.0, 1),
    ("noanswer given", ("noanswer",), 0, 0.0, 0),
    ("yes", ("yes it is", "yes"), 1, 1.0, 1),
    ("Chief of Protocol", ("chief-of-protocol",), 0, 0.0, 0),
    ("U.S.A.", ("USA",), 1, 1.0, 1),
    ("it's", ("its",), 1, 1.0, 1),
    ("Schindler's List", ("Schindlers List",), 1, 1.0, 1),
    ("1,000", ("1000",), 1, 1.0, 1),
    ("1974", ("1975",), 0, 0.0, 0),
    ("Alû", ("alû",), 1, 1.0, 1),
    ("ALÛ", ("alû",), 1, 1.0, 1),
    ("Alu", ("Alû",), 0, 0.0, 0),
    ("東京", ("東京",), 1, 1.0, 1),
    ("1914–1918", ("1914-1918",), 0, 0.0, 0),
    ("New\u00a0York", ("New York",), 1, 1.0, 1),
    ("new\n\tyork", ("New York",), 1, 1.0, 1),
    ("theatre", ("atre",), 0, 0.0, 0),
    ("The-The", ("thethe",), 1, 1.0, 1),
    ("dog dog", ("dog",), 0, 2 / 3, 1),
    ("dog cat dog", ("dog dog bird",), 0, 2 * 2 / 6, 1),
    ("", ("Rush",), 0, 0.0, 0),
    ("Rush", (), 0, 0.0, 0),
]


@pytest.mark.parametrize(("prediction", "golds", "em", "f1", "reward"), PAIRS)
def test_by_hand(prediction, golds, em, f1, reward):
    assert exact_match(prediction, golds) == em
    assert token_f1(prediction, golds) == pytest.approx(f1)
    assert em_or_f1_reward(prediction, golds) == reward
    assert reward_function("em_or_f1")(prediction, golds) == reward
    assert reward_function("exact_match")(prediction, golds) == em


def test_normalisation_order():
    """Punctuation goes before articles: "a.m." is the word "am", not an article and an m."""
    assert normalize_answer("A.M.") == "am"
    assert normalize_answer("The, an (a) cat!") == "cat"
    assert normalize_answer("An Apple a Day") == "apple day"


def test_threshold_is_inclusive():
    golds = ("gold " + "x y z u v w s",)
    assert token_f1("gold p q r o n m l k j i h", golds) == pytest.approx(0.1)
    assert em_or_f1_reward("gold k l x m n o p q r i h", golds, f1_threshold=0.2) == 1.0
    assert token_f1("gold k l x m n o p q r i h", golds) == 0.2
    assert em_or_f1_reward("gold k l x m n o p q r i h", golds, f1_threshold=0.21) == 0.0


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1])
def test_thresholds_that_mean_nothing(threshold):
    with pytest.raises(ValueError, match="f1_threshold"):
        reward_function("em_or_f1", threshold)


def test_unknown_reward():
    with pytest.raises(ValueError, match="unknown reward 'bleu'"):
        reward_function("bleu")


@given(st.text(), st.lists(st.text(), max_size=3))
def test_ranges(prediction, golds):
    assert exact_match(prediction, golds) in (0.0, 1.0)
    assert 0.0 <= token_f1(prediction, golds) <= 1.0
    assert em_or_f1_reward(prediction, golds) >= exact_match(prediction, golds)
    assert exact_match(prediction, [*golds, prediction]) == 1.0
    assert normalize_answer(normalize_answer(prediction)) == normalize_answer(prediction)
