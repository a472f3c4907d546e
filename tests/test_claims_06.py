"""The claims of section 6, as the notebook proves them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmrl.baselines import (
    batch_mean_advantages,
    group_advantages,
    leave_one_out_advantages,
    optimal_baseline,
    subtract_baseline,
)
from lmrl.reinforce import reinforce_terms
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    leaf_probabilities,
    row_gradients,
    score_matrix,
)
from lmrl.variance import group_moments, weighted_scores


def problem(vocab_size, max_length, eos_id, seed):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, eos_id)
    rewards = torch.rand(len(tree.ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return policy, tree, rewards, exact_gradient(tree, rewards, policy.parameters())


def mean_gradient(policy, tree, advantages):
    per_leaf = row_gradients(reinforce_terms(tree.logprobs, advantages).sum(-1), policy.parameters())
    return expectation(tree, per_leaf)


def test_claim_6_1_the_mean_turns_weights_into_a_comparison():
    rewards = torch.tensor([0.7, 0.9, 0.2, 0.8, 1.0], dtype=torch.float64)
    assert (subtract_baseline(rewards, 0.0) > 0).all()
    expected = torch.tensor([-0.02, 0.18, -0.52, 0.08, 0.28], dtype=torch.float64)
    assert torch.allclose(batch_mean_advantages(rewards), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", [(3, 3, 0, 0), (2, 4, None, 1), (5, 2, 4, 2)])
def test_claim_6_2_a_baseline_that_ignores_the_action_is_unbiased(size):
    policy, tree, rewards, gradient = problem(*size)
    assert gradient.norm() > 0.01
    of_state = torch.randn(len(tree.depth), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for advantages in (subtract_baseline(rewards, 0.7), rewards[:, None] - of_state[tree.states]):
        assert torch.allclose(mean_gradient(policy, tree, advantages), gradient, rtol=0, atol=1e-10)
    of_action = exact_values(tree, rewards).q[tree.states, tree.ids]
    assert mean_gradient(policy, tree, rewards[:, None] - of_action).abs().max() < 1e-10


def total_variance(p, scores, rewards, baseline):
    estimates = subtract_baseline(rewards, baseline)[:, None] * scores
    return p @ (estimates - p @ estimates).square().sum(-1)


@pytest.mark.parametrize("size", [(3, 3, 0, 0), (2, 4, None, 1), (5, 2, 4, 2)])
def test_claim_6_3_variance_is_a_parabola_with_its_minimum_at_the_weighted_mean(size):
    policy, tree, rewards, gradient = problem(*size)
    p, scores = leaf_probabilities(tree).detach(), score_matrix(tree, policy.parameters())
    norms = scores.square().sum(-1)
    best = optimal_baseline(rewards, norms, p)
    lowest = total_variance(p, scores, rewards, best)
    for b in (-1.0, 0.0, 0.3, p @ rewards, 2.0):
        assert torch.isclose(
            total_variance(p, scores, rewards, b), lowest + (b - best) ** 2 * (p @ norms), rtol=0, atol=1e-10
        )
    assert abs(best - p @ rewards) > 1e-4


def test_claim_6_3_the_minimum_is_the_mean_when_score_size_is_independent():
    policy = TabularPolicy(3, 2, seed=0)
    policy.logits.data[1:] = 0  # the second token is uniform, and alone decides the reward
    tree = enumerate_tree(policy, 2)
    rewards = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)[tree.ids[:, 1]]
    norms = score_matrix(tree, policy.parameters()).square().sum(-1)
    assert norms.std() > 0.1
    best = optimal_baseline(rewards, norms, leaf_probabilities(tree))
    assert torch.isclose(best, expectation(tree, rewards), rtol=0, atol=1e-10)


def test_claim_6_3_the_mean_can_be_worse_than_no_baseline():
    policy = TabularPolicy(2, 1)
    policy.logits.data[0] = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    tree, rewards = enumerate_tree(policy, 1), torch.tensor([1.0, 0.0]).double()
    p, scores = leaf_probabilities(tree).detach(), score_matrix(tree, policy.parameters())
    variances = [total_variance(p, scores, rewards, b).item() for b in (0.0, 0.9, 0.1)]
    assert variances == pytest.approx([0.0018, 0.1152, 0.0], abs=1e-10)


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("G", [2, 3, 4])
def test_claim_6_4_the_mean_with_the_sample_itself_shortens_the_gradient(G, seed):
    policy, tree, rewards, gradient = problem(2, 2, None, seed)
    scores = score_matrix(tree, policy.parameters())

    def mean_over_all_groups(weigh):
        return group_moments(tree, weighted_scores(scores, rewards, weigh), gradient, G).mean

    centred = mean_over_all_groups(lambda r, g: group_advantages(r, g, scale="none"))
    assert torch.allclose(centred, (1 - 1 / G) * gradient, rtol=0, atol=1e-10)
    assert torch.allclose(mean_over_all_groups(leave_one_out_advantages), gradient, rtol=0, atol=1e-10)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16))
def test_claim_6_4_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one(rewards):
    rewards, n = torch.tensor(rewards, dtype=torch.float64), len(rewards)
    advantages = leave_one_out_advantages(rewards, torch.zeros(n, dtype=torch.int64))
    assert torch.allclose(advantages, n / (n - 1) * (rewards - rewards.mean()), rtol=0, atol=1e-10)
