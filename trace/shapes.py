"""Sizes of decoder-only models, from a config.json or a table of published shapes. No weights, no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config.schema import Config

COLD_START_VOCAB = 160  # about what the synthetic world's word-level tokenizer has


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder: RMSNorm, grouped-query attention, SwiGLU."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters, embeddings included (tied ones once)."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * query + 2 * key + 3 * self.intermediate + 2)
        layer += 2 * self.head_dim * self.qk_norm + (query + 2 * key) * self.qkv_bias
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    def saved_bytes(self, *, half: bool, liger: bool) -> int:
        """Bytes that one layer keeps per token for its backward.

        Counted on transformers' Qwen3 layer with saved-tensor hooks, for hidden size h, MLP width i, query
        width q and key width k: in half types 16 h + 8 i + 10 q + 10 k (an RMSNorm keeps its input in fp32),
        in fp32 24 h + 16 i + 16 q + 16 k. Tree attention adds its fp32 output, 4 q, to the former. Liger's
        norms keep their input alone and its SwiGLU no activation: read in its code, not measured.
        """
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if not half:
            return 24 * self.hidden + 16 * (self.intermediate + query + key)
        if liger:
            return 8 * self.hidden + 6 * self.intermediate + 10 * query + 6 * key
        return 16 * self.hidden + 8 * self.intermediate + 14 * query + 10 * key


PUBLISHED = {
    "smollm2-135m": Shape(576, 30, 9, 3, 64, 1536, 49152, tied=True),
    "qwen3-8b": Shape(4096, 36, 32, 8, 128, 12288, 151936, qk_norm=True),
    "qwen3-14b": Shape(5120, 40, 40, 8, 128, 17408, 151936, qk_norm=True),
    "qwen3-32b": Shape(5120, 64, 64, 8, 128, 25600, 151936, qk_norm=True),
}


def read_shape(config: Config) -> tuple[Shape | None, str]:
    """The policy's shape and where it is known from; None with the reason when it is not known."""
    path = config.model.path
    file = path / "config.json"
    if file.is_file():
        return _from_json(file)
    if config.cold_start:
        c = config.cold_start
        shape = Shape(
            c.hidden_size, c.layers, c.heads, c.kv_heads, c.hidden_size // c.heads, 3 * c.hidden_size,
            COLD_START_VOCAB, tied=c.tie_embeddings, qk_norm=True,
        )  # fmt: skip
        return shape, "to be made by the cold start"
    if published := PUBLISHED.get(path.name.lower()):
        return published, f"published shape of {path.name}; {path} is not there yet"
    return None, f"{file} is not there"


def _from_json(file: Path) -> tuple[Shape | None, str]:
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        shape = Shape(
            hidden=hidden,
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            intermediate=raw["intermediate_size"],
            vocab=raw["vocab_size"],
            tied=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=raw.get("model_type") == "qwen3",
            qkv_bias=bool(raw.get("attention_bias", raw.get("model_type") == "qwen2")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"{file} does not describe a decoder of a known kind: {type(error).__name__} {error}"
    if any(key in raw for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None, f"{file} describes a mixture of experts"
    return shape, "config.json"
