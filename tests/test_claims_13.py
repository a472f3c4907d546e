import itertools

import pytest
import torch

from lmrl.signal import frac_reward_zero_std, tied_groups


def all_outcomes(size):
    """Every group of `size` binary rewards, [2^size, size], and which of them are not tied."""
    outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)
    group = torch.arange(len(outcomes)).repeat_interleave(size)
    return outcomes, ~tied_groups(outcomes.flatten(), group)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("p", [0.0, 1 / 64, 0.2, 0.5, 0.9, 1.0])
def test_claim_13_3_at_least_one_success_and_a_mixed_group(size, p):
    outcomes, mixed = all_outcomes(size)
    right = outcomes.sum(-1)
    probability = p**right * (1 - p) ** (size - right)
    assert abs(probability.sum() - 1) < 1e-10
    assert abs(probability[right > 0].sum() - (1 - (1 - p) ** size)) < 1e-10
    assert abs(probability[mixed].sum() - (1 - (1 - p) ** size - p**size)) < 1e-10


def test_claim_13_3_the_two_part_where_success_is_common():
    def probabilities(p):
        return 1 - (1 - p) ** 8, 1 - (1 - p) ** 8 - p**8

    assert probabilities(0.9) == pytest.approx((1.0, 0.5695), abs=5e-5)
    assert probabilities(1 / 64) == pytest.approx((0.1184, 0.1184), abs=5e-5)


def test_claim_13_3_the_metric_is_the_share_of_groups_without_signal():
    outcomes, mixed = all_outcomes(4)
    group = torch.arange(16).repeat_interleave(4)
    assert frac_reward_zero_std(outcomes.flatten(), group) == 2 / 16 == 1 - mixed.double().mean()
