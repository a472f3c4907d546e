import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lmrl.gae import gae, gae_error, n_step_advantages, score_last_token, split_values, td_errors
from lmrl.tree import TabularPolicy, enumerate_tree, exact_values, leaf_probabilities

NAN = float("nan")


def mask_of(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def rows(*values):
    return torch.tensor(values, dtype=torch.float64)


ONES = torch.ones(1, 3, dtype=torch.bool)

# Small numbers by hand


@pytest.mark.parametrize("padding", [100.0, NAN, 0.0])
def test_padding_does_not_leak(padding):
    mask = mask_of([1, 1, 0])
    advantages, returns = gae(rows([0, 1, padding]), rows([0, 0, padding]), mask, gamma=1.0, lam=0.95)
    assert_close(advantages, rows([0.95, 1.0, 0.0]))
    assert_close(returns, rows([0.95, 1.0, 0.0]))


def test_returns_are_not_rewards():
    rewards, values = rows([0, 0, 1]), rows([0.2, 0.5, 0.8])
    advantages, returns = gae(rewards, values, ONES, gamma=1.0, lam=1.0)
    assert_close(advantages, rows([0.8, 0.5, 0.2]))
    assert_close(returns, rows([1, 1, 1]))
    advantages, returns = gae(rewards, values, ONES, gamma=1.0, lam=0.0)
    assert_close(advantages, rows([0.3, 0.3, 0.2]))
    assert_close(returns, rows([0.5, 0.8, 1]))


def test_the_score_is_on_the_last_token():
    mask = mask_of([1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 1, 0], [0, 0, 0, 0, 0])
    rewards = score_last_token(torch.tensor([1.0, 2.0, 3.0, NAN]), mask)
    assert rewards.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [0, 0, 0, 3, 0], [0, 0, 0, 0, 0]]
    advantages, _ = gae(rewards[:1], torch.zeros(1, 5), mask[:1], gamma=1.0, lam=0.95)
    assert_close(advantages, torch.tensor([[0.9025, 0.95, 1, 0, 0]]))


def test_a_score_that_is_missing_stays_visible_in_its_row():
    rewards = score_last_token(torch.tensor([NAN, 1.0]), torch.ones(2, 2, dtype=torch.bool))
    advantages, _ = gae(rewards, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), gamma=1.0, lam=0.5)
    assert advantages[0].isnan().all() and advantages[1].tolist() == [0.5, 1]


def test_scores_are_at_least_float32():
    assert score_last_token(torch.tensor([1.0]).bfloat16(), ONES).dtype == torch.float32
    assert score_last_token(torch.tensor([1.0]).double(), ONES).dtype == torch.float64


def test_truncated_rows_bootstrap():
    mask, truncated = torch.ones(2, 2, dtype=torch.bool), torch.tensor([False, True])
    values, bootstrap = split_values(torch.full((2, 3), 0.5), mask, truncated)
    assert bootstrap.tolist() == [0, 0.5]
    rewards = score_last_token(torch.zeros(2), mask, bootstrapped=truncated)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    assert advantages.tolist() == [[-0.5, -0.5], [0, 0]] and returns.tolist() == [[0, 0], [0.5, 0.5]]


def test_a_row_that_bootstraps_gets_no_score():
    rewards = score_last_token(
        torch.tensor([1.0, 1.0]), torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False])
    )
    assert rewards.tolist() == [[0, 0], [0, 1]]


def test_the_bootstrap_is_the_value_after_the_last_chosen_token():
    state_values = torch.arange(15.0).view(3, 5)
    mask = mask_of([1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0])
    values, bootstrap = split_values(state_values, mask, torch.ones(3, dtype=torch.bool))
    assert torch.equal(values, state_values[:, :4]) and bootstrap.tolist() == [4, 7, 13]
    spoiled = torch.full((1, 3), NAN)  # what a critic says after a finished text is never used
    assert split_values(spoiled, mask_of([1, 1]), torch.tensor([False]))[1].tolist() == [0]


# Any rows


def batch(seed, chosen=0.7):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < chosen
    return rewards, values, mask, torch.randn(4, generator=generator, dtype=torch.float64)


DIAL = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@given(st.integers(0, 10_000), DIAL, DIAL)
def test_masked_numbers_change_nothing(seed, gamma, lam):
    rewards, values, mask, bootstrap = batch(seed)
    results = []
    for filler in (0.0, NAN, 1e30, float("inf")):
        filled = [torch.where(mask, x, filler) for x in (rewards, values)]
        results.append(
            [
                *gae(*filled, mask, gamma=gamma, lam=lam, bootstrap=bootstrap),
                td_errors(*filled, mask, gamma=gamma, bootstrap=bootstrap),
                n_step_advantages(*filled, mask, 3, gamma=gamma, bootstrap=bootstrap),
            ]
        )
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0])) and all((x[~mask] == 0).all() for x in result)


