"""Messages and observations into token ids, append-only: no earlier token ever changes."""

from __future__ import annotations

from typing import Any, Literal

Message = dict[str, str]

_SENTINEL = "A7Q-assistant-turn-9ZK"


class TemplateError(ValueError):
    """The model's tokenizer or chat template cannot carry append-only rollouts."""


class Transcript:
    """Turns an episode's messages into ids under one tokenizer.

    `raw` appends an observation's text as it is, inside the assistant's turn (Search-R1). `chat` closes the
    assistant's turn and appends the observation as a user message through the chat template; templates
    that rewrite earlier turns are refused, since turn n+1 would then not extend turn n.
    """

    def __init__(self, tokenizer: Any, style: Literal["raw", "chat"] = "raw") -> None:
        if tokenizer.eos_token_id is None:
            raise TemplateError(
                "the tokenizer has no EOS token, so no turn could ever end; set `eos_token` in its tokenizer_config.json"
            )
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError("the tokenizer has no chat template; add one to its tokenizer_config.json")
        self.tokenizer = tokenizer
        self.style = style
        if style == "chat":
            self._check_append_only()

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Ids of the messages and the assistant's opening."""
        return self._ids(self._render(messages))

    def observation_ids(self, messages: list[Message], observation: str) -> list[int]:
        """Ids that follow an action: the observation and whatever reopens the assistant's turn."""
        if self.style == "raw":
            return self._ids(observation)
        turn = [*messages, {"role": "assistant", "content": _SENTINEL}, {"role": "user", "content": observation.strip()}]
        return self._ids(self._render(turn).rsplit(_SENTINEL, 1)[1])

    def action_ids(self, action: str) -> list[int]:
        """Ids of a written action, for expert traces. Sampled actions keep the ids they were sampled as."""
        return self._ids(action)

    def text(self, ids: list[int]) -> str:
        """Text of sampled ids without EOS and its like. Text is derived from ids, never the reverse."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def count(self, text: str) -> int:
        """Tokens of `text`."""
        return len(self._ids(text))

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages: list[Message], opening: bool = True) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opening)

    def _check_append_only(self) -> None:
        messages: list[Message] = [{"role": "user", "content": "question"}]
        for turn in range(2):
            before = self._render(messages)
            messages = [
                *messages,
                {"role": "assistant", "content": f"<think> thought {turn} </think> <search> query {turn} </search>"},
                {"role": "user", "content": f"observation {turn}"},
            ]
            after = self._render(messages)
            expected = before + messages[-2]["content"]
            if not after.startswith(expected):
                at = next((i for i, (a, b) in enumerate(zip(after, expected, strict=False)) if a != b), len(after))
                raise TemplateError(
                    "the chat template is not append-only: rendering the next turn changes an earlier one, at "
                    f"...{expected[max(0, at - 30) : at + 30]!r} which becomes ...{after[max(0, at - 30) : at + 30]!r}. "
                    "Use `model.observations: raw`, or a template that keeps every earlier turn as it was."
                )
