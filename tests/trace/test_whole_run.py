"""The whole loop on its real parts: the deepspeed launcher, ZeRO-3 on two ranks, a vLLM engine each."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_rl.config.load import load_config
from trace_rl.rollout.tree import read_trees

from .launch import ROOT, deepspeed_command, environment, train, write_config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on two ranks, then a third after a resume."""
    folder = tmp_path_factory.mktemp("whole")
    directory = folder / "run"
    config = write_config(folder / "config.yaml", run_dir=str(directory))
    first = train(config, ranks=2)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    resumed = train(config, "--resume", "--set", "steps=3", ranks=2)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + resumed.stderr[-3000:]
    return directory


def rows(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_every_step_is_recorded_once_across_a_resume(run_dir: Path) -> None:
    assert [row["step"] for row in rows(run_dir)] == [1, 2, 3]


def test_the_parts_of_a_step_have_their_times(run_dir: Path) -> None:
    for row in rows(run_dir):
        for part in ("predictor scoring", "predictor update", "log-prob pass", "advantages", "policy update"):
            assert row[f"phase/{part}"] > 0


def test_budget_is_spent_exactly(run_dir: Path) -> None:
    for row in rows(run_dir):
        assert row["ledger/bare_rollouts"] == 12
        assert row["ledger/leaves"] == 24
    assert rows(run_dir)[-1]["num_tokens"] == sum(r["ledger/generated_tokens"] for r in rows(run_dir))


def test_the_ledger_adds_up_with_the_engines_own_counters(run_dir: Path) -> None:
    for row in rows(run_dir):
        differences = {k: v for k, v in row.items() if k.startswith("ledger/engine_minus_ledger/")}
        assert len(differences) == 3
        assert set(differences.values()) == {0.0}


def test_sampler_and_trainer_agree_at_every_step(run_dir: Path) -> None:
    for row in rows(run_dir):
        assert 0 < row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["sync/probe_logp_difference/max"] < 1e-4


def test_the_policy_moves(run_dir: Path) -> None:
    assert any(row["grad_norm"] > 0 for row in rows(run_dir))
    init = AutoModelForCausalLM.from_pretrained(run_dir / "cold_start").state_dict()
    final = AutoModelForCausalLM.from_pretrained(run_dir / "policy").state_dict()
    assert init.keys() == final.keys()
    assert any(not init[name].equal(final[name]) for name in init)


def test_trees_are_whole_and_branch(run_dir: Path) -> None:
    trees = list(read_trees(run_dir / "trees.jsonl"))
    assert sum(len(tree.leaves()) for tree in trees) == 3 * 24
    kinds = [node.kind for tree in trees for node in tree.nodes if node.reward is not None]
    assert kinds.count("continuation") == kinds.count("bare") == 36
    for tree in trees:
        for node in tree.nodes[1:]:
            if node.kind == "continuation":
                assert node.parent > 0  # never from the root: that is stage 1's
    versions = {node.weight_version for tree in trees for node in tree.nodes[1:]}
    assert len(versions) == 3


def test_artefacts(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    expected = {
        "exact_match_before",
        "exact_match_after",
        "effective_ratio_mean",
        "prefix_cache_hit_rate",
        "logprob_diff_max",
        "generated_tokens",
        "wall_s",
        "phase_s",
    }
    assert expected <= summary.keys()
    assert summary["resumed_from_step"] == 2
    assert 0 <= summary["exact_match_before"] <= 1
    assert summary["prefix_cache_hit_rate"] > 0
    assert list((run_dir / "tensorboard").glob("events*"))
    assert load_config(run_dir / "config.yaml").steps == 3
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "policy")
    assert tokenizer.eos_token_id is not None
    assert sorted(p.name for p in (run_dir / "checkpoints").glob("step_*")) == ["step_2", "step_3"]


def test_a_second_run_does_not_overwrite_the_first(run_dir: Path, tmp_path: Path) -> None:
    before = (run_dir / "metrics.jsonl").read_bytes()
    refused = train(write_config(tmp_path / "config.yaml", run_dir=str(run_dir)))
    assert refused.returncode != 0
    assert "--resume" in refused.stderr + refused.stdout
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_a_killed_engine_ends_the_run_with_its_log(run_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "killed"
    config = write_config(
        tmp_path / "config.yaml",
        run_dir=str(directory),
        steps=10_000,
        model={"path": str(run_dir / "cold_start")},
        cold_start=None,
        evaluation={"questions": 0},
    )
    process = subprocess.Popen(
        deepspeed_command(config),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 200
        while not (directory / "metrics.jsonl").is_file() or not rows(directory):
            assert process.poll() is None, process.communicate()[0][-3000:]
            assert time.monotonic() < deadline, "no step within 200 s"
            time.sleep(0.2)
        (engine,) = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "trace_rl.engines.vllm_worker" in " ".join(child.cmdline())
        ]
        engine.kill()
        output, _ = process.communicate(timeout=100)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    assert "the vLLM engine process ended" in output
    assert "engine_rank0.log, ends:" in output
    assert rows(directory)  # nothing already written is lost
    assert list(read_trees(directory / "trees.jsonl"))
