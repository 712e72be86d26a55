"""YAML, overrides, and messages that say what to write instead."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trace_rl.config.load import TRAINER_OWNS, ConfigError, dump_config, load_config, parse_config

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MINIMAL = """\
run_dir: runs/x
steps: 3
model: {path: m}
task: {kind: world}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(file, overrides)
    return str(error.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_published_config_is_valid(path: Path) -> None:
    config = load_config(path)
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_there_are_published_configs() -> None:
    assert {"quickstart", "hotpotqa_qwen3_8b"} <= {path.stem for path in CONFIGS}


# The whole reader


def test_missing_file(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.yaml") == f"cannot read {tmp_path / 'no.yaml'}: No such file or directory"
    assert "Is a directory" in refused(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "must hold a mapping of sections, found list"),
        ("a: [1\n", "is not valid YAML"),
        ("a: 1\n\tb: 2\n", "is not valid YAML"),
        (MINIMAL + "steps: 4\n", "key 'steps' is given twice"),
        (MINIMAL + "loss: {kl: 0, kl: 1}\n", "key 'kl' is given twice"),
        (MINIMAL + "? [a]\n: 1\n", "is not valid YAML"),
    ],
)
def test_unreadable_text(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert message in refused(file)


def test_bytes_that_are_no_text(file: Path) -> None:
    file.write_bytes(b"steps: \xff\xfe\n")
    assert "is not valid YAML" in refused(file)


def test_merge_keys_may_repeat_what_they_merge(file: Path) -> None:
    file.write_text(MINIMAL.replace("model: {path: m}", "model: &m {path: m}") + "loss: {kl: 0.1}\n")
    assert load_config(file).loss.kl == 0.1


def test_a_section_with_all_keys_commented_out_has_its_defaults(file: Path) -> None:
    file.write_text(MINIMAL + "loss:\n  # kl: 0.1\nengine:\n")
    assert load_config(file) == parse_config(yaml.safe_load(MINIMAL))


def test_every_problem_is_reported_at_once(file: Path) -> None:
    file.write_text("steps: 0\nlos: {}\nmodel: {}\ntask: {kind: world}\n")
    assert refused(file).splitlines() == [
        "run_dir: required, and missing",
        "steps: got 0; input should be greater than 0",
        "model.path: required, and missing",
        "los: unknown key; did you mean loss?",
    ]


def test_dump_reads_back_equal(file: Path) -> None:
    overrides = [
        "optimizer.learning_rate=1e-7",
        "allocation.pool=300",
        "cold_start.steps=5",
        "environment.instructions='Antworte kurz: über x'",
        "deepspeed.zero_optimization.sub_group_size=1e8",
    ]
    config = load_config(file, overrides)
    again = file.with_name("resolved.yaml")
    again.write_text(dump_config(config))
    assert load_config(again) == config


# Names


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=1", "stepz: unknown key; did you mean steps?"),
        ("zzz=1", "zzz: unknown key; one of allocation, checkpoint_every,"),
        ("model.pth=x", "model.pth: unknown key; did you mean model.path?"),
        ("task.entites=3", "task.entites: unknown key; did you mean task.entities?"),
        ("environment.topk=3", "environment.topk: unknown key; did you mean environment.top_k?"),
        ("sampling.temprature=1", "did you mean sampling.temperature?"),
        ("engine.kind_=vllm", "did you mean engine.kind?"),
        ("allocation.strateg=trace", "did you mean allocation.strategy?"),
        ("predictor.hiden=3", "did you mean predictor.hidden?"),
        ("loss.adventage=grpo", "did you mean loss.advantage?"),
        ("optimizer.lr=1", "optimizer.lr: unknown key; one of betas, gradient_clipping, learning_rate,"),
        ("cold_start.step=1", "did you mean cold_start.steps?"),
        ("evaluation.question=1", "did you mean evaluation.questions?"),
        ("sync.tolerence=1", "did you mean sync.tolerance?"),
        ("loss.advantage=tree_po", "loss.advantage: got 'tree_po'; did you mean treepo?"),
        ("engine.kind=sglang", "engine.kind: got 'sglang'; one of vllm, transformers"),
        ("task.kind=wrld", "task.kind: got 'wrld'; did you mean world?"),
        ("task.kind=musiqe", "task.kind: got 'musiqe'; did you mean musique?"),
        ("task.kind=chess", "task.kind: got 'chess'; one of world, hotpotqa, 2wikimultihopqa, musique"),
        ("environment.kind=python", "environment.kind=python does not go with task.kind=world"),
        ("environment.retriever={url: u, retrys: 1}", "did you mean environment.retriever.retries?"),
        ("environment.max_calls=3", "environment.max_calls: unknown key"),
        ("task.kind=null", "task.kind: got 'None'; one of world, hotpotqa"),
        ("task={}", "task.kind: required, and missing; one of world, hotpotqa"),
        ("loss=5", "loss: got 5; expected keys with values below it"),
        ("task=5", "task: got 5; expected keys with values below it"),
        ("deepspeed=5", "deepspeed: got 5; expected keys with values below it"),
        ("loss={1: 2}", "keys must be text, quote this one"),
        ("model=null", "model: required, and missing"),
        ("task={kind: hotpotqa, train: [a], test: [3]}", "task.test.0: got 3; input is not a valid path"),
    ],
)
def test_messages_name_the_key_and_the_nearest_valid_name(file: Path, override: str, message: str) -> None:
    assert refused(file, override).startswith(message) or message in refused(file, override)


