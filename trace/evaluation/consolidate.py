"""A run's ZeRO-3 checkpoint as one Hugging Face directory."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from trace_rl.policy.module import DTYPES, ModelError

SOURCE = "checkpoint.json"  # in the made directory: what it was made from
_WRAPPER = "model."  # the policy holds the language model under this name


def consolidate(checkpoint: Path, out: Path, say: Callable[[str], None]) -> Path:
    """Join the shards of `checkpoint` (run/checkpoints/step_N) in `out/model/step_N`, unless that was done before.

    Weights come in the run's `model.dtype`; config and tokenizer are those of the model the run began with. Needs
    memory for the whole weights in that type. Raises ModelError when the checkpoint or that model cannot be read.
    """
    target = out / "model" / checkpoint.name
    source = _description(checkpoint)
    if (target / SOURCE).is_file() and json.loads((target / SOURCE).read_text()) == source:
        say(f"model: {target}, made earlier from {checkpoint}")
        return target
    say(f"model: joining the shards of {checkpoint} in {target} ...")
    run = _run_model(checkpoint)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    dtype = DTYPES[run["dtype"]]
    _copy_config(_first_model(run, checkpoint), part, dtype)
    weights = _weights(checkpoint, dtype, part.parent / "consolidate.log")
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    (part / SOURCE).write_text(json.dumps(source))
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)  # never half a model under the final name
    return target


def _description(checkpoint: Path) -> dict[str, Any]:
    shards = sorted(checkpoint.glob("*.pt"))
    files = {s.name: [s.stat().st_size, s.stat().st_mtime_ns] for s in shards}
    return {"checkpoint": str(checkpoint.resolve()), "files": files}


def _run_model(checkpoint: Path) -> dict[str, Any]:
    """The `model` section of the run that wrote the checkpoint."""
    file = checkpoint.parents[1] / "config.yaml"
    try:
        model: dict[str, Any] = yaml.safe_load(file.read_text())["model"]
        model["path"], DTYPES[model["dtype"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ModelError(
            f"{checkpoint} is a checkpoint, but its run's config {file}, which says whose tokenizer and config go "
            f"with it, cannot be read: {error!r}"
        ) from error
    return model


def _first_model(run: dict[str, Any], checkpoint: Path) -> Path:
    """A directory with config and tokenizer of the run's model."""
    run_dir = checkpoint.parents[1]
    places = [Path(run["path"]), run_dir / "cold_start", run_dir / "policy"]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ModelError(
        f"{checkpoint}: config and tokenizer of the run's model are in none of {', '.join(map(str, places))}; "
        "start in the directory that the run was started in"
    )


def _copy_config(model: Path, target: Path, dtype: torch.dtype) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model, local_files_only=True)
    config.dtype = dtype
    config.save_pretrained(target)
    AutoTokenizer.from_pretrained(model, local_files_only=True).save_pretrained(target)
    if (model / "generation_config.json").is_file():
        shutil.copy(model / "generation_config.json", target)


def _weights(checkpoint: Path, dtype: torch.dtype, log: Path) -> dict[str, torch.Tensor]:
    """Whole parameters by their Hugging Face name; tied ones come once."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with log.open("a") as lines, contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
        try:
            sharded = get_fp32_state_dict_from_zero_checkpoint(
                str(checkpoint.parent), tag=checkpoint.name, lazy_mode=True
            )
        except Exception as error:  # whatever torch.load and DeepSpeed make of half a file
            raise ModelError(f"checkpoint {checkpoint} cannot be read: {error}") from error
        weights: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in sharded.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                weights[name.removeprefix(_WRAPPER)] = tensor.contiguous().to(dtype)
    return weights
