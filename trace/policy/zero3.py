"""The policy under DeepSpeed ZeRO-3: scoring passes, optimiser steps, whole weights on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

from ..config.schema import LossConfig, ModelConfig, OptimizerConfig
from ..ranks import Ranks
from .batch import Features, Forest, LossTerms, NodeKey, PackedBatch, dummy_batch, pack, schedule
from .logits import head_error
from .loss import tree_policy_loss
from .module import ModelError, TreePolicy, load_tree_policy
from .settings import zero3_settings

BUCKET_BYTES = 1 << 30  # weights gathered at a time for a sync

LossFunction = Callable[[PackedBatch, Tensor, NDArray[Any] | None], tuple[Tensor, dict[str, float]]]


class Zero3Policy:
    """A policy whose parameters, gradients and optimiser states are partitioned over the ranks.

    With `trainable=False` it is a frozen reference: scoring only.
    """

    def __init__(
        self,
        model: ModelConfig,
        path: Path,
        *,
        ranks: Ranks,
        device: torch.device,
        temperature: float,
        micro_batch_tokens: int,
        optimizer: OptimizerConfig | None,
        deepspeed_overrides: dict[str, Any],
        trainable: bool = True,
    ) -> None:
        self.ranks, self.device, self.path = ranks, device, path
        self.micro_batch_tokens = micro_batch_tokens
        self._optimizer = optimizer
        settings = zero3_settings(model.dtype, optimizer if trainable else None, device, deepspeed_overrides)
        partitioned = HfDeepSpeedConfig(settings)  # while it lives, weights arrive partitioned
        module = load_tree_policy(
            path,
            dtype=model.dtype,
            temperature=temperature,
            gradient_checkpointing=model.gradient_checkpointing,
            liger=model.liger,
            attention=model.attention,
        )
        del partitioned  # other models of this process, such as an engine's, load and generate as ever
        self.hidden_size: int = module.model.config.hidden_size
        if not trainable:
            module.requires_grad_(False)
        parameters = [p for p in module.parameters() if p.requires_grad] or None
        self.engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=settings)
        self._check_head(module)
        self.steps = 0

    def score(
        self, forest: Forest, on_batch: Callable[[], None] = lambda: None
    ) -> tuple[Features, Features, dict[str, float]]:
        """Log-probs [sampled tokens] and final hidden state [d] of every node, and mean figures, without gradient.

        All ranks take part and all get everything.
        """
        logprobs: Features = {}
        hidden: Features = {}
        entropies: dict[NodeKey, float] = {}  # sums; by node, since a cut tree forwards shared tokens again
        with torch.no_grad():
            for batch in self._batches(forest, None):
                logprob, entropy, ends = self._forward(batch)
                on_batch()
                if batch.is_dummy:
                    continue
                bounds = np.cumsum(batch.edge_counts)[:-1]
                per_node = np.split(logprob.cpu().numpy(), bounds)
                entropy_of = np.split(entropy.cpu().numpy(), bounds)
                states = ends.float().cpu().numpy()
                for i, row in enumerate(batch.rows):
                    key = forest.keys[row]
                    logprobs[key], hidden[key] = per_node[i], states[i]
                    entropies[key] = float(entropy_of[i].sum())
        for share in self.ranks.gather((logprobs, hidden, entropies)):
            logprobs |= share[0]
            hidden |= share[1]
            entropies |= share[2]
        tokens = max(1, sum(len(values) for values in logprobs.values()))
        return logprobs, hidden, {"entropy": sum(entropies.values()) / tokens}

    def update(
        self,
        forest: Forest,
        terms: LossTerms,
        loss: LossConfig,
        reference_logprobs: Features | None = None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One optimiser step over the whole forest; returns its figures (`loss`, `grad_norm`, ...)."""
        weight = terms.advantages.terms(leaf_weight=terms.leaf_weight)[2]
        sampled = np.array([sum(forest.trees[t].nodes[n].loss_mask) for t, n in forest.keys])
        denominator = max(1.0, float((weight * sampled).sum()))

        def policy_loss(
            batch: PackedBatch, logprob: Tensor, reference: NDArray[Any] | None
        ) -> tuple[Tensor, dict[str, float]]:
            out = tree_policy_loss(
                logprob,
                batch.old_logprob,
                batch.sampler_logprob,
                batch.positive,
                batch.negative,
                batch.weight,
                denominator=denominator,
                clip_low=loss.clip_low,
                clip_high=loss.clip_high,
                importance_cap=loss.importance_cap,
                kl=loss.kl,
                reference_logprob=None if reference is None else torch.from_numpy(reference).to(self.device),
            )
            return out.loss, out.sums | {"loss": float(out.loss.detach())}

        return self.step(forest, terms, policy_loss, reference_logprobs, on_batch)

    def step(
        self,
        forest: Forest,
        terms: LossTerms | None,
        loss: LossFunction,
        reference_logprobs: Features | None = None,
        on_batch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Backward over every micro-batch of the forest, then one optimiser step. Sums come back over all ranks."""
        self._warm_up()
        totals: dict[str, float] = {}
        for batch in self._batches(forest, terms):
            logprob, _, _ = self._forward(batch, entropy=False)
            if batch.is_dummy:
                value = (logprob * 0.0).sum()
                sums: dict[str, float] = {}
            else:
                reference = None
                if reference_logprobs is not None:
                    reference = np.concatenate([reference_logprobs[forest.keys[row]] for row in batch.rows])
                value, sums = loss(batch, logprob, reference)
            # DeepSpeed averages gradients over ranks; the loss is a share of one global sum.
            self.engine.backward(value * self.ranks.world, scale_wrt_gas=False)
            on_batch()
            for name, amount in sums.items():
                totals[name] = totals.get(name, 0.0) + amount
        self.engine.step()
        self.steps += 1
        merged: dict[str, float] = {}
        for share in self.ranks.gather(totals):
            for name, amount in share.items():
                merged[name] = merged.get(name, 0.0) + amount
        norm = self.engine.get_global_grad_norm()
        return merged | {
            "grad_norm": float(norm) if norm is not None else 0.0,
            "learning_rate": self.learning_rate,
        }

    @property
    def learning_rate(self) -> float:
        return float(self.engine.optimizer.param_groups[0]["lr"])

    def set_learning_rate(self, value: float) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = value

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by their Hugging Face name, on the first rank of each machine (empty elsewhere).

        Every rank walks the same buckets; tied parameters come once.
        """
        named = list(self.engine.module.model.named_parameters())
        bucket: list[tuple[str, Any]] = []
        size = 0
        for index, (name, parameter) in enumerate(named):
            bucket.append((name, parameter))
            size += getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
            if size < BUCKET_BYTES and index + 1 < len(named):
                continue
            with deepspeed.zero.GatheredParameters([p for _, p in bucket]):
                if self.ranks.is_node_main:
                    for key, value in bucket:
                        yield key, value.detach().to("cpu", copy=True)
            bucket, size = [], 0

    def write_weights(self, directory: Path) -> None:
        """The weights as safetensors in `directory`, one file a bucket, for the engines of this machine."""
        if self.ranks.is_node_main:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        shard: dict[str, Tensor] = {}
        count = 0
        for name, value in self.weights():
            shard[name] = value
            if sum(v.nbytes for v in shard.values()) >= BUCKET_BYTES:
                save_file(shard, directory / f"model-{count:05d}.safetensors", metadata={"format": "pt"})
                shard, count = {}, count + 1
        if shard:
            save_file(shard, directory / f"model-{count:05d}.safetensors", metadata={"format": "pt"})
        self.ranks.barrier()

    def save_pretrained(self, directory: Path) -> None:
        """A Hugging Face directory that transformers and vLLM load: weights, config, tokenizer."""
        state = dict(self.weights())
        if self.ranks.is_main:
            model = self.engine.module.model
            config = type(model.config).from_dict(model.config.to_dict())
            part = directory.with_name(directory.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            config.save_pretrained(part)
            model.generation_config.save_pretrained(part)
            AutoTokenizer.from_pretrained(self.path, local_files_only=True).save_pretrained(part)
            save_file(state, part / "model.safetensors", metadata={"format": "pt"})
            shutil.rmtree(directory, ignore_errors=True)
            part.rename(directory)  # never a half-written policy under the final name
        self.ranks.barrier()

    @property
    def weight_bytes(self) -> int:
        """Size of the whole weights."""
        parameters = self.engine.module.model.parameters()
        return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in parameters)

    def forwarded_tokens(self, forest: Forest) -> int:
        """Tokens one pass over the forest forwards on all ranks: paths shared by several parts count in each."""
        ranks = schedule(forest, self.micro_batch_tokens, self.ranks.world)
        return sum(part.tokens for parts in ranks for part in parts if part is not None)

    def _check_head(self, module: TreePolicy) -> None:
        """Refuse a model whose logits are more than its output layer of its hidden states."""
        found = self.ranks.gather(head_error(module, self.device))  # all ranks decide alike
        error, rounding = next((one for one in found if not one[0] <= one[1]), found[0])
        if not error <= rounding:
            self.close()
            raise ModelError(
                f"{self.path}: {type(module.model).__name__} makes its logits otherwise than the log-prob head, "
                f"which knows lm_head(hidden), a softcap and the scales of Granite and Cohere: log-probs differ "
                f"by {error:.2g} nats, of which rounding explains {rounding:.2g}"
            )

    def close(self) -> None:
        """Free the engine's memory; the process group stays."""
        self.engine.destroy()

    def _warm_up(self) -> None:
        if self._optimizer is not None and self._optimizer.warmup_steps:
            share = min(1.0, (self.steps + 1) / self._optimizer.warmup_steps)
            self.set_learning_rate(self._optimizer.learning_rate * share)

    def _batches(self, forest: Forest, terms: LossTerms | None) -> Iterator[PackedBatch]:
        parts = schedule(forest, self.micro_batch_tokens, self.ranks.world)[self.ranks.rank]
        for part in parts:
            batch = dummy_batch() if part is None else pack(forest, part, terms)
            yield batch.to(self.device)

    def _forward(self, batch: PackedBatch, entropy: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        inputs = batch.input_ids, batch.layout, batch.edge_src, batch.labels, batch.node_ends
        return self.engine(*inputs, entropy=entropy)
