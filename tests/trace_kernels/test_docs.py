"""What the documents show, runs, and gives what it says."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict:
    """The names that docs/other_trainers.md leaves after its last block."""
    torch.manual_seed(0)
    names: dict = {}
    found = blocks((ROOT / "docs/other_trainers.md").read_text())
    assert len(found) == 4
    for block in found:
        exec(compile(block, "docs/other_trainers.md", "exec"), names)
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
    for row, ids, seen in zip(got, page["input_ids"], page["attention_mask"].bool(), strict=True):
        torch.testing.assert_close(row[seen], alone(page, ids[seen].tolist()), rtol=1e-5, atol=1e-5)
        assert not row[~seen].any()
    torch.testing.assert_close(page["answer_logprobs"], got[:, 4:])
    assert torch.equal(entropies != 0, got != 0)


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
