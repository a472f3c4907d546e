"""The claims of section 7, as the notebook proves them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.gae import gae, score_last_token
from lmrl.policy import (
    addition_problems,
    addition_reward,
    completion_texts,
    length_mask,
    pad_left,
    sample,
    warm_start_folder,
)
from lmrl.reinforce import reinforce_terms
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    exact_values,
    leaf_probabilities,
    prompted_policy,
    row_gradients,
)
from lmrl.values import monte_carlo_outcomes, next_chosen
from lmrl.variance import leaf_moments

TREES = [(3, 3, 0, 0), (3, 3, None, 1), (2, 4, 1, 2), (4, 2, None, 3)]
every_tree = pytest.mark.parametrize("shape", TREES, ids=str)


def problem(vocab_size, max_length, eos_id, seed, uniform=False):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    if uniform:
        policy.logits.data.zero_()
    tree = enumerate_tree(policy, max_length, eos_id)
    rewards = torch.rand(len(tree.ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return policy, tree, rewards


def moments(policy, tree, rewards, weights):
    if weights.dim() == 2:
        weights = torch.where(tree.mask, weights, 0.0)
    estimates = row_gradients(reinforce_terms(tree.logprobs, weights).sum(-1), policy.parameters())
    return leaf_moments(tree, estimates, exact_gradient(tree, rewards, policy.parameters()))


def wrong_critic(tree, rewards, seed, size=0.3):
    v = exact_values(tree, rewards).v
    return v + size * torch.randn(len(v), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@every_tree
def test_claim_7_1_the_mean_advantage_is_zero_and_the_advantage_is_the_jump_of_v(shape):
    _, tree, rewards = problem(*shape)
    v, q, a = exact_values(tree, rewards)
    assert (tree.log_policy.exp() * a).sum(-1).abs().max() < 1e-10 < a.abs().max()
    values = torch.where(tree.mask, v[tree.states], torch.nan)
    following = next_chosen(values, tree.mask, rewards)
    assert torch.allclose(following[tree.mask], q[tree.states, tree.ids][tree.mask], atol=1e-10, rtol=0)
    jumps = (following - values)[tree.mask]
    assert torch.allclose(jumps, a[tree.states, tree.ids][tree.mask], atol=1e-10, rtol=0)


@every_tree
def test_claim_7_1_values_are_mean_returns_of_the_completions_that_pass(shape):
    """V and Q from their definitions, with nothing of the tree's own recursion in it."""
    _, tree, rewards = problem(*shape)
    v, q, _ = exact_values(tree, rewards)
    p = leaf_probabilities(tree).detach()
    for state in range(len(v)):
        here = tree.mask & (tree.states == state)
        passing = here.any(1)
        assert abs(p[passing] @ rewards[passing] / p[passing].sum() - v[state]) < 1e-10
        for token in range(q.shape[1]):
            passing = (here & (tree.ids == token)).any(1)
            assert abs(p[passing] @ rewards[passing] / p[passing].sum() - q[state, token]) < 1e-10


@every_tree
def test_claim_7_2_the_advantage_is_a_legal_drop_in(shape):
    policy, tree, rewards = problem(*shape)
    v, q, a = exact_values(tree, rewards)
    weights = [rewards, q[tree.states, tree.ids], rewards[:, None] - v[tree.states], a[tree.states, tree.ids]]
    assert exact_gradient(tree, rewards, policy.parameters()).norm() > 0.01
    for weight in weights:
        assert moments(policy, tree, rewards, weight).bias.abs().max() < 1e-10


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(TREES), st.integers(0, 10_000))
def test_claim_7_2_advantages_vary_less_than_reward_minus_value(shape, seed):
    policy, tree, rewards = problem(*shape[:3], seed)
    v, _, a = exact_values(tree, rewards)
    with_a = moments(policy, tree, rewards, a[tree.states, tree.ids]).variance
    assert with_a < moments(policy, tree, rewards, rewards[:, None] - v[tree.states]).variance


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(TREES), st.integers(0, 10_000))
def test_claim_7_2_advantages_vary_less_than_rewards_for_a_uniform_policy(shape, seed):
    policy, tree, rewards = problem(*shape[:3], seed, uniform=True)
    with_a = moments(policy, tree, rewards, exact_values(tree, rewards).a[tree.states, tree.ids]).variance
    assert with_a < moments(policy, tree, rewards, rewards).variance


def bandit():
    policy = TabularPolicy(2, 1)
    policy.logits.data[0] = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
    return policy, enumerate_tree(policy, 1), torch.tensor([1.0, 0.0], dtype=torch.float64)


def test_claim_7_2_advantages_can_vary_more_than_rewards():
    policy, tree, rewards = bandit()
    a = exact_values(tree, rewards).a[tree.states, tree.ids]
    assert moments(policy, tree, rewards, rewards).variance == pytest.approx(0.0018, abs=1e-10)
    assert moments(policy, tree, rewards, a).variance == pytest.approx(0.1152, abs=1e-10)


