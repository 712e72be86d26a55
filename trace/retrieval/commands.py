"""`trace-rl index` and `trace-rl serve-retriever`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parsers(commands: Any) -> None:
    """Adds both commands to the subparsers of an ``argparse`` parser; ``run`` gives the exit code."""
    index = commands.add_parser("index", help="build a search index on disk from a JSONL corpus")
    index.add_argument("--corpus", type=Path, required=True, help='JSON lines of {"id", "contents"}')
    index.add_argument("--out", type=Path, required=True, help="folder; an interrupted build goes on there")
    index.set_defaults(run=_index)

    serve = commands.add_parser("serve-retriever", help="answer POST /retrieve as Search-R1's server does")
    what = serve.add_mutually_exclusive_group(required=True)
    what.add_argument("--index", type=Path, help="folder made by `trace-rl index`")
    what.add_argument("--corpus", type=Path, help="corpus file to index in memory")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=_port, default=8000, help="default 8000; 0: any free one")
    serve.add_argument("--top-k", type=int, default=3, help="passages where a request names none (default 3)")
    serve.set_defaults(run=_serve)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to 65535")
    return int(text)


def _index(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from .index_build import build_index

    columns = ("{task.fields[passages]:,} passages", BarColumn(), MofNCompleteColumn(), "MB")
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=None, passages=0)
            total = build_index(
                arguments.corpus,
                arguments.out,
                progress=lambda passages, done, size: bar.update(
                    task, completed=done // 10**6, total=size // 10**6, passages=passages
                ),
            )
    except (OSError, ValueError, ImportError) as error:
        print(f"trace-rl index: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("trace-rl index: interrupted; the same command goes on from the last commit", file=sys.stderr)
        return 130
    print(f"{total} passages indexed in {arguments.out}")
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from .server import serve

        serve(_open(arguments), host=arguments.host, port=arguments.port, top_k=arguments.top_k)
    except (OSError, ValueError, ImportError) as error:
        print(f"trace-rl serve-retriever: {error}", file=sys.stderr)
        return 1
    return 0


def _open(arguments: argparse.Namespace) -> Any:
    if arguments.index:
        from .disk_index import DiskIndex

        return DiskIndex(arguments.index)
    from .bm25 import Bm25Index
    from .corpus import load_corpus_jsonl

    return Bm25Index(load_corpus_jsonl(arguments.corpus))
