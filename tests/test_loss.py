import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.loss import LOSS_TYPES, policy_loss, token_weights
from lmrl.policy import length_mask
from lmrl.trust_region import kl_k1

CAP = 8


def batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = length_mask(torch.tensor(lengths), CAP)
    shape = mask.shape
    return {
        "logprobs": -torch.rand(shape, generator=generator, dtype=torch.float64),
        "old_logprobs": -torch.rand(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(shape, generator=generator, dtype=torch.float64),
        "ref_logprobs": -torch.rand(shape, generator=generator, dtype=torch.float64),
        "mask": mask,
    }


def loss_and_gradient(data, loss_type, rows=None, weights=None, **options):
    weights = token_weights(data["mask"], loss_type, CAP) if weights is None else weights
    rows = slice(None) if rows is None else rows
    leaf = data["logprobs"][rows].clone().requires_grad_()
    loss = policy_loss(
        leaf,
        data["old_logprobs"][rows],
        data["advantages"][rows],
        weights[rows],
        ref_logprobs=data["ref_logprobs"][rows],
        **options,
    )
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_of_two_answers():
    mask = length_mask(torch.tensor([1, 3]), 3)
    assert token_weights(mask, "grpo", 4).tolist() == [[0.5, 0, 0], [pytest.approx(1 / 6)] * 3]
    assert token_weights(mask, "dapo", 4).tolist() == [[0.25, 0, 0], [0.25] * 3]
    assert token_weights(mask, "dr_grpo", 4).tolist() == [[0.125, 0, 0], [0.125] * 3]


def test_bnpo_normalised_once_per_step_is_dapo():
    mask = length_mask(torch.tensor([1, 3, 0]), 3)
    assert torch.equal(token_weights(mask, "bnpo", 4), token_weights(mask, "dapo", 4))


def test_unknown_loss_type_names_the_choices():
    with pytest.raises(ValueError, match="'sum'; choose one of grpo, dapo, dr_grpo"):
        token_weights(torch.ones(1, 1, dtype=torch.bool), "sum", 4)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_without_tokens_leave_the_denominator(loss_type):
    mask = length_mask(torch.tensor([2, 0, 3, 0]), 3)
    assert torch.equal(token_weights(mask, loss_type, 4)[[0, 2]], token_weights(mask[[0, 2]], loss_type, 4))


def split_loss(terms, mask, weights, size):
    """What a trainer adds up: the loss of each piece of ``size`` rows, with its rows of the step's weights."""
    zeros = torch.zeros_like(terms)
    return sum(
        policy_loss(zeros[i : i + size], zeros[i : i + size], -terms[i : i + size], weights[i : i + size]).item()
        for i in range(0, len(terms), size)
    )


@pytest.mark.parametrize("loss_type, expected", [("dapo", 1.0), ("bnpo", 1.0), ("grpo", 2.0), ("dr_grpo", 4 / 6)])
@pytest.mark.parametrize("size", [1, 2])
def test_pitfall_4a_one_token_of_loss_4_and_three_of_loss_0(loss_type, expected, size):
    """The token mean is 1 (mean of means 2, double division 0.5); the sequence mean is 2 however it is split."""
    mask = length_mask(torch.tensor([1, 3]), 3)
    terms = torch.tensor([[4.0, 0, 0], [0, 0, 0]])
    assert split_loss(terms, mask, token_weights(mask, loss_type, 3), size) == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_pitfall_4b_each_optimiser_step_is_normalised_by_its_own_tokens(loss_type):
    """Four micro-batches of five tokens, loss 1 each, an optimiser step every two: each step sees 1, and not 0.5."""
    mask, terms = torch.ones(4, 5, dtype=torch.bool), torch.ones(4, 5)
    for step in (slice(0, 2), slice(2, 4)):
        weights = token_weights(mask[step], loss_type, 5)
        assert split_loss(terms[step], mask[step], weights, 1) == pytest.approx(1.0)


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_ratio_learns_which_tokens_count():
    data, seen = batch([2, 0, 8]), []

    def ratio(logprobs, old_logprobs, counts):
        seen.append(counts)
        return torch.ones_like(logprobs)

    loss = policy_loss(
        data["logprobs"],
        data["old_logprobs"],
        data["advantages"],
        token_weights(data["mask"], "dapo", CAP),
        ratio=ratio,
    )
    assert torch.equal(seen[0], data["mask"])
    assert loss.item() == pytest.approx(-data["advantages"][data["mask"]].mean().item())


def test_first_step_loss_is_minus_the_weighted_advantage():
    data = batch([3, 8, 1])
    weights = token_weights(data["mask"], "dapo", CAP)
    loss = policy_loss(data["logprobs"], data["logprobs"], data["advantages"], weights)
    assert loss == pytest.approx(-float((weights * data["advantages"]).sum()))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e9])
