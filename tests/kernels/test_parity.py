"""The programs against the dense truth under the mask of the rollouts."""

import random
from collections.abc import Callable

import pytest
import torch

from ..trace_kernels.forests import ADVERSARIAL, Forest, random_forest
from .cases import LIMITS, Case, Results, Setting, errors, sdpa_per_rollout

SetTiles = Callable[..., None]
FLOAT = torch.float32
HALVES = [torch.bfloat16, torch.float16]
HEADS = [(8, 2), (6, 2), (7, 1)]
# forward, dq, dkdv: the last with block_n a multiple of block_m.
TILES = [
    ((32, 32), (32, 32), (32, 32)),
    ((32, 16), (32, 16), (16, 32)),
    ((16, 32), (16, 32), (32, 32)),
    ((64, 16), (16, 64), (32, 64)),
    ((16, 32), (32, 16), (16, 16)),
]
# Each chunk is a program of its own, which a GPU compiles: there fewer of them take more forests.
CHUNKS, FORESTS_EACH = (7, 75) if torch.cuda.is_available() else (20, 26)


def chunk_setting(i: int) -> Setting:
    """Every option with every other, by periods that share no factor with the tiles' and the types'."""
    return Setting(
        heads=((2, 1), (1, 1), (2, 2))[i % 3],
        dim=(32, 64)[i % 2],
        dtype=(FLOAT, FLOAT, *HALVES)[i % 4],
        window=(None, 5, None, 12, None, 30, 1)[i % 7],
        softcap=(None, 2.5, None)[i // 2 % 3],
        sinks=i % 5 in (1, 4),
        grad_lse=i % 3 == 1,
    )


def check(found: list[tuple[Results, Results]], dtype: torch.dtype) -> None:
    """RMS error over RMS of the truth, of each result and of all together."""
    total: dict[str, list[float]] = {}
    for got, want in found:
        assert got.out.dtype == got.dq.dtype == got.dk.dtype == got.dv.dtype == dtype
        for name, (error, size) in errors(got, want).items():
            # NaN is below no limit; where each row sees one key, the true dq and dk are 0.
            numel = getattr(want, name).numel()
            limit = 1e-5 if name == "lse" else LIMITS[dtype]
            # dsinks sums the rows' terms, of both signs: what a half P costs each is judged over all forests.
            if dtype == FLOAT or name != "dsinks":
                assert error**0.5 <= limit * max(size, numel * 0.05**2) ** 0.5, name
            summed = total.setdefault(name, [0.0, 0.0])
            summed[0] += error
            summed[1] += size
    for name, (error, size) in total.items():
        limit = 1e-5 if name == "lse" else LIMITS[dtype]
        assert error**0.5 <= limit * size**0.5, f"{name}: {(error / size) ** 0.5:.2e}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_forests(chunk: int, device: torch.device, set_tiles: SetTiles) -> None:
    assert CHUNKS * FORESTS_EACH >= 500
    set_tiles(*TILES[chunk % len(TILES)])
    rng, setting, found = random.Random(chunk), chunk_setting(chunk), []
    for seed in range(FORESTS_EACH):
        segments = rng.randint(1, 9)
        forest = random_forest(rng, segments, rng.choice([1, 4, 40 // segments, 70 // segments]))
        case = Case(forest, setting, device, rng.choice([None, None, 8]), seed)
        found.append((case.run(), case.truth()))
    check(found, setting.dtype)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("pad", [None, 16])
def test_adversarial_forests(name: str, pad: int | None, device: torch.device, set_tiles: SetTiles) -> None:
    forest = ADVERSARIAL[name]
    i = 2 * list(ADVERSARIAL).index(name) + (pad is None)
    set_tiles(*(((64, 64),) * 3 if forest.num_tokens > 100 else ((32, 16), (32, 32), (16, 32))))
    setting = Setting(HEADS[i % 3], (32, 64)[i % 2], FLOAT, (None, 40)[i // 3 % 2], grad_lse=True)
    case = Case(forest, setting, device, pad)
    check([(case.run(), case.truth())], FLOAT)


@pytest.mark.parametrize("dtype", HALVES)
def test_no_worse_than_sdpa_of_every_rollout(
    dtype: torch.dtype, device: torch.device, set_tiles: SetTiles
) -> None:
    set_tiles(*((64, 64),) * 3)
    rng = random.Random(3)
    forests = [f for f in ADVERSARIAL.values() if f.num_tokens > 1]
    forests += [random_forest(rng, rng.randint(1, 9), 12, shortest=1) for _ in range(10)]
    for seed, forest in enumerate(forests):
        case = Case(forest, Setting((2, 1), 64, dtype), device, seed=seed)
        want = case.truth()
        got = case.run()
        check([(got, want)], dtype)
        peer = sdpa_per_rollout(case)._replace(lse=want.lse)
        ours, theirs = errors(got, want), errors(peer, want)
        for name in ("out", "dq", "dk", "dv"):
            assert ours[name][0] ** 0.5 <= 2 * theirs[name][0] ** 0.5, name


@pytest.mark.parametrize("dtype", [FLOAT, *HALVES])
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_head_sizes_with_the_tiles_of_the_table(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    forest = (
        Forest([-1, 0, 0, 2, 2], [61, 20, 2, 9, 13]) if dim < 128 else Forest([-1, 0, 0, 0], [33, 30, 1, 9])
    )
    i = (dim // 16 + len(str(dtype))) % 3
    setting = Setting((2, 1), dim, dtype, (None, 50, 7)[i], (None, None, 3.0)[i], True, i == 0)
    case = Case(forest, setting, device)
    check([(case.run(), case.truth())], dtype)


@pytest.mark.parametrize("heads", HEADS)
def test_grouped_heads(heads: tuple[int, int], device: torch.device) -> None:
    case = Case(ADVERSARIAL["branches at 57..63"], Setting(heads, 64, torch.bfloat16, sinks=True), device)
    check([(case.run(), case.truth())], torch.bfloat16)
