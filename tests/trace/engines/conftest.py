"""vLLM engines, really started. All of them start at once: most of that time is spent on imports."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trace_rl.config.schema import EngineConfig
from trace_rl.engines.vllm_engine import VllmEngine, vllm_options

from ..conftest import CONTEXT

OPTIONS = vllm_options("float32", EngineConfig(), CONTEXT, on_gpu=False)

# A trainer that starts an engine and waits to be killed.
TRAINER = f"""
import sys, time
from pathlib import Path
from trace_rl.engines.vllm_engine import VllmEngine
engine = VllmEngine(Path(sys.argv[1]), options={OPTIONS!r}, log_path=Path(sys.argv[2]), threads=1)
engine.wait_ready()
print(engine._process.pid, flush=True)
time.sleep(3600)
"""


@dataclass
class Started:
    """Engines on their way up: `tied` and `untied`, one whose model directory is empty, and another trainer."""

    tied: VllmEngine
    untied: VllmEngine
    broken: VllmEngine
    trainer: subprocess.Popen[str]
    logs: Path


@pytest.fixture(scope="session")
def started(tiny_policies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    logs = tmp_path_factory.mktemp("engines")
    (logs / "empty").mkdir()

    def start(path: Path, name: str) -> VllmEngine:
        return VllmEngine(path, options=OPTIONS, log_path=logs / f"{name}.log", threads=1)

    engines = [
        start(path, name)
        for path, name in (
            (tiny_policies["tied"], "tied"),
            (tiny_policies["untied"], "untied"),
            (logs / "empty", "broken"),
        )
    ]
    command = [sys.executable, "-P", "-c", TRAINER, str(tiny_policies["tied"]), str(logs / "trainer.log")]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ), cwd=logs)
    yield Started(*engines, trainer, logs)
    for engine in engines:
        engine.close()
    trainer.kill()
    trainer.wait()
    assert trainer.stdout
    trainer.stdout.close()


@pytest.fixture(scope="session")
def tied(started: Started) -> Any:
    started.tied.wait_ready()
    return started.tied


@pytest.fixture(scope="session")
def untied(started: Started) -> Any:
    started.untied.wait_ready()
    return started.untied
