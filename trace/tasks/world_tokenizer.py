"""A word-level tokenizer that knows exactly the words of one synthetic world."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from .world import World

PAD, EOS, UNK, USER, ASSISTANT = SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>")
"""Dropped by ``decode(..., skip_special_tokens=True)``."""

TAGS = tuple(
    f"<{slash}{name}>" for name in ("think", "search", "answer", "information") for slash in ("", "/")
)
"""One token each, ordinary ones: decoding always keeps them."""

NOTICE_WORDS = ("Invalid", "Answer", "now", "Nothing", "Oversized")
"""What the search environment says in short mode; it cannot be imported here, a test compares the two."""

# A document's heading is one token up to its title: short observations matter more to a tiny policy.
_WORDS = r"Doc \d+\(Title:|</?\w+>|<\|\w+\|>|\w+|[^\w\s]"

# Every message ends in a way that no later message changes, and an assistant's message begins exactly as the
# generation prompt does, so a longer chat extends the shorter one.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }} <eos>"
    "{% else %}<|user|> {{ message['content'] }} {% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def world_tokenizer(
    world: World, instructions: str | Iterable[str] = "", *, max_documents: int = 5
) -> PreTrainedTokenizerFast:
    """The tokenizer of ``world``: one token per word, tag, punctuation mark and document heading.

    Nothing the world or the search environment in short mode says becomes ``<unk>``; white space is not
    kept, so ``decode(encode(x))`` may differ from ``x`` in spaces and line breaks only.

    Args:
        instructions: one or more further texts (prompt instructions, other notices) whose words are added.
        max_documents: document headings known, "Doc 1(Title:" to "Doc n(Title:"; at least the
            environment's top_k.
    """
    split = Split(Regex(_WORDS), behavior="removed", invert=True)
    texts = [instructions] if isinstance(instructions, str) else list(instructions)
    words: dict[str, None] = dict.fromkeys((*SPECIAL_TOKENS, *TAGS))
    words.update(dict.fromkeys(f"Doc {i}(Title:" for i in range(1, max_documents + 1)))
    words.update(dict.fromkeys((")", *NOTICE_WORDS, *world.vocabulary())))
    for text in texts:
        words.update(dict.fromkeys(word for word, _ in split.pre_tokenize_str(text)))
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=4096,
    )
