"""Dense fp32 oracle of tree attention: O(T^2) memory, for tests and small inputs only."""

from __future__ import annotations

import torch

from ..layout import TreeLayout


def dense_mask(layout: TreeLayout) -> torch.Tensor:
    """bool [T, T] on the layout's device: `mask[q, k]` is true where query q sees key k."""
    index = torch.arange(layout.num_tokens, device=layout.device)
    query, key = index[:, None], index[None, :]
    return (key <= query) & (query < layout.subtree_end[None, :])


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Softmax attention under any bool [T, T] mask in at least fp32, on q [T, H, D], k/v [T, Hk, D].

    Returns [T, H, D] in q's dtype; differentiable by autograd.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    query = q.to(wide).transpose(0, 1)
    key = k.to(wide).transpose(0, 1).repeat_interleave(group, dim=0)
    value = v.to(wide).transpose(0, 1).repeat_interleave(group, dim=0)
    scores = (query @ key.transpose(1, 2)) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return (weights @ value).transpose(0, 1).to(q.dtype)


def tree_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TreeLayout, scale: float
) -> torch.Tensor:
    """Tree attention through a dense mask; arguments and result as `masked_attention`."""
    return masked_attention(q, k, v, dense_mask(layout).to(q.device), scale)
