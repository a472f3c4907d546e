import math

import numpy as np
import pytest
import torch

from lmrl.baselines import group_advantages
from lmrl.loss import policy_loss
from lmrl.ppo import clipped, importance_ratio
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
    sequence_kl,
    visit_probabilities,
)
from lmrl.trust_region import entropy, fisher_matrix, kl_exact, kl_k1, kl_k2, kl_k3, natural_step

float64 = torch.float64


def trees():
    """A policy and a reference over three tokens and at most three steps, with the policy's parameters."""
    policy, reference = TabularPolicy(3, 3, seed=0), TabularPolicy(3, 3, seed=1)
    return enumerate_tree(policy, 3, eos_id=0), enumerate_tree(reference, 3, eos_id=0), list(policy.parameters())


OFFSETS = torch.tensor([0.3, 0.0, -0.3], dtype=float64)
A_IS_RIGHT = torch.tensor([True, True, False])


def chance_of_right(u):
    chance_of_a = torch.sigmoid(u + OFFSETS)
    return torch.where(A_IS_RIGHT, chance_of_a, 1 - chance_of_a)


def collapse_report(u):
    """pass@1, pass@8, entropy, averaged over the three prompts."""
    right = chance_of_right(u)
    return torch.stack([right, 1 - (1 - right) ** 8, entropy(torch.stack([right, 1 - right], -1).log())]).mean(-1)


def test_claim_9_1_exact_steps():
    u, reports = torch.zeros(1, dtype=float64), []
    for _ in range(9):
        u.requires_grad_()
        reports.append(collapse_report(u).detach())
        u = (u + 20 * torch.autograd.grad(collapse_report(u)[0], u)[0]).detach()
    assert reports[0].tolist() == pytest.approx([0.550, 0.998, 0.686], abs=5e-4)
    assert reports[8].tolist() == pytest.approx([0.662, 0.774, 0.155], abs=5e-4)
    changes = torch.stack(reports).diff(dim=0)
    assert (changes[:, 0] > 0).all() and (changes[:, 1:] < 0).all()


@pytest.mark.parametrize("learning_rate, steps, scale", [(20, 8, "none"), (5, 30, "none"), (5, 16, "group")])
def test_claim_9_1_sampled_groups_of_eight(learning_rate, steps, scale):
    """Over 300 seeds, with intervals of two standard errors: entropy and pass@8 fall, pass@1 rises."""
    seeds, generator = 300, torch.Generator().manual_seed(learning_rate + steps)
    group = torch.arange(3 * seeds).repeat_interleave(8)
    u, tied = torch.zeros(seeds, 1, dtype=float64), []
    before = collapse_report(u)
    for _ in range(steps):
        right = chance_of_right(u)[..., None]
        rewards = (torch.rand(seeds, 3, 8, generator=generator, dtype=float64) < right).double()
        advantages = group_advantages(rewards.flatten(), group, scale=scale).view_as(rewards)
        score = torch.where(A_IS_RIGHT[:, None], rewards - right, right - rewards)
        u = u + learning_rate * (advantages * score).mean((1, 2))[:, None]
        tied.append((advantages == 0).all(-1).double().mean().item())
    change = collapse_report(u) - before
    mean, error = change.mean(-1), 2 * change.std(-1) / seeds**0.5
    assert mean[0] - error[0] > 0.1 and mean[1] + error[1] < -0.15 and mean[2] + error[2] < -0.4
    assert tied[0] < 0.05 and tied[-1] > 0.5


def test_claim_9_1_without_shared_parameters_entropy_falls_and_pass_at_8_does_not():
    u = torch.zeros(3, dtype=float64)
    before = collapse_report(u)
    for _ in range(8):
        u.requires_grad_()
        u = (u + 20 * torch.autograd.grad(collapse_report(u)[0], u)[0]).detach()
    after = collapse_report(u)
    assert after[2] < 0.25 < before[2] and after[1] > before[1]


def test_claim_9_2_equal_steps_in_the_parameters_are_unequal_steps_of_the_policy():
    logits = torch.tensor([0.0, 0.0, -6.0], dtype=float64)
    trade = torch.tensor([-1.0, 1.0, 0.0], dtype=float64) / math.sqrt(2)
    lower = torch.tensor([1.0, 1.0, -2.0], dtype=float64) / math.sqrt(6)
    assert abs(trade.norm() - lower.norm()) < 1e-12
    assert kl_exact(logits, logits + trade) > 10 * kl_exact(logits, logits + lower) > 0


