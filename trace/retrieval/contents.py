"""`contents`, the one string in which corpora and servers in Search-R1's format keep title and text."""

from __future__ import annotations

from trace_rl.tasks.task import Passage


def join_contents(passage: Passage) -> str:
    """The quoted title, a newline, the text; line breaks in the title become blanks."""
    return f'"{" ".join(passage.title.splitlines())}"\n{passage.text}'


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text: the first line, quoted or not, and the rest, both without surrounding white space."""
    title, _, text = contents.partition("\n")
    title = title.strip()
    if len(title) >= 2 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title.strip(), text.strip()
