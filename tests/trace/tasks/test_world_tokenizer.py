from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from trace_rl.rollout.transcript import Transcript
from trace_rl.tasks.world import build_world
from trace_rl.tasks.world_tokenizer import TAGS, world_tokenizer


@pytest.fixture(scope="module")
def world():
    return build_world(0)


@pytest.fixture(scope="module")
def tokenizer(world):
    return world_tokenizer(world)


def same_but_for_spaces(a, b):
    return "".join(a.split()) == "".join(b.split())


def texts(world):
    for task in world.test:
        yield task.question
        yield from world.expert_actions(task)
    for i, p in enumerate(world.passages):
        yield f"\n\n<information>Doc {i % 5 + 1}(Title: {p.title}) {p.text}</information>\n\n"


def test_covers_all_text_and_round_trips(world, tokenizer):
    assert 150 <= len(tokenizer) <= 200
    for text in texts(world):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids
        decoded = tokenizer.decode(ids, skip_special_tokens=True)
        assert same_but_for_spaces(decoded, text)
        assert tokenizer.encode(decoded, add_special_tokens=False) == ids


def test_encoding_is_additive(world, tokenizer):
    """Text appended later never changes earlier ids: rollouts are append-only."""
    task = world.test[0]
    parts = [task.question, *world.expert_actions(task)]
    pieces = [i for part in parts for i in tokenizer.encode(part)]
    assert tokenizer.encode("".join(parts)) == pieces


def test_tags_are_single_ordinary_tokens(tokenizer):
    for tag in TAGS:
        (token,) = tokenizer.encode(tag)
        assert tokenizer.decode([token], skip_special_tokens=True) == tag
    ids = [tokenizer.eos_token_id, tokenizer.pad_token_id, *tokenizer.encode("<|user|> <|assistant|>")]
    assert len(set(ids)) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""


def test_unknown_words_are_unknown(tokenizer):
    assert tokenizer.encode("zebra") == [tokenizer.unk_token_id]


def test_instructions_are_covered(world):
    tokenizer = world_tokenizer(world, "Use <search> wisely, then answer!")
    assert tokenizer.unk_token_id not in tokenizer.encode("answer wisely! Use <search>, then")
    tokenizer = world_tokenizer(world, ("one text", "two"))
    assert tokenizer.unk_token_id not in tokenizer.encode("two text one")


def test_chat_template_is_append_only(world, tokenizer):
    def render(messages, prompt):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)

    task = world.test[0]
    chat = [{"role": "user", "content": task.question}]
    before = render(chat, True)
    assert tokenizer.convert_ids_to_tokens(before) == ["<|user|>", *task.question.split(), "<|assistant|>"]
    for action in world.expert_actions(task):
        chat.append({"role": "assistant", "content": action})
        after = render(chat, False)
        assert after[: len(before)] == before
        chat.append({"role": "user", "content": "Answer now"})
        before, shorter = render(chat, True), after
        assert before[: len(shorter)] == shorter


@pytest.mark.parametrize("closed", [False, True], ids=["stop string", "EOS"])
def test_chat_observations_are_what_the_template_writes(world, tokenizer, closed):
    """`model.observations: chat` on the world: turn by turn the ids of the whole conversation rendered anew."""
    transcript = Transcript(tokenizer, "chat")
    task = world.test[0]
    prompt = [{"role": "user", "content": task.question}]
    chat, ids = list(prompt), transcript.prompt_ids(prompt)
    for action in world.expert_actions(task):
        sampled = transcript.action_ids(action) + [tokenizer.eos_token_id] * closed
        observation = f"\n\n<information>{task.question}</information>\n\n"
        ids += sampled + transcript.observation_ids(prompt, observation, sampled)
        chat += [
            {"role": "assistant", "content": action},
            {"role": "user", "content": observation.strip()},
        ]
        assert ids == transcript.prompt_ids(chat)
    assert tokenizer.convert_ids_to_tokens(ids[-1:]) == ["<|assistant|>"]


def test_saved_and_loaded(world, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.padding_side == "left"
    for name in ("eos_token_id", "pad_token_id", "unk_token_id", "all_special_ids"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    for text in list(texts(world))[:50]:
        ids = tokenizer.encode(text)
        assert loaded.encode(text) == ids
        assert loaded.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids, skip_special_tokens=True)
