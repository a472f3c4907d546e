import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmrl import ppo

float64 = torch.float64
row = st.integers(1, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.01, 5), min_size=n, max_size=n), st.lists(st.floats(-3, 3), min_size=n, max_size=n)
    )
)
epsilons = st.floats(0.01, 0.99)


def check_pitfall_23_four_regions():
    """(ratio, advantage) → loss, clipped, with epsilon 0.2."""
    ratio = torch.tensor([[1.5, 1.5], [0.5, 0.5]], dtype=float64, requires_grad=True)
    advantages = torch.tensor([[1.0, -1.0], [1.0, -1.0]], dtype=float64)
    objective = ppo.clipped_surrogate(ratio, advantages, 0.2)
    (slope,) = torch.autograd.grad(objective.sum(), ratio)
    assert torch.allclose(-objective, torch.tensor([[-1.2, 1.5], [-0.5, 0.8]], dtype=float64), rtol=0, atol=1e-10)
    assert slope.tolist() == [[0, -1], [1, 0]]


def check_pitfall_23_clip_fraction():
    ratio = torch.tensor([[1.5, 1.5], [0.5, 0.5]])
    advantages = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    held = ppo.clipped(ratio, advantages, 0.2)
    assert held.dtype == torch.bool and held.tolist() == [[True, False], [False, True]]
    assert held.float().mean() == 0.5


def check_pitfall_24_one_ratio_per_token():
    logprobs = torch.tensor([[1.1, 0.9, 1.5]], dtype=float64).log()
    ratio = ppo.importance_ratio(logprobs, torch.zeros_like(logprobs))
    mean = ppo.clipped_surrogate(ratio, torch.ones_like(ratio), 0.2).mean()
    assert ratio.shape == logprobs.shape and mean.item() == pytest.approx(3.2 / 3, abs=1e-10)


def check_pitfall_24_second_update_has_other_ratios():
    logits = torch.tensor([0.2, -0.1, 0.4], dtype=float64, requires_grad=True)
    old_logprobs = logits.log_softmax(-1).detach().clone()
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=float64)
    for step in range(2):
        ratio = ppo.importance_ratio(logits.log_softmax(-1), old_logprobs)
        assert (ratio == 1).all() if step == 0 else (ratio != 1).all()
        (gradient,) = torch.autograd.grad(ppo.clipped_surrogate(ratio, advantages, 0.2).sum(), logits)
        assert gradient.abs().max() > 0.1
        logits.data += 0.1 * gradient
    assert torch.equal(old_logprobs, torch.tensor([0.2, -0.1, 0.4], dtype=float64).log_softmax(-1))


def check_the_edges():
    """Active up to and at the edge, exactly flat one number beyond it, in the values' own precision."""
    for dtype in (torch.float32, float64):
        for numbers in [(1.28, 1, 9, 0.37), (1.28, 1, 9, 1e-3), (0.8, 1, 0, -0.37), (0.8, 1, 0, -7.1)]:
            edge, inside, outside, advantage = torch.tensor(numbers, dtype=dtype)
            ratio = torch.stack([torch.nextafter(edge, inside), edge, torch.nextafter(edge, outside)]).requires_grad_()
            advantages = advantage.expand_as(ratio)
            (slope,) = torch.autograd.grad(ppo.clipped_surrogate(ratio, advantages, 0.2, 0.28).sum(), ratio)
            assert slope.tolist() == [advantage, advantage, 0]
            assert ppo.clipped(ratio, advantages, 0.2, 0.28).tolist() == [False, False, True]


def check_pitfall_26_value_loss():
    """Clip .2, old 0, return 1; the factor ½ is included."""
    values = torch.tensor([[1.0, 0.1, -1.0]], dtype=float64, requires_grad=True)
    losses = ppo.value_loss(values, torch.zeros_like(values), torch.ones_like(values), 0.2)
    (slope,) = torch.autograd.grad(losses.sum(), values)
    assert losses.shape == values.shape and losses.tolist()[0] == pytest.approx([0.32, 0.405, 2.0], abs=1e-10)
    assert slope.tolist()[0] == pytest.approx([0, -0.9, -2.0], abs=1e-10)


