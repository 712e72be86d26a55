"""Hugging Face models on tree attention: attention implementation `"trace_tree"`.

    enable_tree_attention(model)
    model(input_ids=tokens[None], position_ids=layout.depth[None], tree_layout=layout, use_cache=False)

Sliding windows, softcap and sinks come from the model. What cannot be computed exactly is refused, see
`attention_function`; `self_check` compares a first batch with the model's own attention.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from .attention_function import NAME, UnsupportedModelError
from .model_check import check_architecture, probe

__all__ = ["NAME", "UnsupportedModelError", "enable_tree_attention"]


def enable_tree_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Switches `model` to tree attention in place and proves that its architecture honours the layout.

    The architecture's code and config are inspected; when the weights are here (not on the meta device, not
    partitioned by ZeRO-3) three five-token layouts are also run through the model, see `model_check.probe`. The
    model's mode is kept and no gradient is left behind.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: with the reason; the former attention implementation is then restored.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"model: expected a transformers PreTrainedModel, got {type(model).__name__}"
        )
    check_architecture(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        if model.config.get_text_config()._attn_implementation != NAME:
            raise UnsupportedModelError(
                f"{type(model).__name__} did not accept attention implementation {NAME!r}"
            )
        if all(p.device.type != "meta" and p.numel() and not hasattr(p, "ds_id") for p in model.parameters()):
            probe(model)
    except Exception:
        model.set_attn_implementation(before)
        raise
    return model
