"""What the attention benchmark compares: this repository's backends and their peers, over one workload.

A method is a list of units, each one call of an attention function: on the packed tokens, on one rollout, on a
padded batch. A unit's rows are tokens of the packed forest, so results of all methods can be added up and compared.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from trace_kernels.backends.flash import path_gather
from trace_kernels.layout import TreeLayout
from trace_kernels.tree_attention import refusal, tree_attention

from .workloads import Workload

OWN = ("triton", "segments", "flash", "flex")


class Heads(NamedTuple):
    query: int
    key: int
    size: int


class Unit(NamedTuple):
    """`run(q [n, H, D], k [n, Hk, D], v [n, Hk, D]) -> out [n, H, D]`, where row i is packed token `rows[i]`.

    `padding` marks rows that stand for no token; `extra_bytes` is what the call needs beyond its inputs' copies.
    """

    rows: Tensor  # int64 [n]
    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    padding: Tensor | None = None  # bool [n]
    extra_bytes: int = 0


class Method(NamedTuple):
    units: Callable[[], list[Unit]]
    pairs: int  # that it computes
    own: bool = False


class Skipped(NamedTuple):
    reason: str


def methods(
    work: Workload, heads: Heads, dtype: torch.dtype, device: torch.device
) -> dict[str, Method | Skipped]:
    """All of them, by name; those that cannot run here with the reason."""
    found: dict[str, Method | Skipped] = {}
    for name in OWN:
        found[name] = _own(name, work, heads, dtype, device)
    flat, packed, cuda = work.flat_pairs, work.pairs, device.type == "cuda"
    found["sdpa one rollout at a time"] = Method(lambda: _single(work, device), flat)
    found["sdpa padded batches"] = Method(lambda: _padded(work, device, "auto"), _padded_pairs(work))
    no_gpu = Skipped("needs a GPU")
    found["cudnn padded batches"] = (
        Method(lambda: _padded(work, device, "cudnn"), _padded_pairs(work)) if cuda else no_gpu
    )
    varlen = _varlen() if cuda else no_gpu
    if isinstance(varlen, Skipped):
        found["varlen rollouts"] = varlen
    else:
        found["varlen rollouts"] = Method(lambda: _varlen_rollouts(work, device, varlen), flat)
    if cuda:
        found["gathered paths"] = (
            varlen
            if isinstance(varlen, Skipped)
            else Method(lambda: _gathered_varlen(work, device, varlen), packed)
        )
        found["flex_attention"] = Method(lambda: _flex(work, device), packed)
    else:
        found["gathered paths"] = Method(lambda: _gathered_chains(work, device, heads), packed)
        found["flex_attention"] = Skipped("on the CPU it has no backward, and compiles for a minute")
    if not work.one_level:
        found["PrefixGrouper"] = Skipped("shares one level only")
    elif importlib.util.find_spec("prefix_grouper") is None:
        found["PrefixGrouper"] = Skipped("prefix-grouper is not installed")
    else:
        found["PrefixGrouper"] = Method(lambda: _prefix_grouper(work, heads, dtype, device), packed)
    return found


def _own(
    name: str, work: Workload, heads: Heads, dtype: torch.dtype, device: torch.device
) -> Method | Skipped:
    if name == "segments" and device.type == "cuda":
        return Skipped("is the CPU's backend")
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        return Skipped("flash-attn is not installed")
    query = torch.empty(1, heads.query, heads.size, dtype=dtype, device=device)
    reason = refusal(name, query, differentiable=True)
    if reason is not None:
        return Skipped(reason)

    def units() -> list[Unit]:
        layout = TreeLayout.from_segments(work.parents, work.lengths, device=device)
        return [Unit(_all_rows(work, device), lambda q, k, v: tree_attention(q, k, v, layout, backend=name))]

    return Method(units, work.pairs, own=True)


def _all_rows(work: Workload, device: torch.device) -> Tensor:
    return torch.arange(work.tokens, device=device)


def _batched(x: Tensor, batch: int) -> Tensor:
    """[B L, heads, D] seen as [B, heads, L, D]."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, batch: int) -> Tensor:
    out = functional.scaled_dot_product_attention(
        *(_batched(x, batch) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)


def _single(work: Workload, device: torch.device) -> list[Unit]:
    return [
        Unit(torch.from_numpy(rollout).to(device), lambda q, k, v: _sdpa(q, k, v, 1))
        for rollout in work.rollouts
    ]


def _batches(work: Workload) -> list[list[np.ndarray]]:
    """Rollouts sorted by length, as many as fit into the packed forest's number of tokens with their padding."""
    found: list[list[np.ndarray]] = []
    for rollout in sorted(work.rollouts, key=len, reverse=True):
        if found and (len(found[-1]) + 1) * len(found[-1][0]) <= work.tokens:
            found[-1].append(rollout)
        else:
            found.append([rollout])
    return found


def _padded_pairs(work: Workload) -> int:
    return sum(len(batch) * len(batch[0]) * (len(batch[0]) + 1) // 2 for batch in _batches(work))


def _padded(work: Workload, device: torch.device, implementation: str) -> list[Unit]:
    def unit(batch: list[np.ndarray]) -> Unit:
        # Right padding needs no mask under causal attention.
        longest = len(batch[0])
        rows = np.stack([np.pad(rollout, (0, longest - len(rollout))) for rollout in batch])
        real = np.array([len(rollout) for rollout in batch])[:, None] > np.arange(longest)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if implementation == "cudnn":
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                    return _sdpa(q, k, v, len(batch))
            return _sdpa(q, k, v, len(batch))

        return Unit(
            torch.from_numpy(rows.reshape(-1)).to(device), run, torch.from_numpy(~real.reshape(-1)).to(device)
        )

    return [unit(batch) for batch in _batches(work)]


Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


def _varlen() -> Varlen | Skipped:
    """(q, k, v, query ends, key ends, longest query, longest key) -> out, causal from the lower right."""
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        return lambda *arguments: flash_attn_varlen_func(*arguments, causal=True)
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return Skipped("neither flash-attn nor torch.nn.attention.varlen is there")
    accepted = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}

    def run(q: Tensor, k: Tensor, v: Tensor, *lengths: Any) -> Tensor:
        if "enable_gqa" in accepted:
            return varlen_attn(q, k, v, *lengths, enable_gqa=True, **causal)
        group = q.shape[1] // k.shape[1]
        return varlen_attn(
            q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), *lengths, **causal
        )

    return run


