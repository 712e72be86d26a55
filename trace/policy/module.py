"""The policy as one module: packed trees in, log-probs of sampled tokens and hidden states out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trace_kernels.backends.flash import is_available
from trace_kernels.edge_logprobs import EdgeLogprobHead
from trace_kernels.integrations.transformers import UnsupportedModelError, enable_tree_attention
from trace_kernels.layout import TreeLayout

from .logits import logit_factor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ModelError(ValueError):
    """The model cannot be trained here; the message is meant for the user."""


class TreePolicy(nn.Module):
    """A causal language model whose attention knows the tree and whose head never builds logits."""

    def __init__(self, model: Any, temperature: float, attention: str = "auto") -> None:
        super().__init__()
        enable_tree_attention(model)
        EdgeLogprobHead.adopt(model.get_output_embeddings())
        self.model = model
        self.temperature = temperature
        self.factor = logit_factor(model.config)
        self.softcap = getattr(model.config, "final_logit_softcapping", None)
        self.attention = attention

    def forward(
        self,
        input_ids: Tensor,
        layout: TreeLayout,
        edge_src: Tensor,
        labels: Tensor,
        node_ends: Tensor,
        entropy: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`input_ids` [T], `edge_src` and `labels` [E], `node_ends` [n] -> log-prob [E], entropy [E] in nats,
        float32, under the sampling temperature (zeros when not asked for); final hidden states [n, d], detached."""
        hidden = self.model.base_model(
            input_ids=input_ids[None],
            position_ids=layout.depth[None],
            tree_layout=layout,
            tree_backend=self.attention,
            use_cache=False,
        ).last_hidden_state[0]  # [T, d]
        head = self.model.get_output_embeddings()
        logprob, entropies = head(
            hidden,
            edge_src=edge_src,
            labels=labels,
            temperature=self.temperature / self.factor,
            entropy=entropy,
            softcap=self.softcap,
        )
        return logprob, entropies, hidden[node_ends].detach()


def load_tree_policy(
    path: Path,
    *,
    dtype: str,
    temperature: float,
    gradient_checkpointing: bool,
    liger: bool,
    attention: str = "auto",
) -> TreePolicy:
    """Read a Hugging Face directory; inside an active `HfDeepSpeedConfig` the weights arrive partitioned.

    Raises ModelError when the directory is missing or holds something else, or when the model or a kernel it is to
    use is not supported.
    """
    from transformers import AutoModelForCausalLM

    check_model_directory(path)
    if attention == "flash" and not is_available():
        raise ModelError(
            "model.attention=flash needs flash-attn (pip install --no-build-isolation flash-attn); or use auto"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load {path} as a causal language model: {error}") from error
    if liger:
        _use_liger(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # old and new log-probs must be functions of the weights alone
    try:
        return TreePolicy(model, temperature, attention)
    except (UnsupportedModelError, TypeError) as error:
        raise ModelError(f"{path}: {error}") from error


def check_model_directory(path: Path) -> None:
    """Raise ModelError when `path` is no model directory; nothing is ever looked up on a hub."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} holds no config.json; model.path must be a Hugging Face model directory")


def _use_liger(model: Any) -> None:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if not torch.cuda.is_available():
        raise ModelError("model.liger: Liger's kernels need a GPU, and none is visible")
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
    if apply is None:
        raise ModelError(
            f"model.liger: Liger has no kernels for {model.config.model_type!r}; it knows "
            f"{', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )
    # The log-prob head replaces Liger's fused cross-entropy; norm, rotary and MLP kernels stay.
    apply(model=model, fused_linear_cross_entropy=False, cross_entropy=False)
