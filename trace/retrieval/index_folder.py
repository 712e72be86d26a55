"""The folder of an index on disk: `manifest.json`, `tantivy/`, and while it is being built `build/`.

The manifest says which corpus the index is of and, once it is complete, how many passages it holds.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FORMAT = 1
STORED = ("id", "title", "text")
"""Fields of a passage that searches read back."""

_MANIFEST = "manifest.json"
_DRAFT = "manifest.json.draft"
_EDGE_BYTES = 2**20


class DiskIndexError(ValueError):
    """A folder that cannot be used as an index, or not for this corpus; the message says what to do."""


@dataclass(frozen=True)
class Manifest:
    """What an index was built from; ``passages`` is None until it is complete."""

    corpus_bytes: int
    corpus_mtime_ns: int
    corpus_edges: str
    title_weight: int
    passages: int | None = None
    format: int = FORMAT


def describe_corpus(corpus: Path, title_weight: int) -> Manifest:
    """Size, time of the last change and a hash of the first and last MiB of the file."""
    state = corpus.stat()
    edges = hashlib.sha256()
    with corpus.open("rb") as file:
        edges.update(file.read(_EDGE_BYTES))
        file.seek(max(0, state.st_size - _EDGE_BYTES))
        edges.update(file.read(_EDGE_BYTES))
    return Manifest(state.st_size, state.st_mtime_ns, edges.hexdigest(), title_weight)


def tantivy_folder(folder: Path) -> Path:
    """Where the index itself lies."""
    return folder / "tantivy"


def build_folder(folder: Path) -> Path:
    """What is needed to go on after a break; removed when the index is complete."""
    return folder / "build"


def holds_nothing(folder: Path) -> bool:
    """Whether an index can be begun there: no such folder, an empty one, or one whose beginning was broken off."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(entry.name == _DRAFT for entry in folder.iterdir())


def read_manifest(folder: Path) -> Manifest | None:
    """None where there is none. Raises DiskIndexError if it is not one of ours."""
    file = folder / _MANIFEST
    try:
        data: Any = json.loads(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DiskIndexError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DiskIndexError(
            f"{file} is not of an index of format {FORMAT}: build the index in another folder"
        )
    try:
        return Manifest(**data)
    except TypeError as error:
        raise DiskIndexError(f"{file} is not of an index of format {FORMAT}: {error}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replaces it in one step that survives a crash."""
    draft = folder / _DRAFT
    with draft.open("w") as file:
        json.dump(asdict(manifest), file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / _MANIFEST)


def import_tantivy() -> ModuleType:
    """The library, or an ImportError that says how to get it."""
    try:
        import tantivy
    except ImportError as error:
        raise ImportError("an index on disk needs tantivy: pip install 'trace-kernels[train]'") from error
    module: ModuleType = tantivy
    return module
