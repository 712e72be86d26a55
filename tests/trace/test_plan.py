"""The plan's arithmetic against numbers worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from trace_rl.config.environments import FunctionsConfig, SearchConfig
from trace_rl.config.load import load_config, parse_config
from trace_rl.config.schema import SamplingConfig
from trace_rl.plan import expected_rollout, gpu_visible, plan, render
from trace_rl.shapes import PUBLISHED, Shape, read_shape

ROOT = Path(__file__).resolve().parents[2]
CONFIG_8B = ROOT / "configs/hotpotqa_qwen3_8b.yaml"
MINIMAL: dict[str, Any] = {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "task": {"kind": "world"}}
TINY = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 100,
    "tie_word_embeddings": True,
}  # fmt: skip


# Shapes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3-8b", 8_190_735_360), ("qwen3-14b", 14_768_307_200), ("qwen3-32b", 32_762_123_264)],
)
def test_published_sizes(name: str, parameters: int) -> None:
    assert PUBLISHED[name].parameters == parameters


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_count_is_the_models_own(tied: bool) -> None:
    settings = TINY | {"tie_word_embeddings": tied}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**settings))
    assert Shape(64, 2, 4, 2, 16, 128, 100, tied, qk_norm=True).parameters == model.num_parameters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_what_autograd_saves(dtype: torch.dtype) -> None:
    tokens = 256

    def saved(layers: int) -> int:
        config = Qwen3Config(**TINY | {"num_hidden_layers": layers})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
        assert out.last_hidden_state.shape[1] == tokens
        return sum(storage.nbytes() for storage in kept.values())

    per_token = (saved(4) - saved(2)) / 2 / tokens
    half = dtype == torch.bfloat16
    estimate = Shape(64, 2, 4, 2, 16, 128, 100).saved_bytes(half=half, liger=False)
    assert per_token == pytest.approx(estimate - 4 * 64 * half, rel=0.03)  # sdpa keeps no fp32 output


def test_shape_from_a_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    shape, source = read_shape(parse_config(MINIMAL | {"model": {"path": tmp_path}}))
    assert shape == Shape(64, 2, 4, 2, 16, 128, 100, tied=True, qk_norm=True)
    assert source == "config.json"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "does not describe a decoder"),
        ("[]", "does not describe a decoder"),
        ('{"hidden_size": 3}', "does not describe a decoder of a known kind: KeyError"),
        (json.dumps(TINY | {"num_experts": 8}), "mixture of experts"),
    ],
)
def test_unknown_shapes_say_why(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    shape, source = read_shape(parse_config(MINIMAL | {"model": {"path": tmp_path}}))
    assert shape is None
    assert reason in source


def test_a_model_that_is_not_there() -> None:
    result = plan(parse_config(MINIMAL), world=1)
    assert result.memory is None
    assert "size unknown (m/config.json is not there), so memory is not estimated" in render(result)


def test_the_cold_start_makes_the_shape() -> None:
    shape, source = read_shape(parse_config(MINIMAL | {"cold_start": {}}))
    assert shape is not None
    assert (shape.hidden, shape.layers, shape.intermediate, shape.head_dim) == (128, 3, 384, 32)
    assert source == "to be made by the cold start"


# Tokens


def test_expected_rollout_of_the_8b_config() -> None:
    config = load_config(CONFIG_8B)
    # 256 + (2 searches + 1 answer) x 250 + 2 x 250
    assert expected_rollout(config.environment, config.sampling) == (256, 250, 1506)


def test_budget_of_the_8b_config() -> None:
    result = plan(load_config(CONFIG_8B), world=8)
    assert (result.bare, result.continuations, result.leaves, result.active) == (1024, 2048, 3072, 256)
    assert result.flat == 3072 * 1506 == 4_626_432
    assert result.packed == 256 * 256 + 1024 * 1250 + 2048 * 625 == 2_625_536
    assert result.flat_max == 3072 * 5120
    assert result.micro_batches == 21  # 2,625,536 / (8 x 16,384) = 20.03
    assert result.micro_batches_max == 120


@pytest.mark.parametrize(
    ("strategy", "bare", "continuations", "active"),
    [
        ("trace", 1024, 2048, 256),
        ("random_prefix", 1024, 2048, 128),
        ("uniform", 3072, 0, 256),
        ("pcl", 3072, 0, 256),
    ],
)
def test_every_strategy_has_the_same_leaves(
    strategy: str, bare: int, continuations: int, active: int
) -> None:
    result = plan(load_config(CONFIG_8B, [f"allocation.strategy={strategy}"]), world=8)
    assert (result.bare, result.continuations, result.active) == (bare, continuations, active)
    assert result.leaves == 3072


def test_a_pool_that_is_too_small_for_fixed_groups_is_said() -> None:
    result = plan(load_config(CONFIG_8B, ["allocation.strategy=uniform"]), world=8)
    assert any(
        "384 groups of 8, but the pool has 256 prompts: groups grow to 12" in w for w in result.warnings
    )


def test_a_context_that_cuts_rollouts_is_noted() -> None:
    segments = "model.attention=segments"
    assert plan(load_config(CONFIG_8B, [segments]), world=8).notes == ()
    (note,) = plan(load_config(CONFIG_8B, [segments, "sampling.context_tokens=4096"]), world=8).notes
    assert "about 4,756 tokens" in note  # 256 + 5 x 500 + 4 x 500


# Around it


@pytest.mark.parametrize("gpu", [False, True])
def test_one_rank_of_a_launcher_without_a_gpu_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """`deepspeed trace/train.py --dry-run` on a laptop sets WORLD_SIZE=1, whatever the run is meant for."""
    monkeypatch.setattr("trace_rl.plan.gpu_visible", lambda: gpu)
    monkeypatch.setenv("WORLD_SIZE", "1")
    result = plan(load_config(CONFIG_8B))
    assert result.world == (1 if gpu else 8)
    said = "note       no GPU is visible here: 8 ranks are assumed; `trace-rl plan --world N` plans for N"
    assert (said in render(result)) == (not gpu)
    assert plan(parse_config(MINIMAL)).world == 1  # float32 is a CPU run
    assert plan(load_config(CONFIG_8B), world=1).world == 1  # asked for
    monkeypatch.delenv("WORLD_SIZE")
    assert "8 ranks are assumed" in render(plan(load_config(CONFIG_8B)))


@pytest.mark.parametrize(
    ("script", "visible"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'", True),
        ("echo 'No devices found'; exit 6", False),
        ("echo 'GPU access blocked by the operating system'; exit 9", False),
        (None, False),
    ],
)
def test_a_gpu_is_what_nvidia_smi_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, visible: bool
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")  # the launcher sets it, GPU or not
    assert gpu_visible() == (visible or Path("/dev/kfd").exists())


def test_world_comes_from_the_launcher_or_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert plan(load_config(CONFIG_8B)).world == 8
    assert plan(parse_config(MINIMAL)).world == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert plan(load_config(CONFIG_8B)).world == 4
    assert plan(load_config(CONFIG_8B), world=2).world == 2
    with pytest.raises(ValueError, match="at least one rank"):
        plan(load_config(CONFIG_8B), world=0)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_published_config_has_a_plan(path: Path) -> None:
    result = plan(load_config(path))
    text = render(result)
    assert "estimates" in text
    assert "leaves" in text
    assert not result.warnings


def test_planning_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pathlib import Path; from trace_rl.config.load import load_config;"
        f"from trace_rl.plan import plan, render; render(plan(load_config(Path({str(CONFIG_8B)!r}))));"
        "heavy = ('torch', 'numpy', 'transformers', 'deepspeed', 'vllm', 'trace_kernels');"
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_prompts_of_function_calling_document_the_functions() -> None:
    sampling = SamplingConfig(turn_tokens=1024, context_tokens=32768)
    prompt, observation, rollout = expected_rollout(FunctionsConfig(), sampling)
    assert (prompt, observation) == (4096, 400)
    assert rollout == 4096 + 11 * 512 + 10 * 400  # half of 20 steps, half their tokens, a result for each
    assert expected_rollout(SearchConfig(), sampling) == (256, 250, 256 + 3 * 512 + 2 * 250)
