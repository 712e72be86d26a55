"""Memory of one rank under ZeRO-3 beside an engine: estimates by the formulas written here."""

from __future__ import annotations

from dataclasses import dataclass

from .config.schema import Config
from .shapes import Shape

GIB = 1 << 30

HEAD_TILE_BYTES = 4 << 25  # trace_kernels.edge_logprobs: 2^25 logits, at most fp32 and at most two such tiles
ENGINE_OVERHEAD = 2 * GIB  # vLLM's own activations and CUDA graphs
ASLEEP = 1.5 * GIB  # what vLLM keeps at sleep level 2: its CUDA context and graphs


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. `engine_*` is vLLM's, everything else the trainer's."""

    weights: float
    optimizer: float
    gradients: float
    reference: float
    bucket: float
    gathered: float
    scoring: float
    activations: float
    copies: float
    head: float
    step_copy: float
    engine_weights: float
    engine_awake: float
    engine_asleep: float
    kv_tokens: int
    optimizer_on_host: bool

    @property
    def held(self) -> float:
        """What the trainer holds all the time."""
        on_gpu = 0.0 if self.optimizer_on_host else self.optimizer + self.gradients
        return self.weights + on_gpu + self.reference + self.bucket

    @property
    def sampling(self) -> float:
        """While the engine is awake: prompts, anchors and whole trees are scored beside it."""
        return self.held + self.gathered + self.scoring + self.engine_awake

    @property
    def updating(self) -> float:
        """While the policy is updated: a backward pass, or the optimiser's step, whichever needs more."""
        passing = self.gathered + self.activations + self.copies + self.head
        working = max(passing, self.step_copy)
        return self.held + working + self.engine_asleep


def estimate_memory(
    config: Config, shape: Shape, world: int, gpu_gib: float, path_keys: float = 1.0
) -> Memory:
    """Memory of one rank under ZeRO-3, with P parameters of b bytes over W ranks.

    DeepSpeed keeps, per rank: weights bP/W, an fp32 master copy 4P/W (none when the weights are fp32
    already), two fp32 Adam moments 8P/W, gradients in `data_types.grad_accum_dtype` (fp32 by default, 4P/W)
    and one reduce bucket. During the step it holds the fp32 gradient of one sub-group, unless gradients are
    fp32 already. During a pass it holds gathered weights up to `stage3_max_live_parameters`.

    A scoring pass keeps nothing for a backward: its hidden states, at most what one layer would save, and two
    logit tiles. `attention: flash` copies the keys and values of every chain's path, `path_keys` of them per
    packed token: one layer's when nothing is saved, with their gradients in a backward.
    """
    half = config.model.dtype == "bfloat16"
    size, p = (2 if half else 4), shape.parameters
    zero = config.deepspeed.get("zero_optimization") or {}
    data_types = config.deepspeed.get("data_types") or {}
    grad_size = {"fp16": 2, "bf16": 2}.get(data_types.get("grad_accum_dtype", ""), 4)
    offload = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    live = min(p, int(zero.get("stage3_max_live_parameters", 1e9)))
    bucket = min(p, int(zero.get("reduce_bucket_size", 5e8)))
    sub_group = min(p / world, float(zero.get("sub_group_size", 1e9)))

    tokens = config.optimizer.micro_batch_tokens
    layer = shape.saved_bytes(half=half, liger=config.model.liger)
    key_value = 2 * shape.kv_heads * shape.head_dim * size
    per_token, saved_layers = shape.layers * layer, shape.layers
    if config.model.gradient_checkpointing:
        per_token, saved_layers = shape.layers * shape.hidden * size + layer, 1
    head_weights = shape.vocab * shape.hidden
    tile = min(HEAD_TILE_BYTES, 4 * shape.vocab * tokens)
    copied = path_keys * key_value * tokens if config.model.attention == "flash" else 0.0

    engine_weights = float(p * size)
    if half:
        awake = config.engine.gpu_memory_utilization * gpu_gib * GIB
        cache = awake - engine_weights - ENGINE_OVERHEAD
    else:
        cache = float(config.engine.kv_cache_gib * GIB)
        awake = engine_weights + cache
    if config.engine.kind == "transformers":
        awake, cache = engine_weights, 0.0  # its cache grows with the batch and is not reserved
    return Memory(
        weights=size * p / world,
        optimizer=(12 if half else 8) * p / world,
        gradients=grad_size * p / world,
        reference=size * p / world if config.loss.kl else 0.0,
        bucket=bucket * size,
        gathered=live * size,
        scoring=(shape.hidden * size + layer) * tokens + copied + 2 * tile,
        activations=per_token * tokens,
        copies=(saved_layers + 1) * copied,
        head=head_weights * size + 2 * tile,
        step_copy=4 * sub_group if grad_size < 4 else 0.0,
        engine_weights=engine_weights,
        engine_awake=awake,
        engine_asleep=ASLEEP if config.engine.sleep and half else awake,
        kv_tokens=max(0, int(cache / (shape.layers * key_value))),
        optimizer_on_host=offload,
    )
