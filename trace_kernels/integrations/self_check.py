"""`check_against_unpacked`: is a packed pass of this model on this machine the same as unpacked ones?

For the first batch of a trainer that moves to tree attention: a few root-to-leaf paths are run one by one with the
model's stock attention, and their per-token log-probs are compared with those of the packed pass, which are taken
from its output layer as `edge_logprobs` takes them: a model that goes on from there is found out.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..layout import TreeLayout
from .head_check import of_output_layer, recorded
from .model_check import evaluating

# Packed and unpacked passes may differ by this many times what one rounding of the embeddings changes.
NOISE_FACTOR = 2.0
# Smaller differences, in nats, teach a policy nothing.
NEGLIGIBLE = 1e-5
# Log-probs compared on one path: the logits of these alone are computed.
TOKENS_PER_ROLLOUT = 256


class SelfCheckError(RuntimeError):
    """Packed and unpacked log-probs differ by more than the tolerance; the message gives the figures."""


class SelfCheck(NamedTuple):
    """What was found.

    Attributes:
        agrees: the packed pass may be used. False only after a fall-back.
        rms: root mean square of the differences of a rollout's log-probs, in nats; the worst of all rollouts and
            ranks.
        worst: the largest difference, in nats, on this rank.
        tolerance: what `rms` was held against.
        tokens: log-probs compared on this rank.
        attention: the implementation the model now runs.
    """

    agrees: bool
    rms: float
    worst: float
    tolerance: float
    tokens: int
    attention: str


def check_against_unpacked(
    model: nn.Module,
    layout: TreeLayout,
    input_ids: torch.Tensor,
    *,
    tolerance: float | None = None,
    on_mismatch: Literal["raise", "fall_back"] = "raise",
    stock: str | None = None,
    rollouts: int = 4,
    max_length: int | None = None,
    head_temperature: float = 1.0,
) -> SelfCheck:
    """Compares a packed pass with unpacked passes of some of its rollouts; no gradients, the mode is kept.

    The packed log-probs are those that `edge_logprobs` gives with the output layer's weight and bias, the config's
    `final_logit_softcapping` and `head_temperature`; the unpacked ones are of the model's own logits.

    The rollouts are `rollouts` root-to-leaf paths from the shortest to the longest, and of each the log-probs of up
    to 256 evenly spaced tokens and of those that follow a branch point. Every rank of an FSDP or ZeRO-3 model must
    call this at the same place: all run `1 + 2 * rollouts` forward passes and decide together.

    Args:
        model: a causal language model after `enable_tree_attention`, or a wrapper of one (FSDP, DeepSpeed, PEFT).
        layout: of T tokens, at least one of them with a predecessor.
        input_ids: int64 [T] or [1, T].
        tolerance: largest RMS difference in nats. Default: twice the noise of this model and type, which is how
            far the same unpacked log-probs move when the token embeddings are changed by one rounding. Matrix
            products in TF32 round more than their type says: give a tolerance (1e-3, say) where they are on.
        on_mismatch: "raise", or "fall_back": warn and switch the model to `stock` for good; the caller then runs
            unpacked batches.
        stock: the transformers attention to compare with and to fall back to. Default: "sdpa", or "eager" for
            models with softcap or sinks, which sdpa does not compute.
        rollouts: unpacked passes, at least 1.
        max_length: compare the first tokens of longer paths only. Eager attention holds [H, L, L] scores: set
            this where L is large.
        head_temperature: the `temperature` with which `edge_logprobs` gives this model's own log-probs: what it
            divides its output layer's results by (Granite's `logits_scaling`, 1 / Cohere's `logit_scale`).

    Raises:
        SelfCheckError: the log-probs differ and `on_mismatch` is "raise"; the message says whether the attention
            differs or what the model does after its output layer.
        ValueError: no transformers model in `model`, a layout without edges, arguments out of range.
        UnsupportedModelError: the model refuses the layout.
    """
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if inner is None:
        raise ValueError(f"model: expected a PreTrainedModel or a wrapper of one, got {type(model).__name__}")
    if on_mismatch not in ("raise", "fall_back"):
        raise ValueError(f"on_mismatch: expected 'raise' or 'fall_back', got {on_mismatch!r}")
    if rollouts < 1 or (max_length is not None and max_length < 2):
        raise ValueError(
            f"rollouts, max_length: expected at least 1 and 2 (or None), got {rollouts} and {max_length}"
        )
    if not 0 < head_temperature < math.inf:
        raise ValueError(f"head_temperature: expected a finite number above 0, got {head_temperature}")
    ids = input_ids.reshape(-1)
    if ids.numel() != layout.num_tokens:
        raise ValueError(f"input_ids: expected the layout's {layout.num_tokens} tokens, got {ids.numel()}")
    stock = stock or _stock_attention(inner)
    paths = _sample(layout, rollouts, max_length)
    places = [_compared(path) for path in paths]
    tree = inner.config._attn_implementation
    with torch.no_grad(), evaluating(model):
        own, got, dtype = _packed_logprobs(model, inner, layout, ids, paths, places, head_temperature)
        inner.set_attn_implementation(stock)
        try:
            want = _unpacked_logprobs(model, ids, paths, places)
            with _rounded_embeddings(inner, torch.finfo(dtype).eps):
                noise = _rms(_unpacked_logprobs(model, ids, paths, places) - want, places)
        finally:
            inner.set_attn_implementation(tree)
    rms, worst = _rms(got - want, places), float((got - want).abs().max())
    limit = max(NOISE_FACTOR * noise, NEGLIGIBLE) if tolerance is None else tolerance
    if math.isfinite(rms) and rms <= limit:
        return SelfCheck(True, rms, worst, limit, len(got), tree)
    figures = (
        f"packed ({tree}) and unpacked ({stock}) log-probs differ by {rms:.2e} nats RMS in the worst "
        f"of {len(paths)} rollouts, {worst:.2e} at most, {len(got)} tokens; tolerance {limit:.2e} for {dtype}"
    )
    if _rms(own - want, places) <= limit:
        figures += (
            "; its own packed logits agree: it changes them after its output layer, so that edge_logprobs needs "
            f"another temperature (here head_temperature={head_temperature}), or cannot give them"
        )
    if on_mismatch == "raise":
        raise SelfCheckError(f"{type(inner).__name__}: {figures}")
    inner.set_attn_implementation(stock)
    warnings.warn(
        f"{type(inner).__name__}: {figures}; the model is back on {stock!r}: run unpacked batches",
        stacklevel=2,
    )
    return SelfCheck(False, rms, worst, limit, len(got), stock)


def _stock_attention(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    soft_capped = getattr(config, "attn_logit_softcapping", None) is not None
    return "sdpa" if model._supports_sdpa and not soft_capped else "eager"


def _sample(layout: TreeLayout, count: int, max_length: int | None) -> list[torch.Tensor]:
    """`count` root-to-leaf paths, packed positions from the root down, spread from the shortest to the longest."""
    depth, predecessor = layout.depth.tolist(), layout.predecessor.tolist()
    leaves = [end - 1 for _, end, subtree_end in layout.chains.tolist() if end == subtree_end]
    leaves = sorted((leaf for leaf in leaves if depth[leaf]), key=depth.__getitem__)
    if not leaves:
        raise ValueError("layout: no token has a predecessor, there is no log-prob to compare")
    # Fewer rollouts than asked for are repeated: every rank of a sharded model runs the same number of passes.
    spread = torch.linspace(0, len(leaves) - 1, count).round().long().tolist() if count > 1 else [-1]
    return [_path(predecessor, leaves[i])[:max_length] for i in spread]


def _path(predecessor: list[int], leaf: int) -> torch.Tensor:
    path = [leaf]
    while predecessor[path[-1]] >= 0:
        path.append(predecessor[path[-1]])
    return torch.tensor(path[::-1])


def _compared(path: torch.Tensor) -> torch.Tensor:
    """Places on the path [n], at least 1, whose log-probs are compared."""
    spread = torch.linspace(1, len(path) - 1, min(len(path) - 1, TOKENS_PER_ROLLOUT)).round().long()
    after_branch = torch.nonzero(path.diff() != 1).flatten() + 1
    return torch.cat([spread, after_branch[:TOKENS_PER_ROLLOUT]]).unique()


def _packed_logprobs(
    model: nn.Module,
    inner: PreTrainedModel,
    layout: TreeLayout,
    ids: torch.Tensor,
    paths: list[torch.Tensor],
    places: list[torch.Tensor],
    head_temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """fp32 [n] of the model's logits, the same of its output layer's, and the type of logits."""
    source = torch.cat([path[at - 1] for path, at in zip(paths, places, strict=True)])
    label = torch.cat([path[at] for path, at in zip(paths, places, strict=True)])
    keep, row = source.unique(return_inverse=True)
    with recorded(inner.get_output_embeddings()) as outputs:
        logits = _logits(model, ids, keep, position_ids=layout.depth[None], tree_layout=layout)
    own = _label_logprobs(logits, row, ids, label)
    if not outputs:
        warnings.warn(
            f"{type(inner).__name__} does not call its output layer as a module: of its own logits alone is known "
            "that they agree, not of edge_logprobs",
            stacklevel=3,
        )
        return own, own, logits.dtype
    head = of_output_layer(_kept(outputs[-1][0], keep), inner, head_temperature)
    return own, _label_logprobs(head, row, ids, label), logits.dtype


def _unpacked_logprobs(
    model: nn.Module, ids: torch.Tensor, paths: list[torch.Tensor], places: list[torch.Tensor]
) -> torch.Tensor:
    found = []
    for path, at in zip(paths, places, strict=True):
        logits = _logits(model, ids[path.to(ids.device)], at - 1)
        found.append(_label_logprobs(logits, torch.arange(len(at)), ids, path[at]))
    return torch.cat(found)


@contextmanager
def _rounded_embeddings(model: PreTrainedModel, eps: float) -> Iterator[None]:
    """Within it every other number of the token embeddings is larger by `eps`, relatively, the rest smaller."""

    def change(module: nn.Module, args: object, out: torch.Tensor) -> torch.Tensor:
        sign = torch.arange(out.numel(), device=out.device).view_as(out) % 2 * 2 - 1
        return (out.double() * (1 + eps * sign)).to(out.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _label_logprobs(
    logits: torch.Tensor, row: torch.Tensor, ids: torch.Tensor, label: torch.Tensor
) -> torch.Tensor:
    """fp32 [n] from logits [k, V], the row of each edge and the packed position of its token."""
    logprobs = logits.float().log_softmax(-1)
    return logprobs[row.to(logits.device), ids[label.to(ids.device)].to(logits.device)]


def _logits(model: nn.Module, ids: torch.Tensor, keep: torch.Tensor, **arguments: object) -> torch.Tensor:
    """[k, V] logits at positions `keep` of one row of tokens."""
    keep = keep.to(ids.device)
    logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=keep, **arguments).logits[0]
    return _kept(logits, keep)


def _kept(logits: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """[k, V] of [T, V], or of what the model has cut to these positions already."""
    return logits if logits.shape[0] == len(keep) else logits[keep.to(logits.device)]


def _rms(difference: torch.Tensor, places: list[torch.Tensor]) -> float:
    """Of the worst rollout: a leak into one branch must not drown in the others. The largest over all ranks."""
    parts = difference.split([len(at) for at in places])
    value = torch.stack([part.square().mean().sqrt() for part in parts]).nan_to_num(nan=math.inf).max()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return float(value)
