"""Claims 15.1 to 15.3, exactly, over several trees, rewards and prices."""

import pytest
import torch

from lmrl.dpo import dpo_loss, sequence_logprobs
from lmrl.reward_model import bradley_terry_loss, bradley_terry_scores, optimisation_path, tilted_logprobs
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    flat_gradient,
    leaf_logprobs,
    row_gradients,
    sequence_kl,
)
from lmrl.trust_region import kl_exact

float64 = torch.float64


def random_rewards(count, seed):
    return 1.5 * torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=float64)


def logits_for(policy, tree, probabilities):
    """Logits of a tabular policy whose completions have these probabilities: each token has the mass below it."""
    mass, row = torch.zeros_like(policy.logits), torch.zeros(len(tree.ids), dtype=torch.int64)
    for t in range(tree.ids.shape[1]):
        here = tree.mask[:, t]
        mass.index_put_((row[here], tree.ids[here, t]), probabilities[here], accumulate=True)
        row = row * policy.vocab_size + tree.ids[:, t] + 1
    return torch.where(mass > 0, mass, 1.0).log().detach()


# ------------------------------------------------------------------------------------------------------------------ 15.1


@pytest.mark.parametrize("eos_id", [None, 0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_claim_15_1_rewards_are_recovered_up_to_a_constant(seed, eos_id):
    tree = enumerate_tree(TabularPolicy(3, 3, seed=seed), 3, eos_id=eos_id)
    rewards = random_rewards(len(tree.ids), seed)
    won = (rewards[:, None] - rewards).sigmoid()
    offset = rewards - bradley_terry_scores(won)
    assert (offset - offset.mean()).abs().max() < 1e-10
    again = bradley_terry_scores((rewards[:, None] + 7 - (rewards + 7)).sigmoid())
    assert (again - (rewards - rewards.mean())).abs().max() < 1e-10  # a constant is not in the data


@pytest.mark.parametrize("seed", [0, 1])
def test_claim_15_1_the_only_flat_direction_is_the_constant(seed):
    rewards = random_rewards(9, seed).requires_grad_()
    won = (rewards[:, None] - rewards).sigmoid().detach()
    loss = (won * bradley_terry_loss(rewards[:, None].expand(9, 9), rewards.expand(9, 9))).sum()
    (slope,) = torch.autograd.grad(loss, rewards, create_graph=True)
    eigenvalues, directions = torch.linalg.eigh(row_gradients(slope, [rewards]))
    assert slope.abs().max() < 1e-12
    assert eigenvalues[0].abs() < 1e-12 < 1e-3 < eigenvalues[1]
    assert directions[:, 0].abs().std() < 1e-8


def test_claim_15_1_choices_that_were_drawn_come_nearer_with_their_number():
    rewards, generator = random_rewards(5, 0), torch.Generator().manual_seed(0)
    errors = []
    for count in (500, 50_000):
        first, second = torch.randint(5, (2, count), generator=generator)
        first_wins = torch.rand(count, generator=generator) < (rewards[first] - rewards[second]).sigmoid()
        wins = torch.zeros(5, 5, dtype=float64)
        chosen, rejected = torch.where(first_wins, first, second), torch.where(first_wins, second, first)
        wins.index_put_((chosen, rejected), torch.ones(count, dtype=float64), accumulate=True)
        errors.append((bradley_terry_scores(wins) - (rewards - rewards.mean())).abs().max().item())
    assert errors[1] < 0.1 and errors[1] < errors[0] / 3


# ------------------------------------------------------------------------------------------------------------------ 15.2

REF = torch.tensor([0.6, 0.3, 0.0999, 0.0001], dtype=float64)
TRUE = torch.tensor([0.0, 0.5, 1.0, 0.0], dtype=float64)
LEARNED = torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=float64)


def test_claim_15_2_true_reward_rises_then_falls_to_zero():
    betas = torch.logspace(3, -2, 4001, dtype=float64)
    kl, true, learned = optimisation_path(REF, TRUE, LEARNED, betas)
    assert (REF @ TRUE).item() == pytest.approx(0.25, abs=1e-3) and true[0].item() == pytest.approx(0.25, abs=2e-3)
    assert true[(kl - 1.98).abs().argmin()].item() == pytest.approx(0.926, abs=1e-3)
    assert true.max().item() == pytest.approx(0.927, abs=1e-3) and kl[true.argmax()].item() == pytest.approx(
        2.06, abs=0.02
    )
    assert true[-1] < 1e-10 and learned[-1].item() == pytest.approx(1.5)
    assert kl[-1].item() == pytest.approx(-REF[3].log().item())
    peak = true.argmax()
    assert (true[: peak + 1].diff() > -1e-12).all() and (true[peak:].diff() < 1e-12).all()
    assert (learned.diff() > -1e-12).all() and (kl.diff() > -1e-12).all()


def test_claim_15_2_the_learned_reward_always_rises_along_the_path():
    betas = torch.logspace(2, -2, 300, dtype=float64)
    for seed in range(5):
        ref = random_rewards(6, seed).softmax(-1)
        kl, _, learned = optimisation_path(ref, random_rewards(6, seed + 10), random_rewards(6, seed + 20), betas)
        assert (learned.diff() > -1e-12).all() and (kl.diff() > -1e-12).all()


def test_claim_15_2_not_every_error_does_this():
    errors = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(1), dtype=float64)
    betas = torch.logspace(2, -3, 60, dtype=float64)
    share = {}
    for size in (0.0, 0.75, 1.5):
        _, true, _ = optimisation_path(REF, TRUE, TRUE + size * errors, betas)
        share[size] = (true[:, -1] < true.amax(1) - 0.01).double().mean().item()
    assert share[0.0] == 0 and 0.28 < share[0.75] < 0.32 and share[0.75] < share[1.5] < 0.5


