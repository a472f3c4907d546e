"""The claims of section 4, as the notebook proves them."""

import pytest
import torch
from torch.testing import assert_close

from lmrl.policy import gather_logprobs, supervised_loss
from lmrl.reinforce import logit_score, reinforce_terms
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    flat_gradient,
    leaf_logprobs,
    leaf_probabilities,
    row_gradients,
    score_matrix,
)

EXACT = {"atol": 1e-10, "rtol": 0}


PROBLEMS = [(3, 3, 0, 0), (2, 4, None, 1), (5, 2, 4, 2)]  # vocabulary, cap, stop token, seed


@pytest.fixture(scope="module", params=PROBLEMS)
def problem(request):
    vocab_size, cap, eos_id, seed = request.param
    policy = TabularPolicy(vocab_size, cap, seed=seed)
    tree = enumerate_tree(policy, cap, eos_id)
    rewards = ((tree.ids == 1) & tree.mask).sum(-1).double() / cap
    return policy, tree, rewards


def test_claim_4_1_gradient_of_j_is_the_mean_of_reward_times_score(problem):
    policy, tree, rewards = problem
    by_autograd = flat_gradient((leaf_logprobs(tree).exp() * rewards).sum(), policy.parameters())
    assert by_autograd.norm() > 0.01
    scores = score_matrix(tree, policy.parameters())
    assert_close((leaf_probabilities(tree) * rewards) @ scores, by_autograd, **EXACT)


def test_claim_4_2_every_line_of_the_derivation(problem):
    policy, tree, rewards = problem
    parameters = list(policy.parameters())
    p, scores = leaf_probabilities(tree), score_matrix(tree, parameters)
    line_1 = (p * rewards).sum()
    assert_close(line_1.detach(), exact_values(tree, rewards).v[0], **EXACT)
    slopes = row_gradients(p, parameters)
    line_2 = rewards @ slopes
    assert_close(line_2, flat_gradient(line_1, parameters), **EXACT)
    assert slopes.sum(0).abs().max() < 1e-10 and (slopes < 0).any()  # line 3: not probabilities
    assert_close(slopes, p[:, None] * scores, **EXACT)  # line 4
    line_5 = (p[:, None] * scores * rewards[:, None]).sum(0)
    assert_close(line_5, line_2, **EXACT)
    line_6 = expectation(tree, rewards[:, None] * scores)
    assert_close(line_6, line_5, **EXACT)
    product = torch.where(tree.mask, tree.logprobs.exp(), 1.0).prod(-1)
    assert_close(product.log(), leaf_logprobs(tree), **EXACT)  # line 7
    token_scores = sum(row_gradients(column, parameters) for column in tree.logprobs.unbind(1))
    assert_close(expectation(tree, rewards[:, None] * token_scores), line_6, **EXACT)  # line 8


def test_claim_4_2_sampling_estimates_line_6(problem):
    policy, tree, rewards = problem
    terms = rewards[:, None] * score_matrix(tree, policy.parameters())
    exact = exact_gradient(tree, rewards, policy.parameters())
    drawn = torch.multinomial(leaf_probabilities(tree), 20_000, True, generator=torch.Generator().manual_seed(0))
    standard_error = terms[drawn].std(0) / len(drawn) ** 0.5
    assert ((terms[drawn].mean(0) - exact).abs() <= 4 * standard_error + 1e-10).all()
    assert standard_error.max() < 0.1 * exact.norm()


def test_claim_4_3_the_loss_differentiates_to_the_estimator_sample_by_sample(problem):
    policy, tree, rewards = problem
    losses = -reinforce_terms(tree.logprobs, rewards).sum(-1)
    expected = -rewards[:, None] * score_matrix(tree, policy.parameters())
    assert_close(row_gradients(losses, policy.parameters()), expected, **EXACT)


