from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.environments.actions import parse_action
from trace_rl.environments.protocol import Environment, StepResult
from trace_rl.environments.search_qa import DEFAULT_NOTICES, SHORT_NOTICES, SearchQA
from trace_rl.retrieval.bm25 import Bm25Index
from trace_rl.retrieval.protocol import RetrievalError
from trace_rl.tasks.task import Passage, Task
from trace_rl.tasks.world import build_world
from trace_rl.tasks.world_tokenizer import NOTICE_WORDS, world_tokenizer

TASK = Task("t", "Who?", ("Marla", "Marla Dov"), "test")
CORPUS = [Passage(str(i), f"Title{i}", f"common word{i} " + "filler " * 20) for i in range(4)]
INDEX = Bm25Index(CORPUS)
SEARCH, ANSWER, WRONG = "<search> common </search>", "<answer> Marla </answer>", "<answer> Oro </answer>"


def words(text):
    return len(text.split())


def make(index=INDEX, **options):
    environment = SearchQA(index, **{"count_tokens": words, **options})
    environment.reset(TASK)
    return environment


def test_it_is_an_environment():
    environment: Environment = make()
    assert environment.stop == ("</search>", "</answer>")


def test_prompt():
    (message,) = make(max_searches=3).reset(TASK)
    assert message["role"] == "user"
    assert message["content"].endswith("\nQuestion: Who?")
    assert "You may search 3 times" in message["content"]
    assert make(instructions="").reset(TASK) == [{"role": "user", "content": "Who?"}]
    assert make(instructions="Be {brief}.").reset(TASK)[0]["content"] == "Be {brief}.\nQuestion: Who?"


def test_observation_format():
    result = make(top_k=2).step(SEARCH)
    first, second = (f"Doc {i + 1}(Title: {CORPUS[i].title}) {CORPUS[i].text}" for i in range(2))
    assert result.observation == f"\n\n<information>{first}\n{second}</information>\n\n"
    assert result == StepResult(result.observation, False, None, "search", tool_calls=1)


@pytest.mark.parametrize(("action", "reward"), [(ANSWER, 1.0), (WRONG, 0.0), ("<answer>Dov</answer>", 1.0)])
def test_answers(action, reward):
    result = make().step(action)
    assert (result.observation, result.done, result.reward, result.outcome) == ("", True, reward, "answer")
    assert result.answer == action.removeprefix("<answer>").removesuffix("</answer>").strip()
    assert result.scores.keys() == {"exact_match", "f1"}
    assert result.scores["f1"] >= result.scores["exact_match"]


def test_exact_match_mode():
    assert make(reward="exact_match").step("<answer>Dov</answer>").reward == 0.0
    assert make(reward="exact_match").step("<answer>the marla dov!</answer>").reward == 1.0
    assert make(f1_threshold=0.9).step("<answer>Dov</answer>").reward == 0.0


UNSCORED = {"exact_match": 0.0, "f1": 0.0}


def test_last_turn_has_search_off():
    environment = make(max_searches=2)
    assert DEFAULT_NOTICES.last_turn not in environment.step(SEARCH).observation
    assert environment.step(SEARCH).observation.endswith(f"</information>\n\n{DEFAULT_NOTICES.last_turn}\n\n")
    assert environment.step(SEARCH) == StepResult("", True, 0.0, "no_answer", scores=UNSCORED)
    with pytest.raises(RuntimeError, match="after the end"):
        environment.step(ANSWER)


def test_answer_on_the_last_turn_counts():
    environment = make(max_searches=1)
    environment.step(SEARCH)
    assert environment.step(ANSWER).reward == 1.0
    assert make(max_searches=0).step(ANSWER).reward == 1.0
    assert make(max_searches=0).step(SEARCH).outcome == "no_answer"


def test_invalid_actions_use_up_turns():
    environment = make(max_searches=2)
    first = environment.step("no tag")
    assert (first.outcome, first.done, first.tool_calls) == ("invalid", False, 0)
    assert first.observation == f"\n\n<information>{DEFAULT_NOTICES.invalid}</information>\n\n"
    assert DEFAULT_NOTICES.last_turn in environment.step("<search>never closed").observation
    assert environment.step("still none") == StepResult("", True, 0.0, "invalid", scores=UNSCORED)


def test_no_results_and_long_queries():
    result = make().step("<search> zebra </search>")
    assert DEFAULT_NOTICES.nothing_found in result.observation
    assert (result.tool_calls, result.tool_failures, result.oversized) == (1, 0, False)
    assert "Doc 1" in make().step(f"<search> {'common ' * 50_000} </search>").observation


def test_documents_are_dropped_whole():
    three = words(make().step(SEARCH).observation)
    for limit, documents in ((three, 3), (three - 1, 2), (60, 2), (45, 1)):
        result = make(max_observation_tokens=limit).step(SEARCH)
        assert words(result.observation) <= limit
        assert result.observation.count("(Title:") == documents
        assert result.observation.count("filler") == 20 * documents
        assert not result.oversized


