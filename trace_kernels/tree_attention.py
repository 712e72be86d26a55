"""The public tree attention op: checks its arguments and picks a backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, overload

import torch

from . import attention_op
from .backends import flash, flex
from .layout import TreeLayout
from .reference.tree_attention import tree_attention_reference
from .scoring import Scoring

# (q [T, H, D], k, v [T, Hk, D], layout, scoring, sinks [H] | None) -> (out [T, H, D], lse [H, T] | None)
Backend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

BACKENDS: dict[str, Backend] = {
    "triton": partial(attention_op.run, program="triton"),
    "flash": flash.flash_attention,
    "flex": flex.flex_tree_attention,
    "segments": partial(attention_op.run, program="segments"),
    "reference": tree_attention_reference,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What the Triton kernel is tuned for; `segments`, `flex` and `reference` take any head size.
HEAD_DIMS = (32, 64, 80, 96, 128, 256)


@overload
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention in which query i sees key j exactly when j is i or an ancestor of i.

    Args:
        q: [T, H, D], or [1, H, T, D] as models hold it. fp32, bf16, fp16 (fp64 for gradient checks). Any strides.
        k, v: [T, Hk, D] or [1, Hk, T, D], of q's dtype and device; Hk divides H (grouped-query attention,
            head h reads key head h // (H / Hk)).
        layout: the packed forest of the T tokens.
        scale: factor on the scores; default 1 / sqrt(D).
        window: sliding window in tokens of the path, the query's own included: a query sees the ancestors fewer
            than `window` steps above it, wherever they are packed. Default: all.
        softcap: bound c on the scores, `c * tanh(score / c)`. Default: none.
        sinks: [H] logits, one per head, that take part in the softmax and carry no value (gpt-oss). Default: none.
        backend: "triton" (the kernel), "flash" (FlashAttention over gathered paths), "flex" (FlexAttention),
            "segments" (eager, any device and type, what a CPU uses), "reference" (dense oracle), or "auto":
            `choose_backend` says which that is, and why.
        return_lse: also return the log-sum-exp of each row's scores, natural logarithm, sinks included.

    Returns:
        The outputs in q's shape and dtype; with `return_lse` also the lse, fp32, [T, H] or [1, H, T] as q.
        Differentiable in q, k, v and sinks, through both results.

    Under autocast q, k and v are cast to its type, as in `scaled_dot_product_attention`.

    Raises:
        TypeError: an argument is not a tensor or not a layout.
        ValueError: shapes, dtypes, devices, head counts, lengths or numbers that do not fit, an unknown backend,
            or one that cannot compute what is asked; the message names the argument, what was given and what is
            expected.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if not isinstance(layout, TreeLayout):
        raise TypeError(f"layout: expected a TreeLayout, got {type(layout).__name__}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {['auto', *BACKENDS]}, got {backend!r}")
    batched = q.ndim == 4
    q, k, v = (_autocast(_packed(name, x, batched)) for name, x in (("q", q), ("k", k), ("v", v)))
    _check(q, k, v, layout)
    _check_scoring(q, scale, window, softcap, sinks)
    scoring = Scoring(
        q.shape[-1] ** -0.5 if scale is None else float(scale),
        window,
        None if softcap is None else float(softcap),
    )
    if backend == "auto":
        backend = choose_backend(q).name
    differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    reason = refusal(backend, q, sinks=sinks, return_lse=return_lse, differentiable=differentiable)
    if reason is not None:
        raise ValueError(f"backend: {backend!r} {reason}; use backend='auto'")
    out, lse = BACKENDS[backend](q, k, v, layout, scoring, sinks)
    out = out.transpose(0, 1).unsqueeze(0) if batched else out
    if not return_lse:
        return out
    assert lse is not None
    return out, lse.unsqueeze(0) if batched else lse.transpose(0, 1)


class Choice(NamedTuple):
    """What "auto" means for some inputs, and why."""

    name: str
    reason: str


def choose_backend(q: torch.Tensor) -> Choice:
    """The backend that "auto" runs for queries [T, H, D] or [1, H, T, D] of this device, type and head size."""
    if q.device.type != "cuda":
        return Choice("segments", f"the exact eager backend, for q on {q.device.type}")
    reason = refusal("triton", q)
    if reason is not None:
        return Choice("segments", f"'triton' {reason}")
    return Choice(
        "triton", "the kernel, for q on a GPU; no other backend has been measured against it on one yet"
    )


def refusal(
    backend: str,
    q: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    differentiable: bool = False,
) -> str | None:
    """Why a backend cannot compute this, as the end of a sentence; None: it can."""
    if backend == "triton":
        if q.dtype == torch.float64:
            return "computes in float32, bfloat16 and float16, not float64"
        if q.shape[-1] not in HEAD_DIMS:
            return f"supports head sizes {HEAD_DIMS}, not {q.shape[-1]}"
        return _no_triton(q.device)
    if backend == "flash":
        return flash.refusal(q, sinks=sinks, return_lse=return_lse)
    if backend == "flex":
        return flex.refusal(q, differentiable=differentiable)
    return None


def _no_triton(device: torch.device) -> str | None:
    if torch.compiler.is_compiling():
        return None  # the launch itself tells, then
    try:
        from .launch import unsupported
    except ImportError as error:
        return f"needs the triton package ({error})"
    return unsupported(device)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    device = x.device.type
    if x.dtype == torch.float64 or not x.is_floating_point() or not torch.amp.is_autocast_available(device):
        return x
    if not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


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


def _check_scoring(
    q: torch.Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    if scale is not None and not (_is_number(scale) and abs(scale) < float("inf")):
        raise ValueError(f"scale: expected a finite number or None, got {scale!r}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window: expected a positive number of tokens or None, got {window!r}")
    if softcap is not None and not (_is_number(softcap) and 0 < softcap < float("inf")):
        raise ValueError(f"softcap: expected a positive finite number or None, got {softcap!r}")
    if sinks is None:
        return
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks: expected a tensor, got {type(sinks).__name__}")
    if tuple(sinks.shape) != (q.shape[1],) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks: expected {q.shape[1]} floating-point numbers, one per head of q, "
            f"got {list(sinks.shape)} of {sinks.dtype}"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks: expected q's device {q.device}, got {sinks.device}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
