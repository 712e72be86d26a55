"""New weights to the engines, and the proof that they sample with them."""

from __future__ import annotations

import asyncio
import gc
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from ..engines.protocol import Engine, Sampling
from ..rollout.tree import Node, RolloutTree
from ..tasks.task import Task
from .batch import Forest
from .zero3 import Zero3Policy

PROBE_TOKENS = 16
DEFAULT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}


class SyncError(RuntimeError):
    """The engine does not sample with the trainer's weights."""


def sync_weights(policy: Zero3Policy, engine: Engine, version: int) -> None:
    """Bring the policy's weights to every engine; the engine forgets its cached prefixes."""
    size = policy.weight_bytes
    directory = policy.ranks.from_main(lambda: _exchange_directory(size))
    try:
        policy.write_weights(directory)
        if policy.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # the engine wakes up in what the update has left
        policy.ranks.attempt(lambda: engine.load_weights(directory, version))
    finally:
        if policy.ranks.is_node_main:
            shutil.rmtree(directory, ignore_errors=True)


def probe(
    policy: Zero3Policy,
    engine: Engine,
    prompt_ids: list[int],
    *,
    temperature: float,
    dtype: str,
    tolerance: float | None,
    max_tokens: int,
    version: int,
) -> tuple[float, float]:
    """Sample a few tokens and compare their log-probs with the trainer's: mean and max difference in nats.

    Every rank probes its own engine. Raises SyncError beyond the tolerance, on all ranks.
    """
    sampling = Sampling(temperature, min(PROBE_TOKENS, max_tokens), seed=version)

    def sample() -> RolloutTree:
        completion = asyncio.run(_generate(engine, prompt_ids, sampling))
        n, m = len(prompt_ids), len(completion.token_ids)
        root = Node(-1, 0, "root", prompt_ids, [0] * n, [0.0] * n)
        turn = Node(0, 1, "bare", list(completion.token_ids), [1] * m, list(completion.logprobs), reward=0.0)
        return RolloutTree(Task("probe", "", ("",), "probe"), [root, turn])

    trees = policy.ranks.gather(policy.ranks.attempt(sample))
    logprobs, _, _ = policy.score(Forest.of(trees))
    differences = np.concatenate(
        [
            np.abs(logprobs[i, 1] - np.asarray(t.nodes[1].logprobs, dtype=np.float32))
            for i, t in enumerate(trees)
        ]
    )
    mean, largest = float(differences.mean()), float(differences.max())
    check_agreement(mean, largest, dtype, tolerance, f"after loading weights version {version}")
    return mean, largest


def check_agreement(mean: float, largest: float, dtype: str, tolerance: float | None, where: str) -> None:
    """Raise SyncError when trainer and sampler log-probs differ (nats) by more than the dtype allows."""
    allowed = tolerance if tolerance is not None else DEFAULT_TOLERANCE[dtype]
    measured, what = (largest, "largest") if dtype == "float32" else (mean, "mean")
    if not measured <= allowed:  # also catches NaN
        raise SyncError(
            f"{where} the sampler's log-probs differ from the trainer's: {what} difference {measured:.3g} nats, "
            f"allowed {allowed:.3g} in {dtype}. The engine still samples with other weights (stale head, stale "
            "prefix cache), the trainer's attention is wrong on this model, or one of them computes in another "
            "precision; training on would be off-policy. `sync.tolerance` sets the limit."
        )


async def _generate(engine: Engine, prompt_ids: list[int], sampling: Sampling):  # type: ignore[no-untyped-def]
    return await engine.generate(prompt_ids, sampling)


def _exchange_directory(size: int) -> Path:
    """A fresh directory with room for `size` bytes: in shared memory, else where temporary files go."""
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if place.is_dir() and shutil.disk_usage(place).free > 1.1 * size:
            return Path(tempfile.mkdtemp(prefix="trace-weights-", dir=place))
    raise SyncError(
        f"neither /dev/shm nor {tempfile.gettempdir()} has room for the {size / 2**30:.1f} GiB of weights that go "
        "to the engine; enlarge shared memory (docker: --shm-size) or set TMPDIR"
    )