def check_pitfall_26_value_metric():
    values = torch.tensor([[1.0, 0.1, -1.0]], dtype=float64)
    flags = ppo.value_clipped(values, torch.zeros_like(values), 0.2)
    assert flags.dtype == torch.bool and flags.tolist() == [[True, False, True]]


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_exact_values(check):
    check()


def bounded(ratio, epsilon, epsilon_high=None):
    return ratio.clamp(1 - epsilon, 1 + (epsilon_high or epsilon))


def inverted(ratio, advantages, epsilon=0.2, epsilon_high=None):
    return torch.maximum(ratio * advantages, bounded(ratio, epsilon, epsilon_high) * advantages)


def clip_without_min(ratio, advantages, epsilon=0.2, epsilon_high=None):
    return bounded(ratio, epsilon, epsilon_high) * advantages


def tie_splitting(ratio, advantages, epsilon=0.2, epsilon_high=None):
    return torch.minimum(ratio * advantages, bounded(ratio, epsilon, epsilon_high) * advantages)


def by_ratio_alone(ratio, advantages, epsilon=0.2, epsilon_high=None):
    return (ratio - 1).abs() > epsilon


def one_sided(ratio, advantages, epsilon=0.2, epsilon_high=None):
    return (ratio > 1 + epsilon) & (advantages < 0)


def per_sequence(logprobs, old_logprobs):
    return (logprobs - old_logprobs).sum(-1, keepdim=True).exp().expand_as(logprobs)


def always_one(logprobs, old_logprobs):
    return (logprobs - logprobs.detach()).exp()


value_loss = ppo.value_loss  # the name that a test below replaces in ppo


def near(values, old_values, clip):
    return old_values + (values - old_values).clamp(-clip, clip)


def error_clipped(values, old_values, returns, clip):
    return (values - returns).clamp(-clip, clip).square() / 2


def better_of_two(values, old_values, returns, clip):
    return torch.minimum((values - returns) ** 2, (near(values, old_values, clip) - returns) ** 2) / 2


def clipped_only(values, old_values, returns, clip):
    return (near(values, old_values, clip) - returns) ** 2 / 2


@pytest.mark.parametrize(
    "name, faulty, check",
    [
        ("value_loss", error_clipped, check_pitfall_26_value_loss),
        ("value_loss", better_of_two, check_pitfall_26_value_loss),
        ("value_loss", clipped_only, check_pitfall_26_value_loss),
        ("value_loss", lambda v, old, g, c: (v - g) ** 2 / 2, check_pitfall_26_value_loss),
        ("value_loss", lambda *arguments: 2 * value_loss(*arguments), check_pitfall_26_value_loss),
        ("value_clipped", lambda v, old, c: (near(v, old, c) - old).abs() > c, check_pitfall_26_value_metric),
        ("value_clipped", lambda v, old, c: v - old > c, check_pitfall_26_value_metric),
        ("clipped_surrogate", inverted, check_pitfall_23_four_regions),
        ("clipped_surrogate", clip_without_min, check_pitfall_23_four_regions),
        ("clipped_surrogate", lambda ratio, advantages, *_: ratio * advantages, check_pitfall_23_four_regions),
        ("clipped_surrogate", tie_splitting, check_the_edges),
        ("clipped", by_ratio_alone, check_pitfall_23_clip_fraction),
        ("clipped", one_sided, check_pitfall_23_clip_fraction),
        ("importance_ratio", lambda logprobs, old, *_: (old - logprobs).exp(), check_pitfall_24_one_ratio_per_token),
        ("importance_ratio", per_sequence, check_pitfall_24_one_ratio_per_token),
        ("importance_ratio", always_one, check_pitfall_24_second_update_has_other_ratios),
        ("importance_ratio", lambda p, old: (p - old).detach().exp() + 0 * p, check_pitfall_24_second_update_has_other_ratios),
    ],
    ids=["error clipped, not prediction", "min for max in the value", "value clip alone", "no value clip",
         "value without 1/2", "metric of the clipped value", "metric on one side", "max for min", "clip without min", "no clip", "gradient split at a tie", "sign of A ignored",
         "comparison reversed", "ratio inverted", "one ratio per sequence", "ratio always 1", "ratio detached"],
)  # fmt: skip
def test_a_faulty_version_turns_a_check_red(monkeypatch, name, faulty, check):
    monkeypatch.setattr(ppo, name, faulty)
    with pytest.raises(AssertionError):
        check()


