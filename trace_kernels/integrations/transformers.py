"""Hugging Face models on tree attention: attention implementation `"trace_tree"`.

    enable_tree_attention(model)
    model(input_ids=tokens[None], position_ids=layout.depth[None], tree_layout=layout, use_cache=False)

Whatever cannot be computed exactly is refused with the reason: a call without a layout, other position ids, a
sliding window shorter than a path, softcap, sinks, dropout, a mask, a cache.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..layout import TreeLayout
from ..memo import once_per_layout
from ..tree_attention import tree_attention

NAME = "trace_tree"
# Extra keywords of attention functions that change the result and that the op does not know.
UNSUPPORTED = {
    "softcap": "logit soft-capping",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "cu_seq_lens_q": "packed sequences given by cumulative lengths",
    "head_mask": "a head mask",
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

    `tree_layout` and, optionally, `tree_backend` come from the model call's extra keywords.

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
    _refuse_options(where, module, layout, attention_mask, dropout, kwargs)
    if query.shape[0] != 1:
        raise UnsupportedModelError(
            f"{where}: got a batch of {query.shape[0]}: pack the rows into one layout instead"
        )
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError(
            f"{where}: {key.shape[2]} keys for {query.shape[2]} queries: no key/value cache here"
        )
    _check_positions(where, layout, kwargs.get("position_ids"))
    backend = kwargs.get("tree_backend") or "auto"
    out = tree_attention(query, key, value, layout, scale=scaling, backend=backend)
    return out.transpose(1, 2), None


def _refuse_options(
    where: str,
    module: nn.Module,
    layout: TreeLayout,
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
    window = kwargs.get("sliding_window")
    if window is not None and window < layout.longest_path:
        raise UnsupportedModelError(
            f"{where}: sliding window {window} on paths of up to {layout.longest_path} tokens"
        )
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"{where}: {name} given: {what} is not supported")
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError(f"{where}: output_attentions: the weights are never materialised")


def _check_positions(where: str, layout: TreeLayout, position_ids: torch.Tensor | None) -> None:
    """Most decoders hand the position ids on; any but the layout's depths would rotate branches wrongly."""
    if position_ids is None:
        return
    # One comparison per model call, not per layer: the same tensor object reaches all of them.
    seen = once_per_layout(layout.chains, "positions", list[Any])
    if seen and seen[0]() is position_ids:
        return
    depth = layout.depth.to(position_ids.device)
    if position_ids.shape[-1] != depth.shape[0] or not bool((position_ids == depth).all()):
        raise UnsupportedModelError(
            f"{where}: position_ids are not the layout's depths: pass position_ids=layout.depth[None]"
        )
    seen[:] = [weakref.ref(position_ids)]


def _no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedModelError(
            "attention_mask hides tokens: leave it out, the layout's padding is enough"
        )


AttentionInterface.register(NAME, tree_attention_forward)
AttentionMaskInterface.register(NAME, _no_mask)


def enable_tree_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Switches `model` to tree attention in place and proves that its architecture honours the layout.

    The architecture's code and config are inspected; when the weights are here (not on the meta device, not
    partitioned by ZeRO-3) a five-token tree is also run through the model: every layer must receive the
    layout, and a token must not reach a sibling branch. The model's mode is kept and no gradient is left
    behind.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: with the reason; the former attention implementation is then restored.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model: expected a transformers PreTrainedModel, got {type(model).__name__}"
        )
    _check_architecture(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        if model.config.get_text_config()._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"{type(model).__name__} did not accept attention implementation {NAME!r}"
            )
        if all(p.device.type != "meta" and p.numel() and not hasattr(p, "ds_id") for p in model.parameters()):
            _probe(model)
    except Exception:
        model.set_attn_implementation(before)
        raise
    return model


def _check_architecture(model: PreTrainedModel) -> None:
    name = type(model).__name__
    config = model.config.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        raise UnsupportedModelError(
            f"{name} has layers of type {others}, which do not go through attention alone"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModelError(f"{name}: config.attn_logit_softcapping is set, which is not supported")
    if getattr(config, "attention_dropout", 0.0):
        raise UnsupportedModelError(
            f"{name}: config.attention_dropout is {config.attention_dropout}, set it to 0.0"
        )
    source = inspect.getsource(sys.modules[type(model).__module__])
    if "ALL_ATTENTION_FUNCTIONS" not in source or not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} does not take its attention from transformers' AttentionInterface"
        )


def _probe(model: PreTrainedModel) -> None:
    name = type(model).__name__
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    layout = TreeLayout.from_segments([-1, 0, 0], [2, 1, 2], device=model.device)
    tokens = torch.arange(5, device=model.device) % config.vocab_size
    changed = tokens.clone()
    changed[2] = tokens[0]  # the first branch's only token

    calls: list[bool] = []
    attention = AttentionInterface._global_mapping[NAME]

    def counting(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        calls.append(isinstance(kwargs.get("tree_layout"), TreeLayout))
        return attention(*args, **kwargs)

    training = [(module, module.training) for module in model.modules()]
    model.eval()
    AttentionInterface.register(NAME, counting)
    try:
        with torch.no_grad():
            first, second = (
                model(
                    input_ids=ids[None], position_ids=layout.depth[None], tree_layout=layout, use_cache=False
                )[0].float()
                for ids in (tokens, changed)
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{name} failed on a five-token tree: {error}") from error
    finally:
        AttentionInterface.register(NAME, attention)
        for module, mode in training:
            module.training = mode
    if len(calls) != 2 * layers:
        raise UnsupportedModelError(
            f"{name}: {len(calls) // 2} of its {layers} layers call the attention interface"
        )
    leak = (first - second)[:, [0, 1, 3, 4]].abs().max()
    if leak > 1e-3 * first.abs().max():
        raise UnsupportedModelError(f"{name}: a token reaches a sibling branch by a way other than attention")
    if torch.equal(first[:, 2], second[:, 2]):
        raise UnsupportedModelError(
            f"{name}: its output does not depend on its input tokens, nothing can be checked"
        )
