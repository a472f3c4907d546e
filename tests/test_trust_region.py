import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmrl import trust_region
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, leaf_probabilities, score_matrix, sequence_kl

float64 = torch.float64
numbers = st.floats(-8, 8)
logit_pairs = st.integers(2, 6).flatmap(lambda v: st.tuples(*[st.lists(numbers, min_size=v, max_size=v)] * 2))


def check_pitfall_18_values_and_derivatives():
    """Policy .5, reference .25."""
    for name, value, slope in [("kl_k1", 0.6931, 1.0), ("kl_k2", 0.2402, 0.6931), ("kl_k3", 0.1931, 0.5)]:
        logprob = torch.tensor([[0.5]], dtype=float64).log().requires_grad_()
        estimate = getattr(trust_region, name)(logprob, torch.tensor([[0.25]], dtype=float64).log())
        (derivative,) = torch.autograd.grad(estimate.sum(), logprob)
        assert estimate.item() == pytest.approx(value, abs=5e-5)
        assert derivative.item() == pytest.approx(slope, abs=5e-5)


def check_pitfall_18_swapped_values_are_other_values():
    policy, ref = torch.tensor([[0.25]], dtype=float64).log(), torch.tensor([[0.5]], dtype=float64).log()
    assert trust_region.kl_k1(policy, ref).item() == pytest.approx(-0.6931, abs=5e-5)
    assert trust_region.kl_k3(policy, ref).item() == pytest.approx(0.3069, abs=5e-5)


def check_kl_is_the_mean_under_the_first_policy():
    """p = (1/2, 1/2), q = (1/4, 3/4): ½ log 2 + ½ log ⅔ one way, ¼ log ½ + ¾ log 3/2 the other."""
    p, q = torch.tensor([0.5, 0.5], dtype=float64).log(), torch.tensor([0.25, 0.75], dtype=float64).log()
    assert trust_region.kl_exact(p, q).item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-12)
    assert trust_region.kl_exact(q, p).item() == pytest.approx(0.75 * math.log(3) - math.log(2), abs=1e-12)


def check_entropy_of_known_policies():
    logits = torch.tensor([[0, 0, 0, 0], [math.log(3), 0, -math.inf, -math.inf]], dtype=float64)
    expected = torch.tensor([math.log(4), math.log(4) - 0.75 * math.log(3)], dtype=float64)
    assert torch.allclose(trust_region.entropy(logits), expected, rtol=0, atol=1e-12)


def check_gradients_are_finite_at_an_impossible_token():
    logits = torch.tensor([0.3, -math.inf, 1.0], requires_grad=True)
    ref_logits = torch.tensor([0.0, -math.inf, -1.0], requires_grad=True)
    value = trust_region.entropy(logits) + trust_region.kl_exact(logits, ref_logits)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(value, [logits, ref_logits]))