def test_oversized_result_becomes_a_notice():
    tight = make(max_observation_tokens=10, instructions="", max_searches=1).step(SEARCH)
    assert tight.observation == "\n\n<information>Oversized</information>\n\nAnswer now\n\n"
    assert (tight.oversized, tight.tool_calls, tight.done) == (True, 1, False)


def test_last_turn_notice_counts_towards_the_limit():
    size = words(make().step(SEARCH).observation)
    result = make(max_searches=1, max_observation_tokens=size).step(SEARCH)
    assert result.observation.count("(Title:") == 2
    assert words(result.observation) <= size


def test_failing_index():
    class Broken:
        def search(self, query, k):
            raise RetrievalError("down")

    result = make(Broken()).step(SEARCH)
    assert (result.outcome, result.tool_failures, result.done) == ("tool_error", 1, True)
    assert (result.reward, result.observation, result.error) == (0.0, "", "down")


@pytest.mark.parametrize(
    "options",
    [
        {"max_searches": -1},
        {"top_k": 0},
        {"max_observation_tokens": 3},
        {"reward": "bleu"},
        {"f1_threshold": 0},
    ],
)
def test_refused_options(options):
    with pytest.raises(ValueError, match=r"max_searches|notices|reward|f1_threshold"):
        make(**options)


def test_nothing_works_before_reset():
    environment = SearchQA(INDEX, count_tokens=words)
    for call in (lambda: environment.step(ANSWER), environment.snapshot, lambda: environment.restore({})):
        with pytest.raises(RuntimeError, match="before reset"):
            call()


def test_step_result_is_consistent():
    for arguments in (("", True, None), ("", False, 1.0), ("text", True, 0.0)):
        with pytest.raises(ValueError, match=r"reward|observation"):
            StepResult(*arguments, "answer")


ACTIONS = st.sampled_from(
    [SEARCH, "<search> word2 </search>", "<search> zebra </search>", ANSWER, WRONG, "nothing", "<search>", ""]
)


@given(st.lists(ACTIONS, max_size=7), st.integers(0, 6), st.integers(0, 5))
def test_restore_continues_identically(actions, cut, max_searches):
    """Any prefix, snapshot through JSON, other instance with a past of its own: same results to the end."""
    original, other = (make(max_searches=max_searches, max_observation_tokens=70) for _ in range(2))
    done = False
    for action in actions[:cut]:
        done = done or original.step(action).done
        if done:
            break
    state = json.loads(json.dumps(original.snapshot()))
    other.step(SEARCH)
    other.reset(TASK)
    other.restore(state)
    assert other.snapshot() == state
    assert state["done"] == done
    for action in actions[cut:]:
        if done:
            with pytest.raises(RuntimeError, match="after the end"):
                other.step(action)
            break
        result = original.step(action)
        assert other.step(action) == result
        assert other.snapshot() == original.snapshot()
        done = result.done


@given(st.lists(ACTIONS, min_size=6, max_size=6), st.integers(0, 5))
def test_every_episode_ends_in_time(actions, max_searches):
    environment = make(max_searches=max_searches)
    results = []
    while not results or not results[-1].done:
        results.append(environment.step(actions[len(results)]))
    assert len(results) <= max_searches + 1
    assert sum(r.tool_calls for r in results) <= max_searches
    assert results[-1].reward in (0.0, 1.0)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"searches": 0, "turns": 0},
        {"searches": "0", "turns": 0, "done": False},
        {"searches": 2, "turns": 1, "done": False},
        {"searches": 0, "turns": 5, "done": False},
        {"searches": -1, "turns": 1, "done": False},
        {"searches": 0, "turns": 1, "done": 1},
    ],
)
def test_impossible_snapshots(state):
    with pytest.raises(ValueError, match="snapshot"):
        make().restore(state)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("reward", ["exact_match", "em_or_f1"])
def test_world_experts_always_succeed(seed, reward):
    world = build_world(seed)
    tokenizer = world_tokenizer(world)
    index = Bm25Index(world.passages)
    environment = SearchQA(
        index, count_tokens=words, reward=reward, instructions="", max_observation_tokens=64
    )
    sample = random.Random(seed).sample(world.train, 40)
    for task in (*world.train, *world.test):
        (message,) = environment.reset(task)
        spoken = [message["content"]]
        *searches, answer = world.expert_actions(task)
        known = ""
        for action in searches:
            entity = parse_action(action)[1].split()[1]
            assert entity in known + task.question
            result = environment.step(action)
            assert not result.done
            known += result.observation
            spoken += [action, result.observation]
        assert task.answers[0] in result.observation
        result = environment.step(answer)
        assert (result.done, result.reward, result.outcome) == (True, 1.0, "answer")
        if task in sample:
            assert tokenizer.unk_token_id not in tokenizer.encode("".join([*spoken, answer]))


def test_world_tokenizer_knows_what_the_environment_says():
    spoken = [w for notice in vars(SHORT_NOTICES).values() for w in notice.split()]
    assert set(spoken) == set(NOTICE_WORDS)
