"""DeepSpeed's own configuration of a run."""

from __future__ import annotations

from typing import Any

import torch

from ..config.schema import OptimizerConfig


def zero3_settings(
    dtype: str, optimizer: OptimizerConfig | None, device: torch.device, overrides: dict[str, Any]
) -> dict[str, Any]:
    """DeepSpeed's own config: the trainer's defaults under the user's `deepspeed` section."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # The trainer runs any number of backwards before a step.
        "managed_gradient_accumulation": False,
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "steps_per_print": 1 << 30,
    }
    if dtype == "bfloat16":
        settings["data_types"] = {
            "grad_accum_dtype": "fp32"
        }  # dozens of micro-batches would lose bits in bf16
    if optimizer is not None:
        settings["gradient_clipping"] = optimizer.gradient_clipping
        settings["optimizer"] = {
            "type": "AdamW",
            "params": {
                "lr": optimizer.learning_rate,
                "betas": list(optimizer.betas),
                "weight_decay": optimizer.weight_decay,
                # DeepSpeed's own CPU Adam would compile for a minute at the first start.
                "torch_adam": device.type == "cpu",
            },
        }
    return _merge(settings, overrides)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged
