import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import lmrl.trainer as trainer_module
from lmrl.baselines import group_advantages
from lmrl.batch import concatenate, rollouts_from_samples
from lmrl.config import TrainConfig
from lmrl.figures.trainer import learning_curve
from lmrl.logprobs import unflatten
from lmrl.loss import LOSS_TYPES
from lmrl.models import load_critic
from lmrl.policy import (
    Samples,
    build_policy,
    build_tokenizer,
    completion_logits,
    gather_logprobs,
    is_number,
    pad_left,
    token_logprobs,
)
from lmrl.rewards import RewardError
from lmrl.rollout import TorchSampler
from lmrl.signal import interval_over_problems
from lmrl.tasks import Example, Task, encode_prompt
from lmrl.trainer import (
    ShuffledBatches,
    Trainer,
    collect,
    completion_advantages,
    decode,
    evaluate,
    generator_for,
    grade,
    learning_rate_factor,
    loss_mask,
    rows_with_gradient,
    run,
    score,
    token_budget,
)
from lmrl.trust_region import entropy

SMALL = TrainConfig(
    max_steps=6,
    per_device_train_batch_size=32,
    num_generations=4,
    max_completion_length=5,
    num_eval_problems=8,
    num_eval_generations=2,
    learning_rate=1e-3,
    warmup_steps=0,
    num_iterations=1,
    save_steps=4,
)


def count_sevens(prompts, completions, **columns):
    return [float(completion.count("7")) for completion in completions]


def always_tied(prompts, completions, **columns):
    return [1.0] * len(completions)


def not_gradable(prompts, completions, **columns):
    return [None] * len(completions)


def examples(count=20):
    return [Example(f"{i}+{i}=", {"answer": str(2 * i)}) for i in range(count)]


def make_trainer(config=SMALL, reward=count_sevens, model_seed=0, dtype=torch.float32, dropout=0.0):
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer, seed=model_seed).to(dtype)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    task = Task("sevens", examples(), examples(), reward, well_formed=is_number)
    sampler = TorchSampler(
        model, [tokenizer.eos_token_id], tokenizer.pad_token_id, config.max_completion_length, config.temperature
    )
    reference = build_policy(tokenizer, seed=model_seed).to(dtype) if config.beta else None
    critic = load_critic(model, shared=config.share_critic_trunk) if config.advantage_estimator == "gae" else None
    return Trainer(config, model, tokenizer, task, sampler, reference, critic)


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def rollouts_of(trainer, seed=0):
    chosen = trainer.task.train[:8]
    rollouts = collect(trainer.sampler, trainer.tokenizer, chosen, 4, seed)
    return completion_advantages(grade(rollouts, trainer.tokenizer, chosen, trainer.task.reward), trainer.config)


def with_reference(trainer, rollouts):
    budget = token_budget(rollouts, trainer.config)
    logprobs, _ = score(trainer.reference, rollouts, trainer.config.temperature, budget)
    return replace(rollouts, ref_logprobs=logprobs)


def untimed(metrics):
    return {name: v for name, v in metrics.items() if not name.endswith("seconds") and name != "generation_share"}


# --- one step ---------------------------------------------------------------------------------------------------------


def test_it_learns_what_the_reward_says():
    trainer = make_trainer(replace(SMALL, max_steps=40, per_device_train_batch_size=64, learning_rate=3e-3))
    rewards = [trainer.step()["reward"] for _ in range(40)]
    assert rewards[0] < 0.6 and sum(rewards[-5:]) / 5 > 1.5


def test_first_ratios_are_exactly_one_and_the_sampler_agrees():
    trainer = make_trainer()
    for _ in range(3):
        metrics = trainer.step()
        assert metrics["ratio_error"] == 0.0
        assert metrics["clip_fraction"] == 0.0 and metrics["kl_old"] == 0.0
        assert metrics["sampler_gap"] < 1e-4


def test_dropout_is_off_while_scoring():
    trainer = make_trainer(replace(SMALL, beta=0.1), dropout=0.5)
    trainer.model.train()
    trainer = Trainer(
        trainer.config, trainer.model, trainer.tokenizer, trainer.task, trainer.sampler, trainer.reference
    )
    metrics = trainer.step()
    assert metrics["ratio_error"] == 0.0 and metrics["sampler_gap"] < 1e-4
    assert metrics["kl_ref"] == pytest.approx(0.0, abs=1e-9)


def test_a_separate_scoring_pass_gives_the_old_logprobs():
    """The alias is not a shortcut: scoring once more before the update gives ratio 1 as well, up to rounding."""
    trainer = make_trainer()
    rollouts = rollouts_of(trainer)
    scored, _ = score(trainer.model, rollouts, 1.0, token_budget(rollouts, trainer.config))
    metrics = trainer.update(replace(rollouts, old_logprobs=scored))
    assert metrics["ratio_error"] < 1e-6


