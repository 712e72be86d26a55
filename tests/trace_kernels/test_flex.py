"""FlexAttention on tree masks: on a CPU the forward alone, traced as on a GPU and run without a kernel."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import AuxOutput

from trace_kernels import TreeLayout, tree_attention
from trace_kernels.backends import flex
from trace_kernels.reference.tree_attention import masked_attention
from trace_kernels.scoring import Scoring

from .attention_cases import inputs, oracle_mask
from .drawn_forests import forests
from .forests import ADVERSARIAL, Forest, random_forest


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts the compilations, from a fresh start."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(flex.flex_attention, dynamic=True, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda device_type: compiled)
    return counter


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"), [(None, None, False), (20, None, True), (70, 1.5, True)]
)
def test_equals_the_oracle_in_one_compilation(
    window: int | None, softcap: float | None, with_sinks: bool, compiles: CompileCounterWithBackend
) -> None:
    rng = random.Random(1)
    cases = [*ADVERSARIAL.values(), *(random_forest(rng, 12, 70) for _ in range(2))]
    for i, forest in enumerate(cases):
        layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=(None, 8)[i % 2])
        if layout.num_tokens < 2:  # a dimension of 1 is compiled apart, as is one that equals a head count
            continue
        q, k, v, _ = inputs(layout.num_tokens, (9, 3), 16, torch.float32, seed=i)
        sinks = torch.randn(9) if with_sinks else None
        got = tree_attention(
            q, k, v, layout, scale=0.3, window=window, softcap=softcap, sinks=sinks,
            backend="flex", return_lse=True,
        )  # fmt: skip
        mask = oracle_mask(forest, layout.num_tokens, window)
        out, lse = masked_attention(q, k, v, mask, Scoring(0.3, softcap=softcap), sinks)
        torch.testing.assert_close(got, (out, lse.t()), rtol=1e-5, atol=1e-5)
    assert compiles.frame_count == 1


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_random_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly, so that no shape costs a compilation: 500 forests."""
    monkeypatch.setattr(flex, "_compiled", lambda device_type: flex.flex_attention)
    rng = random.Random(2)
    for i in range(500):
        forest = random_forest(rng, rng.randint(1, 12), rng.choice([2, 20]))
        layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=(None, 8)[i % 2])
        q, k, v, _ = inputs(layout.num_tokens, ((4, 2), (7, 1))[i % 2], 16, torch.float32, seed=i)
        window, softcap = (None, 9, None)[i % 3], (None, None, 1.5, None)[i % 4]
        with torch.no_grad():
            got = tree_attention(
                q, k, v, layout, scale=0.3, window=window, softcap=softcap, backend="flex", return_lse=True
            )
        mask = oracle_mask(forest, layout.num_tokens, window)
        out, lse = masked_attention(q, k, v, mask, Scoring(0.3, softcap=softcap))
        torch.testing.assert_close(got, (out, lse.t()), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(forest=forests(max_length=90), pad=st.integers(1, 150), window=st.none() | st.integers(1, 300))
def test_the_block_mask_is_exact_where_it_must_be(forest: Forest, pad: int, window: int | None) -> None:
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=pad)
    tokens = layout.num_tokens
    made = flex.block_mask(layout, window)
    assert made.shape == (1, 1, tokens, tokens)
    blocks = made.kv_indices.shape[-1]
    seen = torch.zeros(blocks * flex.BLOCK, blocks * flex.BLOCK, dtype=torch.bool)
    seen[:tokens, :tokens] = oracle_mask(forest, tokens, window)
    tiles = seen.view(blocks, flex.BLOCK, blocks, flex.BLOCK).transpose(1, 2)
    partial = listed(made.kv_num_blocks, made.kv_indices)
    full = listed(made.full_kv_num_blocks, made.full_kv_indices)
    assert not partial & full
    for row in range(blocks):
        for key in range(blocks):
            if tiles[row, key].all():
                assert (row, key) in full
            else:
                assert (row, key) not in full
            if window is None:  # exact; a window leaves a block in doubt to the predicate
                assert ((row, key) in partial | full) == bool(tiles[row, key].any())
            elif tiles[row, key].any():
                assert (row, key) in partial | full
    # The backward's lists are the same blocks by key.
    assert {(r, c) for c, r in listed(made.q_num_blocks, made.q_indices)} == partial
    assert {(r, c) for c, r in listed(made.full_q_num_blocks, made.full_q_indices)} == full


