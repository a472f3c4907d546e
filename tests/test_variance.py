import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lmrl.variance
from lmrl.baselines import leave_one_out_advantages
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, leaf_probabilities, score_matrix
from lmrl.variance import (
    Moments,
    group_moments,
    leaf_moments,
    memoryless_moments,
    pair_moments,
    weighted_scores,
)


def bandit(*probabilities):
    """A tree of one-token completions with the given probabilities."""
    policy = TabularPolicy(len(probabilities), 1)
    policy.logits.data[0] = torch.tensor(probabilities, dtype=torch.float64).log()
    return policy, enumerate_tree(policy, 1)


def problem(vocab_size=2, max_length=2, eos_id=None, seed=0):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, eos_id)
    rewards = torch.rand(len(tree.ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradient = exact_gradient(tree, rewards, policy.parameters())
    return tree, score_matrix(tree, policy.parameters()), rewards, gradient


def close(actual, expected, tolerance=1e-10):
    assert actual == pytest.approx(expected, rel=0, abs=tolerance)


# By hand: probabilities ¼ and ¾, estimates (2, 0) and (-2, 4); mean (-1, 3), deviations (3, -3) and (-1, 1).

ESTIMATES = torch.tensor([[2.0, 0.0], [-2.0, 4.0]])


def test_moments_by_hand():
    moments = leaf_moments(bandit(0.25, 0.75)[1], ESTIMATES, torch.tensor([-1.0, 1.0]))
    close(moments.mean.tolist(), [-1, 3])
    close(moments.bias.tolist(), [0, 2])
    close(moments.variance, 0.25 * 18 + 0.75 * 2)
    close(moments.mse, 6 + 4)
    close(moments.snr, (10 / 6) ** 0.5)
    assert moments.mean.dtype == moments.bias.dtype == torch.float64 and isinstance(moments.variance, float)


def test_averaging_divides_the_variance_and_leaves_the_bias():
    moments = leaf_moments(bandit(0.25, 0.75)[1], ESTIMATES, torch.zeros(2)).averaged(4)
    close(moments.variance, 1.5)
    close(moments.mse, 1.5 + 10)
    close(moments.snr, 2 * (10 / 6) ** 0.5)


@pytest.mark.parametrize(
    "mean, variance, snr", [(0.0, 0.0, 0.0), (0.0, 2.0, 0.0), (3.0, 0.0, math.inf), (3.0, 4.0, 1.5)]
)
def test_signal_to_noise_ratio_at_the_edges(mean, variance, snr):
    assert Moments(torch.tensor([mean]), torch.zeros(1), variance).snr == snr


def test_no_gradient_is_kept():
    policy, tree = bandit(0.25, 0.75)
    estimates = ESTIMATES.clone().requires_grad_()
    moments = leaf_moments(tree, estimates, policy.logits[0])
    assert not (moments.mean.requires_grad or moments.bias.requires_grad)
    moments = group_moments(tree, lambda leaves: estimates[leaves].mean(1), policy.logits[0], 2)
    assert not (moments.mean.requires_grad or moments.bias.requires_grad)


# Groups.


def test_groups_by_hand():
    """Pairs of two leaves: the larger of two rewards 0 and 1 has mean 1 - 1/16, whatever the order."""
    tree, rewards = bandit(0.25, 0.75)[1], torch.tensor([0.0, 1.0])
    moments = group_moments(tree, lambda leaves: rewards[leaves].amax(1, keepdim=True), torch.tensor([0.75]), 2)
    close(moments.mean.item(), 15 / 16)
    close(moments.bias.item(), 3 / 16)
    close(moments.variance, 15 / 256)


def test_the_order_in_a_group_counts():
    tree = bandit(0.25, 0.75)[1]
    moments = group_moments(
        tree, lambda leaves: (leaves * torch.tensor([1, 10])).sum(1, keepdim=True), torch.zeros(1), 2
    )
    close(moments.mean.item(), 11 * 0.75)
    close(moments.variance, 101 * 0.75 * 0.25)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 3), st.integers(1, 2), st.sampled_from([None, 0]), st.integers(0, 99), st.integers(1, 3))
def test_an_average_of_independent_terms_has_its_variance_over_n(vocab_size, max_length, eos_id, seed, samples):
    tree, scores, rewards, gradient = problem(vocab_size, max_length, eos_id, seed)
    one = leaf_moments(tree, rewards[:, None] * scores, gradient)
    listed = group_moments(tree, weighted_scores(scores, rewards, lambda r, g: r), gradient, samples)
    close(listed.variance, one.averaged(samples).variance)
    close(listed.mean.tolist(), gradient.tolist())
    assert listed.bias.abs().max() < 1e-10


def test_a_target_so_long_that_every_group_is_a_chunk_of_its_own():
    tree, rewards, chunks = bandit(0.25, 0.75)[1], torch.tensor([0.0, 1.0]), []

    def largest(leaves):
        chunks.append(len(leaves))
        return rewards[leaves].amax(1, keepdim=True).expand(-1, 2_000_000)

    moments = group_moments(tree, largest, torch.zeros(2_000_000), 2)
    assert chunks == [1] * 8
    close(moments.mean[[0, -1]].tolist(), [15 / 16] * 2)
    close(moments.variance, 2_000_000 * 15 / 256, 1e-3)