def check_fisher_of_a_softmax():
    """(.5, .3, .2): diag(π) − ππᵀ in the logits."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=float64)
    fisher = trust_region.fisher_matrix(probs, torch.eye(3, dtype=float64) - probs)
    expected = [[0.25, -0.15, -0.10], [-0.15, 0.21, -0.06], [-0.10, -0.06, 0.16]]
    assert torch.allclose(fisher, torch.tensor(expected, dtype=float64), rtol=0, atol=1e-12)


def check_natural_step_with_known_numbers():
    """Gradient (3, 4), Fisher matrix diag(1, 4): F⁻¹g = (3, 1), gᵀF⁻¹g = 13, so the step for δ = 6.5 is (3, 1)."""
    gradient, fisher = torch.tensor([3.0, 4.0], dtype=float64), torch.diag(torch.tensor([1.0, 4.0], dtype=float64))
    assert trust_region.natural_step(gradient, fisher, 6.5).tolist() == pytest.approx([3, 1], abs=1e-12)
    assert trust_region.natural_step(gradient, fisher, 0.065).tolist() == pytest.approx([0.3, 0.1], abs=1e-12)


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_exact_values(check):
    check()


def naive_entropy(logits):
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize(
    "name, faulty, check",
    [
        ("kl_k1", lambda p, q: q - p, check_pitfall_18_values_and_derivatives),
        ("kl_k3", lambda p, q: torch.expm1(p - q) + q - p, check_pitfall_18_values_and_derivatives),
        ("kl_k3", lambda p, q: torch.expm1(p - q) + q - p, check_pitfall_18_swapped_values_are_other_values),
        ("kl_k2", lambda p, q: (p - q).square(), check_pitfall_18_values_and_derivatives),
        ("kl_k3", lambda p, q: torch.expm1(q - p.detach()) + p - q, check_pitfall_18_values_and_derivatives),
        ("kl_exact", lambda p, q: (q.softmax(-1) * (q - p)).sum(-1), check_kl_is_the_mean_under_the_first_policy),
        ("entropy", naive_entropy, check_entropy_of_known_policies),
        ("entropy", lambda z: torch.special.entr(z.softmax(-1)).sum(-1), check_gradients_are_finite_at_an_impossible_token),
        ("entropy", lambda z: trust_region.kl_exact(z, torch.zeros_like(z)), check_entropy_of_known_policies),
        ("fisher_matrix", lambda p, s: s.T @ s / len(p), check_fisher_of_a_softmax),
        ("natural_step", lambda g, f, d: g * (2 * d / (g @ f @ g)).sqrt(), check_natural_step_with_known_numbers),
        ("natural_step", lambda g, f, d: d * torch.linalg.solve(f, g), check_natural_step_with_known_numbers),
    ],
    ids=["k1 swapped", "k3 swapped", "k3 swapped, swap seen", "k2 without 1/2", "k3 half detached", "kl swapped",
         "entropy with 0 · inf", "entropy with an infinite slope", "entropy as KL to uniform", "outcomes not weighted",
         "plain step of the same KL", "budget taken for a rate"],
)  # fmt: skip
def test_a_faulty_version_turns_a_check_red(monkeypatch, name, faulty, check):
    monkeypatch.setattr(trust_region, name, faulty)
    with pytest.raises(AssertionError):
        check()


def test_the_reference_is_in_the_gradient_of_k2_and_k3_but_not_of_k1():
    for name, changes in [("kl_k1", False), ("kl_k2", True), ("kl_k3", True)]:
        slopes = []
        for ref in (0.25, 0.4):
            logprob = torch.tensor([[0.5]], dtype=float64).log().requires_grad_()
            estimate = getattr(trust_region, name)(logprob, torch.tensor([[ref]], dtype=float64).log())
            slopes.append(torch.autograd.grad(estimate.sum(), logprob)[0].item())
        assert (slopes[0] != slopes[1]) == changes


@given(logit_pairs)
def test_entropy_and_kl_agree_with_a_sum_in_plain_python(pair):
    p, q = ([math.exp(z) / sum(map(math.exp, logits)) for z in logits] for logits in pair)
    p_logits, q_logits = torch.tensor(pair, dtype=float64)
    assert trust_region.entropy(p_logits).item() == pytest.approx(-sum(a * math.log(a) for a in p), abs=1e-10)
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert trust_region.kl_exact(p_logits, q_logits).item() == pytest.approx(kl, abs=1e-10)


@given(logit_pairs)
def test_k1_and_k3_are_unbiased_and_k2_and_k3_never_negative(pair):
    p, q = torch.tensor(pair, dtype=float64).log_softmax(-1)
    kl = trust_region.kl_exact(p, q).item()
    k1, k2, k3 = (getattr(trust_region, name)(p, q) for name in ("kl_k1", "kl_k2", "kl_k3"))
    assert (p.exp() * k1).sum().item() == pytest.approx(kl, abs=1e-10)
    assert (p.exp() * k3).sum().item() == pytest.approx(kl, abs=1e-10)
    assert k2.min() >= 0 and k3.min() >= -1e-12


def test_gradcheck():
    p, q = (
        torch.randn(3, 4, dtype=float64, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in (0, 1)
    )
    assert torch.autograd.gradcheck(trust_region.entropy, p)
    for function in (trust_region.kl_exact, trust_region.kl_k1, trust_region.kl_k2, trust_region.kl_k3):
        assert torch.autograd.gradcheck(function, (p, q))


def test_k3_keeps_its_digits_near_the_reference_in_float32():
    d = torch.tensor([[1e-3]])
    assert trust_region.kl_k3(d, torch.zeros_like(d)).item() == pytest.approx(5e-7, rel=1e-3)


def test_kl_of_equal_policies_is_exactly_zero():
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 10
    assert (trust_region.kl_exact(logits, logits) == 0).all()
    assert (trust_region.kl_k3(logits, logits) == 0).all()


def test_kl_at_impossible_tokens():
    two, three = torch.tensor([0.0, 0.0, -math.inf]), torch.tensor([0.0, 0.0, 0.0])
    assert trust_region.kl_exact(two, three).item() == pytest.approx(math.log(1.5))
    assert trust_region.kl_exact(three, two).item() == math.inf
    assert trust_region.kl_exact(torch.tensor([0.0, -200.0]), torch.tensor([0.0, -math.inf])).item() == 0


@pytest.mark.parametrize(
    "dtype, returned", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (float64, float64)]
)
def test_at_least_float32_comes_back(dtype, returned):
    x = torch.tensor([[-1.0, -3.0]], dtype=dtype)
    assert trust_region.entropy(x).dtype == returned
    for name in ("kl_exact", "log_ratio", "kl_k1", "kl_k2", "kl_k3"):
        assert getattr(trust_region, name)(x, x).dtype == returned


def test_widening_comes_before_the_subtraction():
    p, q = torch.tensor([[-8.0625]], dtype=torch.bfloat16), torch.tensor([[-0.0078125]], dtype=torch.bfloat16)
    assert trust_region.log_ratio(p, q).item() == -8.0625 + 0.0078125


@pytest.mark.parametrize("name", ["kl_exact", "kl_k1", "kl_k2", "kl_k3"])
def test_shapes_that_would_broadcast_are_refused(name):
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[3\]"):
        getattr(trust_region, name)(torch.zeros(2, 3), torch.zeros(3))


def test_a_sharper_policy_has_less_entropy_and_fewer_groups_with_two_different_answers():
    sharpness = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=float64)[:, None]
    logits = sharpness * torch.tensor([2.0, 1.0, 0.0], dtype=float64)
    contrast = 1 - (logits.softmax(-1) ** 8).sum(-1)
    assert (trust_region.entropy(logits).diff() < 0).all() and (contrast.diff() < 0).all()
    assert contrast[0] > 0.96 and contrast[-1] < 0.003


@pytest.mark.parametrize("seed", range(3))
def test_the_fisher_matrix_of_a_tree_is_the_hessian_of_the_kl(seed):
    policy = TabularPolicy(3, 2, seed=seed)
    tree = enumerate_tree(policy, 2, eos_id=0)
    start = policy.logits.detach().clone()

    def kl(logits):
        def moved(prefixes):
            row = prefixes[:, 0] + 1 if prefixes.shape[1] else torch.zeros(len(prefixes), dtype=torch.int64)
            return logits[row]

        return sequence_kl(tree, enumerate_tree(moved, 2, eos_id=0))

    hessian = torch.autograd.functional.hessian(kl, start).view(start.numel(), start.numel())
    fisher = trust_region.fisher_matrix(leaf_probabilities(tree), score_matrix(tree, policy.parameters()))
    assert (hessian - fisher).abs().max() < 1e-10


@given(st.integers(0, 1000), st.floats(1e-6, 10))
def test_no_step_of_the_same_budget_gains_more_to_first_order(seed, delta):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 6, dtype=float64, generator=generator)  # rank 4 of 6: F has no inverse
    fisher = trust_region.fisher_matrix(torch.full((4,), 0.25, dtype=float64), scores)
    gradient = scores.T @ torch.randn(4, dtype=float64, generator=generator)
    step = trust_region.natural_step(gradient, fisher, delta)
    assert (step @ fisher @ step / 2).item() == pytest.approx(delta, rel=1e-6)
    for other in torch.randn(20, 6, dtype=float64, generator=generator):
        other = other * (2 * delta / (other @ fisher @ other)).sqrt()
        assert gradient @ step >= gradient @ other - 1e-9


def test_the_natural_step_does_not_depend_on_the_parameters_that_were_chosen():
    policy = TabularPolicy(3, 2, seed=0)
    tree = enumerate_tree(policy, 2, eos_id=0)
    scores = score_matrix(tree, policy.parameters())
    gradient = exact_gradient(tree, (tree.ids == 1).sum(-1).double(), policy.parameters())
    kept = scores.abs().sum(0) > 0
    kept[::3] = False  # one logit of each state stays where it is, so that F has an inverse
    scores, gradient, p = scores[:, kept], gradient[kept], leaf_probabilities(tree)
    size = int(kept.sum())
    change = torch.randn(size, size, dtype=float64, generator=torch.Generator().manual_seed(1))  # θ = change @ ψ
    step = trust_region.natural_step(gradient, trust_region.fisher_matrix(p, scores), 0.01)
    other = trust_region.natural_step(change.T @ gradient, trust_region.fisher_matrix(p, scores @ change), 0.01)
    assert torch.allclose(change @ other, step, rtol=1e-6, atol=1e-9)


def test_a_natural_step_without_a_gradient_is_no_step():
    assert (trust_region.natural_step(torch.zeros(2, dtype=float64), torch.eye(2, dtype=float64), 0.1) == 0).all()
    nan = torch.tensor([math.nan, 1.0], dtype=float64)
    assert trust_region.natural_step(nan, torch.eye(2, dtype=float64), 0.1).isnan().any()


@pytest.mark.parametrize("delta", [0, -0.1, math.nan])
def test_a_senseless_budget_is_named_with_its_remedy(delta):
    with pytest.raises(ValueError, match=f"delta is {delta}; a KL budget is above 0"):
        trust_region.natural_step(torch.ones(2), torch.eye(2), delta)
