"""Calls of the ops' host code on CPU tensors without values, inside `launch.recorded`."""

from __future__ import annotations

import torch

from ..attention_op import run
from ..backends import anchors, ranges_triton
from ..edge_logprobs_op import Logits
from ..edge_logprobs_op import run as run_edges
from ..layout import TreeLayout
from ..reference.score_anchors import SuccessHead
from ..scoring import Scoring
from ..tree_reductions import segments

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEADS, KEY_HEADS = 8, 2
# One long trunk, so that its dK/dV ranges are cut and the parts are summed.
LAYOUT = ([-1, 0, 0], [4096, 100, 100])


def tree_attention(dtype: str, size: int, variant: str) -> None:
    """Forward and backward with head size `size`; variant: words among window, softcap, sinks, grad_lse."""
    words = variant.split()
    layout = TreeLayout.from_segments(*LAYOUT)
    q, k, v = (
        torch.empty(layout.num_tokens, heads, size, dtype=DTYPES[dtype], requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    sinks = torch.empty(HEADS, requires_grad=True) if "sinks" in words else None
    scoring = Scoring(
        scale=size**-0.5,
        window=1000 if "window" in words else None,
        softcap=50.0 if "softcap" in words else None,
    )
    out, lse = run(q, k, v, layout, scoring, sinks, program="triton")
    results = (out, lse) if "grad_lse" in words else (out,)
    torch.autograd.backward(results, tuple(torch.empty_like(x) for x in results))


def edge_logprobs(dtype: str, size: int, variant: str) -> None:
    """Forward and backward with hidden size `size`; dtype: one, or two as words, of the hidden states and of the
    weight; variant: words among entropy, softcap, bias."""
    words, of_hidden, of_weight = variant.split(), DTYPES[dtype.split()[0]], DTYPES[dtype.split()[-1]]
    hidden = torch.empty(64, size, dtype=of_hidden, requires_grad=True)
    weight = torch.empty(1024, size, dtype=of_weight, requires_grad=True)
    bias = torch.empty(1024, dtype=of_weight, requires_grad=True) if "bias" in words else None
    index = torch.arange(64)
    logits = Logits(1.0, 30.0 if "softcap" in words else None)
    both = run_edges(hidden, weight, bias, index, index, logits, "entropy" in words, None, "triton")
    results = both if "entropy" in words else both[:1]
    torch.autograd.backward(results, tuple(torch.ones_like(x) for x in results))


def score_anchors(dtype: str, size: int, variant: str) -> None:
    """With hidden size `size`; variant: the stage, root or prefix."""
    shapes = {"norm": (size,), "w1": (64, size), "b1": (64,), "w2": (1, 64), "b2": (1,)}
    head = SuccessHead(**{name: torch.empty(shape) for name, shape in shapes.items()})
    index = torch.arange(64)
    rewards = index if variant == "prefix" else None
    anchors.scores(torch.empty(64, size, dtype=DTYPES[dtype]), index, head, variant, rewards, 8, 0.1)


def tree_reductions(dtype: str, size: int, variant: str) -> None:
    """Of `size` values in fp64; variant: sums, moments, extrema or ancestors."""
    values = torch.zeros(size, dtype=torch.float64)
    if variant == "ancestors":
        ranges_triton.ancestor_sums(values, values, torch.arange(size) - 1)
    else:
        getattr(ranges_triton, variant)(values, segments(torch.tensor([size])))
