"""`python -m bench [SUBJECT] [--device cpu|cuda] [--quick] [--json FILE]`; alone: all subjects, quick."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .arguments import positive

SUBJECTS = ("layout", "packed_pass")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measures subjects side by side with their peers. Without a subject: all, --quick.",
    )
    parser.add_argument("subject", nargs="?", choices=SUBJECTS, metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--quick", action="store_true", help="small inputs, two runs: does it work?")
    parser.add_argument(
        "--runs", type=positive, help="timed runs of every method (default: 5, with --quick 2)"
    )
    parser.add_argument("--threads", type=positive, help="of torch on the CPU (default: all cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    subjects: dict[str, ModuleType] = {
        name: importlib.import_module(f".{name}", __package__) for name in SUBJECTS
    }
    for name, subject in subjects.items():
        subject.add_arguments(parser.add_argument_group(name))
    options = parser.parse_args(arguments)
    options.quick |= options.subject is None
    if options.runs is None:
        options.runs = 2 if options.quick else 5

    from .machine import describe, use_threads
    from .rows import table, write_json

    use_threads(options.threads)
    options.device = options.device or describe("cpu").best_device
    machine = describe(options.device)
    rows = []
    for name in [options.subject] if options.subject else SUBJECTS:
        try:
            rows += subjects[name].run(options)
        except (OSError, ValueError) as error:
            print(f"bench {name}: {error}", file=sys.stderr)
            return 1
    print(table(rows, machine))
    if options.json:
        write_json(rows, machine, options.json)
    return 0


if __name__ == "__main__":
    # `python -m` puts the root first on the path, where trace/ hides the standard module and kernels/ looks
    # like the Hub library. Nothing here needs the entry: bench is found already, the packages are installed.
    root = Path(__file__).resolve().parents[1]
    for entry in [entry for entry in sys.path if Path(entry).resolve() == root]:
        sys.path.remove(entry)
    sys.exit(main())
