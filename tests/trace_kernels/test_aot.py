"""`python -m trace_kernels.aot`: what it records, what it reads from binaries, what it refuses."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import trace_kernels
from trace_kernels.aot.binary import Needs, count_matrix, count_spills, read_gcn, read_usage
from trace_kernels.aot.calls import edge_logprobs, tree_attention
from trace_kernels.aot.cases import Case, Job, all_cases, jobs
from trace_kernels.aot.checks import GPUS, faults
from trace_kernels.aot.compilation import Result, compile_job
from trace_kernels.aot.table import markdown, parse
from trace_kernels.device import tiles
from trace_kernels.device.tiles import Tile

NEEDS = Needs(128, 0, 0, 65536, 4096, {"wgmma": 4}, True)
SMALL = Case(tree_attention, "bf16", 32, "causal")


def job(program: str, case: Case = SMALL, target: str = "cuda:90") -> Job:
    return next(job for job in jobs(target, [case]) if job.program == program)


def constants(job: Job) -> dict[str, Any]:
    names = list(job.signature)
    return {names[path[0]]: value for path, value in job.constexprs.items()}


def divisible(job: Job) -> set[str]:
    names = list(job.signature)
    return {names[path[0]] for path, found in job.attributes.items() if ["tt.divisibility", 16] in found}


def test_types_are_those_of_a_launch() -> None:
    forward = job("tree_attention_forward", Case(tree_attention, "bf16", 80, "causal"))
    pointers = {name: kind for name, kind in forward.signature.items() if kind.startswith("*")}
    lists = ("SUBTREE_END", "ORDER", "STARTS", "FULL_ENDS", "KEY_BLOCKS")
    assert pointers == {
        **dict.fromkeys(("Q", "K", "V", "OUT", "REST"), "*bf16"), **dict.fromkeys(("LSE", "SINKS"), "*fp32"),
        **dict.fromkeys(lists, "*i32"), "DEPTH": "*i64",
    }  # fmt: skip
    assert forward.signature["T"] == "i32"
    assert forward.signature["scale"] == "fp32"
    assert constants(forward)["HEAD_DIM"] == 80
    assert constants(forward)["BLOCK_D"] == 128
    strides = {name for name in forward.signature if name.startswith("stride_")}
    assert divisible(forward) == {*pointers, *strides, "window"}


def test_lengths_are_not_specialised_and_ones_are_constants() -> None:
    delta = job("tree_attention_delta", Case(tree_attention, "bf16", 32, "grad_lse"))
    assert delta.signature["T"] == "i32"
    assert "T" not in divisible(delta)
    # The lse's gradient is contiguous: its last stride is 1, which Triton compiles in.
    assert delta.signature["stride_lt"] == "constexpr"
    assert constants(delta)["stride_lt"] == 1


def test_a_launch_is_run_as_recorded() -> None:
    """The JIT's own key, of a launch on a pretended GPU, is what was recorded."""
    from triton import knobs
    from triton.runtime import driver

    from trace_kernels.aot.calls import tree_attention as call
    from trace_kernels.aot.cases import gpu
    from trace_kernels.launch import Target, recorded

    class Pretended:
        def __getattr__(self, name: str) -> Any:
            return {
                "get_current_device": lambda: 0,
                "get_current_stream": lambda device: 0,
                "get_current_target": lambda: gpu("cuda:90"),
            }[name]

    with recorded(Target("cuda:90", "", 128)) as launches:
        call(*SMALL[1:])
    launch = launches[0]
    seen: list[dict[str, Any]] = []
    active, hook = driver._active, knobs.runtime.jit_cache_hook
    driver.set_active(Pretended())
    knobs.runtime.jit_cache_hook = lambda **found: seen.append(found["compile"]) or True
    try:
        launch.program.warmup(
            grid=(1,), **launch.arguments, num_warps=launch.tile.warps, num_stages=launch.tile.stages
        )
    finally:
        driver._active, knobs.runtime.jit_cache_hook = active, hook
        launch.program.device_caches.clear()
    found = job("tree_attention_forward")
    assert seen[0]["signature"] == found.signature
    assert seen[0]["constants"] == found.constexprs
    assert seen[0]["configs"][0] == found.attributes


