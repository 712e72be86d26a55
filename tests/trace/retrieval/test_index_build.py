from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_rl.retrieval import index_build, seen_ids
from trace_rl.retrieval.disk_index import DiskIndex
from trace_rl.retrieval.index_build import build_index
from trace_rl.retrieval.index_folder import DiskIndexError
from trace_rl.retrieval.seen_ids import SeenHashes
from trace_rl.tasks.records import RecordError
from trace_rl.tasks.task import Passage

from .oracle import made_up_passages, write_corpus

# A builder that kills itself at the given write to disk: two before each commit, ids and mark.
KILLED = """
import os, signal, sys
from trace_rl.retrieval import index_build
flush, left = index_build._flush, int(sys.argv[3])
def flush_or_die(file):
    global left
    left -= 1
    if left == 0:
        file.write(b'[1')
    flush(file)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
index_build._flush = flush_or_die
print(index_build.build_index(sys.argv[1], sys.argv[2], commit_every=70))
"""


def run_killed(corpus: Path, out: Path, at_write: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, str(corpus), str(out), str(at_write)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def content(out: Path) -> list[list[tuple[str, float]]]:
    index = DiskIndex(out)
    queries = [f"w{i} w{i + 1} title{i % 30}" for i in range(40)]
    return [[(p.id, round(score, 3)) for p, score in index.scored_search(q, 1000)] for q in queries]


def test_a_killed_build_goes_on(tmp_path: Path) -> None:
    passages = made_up_passages(300, 0, 30)
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages)
    whole = tmp_path / "whole"
    build_index(corpus, whole)
    out = tmp_path / "killed"
    # In the first: before anything is durable. Then: one more commit each time, killed between ids and mark,
    # and between mark and commit.
    for at_write in (1, 2, 3, 4, 3, 4):
        result = run_killed(corpus, out, at_write)
        assert result.returncode == -signal.SIGKILL, result.stderr
        with pytest.raises(DiskIndexError, match="half built"):
            DiskIndex(out)
    starts: list[int] = []
    count = build_index(corpus, out, commit_every=1000, progress=lambda n, done, total: starts.append(n))
    assert count == 300
    assert starts[0] == 280  # 4 commits of 70 had been made
    assert content(out) == content(whole)
    assert not (out / "build").exists()


