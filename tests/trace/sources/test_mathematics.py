"""From the sections of a configuration to the sandbox's limits, and what is found out at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trace_rl.config.environments import PythonConfig
from trace_rl.config.tasks import MathTask
from trace_rl.environments.math_check import MathChecker, MathCheckError
from trace_rl.sandbox import Limits, PythonTool, SandboxError
from trace_rl.sources.load import load_source
from trace_rl.sources.mathematics import call_limits, tried_tools
from trace_rl.sources.source import Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"problem": "What is $2 + 3$?", "answer": "5"}) + "\n")
    task = MathTask(kind="math", train=[file], test=[])
    return load_source(task, PythonConfig(kind="python", max_calls=3, call_seconds=2.5, memory_mib=300))


def test_the_time_of_a_call_reaches_every_limit() -> None:
    config = PythonConfig(kind="python", max_calls=3, call_seconds=2.5, memory_mib=300)
    limits = Limits(cpu_seconds=3, idle_seconds=2.5, replay_seconds=7.5, memory_mib=300)
    assert call_limits(config) == limits


def test_an_episode_in_the_real_environment(source: Source) -> None:
    environment = source.environments(lambda text: len(text.split()))()
    environment.reset(source.train[0])
    assert "<result>5</result>" in environment.step("<python>print(2 + 3)</python>").observation
    end = environment.step(r"<answer> \boxed{\frac{10}{2}} </answer>")
    assert (end.reward, end.answer) == (1.0, r"\boxed{\frac{10}{2}}")


def test_sets_with_equal_limits_share_one_sandbox_and_checker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[object] = []
    for kind in (PythonTool, MathChecker):
        monkeypatch.setattr(kind, "probe", lambda self: probed.append(self))
    tried_tools.cache_clear()
    for name, max_calls, instructions in (("a", 3, "A"), ("b", 3, "B"), ("c", 4, "A")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text(json.dumps({"problem": "What is $2 + 3$?", "answer": "5"}) + "\n")
        config = PythonConfig(kind="python", max_calls=max_calls, instructions=instructions)
        load_source(MathTask(kind="math", train=[], test=[file]), config).environments(len)
    tried_tools.cache_clear()
    assert len(probed) == 4  # for two different limits


@pytest.mark.parametrize(
    ("probed", "error"), [(PythonTool, SandboxError("no Landlock")), (MathChecker, MathCheckError("none"))]
)
def test_what_cannot_work_is_found_out_at_the_start(
    source: Source, monkeypatch: pytest.MonkeyPatch, probed: type, error: Exception
) -> None:
    def probe(self: object) -> None:
        raise error

    tried_tools.cache_clear()  # other tests have tried theirs
    for kind in (PythonTool, MathChecker):
        monkeypatch.setattr(kind, "probe", probe if kind is probed else lambda self: None)
    with pytest.raises(type(error), match=str(error)):
        source.environments(len)
