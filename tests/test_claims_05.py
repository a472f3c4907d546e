"""The claims of section 5, as the notebook proves them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.baselines import group_advantages
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, expectation, leaf_probabilities, score_matrix
from lmrl.variance import group_moments, leaf_moments, memoryless_moments, weighted_scores

PROBABILITIES = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
FIRST = torch.tensor([[1, 2, 2], [1, 1, 1], [2, 2, 2]]), torch.tensor([0.0, 1.0, 0.0])


def problem(vocab_size, max_length, eos_id, seed):
    """A tree with the score of each leaf and the parameters, and a generator to draw rewards from."""
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, eos_id)
    generator = torch.Generator().manual_seed(seed)
    return tree, score_matrix(tree, policy.parameters()), list(policy.parameters()), generator


def slope(x, y):
    """Least-squares slope of log y against log x."""
    x, y = torch.tensor(x).double().log(), torch.tensor(y).double().log()
    return ((x - x.mean()) @ y / (x - x.mean()).square().sum()).item()


shapes = st.tuples(st.integers(2, 3), st.integers(1, 3), st.sampled_from([None, 0]), st.integers(0, 999))


@settings(max_examples=15, deadline=None)
@given(shapes, st.floats(0.1, 0.9))
def test_claim_5_1_a_fraction_of_one_minus_the_pass_rate_contributes_the_zero_vector(shape, share):
    tree, scores, _, generator = problem(*shape)
    rewards = (torch.rand(len(tree.ids), generator=generator) < share).double()
    estimates = rewards[:, None] * scores
    silent = leaf_probabilities(tree)[(estimates == 0).all(1)].sum()
    assert silent.item() == pytest.approx(1 - expectation(tree, rewards).item(), abs=1e-10)


@pytest.mark.parametrize("shape", [(2, 2, None, 0), (3, 2, 0, 1), (2, 3, 0, 2)])
def test_claim_5_2_at_pass_rate_0_every_term_is_zero(shape):
    tree, scores, parameters, _ = problem(*shape)
    rewards = torch.zeros(len(tree.ids), dtype=torch.float64)
    moments = leaf_moments(tree, rewards[:, None] * scores, exact_gradient(tree, rewards, parameters))
    assert moments.variance == 0 and (moments.mean == 0).all() and moments.snr == 0


@pytest.mark.parametrize("shape", [(2, 2, None, 0), (3, 2, 0, 1), (2, 3, 0, 2)])
def test_claim_5_2_at_pass_rate_1_only_the_mean_is_zero_until_a_mean_is_subtracted(shape):
    tree, scores, parameters, generator = problem(*shape)
    rewards = torch.ones(len(tree.ids), dtype=torch.float64)
    gradient = exact_gradient(tree, rewards, parameters)
    plain = leaf_moments(tree, rewards[:, None] * scores, gradient)
    assert plain.mean.abs().max() < 1e-10 < 0.1 < plain.variance
    some = (torch.rand(len(rewards), generator=generator) < 0.5).double()
    fewer = leaf_moments(tree, some[:, None] * scores, exact_gradient(tree, some, parameters))
    assert fewer.variance < plain.variance  # the noise is largest where nothing is to be learned
    assert (leaf_moments(tree, (rewards - 1)[:, None] * scores, gradient).variance) == 0
    for samples in (2, 3):
        centred = weighted_scores(scores, rewards, lambda r, g: group_advantages(r, g, scale="none"))
        moments = group_moments(tree, centred, gradient, samples)
        assert moments.variance == 0 and (moments.mean == 0).all()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=4), st.integers(1, 300))
def test_claim_5_3_the_inverse_square_of_the_ratio_is_affine_in_length(weights, length):
    p = torch.tensor(weights, dtype=torch.float64)
    p, vocab = p / p.sum(), len(p)
    machine = torch.tensor([[1] + [2] * (vocab - 1), [1] * vocab, [2] * vocab])
    right = torch.eye(vocab, dtype=torch.float64)[0] - p
    per_token = (1 - p.square().sum()) / (p[0] * right.square().sum())
    affine = (1 / p[0] - 1) + per_token * (length - 1)
    snr = memoryless_moments(p, machine, FIRST[1], length).snr
    assert snr**-2 == pytest.approx(affine.item(), rel=1e-10)


def test_claim_5_3_the_same_by_enumeration():
    values = []
    for length in range(1, 6):
        logits = PROBABILITIES.log().requires_grad_()
        tree = enumerate_tree(lambda prefixes: logits.expand(len(prefixes), -1), length)
        rewards = (tree.ids[:, 0] == 0).double()
        gradient = exact_gradient(tree, rewards, [logits])
        values.append(leaf_moments(tree, rewards[:, None] * score_matrix(tree, [logits]), gradient).snr ** -2)
    steps = torch.tensor(values).diff()
    assert torch.allclose(steps, torch.full_like(steps, 0.62 / 0.19), atol=1e-10, rtol=0)


def test_claim_5_3_the_slope_from_64_to_4096_tokens_is_minus_one_half():
    lengths = [2**k for k in range(6, 13)]
    ratios = [memoryless_moments(PROBABILITIES, *FIRST, T).snr for T in lengths]
    assert abs(slope(lengths, ratios) + 0.5) < 0.02


def share_of_right_tokens(length):
    counter = torch.arange(length + 1)[:, None] + torch.tensor([1, 0, 0])
    return counter.clamp(max=length), torch.arange(length + 1).double() / length


def test_claim_5_3_other_laws_a_mean_over_tokens():
    lengths, plain, centred = [64, 128, 256], [], []
    for length in lengths:
        machine, share = share_of_right_tokens(length)
        plain.append(memoryless_moments(PROBABILITIES, machine, share, length).snr)
        centred.append(memoryless_moments(PROBABILITIES, machine, share - 0.5, length).snr)
    assert abs(slope(lengths, plain) + 0.5) < 0.02
    assert abs(slope(lengths, centred)) < 0.01  # the signal grows with the noise


@pytest.mark.parametrize("length", [1, 2, 8, 30])
def test_claim_5_3_other_laws_all_tokens_must_be_right(length):
    machine, final = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.tensor([1.0, 0.0])
    assert memoryless_moments(PROBABILITIES, machine, final, length).snr ** -2 == pytest.approx(2**length - 1, rel=1e-9)
    first = 0.4 ** (1 / length)
    better = torch.tensor([first, 0.6 * (1 - first), 0.4 * (1 - first)], dtype=torch.float64)
    assert memoryless_moments(better, machine, final, length).snr == pytest.approx((0.4 / 0.6) ** 0.5, rel=1e-9)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_claim_5_3_other_laws_logits_of_its_own_for_every_position(length):
    own = torch.zeros(length, 2, dtype=torch.float64, requires_grad=True)
    tree = enumerate_tree(lambda prefixes: own[prefixes.shape[1]].expand(len(prefixes), -1), length)
    share = (tree.ids == 0).double().mean(1)
    for baseline, expected in ((0.0, length**2 + length - 1), (0.5, length - 1)):
        terms = (share - baseline)[:, None] * score_matrix(tree, [own])
        moments = leaf_moments(tree, terms, exact_gradient(tree, share, [own]))
        assert moments.snr**-2 == pytest.approx(expected, abs=1e-9)


@settings(max_examples=10, deadline=None)
@given(st.tuples(st.integers(2, 3), st.integers(1, 2), st.sampled_from([None, 0]), st.integers(0, 999)))
def test_claim_5_4_error_falls_like_one_over_root_n(shape):
    tree, scores, parameters, generator = problem(*shape)
    rewards = torch.rand(len(tree.ids), generator=generator, dtype=torch.float64)
    gradient = exact_gradient(tree, rewards, parameters)
    one = leaf_moments(tree, rewards[:, None] * scores, gradient)
    estimator = weighted_scores(scores, rewards, lambda r, g: r)
    for samples in (1, 2, 3):
        assert group_moments(tree, estimator, gradient, samples).mse == pytest.approx(one.mse / samples, abs=1e-10)
    assert math.sqrt(one.averaged(4).mse) == pytest.approx(math.sqrt(one.mse) / 2, abs=1e-10)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_claim_5_4_a_measured_curve_lies_on_the_exact_one(seed):
    tree, scores, parameters, generator = problem(3, 3, 0, seed)
    rewards = (torch.rand(len(tree.ids), generator=generator) < 0.4).double()
    gradient = exact_gradient(tree, rewards, parameters)
    terms = rewards[:, None] * scores
    one = leaf_moments(tree, terms, gradient)
    assert one.variance > 0.05
    sizes, errors = [1, 4, 16, 64], []
    for size in sizes:
        drawn = torch.multinomial(leaf_probabilities(tree), 500 * size, True, generator=generator).view(500, size)
        squared = (terms[drawn].mean(1) - gradient).square().sum(1)
        assert abs(squared.mean() - one.averaged(size).mse) < 4 * squared.std() / 500**0.5
        errors.append(squared.mean().sqrt().item())
    assert abs(slope(sizes, errors) + 0.5) < 0.05
