"""Log-probs and entropies of loss edges straight from hidden states and the output weight, without logits.

An edge `(source, label)` asks for the log-prob of token `label` given the hidden state at packed position
`source`. At a branch point one source has several edges; its gradient is their sum.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from . import edge_logprobs_op
from .backends import edge_peers
from .backends.edge_eager import TILE_ELEMENTS as TILE_ELEMENTS
from .edge_logprobs_op import Logits
from .edges import check_range

BACKENDS = ("auto", "eager", "triton", "liger", "cce")


def edge_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    edge_src: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    entropy: bool = True,
    chunk: int | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`log softmax(z / temperature)` at `labels`, and its entropy, for `z = hidden[edge_src] @ weight.T + bias`.

    Never holds more than a tile of logits, nor the fp32 gradient of a half-precision weight; the backward
    recomputes the tile. Each source is computed once, however many edges it has. A log-prob is never above 0; the
    result is bitwise repeatable with "eager" and "triton".

    Hidden and weight of one half type are multiplied in it, on tensor cores where there are such; types that differ
    are widened to fp32, which is slower: cast one (`hidden.to(weight.dtype)`), or use autocast. Under autocast both
    are multiplied in its type, as `torch.nn.functional.linear` does (fp64 stays); the results are fp32 still.

    Args:
        hidden: [T, d], floating point.
        weight: [V, d], the output embedding; its dtype may differ from hidden's.
        edge_src: [E] int64, rows of `hidden`, repeats allowed.
        labels: [E] int64 in [0, V).
        temperature: > 0 and finite, inside the softmax.
        bias: [V] or None.
        softcap: finite c > 0 puts c tanh(z / c) in the place of z, before the temperature (Gemma 2's
            `final_logit_softcapping`).
        entropy: False leaves the second result zero, without gradient, and saves its work.
        chunk: sources per tile; by default chosen with the tile's share of the vocabulary.
        backend: "eager" (PyTorch, every device), "triton" (an accelerator; its forward waits once for the number of
            unique sources), "auto" (triton where it can), or a peer: "liger" (fp32 only: it rounds logits of half
            types) and "cce" (accelerators, half types; Wijmans et al., 2024). The peers give log-probs only.

    Returns:
        (logprob [E], entropy [E]), at least fp32, differentiable once in hidden, weight and bias; E = 0 works.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes, devices, indices or numbers that do not fit, or a backend that cannot compute
            what is asked for; the message names the argument. Indices are checked on every device.
        ImportError: a peer that is not installed.
    """
    check_inputs(hidden, weight, edge_src, bias, temperature, softcap, chunk)
    if not isinstance(labels, torch.Tensor):
        raise TypeError(f"labels: expected a tensor, got {type(labels).__name__}")
    if labels.ndim != 1 or labels.dtype != torch.int64:
        raise ValueError(f"labels: expected int64 [E], got {labels.dtype} {list(labels.shape)}")
    if edge_src.shape != labels.shape:
        raise ValueError(f"labels: expected {edge_src.shape[0]} entries like edge_src, got {labels.shape[0]}")
    if labels.device != hidden.device:
        raise ValueError(f"labels: expected hidden's device {hidden.device}, got {labels.device}")
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    logits = Logits(float(temperature), None if softcap is None else float(softcap))
    cast = autocast_dtype(hidden, weight)
    if backend in edge_peers.PEERS:
        check_range("edge_src", edge_src, hidden.shape[0])
        check_range("labels", labels, weight.shape[0])
        if cast is not None:
            hidden, weight = hidden.to(cast), weight.to(cast)
        return edge_peers.run(backend, hidden, weight, bias, edge_src, labels, logits, entropy)
    program = _program(backend, hidden, weight, bias)
    return edge_logprobs_op.run(hidden, weight, bias, edge_src, labels, logits, entropy, chunk, program, cast)


def autocast_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype | None:
    """What autocast would multiply them in; None without autocast, and for fp64, which it leaves alone."""
    device = hidden.device.type
    if torch.float64 in (hidden.dtype, weight.dtype) or not torch.amp.is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _program(backend: str, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str:
    dtypes = {x.dtype for x in (hidden, weight, bias) if x is not None}
    fits = dtypes <= {torch.float32, torch.bfloat16, torch.float16}
    if backend == "auto":
        return "triton" if hidden.device.type == "cuda" and fits else "eager"
    if backend == "triton" and not fits:
        raise ValueError(f"backend: 'triton' takes fp32, bf16 and fp16, got {', '.join(map(str, dtypes))}")
    if backend == "triton" and hidden.device.type != "cuda":
        from .interpreter import is_on

        if not is_on():
            raise ValueError(
                f"backend: 'triton' needs an accelerator, hidden is on {hidden.device}; use 'auto'"
            )
    return backend


def check_inputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    edge_src: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    softcap: float | None,
    chunk: int | None,
) -> None:
    """The errors of everything but labels and backends."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("edge_src", edge_src), ("bias", bias)):
        if not isinstance(tensor, torch.Tensor) and not (name == "bias" and tensor is None):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    if hidden.ndim != 2 or not hidden.is_floating_point():
        raise ValueError(f"hidden: expected floating point [T, d], got {hidden.dtype} {list(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight: expected [V, {hidden.shape[1]}] as hidden, got {list(weight.shape)}")
    if not weight.is_floating_point():
        raise ValueError(f"weight: expected floating point, got {weight.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
    if edge_src.ndim != 1 or edge_src.dtype != torch.int64:
        raise ValueError(f"edge_src: expected int64 [E], got {edge_src.dtype} {list(edge_src.shape)}")
    for name, tensor in (("weight", weight), ("edge_src", edge_src), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: expected hidden's device {hidden.device}, got {tensor.device}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature: expected a finite number above 0, got {temperature}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number above 0 or None, got {softcap}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")


class EdgeLogprobHead(nn.Linear):
    """A language model's output layer that answers with edge log-probs when it is given labels.

    The op runs inside the module's own forward, so hooks that gather a partitioned weight (ZeRO-3) see it.
    """

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        edge_src: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = True,
        softcap: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Without `edge_src` and `labels`: the logits of `hidden [..., d]`, like any linear layer. With both:
        `edge_logprobs` of `hidden [T, d]` or `[1, T, d]`."""
        if (edge_src is None) != (labels is None):
            raise ValueError("edge_src and labels: give both, or neither for logits")
        if edge_src is None or labels is None:
            return super().forward(hidden)
        if hidden.ndim == 3 and hidden.shape[0] == 1:
            hidden = hidden[0]
        return edge_logprobs(
            hidden, self.weight, edge_src, labels,
            temperature=temperature, bias=self.bias, softcap=softcap, entropy=entropy,
        )  # fmt: skip

    @classmethod
    def adopt(cls, linear: nn.Linear) -> EdgeLogprobHead:
        """Turns an existing `nn.Linear` into this class in place and returns it.

        The module object and its parameters stay the same ones, so tied weights, optimisers and hooks keep
        working. TypeError for any other class (a quantised or adapter-wrapped layer computes something else).
        """
        if isinstance(linear, cls):
            return linear
        if type(linear) is not nn.Linear:
            raise TypeError(f"linear: expected exactly torch.nn.Linear, got {type(linear).__name__}")
        linear.__class__ = cls
        return linear  # type: ignore[return-value]