def test_second_pass_over_a_batch_has_other_ratios_and_the_same_old_logprobs(monkeypatch):
    seen = []
    original = trainer_module.policy_loss

    def spy(logprobs, old_logprobs, *args, **kwargs):
        seen.append((logprobs.detach().clone(), old_logprobs.clone()))
        return original(logprobs, old_logprobs, *args, **kwargs)

    monkeypatch.setattr(trainer_module, "policy_loss", spy)
    trainer = make_trainer(replace(SMALL, num_iterations=3))
    metrics = trainer.step()
    assert len(seen) == 3 and all(torch.equal(old, seen[0][1]) for _, old in seen)
    assert not torch.equal(seen[1][0], seen[0][0])
    assert metrics["ratio_error"] == 0.0 and metrics["kl_old"] > 0.0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_accumulation_changes_nothing(loss_type, beta):
    """One step cut into ever smaller micro-batches, ragged lengths, two passes: the same parameters and metrics."""
    results, cuts = {}, set()
    for size in (32, 16, 5, 1):
        config = replace(SMALL, loss_type=loss_type, beta=beta, num_iterations=2)
        trainer = make_trainer(config, dtype=torch.float64)
        rollouts = rollouts_of(trainer)
        trainer.config = replace(config, per_device_train_batch_size=size)
        if beta:
            rollouts = with_reference(trainer, rollouts)
        assert rollouts.mask.sum(1).unique().numel() > 1
        metrics = trainer.update(rollouts)
        cuts.add(metrics.pop("padding"))
        results[size] = (parameters(trainer), metrics)
    assert len(cuts) > 1
    for size in (16, 5, 1):
        assert torch.allclose(results[size][0], results[32][0], rtol=0, atol=1e-9)
        assert results[size][1] == pytest.approx(results[32][1], rel=1e-5, abs=1e-9)


def test_a_run_does_not_depend_on_how_its_steps_are_cut():
    runs = []
    for size, steps in ((32, 1), (4, 8)):
        config = replace(SMALL, per_device_train_batch_size=size, gradient_accumulation_steps=steps, beta=0.05)
        trainer = make_trainer(config, dtype=torch.float64)
        runs.append([untimed(trainer.step()) for _ in range(3)])
    for whole, cut in zip(*runs, strict=True):
        assert whole.pop("padding") > cut.pop("padding")
        assert whole == pytest.approx(cut, rel=1e-5, abs=1e-9)


def test_scores_stand_where_their_tokens_stand():
    """Cut into single rows or not at all, sorted by length or not: every token has its own log-prob."""
    trainer = make_trainer(dtype=torch.float64)
    rollouts = rollouts_of(trainer)
    expected = token_logprobs(trainer.model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, 0.7)
    for max_tokens in (1, 40, 10_000):
        scores, _ = score(trainer.model, rollouts, 0.7, max_tokens)
        assert torch.allclose(scores[rollouts.mask], expected[rollouts.mask], rtol=0, atol=1e-12)
        assert not scores.requires_grad


def test_padding_is_logged():
    trainer = make_trainer()
    rollouts = replace(rollouts_of(trainer), advantages=torch.ones(32, 5))  # all rows have a gradient
    used = rollouts.prompt_mask.sum() + rollouts.mask.sum()
    area = rollouts.prompt_mask.numel() + rollouts.mask.numel()
    assert trainer.update(rollouts)["padding"] == pytest.approx(1 - float(used / area))
    trainer.config = replace(trainer.config, per_device_train_batch_size=1)
    assert trainer.update(rollouts)["padding"] < 0.05


def materialised_loss(model, prompt_ids, prompt_mask, completion_ids, mask, token_loss, temperature):
    """`completion_loss` by way of all the logits and plain autograd."""
    logits = completion_logits(model, prompt_ids, prompt_mask, completion_ids, temperature)[mask]
    logprobs, entropies = gather_logprobs(logits, completion_ids[mask]), entropy(logits)
    loss = token_loss(logprobs, entropies, slice(0, len(logprobs)))
    return loss, *(unflatten(values.detach(), mask) for values in (logprobs, entropies))


def materialised_scores(model, prompt_ids, prompt_mask, completion_ids, mask, temperature):
    logits = completion_logits(model, prompt_ids, prompt_mask, completion_ids, temperature)
    return gather_logprobs(logits, completion_ids), entropy(logits)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_fused_and_the_materialised_path_are_the_same_run(loss_type, beta, dtype, monkeypatch):
    """Three steps of two passes in several micro-batches: the same metrics, the same weights."""
    config = replace(
        SMALL, loss_type=loss_type, beta=beta, num_iterations=2, temperature=0.8, gradient_accumulation_steps=2
    )
    runs = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(trainer_module, "completion_loss", materialised_loss)
            monkeypatch.setattr(trainer_module, "completion_logprobs", materialised_scores)
        trainer = make_trainer(replace(config, per_device_train_batch_size=16), dtype=dtype)
        metrics = [trainer.step() for _ in range(3)]
        runs.append((parameters(trainer), metrics))
    exact = dtype == torch.float64
    assert torch.allclose(runs[0][0], runs[1][0], rtol=0, atol=1e-9 if exact else 1e-4)
    for fused, materialised in zip(runs[0][1], runs[1][1], strict=True):
        expected = pytest.approx(untimed(materialised), rel=1e-6 if exact else 1e-2, abs=1e-9 if exact else 1e-5)
        assert untimed(fused) == expected
        assert fused["ratio_error"] == 0.0 and fused["sampler_gap"] < 2e-5
        assert 0 < fused["trained_entropy"] < math.log(15)


