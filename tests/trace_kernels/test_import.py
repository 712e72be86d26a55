"""`import trace_kernels` at the start of a trainer: torch and NumPy, nothing slow, nothing of a trainer."""

import subprocess
import sys


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
