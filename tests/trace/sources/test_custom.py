"""One's own source: the example, modules and files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trace_rl.config.environments import CustomConfig, SearchConfig
from trace_rl.config.evaluate import load_evaluation
from trace_rl.config.load import load_config
from trace_rl.config.tasks import CustomTask
from trace_rl.environment_check import check_environment
from trace_rl.environments.protocol import StepResult
from trace_rl.sources import Source
from trace_rl.sources.load import load_source

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = f"{ROOT}/examples/refund_desk.py:source"


def load(source: str, **options: Any) -> Source:
    return load_source(CustomTask(kind="custom", source=source, options=options), CustomConfig())


def words(text: str) -> int:
    return len(text.split())


def play(source: Source, task: Any, *actions: str) -> list[StepResult]:
    environment = source.environments(words)()
    environment.reset(task)
    return [environment.step(action) for action in actions]


def test_the_example_decides_by_its_rules() -> None:
    source = load(EXAMPLE, train=150, test=50, seed=3)
    assert (len(source.train), len(source.test)) == (150, 50)
    assert not {task.id for task in source.train} & {task.id for task in source.test}
    decisions = []
    for task in [*source.train, *source.test]:
        number = task.id.removeprefix("refund-")
        looked_up, end = play(
            source, task, f"<order> {number} </order>", f"<answer> {task.answers[0]} </answer>"
        )
        assert (looked_up.tool_calls, looked_up.outcome, end.reward) == (1, "order", 1.0)
        record = looked_up.observation.replace(",", "").split()
        price, days = (int(record[record.index(word) + 1]) for word in ("price", "delivered"))
        refunded = days <= 30 and "final" not in record
        assert task.answers == ((f"refund {price}",) if refunded else ("refuse",))
        decisions.append(refunded)
    assert 0 < sum(decisions) < len(decisions)


def test_the_example_ends_wrong_answers_and_idle_episodes_without_reward() -> None:
    source = load(EXAMPLE, lookups=2)
    task = source.train[0]
    [end] = play(source, task, "<answer> maybe </answer>")
    assert (end.reward, end.outcome, end.answer, end.scores) == (0.0, "answer", "maybe", {"accuracy": 0.0})
    missing, odd, last = play(source, task, "<order> 7 </order>", "hello", "<order> 1000 </order>")
    assert "no such order" in missing.observation
    assert (odd.done, odd.outcome) == (False, "invalid")
    assert (last.done, last.reward, last.outcome) == (True, 0.0, "no_answer")


def test_the_example_passes_the_check() -> None:
    source = load(EXAMPLE, train=3, test=1)
    actions = ["<order> 1000 </order>", "hello", "<answer> refuse </answer>"]
    make = source.environments(words)
    assert check_environment(make, source.train[0], actions, count_tokens=words, max_turns=3) == []


def test_the_same_options_give_the_same_tasks() -> None:
    one, other, different = (load(EXAMPLE, seed=seed) for seed in (1, 1, 2))
    assert one.train == other.train
    assert one.train != different.train


def test_the_configs_of_the_example_name_it() -> None:
    training = load_config(ROOT / "configs/custom_example_cpu.yaml")
    evaluation = load_evaluation(ROOT / "configs/evaluate/custom_example_cpu.yaml").sets["refund_desk"]
    assert isinstance(training.task, CustomTask)
    assert evaluation.task == training.task
    assert evaluation.environment == training.environment
    assert f"{ROOT}/{training.task.source}" == EXAMPLE
    assert len(load(EXAMPLE, **training.task.options).test) == training.evaluation.questions


def test_a_module_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_shop").mkdir()
    (tmp_path / "my_shop/__init__.py").write_text("")
    (tmp_path / "my_shop/tasks.py").write_text((ROOT / "examples/refund_desk.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load("my_shop.tasks:source", train=4, test=2).train) == 4


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("examples/refund_desk.py", "expected `package.module:function` or `path/to/file.py:function`"),
        (":source", "expected `package.module:function`"),
        ("examples/refund_desk.py:", "expected `package.module:function`"),
        (f"{ROOT}/examples/nowhere.py:source", "there is no file .*nowhere.py"),
        ("no.such.module:source", "there is no module 'no.such.module'"),
        (f"{ROOT}/examples/refund_desk.py:sauce", "has no function 'sauce'"),
        (f"{ROOT}/examples/refund_desk.py:RULES", "has no function 'RULES'"),
        ("builtins:dict", "returned a dict, expected a Source"),
    ],
)
def test_refusals(source: str, said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        load(source)


def test_a_custom_task_takes_no_other_environment() -> None:
    with pytest.raises(ValueError, match=r"environment\.kind=search does not go with task.kind=custom"):
        load_source(CustomTask(kind="custom", source=EXAMPLE), SearchConfig())
