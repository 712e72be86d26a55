"""Exact attention over the rollouts' paths, in fp32: what every method's results are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from .workloads import Workload

# Scores held at a time.
SCORE_ELEMENTS = 1 << 26


def path_attention(
    work: Workload, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, grad_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, dq [T, G, D], dk, dv [T, 1, D], lse [T, G]) of q, grad_out [T, G, D] and grad_lse [T, G].

    The G query heads share the one head of k, v [T, 1, D]. Segment by segment against its path from the root:
    neither the layout's mask nor any kernel takes part.
    """
    q, k, v, grad_out = (x.float() for x in (q, k, v, grad_out))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    lse = q.new_zeros(q.shape[:2])
    scale = q.shape[-1] ** -0.5
    for own_path, length in zip(work.paths, work.lengths, strict=True):
        path = torch.from_numpy(own_path).to(q.device)
        key, value = k[path, 0], v[path, 0]  # [m, D]
        step = max(1, SCORE_ELEMENTS // (q.shape[1] * max(1, len(path))))
        for first in range(len(path) - length, len(path), step):
            rows = path[first : first + step]
            hidden = torch.ones(len(rows), len(path), dtype=torch.bool, device=q.device).triu(first + 1)
            scores = torch.einsum("ngd,md->ngm", q[rows], key).mul_(scale)
            scores.masked_fill_(hidden[:, None], float("-inf"))
            lse[rows] = scores.logsumexp(-1)
            weights = scores.softmax(-1)
            out[rows] = weights @ value
            grad = grad_out[rows]
            dv[:, 0].index_add_(0, path, torch.einsum("ngm,ngd->md", weights, grad))
            delta = (grad * out[rows]).sum(-1)
            if grad_lse is not None:
                delta = delta - grad_lse[rows]
            slope = weights * (grad @ value.T - delta[..., None]) * scale
            dq[rows] = slope @ key
            dk[:, 0].index_add_(0, path, torch.einsum("ngm,ngd->md", slope, q[rows]))
    return out, dq, dk, dv, lse


def rms_ratio(found: Tensor, expected: Tensor) -> float:
    """RMS of the difference over the RMS of what is expected."""
    return float((found.float() - expected).norm() / expected.norm().clamp_min(1e-30))
