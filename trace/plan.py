"""What a run will sample and how much memory it needs, before anything heavy is imported: `--dry-run`.

All expected figures and all memory figures are estimates; only a run measures them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from .config.environments import EnvironmentConfig, FunctionsConfig
from .config.schema import Config, SamplingConfig
from .memory import GIB, Memory, estimate_memory
from .missing_paths import missing_paths
from .shapes import Shape, read_shape

# How long a rollout is expected to be, the only guesses behind the expected figures: a prompt takes a
# sixteenth of the context, at most 256 tokens; turns, observations and the search budget are half used.
PROMPT_TOKENS, PROMPT_SHARE = 256, 1 / 16
FILL = 0.5
# Function calling is another matter: its prompts document the functions, and results are far below their limit.
FUNCTION_PROMPT_TOKENS, FUNCTION_RESULT_TOKENS = 4096, 400

GPU_WORLD = 8  # ranks of a GPU run when nothing tells: one machine

RESERVE = 4 * GIB  # the trainer's CUDA context, NCCL buffers, fragmentation


@dataclass(frozen=True)
class Plan:
    """One step of a run in numbers. Token counts are over all ranks, micro-batches and memory per rank."""

    config: Config
    world: int
    gpu_gib: float
    shape: Shape | None
    shape_source: str
    active: int  # prompts that get rollouts, at most
    bare: int
    continuations: int
    prompt_tokens: int  # expected
    observation_tokens: int  # expected
    rollout_tokens: int  # expected, prompt included
    flat_max: int
    flat: int
    packed: int
    path_keys: int  # keys that all chains' paths hold together, as `attention: flash` copies them
    micro_batches_max: int
    micro_batches: int
    memory: Memory | None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # about the config itself
    missing: tuple[str, ...] = ()  # paths of the config that are not there, on this machine

    @property
    def leaves(self) -> int:
        return self.bare + self.continuations

    @property
    def on_gpu(self) -> bool:
        return self.config.model.dtype == "bfloat16"


def plan(config: Config, world: int | None = None, gpu_gib: float = 80.0) -> Plan:
    """Work out one step of `config` on `world` ranks with `gpu_gib` GiB each.

    `world` defaults to WORLD_SIZE, else to 8 for a bfloat16 run and 1 otherwise. One rank from a launcher that
    sees no GPU says nothing about a bfloat16 run: that is 8 too. No weights are read, only
    `<model.path>/config.json` if it is there. Paths that are not there are only named: the run may be meant for
    another machine.
    """
    assumed = ""
    if world is None:
        world, assumed = _world(config)
    if world < 1:
        raise ValueError(f"world={world}: at least one rank is needed")
    a, tokens = config.allocation, config.optimizer.micro_batch_tokens
    branches = a.strategy in ("trace", "random_prefix")
    bare = a.bare_rollouts if branches else a.leaves
    continuations = a.leaves - bare
    groups = a.bare_rollouts // 2 if a.strategy == "trace" else max(bare // a.group_size, 1)
    active = min(a.pool_size, groups)

    prompt, observation, rollout = expected_rollout(config.environment, config.sampling)
    flat = (bare + continuations) * rollout
    # A prompt is held once per tree; a continuation leaves its rollout half way on average.
    packed = active * prompt + bare * (rollout - prompt) + continuations * (rollout - prompt) // 2
    # With n continuations a rollout is n + 1 chains, and each chain's path reaches back to the prompt.
    path_keys = active * prompt + a.leaves * prompt + continuations * rollout
    path_keys += (continuations + 2 * bare) * (rollout - prompt) // 2
    flat_max = a.leaves * config.sampling.context_tokens

    shape, source = read_shape(config)
    memory = estimate_memory(config, shape, world, gpu_gib, path_keys / packed) if shape else None
    known = Plan(
        config=config,
        world=world,
        gpu_gib=gpu_gib,
        shape=shape,
        shape_source=source,
        active=active,
        bare=bare,
        continuations=continuations,
        prompt_tokens=prompt,
        observation_tokens=observation,
        rollout_tokens=rollout,
        flat_max=flat_max,
        flat=flat,
        packed=packed,
        path_keys=path_keys,
        micro_batches_max=ceil(flat_max / (world * tokens)),
        micro_batches=ceil(packed / (world * tokens)),
        memory=memory,
    )
    notes = ([assumed] if assumed else []) + list(_notes(known))
    missing = tuple(missing_paths(config))
    return replace(known, notes=tuple(notes), warnings=tuple(_warnings(known)), missing=missing)


def gpu_visible() -> bool:
    """Whether this machine shows a GPU, asked without torch."""
    if Path("/dev/kfd").exists():
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def _world(config: Config) -> tuple[int, str]:
    """Ranks, and what to tell the user when they are a guess."""
    launched = os.environ.get("WORLD_SIZE")
    if config.model.dtype != "bfloat16":
        return int(launched or 1), ""
    if launched and int(launched) != 1:
        return int(launched), ""
    visible = gpu_visible()
    if launched and visible:
        return 1, ""
    why = "WORLD_SIZE is not set" if visible else "no GPU is visible here"
    return GPU_WORLD, f"{why}: {GPU_WORLD} ranks are assumed; `trace-rl plan --world N` plans for N"


def expected_rollout(environment: EnvironmentConfig, sampling: SamplingConfig) -> tuple[int, int, int]:
    """Expected tokens of a prompt, of an observation and of a whole rollout (prompt included)."""
    calls = environment.tool_turns * FILL
    prompt = min(PROMPT_TOKENS, ceil(sampling.context_tokens * PROMPT_SHARE))
    observation = int(FILL * environment.max_observation_tokens)
    if isinstance(environment, FunctionsConfig):
        prompt = min(FUNCTION_PROMPT_TOKENS, sampling.context_tokens // 2)
        observation = min(observation, FUNCTION_RESULT_TOKENS)
    turns = (calls + 1) * FILL * sampling.turn_tokens
    return prompt, observation, min(sampling.context_tokens, int(prompt + turns + calls * observation))


def _notes(plan: Plan) -> Iterable[str]:
    e, s = plan.config.environment, plan.config.sampling
    prompt = plan.prompt_tokens
    longest = prompt + (e.tool_turns + 1) * s.turn_tokens + e.tool_turns * e.max_observation_tokens
    # Function calling has its limits for each message of the user, however many those are.
    if longest > s.context_tokens and not isinstance(e, FunctionsConfig):
        yield (
            f"a rollout that fills every turn has about {longest:,} tokens and ends at "
            f"sampling.context_tokens={s.context_tokens}"
        )
    if plan.config.model.attention == "flash":
        yield (
            f"attention flash copies the keys and values of every chain's path: {plan.path_keys / plan.packed:.1f} "
            "per packed token if continuations leave evenly along their rollouts, more in a tree of many short ones"
        )


def _warnings(plan: Plan) -> Iterable[str]:
    config, memory = plan.config, plan.memory
    a, context = config.allocation, config.sampling.context_tokens
    groups = plan.bare // a.group_size
    if a.strategy != "trace" and groups > a.pool_size:
        yield (
            f"{plan.bare:,} rollouts are {groups} groups of {a.group_size}, but the pool has {a.pool_size} "
            f"prompts: groups grow to {ceil(plan.bare / a.pool_size)}; set allocation.pool={groups}"
        )
    if memory is None or not plan.on_gpu:
        return
    if config.engine.kind == "vllm" and memory.kv_tokens < context:
        yield (
            f"the engine's share holds the weights and {memory.kv_tokens:,} tokens of KV cache, less than "
            f"one rollout of {context:,}; raise engine.gpu_memory_utilization"
        )
    usable = plan.gpu_gib * GIB - RESERVE
    for when, need, what in (
        (
            "sampling",
            memory.sampling,
            "a lower engine.gpu_memory_utilization, more ranks, a smaller optimizer.micro_batch_tokens",
        ),
        (
            "the update",
            memory.updating,
            "more ranks, engine.sleep, model.gradient_checkpointing, a smaller optimizer.micro_batch_tokens",
        ),
    ):
        if need > usable:
            yield (
                f"{when} needs about {need / GIB:.1f} GiB per GPU and {usable / GIB:g} GiB are usable; "
                f"what helps: {what}"
            )


def render(plan: Plan) -> str:
    """The plan as text for a terminal."""
    c = plan.config
    a, s = c.allocation, c.sampling
    ranks = f"{plan.world} rank{'s' if plan.world > 1 else ''}"
    tree = f"{plan.bare:,} bare rollouts + {plan.continuations:,} continuations = {plan.leaves:,} leaves"
    lines = [
        f"run        {c.run_dir}, {c.steps} steps, {ranks}, {c.model.dtype}",
        f"model      {c.model.path}: {_describe(plan)}",
        f"sampling   {a.strategy}: pool of {a.pool_size:,} prompts, at most {plan.active:,} of them active",
        f"           {tree}",
        f"tokens     {plan.flat:,} expected per step if every rollout were a sequence of its own",
        f"           {plan.packed:,} expected packed as trees ({plan.flat / plan.packed:.1f} times fewer)",
        f"           {plan.flat_max:,} at most (leaves x sampling.context_tokens = {s.context_tokens:,})",
        f"           expected means: a rollout of {plan.rollout_tokens:,} with a prompt of {plan.prompt_tokens}, "
        "half of the turns and of",
        f"           their limit used, observations of {plan.observation_tokens}, continuations leaving half way",
        f"passes     {plan.micro_batches} expected, {plan.micro_batches_max} at most micro-batches of up to "
        f"{c.optimizer.micro_batch_tokens:,} tokens per rank and update",
    ]
    if plan.memory:
        lines += ["", *_memory_lines(plan, plan.memory)]
    lines += [f"note       {note}" for note in plan.notes]
    lines += [f"warning    {warning}" for warning in (*plan.warnings, *plan.missing)]
    return "\n".join(lines)


def _describe(plan: Plan) -> str:
    if plan.shape is None:
        return f"size unknown ({plan.shape_source}), so memory is not estimated"
    count = plan.shape.parameters
    size = f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"
    return f"{size} parameters ({plan.shape_source})"


def _memory_lines(plan: Plan, m: Memory) -> list[str]:
    c = plan.config
    if plan.on_gpu:
        title = (
            f"per GPU of {plan.gpu_gib:g} GiB, {RESERVE // GIB} GiB of them left to CUDA and fragmentation"
        )
    else:
        title = "per rank, in host memory (a float32 run is taken for a CPU run)"
    recomputed = "recomputed in the backward" if c.model.gradient_checkpointing else "all kept"
    where = "on the host" if m.optimizer_on_host else "partitioned over the ranks"
    rows = [
        ("weights", m.weights, "partitioned over the ranks"),
        ("optimiser", m.optimizer, f"{'fp32 master and ' if plan.on_gpu else ''}Adam moments, {where}"),
        ("gradients", m.gradients, where),
        ("reference", m.reference, "frozen weights for the KL term, partitioned"),
        ("reduce bucket", m.bucket, "for gradients, always there"),
        ("gathered", m.gathered, "whole layers, during passes"),
        ("scoring", m.scoring, "hidden states, one layer's activations, two logit tiles, beside the engine"),
        ("activations", m.activations, f"of {c.optimizer.micro_batch_tokens:,} tokens, {recomputed}"),
        ("K/V copies", m.copies, "and their gradients, of attention flash"),
        ("log-prob head", m.head, "gradient of the output weight, two logit tiles"),
        ("step", m.step_copy, "fp32 gradients of one sub-group, instead of what a pass needs"),
        (f"{c.engine.kind} awake", m.engine_awake, _engine_note(m)),
        (
            f"{c.engine.kind} asleep",
            m.engine_asleep,
            "during the update" if c.engine.sleep else "never sleeps",
        ),
    ]
    rows += [
        ("while sampling", m.sampling, "in all, with the scoring passes between"),
        ("while updating", m.updating, "in all"),
    ]
    if c.engine.kind == "vllm":
        rows.append(("weight sync", m.engine_weights, "of shared memory on every machine, besides"))
    return [f"memory     estimates, {title}"] + [
        f"           {label:<18}{amount / GIB:8.2f} GiB  {note}" for label, amount, note in rows if amount
    ]


def _engine_note(m: Memory) -> str:
    if not m.kv_tokens:
        return "whole weights"
    return f"whole weights and a KV cache of {m.kv_tokens:,} tokens"
