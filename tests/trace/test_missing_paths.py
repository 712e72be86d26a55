"""A plan names the paths that are not there, and still is a plan."""

from typing import Any

import pytest

from trace_rl.cli import main
from trace_rl.config.load import load_config, parse_config
from trace_rl.missing_paths import missing_paths

from .launch import ROOT, TINY

HOTPOT = str(ROOT / "tests" / "data" / "hotpotqa_official.json")
CONFIG = {"run_dir": "r", "steps": 1, "model": {"path": str(ROOT)}}
QA = {"kind": "hotpotqa", "train": [HOTPOT]}


def missing(**sections: Any) -> list[str]:
    return list(missing_paths(parse_config(CONFIG | sections)))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"task": QA}, []),
        (
            {"task": QA | {"train": [HOTPOT, "a.json"], "test": ["b.json"], "corpus": "index"}},
            ["task.train: a.json", "task.test: b.json", "task.corpus: index"],
        ),
        ({"task": {"kind": "math", "train": ["m.parquet"]}}, ["task.train: m.parquet"]),
        ({"task": QA, "model": {"path": "m", "chat_template": "c.jinja"}},
         ["model.path: m", "model.chat_template: c.jinja"]),
        ({"task": {"kind": "custom", "source": "examples/no.py:source"}}, ["task.source: examples/no.py"]),
        ({"task": {"kind": "custom", "source": f"{ROOT}/examples/refund_desk.py:source"}}, []),
    ],
)  # fmt: skip
def test_what_is_not_there_is_named(sections: dict[str, Any], said: list[str]) -> None:
    assert missing(**sections) == [f"{one} is not there" for one in said]


@pytest.mark.parametrize(
    "sections",
    [
        {"task": {"kind": "world"}, "model": {"path": "m"}, "cold_start": TINY["cold_start"]},
        {"task": QA | {"corpus": "c"}, "environment": {"retriever": {"url": "http://one:8000"}}},
        {
            "task": {"kind": "bfcl", "split_file": "split.json"},
            "model": {"path": str(ROOT), "observations": "chat"},
        },
        {"task": {"kind": "custom", "source": "package.module:source"}},
    ],
)
def test_what_a_run_makes_or_never_opens_is_not_missed(sections: dict[str, Any]) -> None:
    assert missing(**sections) == []


def test_a_plan_with_missing_paths_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/hotpotqa_smollm2_cpu.yaml")
    assert main(["plan", "--config", config, "--set", "task.train=[nope.json]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "warning    task.train: nope.json is not there" in lines


def test_published_configs_name_files_of_the_repository_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    named = [line for path in (ROOT / "configs").glob("*.yaml") for line in missing_paths(load_config(path))]
    fetched = ("runs/", "models/", "data/")  # models and data are the user's to get
    assert [line for line in named if not line.split(": ")[1].startswith(fetched)] == []
