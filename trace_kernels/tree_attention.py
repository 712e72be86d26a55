"""The public tree attention op: checks its arguments and picks a backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .backends.flash import flash_attention, is_available
from .backends.segments import segments_attention
from .layout import TreeLayout
from .reference.tree_attention import tree_attention_reference

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TreeLayout, float], torch.Tensor]

BACKENDS: dict[str, Backend] = {
    "segments": segments_attention,
    "flash": flash_attention,
    "reference": tree_attention_reference,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    *,
    scale: float | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Softmax attention in which query i sees key j exactly when j is i or an ancestor of i.

    Args:
        q: [T, H, D], or [1, H, T, D] as models hold it. fp32, bf16, fp16 (fp64 for gradient checks).
        k, v: [T, Hk, D] or [1, Hk, T, D], of q's dtype and device; Hk divides H (grouped-query attention,
            head h reads key head h // (H / Hk)).
        layout: the packed forest of the T tokens.
        scale: factor on the scores; default 1 / sqrt(D).
        backend: "segments" (any device and type, exact, no T x T memory, no copies), "flash" (FlashAttention
            over gathered paths: GPU, half types), "reference" (dense oracle) or "auto": "flash" for half types
            on a GPU when `flash-attn` is installed, else "segments".

    Returns:
        The outputs in q's shape and dtype; differentiable in q, k and v.

    Raises:
        TypeError: an argument is not a tensor or not a layout.
        ValueError: shapes, dtypes, devices, head counts or lengths that do not fit, or an unknown backend.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not isinstance(layout, TreeLayout):
        raise TypeError(f"layout: expected a TreeLayout, got {type(layout).__name__}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {['auto', *BACKENDS]}, got {backend!r}")
    batched = q.ndim == 4
    q, k, v = (_packed(name, x, batched) for name, x in (("q", q), ("k", k), ("v", v)))
    _check(q, k, v, layout)
    run = BACKENDS[choose_backend(q) if backend == "auto" else backend]
    out = run(q, k, v, layout, q.shape[-1] ** -0.5 if scale is None else float(scale))
    return out.transpose(0, 1).unsqueeze(0) if batched else out


def choose_backend(q: torch.Tensor) -> str:
    """What "auto" means for these queries."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return "flash" if q.device.type == "cuda" and half and is_available() else "segments"


def _packed(name: str, x: torch.Tensor, batched: bool) -> torch.Tensor:
    """[T, H, D] view of either accepted shape."""
    if batched:
        if x.ndim != 4 or x.shape[0] != 1:
            raise ValueError(
                f"{name}: expected shape [1, heads, T, D] as q has 4 dimensions, got {list(x.shape)}"
            )
        return x[0].transpose(0, 1)
    if x.ndim != 3:
        raise ValueError(f"{name}: expected shape [T, heads, D] or [1, heads, T, D], got {list(x.shape)}")
    return x


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TreeLayout) -> None:
    if q.dtype not in DTYPES:
        raise ValueError(f"q: expected a dtype of {[str(d) for d in DTYPES]}, got {q.dtype}")
    if q.shape[0] != layout.num_tokens:
        raise ValueError(f"layout: made for {layout.num_tokens} tokens, but q holds {q.shape[0]}")
    if 0 in q.shape[1:]:
        raise ValueError(f"q: expected at least one head and one channel, got {list(q.shape)} as [T, H, D]")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: expected q's dtype {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device}, got {x.device}")
        if x.shape[0] != q.shape[0] or x.shape[2] != q.shape[2]:
            raise ValueError(
                f"{name}: expected T = {q.shape[0]} and D = {q.shape[2]} as in q, got {list(x.shape)}"
            )
        if x.shape[1] != k.shape[1]:
            raise ValueError(f"{name}: expected k's {k.shape[1]} heads, got {x.shape[1]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k: its {k.shape[1]} heads do not divide the {q.shape[1]} heads of q")