def _varlen_rollouts(work: Workload, device: torch.device, varlen: Varlen) -> list[Unit]:
    lengths = [len(rollout) for rollout in work.rollouts]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    longest = max(lengths)
    rows = torch.from_numpy(np.concatenate(work.rollouts)).to(device)
    return [Unit(rows, lambda q, k, v: varlen(q, k, v, ends, ends, longest, longest))]


def _gathered_varlen(work: Workload, device: torch.device, varlen: Varlen) -> list[Unit]:
    gather, *lengths = path_gather(work.layout.to(device))
    return [Unit(_all_rows(work, device), lambda q, k, v: varlen(q, k[gather], v[gather], *lengths))]


def _gathered_chains(work: Workload, device: torch.device, heads: Heads) -> list[Unit]:
    """One sdpa call per segment, whose keys are copied for the whole path."""
    parts = []
    for path, length in zip(work.paths, work.lengths, strict=True):
        if length:
            mask = torch.ones(length, len(path), dtype=torch.bool, device=device).tril(len(path) - length)
            parts.append((torch.from_numpy(path).to(device), mask))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pieces = []
        for path, mask in parts:
            query, key, value = q[path[-len(mask) :]], k[path], v[path]
            arguments = (_batched(x, 1) for x in (query, key, value))
            pieces.append(
                functional.scaled_dot_product_attention(*arguments, attn_mask=mask, enable_gqa=True)
            )
        return torch.cat([piece[0].transpose(0, 1) for piece in pieces])

    copied = sum(len(path) for path, _ in parts)
    masks = sum(mask.numel() for _, mask in parts)
    return [Unit(_all_rows(work, device), run, extra_bytes=16 * copied * heads.key * heads.size + 5 * masks)]


def _flex(work: Workload, device: torch.device) -> list[Unit]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    end, size = work.layout.to(device).subtree_end, work.tokens
    mask = create_block_mask(
        lambda b, h, q, k: (k <= q) & (q < end[k]), None, None, size, size, device=str(device)
    )
    compiled = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = compiled(*(_batched(x, 1) for x in (q, k, v)), block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)

    return [Unit(_all_rows(work, device), run)]


def _prefix_grouper(work: Workload, heads: Heads, dtype: torch.dtype, device: torch.device) -> list[Unit]:
    from prefix_grouper import PrefixGrouper

    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        # Its masks tell padding only, which stands on the right, where no real query looks anyway.
        causal = causal_lower_right(q.shape[2], k.shape[2])
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=causal, enable_gqa=True)
        return out.transpose(1, 2)

    def unit(first: int, last: int) -> Unit:
        prefix, *suffixes = work.lengths[first:last]
        grouper = PrefixGrouper([[prefix, *suffixes]], device=device)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return grouper.forward(attend, *(_batched(x, 1) for x in (q, k, v)))[0]

        start = sum(work.lengths[:first])
        rows = torch.arange(start, start + prefix + sum(suffixes), device=device)
        keys = len(suffixes) * (prefix + max(suffixes))  # of all rollouts, padded
        copies = 4 * keys * heads.query * heads.size * dtype.itemsize
        return Unit(rows, run, extra_bytes=copies)

    roots = [i for i, parent in enumerate(work.parents) if parent < 0]
    return [unit(a, b) for a, b in zip(roots, [*roots[1:], len(work.parents)], strict=True)]
