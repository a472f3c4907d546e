import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.objective import group_signal, leaf_rewards, monte_carlo, sample_leaves
from lmrl.tree import TabularPolicy, completions, enumerate_tree, leaf_probabilities


def test_leaf_rewards_sees_each_completion_once_and_without_padding():
    tree, seen = enumerate_tree(TabularPolicy(2, 3, seed=0), 3, eos_id=0), []
    rewards = leaf_rewards(tree, lambda ids: seen.append(ids) or len(ids))
    assert seen == completions(tree) == [[0], [1, 0], [1, 1, 0], [1, 1, 1]]
    assert rewards.tolist() == [1, 2, 3, 3] and rewards.dtype == torch.float64


def test_monte_carlo_by_hand():
    estimate = monte_carlo(torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert estimate.mean == 0.5
    assert estimate.standard_error == pytest.approx(math.sqrt(1 / 3) / 2, abs=1e-12)
    assert monte_carlo(torch.tensor([3, 5])) == pytest.approx((4, 1))  # whole numbers too


def test_monte_carlo_adds_up_in_float64():
    rewards = torch.full((1_000_000,), 0.1)
    assert monte_carlo(rewards).mean == pytest.approx(rewards[0].double().item(), abs=1e-12)


@pytest.mark.parametrize("count", [0, 1])
def test_one_sample_has_no_standard_error(count):
    with pytest.raises(ValueError, match=f"at least 2 rewards, and there are {count}"):
        monte_carlo(torch.ones(count))


def test_an_undefined_reward_is_not_hidden():
    assert math.isnan(monte_carlo(torch.tensor([1.0, torch.nan])).mean)


def test_leaves_are_drawn_as_often_as_they_are_probable():
    tree = enumerate_tree(TabularPolicy(3, 2, seed=1), 2, eos_id=0)
    drawn = sample_leaves(tree, 20_000, torch.Generator().manual_seed(0))
    p = leaf_probabilities(tree).detach()
    share = drawn.bincount(minlength=len(p)) / 20_000
    assert ((share - p).abs() < 4 * (p * (1 - p) / 20_000).sqrt()).all()
    assert torch.equal(drawn, sample_leaves(tree, 20_000, torch.Generator().manual_seed(0)))
    assert not torch.equal(drawn, sample_leaves(tree, 20_000, torch.Generator().manual_seed(1)))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 1), st.floats(-2, 2)), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_group_signal_is_the_mean_over_all_groups(answers, group_size):
    weights, rewards = torch.tensor(answers, dtype=torch.float64).unbind(1)
    p = weights / weights.sum()
    groups = torch.cartesian_prod(*[torch.arange(len(p))] * group_size).view(-1, group_size)
    listed = p[groups].prod(1) @ rewards[groups].var(1, correction=0)
    assert group_signal(p, rewards, group_size).item() == pytest.approx(listed.item(), abs=1e-10)


def test_group_signal_of_several_policies_at_once():
    p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    assert group_signal(p, torch.tensor([1.0, 0.0]), 2).tolist() == [0.125, 0]
    assert group_signal(p, torch.tensor([[1.0, 0.0], [0.0, 4.0]]), 2).tolist() == [0.125, 0]
