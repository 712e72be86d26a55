"""Launching device programs: on the current device, and for which target they are compiled."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton

from . import interpreter
from .device.tiles import Tile, architecture


class Target(NamedTuple):
    """A device as the programs see it."""

    architecture: str  # of the tile tables, such as "cuda:90"
    triton_version: str
    multiprocessors: int


@functools.cache
def target(device: torch.device) -> Target:
    """The device's target; a CPU, where the interpreter runs the programs, stands in for a Hopper of 4."""
    if device.type != "cuda":
        return Target("cuda:90", triton.__version__, 4)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = architecture("hip", properties.gcnArchName.split(":")[0])
    else:
        name = architecture("cuda", f"{properties.major}{properties.minor}")
    return Target(name, triton.__version__, properties.multi_processor_count)


def launch(program: Any, grid: tuple[int, ...], tile: Tile, **arguments: Any) -> None:
    """Runs a `@triton.jit` program with its arguments by name, on the device of its tensors."""
    if 0 in grid:
        return
    if interpreter.is_on():
        interpreter.mend_bfloat16()
    device = next(x.device for x in arguments.values() if isinstance(x, torch.Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        program[grid](**arguments, num_warps=tile.warps, num_stages=tile.stages)
