"""Oracle of edge log-probs through full logits: O(E V) memory, for tests and small inputs only."""

from __future__ import annotations

import torch


def edge_logprobs_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    edge_src: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `trace_kernels.edge_logprobs`, in at least fp32 by the library's log_softmax; differentiable."""
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    bias = None if bias is None else bias.to(dtype)
    logits = torch.nn.functional.linear(hidden[edge_src].to(dtype), weight.to(dtype), bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = torch.nn.functional.log_softmax(logits / temperature, dim=-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
