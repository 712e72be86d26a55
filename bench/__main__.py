"""`python -m bench [SUBJECT] [--device cpu|cuda] [--quick] [--json FILE]`; alone: all subjects, quick."""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from .arguments import positive

SUBJECTS = (
    "edge_logprobs",
    "layout",
    "packed_pass",
    "retrieval",
    "score_anchors",
    "tree_attention",
    "tree_reductions",
)


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
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the same as a table")
    forests = parser.add_argument_group("forests (packed_pass, tree_attention)")
    forests.add_argument(
        "--workloads", nargs="*", metavar="NAME", help="those whose name holds one of these; none given: all"
    )
    forests.add_argument("--shrink", type=positive, default=1, help="divide all segments' lengths by this")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="public records to add: rollouts for forests (DIR/tau_bench, DIR/rollout_groups), questions and "
        "passages for retrieval (DIR/hotpotqa, DIR/musique, ...)",
    )
    # Only what is asked for is imported: a machine for kernels need not have the trainer's packages.
    arguments = sys.argv[1:] if arguments is None else arguments
    asked = [name for name in arguments if name in SUBJECTS][:1] or SUBJECTS
    subjects: dict[str, ModuleType] = {
        name: importlib.import_module(f".{name}", __package__) for name in asked
    }
    for name, subject in subjects.items():
        subject.add_arguments(parser.add_argument_group(name))
    options = parser.parse_args(arguments)
    options.quick |= options.subject is None
    if options.runs is None:
        options.runs = 2 if options.quick else 5

    from .machine import describe, use_threads
    from .rows import table, write_csv, write_json

    gc.freeze()  # what was imported is no garbage: collections before a measurement need not look at it
    use_threads(options.threads)
    options.device = options.device or describe("cpu").best_device
    machine = describe(options.device)
    rows = []
    for name in asked:
        try:
            rows += subjects[name].run(options)
        except (OSError, ValueError) as error:
            print(f"bench {name}: {error}", file=sys.stderr)
            return 1
    gc.unfreeze()
    print(table(rows, machine))
    if options.json:
        write_json(rows, machine, options.json)
    if options.csv:
        write_csv(rows, machine, options.csv)
    return 0


if __name__ == "__main__":
    # `python -m` puts the root first on the path, where trace/ hides the standard module and kernels/ looks
    # like the Hub library. Nothing here needs the entry: bench is found already, the packages are installed.
    root = Path(__file__).resolve().parents[1]
    for entry in [entry for entry in sys.path if Path(entry).resolve() == root]:
        sys.path.remove(entry)
    sys.exit(main())
