"""Log-probs and entropies of loss edges straight from hidden states and the output weight, without logits.

An edge `(source, label)` asks for the log-prob of token `label` given the hidden state at packed position
`source`. At a branch point one source has several edges; its gradient is their sum.
"""

from __future__ import annotations

import numbers

import torch
from torch import nn

from . import edge_logprobs_op
from .backends import edge_peers
from .backends.edge_eager import TILE_ELEMENTS as TILE_ELEMENTS
from .edge_logprobs_op import Logits
from .edges import check_range

BACKENDS = ("auto", "eager", "triton", "liger", "cce")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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

    Never holds more than a tile of logits; the backward recomputes the tile. A log-prob is never above 0. With
    "eager" and "triton" each source is computed once, however many edges it has, a half-precision weight has no
    fp32 gradient, and the same call gives the same bits. There the order of the edges changes no bit of the
    results; of gradients it changes the order in which those of edges with one source are added up.

    Hidden and weight of one half type are multiplied in it, on tensor cores where there are such; types that differ
    are widened to fp32, which is slower: cast one (`hidden.to(weight.dtype)`), or use autocast. Under autocast both
    are multiplied in its type, as `torch.nn.functional.linear` does (fp64 stays); the results are fp32 still.

    Args:
        hidden: [T, d], fp64, fp32, bf16 or fp16.
        weight: [V, d], the output embedding, one of these types; it may differ from hidden's.
        edge_src: [E] int64, rows of `hidden`, repeats allowed.
        labels: [E] int64 in [0, V).
        temperature: a number in [1e-6, 1e6], inside the softmax.
        bias: [V], one of these types, or None. -inf takes a token out of the vocabulary ("eager" and "triton":
            under a softcap too): its log-prob is -inf; it, its bias and its row of the weight have no gradient.
        softcap: c in [1e-6, 1e6] puts c tanh(z / c) in the place of z, before the temperature (Gemma 2's
            `final_logit_softcapping`).
        entropy: False leaves the second result zero, without gradient, and saves its work.
        chunk: sources per tile; by default chosen with the tile's share of the vocabulary.
        backend: "eager" (PyTorch, every device), "triton" (an accelerator; its forward waits once for the number of
            unique sources), "auto" (triton where it can), or a peer, which gives log-probs only and computes every
            edge: "liger" (fp32 only: it rounds logits of half types) and "cce" (cut cross-entropy, Wijmans et al.,
            2024: accelerators, half types, temperature 1; sums in an order that varies. Gradients and bias need a
            version with sums in fp32: 25.1.1 has none).

    Returns:
        (logprob [E], entropy [E]), at least fp32, differentiable once in hidden, weight and bias; E = 0 works.

    Raises:
        TypeError: an argument is not a tensor, or no number where one is expected.
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
    if hidden.ndim != 2:
        raise ValueError(f"hidden: expected [T, d], got {list(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"weight: expected [V, {hidden.shape[1]}] as hidden, got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(f"{name}: expected fp64, fp32, bf16 or fp16, got {tensor.dtype}")
    if edge_src.ndim != 1 or edge_src.dtype != torch.int64:
        raise ValueError(f"edge_src: expected int64 [E], got {edge_src.dtype} {list(edge_src.shape)}")
    for name, tensor in (("weight", weight), ("edge_src", edge_src), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise ValueError(f"{name}: expected hidden's device {hidden.device}, got {tensor.device}")
    _check_number("temperature", temperature)
    if softcap is not None:
        _check_number("softcap", softcap)
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, numbers.Integral)):
        raise TypeError(f"chunk: expected a whole number or None, got {type(chunk).__name__}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")


def _check_number(name: str, value: float) -> None:
    # A tensor would be detached: neither has a gradient.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    # Further out fp32 loses quotients of the two, or squares of logits. Constants of a module are traced as data.
    if not 1e-6 <= value <= 1e6:
        raise ValueError(f"{name}: expected a number from 1e-06 to 1e+06, got {value}")


class EdgeLogprobHead(nn.Linear):
    """A language model's output layer that answers with edge log-probs, or the likeliest tokens, of given edges.

    The ops run inside the module's own forward, so hooks that gather a partitioned weight (ZeRO-3) see them.
    """

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        edge_src: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        temperature: float = 1.0,
        entropy: bool = True,
        softcap: float | None = None,
        chunk: int | None = None,
        backend: str = "auto",
        top_k: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """One of three questions about `hidden [..., d]` (`[T, d]` or `[1, T, d]` where edges are given).

        `edge_src` and `labels`: `edge_logprobs`, (logprob [E], entropy [E]). `edge_src` and `top_k`:
        `edge_top_logprobs`, (values [E, top_k], token ids [E, top_k]), without gradient. Neither: the logits
        [..., V], like any linear layer. ValueError for another mixture.
        """
        if edge_src is None and labels is None and top_k is None:
            return super().forward(hidden)
        if hidden.ndim == 3 and hidden.shape[0] == 1:
            hidden = hidden[0]
        if edge_src is not None and labels is not None and top_k is None:
            return edge_logprobs(
                hidden, self.weight, edge_src, labels,
                temperature=temperature, bias=self.bias, softcap=softcap, entropy=entropy,
                chunk=chunk, backend=backend,
            )  # fmt: skip
        if edge_src is not None and labels is None and top_k is not None:
            # It is built on this module, so it is imported here.
            from .edge_top_logprobs import edge_top_logprobs

            return edge_top_logprobs(
                hidden, self.weight, edge_src, top_k,
                temperature=temperature, bias=self.bias, softcap=softcap, chunk=chunk,
            )  # fmt: skip
        raise ValueError("edge_src, labels, top_k: give edge_src with one of the others, or none for logits")

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
