"""Figures by hand, and the bootstrap against one that is written out."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl.evaluation.figures import (
    Estimate,
    average,
    figures,
    interval,
    per_question,
    resampled_means,
    score_table,
)
from trace_rl.evaluation.records import Key, Record
from trace_rl.evaluation.table import markdown


def record(task: str, sample: int, reward: float, **others: Any) -> Record:
    return Record(task, sample, "made", "Who?", ("x",), "", reward, **{"outcome": "answer"} | others)


def table_of(*records: Record) -> dict[Key, Record]:
    return {one.key: one for one in records}


BY_HAND = table_of(
    record("a", 0, 1.0, scores={"f1": 1.0}, official={"m": 0.5}, turns=2, tool_calls=1, generated_tokens=10),
    record(
        "a", 1, 0.0, scores={"f1": 0.2}, official={"m": 0.0}, turns=4, invalid_turns=3, generated_tokens=30
    ),
    record("b", 0, 0.0, official={"m": 0.0}, outcome="truncated", truncation="context_limit", turns=1),
    record("b", 1, 0.0, official={"m": 0.0}, outcome="tool_error", error="down", turns=1, tool_calls=1),
    record("c", 0, 0.0, official={"m": 0.0}, outcome="too_long"),
    record("c", 1, 1.0, scores={"f1": 0.9}, official={"m": 1.0}, turns=2, generated_tokens=8),
)


def test_by_hand() -> None:
    found, means = figures(BY_HAND, ["a", "b", "c"], samples=2, resamples=50, seed=[0])
    assert (found.questions, found.samples) == (3, 2)
    assert {name: one.mean for name, one in found.scores.items()} == pytest.approx(
        {
            "success": (0.5 + 0 + 0.5) / 3,
            "f1": (0.6 + 0 + 0.45) / 3,
            "m": (0.25 + 0 + 0.5) / 3,
            "pass@2": 2 / 3,
        }
    )
    assert found.rollouts == pytest.approx(
        {
            "answered": 3 / 6,
            "turns": 10 / 6,
            "tool_calls": 2 / 6,
            "generated_tokens": 48 / 6,
            "invalid": 3 / 10,
            "truncated": 1 / 6,
            "too_long": 1 / 6,
            "tool_errors": 1 / 6,
        }
    )
    assert means.keys() == found.scores.keys()
    for name, one in found.scores.items():
        assert (one.low, one.high) == interval(means[name])


def test_one_sample_has_no_pass_at_k() -> None:
    assert set(per_question(score_table(BY_HAND, ["a", "b"], 1))) == {"success", "f1", "m"}


def test_a_metric_of_some_questions_only_is_not_averaged_over_all() -> None:
    other = table_of(record("d", 0, 1.0, official={"n": 1.0}, scores={"n": 1.0}))
    assert set(score_table(BY_HAND | other, ["a", "d"], 1)) == {"success", "f1"}
    assert set(score_table(other, ["d"], 1)) == {"success", "n"}


def test_an_expected_score_that_nobody_has_is_zero() -> None:
    unanswered = table_of(record("a", 0, 0.0, outcome="no_answer"), record("b", 0, 0.0, outcome="truncated"))
    table = score_table(unanswered, ["a", "b"], 1, ["f1"])
    assert {name: values.tolist() for name, values in table.items()} == {
        "success": [[0.0], [0.0]],
        "f1": [[0.0], [0.0]],
    }


def test_a_missing_rollout_is_an_error() -> None:
    with pytest.raises(KeyError):
        score_table(BY_HAND, ["a"], 3)


def bootstrap(values: list[float], resamples: int, rng: random.Random) -> list[float]:
    return [sum(rng.choice(values) for _ in values) / len(values) for _ in range(resamples)]


def test_bootstrap_agrees_with_a_plain_one() -> None:
    rng = random.Random(7)
    values = [float(rng.random() < 0.3) for _ in range(60)]
    plain = sorted(bootstrap(values, 20_000, rng))
    means = resampled_means({"x": np.array(values)}, 20_000, [1])["x"]
    assert interval(means) == pytest.approx((plain[500], plain[19_500]), abs=0.018)  # one question is 0.0167
    assert means.mean() == pytest.approx(np.mean(values), abs=0.002)
    assert means.std() == pytest.approx(np.std(values) / 60**0.5, rel=0.03)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(0, 9))
def test_bootstrap_holds_its_questions_together(values: list[float], seed: int) -> None:
    x = np.array(values)
    means = resampled_means({"x": x, "opposite": 1 - x, "none": np.zeros_like(x)}, 40, [seed])
    np.testing.assert_allclose(means["opposite"], 1 - means["x"], atol=1e-12)  # the same draws for all scores
    assert not means["none"].any()
    assert (means["x"] >= x.min() - 1e-12).all()
    assert (means["x"] <= x.max() + 1e-12).all()
    np.testing.assert_allclose(resampled_means({"x": x}, 40, [seed])["x"], means["x"], atol=1e-12)


def test_average_counts_sets_not_questions() -> None:
    small, _ = figures(BY_HAND, ["a"], 1, 10, [0])
    large, _ = figures(BY_HAND, ["b", "c"], 1, 10, [1])
    resampled = [
        {"success": np.array([1.0, 0.0, 0.5]), "m": np.zeros(3)},
        {"success": np.array([0.0, 0.0, 0.5]), "m": np.zeros(3)},
    ]
    found = average([small, large], resampled)
    assert found["success"].mean == 0.5  # 1 of 1 and 0 of 2
    assert (found["success"].low, found["success"].high) == interval(np.array([0.5, 0.0, 0.5]))
    assert set(found) == {"success", "m"}  # only `a` has an f1


def test_average_of_independent_sets_is_narrower_than_each() -> None:
    rows = table_of(*(record(f"q{i}", 0, float(i % 2)) for i in range(100)))
    sets = [figures(rows, [f"q{i}" for i in range(100)], 1, 2000, [0, part]) for part in range(4)]
    whole = average([one for one, _ in sets], [means for _, means in sets])["success"]
    each = sets[0][0].scores["success"]
    assert (whole.high - whole.low) == pytest.approx((each.high - each.low) / 2, rel=0.1)


def test_table() -> None:
    one, _ = figures(BY_HAND, ["a", "b", "c"], 2, 50, [0])
    text = markdown(
        {"first": one, "second": one}, {"second": {"part": one}}, {"success": Estimate(0.5, 0.25, 1)}
    )
    lines = text.splitlines()
    assert lines[2] == "| set | questions | success (avg@2) | f1 | pass@2 | published metric |"
    first, second, part, over = lines[4:8]
    assert first.startswith("| first | 3 | 33.3 [")
    assert second.replace("second", "first") == first == part.replace("– part", "first")
    assert over == "| average of sets |  | 50.0 [25.0, 100.0] | – | – | – |"
    assert "| first | 6 | 50.0 | 30.0 | 16.7 | 16.7 | 16.7 | 1.67 | 0.33 | 8.0 |" in lines
