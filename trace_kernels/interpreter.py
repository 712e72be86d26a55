"""Triton's interpreter (TRITON_INTERPRET=1) on bfloat16: it stores bits as integers and multiplies those."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np


def is_on() -> bool:
    """Whether programs are interpreted, on CPU tensors; Triton reads TRITON_INTERPRET when it is imported."""
    if not os.environ.get("TRITON_INTERPRET"):
        return False  # without importing triton, which takes a second
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def mend_bfloat16() -> None:
    """Makes the interpreter's matrix product and its rounding to bfloat16 do what the hardware does."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product: Any = InterpreterBuilder.create_dot
    narrow: Any = InterpreterBuilder.create_fp_trunc

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return product(self, _widened(a, TensorHandle), _widened(b, TensorHandle), *rest)

    def create_fp_trunc(self: Any, source: Any, to: Any) -> Any:
        if to.scalar != tl.bfloat16 or source.dtype.scalar != tl.float32:
            return narrow(self, source, to)
        bits = source.data.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        broken = np.isnan(source.data)
        return TensorHandle(np.where(broken, np.uint16(0x7FC0), rounded), tl.bfloat16)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_fp_trunc = create_fp_trunc


def _widened(x: Any, handle: Any) -> Any:
    import triton.language as tl

    if x.dtype.scalar != tl.bfloat16:
        return x
    return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
