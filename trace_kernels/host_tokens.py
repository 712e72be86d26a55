"""What a layout says of every token, rebuilt on the host from its chains: no copy back from a device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .memo import once_per_layout


class HostTokens(NamedTuple):
    """int64 [T] each, as `subtree_end` and `depth` of the layout."""

    end: NDArray[np.int64]
    depth: NDArray[np.int64]


def host_tokens(chains: torch.Tensor, num_tokens: int) -> HostTokens:
    """Of the layout with these chains [C, 3] and T tokens, once per layout."""

    def build() -> HostTokens:
        start, stop, subtree_end = chains.numpy().T
        length = stop - start
        padding = np.arange(stop[-1], num_tokens)
        end = np.concatenate([np.repeat(subtree_end, length), padding + 1])
        # A chain adds its length to the depth of all that stands below it.
        step = np.zeros(num_tokens + 1, dtype=np.int64)
        np.add.at(step, stop, length)
        np.subtract.at(step, subtree_end, length)
        above = step.cumsum()[start]
        depth = np.zeros(num_tokens, dtype=np.int64)
        depth[: stop[-1]] = np.arange(stop[-1]) + np.repeat(above - start, length)
        return HostTokens(end, depth)

    return once_per_layout(chains, ("tokens", num_tokens), build)
