"""Ranks of a few programs, forked from one process that has imported what is heavy: each import takes seconds.

Started as a program it serves: a line of JSON in, `{"program": [path, argument, ...], "ranks", "port", "logs",
"seconds"}`, and a line with the ranks' exit codes out. It ends with its input.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

TIMEOUT_S = 240


class RankServer:
    """The process that forks; it imports in the background until it is asked for something."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *program: str, ranks: int, logs: Path) -> tuple[list[int], list[str]]:
        """Exit codes and outputs of the ranks of a Python program, as `torchrun` would start them."""
        assert self._process.stdin
        assert self._process.stdout
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = {"program": program, "ranks": ranks, "port": port, "logs": str(logs), "seconds": TIMEOUT_S}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        return codes, [_log(logs, rank).read_text() for rank in range(ranks)]

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank{rank}.log"


def _become_rank(job: dict[str, Any], rank: int) -> None:
    signal.alarm(job["seconds"])  # nobody waits for ever for a rank that waits for a dead one
    output = os.open(_log(Path(job["logs"]), rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"])}
    sys.argv = list(job["program"])
    runpy.run_path(sys.argv[0], run_name="__main__")


def _fork(job: dict[str, Any], rank: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _become_rank(job, rank)
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def serve() -> None:
    import deepspeed  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import trace_rl.evaluation.run
    import trace_rl.policy.zero3  # noqa: F401

    assert threading.active_count() == 1  # the forks of other threads' locks would stay locked
    for line in sys.stdin:
        job = json.loads(line)
        children = [_fork(job, rank) for rank in range(job["ranks"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve()
