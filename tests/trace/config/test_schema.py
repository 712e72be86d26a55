"""Every key is documented, typed and refused when it makes no sense."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from trace_rl.config.environments import PythonConfig, SearchConfig
from trace_rl.config.load import ConfigError, dump_config, load_config, parse_config
from trace_rl.config.schema import AllocationConfig, Config
from trace_rl.config.section import Section
from trace_rl.config.tasks import BfclTask, MathTask, QaTask, WorldTask

MINIMAL: dict[str, Any] = {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "task": {"kind": "world"}}


def sections() -> list[type[BaseModel]]:
    found, todo = [], Section.__subclasses__()
    while todo:
        found.append(todo.pop())
        todo += found[-1].__subclasses__()
    return found


def refused(**changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(MINIMAL | changes)
    return str(error.value)


@pytest.mark.parametrize("section", sections(), ids=lambda s: s.__name__)
def test_every_key_says_what_it_does(section: type[BaseModel]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no docstring"
        assert field.description.strip().endswith("."), f"{section.__name__}.{name}: not a sentence"


def test_all_sections_are_reachable_from_the_root() -> None:
    assert {Config, WorldTask, QaTask, MathTask, BfclTask, SearchConfig, PythonConfig} <= set(sections())


def test_values_do_not_change_after_loading() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 2  # type: ignore[misc]


def test_defaults_are_the_published_rules() -> None:
    config = parse_config(MINIMAL)
    assert (config.allocation.strategy, config.allocation.contrast) == ("trace", "plug_in")
    assert (config.allocation.bare_rollouts, config.allocation.continuations) == (1024, 2)
    assert config.allocation.pool_size == 256
    assert config.allocation.leaves == 3072
    assert config.allocation.exploration == 0.0


def test_pool_is_never_below_two() -> None:
    assert AllocationConfig(bare_rollouts=4).pool_size == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"top_p": 0.9}}, "sampling: top_p=0.9 truncates"),
        ({"sampling": {"top_k": 40}}, "sampling: top_k=40 truncates"),
        ({"sampling": {"min_p": 0.1}}, "sampling: min_p=0.1 truncates"),
        ({"sampling": {"turn_tokens": 4096}}, "sampling: turn_tokens=4096 leaves no room"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: got 0; input should be greater than 0"),
        ({"allocation": {"bare_rollouts": 1}}, "allocation: bare_rollouts=1: a group needs at least 2"),
        (
            {"allocation": {"bare_rollouts": 64, "pool": 2}},
            "allocation: bare_rollouts=64 exceeds pool x max_per_prompt = 32",
        ),
        (
            {"allocation": {"bare_rollouts": 7, "max_per_prompt": 2, "pool": 8}},
            "allocation: bare_rollouts=7 cannot be made of groups",
        ),
        ({"allocation": {"max_per_prompt": 1}}, "allocation.max_per_prompt: got 1"),
        ({"allocation": {"exploration": 1.5}}, "allocation.exploration: got 1.5"),
        ({"task": {"kind": "world", "min_hops": 4}}, "task: min_hops=4 exceeds max_hops=3"),
        ({"task": {"kind": "hotpotqa"}}, "task: give at least one file in `train` or `test`"),
        (
            {"task": {"kind": "hotpotqa", "train": ["a"], "test": ["b"]}, "cold_start": {}},
            "cold_start needs task.kind=world, got hotpotqa",
        ),
        (
            {"task": {"kind": "hotpotqa", "train": ["a"], "ability": "qa"}},
            "task: ability=qa: only rows of kind=search_r1 have one, not hotpotqa's",
        ),
        (
            {"task": {"kind": "math", "train": ["a"], "ability": "math"}},
            "task.ability: unknown key",
        ),
        (
            {"environment": {"retriever": {"url": "http://127.0.0.1:8000"}}},
            "environment.retriever does not go with task.kind=world",
        ),
        ({"task": {"kind": "bfcl"}}, "task.kind=bfcl needs model.observations=chat"),
        ({"cold_start": {"heads": 3}}, "cold_start: hidden_size=128 must be a multiple of heads=3"),
        ({"cold_start": {"heads": 4, "kv_heads": 3}}, "heads a multiple of kv_heads=3"),
        ({"cold_start": {"hidden_size": 12}}, "cold_start: hidden_size / heads = 3 must be even"),
        (
            {"model": {"path": "m", "dtype": "float32", "attention": "flash"}},
            "model.attention=flash computes in half types",
        ),
        (
            {"optimizer": {"micro_batch_tokens": 4095}},
            "optimizer.micro_batch_tokens=4095 is less than sampling.context_tokens=4096",
        ),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate: got nan"),
        ({"loss": {"importance_cap": float("inf")}}, "loss.importance_cap: got inf"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1: got 1.0; input should be less than 1"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas.1: required, and missing"),
        ({"engine": {"gpu_memory_utilization": 0}}, "engine.gpu_memory_utilization: got 0"),
        (
            {"engine": {"kind": "transformers", "sleep": True}},
            "engine: sleep=true has no effect on kind=transformers, whose model stays in memory; set sleep to "
            "false or use kind=vllm",
        ),
        (
            {"environment": {"f1_threshold": 0}},
            "environment.f1_threshold: got 0; input should be greater than 0",
        ),
        ({"steps": 0}, "steps: got 0"),
        ({"steps": "many"}, "steps: got 'many'"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any], message: str) -> None:
    assert message in refused(**changes)


def test_rows_of_mixed_abilities_and_a_server_are_allowed() -> None:
    task = {"kind": "search_r1", "train": ["a"], "ability": "fact-reasoning"}
    config = parse_config(MINIMAL | {"task": task, "environment": {"retriever": {"url": "http://s:1"}}})
    assert isinstance(config.task, QaTask)
    assert config.task.ability == "fact-reasoning"


def test_a_rollout_that_just_fits_is_allowed() -> None:
    parse_config(MINIMAL | {"optimizer": {"micro_batch_tokens": 4096}})


def test_odd_budgets_need_groups_of_three() -> None:
    parse_config(MINIMAL | {"allocation": {"bare_rollouts": 7, "max_per_prompt": 3, "pool": 8}})
    parse_config(MINIMAL | {"allocation": {"strategy": "uniform", "bare_rollouts": 7, "pool": 8}})


@pytest.mark.parametrize(
    "section",
    [
        {"allocation": {"strategy": "uniform", "group_size": 4}},
        {"allocation": {"strategy": "random_prefix", "group_size": 2}},
        {"allocation": {"contrast": "beta_binomial", "exploration": 0.2, "max_per_prompt": 20}},
        {"engine": {"kind": "vllm", "sleep": True}},
        {"engine": {"kind": "transformers"}},
    ],
)
def test_options_that_are_read_survive_a_dump(section: dict[str, Any], tmp_path: Path) -> None:
    """A dump names every key, the unread ones at their defaults too."""
    config = parse_config(MINIMAL | section)
    (tmp_path / "dump.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dump.yaml") == config


def test_instructions_are_said_to_join_the_user_message() -> None:
    assert "user message" in (SearchConfig.model_fields["instructions"].description or "")
