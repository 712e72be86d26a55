"""A NaN or an infinity reaches what depends on it and nothing else, and is never taken for a number."""

from collections.abc import Callable

import pytest
import torch

from ..trace_kernels.forests import Forest
from .cases import Case, Results, Setting

# Three trees and padding that share blocks of 32; some blocks see each other in full, some in part, some not.
FOREST = Forest([-1, 0, 0, -1, 3, 3, 5, -1], [37, 9, 21, 5, 20, 18, 3, 11])
TREES = [range(67), range(67, 113), range(113, 124), range(124, 125)]
PLACES = [36, 40, 67, 115, 126]  # ends, starts, the middle of a block, padding
NAN, INF = float("nan"), float("inf")

SetTiles = Callable[..., None]


def broken(x: torch.Tensor) -> torch.Tensor:
    """bool [T, heads]: whether a vector holds a NaN or an infinity."""
    return ~x.isfinite().all(-1) if x.ndim == 3 else ~x.isfinite()


def case_of(device: torch.device, window: int | None = None) -> Case:
    setting = Setting((2, 2), 32, torch.float32, window=window, grad_lse=True)
    return Case(FOREST, setting, device, pad=16)


@pytest.fixture(params=[None, 12])
def clean(request: pytest.FixtureRequest, device: torch.device, set_tiles: SetTiles) -> tuple[Case, Results]:
    set_tiles((32, 32), (32, 32), (32, 32))
    case = case_of(device, request.param)
    return case, case.run()


def poison(case: Case, names: tuple[str, ...], token: int, value: float) -> Case:
    """The same case with one broken element, of the first head."""
    spoiled = case_of(case.device, case.setting.window)
    for name in names:
        getattr(spoiled, name)[token, 0, 5] = value
    return spoiled


def reach(case: Case, names: tuple[str, ...], token: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Per result bool [T] twice: what must be broken, and what may be; of the first head."""
    mask = case.mask()
    here = torch.zeros(len(mask), dtype=torch.bool, device=case.device)
    here[token] = True
    sees_it = mask[:, token]
    none = torch.zeros_like(here)
    rows = {"q": here, "k": sees_it, "v": sees_it, "grad": none}
    out = torch.stack([rows[name] for name in names]).any(0)
    dq = out | here if "grad" in names else out
    keys = mask[dq].any(0)
    scores_broken = any(name in names for name in "qk")
    # The weights are sound when v alone is broken: then dV and the lse are too, but where a tile is masked.
    lse = torch.stack([rows[name] if name in "qk" else none for name in names]).any(0)
    dv = keys if scores_broken or "grad" in names else none
    if "v" in names and not scores_broken:
        dv = mask[here].any(0) if "grad" in names else none
    return {"out": (out, out), "lse": (lse, out), "dq": (dq, dq), "dk": (keys, keys), "dv": (dv, keys)}


@pytest.mark.parametrize("names", [("q",), ("k",), ("v",), ("grad",), ("q", "k", "v", "grad")])
def test_a_nan_reaches_what_depends_on_it_and_nothing_else(
    names: tuple[str, ...], clean: tuple[Case, Results]
) -> None:
    case, sound = clean
    for token in PLACES:
        got = poison(case, names, token, NAN).run()
        for name, (must, may) in reach(case, names, token).items():
            result, before = getattr(got, name), getattr(sound, name)
            assert broken(result)[must, 0].all(), f"{name} at {token}: swallowed"
            assert torch.equal(result[~may], before[~may]), f"{name} at {token}: reached another"
        for result, before in zip(got[:5], sound[:5], strict=True):
            assert torch.equal(result[:, 1], before[:, 1]), "the other head"


@pytest.mark.parametrize("name", ["q", "k", "v", "grad"])
@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinity_stays_in_its_tree(name: str, value: float, clean: tuple[Case, Results]) -> None:
    case, sound = clean
    for token in (40, 67):  # that several rows see: of an infinite key, those with a positive score are NaN
        got = poison(case, (name,), token, value).run()
        tree = next(tree for tree in TREES if token in tree)
        outside = [t for t in range(case.layout.num_tokens) if t not in tree]
        for result, before in zip(got[:5], sound[:5], strict=True):
            assert torch.equal(result[outside], before[outside])
        shown = {"q": "dk", "k": "dq", "v": "out", "grad": "dv"}[name]
        assert broken(getattr(got, shown))[list(tree), 0].any()


@pytest.mark.parametrize("name", ["k", "v"])
def test_half_precision(name: str, device: torch.device, set_tiles: SetTiles) -> None:
    set_tiles((32, 32), (32, 32), (32, 32))
    case = Case(FOREST, Setting((1, 1), 32, torch.bfloat16), device)
    sound = case.run()
    getattr(case, name)[70] = NAN
    got = case.run()
    sees_it = case.mask()[:, 70]
    assert torch.equal(broken(got.out)[:, 0], sees_it)
    assert torch.equal(got.out[~sees_it], sound.out[~sees_it])
