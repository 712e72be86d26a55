"""The simulators beside the wheel's executor, apart from each other, and in many threads."""

import decimal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import mpmath
import pytest
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

from trace_rl.environments.bfcl.runaway import runs_away
from trace_rl.environments.bfcl.simulators import Simulators
from trace_rl.environments.calls import Call, parse_call
from trace_rl.tasks.bfcl import bfcl_entry

from .bfcl_scripts import SAMPLE

ODD = [
    "ls(b=1)",
    "cd()",
    "nowhere(x=1)",
    "mean(numbers=[])",
    "cat(file_name='zzz')",
    "book_flight()",
    "pwd(1)",
]


def official(entry, calls, owner):
    return execute_multi_turn_func_call(
        list(calls), entry.config, list(entry.classes), owner, entry.id, long_context=entry.long_context
    )[0]


@pytest.mark.parametrize("entry_id", SAMPLE[::2])
def test_results_are_rendered_as_by_the_official_executor(entry_id):
    entry = bfcl_entry(entry_id)
    known = [c for c in ODD if parse_call(c).name in entry.function_names or "nowhere" in c]
    calls = [call for turn in entry.ground_truth for call in (*turn, *known)]
    simulators = Simulators(entry)
    assert [simulators.call(parse_call(c)).text for c in calls] == official(entry, calls, "simulators_test")


def test_failures_are_marked():
    simulators = Simulators(bfcl_entry("multi_turn_base_0"))
    assert not simulators.call(Call("ls", {})).failed
    assert not simulators.call(Call("cd", {"folder": "nowhere"})).failed  # the tool's own answer
    assert simulators.call(Call("cd", {"wrong": 1})).failed
    assert simulators.call(Call("nowhere", {})).failed
    assert simulators.call(Call("_load_scenario", {"scenario": {}})).failed
    assert simulators.call(Call("__init__", {})).failed


def test_rollouts_share_nothing():
    """Long-context scenarios all refer to the same records in the wheel."""
    numbers = (n for n in range(200) if "TravelAPI" in bfcl_entry(f"multi_turn_long_context_{n}").classes)
    entry = bfcl_entry(f"multi_turn_long_context_{next(numbers)}")
    one, other = Simulators(entry), Simulators(entry)
    before = other.call(Call("get_all_credit_cards", {})).text
    cards = one.instances["TravelAPI"].credit_card_list
    for card in cards.values():
        card["balance"] = -1
    assert other.call(Call("get_all_credit_cards", {})).text == before
    assert Simulators(entry).call(Call("get_all_credit_cards", {})).text == before


def test_many_threads_get_what_one_gets():
    """Calculations share the precision of `mpmath` in the wheel."""
    entry = next(e for i in range(200) if "MathAPI" in (e := bfcl_entry(f"multi_turn_base_{i}")).classes)

    def run(number):
        simulators = Simulators(entry)
        log = Call("logarithm", {"value": 7, "base": 3, "precision": 5 + number % 20})
        root = Call("square_root", {"number": 2, "precision": 5 + number % 7})
        return [simulators.call(call).text for _ in range(10) for call in (log, root)]

    mpmath.mp.dps, before = 15, decimal.getcontext().prec
    expected = [run(number) for number in range(64)]
    assert len({results[0] for results in expected}) == 20
    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(run, range(64))) == expected
    assert (mpmath.mp.dps, decimal.getcontext().prec) == (15, before)


@pytest.mark.parametrize(
    "text",
    [
        "power(9, 10**15)".replace("10**15", str(10**15)),
        f"power(base={2**60}, exponent=100000)",
        f"round_number(5, -{10**12})",
        "logarithm(2, 10, 1000000000)",
        "logarithm(2, 10, '1000000000')",
        "logarithm(value='1e1000000000', base=10, precision=5)",
        "logarithm(value='1e1000000000/3', base=10, precision=5)",
        "square_root(number=2, precision=100000000)",
        "square_root(number=2, precision=101)",
        "logarithm(9223372036854775806, 9223372036854775805, 101)",
    ],
)
def test_calls_that_would_not_come_back_are_refused(text):
    entry = next(e for i in range(200) if "MathAPI" in (e := bfcl_entry(f"multi_turn_base_{i}")).classes)
    assert Simulators(entry).call(parse_call(text)).text.endswith("the numbers are too large")


@pytest.mark.parametrize(
    "text",
    [
        "power(2, 1000)",
        "power(2.5, 3)",
        "power('a', 2)",
        "power(base=2, exponent=[1])",
        "logarithm(10000000, 10, 5)",
        "logarithm(10000000, 10, 100)",
        "logarithm()",
        "square_root(number=1000000, precision=28)",
        "round_number(2.5)",
        "ls()",
    ],
)
def test_ordinary_calls_are_not(text):
    assert not runs_away(parse_call(text))


def test_only_the_simulators_and_the_checker_are_imported():
    program = """
import sys
before = set(sys.modules)
from trace_rl.environments.function_calling import FunctionCalling
from trace_rl.tasks.bfcl import load_bfcl
assert not any(name.startswith("bfcl_eval") for name in sys.modules), "imported without need"
task = load_bfcl()[0][0]
for tool_format in ("hermes", "python"):
    env = FunctionCalling(tool_format=tool_format, count_tokens=len)
    env.reset(task)
    while not env.step("No.").done:
        pass
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split()) - set(sys.stdlib_module_names)
    assert {name for name in loaded if not name.startswith("_")} <= {
        "bfcl_eval",
        "mpmath",
        "trace_rl",
        "gmpy2",
    }
