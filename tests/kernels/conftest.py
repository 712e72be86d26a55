"""Device programs run on a GPU, or in Triton's interpreter on CPU tensors when TRITON_INTERPRET=1.

Triton reads that variable when it is imported, and under it nothing else of the suite should run: with neither,
only `test_interpreted.py` is collected, which runs all the others in a process of their own.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trace_kernels import block_lists
from trace_kernels.device import tiles as tables
from trace_kernels.device.tiles import Tile, Tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent
RUNS_THE_OTHERS = "test_interpreted.py"


if INTERPRETED:
    collect_ignore = [RUNS_THE_OTHERS]
elif not torch.cuda.is_available():
    collect_ignore = [file.name for file in HERE.glob("test_*.py") if file.name != RUNS_THE_OTHERS]


@pytest.fixture(autouse=True, scope="session")
def prepared_once() -> None:
    """The interpreter replaces `triton.language` at every call of a device function: once will do.

    The calling program has replaced what its functions name `tl`; Triton's own name another module.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    prepared = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "tl" not in self.fn.__globals__ and self.fn not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and scratch are allocated full of NaN: an element that no program writes fails every comparison."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return filled

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def set_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`set_tiles((m, n), (m, n), (m, n))`: blocks of forward, dq and dkdv; short ranges are cut too."""

    def put(*blocks: tuple[int, int]) -> None:
        chosen = Tiles(*(Tile(m, n, 4, 1) for m, n in blocks))
        monkeypatch.setattr(tables, "TUNED", {})
        for name, table in tables.DEFAULTS.items():
            monkeypatch.setitem(tables.DEFAULTS, name, dict.fromkeys(table, chosen))
        monkeypatch.setattr(block_lists, "SHORTEST_ITEM", 2)

    return put
