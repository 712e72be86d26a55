"""Whether an id has occurred before, in 8 bytes an id."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_FOLD_AT = 262_144


def hash_id(passage_id: str) -> int:
    """64 bits of BLAKE2b. Among 21 million ids, two have the same with a probability of about 1e-5."""
    return int.from_bytes(hashlib.blake2b(passage_id.encode(), digest_size=8).digest(), "little")


class SeenHashes:
    """A growing set of hashes: a sorted array, and a small set of the latest that it takes in from time to time.

    21 million take 168 MB, twice that for the moments in which the array grows.
    """

    def __init__(self, hashes: Hashes) -> None:
        self._sorted = np.sort(hashes)
        self._latest: set[int] = set()

    def add(self, value: int) -> bool:
        """Adds a hash; whether it was there already."""
        key = np.uint64(value)
        at = int(np.searchsorted(self._sorted, key))
        if value in self._latest or (at < self._sorted.size and self._sorted[at] == key):
            return True
        self._latest.add(value)
        if len(self._latest) >= _FOLD_AT:
            latest = np.fromiter(self._latest, np.uint64, len(self._latest))
            latest.sort()
            # "stable" merges the two sorted runs in linear time.
            self._sorted = np.sort(np.concatenate([self._sorted, latest]), kind="stable")
            self._latest.clear()
        return False
