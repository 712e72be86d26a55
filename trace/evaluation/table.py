"""An evaluation's figures as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .figures import SUCCESS, Estimate, Figures

_COMMON = (SUCCESS, "exact_match", "f1", "accuracy")
_SHARES = ("answered", "invalid", "truncated", "too_long", "tool_errors")
_AMOUNTS = ("turns", "tool_calls", "generated_tokens")


def markdown(
    sets: Mapping[str, Figures],
    sources: Mapping[str, Mapping[str, Figures]],
    average: Mapping[str, Estimate],
) -> str:
    """Two tables: scores in percent with their 95 % intervals, and what the rollouts were like.

    `sources` holds the figures of each source within a set that has several; `average` is over sets.
    """
    rows = [(name, one) for name, one in _with_sources(sets, sources)]
    everything = [*dict.fromkeys(score for _, one in rows for score in one.scores)]
    common = [name for name in _COMMON if name in everything]
    common += [name for name in everything if name.startswith("pass@")]
    own = [name for name in everything if name not in common]
    samples = next(iter(sets.values())).samples

    header = ["set", "questions", *(_title(name, samples) for name in common)]
    lines = [
        [name, str(one.questions), *(_percent(one.scores.get(score)) for score in common)]
        for name, one in rows
    ]
    if len(sets) > 1:
        lines.append(["average of sets", "", *(_percent(average.get(score)) for score in common)])
    if own:
        header.append("published metric")
        for line, (_, one) in zip(lines, rows, strict=False):
            line.append(", ".join(f"{s} {_percent(one.scores[s])}" for s in own if s in one.scores) or "–")
        if len(sets) > 1:
            lines[-1].append("–")

    rollout_header = ["set", "rollouts", *(f"{_plain(n)} %" for n in _SHARES), *map(_plain, _AMOUNTS)]
    rollout_lines = [
        [
            name,
            str(one.questions * one.samples),
            *(f"{100 * one.rollouts[n]:.1f}" for n in _SHARES),
            *(f"{one.rollouts[n]:.2f}" for n in _AMOUNTS[:2]),
            f"{one.rollouts['generated_tokens']:.1f}",
        ]
        for name, one in rows
    ]
    return (
        "Scores in percent, [95 % bootstrap interval over questions]:\n\n"
        + _table(header, lines)
        + "\nPer rollout (invalid: share of turns):\n\n"
        + _table(rollout_header, rollout_lines)
    )


def _with_sources(
    sets: Mapping[str, Figures], sources: Mapping[str, Mapping[str, Figures]]
) -> list[tuple[str, Figures]]:
    rows = []
    for name, one in sets.items():
        rows.append((name, one))
        rows += [(f"– {source}", part) for source, part in sources.get(name, {}).items()]
    return rows


def _title(score: str, samples: int) -> str:
    return f"{_plain(score)} (avg@{samples})" if score == SUCCESS and samples > 1 else _plain(score)


def _plain(name: str) -> str:
    return name.replace("_", " ")


def _percent(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{100 * estimate.mean:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    right = ["---", *("---:" for _ in header[1:])]
    return "".join(
        f"| {' | '.join(cell.replace('|', '/') for cell in row)} |\n" for row in (header, right, *lines)
    )
