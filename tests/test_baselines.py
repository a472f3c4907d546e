import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.baselines import (
    batch_mean_advantages,
    group_advantages,
    group_mean,
    leave_one_out_advantages,
    optimal_baseline,
    subtract_baseline,
)

NAN = float("nan")
METHODS = {
    "scaled": lambda rewards, group, graded=None: group_advantages(rewards, group, graded=graded),
    "centred": lambda rewards, group, graded=None: group_advantages(rewards, group, scale="none", graded=graded),
    "leave_one_out": leave_one_out_advantages,
}
every_method = pytest.mark.parametrize("advantages_of", METHODS.values(), ids=METHODS.keys())


def group_of(*labels):
    return torch.tensor(labels, dtype=torch.int64)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


# Small numbers by hand


def test_population_std():
    advantages = group_advantages(torch.tensor([1.0, 0, 0, 0]), group_of(0, 0, 0, 0))
    close(advantages, [1.7320508, -0.5773503, -0.5773503, -0.5773503], 1e-6)


def test_groups_are_labels_not_positions():
    rewards, group = torch.tensor([1.0, 5, 3, 5]), group_of(7, 2, 7, 2)
    assert group_advantages(rewards, group, scale="none").tolist() == [-1, 0, 1, 0]
    assert group_advantages(rewards, group).tolist() == [-1, 0, 1, 0]
    assert leave_one_out_advantages(rewards, group).tolist() == [-2, 0, 2, 0]
    assert group_mean(rewards, group).tolist() == [2, 5, 2, 5]


def test_ungraded_rows_leave_baseline_and_result():
    rewards, graded = torch.tensor([1.0, 0, NAN, NAN]), torch.tensor([True, True, False, False])
    group = group_of(0, 0, 0, 0)
    assert group_mean(rewards, group, graded).tolist() == [0.5] * 4
    assert group_advantages(rewards, group, scale="none", graded=graded).tolist() == [0.5, -0.5, 0, 0]
    assert group_advantages(rewards, group, graded=graded).tolist() == [1, -1, 0, 0]
    assert leave_one_out_advantages(rewards, group, graded).tolist() == [1, -1, 0, 0]
    assert batch_mean_advantages(rewards, graded).tolist() == [0.5, -0.5, 0, 0]
    assert subtract_baseline(rewards, 2.0, graded).tolist() == [-1, -2, 0, 0]


@every_method
@pytest.mark.parametrize("graded_rows", [0, 1])
def test_fewer_than_two_graded_rows_give_zeros(advantages_of, graded_rows):
    rewards, graded = torch.full((3,), NAN), torch.arange(3) < graded_rows
    rewards[:graded_rows] = 5.0
    assert advantages_of(rewards, group_of(4, 4, 4), graded).tolist() == [0, 0, 0]
    assert group_mean(rewards, group_of(4, 4, 4), graded).tolist() == [5.0 * graded_rows] * 3


