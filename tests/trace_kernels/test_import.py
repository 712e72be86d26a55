"""`import trace_kernels` at the start of a trainer: torch and NumPy, nothing slow, nothing of a trainer."""

import subprocess
import sys

import trace_kernels
from trace_kernels import tree_reductions


def test_imports_neither_triton_nor_dynamo_nor_a_trainer() -> None:
    script = """
import sys
import torch
import trace_kernels
slow = {"triton", "torch._dynamo", "transformers", "trl", "deepspeed", "vllm", "trace_rl", "pydantic"}
print(sorted(slow & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_reductions_are_to_be_had_from_the_package() -> None:
    names = set(tree_reductions.__all__) & set(trace_kernels.__all__)
    bare = {"Ranges", "segments", "range_sums", "range_moments", "range_extrema"}
    assert names == set(tree_reductions.__all__) - bare
    assert all(getattr(trace_kernels, name) is getattr(tree_reductions, name) for name in names)
