"""Claims of section 11: the size of the logits, log-probs without them, masks, token weights, the share of generation."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.batch import micro_batches
from lmrl.config import TrainConfig
from lmrl.logprobs import fused_logprobs, fused_token_loss
from lmrl.loss import LOSS_TYPES, policy_loss, token_weights
from lmrl.metrics import rollout_metrics
from lmrl.policy import build_policy, build_tokenizer, gather_logprobs, length_mask, pad_left, token_logprobs
from lmrl.rollout import TorchSampler
from lmrl.tasks import Example, Task
from lmrl.trainer import Trainer, collect, completion_advantages, grade
from lmrl.trust_region import entropy


def test_claim_11_1_size_of_the_logits():
    assert 256 * 4096 * 128_000 * 2 == pytest.approx(268e9, rel=0.002)


MEASURE = """
import re, sys, torch
from pathlib import Path
from lmrl.logprobs import fused_logprobs, fused_token_loss
from lmrl.policy import gather_logprobs

torch.set_num_threads(1)
hidden, weight = torch.randn(8192, 64).requires_grad_(), torch.randn(16384, 64).requires_grad_()
targets = torch.randint(16384, (8192,))

def run(hidden, targets):
    if sys.argv[1] == "materialised":
        gather_logprobs(hidden @ weight.T, targets).sum().backward()
    elif sys.argv[1] == "fused":
        fused_logprobs(hidden, weight, targets)[0].sum().backward()
    else:
        fused_token_loss(hidden, weight, targets, lambda logprobs, entropy, rows: logprobs.sum())[0].backward()

def peak():  # not getrusage: a child's figure starts from its parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

run(hidden[:2], targets[:2])  # libraries and the weight's gradient
before = peak()
run(hidden, targets)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_claim_11_1_peak_memory_of_fused_and_materialised_log_probs():
    """512 MiB of logits: materialised, they are held at least twice; fused, neither operator holds half of them once."""

    def peak(kind):
        run = subprocess.run([sys.executable, "-c", MEASURE, kind], capture_output=True, text=True, check=True)
        return float(run.stdout)

    logits = 8192 * 16384 * 4 / 2**20
    materialised, fused, loss = map(peak, ("materialised", "fused", "loss"))
    assert materialised > 1.9 * logits
    assert fused < 0.5 * logits and loss < 0.5 * logits, (fused, loss)


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 40),
    v=st.integers(2, 3000),
    d=st.integers(1, 48),
    temperature=st.sampled_from([1.0, 0.6]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_claim_11_2_fused_equals_materialised(n, v, d, temperature, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((n, d), (v, d)))
    targets, slopes = torch.randint(v, (n,), generator=generator), torch.randn(2, n, generator=generator).to(dtype)

    def token_loss(logprobs, entropies, rows):
        return (slopes[0, rows] * logprobs.exp() + slopes[1, rows] * entropies + logprobs).sum()

    logits = hidden @ weight.T / temperature
    values = gather_logprobs(logits, targets), entropy(logits)
    expected = *values, *torch.autograd.grad(token_loss(*values, slice(None)), (hidden, weight))
    values = fused_logprobs(hidden, weight, targets, temperature=temperature)
    recomputed = *values, *torch.autograd.grad(token_loss(*values, slice(None)), (hidden, weight))
    loss, *values = fused_token_loss(hidden, weight, targets, token_loss, temperature=temperature)
    at_once = *values, *torch.autograd.grad(loss, (hidden, weight))
    for found in (recomputed, at_once):
        for a, b in zip(expected, found, strict=True):
            if dtype == torch.float64:
                assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)
            else:
                assert (a - b).norm() <= 1e-5 * a.norm() + 1e-6


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_claim_11_3_masked_tokens_contribute_nothing_to_the_parameters(loss_type, seed):
    """Other padding ids, other numbers under the mask: the model's gradient stays the same; the EOS is part of it."""
    generator = torch.Generator().manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer, seed=seed).double()
    prompt_ids, prompt_mask = pad_left([tokenizer(text).input_ids for text in ("1+2=", "12+34=")], 0)
    mask = length_mask(torch.tensor([2, 3]), 5)
    ids = torch.tensor([[6, 2, 0, 0, 0], [7, 9, 2, 0, 0]])
    advantages = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    weights = token_weights(mask, loss_type, 5)

    def gradient(prompt_ids, ids, advantages, old_noise, mask_weights=weights):
        logprobs = token_logprobs(model, prompt_ids, prompt_mask, ids)
        old = torch.where(mask, logprobs.detach(), old_noise)
        model.zero_grad()
        policy_loss(logprobs, old, advantages, mask_weights).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    clean = gradient(prompt_ids, ids, advantages, 0.0)
    noisy_prompts = torch.where(prompt_mask, prompt_ids, 9)
    noisy_ids = torch.where(mask, ids, torch.randint(15, ids.shape, generator=generator))
    noisy = gradient(noisy_prompts, noisy_ids, torch.where(mask, advantages, float("nan")), float("nan"))
    assert torch.allclose(clean, noisy, rtol=0, atol=1e-12)

    without_eos = token_weights(length_mask(torch.tensor([1, 2]), 5), loss_type, 5)
    assert (gradient(prompt_ids, ids, advantages, 0.0, without_eos) - clean).norm() > 0.01 * clean.norm()


