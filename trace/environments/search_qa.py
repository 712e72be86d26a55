"""Question answering with a search tool, in the tag conventions of Search-R1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trace_rl.retrieval.protocol import RetrievalError, SearchIndex
from trace_rl.tasks.task import Passage, Task

from .actions import parse_action
from .neutralize import neutralize
from .official_scores import official_scores
from .protocol import Message, StepResult
from .scoring import exact_match, reward_function, token_f1

DEFAULT_INSTRUCTIONS = (
    "Answer the question below. Whenever new information arrives, first reason about it between <think> "
    "and </think>. If you still lack a fact, ask the search engine by writing <search> query </search>; "
    "what it finds is shown to you between <information> and </information>. You may search {max_searches} "
    "times, one query at a time. As soon as you know enough, give only the answer, short and without "
    "explanation, between <answer> and </answer>. For example: <answer> Beijing </answer>."
)


@dataclass(frozen=True)
class Notices:
    """What the environment says besides documents; whoever builds a closed vocabulary must cover these."""

    invalid: str
    last_turn: str
    nothing_found: str
    oversized: str


DEFAULT_NOTICES = Notices(
    invalid="That was not a valid action. To search, write the query between <search> and </search>. "
    "To answer, write the answer between <answer> and </answer>. Do one of the two.",
    last_turn="No searches are left. Give your answer now between <answer> and </answer>.",
    nothing_found="The search found nothing.",
    oversized="The search result was too long to show.",
)
SHORT_NOTICES = Notices("Invalid", "Answer now", "Nothing", "Oversized")


class SearchQA:
    """Environment for one question: up to ``max_searches`` turns with search on, then one with search off.

    A turn that is no valid action also uses up one of these turns. The answer is scored from the action it
    stands in, never from prompt or documents. A search that cannot be carried out ends the episode.

    Args:
        index: shared, thread-safe.
        max_searches: turns with search on, >= 0; an episode has at most ``max_searches + 1`` turns.
        top_k: documents per search.
        max_observation_tokens: limit of one observation, tags and notices included. Documents are dropped
            whole from the end until it holds; if none is left, a notice replaces them (``oversized``).
        count_tokens: tokens of a string in the policy's tokenizer.
        reward: ``"em_or_f1"`` or ``"exact_match"``.
        f1_threshold: for ``"em_or_f1"``, in (0, 1].
        instructions: text before the question, where ``{max_searches}`` is replaced; None for the default,
            ``""`` for the bare question.
        notices: None for whole sentences, or single words where ``instructions`` is ``""``.

    Raises ValueError for values out of range, or if not even the notices fit the observation limit.
    """

    stop: tuple[str, ...] = ("</search>", "</answer>")

    def __init__(
        self,
        index: SearchIndex,
        *,
        max_searches: int = 4,
        top_k: int = 3,
        max_observation_tokens: int = 500,
        count_tokens: Callable[[str], int],
        reward: Literal["em_or_f1", "exact_match"] = "em_or_f1",
        f1_threshold: float = 0.3,
        instructions: str | None = None,
        notices: Notices | None = None,
    ) -> None:
        if max_searches < 0 or top_k < 1:
            raise ValueError(f"need max_searches >= 0 and top_k >= 1, got {max_searches} and {top_k}")
        self._index = index
        self._max_searches = max_searches
        self._top_k = top_k
        self._limit = max_observation_tokens
        self._count_tokens = count_tokens
        self._score = reward_function(reward, f1_threshold)
        instructions = DEFAULT_INSTRUCTIONS if instructions is None else instructions
        self._instructions = instructions.replace("{max_searches}", str(max_searches))
        if notices is None:
            notices = DEFAULT_NOTICES if instructions else SHORT_NOTICES
        self._notices = notices
        self._check_notices_fit()
        self._task: Task | None = None
        self._searches = self._turns = 0
        self._done = False

    def _check_notices_fit(self) -> None:
        n = self._notices
        needed = max(
            self._count_tokens(self._observation([text], last=True))
            for text in (n.invalid, n.nothing_found, n.oversized)
        )
        if needed > self._limit:
            raise ValueError(f"max_observation_tokens = {self._limit}, but the notices alone need {needed}")

    def reset(self, task: Task) -> list[Message]:
        """Starts ``task``; the prompt is one user message, instructions first so that prompts share them."""
        self._task = task
        self._searches = self._turns = 0
        self._done = False
        prompt = f"{self._instructions}\nQuestion: {task.question}" if self._instructions else task.question
        return [{"role": "user", "content": prompt}]

    def step(self, action: str) -> StepResult:
        """Answers one turn; see :class:`StepResult` for the outcomes and the protocol for errors."""
        if self._task is None:
            raise RuntimeError("step() before reset()")
        if self._done:
            raise RuntimeError("step() after the end of the episode")
        last = self._turns == self._max_searches
        self._turns += 1
        kind, content = parse_action(action)
        if kind == "answer":
            self._done = True
            return self._answer(content, self._task)
        if last:
            self._done = True
            scores = dict.fromkeys(_scores("", self._task), 0.0)
            return StepResult("", True, 0.0, "invalid" if kind == "invalid" else "no_answer", scores=scores)
        if kind == "search":
            self._searches += 1
            return self._search(content)
        return StepResult(self._observation([self._notices.invalid], self._is_last()), False, None, "invalid")

    def _answer(self, prediction: str, task: Task) -> StepResult:
        reward, scores = self._score(prediction, task.answers), _scores(prediction, task)
        return StepResult("", True, reward, "answer", answer=prediction, scores=scores)

    def _is_last(self) -> bool:
        return self._turns == self._max_searches

    def _search(self, query: str) -> StepResult:
        last = self._is_last()
        try:
            passages = self._index.search(query, self._top_k)
        except RetrievalError as error:
            self._done = True
            return StepResult("", True, 0.0, "tool_error", tool_calls=1, tool_failures=1, error=str(error))
        documents = [_document(i, p) for i, p in enumerate(passages, start=1)]
        if not documents:
            text = self._observation([self._notices.nothing_found], last)
            return StepResult(text, False, None, "search", tool_calls=1)
        while documents:
            text = self._observation(documents, last)
            if self._count_tokens(text) <= self._limit:
                return StepResult(text, False, None, "search", tool_calls=1)
            documents.pop()
        text = self._observation([self._notices.oversized], last)
        return StepResult(text, False, None, "search", tool_calls=1, oversized=True)

    def _observation(self, parts: list[str], last: bool) -> str:
        body = "\n".join(parts)
        text = f"\n\n<information>{body}</information>\n\n"
        return f"{text}{self._notices.last_turn}\n\n" if last else text

    def snapshot(self) -> dict[str, Any]:
        """``{"searches": int, "turns": int, "done": bool}``; the task is the caller's to keep."""
        if self._task is None:
            raise RuntimeError("snapshot() before reset()")
        return {"searches": self._searches, "turns": self._turns, "done": self._done}

    def restore(self, state: dict[str, Any]) -> None:
        """See the protocol."""
        if self._task is None:
            raise RuntimeError("restore() before reset()")
        searches, turns, done = (state.get(name) for name in ("searches", "turns", "done"))
        if type(searches) is not int or type(turns) is not int or type(done) is not bool:
            raise ValueError(f"not a SearchQA snapshot: {state!r}")
        if not 0 <= searches <= min(turns, self._max_searches) or turns > self._max_searches + done:
            raise ValueError(f"snapshot {state!r} is impossible with max_searches = {self._max_searches}")
        self._searches, self._turns, self._done = searches, turns, done


def _scores(prediction: str, task: Task) -> dict[str, float]:
    """The common figures and the set's own."""
    golds = task.answers
    common = {"exact_match": exact_match(prediction, golds), "f1": token_f1(prediction, golds)}
    return common | official_scores(task.source, prediction, golds)


def _document(number: int, passage: Passage) -> str:
    return f"Doc {number}(Title: {neutralize(passage.title)}) {neutralize(passage.text)}"
