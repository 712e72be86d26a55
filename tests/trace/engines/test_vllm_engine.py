"""vLLM, really started: what it samples, what it counts, and what becomes of it when weights change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from trace_rl.engines.protocol import EngineCounters, EngineError, Sampling
from trace_rl.engines.vllm_engine import VllmEngine

from ..conftest import CONTEXT
from .oracle import Oracle, prompts, sample

TOLERANCE = 1e-5
BLOCK = 32


@pytest.fixture(scope="module")
def oracle(tiny_policy: Path) -> Oracle:
    return Oracle(tiny_policy)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_transformers(tied: VllmEngine, oracle: Oracle, temperature: float) -> None:
    prefixes = [*prompts(6, 1), [7]]
    requests = [(p, Sampling(temperature, 24, seed=i)) for i, p in enumerate(prefixes)]
    for (prefix, _), completion in zip(requests, sample(tied, requests), strict=True):
        assert oracle.difference(prefix, completion, temperature) < TOLERANCE


def test_greedy_takes_the_likeliest(tied: VllmEngine, oracle: Oracle) -> None:
    prefixes = prompts(6, 2)
    for prefix, completion in zip(
        prefixes, sample(tied, [(p, Sampling(0.0, 12)) for p in prefixes]), strict=True
    ):
        assert oracle.greedy(prefix, completion)
        assert oracle.difference(prefix, completion) < TOLERANCE


def test_seeds_make_requests_reproducible(tied: VllmEngine) -> None:
    requests = [(p, Sampling(1.0, 20, seed=i)) for i, p in enumerate(prompts(4, 3))]
    together = [c.token_ids for c in sample(tied, requests)]
    assert [c.token_ids for r in requests[::-1] for c in sample(tied, [r])] == together[::-1]
    (prefix, _) = requests[0]
    siblings = sample(tied, [(prefix, Sampling(1.0, 20, seed=seed)) for seed in range(8)])
    assert len({tuple(c.token_ids) for c in siblings}) == 8


def test_where_completions_end(tied: VllmEngine, tiny_tokenizer: Any, oracle: Oracle) -> None:
    """The same seeds with and without a stop string: the stop cuts, and changes nothing before it."""
    (prefix,) = prompts(1, 4)
    eos = tiny_tokenizer.eos_token_id
    stops = ("</search>", "</answer>")
    ends = set(tiny_tokenizer.convert_tokens_to_ids(list(stops)))
    free = sample(tied, [(prefix, Sampling(1.0, 90, seed=i)) for i in range(24)])
    cut = sample(tied, [(prefix, Sampling(1.0, 90, stops, seed=i)) for i in range(24)])
    kinds = set()
    for whole, part in zip(free, cut, strict=True):
        assert eos not in whole.token_ids[:-1]
        assert whole.truncated == (whole.token_ids[-1] != eos)
        assert whole.truncated <= (len(whole.token_ids) == 90)
        at = next((i for i, token in enumerate(whole.token_ids) if token in ends), None)
        expected = whole.token_ids if at is None else whole.token_ids[: at + 1]
        assert part.token_ids == expected
        assert part.truncated == (at is None and whole.truncated)
        assert oracle.difference(prefix, part) < TOLERANCE
        kinds.add("stop" if at is not None else "length" if part.truncated else "eos")
    assert {"stop", "eos"} <= kinds
    assert any(c.truncated for c in free)


def test_max_tokens_cuts(tied: VllmEngine) -> None:
    (prefix,) = prompts(1, 5)
    ten, one = sample(tied, [(prefix, Sampling(0.0, 10)), (prefix, Sampling(0.0, 1))])
    assert (len(ten.token_ids), ten.truncated) == (10, True)
    assert (one.token_ids, one.truncated) == (ten.token_ids[:1], True)
    (to_the_brim,) = sample(tied, [([7] * (CONTEXT - 1), Sampling(0.0, 1))])
    assert len(to_the_brim.token_ids) == 1


def minus(after: EngineCounters, before: EngineCounters) -> EngineCounters:
    return EngineCounters(
        after.prompt_tokens - before.prompt_tokens,
        after.cached_tokens - before.cached_tokens,
        after.generated_tokens - before.generated_tokens,
    )


def test_branches_are_served_from_the_prefix_cache(tied: VllmEngine) -> None:
    """A trunk, then branches off it: whole blocks are hits, and the engine's counters say the same."""
    (trunk,) = prompts(1, 6, low=100, high=101)
    before = tied.counters()
    requests = [(trunk, Sampling(1.0, 8))]
    done = sample(tied, requests)
    assert done[0].cached_tokens == 0
    leaves = prompts(6, 7, low=1, high=40)
    branches = [(trunk[: 20 + 16 * i] + leaf, Sampling(1.0, 8, seed=i)) for i, leaf in enumerate(leaves)]
    branched = sample(tied, branches)
    for i, completion in enumerate(branched):
        assert completion.cached_tokens % BLOCK == 0
        assert completion.cached_tokens >= (20 + 16 * i) // BLOCK * BLOCK
    assert sum(c.cached_tokens for c in branched) > 0
    requests, done = requests + branches, done + branched
    assert minus(tied.counters(), before) == EngineCounters(
        prompt_tokens=sum(len(prefix) for prefix, _ in requests),
        cached_tokens=sum(c.cached_tokens for c in done),
        generated_tokens=sum(len(c.token_ids) for c in done),
    )


