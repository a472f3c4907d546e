import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl import signal
from lmrl.baselines import group_advantages
from lmrl.batch import Rollouts
from lmrl.policy import build_policy, build_tokenizer, pad_left, pad_right
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, score_matrix
from lmrl.variance import group_moments, weighted_scores

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


# -- probabilities, pass@k and its interval


@given(st.floats(1e-12, 1 - 1e-12), st.integers(1, 600))
@settings(deadline=None)
def test_signal_probabilities_agree_with_exact_fractions(p, size):
    q = Fraction(p)
    at_least_one, all_right = 1 - (1 - q) ** size, q**size
    assert signal.success_probability(p, size).item() == pytest.approx(float(at_least_one), rel=1e-9)
    assert signal.mixed_probability(p, size).item() == pytest.approx(
        float(at_least_one - all_right), rel=1e-9, abs=1e-15
    )


def test_signal_probabilities_broadcast_and_refuse_nonsense():
    p, size = torch.tensor([[0.1], [0.9]]), torch.tensor([1, 8, 64])
    assert signal.mixed_probability(p, size).shape == (2, 3)
    assert torch.allclose(signal.mixed_probability(p, size)[0], signal.mixed_probability(1 - p, size)[0])
    for p, size in ((-0.1, 8), (1.1, 8), (nan, 8), (0.5, 0)):
        with pytest.raises(ValueError, match="take 0 <= p <= 1 and at least 1"):
            signal.mixed_probability(p, size)


def check_pass_at_k_is_the_share_of_choices_with_a_right_one():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hits = [any(i < c for i in chosen) for chosen in itertools.combinations(range(n), k)]
                assert signal.pass_at_k(torch.tensor([c]), n, k).item() == pytest.approx(
                    sum(hits) / len(hits), abs=1e-12
                )


def test_pass_at_k_against_all_choices_and_exact_binomials():
    check_pass_at_k_is_the_share_of_choices_with_a_right_one()
    for n, c, k in ((1000, 3, 700), (20_000, 1, 64), (20_000, 19_000, 900), (5000, 5, 4999)):
        exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
        assert signal.pass_at_k(torch.tensor([c]), n, k).item() == pytest.approx(float(exact), rel=1e-9)


def test_pass_at_k_takes_a_sample_count_for_each_problem():
    both = signal.pass_at_k(torch.tensor([1, 3]), torch.tensor([4, 9]), 3)
    alone = [signal.pass_at_k(torch.tensor([c]), n, 3).item() for c, n in ((1, 4), (3, 9))]
    assert both.dtype == torch.float64 and both.tolist() == alone


@pytest.mark.parametrize(
    "faulty",
    [
        lambda correct, samples, k: signal.success_probability(correct.double() / samples, k),
        lambda correct, samples, k: (correct >= k).double(),
        lambda correct, samples, k: 1 - (1 - correct.double() / samples).clamp(min=1e-9) ** (k - 1),
    ],
    ids=["the plug-in", "k right ones", "k - 1 tries"],
)
def test_a_biased_pass_at_k_turns_the_check_red(monkeypatch, faulty):
    monkeypatch.setattr(signal, "pass_at_k", faulty)
    with pytest.raises(AssertionError):
        check_pass_at_k_is_the_share_of_choices_with_a_right_one()


@pytest.mark.parametrize(
    "correct, samples, k, message",
    [
        ([1, 2], 4, 5, "pass@5 from 4 samples"),
        ([1, 2], 4, 0, "pass@0 from 4 samples"),
        ([1, 2], torch.tensor([8, 4]), 5, "pass@5 from 4 samples"),
        ([1, 5], 4, 2, "from 1 to 5, outside"),
        ([-1, 2], 4, 2, "from -1 to 2, outside"),
        ([1, 2], 4, 2.5, "pass@2.5 from 4 samples"),
        ([], 4, 2, "pass@k of no problems"),
    ],
)
def test_pass_at_k_names_what_is_wrong(correct, samples, k, message):
    with pytest.raises(ValueError, match=message):
        signal.pass_at_k(torch.tensor(correct), samples, k)


def test_a_reward_tells_no_bits_outside_of_probabilities():
    with pytest.raises(ValueError, match="a pass rate of 1.1"):
        signal.reward_bits(torch.tensor([0.5, 1.1], dtype=torch.float64))


def test_the_interval_is_wilsons_for_single_verdicts():
    """3 right of 10: by Wilson's formula 0.3 [0.108, 0.603]. The observed variance with ddof 1 is 10/9 of a coin's."""
    verdicts = torch.tensor([1.0] * 3 + [0.0] * 7)
    z = 1.96**2 * (10 / 9) / 10
    centre, half = (0.3 + z / 2) / (1 + z), math.sqrt(z * 0.21 + z * z / 4) / (1 + z)
    interval = signal.interval_over_problems(verdicts)
    assert interval == pytest.approx((0.3, centre - half, centre + half), abs=1e-6)
    assert interval.low == pytest.approx(0.1021, abs=1e-4) and interval.high == pytest.approx(0.6175, abs=1e-4)
    assert str(interval) == f"0.300 [{interval.low:.3f}, {interval.high:.3f}]"


