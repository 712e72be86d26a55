"""Messages into ids: what is refused, that turns only append, that observations cannot inject control tokens."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_rl.rollout.transcript import TemplateError, Transcript

from .scripted import CHATML, CONTROL, HANG_S, byte_tokenizer

STYLES: tuple[Literal["raw", "chat"], ...] = ("raw", "chat")
MESSAGES = [{"role": "user", "content": "Who wrote Tarn?"}]

# As Qwen3's: thoughts before the last user message are dropped.
FORGETFUL = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Some templates open the thought in the generation prompt only.
OPENS_A_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
DATED = "{{ messages | length }} messages\n" + CHATML

BYTES = byte_tokenizer()
SPECIAL = set(BYTES.convert_tokens_to_ids(list(CONTROL)))


@pytest.mark.parametrize("style", STYLES)
def test_a_tokenizer_without_eos_is_refused(style: Any) -> None:
    with pytest.raises(TemplateError, match="no EOS token"):
        Transcript(byte_tokenizer(eos=None), style)


@pytest.mark.parametrize("style", STYLES)
def test_a_tokenizer_without_a_template_is_refused(style: Any) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        Transcript(byte_tokenizer(template=None), style)


@pytest.mark.parametrize("template", [FORGETFUL, OPENS_A_THOUGHT, DATED])
def test_chat_refuses_templates_that_rewrite_earlier_turns(template: str) -> None:
    with pytest.raises(TemplateError, match=r"not append-only.*observations: raw"):
        Transcript(byte_tokenizer(template), "chat")
    Transcript(byte_tokenizer(template), "raw")  # renders the prompt only, once


def test_the_refusal_shows_where(tiny_tokenizer: Any) -> None:
    with pytest.raises(TemplateError, match=r"<think> thought 0 .* which becomes .*<search> 0 </search>"):
        Transcript(byte_tokenizer(FORGETFUL), "chat")


@pytest.mark.parametrize("closed", [False, True], ids=["stop string", "EOS"])
def test_chat_equals_the_template_at_every_turn(closed: bool) -> None:
    """The oracle renders the whole conversation anew each turn; nothing before may have changed."""
    transcript = Transcript(BYTES, "chat")
    messages = list(MESSAGES)
    ids = transcript.prompt_ids(messages)
    for n in range(3):
        assert (
            ids
            == BYTES(BYTES.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))[
                "input_ids"
            ]
        )
        action = f"<think> banana {n} </think> <search> q{n} </search>"
        observation = f"\n\n<information>Doc 1(Title: x) an {n}</information>\n\n"
        sampled = transcript.action_ids(action) + [BYTES.eos_token_id] * closed
        added = sampled + transcript.observation_ids(MESSAGES, observation, sampled)
        ids = ids + added
        messages += [
            {"role": "assistant", "content": action},
            {"role": "user", "content": observation.strip()},
        ]
    assert ids.count(BYTES.eos_token_id) == 7  # each message of the conversation closes once


def test_raw_appends_the_observation_and_nothing_else() -> None:
    transcript = Transcript(BYTES, "raw")
    text = "\n\n<information>Doc 1(Title: x) an 1</information>\n\n"
    ids = transcript.observation_ids(MESSAGES, text)
    assert ids == BYTES(text)["input_ids"]
    assert BYTES.convert_tokens_to_ids("<information>") in ids  # the environment's tags stay what they are
    assert BYTES.decode(transcript.prompt_ids(MESSAGES)).endswith("<|im_start|>assistant\n")


def outside_of_the_template(style: str, ids: list[int]) -> list[int]:
    """The ids between what the chat template itself writes around an observation."""
    if style == "raw":
        return ids
    before = BYTES("<|im_end|>\n<|im_start|>user\n")["input_ids"]
    after = BYTES("<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    assert ids[: len(before)] == before
    assert ids[-len(after) :] == after
    return ids[len(before) : -len(after)]


@pytest.mark.parametrize("style", STYLES)
@given(
    st.lists(
        st.sampled_from([*CONTROL, "<information>", "</information>", "an", "é", " "]) | st.text(max_size=5)
    )
)
@settings(max_examples=100, deadline=None)
def test_observations_inject_no_control_tokens(style: Any, pieces: list[str]) -> None:
    text = "".join(pieces)
    transcript = Transcript(BYTES, style)
    ids = outside_of_the_template(style, transcript.observation_ids(MESSAGES, text))
    assert not SPECIAL & set(ids)
    assert BYTES.decode(ids) == (text if style == "raw" else text.strip())  # and nothing is lost
    plain = text.count("<information>")
    assert ids.count(BYTES.convert_tokens_to_ids("<information>")) == plain
    assert transcript.count(text) == len(Transcript(BYTES).observation_ids(MESSAGES, text))


def test_the_prompt_keeps_its_control_tokens_after_observations_lost_theirs() -> None:
    transcript = Transcript(BYTES, "chat")
    before = transcript.prompt_ids(MESSAGES)
    transcript.observation_ids(MESSAGES, "<|im_end|>")
    transcript.count("[INST]")
    assert transcript.prompt_ids(MESSAGES) == before
    assert set(before) & SPECIAL
    assert transcript.action_ids("<|im_end|>") == [BYTES.eos_token_id]


@pytest.mark.parametrize("text", ["<eos> found", "found <|user|> <|assistant|> <pad>"])
def test_a_vocabulary_that_knows_control_tokens_as_words(tiny_tokenizer: Any, text: str) -> None:
    """A word-level tokenizer finds them without any special treatment: they are dropped."""
    transcript = Transcript(tiny_tokenizer)
    observation = f"<information>{text}</information>"
    expected = ["<information>", "found", "</information>"]
    assert tiny_tokenizer.convert_ids_to_tokens(transcript.observation_ids(MESSAGES, observation)) == expected


def test_tools_count_in_threads_while_the_prompt_is_encoded() -> None:
    """Both ways of reading control tokens at once, from many threads, never mix."""
    transcript = Transcript(BYTES, "chat")
    text, barrier = "x <|im_end|> an " * 50, threading.Barrier(4)
    alone = (transcript.count(text), transcript.observation_ids(MESSAGES, text))

    def work(_: int) -> set[tuple[int, tuple[int, ...]]]:
        barrier.wait(HANG_S)
        both = ((transcript.count(text), transcript.observation_ids(MESSAGES, text)) for _ in range(50))
        return {(count, tuple(ids)) for count, ids in both}

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(work, range(4))) == {(alone[0], tuple(alone[1]))}


def test_text_leaves_out_eos() -> None:
    transcript = Transcript(BYTES)
    assert transcript.text([*transcript.action_ids("<answer> é </answer>"), BYTES.eos_token_id]) == (
        "<answer> é </answer>"
    )
