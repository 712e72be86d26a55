"""What a compiled program needs of a GPU, read from its binary and its assembly."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

# Matrix instructions, by the name of the unit in a table and their mnemonic in PTX or GCN assembly.
MATRIX = {
    "wgmma": re.compile(r"\bwgmma\.mma_async\b"),
    "mma": re.compile(r"\bmma\.sync\b"),
    "tcgen05": re.compile(r"\btcgen05\.mma\b"),
    "mfma": re.compile(r"\bv_mfma_"),
}
EXECUTABLE = 4  # ELF section flag SHF_EXECINSTR


class Needs(NamedTuple):
    """Of one program."""

    registers: int  # per thread; AMD: vector and accumulation ones, which share one file
    stack: int  # bytes per thread
    spills: int  # CUDA: loads and stores of local memory; AMD: spilled vector registers
    shared: int  # bytes per CTA
    code: int  # bytes of instructions
    matrix: dict[str, int]  # unit -> instructions
    multiplies: bool  # whether the program asks for matrix products
    tensor_memory: int = 0  # columns per CTA, Blackwell only


def needs(compiled: Any) -> Needs:
    """Of a `triton.compile` result, for CUDA or HIP."""
    asm, shared = compiled.asm, compiled.metadata.shared
    multiplies = "tt.dot " in asm["ttir"]
    if "amdgcn" in asm:
        registers, stack, spills, static = read_gcn(asm["amdgcn"])
        matrix = count_matrix(asm["amdgcn"])
        return Needs(
            registers, stack, spills, max(shared, static), code_bytes(asm["hsaco"]), matrix, multiplies
        )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "program.cubin"
        cubin.write_bytes(asm["cubin"])
        registers, stack, static = read_usage(_cuobjdump("--dump-resource-usage", cubin))
        # Local memory lies in the stack: without one there is nothing to disassemble for.
        spills = count_spills(_cuobjdump("--dump-sass", cubin)) if stack else 0
    matrix = count_matrix(asm["ptx"])
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    size = code_bytes(asm["cubin"])
    return Needs(registers, stack, spills, shared + static, size, matrix, multiplies, columns)


def read_usage(text: str) -> tuple[int, int, int]:
    """(registers, bytes of stack, bytes of static shared memory) from `cuobjdump --dump-resource-usage`.

    The kilobyte that CUDA reserves for each CTA from sm_90 on is not counted.
    """
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump --dump-resource-usage printed no line with REG, STACK, SHARED: {text!r}")
    registers, stack, static, local = map(int, found.groups())
    return registers, stack + local, static - 1024 if static >= 1024 else static


def count_spills(sass: str) -> int:
    """Loads and stores of local memory."""
    return len(re.findall(r"\b(?:STL|LDL)\b", sass))


def read_gcn(assembly: str) -> tuple[int, int, int, int]:
    """(registers, bytes of stack, spilled vector registers, bytes of LDS) from AMD assembly.

    Scalar registers spill into lanes of vector registers, not into memory; where those run out too, into the stack.
    """
    keys = "vgpr_count private_segment_fixed_size vgpr_spill_count group_segment_fixed_size"
    values = []
    for key in keys.split():
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        if found is None:
            raise ValueError(f"the assembly's metadata hold no .{key}")
        values.append(int(found[1]))
    registers, stack, spills, shared = values
    return registers, stack, spills, shared


def count_matrix(assembly: str) -> dict[str, int]:
    counts = {name: len(pattern.findall(assembly)) for name, pattern in MATRIX.items()}
    return {name: count for name, count in counts.items() if count}


def code_bytes(elf: bytes) -> int:
    """Size of all executable sections of an ELF64 file: of a cubin or an AMD code object."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    total = 0
    for i in range(count):
        # name, type, flags, address, offset, size
        _, _, flags, _, _, length = struct.unpack_from("<IIQQQQ", elf, offset + i * size)
        total += length if flags & EXECUTABLE else 0
    return total


def _cuobjdump(option: str, cubin: Path) -> str:
    """Output of the tool in the Triton wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([str(tool), option, str(cubin)], capture_output=True, text=True, check=True).stdout
