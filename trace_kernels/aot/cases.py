"""What is compiled: the launches of the ops' own host code, recorded on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from ..device.tiles import Tile
from ..launch import Launch, Target, recorded
from ..tree_attention import HEAD_DIMS
from .calls import DTYPES, edge_logprobs, score_anchors, tree_attention, tree_reductions

EDGE_VARIANTS = ("", "entropy bias softcap")
VARIANTS = ("window", "softcap", "sinks", "grad_lse")


class Case(NamedTuple):
    """One way to call an op."""

    call: Callable[[str, int, str], None]  # of `calls`, with what follows
    dtype: str  # of edge log-probs also two, as words: of the hidden states and of the weight
    size: int  # the head size of tree attention, the hidden size of others
    variant: str  # what else is on, as words


class Job(NamedTuple):
    """One compilation, as Triton's JIT would do it for a launch; plain data, for other processes."""

    target: str  # such as "cuda:90"
    program: str
    case: Case
    module: str
    tile: Tile
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]


def all_cases() -> list[Case]:
    """Every head size and type; every variant alone at the common size, and all at once at each size. The other
    ops at a hidden size of 4096; edge log-probs of mixed types, and at a size that no tile divides, too."""
    plain = [Case(tree_attention, dtype, size, "causal") for dtype in DTYPES for size in HEAD_DIMS]
    alone = [Case(tree_attention, "bf16", 128, variant) for variant in VARIANTS]
    every = [Case(tree_attention, "bf16", size, " ".join(VARIANTS)) for size in HEAD_DIMS]
    edges = [
        Case(edge_logprobs, dtype, size, words)
        for dtype, size in (("bf16 fp32", 4096), ("fp32 bf16", 4096), ("bf16", 1000), ("fp32", 1000))
        for words in EDGE_VARIANTS
    ]
    return plain + alone + every + edges + _other_cases(("bf16", "fp16", "fp32"))


def quick_cases() -> list[Case]:
    """The common sizes in bf16, and at one of them everything at once."""
    plain = [Case(tree_attention, "bf16", size, "causal") for size in (64, 128, 256)]
    return [*plain, Case(tree_attention, "bf16", 128, " ".join(VARIANTS)), *_other_cases(("bf16",))]


def _other_cases(dtypes: tuple[str, ...]) -> list[Case]:
    edges = [Case(edge_logprobs, dtype, 4096, words) for dtype in dtypes for words in EDGE_VARIANTS]
    anchors = [Case(score_anchors, dtype, 4096, stage) for dtype in dtypes for stage in ("root", "prefix")]
    kinds = ("sums", "moments", "extrema", "ancestors")
    return [*edges, *anchors, *(Case(tree_reductions, "fp64", 4096, kind) for kind in kinds)]


def jobs(target: str, cases: list[Case]) -> list[Job]:
    """The compilations of these cases, each once: what does not differ keeps its first case."""
    found: dict[str, Job] = {}
    for case in cases:
        with recorded(Target(target, triton.__version__, multiprocessors=128)) as launches:
            case.call(*case[1:])
        for launch in launches:
            job = _job(target, case, launch)
            found.setdefault(repr((job.program, *job[3:])), job)
    return list(found.values())


def _job(target: str, case: Case, launch: Launch) -> Job:
    program, tile, arguments = launch
    # Triton's own binder decides on types, divisibility and constants, as at a launch.
    backend = make_backend(gpu(target))
    bind = create_function_from_signature(program.signature, program.params, backend)
    bound, specialization, rest = bind(**arguments)
    _, signature, constexprs, attributes = program._pack_args(backend, rest, bound, specialization, rest)
    name, module = program.fn.__name__, program.fn.__module__
    return Job(target, name, case, module, tile, signature, constexprs, attributes)


def gpu(target: str) -> GPUTarget:
    """Triton's target for a name such as "cuda:90" or "hip:gfx942"."""
    backend, _, name = target.partition(":")
    return GPUTarget(backend, int(name), 32) if backend == "cuda" else GPUTarget(backend, name, 64)
