"""Predictor scores of anchors by the Triton program in `kernels/score_anchors.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device.anchor_tiles import anchor_tile
from ..device.score_anchors import score_anchors
from ..device.tiles import padded
from ..launch import launch, target
from ..reference.score_anchors import EPS, SuccessHead

BLOCK_D = 32


def scores(
    hidden: Tensor,
    anchor_src: Tensor,
    head: SuccessHead,
    stage: str = "root",
    rewards: Tensor | None = None,
    counts: int = 0,
    rho: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """float64 logit [A], value [A] and gains [A, counts] of indices in range and rewards 0 and 1, int64."""
    device, anchors = hidden.device, len(anchor_src)
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    anchor_src = anchor_src.contiguous()
    rewards = anchor_src if rewards is None else rewards.contiguous()
    norm, w1, b1, w2, b2 = (x.contiguous() for x in head)
    logit, value = (torch.empty(anchors, dtype=torch.float64, device=device) for _ in range(2))
    gains = torch.empty((counts, anchors), dtype=torch.float64, device=device)
    # A number would reach the program as fp32, and 64 roundings of it add up.
    inverse_kappa = torch.full((1,), rho, dtype=torch.float64, device=device)
    architecture = target(device).architecture
    tile = anchor_tile(architecture)
    launch(
        score_anchors,
        (-(-anchors // tile.block_m),),
        tile,
        HIDDEN=hidden, SOURCE=anchor_src, REWARD=rewards,
        NORM=norm, W1=w1, B1=b1, W2=w2, B2=b2, RHO=inverse_kappa, LOGIT=logit, VALUE=value, GAINS=gains,
        A=anchors, counts=counts, stride=hidden.stride(0), eps=EPS, D=hidden.shape[1], WIDTH=len(b1),
        # fp32 products by three tensor-core products each, where there are such.
        STAGE=stage, PRECISION="tf32x3" if architecture.startswith("cuda") else "ieee",
        BLOCK_A=tile.block_m, BLOCK_W=min(tile.block_n, padded(len(b1))), BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return logit, value, gains.t()
