"""ZeRO-3 on one and on two ranks against plain torch: flat rollouts, stock attention, one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_rl.config.schema import LossConfig, OptimizerConfig
from trace_rl.policy.settings import zero3_settings
from trace_rl.rollout.tree import RolloutTree

from .oracle import EPS, random_trees, score_flat, stock_model, token_logprobs, train_flat

Results = dict[str, Any]

TOLERANCE = 1e-5
LOSS = LossConfig()
OPTIMIZER = OptimizerConfig(learning_rate=5e-3, weight_decay=0.1, gradient_clipping=0.3)
TREES = random_trees(0, 6)


@pytest.fixture(scope="session")
def flat(models: Path) -> Results:
    return train_flat(models / "untied", [TREES, TREES], LOSS, OPTIMIZER)


@pytest.fixture(scope="session")
def flat_tied(models: Path) -> Results:
    return train_flat(models / "tied", [TREES, TREES], LOSS, OPTIMIZER)


def assert_same_logprobs(got: Results, want: Results) -> None:
    assert got.keys() == want.keys()
    for key, expected in want.items():
        np.testing.assert_allclose(got[key], expected, rtol=0, atol=TOLERANCE, err_msg=str(key))


def assert_same_weights(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        torch.testing.assert_close(
            got[name], expected, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_training(got: Results, want: Results) -> None:
    assert_same_logprobs(got["logprobs"], want["logprobs"])
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([f[name] for f in got["figures"]], want[name], rtol=TOLERANCE, atol=1e-6)
    assert_same_weights(got["weights"], want["weights"])


def test_the_oracle_itself_clips_everything_there_is_to_clip(flat: Results) -> None:
    assert flat["grad_norm"][0] > OPTIMIZER.gradient_clipping
    assert TREES[0].is_mixed() is False  # counts in the denominator, and nowhere else
    assert any(tree.is_mixed() for tree in TREES)


def test_parameters_are_really_partitioned(results: Results, ranks: int) -> None:
    assert results["plain"]["held"] == pytest.approx(1 / ranks, abs=0.02)


@pytest.mark.parametrize("scenario", ["plain", "micro_batches", "checkpointing"])
def test_two_updates_equal_plain_torch(results: Results, flat: Results, scenario: str) -> None:
    assert_same_training(results[scenario], flat)


def test_the_ratio_clip_acts_in_the_second_update(results: Results) -> None:
    first, second = results["plain"]["figures"]
    assert first["clipped"] == 0
    assert second["clipped"] > 0


def test_small_micro_batches_are_many(results: Results) -> None:
    assert results["micro_batches"]["parts"] > results["plain"]["parts"]


def test_tied_embeddings_train_alike(results: Results, flat_tied: Results) -> None:
    assert_same_training(results["saved"], flat_tied)
    assert "lm_head.weight" not in results["saved"]["weights"]


def test_ranks_make_no_difference(one_rank: Results, two_ranks: Results) -> None:
    for scenario in ("plain", "micro_batches", "saved", "against_reference"):
        one, two = one_rank[scenario], two_ranks[scenario]
        assert_same_logprobs(two["logprobs"], one["logprobs"])
        assert_same_logprobs(two["hidden"], one["hidden"])
        assert_same_weights(two["weights"], one["weights"])
        assert two["entropy"] == pytest.approx(one["entropy"], abs=TOLERANCE)
        for a, b in zip(two["figures"], one["figures"], strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=TOLERANCE)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=TOLERANCE)
            assert a["weight"] == b["weight"]


@torch.no_grad()
def test_hidden_states_and_entropy_are_the_stock_models(results: Results, models: Path) -> None:
    model = stock_model(models / "untied")
    total, count = 0.0, 0
    seen = set()
    for t, tree in enumerate(TREES):
        for leaf in tree.leaves():
            out = model(input_ids=torch.tensor([tree.prefix_ids(leaf)]), output_hidden_states=True)
            entropy = torch.distributions.Categorical(logits=out.logits[0] / 0.8).entropy()
            place = 0
            for n in tree.path(leaf):
                node = tree.nodes[n]
                if (t, n) not in seen:
                    seen.add((t, n))
                    sampled = [place + i for i, m in enumerate(node.loss_mask) if m]
                    total += float(entropy[[s - 1 for s in sampled]].sum())
                    count += len(sampled)
                    last = out.hidden_states[-1][0, place + len(node.token_ids) - 1]
                    np.testing.assert_allclose(results["plain"]["hidden"][t, n], last, atol=TOLERANCE)
                place += len(node.token_ids)
    assert results["plain"]["hidden"].keys() == seen
    for scenario in ("plain", "micro_batches"):  # a cut tree's shared tokens count once
        assert results[scenario]["entropy"] == pytest.approx(total / count, abs=TOLERANCE)


def test_bfloat16_is_near(results: Results) -> None:
    got, want = results["bfloat16"], results["plain"]
    gaps = np.concatenate([abs(got["logprobs"][key] - values) for key, values in want["logprobs"].items()])
    assert 0 < gaps.mean() < 0.02
    for a, b in zip(got["figures"], want["figures"], strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.1)
        assert a["loss"] == pytest.approx(b["loss"], abs=0.02)
    assert {value.dtype for value in got["weights"].values()} == {torch.bfloat16}
    for name, value in want["weights"].items():
        torch.testing.assert_close(got["weights"][name].float(), value, rtol=0.02, atol=0.02)


def test_the_reference_is_frozen_and_pulls(results: Results, models: Path) -> None:
    got = results["against_reference"]
    other = stock_model(models / "other")
    assert_same_logprobs(got["reference"], score_flat(other, TREES))
    assert_same_logprobs(got["reference_after"], got["reference"])
    loss = LossConfig(kl=0.1)
    assert_same_training(got, train_flat(models / "untied", [TREES, TREES], loss, OPTIMIZER, reference=other))
    assert got["figures"][0]["kl"] > 0


@pytest.mark.parametrize("scenario", ["minibatches", "minibatches_against_reference"])
def test_minibatches_are_updates_of_their_own(results: Results, models: Path, scenario: str) -> None:
    """`learning.update_policy`: every other tree, then the rest, under the log-probs from before both."""
    other = stock_model(models / "other") if "reference" in scenario else None
    loss = LossConfig(kl=0.1 if other else 0.0)
    want = train_flat(models / "untied", [TREES[0::2], TREES[1::2]], loss, OPTIMIZER, reference=other)
    got = results[scenario]
    assert_same_weights(got["weights"], want["weights"])
    assert got["figures"]["loss"] == pytest.approx(np.mean(want["loss"]), rel=TOLERANCE, abs=1e-6)
    assert got["figures"]["grad_norm"] == pytest.approx(np.mean(want["grad_norm"]), rel=TOLERANCE)
    assert (got["figures"]["kl"] > 0) is bool(other)
    assert got["phases"] == {"advantages", "policy update"}


def test_no_contrast_no_gradient(results: Results, models: Path) -> None:
    got = results["zero_variance"]
    for figures in got["figures"]:
        assert figures["grad_norm"] == 0.0
        assert figures["loss"] == 0.0
        assert figures["weight"] > 0
    for name, value in stock_model(models / "untied").named_parameters():
        assert torch.equal(got["weights"][name], value)


def test_more_ranks_than_trees(results: Results, ranks: int, models: Path) -> None:
    got = results["fewer_trees_than_ranks"]
    assert got["dummies"] == ranks - 1
    tree = RolloutTree.from_json(got["tree"])
    model = stock_model(models / "untied")
    losses = []
    adam = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0, eps=EPS)
    for step in range(6):
        adam.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 4)
        adam.zero_grad()
        loss = -token_logprobs(model, tree, 1).mean()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    np.testing.assert_allclose([f["loss"] for f in got["figures"]], losses, rtol=TOLERANCE)
    assert_same_logprobs(got["logprobs"], score_flat(model, [tree]))


def test_the_learning_rate_warms_up(results: Results) -> None:
    rates = [f["learning_rate"] for f in results["fewer_trees_than_ranks"]["figures"]]
    np.testing.assert_allclose(rates, np.array([0.25, 0.5, 0.75, 1, 1, 1]) * 5e-3)
    assert results["fewer_trees_than_ranks"]["steps"] == 6


@pytest.mark.parametrize(("name", "scenario"), [("tied", "saved"), ("untied", "saved_untied")])
def test_a_saved_policy_loads_anywhere(results: Results, name: str, scenario: str) -> None:
    directory = results["out"] / name
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.config._attn_implementation != "trace_tree"
    assert model.config.tie_word_embeddings is (name == "tied")
    assert_same_logprobs(score_flat(model, TREES), results[scenario]["after"])
    assert AutoTokenizer.from_pretrained(directory).eos_token_id == 0
    for key, value in results[scenario]["weights"].items():
        assert torch.equal(model.get_parameter(key), value)


def test_saving_replaces_the_directory_as_a_whole(results: Results) -> None:
    assert not (results["out"] / "tied" / "stale.txt").exists()
    assert not list(results["out"].glob("tied.part*"))


def test_a_save_that_breaks_off_leaves_the_former_policy(one_rank: Results) -> None:
    assert one_rank["saved"]["broken_off"] == "disk full"
    model = AutoModelForCausalLM.from_pretrained(one_rank["out"] / "survivor")
    assert_same_logprobs(score_flat(model, TREES), one_rank["saved"]["after"])


def test_weights_for_the_engines(results: Results) -> None:
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted((results["out"] / "weights").glob("*.safetensors")):
        loaded |= load_file(file)
    assert loaded.keys() == results["saved"]["weights"].keys()
    for name, value in results["saved"]["weights"].items():
        assert torch.equal(loaded[name], value)


def test_other_models_load_whole_beside_the_policy(results: Results) -> None:
    """A live HfDeepSpeedConfig would partition the next `from_pretrained`, an in-process engine's for one."""
    assert results["plain"]["zero3"] is False


def test_a_model_that_makes_its_logits_otherwise_is_refused(results: Results) -> None:
    assert "HyperCLOVAXForCausalLM makes its logits otherwise" in results["refused"]


def test_the_users_settings_win_over_the_defaults() -> None:
    over = {"zero_optimization": {"sub_group_size": 7}, "gradient_clipping": 5.0, "zero_quantized": True}
    got = zero3_settings("bfloat16", OPTIMIZER, torch.device("cpu"), over)
    assert got["zero_optimization"] == {"stage": 3, "overlap_comm": False, "sub_group_size": 7}
    assert got["gradient_clipping"] == 5.0
    assert got["zero_quantized"] is True
    assert got["bf16"] == {"enabled": True}
    assert got["optimizer"]["params"]["torch_adam"] is True
    assert "optimizer" not in zero3_settings("float32", None, torch.device("cpu"), {})
