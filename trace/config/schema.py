"""The typed configuration of a run. Every field's docstring says what it does and in which unit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .environments import EnvironmentConfig, with_environment_kind
from .learning import ColdStartConfig, LossConfig, OptimizerConfig, PredictorConfig
from .scenario import check_scenario
from .section import Probability, Section
from .tasks import TaskConfig, WorldTask


class ModelConfig(Section):
    path: Path
    """Hugging Face directory with config, tokenizer and safetensors weights. With a `cold_start` section it may be
    left out, and is then `run_dir/cold_start`; the cold start makes it when it is absent."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in trainer and sampler."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    liger: bool = False
    """Use Liger's fused RMSNorm, RoPE and SwiGLU kernels (GPU only)."""
    attention: Literal["auto", "triton", "segments", "flash"] = "auto"
    """Backend of the tree attention: `triton` is the kernel (GPU), `segments` is exact on any device, `flash` is
    FlashAttention over gathered paths (GPU, bfloat16, needs flash-attn); `auto` takes triton where it can."""
    chat_template: Path | None = None
    """Jinja file that replaces the chat template, for instance an append-only one (configs/templates)."""
    observations: Literal["raw", "chat"] = "raw"
    """How observations join the history: as `raw` text inside one assistant turn (Search-R1), or as a `chat`
    message through the model's template, which must then be append-only."""


class SamplingConfig(Section):
    temperature: PositiveFloat = 1.0
    """Sampling temperature of training rollouts; log-probs are taken under it on both sides."""
    turn_tokens: PositiveInt = 500
    """Most tokens of one thought and action; a longer turn is truncated and ends its rollout."""
    context_tokens: PositiveInt = 4096
    """Most tokens of a whole rollout, prompt included."""
    top_p: float = 1.0
    """Must stay 1: nucleus sampling biases every importance ratio by the mass it drops."""
    top_k: int = 0
    """Must stay 0, for the same reason."""
    min_p: float = 0.0
    """Must stay 0, for the same reason."""

    @model_validator(mode="after")
    def _untruncated(self) -> SamplingConfig:
        for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name}={getattr(self, name)} truncates the sampling distribution and biases every "
                    f"importance ratio; leave it at {neutral} and use `temperature`"
                )
        if self.turn_tokens >= self.context_tokens:
            raise ValueError(
                f"turn_tokens={self.turn_tokens} leaves no room for a prompt in "
                f"context_tokens={self.context_tokens}"
            )
        return self


class EngineConfig(Section):
    kind: Literal["vllm", "transformers"] = "vllm"
    """`vllm` (prefix caching, a process of its own per rank) or `transformers` (in-process; for tests and
    machines without vLLM)."""
    kv_cache_gib: PositiveInt = 1
    """CPU only: KV cache of each engine, GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """GPU only: share of the GPU's memory the engine may use while awake."""
    sleep: bool = False
    """GPU only: free the engine's memory during the policy update (vLLM sleep mode, level 2)."""
    enforce_eager: bool = False
    """Run the engine without CUDA graphs and compilation."""
    max_sequences: PositiveInt = 256
    """Most sequences in one engine batch."""
    threads: PositiveInt | None = None
    """CPU threads of the engine process; by default the machine's cores divided by its ranks."""

    @model_validator(mode="after")
    def _can_sleep(self) -> EngineConfig:
        if self.sleep and self.kind == "transformers":
            raise ValueError(
                "sleep=true has no effect on kind=transformers, whose model stays in memory; set sleep to "
                "false or use kind=vllm"
            )
        return self


