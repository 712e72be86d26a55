"""A sampler with other weights is found out, on every rank, whichever rank's engine it is."""

from __future__ import annotations

from typing import Any

import pytest

Results = dict[str, Any]


@pytest.fixture
def synced(results: Results, ranks: int) -> Results:
    found: Results = results["synced"]
    assert all(len(outcomes) == ranks for outcomes in found.values())
    return found


def test_a_synced_engine_passes(synced: Results) -> None:
    assert set(synced["load"]) == {None}
    for mean, largest in synced["good"]:
        assert 0 < mean <= largest < 1e-5
    assert len(set(synced["good"])) == 1  # the same figures everywhere


def test_an_engine_that_kept_its_weights_is_found_out(synced: Results) -> None:
    for kind, message in synced["never loaded"]:
        assert kind == "SyncError"
        assert "allowed 0.001" in message


def test_one_stale_engine_stops_all_ranks_with_the_figures(synced: Results, ranks: int) -> None:
    for kind, message in synced["stale"]:
        assert kind == "SyncError"
        assert "version 7" in message
        assert "largest difference 0.5 nats" in message
        assert "allowed 0.001 in float32" in message
        assert "sync.tolerance" in message
    assert len(set(synced["stale"])) == 1


def test_the_users_tolerance_counts(synced: Results) -> None:
    for mean, largest in synced["tolerated"]:
        assert mean <= largest
        assert largest == pytest.approx(0.5, abs=1e-4)


def test_nan_is_no_agreement(synced: Results) -> None:
    for kind, message in synced["nan"]:
        assert kind == "SyncError"
        assert "nan nats" in message


@pytest.mark.parametrize(
    ("case", "words"), [("dies", "died of thirst"), ("does not load", "no room for the weights")]
)
def test_an_engines_failure_surfaces_on_all_ranks(synced: Results, ranks: int, case: str, words: str) -> None:
    *others, (kind, message) = synced[case]
    assert (kind, words in message) == ("EngineError", True)
    for other_kind, other_message in others:
        assert other_kind == "RankError"
        assert f"rank {ranks - 1} failed" in other_message
        assert words in other_message
