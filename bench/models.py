"""The same weights twice: as the trainer's policy on packed trees, and as the stock model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trace_rl.policy.module import DTYPES, TreePolicy, load_tree_policy

from .flat import FlatPolicy


def two_models(
    path: Path | None, dtype: str, device: torch.device, *, small: bool
) -> tuple[TreePolicy, FlatPolicy]:
    """Those in a directory, or (None) tiny random ones; `small` makes these smaller still."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    stock: Any
    if path is not None:
        policy = load_tree_policy(
            path, dtype=dtype, temperature=1.0, gradient_checkpointing=False, liger=False
        )
        stock = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="sdpa")
    else:
        size = 64 if small else 256
        shape: dict[str, Any] = {
            "vocab_size": 1000 if small else 8000,
            "hidden_size": size,
            "intermediate_size": 3 * size,
            "num_hidden_layers": 2 if small else 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        }
        torch.manual_seed(0)
        model, stock = (
            AutoModelForCausalLM.from_config(
                LlamaConfig(**shape), dtype=DTYPES[dtype], attn_implementation="sdpa"
            )
            for _ in range(2)  # a model's config is its own: tree attention is switched on in it
        )
        stock.load_state_dict(model.state_dict())
        policy = TreePolicy(model, temperature=1.0)
    return policy.to(device).train(), FlatPolicy(stock.to(device).train())
