"""What the Triton programs use and take on this device: registers, spills, shared memory, time of every launch."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trace_kernels.device import (
    edge_logprobs,
    score_anchors,
    tree_attention_backward,
    tree_attention_forward,
    tree_reductions,
)
from trace_kernels.layout import TreeLayout
from trace_kernels.tree_attention import tree_attention

from .attention_methods import Heads
from .workloads import Workload

MODULES = (tree_attention_forward, tree_attention_backward, edge_logprobs, score_anchors, tree_reductions)
REPEATS = 3


def times(work: Workload, heads: Heads, device: torch.device) -> dict[str, float]:
    """Milliseconds on the device of every kernel of one forward and backward, by kernel name, most first."""
    layout = TreeLayout.from_segments(work.parents, work.lengths, device=device)
    q, k, v = (
        torch.randn(work.tokens, n, heads.size, dtype=torch.bfloat16, device=device, requires_grad=True)
        for n in heads[:2] + heads[1:2]
    )
    grad = torch.randn_like(q)

    def once() -> None:
        torch.autograd.grad(tree_attention(q, k, v, layout, backend="triton"), (q, k, v), grad)

    once()
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        for _ in range(REPEATS):
            once()
        if cuda:
            torch.cuda.synchronize(device)
    found = {}
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        if microseconds:
            found[event.key[:80]] = microseconds / 1e3 / REPEATS
    return dict(sorted(found.items(), key=lambda item: -item[1])[:12])


def resources() -> list[dict[str, Any]]:
    """Of every program compiled so far in this process; empty under the interpreter."""
    found = []
    programs = {
        name: value
        for module in MODULES
        for name, value in vars(module).items()
        if hasattr(value, "device_caches")
    }
    for name, program in programs.items():
        for caches in program.device_caches.values():
            for kernel in caches[0].values():
                found.append(
                    {
                        "program": name,
                        "registers": getattr(kernel, "n_regs", None),
                        # Spilled registers and other local memory of a thread, in words of 4 bytes.
                        "local_words": getattr(kernel, "n_spills", None),
                        "shared_bytes": getattr(kernel.metadata, "shared", None),
                        "warps": getattr(kernel.metadata, "num_warps", None),
                        "stages": getattr(kernel.metadata, "num_stages", None),
                        "wgmma": "wgmma" in str(kernel.asm.get("ptx", "")),
                    }
                )
    # One that only another program calls was never compiled on its own and has no registers.
    return [program for program in found if program["registers"]]