def test_the_interval_has_a_width_where_nothing_or_everything_is_right():
    none, every = signal.interval_over_problems(torch.zeros(100)), signal.interval_over_problems(torch.ones(100))
    assert none == pytest.approx((0, 0, 0.037), abs=5e-4) and every == pytest.approx((1, 0.963, 1), abs=5e-4)
    assert signal.interval_over_problems(torch.tensor([0.5])).low < 0.2
    three = signal.interval_over_problems(torch.full((3,), 0.5))  # three that agree are not all
    assert three.low < 0.15 and three.high > 0.85
    for values in (torch.zeros(0), torch.tensor([0.5, 1.1]), torch.tensor([0.5, nan])):
        with pytest.raises(ValueError, match="values; give at least one"):
            signal.interval_over_problems(values)


@pytest.mark.parametrize("alpha, beta, least", [(0.3, 6.0, 0.93), (1.0, 1.0, 0.93), (5.0, 0.5, 0.87)])
def test_the_interval_covers_the_mean_of_other_problems(alpha, beta, least):
    """60 problems with pass rates from a Beta distribution, 8 samples each, pass@2; 2000 times. In the last case a few rare
    hard problems decide, and 60 are too few for any of the simple intervals; the plain ± 1.96 errors covers 0.86."""
    truth = 1 - beta * (beta + 1) / ((alpha + beta) * (alpha + beta + 1))  # E[(1 - p)²] of a Beta distribution
    draw = np.random.default_rng(0)
    rates = draw.beta(alpha, beta, size=(2000, 60))
    right = torch.tensor(draw.binomial(8, rates))
    intervals = [signal.interval_over_problems(row) for row in signal.pass_at_k(right, 8, 2)]
    covered = sum(i.low <= truth <= i.high for i in intervals) / 2000
    values = signal.pass_at_k(right, 8, 2)
    plain = ((values.mean(1) - truth).abs() <= 1.96 * values.std(1) / 60**0.5).double().mean().item()
    assert least < covered < 0.98 and covered > plain


# -- dynamic sampling


def rollouts_with(rewards, width, first_id=0):
    """Graded rollouts, rewards [groups, G]; completion ids number the rows, each row is `width` or shorter."""
    rewards = torch.tensor(rewards)
    rows = rewards.numel()
    lengths = torch.arange(rows) % width + 1
    mask = torch.arange(width) < lengths[:, None]
    ids = torch.where(mask, first_id + torch.arange(rows)[:, None], 0)
    return Rollouts(
        prompt_ids=torch.ones(rows, 2, dtype=torch.int64),
        prompt_mask=torch.ones(rows, 2, dtype=torch.bool),
        completion_ids=ids,
        mask=mask,
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampler_logprobs=torch.zeros(rows, width),
        group=torch.arange(len(rewards)).repeat_interleave(rewards.shape[1]),
        rewards=rewards.flatten(),
        graded=~rewards.flatten().isnan(),
    )


def from_rounds(*rounds):
    """A `draw` that returns the given rollouts one after the other, and remembers what it was asked for."""
    asked, rounds = [], iter(rounds)

    def draw(groups):
        asked.append(groups)
        return next(rounds)

    return draw, asked


def check_dynamic_sampling_fills_the_batch_with_mixed_groups_in_order():
    first = rollouts_with([[1.0, 1], [0, 1], [0.1, 0.1]], width=2, first_id=100)
    second = rollouts_with([[1.0, 0], [1, nan], [0, 1]], width=5, first_id=200)
    draw, asked = from_rounds(first, second)
    batch = signal.dynamic_sampling(draw, 2)
    assert asked == [2, 2] and batch.rounds == 2 and batch.groups_drawn == 6
    assert batch.rollouts.completion_ids[:, 0].tolist() == [102, 103, 200, 201]
    assert batch.rollouts.group.tolist() == [0, 0, 1, 1] and batch.rollouts.rewards.tolist() == [0, 1, 1, 0]
    assert batch.rollouts.mask.shape[1] == 2 and batch.rollouts.mask.any(0).all()  # trimmed to what is kept
    assert len(batch.drawn) == 12 and batch.drawn.group.unique().tolist() == list(range(6))
    assert signal.frac_reward_zero_std(batch.drawn.rewards, batch.drawn.group, batch.drawn.graded) == 0.5


def test_dynamic_sampling_fills_the_batch():
    check_dynamic_sampling_fills_the_batch_with_mixed_groups_in_order()


def test_dynamic_sampling_stops_after_the_first_round_that_is_enough():
    draw, asked = from_rounds(rollouts_with([[1.0, 0], [0, 1], [1, 1], [0, 1]], width=3))
    batch = signal.dynamic_sampling(draw, 2)
    assert asked == [2] and batch.rollouts.group.tolist() == [0, 0, 1, 1] and batch.groups_drawn == 4


