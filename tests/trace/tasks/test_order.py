from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.tasks.order import TaskOrder

sizes = st.lists(st.integers(0, 15), max_size=12)


@given(n=st.integers(1, 12), seed=st.integers(0, 99), takes=sizes)
def test_every_epoch_is_a_permutation(n, seed, takes):
    order = TaskOrder(n, seed)
    drawn = [i for k in takes for i in order.take(k)]
    assert len(drawn) == sum(takes)
    for start in range(0, len(drawn), n):
        epoch = drawn[start : start + n]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(n))
    assert drawn == TaskOrder(n, seed).take(sum(takes))


@given(n=st.integers(1, 12), seed=st.integers(0, 99), before=st.integers(0, 40), after=st.integers(0, 40))
def test_exact_resume(n, seed, before, after):
    order = TaskOrder(n, seed)
    order.take(before)
    state = json.loads(json.dumps(order.state_dict()))
    expected = order.take(after)
    random.seed(before)
    resumed = TaskOrder(n, seed)
    resumed.take(3)
    resumed.load_state_dict(state)
    assert resumed.take(after) == expected


def test_epochs_and_seeds_differ():
    order = TaskOrder(50, 0)
    assert order.take(50) != order.take(50)
    assert TaskOrder(50, 0).take(50) != TaskOrder(50, 1).take(50)


def test_refusals():
    with pytest.raises(ValueError, match="at least one task"):
        TaskOrder(0, 0)
    with pytest.raises(ValueError, match="cannot take"):
        TaskOrder(3, 0).take(-1)
    state = TaskOrder(3, 0).state_dict()
    with pytest.raises(ValueError, match="saved with n = 3"):
        TaskOrder(4, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with seed = 0"):
        TaskOrder(3, 1).load_state_dict(state)
    with pytest.raises(ValueError, match="impossible"):
        TaskOrder(3, 0).load_state_dict({**state, "position": 9})
