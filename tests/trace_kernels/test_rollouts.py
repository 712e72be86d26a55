import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from trace_kernels import PackedRollouts, edge_logprobs, pack_rollouts, tree_attention
from trace_kernels.reference.tree_attention import dense_mask

Rollouts = list[list[int]]
# Three token ids and short rollouts: duplicates, prefixes and branches everywhere.
ROLLOUTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


def prefixes(rollout: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(rollout[: i + 1]) for i in range(len(rollout))]


def check(packed: PackedRollouts, rollouts: Rollouts, masks: list[list[bool]] | None = None) -> None:
    """A token is the prefix it ends: whatever shares the prefix is the same token."""
    distinct = {p for rollout in rollouts for p in prefixes(rollout)}
    layout = packed.layout
    real = layout.num_tokens - layout.num_padding
    assert real == len(distinct)
    place: dict[tuple[int, ...], int] = {}
    for rollout, positions in zip(rollouts, packed.positions, strict=True):
        for prefix, position in zip(prefixes(rollout), positions.tolist(), strict=True):
            assert place.setdefault(prefix, position) == position
    assert sorted(place.values()) == list(range(real))

    ids, depth = (
        torch.zeros(layout.num_tokens, dtype=torch.int64),
        torch.zeros(layout.num_tokens, dtype=torch.int64),
    )
    mask = torch.eye(layout.num_tokens, dtype=torch.bool)
    for prefix, position in place.items():
        ids[position], depth[position] = prefix[-1], len(prefix) - 1
        mask[position, [place[p] for p in prefixes(prefix)]] = True
    assert torch.equal(packed.input_ids, ids)
    assert torch.equal(layout.depth, depth)
    assert torch.equal(dense_mask(layout), mask)

    edges = [
        (place[prefixes(rollout)[i - 1]], rollout[i], r, i)
        for r, rollout in enumerate(rollouts)
        for i in range(1, len(rollout))
        if masks is None or masks[r][i]
    ]
    got = (packed.edge_src, packed.edge_labels, packed.edge_rollout, packed.edge_position)
    assert all(t.dtype == torch.int64 for t in got)
    assert list(zip(*(t.tolist() for t in got), strict=True)) == edges


@given(ROLLOUTS, st.sampled_from([None, 1, 8]), st.data())
def test_any_rollouts(rollouts: Rollouts, pad: int | None, data: st.DataObject) -> None:
    check(pack_rollouts(rollouts, pad_to_multiple=pad), rollouts)
    masks = [data.draw(st.lists(st.booleans(), min_size=len(r), max_size=len(r))) for r in rollouts]
    check(pack_rollouts(rollouts, loss_masks=masks, pad_to_multiple=pad), rollouts, masks)


@pytest.mark.parametrize(
    "rollouts",
    [
        [[7]],
        [[7], [7]],
        [[1, 2, 3], [1, 2]],
        [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 5]],
        [[300, 1], [1, 300], [2**40, 5], [256, 2], [255, 2]],  # ids whose bytes must not be mixed up
        [list(range(70)), [*range(63), 9, 9], [*range(57), 8]],
    ],
)
def test_named_cases(rollouts: Rollouts) -> None:
    check(pack_rollouts(rollouts), rollouts)


def test_lists_arrays_and_tensors_are_the_same() -> None:
    rollouts = [[1, 2, 3], [1, 4]]
    masks = [[False, True, True], [True, False]]
    wanted = pack_rollouts(rollouts, loss_masks=masks)
    for ids, mask in (
        (lambda r: np.array(r, dtype=np.int32), np.array),
        (torch.tensor, lambda m: torch.tensor(m, dtype=torch.int64)),
    ):
        got = pack_rollouts([ids(r) for r in rollouts], loss_masks=[mask(m) for m in masks])
        check(got, rollouts, masks)
        assert torch.equal(got.edge_src, wanted.edge_src)


@pytest.mark.parametrize(
    ("rollouts", "masks", "message"),
    [
        ([], None, "rollouts: expected at least one"),
        ([[1], []], None, r"rollouts\[1\]: empty"),
        ([[1], [2, -1]], None, r"rollouts\[1\]\[1\] = -1: a token id must not be negative"),
        ([[1.5]], None, r"rollouts\[0\]: expected integers"),
        ([[[1]]], None, r"rollouts\[0\]: expected one dimension"),
        ([[1]], [], "loss_masks: expected 1, one per rollout, got 0"),
        ([[1], [1, 2]], [[True], [True]], r"loss_masks\[1\]: expected shape \(2,\)"),
        ([[1]], [[0.5]], r"loss_masks\[0\]: expected bools"),
        ([[1]], [[2]], r"loss_masks\[0\]: expected bools"),
    ],
)
def test_malformed_rollouts_are_named(rollouts: list, masks: list | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_rollouts(rollouts, loss_masks=masks)


def test_moves() -> None:
    packed = pack_rollouts([[1, 2, 3], [1, 2]], pad_to_multiple=8).to("meta")
    assert (
        packed.layout.device.type == packed.edge_src.device.type == packed.positions[1].device.type == "meta"
    )
    assert [len(p) for p in packed.positions] == [3, 2]
    assert pack_rollouts([[1]], device="meta").input_ids.device.type == "meta"


def test_log_probs_and_gradients_are_those_of_unpacked_rollouts() -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(11) for _ in range(9)]
    tails = [[1, 2, 3], [1, 2, 4, 4], [5], [1, 2, 3], [1], [6, 7, 8, 9, 1]]
    rollouts = [prompt + t for t in tails] + [prompt, [3, 1, 2], [3, 1, 5, 5], [4]]
    generator = torch.Generator().manual_seed(0)
    shapes = ((11, 16), (20, 16), (3, 16, 16), (13, 16))  # tokens, positions, q k v, vocabulary
    weights = [torch.randn(s, generator=generator, dtype=torch.float32) / 4 for s in shapes]
    factors = torch.randn(len(rollouts), 20, generator=generator)
    for weight in weights:
        weight.requires_grad_()

    def qkv(ids: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        hidden = weights[0][ids] + weights[1][depth]
        return (hidden @ weights[2]).view(3, 1, len(ids), 2, 8).transpose(2, 3)  # [3, 1, H, T, D]

    def collect(logprobs: torch.Tensor) -> list[torch.Tensor]:
        return [logprobs.detach(), *torch.autograd.grad((logprobs * factors).sum(), weights)]

    rows = []
    for rollout in rollouts:
        ids = torch.tensor(rollout)
        out = scaled_dot_product_attention(*qkv(ids, torch.arange(len(ids))), is_causal=True)
        logits = out[0].transpose(0, 1).reshape(-1, 16) @ weights[3].t()
        logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        rows.append(torch.nn.functional.pad(logprobs, (1, 20 - len(ids))))
    wanted = collect(torch.stack(rows))

    packed = pack_rollouts(rollouts, pad_to_multiple=16)
    out = tree_attention(*qkv(packed.input_ids, packed.layout.depth), packed.layout)
    hidden = out[0].transpose(0, 1).reshape(-1, 16)
    edges, _ = edge_logprobs(hidden, weights[3], packed.edge_src, packed.edge_labels)
    batch = torch.zeros(len(rollouts), 20).index_put((packed.edge_rollout, packed.edge_position), edges)
    for got, want in zip(collect(batch), wanted, strict=True):
        error = (got - want).norm() / want.norm()
        assert float(error) <= 1e-5
        assert not math.isnan(float(error))
