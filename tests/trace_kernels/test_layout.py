import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_kernels import TreeLayout
from trace_kernels.layout import IntSequence
from trace_kernels.reference.tree_attention import dense_mask

from .drawn_forests import forests
from .forests import ADVERSARIAL, Forest, random_forest


def check(forest: Forest, pad: int | None) -> None:
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=pad)
    real, total = forest.num_tokens, layout.num_tokens
    assert total == (real if pad is None else -(-real // pad) * pad)
    assert layout.num_padding == total - real
    mask = torch.eye(total, dtype=torch.bool)
    mask[:real, :real] = forest.mask()
    depth = torch.zeros(total, dtype=torch.int64)
    predecessor = torch.full((total,), -1)
    for rollout in forest.rollouts():
        for place, token in enumerate(rollout):
            depth[token] = place
            predecessor[token] = rollout[place - 1] if place else -1
    assert torch.equal(dense_mask(layout), mask)
    assert torch.equal(layout.depth, depth)
    assert torch.equal(layout.predecessor, predecessor)
    assert layout.subtree_end.dtype == torch.int32
    assert layout.pairs == int(mask.sum())
    assert layout.longest_path == max(len(r) for r in forest.rollouts())
    check_chains(layout, mask)


def check_chains(layout: TreeLayout, mask: torch.Tensor) -> None:
    real = layout.num_tokens - layout.num_padding
    assert [s for s, _, _ in layout.chains.tolist()] == [0, *(e for _, e, _ in layout.chains)][:-1]
    assert layout.chains[-1][1] == real
    for start, end, subtree_end in layout.chains.tolist():
        rows = mask[:, start:end]
        assert rows[end:subtree_end].all()
        assert not rows[subtree_end:].any()
        assert torch.equal(rows[start:end], torch.ones(end - start, end - start).tril().bool())
        if end < real and mask[end, end - 1]:  # maximal: whoever continues the chain has a sibling
            assert not mask[end:subtree_end, end].all()


@pytest.mark.parametrize("pad", [None, 1, 16])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_forests(name: str, pad: int | None) -> None:
    check(ADVERSARIAL[name], pad)


def test_random_forests() -> None:
    rng = random.Random(0)
    for _ in range(300):
        forest = random_forest(rng, rng.randint(1, 25), rng.choice([1, 2, 8]))
        check(forest, rng.choice([None, 8]))


@pytest.mark.parametrize(
    ("parents", "lengths", "message"),
    [
        ([-1, 1], [1, 1], r"parents\[1\] = 1: a parent must come before"),
        ([-1, 2, 0], [1, 1, 1], r"parents\[1\] = 2: a parent must come before"),
        ([-2], [1], r"parents\[0\] = -2"),
        ([-1, 0, 0, 1], [1] * 4, r"parents\[3\] = 1: not DFS pre-order"),
        ([-1, -1, 0], [1] * 3, r"parents\[2\] = 0: not DFS pre-order"),
        ([-1, 0], [1, -3], r"lengths\[1\] = -3"),
        ([-1, 0], [1], r"lengths: expected 2 entries"),
        ([-1, 0], [0, 0], r"lengths: the 2 segments hold no token"),
        ([], [], r"lengths: the 0 segments hold no token"),
        ([-1], [1.5], r"lengths: expected integers"),
        ([[-1]], [1], r"parents: expected one dimension"),
    ],
)
def test_malformed_segments_are_named(parents: list[int], lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeLayout.from_segments(parents, lengths)


def test_padding_must_be_positive() -> None:
    with pytest.raises(ValueError, match="pad_to_multiple: expected at least 1, got 0"):
        TreeLayout.from_segments([-1], [1], pad_to_multiple=0)


def assert_equal(got: TreeLayout, wanted: TreeLayout) -> None:
    for name in ("subtree_end", "depth", "predecessor", "chains"):
        a, b = getattr(got, name), getattr(wanted, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name
    assert (got.num_padding, got.longest_path) == (wanted.num_padding, wanted.longest_path)


@pytest.mark.parametrize("kind", [list, np.array, lambda x: torch.tensor(x, dtype=torch.int32)])
def test_sequences_end_to_end(kind: Callable[[list[int]], IntSequence]) -> None:
    layout = TreeLayout.from_cu_seqlens(kind([0, 3, 4, 9]), pad_to_multiple=4)
    blocks = [torch.ones(n, n).tril().bool() for n in (3, 1, 5, 1, 1, 1)]
    assert torch.equal(dense_mask(layout), torch.block_diag(*blocks).bool())
    assert_equal(layout, TreeLayout.from_segments([-1] * 3, [3, 1, 5], pad_to_multiple=4))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        ([], "cu_seqlens: expected 0 and the end of at least one sequence, got 0 entries"),
        ([0], "cu_seqlens: expected 0 and the end of at least one sequence, got 1 entries"),
        ([1, 3], r"cu_seqlens\[0\] = 1: expected 0"),
        ([0, 3, 3], r"cu_seqlens\[2\] = 3 after 3: each end must be above"),
        ([0, 3, 2], r"cu_seqlens\[2\] = 2 after 3: each end must be above"),
        ([0, 1.5], "cu_seqlens: expected integers"),
    ],
)
def test_malformed_sequences_are_named(cu_seqlens: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeLayout.from_cu_seqlens(cu_seqlens)


@given(forests(), st.sampled_from([None, 8]))
def test_a_packing_made_elsewhere(forest: Forest, pad: int | None) -> None:
    # The end of a token's range, from the rollouts: one past the last token that sees it.
    ends = [int(seen.nonzero()[-1]) + 1 for seen in forest.mask().t()]
    wanted = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=pad)
    assert_equal(TreeLayout.from_subtree_end(ends, pad_to_multiple=pad), wanted)
    assert_equal(TreeLayout.from_subtree_end(torch.tensor(ends), pad_to_multiple=pad), wanted)


@given(st.integers(1, 7).flatmap(lambda n: st.lists(st.integers(0, n + 1), min_size=n, max_size=n)))
def test_a_packing_is_refused_exactly_when_ranges_cross(ends: list[int]) -> None:
    tokens = len(ends)
    valid = all(k < end <= tokens for k, end in enumerate(ends)) and not any(
        ends[j] > k and ends[k] > ends[j] for k in range(tokens) for j in range(k)
    )
    if not valid:
        with pytest.raises(ValueError, match=r"subtree_end\[\d\] = "):
            TreeLayout.from_subtree_end(ends)
        return
    layout = TreeLayout.from_subtree_end(ends)
    above = [[j for j in range(k) if ends[j] > k] for k in range(tokens)]
    assert layout.depth.tolist() == [len(a) for a in above]
    assert layout.predecessor.tolist() == [a[-1] if a else -1 for a in above]
    check_chains(layout, dense_mask(layout))


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([], "subtree_end: no token"),
        ([1, 1], r"subtree_end\[1\] = 1: expected a value above the token's own position and at most 2"),
        ([2, 3], r"subtree_end\[1\] = 3: expected"),
        (
            [3, 3, 4, 4],
            r"subtree_end\[2\] = 4: ends after the subtree of token 1, which is above it and ends at 3",
        ),
        ([[1]], "subtree_end: expected one dimension"),
    ],
)
def test_malformed_packings_are_named(ends: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeLayout.from_subtree_end(ends)


def test_pickles_and_moves() -> None:
    layout = TreeLayout.from_segments([-1, 0, 0], [3, 2, 2], pad_to_multiple=4)
    copy = pickle.loads(pickle.dumps(layout))
    assert torch.equal(copy.subtree_end, layout.subtree_end)
    assert torch.equal(copy.chains, layout.chains)
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert moved.device.type == "meta"
    assert moved.num_tokens == 8
    assert moved.pairs == layout.pairs
