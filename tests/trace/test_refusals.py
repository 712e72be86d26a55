"""What cannot work is refused in one message, before anything heavy starts."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trace_rl.checkpoint import CheckpointError, load_checkpoint
from trace_rl.config.load import ConfigError, parse_config
from trace_rl.ranks import Ranks
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


def test_a_question_is_never_both_trained_on_and_tested(tmp_path: Path) -> None:
    source = load(qa(tmp_path, train=[str(HOTPOT), str(HOTPOT)], test=[str(HOTPOT), str(HUB)]))
    ids = [task.id for task in (*source.train, *source.test)]
    assert len(source.train) == 5
    assert len(ids) == len(set(ids)) == 10
