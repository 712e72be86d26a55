"""The self-check finds what it is for, and says so with figures."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel, Qwen3Config

from trace_kernels import TreeLayout
from trace_kernels.integrations.attention_function import NAME, tree_attention_forward
from trace_kernels.integrations.self_check import SelfCheckError, check_against_unpacked
from trace_kernels.integrations.transformers import enable_tree_attention

from .forests import ADVERSARIAL, Forest
from .tiny_models import FAMILIES, tiny, tiny_family, tokens_of

FOREST = Forest([-1, 0, 0, 2, 2, 0, -1, 6, 6, -1], [9, 1, 8, 1, 6, 12, 10, 4, 1, 1])


def batch(forest: Forest = FOREST) -> tuple[TreeLayout, torch.Tensor]:
    layout = TreeLayout.from_segments(forest.parents, forest.lengths, pad_to_multiple=16)
    return layout, torch.cat([tokens_of(forest), torch.zeros(layout.num_padding, dtype=torch.int64)])


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model whose packed pass lets every token see all before it: branches see their siblings."""
    model = enable_tree_attention(tiny(Qwen3Config))

    def leaking(
        module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, **kwargs: object
    ) -> tuple[torch.Tensor, None]:
        depth = kwargs["tree_layout"].depth[None]
        chain = TreeLayout.from_segments([-1], [depth.shape[1]])
        kwargs.update(tree_layout=chain, position_ids=chain.depth[None])
        return tree_attention_forward(module, q, k, v, mask, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, leaking)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees(family: str) -> None:
    model = enable_tree_attention(tiny_family(family))
    found = check_against_unpacked(model, *batch())
    assert found.agrees
    assert found.rms <= found.worst < 1e-5 <= found.tolerance
    assert found.tokens > 40
    assert found.attention == model.config._attn_implementation == "trace_tree"


@pytest.mark.parametrize("forest", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_any_forest_can_be_checked(forest: Forest) -> None:
    model = enable_tree_attention(tiny(Qwen3Config))
    if forest.num_tokens == 1:
        with pytest.raises(ValueError, match="layout: no token has a predecessor"):
            check_against_unpacked(model, *batch(forest))
        return
    assert check_against_unpacked(model, *batch(forest), tolerance=1e-5).agrees


def test_a_wrong_mask_raises_with_figures(broken: PreTrainedModel) -> None:
    message = (
        r"Qwen3ForCausalLM: packed \(trace_tree\) and unpacked \(sdpa\) log-probs differ by \d\.\d+e-0\d nats"
    )
    with pytest.raises(SelfCheckError, match=message) as error:
        check_against_unpacked(broken, *batch())
    assert "its own packed logits agree" not in str(error.value)  # that would blame the output layer
    assert broken.config._attn_implementation == "trace_tree"
    assert check_against_unpacked(broken, *batch(), tolerance=10.0).agrees


def test_falling_back_leaves_a_model_that_runs_unpacked(broken: PreTrainedModel) -> None:
    with pytest.warns(UserWarning, match="the model is back on 'sdpa': run unpacked batches"):
        found = check_against_unpacked(broken, *batch(), on_mismatch="fall_back")
    assert (found.agrees, found.attention) == (False, "sdpa")
    assert found.rms > 1e-4
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(broken(input_ids=ids).logits, tiny(Qwen3Config)(input_ids=ids).logits)


def test_wrong_weights_for_not_a_number_are_a_mismatch() -> None:
    model = enable_tree_attention(tiny(Qwen3Config))
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(SelfCheckError, match="inf nats"):
        check_against_unpacked(model, *batch())


def test_modes_gradients_and_the_number_of_passes() -> None:
    model = enable_tree_attention(tiny(Qwen3Config))
    model.model.layers[1].eval()
    passes: list[tuple[int, bool]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append((kwargs["input_ids"].shape[1], module.training)),
        with_kwargs=True,
    )
    layout, ids = batch()
    check_against_unpacked(nn.ModuleList([model])[0], layout, ids[None], rollouts=6, max_length=12)
    assert passes == [(64, False)] + 2 * [(n, False) for n in (10, 11, 12, 12, 12, 12)]
    assert model.training
    assert not model.model.layers[1].training
    assert all(p.grad is None for p in model.parameters())


def test_a_wrapped_model_is_found() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **kwargs: object) -> object:
            return self.module(**kwargs)

    assert check_against_unpacked(Wrapper(enable_tree_attention(tiny(Qwen3Config))), *batch()).agrees


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tolerance_is_the_noise_of_the_type(dtype: torch.dtype) -> None:
    exact = check_against_unpacked(enable_tree_attention(tiny(Qwen3Config)), *batch())
    rounded = check_against_unpacked(enable_tree_attention(tiny(Qwen3Config).to(dtype)), *batch())
    assert rounded.agrees
    assert exact.tolerance == 1e-5
    assert rounded.rms > 5 * exact.tolerance  # what fp32 would call a mismatch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_mismatch": "ignore"}, "on_mismatch: expected 'raise' or 'fall_back', got 'ignore'"),
        ({"rollouts": 0}, "rollouts, max_length: expected at least 1"),
        ({"max_length": 1}, "rollouts, max_length: expected at least 1"),
        (
            {"input_ids": torch.zeros(3, dtype=torch.int64)},
            "input_ids: expected the layout's 64 tokens, got 3",
        ),
        ({"model": nn.Linear(2, 2)}, "a PreTrainedModel or a wrapper of one, got Linear"),
    ],
)
def test_arguments_that_do_not_fit(changes: dict, message: str) -> None:
    layout, ids = batch()
    arguments = {"model": tiny(Qwen3Config), "layout": layout, "input_ids": ids}
    with pytest.raises(ValueError, match=message):
        check_against_unpacked(**{**arguments, **changes})
