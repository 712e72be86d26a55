"""The reductions over a forest as autograd functions: what a leaf gets back is a sum over the nodes above it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import range_reductions as reduce
from .backends.ranges import Ranges
from .leaf_ranges import LeafRanges


class Sums(torch.autograd.Function):
    """per_leaf [L] -> [N]."""

    @staticmethod
    def forward(ctx: Any, per_leaf: Tensor, forest: LeafRanges) -> Tensor:
        ctx.forest, ctx.dtype = forest, per_leaf.dtype
        return reduce.sums(per_leaf, forest.distinct).index_select(0, forest.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _to_leaves(grad, ctx.forest).to(ctx.dtype), None


class Means(torch.autograd.Function):
    """per_leaf [L] -> [N]."""

    @staticmethod
    def forward(ctx: Any, per_leaf: Tensor, forest: LeafRanges) -> Tensor:
        ctx.forest, ctx.dtype = forest, per_leaf.dtype
        return reduce.means(per_leaf, forest.distinct).index_select(0, forest.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _to_leaves(grad / ctx.forest.count, ctx.forest).to(ctx.dtype), None


class NodeMoments(torch.autograd.Function):
    """per_leaf [L] -> (mean [N], std [N]); a std of 0 gives no gradient."""

    @staticmethod
    def forward(ctx: Any, per_leaf: Tensor, forest: LeafRanges) -> tuple[Tensor, Tensor]:
        both = reduce.moments(per_leaf, forest.distinct)
        mean, std = (x.index_select(0, forest.group) for x in both)
        ctx.forest = forest
        ctx.save_for_backward(per_leaf, mean, std)
        return mean, std

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_std: Tensor) -> Any:
        per_leaf, mean, std = ctx.saved_tensors
        forest: LeafRanges = ctx.forest
        at = forest.leaf_nodes
        # d std / d x = (x - mean) / (count std) for every node above: lines in x.
        slope = torch.where(std > 0, grad_std / (forest.count * std), 0.0)
        total, offset = reduce.ancestor_sums(slope, mean, forest.parents)
        grad = total[at] * (per_leaf.double() - mean[at]) + offset[at]
        return (grad + _to_leaves(grad_mean / forest.count, forest)).to(per_leaf.dtype), None


class ToMembers(torch.autograd.Function):
    """per_group [G] -> [N], each member its group's; `order` [N] lists the members by group, as in `groups`."""

    @staticmethod
    def forward(ctx: Any, per_group: Tensor, order: Tensor, groups: Ranges) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(order)
        of_member = per_group.index_select(0, groups.segment)
        return torch.empty_like(of_member).index_copy_(0, order, of_member)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return reduce.sums(grad.index_select(0, order), ctx.groups), None, None


class Lines(torch.autograd.Function):
    """slope [N], centre [N] -> (their sums over each node and its ancestors, the offsets), [N] each."""

    @staticmethod
    def forward(ctx: Any, slope: Tensor, centre: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        total, offset = reduce.ancestor_sums(slope, centre, parents)
        ctx.save_for_backward(slope, centre, parents, total)
        return total, offset

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_offset: Tensor) -> Any:
        slope, centre, parents, total = ctx.saved_tensors
        # Every node is a leaf here, so that what lies below a node is summed over nodes.
        nodes = LeafRanges.of(parents.cpu().numpy(), torch.arange(len(parents)).numpy()).to(slope.device)
        below = reduce.sums(grad_offset, nodes.distinct)[nodes.group]
        # Centres from their tree's root's: nothing cancels that the differences would not lose as well.
        apart = centre.double() - centre.double()[nodes.roots[nodes.tree]]
        risen = reduce.sums(grad_total + grad_offset * apart, nodes.distinct)[nodes.group]
        grad_slope = risen - apart * below
        grad_centre = grad_offset * total - slope * below
        return grad_slope.to(slope.dtype), grad_centre.to(centre.dtype), None


def _to_leaves(grad: Tensor, forest: LeafRanges) -> Tensor:
    """[L]: the sum of grad [N] over the nodes that a leaf is at or below."""
    return reduce.ancestor_sums(grad, torch.zeros_like(grad), forest.parents)[0][forest.leaf_nodes]
