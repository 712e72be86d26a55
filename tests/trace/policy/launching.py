"""Scripts on one or several ranks, in processes of their own that always end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil

LAUNCHER_SETS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(script: Path, *arguments: str, ranks: int, timeout: int) -> None:
    """Run `script` under the deepspeed launcher, or alone for one rank; fails with the end of its output."""
    binaries = Path(sys.executable).parent
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_SETS}
    environment |= {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    port = str(free_port())
    command = [sys.executable]
    if ranks > 1:
        command = [
            str(binaries / "deepspeed"),
            "--num_gpus",
            str(ranks),
            "--master_port",
            port,
            "--no_local_rank",
        ]
    process = subprocess.Popen(
        [*command, str(script), *arguments],
        env=environment | {"MASTER_PORT": port},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        tree = psutil.Process(process.pid)
        for member in [*tree.children(recursive=True), tree]:
            member.kill()
        output, _ = process.communicate()
        print(output[-4000:])
        raise
    assert process.returncode == 0, output[-6000:]
    # DeepSpeed's communication op frees none of its 66 MiB per rank: a day of short runs filled the memory.
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
