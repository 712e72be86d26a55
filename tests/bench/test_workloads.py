"""The workloads are those of the design note, and recorded rollouts become the forests they are."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.recorded import from_sequences, recorded
from bench.workloads import Workload, block_efficiency, made_up, star
from trace_kernels.layout import TreeLayout

# tokens, flat/packed token ratio, flat/packed pair ratio, block efficiency at 128 x 64 (None: 0.92 to 1)
NOTE: dict[str, tuple[int, float, float, float | None]] = {
    "P16384 N28 R2048": (73_728, 7.00, 4.20, None),
    "P8192 N32 R2048": (73_728, 4.44, 2.63, None),
    "P512 N16 R512": (8704, 1.88, 1.31, None),
    "P512 N16 R64-512": (4657, 2.65, 1.68, 0.80),
    "P128 N8 R2048": (16_512, 1.05, 1.00, None),
    "binary depth 6 L512": (32_256, 3.05, 1.99, None),
    "binary depth 8 L100": (25_500, 4.02, 2.46, 0.69),
    "4-ary depth 4 L256": (21_760, 3.01, 1.89, None),
    "tau2-like": (52_800, 8.41, 5.03, None),
}


@pytest.mark.parametrize("work", made_up(), ids=lambda work: work.name)
def test_made_up_workloads_have_the_notes_figures(work: Workload) -> None:
    tokens, token_ratio, pair_ratio, efficiency = NOTE[work.name]
    figures = work.figures()
    assert work.tokens == figures["tokens"] == tokens
    assert round(figures["token_ratio"], 2) == token_ratio
    assert round(figures["pair_ratio"], 2) == pair_ratio
    if efficiency is None:
        assert 0.92 <= figures["block_efficiency"] < 1
    else:
        assert round(figures["block_efficiency"], 2) == efficiency


def test_every_workload_of_the_note_is_there() -> None:
    assert [work.name for work in made_up()] == list(NOTE)


def test_shrunk_keeps_the_shape() -> None:
    work = made_up()[-1]
    small = work.shrunk(100)
    assert small.parents == work.parents
    assert small.lengths == tuple(length // 100 for length in work.lengths)
    assert star("", 5, [3, 0]).shrunk(100).lengths == (1, 1, 0)


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@given(prefix=st.integers(1, 60), suffixes=lengths, queries=st.integers(1, 20), keys=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_block_efficiency_by_the_dense_mask(
    prefix: int, suffixes: list[int], queries: int, keys: int
) -> None:
    work = star("", prefix, suffixes)
    seen = torch.zeros(work.tokens, work.tokens, dtype=torch.bool)
    for rollout in work.rollouts:
        for place, token in enumerate(rollout):
            seen[token, torch.from_numpy(rollout[: place + 1])] = True
    touched = sum(bool(part.any()) for rows in seen.split(queries) for part in rows.split(keys, dim=1))
    layout = TreeLayout.from_segments(work.parents, work.lengths)
    expected = int(seen.sum()) / (touched * queries * keys)
    assert block_efficiency(layout, queries, keys) == pytest.approx(expected)


# Few ids: prefixes, duplicates and parting places are common.
tokens = st.tuples(st.integers(0, 2), st.just(False) | st.just(True))
sequences = st.lists(st.lists(tokens, min_size=1, max_size=8), min_size=1, max_size=8)


@given(sequences)
@settings(max_examples=150, deadline=None)
def test_a_forest_of_sequences_holds_each_of_them_once(given_: list[list[tuple[int, bool]]]) -> None:
    work = from_sequences("", given_)
    layout = work.layout
    # Ids of the packed tokens are found again by walking the sorted sequences along the forest's rollouts.
    assert len(work.rollouts) == len(given_)
    assert sorted(map(len, work.rollouts)) == sorted(map(len, given_))
    assert layout.num_tokens == len({tuple(s[: n + 1]) for s in given_ for n in range(len(s))})
    packed: dict[int, tuple[int, bool]] = {}
    for rollout, sequence in zip(work.rollouts, sorted(map(tuple, given_)), strict=True):
        for position, token in zip(rollout.tolist(), sequence, strict=True):
            assert packed.setdefault(position, token) == token
    wrote = np.repeat(work.sampled, work.lengths)
    assert [bool(w) for w in wrote] == [packed[position][1] for position in range(work.tokens)]


def write(folder: Path, name: str, records: Any) -> None:
    folder.mkdir(exist_ok=True)
    lines = "\n".join(map(json.dumps, records)) if name.endswith("l") else json.dumps(records)
    (folder / name).write_text(lines)


def test_recorded_rollouts_share_what_their_source_shares(tmp_path: Path) -> None:
    def talk(task: int, words: str) -> dict[str, Any]:
        turns = [("system", "Be kind to all of them."), ("user", words), ("assistant", "Yes, at once.")]
        return {"task_id": task, "traj": [{"role": role, "content": text} for role, text in turns]}

    write(
        tmp_path / "tau_bench",
        "gpt-4o-airline_public.json",
        [talk(0, "A seat"), talk(1, "My bag"), talk(9, "x")],
    )
    first, second, third = "1 + 1 = 2\n", "1 + 3 = 4\n", "1 + 1 = 2\n2 + 3 = 5\n"
    steps = [{"x": "1 1 3", "new_ys": [first, second]}, {"x": "1 1 3", "new_ys": [third]}]
    write(tmp_path / "rollout_groups", "tot_game24_bfs_public.json", [{"steps": steps}])
    record = {"system": "Reason.", "query": "What is 1 + 1?", "code": ["It is 2.", "2", "It is 3, I think."]}
    write(tmp_path / "rollout_groups", "math_cot_8samples_public.jsonl", [record, record])

    airline, game, groups = recorded(tmp_path)
    assert [len(work.rollouts) for work in (airline, game, groups)] == [2, 2, 6]
    assert groups.one_level
    assert not airline.sampled[0]
    assert any(airline.sampled)
    assert airline.figures()["token_ratio"] > 1.3
    assert groups.parents == (-1, 0, 0, 0, -1, 4, 4, 4)
