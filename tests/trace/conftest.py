"""Real parts that many tests share: a small world, its tokenizer, tiny random policies on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trace_rl.cold_start import new_policy
from trace_rl.config.schema import ColdStartConfig
from trace_rl.tasks.world import World, WorldConfig, build_world
from trace_rl.tasks.world_tokenizer import world_tokenizer

CONTEXT = 256


@pytest.fixture(scope="session")
def tiny_world() -> World:
    sizes = {"people": 6, "places": 6, "works": 6, "relations_per_kind": 2, "max_hops": 2}
    return build_world(0, WorldConfig(**sizes, train_questions=24, test_questions=8))


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_world: World) -> Any:
    return world_tokenizer(tiny_world)


@pytest.fixture(scope="session")
def tiny_policies(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of random policies: two with tied embeddings, two with an output head of their own."""
    root = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate(("tied", "tied_other", "untied", "untied_other")):
        shape = ColdStartConfig(layers=2, heads=4, kv_heads=2, tie_embeddings=name.startswith("tied"))
        new_policy(shape, tiny_tokenizer, CONTEXT, root / name, seed)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="session")
def tiny_policy(tiny_policies: dict[str, Path]) -> Path:
    """Directory of a random two-layer policy with tied embeddings and `tiny_tokenizer`."""
    return tiny_policies["tied"]