@pytest.mark.parametrize("mixed", [0, 1])
def test_dynamic_sampling_says_what_it_has_when_the_rounds_run_out(mixed):
    rounds = [rollouts_with([[1.0, 1], [float(i >= mixed)] * 1 + [1.0]], width=3) for i in range(3)]
    draw, asked = from_rounds(*rounds)
    with pytest.warns(UserWarning, match=f"{mixed} of 6 groups are mixed after 3 rounds, and 2 were asked for"):
        batch = signal.dynamic_sampling(draw, 2, max_rounds=3)
    assert asked == [2, 2, 2] and batch.groups_drawn == 6 and batch.rounds == 3
    assert len(batch.rollouts) == 2 * mixed and len(batch.drawn) == 12


def test_dynamic_sampling_keeps_an_ungraded_row_of_a_mixed_group_and_fields_of_every_kind():
    draw, _ = from_rounds(rollouts_with([[1.0, nan, 0], [1, nan, 1]], width=4))
    batch = signal.dynamic_sampling(draw, 1)
    assert batch.rollouts.graded.tolist() == [True, False, True]
    assert batch.rollouts.known().keys() == batch.drawn.known().keys()


def test_dynamic_sampling_refuses_what_cannot_work():
    ungraded = replace(rollouts_with([[1.0, 0]], width=2), rewards=None)
    with pytest.raises(ValueError, match="without rewards"):
        signal.dynamic_sampling(lambda groups: ungraded, 1)
    for groups, rounds in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="both must be at least 1"):
            signal.dynamic_sampling(lambda groups: ungraded, groups, rounds)


def test_a_filter_that_tests_another_quantity_turns_the_check_red(monkeypatch):
    wrong = per_group(lambda r: r.double().mean() in (0.0, 1.0))
    monkeypatch.setattr(signal, "tied_groups", wrong)
    with pytest.raises(AssertionError):
        check_dynamic_sampling_fills_the_batch_with_mixed_groups_in_order()


@given(rows)
def test_mixed_rows_are_the_rows_of_groups_that_are_not_tied(batch):
    rewards, group, graded = columns(batch)
    tied = dict(zip(group.unique().tolist(), signal.tied_groups(rewards, group, graded).tolist(), strict=True))
    assert signal.mixed_rows(rewards, group, graded).tolist() == [not tied[g] for g in group.tolist()]


@pytest.mark.parametrize("leaf_rewards", [[1.0, 0, 0, 1], [1.0, 0, -1, 0], [0.1, 0.1, 0.3, 1]])
def test_the_filter_changes_the_length_of_the_expected_step_and_not_its_direction(leaf_rewards):
    policy, G = TabularPolicy(2, 2, seed=1), 3
    tree, rewards = enumerate_tree(policy, 2), torch.tensor(leaf_rewards, dtype=torch.float64)
    gradient = exact_gradient(tree, rewards, policy.parameters())

    def filtered(r, g):
        return torch.where(signal.mixed_rows(r, g), group_advantages(r, g, scale="none"), 0.0)

    scores = score_matrix(tree, policy.parameters())
    found = group_moments(tree, weighted_scores(scores, rewards, filtered), gradient, G).mean
    assert torch.allclose(found, (1 - 1 / G) * gradient, rtol=0, atol=1e-12)


# -- thoughts


class Scripted:
    """A sampler that writes given completions; the last token is a stop token unless the row is truncated."""

    def __init__(self, completions, truncated):
        self.completions, self.truncated = completions, truncated

    def generate(self, prompts, num_generations, seed):
        self.prompts = prompts
        rows = len(prompts) * num_generations
        ids, mask = pad_right(self.completions, 0)
        prompt_ids, prompt_mask = pad_left([prompts[i // num_generations] for i in range(rows)], 0)
        truncated, group = torch.tensor(self.truncated), torch.arange(len(prompts)).repeat_interleave(num_generations)
        return Rollouts(prompt_ids, prompt_mask, ids, mask, truncated, torch.zeros(mask.shape), group)


def test_a_thought_stands_between_its_marks_without_the_stop_token():
    sampler = Scripted([[5, 6, 9], [5, 5, 5], [9], [7, 2]], [False, True, False, False])
    rows = signal.think(sampler, [[1, 3], [1]], 2, seed=0, opening=8, closing=9)
    assert sampler.prompts == [[1, 3, 8], [1, 8]]
    assert rows == [[1, 3, 8, 5, 6, 9], [1, 3, 8, 5, 5, 5, 9], [1, 8, 9], [1, 8, 7, 9]]


def test_next_token_logprobs_do_not_depend_on_the_company():
    model = build_policy(build_tokenizer(), seed=0)
    contexts = [[1, 4, 5, 6], [1], [1, 9]]
    together = signal.next_token_logprobs(model, contexts)
    alone = torch.cat([signal.next_token_logprobs(model, [context]) for context in contexts])
    assert torch.allclose(together, alone, atol=1e-5)
    assert torch.allclose(together.exp().sum(1), torch.ones(3), atol=1e-5) and not together.requires_grad
