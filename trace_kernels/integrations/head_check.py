"""What a model's output layer gives within a pass, to be held against the logits that the model makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel


@contextmanager
def recorded(layer: nn.Module | None) -> Iterator[list[torch.Tensor]]:
    """Within it every result [..., V] of the output layer is listed; none where the model never calls it."""
    outputs: list[torch.Tensor] = []
    if layer is None:
        yield outputs
        return
    hook = layer.register_forward_hook(lambda _module, _args, out: outputs.append(out))
    try:
        yield outputs
    finally:
        hook.remove()


def of_output_layer(z: torch.Tensor, model: PreTrainedModel, temperature: float) -> torch.Tensor:
    """Logits as `edge_logprobs` makes them of the layer's z [k, V], each step rounded as models round it."""
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    return z if temperature == 1.0 else z / temperature
