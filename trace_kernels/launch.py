"""Launching device programs: on the current device, and for which target they are compiled."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import triton

from . import interpreter
from .device.tiles import Tile, architecture

LOG2_E = 1.4426950408889634  # the programs use exp2: logits come to them times this


class Target(NamedTuple):
    """A device as the programs see it."""

    architecture: str  # of the tile tables, such as "cuda:90"
    triton_version: str
    multiprocessors: int


class Launch(NamedTuple):
    """A launch that was recorded instead of run."""

    program: Any
    tile: Tile
    arguments: dict[str, Any]


class _Recording(NamedTuple):
    target: Target
    launches: list[Launch]


_recordings: list[_Recording] = []


@contextmanager
def recorded(target: Target) -> Iterator[list[Launch]]:
    """Inside, launches are listed as for `target` and not run: results are allocated and hold no values."""
    recording = _Recording(target, [])
    _recordings.append(recording)
    try:
        yield recording.launches
    finally:
        _recordings.remove(recording)


def target(device: torch.device) -> Target:
    """The device's target; a CPU, where the interpreter runs the programs, stands in for a Hopper of 4."""
    return _recordings[-1].target if _recordings else _target(device)


def unsupported(device: torch.device) -> str | None:
    """Why the programs cannot run on a device, as the end of a sentence; None: they can."""
    if device.type != "cuda":
        return None if interpreter.is_on() else f"needs a GPU, not the device {device}"
    if _architecture(device) is None:
        return f"has no tiles for {torch.cuda.get_device_name(device)}: Ampere or newer is needed, or gfx942 of AMD"
    return None


@functools.cache
def _architecture(device: torch.device) -> str | None:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return architecture("hip", properties.gcnArchName.split(":")[0])
    return architecture("cuda", f"{properties.major}{properties.minor}")


@functools.cache
def _target(device: torch.device) -> Target:
    if device.type != "cuda":
        return Target("cuda:90", triton.__version__, 4)
    name = _architecture(device)
    if name is None:
        raise ValueError(f"the Triton backend {unsupported(device)}")
    return Target(name, triton.__version__, torch.cuda.get_device_properties(device).multi_processor_count)


def launch(program: Any, grid: tuple[int, ...], tile: Tile, **arguments: Any) -> None:
    """Runs a `@triton.jit` program with its arguments by name, on the device of its tensors."""
    if 0 in grid:
        return
    if _recordings:
        _recordings[-1].launches.append(Launch(program, tile, arguments))
        return
    if interpreter.is_on():
        interpreter.mend_bfloat16()
    device = next(x.device for x in arguments.values() if isinstance(x, torch.Tensor))
    reason = unsupported(device)
    if reason is not None:
        raise ValueError(f"the Triton backend {reason}")
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        program[grid](**arguments, num_warps=tile.warps, num_stages=tile.stages)


def unit_channels(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if its last dimension does not have stride 1, as the programs need."""
    return x if x.stride(-1) == 1 else x.contiguous()
