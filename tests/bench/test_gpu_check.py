"""The GPU check: its dry run on the CPU, and what it does with late, failing and spilling candidates."""

import json
import multiprocessing
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.gpu_pool import side_by_side
from bench.gpu_tests import outcome
from bench.gpu_tiles import Trial, best
from bench.workloads import made_up
from trace_kernels.device.tiles import Tile

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a dry run of the GPU check filled."""
    folder = tmp_path_factory.mktemp("gpu_check")
    environment = {
        "OUT": str(folder),
        "PYTHON": sys.executable,
        "PATH": "/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
    }
    script = [ROOT / "bench/gpu_check.sh", "--dry-run"]
    result = subprocess.run(script, env=environment, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "FAILED" not in result.stdout, (folder / "log.txt").read_text()[-4000:]
    return folder


def test_gpu_check_leaves_a_table_and_its_files(dry_run: Path) -> None:
    assert {file.name for file in dry_run.iterdir()} == {
        *(
            "results.json",
            "tiles.json",
            "rows.json",
            "rows.csv",
            "tree_attention.svg",
            "table.txt",
            "log.txt",
        ),
    }
    text = (dry_run / "table.txt").read_text()
    for part in (
        "interpreted",
        "benchmarks",
        "tests: ",
        "parity ",
        "tiles ",
        "tree_attention ",
        "score_anchors ",
    ):
        assert f"\n{part}" in f"\n{text}"
    assert "no result" not in text


def test_gpu_check_finds_every_op_right(dry_run: Path) -> None:
    results = json.loads((dry_run / "results.json").read_text())
    assert results["tests"]["passed"] > 0
    assert not results["tests"]["failed"]
    for finding in results["parity"]:
        assert finding["wrong"] == []
        assert set(finding["errors"]) == {"out", "lse", "dq", "dk", "dv"}
    assert max(results["parity"][1]["ratios"].values()) > 0
    assert len(results["ops"]) == 7
    assert all(finding["wrong"] == [] and finding["errors"] for finding in results["ops"])
    best = json.loads((dry_run / "tiles.json").read_text())["best"]
    assert set(best["32 D32"]) == {"forward", "dq", "dkdv"}


def test_gpu_check_measures_every_op(dry_run: Path) -> None:
    rows = json.loads((dry_run / "rows.json").read_text())
    measured = {row["subject"] for row in rows if row["skipped"] is None}
    assert measured == {"edge_logprobs", "score_anchors", "tree_attention", "tree_reductions"}
    (row,) = [row for row in rows if (row["method"], row["phase"]) == ("triton", "pass")]
    assert row["error"] < 1e-5
    assert row["workload"].startswith(made_up()[3].name)


def test_gpu_check_stays_under_seven_minutes() -> None:
    script = (ROOT / "bench/gpu_check.sh").read_text()
    limits = re.findall(r"^ *(?:check \w+ \d+|part table) (\d+).*?(&?)$", script, re.MULTILINE)
    together = [int(limit) for limit, beside in limits if beside]
    alone = [int(limit) for limit, beside in limits if not beside]
    assert len(together) == 3
    assert len(alone) == 8
    assert max(together) + sum(alone) + 3 * (1 + len(alone)) < 410


def test_gpu_check_reads_verdicts_of_pytest() -> None:
    text = (
        "tests/kernels/test_a.py::test_x[a b: 1..2] PASSED [ 50%]\n"
        "tests/kernels/test_a.py::test_y FAILED [100%]\n"
        "tests/kernels/test_b.py::test_z SKIPPED (needs a GPU) [100%]\n"
        "____ ERROR collecting tests/kernels/test_c.py ____\n"
        "FAILED tests/kernels/test_a.py::test_y - assert 0\n"
    )
    found = outcome(text, 2)
    assert found[:2] == (1, 1)
    assert found.failed == ["ERROR collecting tests/kernels/test_c.py", "tests/kernels/test_a.py::test_y"]
    assert found.unfinished == 2


def test_no_late_worker_lives_on() -> None:
    assert side_by_side(eval, ["1 / 0", "6 * 7"], time.monotonic() + 300, workers=2) == [None, 42]
    assert side_by_side(eval, ["__import__('time').sleep(600)"], time.monotonic() + 2) == [None]
    assert not multiprocessing.active_children()


def test_best_tiles_spill_nothing() -> None:
    def trial(tile: Tile, ms: float | None, words: int, own: bool = False) -> Trial:
        return Trial(16, 128, "dq", tile, own, ms, 128, words)

    own, spilling, better = Tile(64, 64, 4, 3), Tile(128, 128, 8, 3), Tile(128, 64, 8, 3)
    trials = [
        trial(own, 4.0, 0, own=True),
        trial(spilling, 1.0, 8),
        trial(better, 2.0, 0),
        trial(own, None, 0),
    ]
    found = best(trials)["16 D128"]["dq"]
    assert (found["tile"], found["gain"]) == (list(better), 2.0)
    assert best(trials[1:2])["16 D128"]["dq"]["tile"] == list(spilling)
