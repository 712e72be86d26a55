"""The in-process engine: batches equal singles, ends of completions, weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config

from trace_rl.engines.protocol import EngineError, Sampling
from trace_rl.engines.transformers_engine import TransformersEngine

from .oracle import Oracle, prompts, sample

TOLERANCE = 1e-5


@pytest.fixture
def engine(tiny_policy: Path) -> TransformersEngine:
    return TransformersEngine(tiny_policy, dtype=torch.float32)


@pytest.fixture(scope="module")
def oracle(tiny_policy: Path) -> Oracle:
    return Oracle(tiny_policy)


def test_a_batch_of_mixed_lengths_equals_singles_when_greedy(engine: Any, oracle: Oracle) -> None:
    prefixes = [*prompts(5, 0), [7]]
    greedy = Sampling(0.0, 12)
    batch = sample(engine, [(p, greedy) for p in prefixes])
    for prefix, together in zip(prefixes, batch, strict=True):
        (alone,) = sample(engine, [(prefix, greedy)])
        assert together.token_ids == alone.token_ids
        assert together.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)
        assert oracle.greedy(prefix, together)
        assert oracle.difference(prefix, together) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution(
    engine: Any, oracle: Oracle, temperature: float
) -> None:
    prefixes = prompts(6, 1)
    requests = [(p, Sampling(temperature, 5 + 7 * i, seed=i)) for i, p in enumerate(prefixes)]
    for (prefix, sampling), completion in zip(requests, sample(engine, requests), strict=True):
        assert oracle.difference(prefix, completion, temperature) < TOLERANCE
        assert completion.truncated == (len(completion.token_ids) == sampling.max_tokens) or (
            completion.token_ids[-1] == engine._tokenizer.eos_token_id
        )
        assert completion.cached_tokens == 0


VOCAB = 512
# What a published generation_config.json may ask for; every one of them changes the distribution.
ASKED = {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2,
         "suppress_tokens": list(range(100, VOCAB)), "max_time": 1e-9}  # fmt: skip


@pytest.fixture(scope="module", params=[{}, ASKED], ids=["no wishes", "a generation config that truncates"])
def flat_policy(request: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy so small in its weights that all of its `VOCAB` tokens are about equally likely."""
    path = tmp_path_factory.mktemp("flat")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
             "head_dim": 16, "intermediate_size": 32, "vocab_size": VOCAB}  # fmt: skip
    model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, eos_token_id=tiny_tokenizer.eos_token_id))
    model.save_pretrained(path)
    GenerationConfig(
        do_sample=True, eos_token_id=tiny_tokenizer.eos_token_id, **request.param
    ).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def test_the_whole_vocabulary_is_sampled(flat_policy: Path) -> None:
    """Of 400 draws from 512 tokens all but equally likely, 9 in 10 rank beyond 50; none would under top_k=50."""
    engine = TransformersEngine(flat_policy, dtype=torch.float32)
    oracle = Oracle(flat_policy)
    (prefix,) = prompts(1, 8)
    requests = [(prefix, Sampling(1.0, 40, seed=seed)) for seed in range(10)]
    ranks: list[int] = []
    for completion in sample(engine, requests):
        assert oracle.difference(prefix, completion) < TOLERANCE
        logits = oracle.logits(prefix, completion.token_ids)
        chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])
        ranks += (logits > chosen).sum(1).tolist()
    assert len(ranks) > 300
    beyond = [sum(rank >= k for rank in ranks) / len(ranks) for k in (50, VOCAB // 2, VOCAB - 50)]
    assert beyond == pytest.approx([0.9, 0.5, 0.1], abs=0.1)


def test_only_the_eos_of_the_models_own_generation_config_is_kept(flat_policy: Path) -> None:
    config = TransformersEngine(flat_policy, dtype=torch.float32)._model.generation_config
    given = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    given.pop("transformers_version", None)
    assert given == {
        "eos_token_id": AutoTokenizer.from_pretrained(flat_policy).eos_token_id,
        "pad_token_id": AutoTokenizer.from_pretrained(flat_policy).pad_token_id,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
    }


def test_a_missing_directory_is_not_looked_for_on_a_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def remember(path: Any, **options: Any) -> None:
        asked.append(options.get("local_files_only"))
        raise OSError("stop here")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", remember)
    with pytest.raises(OSError, match="stop here"):
        TransformersEngine(tmp_path, dtype=torch.float32)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda path, **options: None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", remember)
    with pytest.raises(OSError, match="stop here"):
        TransformersEngine(tmp_path, dtype=torch.float32)
    assert asked == [True, True]


def test_requests_that_sample_differently_share_no_batch(engine: Any, oracle: Oracle) -> None:
    (prefix,) = prompts(1, 2)
    kinds = [Sampling(0.0, 6), Sampling(1.0, 9, seed=1), Sampling(0.5, 4, seed=2), Sampling(0.0, 3)]
    cold, warm, half, short = sample(engine, [(prefix, kind) for kind in kinds])
    assert oracle.greedy(prefix, cold)
    assert short.token_ids == cold.token_ids[:3]
    assert oracle.difference(prefix, warm, 1.0) < TOLERANCE
    assert oracle.difference(prefix, half, 0.5) < TOLERANCE
    assert len(half.token_ids) <= 4


def test_more_requests_than_a_batch_holds(tiny_policy: Path) -> None:
    engine = TransformersEngine(tiny_policy, dtype=torch.float32, max_batch=2)
    whole = TransformersEngine(tiny_policy, dtype=torch.float32)
    requests = [(p, Sampling(0.0, 4)) for p in prompts(5, 3)]
    few, all_at_once = sample(engine, requests), sample(whole, requests)
    assert [c.token_ids for c in few] == [c.token_ids for c in all_at_once]


def test_a_stop_string_ends_the_completion_and_belongs_to_it(engine: Any, tiny_tokenizer: Any) -> None:
    (prefix,) = prompts(1, 4)
    free = [(prefix, Sampling(1.0, 100, seed=seed)) for seed in range(12)]
    stop = ("</search>", "</answer>")
    ends = set(tiny_tokenizer.convert_tokens_to_ids(list(stop)))
    stopped = [(prefix, Sampling(1.0, 100, stop, seed)) for seed in range(12)]
    kinds = set()
    for completion in sample(engine, stopped):
        *inner, last = completion.token_ids
        assert not {*ends, tiny_tokenizer.eos_token_id} & set(inner)
        assert completion.truncated == (last not in {*ends, tiny_tokenizer.eos_token_id})
        assert completion.truncated <= (len(completion.token_ids) == 100)
        kinds.add("stop" if last in ends else "eos" if last == tiny_tokenizer.eos_token_id else "length")
    assert {"stop", "eos"} <= kinds
    assert any(ends & set(completion.token_ids[:-1]) for completion in sample(engine, free))


def test_the_same_batch_again_gives_the_same(engine: Any) -> None:
    requests = [(p, Sampling(1.0, 8, seed=i)) for i, p in enumerate(prompts(3, 5))]
    state = torch.random.get_rng_state()
    first = sample(engine, requests)
    assert first == sample(engine, requests)
    assert torch.equal(state, torch.random.get_rng_state())  # the trainer's own generator is left alone
    other = sample(engine, [(p, Sampling(1.0, 8, seed=9)) for p, _ in requests])
    assert [c.token_ids for c in other] != [c.token_ids for c in first]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_load_weights(kind: str, tiny_policies: dict[str, Path]) -> None:
    engine = TransformersEngine(tiny_policies[kind], dtype=torch.float32)
    (prefix,) = prompts(1, 6)
    engine.load_weights(tiny_policies[f"{kind}_other"], 1)
    (completion,) = sample(engine, [(prefix, Sampling(1.0, 30))])
    assert Oracle(tiny_policies[f"{kind}_other"]).difference(prefix, completion) < TOLERANCE
    assert Oracle(tiny_policies[kind]).difference(prefix, completion) > 0.01


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("tied", "model.norm.weight", "model.norm.weight"),
        ("untied", "lm_head.weight", "lm_head.weight"),
        ("untied", "+strange.weight", "strange.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    kind: str, change: str, named: str, tiny_policies: dict[str, Path], tmp_path: Path
) -> None:
    weights = load_file(tiny_policies[kind] / "model.safetensors")
    if change.startswith("+"):
        weights[change[1:]] = torch.ones(1)
    else:
        del weights[change]
    save_file(weights, tmp_path / "model.safetensors")
    engine = TransformersEngine(tiny_policies[kind], dtype=torch.float32)
    with pytest.raises(EngineError, match=f"do not fit.*{named}"):
        engine.load_weights(tmp_path, 1)


def test_a_failed_batch_surfaces_and_the_engine_goes_on(engine: Any, tiny_tokenizer: Any) -> None:
    (prefix,) = prompts(1, 7)
    with pytest.raises(EngineError, match="transformers generate failed"):
        sample(engine, [([len(tiny_tokenizer)], Sampling(0.0, 3))])
    assert len(sample(engine, [(prefix, Sampling(0.0, 3))])[0].token_ids) == 3
    engine.sleep()
    assert engine.counters() is None
    engine.close()
    engine.close()
