"""A turn's text is the policy's: no text may hold up the environment's thread, and with it all others."""

from __future__ import annotations

import time

import pytest

from trace_rl.environments.actions import parse_action

N = 100_000


@pytest.mark.parametrize(
    "text",
    [
        "<search>" * N,
        "<think>" * N,
        "<think></think>" * N,
        "</think>" * N,
        "<search>" + "<think>" * N + "</search>",
    ],
)
def test_many_tags_take_linear_time(text: str) -> None:
    started = time.perf_counter()
    assert parse_action(text) == ("invalid", "")
    assert time.perf_counter() - started < 30  # quadratic time would be hours
