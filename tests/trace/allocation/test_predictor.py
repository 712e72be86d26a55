"""The predictor learns, weighs nodes by the root of their leaves, and resumes bit for bit."""

import io

import numpy as np
import pytest
import torch

from trace_rl.allocation.contrast import KAPPA_CAP
from trace_rl.allocation.predictor import SuccessPredictor


def nodes(seed: int, n: int = 256, d: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features whose first coordinate decides the success of 8 leaves."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g)
    wins = torch.bernoulli(torch.sigmoid(6 * x[:, :1]).expand(n, 8), generator=g)
    return x, wins.mean(1), torch.full((n,), 8)


def test_starts_at_one_half_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    predictor = SuccessPredictor(16)
    v = predictor.predict(torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).bfloat16())
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    assert v.dtype == np.float64
    np.testing.assert_array_equal(v, 0.5)
    assert predictor.predict(torch.zeros(0, 16)).shape == (0,)


def test_learns_a_separable_success_function() -> None:
    predictor = SuccessPredictor(16, seed=1)
    losses = [predictor.update(*nodes(seed)) for seed in range(12)]
    x, y, _ = nodes(99)
    error = np.mean((predictor.predict(x) - y.numpy()) ** 2)
    assert error < 0.25 * float(y.var())
    assert losses[-1].loss < 0.5 * losses[0].loss
    assert losses[0].steps == 4
    assert losses[-1].steps == 4 * 2  # four steps of 256 nodes in minibatches of 512


def test_conflicting_targets_meet_at_the_mean_weighted_by_root_leaves() -> None:
    predictor = SuccessPredictor(4, learning_rate=1e-2, weight_decay=0.0, epochs=400)
    x = torch.ones(2, 4)
    predictor.update(x, torch.tensor([0.0, 1.0]), torch.tensor([1, 16]))
    np.testing.assert_allclose(predictor.predict(x), 4 / 5, atol=0.01)


def test_window_keeps_the_last_steps_only_and_no_gradient() -> None:
    predictor = SuccessPredictor(16, window=2)
    features = nodes(0)[0].requires_grad_()
    for seed in range(3):
        _, y, n = nodes(seed)
        predictor.update(features, y, n)
    assert len(predictor.nodes) == 2
    assert features.grad is None
    assert not predictor.nodes[0][0].requires_grad
    assert all(p.grad is None for p in predictor.parameters())


def test_update_works_under_no_grad() -> None:
    predictor = SuccessPredictor(16)
    with torch.no_grad():
        predictor.update(*nodes(0))
    assert np.ptp(predictor.predict(nodes(0)[0])) > 0


def test_no_nodes_is_no_step() -> None:
    predictor = SuccessPredictor(4)
    assert predictor.update(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0)) == (0.0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_equal(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    groups = [(rng.random(20), rng.integers(0, 5, 20), np.full(20, 4)) for _ in range(6)]

    def advance(predictor: SuccessPredictor, step: int) -> None:
        x, y, n = nodes(step)
        predictor.update(x.to(dtype), y, n)
        predictor.update_kappa(*groups[step])

    straight = SuccessPredictor(16, seed=3, window=3, batch_size=100)
    for step in range(3):
        advance(straight, step)
    file = io.BytesIO()
    torch.save(straight.state_dict(), file)
    for step in range(3, 6):
        advance(straight, step)

    file.seek(0)
    resumed = SuccessPredictor(16, seed=77, window=3, batch_size=100)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(3, 6):
        advance(resumed, step)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    assert straight.kappa == resumed.kappa
    assert torch.equal(straight.generator.get_state(), resumed.generator.get_state())
    x = nodes(50)[0]
    np.testing.assert_array_equal(straight.predict(x), resumed.predict(x))


def test_loaded_optimiser_is_a_copy() -> None:
    first = SuccessPredictor(16)
    first.update(*nodes(0))
    second = SuccessPredictor(16)
    second.load_state_dict(first.state_dict())
    before = [p.clone() for p in first.parameters()]
    momentum = first.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    second.update(*nodes(1))
    assert all(torch.equal(a, b) for a, b in zip(before, first.parameters(), strict=True))
    assert torch.equal(momentum, first.optimizer.state_dict()["state"][0]["exp_avg"])


def test_kappa_follows_the_last_steps() -> None:
    predictor = SuccessPredictor(4, window=2)
    assert predictor.kappa == KAPPA_CAP
    split = (np.full(40, 0.5), np.repeat([0, 4], 20), np.full(40, 4))
    even = (np.full(40, 0.5), np.full(40, 2), np.full(40, 4))
    assert predictor.update_kappa(*split) < 0.1
    predictor.update_kappa(*even)
    assert predictor.update_kappa(*even) == KAPPA_CAP
    with pytest.raises(ValueError, match="exceed"):
        predictor.update_kappa([0.5], [3], [2])
    assert len(predictor.groups) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(2, 5)}, "must be"),
        ({"target": torch.tensor([0.0, 2.0])}, "target"),
        ({"target": torch.tensor([0.0, float("nan")])}, "target"),
        ({"leaf_count": torch.tensor([0, 1])}, "at least 1 leaf"),
        ({"features": torch.full((2, 4), float("inf"))}, "NaN or infinity"),
    ],
)
def test_bad_nodes_are_refused_and_not_kept(change: dict, message: str) -> None:
    predictor = SuccessPredictor(4)
    good = {"features": torch.ones(2, 4), "target": torch.zeros(2), "leaf_count": torch.ones(2)}
    with pytest.raises(ValueError, match=message):
        predictor.update(**(good | change))
    assert not predictor.nodes


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="window = 0"):
        SuccessPredictor(4, window=0)