@given(st.integers(0, 10_000), DIAL, DIAL)
def test_a_row_with_holes_is_the_row_without_its_masked_entries(seed, gamma, lam):
    rewards, values, mask, bootstrap = batch(seed)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for row in range(len(mask)):
        kept = mask[row]
        cut = [x[row, kept][None] for x in (rewards, values, mask)]
        expected = gae(*cut, gamma=gamma, lam=lam, bootstrap=bootstrap[row : row + 1])
        assert torch.equal(advantages[row, kept], expected[0][0]) and torch.equal(returns[row, kept], expected[1][0])


@given(st.integers(0, 10_000), DIAL, DIAL)
def test_the_bootstrap_is_one_more_value(seed, gamma, lam):
    """A cut row with V after its end has the advantages of the row continued by a token that brings no surprise."""
    rewards, values, mask, bootstrap = batch(seed, chosen=1.0)
    cut, _ = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    longer, _ = gae(
        torch.cat([rewards, bootstrap[:, None]], 1),
        torch.cat([values, bootstrap[:, None]], 1),
        torch.ones(4, 7, dtype=torch.bool),
        gamma=gamma,
        lam=lam,
    )
    assert_close(cut, longer[:, :-1], atol=1e-10, rtol=0)


def test_results_are_data_in_at_least_float32():
    rewards, values = torch.zeros(1, 3).bfloat16(), torch.ones(1, 3, requires_grad=True)
    for x in (*gae(rewards, values, ONES, gamma=1.0, lam=0.9), td_errors(rewards, values, ONES, gamma=1.0)):
        assert x.dtype == torch.float32 and not x.requires_grad
    assert gae(rewards, values.detach().bfloat16(), ONES, gamma=1.0, lam=0.9)[1].dtype == torch.float32
    assert gae(rewards.double(), values, ONES, gamma=1.0, lam=0.9)[0].dtype == torch.float64


def test_inputs_are_not_changed():
    rewards, values, mask, bootstrap = batch(0)
    copies = [x.clone() for x in (rewards, values, mask, bootstrap)]
    gae(rewards, values, mask, gamma=1.0, lam=0.9, bootstrap=bootstrap)
    assert all(torch.equal(a, b) for a, b in zip(copies, (rewards, values, mask, bootstrap)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rewards": torch.zeros(1, 4)}, r"\[1, 4\], \[1, 3\], \[1, 3\]"),
        ({"values": torch.zeros(1, 4)}, r"\[1, 3\], \[1, 4\], \[1, 3\]"),
        ({"bootstrap": torch.zeros(1, 1)}, r"bootstrap has the shape \[1, 1\]"),
        ({"gamma": 1.1}, "gamma is 1.1"),
        ({"lam": -0.1}, "lam is -0.1"),
    ],
)
def test_errors_say_what_is_wrong(change, message):
    right = {"rewards": torch.zeros(1, 3), "values": torch.zeros(1, 3), "mask": ONES, "gamma": 1.0, "lam": 0.9}
    with pytest.raises(ValueError, match=message):
        gae(**(right | change))


def test_n_is_at_least_one():
    with pytest.raises(ValueError, match="n is 0"):
        n_step_advantages(torch.zeros(1, 3), torch.zeros(1, 3), ONES, 0, gamma=1.0)


# The exact error


@pytest.mark.parametrize("lam", [0.0, 0.6, 1.0])
def test_the_exact_error_of_gae_agrees_with_drawn_critics(lam):
    tree = enumerate_tree(TabularPolicy(3, 3, seed=1), 3, eos_id=0)
    scores = torch.rand(len(tree.ids), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact, critics, sigma = exact_values(tree, scores), 4000, 0.5
    generator = torch.Generator().manual_seed(2)
    drawn = exact.v + sigma * torch.randn(critics, len(exact.v), generator=generator, dtype=torch.float64)
    rewards, mask = score_last_token(scores, tree.mask).repeat(critics, 1), tree.mask.repeat(critics, 1)
    estimate, _ = gae(rewards, drawn[:, tree.states].flatten(0, 1), mask, gamma=1.0, lam=lam)
    estimate = estimate.view(critics, *tree.mask.shape)[:, tree.mask]  # [critics, tokens]
    weight = leaf_probabilities(tree).detach()[:, None].expand_as(tree.mask)[tree.mask]
    weight = weight / weight.sum()
    A = exact.a[tree.states, tree.ids][tree.mask]

    error = gae_error(tree, scores, lam)
    one = (estimate - A).square() @ weight
    assert (one.mean() - error.mse(sigma)).abs() < 4 * one.std() / critics**0.5

    pair = (tree.states * 3 + tree.ids)[tree.mask]  # many rollouts, one critic: the mean over what follows (s, a)
    visits = torch.zeros(len(exact.v) * 3).double().index_add(0, pair, weight)
    mean = torch.zeros(critics, len(visits)).double().index_add(1, pair, estimate * weight) / visits
    many = (mean - exact.a.flatten()).square() @ visits
    assert (many.mean() - error.mse(sigma, rollouts=10**9)).abs() < 4 * many.std() / critics**0.5
    assert error.mse(sigma, 8, persistent=False) == pytest.approx(error.mse(sigma) / 8)
