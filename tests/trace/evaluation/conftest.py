from collections.abc import Iterator
from pathlib import Path

import pytest

from .examinee import Bench, new_bench
from .forking import RankServer


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return new_bench(tmp_path)


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()
