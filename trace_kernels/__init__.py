"""Tree-structured rollouts for other trainers: layouts, tree attention, edge log-probs, tree advantages.

Needs torch and numpy only; the Hugging Face integration is `trace_kernels.integrations.transformers`.
"""

from .advantages import (
    TreeAdvantages,
    advantages,
    leaf_advantages,
    leaf_weights,
    node_values,
    turn_advantages,
)
from .edge_logprobs import EdgeLogprobHead, edge_logprobs
from .layout import TreeLayout
from .packing import CostModel, Part, balance, cut_forest, reforward_factor
from .rollouts import PackedRollouts, pack_rollouts
from .tree_attention import tree_attention

__all__ = [
    "CostModel",
    "EdgeLogprobHead",
    "PackedRollouts",
    "Part",
    "TreeAdvantages",
    "TreeLayout",
    "advantages",
    "balance",
    "cut_forest",
    "edge_logprobs",
    "leaf_advantages",
    "leaf_weights",
    "node_values",
    "pack_rollouts",
    "reforward_factor",
    "tree_attention",
    "turn_advantages",
]
