"""The trainer's ranks: plain Python objects between them, over gloo, so that no GPU memory is involved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

TIMEOUT = timedelta(hours=2)  # the slowest rank may sample for long; a dead rank is the launcher's to notice


class RankError(RuntimeError):
    """Another rank failed; the message says which and why."""


@dataclass(frozen=True)
class Ranks:
    """This process among the trainer's; `group` carries objects."""

    rank: int
    world: int
    local_rank: int
    group: Any

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_node_main(self) -> bool:
        """First rank of its machine: the one that writes what all engines there read."""
        return self.local_rank == 0

    def gather(self, value: T) -> list[T]:
        """Everybody's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_main(self, compute: Callable[[], T]) -> T:
        """`compute()` of rank 0, on every rank; if it raises there, every rank raises."""
        value: Any = None
        error: Exception | None = None
        if self.is_main:
            try:
                value = compute()
            except Exception as caught:
                error = caught
        if self.world > 1:
            # The other ranks wait for this message, whatever happened; an exception may not survive pickling.
            box = [value, _describe(error)]
            dist.broadcast_object_list(box, src=0, group=self.group)
            value, failure = box
            if failure is not None and not self.is_main:
                raise RankError(f"rank 0 failed: {failure}")
        if error is not None:
            raise error
        return value

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.group)

    def attempt(self, action: Callable[[], T]) -> T:
        """This rank's own `action()`; when it fails on any rank, every rank raises instead of waiting for it."""
        result: Any = None
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        self.agree(error)
        return result

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank when any rank failed, so that none waits for one that is gone."""
        failures = self.gather(_describe(error))
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise RankError(f"rank {rank} failed: {failure}")


def _describe(error: BaseException | None) -> str | None:
    """An error in words, never empty."""
    return None if error is None else f"{type(error).__name__}: {error}"


def end_process(code: int) -> NoReturn:
    """Flush and end at once. gloo's threads now and then abort a process that destroys its group or ends the usual
    way, after all its work is done, and its launcher then reports a failure."""
    sys.stdout.flush()
    sys.stderr.flush()
    _shared_buffer().unlink(missing_ok=True)
    os._exit(code)


def _shared_buffer() -> Path:
    """What DeepSpeed's CPU communication op leaves of this rank in shared memory: 66 MiB. Who maps it keeps it."""
    place = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    return Path("/dev/shm") / "_".join(("deepspeed_allreduce_buffer", str(os.getuid()), *place))


def connect(device: torch.device) -> Ranks:
    """Join the launcher's process group (one of a single rank without a launcher)."""
    import deepspeed

    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, timeout=TIMEOUT, verbose=False)
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=TIMEOUT)
    return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]), group)
