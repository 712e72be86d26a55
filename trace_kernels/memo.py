"""What is derived from a layout once and reused in every layer, in backward and in recomputation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

# Keyed by the identity of a layout's `chains`: torch.compile and autograd hand on tensors, not layouts.
_derived: Any = WeakTensorKeyDictionary()


def once_per_layout(chains: torch.Tensor, key: Hashable, build: Callable[[], T]) -> T:
    """`build()`, or what it returned before for the same `chains` tensor and key; kept while the tensor lives."""
    found = _derived.get(chains)
    if found is None:
        found = _derived[chains] = {}
    if key not in found:
        found[key] = build()
    return found[key]