@given(row, epsilons, epsilons)
def test_the_values_are_the_textbook_minimum(pair, epsilon, epsilon_high):
    ratio, advantages = torch.tensor(pair, dtype=float64)
    expected = [
        min(r * a, min(max(r, 1 - epsilon), 1 + epsilon_high) * a)
        for r, a in zip(ratio.tolist(), advantages.tolist(), strict=True)
    ]
    objective = ppo.clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
    assert objective.tolist() == pytest.approx(expected, abs=1e-10)
    assert (objective <= ratio * advantages + 1e-12).all()


@given(row, epsilons, epsilons)
def test_the_gradient_is_the_advantage_or_exactly_zero_where_clipped(pair, epsilon, epsilon_high):
    ratio, advantages = torch.tensor(pair, dtype=float64)
    ratio.requires_grad_()
    (slope,) = torch.autograd.grad(ppo.clipped_surrogate(ratio, advantages, epsilon, epsilon_high).sum(), ratio)
    held = ppo.clipped(ratio, advantages, epsilon, epsilon_high)
    assert torch.equal(slope, torch.where(held, 0.0, advantages))
    assert torch.equal((slope == 0) & (advantages != 0), held)


def test_clip_higher_moves_the_upper_edge_only():
    ratio = torch.tensor([1.25, 1.25, 0.75])
    advantages = torch.tensor([1.0, -1.0, -1.0])
    assert ppo.clipped(ratio, advantages, 0.2).tolist() == [True, False, True]
    assert ppo.clipped(ratio, advantages, 0.2, 0.28).tolist() == [False, False, True]
    assert ppo.clip_bounds(0.2) == (0.8, 1.2) and ppo.clip_bounds(0.2, 0.28) == (0.8, 1.28)


def test_a_token_without_advantage_is_not_clipped():
    ratio = torch.tensor([0.1, 5.0], requires_grad=True)
    objective = ppo.clipped_surrogate(ratio, torch.zeros(2))
    assert not ppo.clipped(ratio, torch.zeros(2)).any() and objective.tolist() == [0, 0]


@pytest.mark.parametrize("epsilon", [0, 0.0, -0.2, 1, 1.5, math.nan])
@pytest.mark.parametrize("function", [ppo.clipped, ppo.clipped_surrogate])
def test_a_senseless_epsilon_is_named_with_its_remedy(function, epsilon):
    with pytest.raises(ValueError, match=f"epsilon is {epsilon}; choose it above 0 and below 1"):
        function(torch.ones(2), torch.ones(2), epsilon)


@pytest.mark.parametrize("epsilon_high", [0, -0.1, math.nan])
def test_a_senseless_epsilon_high_is_named_with_its_remedy(epsilon_high):
    with pytest.raises(ValueError, match=f"epsilon_high is {epsilon_high}; choose it above 0"):
        ppo.clipped_surrogate(torch.ones(2), torch.ones(2), 0.2, epsilon_high)


def test_one_advantage_per_row_must_be_expanded_by_the_caller():
    with pytest.raises(ValueError, match=r"\[3, 3\] and \[3\]"):
        ppo.clipped_surrogate(torch.ones(3, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"\[3, 3\] and \[3\]"):
        ppo.importance_ratio(torch.ones(3, 3), torch.ones(3))


@pytest.mark.parametrize(
    "dtype, returned", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (float64, float64)]
)
def test_ratios_are_at_least_float32(dtype, returned):
    logprobs = torch.tensor([[-1.0, -3.0]], dtype=dtype)
    ratio = ppo.importance_ratio(logprobs, logprobs)
    assert ratio.dtype == returned and (ratio == 1).all()
    assert ppo.clipped_surrogate(ratio, torch.ones_like(ratio)).dtype == returned


