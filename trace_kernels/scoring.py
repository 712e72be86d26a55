"""`Scoring`: what is done to q k^T before the softmax, besides the tree mask."""

from __future__ import annotations

from typing import NamedTuple


class Scoring(NamedTuple):
    """`s = scale * (q . k)`, then `softcap * tanh(s / softcap)`, seen only within the window.

    Attributes:
        scale: factor on the products.
        window: tokens of the path, the query's own included, that a query sees: `depth[q] - depth[k] < window`.
            None: all.
        softcap: bound on the scores, as in Gemma 2. None: no bound.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
