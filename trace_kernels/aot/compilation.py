"""Compiles jobs, in parallel processes and through Triton's cache."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import triton
from triton.compiler import ASTSource

from .binary import Needs, needs
from .cases import Job, gpu


class Result(NamedTuple):
    job: Job
    needs: Needs | None  # None: it did not compile
    error: str
    seconds: float


def compile_all(jobs: list[Job], processes: int | None = None) -> Iterator[Result]:
    """Results as they come; `processes` defaults to the CPUs at hand."""
    processes = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(processes, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_job, job) for job in jobs]):
            yield done.result()


def compile_job(job: Job) -> Result:
    """One compilation; what goes wrong in it is part of the result."""
    program = getattr(importlib.import_module(job.module), job.program)
    source = ASTSource(program, job.signature, job.constexprs, job.attributes)
    options = {"num_warps": job.tile.warps, "num_stages": job.tile.stages}
    start = time.perf_counter()
    try:
        compiled = triton.compile(source, target=gpu(job.target), options=options)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Result(job, None, f"{type(error).__name__}: {lines[0]}", time.perf_counter() - start)
    return Result(job, needs(compiled), "", time.perf_counter() - start)