def listed(counts: torch.Tensor | None, indices: torch.Tensor | None) -> set[tuple[int, int]]:
    assert counts is not None
    assert indices is not None
    rows = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return {(row, block) for row, (count, which) in enumerate(rows) for block in which[:count]}


def test_a_window_skips_blocks() -> None:
    layout = TreeLayout.from_segments([-1, 0, 0], [2048, 1024, 1024])

    def blocks(window: int | None) -> int:
        made = flex.block_mask(layout, window)
        assert made.full_kv_num_blocks is not None
        return int(made.kv_num_blocks.sum() + made.full_kv_num_blocks.sum())

    assert blocks(128) <= 2 * 32 + 1 < blocks(None) // 4


def test_the_mask_is_made_once_per_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int | None] = []

    def counted(layout: TreeLayout, window: int | None = None) -> object:
        made.append(window)
        return original(layout, window)

    original = flex.block_mask

    def attend(q: torch.Tensor, *others: object, **options: object) -> tuple[torch.Tensor, AuxOutput]:
        return q, AuxOutput(lse=q[..., 0])

    monkeypatch.setattr(flex, "block_mask", counted)
    monkeypatch.setattr(flex, "_compiled", lambda device_type: attend)
    layout = TreeLayout.from_segments([-1, 0, 0], [9, 4, 5])
    q, k, v, _ = inputs(18, (6, 2), 16, torch.float32)
    for window in (None, 5, None, 5):
        tree_attention(q, k, v, layout, window=window, backend="flex")
    assert made == [None, 5]


def test_half_types_and_model_shapes() -> None:
    layout = TreeLayout.from_segments([-1, 0, 0], [9, 4, 5])
    q, k, v, _ = inputs(18, (6, 2), 16, torch.bfloat16)
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, lse = tree_attention(*batched, layout, backend="flex", sinks=torch.zeros(6), return_lse=True)
    want, want_lse = tree_attention(*batched, layout, sinks=torch.zeros(6), return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=2e-2, atol=2e-2)


def test_refuses_a_gradient_on_a_cpu() -> None:
    layout = TreeLayout.from_segments([-1], [8])
    q, k, v, _ = inputs(8, (2, 2), 16, torch.float32)
    k.requires_grad_()
    with pytest.raises(
        ValueError, match=r"backend: 'flex' has no backward on a CPU: call it under torch.no_grad"
    ):
        tree_attention(q, k, v, layout, backend="flex")
    with torch.no_grad():
        torch.testing.assert_close(
            tree_attention(q, k, v, layout, backend="flex"), tree_attention(q, k, v, layout)
        )
    # Sinks are applied outside of FlexAttention.
    sinks = torch.zeros(2, requires_grad=True)
    tree_attention(q, k.detach(), v, layout, backend="flex", sinks=sinks).sum().backward()
    assert sinks.grad is not None


@pytest.mark.parametrize(
    ("device", "dim", "dtype", "reason"),
    [
        ("cuda", 64, torch.bfloat16, None),
        ("cuda", 8, torch.bfloat16, "takes head sizes of at least 16 on a GPU, not 8"),
        ("cuda", 64, torch.float64, "computes in float32, bfloat16 and float16 on a GPU, not float64"),
        ("meta", 64, torch.float32, "needs a GPU or a CPU, q is on meta"),
        ("cpu", 8, torch.float64, None),
    ],
)
def test_what_it_refuses_elsewhere(device: str, dim: int, dtype: torch.dtype, reason: str | None) -> None:
    class Query:  # a tensor of a GPU, where there is none
        def __init__(self) -> None:
            self.device, self.dtype, self.shape = torch.device(device), dtype, torch.Size([4, 2, dim])

    assert flex.refusal(Query(), differentiable=device == "cuda") == reason  # type: ignore[arg-type]