def naive_update(model, reference, rollouts, config):
    """GRPO from its formulas, a row at a time without padding, in float64: the loss and gradient norm of each pass."""

    def logprobs(model, row):
        prompt, ids = rollouts.prompt_ids[row][rollouts.prompt_mask[row]], rollouts.completion_ids[row]
        logits = model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1] / config.temperature
        return logits.log_softmax(-1)[range(len(ids)), ids]

    kept = rollouts.graded & ~(rollouts.truncated & config.mask_truncated_completions)
    tokens = {row: rollouts.mask[row].nonzero().squeeze(1) for row in kept.nonzero().squeeze(1).tolist()}
    share = {
        "dapo": lambda count: 1 / sum(map(len, tokens.values())),
        "grpo": lambda count: 1 / len(tokens) / count,
        "dr_grpo": lambda count: 1 / len(tokens) / config.max_completion_length,
    }[config.loss_type]
    optimizer = torch.optim.AdamW(
        model.parameters(), config.learning_rate, (0.9, 0.99), weight_decay=config.weight_decay
    )
    old, results = {}, []
    for _ in range(config.num_iterations):
        loss = torch.zeros((), dtype=torch.float64)
        for row, at in tokens.items():
            others = [i for i, g in enumerate(rollouts.group) if g == rollouts.group[row] and rollouts.graded[i]]
            rewards = rollouts.rewards[others].double()
            scale = rewards.std(correction=0) if config.scale_rewards == "group" else 1.0
            advantage = (rollouts.rewards[row] - rewards.mean()) / scale if rewards.std(correction=0) > 0 else 0.0
            new = logprobs(model, row)[at]
            ratio = (new - old.setdefault(row, new.detach())).exp()
            gain = torch.minimum(
                ratio * advantage, ratio.clamp(1 - config.epsilon, 1 + config.epsilon_high) * advantage
            )
            difference = logprobs(reference, row)[at].detach() - new
            gain = gain - config.beta * (difference.exp() - difference - 1)
            loss = loss - share(len(at)) * gain.sum()
        optimizer.zero_grad()
        loss.backward()
        results.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm).item()))
        optimizer.step()
    return results


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.5, "epsilon_high": 0.3, "mask_truncated_completions": True, "weight_decay": 0.1},
        {"beta": 0.0, "epsilon_high": 0.1, "scale_rewards": "none", "max_grad_norm": 0.05},
    ],
)
def test_an_update_is_the_formula_written_out(loss_type, settings):
    """Ragged lengths, holes, cut and ungraded rows, groups in any order, three passes, temperature 0.7, short pieces."""
    config = replace(
        SMALL, loss_type=loss_type, num_iterations=3, temperature=0.7, epsilon=0.05, max_completion_length=7, **settings
    )
    trainer = make_trainer(config, dtype=torch.float64)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(5)
    reference, naive = build_policy(trainer.tokenizer, seed=5).double(), copy.deepcopy(trainer.model)
    rollouts = rollouts_of(trainer).trim(6)  # narrower than max_completion_length
    random = torch.Generator().manual_seed(1)
    rollouts = rollouts.select(torch.randperm(len(rollouts), generator=random))
    holes = torch.rand(rollouts.mask.shape, generator=random) < 0.2
    graded = torch.rand(len(rollouts), generator=random) < 0.8
    rewards = torch.where(graded, rollouts.rewards, float("nan"))
    rollouts = replace(rollouts, mask=rollouts.mask & ~holes, graded=graded, rewards=rewards)
    rollouts = completion_advantages(rollouts, config)
    expected = naive_update(naive, reference, rollouts, config)
    trainer.config = replace(config, per_device_train_batch_size=5)
    if config.beta:
        trainer.reference = reference
        rollouts = with_reference(trainer, rollouts)
    metrics = trainer.update(rollouts)
    assert metrics["loss"] == pytest.approx(expected[-1][0], rel=1e-5, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(expected[-1][1], rel=1e-5)
    assert metrics["clip_fraction"] > 0
    weights = torch.cat([p.detach().flatten() for p in naive.parameters()])
    assert torch.allclose(parameters(trainer), weights, rtol=0, atol=1e-5)


def test_token_metrics_of_one_token_by_hand():
    """π = 1/2, π_old = 1/4, π_ref = 1/8, and the sampler says 1/5: each metric has its own number."""
    piece = replace(rollouts_of(make_trainer()).select(torch.tensor([0])).trim(1), advantages=torch.ones(1, 1))
    old, reference, sampler = (torch.tensor([[p]]).log() for p in (1 / 4, 1 / 8, 1 / 5))
    piece = replace(piece, old_logprobs=old, ref_logprobs=reference, sampler_logprobs=sampler)
    metrics = trainer_module.token_metrics(torch.tensor([[0.5]]).log(), piece, SMALL)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "ratio_error": 1.0,
            "clip_fraction": 1.0,
            "kl_old": 2 - 1 - math.log(2),  # k3 of KL(π_old ‖ π)
            "kl_ref": 1 / 4 - 1 + math.log(4),  # k3 of KL(π ‖ π_ref)
            "sampler_gap": math.log(2.5),
        }
    )


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_step_scales_the_rewards_as_it_is_told(scale):
    trainer = make_trainer(replace(SMALL, scale_rewards=scale))
    seen = []
    trainer.update = lambda rollouts: seen.append(rollouts) or {}
    trainer.step()
    expected = group_advantages(seen[0].rewards, seen[0].group, scale=scale)
    assert expected.any() and torch.equal(seen[0].advantages[:, 0], expected)


