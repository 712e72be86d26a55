"""vLLM with prefix caching, in a process of its own per rank."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from ..config.schema import EngineConfig
from .protocol import Completion, EngineCounters, EngineError, Sampling

START_TIMEOUT_S = 1800.0  # large models load for minutes
REPLY_TIMEOUT_S = 1800.0

# The engine is a single-rank program of its own: the launcher's rendezvous must not reach it.
_TRAINER_ONLY = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE", "NODE_RANK",
)  # fmt: skip


class VllmEngine:
    """Engine protocol over a `vllm_worker` process.

    `options` are arguments of `vllm.LLM`. `kv_cache_gib` is the CPU KV cache in GiB (whole numbers);
    on a GPU `gpu_memory_utilization` in `options` rules instead. `threads` is the number of CPU threads
    of the process, `gpu` the index of its device among those visible. The process writes everything it
    prints to `log_path`.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        options: dict[str, Any],
        log_path: Path,
        kv_cache_gib: int = 1,
        threads: int | None = None,
        gpu: int | None = None,
    ) -> None:
        self._log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        env = {k: v for k, v in os.environ.items() if k not in _TRAINER_ONLY}
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib)}
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
        if options.get("enforce_eager"):
            env["TORCHDYNAMO_DISABLE"] = "1"  # nothing to compile: saves seconds at the start
        if threads:
            env["OMP_NUM_THREADS"] = str(threads)
        if gpu is not None:
            visible = env.get("CUDA_VISIBLE_DEVICES", "")
            env["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
        ours, theirs = Pipe()
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trace_rl.engines.vllm_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=log_path.parent,  # never the repository root: its `trace/` would hide the standard module
            )
        theirs.close()
        self._connection = ours
        self._send_lock = threading.Lock()
        self._keys = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Completion]]] = {}
        self._waiting_lock = threading.Lock()
        self._replies: Queue[tuple[str, Any]] = Queue()
        self._dead: str | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._send("options", {"model": str(model_path.resolve()), **options}, bare=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Block until the model is loaded; raises EngineError when the start failed."""
        self._expect("ready", START_TIMEOUT_S)

    async def generate(self, prefix_ids: Sequence[int], sampling: Sampling) -> Completion:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        key = next(self._keys)
        with self._waiting_lock:
            if self._dead:
                raise EngineError(self._dead)
            self._waiting[key] = (loop, future)
        self._send("generate", (key, list(prefix_ids), asdict(sampling)))
        try:
            return await future
        except asyncio.CancelledError:
            with self._waiting_lock:
                abandoned = self._waiting.pop(key, None) is not None
            if abandoned:
                with contextlib.suppress(EngineError):
                    self._send("abort", key)
            raise

    def load_weights(self, source: Path, version: int) -> None:
        self._send("load", (str(source.resolve()), version))
        self._expect("loaded", REPLY_TIMEOUT_S)

    def sleep(self) -> None:
        self._send("sleep", None)
        self._expect("asleep", REPLY_TIMEOUT_S)

    def counters(self) -> EngineCounters:
        self._send("counters", None)
        return EngineCounters(**self._expect("counters", REPLY_TIMEOUT_S))

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                self._send("close", None)
                self._process.wait(timeout=30)
            except (EngineError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        self._reader.join()  # it ends with the process, and reads the connection until then
        self._connection.close()

    def _send(self, name: str, payload: Any, bare: bool = False) -> None:
        try:
            with self._send_lock:
                self._connection.send(payload if bare else (name, payload))
        except OSError as error:
            raise EngineError(self._dead or self._obituary()) from error

    def _expect(self, name: str, timeout: float) -> Any:
        try:
            got, payload = self._replies.get(timeout=timeout)
        except Empty:
            raise EngineError(f"no {name!r} from the engine in {timeout:.0f} s\n{self._log_tail()}") from None
        if got == "dead":
            self._replies.put((got, payload))  # every later call fails the same way
            raise EngineError(payload)
        assert got == name, f"engine answered {got!r} to {name!r}"
        return payload

    def _read(self) -> None:
        while True:
            try:
                name, payload = self._connection.recv()
            except (EOFError, OSError):
                self._bury()
                return
            if name in ("done", "refused"):
                key, result = payload
                with self._waiting_lock:
                    waiting = self._waiting.pop(key, None)  # None: abandoned meanwhile
                if waiting and name == "done":
                    _tell(*waiting, Completion(**result))
                elif waiting:
                    _tell(*waiting, EngineError(f"vLLM refused a request: {result}"))
            else:
                self._replies.put((name, payload))

    def _bury(self) -> None:
        message = self._obituary()
        with self._waiting_lock:
            self._dead = message
            waiting, self._waiting = list(self._waiting.values()), {}
        for loop, future in waiting:
            _tell(loop, future, EngineError(message))
        self._replies.put(("dead", message))

    def _obituary(self) -> str:
        try:
            code: int | str | None = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = "unknown"
        ended = f"the vLLM engine process ended (exit code {code}); its log, {self._log_path}, ends:"
        return f"{ended}\n{self._log_tail()}"

    def _log_tail(self, lines: int = 30) -> str:
        try:
            return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return f"(log not readable: {error})"


def vllm_options(dtype: str, engine: EngineConfig, context_tokens: int, *, on_gpu: bool) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for this run."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": context_tokens,
        "max_num_seqs": engine.max_sequences,
        "seed": 0,
    }
    if on_gpu:
        return options | {
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "enable_sleep_mode": engine.sleep,
            "enforce_eager": engine.enforce_eager,
        }
    # Without compilation the CPU engine starts in seconds. vLLM 0.32 rewinds a seeded request's generator
    # after a partial prefill, which CPU generators cannot do: prefill whole prompts.
    return options | {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, context_tokens),
        "block_size": 32,  # the smallest: short prefixes are shared too
    }


def _tell(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Completion], result: Completion | EngineError
) -> None:
    """Settle `future` from another thread; nobody listens once its loop is closed."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle)
