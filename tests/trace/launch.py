"""Starting the trainer as a user does, with a config of a few seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]

TINY: dict[str, Any] = {
    "steps": 2,
    "model": {},
    "task": {"kind": "world", "entities": 30, "min_hops": 1, "train_questions": 200, "test_questions": 12},
    "environment": {"reward": "exact_match", "instructions": "", "max_observation_tokens": 64},
    "sampling": {"turn_tokens": 24, "context_tokens": 256},
    "allocation": {"bare_rollouts": 12, "continuations": 1, "pool": 6, "max_per_prompt": 4},
    "optimizer": {"learning_rate": 5e-4, "micro_batch_tokens": 512},
    "cold_start": {
        "steps": 100,
        "batch": 16,
        "learning_rate": 4e-3,
        "hidden_size": 128,
        "layers": 2,
        "hasty": 0.5,
    },
    "evaluation": {"questions": 12},
    "checkpoint_every": 1,
}


def write_config(path: Path, **sections: Any) -> Path:
    """TINY with whole sections replaced or, for mappings, updated."""
    config = dict(TINY)
    for name, value in sections.items():
        both = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = config[name] | value if both else value
    path.write_text(yaml.safe_dump(config))
    return path


def environment() -> dict[str, str]:
    bin_directory = str(Path(sys.executable).parent)
    return os.environ | {
        "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def deepspeed_command(config: Path, *arguments: str, ranks: int = 1) -> list[str]:
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ["--num_gpus", str(ranks), "--master_port", str(free_port())]
    return [str(launcher), *options, "trace/train.py", "--config", str(config), *arguments]


def train(
    config: Path, *arguments: str, ranks: int = 1, timeout: int = 400
) -> subprocess.CompletedProcess[str]:
    """Run the trainer under its launcher from the repository root."""
    return subprocess.run(
        deepspeed_command(config, *arguments, ranks=ranks),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
