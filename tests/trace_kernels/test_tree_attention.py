import random

import pytest
import torch

from trace_kernels import TreeLayout, tree_attention
from trace_kernels.backends import blocks, segments
from trace_kernels.reference.tree_attention import masked_attention
from trace_kernels.scoring import Scoring

from .forests import ADVERSARIAL, Forest, random_forest

HEADS = [(8, 2), (6, 2), (7, 1), (2, 2)]


@pytest.fixture(params=["flash", "matmul"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both block implementations; the matmul one in the smallest row chunks as well."""
    chosen = {"flash": blocks.CPU_FLASH, "matmul": blocks.MATMUL}[request.param]
    monkeypatch.setattr(segments, "block_ops", lambda device: chosen)
    monkeypatch.setattr(blocks, "MAX_ELEMENTS", 700)
    return request.param


def inputs(
    tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (tokens, heads[0], dim),
        (tokens, heads[1], dim),
        (tokens, heads[1], dim),
        (tokens, heads[0], dim),
    ]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def outputs_and_grads(attend, q, k, v, grad) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def compare(
    forest: Forest, heads: tuple[int, int], dim: int, dtype: torch.dtype, pad: int | None = None
) -> None:
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=pad)
    mask = torch.eye(layout.num_tokens, dtype=torch.bool)
    mask[: forest.num_tokens, : forest.num_tokens] = forest.mask()
    scale = dim**-0.5
    q, k, v, grad = inputs(layout.num_tokens, heads, dim, dtype)
    got = outputs_and_grads(lambda *x: tree_attention(*x, layout), q, k, v, grad)
    wide = [x.double() for x in (q, k, v)]
    want = outputs_and_grads(lambda *x: masked_attention(*x, mask, Scoring(scale))[0], *wide, grad)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert a.dtype == dtype
        error = (a.double() - b).pow(2).mean().sqrt()
        # Where every row sees one key the true dq and dk are 0: an absolute floor for the ratio.
        size = b.pow(2).mean().sqrt().clamp_min(0.05)
        limit = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]
        assert error <= limit * size, f"{name}: {error / size:.2e}"
        if dtype == torch.float32:
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_forests(name: str, ops: str) -> None:
    for i, heads in enumerate(HEADS):
        compare(ADVERSARIAL[name], heads, (16, 7, 24, 8)[i], torch.float32, (None, 16)[i % 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_forests(dtype: torch.dtype, ops: str) -> None:
    rng = random.Random(3)
    for i in range(30):
        forest = random_forest(rng, rng.randint(1, 25), rng.choice([1, 3, 20, 50]))
        compare(forest, HEADS[i % 4], rng.choice([8, 16, 40]), dtype, rng.choice([None, 32]))


@pytest.mark.parametrize("limit", [0, 8, 10_000])
def test_grouping_does_not_change_the_result(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "GROUP_TOKENS", limit)
    rng = random.Random(5)
    grouped = 0
    for _ in range(15):
        forest = random_forest(rng, rng.randint(3, 30), 6)
        layout = TreeLayout.from_segments(forest.parents, forest.lengths)
        grouped += sum(step.grouped for step in segments.plan(layout.chains.tolist()))
        compare(forest, (4, 2), 16, torch.float32)
    assert (grouped > 0) == (limit > 0)


def test_the_plan_covers_every_pair_once() -> None:
    rng = random.Random(6)
    for _ in range(100):
        forest = random_forest(rng, rng.randint(1, 30), rng.choice([2, 30]))
        layout = TreeLayout.from_segments(forest.parents, forest.lengths)
        covered = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int64)
        written = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for step in segments.plan(layout.chains.tolist()):
            rows = torch.arange(step.start, step.row_end)
            keys = torch.arange(step.start, step.key_end)
            seen = keys[None] <= rows[:, None]
            if step.grouped:
                seen &= rows[:, None] < layout.subtree_end[keys][None]
            covered[step.start : step.row_end, step.start : step.key_end] += seen
            assert (written[rows] != step.first).all()
            written[rows] = True
        assert torch.equal(covered, forest.mask().long())


def test_model_shaped_and_strided_inputs() -> None:
    layout = TreeLayout.from_segments([-1, 0, 0], [70, 20, 9])
    q, k, v, _ = inputs(99, (6, 2), 16, torch.float32)
    want = tree_attention(q, k, v, layout, scale=0.3)
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
    torch.testing.assert_close(tree_attention(*batched, layout, scale=0.3)[0].transpose(0, 1), want)
    strided = [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (q, k, v)]
    torch.testing.assert_close(tree_attention(*strided, layout, scale=0.3), want)
    torch.testing.assert_close(tree_attention(q, k, v, layout, scale=0.3, backend="reference"), want)


def test_gradcheck_in_double(ops: str) -> None:
    layout = TreeLayout.from_segments([-1, 0, 0, 2], [3, 2, 1, 2], pad_to_multiple=3)
    q, k, v, _ = inputs(layout.num_tokens, (4, 2), 4, torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: tree_attention(*x, layout), leaves)


def test_repeats_bitwise() -> None:
    forest = random_forest(random.Random(9), 20, 60)
    layout = TreeLayout.from_segments(forest.parents, forest.lengths)
    data = inputs(layout.num_tokens, (8, 2), 32, torch.float32)
    first, second = (outputs_and_grads(lambda *x: tree_attention(*x, layout), *data) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nan_stays_in_its_tree(ops: str) -> None:
    layout = TreeLayout.from_segments([-1, 0, 0, -1, 3, 3, -1], [30, 4, 5, 40, 6, 50, 8], pad_to_multiple=16)
    q, k, v, grad = inputs(layout.num_tokens, (4, 2), 16, torch.float32)
    clean = outputs_and_grads(lambda *x: tree_attention(*x, layout), q, k, v, grad)
    for x in (q, k, v, grad):
        x[39:135] = float("nan")
    poisoned = outputs_and_grads(lambda *x: tree_attention(*x, layout), q, k, v, grad)
    for a, b in zip(clean, poisoned, strict=True):
        assert torch.equal(a[:39], b[:39])
        assert torch.equal(a[135:], b[135:])
        assert b[39:135].isnan().any()


def bad_calls() -> dict[str, tuple[dict[str, object], type[Exception], str]]:
    def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    layout5 = TreeLayout.from_segments([-1], [5])
    return {
        "other length": ({"layout": layout5}, ValueError, "layout: made for 5 tokens, but q holds 4"),
        "no layout": ({"layout": None}, TypeError, "layout: expected a TreeLayout, got NoneType"),
        "no tensor": ({"k": [1]}, TypeError, "k: expected a tensor, got list"),
        "heads": ({"k": t(4, 3, 8), "v": t(4, 3, 8)}, ValueError, "k: its 3 heads do not divide the 4 heads"),
        "v heads": ({"v": t(4, 1, 8)}, ValueError, "v: expected k's 2 heads, got 1"),
        "dtype": ({"v": t(4, 2, 8, dtype=torch.bfloat16)}, ValueError, "v: expected q's dtype torch.float32"),
        "device": ({"k": t(4, 2, 8, device="meta")}, ValueError, "k: expected q's device cpu, got meta"),
        "dim": ({"k": t(4, 2, 6)}, ValueError, r"k: expected T = 4 and D = 8 as in q, got \[4, 2, 6\]"),
        "length": ({"v": t(3, 2, 8)}, ValueError, r"v: expected T = 4 and D = 8 as in q, got \[3, 2, 8\]"),
        "rank": ({"q": t(4, 8)}, ValueError, r"q: expected shape \[T, heads, D\]"),
        "batch": ({"q": t(2, 4, 4, 8)}, ValueError, r"q: expected shape \[1, heads, T, D\]"),
        "mixed ranks": ({"q": t(1, 4, 4, 8)}, ValueError, r"k: expected shape \[1, heads, T, D\] as q"),
        "integers": ({"q": t(4, 4, 8, dtype=torch.int64)}, ValueError, "q: expected a dtype of"),
        "backend": ({"backend": "magic"}, ValueError, "backend: expected one of .*segments.*, got 'magic'"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_errors_name_the_argument(name: str) -> None:
    changes, error, message = bad_calls()[name]
    call: dict[str, object] = {
        "q": torch.zeros(4, 4, 8),
        "k": torch.zeros(4, 2, 8),
        "v": torch.zeros(4, 2, 8),
        "layout": TreeLayout.from_segments([-1], [4]),
        **changes,
    }
    with pytest.raises(error, match=message):
        tree_attention(**call)  # type: ignore[arg-type]
