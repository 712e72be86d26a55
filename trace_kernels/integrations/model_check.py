"""Proofs that a transformers model honours a tree layout, from its code, its config and a few tokens."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..layout import TreeLayout
from .attention_function import NAME, UnsupportedModelError, no_mask, tree_attention_forward

LAYER_TYPES = {"full_attention", "sliding_attention"}
# Tensors that decoders hand to every attention function and that are the layout's, or the op's, to use.
KNOWN_TENSORS = {"position_ids", "cache_position", "position_embeddings", "s_aux"}
# Distances, in tokens, at which a layer's own mask is compared with ours; beyond any context length.
DISTANCES = [-2, -1, 0, *(2**i for i in range(21))]


def check_architecture(model: PreTrainedModel) -> None:
    """Refuses what the model's code and config alone show.

    Raises:
        UnsupportedModelError: layers that are not attention, attention dropout, positions counted by index,
            attention that does not come from transformers' AttentionInterface.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if others:
        raise UnsupportedModelError(
            f"{name} has layers of type {others}, only {sorted(LAYER_TYPES)} go through tree attention"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedModelError(
            f"{name}: config.attention_dropout is {config.attention_dropout}, set it to 0.0"
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise UnsupportedModelError(
            f"{name}: config.attn_temperature_tuning scales queries by their index in the row, not by their depth"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{name}: config.alibi adds a bias to the scores, which is not supported")
    source = inspect.getsource(sys.modules[type(model).__module__])
    if "ALL_ATTENTION_FUNCTIONS" not in source or not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} does not take its attention from transformers' AttentionInterface"
        )


def probe(model: PreTrainedModel) -> None:
    """Runs a chain, a tree and the same tree with its branches swapped, five tokens each, through the model.

    Every layer must call the attention function with the layout, hide exactly what the model's own mask hides, and
    ask for nothing the op does not know; a token must not reach a sibling branch; and a token's output must not
    depend on where in the row its path is packed.

    Raises:
        UnsupportedModelError: the model fails, or one of these does not hold.
    """
    name = type(model).__name__
    layers = model.config.get_text_config().num_hidden_layers
    tree = [-1, 0, 0]
    tokens = torch.arange(5) % model.config.get_text_config().vocab_size
    changed = tokens.clone()
    changed[2] = tokens[0]  # the first branch's only token
    with evaluating(model):
        try:
            with _recording_masks() as layer_calls:
                _hidden(model, tokens, [-1], [5])
            first = _hidden(model, tokens, tree, [2, 1, 2])
            second = _hidden(model, changed, tree, [2, 1, 2])
            swapped = _hidden(model, tokens[[0, 1, 3, 4, 2]], tree, [2, 2, 1])
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"{name} failed on a five-token tree: {error}") from error
    if len(layer_calls) != layers:
        raise UnsupportedModelError(
            f"{name}: {len(layer_calls)} of its {layers} layers call the attention interface"
        )
    size = first.abs().max()
    if (first - second)[[0, 1, 3, 4]].abs().max() > 1e-3 * size:
        raise UnsupportedModelError(f"{name}: a token reaches a sibling branch by a way other than attention")
    if torch.equal(first[2], second[2]):
        raise UnsupportedModelError(
            f"{name}: its output does not depend on its input tokens, nothing can be checked"
        )
    # Half types round the same sums differently when rows move; a shifted position moves every output by far more.
    allowed = 1e-4 if next(model.parameters()).dtype == torch.float32 else 2e-2
    moved = (first[[0, 1, 3, 4, 2]] - swapped).pow(2).mean().sqrt()
    if moved > allowed * first.pow(2).mean().sqrt():
        raise UnsupportedModelError(
            f"{name}: a token's output depends on its place in the row, not on its depth alone"
        )


def _hidden(
    model: PreTrainedModel, tokens: torch.Tensor, parents: list[int], lengths: list[int]
) -> torch.Tensor:
    """fp32 [T, ...], the model's first output."""
    layout = TreeLayout.from_segments(parents, lengths, device=model.device)
    ids = tokens.to(model.device)[None]
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=layout.depth[None], tree_layout=layout, use_cache=False)
    return out[0][0].float()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it every module is in evaluation mode; each gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _recording_masks() -> Iterator[list[str]]:
    """Within it, every layer's call is listed and its mask, as the model would build it, compared with ours."""
    masks: list[tuple[torch.Tensor, Callable[..., torch.Tensor]]] = []
    calls: list[str] = []

    def mark(
        *args: Any, mask_function: Callable[..., torch.Tensor], q_length: int, kv_length: int, **kwargs: Any
    ) -> torch.Tensor:
        no_mask(*args, **kwargs)
        marker = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
        masks.append((marker, mask_function))
        return marker

    def attend(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        where = type(module).__name__
        calls.append(where)
        unknown = {k for k, v in kwargs.items() if isinstance(v, torch.Tensor)} - KNOWN_TENSORS
        for marker, mask_function in masks:
            # Some models slice the mask on the way: the storage is what tells whose it is.
            if attention_mask is not None and _storage(attention_mask) == _storage(marker):
                _compare_mask(where, mask_function, kwargs.get("sliding_window"))
                attention_mask = None
        result = tree_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
        if unknown:
            raise UnsupportedModelError(
                f"{where}: gives its attention {sorted(unknown)}, which is not supported"
            )
        return result

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mark)
    try:
        yield calls
    finally:
        AttentionInterface.register(NAME, tree_attention_forward)
        AttentionMaskInterface.register(NAME, no_mask)


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _compare_mask(where: str, mask_function: Callable[..., torch.Tensor], window: int | None) -> None:
    near = [] if window is None else [window - 1, window, window + 1]
    distance = torch.tensor([*DISTANCES, *near])
    query = torch.full_like(distance, 2**21 + 1)
    want = (distance >= 0) & (distance < (2**62 if window is None else window))
    try:
        seen = mask_function(torch.zeros_like(query), torch.zeros_like(query), query, query - distance)
    except Exception as error:
        raise UnsupportedModelError(f"{where}: its mask is not a function of positions: {error}") from error
    wrong = distance[seen.cpu() != want]
    if len(wrong):
        given = "no sliding_window" if window is None else f"sliding_window={window}"
        raise UnsupportedModelError(
            f"{where}: gives its attention {given}, but its own mask differs from that at a distance of "
            f"{int(wrong[0])} tokens"
        )
