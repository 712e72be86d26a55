"""What docs/environments.md shows is what the files hold, and runs."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from trace_rl.environment_check.command import add_parser

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/environments.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_code_is_the_examples_or_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    example = (ROOT / "examples/refund_desk.py").read_text()
    *excerpts, test = blocks("python")
    assert len(excerpts) == 4
    assert [text for text in excerpts if text not in example] == []
    monkeypatch.chdir(ROOT)
    exec(compile(test, "docs/environments.md", "exec"), {"__name__": "page"})


def test_the_section_is_the_configs() -> None:
    [section] = blocks("yaml")
    assert section in (ROOT / "configs/custom_example_cpu.yaml").read_text()


def test_the_number_of_lines_is_the_examples() -> None:
    assert f"{(ROOT / 'examples/refund_desk.py').read_text().count(chr(10))} lines" in PAGE


def test_commands_name_files_that_exist_and_options_that_are_known() -> None:
    commands = [line.split("#")[0].strip() for line in re.findall(r"^    (\S.*)$", PAGE, re.MULTILINE)]
    files = [word for line in commands for word in line.split() if re.search(r"\.(yaml|json|py)$", word)]
    assert len(files) >= 6
    assert [file for file in files if not (ROOT / file).is_file()] == []
    [check] = [line for line in commands if line.startswith("trace-rl check-environment")]
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    assert parser.parse_args(shlex.split(check)[1:]).actions == Path("examples/refund_desk_actions.json")
