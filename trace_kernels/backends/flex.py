"""Tree attention through PyTorch's FlexAttention with the same predicate."""

from __future__ import annotations

import torch

from ..layout import TreeLayout
from ..scoring import Scoring


def refusal(q: torch.Tensor) -> str | None:
    """Why this backend cannot compute what is asked, as the end of a sentence; None: it can."""
    return "is not written yet"


def flex_tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: TreeLayout,
    scoring: Scoring,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tree attention on q [T, H, D], k/v [T, Hk, D] -> (out [T, H, D], lse [H, T])."""
    raise NotImplementedError
