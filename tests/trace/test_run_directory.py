"""One run_dir, one run: what a new start may use, what it refuses, what a failed start leaves behind."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trace_rl.config.load import ConfigError, load_config, parse_config
from trace_rl.config.schema import Config
from trace_rl.report import Reporter
from trace_rl.run_directory import held, prepare

from .launch import ROOT, TINY, write_config

HOTPOT = ROOT / "tests" / "data" / "hotpotqa_official.json"
HUB = ROOT / "tests" / "data" / "hotpotqa_hub.json"
SERVER = {"url": "http://one:8000"}


def qa(run_dir: Path, retriever: Any = None, **task: Any) -> Config:
    files = {"kind": "hotpotqa", "train": [str(HOTPOT)], "test": [str(HUB)]}
    return parse_config(
        TINY
        | {"run_dir": str(run_dir), "model": {"path": "m"}, "cold_start": None, "task": files | task}
        | {"environment": {"retriever": retriever}}
    )


def world(run_dir: Path, *overrides: str) -> Config:
    """With a cold start, whose policy is `run_dir/cold_start`."""
    run_dir.parent.mkdir(exist_ok=True)
    return load_config(write_config(run_dir.parent / "world.yaml", run_dir=str(run_dir)), overrides)


def fail_early(config: Config, *, resume: bool = False) -> None:
    """What a start does until it finds that, for instance, a data file is not there."""
    done = prepare(config, resume)
    with Reporter(config.run_dir, config.steps, done):
        pass


def finish_a_step(config: Config) -> None:
    prepare(config, resume=False)
    (config.run_dir / "metrics.jsonl").write_text('{"step": 1, "trees_end": 0}\n')


def make_policy(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_text("costly")


# A failed start


@pytest.mark.parametrize("resume", [False, True])
def test_a_failed_first_start_does_not_lock_its_directory(tmp_path: Path, resume: bool) -> None:
    fail_early(qa(tmp_path / "run", train=["no.json"]))
    mended = qa(tmp_path / "run").model_copy(update={"seed": 5})
    assert prepare(mended, resume) == 0
    assert load_config(tmp_path / "run" / "config.yaml") == mended


def test_an_evaluation_before_the_first_step_is_not_taken_for_another_runs(tmp_path: Path) -> None:
    evaluations = tmp_path / "run" / "evaluations.json"
    fail_early(qa(tmp_path / "run"))
    evaluations.write_text("{}")
    fail_early(qa(tmp_path / "run"), resume=True)
    assert evaluations.exists()
    fail_early(qa(tmp_path / "run", limit=3))
    assert not evaluations.exists()


# The cold start of a failed start


@pytest.mark.parametrize("resume", [False, True])
def test_a_cold_start_is_used_again_when_nothing_it_depends_on_has_changed(
    tmp_path: Path, resume: bool
) -> None:
    fail_early(world(tmp_path / "run"))
    make_policy(tmp_path / "run" / "cold_start")
    changes = (
        "steps=9",
        "allocation.strategy=uniform",
        "optimizer.micro_batch_tokens=1024",
        "engine.kind=vllm",
    )
    assert prepare(world(tmp_path / "run", *changes), resume) == 0
    assert (tmp_path / "run" / "cold_start" / "model.safetensors").read_text() == "costly"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        "seed=1", "cold_start.hidden_size=192", "cold_start.steps=7", "task.entities=60", "environment.top_k=2",
        "sampling.context_tokens=320", "model.dtype=bfloat16", "deepspeed.zero_optimization={a: 1}",
    ],
)  # fmt: skip
def test_a_cold_start_of_another_config_is_not_taken_for_this_ones(
    tmp_path: Path, change: str, resume: bool
) -> None:
    policy = tmp_path / "run" / "cold_start"
    before = world(tmp_path / "run")
    fail_early(before)
    assert prepare(world(tmp_path / "run", change), resume) == 0  # there is no policy yet
    fail_early(before)
    make_policy(policy)
    key = change.split("=")[0]
    with pytest.raises(ConfigError, match=rf"cold_start is there, .*another {key}.*: delete .*make it anew"):
        prepare(world(tmp_path / "run", change), resume)
    assert load_config(tmp_path / "run" / "config.yaml") == before
    assert (policy / "model.safetensors").read_text() == "costly"


def test_a_start_without_the_cold_start_does_not_hide_whose_it_is(tmp_path: Path) -> None:
    """Three failed starts: of one cold start, of another policy, of another cold start."""
    fail_early(world(tmp_path / "run"))
    make_policy(tmp_path / "run" / "cold_start")
    fail_early(world(tmp_path / "run", "cold_start.hidden_size=192", "model.path=elsewhere"))
    with pytest.raises(ConfigError, match=r"cold_start is there, .*another model\.path \('elsewhere', now"):
        prepare(world(tmp_path / "run", "cold_start.hidden_size=192"), resume=False)


def test_a_policy_made_elsewhere_is_used_as_it_is(tmp_path: Path) -> None:
    make_policy(tmp_path / "shared")
    fail_early(world(tmp_path / "run", "model.path=wrong"))
    for seed in (1, 2):  # several runs share it, as docs/runs.md has them
        config = world(tmp_path / "run", f"model.path={tmp_path / 'shared'}", f"seed={seed}")
        assert prepare(config, resume=False) == 0


def test_a_policy_in_a_directory_that_was_never_started_is_used(tmp_path: Path) -> None:
    make_policy(tmp_path / "run" / "cold_start")
    assert prepare(world(tmp_path / "run"), resume=False) == 0


# Two processes


def test_a_directory_in_use_is_refused_until_the_other_ends(tmp_path: Path) -> None:
    hold = (
        "import sys, pathlib, trace_rl.run_directory as r\n"
        "with r.held(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin
    assert other.stdout
    assert "held\n" in other.stdout  # libraries say something first
    with pytest.raises(ConfigError, match="a process is running in"), held(tmp_path):
        pass
    other.kill()  # as a crash would end it
    other.wait()
    with held(tmp_path):
        pass


# A directory that holds a run


@pytest.mark.parametrize(
    ("file", "text"), [("metrics.jsonl", '{"step": 1}\n'), ("checkpoints/latest", "step_3")]
)
def test_a_run_is_not_begun_over(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=r"already holds a run; pass --resume .*delete .*or choose another"):
        prepare(qa(tmp_path), resume=False)
    assert not (tmp_path / "config.yaml").exists()


def test_a_resume_under_another_config_is_refused(tmp_path: Path) -> None:
    """`make quickstart` always resumes: another strategy there would wear the first figures."""
    config = qa(tmp_path / "run")
    finish_a_step(config)
    assert prepare(config, resume=True) == 0
    assert prepare(config.model_copy(update={"steps": 9}), resume=True) == 0
    other = config.model_copy(update={"seed": 5})
    with pytest.raises(
        ConfigError, match=r"was run with another seed \(0, now 5\); choose another .*delete that"
    ):
        prepare(other, resume=True)
    assert load_config(tmp_path / "run" / "config.yaml").seed == config.seed
    several = qa(tmp_path / "run", limit=3, kind="search_r1").model_copy(update={"seed": 5})
    with pytest.raises(
        ConfigError, match=r"another seed .*task\.limit \(None, now 3\).*task\.kind \('hotpotqa', now"
    ):
        prepare(several, resume=True)


def test_a_search_server_may_move_between_two_starts(tmp_path: Path) -> None:
    finish_a_step(qa(tmp_path, SERVER))
    moved = {"url": "http://two:9000", "timeout_s": 30, "retries": 5, "connections": 8}
    assert prepare(qa(tmp_path, moved), resume=True) == 0
    with pytest.raises(ConfigError, match=r"another environment\.retriever \(.*two:9000.*, now None\)"):
        prepare(qa(tmp_path), resume=True)


def test_a_run_from_before_a_key_existed_goes_on(tmp_path: Path) -> None:
    finish_a_step(qa(tmp_path))
    file = tmp_path / "config.yaml"
    raw = yaml.safe_load(file.read_text())
    for key in ("kind", "retriever"):
        del raw["environment"][key]
    del raw["sync"]
    file.write_text(yaml.safe_dump(raw))
    assert prepare(qa(tmp_path), resume=True) == 0
    assert load_config(file) == qa(tmp_path)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_config_that_is_none_any_more_is_refused_and_kept(tmp_path: Path, stepped: bool) -> None:
    """It may be another program's, too."""
    finish_a_step(qa(tmp_path))
    if not stepped:
        (tmp_path / "metrics.jsonl").unlink()
    file = tmp_path / "config.yaml"
    raw = yaml.safe_load(file.read_text())
    raw["environment"]["topk"] = raw["environment"].pop("top_k")
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(
        ConfigError, match=r"(?s)config\.yaml, which .*mend that file:\nenvironment\.topk: unknown key"
    ):
        prepare(qa(tmp_path), resume=True)
    assert yaml.safe_load(file.read_text()) == raw


def test_fewer_steps_than_done(tmp_path: Path) -> None:
    config = qa(tmp_path / "run")
    prepare(config, resume=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_7")
    with pytest.raises(ConfigError, match=r"steps: 2, but .* has already done 7"):
        prepare(config, resume=True)
    assert prepare(config.model_copy(update={"steps": 8}), resume=True) == 7
