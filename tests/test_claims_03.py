"""The claims of section 3, as the notebook proves them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.objective import group_signal, leaf_rewards, monte_carlo, sample_leaves
from lmrl.policy import build_policy, build_tokenizer, completion_texts, sample
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    expectation,
    leaf_probabilities,
    prompted_policy,
)


@pytest.mark.parametrize("vocab_size, max_length, eos_id, seed", [(2, 4, None, 0), (3, 3, 0, 1), (4, 2, 1, 2)])
def test_claim_3_1_sampling_agrees_with_enumeration(vocab_size, max_length, eos_id, seed):
    tree = enumerate_tree(TabularPolicy(vocab_size, max_length, seed=seed), max_length, eos_id)
    rewards = leaf_rewards(tree, lambda ids: len(ids) + sum(ids) ** 2 / 7)
    J = expectation(tree, rewards).item()
    errors = []
    for count in (100, 10_000):
        drawn = sample_leaves(tree, count, torch.Generator().manual_seed(seed))
        estimate = monte_carlo(rewards[drawn])
        assert abs(estimate.mean - J) < 4 * estimate.standard_error
        errors.append(estimate.standard_error)
    assert 0 < errors[1] < errors[0] / 8


@pytest.mark.parametrize("seed", [0, 1])
def test_claim_3_1_a_sampled_language_model_agrees_with_its_tree(seed):
    tokenizer = build_tokenizer("ab")
    model = build_policy(tokenizer, hidden_size=32, num_layers=1, num_heads=1, seed=seed)
    prompt = torch.tensor([tokenizer("ba").input_ids])
    with torch.no_grad():
        tree = enumerate_tree(prompted_policy(model, prompt[0]), 3, tokenizer.eos_token_id)
    J = expectation(tree, leaf_rewards(tree, lambda ids: float("a" in tokenizer.decode(ids)))).item()
    prompts = prompt.expand(2000, -1)
    samples = sample(
        model,
        prompts,
        torch.ones_like(prompts).bool(),
        max_new_tokens=3,
        stop_ids=[tokenizer.eos_token_id],
        generator=torch.Generator().manual_seed(seed),
    )
    texts = completion_texts(tokenizer, samples.ids, samples.lengths, samples.truncated)
    estimate = monte_carlo(torch.tensor([float("a" in text) for text in texts]))
    assert abs(estimate.mean - J) < 4 * estimate.standard_error < 0.1


@settings(max_examples=10, deadline=None)
@given(st.integers(2, 3), st.integers(1, 3), st.integers(0, 999))
def test_claim_3_2_theta_moves_the_measure_and_never_the_reward(vocab_size, max_length, seed):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    calls = []

    def black_box(ids):
        calls.append(ids)
        return float(str(ids).count("1") > 0)  # reads text, has no derivative

    before = enumerate_tree(policy, max_length)
    rewards = leaf_rewards(before, black_box)
    asked = len(calls)
    gradient = exact_gradient(before, rewards, policy.parameters())
    assert not rewards.requires_grad and gradient.abs().max() > 1e-6
    J, p = expectation(before, rewards).item(), leaf_probabilities(before).detach()
    policy.logits.data += 0.1 * gradient.view_as(policy.logits)
    after = enumerate_tree(policy, max_length)
    assert expectation(after, rewards).item() > J and len(calls) == asked  # J moved without asking again
    assert (leaf_probabilities(after) - p).abs().max() > 1e-9
    assert torch.equal(leaf_rewards(after, black_box), rewards)


def test_claim_3_2_samples_of_an_old_policy_estimate_the_old_objective():
    tree, new = (enumerate_tree(TabularPolicy(3, 2, seed=seed), 2) for seed in (0, 1))
    rewards = leaf_rewards(tree, lambda ids: float(ids[0] == 2))
    estimate = monte_carlo(rewards[sample_leaves(tree, 10_000, torch.Generator().manual_seed(0))])
    assert abs(estimate.mean - expectation(tree, rewards)) < 4 * estimate.standard_error
    assert abs(estimate.mean - expectation(new, rewards)) > 10 * estimate.standard_error


DIVERSE = torch.full((5,), 0.2, dtype=torch.float64), torch.tensor([1, 1, 1, 0, 0], dtype=torch.float64)
CONSTANT = torch.eye(5, dtype=torch.float64)[0], torch.tensor([0.6, 1, 1, 0, 0], dtype=torch.float64)


def listed_signal(p, rewards, group_size):
    groups = torch.cartesian_prod(*[torch.arange(len(p))] * group_size)
    return (p[groups].prod(1) @ rewards[groups].var(1, correction=0)).item()


@pytest.mark.parametrize("group_size, expected", [(2, 0.12), (4, 0.18)])
def test_claim_3_3_equal_j_and_a_signal_of_24_hundredths_times_one_minus_one_over_g_against_zero(group_size, expected):
    for p, rewards in (DIVERSE, CONSTANT):
        assert (p @ rewards).item() == pytest.approx(0.6, abs=1e-10)
        assert group_signal(p, rewards, group_size).item() == pytest.approx(
            listed_signal(p, rewards, group_size), abs=1e-10
        )
    assert group_signal(*DIVERSE, group_size).item() == pytest.approx(expected, abs=1e-10)
    assert group_signal(*CONSTANT, group_size) == 0


def trained(p, rewards, rate, steps, runs=200, seed=0):
    """Logits [runs, L] after sampled steps on groups of eight; and which runs wrote completion 0."""
    z, generator = p.log().repeat(runs, 1), torch.Generator().manual_seed(seed)
    found = torch.zeros(runs, dtype=torch.bool)
    for _ in range(steps):
        drawn = torch.multinomial(z.softmax(1), 8, replacement=True, generator=generator)
        found |= (drawn == 0).any(1)
        z = z.scatter_add(1, drawn, rate / 8 * (rewards[drawn] - rewards[drawn].mean(1, keepdim=True)))
    return z, found


def test_claim_3_3_the_diverse_policy_learns_and_the_constant_one_does_not_move():
    z, _ = trained(*DIVERSE, rate=1.0, steps=200)
    assert (z.softmax(1) @ DIVERSE[1]).min() > 0.9
    z, _ = trained(*CONSTANT, rate=1.0, steps=200)
    assert torch.equal(z, CONSTANT[0].log().expand_as(z))


def test_claim_3_3_right_or_wrong_and_constant_means_j_of_zero_or_one():
    """Over five prompts a constant policy can have J = .6; then no prompt has a signal."""
    prompts = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    p, rewards = torch.tensor([1.0, 0.0]), torch.stack([prompts, 1 - prompts], 1)
    assert (rewards @ p).mean() == pytest.approx(0.6) and set((rewards @ p).tolist()) == {0.0, 1.0}
    assert (group_signal(p.expand(5, 2), rewards, 8) == 0).all()


START, REWARDS = torch.tensor([[0.01, 0.3, 0.3, 0.39], [1.0, 0.7, 0.2, 0.0]], dtype=torch.float64)


def trapped(alpha):
    return (1 - alpha) * START + alpha * torch.eye(4, dtype=torch.float64)[1]


def test_claim_3_4_the_greedy_trap_raises_j_and_takes_the_signal_away():
    policies = torch.stack([trapped(alpha) for alpha in torch.linspace(0, 1, 101, dtype=torch.float64).tolist()])
    J, entropy = policies @ REWARDS, torch.special.entr(policies).sum(1)
    signal = group_signal(policies, REWARDS, 8)
    assert (J.diff() > 0).all()
    assert (entropy[4:].diff() < 0).all()  # a little more at first, then less and less; so with the signal
    assert (signal[60:].diff() < 0).all()
    assert J[99].item() == pytest.approx(0.696, abs=5e-4)
    assert entropy[99].item() == pytest.approx(0.047, abs=5e-4)
    assert signal[99].item() == pytest.approx(0.0023, abs=5e-5)
    assert J[-1].item() == pytest.approx(0.7, abs=1e-10) and entropy[-1] == 0
    assert signal[-1].item() == pytest.approx(0, abs=1e-10)
    assert (START * REWARDS).argmax() == 1 and REWARDS.argmax() == 0


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(-1, 1)), min_size=2, max_size=5))
def test_claim_3_4_an_answer_is_pushed_in_proportion_to_its_own_probability(answers):
    weights, rewards = torch.tensor(answers, dtype=torch.float64).unbind(1)
    bandit = TabularPolicy(len(answers), 1)
    bandit.logits.data[0] = weights.log()
    p = weights / weights.sum()
    slopes = exact_gradient(enumerate_tree(bandit, 1), rewards, bandit.parameters())
    assert torch.allclose(slopes, p * (rewards - p @ rewards), rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
def test_claim_3_4_the_better_answer_may_be_sampled_and_still_not_be_learned(seed):
    shares = {}
    for rate, steps in ((1.0, 500), (10.0, 300)):
        for alpha in (0.0, 0.99):
            z, found = trained(trapped(alpha), REWARDS, rate, steps, runs=500, seed=seed)
            learned = z.softmax(1)[:, 0] > 0.5
            shares[rate, alpha] = found.double().mean().item(), learned.double().mean().item()
    assert shares[1.0, 0.0][0] > 0.9 and shares[1.0, 0.0][1] < 0.01
    assert 0.02 < shares[10.0, 0.0][1] < 0.12 < 0.4 < shares[10.0, 0.0][0]
    for rate in (1.0, 10.0):
        assert shares[rate, 0.99][0] < shares[rate, 0.0][0] / 2 and shares[rate, 0.99][1] < 0.01
