"""No episode can hold the simulators' lock for long or fill the memory, and the verdict knows its limits."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from trace_rl.environments.bfcl import wheel
from trace_rl.environments.bfcl.budget import MAX_CALLS, MAX_READ, MAX_WALK, MAX_WRITTEN
from trace_rl.environments.bfcl.official import official_score
from trace_rl.environments.bfcl.simulators import Simulators
from trace_rl.environments.calls import NO_SUCH_FUNCTION, Call, parse_call, render_call
from trace_rl.environments.function_calling import OVERSIZED
from trace_rl.environments.tool_formats import MAX_CALLS_PER_ACTION, Hermes, Parsed, PythonCalls
from trace_rl.tasks.bfcl import bfcl_entry

from .bfcl_scripts import TASKS, environment

FILES = bfcl_entry("multi_turn_base_0")
TWEETS = next(e for i in range(200) if "TwitterAPI" in (e := bfcl_entry(f"multi_turn_base_{i}")).classes)


def played(texts, entry=FILES):
    simulators = Simulators(entry)
    return [simulators.call(parse_call(text)) for text in texts]


def doubling(levels):
    """Directories of which each holds the one before twice: 4 * levels calls, 2**levels paths."""
    yield "mkdir('n0')"
    for k in range(levels):
        yield from (f"cp('n{k}', 'm{k}')", f"mkdir('n{k + 1}')")
        yield from (f"mv('n{k}', 'n{k + 1}')", f"mv('m{k}', 'n{k + 1}')")


DOUBLING = [*doubling(18), "ls()", "find()", "find('/')", "find(path='.', name='zzz')", "du()"]
DEEP = [call for _ in range(102) for call in ("mkdir('d')", "cd('d')")] + ["find('/')", "pwd()"]
SELF = ["mkdir('q')", "cp('q', 'q')", "find()", "cd('q')", "du()", "cd('..')", "rm('q')", "find()", "du()"]
MANY = ["ls()"] * (MAX_CALLS + 3)
LONG = [
    "touch('a')",
    *[f"echo({'x' * 6000!r}, 'a')"] * (MAX_WRITTEN // 6000 + 1),
    "ls()",
    "nowhere()",
]
READ = ["touch('a')", f"echo({'x' * 60000!r}, 'a')", *["cat('a')"] * (MAX_READ // 60000 + 3)]


def test_directories_shared_by_cp_and_mv_are_not_walked_path_by_path():
    results = played(DOUBLING)
    assert all(result.made for result in results[:-4])
    assert {result.text for result in results[-4:]} == {
        "Error during execution: the directory tree is too large"
    }


def test_a_directory_in_itself_is_not_walked_and_can_be_removed():
    results = played(SELF)
    assert [result.made for result in results] == [True, True, False, True, False, True, True, True, True]
    assert "matches" in results[-2].text


def test_a_directory_too_deep_for_recursion_is_not_walked():
    find, pwd = played(DEEP)[-2:]
    assert (find.made, pwd.made) == (False, True)


def test_a_large_directory_outside_the_tree_is_found_out():
    """`cd('..')` goes to where a shared directory was made, which may have been removed meanwhile."""
    away = [
        "mkdir('p')",
        "cd('p')",
        "mkdir('c')",
        "cd('..')",
        "cp('p', 'o')",
        "rm('p')",
        "cd('o')",
        "cd('c')",
    ]
    results = played([*away, "cd('..')", *doubling(18), "du()", "find('/')"])
    assert [result.made for result in results[-2:]] == [False, True]


def test_calls_and_their_characters_are_limited():
    made = [result.made for result in played(MANY)]
    assert made == [True] * MAX_CALLS + [False] * 3
    assert [result.made for result in played(LONG)[-3:]] == [False] * 3
    results = played(READ)
    assert MAX_READ < sum(len(result.text) for result in results if result.made) < MAX_READ + 60100
    assert results[-1].text.endswith("the limit of calls or text of this conversation is reached")


def test_walks_count_as_reading():
    filled = ["touch('a')", f"echo({'x' * 60000!r}, 'a')", *["du()"] * (MAX_READ // 60000 + 3)]
    assert [result.made for result in played(filled)[-3:]] == [False] * 3
    assert MAX_WALK > 60000


@pytest.mark.parametrize("texts", [DOUBLING, SELF, DEEP, MANY, LONG, READ], ids=range(6))
def test_the_verdict_replaces_what_was_not_made(texts, monkeypatch):
    """Also after a branch: a restored episode has the budget that was left."""
    reached = []

    def check(turns, *_):
        reached.extend(call for turn in turns for step in turn for call in step)
        return {"valid": False}

    monkeypatch.setattr(wheel, "checker", lambda: SimpleNamespace(multi_turn_checker=check))
    turns = [[texts[:50], texts[50:]], *[[["ls()"]] for _ in FILES.questions[1:]]]
    official_score(FILES, turns)
    made = [result.made for result in played(texts)]
    assert [call != NO_SUCH_FUNCTION for call in reached[: len(texts)]] == made
    env = environment()
    env.reset(TASKS[FILES.id])
    steps = [texts[i : i + MAX_CALLS_PER_ACTION] for i in range(0, len(texts), MAX_CALLS_PER_ACTION)]
    env.restore({"turns": [steps], "done": False})
    again = env._simulators.call(parse_call("ls()"))
    assert again.made is played([*texts, "ls()"])[-1].made


def test_the_checker_is_not_lost_in_such_directories():
    turns = [[DOUBLING], *[[["find()"]] for _ in FILES.questions[1:]]]
    assert official_score(FILES, turns)[0] is False


def test_names_in_full_width_are_no_names():
    """Python reads them as the plain ones, so that the checker would run what the episode did not."""
    for call in (Call("ｌs", {}), Call("ls", {"ａ": True})):
        assert render_call(call) == NO_SUCH_FUNCTION
        assert Simulators(FILES).call(call).failed
    env = environment()
    env.reset(TASKS[FILES.id])
    env.step('<tool_call>\n{"name": "ｍkdir", "arguments": {"dir_name": "x"}}\n</tool_call>')
    assert env.snapshot()["turns"] == [[[NO_SUCH_FUNCTION]]]
    assert PythonCalls().parse("[ｌs()]").calls == [Call("ls", {})]  # here Python has read it


@pytest.mark.parametrize("tool_format", [Hermes(), PythonCalls()])
def test_more_calls_in_an_action_than_allowed_are_malformed(tool_format):
    def written(number):
        if isinstance(tool_format, PythonCalls):
            return f"[{', '.join(['ls()'] * number)}]"
        return '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>\n' * number

    assert tool_format.parse(written(64)) == Parsed([Call("ls", {})] * 64)
    assert tool_format.parse(written(65)) == Parsed(malformed=True)
    env = environment()
    env.reset(TASKS[FILES.id])
    with pytest.raises(ValueError, match="impossible"):
        env.restore({"turns": [[["ls()"] * 65]], "done": False})


def test_few_tokens_are_counted_to_shorten_an_observation():
    """As many of the shortest results as fit are kept; which number that is takes a few counts to find."""
    counted = []
    limit = 8000

    def count(text):
        counted.append(len(text))
        return len(text) // 4

    env = environment(tool_format="python", count_tokens=count, max_observation_tokens=limit)
    env.reset(TASKS[FILES.id])
    env.step("[touch('a'), touch('big')]")
    env.step(f"[echo({'x' * 40000!r}, 'big')]")
    counted.clear()
    calls = [f"echo({'y' * (10 * i)!r})" for i in range(60)] + ["cat('big')"] * 4
    result = env.step(f"[{', '.join(calls)}]")
    assert result.oversized
    assert count(result.observation) <= limit
    assert len(counted) < 12
    assert max(counted) < 20 * limit + sum(map(len, calls))
    kept = [OVERSIZED not in item["content"] for item in eval(result.observation, {})]
    assert 2 < kept.index(False) < 60
    assert kept == sorted(kept, reverse=True)  # the longest went
    fuller = result.observation.replace(OVERSIZED, "y" * (10 * kept.index(False)), 1)
    assert len(fuller) // 4 > limit  # and no more of them than needed


def test_unclosed_blocks_are_read_in_linear_time():
    program = """
from trace_rl.environments.tool_formats import _blocks
print(len(list(_blocks("<tool_call>\\n" * 300_000))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout == "0\n", done.stderr


def test_lists_left_out_are_not_shared():
    """The wheel's default for mentions is one list, which `mention` extends."""

    def posted(simulators):
        simulators.instances["TwitterAPI"].authenticated = True
        tweet = json.loads(simulators.call(Call("post_tweet", {"content": "x"})).text)
        assert simulators.call(Call("mention", {"tweet_id": tweet["id"], "mentioned_usernames": ["@a"]})).made
        return tweet["mentions"]

    assert [posted(Simulators(TWEETS)) for _ in range(2)] == [[], []]
    login = [f"authenticate_twitter({TWEETS.config['TwitterAPI']['username']!r}, "]
    login = [login[0] + f"{TWEETS.config['TwitterAPI']['password']!r})"]
    counter = TWEETS.config["TwitterAPI"]["tweet_counter"]
    calls = [*login, "post_tweet('x')", f"mention({counter}, ['@a'])"]
    official_score(TWEETS, [[calls] for _ in TWEETS.questions])
    assert wheel.simulator_class("TwitterAPI").post_tweet.__defaults__ == ([], [])
