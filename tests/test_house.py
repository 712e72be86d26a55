"""Rules about the repository itself: names, import arrows that import-linter cannot see, file sizes."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"trace_kernels": "trace_kernels", "kernels": "trace_kernels.device", "trace": "trace_rl"}
SOURCES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]

MAX_LINES = 300
LONG_FILES = {"LICENSE"}
DATA = ("tests/data/",)


def imports(file: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Absolute names of all modules a file imports, lazily or not, relative ones resolved."""
    folder, *below = file.relative_to(ROOT).with_suffix("").parts
    package = [*FOLDERS.get(folder, folder).split("."), *below][:-1]
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, node
            yield from ((f"{module}.{alias.name}", node) for alias in node.names)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(folder: str, forbidden: tuple[str, ...], but_for: str = "") -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{node.lineno} imports {name}"
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not (but_for and file.is_relative_to(ROOT / but_for))
        for name, node in imports(file)
        if any(inside(name, package) for package in forbidden)
    ]


def run(code: str, *options: str, cwd: Path = ROOT) -> str:
    result = subprocess.run([sys.executable, *options, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_relative_imports_are_resolved() -> None:
    names = {name for name, _ in imports(ROOT / "trace/config/load.py")}
    assert "trace_rl.config.schema" in names
    assert "trace_rl.config.schema.Config" in names


def test_device_programs_import_triton_only() -> None:
    allowed = {"triton", "__future__", "typing", "dataclasses", "functools", "math", "collections"}
    wrong = [
        f"{file.name}:{node.lineno} imports {name}"
        for file in sorted((ROOT / "kernels").rglob("*.py"))
        for name, node in imports(file)
        if name.split(".")[0] not in allowed and not inside(name, "trace_kernels.device")
    ]
    assert not wrong


def test_the_trainer_never_reaches_into_device_programs() -> None:
    assert not violations("trace", ("trace_kernels.device", "kernels"))


def test_trace_kernels_imports_no_trainer() -> None:
    assert not violations("trace_kernels", ("trace_rl", "trace", "deepspeed", "vllm"))


def test_other_libraries_are_known_to_integrations_only() -> None:
    others = ("transformers", "trl", "trace_kernels.integrations")
    assert not violations("trace_kernels", others, but_for="trace_kernels/integrations")


@pytest.mark.parametrize(
    ("part", "forbidden"),
    [
        ("config", "tasks environments engines rollout allocation policy"),
        ("tasks", "config environments engines rollout allocation policy"),
        ("environments", "config engines rollout allocation policy sources evaluation"),
        ("retrieval", "config environments engines rollout allocation policy sandbox sources evaluation"),
        (
            "sandbox",
            "config tasks environments retrieval engines rollout allocation policy sources evaluation",
        ),
        ("engines", "tasks environments rollout allocation policy"),
        ("rollout", "config allocation policy"),
        ("allocation", "config tasks environments engines rollout policy"),
        ("policy", "environments allocation rollout.collector rollout.transcript"),
    ],
)
def test_data_flows_one_way(part: str, forbidden: str) -> None:
    side = "ledger metrics checkpoint report loop runner train cli"
    names = tuple(f"trace_rl.{name}" for name in f"{forbidden} {side}".split())
    assert not violations(f"trace/{part}", names)


def test_nobody_edits_the_import_path() -> None:
    pattern = re.compile(r"sys\.path\s*(\.(insert|append|extend)|\[|\+?=)")
    files = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "bench").rglob("*.py"))]
    others = [file for file in files if file != Path(__file__)]
    assert [str(file.relative_to(ROOT)) for file in others if pattern.search(file.read_text())] == []


def test_modules_beside_train_hide_no_library() -> None:
    """`deepspeed trace/train.py` puts trace/ first on the path, so a bare import would find these first."""
    beside = {file.stem for file in (ROOT / "trace").iterdir() if file.suffix == ".py" or file.is_dir()}
    installed = set(importlib.metadata.packages_distributions()) | {
        "kernels",
        "trl",
        "datasets",
        "flash_attn",
    }
    assert not beside & set(sys.stdlib_module_names)
    assert not beside & installed


def test_our_kernels_folder_is_not_taken_for_the_hub_library() -> None:
    code = (
        "import sys; sys.path[0] == '' or sys.exit('the root is not on the path, the test tests nothing');"
        "from transformers.utils import is_kernels_available; print(is_kernels_available())"
    )
    assert run(code).splitlines()[-1] == "False"


def test_the_standard_trace_module_is_importable() -> None:
    where = run("import trace; print(trace.__file__); trace.Trace", "-P")
    assert not Path(where).is_relative_to(ROOT / "trace")


def test_the_installed_names_are_the_folders_here() -> None:
    names = tuple(FOLDERS.values())
    code = f"import importlib; [print(importlib.import_module(n).__path__[0]) for n in {names!r}]"
    assert run(code, "-P").splitlines() == [str(ROOT / folder) for folder in FOLDERS]


def test_trace_kernels_is_light() -> None:
    code = (
        "import sys, trace_kernels, trace_kernels.layout, trace_kernels.tree_attention;"
        "print([m for m in ('transformers', 'deepspeed', 'vllm', 'trace_rl') if m in sys.modules])"
    )
    assert run(code, "-P") == "[]"


def test_files_are_short_enough_to_read() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    long = {}
    for name in listed:
        file = ROOT / name
        if file.is_file() and name not in LONG_FILES and not name.startswith(DATA):
            lines = file.read_bytes().count(b"\n")
            if lines > MAX_LINES:
                long[name] = lines
    assert not long, f"split these, or give a reason in LONG_FILES: {long}"