def test_every_step_has_its_own_seed_and_learning_rate_and_tells_the_sampler():
    class Spy:
        def __init__(self, inner):
            self.inner, self.seeds, self.synced = inner, [], []

        def generate(self, prompts, num_generations, seed):
            self.seeds.append(seed)
            return self.inner.generate(prompts, num_generations, seed)

        def sync(self, model):
            self.synced.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    trainer = make_trainer()
    trainer.sampler = Spy(trainer.sampler)
    rates = [trainer.step()["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([1e-3, 1e-3 * 5 / 6, 1e-3 * 4 / 6])
    assert len(set(trainer.sampler.seeds)) == 3
    assert len(trainer.sampler.synced) == 3 and torch.equal(trainer.sampler.synced[-1], parameters(trainer))
    assert not torch.equal(trainer.sampler.synced[0], trainer.sampler.synced[1])


def test_tied_groups_leave_the_weights_bit_identical():
    trainer = make_trainer(reward=always_tied)
    before = parameters(trainer)
    metrics = trainer.step()
    assert metrics["frac_reward_zero_std"] == 1.0
    assert torch.equal(parameters(trainer), before)


@pytest.mark.filterwarnings("ignore:0 of .* groups are mixed")
@pytest.mark.parametrize(("dynamic_sampling", "steps"), [(False, 12), (True, 3)])
def test_all_groups_tied_for_many_steps(dynamic_sampling, steps, tmp_path):
    """After one step with a signal, so that AdamW has moments, and to the end of a run: finite, and nothing but its echo."""
    settings = {"max_steps": steps + 1, "dynamic_sampling": dynamic_sampling, "output_dir": str(tmp_path)}
    trainer = make_trainer(replace(SMALL, **settings))
    trainer.step()
    trainer.task = replace(trainer.task, reward=always_tied)
    result = run(trainer, learning_curve)
    records = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(2, steps + 2)) and not result.interrupted
    assert all(value is not None for record in records for value in record.values())
    assert {record["frac_reward_zero_std"] for record in records} == {1.0}
    assert {record["grad_norm"] for record in records} == {record["skipped_updates"] for record in records} == {0.0}
    fresh = make_trainer(replace(SMALL, **settings), reward=always_tied)
    before = parameters(fresh)
    for _ in range(steps):
        fresh.step()
    assert torch.equal(parameters(fresh), before)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_completions_of_length_0_change_nothing(loss_type):
    """Two groups more, of completions without a token: the update of the others; all of them empty: none."""
    results = []
    for empty in (False, True):
        trainer = make_trainer(replace(SMALL, loss_type=loss_type, num_iterations=2), dtype=torch.float64)
        rollouts = rollouts_of(trainer)
        if empty:
            none = replace(rollouts.select(torch.arange(8)), mask=torch.zeros(8, rollouts.mask.shape[1]).bool())
            none = replace(none, advantages=torch.ones_like(none.advantages), group=none.group + 100)
            rollouts = concatenate([rollouts, none])
        before = parameters(trainer)
        metrics = trainer.update(rollouts)
        assert all(math.isfinite(value) for value in metrics.values())
        results.append(parameters(trainer))
    if loss_type != "grpo" and loss_type != "dr_grpo":  # these two divide by the number of rows, of length 0 too
        assert torch.allclose(*results, rtol=0, atol=1e-12)
    assert not torch.equal(results[0], before)
    trainer.update(none)
    metrics = trainer.update(none)
    assert metrics["loss"] == metrics["grad_norm"] == 0.0


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_rows_without_gradient_may_be_left_out(beta, monkeypatch):
    """Training on the rows that have a gradient gives the parameters that training on all of them gives."""
    results = []
    for everything in (False, True):
        if everything:
            monkeypatch.setattr(trainer_module, "rows_with_gradient", lambda r, w, c: torch.ones(len(r)).bool())
        trainer = make_trainer(replace(SMALL, beta=beta, num_iterations=2), dtype=torch.float64)
        rollouts = rollouts_of(trainer)
        advantages = torch.where(rollouts.group[:, None] % 2 == 0, 0.0, rollouts.advantages)
        if beta:
            rollouts = with_reference(trainer, rollouts)
        rows = trainer_module.rows_with_gradient(rollouts, rollouts.mask.float(), trainer.config)
        trainer.update(replace(rollouts, advantages=advantages))
        results.append(parameters(trainer))
    assert torch.allclose(*results, rtol=0, atol=1e-12)
    assert rows.all() or not beta


def test_rows_with_gradient():
    trainer = make_trainer()
    rollouts = rollouts_of(trainer)
    weights = rollouts.mask.float()
    weights[0] = 0.0
    advantages = rollouts.advantages.clone()
    advantages[0], advantages[1], advantages[2] = 1.0, 0.0, 1.0
    changed = replace(rollouts, advantages=advantages)
    assert rows_with_gradient(changed, weights, SMALL)[:3].tolist() == [False, False, True]
    assert rows_with_gradient(changed, weights, replace(SMALL, beta=0.1))[:3].tolist() == [False, True, True]


def test_nothing_gradable_leaves_the_weights_and_finite_metrics():
    trainer = make_trainer(reward=not_gradable)
    before = parameters(trainer)
    with pytest.warns(UserWarning, match="graded none of the completions"):
        metrics = trainer.step()
    assert metrics["ungraded"] == 1.0
    assert all(value == value and abs(value) < float("inf") for value in metrics.values())
    assert torch.equal(parameters(trainer), before)


def test_ungraded_completions_leave_the_loss():
    """Other ids in an ungraded row: the same update."""
    results = []
    for filler in (3, 9):
        trainer = make_trainer(dtype=torch.float64)
        rollouts = rollouts_of(trainer)
        graded = torch.arange(len(rollouts)) % 4 != 0
        ids = torch.where(graded[:, None], rollouts.completion_ids, filler)
        trainer.update(replace(rollouts, graded=graded, completion_ids=ids))
        results.append(parameters(trainer))
    assert torch.equal(*results)


def test_masking_truncated_completions():
    trainer = make_trainer()
    rollouts = rollouts_of(trainer)
    assert rollouts.truncated.any() and not rollouts.truncated.all()
    assert torch.equal(loss_mask(rollouts, False), rollouts.mask)
    kept = loss_mask(rollouts, True)
    assert not kept[rollouts.truncated].any()
    assert torch.equal(kept[~rollouts.truncated], rollouts.mask[~rollouts.truncated])


def test_every_completion_truncated_and_masked_is_a_zero_step():
    trainer = make_trainer(replace(SMALL, mask_truncated_completions=True))
    rollouts = rollouts_of(trainer)
    before = parameters(trainer)
    metrics = trainer.update(replace(rollouts, truncated=torch.ones_like(rollouts.truncated)))
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0
    assert torch.equal(parameters(trainer), before)


def length_when_short_answers_pay():
    """Mean length after 8 to 16 steps on the negative length as the reward; it starts above 4."""

    def prefer_short(prompts, completions, **columns):
        return [-float(len(completion)) for completion in completions]

    config = replace(SMALL, max_steps=30, per_device_train_batch_size=64, learning_rate=3e-3)
    trainer = make_trainer(config, reward=prefer_short)
    lengths = [trainer.step()["completion_length"] for _ in range(17)]
    assert lengths[0] > 4
    return sum(lengths[8:]) / 9


def test_the_eos_token_is_trained():
    """Rewarding short answers makes the policy stop early."""
    assert length_when_short_answers_pay() < 2.3


def test_planted_fault_a_masked_eos_is_noticed(monkeypatch):
    """With the stop token masked, the same run learns it more slowly: the check above would fail."""

    def without_stop_token(rollouts, mask_truncated_completions):
        last = rollouts.mask & (rollouts.mask.cumsum(1) == rollouts.mask.sum(1, keepdim=True))
        return rollouts.mask & ~(last & ~rollouts.truncated[:, None])

    monkeypatch.setattr(trainer_module, "loss_mask", without_stop_token)
    assert length_when_short_answers_pay() > 2.3


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_temperature_is_on_both_sides(temperature):
    trainer = make_trainer(replace(SMALL, temperature=temperature))
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(20)
    assert trainer.step()["sampler_gap"] < 1e-3
    one_sided = make_trainer(replace(SMALL, temperature=0.6))
    with torch.no_grad():
        one_sided.model.lm_head.weight.mul_(20)
    one_sided.sampler = replace(one_sided.sampler, temperature=1.0)
    assert one_sided.step()["sampler_gap"] > 0.1


def test_a_nan_in_the_weights_raises_and_says_where():
    trainer = make_trainer()
    rollouts = rollouts_of(trainer)
    with torch.no_grad():
        trainer.model.lm_head.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="log-probs: .* values are not finite; lower learning_rate"):
        trainer.update(rollouts)


