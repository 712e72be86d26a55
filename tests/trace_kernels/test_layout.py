import pickle
import random
import time

import pytest
import torch

from trace_kernels import TreeLayout
from trace_kernels.reference.tree_attention import dense_mask

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


def test_fast_enough_for_every_step() -> None:
    forest = random_forest(random.Random(1), 2000, 65)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        layout = TreeLayout.from_segments(forest.parents, forest.lengths)
        times.append(time.perf_counter() - start)
    assert layout.num_tokens > 60_000
    assert min(times) < 0.02
