"""`trace-rl index` and `trace-rl serve-retriever`, from arguments to exit code."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from trace_rl.retrieval.commands import add_parsers

from .oracle import made_up_passages, write_corpus

COMMANDS = """
import argparse, sys
from trace_rl.retrieval.commands import add_parsers
parser = argparse.ArgumentParser()
add_parsers(parser.add_subparsers(required=True))
arguments = parser.parse_args()
sys.exit(arguments.run(arguments))
"""


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(required=True))
    parsed = parser.parse_args([str(argument) for argument in arguments])
    code: int = parsed.run(parsed)
    return code


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl", made_up_passages(50, seed=0, longest=30))


def test_index(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run("index", "--corpus", corpus, "--out", tmp_path / "index") == 0
        assert capsys.readouterr().out == f"50 passages indexed in {tmp_path / 'index'}\n"

    assert run("index", "--corpus", corpus, "--out", tmp_path) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"trace-rl index: {tmp_path} holds other files: give a new or empty folder"

    assert run("index", "--corpus", tmp_path / "none", "--out", tmp_path / "other") == 1
    assert "trace-rl index: no record file at" in capsys.readouterr().err


def test_nothing_to_serve(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve-retriever", "--index", tmp_path) == 1
    assert "trace-rl serve-retriever: no index in" in capsys.readouterr().err
    assert run("serve-retriever", "--corpus", corpus, "--top-k", "0") == 1
    assert "top_k must be from 1" in capsys.readouterr().err
    for wrong in (["--port", "65536"], ["--port", "x"], ["--index", "other"]):
        with pytest.raises(SystemExit, match="2"):
            run("serve-retriever", "--corpus", corpus, *wrong)


@pytest.mark.parametrize(("source", "stop"), [("--index", signal.SIGTERM), ("--corpus", signal.SIGINT)])
def test_serving_until_a_signal(source: str, stop: signal.Signals, corpus: Path, tmp_path: Path) -> None:
    if source == "--index":
        assert run("index", "--corpus", corpus, "--out", tmp_path / "index") == 0
    place = tmp_path / "index" if source == "--index" else corpus
    options = ["serve-retriever", source, str(place), "--port", "0", "--top-k", "1"]
    command = [sys.executable, "-c", COMMANDS, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            log = iter(process.stderr.readline, "")
            address = next(m[0] for line in log if (m := re.search(r"http://127.0.0.1:\d+", line)))
            asked = {"queries": ["w1 w2 w3"]}
            answer = httpx.post(f"{address}/retrieve", json=asked, timeout=30, trust_env=False)
            assert len(answer.json()["result"][0]) == 1
            process.send_signal(stop)
            assert process.wait(60) == 0, process.stderr.read()
        finally:
            process.kill()
