"""The engine process: starts that fail, deaths, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from trace_rl.engines.protocol import EngineError, Sampling
from trace_rl.engines.vllm_engine import VllmEngine

from .conftest import Started
from .oracle import HANG_S, prompts


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(process: psutil.Process) -> None:
    for _ in range(HANG_S * 10):
        if not is_running(process.pid):
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"{process} is still there")


def test_a_start_that_fails_shows_the_log(started: Started) -> None:
    engine, log = started.broken, started.logs / "broken.log"
    with pytest.raises(EngineError, match=r"engine process ended \(exit code 1\)") as failure:
        engine.wait_ready()
    assert str(log) in str(failure.value)
    assert log.read_text().splitlines()[-1] in str(failure.value)
    assert str(started.logs / "empty") in str(failure.value)  # vLLM's own reason names the directory
    with pytest.raises(EngineError, match="engine process ended"):
        engine.wait_ready()
    engine.close()
    engine.close()


def test_a_killed_engine_fails_every_call_and_none_hangs(
    started: Started, untied: VllmEngine, tiny_policies: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is stopped first, so that all three calls are in flight when it dies."""
    in_flight = threading.Barrier(3)
    expect = untied._expect

    def expect_together(name: str, timeout: float) -> object:
        in_flight.wait(HANG_S)
        return expect(name, timeout)

    async def calls() -> list[object]:
        os.kill(untied._process.pid, signal.SIGSTOP)
        generations = [untied.generate(p, Sampling(1.0, 100)) for p in prompts(3, 0)]
        others = [
            asyncio.to_thread(untied.load_weights, tiny_policies["untied"], 9),
            asyncio.to_thread(untied.counters),
        ]
        everything = asyncio.gather(*generations, *others, return_exceptions=True)
        await asyncio.to_thread(in_flight.wait, HANG_S)
        os.kill(untied._process.pid, signal.SIGKILL)
        return await asyncio.wait_for(everything, HANG_S)

    with monkeypatch.context() as patch:
        patch.setattr(untied, "_expect", expect_together)
        errors = asyncio.run(calls())
    last_line = (started.logs / "untied.log").read_text().splitlines()[-1]
    for error in errors:
        assert isinstance(error, EngineError), error
        assert "exit code -9" in str(error)
        assert str(started.logs / "untied.log") in str(error)
        assert last_line in str(error)

    with pytest.raises(EngineError, match="exit code -9"):  # and so does whoever comes later
        asyncio.run(untied.generate([7], Sampling(1.0, 5)))
    for call in (untied.counters, untied.sleep, lambda: untied.load_weights(tiny_policies["untied"], 9)):
        with pytest.raises(EngineError, match="exit code -9"):
            call()
    untied.close()
    untied.close()


def test_the_engine_ends_when_its_trainer_is_killed(started: Started) -> None:
    assert started.trainer.stdout
    line = started.trainer.stdout.readline()
    assert line, (started.logs / "trainer.log").read_text()
    worker = psutil.Process(int(line))
    assert is_running(worker.pid)
    started.trainer.kill()
    started.trainer.wait()
    wait_for_end(worker)


def test_close_leaves_no_process_and_may_be_called_twice(started: Started, tied: VllmEngine) -> None:
    worker = psutil.Process(tied._process.pid)
    family = [worker, *worker.children(recursive=True)]
    tied.close()
    tied.close()
    for process in family:
        wait_for_end(process)
    with pytest.raises(EngineError, match="engine process ended"):
        asyncio.run(tied.generate([7], Sampling(1.0, 5)))
    with pytest.raises(EngineError, match="engine process ended"):
        tied.counters()
