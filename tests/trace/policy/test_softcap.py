"""A model that soft-caps its logits, through the policy's log-prob head."""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from trace_kernels.layout import TreeLayout
from trace_rl.policy.module import TreePolicy


def test_log_probs_are_the_models_own() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.5, initializer_range=0.5,
        attn_implementation="eager",
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    ids = torch.randint(61, (9,))
    with torch.no_grad():
        want = (model(input_ids=ids[None]).logits[0, :-1].float() / 0.7).log_softmax(-1)
        bare = (model.lm_head(model.model(input_ids=ids[None]).last_hidden_state)[0, :-1] / 0.7).log_softmax(
            -1
        )
    want, bare = (x.gather(1, ids[1:, None])[:, 0] for x in (want, bare))
    policy = TreePolicy(model, temperature=0.7)
    layout = TreeLayout.from_segments([-1], [9])
    got, _, _ = policy(ids, layout, torch.arange(8), ids[1:], torch.tensor([8]))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, bare, atol=1e-2)
