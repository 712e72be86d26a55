"""Tiles of the edge log-prob programs, by architecture; not tuned, they are what compiles without spills.

`python -m trace_kernels.aot` checks that at a hidden size of 4096, with types alike and mixed, and at 1000, which
`channels` does not divide; `python -m bench edge_logprobs` measures the one a GPU gets, and tries no other.
"""

from typing import NamedTuple

from .tiles import Tile


class EdgeTiles(NamedTuple):
    """block_m sources by block_n tokens of the vocabulary; `channels` of both are multiplied at a time."""

    forward: Tile
    backward: Tile
    channels: int


# Element bits of the product's operands -> tiles. They fit the shared memory of every CUDA device.
COMMON = {
    16: EdgeTiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), 64),
    32: EdgeTiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), 32),
}
# Where types differ or the hidden size is no multiple of `channels`: operands then pass through registers.
BY_REGISTERS = {
    16: EdgeTiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), 32),
    32: EdgeTiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), 32),
}

# Architecture -> what differs from the common ones.
EDGE_TILES = {
    "cuda:90": {16: EdgeTiles(Tile(128, 128, 8, 2), Tile(128, 128, 8, 2), 64)},
    "cuda:86": {32: BY_REGISTERS[32]},
    "hip:gfx942": {16: EdgeTiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), 64)},
}


def edge_tiles(architecture: str, element_bits: int, hidden_size: int, mixed: bool) -> EdgeTiles:
    """For operands of 16 or 32 bits, `mixed` if of two types, on an architecture named as in `tiles`."""
    found = EDGE_TILES.get(architecture, {}).get(element_bits, COMMON[element_bits])
    return BY_REGISTERS[element_bits] if mixed or hidden_size % found.channels else found