def test_a_request_over_the_context_fails_alone(tied: VllmEngine, oracle: Oracle) -> None:
    (prefix,) = prompts(1, 8)

    async def main() -> list[Any]:
        long = tied.generate([7] * (CONTEXT + 1), Sampling(0.0, 4))
        others = [tied.generate(prefix, Sampling(0.0, 4, seed=i)) for i in range(3)]
        return await asyncio.gather(others[0], long, *others[1:], return_exceptions=True)

    first, refused, *rest = asyncio.run(main())
    assert isinstance(refused, EngineError)
    assert "refused a request" in str(refused)
    assert str(CONTEXT) in str(refused)  # it says how long is too long
    assert all(oracle.greedy(prefix, completion) for completion in (first, *rest))


def test_abandoned_requests_leave_the_engine_as_it_was(tied: VllmEngine, tiny_policy: Path) -> None:
    """A failed step cancels what is in flight; the engine forgets it and can still change its weights."""
    (prefix,) = prompts(1, 9)

    async def abandon() -> None:
        requests = [
            asyncio.ensure_future(tied.generate(prefix, Sampling(1.0, 150, seed=i))) for i in range(6)
        ]
        await tied.generate(prefix, Sampling(1.0, 2))
        for request in requests:
            request.cancel()
        assert {type(e) for e in await asyncio.gather(*requests, return_exceptions=True)} == {
            asyncio.CancelledError
        }

    asyncio.run(abandon())
    tied.load_weights(tiny_policy, 1)  # refused while anything still runs
    assert len(sample(tied, [(prefix, Sampling(0.0, 3))])[0].token_ids) == 3


def test_a_loop_that_closed_early_does_not_stop_the_reader(tied: VllmEngine) -> None:
    (prefix,) = prompts(1, 9)

    async def outlast() -> None:
        steps = 0
        while steps < 40:
            steps += len((await tied.generate(prefix, Sampling(0.0, 40 - steps))).token_ids)

    loop = asyncio.new_event_loop()
    unfinished = loop.create_task(tied.generate(prefix, Sampling(1.0, 30)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.run(outlast())
    tied.counters()
    assert not unfinished.done()
    unfinished.get_coro().close()  # type: ignore[union-attr]
    unfinished._log_destroy_pending = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_new_weights_are_sampled_from_and_old_prefixes_forgotten(
    kind: str, request: pytest.FixtureRequest, tiny_policies: dict[str, Path]
) -> None:
    engine: VllmEngine = request.getfixturevalue(kind)
    prefix = prompts(1, 10, low=100, high=101)[0]
    requests = [(prefix, Sampling(1.0, 20, seed=i)) for i in range(4)]
    for version, name in enumerate((kind, f"{kind}_other", kind), start=2):
        engine.load_weights(tiny_policies[name], version)
        (first,) = sample(engine, requests[:1])
        assert first.cached_tokens == 0  # the same prompt was cached under the weights before
        others = sample(engine, requests[1:])
        assert {c.cached_tokens for c in others} == {96}
        oracles = {name: Oracle(tiny_policies[name]) for name in (kind, f"{kind}_other")}
        new = oracles.pop(name)
        (old,) = oracles.values()
        for completion in (first, *others):
            assert new.difference(prefix, completion) < TOLERANCE
            assert old.difference(prefix, completion) > 0.01