def test_claim_9_2_the_same_step_elsewhere():
    """One step in one logit: at an even choice it moves the probability by .23, far from it by less than .002."""
    step = torch.tensor([1.0, 0.0], dtype=float64)
    even, sure = torch.zeros(2, dtype=float64), torch.tensor([7.0, 0.0], dtype=float64)
    moved = [(logits + step).softmax(-1)[0] - logits.softmax(-1)[0] for logits in (even, sure)]
    assert moved[0] > 0.23 and moved[1] < 0.002
    assert kl_exact(even, even + step) > 100 * kl_exact(sure, sure + step)


def test_claim_9_2_exact_reason():
    """KL(π ‖ π_Δ) = log E[e^Δ] − E[Δ], on random policies and steps."""
    generator = torch.Generator().manual_seed(0)
    logits, step = torch.randn(2, 20, 6, dtype=float64, generator=generator)
    probs = logits.softmax(-1)
    cumulant = (probs * step.exp()).sum(-1).log() - (probs * step).sum(-1)
    assert torch.allclose(kl_exact(logits, logits + step), cumulant, rtol=0, atol=1e-10)


def log_slope(lengths, remainders):
    """Slope of a line through logarithms, and two standard errors."""
    (slope, _), covariance = np.polyfit(np.log(lengths), np.log(remainders), 1, cov=True)
    return slope, 2 * covariance[0, 0] ** 0.5


@pytest.mark.parametrize(
    "vocab_size, max_length, eos_id, seed", [(3, 3, 0, 0), (3, 3, None, 1), (2, 4, 0, 2), (5, 2, 0, 3)]
)
def test_claim_9_3_the_remainder_is_of_third_order(vocab_size, max_length, eos_id, seed):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, eos_id)
    fisher = fisher_matrix(leaf_probabilities(tree), score_matrix(tree, policy.parameters()))
    start = policy.logits.detach().clone()
    direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(seed), dtype=float64)
    direction /= direction.norm()
    lengths, remainders = np.logspace(-3, -1, 9), []
    for length in lengths:
        policy.logits.data = start + length * direction
        half = length**2 * (direction.flatten() @ fisher @ direction.flatten()).item() / 2
        kl = sequence_kl(tree, enumerate_tree(policy, max_length, eos_id)).item()
        remainders.append(abs(kl - half))
        assert abs(kl / half - 1) < length
    slope, error = log_slope(lengths, remainders)
    assert abs(slope - 3) < 0.1 and error < 0.1


@pytest.mark.parametrize(
    "probs, step, wanted",
    [
        ([0.5, 0.5], [1.0, -1.0], 4),
        ([0.3, 0.3, 0.4], [1.0, -1.0, 0.0], 4),
        ([0.25] * 4, [2.0, 1.0, -1.0, -2.0], 4),
        ([0.8, 0.2], [1.0, -1.0], 3),
        ([0.5, 0.3, 0.2], [1.0, -1.0, 0.0], 3),
    ],
)
def test_claim_9_3_the_third_cumulant_decides_the_order(probs, step, wanted):
    """The remainder starts with κ₃/6; in a symmetric case κ₃ is zero, and the next term is of fourth order."""
    p, step = torch.tensor(probs, dtype=float64), torch.tensor(step, dtype=float64)
    lengths = torch.from_numpy(np.logspace(-2, -1, 9))[:, None]
    centred = step - (p * step).sum()
    variance, third = (p * centred**2).sum(), (p * centred**3).sum()
    kl = kl_exact(p.log().expand(9, -1), p.log() + lengths * step)
    remainder = kl - lengths[:, 0] ** 2 * variance / 2
    slope, error = log_slope(lengths[:, 0].numpy(), remainder.abs().numpy())
    assert abs(slope - wanted) < 0.1 and error < 0.1
    assert (abs(third) < 1e-12) == (wanted == 4)
    if wanted == 3:
        assert (remainder / lengths[:, 0] ** 3)[0].item() == pytest.approx(third.item() / 6, rel=0.05)


@pytest.mark.parametrize(
    "vocab_size, max_length, eos_id, seed", [(3, 3, 0, 0), (3, 3, None, 1), (2, 4, 0, 2), (4, 2, 0, 3)]
)
def test_claim_9_4_the_surrogate_is_j_to_first_order(vocab_size, max_length, eos_id, seed):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, eos_id)
    rewards = torch.randn(len(tree.ids), generator=torch.Generator().manual_seed(seed), dtype=float64)
    advantage, visits = exact_values(tree, rewards).a, visit_probabilities(tree).detach()
    gradient = exact_gradient(tree, rewards, policy.parameters())
    surrogate = (visits[:, None] * tree.log_policy.exp() * advantage).sum()
    assert abs(surrogate.item()) < 1e-10
    assert (flat_gradient(surrogate, policy.parameters()) - gradient).abs().max() < 1e-10
    start, lengths, gaps = policy.logits.detach().clone(), np.logspace(-3, -1, 7), []
    for length in lengths:
        policy.logits.data = start + length * (gradient / gradient.norm()).view_as(start)
        moved = enumerate_tree(policy, max_length, eos_id)
        change = (expectation(moved, rewards) - expectation(tree, rewards)).item()
        gain = (moved.log_policy.exp() * advantage).sum(-1)
        assert abs((visit_probabilities(moved) * gain).sum().item() - change) < 1e-10
        gaps.append(abs((visits * gain).sum().item() - change))
    slope, error = log_slope(lengths, gaps)
    assert abs(slope - 2) < 0.1 and error < 0.1


