"""What a run shows and writes: progress, one line a step, metrics.jsonl, trees.jsonl, TensorBoard, summary.json."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch.utils.tensorboard import SummaryWriter

from .rollout.tree import RolloutTree

QUIET_S = 15.0  # without a terminal a long phase says how far it is this often


class Reporter:
    """Rank 0's eyes and hands. A `phases.Watcher`: on a terminal it draws each phase's progress."""

    def __init__(self, run_dir: Path, steps: int, resumed_at: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir, self.steps = run_dir, steps
        self.console = Console(soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.fields[where]}"),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._where = "start"
        self._phase, self._done, self._said = "", 0, 0.0
        self._total: int | None = None
        self._recent: list[float] = []  # seconds of the last steps
        _keep_steps(run_dir / "metrics.jsonl", resumed_at)
        _keep_lines(run_dir / "trees.jsonl", _tree_lines(run_dir))
        self._metrics = (run_dir / "metrics.jsonl").open("a", buffering=1)
        self._trees = (run_dir / "trees.jsonl").open("a")
        # A run that begins anew hides all that a failed start wrote there, its evaluation at step 0 too.
        hidden_from = resumed_at + 1 if resumed_at else 0
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=hidden_from)
        self._progress.start()

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()
        self._metrics.close()
        self._trees.close()
        self._board.close()

    def say(self, text: str) -> None:
        """One line for the reader."""
        self.console.print(text, highlight=False, markup=False)

    def start(self, name: str, total: int | None) -> None:
        self._phase, self._total, self._done, self._said = name, total, 0, time.perf_counter()
        self._bar = self._progress.add_task(name, total=total, where=self._where)

    def advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._progress.advance(self._bar)
        if not self.console.is_terminal and time.perf_counter() - self._said > QUIET_S:
            self._said = time.perf_counter()
            self.say(f"{self._phase}: {self._done}/{self._total or '?'}")

    def stop(self) -> None:
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None

    def step(self, step: int, trees: Sequence[RolloutTree], metrics: dict[str, float]) -> None:
        """Write one step; what is on disk afterwards survives anything."""
        for tree in trees:
            self._trees.write(tree.to_json() + "\n")
        self._trees.flush()
        row = {"step": step, "trees_end": self._trees.tell(), **metrics}
        self._metrics.write(json.dumps(row) + "\n")
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        took = sum(value for name, value in metrics.items() if name.startswith("phase/"))
        self._recent = [*self._recent[-9:], took]
        left = sum(self._recent) / len(self._recent) * (self.steps - step)
        self._where = f"step {min(step + 1, self.steps)}/{self.steps}, {_clock(left)} left"
        self.say(
            f"step {step:>4}/{self.steps}  reward {metrics['reward']:.3f}  "
            f"effective {metrics['effective_ratio']:.2f}  "
            f"leaves {metrics['ledger/leaves']:.0f}  tokens {metrics['ledger/generated_tokens']:.0f}  "
            f"cached {metrics['ledger/cached_tokens'] / max(1.0, metrics['ledger/prompt_tokens']):.0%}  "
            f"brier {metrics['predictor/brier']:.3f}  entropy {metrics['entropy']:.2f}  "
            f"logp diff {metrics['sampling/sampling_logp_difference/max']:.1e}  "
            f"{took:.1f} s  {_clock(left)} left"
        )
        errors = [node.error for tree in trees for node in tree.nodes if node.error]
        if errors:
            share = len(errors) / sum(len(tree.leaves()) for tree in trees)
            self.say(
                f"warning: {len(errors)} rollouts ({share:.1%}) were ended by their tool and teach nothing, the "
                f"first by: {errors[0]}"
            )

    def evaluated(self, name: str, step: int, figures: dict[str, float]) -> None:
        """Record an evaluation."""
        rest = {"answer_rate", "turns", "questions", "tool_errors"}
        shown = ", ".join(f"{key.replace('_', ' ')} {v:.3f}" for key, v in figures.items() if key not in rest)
        self.say(
            f"evaluation {name}: {shown}, answered {figures['answer_rate']:.2f} of "
            f"{figures['questions']:.0f} held-out questions"
        )
        if figures.get("tool_errors"):
            self.say(
                f"warning: {figures['tool_errors']:.0f} of these rollouts were ended by their tool, and count as "
                "failures"
            )
        path = self.run_dir / "evaluations.json"
        record = json.loads(path.read_text()) if path.is_file() else {}
        _write(path, record | {name: {"step": step, **figures}})
        for key, value in figures.items():
            self._board.add_scalar(f"evaluation/{key}", value, step)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write `run_dir/name`, whole or not at all."""
        _write(self.run_dir / name, content)


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Rows of metrics.jsonl, of a run that is under way or was killed too."""
    return [json.loads(line) for line in _whole_lines(run_dir / "metrics.jsonl")]


def _whole_lines(path: Path) -> list[str]:
    """Lines of a file with their ends, but for the half a line that a killed run may have left."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return lines[:-1] if lines and not lines[-1].endswith("\n") else lines


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(part, path)


def _keep_steps(path: Path, last: int) -> None:
    """Set rows after step `last` aside: a resumed run writes those steps again."""
    if not path.is_file():
        return
    whole = _whole_lines(path)
    late = [line for line in whole if json.loads(line)["step"] > last]
    if late:
        with path.with_name("metrics.discarded.jsonl").open("a") as aside:
            aside.writelines(late)
    part = path.with_name(path.name + ".part")
    part.write_text("".join(line for line in whole if json.loads(line)["step"] <= last))
    os.replace(part, path)


def _tree_lines(run_dir: Path) -> int:
    """Bytes of trees.jsonl that belong to the kept steps."""
    rows = read_metrics(run_dir)
    return int(rows[-1]["trees_end"]) if rows else 0


def _keep_lines(path: Path, size: int) -> None:
    """Set what stands after the first `size` bytes aside, but for half a line at the end."""
    if path.is_file() and path.stat().st_size > size:
        with path.open("r+b") as trees, path.with_name("trees.discarded.jsonl").open("ab") as aside:
            trees.seek(size)
            aside.writelines(line for line in trees if line.endswith(b"\n"))
            trees.truncate(size)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
