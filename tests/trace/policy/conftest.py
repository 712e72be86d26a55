"""What the policy tests share: tiny models on disk, and one run of `worker.py` on each number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .launching import launch
from .oracle import write_model
from .test_logits import scaled_otherwise

Results = dict[str, Any]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of models: untied, tied, other (untied, other weights), scaled (its logits, in its own way)."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("untied", "tied", "other")):
        write_model(root / name, tied=name == "tied", seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        scaled_otherwise().save_pretrained(root / "scaled")
    return root


def _run(models: Path, out: Path, ranks: int) -> Results:
    launch(Path(__file__).with_name("worker.py"), str(models), str(out), ranks=ranks, timeout=240)
    return {**torch.load(out / "results.pt", weights_only=False), "out": out}


@pytest.fixture(scope="session")
def one_rank(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _run(models, tmp_path_factory.mktemp("one_rank"), 1)


@pytest.fixture(scope="session")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _run(models, tmp_path_factory.mktemp("two_ranks"), 2)


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def results(request: pytest.FixtureRequest, ranks: int) -> Results:
    found: Results = request.getfixturevalue("one_rank" if ranks == 1 else "two_ranks")
    return found