def test_an_unmasked_nan_is_not_swallowed():
    ratio = torch.tensor([math.nan, 1.0])
    assert ppo.clipped_surrogate(ratio, torch.ones(2)).isnan().tolist() == [True, False]


def test_a_ratio_that_does_not_count_is_1_and_is_never_looked_at():
    logprobs = torch.tensor([[math.log(1.5), math.nan, 2000.0]], requires_grad=True)
    counts = torch.tensor([[True, False, False]])
    ratio = ppo.importance_ratio(logprobs, torch.zeros(1, 3), counts)
    assert ratio.tolist() == [[pytest.approx(1.5), 1, 1]]
    (slope,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert slope.tolist() == [[pytest.approx(1.5), 0, 0]]


def test_gradcheck_of_the_ratio():
    logprobs = -torch.rand(2, 3, dtype=float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(ppo.importance_ratio, (logprobs.requires_grad_(), logprobs.detach() - 0.3))


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=8), st.floats(0.01, 2))
def test_the_value_loss_is_the_textbook_maximum_and_its_gradient_is_the_error_or_exactly_zero(rows, clip):
    values, old, returns = torch.tensor(rows, dtype=float64).T
    values.requires_grad_()
    losses = ppo.value_loss(values, old, returns, clip)
    (slope,) = torch.autograd.grad(losses.sum(), values)
    flags = ppo.value_clipped(values, old, clip).tolist()
    for (v, o, g), loss, gradient, flag in zip(rows, losses.tolist(), slope.tolist(), flags, strict=True):
        bounded = min(max(v, o - clip), o + clip)
        assert loss == pytest.approx(max((v - g) ** 2, (bounded - g) ** 2) / 2, abs=1e-10)
        assert flag == (v < o - clip or v > o + clip)
        if (bounded - g) ** 2 > (v - g) ** 2:
            assert gradient == 0 and flag
        elif (bounded - g) ** 2 < (v - g) ** 2 or not flag:
            assert gradient == pytest.approx(v - g, abs=1e-12)


def test_without_a_value_clip_it_is_the_squared_error():
    values, old, returns = torch.randn(3, 2, 5, dtype=float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ppo.value_loss(values, old, returns, None), (values - returns).square() / 2)
    assert not ppo.value_clipped(values, old, None).any()


def test_the_value_loss_has_no_gradient_in_the_old_values_and_the_returns():
    values, old, returns = (torch.tensor([[x]], requires_grad=True) for x in (0.9, 0.0, 1.0))
    ppo.value_loss(values, old, returns, 0.2).sum().backward()
    assert old.grad is None and returns.grad is None and values.grad is not None


@pytest.mark.parametrize("clip", [0, -0.2, math.nan])
@pytest.mark.parametrize("function", [lambda *a: ppo.value_loss(a[0], *a), ppo.value_clipped])
def test_a_senseless_value_clip_is_named_with_its_remedy(function, clip):
    with pytest.raises(ValueError, match=f"cliprange_value is {clip}; choose it above 0, or None"):
        function(torch.zeros(1, 1), torch.zeros(1, 1), clip)


def test_values_and_returns_that_would_broadcast_are_refused():
    square, row_of_3 = torch.zeros(3, 3), torch.zeros(3)
    with pytest.raises(ValueError, match=r"returns and values have the shapes \[3\] and \[3, 3\]"):
        ppo.value_loss(square, square, row_of_3)
    with pytest.raises(ValueError, match=r"values and old_values have the shapes \[3, 3\] and \[3\]"):
        ppo.value_loss(square, row_of_3, square)
    with pytest.raises(ValueError, match=r"\[3, 3\] and \[3\]"):
        ppo.value_clipped(square, row_of_3)


@pytest.mark.parametrize("dtype, returned", [(torch.bfloat16, torch.float32), (float64, float64)])
def test_the_value_loss_is_at_least_float32_and_keeps_an_unmasked_nan(dtype, returned):
    values = torch.tensor([[0.3, math.nan]], dtype=dtype)
    losses = ppo.value_loss(values, torch.zeros_like(values), torch.ones_like(values))
    assert losses.dtype == returned and losses.isnan().tolist() == [[False, True]]
