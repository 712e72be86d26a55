"""Tasks and environments of a run, from its config."""

from .source import Source

__all__ = ["Source"]
