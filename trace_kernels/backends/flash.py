"""Tree attention through FlashAttention's varlen kernel, over the gathered keys and values of each path.

A chain of tokens attends to its ancestors and causally to itself: with the chain's path gathered, that is one
sequence whose queries are the last of its keys, which is how the kernel aligns `causal`. The price is a copy of K/V
per path (and a gradient summed back over the copies, in fp32), so this pays for short prefixes and for half types,
where the exact `segments` backend computes in fp32.

`flash-attn` is compiled against the torch that is installed, so pip must not build it in isolation:

    pip install --no-build-isolation flash-attn
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ..layout import TreeLayout
from ..memo import once_per_layout
from ..scoring import Scoring

# Rows of copied gradients widened to fp32 at a time, as elements: 2^25 are 128 MiB.
SUM_ELEMENTS = 1 << 25


def is_available() -> bool:
    """Whether the `flash-attn` package is installed."""
    return importlib.util.find_spec("flash_attn") is not None


def path_gather(layout: TreeLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """What the varlen kernel needs for a layout: packed positions of all paths' keys one after the other (int64),
    cumulative query and key lengths (int32, [chains + 1]), and the longest of either.

    Padding tokens are chains of one token.
    """
    end = layout.num_tokens - layout.num_padding
    chains = [*layout.chains.tolist(), *((t, t + 1, t + 1) for t in range(end, layout.num_tokens))]
    open_paths: list[tuple[int, np.ndarray]] = []  # (subtree end, positions from the root)
    keys: list[np.ndarray] = []
    for start, stop, subtree_end in chains:
        while open_paths and open_paths[-1][0] <= start:
            open_paths.pop()
        own = np.arange(start, stop)
        path = np.concatenate([open_paths[-1][1], own]) if open_paths else own
        open_paths.append((subtree_end, path))
        keys.append(path)
    query_lengths = np.array([stop - start for start, stop, _ in chains])
    key_lengths = np.array([len(path) for path in keys])

    def cumulated(lengths: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)).to(layout.device)

    gather = torch.from_numpy(np.concatenate(keys)).to(layout.device)
    longest = int(query_lengths.max()), int(key_lengths.max())
    return gather, cumulated(query_lengths), cumulated(key_lengths), *longest


class _Gather(torch.autograd.Function):
    """`x[index]` whose gradient is summed in fp32 and rounded once.

    A shared prefix has as many copies as there are chains below it; summed in bf16, small terms are lost
    against the sum so far.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        (grad,) = grads
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        step = max(1, SUM_ELEMENTS // grad[0].numel())
        for part in (slice(first, first + step) for first in range(0, len(index), step)):
            rows = grad[part].float()
            # index_add_ uses atomics on accelerators, index_put_ sorts: the same sum on every run.
            if grad.device.type == "cpu":
                total.index_add_(0, index[part], rows)
            else:
                total.index_put_((index[part],), rows, accumulate=True)
        return total.to(ctx.dtype), None


def refusal(q: torch.Tensor, *, sinks: torch.Tensor | None, return_lse: bool) -> str | None:
    """Why this backend cannot compute what is asked, as the end of a sentence; None: it can."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 and float16, not {q.dtype}"
    if sinks is not None or return_lse:
        return f"has no {'sinks' if sinks is not None else 'lse'}"
    return None


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Tree attention on q [T, H, D], k/v [T, Hk, D] -> (out [T, H, D], no lse); bf16 or fp16 on a GPU.

    Raises ImportError when `flash-attn` is missing.
    """
    if not is_available():
        raise ImportError(
            "backend 'flash' needs the flash-attn package: pip install --no-build-isolation flash-attn "
            "(it compiles against the installed torch), or use another backend"
        )
    from flash_attn import flash_attn_varlen_func

    gather, query_ends, key_ends, longest_query, longest_key = once_per_layout(
        layout.chains, ("flash", q.device), lambda: path_gather(layout.to(q.device))
    )
    # The kernel's own backward adds dQ with atomics unless told otherwise.
    arguments: dict[str, Any] = {"softmax_scale": scoring.scale, "causal": True, "deterministic": True}
    if scoring.window is not None:
        arguments["window_size"] = (scoring.window - 1, 0)  # along the gathered path, which is by depth
    if scoring.softcap is not None:
        arguments["softcap"] = scoring.softcap
    keys, values = _Gather.apply(k, gather), _Gather.apply(v, gather)
    out = flash_attn_varlen_func(
        q, keys, values, query_ends, key_ends, longest_query, longest_key, **arguments
    )
    return out, None
