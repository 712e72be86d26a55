"""Messages and observations into token ids, append-only: no earlier token ever changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

Message = dict[str, str]

_ACTION, _OBSERVATION = "A7Q-assistant-turn-9ZK", "B3X-observation-4WM"


class TemplateError(ValueError):
    """The model's tokenizer or chat template cannot carry append-only rollouts."""


class Transcript:
    """Turns an episode's messages into ids under one tokenizer.

    `raw` appends an observation's text as it is, inside the assistant's turn (Search-R1). `chat` closes the
    assistant's turn and appends the observation as a user message through the chat template; templates
    that rewrite earlier turns are refused, since turn n+1 would then not extend turn n.

    Text of an observation never becomes a control token (EOS, chat roles, `[INST]`), whatever it says.
    """

    def __init__(self, tokenizer: Any, style: Literal["raw", "chat"] = "raw") -> None:
        if tokenizer.eos_token_id is None:
            raise TemplateError(
                "the tokenizer has no EOS token, so no turn could ever end; "
                "set `eos_token` in its tokenizer_config.json"
            )
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError("the tokenizer has no chat template; add one to its tokenizer_config.json")
        self.tokenizer = tokenizer
        self.style = style
        # A copy: whether control tokens are recognised is state of a tokenizer, and tools count in threads.
        self._plain = copy.deepcopy(tokenizer)
        added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
        self._control = (added | set(tokenizer.all_special_ids)) - {tokenizer.unk_token_id}
        self._plain_ids("")
        if style == "chat":
            self._check_append_only()

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of the messages and the assistant's opening."""
        return self._ids(self._render(messages))

    def observation_ids(
        self, messages: list[Message], observation: str, action_ids: Sequence[int] = ()
    ) -> list[int]:
        """Ids that follow an action: the observation and whatever reopens the assistant's turn.

        An EOS that ends `action_ids` closes the turn already and is not repeated.
        """
        if self.style == "raw":
            return self._plain_ids(observation)
        turn = [{"role": "assistant", "content": _ACTION}, {"role": "user", "content": _OBSERVATION}]
        closing, opening = self._render([*messages, *turn]).rsplit(_ACTION, 1)[1].split(_OBSERVATION)
        close = self._ids(closing)
        if action_ids and action_ids[-1] == self.tokenizer.eos_token_id == close[0]:
            close = close[1:]
        return close + self._plain_ids(observation.strip()) + self._ids(opening)

    def action_ids(self, action: str) -> list[int]:
        """Ids of a written action, for expert traces. Sampled actions keep the ids they were sampled as."""
        return self._ids(action)

    def text(self, ids: list[int]) -> str:
        """Text of sampled ids without EOS and its like. Text is derived from ids, never the reverse."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def count(self, text: str) -> int:
        """Tokens of `text` in an observation; safe to call from any thread."""
        return len(self._plain_ids(text))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _plain_ids(self, text: str) -> list[int]:
        """Ids of text that is not ours: what looks like a control token is spelled out, or dropped where
        the vocabulary knows it as a word."""
        ids = self._plain(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [token for token in ids if token not in self._control]

    def _render(self, messages: list[Message], opening: bool = True) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening)

    def _check_append_only(self) -> None:
        messages: list[Message] = [{"role": "user", "content": "question"}]
        for turn in range(2):
            before = self._render(messages)
            messages = [
                *messages,
                {
                    "role": "assistant",
                    "content": f"<think> thought {turn} </think> <search> {turn} </search>",
                },
                {"role": "user", "content": f"observation {turn}"},
            ]
            after = self._render(messages)
            expected = before + messages[-2]["content"]
            if not after.startswith(expected):
                pairs = enumerate(zip(after, expected, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), len(after))
                near = slice(max(0, at - 30), at + 30)
                raise TemplateError(
                    "the chat template is not append-only: rendering the next turn changes an earlier one, "
                    f"at ...{expected[near]!r} which becomes ...{after[near]!r}. "
                    "Use `model.observations: raw`, or a template that keeps every earlier turn as it was."
                )
