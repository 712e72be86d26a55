"""The directory of weights to evaluate: a model's own, a training run's policy, or a checkpoint's made whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import yaml

from trace_rl.config.schema import ModelConfig
from trace_rl.policy.module import ModelError

from .consolidate import consolidate

_CHUNK, _CHUNKS = 1 << 16, 64


def find_model(model: ModelConfig, out: Path, say: Callable[[str], None]) -> Path:
    """The Hugging Face directory that `model.path` means; a checkpoint's is made below `out`.

    A training run's directory means its `policy`, or its latest checkpoint while there is none. `say` hears which
    it was. Raises ModelError, with what was found, for anything else.
    """
    path = model.path
    if not path.is_dir():
        raise ModelError(f"model.path: there is no directory {path}")
    if (path / "config.json").is_file():
        return path
    if (path / "policy" / "config.json").is_file():
        say(f"model: {path / 'policy'}, the final policy of the run")
        _warn_of_other_prompts(model, path, say)
        return path / "policy"
    for directory in (path / "checkpoints", path):
        if (directory / "latest").is_file():
            path = directory / (directory / "latest").read_text().strip()
            say(f"model: {path}, the run's latest checkpoint")
    if not list(path.glob("*_model_states.pt")):
        raise ModelError(_what_is_there(model.path))
    _warn_of_other_prompts(model, path.parents[1], say)
    return consolidate(path, out, say)


def fingerprint(directory: Path) -> str:
    """A hash of the weights by their sizes and samples of their bytes: any training step changes it, at no cost.

    Raises ModelError when there are no weights.
    """
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")])
    if not files:
        raise ModelError(f"{directory} holds a config.json, but no *.safetensors weights")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as weights:
            for part in range(_CHUNKS):
                weights.seek(max(0, size - _CHUNK) * part // (_CHUNKS - 1))
                digest.update(weights.read(_CHUNK))
    return digest.hexdigest()


def _what_is_there(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return (
        f"model.path: {path} holds {shown or 'nothing'}; expected a Hugging Face directory (config.json and "
        "*.safetensors), a training run (policy/ or checkpoints/latest) or a checkpoint (run/checkpoints/step_N)"
    )


def _warn_of_other_prompts(model: ModelConfig, run_dir: Path, say: Callable[[str], None]) -> None:
    """A policy that is asked otherwise than it was trained answers worse: never without a word."""
    file = run_dir / "config.yaml"
    trained = (yaml.safe_load(file.read_text()) or {}).get("model", {}) if file.is_file() else {}
    now = model.model_dump(mode="json")
    for key in ("chat_template", "observations"):
        if key in trained and trained[key] != now[key]:
            say(f"warning: the run was trained with model.{key}={trained[key]}, this asks with {now[key]}")