def tiny_trainer(loss_type, *, beta=0.0, budget_rows=16, **settings):
    """A trainer of a random tiny policy with 16 completions of up to 5 tokens per step; reward: the number of sevens."""
    config = TrainConfig(
        max_steps=4,
        per_device_train_batch_size=budget_rows,
        gradient_accumulation_steps=16 // budget_rows,
        num_generations=4,
        max_completion_length=5,
        num_iterations=2,
        loss_type=loss_type,
        beta=beta,
        learning_rate=1e-2,
        warmup_steps=0,
        **settings,
    )
    tokenizer = build_tokenizer()
    model, reference = (build_policy(tokenizer, seed=seed).double() for seed in (0, 1))
    examples = [Example(f"{i}+{7 * i}=", {}) for i in range(12)]
    task = Task("sevens", examples, examples, lambda prompts, completions, **_: [c.count("7") for c in completions])
    sampler = TorchSampler(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, 5)
    return Trainer(config, model, tokenizer, task, sampler, reference if beta else None)


def rollouts_for(trainer, seed=0):
    examples = trainer.task.train[:4]  # prompts of 5 and 6 tokens
    rollouts = collect(trainer.sampler, trainer.tokenizer, examples, 4, seed)
    rollouts = completion_advantages(grade(rollouts, trainer.tokenizer, examples, trainer.task.reward), trainer.config)
    with torch.no_grad():
        scored = token_logprobs(
            trainer.reference or trainer.model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids
        )
    return replace(rollouts, ref_logprobs=scored, old_logprobs=scored + 0.05 * rollouts.advantages)


def spoil(rollouts, filler, generator):
    """The rollouts with other ids and other numbers in every slot that is not a token."""

    def spoiled(name, value):
        mask = rollouts.prompt_mask if name == "prompt_ids" else rollouts.mask
        if value.is_floating_point():
            other = (
                torch.randn(value.shape, generator=generator) if filler == "noise" else torch.full(value.shape, filler)
            )
        else:
            other = torch.randint(15, value.shape, generator=generator)
        return torch.where(mask, value, other.to(value.dtype))

    fields = {"prompt_ids": rollouts.prompt_ids, **rollouts.per_token()}
    del fields["mask"]
    return replace(rollouts, **{name: spoiled(name, value) for name, value in fields.items()})


@pytest.mark.parametrize("filler", ["noise", float("nan"), float("inf")])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_claim_11_3_masked_slots_reach_no_weight_and_no_metric(loss_type, beta, filler):
    """Two optimiser steps from clean and from spoiled rollouts: the same weights, the same metrics, all of them."""
    results = []
    for spoiled in (False, True):
        trainer = tiny_trainer(loss_type, beta=beta)
        rollouts = rollouts_for(trainer)
        assert not rollouts.mask.all() and not rollouts.prompt_mask.all() and (rollouts.advantages != 0).any()
        if spoiled:
            rollouts = spoil(rollouts, filler, torch.Generator().manual_seed(1))
        metrics = {**trainer.update(rollouts), **rollout_metrics(rollouts)}
        results.append((torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), metrics))
    (clean, metrics), (dirty, dirty_metrics) = results
    assert (clean - dirty).abs().max() < 1e-10
    assert dirty_metrics == pytest.approx(metrics, abs=1e-10) and len(metrics) > 10
    untrained = torch.cat([p.flatten() for p in tiny_trainer(loss_type).model.parameters()])
    assert (clean - untrained).abs().max() > 1e-3


@pytest.mark.parametrize("row_budget", [16, 4, 1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_pitfall_4c_accumulation_changes_nothing_in_the_model(loss_type, row_budget):
    """Uneven lengths, in 1, 4 and 16 pieces' worth of memory: the same gradient, to 1e-6 and better."""
    trainer = tiny_trainer(loss_type)
    rollouts = rollouts_for(trainer)
    weights = token_weights(rollouts.mask, loss_type, 5)

    def gradient(max_tokens):
        trainer.model.zero_grad()
        pieces = list(micro_batches(rollouts, weights, max_tokens))
        for piece, piece_weights in pieces:
            logprobs = token_logprobs(trainer.model, piece.prompt_ids, piece.prompt_mask, piece.completion_ids)
            policy_loss(logprobs, piece.old_logprobs, piece.advantages, piece_weights).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters()]), len(pieces)

    whole, one = gradient(10**6)
    accumulated, count = gradient(row_budget * 11)
    assert one == 1 and count >= 16 // row_budget and whole.norm() > 0.01
    assert (whole - accumulated).norm() < 1e-10 * whole.norm()


