import math

import pytest
import torch

from lmrl.dpo import dpo_loss, implicit_reward, sequence_logprobs

float64 = torch.float64


def test_loss_by_hand():
    chosen, rejected = torch.tensor([-1.0]), torch.tensor([-2.0])
    ref_chosen, ref_rejected = torch.tensor([-1.5]), torch.tensor([-1.0])
    margin = 0.1 * ((-1.0 + 1.5) - (-2.0 + 1.0))
    assert dpo_loss(chosen, rejected, ref_chosen, ref_rejected).item() == pytest.approx(math.log1p(math.exp(-margin)))
    assert dpo_loss(chosen, rejected, chosen, rejected).item() == pytest.approx(math.log(2))


def test_gradient_is_beta_times_the_probability_of_the_wrong_choice():
    """∇ℓ = -β σ(-margin) (∇log π(chosen) - ∇log π(rejected)); nothing reaches the reference."""
    values = [torch.tensor([x], dtype=float64, requires_grad=True) for x in (-1.0, -2.0, -1.5, -1.0)]
    loss = dpo_loss(*values, beta=0.5).sum()
    gradients = torch.autograd.grad(loss, values, allow_unused=True)
    wrong = torch.tensor(-0.5 * 1.5).sigmoid().item()
    assert gradients[0].item() == pytest.approx(-0.5 * wrong) and gradients[1].item() == pytest.approx(0.5 * wrong)
    assert gradients[2] is None and gradients[3] is None


def test_raising_both_by_the_same_changes_nothing():
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=float64)
    shifted = values.clone()
    shifted[:2] += torch.randn(5, generator=torch.Generator().manual_seed(1), dtype=float64)
    torch.testing.assert_close(dpo_loss(*values, beta=0.3), dpo_loss(*shifted, beta=0.3))


def test_implicit_reward():
    reward = implicit_reward(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0]), beta=0.5)
    assert reward.tolist() == [0.5, -1.0]
    assert implicit_reward(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16), 1.0).dtype == (
        torch.float32
    )
    for beta in (0, -0.1, math.nan):
        with pytest.raises(ValueError, match="beta is"):
            implicit_reward(torch.zeros(1), torch.zeros(1), beta)
    with pytest.raises(ValueError, match="shapes"):
        dpo_loss(torch.zeros(2), torch.zeros(2), torch.zeros(3), torch.zeros(2))


def test_log_probs_of_completions_are_sums_and_a_masked_nan_does_not_leak():
    logprobs = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, -4.0, -5.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    sums = sequence_logprobs(logprobs, mask)
    assert sums.tolist() == [-3.0, -12.0]
    (gradient,) = torch.autograd.grad(sums.sum(), logprobs)
    assert gradient.tolist() == mask.float().tolist()
