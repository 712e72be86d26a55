"""New weights to the engines, and the proof that they sample with them."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import numpy as np

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
    directory = policy.ranks.from_main(_shared_memory_directory)
    try:
        policy.write_weights(directory)
        error: Exception | None = None
        try:
            engine.load_weights(directory, version)
        except Exception as caught:
            error = caught
        policy.ranks.agree(error)
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
    error: Exception | None = None
    tree = RolloutTree(Task("probe", "", ("",), "probe"), [])
    try:
        completion = asyncio.run(_generate(engine, prompt_ids, sampling))
        n, m = len(prompt_ids), len(completion.token_ids)
        tree.nodes = [
            Node(-1, 0, "root", prompt_ids, [0] * n, [0.0] * n),
            Node(0, 1, "bare", list(completion.token_ids), [1] * m, list(completion.logprobs), reward=0.0),
        ]
    except Exception as caught:
        error = caught
    policy.ranks.agree(error)
    trees = policy.ranks.gather(tree)
    logprobs, _, _ = policy.score(Forest.of(trees))
    differences = np.concatenate(
        [
            np.abs(logprobs[i, 1] - np.asarray(t.nodes[1].logprobs, dtype=np.float32))
            for i, t in enumerate(trees)
        ]
    )
    mean, largest = float(differences.mean()), float(differences.max())
    allowed = tolerance if tolerance is not None else DEFAULT_TOLERANCE[dtype]
    measured, what = (largest, "largest") if dtype == "float32" else (mean, "mean")
    if not measured <= allowed:  # also catches NaN
        raise SyncError(
            f"after loading weights version {version} the sampler's log-probs differ from the trainer's: {what} "
            f"difference {measured:.3g} nats over {differences.size} tokens, allowed {allowed:.3g} in {dtype}. "
            "The engine still samples with other weights (stale head, stale prefix cache), or computes in another "
            "precision; training on would be off-policy. `sync.tolerance` sets the limit."
        )
    return mean, largest


async def _generate(engine: Engine, prompt_ids: list[int], sampling: Sampling):  # type: ignore[no-untyped-def]
    return await engine.generate(prompt_ids, sampling)


def _shared_memory_directory() -> Path:
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="trace-weights-", dir=shm if shm.is_dir() else None))