@pytest.mark.parametrize("budget_rows", [4, 2])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_pitfall_4c_accumulation_changes_nothing_in_a_step_of_the_trainer(loss_type, budget_rows):
    steps = {}
    for rows in (16, budget_rows):
        trainer = tiny_trainer(loss_type, budget_rows=rows)
        metrics = trainer.update(rollouts_for(trainer))
        steps[rows] = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]), metrics["loss"]
    assert (steps[16][0] - steps[budget_rows][0]).abs().max() < 1e-6
    assert steps[16][1] == pytest.approx(steps[budget_rows][1], abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_pitfall_5_a_step_in_which_everything_is_masked(loss_type, beta):
    """Every completion was cut off and cut-off ones are masked: loss 0, gradient 0, every metric finite."""
    trainer = tiny_trainer(loss_type, beta=beta, mask_truncated_completions=True)
    rollouts = rollouts_for(trainer)
    rollouts = replace(rollouts, truncated=torch.ones_like(rollouts.truncated))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    metrics = {**trainer.update(rollouts), **rollout_metrics(rollouts)}
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True))
    empty = replace(rollouts, mask=torch.zeros_like(rollouts.mask))
    assert all(math.isfinite(value) for value in {**trainer.update(empty), **rollout_metrics(empty)}.values())


def test_claim_11_4_weight_of_a_token_in_a_short_and_a_long_answer():
    mask = length_mask(torch.tensor([100, 2000]), 2000)
    ratio = {kind: float(w[0, 0] / w[1, 0]) for kind in LOSS_TYPES for w in [token_weights(mask, kind, 4000)]}
    assert ratio == {"grpo": pytest.approx(20), "dapo": 1.0, "dr_grpo": 1.0}
    total = {kind: float(token_weights(mask, kind, 4000).double().sum()) for kind in LOSS_TYPES}
    assert total == {
        "grpo": pytest.approx(1, abs=1e-5),
        "dapo": pytest.approx(1, abs=1e-5),
        "dr_grpo": pytest.approx(2100 / 8000, abs=1e-5),
    }


@given(st.lists(st.integers(0, 12), min_size=2, max_size=8).filter(any))
@settings(max_examples=60, deadline=None)
def test_claim_11_4_weights_of_every_aggregation(lengths):
    """grpo: every answer weighs the same, its tokens share it. dapo: every token the same. dr_grpo: 1 / (answers x cap)."""
    lengths, cap = torch.tensor(lengths), 15
    mask = length_mask(lengths, 12)
    answers, tokens = int((lengths > 0).sum()), int(lengths.sum())
    each = {
        "grpo": 1 / (answers * lengths.clamp(min=1)),
        "dapo": torch.full(lengths.shape, 1 / tokens),
        "dr_grpo": torch.full(lengths.shape, 1 / (answers * cap)),
    }
    assert set(each) == set(LOSS_TYPES)
    for kind, weight in each.items():
        torch.testing.assert_close(token_weights(mask, kind, cap), torch.where(mask, weight[:, None], 0.0))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_claim_11_5_a_step_reports_where_its_time_went(beta):
    """The share is of the measured step; the parts are positive and leave no more than the rest of it."""
    trainer = tiny_trainer("dapo", beta=beta)
    for _ in range(2):
        metrics = trainer.step()
        parts = [metrics[f"{part}_seconds"] for part in ("generation", "reward", "update")]
        assert min(parts) > 0 and sum(parts) <= metrics["seconds"] * (1 + 1e-9)
        assert metrics["generation_share"] == pytest.approx(parts[0] / metrics["seconds"])
        assert 0 < metrics["generation_share"] < 1


def test_claim_11_5_the_share_counts_generation_and_nothing_else():
    """A sampler that takes a second longer moves the share as a second of generation does; a slow reward does not."""
    shares = {}
    for slow in ("sampler", "reward"):
        trainer, clock = tiny_trainer("dapo"), [0.0]
        generate, reward = trainer.sampler.generate, trainer.task.reward

        def slower(function, seconds, clock=clock):
            def called(*args, **kwargs):
                clock[0] += seconds
                return function(*args, **kwargs)

            return called

        trainer.sampler = SimpleNamespace(
            generate=slower(generate, 3.0 if slow == "sampler" else 1.0), sync=lambda model: None
        )
        trainer.task = replace(trainer.task, reward=slower(reward, 3.0 if slow == "reward" else 1.0))
        with patch("lmrl.metrics.time.perf_counter", lambda clock=clock: clock[0]):
            shares[slow] = trainer.step()["generation_share"]
    assert shares == {"sampler": pytest.approx(0.75), "reward": pytest.approx(0.25)}
