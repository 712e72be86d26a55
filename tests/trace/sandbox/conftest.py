"""A tool that many tests share, and eyes on the processes and files around it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trace_rl.sandbox import Limits, PythonTool

from .processes import children, directory_of, zygotes

LIMITS = Limits(
    wall_seconds=8, replay_seconds=8, cpu_seconds=8, memory_mib=300, file_mib=4, output_chars=3000
)


@pytest.fixture(scope="session")
def tool() -> Iterator[PythonTool]:
    with PythonTool(LIMITS) as tool:
        yield tool


@pytest.fixture
def calm(tool: PythonTool) -> Iterator[None]:
    """Fails if the zygote was harmed, or a process or a file is left, when the test is over."""
    assert tool.run([], "1").output == "1\n"
    before = zygotes()
    yield
    assert zygotes() == before
    assert [child for pid in before for child in children(pid)] == []
    assert [[file.name for file in directory_of(pid).iterdir()] for pid in before] == [["zygote.log"]] * len(
        before
    )
