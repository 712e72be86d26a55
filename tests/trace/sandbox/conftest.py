"""Tools that many tests share, and eyes on the processes and files around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trace_rl.sandbox import Limits, PythonTool
from trace_rl.sandbox.processors import processor_share

from .processes import children, directory_of, zygotes

LIMITS = Limits(
    cpu_seconds=8, idle_seconds=8, replay_seconds=8, memory_mib=300, file_mib=4, output_chars=3000
)
STRICT = Limits(cpu_seconds=1, idle_seconds=0.5, replay_seconds=0.4)


@pytest.fixture(scope="session")
def tool() -> Iterator[PythonTool]:
    with PythonTool(LIMITS, calls=2) as tool:
        tool.probe()
        yield tool


@pytest.fixture(scope="session")
def strict() -> Iterator[PythonTool]:
    """Short of time, and with more calls at a time than there are processors."""
    with PythonTool(STRICT, calls=12 * processor_share()) as tool:
        yield tool


@pytest.fixture
def calm(tool: PythonTool) -> Iterator[None]:
    """Fails if the zygote was harmed, or a process or a file is left, when the test is over."""
    before = zygotes()
    yield
    assert zygotes() == before
    assert [child for pid in before for child in children(pid)] == []
    assert [[file.name for file in directory_of(pid).iterdir()] for pid in before] == [["zygote.log"]] * len(
        before
    )