def test_every_launched_program_is_compiled() -> None:
    launched = set()
    for file in (Path(inspect.getfile(trace_kernels)).parent / "backends").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch":
                launched.add(ast.unparse(node.args[0]))
    assert len(launched) >= 5
    assert launched == {job.program for job in jobs("cuda:90", all_cases())}


def test_a_program_for_hopper_uses_its_matrix_unit() -> None:
    result = compile_job(job("tree_attention_forward"))
    assert result.needs is not None, result.error
    assert result.needs.matrix.keys() == {"wgmma"}
    assert faults(result) == []
    (line,) = parse(markdown([result]))
    assert line["kernel"] == "tree_attention_forward"
    assert line["tile"] == "128x128, 8, 3"
    assert line["registers"] == str(result.needs.registers)
    assert "wgmma" in line["matrix"]


@pytest.mark.parametrize(("dtype", "size"), [("bf16 fp32", 4096), ("bf16", 1000), ("fp32", 1000)])
def test_operands_that_pass_through_registers_do_not_spill(dtype: str, size: int) -> None:
    found = job("edge_logprobs_forward", Case(edge_logprobs, dtype, size, "entropy bias softcap"))
    assert found.case in all_cases()
    assert found.signature["HIDDEN"] == "*" + dtype.split()[0]
    assert found.signature["WEIGHT"] == found.signature["BIAS"] == "*" + dtype.split()[-1]
    assert faults(compile_job(found)) == []


def test_a_tile_that_is_too_large_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tiles.Tiles(*[Tile(128, 128, 8, 16)] * 3)
    monkeypatch.setitem(tiles.DEFAULTS["cuda:90"], (16, 32), deep)
    (fault,) = faults(compile_job(job("tree_attention_forward")))
    assert fault.startswith("needs ")
    assert fault.endswith(f"bytes of shared memory, a CTA has {227 * 1024}")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"spills": 3}, "spills 3"),
        ({"stack": 8}, "uses 8 bytes of stack"),
        ({"matrix": {"mma": 4}}, "multiplies without wgmma"),
        ({"tensor_memory": 513}, "needs 513 columns of tensor memory, there are 512"),
        ({"registers": 1024}, "1024 registers x 8 warps: no room for 8 warps"),
    ],
)
def test_faults_are_named(change: dict[str, Any], expected: str) -> None:
    result = Result(job("tree_attention_forward"), NEEDS, "", 0.0)
    assert faults(result) == []
    assert faults(result._replace(needs=NEEDS._replace(**change))) == [expected]


def test_what_does_not_compile_is_a_fault() -> None:
    result = Result(job("tree_attention_forward"), None, "CompilationError: at 3:4", 0.0)
    assert faults(result) == ["does not compile: CompilationError: at 3:4"]


def test_every_table_has_a_gpu() -> None:
    assert GPUS.keys() == tiles.DEFAULTS.keys()


def test_tool_output_is_read() -> None:
    usage = " Function f:\n  REG:255 STACK:520 SHARED:1024 LOCAL:0 CONSTANT[0]:712 TEXTURE:0\n"
    assert read_usage(usage) == (255, 520, 0)
    with pytest.raises(ValueError, match="no line with REG"):
        read_usage("nothing")
    assert count_spills("/*0010*/ STL [R1], R2 ;\n/*0020*/ LDL.64 R4, [R1] ;\n/*0030*/ LDG R4, [R1] ;") == 2
    assert count_matrix("wgmma.mma_async.sync.aligned.m64 \n mma.sync.aligned.m16n8 \n wgmma.fence") == {
        "wgmma": 1, "mma": 1,
    }  # fmt: skip
    metadata = (
        ".group_segment_fixed_size: 64\n.private_segment_fixed_size: 8\n.sgpr_spill_count: 5\n"
        ".vgpr_count:     90\n.vgpr_spill_count: 2\n"
    )
    assert read_gcn(metadata) == (90, 8, 2, 64)
