"""`official_score` against the wheel's checker called directly, on right, wrong and hostile episodes."""

import random
import re

import pytest
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

from trace_rl.environments.bfcl.official import official_score
from trace_rl.environments.calls import CallError
from trace_rl.tasks.bfcl import bfcl_entry

from .bfcl_scripts import SAMPLE

TRUE = {entry_id: [[list(turn)] for turn in bfcl_entry(entry_id).ground_truth] for entry_id in SAMPLE}


def direct(entry, turns):
    """The checker under an owner's name of its own, so that no earlier state is met."""
    direct.number = getattr(direct, "number", 0) + 1
    test_entry = {"id": entry.id, "initial_config": entry.config, "involved_classes": list(entry.classes)}
    kept = [[step for step in turn if step] for turn in turns]
    truth = [list(turn) for turn in entry.ground_truth]
    verdict = multi_turn_checker(kept, truth, test_entry, entry.subset, f"direct{direct.number}")
    return verdict["valid"], verdict.get("error_type", "")


def changed(turns, rng):
    """The same calls with some left out, doubled, out of order, in other steps, or unknown ones between."""
    turns = [[call for step in turn for call in step] for turn in turns]
    for turn in turns:
        match rng.randrange(7):
            case 0 if turn:
                turn.pop(rng.randrange(len(turn)))
            case 1 if turn:
                turn.append(rng.choice(turn))
            case 2:
                rng.shuffle(turn)
            case 3:
                turn.insert(0, "nowhere(x=1)")
    return [[turn[:1], turn[1:]] for turn in turns]


def test_verdicts_are_the_checkers():
    rng, seen = random.Random(0), set()
    for entry_id in SAMPLE:
        entry = bfcl_entry(entry_id)
        for turns in (TRUE[entry_id], changed(TRUE[entry_id], rng), [[] for _ in TRUE[entry_id]]):
            verdict = official_score(entry, turns)
            assert verdict == direct(entry, turns)
            seen.add(verdict)
    assert (True, "") in seen
    assert {re.sub(".*:", "", error) for _, error in seen} >= {
        "instance_state_mismatch",
        "execution_response_mismatch",
        "empty_turn_model_response",
    }


def test_a_missing_turn_means_the_run_was_ended_by_force():
    entry_id = SAMPLE[0]
    turns = TRUE[entry_id]
    assert official_score(bfcl_entry(entry_id), turns[:-1]) == (False, "multi_turn:force_terminated")


def test_nothing_is_left_behind():
    """Long-context scenarios pay with, and cancel, records that the wheel keeps for all of them."""
    before, cards = set(vars(multi_turn_utils)), repr(long_context.CREDIT_CARD_EXTENSION)
    entry = bfcl_entry("multi_turn_long_context_151")
    cancel = "cancel_booking(access_token='abc123xyz', booking_id='booking_901')"
    turns = [[[cancel]] for _ in entry.questions]
    assert official_score(entry, turns)[0] is False
    assert set(vars(multi_turn_utils)) == before
    assert repr(long_context.CREDIT_CARD_EXTENSION) == cards


def test_directories_in_themselves_do_not_break_the_checker():
    entry = bfcl_entry("multi_turn_base_0")
    turns = [[["cp('document', 'document')", "cd('document')", "cp('document', 'document')"]]]
    turns += [[["ls()"]] for _ in entry.questions[1:]]
    assert official_score(entry, turns)[0] is False


@pytest.mark.parametrize(
    "call",
    ["__import__('os').system('touch {mark}')", "cd(folder=open('{mark}', 'w'))", "ls(); ls()", "ls(), ls()"],
)
def test_strings_that_are_no_calls_are_refused(call, tmp_path):
    mark = tmp_path / "ran"
    with pytest.raises(CallError):
        official_score(bfcl_entry("multi_turn_base_0"), [[[call.format(mark=mark)]]] * 4)
    assert not mark.exists()


@pytest.mark.parametrize(
    "call",
    [
        "open('{mark}', 'w')",
        "exec('open(\\'{mark}\\', \\'w\\')')",
        "ls(a='\\') or open(\\'{mark}\\', \\'w\\')')",
    ],
)
def test_functions_outside_the_entry_are_not_run(call, tmp_path):
    mark = tmp_path / "ran"
    assert official_score(bfcl_entry("multi_turn_base_0"), [[[call.format(mark=mark)]]] * 4)[0] is False
    assert not mark.exists()
