"""Every attack ends its own call with an observation that says so, and does nothing else."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trace_rl.sandbox import CellResult, PythonTool

from .attacks import ATTACKS
from .processes import zygotes


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trainer") / "weights"
    file.write_text("the secret")
    file.chmod(0o640)
    return file


@pytest.fixture(autouse=True)
def untouched(secret: Path, calm: None) -> Iterator[None]:
    before = secret.stat()
    yield
    assert list(secret.parent.iterdir()) == [secret]
    after = secret.stat()
    assert (secret.read_text(), after.st_mode, after.st_mtime_ns) == (
        "the secret",
        before.st_mode,
        before.st_mtime_ns,
    )


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_its_call_and_nothing_else(tool: PythonTool, secret: Path, name: str) -> None:
    code, ended, words = ATTACKS[name]
    code = code.replace("SECRET", str(secret)).replace("PARENT", str(os.getpid()))
    results: list[CellResult] = []
    attack = threading.Thread(target=lambda: results.append(tool.run(["mine = 6"], code)))
    attack.start()
    beside = tool.run(["mine = 7"], "mine * 6")
    attack.join()
    assert beside == CellResult("42\n", "ok", keep=True)
    assert (results[0].ended, words in results[0].output) == (ended, True), results[0]
    assert len(results[0].output) < 3200
    assert "the secret" not in results[0].output
    unkept = {"NUL", "syntax", "surrogate source", "10 MB of source", "deep source"}
    assert results[0].keep == (ended in ("ok", "exception") and name not in unkept)


def test_nothing_of_the_trainers_environment_is_seen(
    tool: PythonTool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "abc")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere")  # Python itself may need it
    before = zygotes()
    with PythonTool() as fresh:
        assert fresh.run([], "import os\nsorted(os.environ)").output == "['HOME', 'LC_ALL', 'TMPDIR', 'TZ']\n"
        (zygote,) = set(zygotes()) - set(before)
        variables = Path(f"/proc/{zygote}/environ").read_text().split("\0")
        assert "LD_LIBRARY_PATH=/nowhere" in variables
        assert not any(variable.startswith("TOKEN") for variable in variables)
    assert tool.run([], "import sys\nsys.argv, sys.executable").output == "([''], '')\n"


def test_no_part_of_the_trainer_can_be_imported(tool: PythonTool) -> None:
    for name in ("trace_rl", "trace_kernels", "torch", "pytest"):
        assert tool.run([], f"import {name}").output.endswith(
            f"ModuleNotFoundError: No module named '{name}'\n"
        )


def test_no_module_of_an_installation_and_no_argument_is_left(tool: PythonTool) -> None:
    code = """import sys
        named = [name for name in sys.modules if '__editable__' in name or name.startswith('trace_')]
        hooks = [hook.__module__ for hook in sys.path_hooks]
        named, sys.orig_argv, 'editable' in str(hooks)"""
    assert tool.run([], inspect.cleandoc(code)).output == "([], [''], False)\n"


def test_a_cell_cannot_keep_the_limit_of_processor_time_from_being_lowered(tool: PythonTool) -> None:
    replace = """import builtins, resource
        real = resource.getrlimit
        resource.setrlimit = resource.getrusage = resource.getrlimit = lambda *_: (99, 99)
        builtins.min, builtins.int = max, None"""
    untouched = tool.run(["import resource\nreal = resource.getrlimit"], "real(0)").output
    assert tool.run([inspect.cleandoc(replace)], "real(0)").output == untouched  # 0 is RLIMIT_CPU


def test_only_its_own_files_are_open(tool: PythonTool) -> None:
    code = (
        "import os, stat\nfor fd in range(64):\n    try: print(fd, oct(stat.S_IFMT(os.fstat(fd).st_mode)))\n"
        "    except OSError: pass"
    )
    pipe, device = oct(0o010000), oct(0o020000)
    assert tool.run([], code).output == f"0 {device}\n" + "".join(f"{fd} {pipe}\n" for fd in range(1, 5))


def test_no_capability_is_left(tool: PythonTool) -> None:
    code = (
        "import ctypes, struct\nheader = struct.pack('=Ii', 0x20080522, 0)\n"
        "data = ctypes.create_string_buffer(24)\nctypes.CDLL(None).capget(header, data), data.raw"
    )
    assert tool.run([], code).output.startswith("(-1")  # not even asking is allowed
