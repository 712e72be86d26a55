"""Bitwise the same run to run, and to rounding the same however the ranges of dK and dV are cut."""

from collections.abc import Callable

import pytest
import torch

from trace_kernels import block_lists
from trace_kernels.backends import triton as backend

from ..trace_kernels.forests import Forest
from .cases import Case, Results, Setting

SetTiles = Callable[..., None]
WIDE = Forest([-1] + [0] * 12 + [-1, 13], [21] + [11] * 12 + [9, 30])


def same(a: Results, b: Results) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (20, torch.bfloat16)])
def test_cut_ranges(
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    set_tiles: SetTiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_tiles((32, 32), (32, 32), (16, 32))
    slots: list[int] = []
    build = block_lists.key_items

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        work = build(*args, **kwargs)
        slots.append(work.slots)
        return work

    monkeypatch.setattr(backend, "key_items", counted)
    setting = Setting((2, 1), 32, dtype, window, sinks=True, grad_lse=True)
    monkeypatch.setattr(block_lists, "SHORTEST_ITEM", 1)
    monkeypatch.setattr(backend, "SHARES", 1000)
    cut = Case(WIDE, setting, device)
    parts, again = cut.run(), cut.run()
    monkeypatch.setattr(block_lists, "SHORTEST_ITEM", 1000)
    whole = Case(WIDE, setting, device).run()
    assert slots[0] >= 10
    assert slots[-1] == 0
    assert same(parts, again)
    for name in ("out", "lse", "dq", "dsinks"):
        assert torch.equal(getattr(parts, name), getattr(whole, name))
    for name in ("dk", "dv"):
        a, b = getattr(parts, name).double(), getattr(whole, name).double()
        limit = 1e-6 if dtype == torch.float32 else 2e-3
        assert (a - b).pow(2).mean() <= limit**2 * b.pow(2).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bitwise_repeatable(dtype: torch.dtype, device: torch.device, set_tiles: SetTiles) -> None:
    set_tiles((32, 32), (32, 32), (32, 32))
    case = Case(WIDE, Setting((2, 1), 64, dtype, softcap=4.0, sinks=True, grad_lse=True), device, pad=8)
    first = case.run()
    assert all(x.isfinite().all() for x in first if x is not None)
    for _ in range(1 if device.type == "cpu" else 50):
        assert same(case.run(), first)
    # A new layout of the same forest builds its lists anew.
    assert same(Case(case.forest, case.setting, device, pad=8).run(), first)


def test_a_tree_does_not_depend_on_its_neighbours_values(device: torch.device, set_tiles: SetTiles) -> None:
    set_tiles((32, 32), (32, 32), (32, 32))
    setting = Setting((2, 1), 32)
    first, other = (Case(WIDE, setting, device) for _ in range(2))
    tree = 21 + 12 * 11
    for x in (other.q, other.k, other.v, other.grad):
        x[tree:] = 100 * torch.randn_like(x[tree:])
    for a, b in zip(first.run()[:5], other.run()[:5], strict=True):
        assert torch.equal(a[:tree], b[:tree])
        assert not torch.equal(a[tree:], b[tree:])
