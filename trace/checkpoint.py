"""Checkpoints: a run that resumes goes on as if it had never stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import ledger
from .state import Run

LATEST = "latest"
WORLD = "world.json"  # written into a checkpoint last, when the files of all ranks are there


def save_checkpoint(run: Run, directory: Path, step: int) -> None:
    """Write the state after `step` under `directory/step_N`, then point `latest` to it, then drop the others.

    Kept are the newest `keep_checkpoints`. What a crash left behind goes: half a checkpoint, or one that
    `latest` never pointed to, of a step after this one.
    """
    tag = f"step_{step}"
    if run.ranks.is_main:
        (directory / tag / WORLD).unlink(missing_ok=True)
    run.policy.engine.save_checkpoint(
        str(directory), tag=tag, client_state=_state(run, step), save_latest=False
    )
    run.ranks.barrier()
    if run.ranks.is_main:
        (directory / tag / WORLD).write_text(json.dumps({"ranks": run.ranks.world}))
        pointer = directory / f"{LATEST}.part"
        pointer.write_text(tag)
        os.replace(pointer, directory / LATEST)  # only a whole checkpoint is ever the latest
        kept = [s for s in checkpoints(directory) if s <= step][-run.config.keep_checkpoints :]
        for other in set(directory.glob("step_*")) - {directory / f"step_{s}" for s in kept}:
            shutil.rmtree(other, ignore_errors=True)
    run.ranks.barrier()


def checkpoints(directory: Path) -> list[int]:
    """Steps that have a whole checkpoint, oldest first."""
    return sorted(int(path.parent.name.removeprefix("step_")) for path in directory.glob(f"step_*/{WORLD}"))


class CheckpointError(ValueError):
    """The checkpoint does not fit this run; the message says why."""


def latest_step(directory: Path) -> int:
    """Step of the latest whole checkpoint, 0 when there is none."""
    pointer = directory / LATEST
    return int(pointer.read_text().strip().removeprefix("step_")) if pointer.is_file() else 0


def load_checkpoint(run: Run, directory: Path) -> int:
    """Restore the latest checkpoint into `run`; returns its step, or 0 when there is none.

    Raises CheckpointError when the checkpoint was written by another number of ranks, goes with other training
    questions, or cannot be read.
    """
    pointer = directory / LATEST
    if not pointer.is_file():
        return 0
    tag = pointer.read_text().strip()
    world = _world(directory / tag)
    if world != run.ranks.world:
        raise CheckpointError(
            f"checkpoint {directory / tag} was written by {world} ranks, this run has {run.ranks.world}: "
            "resume with as many ranks as before"
        )
    path, state = run.policy.engine.load_checkpoint(str(directory), tag=tag)
    if path is None:
        raise CheckpointError(f"checkpoint {directory / tag} cannot be read")
    try:
        run.order.load_state_dict(state["order"])
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint {directory / tag} goes with other training questions ({error}): their files have changed; "
            "resume with those it was written with, or choose another run_dir"
        ) from error
    random.setstate(_tuple(state["python_rng"]))
    kind, keys, *rest = state["numpy_rng"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch_rng"])
    run.predictor.load_state_dict(state["predictor"])
    run.totals = ledger.Ledger(**state["totals"])
    run.version = state["version"]
    run.policy.steps = state["optimizer_steps"]
    return int(state["step"])


def _world(path: Path) -> int:
    try:
        return int(json.loads((path / WORLD).read_text())["ranks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def _state(run: Run, step: int) -> dict[str, Any]:
    """Plain numbers and tensors only, so that any reader can load them; each rank writes its own."""
    kind, keys, *rest = np.random.get_state()
    return {
        "step": step,
        "version": run.version,
        "optimizer_steps": run.policy.steps,
        "order": run.order.state_dict(),
        "predictor": run.predictor.state_dict(),
        "totals": asdict(run.totals),
        "python_rng": random.getstate(),
        "numpy_rng": [kind, np.asarray(keys).tolist(), *rest],
        "torch_rng": torch.get_rng_state(),
    }


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list | tuple) else value