def test_groups_survive_a_shuffle_of_the_rows():
    trainer = make_trainer()
    rollouts = rollouts_of(trainer)
    order = torch.randperm(len(rollouts), generator=torch.Generator().manual_seed(0))
    shuffled = completion_advantages(rollouts.select(order), SMALL)
    assert torch.allclose(shuffled.advantages, rollouts.advantages[order], atol=1e-6)


# --- the loop's parts -------------------------------------------------------------------------------------------------


def test_batches_visit_every_prompt_once_per_pass():
    batches = ShuffledBatches(10, 4, torch.Generator().manual_seed(0))
    stream = [i for _ in range(5) for i in next(batches)]
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10)) and stream[:10] != stream[10:]


def test_generators_differ_by_purpose_and_seed():
    draws = {
        (seed, purpose): float(torch.rand((), generator=generator_for(seed, purpose)))
        for seed in (0, 1)
        for purpose in ("data", "sampling")
    }
    assert len(set(draws.values())) == 4
    assert draws[0, "data"] == float(torch.rand((), generator=generator_for(0, "data")))


def test_learning_rate_schedule():
    config = TrainConfig(max_steps=10, warmup_steps=2)
    assert [learning_rate_factor(s, config) for s in (0, 1, 5, 9)] == pytest.approx([0.5, 0.9, 0.5, 0.1])
    constant = replace(config, lr_scheduler_type="constant", warmup_steps=0)
    assert [learning_rate_factor(s, constant) for s in (0, 9)] == [1.0, 1.0]


def test_too_few_prompts_names_both_numbers():
    with pytest.raises(ValueError, match="a step takes 24 prompts .* has 20"):
        make_trainer(replace(SMALL, per_device_train_batch_size=96))


def test_the_longest_prompt_has_to_fit_with_its_completion():
    with pytest.raises(
        ValueError, match="a prompt of 7 tokens and a completion of up to 60 are 67, but .* 64 positions"
    ):
        make_trainer(replace(SMALL, max_completion_length=60))


