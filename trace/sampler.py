"""What samples rollouts: the transcript of the model's tokenizer and the engine on this rank's device."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import AutoTokenizer

from .config.schema import EngineConfig, ModelConfig
from .engines.protocol import Engine
from .policy.module import DTYPES
from .ranks import Ranks
from .rollout.transcript import Transcript


def load_transcript(model: ModelConfig) -> Transcript:
    """The transcript of `model`'s tokenizer and chat template; TemplateError if they cannot carry rollouts."""
    tokenizer = AutoTokenizer.from_pretrained(model.path, local_files_only=True)
    if model.chat_template:
        tokenizer.chat_template = model.chat_template.read_text()
    return Transcript(tokenizer, model.observations)


def make_engine(
    model: ModelConfig,
    engine: EngineConfig,
    context_tokens: int,
    log_dir: Path,
    ranks: Ranks,
    device: torch.device,
) -> Engine:
    """This rank's engine; vLLM goes on starting while the trainer loads its own model."""
    if engine.kind == "transformers":
        from .engines.transformers_engine import TransformersEngine

        return TransformersEngine(
            model.path, dtype=DTYPES[model.dtype], device=str(device), max_batch=engine.max_sequences
        )
    from .engines.vllm_engine import VllmEngine, vllm_options

    return VllmEngine(
        model.path,
        options=vllm_options(model.dtype, engine, context_tokens, on_gpu=device.type == "cuda"),
        log_path=log_dir / f"engine_rank{ranks.rank}.log",
        kv_cache_gib=engine.kv_cache_gib,
        threads=engine.threads or max(1, (os.cpu_count() or 1) // ranks.world),
        gpu=ranks.local_rank if device.type == "cuda" else None,
    )


def wait_ready(engine: Engine) -> None:
    """Return when the engine can sample; raises EngineError if it died on the way."""
    wait = getattr(engine, "wait_ready", None)
    if wait:
        wait()


def this_device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())
