"""Train a policy with TRACE: `deepspeed trace/train.py --config configs/quickstart.yaml`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from trace_rl.config.load import ConfigError, load_config


def main() -> int:
    """Exit code 0 when the run is whole, 2 when the configuration cannot be used, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one config value"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the run's latest checkpoint, if any"
    )
    parser.add_argument("--dry-run", action="store_true", help="validate, print the plan, and stop")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher passes it
    arguments = parser.parse_args()
    # DeepSpeed compiles a communication op with the `ninja` that stands beside this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # DeepSpeed calls collectives by names that torch renames: nothing a user could mend.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        config = load_config(arguments.config, arguments.set)
        if arguments.dry_run:
            from trace_rl.plan import plan, render

            if is_main:
                print(render(plan(config)))
            return 0
        from trace_rl.runner import USER_ERRORS, run
    except ConfigError as error:
        if is_main:
            print(f"config error:\n{error}", file=sys.stderr)
        return 2
    try:
        run(config, resume=arguments.resume)
    except ConfigError as error:
        print(f"config error:\n{error}", file=sys.stderr)
        return 2
    except USER_ERRORS as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":  # engines are spawned: importing this file must start nothing
    code = main()
    if "torch" in sys.modules:
        from trace_rl.ranks import end_process

        end_process(code)
    sys.exit(code)