def two_prompts(theta):
    ends = torch.tensor([-1.0, 0.0, 1.0], dtype=float64)
    return 8 * theta[0] * ends, torch.stack([0.2 * theta[1] - 1, torch.zeros_like(theta[1])])


def mean_reward(theta):
    first, second = two_prompts(theta)
    return (first.softmax(-1)[1] + second.softmax(-1)[0]) / 2


def gains(delta):
    """(natural, plain) gains of J at one parameter length, and their mean KL."""
    theta = torch.tensor([0.1, 0.0], dtype=float64, requires_grad=True)
    logprobs = torch.cat([z.log_softmax(-1) for z in two_prompts(theta)])
    fisher = fisher_matrix(logprobs.exp() / 2, row_gradients(logprobs, [theta]))
    (gradient,) = torch.autograd.grad(mean_reward(theta), theta)
    theta = theta.detach()
    natural = natural_step(gradient, fisher, delta)
    steps = natural, gradient * natural.norm() / gradient.norm()
    kl = [sum(map(kl_exact, two_prompts(theta), two_prompts(theta + step))).item() / 2 for step in steps]
    return [(mean_reward(theta + step) - mean_reward(theta)).item() for step in steps], kl


def test_claim_9_5_a_natural_step_improves_where_a_plain_step_of_the_same_length_does_not():
    assert gains(1e-4)[0] == pytest.approx([0.0048, -0.0039], abs=5e-5)
    assert gains(1e-2)[0] == pytest.approx([0.052, -0.135], abs=5e-4)
    for delta in (1e-5, 1e-4, 1e-3):
        assert gains(delta)[1][0] == pytest.approx(delta, rel=0.05)


def test_claim_9_5_a_small_plain_step_improves_too_and_gains_more_for_far_more_kl():
    for delta in (1e-8, 1e-6, 1e-5):
        (natural, plain), (natural_kl, plain_kl) = gains(delta)
        assert plain > natural > 0 and plain_kl > 1000 * natural_kl


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_claim_9_6_a_budget_bounds_the_step_and_a_penalty_the_distance(seed):
    start = enumerate_tree(TabularPolicy(3, 3, seed=seed), 3, eos_id=0)
    rewards = (start.ids == 1).sum(-1).double()
    largest, distance, first = {}, {}, {}
    for run in [(budget, beta) for budget in (0.02, None) for beta in (0.0, 0.5)]:
        policy, spent = TabularPolicy(3, 3, seed=seed), []
        parameters = list(policy.parameters())
        for _ in range(15):
            tree = enumerate_tree(policy, 3, eos_id=0)
            uphill = flat_gradient(expectation(tree, rewards) - run[1] * sequence_kl(tree, start), parameters)
            fisher = fisher_matrix(leaf_probabilities(tree), score_matrix(tree, parameters))
            step = natural_step(uphill, fisher, run[0]) if run[0] else 5 * uphill
            policy.logits.data += step.view_as(policy.logits)
            spent.append(sequence_kl(tree, enumerate_tree(policy, 3, eos_id=0)).item())
        largest[run], first[run] = max(spent), spent[0]
        distance[run] = sequence_kl(enumerate_tree(policy, 3, eos_id=0), start).item()
    for beta in (0.0, 0.5):
        assert largest[0.02, beta] < 0.03 and largest[None, beta] > 0.2
    for budget in (0.02, None):
        assert distance[budget, 0.5] < 0.75 * distance[budget, 0.0]
        assert first[budget, 0.5] == pytest.approx(first[budget, 0.0], abs=1e-10)


