from pathlib import Path

import pytest

from .examinee import Bench, new_bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return new_bench(tmp_path)
