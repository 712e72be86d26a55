"""What the completions of an engine must be: by transformers, one sequence at a time, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from trace_rl.engines.protocol import Completion, Engine, Sampling

HANG_S = 120  # only how long a test that hangs takes to fail


def prompts(count: int, seed: int, *, low: int = 20, high: int = 90) -> list[list[int]]:
    """Random ordinary tokens; the world's special ones come first in its vocabulary."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 40, rng.integers(low, high)).tolist() for _ in range(count)]


def sample(engine: Engine, requests: Sequence[tuple[Sequence[int], Sampling]]) -> list[Completion]:
    """All requests at once."""

    async def all_of_them() -> list[Completion]:
        together = asyncio.gather(*(engine.generate(prefix, sampling) for prefix, sampling in requests))
        return await asyncio.wait_for(together, HANG_S)

    return asyncio.run(all_of_them())


class Oracle:
    """Teacher-forced log-probs of `path`'s policy."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, prefix: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
        """[len(sampled), V]: what each sampled token was drawn from."""
        ids = torch.tensor([[*prefix, *sampled]])
        return self.model(ids).logits[0, len(prefix) - 1 : -1].float()

    def difference(self, prefix: Sequence[int], completion: Completion, temperature: float = 1.0) -> float:
        """Largest difference in nats from the completion's own log-probs."""
        expected = (self.logits(prefix, completion.token_ids) / temperature).log_softmax(-1)
        chosen = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert len(completion.logprobs) == len(completion.token_ids)
        return float((chosen - torch.tensor(completion.logprobs)).abs().max())

    def greedy(self, prefix: Sequence[int], completion: Completion) -> bool:
        """Whether each token is the likeliest after those before it."""
        return self.logits(prefix, completion.token_ids).argmax(-1).tolist() == completion.token_ids