def test_beta_without_a_reference_is_refused():
    trainer = make_trainer()
    with pytest.raises(ValueError, match="beta is 0.1, which needs a reference"):
        Trainer(replace(SMALL, beta=0.1), trainer.model, trainer.tokenizer, trainer.task, trainer.sampler)


def test_a_model_whose_logits_are_not_those_of_its_head_is_refused():
    trainer = make_trainer()
    trainer.model.lm_head.register_forward_hook(lambda module, inputs, logits: 3 * logits)
    with pytest.raises(ValueError, match="log-probs from hidden states and output head differ from the model's own"):
        Trainer(SMALL, trainer.model, trainer.tokenizer, trainer.task, trainer.sampler)


@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_bfloat16_trains_with_float32_logprobs(beta, monkeypatch):
    seen = []
    original = trainer_module.policy_loss

    def spy(logprobs, old_logprobs, advantages, weights, *, ref_logprobs=None, **kwargs):
        seen.extend(value for value in (logprobs, old_logprobs, weights, ref_logprobs) if value is not None)
        return original(logprobs, old_logprobs, advantages, weights, ref_logprobs=ref_logprobs, **kwargs)

    monkeypatch.setattr(trainer_module, "policy_loss", spy)
    trainer = make_trainer(replace(SMALL, beta=beta, num_iterations=2), dtype=torch.bfloat16)
    before = parameters(trainer)
    metrics = trainer.step()
    assert seen and all(value.dtype == torch.float32 for value in seen)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["ratio_error"] == 0.0 and metrics["sampler_gap"] < 0.05
    assert trainer.model.dtype == torch.bfloat16 and not torch.equal(parameters(trainer), before)


def test_the_kl_to_the_reference_starts_at_zero_and_grows():
    trainer = make_trainer(replace(SMALL, beta=0.01))
    kl = [trainer.step()["kl_ref"] for _ in range(4)]
    assert kl[0] == pytest.approx(0.0, abs=1e-9) and kl[-1] > 1e-6
    assert all(p.grad is None for p in trainer.reference.parameters())


def test_the_seed_decides_the_prompts_and_the_sampling():
    first, second = (make_trainer(replace(SMALL, seed=seed)) for seed in (0, 1))
    assert next(first.batches) != next(second.batches)
    assert torch.rand((), generator=first.sampling) != torch.rand((), generator=second.sampling)


