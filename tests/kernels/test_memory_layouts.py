"""Inputs as models hold them: views of a fused projection, any strides, offsets past 2^31 elements."""

from collections.abc import Callable

import pytest
import torch

from trace_kernels import TreeLayout, tree_attention

SetTiles = Callable[..., None]
TOKENS, HEADS, KEY_HEADS, DIM = 75, 4, 2, 32


@pytest.fixture
def layout(device: torch.device) -> TreeLayout:
    return TreeLayout.from_segments([-1, 0, 0, -1], [33, 12, 21, 9]).to(device)


@pytest.fixture(autouse=True)
def _small_tiles(set_tiles: SetTiles) -> None:
    set_tiles((32, 32), (32, 32), (16, 32))


def inputs(device: torch.device) -> list[torch.Tensor]:
    """q, k, v, dO."""
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    return [torch.randn(TOKENS, n, DIM, generator=generator).to(device) for n in heads]


def run(q, k, v, grad, layout: TreeLayout) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = tree_attention(*leaves, layout, backend="triton", return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_views_of_a_fused_projection(layout: TreeLayout, device: torch.device) -> None:
    q, k, v, grad = inputs(device)
    fused = torch.cat([q, k, v, grad], 1)
    views = fused.split([HEADS, KEY_HEADS, KEY_HEADS, HEADS], 1)
    assert not any(x.is_contiguous() for x in views)
    assert equal(run(*views, layout), run(q, k, v, grad, layout))


@pytest.mark.parametrize("order", [(2, 1, 0), (2, 0, 1), (1, 0, 2), (1, 2, 0)])
def test_any_order_of_dimensions(order: tuple[int, ...], layout: TreeLayout, device: torch.device) -> None:
    back = tuple(order.index(i) for i in range(3))
    plain = inputs(device)
    turned = [x.permute(order).contiguous().permute(back) for x in plain]
    assert equal(run(*turned, layout), run(*plain, layout))


def test_channels_two_apart_and_expanded_gradients(layout: TreeLayout, device: torch.device) -> None:
    q, k, v, grad = inputs(device)
    apart = [torch.stack([x, -x], -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    assert apart[0].stride(-1) == 2
    one = grad[:1, :1, :1].expand_as(grad)
    assert equal(run(*apart, one, layout), run(q, k, v, one.contiguous(), layout))


def test_model_shape(layout: TreeLayout, device: torch.device) -> None:
    plain = inputs(device)
    out, lse, *grads = run(*(x.transpose(0, 1)[None] for x in plain), layout)
    got = [out[0].transpose(0, 1), lse[0].T, *(x[0].transpose(0, 1) for x in grads)]
    assert equal(got, run(*plain, layout))


@pytest.mark.parametrize("far", ["tokens", "heads"])
def test_offsets_past_2_to_the_31(
    far: str, layout: TreeLayout, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = 2**31 + 2**20
    plain = [x.half() for x in inputs(device)]
    # Memory that nobody touches is never committed; the interpreter would copy it onto itself.
    storage = torch.UntypedStorage(2 * (elements + 2**16), device=device)
    if device.type == "cpu":
        monkeypatch.setattr(torch.UntypedStorage, "copy_", lambda self, *_: self)
    far_views, start = [], 0
    for x in plain:
        heads = x.shape[1]
        stride = elements // (TOKENS - 1), DIM
        if far == "heads":
            stride = DIM, elements // (heads - 1)
        room = heads * DIM if far == "tokens" else TOKENS * DIM
        view = torch.empty(0, dtype=x.dtype, device=device).set_(storage, start, x.shape, (*stride, 1))
        far_views.append(view.copy_(x))
        start += room
    assert max(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in far_views) > 2**31
    assert equal(run(*far_views, layout), run(*plain, layout))


def test_strided_sinks(layout: TreeLayout, device: torch.device) -> None:
    q, k, v, _ = inputs(device)
    sinks = torch.randn(2 * HEADS, device=device)
    strided = tree_attention(q, k, v, layout, sinks=sinks[::2], backend="triton")
    assert torch.equal(
        strided, tree_attention(q, k, v, layout, sinks=sinks[::2].contiguous(), backend="triton")
    )
