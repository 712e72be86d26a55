"""What sampling cost: "equal sampling cost" is only a claim if it is counted (algorithm.md, section 7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from .engines.protocol import EngineCounters
from .rollout.tree import RolloutTree


@dataclass(frozen=True)
class Ledger:
    """Counts over a set of rollout trees; every generation request is one turn, so one node."""

    leaves: int = 0
    bare_rollouts: int = 0
    turns: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens served from the engine's prefix cache
    continuation_prompt_tokens: int = 0
    continuation_cached_tokens: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    tool_errors: int = 0  # rollouts that a tool's failure ended
    oversized_tool_results: int = 0
    generation_limit: int = 0  # turns cut at sampling.turn_tokens
    context_limit: int = 0  # rollouts ended by sampling.context_tokens

    @property
    def computed_prompt_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def to_dict(self) -> dict[str, int]:
        return asdict(self) | {"computed_prompt_tokens": self.computed_prompt_tokens}

    def disagreement(self, engine: EngineCounters) -> dict[str, int]:
        """Engine's count minus the ledger's, by name: all zero when the ledger is whole."""
        return {name: getattr(engine, name) - getattr(self, name) for name in asdict(engine)}


def count(trees: Sequence[RolloutTree]) -> Ledger:
    """The ledger of `trees`."""
    turns = [node for tree in trees for node in tree.nodes[1:]]
    branched = [node for node in turns if node.kind == "continuation"]
    leaves = [node for node in turns if node.reward is not None]
    return Ledger(
        leaves=len(leaves),
        bare_rollouts=sum(node.kind == "bare" for node in leaves),
        turns=len(turns),
        generated_tokens=sum(sum(node.loss_mask) for node in turns),
        prompt_tokens=sum(node.prompt_tokens for node in turns),
        cached_tokens=sum(node.cached_tokens for node in turns),
        continuation_prompt_tokens=sum(node.prompt_tokens for node in branched),
        continuation_cached_tokens=sum(node.cached_tokens for node in branched),
        tool_calls=sum(node.tool_calls for node in turns),
        tool_failures=sum(node.tool_failures for node in turns),
        tool_errors=sum(bool(node.error) for node in leaves),
        oversized_tool_results=sum(node.oversized_results for node in turns),
        generation_limit=sum(node.truncation == "generation_limit" for node in turns),
        context_limit=sum(node.truncation == "context_limit" for node in turns),
    )
