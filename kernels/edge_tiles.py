"""Tiles of the edge log-prob programs, by architecture; not tuned, they are what compiles without spills.

`python -m trace_kernels.aot` checks that; `python -m bench edge_logprobs` measures the one a GPU gets, and tries
no other.
"""

from typing import NamedTuple

from .tiles import Tile


class EdgeTiles(NamedTuple):
    """block_m sources by block_n tokens of the vocabulary; `channels` of both are multiplied at a time."""

    forward: Tile
    backward: Tile
    channels: int


# Element bits of the product's operands -> tiles. They fit the shared memory of every CUDA device, and no program
# spills registers at hidden sizes that are multiples of `channels`.
COMMON = {
    16: EdgeTiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), 64),
    32: EdgeTiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), 32),
}

# Architecture -> what differs.
EDGE_TILES = {
    "cuda:90": {16: EdgeTiles(Tile(128, 128, 8, 2), Tile(128, 128, 8, 2), 64)},
    "hip:gfx942": {16: EdgeTiles(Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), 64)},
}


def edge_tiles(architecture: str, element_bits: int) -> EdgeTiles:
    """For operands of 16 or 32 bits, on an architecture named as in `tiles`."""
    return EDGE_TILES.get(architecture, {}).get(element_bits, COMMON[element_bits])