def test_too_many_groups_are_refused(monkeypatch):
    tree, scores, rewards, gradient = problem(3, 2)
    estimator = weighted_scores(scores, rewards, lambda r, g: r)
    with pytest.raises(ValueError, match=r"7 completions out of 9 make 9\*\*7 groups; the limit is 2000000"):
        group_moments(tree, estimator, gradient, 7)
    with pytest.raises(ValueError, match="at least one completion"):
        group_moments(tree, estimator, gradient, 0)
    monkeypatch.setattr(lmrl.variance, "MAX_GROUPS", 81)
    group_moments(tree, estimator, gradient, 2)


def test_weights_get_the_rewards_of_a_group_under_one_label():
    tree, scores, rewards, _ = problem()
    leaves = torch.tensor([[0, 1, 1], [3, 2, 0]])
    seen = []
    estimate = weighted_scores(scores, rewards, lambda r, g: seen.append((r, g)) or r * (g + 1))(leaves)
    ((r, g),) = seen
    assert torch.equal(r, rewards[leaves].flatten()) and g.tolist() == [0, 0, 0, 1, 1, 1]
    by_hand = [sum(rewards[i] * scores[i] for i in row) / 3 * (k + 1) for k, row in enumerate(leaves.tolist())]
    assert torch.allclose(estimate, torch.stack(by_hand), rtol=0, atol=1e-12)


# Pairs.


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 3), st.sampled_from([None, 0]), st.integers(0, 99), st.sampled_from([2, 3, 4]))
def test_leave_one_out_is_an_average_over_pairs(vocab_size, eos_id, seed, samples):
    tree, scores, rewards, gradient = problem(vocab_size, 2, eos_id, seed)
    if len(tree.ids) > 8:
        samples = min(samples, 3)
    estimator = weighted_scores(scores, rewards, leave_one_out_advantages)
    listed = group_moments(tree, estimator, gradient, samples)
    by_pairs = pair_moments(tree, estimator, gradient, samples)
    close(by_pairs.variance, listed.variance)
    close(by_pairs.mean.tolist(), listed.mean.tolist())
    assert by_pairs.bias.abs().max() < 1e-10


def test_an_unsymmetric_pair_estimator_is_averaged_over_both_orders():
    tree = problem()[0]
    values = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p, variance_terms, mean = leaf_probabilities(tree).detach(), [], torch.zeros(3, dtype=torch.float64)
    groups = list(itertools.product(range(4), repeat=3))
    for group in groups:
        ordered = [values[i, j] for i, j in itertools.permutations(group, 2)]
        variance_terms.append((p[list(group)].prod(), sum(ordered) / 6))
        mean += p[list(group)].prod() * sum(ordered) / 6
    variance = sum(weight * (value - mean).square().sum() for weight, value in variance_terms)
    by_pairs = pair_moments(tree, lambda pairs: values[pairs[:, 0], pairs[:, 1]], torch.zeros(3), 3)
    close(by_pairs.variance, variance.item())
    close(by_pairs.mean.tolist(), mean.tolist())


def test_a_pair_needs_two():
    tree, scores, rewards, gradient = problem()
    with pytest.raises(ValueError, match="samples is 1; a pair needs at least 2"):
        pair_moments(tree, weighted_scores(scores, rewards, lambda r, g: r), gradient, 1)


# The recursion.


def machines(length):
    """Next states and rewards of machines over three tokens that read a text of `length`."""
    count = torch.arange(length + 1)[:, None] + torch.tensor([1, 0, 0])
    return {
        "first": (torch.tensor([[1, 2, 2], [1, 1, 1], [2, 2, 2]]), torch.tensor([0.0, 1.0, -0.3])),
        "share": (count.clamp(max=length), torch.arange(length + 1) / length - 0.4),
        "all": (torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([1.0, 0.0])),
        "parity": (torch.tensor([[1, 0, 0], [0, 1, 1]]), torch.tensor([0.2, 1.0])),
        "last two": (torch.tensor([[1, 0, 0], [1, 2, 0], [1, 0, 0]]), torch.tensor([0.0, 0.0, 1.0])),
    }


@pytest.mark.parametrize("name", machines(1))
@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_recursion_agrees_with_the_tree(name, length):
    next_state, final = machines(length)[name]
    logits = torch.tensor([0.4, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    tree = enumerate_tree(lambda prefixes: logits.expand(len(prefixes), -1), length)
    state = torch.zeros(len(tree.ids), dtype=torch.int64)
    for token in tree.ids.unbind(1):
        state = next_state[state, token]
    rewards = final[state].double()
    estimates = rewards[:, None] * score_matrix(tree, [logits])
    listed = leaf_moments(tree, estimates, exact_gradient(tree, rewards, [logits]))
    computed = memoryless_moments(logits.detach().softmax(0), next_state, final, length)
    close(computed.mean.tolist(), listed.mean.tolist())
    close(computed.variance, listed.variance)
    assert (computed.bias == 0).all() and listed.bias.abs().max() < 1e-10
    assert length < 2 or listed.variance > 0.01
