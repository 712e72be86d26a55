"""Libraries that only some scenarios need: without one, a message instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingLibraryError(ImportError):
    """A library that this run needs is not installed; the message says which, and how to install it."""


@contextmanager
def missing_libraries_named() -> Iterator[None]:
    """Raise MissingLibraryError for the ImportErrors that say what to install.

    Those are raised by hand, without the `name` that Python gives to an import that failed: of such a one the
    traceback is what helps.
    """
    try:
        yield
    except ImportError as error:
        if error.name is not None:
            raise
        raise MissingLibraryError(str(error)) from error
