"""A model on tree attention is one graph, compiled once for all layouts."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel, Qwen3Config

from trace_kernels import TreeLayout
from trace_kernels.integrations.transformers import enable_tree_attention

from .tiny_models import relative_rms, tiny

SLIDING = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"]}


def loss(model: PreTrainedModel, layout: TreeLayout) -> torch.Tensor:
    ids = torch.arange(layout.num_tokens)[None] % 60 + 1
    logits = model(
        input_ids=ids, position_ids=layout.depth[None], tree_layout=layout, use_cache=False
    ).logits[0]
    return logits.log_softmax(-1)[layout.predecessor.clamp_min(0), ids[0]].square().mean()


def test_one_graph_for_every_layout() -> None:
    """`fullgraph` raises at a graph break; the model has a window, so nothing of the op is left out."""
    torch._dynamo.reset()
    model = enable_tree_attention(tiny(Qwen3Config, num_hidden_layers=1, **SLIDING))
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in ([5, 3, 9], [9, 2, 6, 4], [7, 1, 13, 2, 8]):
        layout = TreeLayout.from_segments([-1, *[0] * (len(lengths) - 1)], lengths, pad_to_multiple=4)
        got, want = loss(compiled, layout), loss(model, layout)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        weight = model.get_input_embeddings().weight
        grads = [torch.autograd.grad(x, weight)[0] for x in (got, want)]
        assert relative_rms(*grads) <= 1e-5
    # The first layout's sizes are taken for constants, the second shows that they vary.
    assert counter.frame_count == 2
