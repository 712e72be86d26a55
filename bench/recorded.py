"""Workloads from recorded rollouts: tau-bench conversations, Tree-of-Thoughts searches, groups of eight samples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .workloads import Workload

TOKENIZER = Path(__file__).resolve().parents[1] / "runs/smollm2-135m/tokenizer.json"
# How many of the files' tasks make one forest, so that it is of a micro-batch's size.
TAU_TASKS, GAMES, PROMPTS = 4, 8, 8

Token = tuple[int, bool]  # id, whether the model sampled it
Encode = Callable[[str], list[int]]


def encoder() -> tuple[str, Encode]:
    """SmolLM2's tokenizer where `make smollm2` has been run, else a stand-in: words cut to four letters, marks."""
    if TOKENIZER.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        return "SmolLM2 tokens", lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    ids: dict[str, int] = {}

    def encode(text: str) -> list[int]:
        return [ids.setdefault(piece, len(ids)) for piece in re.findall(r" ?\w{1,4}|[^\w]", text)]

    return "4-letter pieces", encode


def recorded(folder: Path) -> list[Workload]:
    """All workloads of a folder with `tau_bench` and `rollout_groups`; OSError where a file is missing."""
    unit, encode = encoder()
    return [
        from_sequences(f"tau-bench airline, {unit}", _tau(folder / "tau_bench", encode)),
        from_sequences(f"game of 24, {unit}", _games(folder / "rollout_groups", encode)),
        _groups(f"8 samples a prompt, {unit}", folder / "rollout_groups", encode),
    ]


def from_sequences(name: str, sequences: Iterable[Sequence[Token]]) -> Workload:
    """The forest that shares every common prefix of the sequences; equal ones share everything.

    Segments end where sequences part or end, and where sampled tokens begin or end.
    """
    parents: list[int] = []
    lengths: list[int] = []
    sampled: list[bool] = []

    def segment(parent: int, length: int, wrote: bool) -> int:
        parents.append(parent)
        lengths.append(length)
        sampled.append(wrote)
        return len(parents) - 1

    # Sorted, sequences with a common prefix are neighbours. Depth first, without recursion.
    stack = [(-1, 0, sorted(map(tuple, sequences)))]
    while stack:
        parent, depth, group = stack.pop()
        stop, first = depth, group[0]
        # The first and the last of sorted sequences share what all of them share.
        while (
            stop < min(len(first), len(group[-1]))
            and first[stop] == group[-1][stop]
            and first[stop][1] == first[depth][1]
        ):
            stop += 1
        if stop > depth:
            parent = segment(parent, stop - depth, first[depth][1])
        ended = [sequence for sequence in group if len(sequence) == stop]
        going = [sequence for sequence in group if len(sequence) > stop]
        if going or len(ended) > 1:
            for _ in ended:
                segment(parent, 0, False)
        begin = 0
        parts = []
        for place in range(1, len(going) + 1):
            if place == len(going) or going[place][stop] != going[begin][stop]:
                parts.append((parent, stop, going[begin:place]))
                begin = place
        stack += reversed(parts)
    return Workload(name, tuple(parents), tuple(lengths), tuple(sampled))


def _tau(folder: Path, encode: Encode) -> list[list[Token]]:
    """Whole conversations of the first tasks: four trials each, all below one system prompt."""
    runs: list[dict[str, Any]] = json.loads((folder / "gpt-4o-airline_public.json").read_text())
    found = []
    for run in (run for run in runs if run["task_id"] < TAU_TASKS):
        sequence: list[Token] = []
        for message in run["traj"]:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            wrote = message["role"] == "assistant"
            sequence += [(token, False) for token in encode(f"\n{message['role']}\n")]
            sequence += [(token, wrote) for token in encode(f"{message.get('content') or ''}{calls}")]
        found.append(sequence)
    return found


def _games(folder: Path, encode: Encode) -> list[list[Token]]:
    """Every candidate that a breadth-first search over equations looked at and did not go on from."""
    games: list[dict[str, Any]] = json.loads((folder / "tot_game24_bfs_public.json").read_text())
    found = []
    for game in games[:GAMES]:
        texts = {text for step in game["steps"] for text in step["new_ys"]}
        prompt = [(token, False) for token in encode(f"Input: {game['steps'][0]['x']}\n")]
        for text in texts:
            if any(other != text and other.startswith(text) for other in texts):
                continue
            # By lines: an equation's tokens must not depend on what follows.
            lines = [(token, True) for line in text.splitlines(True) for token in encode(line)]
            found.append(prompt + lines)
    return found


def _groups(name: str, folder: Path, encode: Encode) -> Workload:
    """Prompts with eight samples each; what samples happen to share at their start is not shared here."""
    lines = (folder / "math_cot_8samples_public.jsonl").read_text().splitlines()[:PROMPTS]
    parents: list[int] = []
    lengths: list[int] = []
    for record in map(json.loads, lines):
        root = len(parents)
        parents += [-1, *[root] * len(record["code"])]
        prompt = len(encode(f"{record['system']}\n{record['query']}\n"))
        lengths += [prompt, *(len(encode(sample)) for sample in record["code"])]
    return Workload(name, tuple(parents), tuple(lengths), tuple(parent >= 0 for parent in parents))
