"""What a run learns, and how: the success predictor, the policy's loss and optimiser, the cold start."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .section import DecayRate, Probability, Section


class PredictorConfig(Section):
    hidden: PositiveInt = 256
    """Width of the head's hidden layer."""
    learning_rate: PositiveFloat = 1e-3
    """AdamW learning rate of the head."""
    epochs: PositiveInt = 4
    """Passes over the nodes (replay included) per step."""
    batch: PositiveInt = 512
    """Nodes per head update."""
    replay_steps: NonNegativeInt = 4
    """Earlier steps whose nodes are replayed."""


class LossConfig(Section):
    advantage: Literal["treepo", "grpo", "tree_grpo", "turn"] = "treepo"
    """Advantage estimator over the tree (design note, section 5)."""
    leaf_weighting: Literal["per_leaf", "per_subtree"] = "per_leaf"
    """Every leaf counts once, or every bare rollout does (its branches share one unit of weight)."""
    root_baseline: Literal["all", "bare"] = "all"
    """Leaves that form the root group's mean and spread."""
    clip_low: Probability = 0.2
    """PPO clip below 1."""
    clip_high: PositiveFloat = 0.28
    """PPO clip above 1."""
    importance_cap: PositiveFloat = 2.0
    """Cap of the token-level importance weight between trainer and sampler."""
    kl: NonNegativeFloat = 0.0
    """Weight of the k3 KL term to the frozen initial policy; 0 loads no reference model."""


class OptimizerConfig(Section):
    learning_rate: PositiveFloat = 1e-6
    """Peak AdamW learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Optimiser steps of linear warm-up."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW weight decay."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW moment decay rates."""
    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    minibatches: PositiveInt = 1
    """Optimiser steps per sampled batch; with 1 the update is strictly on-policy and the clip never acts."""
    micro_batch_tokens: PositiveInt = 16384
    """Most packed tokens in one forward and backward pass of a rank; a whole rollout must fit."""


class ColdStartConfig(Section):
    """Supervised training on expert ReAct traces, run first when `model.path` does not exist."""

    steps: PositiveInt = 300
    """Optimiser steps."""
    batch: PositiveInt = 32
    """Traces per step, over all ranks."""
    traces: PositiveInt | None = None
    """Expert traces to learn from, the first of the training questions; by default one for each question."""
    hasty: Probability = 0.0
    """Share of the traces whose expert answers one fact too early: a habit for reinforcement learning to break."""
    learning_rate: PositiveFloat = 1e-3
    """Peak AdamW learning rate, with linear warm-up and cosine decay."""
    hidden_size: PositiveInt = 128
    """Width of the new policy."""
    layers: PositiveInt = 3
    """Decoder layers of the new policy."""
    heads: PositiveInt = 4
    """Attention heads; each is `hidden_size / heads` wide."""
    kv_heads: PositiveInt = 2
    """Key and value heads."""
    tie_embeddings: bool = True
    """Share the input embedding with the output head."""

    @model_validator(mode="after")
    def _divides(self) -> ColdStartConfig:
        if self.hidden_size % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of heads={self.heads}, and heads a "
                f"multiple of kv_heads={self.kv_heads}"
            )
        if self.hidden_size // self.heads % 2:
            raise ValueError(
                f"hidden_size / heads = {self.hidden_size // self.heads} must be even: "
                "rotary embedding turns pairs"
            )
        return self
