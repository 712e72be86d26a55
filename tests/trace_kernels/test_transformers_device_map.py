"""A `device_map`'s hooks hand every layer a copy of the position ids: they are compared once for each call."""

from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers import PreTrainedModel, Qwen3Config

from trace_kernels import TreeLayout
from trace_kernels.integrations import attention_function
from trace_kernels.integrations.transformers import UnsupportedModelError, enable_tree_attention

from .test_transformers_refusals import call
from .tiny_models import tiny

LAYERS = 4


class Copies(ModelHook):
    """As `AlignDevicesHook` on another device: tensors arrive as copies that are gone after the layer."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        positions = kwargs.get("position_ids")
        return args, kwargs if positions is None else {**kwargs, "position_ids": positions.clone()}


def hooked() -> PreTrainedModel:
    model = enable_tree_attention(tiny(Qwen3Config, num_hidden_layers=LAYERS))
    for layer in model.model.layers:
        add_hook_to_module(layer, Copies())
        add_hook_to_module(layer.self_attn, Copies())
    return model


@pytest.fixture
def comparisons(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    inner = attention_function._are_depths

    def spy(position_ids: torch.Tensor, layout: TreeLayout) -> bool:
        seen.append(position_ids)
        return inner(position_ids, layout)

    monkeypatch.setattr(attention_function, "_are_depths", spy)
    return seen


def test_copies_are_compared_once_for_each_call(comparisons: list[torch.Tensor]) -> None:
    model, layout = hooked(), TreeLayout.from_segments([-1, 0, 0], [4, 2, 3])
    comparisons.clear()
    for calls in (1, 2, 3):
        call(model, layout)
        assert len(comparisons) == calls


def test_wrong_positions_of_a_later_call_are_refused(comparisons: list[torch.Tensor]) -> None:
    model, layout = hooked(), TreeLayout.from_segments([-1, 0, 0], [4, 2, 3])
    call(model, layout)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="position_ids are not the layout's depths"):
            call(model, layout, position_ids=torch.arange(9)[None])
    call(model, layout)


def test_another_models_later_layers_are_compared(comparisons: list[torch.Tensor]) -> None:
    layout = TreeLayout.from_segments([-1, 0, 0], [4, 2, 3])
    first, second = hooked(), hooked()
    second.model.layers = second.model.layers[1:]  # its first layer is number 1, as in a part of a pipeline
    second.config.num_hidden_layers = LAYERS - 1
    first.model.layers = first.model.layers[:1]
    first.config.num_hidden_layers = 1
    call(first, layout)
    with pytest.raises(UnsupportedModelError, match="position_ids are not the layout's depths"):
        call(second, layout, position_ids=torch.arange(9)[None])


def test_without_hooks_every_new_tensor_is_compared(comparisons: list[torch.Tensor]) -> None:
    model = enable_tree_attention(tiny(Qwen3Config, num_hidden_layers=LAYERS))
    layout = TreeLayout.from_segments([-1, 0, 0], [4, 2, 3])
    comparisons.clear()
    for calls in (1, 2):
        call(model, layout)
        assert len(comparisons) == calls
    attention = model.model.layers[2].self_attn
    inner = attention.forward
    attention.forward = lambda *args, **kwargs: inner(
        *args, **{**kwargs, "position_ids": torch.arange(9)[None]}
    )
    with pytest.raises(UnsupportedModelError, match="position_ids are not the layout's depths"):
        call(model, layout)
