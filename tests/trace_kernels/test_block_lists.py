"""Block lists against the dense mask of the rollouts."""

import random
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_kernels import TreeLayout, block_lists
from trace_kernels.block_lists import KeyItems, key_items, query_lists

from .drawn_forests import forests
from .forests import ADVERSARIAL, Forest, random_forest

BLOCKS = [(1, 1), (2, 4), (4, 2), (4, 4), (8, 4), (4, 8), (16, 4), (2, 16), (5, 3), (64, 128)]
BLOCKS_OF_KEY_ITEMS = [(m, n) for m, n in BLOCKS if n % m == 0]


def laid_out(forest: Forest, pad: int | None) -> tuple[TreeLayout, torch.Tensor, torch.Tensor]:
    """The layout, and from the rollouts: bool [T, T] mask and int64 [T] depth; padding stands alone."""
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=pad)
    mask = torch.eye(layout.num_tokens, dtype=torch.bool)
    mask[: forest.num_tokens, : forest.num_tokens] = forest.mask()
    depth = torch.zeros(layout.num_tokens, dtype=torch.int64)
    for rollout in forest.rollouts():
        depth[rollout] = torch.arange(len(rollout))
    return layout, mask, depth


def by_block(mask: torch.Tensor, m: int, n: int) -> torch.Tensor:
    """[query blocks, key blocks, m, n]; what lies past the end is not seen."""
    tokens = len(mask)
    rows, columns = -(-tokens // m), -(-tokens // n)
    whole = torch.zeros(rows * m, columns * n, dtype=torch.bool)
    whole[:tokens, :tokens] = mask
    return whole.view(rows, m, columns, n).transpose(1, 2)


def seen(mask: torch.Tensor, depth: torch.Tensor, window: int | None) -> torch.Tensor:
    return mask if window is None else mask & (depth[:, None] - depth < window)


def allowed(mask: torch.Tensor, depth: torch.Tensor, window: int | None, m: int, n: int) -> torch.Tensor:
    """Block pairs that may be listed: with a window, those whose nearest depths are in it, seen or not."""
    met = by_block(mask, m, n).flatten(2).any(2)
    if window is not None:
        nearest = torch.stack([x.min() for x in depth.split(m)])
        deepest = torch.stack([x.max() for x in depth.split(n)])
        met &= nearest[:, None] - deepest < window
    return met


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_forests(name: str) -> None:
    for m, n in [(4, 8), (8, 4), (16, 16), (64, 64), (32, 128)]:
        check_query_lists(ADVERSARIAL[name], None, m, n, None)
        check_query_lists(ADVERSARIAL[name], 16, m, n, 9)
        if n % m == 0:
            check_key_items(ADVERSARIAL[name], None, m, n, None, 4, 1)
            check_key_items(ADVERSARIAL[name], 16, m, n, 9, 4, 1)


@settings(max_examples=300, deadline=None)
@given(forests(), st.sampled_from([None, 8]), st.sampled_from(BLOCKS), st.sampled_from([None, 1, 3, 10]))
def test_query_lists_are_exact(
    forest: Forest, pad: int | None, blocks: tuple[int, int], window: int | None
) -> None:
    check_query_lists(forest, pad, *blocks, window)


def check_query_lists(forest: Forest, pad: int | None, m: int, n: int, window: int | None) -> None:
    layout, mask, depth = laid_out(forest, pad)
    lists = query_lists(layout.chains, layout.num_tokens, m, n, window)
    assert {x.dtype for x in lists} == {torch.int32}
    blocks = by_block(seen(mask, depth, window), m, n).flatten(2)
    listed, full = torch.zeros(blocks.shape[:2], dtype=torch.bool), torch.zeros(blocks.shape[:2]).bool()
    assert len(lists.starts) == len(blocks) + 1
    assert lists.starts[0] == 0
    assert lists.starts[-1] == len(lists.key_blocks)
    for block in range(len(blocks)):
        start, middle, end = lists.starts[block], lists.full_ends[block], lists.starts[block + 1]
        assert start <= middle <= end
        assert len(set(lists.key_blocks[start:end].tolist())) == end - start
        listed[block, lists.key_blocks[start:end]] = True
        full[block, lists.key_blocks[start:middle]] = True
    assert torch.equal(full, blocks.all(2))
    assert not (blocks.any(2) & ~listed).any()
    assert torch.equal(listed, allowed(mask, depth, window, m, n))
    assert sorted(lists.order.tolist()) == list(range(len(blocks)))
    lengths = lists.starts.diff()[lists.order]
    assert (lengths.diff() <= 0).all()


@settings(max_examples=300, deadline=None)
@given(
    forests(),
    st.sampled_from([None, 8]),
    st.sampled_from(BLOCKS_OF_KEY_ITEMS),
    st.sampled_from([None, 1, 3, 10]),
    st.sampled_from([1, 5, 1000]),
    st.sampled_from([1, 2, 8]),
)
def test_key_items_cover_every_pair_once(
    forest: Forest, pad: int | None, blocks: tuple[int, int], window: int | None, programs: int, shortest: int
) -> None:
    check_key_items(forest, pad, *blocks, window, programs, shortest)


def check_key_items(
    forest: Forest, pad: int | None, m: int, n: int, window: int | None, programs: int, shortest: int
) -> None:
    layout, mask, depth = laid_out(forest, pad)
    tokens = layout.num_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_lists, "SHORTEST_ITEM", shortest)
        work = key_items(layout.chains, tokens, m, n, window, programs=programs)
    visible = seen(mask, depth, window)
    key_blocks = -(-tokens // n)
    listed = torch.zeros(tokens, key_blocks, dtype=torch.int64)
    listed_full = torch.zeros(tokens, key_blocks, dtype=torch.bool)
    for block, first, full_first, full_last, last, _ in work.items.tolist():
        assert block * n <= first <= full_first <= full_last <= last <= tokens
        assert first < last
        assert {(x - block * n) % m for x in (first, full_first, full_last)} == {0}
        assert last == tokens or (last - block * n) % m == 0
        listed[first:last, block] += 1
        listed_full[full_first:full_last, block] = True
    assert listed.max() == 1
    seen_of_block = torch.stack([x.any(1) for x in visible.split(n, 1)], 1)
    assert not (seen_of_block & (listed == 0)).any()
    assert torch.equal(
        listed_full, by_block(visible, m, n).flatten(2).all(2).repeat_interleave(m, 0)[:tokens]
    )
    may = allowed(mask, depth, window, m, n).repeat_interleave(m, 0)[:tokens]
    assert torch.equal(listed == 1, may)
    pairs = [-(-(last - first) // m) for _, first, _, _, last, _ in work.items.tolist()]
    assert pairs == sorted(pairs, reverse=True)
    assert max(pairs) <= max(shortest, -(-sum(pairs) // programs))
    check_slots(work, key_blocks)


def check_slots(work: KeyItems, key_blocks: int) -> None:
    """Every key block is written by one item alone, or by the sum of all its parts, each in a slot of its own."""
    slots: dict[int, list[int]] = {block: [] for block in range(key_blocks)}
    for block, *_, slot in work.items.tolist():
        slots[block].append(slot)
    split = {block: (first, last) for block, first, last in work.splits.tolist()}
    assert len(split) == len(work.splits)
    for block, found in slots.items():
        if block in split:
            assert len(found) > 1
            assert sorted(found) == list(range(*split[block]))
        else:
            assert found == [-1]
    taken = sorted(slot for found in slots.values() for slot in found if slot >= 0)
    assert taken == list(range(work.slots))


def test_ranges_are_cut_where_one_key_block_meets_all() -> None:
    layout = TreeLayout.from_segments([-1] + [0] * 30, [8] + [8] * 30)
    whole = key_items(layout.chains, 248, 8, 8, programs=1)
    assert whole.slots == 0
    cut = key_items(layout.chains, 248, 8, 8, programs=100)
    assert cut.splits.tolist() == [[0, 0, 4]]


@pytest.mark.parametrize("window", [None, 500])
def test_memory_is_linear_in_tokens_and_block_pairs(window: int | None) -> None:
    rng = random.Random(4)
    forest = random_forest(rng, 500, 60)
    layout = TreeLayout.from_segments(forest.parents, forest.lengths)
    tokens = layout.num_tokens
    pairs = len(query_lists(layout.chains, tokens, 16, 16).key_blocks)
    fresh = TreeLayout.from_segments(forest.parents, forest.lengths)
    tracemalloc.start()
    try:
        query_lists(fresh.chains, tokens, 16, 16, window)
        key_items(fresh.chains, tokens, 16, 16, window, programs=528)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 25 * 8 * (tokens + pairs) < tokens * tokens
