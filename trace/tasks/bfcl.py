"""BFCL v4 multi-turn: entries read from the `bfcl-eval` wheel, and a fixed split into train and test."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .task import Task

SUBSETS = ("base", "miss_func", "miss_param", "long_context")
INSTALL = "pip install --no-deps bfcl-eval==2026.3.23"

_PREFIX = "multi_turn_"
_DOCUMENTATION = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
# The benchmark's loader adds this to every function known from the start, not to those held back.
_SYNTAX_HINT = " Note that the provided function is in Python 3 syntax."


@dataclass(frozen=True)
class Entry:
    """One multi-turn conversation. Entries are cached and shared: nobody may change what they hold.

    Attributes:
        id: e.g. ``"multi_turn_base_17"``.
        subset: one of :data:`SUBSETS`.
        questions: the user's message of each turn; ``""`` in the turn that only reveals held-back functions.
        ground_truth: Python call strings of each turn; empty where the request cannot be fulfilled.
        classes: names of the simulated APIs.
        config: initial state of each API.
        functions: documentation of the functions known from the start.
        revealed: documentation of the functions that become known at a turn (``miss_func``).
    """

    id: str
    subset: str
    questions: tuple[str, ...]
    ground_truth: tuple[tuple[str, ...], ...]
    classes: tuple[str, ...]
    config: dict[str, Any]
    functions: tuple[dict[str, Any], ...]
    revealed: dict[int, tuple[dict[str, Any], ...]]

    @property
    def long_context(self) -> bool:
        """Whether the simulators pad their state with bulk data."""
        return self.subset == "long_context"

    @property
    def scenario(self) -> int:
        """The number that the four variants of a conversation share."""
        return int(self.id.rsplit("_", 1)[1])

    @property
    def function_names(self) -> frozenset[str]:
        """All functions that can be called, those still held back included."""
        held_back = (f for functions in self.revealed.values() for f in functions)
        return frozenset(f["name"] for f in (*self.functions, *held_back))


def load_bfcl(
    subsets: Sequence[str] = SUBSETS,
    train_share: float = 0.8,
    seed: int = 0,
    split_file: str | Path | None = None,
) -> tuple[list[Task], list[Task]]:
    """Train and test tasks of ``subsets``, in the benchmark's order, source ``"bfcl_<subset>"``.

    Entry 17 of every subset is the same scenario (same APIs, initial state and, mostly, requests), so the
    split is by scenario number: all variants of a scenario are on one side, and every subset is split in the
    same proportion. It depends on ``seed`` and ``train_share`` only, not on ``subsets``.

    Args:
        train_share: share of the 200 scenarios used for training, in (0, 1).
        split_file: JSON file of the split of all four subsets (``bfcl_eval``, ``seed``, ``train_share`` and
            the ids of ``train`` and ``test``); written if missing, else read and checked.

    Raises ModuleNotFoundError if the wheel is missing, and ValueError for an unknown subset, a share out of
    range or a split file made from something else.
    """
    unknown = [s for s in subsets if s not in SUBSETS]
    if unknown or not subsets:
        raise ValueError(f"unknown BFCL subsets {unknown}: choose from {', '.join(SUBSETS)}")
    if not 0.0 < train_share < 1.0:
        raise ValueError(f"train_share must be in (0, 1), got {train_share}")
    split = _split(train_share, seed)
    if split_file is not None:
        path = Path(split_file)
        if path.exists():
            _check_same_split(path, split)
        else:
            _write(path, split)
    chosen = [entry for subset in subsets for entry in _entries(subset).values()]
    chosen.sort(key=lambda entry: entry.scenario)  # so that the first so many are of all subsets
    train_ids = set(split["train"])
    train = [_task(e) for e in chosen if e.id in train_ids]
    test = [_task(e) for e in chosen if e.id not in train_ids]
    return train, test


def bfcl_entry(entry_id: str) -> Entry:
    """The entry called ``entry_id``. Raises ValueError for another id, ModuleNotFoundError as above."""
    subset = entry_id.removeprefix(_PREFIX).rpartition("_")[0]
    entry = _entries(subset).get(entry_id) if subset in SUBSETS else None
    if entry is None:
        raise ValueError(f"no BFCL multi-turn entry {entry_id!r}: expected e.g. 'multi_turn_base_17'")
    return entry


@lru_cache(maxsize=1)
def bfcl_version() -> str:
    """Version of the installed wheel."""
    _wheel()
    return importlib.metadata.version("bfcl-eval")


def _split(train_share: float, seed: int) -> dict[str, Any]:
    scenarios = sorted({entry.scenario for entry in _entries("base").values()})
    shuffled = list(scenarios)
    random.Random(seed).shuffle(shuffled)
    train = set(shuffled[: round(train_share * len(shuffled))])
    everything = [entry for subset in SUBSETS for entry in _entries(subset).values()]
    return {
        "bfcl_eval": bfcl_version(),
        "seed": seed,
        "train_share": train_share,
        "train": [e.id for e in everything if e.scenario in train],
        "test": [e.id for e in everything if e.scenario not in train],
    }


def _check_same_split(path: Path, split: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a BFCL split file ({error}); delete it to have it written") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: not a BFCL split file (no JSON object); delete it to have it written")
    for name, expected in split.items():
        value = found.get(name)
        if value == expected:
            continue
        if name in ("train", "test") and isinstance(value, list):
            odd = sorted(set(map(str, value)) ^ set(expected)) or ["none; only their order"]
            problem = (
                f"{len(value)} {name} ids, expected {len(expected)}; they differ in {', '.join(odd[:5])}"
            )
        else:
            problem = f"{name} = {value!r}, but this run has {expected!r}"
        raise ValueError(f"{path}: {problem}. Use the settings it was made with, or another split file")


def _write(path: Path, split: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")  # ranks may write at the same time
    partial.write_text(json.dumps(split, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _task(entry: Entry) -> Task:
    answer = json.dumps([list(turn) for turn in entry.ground_truth])
    return Task(entry.id, entry.questions[0], (answer,), f"bfcl_{entry.subset}")


@lru_cache(maxsize=1)
def _wheel() -> Path:
    found = importlib.util.find_spec("bfcl_eval")  # finds it without importing it
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            f"BFCL needs the bfcl-eval wheel (data, simulators, checker); install it with: {INSTALL}"
        )
    return Path(found.origin).parent


@lru_cache(maxsize=len(SUBSETS))
def _entries(subset: str) -> dict[str, Entry]:
    name = f"BFCL_v4_{_PREFIX}{subset}.json"
    answers = {row["id"]: row["ground_truth"] for row in _rows(f"possible_answer/{name}")}
    return {row["id"]: _entry(subset, row, answers[row["id"]]) for row in _rows(name)}


def _entry(subset: str, row: dict[str, Any], ground_truth: list[list[str]]) -> Entry:
    functions = [f for name in row["involved_classes"] for f in _documentation(name)]
    by_name = {f["name"]: f for f in functions}
    held_back = {int(turn): names for turn, names in row.get("missed_function", {}).items()}
    hidden = {name for names in held_back.values() for name in names}
    return Entry(
        id=row["id"],
        subset=subset,
        questions=tuple("\n".join(message["content"] for message in turn) for turn in row["question"]),
        ground_truth=tuple(tuple(turn) for turn in ground_truth),
        classes=tuple(row["involved_classes"]),
        config=row["initial_config"],
        functions=tuple(
            {**f, "description": f["description"] + _SYNTAX_HINT}
            for f in functions
            if f["name"] not in hidden
        ),
        revealed={turn: tuple(by_name[name] for name in names) for turn, names in held_back.items()},
    )


@lru_cache(maxsize=len(_DOCUMENTATION))
def _documentation(class_name: str) -> list[dict[str, Any]]:
    return _rows(f"multi_turn_func_doc/{_DOCUMENTATION[class_name]}.json")


def _rows(name: str) -> list[dict[str, Any]]:
    with (_wheel() / "data" / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
