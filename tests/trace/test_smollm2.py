"""The real policy out of the wheel that the set-up installs."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from trace_rl.smollm2 import ConversionError, check, convert


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "model"
    convert(None, out)
    return out


def test_it_answers(model: Path) -> None:
    assert "Paris" in check(model)


def test_it_is_a_plain_float32_directory(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    with safe_open(model / "model.safetensors", "pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert "lm_head.weight" not in names  # tied: it must not be stored apart
    assert not model.with_name("model.part").exists()


def test_a_wrong_answer_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_rl.smollm2.ANSWER", "Atlantis")
    with pytest.raises(ConversionError, match="without Atlantis"):
        check(model)