def test_finished_is_finished(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", made_up_passages(30, 0, 30))
    reports: list[tuple[int, int, int]] = []
    build_index(corpus, tmp_path / "out", commit_every=7, progress=lambda *report: reports.append(report))
    size = corpus.stat().st_size
    assert reports == [(0, 0, size), (30, size, size)]
    before = sorted((f.name, f.stat().st_mtime_ns) for f in (tmp_path / "out").rglob("*"))
    assert build_index(corpus, tmp_path / "out") == 30
    assert sorted((f.name, f.stat().st_mtime_ns) for f in (tmp_path / "out").rglob("*")) == before


def test_a_changed_corpus_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", made_up_passages(200, 0, 30))
    assert run_killed(corpus, tmp_path / "out", 3).returncode == -signal.SIGKILL
    old, stamp = corpus.read_bytes(), corpus.stat().st_mtime_ns
    changed = old.replace(b"title5", b"title6", 1)
    for text, time_ns in ((old, stamp + 1), (old + b"\n", stamp), (changed, stamp)):
        corpus.write_bytes(text)
        os.utime(corpus, ns=(time_ns, time_ns))
        with pytest.raises(DiskIndexError, match="another corpus, an earlier state"):
            build_index(corpus, tmp_path / "out")
    corpus.write_bytes(old)
    os.utime(corpus, ns=(stamp, stamp))
    with pytest.raises(DiskIndexError, match="title weight"):
        build_index(corpus, tmp_path / "out", title_weight=3)
    assert build_index(corpus, tmp_path / "out") == 200


def test_a_corpus_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", made_up_passages(20, 0, 30))

    def touch(passages: int, done: int, total: int) -> None:
        os.utime(corpus, ns=(1, 1))

    with pytest.raises(DiskIndexError, match="changed while it was read"):
        build_index(corpus, tmp_path / "out", progress=touch)
    with pytest.raises(DiskIndexError, match="half built"):
        DiskIndex(tmp_path / "out")


def test_two_builders_at_once(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", made_up_passages(20, 0, 30))
    refused: list[str] = []

    def second(passages: int, done: int, total: int) -> None:
        with pytest.raises(DiskIndexError, match="another process is building") as caught:
            build_index(corpus, tmp_path / "out")
        refused.append(str(caught.value))

    assert build_index(corpus, tmp_path / "out", progress=second) == 20
    assert len(refused) == 2


def test_refusals(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", made_up_passages(20, 0, 30))
    with pytest.raises(FileNotFoundError, match="no record file"):
        build_index(tmp_path / "none.jsonl", tmp_path / "out")
    with pytest.raises(DiskIndexError, match="holds other files"):
        build_index(corpus, tmp_path)
    with pytest.raises(DiskIndexError, match="holds other files"):
        build_index(corpus, corpus)
    for numbers in ({"title_weight": 0}, {"commit_every": 0}):
        with pytest.raises(ValueError, match="must be >= 1"):
            build_index(corpus, tmp_path / "out", **numbers)
    listed = tmp_path / "list.json"
    listed.write_text('[\n{"title": "a", "text": "b"}]')
    with pytest.raises(DiskIndexError, match=r"JSON list.*one record a line"):
        build_index(listed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line", ['{"id": "p3", "contents": "T\\nx"}', '{"id": "x"}', "{", '"text"', b"\xff", ""]
)
def test_malformed_records(line: str | bytes, tmp_path: Path) -> None:
    passages = made_up_passages(20, 0, 30)
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages)
    raw = line if isinstance(line, bytes) else line.encode()
    corpus.write_bytes(corpus.read_bytes() + b"\n" + raw + b"\n" + b'{"id": "end", "contents": "T\\nx"}')
    if not raw:
        assert build_index(corpus, tmp_path / "out", commit_every=5) == 21
        return
    for _ in range(2):  # the second time from a commit on
        with pytest.raises(RecordError, match="record 21") as caught:
            build_index(corpus, tmp_path / "out", commit_every=5)
    if b"p3" in raw:
        assert "field 'id': \"p3\" occurs twice" in str(caught.value)


def test_an_empty_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n\n")
    with pytest.raises(RecordError, match="no records"):
        build_index(corpus, tmp_path / "out")


def test_ids_with_equal_hashes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_build, "hash_id", lambda passage_id: 5)
    passages = [Passage(f"p{i}", "t", "x") for i in range(5)]
    corpus = write_corpus(tmp_path / "corpus.jsonl", passages)
    assert build_index(corpus, tmp_path / "out") == 5
    corpus = write_corpus(tmp_path / "twice.jsonl", [*passages, Passage("p2", "t", "x")])
    with pytest.raises(RecordError, match=r'record 5.*"p2" occurs twice'):
        build_index(corpus, tmp_path / "out2")


@given(st.lists(st.integers(0, 40) | st.integers(2**64 - 3, 2**64 - 1), max_size=60), st.integers(1, 9))
def test_seen_hashes_are_a_set(values: list[int], fold_at: int) -> None:
    before, after = values[: len(values) // 3], values[len(values) // 3 :]
    seen, reference = SeenHashes(np.array(before, np.uint64)), set(before)
    patch = pytest.MonkeyPatch()
    patch.setattr(seen_ids, "_FOLD_AT", fold_at)
    for value in after:
        assert seen.add(value) == (value in reference)
        reference.add(value)
    patch.undo()


def test_line_offsets_survive_odd_bytes(tmp_path: Path) -> None:
    """Byte-order mark, CRLF, blank lines, separators of other alphabets: commits lie at the right bytes."""
    lines = [
        json.dumps({"id": f"ü{i}", "contents": f"T{i}\nline\u2028sep w{i}"}, ensure_ascii=False)
        for i in range(9)
    ]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"\xef\xbb\xbf" + "\r\n\n \n".join(lines).encode())
    bad = tmp_path / "bad"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_build, "hash_id", lambda i: 1 / 0 if i == "ü7" else ord(i[1]))
        with pytest.raises(ZeroDivisionError):
            build_index(corpus, bad, commit_every=2)
    starts: list[int] = []
    assert build_index(corpus, bad, progress=lambda n, done, total: starts.append(n)) == 9
    assert starts[0] == 6
    assert [p.id for i in range(9) for p in DiskIndex(bad).search(f"w{i}", 3)] == [f"ü{i}" for i in range(9)]
