"""Predictor scores of anchors by the Triton program in `kernels/score_anchors.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device.score_anchors import score_anchors
from ..device.tiles import Tile, padded
from ..launch import launch, target
from ..reference.score_anchors import EPS, SuccessHead

# block_m anchors by block_n units of the first layer.
TILE = Tile(64, 64, 8, 2)
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
    """(logit [A] fp32, value [A] float64, gains [A, counts] float64)."""
    device, anchors = hidden.device, len(anchor_src)
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    norm, w1, b1, w2, b2 = (x.contiguous() for x in head)
    logit = torch.empty(anchors, dtype=torch.float32, device=device)
    value = torch.empty(anchors, dtype=torch.float64, device=device)
    gains = torch.empty((counts, anchors), dtype=torch.float64, device=device)
    # A number would reach the program as fp32, and 64 roundings of it add up.
    inverse_kappa = torch.tensor([rho], dtype=torch.float64, device=device)
    is_cuda = target(device).architecture.startswith("cuda")
    launch(
        score_anchors,
        (-(-anchors // TILE.block_m),),
        TILE,
        HIDDEN=hidden, SOURCE=anchor_src, REWARD=anchor_src if rewards is None else rewards,
        NORM=norm, W1=w1, B1=b1, W2=w2, B2=b2, RHO=inverse_kappa, LOGIT=logit, VALUE=value, GAINS=gains,
        A=anchors, counts=counts, stride=hidden.stride(0), eps=EPS, D=hidden.shape[1], WIDTH=len(b1),
        # fp32 products by three tensor-core products each, where there are such.
        STAGE=stage, PRECISION="tf32x3" if is_cuda else "ieee",
        BLOCK_A=TILE.block_m, BLOCK_W=min(TILE.block_n, padded(len(b1))), BLOCK_D=BLOCK_D,
    )  # fmt: skip
    return logit, value, gains.t()