def test_the_same_seed_gives_the_same_run():
    first, second = ([make_trainer().step() for _ in range(1)] for _ in range(2))
    for name in ("reward", "loss", "grad_norm", "entropy"):
        assert first[0][name] == second[0][name]


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_it_promises(tmp_path):
    trainer = make_trainer(replace(SMALL, output_dir=str(tmp_path), name="r"))
    result = run(trainer, learning_curve)
    assert result.folder == tmp_path / "r" and not result.interrupted
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for name in ("reward", "completion_length", "entropy", "kl_old", "clip_fraction", "frac_reward_zero_std"):
        assert name in lines[0]
    assert 0 < lines[0]["generation_share"] < 1
    assert sum(lines[0][f"{phase}_seconds"] for phase in ("generation", "reward", "update")) <= lines[0]["seconds"]
    assert json.loads((result.folder / "config.json").read_text())["num_generations"] == 4
    assert (result.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list(result.folder.glob("events.out.tfevents*"))
    samples = [json.loads(line) for line in (result.folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 8 * 2 and {row["when"] for row in samples} == {"before", "after"}
    model = AutoModelForCausalLM.from_pretrained(result.folder / "checkpoint")
    assert torch.equal(model.lm_head.weight, trainer.model.lm_head.weight)
    tokenizer = AutoTokenizer.from_pretrained(result.folder / "checkpoint")
    assert tokenizer("1+2=").input_ids == trainer.tokenizer("1+2=").input_ids


def test_ungraded_answers_are_null_in_the_samples(tmp_path):
    def every_other(prompts, completions, **columns):
        return [None if i % 2 else 1.0 for i in range(len(completions))]

    def not_json(constant):
        raise ValueError(f"{constant} is not JSON")

    trainer = make_trainer(replace(SMALL, max_steps=1, output_dir=str(tmp_path)), reward=every_other)
    lines = (run(trainer, learning_curve).folder / "samples.jsonl").read_text().splitlines()
    rewards = [json.loads(line, parse_constant=not_json)["reward"] for line in lines]
    assert rewards == [1.0, None] * 16


def test_the_phases_of_a_step_are_parts_of_it(monkeypatch):
    """A clock that only ticks when a phase runs: each phase's seconds are its own."""
    now = [0.0]
    monkeypatch.setattr("lmrl.metrics.time.perf_counter", lambda: now[0])

    def taking(seconds, function):
        def slow(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return slow

    trainer = make_trainer()
    monkeypatch.setattr(trainer_module, "collect", taking(4.0, trainer_module.collect))
    monkeypatch.setattr(trainer_module, "grade", taking(2.0, trainer_module.grade))
    trainer.update = taking(1.0, trainer.update)
    monkeypatch.setattr(TorchSampler, "sync", taking(1.0, TorchSampler.sync))
    metrics = trainer.step()
    names = ("generation_seconds", "reward_seconds", "update_seconds", "seconds", "generation_share")
    assert [metrics[name] for name in names] == [4.0, 2.0, 1.0, 8.0, 0.5]


def test_runs_do_not_overwrite_each_other(tmp_path):
    config = replace(SMALL, max_steps=1, output_dir=str(tmp_path))
    folders = [run(make_trainer(config), learning_curve).folder.name for _ in range(2)]
    assert folders == ["arithmetic-1", "arithmetic-2"]
    named = replace(config, name="arithmetic-1")
    with pytest.raises(FileExistsError, match="choose another --name"):
        run(make_trainer(named), learning_curve)


def test_a_reward_that_fails_at_once_leaves_no_folder(tmp_path):
    def broken(prompts, completions, **columns):
        raise KeyError("answer_key")

    trainer = make_trainer(replace(SMALL, output_dir=str(tmp_path / "runs")), reward=broken)
    with pytest.raises(RewardError, match="answer_key"):
        run(trainer, learning_curve)
    assert not (tmp_path / "runs").exists()


def test_a_reward_that_fails_later_costs_no_step(tmp_path, capsys):
    calls = []

    def breaks_later(prompts, completions, **columns):
        calls.append(1)
        if len(calls) == 9:  # three evaluations, and step 6
            return [0.0]
        return count_sevens(prompts, completions)

    trainer = make_trainer(replace(SMALL, output_dir=str(tmp_path), name="r", save_steps=2), reward=breaks_later)
    with pytest.raises(RewardError):
        run(trainer, learning_curve)
    assert json.loads((tmp_path / "r" / "checkpoint" / "lmrl.json").read_text())["step"] == 5
    assert f"saved after step 5; go on with: lmrl train --resume {tmp_path / 'r'}" in capsys.readouterr().err
    AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "checkpoint")


def test_ctrl_c_saves_before_it_leaves(tmp_path):
    program = "from lmrl.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "train", "--name", "r", "--output-dir", str(tmp_path)]
    command += ["--max-steps", "100000", "--save-steps", "100000", "--num-eval-problems", "8"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    metrics = tmp_path / "r" / "metrics.jsonl"
    deadline = time.time() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "interrupted" in err and "checkpoint/" in out
    steps = metrics.read_text().count("\n")
    assert json.loads((tmp_path / "r" / "checkpoint" / "lmrl.json").read_text()) == {"step": steps}
    AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "checkpoint")


# --- evaluation -------------------------------------------------------------------------------------------------------


def test_evaluation_counts_full_marks_and_well_formed_answers():
    def half(prompts, completions, **columns):
        return [1.0 if i % 2 == 0 else 0.5 for i in range(len(completions))]

    trainer = make_trainer(reward=half)
    result = evaluate(trainer)
    assert result.pass_at_1 == 0.5 and result.reward == 0.75
    formed = [not row["truncated"] and is_number(row["completion"]) for row in result.samples]
    assert result.well_formed == sum(formed) / 16


def test_evaluation_without_heldout_problems_is_refused():
    trainer = make_trainer()
    trainer.task = replace(trainer.task, heldout=[])
    with pytest.raises(ValueError, match="task sevens has no held-out problems"):
        evaluate(trainer)


def test_evaluation_interval_is_over_problems():
    def by_problem(prompts, completions, **columns):
        return [float(int(prompt.split("+")[0]) % 2) for prompt in prompts]

    result = evaluate(make_trainer(reward=by_problem))
    assert result.pass_at_1 == 0.5
    assert str(result) == str(interval_over_problems(torch.tensor([0.0, 1.0] * 4)))
    none_right = evaluate(make_trainer(reward=lambda prompts, completions, **columns: [0.0] * len(prompts)))
    assert str(none_right) == "0.000 [0.000, 0.324]"  # Wilson's for 0 of 8


def test_evaluation_writes_no_more_at_once_than_a_step_and_its_result_does_not_depend_on_the_portions(monkeypatch):
    rows, generate = [], TorchSampler.generate

    def spy(sampler, *arguments):
        rollouts = generate(sampler, *arguments)
        rows.append(len(rollouts))
        return rollouts

    monkeypatch.setattr(TorchSampler, "generate", spy)
    results = [
        evaluate(make_trainer(replace(SMALL, per_device_train_batch_size=size, num_generations=4))) for size in (4, 64)
    ]
    assert rows == [4, 4, 4, 4, 16]
    assert results[0].samples == results[1].samples and results[0].pass_at_1 == results[1].pass_at_1


def test_a_prompt_that_is_long_in_tokens_is_refused_before_the_run_begins(tmp_path):
    """Found by its tokens: other prompts have more characters. A run would come to it only in some later step."""
    trainer = make_trainer(replace(SMALL, output_dir=str(tmp_path), name="r"))
    encode = trainer.tokenizer

    class Expanding:
        """One character of a prompt, ?, is sixty tokens."""

        def __getattr__(self, name):
            return getattr(encode, name)

        def __call__(self, text, **options):
            return encode(text.replace("?", "1" * 60), **options)

    task = replace(trainer.task, train=[*trainer.task.train, Example("?+1=", {"answer": ""})])
    with pytest.raises(ValueError, match="the model has 64 positions"):
        run(Trainer(trainer.config, trainer.model, Expanding(), task, trainer.sampler), learning_curve)
    assert not (tmp_path / "r").exists()


def test_the_text_of_a_completion_ends_where_its_last_token_is_even_if_the_mask_has_holes():
    trainer = make_trainer()
    rollouts = rollouts_of(trainer)
    whole = decode(trainer.tokenizer, rollouts)
    holes = rollouts.mask.clone()
    holes[:, 1:2] &= rollouts.mask.sum(1, keepdim=True) <= 2
    assert (holes != rollouts.mask).any()
    assert decode(trainer.tokenizer, replace(rollouts, mask=holes)) == whole


def test_the_blocks_of_the_fused_loss_change_nothing(monkeypatch):
    """All tokens in one block, or three at a time in tiles of eight vocabulary entries: the same step."""
    results = []
    for blocks in (None, (3, 8)):
        if blocks:
            monkeypatch.setattr("lmrl.logprobs.loss_tile_shape", lambda vocabulary: blocks)
        trainer = make_trainer(replace(SMALL, loss_type="grpo", num_iterations=2), dtype=torch.float64)
        metrics = trainer.update(rollouts_of(trainer))
        results.append((parameters(trainer), metrics["loss"], metrics["grad_norm"]))
    assert torch.allclose(results[0][0], results[1][0], rtol=0, atol=1e-9)
    assert results[0][1:] == pytest.approx(results[1][1:], rel=1e-9)


# --- whose prompts, whose ids -----------------------------------------------------------------------------------------


def test_training_asks_only_training_prompts_and_evaluation_only_heldout_ones():
    asked = []

    def spy(prompts, completions, **columns):
        asked.append(set(prompts))
        return count_sevens(prompts, completions)

    trainer = make_trainer(reward=spy)
    task = replace(trainer.task, train=examples()[:12], heldout=examples()[12:])
    trainer = Trainer(trainer.config, trainer.model, trainer.tokenizer, task, trainer.sampler)
    train, heldout = ({example.prompt for example in side} for side in (task.train, task.heldout))
    for _ in range(3):
        trainer.step()
    assert set.union(*asked) == train
    evaluate(trainer)
    assert asked[-1] == heldout


def test_each_completion_is_graded_with_its_own_prompt():
    calls = []

    def spy(prompts, completions, answer):
        calls.append((prompts, completions, answer))
        return [0.0] * len(prompts)

    trainer = make_trainer()
    chosen = trainer.task.train[:5]
    rollouts = collect(trainer.sampler, trainer.tokenizer, chosen, 4, seed=0)
    rollouts = rollouts.select(torch.randperm(20, generator=torch.Generator().manual_seed(0)))
    grade(rollouts, trainer.tokenizer, chosen, spy)
    for row, (prompt, completion, answer) in enumerate(zip(*calls[0], strict=True)):
        ids = rollouts.prompt_ids[row, rollouts.prompt_mask[row]].tolist()
        assert ids == trainer.tokenizer(prompt).input_ids and answer == str(2 * int(prompt.split("+")[0]))
        chars = trainer.tokenizer(completion, add_special_tokens=False).input_ids
        assert chars == [id for id in rollouts.completion_ids[row, rollouts.mask[row]].tolist() if id != 2]


def test_pitfall_6_the_engines_ids_are_scored_not_their_text():
    """a = 3, b = 4, ab = 5: the engine wrote "ab" as [3, 4] and as [5], and both are trained as they were written."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "a": 3, "b": 4, "ab": 5}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [("a", "b")])),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    assert tokenizer("ab").input_ids == [5] and tokenizer.decode([3, 4]).replace(" ", "") == "ab"
    written = Samples(
        ids=torch.tensor([[3, 4, 2], [5, 2, 0]]),
        logprobs=torch.full((2, 3), -1.0),
        lengths=torch.tensor([3, 2]),
        truncated=torch.tensor([False, False]),
    )

    class Engine:
        def generate(self, prompts, num_generations, seed):
            return rollouts_from_samples(*pad_left(prompts * 2, 0), torch.tensor([0, 0]), written)

        def sync(self, model):
            pass

    config = replace(SMALL, per_device_train_batch_size=2, num_generations=2, max_completion_length=3)
    model, scored = build_policy(tokenizer), []
    task = Task("ab", [Example("a", {})], [], lambda prompts, completions: [1.0, 0.0])
    trainer = Trainer(config, model, tokenizer, task, Engine())
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: scored.append(kwargs["input_ids"]), with_kwargs=True
    )
    trainer.step()
    rows = {tuple(row) for ids in scored for row in ids.tolist()}
    assert rows == {(1, 3, 3, 4, 2), (1, 3, 5, 2, 0)}


# --- long prompts, by setting -----------------------------------------------------------------------------------------


def test_prompts_of_more_than_max_prompt_length_tokens_are_dropped_and_counted():
    trainer = make_trainer()
    task = replace(
        trainer.task,
        train=[*trainer.task.train, Example("1+1+1+1+1+1=", trainer.task.train[0].columns)],
        heldout=[*trainer.task.heldout, Example("1+1+1+1+1+2=", trainer.task.train[0].columns)],
    )
    longest = max(len(encode_prompt(trainer.tokenizer, example.prompt)) for example in trainer.task.train)
    parts = trainer.model, trainer.tokenizer, task, trainer.sampler
    kept = Trainer(replace(SMALL, max_prompt_length=longest), *parts)
    assert kept.dropped_prompts == 2
    assert kept.task.train == trainer.task.train and kept.task.heldout == trainer.task.heldout
    every = Trainer(replace(SMALL, max_prompt_length=13), *parts)  # 12 characters and BOS
    assert every.dropped_prompts == 0 and every.task == task
    with pytest.raises(ValueError, match="no prompt has at most 1 tokens"):
        Trainer(replace(SMALL, max_prompt_length=1), *parts)