@every_method
@pytest.mark.parametrize("size", [2, 3, 6, 7, 8, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(advantages_of, size, dtype):
    rewards = torch.tensor([0.1, 0.7, 1 / 3], dtype=dtype).repeat(size)  # std of eight times 0.1 is 7e-9 in float32
    assert (advantages_of(rewards, torch.arange(3).repeat(size)) == 0).all()


@every_method
def test_only_equality_makes_a_tie(advantages_of):
    rewards = torch.tensor([1.0, 1.0, 1.0 + 1e-6])
    assert (advantages_of(rewards, group_of(0, 0, 0)) != 0).all()


def test_scale_needs_no_epsilon():
    tiny = torch.tensor([0, 1e-30, 0, 1e-30])  # their squares vanish in float32
    large = torch.tensor([0, 1e30, 0, 1e30])  # their squares overflow
    for rewards in (tiny, large):
        assert group_advantages(rewards, group_of(0, 0, 0, 0)).tolist() == [-1, 1, -1, 1]


@every_method
def test_a_group_of_one_is_an_error_that_names_it(advantages_of):
    with pytest.raises(ValueError, match="group 42 has one completion.*num_generations >= 2"):
        advantages_of(torch.tensor([1.0, 0, 1]), group_of(3, 42, 3))


def test_an_unknown_scale_is_an_error():
    with pytest.raises(ValueError, match="scale is 'std'"):
        group_advantages(torch.tensor([1.0, 0]), group_of(0, 0), scale="std")


@every_method
def test_a_graded_nan_stays_visible_in_its_group_only(advantages_of):
    advantages = advantages_of(torch.tensor([1.0, NAN, 1.0, 0.0]), group_of(0, 0, 1, 1))
    assert advantages[:2].isnan().all() and advantages[2:].isfinite().all()


@every_method
def test_an_empty_batch_is_empty(advantages_of):
    assert advantages_of(torch.zeros(0), group_of()).shape == (0,)


@every_method
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_results_are_at_least_float32(advantages_of, dtype):
    rewards = torch.tensor([1, 0, 0]).to(dtype)
    advantages = advantages_of(rewards, group_of(0, 0, 0))
    assert advantages.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(advantages, advantages_of(rewards.double(), group_of(0, 0, 0)), 1e-6)


def test_batch_mean_and_constant():
    rewards = torch.tensor([0.0, 1, 2])
    assert batch_mean_advantages(rewards).tolist() == [-1, 0, 1]
    assert subtract_baseline(rewards, 0.5).tolist() == [-0.5, 0.5, 1.5]
    assert subtract_baseline(rewards, torch.tensor([0.0, 1, 1])).tolist() == [0, 0, 1]


def test_optimal_baseline_weighs_by_score_size():
    rewards, norms, probabilities = torch.tensor([[1.0, 0.0], [0.02, 1.62], [0.9, 0.1]], dtype=torch.float64)
    close(optimal_baseline(rewards, norms, probabilities), 0.1)
    close(optimal_baseline(rewards, norms), 0.02 / 1.64)


# Properties


@st.composite
def batches(draw):
    """Rewards, groups of at least two rows with arbitrary labels, and graded flags, in random row order."""
    sizes = draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    labels = draw(st.lists(st.integers(-1000, 1000), min_size=len(sizes), max_size=len(sizes), unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    group = torch.cat([torch.full((size,), label) for size, label in zip(sizes, labels)])
    order = torch.randperm(len(group), generator=generator)
    rewards = torch.randint(-3, 4, (len(group),), generator=generator).double() / 3
    graded = torch.rand(len(group), generator=generator) < 0.8
    return rewards, group[order], graded


@every_method
@settings(max_examples=50, deadline=None)
@given(batches(), st.integers(0, 10_000))
def test_rows_may_come_in_any_order_under_any_labels(advantages_of, batch, seed):
    rewards, group, graded = batch
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed))
    expected = advantages_of(rewards, group, graded)
    close(advantages_of(rewards[order], group[order], graded[order]), expected[order])
    close(advantages_of(rewards, 5 - 3 * group, graded), expected)


@every_method
@settings(max_examples=50, deadline=None)
@given(batches())
def test_groups_do_not_see_each_other(advantages_of, batch):
    rewards, group, graded = batch
    together = advantages_of(rewards, group, graded)
    for label in group.unique():
        rows = group == label
        close(together[rows], advantages_of(rewards[rows], group[rows], graded[rows]))


@every_method
@settings(max_examples=50, deadline=None)
@given(batches())
def test_what_is_not_graded_does_not_matter(advantages_of, batch):
    rewards, group, graded = batch
    result = advantages_of(rewards, group, graded)
    assert torch.equal(advantages_of(torch.where(graded, rewards, NAN), group, graded), result)
    assert (result[~graded] == 0).all()
    for label in group.unique():
        rows = (group == label) & graded
        if rows.sum() > 1:
            close(result[rows], advantages_of(rewards[rows], group[rows]))


@settings(max_examples=50, deadline=None)
@given(batches(), st.floats(-10, 10), st.floats(0.1, 10))
def test_shifts_and_scales_of_the_reward(batch, shift, scale):
    rewards, group, graded = batch
    moved = torch.where(graded, scale * rewards + shift, NAN)
    for name, factor in (("scaled", 1), ("centred", scale), ("leave_one_out", scale)):
        before, after = (METHODS[name](r, group, graded) for r in (rewards, moved))
        close(after, factor * before)


@settings(max_examples=50, deadline=None)
@given(batches())
def test_against_a_loop_over_groups(batch):
    rewards, group, graded = batch
    for label in group.unique():
        rows = (group == label) & graded
        own = rewards[rows]
        if rows.sum() < 2 or own.unique().numel() == 1:
            expected = {name: torch.zeros_like(own) for name in METHODS}
        else:
            others = torch.stack([torch.cat([own[:i], own[i + 1 :]]).mean() for i in range(len(own))])
            expected = {"centred": own - own.mean(), "leave_one_out": own - others}
            expected["scaled"] = expected["centred"] / own.std(correction=0)
        for name, advantages_of in METHODS.items():
            close(advantages_of(rewards, group, graded)[rows], expected[name])
