"""The normal run of the suite runs the programs in the interpreter, all of them, whatever the machine has."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

HERE = Path(__file__).parent


def test_the_programs_pass_in_the_interpreter(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    files = {file.stem for file in HERE.glob("test_*.py")}
    # -P: the root, with its folders trace/ and kernels/, stays off sys.path.
    options = [f"--junitxml={report}", "-p", "no:cacheprovider"]
    command = [sys.executable, "-P", "-m", "pytest", str(HERE), *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    result = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    cases = ET.parse(report).getroot().findall(".//testcase")
    assert not [case.get("name") for case in cases if case.find("skipped") is not None]
    assert {case.get("classname", "").split(".")[-1] for case in cases} == files - {Path(__file__).stem}
