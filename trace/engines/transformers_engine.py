"""In-process engine over `transformers` `generate`: for tests and machines without vLLM."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .protocol import Completion, EngineError, Sampling

_Stopped = Callable[[list[int], tuple[str, ...]], bool]
_Pending = tuple[list[int], Sampling, asyncio.Future[Completion]]


class TransformersEngine:
    """Engine protocol over a model of its own on `device`. Requests that wait together and sample alike
    run as one left-padded batch with a KV cache; it keeps no prefix cache between calls."""

    def __init__(
        self, model_path: Path, *, dtype: torch.dtype, device: str = "cpu", max_batch: int = 256
    ) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, local_files_only=True)
        self._model = model.to(device).eval()
        self._pad = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else 0
        # Nothing of the model's own generation_config.json but its EOS. `generate` fills what is None from
        # defaults that include top_k=50, so whatever would truncate is set to its neutral value.
        eos = self._model.generation_config.eos_token_id
        self._model.generation_config = GenerationConfig(
            eos_token_id=self._tokenizer.eos_token_id if eos is None else eos,
            pad_token_id=self._pad,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
        )
        self._max_batch = max_batch
        self._pending: list[_Pending] = []
        self._flusher: asyncio.Task[None] | None = None

    async def generate(self, prefix_ids: Sequence[int], sampling: Sampling) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending.append((list(prefix_ids), sampling, future))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        return await future

    def load_weights(self, source: Path, version: int) -> None:
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(source.glob("*.safetensors")):
            weights |= load_file(file)
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        tied = set(self._model._tied_weights_keys or ()) if self._model.config.tie_word_embeddings else set()
        if unexpected or set(missing) - tied:
            raise EngineError(f"weights in {source} do not fit: missing {missing}, unexpected {unexpected}")

    def sleep(self) -> None:
        """Nothing to free: the model lives beside the trainer's."""

    def counters(self) -> None:
        """Keeps no counters of its own."""

    def close(self) -> None:
        self._pending.clear()

    async def _flush(self) -> None:
        while self._pending:
            await asyncio.sleep(0)  # let every rollout that is ready join the batch
            alike = (self._pending[0][1].temperature, self._pending[0][1].stop)
            batch = [p for p in self._pending if (p[1].temperature, p[1].stop) == alike][: self._max_batch]
            taken = {id(p) for p in batch}
            self._pending = [p for p in self._pending if id(p) not in taken]
            try:
                completions = await asyncio.to_thread(self._run, batch)
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(EngineError(f"transformers generate failed: {error}"))
                continue
            for (_, _, future), completion in zip(batch, completions, strict=True):
                if not future.done():
                    future.set_result(completion)

    @torch.no_grad()
    def _run(self, batch: list[_Pending]) -> list[Completion]:
        temperature, stop = batch[0][1].temperature, batch[0][1].stop
        longest = max(len(ids) for ids, _, _ in batch)
        input_ids = torch.tensor([[self._pad] * (longest - len(ids)) + ids for ids, _, _ in batch])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _, _ in batch])
        device = self._model.device
        with torch.random.fork_rng():
            torch.manual_seed(_joint_seed([s.seed for _, s, _ in batch]))
            out = self._model.generate(
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=max(s.max_tokens for _, s, _ in batch),
                do_sample=temperature > 0,
                temperature=temperature if temperature > 0 else None,
                stopping_criteria=StoppingCriteriaList([_Ends(self._stopped, longest, stop)] if stop else []),
                output_logits=True,
                return_dict_in_generate=True,
            )
        logits = torch.stack(out.logits, dim=1).float()  # [n, steps, V]
        if temperature > 0:
            logits = logits / temperature
        sampled = out.sequences[:, longest:]  # [n, steps]
        logprobs = logits.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        rows = zip(sampled.tolist(), logprobs.tolist(), batch, strict=True)
        return [self._completion(ids, row, sampling) for ids, row, (_, sampling, _) in rows]

    def _completion(self, ids: list[int], logprobs: list[float], sampling: Sampling) -> Completion:
        """Cut the padded row where this request's own end is."""
        eos = self._model.generation_config.eos_token_id
        ends = set(eos if isinstance(eos, list) else [eos])
        for n, token in enumerate(ids[: sampling.max_tokens], start=1):
            if token in ends or self._stopped(ids[:n], sampling.stop):
                return Completion(ids[:n], logprobs[:n], truncated=False, cached_tokens=0)
        return Completion(ids[: sampling.max_tokens], logprobs[: sampling.max_tokens], True, 0)

    def _stopped(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether a stop string ends in the last of `ids`, those before it having been asked already."""
        tail = self._tokenizer.decode(ids[-24:]) if stop else ""
        return any(string in tail for string in stop)


class _Ends(StoppingCriteria):
    """Stops each row by the engine's own rule: transformers' `stop_strings` knows only some tokenizers."""

    def __init__(self, stopped: _Stopped, prompt: int, stop: tuple[str, ...]) -> None:
        self._stopped, self._prompt, self._stop = stopped, prompt, stop

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        sampled = input_ids[:, self._prompt :].tolist()
        return torch.tensor([self._stopped(ids, self._stop) for ids in sampled], device=input_ids.device)


def _joint_seed(seeds: list[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(seeds).encode(), digest_size=7).digest(), "big")
