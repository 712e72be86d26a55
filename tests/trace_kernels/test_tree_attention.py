import random
from functools import partial

import pytest
import torch

from trace_kernels import TreeLayout, tree_attention
from trace_kernels.backends import blocks, segments, steps
from trace_kernels.tree_attention import choose_backend

from .attention_cases import HEADS, compare, inputs, oracle_mask, random_scoring, results
from .forests import ADVERSARIAL, Forest, random_forest


@pytest.fixture(params=["as on a CPU", "matmul"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both block implementations; the matmul one in the smallest row chunks as well, chains in small pieces."""
    if request.param == "matmul":
        monkeypatch.setattr(segments, "block_ops", lambda device, scoring: blocks.MATMUL)
    monkeypatch.setattr(blocks, "MAX_ELEMENTS", 700)
    monkeypatch.setattr(steps, "GROUP_TOKENS", 20)
    monkeypatch.setattr(steps, "PIECE_TOKENS", 24)
    monkeypatch.setattr(steps, "LEAST_PIECE_TOKENS", 5)
    return str(request.param)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_forests(name: str) -> None:
    for i, heads in enumerate(HEADS):
        dim, pad = (16, 7, 24)[i], (None, 16)[i % 2]
        compare(ADVERSARIAL[name], heads, dim, torch.float32, pad=pad, with_lse=True)
        options = {"window": (5, 64, 60)[i], "softcap": (None, 2.0, None)[i], "sinks": torch.randn(heads[0])}
        compare(ADVERSARIAL[name], heads, dim, torch.float32, pad=pad, with_lse=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.float64, 20), (torch.float32, 170), (torch.bfloat16, 50), (torch.float16, 10)]
)
def test_random_forests(dtype: torch.dtype, count: int, ops: str) -> None:
    rng = random.Random(f"{ops} {dtype}")  # 2 x 250 forests, all different
    for i in range(count):
        forest = random_forest(rng, rng.randint(1, 16), rng.choice([1, 3, 10, 24]))
        heads = HEADS[i % 3]
        compare(
            forest,
            heads,
            rng.choice([8, 16, 40]),
            dtype,
            pad=rng.choice([None, 32]),
            with_lse=rng.random() < 0.5,
            **random_scoring(rng, heads[0]),
        )


@pytest.mark.parametrize("limit", [0, 8, 10_000])
def test_grouping_does_not_change_the_result(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "GROUP_TOKENS", limit)
    rng = random.Random(5)
    grouped = 0
    for i in range(15):
        forest = random_forest(rng, rng.randint(3, 30), 6)
        layout = TreeLayout.from_segments(forest.parents, forest.lengths)
        grouped += sum(step.grouped for step in steps.plan(layout.chains.tolist()))
        compare(forest, (4, 2), 16, torch.float32, window=(None, 9)[i % 2])
    assert (grouped > 0) == (limit > 0)


def test_the_plan_covers_every_pair_once() -> None:
    rng = random.Random(6)
    for _ in range(60):
        forest = random_forest(rng, rng.randint(1, 30), rng.choice([2, 20]))
        layout = TreeLayout.from_segments(forest.parents, forest.lengths)
        covered = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.int64)
        written = torch.zeros(layout.num_tokens, dtype=torch.bool)
        for step in steps.plan(layout.chains.tolist()):
            rows = torch.arange(step.start, step.row_end)
            keys = torch.arange(step.start, step.key_end)
            seen = keys[None] <= rows[:, None]
            if step.grouped:
                seen &= rows[:, None] < layout.subtree_end[keys][None]
            covered[step.start : step.row_end, step.start : step.key_end] += seen
            assert (written[rows] != step.first).all()
            written[rows] = True
        assert torch.equal(covered, forest.mask().long())


def test_a_short_window_costs_in_proportion_to_it() -> None:
    """Pairs computed on a long path with branches, against those the window leaves."""
    window, forest = 128, Forest([-1, 0, 0, 2, 2], [3000, 1000, 500, 700, 900])
    layout = TreeLayout.from_segments(forest.parents, forest.lengths)
    geometry = segments.Geometry(layout.subtree_end, layout.depth, layout.chains)
    computed = 0
    for block in steps.blocks_of(geometry, window, torch.float32, cut=True):
        index = torch.arange(layout.num_tokens)
        computed += index[block.rows].numel() * index[block.keys].numel()
    assert computed <= 2 * layout.num_tokens * window


def test_model_shaped_and_strided_inputs() -> None:
    layout = TreeLayout.from_segments([-1, 0, 0], [70, 20, 9])
    q, k, v, grad = inputs(99, (6, 2), 16, torch.float32)
    options = {"scale": 0.3, "window": 30, "sinks": torch.randn(6), "return_lse": True}
    want, want_lse = tree_attention(q, k, v, layout, **options)  # type: ignore[call-overload]
    batched = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out, lse = tree_attention(*batched, layout, **options)  # type: ignore[call-overload]
    assert torch.equal(out[0].transpose(0, 1), want)
    assert torch.equal(lse[0].t(), want_lse)
    strided = [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in (q, k, v)]
    torch.testing.assert_close(tree_attention(*strided, layout, **options)[0], want)  # type: ignore[call-overload]

    def from_fused(q, k, v, sinks):  # type: ignore[no-untyped-def]
        fused = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)  # [T, (H + 2 Hk) D]
        views = [x.unflatten(1, (-1, 16)) for x in fused.split([96, 32, 32], dim=1)]
        assert not any(x.is_contiguous() for x in views)
        return tree_attention(*views, layout, **{**options, "sinks": sinks})  # type: ignore[call-overload]

    def apart(q, k, v, sinks):  # type: ignore[no-untyped-def]
        return tree_attention(q, k, v, layout, **{**options, "sinks": sinks})  # type: ignore[call-overload]

    sinks = torch.randn(6)
    one, other = (results(f, q, k, v, grad, sinks) for f in (from_fused, apart))
    for name in one:
        torch.testing.assert_close(one[name], other[name])


@pytest.mark.parametrize("window", [None, 20])
def test_repeats_bitwise(window: int | None) -> None:
    forest = random_forest(random.Random(9), 20, 60)
    layout = TreeLayout.from_segments(forest.parents, forest.lengths)
    q, k, v, grad = inputs(layout.num_tokens, (8, 2), 32, torch.float32)

    def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
        return tree_attention(q, k, v, layout, window=window, sinks=sinks, return_lse=True)

    first, second = (results(attend, q, k, v, grad, torch.ones(8), grad[..., 0]) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("options", [{}, {"window": 12}, {"window": 12, "softcap": 2.0}, {"softcap": 2.0}])
def test_nan_stays_in_its_tree(options: dict[str, float]) -> None:
    """A large tree poisoned, then one of several that are small enough to be computed together."""
    layout = TreeLayout.from_segments(
        [-1, 0, 0, -1, 3, 3, -1, -1, -1], [30, 4, 5, 40, 6, 50, 8, 9, 3], pad_to_multiple=16
    )

    def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
        return tree_attention(q, k, v, layout, sinks=sinks, return_lse=True, **options)

    for first, last in ((39, 135), (143, 152)):
        data = inputs(layout.num_tokens, (4, 2), 16, torch.float32)
        clean = results(attend, *data, torch.ones(4))
        for x in data:
            x[first:last] = float("nan")
        poisoned = results(attend, *data, torch.ones(4))
        for name in ("out", "lse", "dq", "dk", "dv"):
            a, b = clean[name], poisoned[name]
            assert torch.equal(a[:first], b[:first])
            assert torch.equal(a[last:], b[last:])
            if (
                name != "lse"
            ):  # torch's CPU kernel takes a row of NaN scores in a short block for an empty one
                assert b[first:last].isnan().any()


def test_the_oracle_mask_without_a_window_is_the_ancestors() -> None:
    forest = ADVERSARIAL["duplicates"]
    assert torch.equal(oracle_mask(forest, forest.num_tokens), forest.mask())
    assert oracle_mask(forest, forest.num_tokens, 1).sum() == forest.num_tokens


def test_auto_says_what_it_chose() -> None:
    q = torch.zeros(4, 2, 64)
    assert choose_backend(q) == ("segments", "the exact eager backend, for q on cpu")
    assert choose_backend(q[None].to("meta")).name == "segments"
    layout = TreeLayout.from_segments([-1], [4])
    torch.manual_seed(0)
    q = torch.randn(4, 2, 64)
    assert torch.equal(tree_attention(q, q, q, layout), tree_attention(q, q, q, layout, backend="segments"))


def bad_calls() -> dict[str, tuple[dict[str, object], type[Exception], str]]:
    def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def sink(*shape: int, **options: object) -> dict[str, object]:
        return {"sinks": t(*shape, **options)}  # type: ignore[arg-type]

    half = partial(t, dtype=torch.bfloat16)
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
        "no window": (
            {"window": 0},
            ValueError,
            "window: expected a positive number of tokens or None, got 0",
        ),
        "half a token": ({"window": 2.5}, ValueError, "window: expected a positive number of tokens .*2.5"),
        "window as a flag": ({"window": True}, ValueError, "window: expected .*, got True"),
        "scale in words": ({"scale": "x"}, ValueError, "scale: expected a finite number or None, got 'x'"),
        "no scale": ({"scale": float("nan")}, ValueError, "scale: expected a finite number .* got nan"),
        "no softcap": (
            {"softcap": 0.0},
            ValueError,
            "softcap: expected a positive finite number .*, got 0.0",
        ),
        "endless softcap": ({"softcap": float("inf")}, ValueError, "softcap: expected .* got inf"),
        "softcap in words": ({"softcap": "30"}, ValueError, "softcap: expected .* got '30'"),
        "sinks as a list": ({"sinks": [0.0] * 4}, TypeError, "sinks: expected a tensor, got list"),
        "sinks of key heads": (
            sink(2),
            ValueError,
            r"sinks: expected 4 floating-point numbers, .* got \[2\]",
        ),
        "integer sinks": (sink(4, dtype=torch.int64), ValueError, r"sinks: .* got \[4\] of torch.int64"),
        "sinks elsewhere": (sink(4, device="meta"), ValueError, "sinks: expected q's device cpu, got meta"),
        "sinks in flash": (
            {"q": half(4, 4, 8), "k": half(4, 2, 8), "v": half(4, 2, 8), "backend": "flash", **sink(4)},
            ValueError,
            "backend: 'flash' has no sinks; use backend='auto'",
        ),
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
