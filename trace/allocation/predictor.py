"""The success predictor: one head for roots and prefixes (algorithm.md section 4), outside the policy."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from trace_kernels.score_anchors import SuccessHead, anchor_loss, score_anchors

from .contrast import KAPPA_CAP, fit_kappa


class PredictorUpdate(NamedTuple):
    """Weighted MSE of the last epoch (units of squared probability) and the optimiser steps taken."""

    loss: float
    steps: int


class SuccessPredictor(nn.Module):
    """P(success) from the policy's final hidden state at the last token of a prefix.

    RMSNorm, Linear to `width`, SiLU, Linear to 1, sigmoid, all in fp32, computed by the ops `score_anchors` in use
    and `anchor_loss` in training; the modules here hold their tensors. The last layer starts at zero, so the first
    prediction is 0.5 everywhere and stage 1 starts uniform. Nothing here reads or moves the global random state.

    `state_dict` holds, beside the weights, one `_extra_state` with the optimiser, the replay windows, the
    generator and kappa as tensors and numbers: a predictor that loads it continues bit for bit. Move the
    module to its device before the first update (the optimiser's state does not follow it later).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        width: int = 256,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        epochs: int = 4,
        batch_size: int = 512,
        window: int = 4,
        seed: int = 0,
    ) -> None:
        """Args: `window` is the number of steps replayed, the current one included; the rest is as usual.

        Raises:
            ValueError: a size, epoch count or window below 1.
        """
        super().__init__()
        sizes = {
            "hidden_size": hidden_size,
            "width": width,
            "epochs": epochs,
            "batch_size": batch_size,
            "window": window,
        }
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"predictor {name} = {value}: set it to 1 or more")
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            self.norm = nn.RMSNorm(hidden_size, eps=1e-6, dtype=torch.float32)
            self.hidden = nn.Linear(hidden_size, width, dtype=torch.float32)
            self.output = nn.Linear(width, 1, dtype=torch.float32)
        bound = 1.0 / math.sqrt(hidden_size)
        nn.init.uniform_(self.hidden.weight, -bound, bound, generator=self.generator)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=learning_rate, weight_decay=weight_decay)
        self.epochs, self.batch_size, self.window = epochs, batch_size, window
        self.nodes: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=window)
        self.groups: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=window)
        self.kappa: float = KAPPA_CAP

    @property
    def head(self) -> SuccessHead:
        """The parameters as the op takes them."""
        return SuccessHead(
            self.norm.weight, self.hidden.weight, self.hidden.bias, self.output.weight, self.output.bias
        )

    def predict(self, features: Tensor) -> NDArray[np.float64]:
        """Features [A, hidden_size] of any float type -> success probabilities [A], float64 in numpy."""
        features = features.to(self.hidden.weight.device)
        rows = torch.arange(len(features), device=features.device)
        value: NDArray[np.float64] = score_anchors(features, rows, self.head).value.cpu().numpy()
        return value

    def update(self, features: Tensor, target: Tensor, leaf_count: Tensor) -> PredictorUpdate:
        """Fit to this step's tree nodes and those of the replay window.

        Args:
            features: [n, hidden_size], detached here and kept on the CPU in their own type for the window.
            target: V_hat [n] in [0, 1], share of successful leaves below each node.
            leaf_count: n_y [n] >= 1, leaves below each node; the node's weight is its root.

        Raises:
            ValueError: unequal lengths, targets outside [0, 1], leaf counts below 1, features that are not
                finite.
        """
        step = (
            features.detach().cpu().clone(),
            target.detach().to("cpu", torch.float32, copy=True),
            leaf_count.detach().to("cpu", torch.float32, copy=True),
        )
        _check_nodes(*step, width=self.hidden.in_features)
        if not len(step[0]):
            return PredictorUpdate(0.0, 0)
        self.nodes.append(step)
        device = self.hidden.weight.device
        x, y, leaves = (torch.cat(parts) for parts in zip(*self.nodes, strict=True))
        weight = leaves.sqrt()
        weight = weight / weight.mean()
        steps, error = 0, 0.0
        for _ in range(self.epochs):
            error = 0.0
            for batch in torch.randperm(len(x), generator=self.generator).split(self.batch_size):
                # A batch at a time: the window's hidden states may be larger than what a GPU has left.
                inputs, outcomes, weights = (part[batch].to(device) for part in (x, y, weight))
                rows = torch.arange(len(batch), device=device)
                with torch.enable_grad():
                    loss = anchor_loss(inputs, rows, self.head, outcomes, weights)
                    self.optimizer.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
                self.optimizer.step()
                error += float(loss.detach()) * len(batch)
                steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        return PredictorUpdate(error / len(x), steps)

    def update_kappa(self, v_root: ArrayLike, successes: ArrayLike, trials: ArrayLike) -> float:
        """Refit kappa to the root groups of the last `window` steps, this one included, and return it.

        Args:
            v_root: predicted success [n] that the groups were allocated with.
            successes: successful bare rollouts [n].
            trials: bare rollouts [n].

        Raises:
            ValueError: as `fit_kappa`; the window is then unchanged.
        """
        fit_kappa(v_root, successes, trials)
        arrays = (np.array(v_root, np.float64), np.array(successes, np.int64), np.array(trials, np.int64))
        v, won, tried = (torch.from_numpy(array) for array in arrays)
        self.groups.append((v, won, tried))
        self.kappa = fit_kappa(*(torch.cat(column).numpy() for column in zip(*self.groups, strict=True)))
        return self.kappa

    def get_extra_state(self) -> dict[str, Any]:
        """All that a resume needs beside the weights; called by `state_dict`."""
        return {
            "optimizer": _copied(self.optimizer.state_dict()),
            "nodes": [list(part) for part in self.nodes],
            "groups": [list(part) for part in self.groups],
            "generator": self.generator.get_state(),
            "kappa": self.kappa,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of `get_extra_state`; called by `load_state_dict`."""
        self.optimizer.load_state_dict(_copied(state["optimizer"]))
        self.nodes = deque((_triple(part) for part in state["nodes"]), maxlen=self.window)
        self.groups = deque((_triple(part) for part in state["groups"]), maxlen=self.window)
        self.generator.set_state(state["generator"].cpu())
        self.kappa = float(state["kappa"])


def _triple(part: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = (tensor.cpu() for tensor in part)
    return first, second, third


def _copied(value: Any) -> Any:
    """A copy of nested dicts and lists of tensors: the optimiser changes its state in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    return value


def _check_nodes(features: Tensor, target: Tensor, leaf_count: Tensor, *, width: int) -> None:
    rows = len(target)
    if features.shape != (rows, width) or target.shape != (rows,) or leaf_count.shape != (rows,):
        raise ValueError(
            f"predictor update: features {tuple(features.shape)}, target {tuple(target.shape)}, "
            f"leaf_count {tuple(leaf_count.shape)} must be [n, {width}], [n], [n]"
        )
    if not bool(((target >= 0) & (target <= 1)).all()):
        raise ValueError("predictor update: target must be a share of successes in [0, 1]")
    if not bool((leaf_count >= 1).all()):
        raise ValueError("predictor update: every node has at least 1 leaf below it")
    if not bool(torch.isfinite(features).all()):
        raise ValueError(
            "predictor update: features hold NaN or infinity, look at the log-prob pass that made them"
        )
