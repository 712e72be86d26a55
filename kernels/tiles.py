"""Tile tables of the tree attention programs, by architecture; re-tune with `bench/gpu_check.sh`.

A tile is what one program works on: BLOCK_M query rows and BLOCK_N keys, with the warps and pipeline stages it is
compiled for. Tables are looked up by the Triton version they were tuned with, else the defaults hold.

No default is tuned: they are what compiles for each architecture without spills and within its shared memory, as
`python -m trace_kernels.aot` checks (docs/kernels.md), with all of window, softcap and sinks on.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    block_m: int  # query rows
    block_n: int  # keys
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Of the three large programs. In dkdv, block_n is a multiple of block_m."""

    forward: Tile
    dq: Tile
    dkdv: Tile


# (element bits, padded head size) -> tiles
Table = dict[tuple[int, int], Tiles]

# Small: on NVIDIA no matrix unit computes in full fp32.
FP32: Table = {
    (32, 32): Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2)),
    (32, 64): Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
    (32, 128): Tiles(Tile(32, 16, 8, 2), Tile(32, 16, 8, 1), Tile(16, 32, 8, 1)),
    (32, 256): Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 16, 1)),
}

HOPPER: Table = FP32 | {
    (16, 32): Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    (16, 64): Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
    (16, 128): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(32, 128, 8, 3)),
    (16, 256): Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(16, 64, 8, 2)),
}
BLACKWELL: Table = HOPPER | {
    (16, 32): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    (16, 64): Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
    (16, 256): Tiles(Tile(64, 32, 8, 2), Tile(64, 64, 8, 2), Tile(16, 64, 8, 2)),
    (32, 128): Tiles(Tile(32, 16, 8, 2), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1)),
}
AMPERE: Table = FP32 | {
    (16, 32): Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    (16, 64): Tiles(Tile(128, 64, 8, 3), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
    (16, 128): Tiles(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    (16, 256): Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(32, 32, 8, 2)),
}
# 99 KiB of shared memory.
AMPERE_CONSUMER: Table = AMPERE | {
    (16, 256): Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (32, 64): Tiles(Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2)),
}
# 64 KiB of shared memory, warps of 64.
CDNA3: Table = FP32 | {
    (16, 32): Tiles(Tile(128, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    (16, 64): Tiles(Tile(128, 64, 4, 1), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    (16, 128): Tiles(Tile(128, 32, 4, 1), Tile(64, 32, 4, 1), Tile(16, 64, 4, 1)),
    (16, 256): Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
    (32, 256): Tiles(Tile(32, 16, 8, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)),
}

# architecture -> its defaults
DEFAULTS: dict[str, Table] = {
    "cuda:90": HOPPER,
    "cuda:100": BLACKWELL,
    "cuda:80": AMPERE,
    "cuda:86": AMPERE_CONSUMER,
    "hip:gfx942": CDNA3,
}

# (architecture, Triton major and minor version) -> what differs from the defaults, as measured.
TUNED: dict[tuple[str, str], Table] = {}


def tiles(architecture: str, triton_version: str, element_bits: int, head_dim: int) -> Tiles:
    """The tiles for a head size of at most 256; `element_bits` 16 or 32, `triton_version` as "3.6.0"."""
    key = element_bits, padded(head_dim)
    version = ".".join(triton_version.split(".")[:2])
    return TUNED.get((architecture, version), {}).get(key) or DEFAULTS[architecture][key]


def padded(head_dim: int) -> int:
    """The power of two that a program's channels are padded to; at least 16, the least of a matrix product."""
    return max(16, 1 << (head_dim - 1).bit_length())


def architecture(backend: str, capability: str) -> str | None:
    """The table for a device: `cuda` and its capability such as "90", or `hip` and its name such as "gfx942".

    None below Ampere and on other AMD chips: there is no table for them.
    """
    exact = f"{backend}:{capability}"
    if exact in DEFAULTS:
        return exact
    if backend == "hip":
        return None
    # Ada and the consumer Blackwells (8.9, 12.x) have the 100 KB of shared memory of 8.6.
    return {8: "cuda:86", 9: "cuda:90", 10: "cuda:100", 12: "cuda:86"}.get(int(capability) // 10)