@pytest.mark.parametrize("beta", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_claim_15_2_the_tilted_policy_is_the_regularised_optimum(seed, beta):
    """E[R] - β KL(π ‖ π_ref) = β log Z - β KL(π ‖ π_β), for every policy."""
    ref, rewards = random_rewards(8, seed).log_softmax(-1), random_rewards(8, seed + 5)
    optimum = tilted_logprobs(ref, rewards, beta)
    log_z = (ref + rewards / beta).logsumexp(-1)
    for other in range(4):
        policy = random_rewards(8, 100 + other).log_softmax(-1)
        value = policy.exp() @ rewards - beta * kl_exact(policy, ref)
        assert abs(value - beta * (log_z - kl_exact(policy, optimum))) < 1e-10


# ------------------------------------------------------------------------------------------------------------------ 15.3


def expected_loss(policy, ref, rewards, beta, length, eos_id, weights=None):
    """The DPO loss over all ordered pairs of leaves, each with the probability that the first is chosen."""
    tree = enumerate_tree(policy, length, eos_id=eos_id)
    leaves = sequence_logprobs(tree.logprobs, tree.mask)
    one, two = torch.cartesian_prod(torch.arange(len(rewards)), torch.arange(len(rewards))).T
    won = (rewards[one] - rewards[two]).sigmoid()
    weights = 1 / len(one) if weights is None else weights[one] * weights[two]
    return (weights * won * dpo_loss(leaves[one], leaves[two], ref[one], ref[two], beta)).sum()


CASES = [(2, 3, None), (3, 2, None), (3, 2, 0), (2, 3, 0), (5, 1, None)]


@pytest.mark.parametrize(("vocab_size", "length", "eos_id"), CASES)
@pytest.mark.parametrize(("seed", "beta"), [(0, 0.5), (1, 2.0)])
def test_claim_15_3_the_gradient_vanishes_at_the_regularised_optimum(vocab_size, length, eos_id, seed, beta):
    policy = TabularPolicy(vocab_size, length, seed=seed)
    tree = enumerate_tree(policy, length, eos_id=eos_id)
    ref, rewards = leaf_logprobs(tree).detach(), random_rewards(len(tree.ids), seed)
    optimum = tilted_logprobs(ref, rewards, beta)
    for weights in (None, ref.exp()):
        arguments = (policy, ref, rewards, beta, length, eos_id, weights)
        policy.logits.data = TabularPolicy(vocab_size, length, seed=seed).logits.data
        assert flat_gradient(expected_loss(*arguments), policy.parameters()).abs().max() > 1e-3
        policy.logits.data = logits_for(policy, tree, optimum.exp())
        reached = enumerate_tree(policy, length, eos_id=eos_id)
        assert (leaf_logprobs(reached) - optimum).abs().max() < 1e-12
        assert flat_gradient(expected_loss(*arguments), policy.parameters()).abs().max() < 1e-12


@pytest.mark.parametrize(("vocab_size", "length", "eos_id"), CASES)
def test_claim_15_3_only_shifts_of_a_states_logits_are_flat(vocab_size, length, eos_id):
    policy, beta = TabularPolicy(vocab_size, length, seed=0), 0.5
    tree = enumerate_tree(policy, length, eos_id=eos_id)
    ref, rewards = leaf_logprobs(tree).detach(), random_rewards(len(tree.ids), 0)
    policy.logits.data = logits_for(policy, tree, tilted_logprobs(ref, rewards, beta).exp())
    slope = torch.autograd.grad(
        expected_loss(policy, ref, rewards, beta, length, eos_id), policy.logits, create_graph=True
    )[0]
    hessian = row_gradients(slope.flatten(), policy.parameters())
    states = hessian.abs().view(len(policy.logits), vocab_size, -1).sum((1, 2)) > 1e-12  # visited ones
    assert states.sum() == len(tree.log_policy)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    flat = len(policy.logits) + int((~states).sum()) * (vocab_size - 1)  # a shift per state; all of an unvisited one
    assert eigenvalues[:flat].abs().max() < 1e-12 and eigenvalues[flat:].min() > 1e-5
    shifts = torch.eye(len(policy.logits), dtype=float64).repeat_interleave(vocab_size, 1)
    assert (hessian @ shifts.T).abs().max() < 1e-12


def test_claim_15_3_gradient_steps_arrive_there():
    policy, beta = TabularPolicy(3, 2, seed=3), 1.0
    tree = enumerate_tree(policy, 2)
    ref, rewards = leaf_logprobs(tree).detach(), random_rewards(9, 3)
    target = TabularPolicy(3, 2, seed=0)
    target.logits.data = logits_for(policy, tree, tilted_logprobs(ref, rewards, beta).exp())
    optimizer = torch.optim.LBFGS(policy.parameters(), max_iter=300, tolerance_grad=1e-12, tolerance_change=0)

    def closure():
        optimizer.zero_grad()
        loss = expected_loss(policy, ref, rewards, beta, 2, None)
        loss.backward()
        return loss

    start = sequence_kl(tree, enumerate_tree(target, 2)).item()
    optimizer.step(closure)
    assert start > 0.1 and sequence_kl(enumerate_tree(policy, 2), enumerate_tree(target, 2)) < 1e-8
