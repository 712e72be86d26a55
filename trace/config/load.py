"""YAML and `--set` into a `Config`; every refusal names the key, what was given and what would do.

Imports nothing heavy: a mistake in a run's configuration shows at once, before torch is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from .explain import explain
from .schema import Config
from .section import Section

Root = TypeVar("Root", bound=Section)

# What the trainer computes itself: setting it in the `deepspeed` section could only contradict it.
TRAINER_OWNS = {
    "train_batch_size": "allocation.bare_rollouts and allocation.continuations: a step is one sampled batch",
    "train_micro_batch_size_per_gpu": "optimizer.micro_batch_tokens: micro-batches are cut by tokens",
    "gradient_accumulation_steps": "optimizer.micro_batch_tokens: the trainer counts its micro-batches",
    "managed_gradient_accumulation": "optimizer.micro_batch_tokens: the trainer says when a step is complete",
    "gradient_clipping": "optimizer.gradient_clipping",
    "optimizer": "the `optimizer` section",
    "scheduler": "optimizer.warmup_steps",
    "bf16": "model.dtype",
    "fp16": "model.dtype (float32 or bfloat16)",
    "amp": "model.dtype",
    "torch_autocast": "model.dtype",
}


class ConfigError(ValueError):
    """The configuration cannot be used; the message is meant for the user."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `a.b=value` overrides (values are YAML), validate.

    Raises ConfigError with every problem found, one a line.
    """
    return parse_config(read_config(path, overrides))


def read_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping in `path` with the overrides in place, not yet validated; raises ConfigError."""
    try:
        raw = _read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if raw is None:
        raise ConfigError(f"{path} is empty; it must hold a mapping of sections")
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, found {type(raw).__name__}")
    raw = {key: _unshared(value) for key, value in raw.items()}
    for override in overrides:
        _override(raw, override)
    return raw


def validated(root: type[Root], raw: dict[str, Any]) -> Root:
    """A plain mapping as a `root`; a section that is null (its keys commented out) has its defaults.

    Raises ConfigError with every problem found, one a line.
    """
    try:
        return root.model_validate({key: value for key, value in raw.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("\n".join(explain(root, item) for item in error.errors())) from None


def parse_config(raw: dict[str, Any]) -> Config:
    """Validate the mapping of a run. Raises ConfigError with every problem found, one a line."""
    config = validated(Config, raw)
    problems = _deepspeed_problems(config.deepspeed)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def dump_config(config: Section) -> str:
    """The resolved config as YAML that reads back equal."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-6 as a number and takes no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in seen:
                message = f"key {key.value!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


# YAML 1.1, which PyYAML speaks, wants a dot and a signed exponent and takes 1e-6 for text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _unshared(value: Any) -> Any:
    """A copy in which no two places are one object, as YAML's `*aliases` are: an override changes one place."""
    if isinstance(value, dict):
        return {key: _unshared(inner) for key, inner in value.items()}
    return [_unshared(inner) for inner in value] if isinstance(value, list) else value


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not all((*sections, last)):
        raise ConfigError(
            f"--set {override}: expected key=value, for instance --set optimizer.learning_rate=1e-6"
        )
    try:
        value = _read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML: {error}") from error
    place = raw
    for section in sections:
        if place.get(section) is None:
            place[section] = {}
        place = place[section]
        if not isinstance(place, dict):
            raise ConfigError(f"--set {override}: {section} is a value, not a section")
    place[last] = value


def _deepspeed_problems(section: dict[str, Any]) -> list[str]:
    problems = [
        f"deepspeed.{key}: the trainer sets this; use {TRAINER_OWNS[key]}"
        for key in section
        if key in TRAINER_OWNS
    ]
    zero = section.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return [*problems, f"deepspeed.zero_optimization: got {zero!r}, expected a mapping"]
    if zero.get("stage", 3) != 3:
        problems.append(
            f"deepspeed.zero_optimization.stage: got {zero['stage']!r}, the trainer is built for ZeRO stage 3"
        )
    if zero.get("overlap_comm"):
        problems.append(
            "deepspeed.zero_optimization.overlap_comm: must stay false, since the trainer runs several "
            "backward passes for one step"
        )
    return problems
