"""What cannot work is refused in one message, before anything heavy starts."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from trace_rl.checkpoint import CheckpointError, load_checkpoint
from trace_rl.config.load import ConfigError, load_config, parse_config
from trace_rl.ranks import Ranks
from trace_rl.run_directory import prepare
from trace_rl.runner import check_source
from trace_rl.sources.load import load_source
from trace_rl.tasks.order import TaskOrder
from trace_rl.tasks.records import RecordError

from .launch import ROOT, TINY, environment, write_config

HOTPOT = ROOT / "tests" / "data" / "hotpotqa_official.json"
HUB = ROOT / "tests" / "data" / "hotpotqa_hub.json"


def qa(tmp_path: Path, **task: Any) -> Any:
    files = {"kind": "hotpotqa", "train": [str(HOTPOT)], "test": [str(HUB)]}
    raw = TINY | {"run_dir": str(tmp_path), "model": {"path": "m"}, "cold_start": None, "task": files | task}
    return parse_config(raw | {"allocation": {"bare_rollouts": 8, "pool": 4}})


def load(config: Any) -> Any:
    return load_source(config.task, config.environment)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"samplng": {}}, "samplng: unknown key; did you mean sampling?"),
        ({"sampling": {"top_p": 0.9}}, "sampling: top_p=0.9 truncates the sampling distribution"),
        ({"sampling": {"top_k": 20}}, "sampling: top_k=20 truncates the sampling distribution"),
        ({"allocation": {"bare_rollouts": 1}}, "allocation: bare_rollouts=1"),
        ({"deepspeed": {"gradient_accumulation_steps": 4}}, "deepspeed.gradient_accumulation_steps"),
    ],
)
def test_a_bad_config_exits_with_2_and_names_the_key(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    config = write_config(tmp_path / "c.yaml", run_dir=str(tmp_path / "run"), **sections)
    done = subprocess.run(
        [sys.executable, "trace/train.py", "--config", str(config)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_missing_records(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        load(qa(tmp_path, train=[str(tmp_path / "nowhere.json")]))


def test_empty_records(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("[]")
    with pytest.raises(RecordError, match=r"empty\.json"):
        load(qa(tmp_path, train=[str(tmp_path / "empty.json")]))


def test_a_malformed_record_is_skipped_and_named_or_fatal(tmp_path: Path) -> None:
    records = json.loads(HOTPOT.read_text())
    del records[1]["answer"]
    (tmp_path / "bad.json").write_text(json.dumps(records))
    source = load(qa(tmp_path, train=[str(tmp_path / "bad.json")]))
    assert len(source.train) == len(records) - 1
    (message,) = source.skipped
    assert "bad.json" in message
    assert "answer" in message
    with pytest.raises(RecordError, match="answer"):
        load(qa(tmp_path, train=[str(tmp_path / "bad.json")], on_malformed="fail"))


def test_a_pool_larger_than_the_data(tmp_path: Path) -> None:
    config = qa(tmp_path, limit=2)
    with pytest.raises(ConfigError, match=r"allocation\.pool: 4 prompts per step, but there are only 2"):
        check_source(config, load(config))


def test_a_resume_under_another_config_is_refused(tmp_path: Path) -> None:
    """`make quickstart` always resumes: another strategy there would wear the first figures."""
    config = qa(tmp_path / "run")
    assert prepare(config, resume=True) == 0
    assert prepare(config.model_copy(update={"steps": 9}), resume=True) == 0
    other = config.model_copy(update={"seed": 5})
    with pytest.raises(ConfigError, match=r"was run with another seed \(0, now 5\)"):
        prepare(other, resume=True)
    assert load_config(tmp_path / "run" / "config.yaml").seed == config.seed
    several = qa(tmp_path / "run", limit=3, kind="search_r1").model_copy(update={"seed": 5})
    with pytest.raises(
        ConfigError, match=r"another seed .*task\.limit \(None, now 3\).*task\.kind \('hotpotqa', now"
    ):
        prepare(several, resume=True)


SERVER = {"url": "http://one:8000"}


def searching(run_dir: Path, retriever: Any) -> Any:
    config = qa(run_dir)
    environment = config.environment.model_dump() | {"retriever": retriever}
    return parse_config(config.model_dump() | {"environment": environment})


def test_a_search_server_may_move_between_two_starts(tmp_path: Path) -> None:
    prepare(searching(tmp_path, SERVER), resume=True)
    moved = {"url": "http://two:9000", "timeout_s": 30, "retries": 5, "connections": 8}
    assert prepare(searching(tmp_path, moved), resume=True) == 0
    with pytest.raises(ConfigError, match=r"another environment\.retriever \(.*two:9000.*, now None\)"):
        prepare(searching(tmp_path, None), resume=True)


def test_a_run_from_before_a_key_existed_goes_on(tmp_path: Path) -> None:
    prepare(qa(tmp_path), resume=True)
    file = tmp_path / "config.yaml"
    raw = yaml.safe_load(file.read_text())
    for key in ("kind", "retriever"):
        del raw["environment"][key]
    del raw["sync"]
    file.write_text(yaml.safe_dump(raw))
    assert prepare(qa(tmp_path), resume=True) == 0
    assert load_config(file) == qa(tmp_path)


def test_a_run_whose_config_is_none_any_more_says_which_key(tmp_path: Path) -> None:
    prepare(qa(tmp_path), resume=True)
    file = tmp_path / "config.yaml"
    raw = yaml.safe_load(file.read_text())
    raw["environment"]["topk"] = raw["environment"].pop("top_k")
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(
        ConfigError, match=r"(?s)config\.yaml, which .*mend that file:\nenvironment\.topk: unknown key"
    ):
        prepare(qa(tmp_path), resume=True)


def test_a_checkpoint_of_other_questions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "world.json").write_text('{"ranks": 1}')
    (tmp_path / "latest").write_text("step_3")
    state = {"order": TaskOrder(9, seed=0).state_dict()}
    engine = SimpleNamespace(load_checkpoint=lambda *_, **__: ("there", state))
    run: Any = SimpleNamespace(
        ranks=Ranks(0, 1, 0, None), policy=SimpleNamespace(engine=engine), order=TaskOrder(8, seed=0)
    )
    with pytest.raises(
        CheckpointError, match=r"step_3 goes with other training questions .*n = 9, .*has 8.*choose another"
    ):
        load_checkpoint(run, tmp_path)


def test_fewer_steps_than_done(tmp_path: Path) -> None:
    config = qa(tmp_path / "run")
    prepare(config, resume=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_7")
    with pytest.raises(ConfigError, match=r"steps: 2, but .* has already done 7"):
        prepare(config, resume=True)
    assert prepare(config.model_copy(update={"steps": 8}), resume=True) == 7


def test_a_question_is_never_both_trained_on_and_tested(tmp_path: Path) -> None:
    source = load(qa(tmp_path, train=[str(HOTPOT), str(HOTPOT)], test=[str(HOTPOT), str(HUB)]))
    ids = [task.id for task in (*source.train, *source.test)]
    assert len(source.train) == 5
    assert len(ids) == len(set(ids)) == 10
