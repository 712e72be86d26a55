"""Which weights `model.path` means, and a checkpoint's shards joined."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_rl.config.schema import ModelConfig
from trace_rl.evaluation.model import find_model, fingerprint
from trace_rl.policy.module import ModelError

from .forking import RankServer


@pytest.fixture(scope="module")
def runs(rank_server: RankServer, tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    worker = Path(__file__).with_name("checkpoint_worker.py")
    codes, logs = rank_server.run(str(worker), str(tiny_policy.parent), str(out), ranks=2, logs=out)
    assert codes == [0, 0], logs
    return out


def find(path: Path, out: Path, **model: str) -> tuple[Path, str]:
    said: list[str] = []
    return find_model(ModelConfig.model_validate({"path": path, **model}), out, said.append), "\n".join(said)


@pytest.mark.parametrize(("name", "dtype"), [("untied", torch.float32), ("tied", torch.bfloat16)])
def test_a_checkpoint_gives_the_policy(
    runs: Path, tiny_policies: dict[str, Path], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    made, said = find(runs / name, tmp_path)
    assert made == tmp_path / "model" / "step_1"
    assert "latest checkpoint" in said
    assert f"joining the shards of {runs / name / 'checkpoints' / 'step_1'}" in said
    expected = load_file(runs / name / "expected" / "model.safetensors")
    found = load_file(made / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == dtype
        assert torch.equal(found[key], value), key
    start = load_file(tiny_policies[name] / "model.safetensors")
    assert not torch.equal(start["model.norm.weight"].to(dtype), found["model.norm.weight"])
    written = [json.loads((p / "config.json").read_text()) for p in (made, runs / name / "expected")]
    assert written[0] == written[1]
    model = AutoModelForCausalLM.from_pretrained(made, local_files_only=True)
    whole = AutoModelForCausalLM.from_pretrained(runs / name / "expected", local_files_only=True)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(model(ids).logits, whole(ids).logits)
    ours, theirs = (
        AutoTokenizer.from_pretrained(p, local_files_only=True) for p in (made, tiny_policies[name])
    )
    assert (ours.get_vocab(), ours.chat_template) == (theirs.get_vocab(), theirs.chat_template)


def test_shards_are_joined_once(runs: Path, tmp_path: Path) -> None:
    checkpoint = runs / "untied" / "checkpoints" / "step_1"
    made, _ = find(checkpoint, tmp_path)
    marker = made / "model.safetensors"
    marker.write_bytes(b"as it was")
    for path in (checkpoint, checkpoint.parent, runs / "untied"):
        assert "made earlier" in find(path, tmp_path)[1]
    assert marker.read_bytes() == b"as it was"
    source = json.loads((made / "checkpoint.json").read_text())
    (made / "checkpoint.json").write_text(json.dumps(source | {"checkpoint": "/another"}))
    assert "joining" in find(checkpoint, tmp_path)[1]
    assert marker.stat().st_size > 1000


def test_a_checkpoint_that_cannot_be_read(runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "untied" / "checkpoints", run / "checkpoints")
    checkpoint = run / "checkpoints" / "step_1"
    with pytest.raises(ModelError, match=r"step_1 is a checkpoint, but its run's config .*config\.yaml"):
        find(run, tmp_path / "out")
    text = (runs / "untied" / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("/untied\n", "/gone\n"))
    with pytest.raises(ModelError, match=r"tokenizer of the run's model are in none of .*gone.*cold_start"):
        find(run, tmp_path / "out")
    (run / "config.yaml").write_text(text)
    shard = next(checkpoint.glob("*optim_states.pt"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"checkpoint .*step_1 cannot be read"):
        find(checkpoint, tmp_path / "out")
    shard.unlink()
    with pytest.raises(ModelError, match=r"cannot be read.*Expected 2 of"):
        find(checkpoint, tmp_path / "out")
    assert not list((tmp_path / "out" / "model").glob("step_1"))


def test_directories_that_are_models(tiny_policy: Path, tmp_path: Path) -> None:
    assert find(tiny_policy, tmp_path) == (tiny_policy, "")
    shutil.copytree(tiny_policy, tmp_path / "run" / "policy")
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step_9")
    (tmp_path / "run" / "config.yaml").write_text("model: {observations: chat}")
    found, said = find(tmp_path / "run", tmp_path)
    assert found == tmp_path / "run" / "policy"
    assert "final policy" in said
    assert "trained with model.observations=chat, this asks with raw" in said


def test_directories_that_are_not(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no directory .*gone"):
        find(tmp_path / "gone", tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"holds notes\.txt; expected a Hugging Face directory"):
        find(tmp_path, tmp_path)
    (tmp_path / "latest").write_text("step_7")
    with pytest.raises(ModelError, match="expected"):
        find(tmp_path, tmp_path)


def test_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        fingerprint(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(10_000_000))
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    for place in (0, 9_999_999):
        content = bytearray(10_000_000)
        content[place] = 1
        weights.write_bytes(content)
        assert fingerprint(tmp_path) != first
    weights.write_bytes(bytes(10_000_001))
    assert fingerprint(tmp_path) != first
