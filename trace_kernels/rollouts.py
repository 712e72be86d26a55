"""`pack_rollouts`: rollouts as lists of token ids in, a packed forest with its loss edges out.

Common prefixes are found in the token ids alone, so rollouts of one prompt, of several prompts and with branches
anywhere need no description of their tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from .forest import as_int_vector
from .layout import Ints, TreeLayout, on_host

Bools = NDArray[np.bool_]
Tokens = Sequence[int] | NDArray[np.integer] | torch.Tensor
Mask = Sequence[bool] | NDArray[np.bool_] | torch.Tensor


@dataclass(frozen=True, eq=False)
class PackedRollouts:
    """R rollouts packed into T tokens, and the E loss edges of their log-probs.

    An edge is one token of one rollout: `log softmax(logits[edge_src])[edge_labels]` is its log-prob. A token
    shared by several rollouts has one edge for each; at a branch point one `edge_src` has a different label per
    branch. Edges stand in rollout order, then in token order, so that

        logprobs = torch.zeros(R, L)
        logprobs[packed.edge_rollout, packed.edge_position] = edge_logprobs

    is the padded batch of an unpacked forward, entry [r, i] for token i of rollout r.

    Attributes:
        layout: the forest.
        input_ids: int64 [T], 0 at padding tokens.
        edge_src: int64 [E], packed position whose hidden state predicts the edge's token.
        edge_labels: int64 [E], the token.
        edge_rollout: int64 [E], index of the rollout.
        edge_position: int64 [E], index of the token in its rollout, at least 1.
        positions: R tensors int64 [L_r], the packed position of every token of each rollout:
            `values[packed.positions[r]]` are any per-token values [T, ...] along rollout r.
    """

    layout: TreeLayout
    input_ids: torch.Tensor
    edge_src: torch.Tensor
    edge_labels: torch.Tensor
    edge_rollout: torch.Tensor
    edge_position: torch.Tensor
    positions: tuple[torch.Tensor, ...]

    def to(self, device: torch.device | str) -> PackedRollouts:
        """The same packing with its tensors on `device`."""
        lengths = [len(p) for p in self.positions]
        return replace(
            self,
            layout=self.layout.to(device),
            input_ids=self.input_ids.to(device),
            edge_src=self.edge_src.to(device),
            edge_labels=self.edge_labels.to(device),
            edge_rollout=self.edge_rollout.to(device),
            edge_position=self.edge_position.to(device),
            positions=torch.cat(self.positions).to(device).split(lengths),
        )


def pack_rollouts(
    rollouts: Sequence[Tokens],
    *,
    loss_masks: Sequence[Mask] | None = None,
    pad_to_multiple: int | None = None,
    device: torch.device | str | None = None,
) -> PackedRollouts:
    """Packs rollouts so that every common prefix stands once.

    Args:
        rollouts: R sequences of token ids >= 0 (lists, arrays or int tensors [L_r]), prompt included, without
            padding. Duplicates, a rollout that is a prefix of another, and rollouts that share nothing are fine.
        loss_masks: R masks [L_r] of bools, True where a token is in the loss (as in a completion mask). Default:
            every token. A rollout's first token has no edge in either case: nothing predicts it.
        pad_to_multiple: round T up to a multiple of this with padding tokens.
        device: where the tensors live (default: CPU).

    Returns:
        The packing. Branches stand in an order of its own (the same for the same rollouts), not as given.

    Raises:
        ValueError: no rollout, an empty one, a negative id, anything but integers, masks that do not fit their
            rollouts, `pad_to_multiple` < 1. The message names the rollout.
    """
    tokens, lengths = _checked_tokens(rollouts)
    offsets = np.cumsum(lengths) - lengths
    position, starts, last_shared = _trie(tokens, offsets, lengths)
    layout = _layout(starts, last_shared, int(position.max()) + 1, pad_to_multiple, device)

    input_ids = np.zeros(layout.num_tokens, dtype=np.int64)
    input_ids[position] = tokens
    in_loss = np.ones(tokens.size, dtype=bool) if loss_masks is None else _checked_masks(loss_masks, lengths)
    in_loss[offsets] = False
    edge = np.flatnonzero(in_loss)
    rollout = np.repeat(np.arange(lengths.size), lengths)[edge]

    def tensor(values: Ints) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return PackedRollouts(
        layout=layout,
        input_ids=tensor(input_ids),
        edge_src=tensor(position[edge - 1]),
        edge_labels=tensor(tokens[edge]),
        edge_rollout=tensor(rollout),
        edge_position=tensor(edge - offsets[rollout]),
        positions=tensor(position).split(lengths.tolist()),
    )


def _checked_tokens(rollouts: Sequence[Tokens]) -> tuple[Ints, Ints]:
    """All token ids end to end [N], and the number of tokens of each rollout [R]."""
    if not len(rollouts):
        raise ValueError("rollouts: expected at least one, got none")
    found = []
    for number, rollout in enumerate(rollouts):
        ids = as_int_vector(on_host(rollout), f"rollouts[{number}]")
        if ids.size == 0:
            raise ValueError(f"rollouts[{number}]: empty, a rollout needs at least one token: leave it out")
        if ids.min() < 0:
            at = int(np.argmax(ids < 0))
            raise ValueError(
                f"rollouts[{number}][{at}] = {ids[at]}: a token id must not be negative (cut padding off)"
            )
        found.append(ids)
    return np.concatenate(found), np.array([ids.size for ids in found], dtype=np.int64)


def _checked_masks(masks: Sequence[Mask], lengths: Ints) -> Bools:
    """The masks end to end, bool [N]."""
    if len(masks) != lengths.size:
        raise ValueError(f"loss_masks: expected {lengths.size}, one per rollout, got {len(masks)}")
    found = []
    for number, (mask, length) in enumerate(zip(masks, lengths.tolist(), strict=True)):
        array = np.asarray(on_host(mask))
        if array.shape != (length,):
            raise ValueError(
                f"loss_masks[{number}]: expected shape ({length},) like its rollout, got {array.shape}"
            )
        if array.dtype != bool and not (array.dtype.kind in "iu" and np.isin(array, (0, 1)).all()):
            raise ValueError(f"loss_masks[{number}]: expected bools (or 0 and 1), got dtype {array.dtype}")
        found.append(array.astype(bool))
    return np.concatenate(found)


def _trie(tokens: Ints, offsets: Ints, lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Packed position of every token [N]; then, for every rollout that adds tokens to the packing, in packed
    order: the position of the first one [C], and of the token before it on the path [C] (-1: none)."""
    # Sorted by the bytes of their ids, rollouts with a common prefix are neighbours and a prefix comes before what
    # continues it: each shares most with the one before, and its new tokens are next in the trie's DFS pre-order.
    raw = tokens.tobytes()
    spans = list(zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True))
    order = sorted(range(len(spans)), key=[raw[8 * a : 8 * b] for a, b in spans].__getitem__)

    position = np.empty_like(tokens)
    starts: list[int] = []
    last_shared: list[int] = []
    total, before = 0, (0, 0)
    for start, stop in (spans[rollout] for rollout in order):
        shared = _common(tokens[slice(*before)], tokens[start:stop])
        position[start : start + shared] = position[before[0] : before[0] + shared]
        new = stop - start - shared
        if new:
            starts.append(total)
            last_shared.append(int(position[start + shared - 1]) if shared else -1)
            position[start + shared : stop] = np.arange(total, total + new)
            total += new
        before = (start, stop)
    return position, np.array(starts, dtype=np.int64), np.array(last_shared, dtype=np.int64)


def _common(first: Ints, second: Ints) -> int:
    """Length of the longest common prefix."""
    length = min(first.size, second.size)
    differ = first[:length] != second[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length


def _layout(
    starts: Ints,
    last_shared: Ints,
    total: int,
    pad_to_multiple: int | None,
    device: torch.device | str | None,
) -> TreeLayout:
    # Segments start where a rollout's own tokens start, and where others leave it: after the last shared token.
    cuts = np.union1d(starts, last_shared + 1)
    cuts = cuts[cuts < total]
    parents = np.arange(-1, cuts.size - 1)
    first = np.searchsorted(cuts, starts)
    parents[first] = np.searchsorted(cuts, last_shared, side="right") - 1
    return TreeLayout.from_segments(
        parents, np.diff(np.append(cuts, total)), pad_to_multiple=pad_to_multiple, device=device
    )
