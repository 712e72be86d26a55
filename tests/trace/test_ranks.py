"""A rank that fails says so to the others, whatever its error looks like."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trace_rl.ranks import Ranks

from .launch import ROOT, environment, free_port

SCRIPT = """
import sys, torch
from trace_rl.ranks import RankError, connect, end_process

ranks = connect(torch.device("cpu"))


class Unpicklable(Exception):
    def __init__(self):
        super().__init__()
        self.handle = open("/dev/null")


def fail():
    raise Unpicklable()


def outcome(call):
    try:
        return repr(call())
    except Exception as error:
        return f"{type(error).__name__}|{error}"


results = [
    outcome(lambda: ranks.gather(ranks.rank)),
    outcome(lambda: ranks.from_main(lambda: 7)),
    outcome(lambda: ranks.from_main(fail)),
    outcome(lambda: ranks.agree(TimeoutError() if ranks.rank == 1 else None)),
    outcome(lambda: ranks.agree(None)),
]
with open(f"{sys.argv[1]}/rank{ranks.rank}", "w") as file:
    file.write("\\n".join(results))
ranks.barrier()
end_process(0)
"""


def test_failures_reach_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    port = str(free_port())
    processes = []
    for rank in range(2):
        env = environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(subprocess.Popen([sys.executable, str(script), str(tmp_path)], cwd=ROOT, env=env))
    try:
        assert [p.wait(timeout=120) for p in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    main, other = ((tmp_path / f"rank{r}").read_text().splitlines() for r in range(2))
    assert main == ["[0, 1]", "7", "Unpicklable|", "RankError|rank 1 failed: TimeoutError: ", "None"]
    assert other == ["[0, 1]", "7", "RankError|rank 0 failed: Unpicklable: ", "TimeoutError|", "None"]


def test_a_single_rank_raises_the_error_itself() -> None:
    alone = Ranks(0, 1, 0, None)
    with pytest.raises(ZeroDivisionError):
        alone.from_main(lambda: 1 // 0)
    with pytest.raises(TimeoutError):
        alone.agree(TimeoutError())
    alone.agree(None)
    assert os.getpid() in alone.gather(os.getpid())
