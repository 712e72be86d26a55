"""Tree attention through PyTorch's FlexAttention with the same predicate.

Compiled on a GPU, once for all lengths (but for lengths that equal a head count: torch takes the two for one
size); on a CPU eager and dense, to check results, as FlexAttention has no backward there. Head h reads key head
h // (H / Hk) in FlexAttention too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..layout import TreeLayout
from ..memo import once_per_layout
from ..scoring import Scoring

BLOCK = 128  # tokens; FlexAttention's default
LEAST_GPU_HEAD_DIM = 16  # what its Triton kernel multiplies at least


def refusal(q: torch.Tensor, *, differentiable: bool = False) -> str | None:
    """Why this backend cannot compute what is asked, as the end of a sentence; None: it can.

    `differentiable`: whether a gradient of q, k or v will be asked for.
    """
    if q.device.type == "cpu":
        if differentiable:
            return (
                "has no backward on a CPU: call it under torch.no_grad() or with inputs that need no gradient"
            )
        return None
    if q.device.type != "cuda":
        return f"needs a GPU or a CPU, q is on {q.device}"
    if q.dtype == torch.float64:
        return "computes in float32, bfloat16 and float16 on a GPU, not float64"
    if q.shape[-1] < LEAST_GPU_HEAD_DIM:
        return f"takes head sizes of at least {LEAST_GPU_HEAD_DIM} on a GPU, not {q.shape[-1]}"
    return None


def block_mask(layout: TreeLayout, window: int | None = None) -> BlockMask:
    """Which [128 x 128] blocks of the mask hold a pair, and which are full: from ranges, with no T x T mask.

    Keys [n0, n1) with subtree ends min_end to max_end touch rows [m0, m1) iff `n0 < m1 and max_end > m0`, and fill
    the block iff `n1 - 1 <= m0 and min_end >= m1`; under a window, depths must allow it as well.
    """
    tokens = layout.num_tokens
    # torch.compile takes a dimension of 1 for a constant, so one block alone would be compiled apart.
    blocks = max(2, -(-tokens // BLOCK))

    def ends(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest of each block, [blocks]."""
        # The last block is filled with its last token, which changes neither; it is never full, as m1 > tokens.
        index = torch.arange(blocks * BLOCK, device=x.device).clamp_(max=tokens - 1)
        least, greatest = x[index].view(blocks, BLOCK).aminmax(dim=1)
        return least, greatest

    first = torch.arange(blocks, device=layout.device) * BLOCK
    row, key = first[:, None], first[None, :]
    least_end, greatest_end = ends(layout.subtree_end)
    touched = (key < row + BLOCK) & (greatest_end > row)
    full = (key + BLOCK - 1 <= row) & (least_end >= row + BLOCK)
    if window is not None:
        least_depth, greatest_depth = ends(layout.depth)
        touched &= least_depth[:, None] - greatest_depth < window
        full &= greatest_depth[:, None] - least_depth < window

    def listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many blocks each row block has and which, as [1, 1, blocks] and [1, 1, blocks, blocks]."""
        order = blocks.int().argsort(dim=1, descending=True, stable=True)
        return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(touched & ~full),
        *listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=_predicate(layout, window),
        seq_lengths=(tokens, tokens),
    )


def _predicate(layout: TreeLayout, window: int | None) -> Callable[..., torch.Tensor]:
    subtree_end, depth = layout.subtree_end, layout.depth

    def sees(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < subtree_end[key])

    if window is None:
        return sees
    # A tensor and not the number, which would be compiled in.
    above_window = depth - window

    def sees_in_window(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < subtree_end[key]) & (depth[key] > above_window[query])

    return sees_in_window


@cache
def _softcap(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _compiled(device_type: str) -> Callable[..., Any]:
    # Called as it is, FlexAttention would trace itself anew on every call; "eager" runs the trace as it stands.
    # `fullgraph`: an error where it would give up compiling and hold the T x T scores instead.
    backend = "eager" if device_type == "cpu" else "inductor"
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


def flex_tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tree attention on q [T, H, D], k/v [T, Hk, D] -> (out [T, H, D], lse [H, T])."""
    mask = once_per_layout(
        layout.chains,
        ("flex", q.device, scoring.window),
        lambda: block_mask(layout.to(q.device), scoring.window),
    )
    on_gpu = q.device.type == "cuda"
    if not torch.is_grad_enabled():
        q, k, v = q.detach(), k.detach(), v.detach()
    batched, aux = _compiled(q.device.type)(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        score_mod=None if scoring.softcap is None else _softcap(scoring.softcap),
        block_mask=mask,
        scale=scoring.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        # The kernel for short queries, taken otherwise, refuses groups that are no power of two.
        kernel_options={"BACKEND": "TRITON"} if on_gpu else None,
        return_aux=AuxRequest(lse=True),
    )
    out, lse = batched[0].transpose(0, 1), aux.lse[0]
    if sinks is not None:
        sink = sinks.to(lse.dtype)[:, None]
        out = (out * torch.sigmoid(lse - sink).t().unsqueeze(-1)).to(q.dtype)
        lse = torch.logaddexp(lse, sink)
    return out, lse
