"""What the tests of the tree attention programs share: inputs, the truth from the rollouts, errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F

from trace_kernels import TreeLayout, tree_attention
from trace_kernels.reference.tree_attention import masked_attention
from trace_kernels.scoring import Scoring

from ..trace_kernels.forests import Forest

# RMS error over RMS of the truth.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


class Results(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Setting:
    """All that a call is given besides a forest."""

    heads: tuple[int, int] = (2, 1)
    dim: int = 32
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    grad_lse: bool = False


@dataclass
class Case:
    """A forest, its layout, and random inputs on the device."""

    forest: Forest
    setting: Setting
    device: torch.device
    pad: int | None = None
    seed: int = 0
    layout: TreeLayout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = TreeLayout.from_segments(
            self.forest.parents, self.forest.lengths, pad_to_multiple=self.pad
        ).to(self.device)
        tokens, setting = self.layout.num_tokens, self.setting
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        heads, key_heads = setting.heads
        q, k, v, grad = (draw(tokens, n, setting.dim) for n in (heads, key_heads, key_heads, heads))
        self.q, self.k, self.v, self.grad = (x.to(self.device, setting.dtype) for x in (q, k, v, grad))
        self.sinks = draw(heads).to(self.device) if setting.sinks else None
        self.grad_lse = draw(tokens, heads).to(self.device) if setting.grad_lse else None

    def run(self) -> Results:
        def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
            return tree_attention(
                q, k, v, self.layout, window=self.setting.window, softcap=self.setting.softcap,
                sinks=sinks, backend="triton", return_lse=True,
            )  # fmt: skip

        return self._results(attend, self.setting.dtype)

    def truth(self) -> Results:
        """In fp64, under the mask of the rollouts."""
        scoring = Scoring(self.setting.dim**-0.5, self.setting.window, self.setting.softcap)

        def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
            out, lse = masked_attention(q, k, v, self.mask(), scoring, sinks)
            return out, lse.T

        return self._results(attend, torch.float64)

    def mask(self) -> torch.Tensor:
        return rollout_mask(self.forest, self.layout.num_tokens, self.setting.window).to(self.device)

    def _results(self, attend, dtype: torch.dtype) -> Results:  # type: ignore[no-untyped-def]
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v))
        sinks = None if self.sinks is None else self.sinks.detach().clone().requires_grad_()
        if sinks is not None and dtype == torch.float64:
            sinks = sinks.detach().double().requires_grad_()
        out, lse = attend(q, k, v, sinks)
        grads = [self.grad.to(out.dtype), None if self.grad_lse is None else self.grad_lse.to(lse.dtype)]
        outputs = [x for x, grad in zip((out, lse), grads, strict=True) if grad is not None]
        torch.autograd.backward(outputs, [grad for grad in grads if grad is not None])
        dsinks = None if sinks is None else sinks.grad
        return Results(out.detach(), lse.detach(), q.grad, k.grad, v.grad, dsinks)  # type: ignore[arg-type]


def rollout_mask(forest: Forest, num_tokens: int, window: int | None = None) -> torch.Tensor:
    """bool [T, T] from the rollouts; a padding token sees itself alone."""
    mask = torch.eye(num_tokens, dtype=torch.bool)
    mask[: forest.num_tokens, : forest.num_tokens] = forest.mask()
    if window is not None:
        depth = torch.zeros(num_tokens, dtype=torch.int64)
        for rollout in forest.rollouts():
            depth[rollout] = torch.arange(len(rollout))
        mask &= depth[:, None] - depth[None, :] < window
    return mask


def sdpa_per_rollout(case: Case) -> Results:
    """Causal SDPA on each rollout in the case's type; a shared token's gradient enters in one of them."""
    assert case.layout.num_tokens == case.forest.num_tokens
    q, k, v = (x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v))
    out = torch.zeros_like(case.q)
    counted = torch.zeros(case.forest.num_tokens, dtype=torch.bool)
    for rollout in case.forest.rollouts():
        if all(counted[token] for token in rollout):
            continue
        path = torch.tensor(rollout)
        one = [x[path].transpose(0, 1)[None] for x in (q, k, v)]
        group = case.setting.heads[0] // case.setting.heads[1]
        one[1:] = (x.repeat_interleave(group, dim=1) for x in one[1:])
        part = F.scaled_dot_product_attention(*one, is_causal=True)[0].transpose(0, 1)
        new = ~counted[path]
        part[new].backward(case.grad[path[new]])
        out[path[new]] = part[new].detach()
        counted[path] = True
    return Results(out, out.new_empty(0), q.grad, k.grad, v.grad)  # type: ignore[arg-type]


def errors(got: Results, want: Results) -> dict[str, tuple[float, float]]:
    """Per result: sums of squares of the error and of the truth."""
    return {
        name: (float((a.double() - b.double()).pow(2).sum()), float(b.double().pow(2).sum()))
        for name, a, b in zip(Results._fields, got, want, strict=True)
        if a is not None and b is not None
    }
