"""Which ImportErrors become a message."""

import pytest

from trace_rl.evaluation.run import USER_ERRORS as EVALUATION
from trace_rl.missing_library import MissingLibraryError, missing_libraries_named
from trace_rl.retrieval.index_folder import import_tantivy
from trace_rl.runner import USER_ERRORS as TRAINING


def test_what_says_how_to_install_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tantivy", None)
    with pytest.raises(MissingLibraryError, match="needs tantivy: pip install"), missing_libraries_named():
        import_tantivy()


def test_an_import_that_failed_keeps_its_traceback() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_library") as error, missing_libraries_named():
        __import__("no_such_library")
    assert not isinstance(error.value, MissingLibraryError)


def test_both_commands_show_it_as_a_message() -> None:
    assert MissingLibraryError in EVALUATION
    assert MissingLibraryError in TRAINING
    assert ImportError not in (*EVALUATION, *TRAINING)
