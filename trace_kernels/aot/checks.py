"""What a compiled program may need of each GPU."""

from __future__ import annotations

from typing import NamedTuple

from .compilation import Result

KIB = 1024
SIXTEEN_BITS = ("bf16", "fp16")


class Gpu(NamedTuple):
    """Of one multiprocessor (AMD: compute unit)."""

    shared: int  # bytes that one CTA may have
    total_shared: int  # bytes for all of its CTAs
    registers: int  # of 32 bits, in all
    lanes: int  # of a warp
    max_warps: int
    matrix: tuple[str, ...]  # the units that products of 16-bit types must use, one of them


GPUS = {
    "cuda:80": Gpu(163 * KIB, 164 * KIB, 65536, 32, 64, ("mma",)),
    "cuda:86": Gpu(99 * KIB, 100 * KIB, 65536, 32, 48, ("mma",)),
    "cuda:90": Gpu(227 * KIB, 228 * KIB, 65536, 32, 64, ("wgmma",)),
    "cuda:100": Gpu(227 * KIB, 228 * KIB, 65536, 32, 64, ("tcgen05", "mma")),
    "hip:gfx942": Gpu(64 * KIB, 64 * KIB, 4 * 512 * 64, 64, 32, ("mfma",)),
}
# Planned occupancy, of a multiprocessor's four schedulers: two warps of 32 lanes each, or one of 64.
PLANNED_LANES = 8 * 32
# CUDA reserves this much shared memory for each CTA.
RESERVED = KIB
TENSOR_MEMORY = 512  # columns of a multiprocessor


def ctas(result: Result) -> int:
    """CTAs of the program that fit on one multiprocessor at a time."""
    gpu, needs, warps = GPUS[result.job.target], result.needs, result.job.tile.warps
    assert needs is not None
    per_warp = -(-max(needs.registers, 1) // 8) * 8 * gpu.lanes
    by_shared = gpu.total_shared // (needs.shared + (RESERVED if gpu.lanes == 32 else 0) or 1)
    by_shared = min(by_shared, TENSOR_MEMORY // max(needs.tensor_memory, 1))
    return min(gpu.registers // per_warp // warps, gpu.max_warps // warps, by_shared)


def faults(result: Result) -> list[str]:
    """What is wrong with a program, each as a phrase; empty: nothing."""
    needs, gpu, job = result.needs, GPUS[result.job.target], result.job
    if needs is None:
        return [f"does not compile: {result.error}"]
    found = []
    if needs.spills:
        found.append(f"spills {needs.spills}")
    if needs.stack:
        found.append(f"uses {needs.stack} bytes of stack")
    if needs.shared > gpu.shared:
        found.append(f"needs {needs.shared} bytes of shared memory, a CTA has {gpu.shared}")
    elif needs.tensor_memory > TENSOR_MEMORY:
        found.append(f"needs {needs.tensor_memory} columns of tensor memory, there are {TENSOR_MEMORY}")
    elif ctas(result) * job.tile.warps * gpu.lanes < PLANNED_LANES:
        planned = PLANNED_LANES // gpu.lanes
        found.append(f"{needs.registers} registers x {job.tile.warps} warps: no room for {planned} warps")
    on_units = any(unit in needs.matrix for unit in gpu.matrix)
    if needs.multiplies and job.case.dtype in SIXTEEN_BITS and not on_units:
        found.append(f"multiplies without {' or '.join(gpu.matrix)}")
    return found
