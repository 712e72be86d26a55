"""Dense fp32 oracle of tree attention: O(T^2) memory, for tests and small inputs only."""

from __future__ import annotations

import torch

from ..layout import TreeLayout
from ..scoring import Scoring


def dense_mask(layout: TreeLayout, window: int | None = None) -> torch.Tensor:
    """bool [T, T] on the layout's device: `mask[q, k]` is true where query q sees key k."""
    index = torch.arange(layout.num_tokens, device=layout.device)
    query, key = index[:, None], index[None, :]
    mask = (key <= query) & (query < layout.subtree_end[None, :])
    if window is not None:
        mask &= layout.depth[:, None] - layout.depth[None, :] < window
    return mask


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention under any bool [T, T] mask in at least fp32, on q [T, H, D], k/v [T, Hk, D].

    Returns out [T, H, D] in q's dtype and lse [H, T], which holds the sinks [H] too; differentiable by autograd.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    query = q.to(wide).transpose(0, 1)
    key = k.to(wide).transpose(0, 1).repeat_interleave(group, dim=0)
    value = v.to(wide).transpose(0, 1).repeat_interleave(group, dim=0)
    scores = (query @ key.transpose(1, 2)) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(wide)[:, None])
    weights = (scores - lse[..., None]).exp()
    return (weights @ value).transpose(0, 1).to(q.dtype), lse


def tree_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tree attention through a dense mask; arguments and result as `masked_attention`."""
    mask = dense_mask(layout, scoring.window).to(q.device)
    return masked_attention(q, k, v, mask, scoring, sinks)
