"""The attention benchmark: exact references, and rows that say everything."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.attention_methods import Heads, Method, methods
from bench.attention_reference import path_attention
from bench.machine import describe
from bench.plot import write_plot
from bench.rows import Row, table, write_csv, write_json
from bench.tree_attention import measure
from bench.workloads import Workload, star, turns

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 32)
TREE = turns("tree", 20, groups=2, count=2, observed=5, dropped=9, kept=7)
STAR = star("star", 20, [7, 1, 12])


def test_path_attention_is_dense_attention_over_the_rollouts() -> None:
    torch.manual_seed(0)
    size = TREE.tokens
    q, k, v = (torch.randn(size, n, 8, dtype=torch.float32, requires_grad=True) for n in (2, 1, 1))
    grad, grad_lse = torch.randn(size, 2, 8), torch.randn(size, 2)
    seen = torch.zeros(size, size, dtype=torch.bool)
    for rollout in TREE.rollouts:
        for place, token in enumerate(rollout):
            seen[token, torch.from_numpy(rollout[: place + 1])] = True
    scores = (torch.einsum("qgd,kd->gqk", q, k[:, 0]) * 8**-0.5).masked_fill(~seen, float("-inf"))
    out = torch.einsum("gqk,kd->qgd", scores.softmax(-1), v[:, 0])
    lse = scores.logsumexp(-1).T
    gradients = torch.autograd.grad((out, lse), (q, k, v), (grad, grad_lse))
    found = path_attention(TREE, q.detach(), k.detach(), v.detach(), grad, grad_lse)
    for name, value, expected in zip(
        ("out", "dq", "dk", "dv", "lse"), found, (out, *gradients, lse), strict=True
    ):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("work", [TREE, STAR], ids=lambda work: work.name)
def test_every_method_is_exact_or_says_why_it_did_not_run(work: Workload) -> None:
    rows = measure(work, HEADS, torch.float32, CPU, runs=1)
    ran = {row.method for row in rows if row.skipped is None}
    skipped = {row.method: row.skipped for row in rows if row.skipped is not None}
    assert ran >= {"segments", "sdpa one rollout at a time", "sdpa padded batches", "gathered paths"}
    assert ran | set(skipped) == set(methods(work, HEADS, torch.float32, CPU))
    assert not ran & set(skipped)
    assert all("failed" not in reason for reason in skipped.values()), skipped
    for row in (row for row in rows if row.skipped is None):
        assert row.error is not None
        assert row.error < 1e-5, row
        assert row.median_ms is not None
        factor = {"forward": 1.0, "backward": 2.5, "pass": 3.5}[row.phase]
        flops = factor * 4 * work.pairs * HEADS.query * HEADS.size
        assert row.figures["useful_tflops"] == pytest.approx(flops / row.median_ms / 1e9)
        assert row.figures["token_ratio"] == work.flat_tokens / work.tokens
    for phase in ("forward", "backward", "pass"):
        best = [row for row in rows if row.phase == phase and row.skipped is None and row.peer is None]
        assert len(best) == 1
        assert best[0].method != "segments"
        assert {
            row.peer for row in rows if row.phase == phase and row is not best[0] and not row.skipped
        } == {best[0].method}


def test_what_does_not_fit_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.tree_attention.available_bytes", lambda device: 1000)
    rows = measure(STAR, HEADS, torch.float32, CPU, runs=1)
    assert all(row.skipped for row in rows)
    assert any("GB are free" in (row.skipped or "") for row in rows if row.method == "segments")


def test_a_method_that_is_wrong_shows_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = methods(STAR, HEADS, torch.float32, CPU)["segments"]
    assert isinstance(right, Method)

    def doubled(run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v: 1.01 * run(q, k, v)

    wrong = right._replace(units=lambda: [unit._replace(run=doubled(unit.run)) for unit in right.units()])
    monkeypatch.setattr("bench.tree_attention.methods", lambda *_: {"wrong": wrong})
    rows = measure(STAR, HEADS, torch.float32, CPU, runs=1)
    assert [row.error for row in rows] == [pytest.approx(0.01, rel=1e-3)] * 3


def test_rows_survive_json_and_csv(tmp_path: Path) -> None:
    rows = [
        Row("tree_attention", "a, b", "x", "pass", 1.25, 3, "y", 2.0, None, 1e-7, {"useful_tflops": 3.5}),
        Row("tree_attention", "a, b", "z", "pass", None, 0, skipped='needs a "GPU"'),
    ]
    machine = describe("cpu")
    write_json(rows, machine, tmp_path / "rows.json")
    write_csv(rows, machine, tmp_path / "rows.csv")
    for line, row in zip(json.loads((tmp_path / "rows.json").read_text()), rows, strict=True):
        assert line.pop("machine")["torch"] == torch.__version__
        assert Row(**line) == row
    with (tmp_path / "rows.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["workload"], first["median_ms"], first["figure useful_tflops"]) == ("a, b", "1.25", "3.5")
    assert (second["median_ms"], second["skipped"]) == ("", 'needs a "GPU"')
    assert first["machine triton"] == machine.triton
    assert 'z: skipped, needs a "GPU"' in table(rows, machine)


def test_plot_draws_a_bar_for_every_measured_method(tmp_path: Path) -> None:
    rows = [
        Row("s", "w & co", name, phase, 1.0, 1, figures={"useful_tflops": value})
        for name, value in (("one", 2.0), ("two", 4.0))
        for phase in ("forward", "pass")
    ]
    write_plot([*rows, Row("s", "w & co", "three", "pass", None, 0, skipped="no")], tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    widths = [float(part.split('"')[0]) for part in drawn.split('fill="#')[0].split('width="')[3:]]
    assert drawn.count('fill="#') == 2
    assert "w &amp; co" in drawn
    assert widths[0] > 0
    with pytest.raises(ValueError, match=r"\.svg"):
        write_plot(rows, tmp_path / "bars.png")
    with pytest.raises(ValueError, match="nothing was measured"):
        write_plot([], tmp_path / "bars.svg")
