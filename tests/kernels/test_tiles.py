"""Which table a device gets."""

import pytest

from trace_kernels.device.tiles import DEFAULTS, architecture, tiles


@pytest.mark.parametrize(
    ("capability", "table"),
    [
        ("80", "cuda:80"), ("86", "cuda:86"), ("89", "cuda:86"), ("90", "cuda:90"), ("100", "cuda:100"),
        ("103", "cuda:100"), ("120", "cuda:86"), ("75", None), ("70", None), ("110", None),
    ],
)  # fmt: skip
def test_cuda_devices(capability: str, table: str | None) -> None:
    assert architecture("cuda", capability) == table


def test_amd_devices() -> None:
    assert architecture("hip", "gfx942") == "hip:gfx942"
    assert architecture("hip", "gfx90a") is None


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_table_has_every_size(name: str) -> None:
    for bits in (16, 32):
        for head_dim in (32, 64, 80, 96, 128, 256):
            found = tiles(name, "3.9.0", bits, head_dim)
            assert found.dkdv.block_n % found.dkdv.block_m == 0
