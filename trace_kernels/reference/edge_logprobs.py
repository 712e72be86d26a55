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
    """As `trace_kernels.edge_logprobs`, in at least fp32 by the library's log_softmax; differentiable.

    A token whose bias is -inf is out of the vocabulary: its logit is the constant -inf, without a gradient.
    """
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    masked = None if bias is None else bias == float("-inf")
    bias = None if bias is None else bias.to(dtype)
    logits = torch.nn.functional.linear(hidden[edge_src].to(dtype), weight.to(dtype), bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if masked is not None:
        logits = logits.masked_fill(masked, float("-inf"))
    logp = torch.nn.functional.log_softmax(logits / temperature, dim=-1)
    at_label, p = logp.gather(1, labels[:, None])[:, 0], logp.exp()
    if masked is not None:
        logp = logp.masked_fill(masked, 0.0)  # 0 times -inf is meant to be 0
    return at_label, -(p * logp).sum(-1)