@every_tree
@pytest.mark.parametrize("seed", [0, 1])
def test_claim_7_3_a_wrong_critic_as_a_baseline_leaves_the_gradient_unbiased(shape, seed):
    policy, tree, rewards = problem(*shape)
    values = wrong_critic(tree, rewards, seed)[tree.states]
    assert moments(policy, tree, rewards, rewards[:, None] - values).bias.abs().max() < 1e-10
    full, _ = gae(score_last_token(rewards, tree.mask), values, tree.mask, gamma=1.0, lam=1.0)
    assert moments(policy, tree, rewards, full).bias.abs().max() < 1e-10


def test_claim_7_3_a_wrong_baseline_changes_the_variance_in_either_direction():
    policy, tree, rewards = bandit()
    better, exact, worse = (moments(policy, tree, rewards, rewards - b).variance for b in (0.1, 0.9, 1.5))
    assert better < exact < worse


@every_tree
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
def test_claim_7_3_bootstrapping_from_a_wrong_critic_biases_the_gradient(shape, lam):
    policy, tree, rewards = problem(*shape)
    values = wrong_critic(tree, rewards, seed=0)[tree.states]
    advantages, _ = gae(score_last_token(rewards, tree.mask), values, tree.mask, gamma=1.0, lam=lam)
    assert moments(policy, tree, rewards, advantages).bias.norm() > 1e-3
    exact = exact_values(tree, rewards).v[tree.states]
    advantages, _ = gae(score_last_token(rewards, tree.mask), exact, tree.mask, gamma=1.0, lam=lam)
    assert moments(policy, tree, rewards, advantages).bias.abs().max() < 1e-10


@pytest.mark.parametrize("lam", [0.0, 0.5])
@pytest.mark.parametrize("eos_id, biased", [(None, False), (0, True)])
def test_claim_7_3_a_constant_error_is_harmless_at_fixed_length_only(lam, eos_id, biased):
    policy, tree, rewards = problem(3, 3, eos_id, 0)
    values = exact_values(tree, rewards).v[tree.states] + 0.3
    advantages, _ = gae(score_last_token(rewards, tree.mask), values, tree.mask, gamma=1.0, lam=lam)
    bias = moments(policy, tree, rewards, advantages).bias.norm()
    assert bias > 0.01 if biased else bias < 1e-10


@pytest.fixture(scope="module")
def measured():
    """Values by Monte Carlo along 32 answers of the warm-started adder, and its advantages by (7.2)."""
    folder = warm_start_folder(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    problems, generator = addition_problems()[1][64:96], torch.Generator().manual_seed(1)
    prompts = pad_left([tokenizer(p.prompt).input_ids for p in problems], tokenizer.pad_token_id)
    how = {"stop_ids": [tokenizer.eos_token_id], "generator": generator}
    samples = sample(model, *prompts, max_new_tokens=4, **how)
    mask = length_mask(samples.lengths, 4)

    def score(rows, ids, lengths, truncated):
        answers = [problems[row].answer for row in rows.tolist()]
        return torch.tensor(addition_reward([], completion_texts(tokenizer, ids, lengths, truncated), answer=answers))

    reached = score(torch.arange(32), samples.ids, samples.lengths, samples.truncated)
    outcomes = monte_carlo_outcomes(
        model, *prompts, samples.ids, mask, score, num_rollouts=128, max_completion_length=4, **how
    )
    values = outcomes.mean(-1)
    advantages = torch.where(mask, next_chosen(values, mask, reached) - values, 0.0)
    return model, tokenizer, problems, prompts, samples, mask, score, values, advantages, reached


def test_claim_7_4_most_tokens_barely_move_v_and_a_few_move_it_a_lot(measured):
    mask, advantages = measured[5], measured[8]
    moves = advantages[mask].abs().sort(descending=True).values
    assert (moves < 0.1).double().mean() > 0.5
    assert moves[: round(0.3 * len(moves))].sum() > 0.7 * moves.sum()
    assert moves[0] > 0.4


def test_claim_7_4_after_the_first_wrong_digit_nothing_moves(measured):
    """Found with V by Monte Carlo only: once it is 0 in a wrong answer, it stays 0."""
    _, _, _, _, _, mask, _, values, advantages, reached = measured
    lost = mask & (values == 0) & (reached == 0)[:, None]
    assert lost.any() and (advantages[lost] == 0).all()


def test_claim_7_4_the_values_are_those_of_the_tree(measured):
    model, tokenizer, _, (prompt_ids, prompt_mask), samples, mask, score, values, _, _ = measured
    row = int(values.sum(1).argmax())
    with torch.no_grad():
        tree = enumerate_tree(prompted_policy(model, prompt_ids[row][prompt_mask[row]]), 4, tokenizer.eos_token_id)
    lengths = tree.mask.sum(-1)
    exact = exact_values(tree, score(torch.full_like(lengths, row), tree.ids, lengths, tree.truncated)).v
    leaf = ((tree.ids == samples.ids[row]).all(-1) & (lengths == samples.lengths[row])).nonzero().item()
    v = exact[tree.states[leaf, mask[row]]]
    assert ((values[row, mask[row]] - v).abs() <= 4 * (v * (1 - v) / 128).sqrt() + 1e-3).all()