class AllocationConfig(Section):
    strategy: Literal["uniform", "pcl", "random_prefix", "trace"] = "trace"
    """Who gets the sampling budget: `uniform` (GRPO), `pcl` (predicted success nearest 1/2), `random_prefix`
    (TreePO, Tree-GRPO), `trace`. All sample M(1+N) leaves per step."""
    bare_rollouts: int = 1024
    """M: bare rollouts per step, over all ranks."""
    continuations: NonNegativeInt = 2
    """N: continuations per bare rollout; leaves per step are M(1+N)."""
    pool: PositiveInt | None = None
    """B: candidate prompts per step; by default M/4, at least 2."""
    max_per_prompt: Annotated[int, Field(ge=2)] = 16
    """m_max: most bare rollouts of one prompt (`trace` only)."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per prompt for the strategies with a fixed group."""
    contrast: Literal["plug_in", "beta_binomial"] = "plug_in"
    """Contrast utility: the paper's, or one that allows for correlated rollouts of a prompt (`trace` only)."""
    exploration: Probability = 0.0
    """Share of M spread over random prompts of the pool, so that none starves (`trace` only)."""

    @property
    def pool_size(self) -> int:
        return self.pool or max(2, self.bare_rollouts // 4)

    @property
    def leaves(self) -> int:
        return self.bare_rollouts * (1 + self.continuations)

    @model_validator(mode="after")
    def _feasible(self) -> AllocationConfig:
        m, cap = self.bare_rollouts, self.pool_size * self.max_per_prompt
        if m < 2:
            raise ValueError(f"bare_rollouts={m}: a group needs at least 2 rollouts to hold any contrast")
        if self.strategy == "trace" and m > cap:
            raise ValueError(f"bare_rollouts={m} exceeds pool x max_per_prompt = {cap}; raise either of them")
        if self.strategy == "trace" and self.max_per_prompt == 2 and m % 2:
            raise ValueError(
                f"bare_rollouts={m} cannot be made of groups of max_per_prompt=2; use an even number"
            )
        return self


class EvaluationConfig(Section):
    questions: NonNegativeInt = 200
    """Held-out questions answered greedily before and after training; 0 turns evaluation off."""


class SyncConfig(Section):
    tolerance: PositiveFloat | None = None
    """Largest difference between trainer and sampler log-probs, in nats, beyond which the run stops: of any
    token in float32 (default 1e-3), of the mean over tokens in bfloat16 (default 0.05)."""


class Config(Section):
    """A whole run."""

    run_dir: Path
    """Directory of everything the run writes."""
    seed: int = 0
    """Seed of data order, sampling, ties and the predictor."""
    steps: PositiveInt
    """TRACE steps: sample, score, branch, update."""
    model: ModelConfig
    """The policy."""
    task: TaskConfig
    """Where questions come from; `kind` selects the section's keys."""
    environment: EnvironmentConfig
    """Rules and reward of a rollout; its keys follow from `task.kind`."""
    sampling: SamplingConfig = SamplingConfig()
    """How and how far rollouts are sampled."""
    engine: EngineConfig = EngineConfig()
    """What samples them."""
    allocation: AllocationConfig = AllocationConfig()
    """How many rollouts, of which prompts and from which prefixes."""
    predictor: PredictorConfig = PredictorConfig()
    """The success predictor that allocation reads."""
    loss: LossConfig = LossConfig()
    """Advantages and policy loss."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and the size of a pass."""
    cold_start: ColdStartConfig | None = None
    """Makes the first policy when `model.path` does not exist; null: it must exist."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out accuracy."""
    sync: SyncConfig = SyncConfig()
    """Check that the sampler runs the trainer's weights."""
    checkpoint_every: NonNegativeInt = 50
    """Steps between checkpoints; 0 writes none but the final policy."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints to keep."""
    deepspeed: dict[str, Any] = Field(default={})
    """Passed through to DeepSpeed's own config, over the trainer's ZeRO-3 defaults."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("cold_start") and "run_dir" in raw:
            model = raw.get("model") or {}
            if isinstance(model, dict) and "path" not in model:
                raw = raw | {"model": model | {"path": str(Path(str(raw["run_dir"])) / "cold_start")}}
        return with_environment_kind(raw)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.cold_start and not isinstance(self.task, WorldTask):
            raise ValueError(
                f"cold_start needs task.kind=world, got {self.task.kind}: "
                "only the synthetic world makes expert traces"
            )
        check_scenario(self.task, self.environment, self.model.observations)
        if self.model.dtype == "float32" and self.model.attention == "flash":
            raise ValueError(
                "model.attention=flash computes in half types; use auto or segments with float32"
            )
        if self.optimizer.micro_batch_tokens < self.sampling.context_tokens:
            raise ValueError(
                f"optimizer.micro_batch_tokens={self.optimizer.micro_batch_tokens} is less than "
                f"sampling.context_tokens={self.sampling.context_tokens}: a whole rollout must fit"
            )
        return self
