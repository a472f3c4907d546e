"""The claims of section 8, as the notebook proves them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lmrl.gae import gae, gae_error, n_step_advantages, score_last_token, td_errors
from lmrl.tree import TabularPolicy, enumerate_tree, exact_values, leaf_probabilities

EXACT = {"atol": 1e-10, "rtol": 0}
TREES = [(3, 4, 0, 0), (3, 4, None, 1), (2, 5, 1, 2), (4, 2, 3, 3)]
every_tree = pytest.mark.parametrize("shape", TREES, ids=str)
LAMS = torch.linspace(0, 1, 101).tolist()


def problem(vocab_size, max_length, eos_id, seed):
    """A tree, scores, and values with NaN on padding: the exact ones and those of a critic that knows nothing."""
    tree = enumerate_tree(TabularPolicy(vocab_size, max_length, seed=seed), max_length, eos_id)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(len(tree.ids), generator=generator, dtype=torch.float64)
    critic = torch.randn(len(tree.depth), generator=generator, dtype=torch.float64)
    return tree, scores, torch.where(tree.mask, critic[tree.states], torch.nan)


@every_tree
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_claim_8_1_with_an_exact_critic_the_td_error_is_the_advantage(shape, gamma):
    tree, scores, _ = problem(*shape)
    v, _, a = exact_values(tree, scores, gamma)
    values = torch.where(tree.mask, v[tree.states], torch.nan)
    delta = td_errors(score_last_token(scores, tree.mask), values, tree.mask, gamma=gamma)
    assert_close(delta[tree.mask], a[tree.states, tree.ids][tree.mask], **EXACT)
    seen = torch.zeros_like(a)
    seen[tree.states[tree.mask], tree.ids[tree.mask]] = 1
    assert (seen == 1).all()  # every state and every token


@every_tree
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_claim_8_1_and_so_is_the_mean_of_gae_for_any_lambda(shape, lam):
    tree, scores, _ = problem(*shape)
    v, _, a = exact_values(tree, scores)
    advantages, _ = gae(score_last_token(scores, tree.mask), v[tree.states], tree.mask, gamma=1.0, lam=lam)
    p = leaf_probabilities(tree).detach()[:, None].expand_as(tree.mask)[tree.mask]
    pair = (tree.states * a.shape[1] + tree.ids)[tree.mask]
    visits, total = torch.zeros(2, a.numel(), dtype=torch.float64)
    visits.index_add_(0, pair, p)
    total.index_add_(0, pair, p * advantages[tree.mask])
    assert_close(total / visits, a.flatten(), **EXACT)


UNIT = st.floats(0, 1)


@given(st.integers(0, 10_000), UNIT, UNIT, st.booleans())
def test_claim_8_2_three_forms_of_gae_are_one(seed, gamma, lam, holes):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)
    bootstrap = torch.randn(3, generator=generator, dtype=torch.float64)
    if holes:
        mask = torch.rand(3, 6, generator=generator) < 0.6
    else:
        mask = torch.arange(6) < torch.randint(7, (3, 1), generator=generator)
    recursion, _ = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)

    n_steps = [n_step_advantages(rewards, values, mask, n, gamma=gamma, bootstrap=bootstrap) for n in range(1, 7)]
    weights = [(1 - lam) * lam**n for n in range(5)] + [lam**5]
    assert_close(sum(w * x for w, x in zip(weights, n_steps)), recursion, **EXACT)

    for row in range(3):  # the sum of TD errors and the n-step estimates, in plain Python
        r, v = rewards[row, mask[row]].tolist(), [*values[row, mask[row]].tolist(), bootstrap[row].item()]
        length = len(r)
        delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(length)]
        sums = [sum((gamma * lam) ** k * delta[t + k] for k in range(length - t)) for t in range(length)]
        assert recursion[row, mask[row]].tolist() == pytest.approx(sums, abs=1e-10)
        for n, estimate in enumerate(n_steps, 1):
            ends = [min(t + n, length) for t in range(length)]
            direct = [
                sum(gamma ** (k - t) * r[k] for k in range(t, end)) + gamma ** (end - t) * v[end] - v[t]
                for t, end in enumerate(ends)
            ]
            assert estimate[row, mask[row]].tolist() == pytest.approx(direct, abs=1e-10)


@every_tree
def test_claim_8_3_the_two_ends_of_the_dial(shape):
    tree, scores, guesses = problem(*shape)
    rewards = score_last_token(scores, tree.mask)
    for gamma in (1.0, 0.9):
        short, _ = gae(rewards, guesses, tree.mask, gamma=gamma, lam=0.0)
        assert_close(short, td_errors(rewards, guesses, tree.mask, gamma=gamma), **EXACT)
        full, targets = gae(rewards, guesses, tree.mask, gamma=gamma, lam=1.0)
        to_come = tree.mask.sum(-1, keepdim=True) - 1 - torch.arange(tree.mask.shape[1])
        returns = torch.where(tree.mask, scores[:, None] * torch.tensor(gamma, dtype=torch.float64) ** to_come, 0.0)
        assert_close(targets, returns, **EXACT)
        assert_close(full[tree.mask], (returns - guesses)[tree.mask], **EXACT)
    full, _ = gae(rewards, guesses, tree.mask, gamma=1.0, lam=1.0)
    assert_close(full[tree.mask], (scores[:, None] - guesses)[tree.mask], **EXACT)


@every_tree
def test_claim_8_4_the_td_error_is_the_critics_own_curve_until_the_end(shape):
    tree, scores, guesses = problem(*shape)
    delta = td_errors(score_last_token(scores, tree.mask), guesses, tree.mask, gamma=1.0)
    for row, length in enumerate(tree.mask.sum(-1).tolist()):
        v = guesses[row, :length]
        assert_close(delta[row, : length - 1], v.diff(), **EXACT)
        assert_close(delta[row, length - 1], scores[row] - v[-1], **EXACT)


def errors_of(policy, eos_id=None, seed=0):
    tree = enumerate_tree(policy, 4, eos_id)
    scores = torch.rand(len(tree.ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).lt(0.5)
    return tree, scores.double(), [gae_error(tree, scores.double(), lam) for lam in LAMS]


def best(errors, sigma, rollouts=1, persistent=True):
    return LAMS[min(range(len(LAMS)), key=lambda i: errors[i].mse(sigma, rollouts, persistent))]


@pytest.fixture(scope="module")
def dial():
    uniform = TabularPolicy(3, 4)
    uniform.logits.data.zero_()
    return errors_of(uniform)


SIGMAS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0)


def test_claim_8_5_critic_error_creates_an_interior_optimum(dial):
    _, _, errors = dial
    assert errors[0].noise < 1e-10 and all(a.noise < b.noise for a, b in zip(errors, errors[1:]))
    assert [best(errors, sigma) for sigma in SIGMAS] == pytest.approx([0, 0.10, 0.28, 0.43, 0.63, 0.85])


@pytest.mark.parametrize("eos_id, seed", [(None, 1), (0, 2), (0, 3)])
def test_claim_8_5_on_other_policies_too(eos_id, seed):
    _, _, errors = errors_of(TabularPolicy(3, 4, seed=seed), eos_id, seed)
    optima = [best(errors, sigma) for sigma in SIGMAS]
    assert optima[0] == 0 and optima == sorted(set(optima)) and optima[-1] < 1


def test_claim_8_5_the_average_over_errors_is_exact():
    """Errors of ±σ in every state, all combinations of signs listed, against the formula."""
    policy, sigma = TabularPolicy(2, 3, seed=4), 0.4
    tree = enumerate_tree(policy, 3)
    scores = torch.rand(8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    v, _, a = exact_values(tree, scores)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * len(v))  # [128, 7]
    values = (v + sigma * signs)[:, tree.states].flatten(0, 1)
    rewards, mask = score_last_token(scores, tree.mask).repeat(128, 1), tree.mask.repeat(128, 1)
    p = leaf_probabilities(tree).detach()
    for lam in (0.0, 0.5, 1.0):
        advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=lam)
        squared = (advantages.view(128, 8, 3) - a[tree.states, tree.ids]).square().mean((0, 2)) @ p
        assert abs(squared - gae_error(tree, scores, lam).mse(sigma)) < 1e-10


@pytest.mark.parametrize("constant", [0.1, 1.0])
def test_claim_8_5_a_constant_error_keeps_the_optimum_at_zero(dial, constant):
    tree, scores, _ = dial
    v, _, a = exact_values(tree, scores)
    rewards = score_last_token(scores, tree.mask)
    mse = []
    for lam in LAMS:
        advantages, _ = gae(rewards, v[tree.states] + constant, tree.mask, gamma=1.0, lam=lam)
        mse.append((advantages - a[tree.states, tree.ids]).square().mean().item())
    assert min(mse) == mse[0] < mse[1]


ROLLOUTS = (1, 4, 16, 64, 1024)


def test_claim_8_6_a_persistent_error_moves_the_optimum_towards_one(dial):
    _, _, errors = dial
    assert [best(errors, 0.1, N) for N in ROLLOUTS] == pytest.approx([0.10, 0.29, 0.54, 0.76, 0.97])
    assert [best(errors, 0.1, N, persistent=False) for N in ROLLOUTS] == pytest.approx([0.10] * 5)


@pytest.mark.parametrize("eos_id, seed", [(None, 1), (0, 2)])
def test_claim_8_6_on_other_policies_too(eos_id, seed):
    _, _, errors = errors_of(TabularPolicy(3, 4, seed=seed), eos_id, seed)
    persistent = [best(errors, 0.1, N) for N in ROLLOUTS]
    assert persistent == sorted(set(persistent)) and persistent[-1] > 0.9
    assert len({best(errors, 0.1, N, persistent=False) for N in ROLLOUTS}) == 1


def test_claim_8_6_the_error_of_a_batch_mean_is_exact():
    """Two rollouts from the same state and token under one critic, all pairs and all signs of the error listed."""
    policy, sigma, lam = TabularPolicy(2, 3, seed=4), 0.4, 0.5
    tree = enumerate_tree(policy, 3)
    scores = torch.rand(8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    v, _, a = exact_values(tree, scores)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * len(v))
    values = (v + sigma * signs)[:, tree.states].flatten(0, 1)
    rewards, mask = score_last_token(scores, tree.mask).repeat(128, 1), tree.mask.repeat(128, 1)
    advantages = gae(rewards, values, mask, gamma=1.0, lam=lam)[0].view(128, 8, 3)
    p, total = leaf_probabilities(tree).detach(), 0.0
    for t in range(3):
        for first in range(8):
            same = (tree.states[:, t] == tree.states[first, t]) & (tree.ids[:, t] == tree.ids[first, t])
            for second in same.nonzero().flatten().tolist():
                mean = (advantages[:, first, t] + advantages[:, second, t]) / 2
                error = (mean - a[tree.states[first, t], tree.ids[first, t]]).square().mean()
                total += p[first] * p[second] / p[same].sum() * error / 3
    assert abs(total - gae_error(tree, scores, lam).mse(sigma, rollouts=2)) < 1e-10
