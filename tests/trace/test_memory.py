"""The memory estimates against numbers worked out by hand."""

from pathlib import Path
from typing import Any

import pytest

from trace_kernels.edge_logprobs import TILE_ELEMENTS
from trace_rl.config.load import load_config, parse_config
from trace_rl.memory import GIB, HEAD_TILE_BYTES, estimate_memory
from trace_rl.plan import plan, render
from trace_rl.shapes import Shape

ROOT = Path(__file__).resolve().parents[2]
CONFIG_8B = ROOT / "configs/hotpotqa_qwen3_8b.yaml"
FLASH = ["model.attention=flash"]
MINIMAL: dict[str, Any] = {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "task": {"kind": "world"}}


def test_memory_of_the_8b_config() -> None:
    p = 8_190_735_360
    m = plan(load_config(CONFIG_8B, FLASH), world=8).memory
    assert m is not None
    assert m.weights == 2 * p / 8
    assert m.optimizer == 12 * p / 8  # fp32 master and two moments
    assert m.gradients == 4 * p / 8  # accumulated in fp32
    assert m.bucket == 2 * 5e8
    assert m.held == 18 * p / 8 + m.bucket
    assert m.gathered == 2 * 1e9
    layer = 8 * 4096 + 6 * 12288 + 10 * 4096 + 6 * 1024
    assert m.activations == 16384 * (36 * 4096 * 2 + layer)
    assert m.head == 151936 * 4096 * 2 + 2 * 2**27
    assert m.step_copy == 0  # the gradients are fp32 already
    # 6,496,256 keys on all paths of 2,625,536 packed tokens, each 2 x 8 heads x 128 x 2 bytes; a pass that saves
    # nothing holds one layer's, a recomputed backward their gradients too.
    copied = 16384 * 4096 * 6_496_256 / 2_625_536
    assert m.copies == pytest.approx(2 * copied)
    assert m.scoring == pytest.approx(16384 * (4096 * 2 + layer) + copied + 2 * 2**27)
    assert m.engine_awake == pytest.approx(48 * GIB)
    # (48 GiB - weights - 2 GiB) / (keys and values x 36 layers x 8 heads x 128 x 2 bytes)
    assert m.kv_tokens == int((46 * GIB - 2 * p) / 147_456)
    assert m.sampling == m.held + m.gathered + m.scoring + m.engine_awake
    assert m.updating == m.held + m.gathered + m.activations + m.copies + m.head + m.engine_asleep
    assert not plan(load_config(CONFIG_8B), world=8).warnings


def test_keys_on_the_paths_of_the_8b_config() -> None:
    """Attention flash copies the path of every chain."""
    result = plan(load_config(CONFIG_8B, FLASH), world=8)
    prompts = 256 * 256  # the prompt itself, once per tree
    # Two continuations leave a rollout after 1/3 and 2/3 of its 1,250 tokens below the prompt: three chains.
    rollouts = 1024 * (3 * 256 + 1250 * (1 + 2 + 3) / 3)
    continuations = 2048 * 1506
    assert result.path_keys == prompts + rollouts + continuations == 6_496_256
    assert any("copies the keys and values of every chain's path: 2.5 per packed" in n for n in result.notes)
    flat = plan(load_config(CONFIG_8B, ["allocation.strategy=uniform"]), world=8)
    assert flat.path_keys == 256 * 256 + 3072 * 1506


def test_flash_copies_of_every_layer_are_kept_without_checkpointing() -> None:
    def copies(*overrides: str) -> float:
        memory = plan(load_config(CONFIG_8B, [*FLASH, *overrides]), world=8).memory
        assert memory is not None
        return memory.copies

    kept = copies("model.gradient_checkpointing=false")
    assert kept == pytest.approx(copies() * 37 / 2)  # 36 layers and one layer's gradients
    assert copies("model.attention=segments") == 0


def test_memory_in_float32_has_no_master_copy() -> None:
    config = parse_config(MINIMAL | {"engine": {"kv_cache_gib": 3}})
    shape = Shape(64, 2, 4, 2, 16, 128, 100)
    m = estimate_memory(config, shape, 1, 80.0)
    p = shape.parameters
    assert (m.weights, m.optimizer, m.gradients, m.step_copy) == (4 * p, 8 * p, 4 * p, 0)
    assert (m.bucket, m.gathered) == (4 * p, 4 * p)  # all of it fits in a bucket
    assert m.engine_awake == m.engine_asleep == 4 * p + 3 * GIB
    layer = 24 * 64 + 16 * (128 + 64 + 32)
    assert m.scoring == 16384 * (64 * 4 + layer) + 2 * 4 * 100 * 16384
    assert m.sampling == m.held + m.gathered + m.scoring + m.engine_awake
    assert m.head == 100 * 64 * 4 + 2 * 4 * 100 * 16384  # a small vocabulary needs no full tile


def test_the_users_deepspeed_section_counts() -> None:
    overrides = ["deepspeed.data_types.grad_accum_dtype=bf16", "loss.kl=0.1"]
    m = plan(load_config(CONFIG_8B, overrides), world=8).memory
    assert m is not None
    # In bf16, and one sub-group of 1e9 of them in fp32 during the step; a rank has 1.02e9.
    assert (m.gradients, m.step_copy) == (2 * 8_190_735_360 / 8, 4e9)
    assert m.reference == m.weights
    offloaded = plan(
        load_config(CONFIG_8B, ["deepspeed.zero_optimization.offload_optimizer.device=cpu"]), world=8
    )
    assert offloaded.memory is not None
    assert offloaded.memory.held == offloaded.memory.weights + offloaded.memory.bucket
    assert "Adam moments, on the host" in render(offloaded)


def test_what_does_not_fit_is_said() -> None:
    def warnings(*overrides: str, world: int = 8) -> str:
        return "\n".join(plan(load_config(CONFIG_8B, overrides), world=world).warnings)

    assert warnings() == ""
    assert "the update needs about" in warnings("model.gradient_checkpointing=false", "model.liger=false")
    assert "the update needs about" in warnings("engine.sleep=false")
    assert "sampling needs about" in warnings(world=1)
    # 0.67 x 80 = 53.6 GiB awake and 18.1 GiB held fit into 76; the scoring passes between, 4.7 GiB, do not.
    assert "sampling needs about" in warnings("engine.gpu_memory_utilization=0.67")
    assert "the engine's share holds the weights and 0 tokens" in warnings(
        "engine.gpu_memory_utilization=0.2"
    )


def test_larger_gpus_fit_more() -> None:
    config = load_config(CONFIG_8B, ["engine.sleep=false"])
    assert plan(config, world=8, gpu_gib=80).warnings
    assert not plan(config, world=8, gpu_gib=139).warnings


def test_the_heads_tile_is_the_kernels() -> None:
    assert HEAD_TILE_BYTES == 4 * TILE_ELEMENTS
