"""Which blocks of queries meet which blocks of keys: what the tree attention kernel walks over.

Everything follows from the smallest and largest `subtree_end` of each key block [n0, n1): query block [m0, m1)
meets it iff `n0 < m1 and max_end > m0`, and sees all of it iff `n1 - 1 <= m0 and min_end >= m1`. So the query
blocks of a key block are one range, and the lists of the query blocks are its transpose. Built with NumPy on the
host, without a loop over tokens and without a dense matrix: O(tokens + blocks met).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .host_tokens import HostTokens, host_tokens

Ints = NDArray[np.int64]


class QueryLists(NamedTuple):
    """The key blocks of every query block, int32.

    order: [M], query blocks, longest list first.
    starts: [M + 1]; block m visits `key_blocks[starts[m] : starts[m + 1]]`.
    full_ends: [M]; up to there it sees all of each key block, from there a part.
    """

    order: torch.Tensor
    starts: torch.Tensor
    full_ends: torch.Tensor
    key_blocks: torch.Tensor


class KeyItems(NamedTuple):
    """The work of dK and dV, int32.

    items: [I, 6], longest first: key block, query rows `first <= full_first <= full_last <= last` of which those in
        [full_first, full_last) see the whole block, slot of the partial result or -1 when there is one item alone.
    splits: [S, 3]: key block, its first slot, one past its last.
    slots: partial results in all.
    """

    items: torch.Tensor
    splits: torch.Tensor
    slots: int


class _Met(NamedTuple):
    """Per pair of blocks that meet, by key block and within it by query block."""

    query_block: Ints
    key_block: Ints
    full: NDArray[np.bool_]


def query_lists(
    chains: torch.Tensor, num_tokens: int, block_m: int, block_n: int, window: int | None = None
) -> QueryLists:
    """Lists for blocks of `block_m` queries and `block_n` keys, on the CPU."""
    met = _met(host_tokens(chains, num_tokens), block_m, block_n, window)
    blocks = -(-num_tokens // block_m)
    counts = np.bincount(met.query_block, minlength=blocks)
    starts = np.concatenate([[0], counts.cumsum()])
    full_ends = starts[:-1] + np.bincount(met.query_block[met.full], minlength=blocks)
    key = met.query_block * 2 + ~met.full
    # NumPy sorts 16-bit integers by radix, in linear time.
    by_query = np.argsort(key.astype(np.uint16) if 2 * blocks < 1 << 16 else key, kind="stable")
    order = np.argsort(-counts, kind="stable")
    return QueryLists(*map(_int32, (order, starts, full_ends, met.key_block[by_query])))


def key_items(
    chains: torch.Tensor,
    num_tokens: int,
    block_m: int,
    block_n: int,
    window: int | None = None,
    *,
    programs: int,
) -> KeyItems:
    """Items for blocks of `block_n` keys and `block_m` queries, on the CPU.

    A key block near a root meets the queries of all its branches, one in a leaf only a few: ranges are cut so that
    none holds much more than the work of one of `programs` equal shares.
    """
    met = _met(host_tokens(chains, num_tokens), block_m, block_n, window)
    limit = max(SHORTEST_ITEM, -(-len(met.query_block) // max(1, programs)))
    # A range is a run of neighbouring query blocks of one key block, in pieces of at most `limit`.
    new_run = (np.diff(met.query_block, prepend=-2) != 1) | (np.diff(met.key_block, prepend=-1) != 0)
    run_start = _one_full_range_each(np.flatnonzero(new_run), met.full)
    place = np.arange(len(met.full)) - np.repeat(run_start, np.diff(run_start, append=len(met.full)))
    start = np.flatnonzero(place % limit == 0)
    stop = np.append(start[1:], len(met.full))
    full = np.concatenate([[0], met.full.cumsum()])
    full_count = full[stop] - full[start]
    first = met.query_block[start] * block_m
    last = np.minimum((met.query_block[stop - 1] + 1) * block_m, num_tokens)
    first_full = np.where(full_count > 0, _first_full(met.full, start), 0)
    full_first = np.where(full_count > 0, first + (first_full - start) * block_m, first)
    full_last = full_first + full_count * block_m
    key_block = met.key_block[start]
    pieces = np.bincount(key_block, minlength=-(-num_tokens // block_n))
    alone = pieces[key_block] == 1
    slot = np.where(alone, -1, (~alone).cumsum() - 1)
    split = np.flatnonzero(pieces > 1)
    slot_end = pieces[split].cumsum()
    items = np.stack([key_block, first, full_first, full_last, last, slot], axis=1)
    by_length = np.argsort(start - stop, kind="stable")
    splits = np.stack([split, slot_end - pieces[split], slot_end], axis=1)
    return KeyItems(_int32(items[by_length]), _int32(splits), int((~alone).sum()))


# Query blocks below which a range is not cut: the partial results would cost more than the wait.
SHORTEST_ITEM = 8


def _one_full_range_each(run_start: Ints, full: NDArray[np.bool_]) -> Ints:
    """Run starts, with new ones wherever a run's full pairs begin anew.

    Without a window they are one range: after the diagonal, before the first branch ends. With one, a deep branch
    may lie between two shallow ones.
    """
    rises = np.flatnonzero(full & ~np.concatenate([[False], full[:-1]]))
    run = np.searchsorted(run_start, rises, side="right")
    again = rises[1:][run[1:] == run[:-1]]
    return np.union1d(run_start, again)


def _first_full(full: NDArray[np.bool_], start: Ints) -> Ints:
    """Index of the first full pair at or after each start (of the last pair, when there is none)."""
    found = np.append(np.flatnonzero(full), len(full))
    return found[np.searchsorted(found, start)]


def _met(tokens: HostTokens, block_m: int, block_n: int, window: int | None) -> _Met:
    num_tokens = len(tokens.end)
    key_start = np.arange(0, num_tokens, block_n)
    query_start = np.arange(0, num_tokens, block_m)
    max_end = np.maximum.reduceat(tokens.end, key_start)
    min_end = np.minimum.reduceat(tokens.end, key_start)
    first = key_start // block_m
    counts = -(-max_end // block_m) - first
    key_block = np.repeat(np.arange(len(key_start)), counts)
    offset = np.arange(len(key_block)) - np.repeat(counts.cumsum() - counts, counts)
    query_block = first[key_block] + offset
    # A last block that is not whole is never seen in full: its keys past the end belong to nobody.
    last_key = key_start + block_n - 1
    full = (last_key[key_block] <= query_start[query_block]) & (
        min_end[key_block] >= (query_block + 1) * block_m
    )
    if window is not None:
        nearest = (
            np.minimum.reduceat(tokens.depth, query_start)[query_block]
            - (np.maximum.reduceat(tokens.depth, key_start)[key_block])
        )
        farthest = (
            np.maximum.reduceat(tokens.depth, query_start)[query_block]
            - (np.minimum.reduceat(tokens.depth, key_start)[key_block])
        )
        met = nearest < window
        full &= farthest < window
        query_block, key_block, full = query_block[met], key_block[met], full[met]
    return _Met(query_block, key_block, full)


def _int32(x: Ints) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.int32))