def test_claim_4_4_the_score_is_the_supervised_gradient_with_the_sample_as_label(problem):
    _, tree, _ = problem
    logits = tree.log_policy.detach()[tree.states].requires_grad_()
    loss = supervised_loss(gather_logprobs(logits, tree.ids), tree.mask) * tree.mask.sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    assert_close(gradient[tree.mask], -logit_score(logits.detach(), tree.ids)[tree.mask], **EXACT)
    assert (gradient[~tree.mask] == 0).all()


def test_claim_4_5_equal_rewards_give_no_gradient_and_no_drift_towards_the_mode(problem):
    policy, tree, rewards = problem
    assert exact_gradient(tree, torch.ones_like(rewards), policy.parameters()).abs().max() < 1e-10
    start = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
    moved = start.log() + logit_score(start.log().expand(4, 4), torch.arange(4))
    assert_close(start @ moved, start.log(), **EXACT)  # the logits are a martingale
    assert (start @ moved.softmax(-1))[0] < 0.7 - 0.01


def entropies(first, steps, seeds=400):
    """Entropy [seeds] of four answers after sampled steps with reward 1, and the favourite answers' counts [4]."""
    z = torch.tensor([first, *[(1 - first) / 3] * 3], dtype=torch.float64).log().expand(seeds, 4).clone()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        z += logit_score(z, torch.multinomial(z.softmax(-1), 1, generator=generator)[:, 0])
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1), z.argmax(-1).bincount(minlength=4)


def test_claim_4_5_sampled_steps_collapse_a_uniform_policy_onto_an_arbitrary_answer():
    entropy, winners = entropies(0.25, 500)
    assert 0.04 < entropy.mean() < 0.08  # from 1.386
    assert (winners - 100).abs().max() < 4 * (400 * 0.25 * 0.75) ** 0.5


def test_claim_4_5_sampled_steps_can_raise_the_entropy_of_a_peaked_policy():
    before, after = entropies(0.97, 0)[0], entropies(0.97, 20)[0]
    assert after.mean() - 3 * after.std() / 20 > before.mean()


@pytest.mark.parametrize("weights", [[900, 90, 9, 1], [5, 4, 3, 2, 1], [99, 1, 0.01], [3, 2]])
def test_claim_4_6_the_score_grows_as_the_probability_falls_but_stays_below_root_two(weights):
    p = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    norms = logit_score(p.log().expand(len(p), len(p)), torch.arange(len(p))).norm(dim=-1)
    assert_close(norms.square(), 1 - 2 * p + p.square().sum(), **EXACT)
    assert (norms.diff() > 0).all() and (norms < 2**0.5).all()


def test_claim_4_6_the_score_does_not_grow_like_one_over_the_probability():
    p = torch.tensor([0.9, 0.09, 0.009, 0.001], dtype=torch.float64)
    norms = logit_score(p.log().expand(4, 4), torch.arange(4)).norm(dim=-1)
    assert norms[3] / norms[2] < 1.01  # nine times as rare, and no longer


@pytest.mark.parametrize("problem, size", [(size, size) for size in PROBLEMS], indirect=["problem"])
def test_claim_4_7_reusing_an_older_policys_samples_biases_the_estimator(problem, size):
    policy, tree, rewards = problem
    vocab_size, cap, eos_id, _ = size
    old = enumerate_tree(TabularPolicy(vocab_size, cap, seed=7), cap, eos_id)
    ratio = (tree.logprobs - old.logprobs).detach().exp()
    prefix, q = ratio.cumprod(-1), exact_values(tree, rewards).q[tree.states, tree.ids]

    def bias(weights):
        per_leaf = row_gradients(reinforce_terms(tree.logprobs, weights).sum(-1), policy.parameters())
        return (expectation(old, per_leaf) - exact_gradient(tree, rewards, policy.parameters())).norm()

    for biased in (rewards, rewards[:, None] * ratio, rewards[:, None] * prefix):
        assert bias(biased) > 0.005
    for exact in (rewards * prefix[:, -1], q * prefix):
        assert bias(exact) < 1e-10
