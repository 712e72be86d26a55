"""What a source of one's own is refused for as it is loaded: its arguments, its tasks, a file that is not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from trace_rl.config.environments import CustomConfig
from trace_rl.config.load import ConfigError
from trace_rl.config.tasks import CustomTask
from trace_rl.sources import Source
from trace_rl.sources.load import load_source

GAMES = """
import functools
from trace_rl.sources import Source
from trace_rl.tasks.task import Task

def one(*tasks):
    return Source([Task("guess-0", "Game 0.", ("7",), "guess")], list(tasks), lambda count: lambda: None)

def malformed(): return one(Task("guess-1", "Game 1.", (), "guess", {"number": 7}))
def text(): return one(Task("guess-1", "Game 1.", "7", "guess"))
def plain(): return one({"id": "guess-1"})
def lazy(): return Source((task for task in ()), [], lambda count: lambda: None)
def right(): return one(Task("guess-1", "Game 1.", (), "guess", extra={"number": 7}))

def source(train, *, test=1): return one()
def any_option(train, **others): return one()
def nothing(): return one()
def own_error(train): return one(*train)

@functools.wraps(nothing)
def decorated(seed): return nothing()
"""


@pytest.fixture
def games(tmp_path: Path) -> str:
    (tmp_path / "games.py").write_text(GAMES)
    return f"{tmp_path}/games.py"


def load(source: str, **options: Any) -> Source:
    return load_source(CustomTask(kind="custom", source=source, options=options), CustomConfig())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "malformed",
            "task: Source.test[0], the task 'guess-1': titles must be a tuple of strings, got {'number': 7}",
        ),
        ("text", "task: Source.test[0], the task 'guess-1': answers must be a tuple of strings, got '7'"),
        ("plain", "task: Source.test[0] must be a Task, got a dict"),
        ("lazy", "task: Source.train must be a list of Tasks, got a generator"),
    ],
)
def test_tasks_of_other_types_are_refused(name: str, said: str, games: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(f"{games}:{name}")


def test_what_the_page_shows_is_accepted(games: str) -> None:
    assert load(f"{games}:right").test[0].extra == {"number": 7}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "source",
            {"trian": 3},
            "'trian' is no argument of source(); did you mean train?",
        ),
        ("source", {"train": 3, "sizes": 3}, "'sizes' is no argument of source(); one of train, test"),
        ("source", {"test": 3}, "missing a required argument: 'train' of source(); it takes train, test"),
        ("any_option", {"seed": 3}, "missing a required argument: 'train' of any_option(); it takes train"),
        ("nothing", {"seed": 3}, "'seed' is no argument of nothing(); it takes none"),
    ],
)
def test_options_that_are_no_arguments_are_refused(
    name: str, options: dict[str, Any], said: str, games: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(f"{games}:{name}", **options)
    assert str(raised.value) == f"task: task.options: {said}"


def test_options_that_fit_are_given(games: str) -> None:
    assert load(f"{games}:source", train=1, test=2)
    assert load(f"{games}:any_option", train=1, seed=2)
    assert load(f"{games}:decorated", seed=2)


def test_a_type_error_of_the_users_own_keeps_its_traceback(games: str) -> None:
    with pytest.raises(TypeError) as raised:
        load(f"{games}:own_error", train=3)
    assert raised.traceback[-1].name == "own_error"


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as raised:
        load("games/nowhere.py:source")
    expected = f"there is no file games/nowhere.py (looked from {tmp_path}, where the command was started)"
    assert str(raised.value) == f"task.source: {expected}"
