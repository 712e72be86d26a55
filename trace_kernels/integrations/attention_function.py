"""The attention function that transformers calls under the name `"trace_tree"`, and the mask function beside it.

Whatever cannot be computed exactly is refused with the reason: a call without a layout, other position ids,
dropout, a mask, a cache, a bias, rotary frequencies that depend on the length of the call.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..layout import TreeLayout
from ..memo import once_per_layout
from ..tree_attention import tree_attention

NAME = "trace_tree"
# Extra keywords of attention functions that change the result and that the op does not know.
UNSUPPORTED = {
    "position_bias": "a position bias",
    "cu_seq_lens_q": "packed sequences given by cumulative lengths",
    "head_mask": "a head mask",
    "indices": "sparse attention",
    "block_indices": "block-sparse attention",
}


class UnsupportedModelError(ValueError):
    """The model, or this call of it, cannot run on tree attention; the message says why."""


def tree_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: query [1, H, T, D], key/value [1, Hk, T, D] -> ([1, T, H, D], None).

    `tree_layout` and, optionally, `tree_backend` come from the model call's extra keywords; the model itself gives
    `sliding_window` (tokens of the path, the query's own included), `softcap` and `s_aux` (sink logits [H]).

    Raises:
        UnsupportedModelError: no `tree_layout` reached this layer, or the call asks for something tree
            attention does not compute.
    """
    layout = kwargs.get("tree_layout")
    where = type(module).__name__
    if not isinstance(layout, TreeLayout):
        got = "nothing" if layout is None else type(layout).__name__
        raise UnsupportedModelError(
            f"{where} runs attention {NAME!r} but got {got} as tree_layout: call "
            "model(..., position_ids=layout.depth[None], tree_layout=layout), or set another implementation"
        )
    _refuse_options(where, module, attention_mask, dropout, kwargs)
    if query.shape[0] != 1:
        raise UnsupportedModelError(
            f"{where}: got a batch of {query.shape[0]}: pack the rows into one layout instead"
        )
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"{where}: {key.shape[2]} keys for {query.shape[2]} queries: no key/value cache here"
        )
    _check_positions(module, layout, kwargs.get("position_ids"))
    _check_rope(where, layout, getattr(module, "config", None))
    out = tree_attention(
        query,
        key,
        value,
        layout,
        scale=scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        backend=kwargs.get("tree_backend") or "auto",
    )
    return out.transpose(1, 2), None


def _refuse_options(
    where: str,
    module: nn.Module,
    attention_mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    if attention_mask is not None:
        raise UnsupportedModelError(f"{where}: got an attention mask, but the tree layout is the whole mask")
    if dropout:
        raise UnsupportedModelError(
            f"{where}: attention dropout {dropout}: set attention_dropout=0.0 in the config"
        )
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise UnsupportedModelError(f"{where}: its attention is not causal, tree attention is")
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{where}: {name} given: {what} is not supported")
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError(f"{where}: output_attentions: the weights are never materialised")


class _Checked(NamedTuple):
    """Position ids that were found right, and the attention they last reached."""

    position_ids: weakref.ref[torch.Tensor]
    config: Any
    layer: int


def _check_positions(module: nn.Module, layout: TreeLayout, position_ids: torch.Tensor | None) -> None:
    """Most decoders hand the position ids on; any but the layout's depths would rotate branches wrongly."""
    if position_ids is None:
        return
    where = type(module).__name__
    wrong = f"{where}: position_ids are not the layout's depths: pass position_ids=layout.depth[None]"
    if position_ids.shape[-1] != layout.num_tokens:
        raise UnsupportedModelError(wrong)
    # The values are unknown while a graph is captured: reading them would split it.
    if torch.compiler.is_compiling():
        return
    # One comparison per model call, not per layer: on an accelerator each is a wait.
    seen = once_per_layout(layout.chains, "positions", list[_Checked])
    if not (seen and _is_same_call(seen[0], module, position_ids)) and not _are_depths(position_ids, layout):
        raise UnsupportedModelError(wrong)
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    seen[:] = [_Checked(weakref.ref(position_ids), config, -1 if layer is None else layer)]


def _is_same_call(checked: _Checked, module: nn.Module, position_ids: torch.Tensor) -> bool:
    """Layers get the same tensor, or, under the hooks of a `device_map`, each a copy of its own.

    With hooks a later layer of the same model goes on with a call; a model's first one begins another.
    """
    if checked.position_ids() is position_ids:
        return True
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if config is None or config is not checked.config or layer is None or not hasattr(module, "_hf_hook"):
        return False
    return 0 <= checked.layer < int(layer)


def _are_depths(position_ids: torch.Tensor, layout: TreeLayout) -> bool:
    return bool((position_ids == layout.depth.to(position_ids.device)).all())


def _check_rope(where: str, layout: TreeLayout, config: Any) -> None:
    """Dynamic NTK and LongRoPE choose frequencies by a call's longest path, flat rollouts each by its own."""
    limit = rope_limit(config)
    if limit is not None and layout.longest_path > limit:
        raise UnsupportedModelError(
            f"{where}: a path of {layout.longest_path} tokens, but from {limit} on this model's rotary frequencies "
            "depend on the length of each rollout: pack shorter rollouts, or set a fixed rope type (yarn, linear)"
        )


def rope_limit(config: Any) -> int | None:
    """The longest path, in tokens, up to which the rotary frequencies do not depend on a call's length.

    None: they never do. `transformers.modeling_rope_utils.dynamic_rope_update` is the rule.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    limits: list[int] = []
    for parameters in per_layer_type or [rope]:
        kind = parameters.get("rope_type") or ""
        if kind == "longrope":
            limits.append(parameters["original_max_position_embeddings"])
        elif "dynamic" in kind:
            limits.append(config.max_position_embeddings)
    return min(limits) if limits else None


def no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    """The registered mask function: the layout is the mask, a padding mask may only say that nothing is hidden."""
    if attention_mask is None:
        return
    if torch.compiler.is_compiling() or not bool(attention_mask.all()):
        raise UnsupportedModelError(
            "attention_mask hides tokens: leave it out, the layout's padding is enough"
        )


AttentionInterface.register(NAME, tree_attention_forward)
AttentionMaskInterface.register(NAME, no_mask)
