"""lmrl.mismatch: how far the sampler is from the trainer, and the weights that correct it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.mismatch import CORRECTION_MODES, correction_weights, mismatch_alarm, mismatch_metrics, sampler_gap
from lmrl.policy import length_mask
from lmrl.tree import TabularPolicy, enumerate_tree, expectation

float64 = torch.float64
OLD = torch.tensor([[-1.0, -1.0, -2.0], [-0.5, -1.5, 0.0], [-3.0, 0.0, 0.0]], dtype=float64)
# gaps: 0.5, 0.2, -0.5; 1, 0.5; -1.25
SAMPLER = torch.tensor([[-1.5, -1.2, -1.5], [-1.5, -2.0, 0.0], [-1.75, 0.0, 0.0]], dtype=float64)
MASK = length_mask(torch.tensor([3, 2, 1]), 3)


# --- weights ----------------------------------------------------------------------------------------------------------


def weights(mode, cap):
    return correction_weights(OLD, SAMPLER, MASK, mode, cap)


def close(found, expected):
    return torch.allclose(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=1e-12)


def test_the_weights_of_four_modes():
    e = math.exp
    assert close(weights("token_truncate", 1.5), [[1.5, e(0.2), e(-0.5)], [1.5, 1.5, 1], [e(-1.25), 1, 1]])
    assert close(weights("token_mask", 1.5), [[0, e(0.2), e(-0.5)], [0, 0, 1], [e(-1.25), 1, 1]])
    assert close(weights("sequence_truncate", 1.5), [[e(0.2)] * 3, [1.5, 1.5, 1], [e(-1.25), 1, 1]])
    assert close(weights("sequence_mask", 1.5), [[e(0.2)] * 3, [0, 0, 1], [e(-1.25), 1, 1]])


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_a_ratio_at_the_cap_stays_and_padding_weighs_1(mode):
    found = correction_weights(OLD, OLD, MASK, mode, 1.0)
    assert found.tolist() == [[1.0] * 3] * 3
    assert weights(mode, 0.1)[~MASK].tolist() == [1.0] * 3


def test_the_defaults_are_those_of_trl():
    apart = torch.tensor([[math.log(2.9)], [math.log(3.1)]], dtype=float64)
    found = correction_weights(apart, torch.zeros_like(apart), torch.ones(2, 1, dtype=torch.bool))
    assert close(found, [[2.9], [0.0]])


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_nothing_leaks_out_of_the_padding(mode):
    """NaN, infinity, or any number where the mask is False changes nothing; a hole in the mask is no token."""
    for junk in (math.nan, math.inf, -7.0):
        dirty = [torch.where(MASK, x, junk) for x in (OLD, SAMPLER)]
        assert torch.equal(correction_weights(*dirty, MASK, mode, 1.5), weights(mode, 1.5))
        one_sided = correction_weights(dirty[0], SAMPLER, MASK, mode, 1.5)
        assert torch.equal(one_sided, weights(mode, 1.5))
        assert mismatch_metrics(*dirty, MASK) == mismatch_metrics(OLD, SAMPLER, MASK)
    hole = MASK & torch.tensor([True, False, True])
    closed = correction_weights(OLD[:, ::2], SAMPLER[:, ::2], hole[:, ::2], mode, 1.5)
    assert torch.equal(correction_weights(OLD, SAMPLER, hole, mode, 1.5)[:, ::2], closed)


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_a_nan_in_a_token_is_not_hidden(mode):
    broken = SAMPLER.clone()
    broken[0, 1] = math.nan
    assert correction_weights(OLD, broken, MASK, mode, 1.5)[0, 1].isnan()
    metrics = mismatch_metrics(OLD, broken, MASK)
    assert all(math.isnan(value) for value in metrics.values()) and mismatch_alarm(metrics) is not None


@pytest.mark.parametrize(
    "dtype, expected", [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (float64, float64)]
)
def test_weights_carry_no_gradient_and_are_at_least_float32(dtype, expected):
    learned = [x.to(dtype, copy=True).requires_grad_() for x in (OLD, SAMPLER)]
    for mode in CORRECTION_MODES:
        found = correction_weights(*learned, MASK, mode, 1.5)
        assert found.dtype == expected and not found.requires_grad
    wide = correction_weights(OLD.bfloat16(), SAMPLER.bfloat16(), MASK, "token_truncate", 9.0)
    assert torch.equal(
        wide, correction_weights(OLD.bfloat16().float(), SAMPLER.bfloat16().float(), MASK, "token_truncate", 9.0)
    )


def test_a_completion_of_thousands_of_tokens_overflows_into_the_cap():
    gap, mask = torch.full((1, 4000), 0.5), torch.ones(1, 4000, dtype=torch.bool)
    assert (correction_weights(gap, torch.zeros_like(gap), mask, "sequence_truncate", 2.0) == 2).all()
    assert (correction_weights(gap, torch.zeros_like(gap), mask, "sequence_mask", 2.0) == 0).all()
    assert (correction_weights(-gap, torch.zeros_like(gap), mask, "sequence_mask", 2.0) == 0).all()
    assert mismatch_metrics(torch.cat([gap, gap]), torch.zeros(2, 4000), mask.expand(2, -1))["mismatch/ess"] == 1


@pytest.mark.parametrize(
    "mode, cap", [("sequence", 2.0), ("token_truncate", 0.0), ("token_mask", -1.0), ("token_mask", math.nan)]
)
def test_unknown_modes_and_caps_are_refused(mode, cap):
    with pytest.raises(ValueError, match="mode is .* cap"):
        correction_weights(OLD, SAMPLER, MASK, mode, cap)


def test_shapes_have_to_agree():
    for function in (sampler_gap, correction_weights, mismatch_metrics):
        with pytest.raises(ValueError, match=r"\[3, 3\] and \[3, 2\]"):
            function(OLD, SAMPLER[:, :2], MASK)


@given(st.integers(0, 10**6), st.floats(0.2, 5.0))
@settings(max_examples=30)
def test_weights_are_bounded_and_a_row_minds_its_own_business(seed, cap):
    generator = torch.Generator().manual_seed(seed)
    gap = torch.randn(4, 5, generator=generator, dtype=float64)
    mask = length_mask(torch.randint(0, 6, (4,), generator=generator), 5)
    for mode in CORRECTION_MODES:
        found = correction_weights(gap, torch.zeros_like(gap), mask, mode, cap)
        assert (found[mask] >= 0).all() and (found[mask] <= cap).all()
        alone = [correction_weights(gap[[i]], torch.zeros(1, 5, dtype=float64), mask[[i]], mode, cap) for i in range(4)]
        assert torch.equal(found, torch.cat(alone))
        if mode.startswith("sequence"):
            row_sums = [sum(gap[i, t].item() for t in range(5) if mask[i, t]) for i in range(4)]
            for i, total in enumerate(row_sums):
                ratio = math.exp(total)
                expected = min(ratio, cap) if mode == "sequence_truncate" else (0.0 if ratio > cap else ratio)
                assert found[i][mask[i]].tolist() == pytest.approx([expected] * int(mask[i].sum()), abs=1e-10)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_the_metrics_written_out():
    gaps, rows = [0.5, 0.2, -0.5, 1.0, 0.5, -1.25], [0.2, 1.5, -1.25]
    w = [math.exp(row) for row in rows]
    assert mismatch_metrics(OLD, SAMPLER, MASK) == pytest.approx(
        {
            "mismatch/ratio_geometric": math.exp(sum(gaps) / 6),
            "mismatch/ratio_arithmetic": sum(map(math.exp, gaps)) / 6,
            "mismatch/delta_mean": sum(map(abs, gaps)) / 6,
            "mismatch/delta_max": 1.25,
            "mismatch/ess": sum(w) ** 2 / (3 * sum(x * x for x in w)),
        },
        abs=1e-12,
    )


def test_equal_policies_have_nothing_to_report():
    expected = {"ratio_geometric": 1, "ratio_arithmetic": 1, "delta_mean": 0, "delta_max": 0, "ess": 1}
    metrics = mismatch_metrics(OLD, OLD, MASK)
    assert metrics == {f"mismatch/{name}": value for name, value in expected.items()}
    assert mismatch_alarm(metrics) is None


def test_a_row_without_tokens_is_no_completion():
    padded = [torch.cat([x, torch.full((1, 3), math.nan, dtype=float64)]) for x in (OLD, SAMPLER)]
    mask = torch.cat([MASK, torch.zeros(1, 3, dtype=torch.bool)])
    assert mismatch_metrics(*padded, mask) == mismatch_metrics(OLD, SAMPLER, MASK)
    with pytest.raises(ValueError, match="no tokens"):
        mismatch_metrics(OLD, SAMPLER, torch.zeros_like(MASK))


def test_one_completion_that_outweighs_the_others_leaves_a_sample_of_one():
    old = torch.zeros(8, 1, dtype=float64)
    old[3] = 50.0
    metrics = mismatch_metrics(old, torch.zeros_like(old), torch.ones(8, 1, dtype=torch.bool))
    assert metrics["mismatch/ess"] == pytest.approx(1 / 8, abs=1e-12)


@pytest.mark.parametrize(
    "ratio, alarms", [(0.89, True), (0.91, False), (1.0, False), (1.09, False), (1.11, True), (math.nan, True)]
)
def test_the_alarm_hangs_on_the_geometric_mean(ratio, alarms):
    message = mismatch_alarm({"mismatch/ratio_geometric": ratio, "mismatch/ratio_arithmetic": 1.0})
    assert (message is not None) == alarms
    assert not alarms or f"{ratio:.3f}" in message


@pytest.mark.parametrize("seed", range(4))
def test_pitfall_2_the_arithmetic_mean_is_blind_and_the_geometric_one_is_not(seed):
    """Exact: the mean ratio is 1 in every state whatever the policy; the geometric mean is exp(-KL(μ ‖ π)) of a token."""
    pi = enumerate_tree(TabularPolicy(4, 1, seed=seed), 1)
    mu = enumerate_tree(TabularPolicy(4, 1, seed=seed + 10), 1)
    gap = sampler_gap(pi.logprobs, mu.logprobs, mu.mask)[:, 0]
    assert expectation(mu, gap.exp()).item() == pytest.approx(1, abs=1e-10)
    kl = (mu.logprobs[:, 0].exp() * (mu.logprobs - pi.logprobs)[:, 0]).sum().item()
    assert expectation(mu, gap).item() == pytest.approx(-kl, abs=1e-10)
    draws = torch.multinomial(mu.logprobs[:, 0].exp(), 20_000, True, generator=torch.Generator().manual_seed(seed))
    metrics = mismatch_metrics(pi.logprobs[draws], mu.logprobs[draws], mu.mask[draws])
    error = 5 * gap.exp()[draws].std().item() / 20_000**0.5
    assert abs(metrics["mismatch/ratio_arithmetic"] - 1) < error
    assert metrics["mismatch/ratio_geometric"] == pytest.approx(math.exp(-kl), abs=0.05) and kl > 0.1
    assert mismatch_alarm(metrics) is not None


def test_pitfall_3_an_untempered_side():
    """Logits (2, 1, 0), temperature 1/2 on the trainer's side alone: ratios 1.303 and 0.176, and an alarm."""
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=float64)
    tempered, raw = (logits / 0.5).log_softmax(0), logits.log_softmax(0)
    mask = torch.ones(3, 1, dtype=torch.bool)
    found = correction_weights(tempered[:, None], raw[:, None], mask, "token_truncate", 9.0)
    assert found[[0, 2], 0].tolist() == [pytest.approx(1.303, abs=1e-3), pytest.approx(0.176, abs=1e-3)]
    assert mismatch_alarm(mismatch_metrics(tempered[:, None], raw[:, None], mask)) is not None
    assert mismatch_metrics(tempered[:, None], tempered[:, None], mask)["mismatch/delta_max"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_pitfall_20_weights_that_never_arrived(seed):
    """The engine kept another policy, and the alarm says so."""
    pi, stale = (enumerate_tree(TabularPolicy(5, 3, seed=s), 3) for s in (seed, seed + 10))
    draws = torch.multinomial(stale.logprobs.sum(1).exp(), 256, True, generator=torch.Generator().manual_seed(0))
    metrics = mismatch_metrics(pi.logprobs[draws], stale.logprobs[draws], stale.mask[draws])
    assert metrics["mismatch/ratio_geometric"] < 0.8 and mismatch_alarm(metrics) is not None
