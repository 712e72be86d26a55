"""A run that resumes goes on as if it had never stopped, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .policy.launching import launch
from .policy.oracle import write_model

Results = dict[str, Any]

WORKER = Path(__file__).parent / "policy" / "resume_worker.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """What `resume_worker.py` found, by the number of ranks; two ranks also try what one wrote."""
    root = tmp_path_factory.mktemp("resume")
    write_model(root / "models" / "untied", tied=False, seed=0)
    found = {}
    for ranks in (1, 2):
        out = root / f"{ranks}_ranks"
        out.mkdir()
        foreign = [str(root / "1_ranks" / "checkpoints")] if ranks == 2 else []
        launch(WORKER, str(root / "models"), str(out), *foreign, ranks=ranks, timeout=240)
        found[ranks] = torch.load(out / "results.pt", weights_only=False)
    return found


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def results(both: dict[int, Results], ranks: int) -> Results:
    return both[ranks]


def equal(a: Any, b: Any) -> bool:
    """Bit for bit, through nested containers of tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_without_a_checkpoint_there_is_nothing_to_load(results: Results) -> None:
    assert results["missing"] == 0


@pytest.mark.parametrize("part", ["order", "totals", "version", "optimizer_steps", "predictor", "weights"])
def test_everything_comes_back(results: Results, part: str) -> None:
    assert results["step"] == 2
    assert equal(results["loaded"][part], results["saved"][part])
    assert not equal(results["fresh"][part], results["saved"][part])


def test_generators_go_on_where_each_rank_was(results: Results, ranks: int) -> None:
    draws = [step["draws"] for step in results["before"] + results["on"]]
    assert [step["draws"] for step in results["again"]] == draws[2:]
    assert len({mine for step in draws for mine in step}) == 4 * ranks  # no rank draws what another drew


def test_two_more_updates_are_bit_equal(results: Results) -> None:
    for again, on in zip(results["again"], results["on"], strict=True):
        assert equal(again, on)
        assert on["learned"]["grad_norm"] > 0
    assert (
        results["on"][0]["learned"]["learning_rate"] < results["on"][1]["learned"]["learning_rate"]
    )  # warm-up
    assert equal(results["again_state"], results["on_state"])
    assert not equal(results["on_state"]["weights"], results["saved"]["weights"])


def test_one_ranks_checkpoint_is_refused_on_two(both: dict[int, Results]) -> None:
    for kind, message in both[2]["foreign"]:
        assert kind == "CheckpointError"
        assert "step_2 was written by 1 ranks, this run has 2" in message


def test_another_number_of_ranks_is_refused(both: dict[int, Results]) -> None:
    ((kind, message),) = both[1]["other"]
    assert kind == "CheckpointError"
    assert "written by 4 ranks, this run has 1" in message


def test_a_checkpoint_that_is_gone_is_named(both: dict[int, Results]) -> None:
    ((kind, message),) = both[1]["gone"]
    assert kind == "CheckpointError"
    assert "step_7 cannot be read" in message


def test_latest_points_to_whole_checkpoints_only(both: dict[int, Results]) -> None:
    crashes = both[1]["crashes"]
    assert crashes["one"] == ("step_1", ["step_1"], [1])
    assert crashes["before the pointer"] == ("step_1", ["step_1", "step_2"], [1, 2])
    assert crashes["half"] == ("step_1", ["step_1", "step_2", "step_3"], [1, 2])
    assert crashes["loaded"] == 1


def test_the_newest_are_kept_and_leftovers_go(both: dict[int, Results]) -> None:
    """Half of step 3, and a step 9 from before the resume, must neither stay nor push out what is needed."""
    crashes = both[1]["crashes"]
    assert crashes["step 4"] == ("step_4", ["step_2", "step_4"], [2, 4])
    assert crashes["step 5"] == ("step_5", ["step_4", "step_5"], [4, 5])
    assert crashes["step 6"] == ("step_6", ["step_5", "step_6"], [5, 6])
    assert crashes["loaded again"] == 6
