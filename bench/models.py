"""The same weights twice: as the trainer's policy on packed trees, and as the stock model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from trace_rl.policy.module import DTYPES, TreePolicy, load_tree_policy

from .flat import FlatPolicy


def two_models(
    path: Path | None, dtype: str, device: torch.device, *, small: bool, qwen3: bool = False
) -> tuple[TreePolicy, FlatPolicy]:
    """Those in a directory, or (None) random ones: tiny, or of Qwen3's shape; `small` makes them smaller still."""
    from transformers import AutoModelForCausalLM

    stock: Any
    if path is not None:
        policy = load_tree_policy(
            path, dtype=dtype, temperature=1.0, gradient_checkpointing=False, liger=False
        )
        stock = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")
    else:
        config = _qwen3(small) if qwen3 else _llama(small)
        torch.manual_seed(0)
        model, stock = (
            AutoModelForCausalLM.from_config(
                # a model's config is its own: tree attention is switched on in it
                copy.deepcopy(config),
                dtype=DTYPES[dtype],
                attn_implementation="sdpa",
            )
            for _ in range(2)
        )
        stock.load_state_dict(model.state_dict())
        policy = TreePolicy(model, temperature=1.0)
    return policy.to(device).train(), FlatPolicy(stock.to(device).train())


def _llama(small: bool) -> Any:
    from transformers import LlamaConfig

    size = 64 if small else 256
    return LlamaConfig(
        vocab_size=1000 if small else 8000,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=2 if small else 6,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def _qwen3(small: bool) -> Any:
    """6 layers, hidden 512, 8:2 heads of 64."""
    from transformers import Qwen3Config

    size = 64 if small else 512
    return Qwen3Config(
        vocab_size=1000 if small else 4096,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=2 if small else 6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=size // 8,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )


def activation_bytes(config: Any, element: int) -> int:
    """Rough bytes that a token leaves for the backward: two norms, the projections, attention and the MLP."""
    heads = config.num_attention_heads + config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_layer = 8 * config.hidden_size + 6 * heads * head_size + 4 * config.intermediate_size
    return int(config.num_hidden_layers * per_layer * element)