def test_what_is_masked_changes_nothing(loss_type, beta, filler):
    data = batch([3, 8, 1, 0])
    clean = loss_and_gradient(data, loss_type, beta=beta)
    spoiled = {k: v if k == "mask" else torch.where(data["mask"], v, filler) for k, v in data.items()}
    dirty = loss_and_gradient(spoiled, loss_type, beta=beta)
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    assert (clean[1][~data["mask"]] == 0).all()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_unmasked_nan_is_not_hidden(loss_type):
    data = batch([3, 8])
    data["logprobs"][0, 1] = float("nan")
    assert loss_and_gradient(data, loss_type)[0].isnan()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_fully_masked_batch_gives_zero(loss_type, beta):
    data = batch([0, 0])
    for name in ("logprobs", "old_logprobs", "advantages", "ref_logprobs"):
        data[name][:] = float("nan")
    loss, gradient = loss_and_gradient(data, loss_type, beta=beta)
    assert loss == 0.0 and (gradient == 0).all()


@given(
    st.lists(st.integers(0, CAP), min_size=2, max_size=7),
    st.sampled_from(LOSS_TYPES),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.05]),
)
@settings(max_examples=60, deadline=None)
def test_accumulation_changes_nothing(lengths, loss_type, size, beta):
    data = batch(lengths)
    weights = token_weights(data["mask"], loss_type, CAP)
    whole = loss_and_gradient(data, loss_type, beta=beta)
    pieces = [
        loss_and_gradient(data, loss_type, rows=slice(i, i + size), weights=weights, beta=beta)
        for i in range(0, len(lengths), size)
    ]
    assert sum(p[0] for p in pieces) == pytest.approx(float(whole[0]), abs=1e-12)
    assert torch.allclose(torch.cat([p[1] for p in pieces]), whole[1], rtol=0, atol=1e-12)


def test_the_penalty_pulls_towards_the_reference():
    """With no advantage, a descent step brings the log-prob closer to the reference's, from either side."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.zeros(1, 2),
        token_weights(mask, "dapo", 2),
        beta=0.1,
        ref_logprobs=torch.tensor([[-2.0, -1.0]]),
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[0, 0] > 0 > gradient[0, 1]


def test_beta_without_reference_is_an_error():
    data = batch([2])
    with pytest.raises(ValueError, match="beta is 0.1"):
        policy_loss(data["logprobs"], data["old_logprobs"], data["advantages"], data["mask"].double(), beta=0.1)


def test_the_kl_estimator_is_an_argument():
    data = batch([2, 5])
    assert loss_and_gradient(data, "dapo", beta=0.1)[0] != loss_and_gradient(data, "dapo", beta=0.1, kl=kl_k1)[0]


def test_token_ratios_are_not_sequence_ratios():
    """Ratios 1.1, 0.9, 1.5 with advantage 1 and epsilon 0.2: the mean surrogate is (1.1 + 0.9 + 1.2) / 3."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    logprobs = torch.tensor([[1.1, 0.9, 1.5]], dtype=torch.float64).log()
    loss = policy_loss(
        logprobs, torch.zeros_like(logprobs), torch.ones_like(logprobs), token_weights(mask, "dapo", 3).double()
    )
    assert loss == pytest.approx(-1.0666667, abs=1e-6)