def test_claim_9_6_the_reference_penalty_changes_nothing_in_the_clip_and_the_reverse():
    """The gradient of the loss is the clipped surrogate's plus β times the penalty's, for any ε, β and reference."""
    generator = torch.Generator().manual_seed(0)
    old, ref, advantages = torch.randn(3, 4, 6, generator=generator, dtype=float64)
    logprobs = (old + 0.3 * torch.randn(4, 6, generator=generator, dtype=float64)).requires_grad_()
    weights = torch.full((4, 6), 1 / 24, dtype=float64)

    def gradient(advantages, epsilon, beta, ref):
        loss = policy_loss(logprobs, old, advantages, weights, epsilon=epsilon, beta=beta, ref_logprobs=ref)
        return torch.autograd.grad(loss, logprobs)[0]

    for epsilon in (0.1, 0.2, 0.9):
        held = clipped(importance_ratio(logprobs, old), advantages, epsilon)
        assert held.any() == (epsilon < 0.9)
        surrogate = gradient(advantages, epsilon, 0.0, None)
        assert torch.equal(surrogate == 0, held)
        for beta, reference in [(0.1, ref), (0.1, ref + 1), (5.0, ref)]:
            penalty = gradient(torch.zeros_like(advantages), 0.2, beta, reference)  # the same for every ε
            assert (gradient(advantages, epsilon, beta, reference) - surrogate - penalty).abs().max() < 1e-10
            assert penalty.abs().min() > 0


def test_claim_14_4_expectations_on_whole_completions():
    tree, ref, _ = trees()
    p, ref_p, kl = leaf_logprobs(tree), leaf_logprobs(ref), sequence_kl(tree, ref)
    mean = {k: (p.exp() * k(p, ref_p)).sum() for k in (kl_k1, kl_k2, kl_k3)}
    assert abs(mean[kl_k1] - kl) < 1e-10 and abs(mean[kl_k3] - kl) < 1e-10
    assert abs(mean[kl_k2] - kl) > 0.01
    assert kl_k1(p, ref_p).min() < 0 <= min(kl_k2(p, ref_p).min(), kl_k3(p, ref_p).min())


def test_claim_14_4_expectations_token_by_token():
    """The sum over a completion's tokens of k1 or k3 has the sequence KL as its mean; swapped k1 has not."""
    tree, ref, _ = trees()
    kl = sequence_kl(tree, ref)
    for k, expected in ((kl_k1, kl), (kl_k3, kl)):
        summed = torch.where(tree.mask, k(tree.logprobs, ref.logprobs), 0.0).sum(-1)
        assert abs((leaf_logprobs(tree).exp() * summed).sum() - expected) < 1e-10
    swapped = torch.where(tree.mask, kl_k1(ref.logprobs, tree.logprobs), 0.0).sum(-1)
    assert abs((leaf_logprobs(tree).exp() * swapped).sum() + kl) < 1e-10
    by_state = (visit_probabilities(tree) * kl_exact(tree.log_policy, ref.log_policy)).sum()
    assert abs(by_state - kl) < 1e-10


def test_claim_14_4_variance_near_the_reference_and_far_from_it():
    spread = {}
    for place, policy, ref in [("near", (0.5, 0.5), (0.25, 0.75)), ("far", (0.01, 0.99), (0.5, 0.5))]:
        p, q = torch.tensor(policy, dtype=float64), torch.tensor(ref, dtype=float64)
        values = torch.stack([k(p.log(), q.log()) for k in (kl_k1, kl_k2, kl_k3)])
        spread[place] = (p * (values - (p * values).sum(-1, keepdim=True)) ** 2).sum(-1).sqrt().tolist()
    assert spread["near"][2] < 0.1 * spread["near"][0]
    assert spread["far"][2] > 9 * spread["far"][0]


def test_claim_14_4_gradient_in_the_loss_of_whole_completions():
    tree, ref, parameters = trees()
    p, ref_p = leaf_logprobs(tree), leaf_logprobs(ref).detach()
    wanted = flat_gradient(sequence_kl(tree, ref), parameters)
    other = flat_gradient(sequence_kl(ref, tree), parameters)
    in_loss = {k: flat_gradient((p.exp().detach() * k(p, ref_p)).sum(), parameters) for k in (kl_k1, kl_k2, kl_k3)}
    assert in_loss[kl_k1].abs().max() < 1e-10
    assert (in_loss[kl_k2] - wanted).abs().max() < 1e-10
    assert (in_loss[kl_k3] - other).abs().max() < 1e-10
    assert (other - wanted).abs().max() > 0.01


def test_claim_14_4_gradient_in_the_reward_of_whole_completions():
    tree, ref, parameters = trees()
    p, ref_p = leaf_logprobs(tree), leaf_logprobs(ref).detach()
    wanted = flat_gradient(sequence_kl(tree, ref), parameters)
    error = {}
    for k in (kl_k1, kl_k2, kl_k3):
        surrogate = ((p.exp() * k(p, ref_p)).detach() * p).sum()
        error[k] = (flat_gradient(surrogate, parameters) - wanted).abs().max().item()
    assert error[kl_k1] < 1e-10
    assert error[kl_k2] > 0.01 and error[kl_k3] > 0.01
