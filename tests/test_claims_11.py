"""Claims of section 11 that the section makes so far: the size of the logits, masks, token weights."""

import pytest
import torch

from lmrl.loss import LOSS_TYPES, policy_loss, token_weights
from lmrl.policy import build_policy, build_tokenizer, length_mask, pad_left, token_logprobs


def test_claim_11_1_size_of_the_logits():
    assert 256 * 4096 * 128_000 * 2 == pytest.approx(268e9, rel=0.002)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_claim_11_3_masked_tokens_contribute_nothing_to_the_parameters(loss_type, seed):
    """Other padding ids, other numbers under the mask: the model's gradient stays the same; the EOS is part of it."""
    generator = torch.Generator().manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer, seed=seed).double()
    prompt_ids, prompt_mask = pad_left([tokenizer(text).input_ids for text in ("1+2=", "12+34=")], 0)
    mask = length_mask(torch.tensor([2, 3]), 5)
    ids = torch.tensor([[6, 2, 0, 0, 0], [7, 9, 2, 0, 0]])
    advantages = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    weights = token_weights(mask, loss_type, 5)

    def gradient(prompt_ids, ids, advantages, old_noise, mask_weights=weights):
        logprobs = token_logprobs(model, prompt_ids, prompt_mask, ids)
        old = torch.where(mask, logprobs.detach(), old_noise)
        model.zero_grad()
        policy_loss(logprobs, old, advantages, mask_weights).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    clean = gradient(prompt_ids, ids, advantages, 0.0)
    noisy_prompts = torch.where(prompt_mask, prompt_ids, 9)
    noisy_ids = torch.where(mask, ids, torch.randint(15, ids.shape, generator=generator))
    noisy = gradient(noisy_prompts, noisy_ids, torch.where(mask, advantages, float("nan")), float("nan"))
    assert torch.allclose(clean, noisy, rtol=0, atol=1e-12)

    without_eos = token_weights(length_mask(torch.tensor([1, 2]), 5), loss_type, 5)
    assert (gradient(prompt_ids, ids, advantages, 0.0, without_eos) - clean).norm() > 0.01 * clean.norm()


def test_claim_11_4_weight_of_a_token_in_a_short_and_a_long_answer():
    mask = length_mask(torch.tensor([100, 2000]), 2000)
    ratio = {kind: float(w[0, 0] / w[1, 0]) for kind in LOSS_TYPES for w in [token_weights(mask, kind, 4000)]}
    assert ratio == {"grpo": pytest.approx(20), "dapo": 1.0, "dr_grpo": 1.0}
    total = {kind: float(token_weights(mask, kind, 4000).double().sum()) for kind in LOSS_TYPES}
    assert total == {
        "grpo": pytest.approx(1, abs=1e-5),
        "dapo": pytest.approx(1, abs=1e-5),
        "dr_grpo": pytest.approx(2100 / 8000, abs=1e-5),
    }
