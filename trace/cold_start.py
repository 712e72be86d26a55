"""Supervised training of a new policy on expert ReAct traces, with the trainer's own packing and ZeRO-3 engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from .config.environments import SearchConfig
from .config.schema import ColdStartConfig, Config, OptimizerConfig
from .environments.protocol import Environment
from .phases import Phases
from .policy.batch import Forest, PackedBatch
from .policy.zero3 import Zero3Policy
from .ranks import Ranks
from .rollout.transcript import Transcript
from .rollout.tree import Node, RolloutTree
from .sources.search import new_tokenizer
from .sources.source import Source
from .tasks.order import TaskOrder
from .tasks.task import Task

# The usual 0.02 is made for widths in the thousands; at 128 a policy would take ten times as long to learn to copy.
INITIALIZER_RANGE = 0.08


def cold_start(config: Config, source: Source, ranks: Ranks, device: torch.device, phases: Phases) -> None:
    """Train a small Qwen3-shaped policy from nothing and write it to `config.model.path`."""
    settings, world = config.cold_start, source.world
    assert settings is not None
    assert world is not None
    start = config.run_dir / "cold_start_init"
    assert isinstance(config.environment, SearchConfig)
    tokenizer = new_tokenizer(world, config.environment)
    ranks.from_main(
        lambda: new_policy(settings, tokenizer, config.sampling.context_tokens, start, config.seed)
    )
    transcript = Transcript(tokenizer, config.model.observations)
    make_environment = source.environments(transcript.count)
    rng = np.random.default_rng(config.seed)
    traces = []
    for task in source.train[: settings.traces]:
        actions = world.expert_actions(task, hasty=bool(rng.random() < settings.hasty))
        traces.append(expert_trace(task, actions, make_environment(), transcript))
    policy = Zero3Policy(
        config.model,
        start,
        ranks=ranks,
        device=device,
        temperature=1.0,
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        optimizer=OptimizerConfig(learning_rate=settings.learning_rate, betas=(0.9, 0.98)),
        deepspeed_overrides=config.deepspeed,
    )
    order = TaskOrder(len(traces), config.seed)
    with phases("cold start", settings.steps) as advance:
        for step in range(settings.steps):
            policy.set_learning_rate(settings.learning_rate * cosine_schedule(step, settings.steps))
            forest = Forest.of([traces[i] for i in order.take(settings.batch)])
            sampled = sum(sum(node.loss_mask) for tree in forest.trees for node in tree.nodes)
            policy.step(forest, None, negative_log_likelihood(sampled))
            advance()
    policy.save_pretrained(config.model.path)
    policy.close()


def new_policy(settings: ColdStartConfig, tokenizer: Any, context: int, path: Path, seed: int) -> None:
    """Write a randomly initialised Qwen3-shaped model and its tokenizer to `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=settings.hidden_size,
                intermediate_size=settings.hidden_size * 3,
                num_hidden_layers=settings.layers,
                num_attention_heads=settings.heads,
                num_key_value_heads=settings.kv_heads,
                head_dim=settings.hidden_size // settings.heads,
                initializer_range=INITIALIZER_RANGE,
                tie_word_embeddings=settings.tie_embeddings,
                max_position_embeddings=context,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def expert_trace(
    task: Task, actions: list[str], environment: Environment, transcript: Transcript
) -> RolloutTree:
    """The expert's actions played in the real environment, as a tree of one rollout."""
    messages = environment.reset(task)
    ids = transcript.prompt_ids(messages)
    tree = RolloutTree(task, [Node(-1, 0, "root", ids, [0] * len(ids), [0.0] * len(ids))])
    for depth, action in enumerate(actions, start=1):
        result = environment.step(action)
        sampled = transcript.action_ids(action)
        observed = [] if result.done else transcript.observation_ids(messages, result.observation)
        tree.nodes.append(
            Node(
                parent=depth - 1,
                depth=depth,
                kind="bare",
                token_ids=sampled + observed,
                loss_mask=[1] * len(sampled) + [0] * len(observed),
                logprobs=[0.0] * (len(sampled) + len(observed)),
                reward=result.reward,
                outcome=result.outcome,
            )
        )
    if tree.nodes[-1].outcome != "answer":
        raise ValueError(
            f"the expert fails on {task.id!r}: its last turn ended as {tree.nodes[-1].outcome!r}"
        )
    return tree


def negative_log_likelihood(sampled: int) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Mean negative log-prob of the expert's own tokens (`sampled` of them over all ranks)."""

    def loss(
        batch: PackedBatch, logprob: Tensor, reference: NDArray[np.float32] | None
    ) -> tuple[Tensor, dict[str, float]]:
        value = -logprob.sum() / sampled
        return value, {"loss": float(value.detach())}

    return loss


def cosine_schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up over a tenth of the steps, then cosine to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
