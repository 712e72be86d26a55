"""Plays an environment through its protocol and says what is wrong with it, without a model."""

from .checks import check_environment
from .problem import Problem

__all__ = ["Problem", "check_environment"]
