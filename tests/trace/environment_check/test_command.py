"""`trace-rl check-environment` on the example, on the quickstart's world, and on what it must refuse."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trace_rl.environment_check.command import add_parser

from .checking import write_failing_source
from .guess_number import __file__ as GUESS_NUMBER

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "configs/custom_example_cpu.yaml")
ACTIONS = ROOT / "examples/refund_desk_actions.json"
NO_MODEL = ["--set", "model.path=no/such/model"]  # words are counted instead of tokens


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # configs name files from there


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["check-environment", *arguments])
    return int(parsed.run(parsed))


def test_the_example_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--config", EXAMPLE, "--actions", str(ACTIONS), *NO_MODEL) == 0
    assert capsys.readouterr().out == "3 tasks played, 0 problems, 0 remarks\n"


def test_search_in_the_synthetic_world_has_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/quickstart.yaml")
    small = ["--set", "task.entities=30", "--set", "task.train_questions=5", "--set", "task.test_questions=2"]
    assert command("--config", config, "--tasks", "1", *small, *NO_MODEL) == 0
    assert capsys.readouterr().out == "1 tasks played, 0 problems, 0 remarks\n"


CARELESS = f"""
import importlib.util
import re
from trace_rl.sources import Source
spec = importlib.util.spec_from_file_location("guess_number_of_a_user", {GUESS_NUMBER!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

class Careless(module.GuessNumber):
    def restore(self, state):
        pass

def source():
    return Source([module.TASK, module.TASK], [], lambda count: Careless)

class Backtracking(module.GuessNumber):
    def step(self, action):
        re.fullmatch("(x+x+)+y", action[:60])
        return super().step(action)

def backtracking():
    return Source([module.TASK], [], lambda count: Backtracking)

def empty():
    return Source([], [], lambda count: Careless)
"""


def test_problems_are_printed_once_and_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    (tmp_path / "actions.json").write_text(json.dumps([f"<guess> {guess} </guess>" for guess in (3, 9, 7)]))
    mine = ["--set", f"task.source={tmp_path}/careless.py:source", "--set", "task.options={}"]
    actions = ["--actions", str(tmp_path / "actions.json")]
    assert command("--config", EXAMPLE, *mine, *actions, *NO_MODEL, "--set", "environment.tool_turns=5") == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("problem (task guess-7): restore: ")
    assert len(set(lines)) == len(lines)
    assert last == f"2 tasks played, {len(lines)} problems, 0 remarks"


def test_a_call_that_stops_all_threads_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    code = (
        "import trace_rl.environment_check.command as c, argparse, sys;"
        "c.CALL_SECONDS = 1.0; p = argparse.ArgumentParser(); c.add_parser(p.add_subparsers());"
        "a = p.parse_args(sys.argv[1:]); sys.exit(a.run(a))"
    )
    mine = [
        "--set",
        f"task.source={tmp_path}/careless.py:backtracking",
        "--set",
        "task.options={}",
        *NO_MODEL,
    ]
    command = [sys.executable, "-P", "-c", code, "check-environment", "--config", EXAMPLE, *mine]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "Timeout (0:00:02)!" in result.stderr
    assert "in fullmatch" in result.stderr


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("environment.max_observation_tokens=4", "expected at most 4 tokens of observation"),
        ("environment.tool_turns=1", "2 times the action 'no action': expected the episode to be over"),
    ],
)
def test_what_the_plan_is_told_is_checked(told: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--config", EXAMPLE, "--tasks", "1", "--set", told, *NO_MODEL) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read"),
        ("[", "is not JSON"),
        ("[]", "must hold a list of strings"),
        ('"x"', "must hold a list of strings"),
        ("[1]", "must hold a list of strings"),
    ],
)
def test_files_of_actions_that_are_refused(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "actions.json"
    if text is not None:
        file.write_text(text)
    assert command("--config", EXAMPLE, "--actions", str(file)) == 2
    assert said in capsys.readouterr().err


def test_configs_and_sources_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--config", str(tmp_path / "no.yaml")) == 2
    assert "cannot read" in capsys.readouterr().err
    assert command("--config", EXAMPLE, "--set", "task.source=nowhere.py:source") == 1
    assert "there is no file" in capsys.readouterr().err
    (tmp_path / "careless.py").write_text(CARELESS)
    mine = ["--set", f"task.source={tmp_path}/careless.py:empty", "--set", "task.options={}", *NO_MODEL]
    assert command("--config", EXAMPLE, *mine) == 1
    assert "0 training and 0 held-out tasks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("--config", EXAMPLE, "--tasks", "0")


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("here", "ImportError('cubes need rubik: pip install rubik')"),
        ("environments", "ImportError('cubes need rubik: pip install rubik')"),
        ("environments", "MathCheckError('math-verify is broken')"),
        ("environments", "SandboxError('no user namespaces')"),
    ],
)
def test_what_a_source_lacks_is_one_message(
    place: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_failing_source(tmp_path, place, error)
    mine = ["--set", f"task.source={source}", "--set", "task.options={}", *NO_MODEL]
    assert command("--config", EXAMPLE, *mine) == 1
    said = error.partition("'")[2].rstrip("')")
    assert capsys.readouterr().err == f"trace-rl check-environment: {said}\n"


def test_a_users_own_broken_import_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        command("--config", EXAMPLE, "--set", f"task.source={tmp_path}/broken.py:source", *NO_MODEL)
