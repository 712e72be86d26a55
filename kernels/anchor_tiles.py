"""Tiles of the anchor-score program, by architecture; not tuned, they are what compiles without spills.

`python -m trace_kernels.aot` checks that; `python -m bench score_anchors` measures the one a GPU gets.
"""

from .tiles import Tile

# block_m anchors by block_n units of the first layer.
COMMON = Tile(64, 64, 8, 2)

# Architecture -> what differs.
ANCHOR_TILES = {"cuda:100": Tile(64, 64, 8, 1)}


def anchor_tile(architecture: str) -> Tile:
    """On an architecture named as in `tiles`."""
    return ANCHOR_TILES.get(architecture, COMMON)
