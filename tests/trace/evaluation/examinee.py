"""A whole evaluation but for the model: a scripted engine that answers by its seed, the real search environment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trace_rl.config.evaluate import EvaluateConfig
from trace_rl.config.load import validated
from trace_rl.engines.protocol import Completion, Sampling
from trace_rl.environments.protocol import Environment
from trace_rl.environments.search_qa import SearchQA
from trace_rl.evaluation import run
from trace_rl.retrieval.bm25 import Bm25Index
from trace_rl.retrieval.protocol import RetrievalError, SearchIndex
from trace_rl.rollout.transcript import Transcript
from trace_rl.sources.source import CountTokens, Source
from trace_rl.tasks.task import Passage, Task

from ..rollout.scripted import byte_tokenizer, completion

BYTES = byte_tokenizer()
HANG_S = 60.0
QUESTIONS = {
    "hotpotqa": [Task(f"h{i}", f"Who wrote book {i}?", ("Marla Voss", "Voss"), "hotpotqa") for i in range(8)],
    "mixed": [Task(f"m{i}", f"Who painted {i}?", (f"Oro {i}",), ("nq", "musique")[i % 2]) for i in range(5)],
}


@dataclass
class SeededEngine:
    """Says one of four things, by the request's seed alone: any order of requests gives the same rollouts."""

    requests: list[tuple[str, Sampling]] = field(default_factory=list)
    broken: BaseException | None = None
    records: Path | None = None  # when `broken`: raise it once this folder holds some finished rollouts
    closed: int = 0

    async def generate(self, prefix_ids: Any, sampling: Sampling) -> Completion:
        prompt = BYTES.decode(prefix_ids)
        self.requests.append((prompt, sampling))
        if self.broken and "0?" in prompt:
            assert self.records
            for _ in range(int(HANG_S / 0.01)):
                if sum(file.read_bytes().count(b"\n") for file in self.records.glob("*")) >= 2:
                    raise self.broken
                await asyncio.sleep(0.01)
            raise AssertionError("no rollout was recorded")
        said = (
            "<answer> Marla Voss </answer>",
            "<answer> Oro 1 </answer>",
            "<search> Tarn </search>",
            "hm",
        )[sampling.seed % 4]
        ids = BYTES(said)["input_ids"]
        return completion(ids[: sampling.max_tokens], truncated=len(ids) > sampling.max_tokens)

    def wait_ready(self) -> None: ...

    def close(self) -> None:
        self.closed += 1


@dataclass
class FailingIndex:
    """Fails the first `failures` searches."""

    index: SearchIndex
    failures: int

    def search(self, query: str, k: int) -> list[Passage]:
        if self.failures:
            self.failures -= 1
            raise RetrievalError("the server is down")
        return self.index.search(query, k)


@dataclass
class Bench:
    """Evaluations in one temporary directory, with the parts that `run` would load put in their place."""

    path: Path
    failures: int = 0

    def config(self, out: str = "out", **sections: Any) -> EvaluateConfig:
        raw: dict[str, Any] = {
            "out": str(self.path / out),
            "model": {"path": str(self.path / "model")},
            "sampling": {"temperature": 1.0, "samples": 3, "turn_tokens": 40, "context_tokens": 600},
            "bootstrap_resamples": 200,
            "sets": {
                name: {"task": {"kind": "search_r1", "test": [name]}, "environment": {"max_searches": 1}}
                for name in QUESTIONS
            },
        }
        for name, value in sections.items():
            raw[name] = raw[name] | value if isinstance(value, dict) and name in raw else value
        return validated(EvaluateConfig, raw)

    def source(self, task: Any, environment: Any, within: str) -> Source:
        index = FailingIndex(Bm25Index([Passage("0", "Tarn", "author Marla Voss")]), self.failures)

        def environments(count: CountTokens) -> Any:
            def make() -> Environment:
                return SearchQA(index, max_searches=1, count_tokens=count, instructions="")

            return make

        return Source([], QUESTIONS[str(task.test[0])], environments)

    def run(self, config: EvaluateConfig, **broken: Any) -> SeededEngine:
        """Run the evaluation; the engine says what it was asked."""
        engine = SeededEngine(**broken)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "make_engine", lambda *_: engine)
            patch.setattr(run, "load_transcript", lambda _: Transcript(BYTES))
            patch.setattr(run, "load_source", self.source)
            try:
                run.run(config)
            finally:
                self.engine = engine
        return engine


def new_bench(path: Path) -> Bench:
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text("{}")
    (path / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 700)
    return Bench(path)
