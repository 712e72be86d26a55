"""TRL's async GRPO (trl 1.16, `trl.experimental.async_grpo`) on tree attention instead of FlashAttention-3.

    trainer = AsyncGRPOTrainer(...)
    enable_tree_rows(trainer.model)

TRL packs one `TreeRow` of rollouts per rank and attends by copying every segment's root-to-segment keys and values.
Those rows are DFS packings, so the same call runs on a `TreeLayout` without the copies. In a training loop of your
own, `pack_row` also saves the extra token per branch: TRL's trie shares a token only where the next one agrees too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..layout import TreeLayout, on_host
from ..memo import once_per_layout
from ..rollouts import PackedRollouts, pack_rollouts
from .attention_function import UnsupportedModelError, no_mask, tree_attention_forward
from .transformers import enable_tree_attention

if TYPE_CHECKING:
    from trl.experimental.async_grpo.packing import TreeRow

NAME = "trace_tree_rows"
KEYS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


def enable_tree_rows(model: PreTrainedModel) -> PreTrainedModel:
    """Switches a model to tree attention in place, for calls with the keywords TRL's trainer gives.

    To be called once the trainer is made (TRL creates the model for its own attention).

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: as in `enable_tree_attention`; the former attention implementation is restored.
    """
    enable_tree_attention(model)
    model.set_attn_implementation(NAME)
    return model


def pack_row(
    row: TreeRow, *, pad_to_multiple: int | None = None, device: torch.device | str | None = None
) -> PackedRollouts:
    """The samples of a `TreeRow` packed without its extra token per branch.

    The edges are the row's loss terms in the order of `row.pack()`: `old_log_probs`, `advantages` and `segment_id`
    [M] found there go with them, `edge_src` takes the place of `token_index`, and `edge_labels` are the targets.

    Args:
        row: `trl.experimental.async_grpo.packing.TreeRow`.
        pad_to_multiple, device: as in `pack_rollouts`.
    """
    return pack_rollouts(
        [sample["input_ids"] for sample in row.samples],
        loss_masks=[sample["completion_mask"] for sample in row.samples],
        pad_to_multiple=pad_to_multiple,
        device=device,
    )


def row_layout(packed: Mapping[str, torch.Tensor]) -> TreeLayout:
    """The layout of a row as TRL packed it, on the device of its `tree_kv_index`; `depth` is its `position_ids`.

    Its loss edges are `(token_index, shift_labels[token_index])`.

    Args:
        packed: `TreeRow.pack()`, or at least `tree_kv_index [K]`, `tree_cu_seqlens_q [S + 1]` and
            `tree_cu_seqlens_k [S + 1]`, as TRL gives them to its attention: without the collator's -1 padding.

    Raises:
        ValueError: a key is missing, or the three do not describe paths of segments.
    """
    missing = [key for key in KEYS if packed.get(key) is None]
    if missing:
        raise ValueError(
            f"packed: {missing} missing, expected the keys of TRL's TreeRow.pack(): {list(KEYS)}"
        )
    kv_index, (queries, keys) = packed[KEYS[0]], (on_host(packed[key]).astype(np.int64) for key in KEYS[1:])
    length, path = np.diff(queries), np.diff(keys)
    if not length.size or length.shape != path.shape or keys[-1] != kv_index.numel() or (length > path).any():
        raise ValueError(
            f"packed: {length.size} segments, {path.size} paths that end at {keys[-1:]} and {kv_index.numel()} "
            "entries of tree_kv_index do not go together (is the collator's padding still there?)"
        )
    # A path ends with the segment itself; what stands before that is the last token of the parent segment.
    parents = np.full(length.size, -1)
    below = np.flatnonzero(path > length)
    before = torch.from_numpy(keys[1:][below] - length[below] - 1).to(kv_index.device)
    parents[below] = np.searchsorted(queries, on_host(kv_index[before]), side="right") - 1
    wrong = "packed: the paths in tree_kv_index are not those of its segments in DFS pre-order"
    try:
        layout = TreeLayout.from_segments(parents, length, device=kv_index.device)
    except ValueError as error:
        raise ValueError(f"{wrong}: {error}") from error
    if (on_host(layout.depth)[queries[1:] - 1] != path - 1).any():
        raise ValueError(wrong)
    return layout


def tree_row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: `tree_attention_forward`, with the layout read from TRL's keywords."""
    if kwargs.get(KEYS[0]) is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} runs attention {NAME!r} but got no {KEYS[0]}: it serves TRL's async GRPO; "
            "elsewhere use enable_tree_attention and tree_layout=..."
        )
    # The same tensor object reaches all layers, and the recomputation under activation checkpointing.
    layout = once_per_layout(kwargs[KEYS[0]], NAME, lambda: row_layout(kwargs))
    return tree_attention_forward(module, query, key, value, attention_mask, tree_layout=layout, **kwargs)


AttentionInterface.register(NAME, tree_row_attention)
AttentionMaskInterface.register(NAME, no_mask)
