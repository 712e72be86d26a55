"""Tree-structured rollouts for other trainers: layouts, tree attention, edge log-probs, anchor scores, advantages.

Needs torch, triton and numpy only; Hugging Face models and TRL are in `trace_kernels.integrations`.
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
from .edge_top_logprobs import edge_top_logprobs
from .layout import TreeLayout
from .packing import CostModel, Part, balance, cut_forest, reforward_factor
from .rollouts import PackedRollouts, pack_rollouts
from .score_anchors import AnchorScores, SuccessHead, anchor_loss, score_anchors
from .tree_attention import choose_backend, tree_attention
from .tree_reductions import (
    LeafRanges,
    Moments,
    ancestor_sums,
    sibling_moments,
    subtree_extrema,
    subtree_means,
    subtree_moments,
    subtree_sums,
    to_tokens,
)

__all__ = [
    "AnchorScores",
    "CostModel",
    "EdgeLogprobHead",
    "LeafRanges",
    "Moments",
    "PackedRollouts",
    "Part",
    "SuccessHead",
    "TreeAdvantages",
    "TreeLayout",
    "advantages",
    "ancestor_sums",
    "anchor_loss",
    "balance",
    "choose_backend",
    "cut_forest",
    "edge_logprobs",
    "edge_top_logprobs",
    "leaf_advantages",
    "leaf_weights",
    "node_values",
    "pack_rollouts",
    "reforward_factor",
    "score_anchors",
    "sibling_moments",
    "subtree_extrema",
    "subtree_means",
    "subtree_moments",
    "subtree_sums",
    "to_tokens",
    "tree_attention",
    "turn_advantages",
]
