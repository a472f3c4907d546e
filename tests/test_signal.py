import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmrl import signal
from lmrl.baselines import group_advantages

nan = math.nan
rows = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(-2, 3), st.booleans()), min_size=1, max_size=20
)


def columns(batch):
    rewards, group, graded = map(list, zip(*batch, strict=True))
    rewards = torch.where(torch.tensor(graded), torch.tensor(rewards), nan)
    return rewards, torch.tensor(group), torch.tensor(graded)


def check_pitfall_10_interleaved_groups():
    """Prompts a, b, a, b; both differ inside. And by position (1, 1), (2, 2) would both be tied."""
    group = torch.tensor([7, 3, 7, 3])
    assert signal.tied_groups(torch.tensor([1.0, 5, 3, 5]), group).tolist() == [True, False]
    assert signal.tied_groups(torch.tensor([1.0, 1, 2, 2]), group).tolist() == [False, False]


def check_pitfall_11_ungraded_rows_are_not_zero():
    rewards, group = torch.tensor([1.0, 1, nan, nan, 1, 0, nan, nan]), torch.arange(2).repeat_interleave(4)
    assert signal.tied_groups(rewards, group, ~rewards.isnan()).tolist() == [True, False]
    assert signal.frac_reward_zero_std(rewards, group, ~rewards.isnan()) == 0.5


def check_equal_rewards_are_tied_whatever_their_float_std():
    rewards = torch.tensor([0.1] * 8 + [0.1] * 7 + [0.1 + 1e-6])
    assert rewards[:8].std(correction=0) > 0
    assert signal.tied_groups(rewards, torch.arange(2).repeat_interleave(8)).tolist() == [True, False]


def check_all_right_is_tied_and_a_mean_of_zero_is_not():
    rewards = torch.tensor([1.0, 1, 1, -1, 0, 0])
    assert signal.tied_groups(rewards, torch.tensor([0, 0, 1, 1, 2, 2])).tolist() == [True, False, True]


def check_the_share_leaves_out_groups_that_nothing_graded():
    rewards, group = torch.tensor([1.0, 1, 1, 0, nan, nan]), torch.tensor([0, 0, 1, 1, 2, 2])
    assert signal.tied_groups(rewards, group, ~rewards.isnan()).tolist() == [True, False, True]
    assert signal.frac_reward_zero_std(rewards, group, ~rewards.isnan()) == 0.5
    assert signal.frac_reward_zero_std(rewards[4:], group[4:], torch.tensor([False, False])) == 1.0


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_exact_values(check):
    check()


def per_group(test):
    """A version of `tied_groups` that applies a test to the rewards of each group, with 0 for what is ungraded."""
    return lambda rewards, group, graded=None: torch.tensor(
        [bool(test(rewards[group == label].nan_to_num(0.0))) for label in group.unique()]
    )


def by_position(rewards, group, graded=None):
    blocks = rewards.view(len(group.unique()), -1)
    return (blocks == blocks[:, :1]).all(1)


@pytest.mark.parametrize(
    "name, faulty, check",
    [
        ("tied_groups", by_position, check_pitfall_10_interleaved_groups),
        ("tied_groups", per_group(lambda r: (r == r[0]).all()), check_pitfall_11_ungraded_rows_are_not_zero),
        ("tied_groups", per_group(lambda r: r.std() == 0), check_equal_rewards_are_tied_whatever_their_float_std),
        ("tied_groups", per_group(lambda r: r.std() < 1e-4), check_equal_rewards_are_tied_whatever_their_float_std),
        ("tied_groups", per_group(lambda r: r.mean() == 0), check_all_right_is_tied_and_a_mean_of_zero_is_not),
        ("frac_reward_zero_std", lambda *args: signal.tied_groups(*args).double().mean().item(),
         check_the_share_leaves_out_groups_that_nothing_graded),
    ],
    ids=["groups by position", "ungraded as 0", "std == 0", "std below a tolerance", "mean == 0", "ungraded groups counted"],
)  # fmt: skip
def test_a_faulty_version_turns_a_check_red(monkeypatch, name, faulty, check):
    monkeypatch.setattr(signal, name, faulty)
    with pytest.raises(AssertionError):
        check()


@given(rows)
def test_tied_is_at_most_one_distinct_graded_reward(batch):
    rewards, group, graded = columns(batch)
    distinct = [{r for r, g, kept in batch if kept and g == label} for label in sorted({g for _, g, _ in batch})]
    assert signal.tied_groups(rewards, group, graded).tolist() == [len(values) < 2 for values in distinct]
    counted = [len(values) == 1 for values in distinct if values]
    share = signal.frac_reward_zero_std(rewards, group, graded)
    assert isinstance(share, float) and share == pytest.approx(sum(counted) / len(counted) if counted else 1.0)


@given(rows, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(batch, random):
    shuffled = random.sample(batch, len(batch))
    assert torch.equal(signal.tied_groups(*columns(batch)), signal.tied_groups(*columns(shuffled)))


@given(rows)
def test_tied_groups_are_those_whose_advantages_are_all_zero(batch):
    rewards, group, graded = columns(batch * 2)  # no group of one row
    advantages = group_advantages(rewards, group, graded=graded)
    zero = [bool((advantages[group == label] == 0).all()) for label in group.unique()]
    assert signal.tied_groups(rewards, group, graded).tolist() == zero


def test_infinite_rewards_are_compared_like_others():
    rewards = torch.tensor([math.inf, math.inf, -math.inf, 0, -math.inf, -math.inf])
    assert signal.tied_groups(rewards, torch.tensor([0, 0, 1, 1, 2, 2])).tolist() == [True, False, True]


def test_a_graded_nan_is_an_error_with_a_remedy():
    with pytest.raises(ValueError, match="1 graded rewards are NaN; set graded to False there"):
        signal.tied_groups(torch.tensor([nan, 1.0]), torch.tensor([0, 0]))


@pytest.mark.parametrize("lengths", [(3, 2, 3), (2, 3, 3), (3, 3, 2)])
def test_unequal_lengths_are_named(lengths):
    rewards, group, graded = torch.ones(lengths[0]), torch.zeros(lengths[1]).long(), torch.ones(lengths[2]).bool()
    with pytest.raises(ValueError, match=f"{lengths[0]}, {lengths[1]} and {lengths[2]} rows"):
        signal.tied_groups(rewards, group, graded)
