"""Makes `bench` importable: it is not installed, and the root on the import path would hide other libraries."""

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "bench"

if "bench" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "bench", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["bench"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["bench"])
