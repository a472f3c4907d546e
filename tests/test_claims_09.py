import math

import torch

from lmrl.tree import TabularPolicy, enumerate_tree, flat_gradient, leaf_logprobs, sequence_kl, visit_probabilities
from lmrl.trust_region import kl_exact, kl_k1, kl_k2, kl_k3

float64 = torch.float64


def trees():
    """A policy and a reference over three tokens and at most three steps, with the policy's parameters."""
    policy, reference = TabularPolicy(3, 3, seed=0), TabularPolicy(3, 3, seed=1)
    return enumerate_tree(policy, 3, eos_id=0), enumerate_tree(reference, 3, eos_id=0), list(policy.parameters())


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
