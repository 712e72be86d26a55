"""What the documents show, runs, and gives what it says."""

import re
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, GraniteConfig, PhiConfig

from trace_kernels.integrations.transformers import enable_tree_attention

from .tiny_models import tiny

ROOT = Path(__file__).resolve().parents[2]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that docs/other_trainers.md leaves after its last block."""
    torch.manual_seed(0)
    names: dict = {}
    found = blocks((ROOT / "docs/other_trainers.md").read_text())
    assert len(found) == 7
    for block in found:
        exec(compile(block, "docs/other_trainers.md", "exec"), names)
    names["engine"].zero_grad(set_to_none=True)
    (names["logprob"] + names["entropy"]).sum().backward()
    names["model"].set_attn_implementation("sdpa")  # the stock model, with the same weights
    return names


def alone(page: dict, ids: list[int]) -> torch.Tensor:
    """[L] log-probs of one unpacked rollout, 0 for its first token."""
    row = torch.tensor([ids])
    with torch.no_grad():
        logprobs = page["model"](input_ids=row).logits[0, :-1].log_softmax(-1)
    return torch.cat([torch.zeros(1), logprobs.gather(1, row[0, 1:, None])[:, 0]])


def test_the_log_probs_of_the_page_are_those_of_unpacked_rollouts(page: dict) -> None:
    want = torch.cat(
        [
            alone(page, ids)[prompt:]
            for ids, prompt in zip(page["rollouts"], page["prompt_lengths"], strict=True)
        ]
    )
    torch.testing.assert_close(page["logprob"], want, rtol=1e-5, atol=1e-5)
    assert page["packed"].layout.num_tokens == 15
    assert sum(map(len, page["rollouts"])) == 26
    assert page["report"].agrees
    assert all(p.grad is not None for p in page["model"].parameters())


def test_the_drop_in_of_the_page_equals_a_padded_pass(page: dict) -> None:
    got, entropies = page["logprobs"], page["entropies"]
    for row, ids, seen in zip(got[:3], page["input_ids"], page["attention_mask"].bool(), strict=False):
        torch.testing.assert_close(row[seen], alone(page, ids[seen].tolist()), rtol=1e-5, atol=1e-5)
        assert not row[~seen].any()
    torch.testing.assert_close(page["answer_logprobs"], got[:, 4:])
    assert torch.equal(entropies != 0, got != 0)


@torch.no_grad()
@pytest.mark.parametrize("config", [PhiConfig, Gemma2Config, GraniteConfig])
def test_the_drop_in_of_the_page_knows_biases_softcaps_and_scales(page: dict, config: type) -> None:
    scale = 8.0 if config is GraniteConfig else 1.0
    model = enable_tree_attention(tiny(config, "eager", **({"logits_scaling": scale} if scale != 1 else {})))
    head = model.get_output_embeddings()
    head.weight.mul_(200)
    if config is PhiConfig:
        head.bias.normal_()
    ids, mask = page["input_ids"] % 61, page["attention_mask"]
    got, _ = page["token_logprobs"](model, ids, mask, scale)
    model.set_attn_implementation("eager")
    for r in range(3):
        want = alone({"model": model}, ids[r, mask[r].bool()].tolist())
        torch.testing.assert_close(got[r, mask[r].bool()], want, rtol=1e-5, atol=1e-5)
    enable_tree_attention(model)
    head.bias, model.config.final_logit_softcapping = None, None
    without, _ = page["token_logprobs"](model, ids, mask, 1.0)
    assert (without - got).abs().max() > 0.5


def test_a_row_of_padding_alone_gives_zeros(page: dict) -> None:
    assert not page["attention_mask"][3].any()
    assert not page["logprobs"][3].any()
    assert not page["entropies"][3].any()


def test_the_likeliest_tokens_of_the_page_are_the_unpacked_models(page: dict) -> None:
    assert page["top_tokens"].shape == (len(page["packed"].edge_src), 5)
    first = page["packed"].edge_rollout == 0
    row = torch.tensor([page["rollouts"][0]])
    with torch.no_grad():
        want = page["model"](input_ids=row).logits[0, 3:-1].log_softmax(-1).topk(5)
    torch.testing.assert_close(page["top_values"][first], want.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(page["top_tokens"][first], want.indices)


def test_the_other_operations_of_the_page_give_what_they_say(page: dict) -> None:
    assert page["success"].tolist() == pytest.approx([1 / 3, 0.5, 1, 0, 0, 0.5, 1, 0])
    assert page["least"].tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert page["per_rollout"].shape == (5,)
    assert page["per_rollout"][0] > 0 > page["per_rollout"][2]
    assert page["values"].shape == page["tokens"].shape == (2, 3)
    v = page["scores"].value
    torch.testing.assert_close(page["scores"].gains.sum(1), 1 - v**4 - (1 - v) ** 4)
    assert all(x.grad is not None for x in page["predictor"])


def test_the_snippet_of_the_readme_runs() -> None:
    text = (ROOT / "README.md").read_text()
    section = re.search(
        r"^## [^\n]*in your trainer\n(.*?)^## ", text, re.MULTILINE | re.DOTALL | re.IGNORECASE
    )
    assert section, "README.md has no section whose heading ends in 'in your trainer'"
    found = blocks(section[1])
    assert found
    names: dict = {}
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
