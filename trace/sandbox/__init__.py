"""Runs Python that a model wrote, on Linux, without privileges and without containers: docs/sandbox.md."""

from .limits import CellResult, Limits, SandboxError
from .tool import PythonTool

__all__ = ["CellResult", "Limits", "PythonTool", "SandboxError"]
