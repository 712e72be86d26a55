"""Forests as hypothesis draws and shrinks them; apart from `forests.py`, which needs no hypothesis."""

from hypothesis import strategies as st

from .forests import Forest


@st.composite
def forests(draw: st.DrawFn, max_nodes: int = 14, max_length: int = 6) -> Forest:
    parents: list[int] = []
    path: list[int] = []
    for node in range(draw(st.integers(1, max_nodes))):
        path = path[: draw(st.integers(0, len(path)))]
        parents.append(path[-1] if path else -1)
        path = [*path, node]
    lengths = draw(st.lists(st.integers(0, max_length), min_size=len(parents), max_size=len(parents)))
    if not sum(lengths):
        lengths[0] = 1
    return Forest(parents, lengths)
