"""configs/templates/chatml.jinja: append-only, and otherwise what Qwen3's own template renders."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from trace_rl.rollout.transcript import TemplateError, Transcript

from .scripted import byte_tokenizer

SHIPPED = (Path(__file__).resolve().parents[3] / "configs" / "templates" / "chatml.jinja").read_text()
QWEN3 = (files("trl") / "chat_templates" / "qwen3.jinja").read_text()
CONVERSATION = [
    {"role": "system", "content": "Be brief.\n\n# Tools"},
    {"role": "user", "content": "Pack <b>it</b>, please.\n"},
    {"role": "assistant", "content": '<tool_call>\n{"name": "pack", "arguments": {}}\n</tool_call>'},
    {"role": "user", "content": "<tool_response>\nok\n</tool_response>"},
    {"role": "assistant", "content": "Packed."},
    {"role": "user", "content": "And now send it."},
]


@pytest.mark.parametrize("length", [2, 4, 6])
def test_it_renders_what_qwen3_renders(length: int) -> None:
    shown = [
        byte_tokenizer(template).apply_chat_template(
            CONVERSATION[:length], tokenize=False, add_generation_prompt=True
        )
        for template in (SHIPPED, QWEN3)
    ]
    assert shown[0] == shown[1]


def test_it_carries_chat_observations_and_qwen3s_own_does_not() -> None:
    Transcript(byte_tokenizer(SHIPPED), "chat")
    with pytest.raises(TemplateError, match="not append-only"):
        Transcript(byte_tokenizer(QWEN3), "chat")