def test_long_values_are_cut_in_messages(file: Path) -> None:
    assert len(refused(file, f"steps={'x' * 5000}")) < 200


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.learning_rate=1e-6", "optimizer.learning_rate", 1e-6),
        ("optimizer.learning_rate=5E-4", "optimizer.learning_rate", 5e-4),
        ("optimizer.betas=[0.8, 0.95]", "optimizer.betas", (0.8, 0.95)),
        ("allocation.pool=null", "allocation.pool", None),
        ("allocation.bare_rollouts=8", "allocation.bare_rollouts", 8),
        ("model.liger=true", "model.liger", True),
        ("environment.instructions=", "environment.instructions", None),
        ("environment.instructions=''", "environment.instructions", ""),
        ("environment.instructions=a=b", "environment.instructions", "a=b"),
        ("deepspeed.zero_optimization.stage=3", "deepspeed.zero_optimization", {"stage": 3}),
        ("cold_start.steps=7", "cold_start.steps", 7),
        (" steps =9", "steps", 9),
    ],
)
def test_override(file: Path, override: str, path: str, value: Any) -> None:
    got: Any = load_config(file, [override])
    for part in path.split("."):
        got = got[part] if isinstance(got, dict) else getattr(got, part)
    assert got == value


def test_overrides_apply_in_order_and_keep_their_neighbours(file: Path) -> None:
    file.write_text(MINIMAL + "loss: {kl: 0.5, clip_low: 0.1}\n")
    config = load_config(file, ["loss.kl=1", "loss.kl=2"])
    assert (config.loss.kl, config.loss.clip_low) == (2.0, 0.1)


def test_a_section_can_be_taken_back(file: Path) -> None:
    file.write_text(MINIMAL + "cold_start: {steps: 3}\n")
    assert load_config(file, ["cold_start=null"]).cold_start is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set steps: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("loss..kl=3", "--set loss..kl=3: expected key=value"),
        ("loss.=3", "expected key=value"),
        ("steps=[1", "--set steps=[1: the value is not valid YAML"),
        ("steps.more=1", "--set steps.more=1: steps is a value, not a section"),
        ("model.path.more=1", "path is a value, not a section"),
    ],
)
def test_bad_override(file: Path, override: str, message: str) -> None:
    assert message in refused(file, override)


def test_numbers_without_a_dot_are_numbers_in_files_too(file: Path) -> None:
    file.write_text(MINIMAL + "deepspeed: {zero_optimization: {reduce_bucket_size: 5e8}}\n")
    assert load_config(file).deepspeed["zero_optimization"]["reduce_bucket_size"] == 5e8


# DeepSpeed


@pytest.mark.parametrize("key", TRAINER_OWNS)
def test_what_the_trainer_sets_is_refused(file: Path, key: str) -> None:
    assert (
        refused(file, f"deepspeed.{key}=1")
        == f"deepspeed.{key}: the trainer sets this; use {TRAINER_OWNS[key]}"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{stage: 2}", "deepspeed.zero_optimization.stage: got 2, the trainer is built for ZeRO stage 3"),
        ("{overlap_comm: true}", "deepspeed.zero_optimization.overlap_comm: must stay false"),
        ("[3]", "deepspeed.zero_optimization: got [3], expected a mapping"),
        ("null", "deepspeed.zero_optimization: got None, expected a mapping"),
    ],
)
def test_zero_stage_3_only(file: Path, value: str, message: str) -> None:
    assert message in refused(file, f"deepspeed.zero_optimization={value}")


def test_everything_else_goes_through(file: Path) -> None:
    config = load_config(file, ["deepspeed.zero_optimization={stage: 3, offload_optimizer: {device: cpu}}"])
    assert config.deepspeed["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


# Cost


@pytest.mark.parametrize("override", ["steps=2", "stepz=2"])
def test_reading_a_config_loads_nothing_heavy(file: Path, override: str) -> None:
    code = (
        "import sys; from pathlib import Path; from trace_rl.config.load import load_config, ConfigError\n"
        f"try: load_config(Path({str(file)!r}), [{override!r}])\n"
        "except ConfigError: print('refused')\n"
        "heavy = ('torch', 'numpy', 'transformers', 'deepspeed', 'vllm', 'trace_kernels')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert out[-2] == "[]"
    assert ("refused" in out) == (override == "stepz=2")
