"""The benchmarks run and write well-formed rows; how fast they are is not tested here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = ("subject", "workload", "method", "phase")
MACHINE = {"device", "cpu", "cores", "threads", "torch", "triton", "transformers", "python", "driver"}

# Two steps of a run: trees of four prompts, of which the second step has the last one.
WRITE_RUN = """
import json, sys
from pathlib import Path
from bench.trees import SMALL, made_up_trees
lines = [tree.to_json() + chr(10) for tree in made_up_trees(SMALL, 4, 1000, seed=3)]
ends = [len("".join(lines[:3])), len("".join(lines))]
folder = Path(sys.argv[1])
(folder / "trees.jsonl").write_text("".join(lines) + "unfinished")
rows = [{"step": step, "trees_end": end} for step, end in enumerate(ends, start=1)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + chr(10) for row in rows))
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "bench", "--device", "cpu", "--threads", "1", *arguments)


def rows(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(file.read_text())
    for row in found:
        assert all(isinstance(row[name], str) and row[name] for name in TEXT), row
        assert (row["median_ms"] is None) == (row["skipped"] is not None), row
        assert row["median_ms"] is None or row["median_ms"] > 0, row
        assert (row["runs"] == 0) == (row["skipped"] is not None), row
        assert (row["ratio"] is None) == (row["peer"] is None), row
        assert row["ratio"] is None or row["ratio"] > 0, row
        assert row["peak_bytes"] is None or row["peak_bytes"] >= 0, row
        assert set(row["machine"]) == MACHINE, row
        assert row["machine"]["cores"] >= row["machine"]["threads"] >= 1, row
    keys = [tuple(row[name] for name in TEXT) for row in found]
    assert len(set(keys)) == len(keys)
    return found


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """`python -m bench` alone, from the root: all subjects."""
    file = tmp_path_factory.mktemp("bench") / "rows.json"
    result = bench("--json", str(file))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("| subject")
    return rows(file)


def test_alone_it_runs_all_subjects(everything: list[dict[str, Any]]) -> None:
    files = {file.stem for file in (ROOT / "bench").glob("*.py") if "def add_arguments" in file.read_text()}
    assert {row["subject"] for row in everything} == files


def test_layout_results_are_right(everything: list[dict[str, Any]]) -> None:
    found = [row for row in everything if row["subject"] == "layout"]
    assert {"TreeLayout.from_segments", "cut_forest", "allocate_roots", "allocate_prefixes"} <= {
        row["method"] for row in found
    }
    assert [row["error"] for row in found] == [0.0] * len(found)


def test_packed_and_flat_passes_agree(everything: list[dict[str, Any]]) -> None:
    found = [row for row in everything if row["subject"] == "packed_pass"]
    methods, phases = {row["method"] for row in found}, {row["phase"] for row in found}
    assert methods == {"packed", "flat_single", "flat_padded"}
    assert phases == {"prepare", "forward", "backward", "pass"}
    assert len(found) == len(methods) * len(phases)
    (packed,) = [row for row in found if row["method"] == "packed" and row["phase"] == "pass"]
    figures = packed["figures"]
    assert packed["error"] < 1e-5
    assert figures["gradient_error"] < 1e-4
    assert figures["token_ratio"] == pytest.approx(figures["flat_tokens"] / figures["packed_tokens"])
    assert figures["token_ratio"] > 1.5
    assert figures["time/token_ratio"] == pytest.approx(figures["time_ratio"] / figures["token_ratio"])


def test_packed_pass_on_workloads(tmp_path: Path) -> None:
    options = ("packed_pass", "--quick", "--runs", "1", "--json", str(tmp_path / "rows.json"))
    result = bench(*options, "--workloads", "P512 N16 R64", "tau2")
    assert result.returncode == 0, result.stderr
    packed = [
        row for row in rows(tmp_path / "rows.json") if (row["method"], row["phase"]) == ("packed", "pass")
    ]
    assert [row["workload"] for row in packed] == ["tiny, P512 N16 R64-512 /64", "tiny, tau2-like /64"]
    for row in packed:
        assert row["error"] < 1e-5
        assert row["figures"]["gradient_error"] < 1e-4
        assert row["figures"]["packed_tokens"] == row["figures"]["micro_batch_tokens"]
    assert packed[1]["figures"]["token_ratio"] == pytest.approx(8.4, rel=0.1)

    result = bench("packed_pass", "--quick", "--workloads", "no such")
    assert result.returncode == 1
    assert "--workloads 'no such'" in result.stderr


def test_trees_of_one_step_of_a_run(tmp_path: Path) -> None:
    assert python("-c", WRITE_RUN, str(tmp_path)).returncode == 0
    options = ("packed_pass", "--quick", "--runs", "1", "--trees", str(tmp_path / "trees.jsonl"))

    result = bench(*options, "--step", "1", "--json", str(tmp_path / "rows.json"))
    assert result.returncode == 0, result.stderr
    assert {row["workload"] for row in rows(tmp_path / "rows.json")} == {
        f"tiny, {tmp_path.name} step 1, 3 prompts"
    }

    result = bench(*options, "--step", "3")
    assert result.returncode == 1
    assert "--step 3" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_folder_of_ours_hides_a_library(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; assert '' in sys.path, 'the root must be on the path, or nothing is tested';"
        "sys.argv = ['bench', '--help']\n"
        "try: runpy.run_module('bench', run_name='__main__', alter_sys=True)\n"
        "except SystemExit: pass\n"
        "import trace; print(trace.__file__)"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert not Path(result.stdout.splitlines()[-1]).is_relative_to(ROOT / "trace")
