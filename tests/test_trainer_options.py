import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_trainer import SMALL, make_trainer, parameters, rollouts_of, untimed

import lmrl.cli as cli
import lmrl.trainer as trainer_module
from lmrl.checkpoint import restore, write_checkpoint
from lmrl.config import TrainConfig, check_config
from lmrl.memory import training_bytes
from lmrl.models import load_critic
from lmrl.trainer import Learner, learning_rate_factor, loss_mask, needs_old_logprobs, token_advantages
from lmrl.vllm_rollout import policy_weights

GAE = {"advantage_estimator": "gae", "scale_rewards": "none"}


def spoiled(rollouts):
    """Advantages of which one is infinite: finite log-probs, and a gradient that is not."""
    advantages = rollouts.advantages.clone()
    advantages[0, 0] = math.inf
    return replace(rollouts, advantages=advantages)


def moments(learner):
    return [value.clone() for state in learner.optimizer.state.values() for value in state.values()]


def same(tensors, others):
    return len(tensors) == len(others) and all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


# --- a gradient that is not finite ------------------------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_changes_nothing():
    """A good batch, a bad one, the good one again: the run that never saw the bad one, bit by bit."""
    trainer, other = make_trainer(), make_trainer()
    rollouts = rollouts_of(trainer)
    assert trainer.update(rollouts)["skipped_updates"] == other.update(rollouts)["skipped_updates"] == 0
    before, state = parameters(trainer), moments(trainer.learner)
    metrics = trainer.update(spoiled(rollouts))
    assert metrics["skipped_updates"] == 1 and not math.isfinite(metrics["grad_norm"])
    assert torch.equal(parameters(trainer), before) and same(moments(trainer.learner), state) and len(state) > 10
    assert trainer.learner.skipped_in_a_row == 1
    again, expected = trainer.update(rollouts), other.update(rollouts)
    assert again == expected and trainer.learner.skipped_in_a_row == 0
    assert torch.equal(parameters(trainer), parameters(other))


def test_the_first_gradient_may_be_the_bad_one():
    trainer = make_trainer()
    before = parameters(trainer)
    trainer.update(spoiled(rollouts_of(trainer)))
    assert torch.equal(parameters(trainer), before) and not trainer.learner.optimizer.state


def test_skipped_steps_in_a_row_stop_the_run(monkeypatch):
    trainer = make_trainer(replace(SMALL, max_skipped_updates=2))
    prepare, bad = trainer.prepare, [False, True, False, True, True, True]
    monkeypatch.setattr(
        trainer, "prepare", lambda *args: spoiled(prepare(*args)) if bad[trainer.steps_done] else prepare(*args)
    )
    assert [trainer.step()["skipped_updates"] for _ in range(4)] == [0, 1, 0, 1]
    before = parameters(trainer)
    with pytest.raises(FloatingPointError, match="step 5: 2 optimiser steps in a row were skipped.*learning_rate"):
        trainer.step()
    assert torch.equal(parameters(trainer), before)


def test_a_critics_gradient_is_skipped_alone():
    trainer = make_trainer(replace(SMALL, **GAE))
    examples, _, rollouts = trainer.gather(trainer_module.Stopwatch())
    rollouts = trainer.prepare(rollouts, examples, trainer_module.Stopwatch())
    returns = rollouts.returns.clone()
    returns[rollouts.mask] = math.inf
    before = parameters(trainer), [p.clone() for p in trainer.critic.parameters()]
    metrics = trainer.update(replace(rollouts, returns=returns))
    assert metrics["skipped_updates"] == 1 and math.isfinite(metrics["grad_norm"])
    assert not math.isfinite(metrics["critic_grad_norm"])
    assert same(list(trainer.critic.parameters()), before[1]) and not torch.equal(parameters(trainer), before[0])


@pytest.mark.parametrize("place", ["sampler", "update"])
def test_a_nan_among_the_logprobs_names_the_step(place, monkeypatch):
    trainer = make_trainer()
    trainer.step()

    def spoil(result):
        with torch.no_grad():
            trainer.model.lm_head.weight[3] = math.nan
        return result

    if place == "sampler":
        spoil(None)
    else:
        prepare = trainer.prepare
        monkeypatch.setattr(trainer, "prepare", lambda *args: spoil(prepare(*args)))
    with pytest.raises(FloatingPointError, match="^step 2: the .*log-probs"):
        trainer.step()


# --- half precision ---------------------------------------------------------------------------------------------------

HALF = {"dtype": "bfloat16", "master_weights": True}
FLOAT16 = {"dtype": "float16", "master_weights": True}


def layer_of(weights, dtype):
    layer = torch.nn.Linear(*weights.shape[::-1], bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(weights)
    return layer


def push(layer, learner, gradients):
    for gradient in gradients:
        learner.zero_grad()
        layer.weight.grad = gradient.to(layer.weight.dtype)
        learner.step()


def test_master_weights_are_those_of_a_float32_model_and_small_steps_add_up():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 9, generator=generator).bfloat16()
    gradients = [torch.randn(16, 9, generator=generator).bfloat16() + 1 for _ in range(60)]
    config = replace(SMALL, learning_rate=1e-5, max_grad_norm=0.5, weight_decay=0.1)
    whole, half, alone = (layer_of(start, dtype) for dtype in (torch.float32, torch.bfloat16, torch.bfloat16))
    push(whole, Learner(whole, 1e-5, config), gradients)
    learner = Learner(half, 1e-5, replace(config, **HALF))
    push(half, learner, gradients)
    push(alone, Learner(alone, 1e-5, config), gradients)
    assert torch.equal(learner.masters[0], whole.weight)
    assert torch.equal(half.weight, whole.weight.bfloat16()) and half.weight.dtype == torch.bfloat16
    large = start.abs() > 1e-5 * 2**9
    assert torch.equal(alone.weight[large], start[large]) and large.sum() > 100
    assert not torch.equal(half.weight[large], start[large])


def test_a_run_in_bfloat16_with_master_weights():
    """At this learning rate no large weight moves without them; with them, the model is the rounded masters."""
    moved = {}
    for master_weights in (False, True):
        config = replace(SMALL, learning_rate=2e-6, dtype="bfloat16", master_weights=master_weights)
        trainer = make_trainer(config, dtype=torch.bfloat16)
        start = parameters(trainer)
        metrics = [trainer.step() for _ in range(6)]
        assert all(m["ratio_error"] == 0.0 and m["skipped_updates"] == 0 for m in metrics)
        moved[master_weights] = int((parameters(trainer) != start)[start.abs() > 2e-6 * 2**9].sum())
    masters = torch.cat([master.flatten() for master in trainer.learner.masters])
    assert torch.equal(parameters(trainer), masters.bfloat16()) and masters.dtype == torch.float32
    assert (masters != start).float().mean() > 0.9
    assert moved[False] == 0 and moved[True] > 500


def held_bytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    ("dtype", "master_weights"), [("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", True)]
)
def test_the_trainer_holds_what_the_plan_says(dtype, master_weights):
    dtype = getattr(torch, dtype)
    config = replace(SMALL, dtype=str(dtype)[6:], master_weights=master_weights)
    trainer = make_trainer(config, dtype=dtype)
    learner = trainer.learner
    learner.scale = 1.0  # a first step that is taken
    trainer.step()
    weights = list(trainer.model.parameters())
    planned = training_bytes(sum(w.numel() for w in weights), len(weights), dtype, master_weights=master_weights)
    assert planned == {
        "weights": held_bytes(weights),
        "gradients": held_bytes(w.grad for w in weights),
        "master weights": held_bytes(learner.masters) if master_weights else 0,
        "optimiser": held_bytes(moments(learner)),
    }


def test_the_loss_scale_changes_no_digit():
    """Where nothing is too large or too small for float16, every scale gives the same masters."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(5, 7, generator=generator), torch.randn(4, 5, 7, generator=generator).half()
    found = []
    for scale in (1.0, 2.0**4, 2.0**12):
        layer = layer_of(start, torch.float16)
        learner = Learner(layer, 1e-3, replace(SMALL, max_grad_norm=0.5, **FLOAT16))
        learner.scale = scale
        push(layer, learner, gradients * scale)
        found.append(learner.masters[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def gradients_of_a_step(precision, shrink, **settings):
    """What AdamW is given for advantages of about ``shrink``, and the norm that is logged, from the same weights."""
    trainer = make_trainer(replace(SMALL, **settings), dtype=torch.float16)
    rollouts = rollouts_of(trainer)
    trainer.model.to(precision)
    trainer.learner = Learner(trainer.model, 1e-3, trainer.config)
    seen = []
    trainer.learner.optimizer.step = lambda: seen.extend(m.grad.double().flatten() for m in trainer.learner.masters)
    metrics = trainer.update(replace(rollouts, advantages=shrink * rollouts.advantages))
    return torch.cat(seen), metrics["grad_norm"]


def test_float16_sees_small_gradients_and_their_true_norm():
    """The reference is the same model in float32. Without the scale the gradients of the head are all but gone."""
    settings = {"max_grad_norm": 1e-7, "num_iterations": 1}
    expected, norm = gradients_of_a_step(torch.float32, 1e-5, **settings)
    found, found_norm = gradients_of_a_step(torch.float16, 1e-5, **settings, **FLOAT16)
    assert found_norm == pytest.approx(norm, rel=0.01) and norm > 1e-6
    assert float((found - expected).norm() / expected.norm()) < 0.02
    assert float(found.norm()) == pytest.approx(float(expected.norm()), rel=0.01)
    assert expected.norm() < norm / 10  # both are cut


def test_a_loss_scale_that_is_too_high_is_halved_until_steps_are_taken():
    trainer = make_trainer(replace(SMALL, **FLOAT16), dtype=torch.float16)
    rollouts, before = rollouts_of(trainer), parameters(trainer)
    trainer.learner.scale = 2.0**30
    for halvings in range(1, 40):
        metrics = trainer.update(rollouts)
        if not metrics["skipped_updates"]:
            break
        assert torch.equal(parameters(trainer), before) and trainer.learner.skipped_in_a_row == 0
        assert trainer.learner.scale == 2.0 ** (30 - halvings)
    assert 4 < halvings < 30 and not torch.equal(parameters(trainer), before)
    trainer.learner.scale = 1.0
    for _ in range(2):
        trainer.update(spoiled(rollouts))
    assert trainer.learner.scale == 1.0 and trainer.learner.skipped_in_a_row == 2


def test_the_loss_scale_grows_after_good_steps(monkeypatch):
    monkeypatch.setattr(trainer_module, "GOOD_STEPS", 3)
    layer = layer_of(torch.ones(1, 1), torch.float16)
    learner = Learner(layer, 1e-3, replace(SMALL, **FLOAT16))
    scales = []
    for gradient in (1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0):
        push(layer, learner, torch.tensor([[[gradient]]]))
        scales.append(learner.scale / 2.0**16)
    assert scales == [1, 1, 0.5, 0.5, 0.5, 1, 1]


def test_float32_knows_no_scale():
    trainer = make_trainer()
    trainer.step()
    assert trainer.learner.scale == 1.0 and trainer.learner.masters is trainer.learner.weights


# --- mini-batches, and when to leave a batch --------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_mini_batches_are_steps_on_parts_of_the_batch(loss_type):
    """Against single steps on the parts by hand, with old log-probs from before all of them."""
    config = replace(SMALL, loss_type=loss_type, num_iterations=2)
    trainer, other = (make_trainer(config, dtype=torch.float64) for _ in range(2))
    trainer.config = replace(config, num_mini_batches=4)
    examples, _, rollouts = trainer.gather(trainer_module.Stopwatch())
    metrics = trainer.update(trainer.prepare(rollouts, examples, trainer_module.Stopwatch()))

    other.config = replace(config, num_iterations=1)
    budget = trainer_module.token_budget(rollouts, config)
    old, _ = trainer_module.score(other.model, rollouts, 1.0, budget)
    prepared = replace(trainer_module.completion_advantages(rollouts, config), old_logprobs=old)
    steps = []
    for _ in range(2):
        for start in range(0, 32, 8):
            steps.append(other.update(prepared.select(torch.arange(start, start + 8))))
    assert torch.allclose(parameters(trainer), parameters(other), rtol=0, atol=1e-12)
    assert metrics["updates"] == 8 and metrics["ratio_error"] == steps[0]["ratio_error"] < 1e-9
    assert steps[1]["ratio_error"] > 1e-4
    assert metrics["kl_old"] == pytest.approx(sum(step["kl_old"] for step in steps[-4:]) / 4)
    assert metrics["trained_entropy"] == pytest.approx(sum(step["trained_entropy"] for step in steps[:4]) / 4)


def test_the_old_logprobs_of_mini_batches_are_known_before_the_first():
    assert needs_old_logprobs(replace(SMALL, num_mini_batches=2)) and not needs_old_logprobs(SMALL)
    trainer = make_trainer(replace(SMALL, num_mini_batches=2))
    seen, learn = [], trainer.learn

    def spy(pieces, target_kl=None):
        seen.append(all(piece.old_logprobs is not None for piece, _ in pieces))
        return learn(pieces, target_kl)

    trainer.learn = spy
    trainer.step()
    assert seen == [True, True]


def test_a_critic_learns_from_every_mini_batch():
    trainer = make_trainer(replace(SMALL, **GAE, num_mini_batches=4, num_iterations=2))
    metrics = trainer.step()
    steps = {int(state["step"]) for state in trainer.critic_learner.optimizer.state.values()}
    assert steps == {8} and metrics["updates"] == 8 and metrics["critic_grad_norm"] > 0


def test_target_kl_leaves_the_batch_before_the_step_that_is_too_far():
    config = replace(SMALL, learning_rate=1e-2, num_iterations=6)
    passes = []
    for count in range(1, 7):  # what the policy is like before the last of so many steps, and after it
        trainer = make_trainer(config)
        trainer.config = replace(config, num_iterations=count)
        passes.append((trainer.update(rollouts_of(trainer))["kl_old"], parameters(trainer)))
    kl = [before for before, _ in passes]
    assert kl == sorted(kl) and kl[0] == 0.0 and kl[3] > kl[2] > 0
    trainer = make_trainer(config)
    trainer.config = replace(config, target_kl=(kl[2] + kl[3]) / 2)
    metrics = trainer.update(rollouts_of(trainer))
    assert metrics["updates"] == 3 and metrics["kl_old"] == kl[2]
    assert torch.equal(parameters(trainer), passes[2][1])
    trainer = make_trainer(config)
    trainer.config = replace(config, target_kl=1e9)
    assert trainer.update(rollouts_of(trainer))["updates"] == 6
    assert torch.equal(parameters(trainer), passes[5][1])


def test_the_first_step_is_always_taken():
    trainer = make_trainer(replace(SMALL, num_mini_batches=2, num_iterations=3, target_kl=1e-30))
    start = parameters(trainer)
    assert trainer.step()["updates"] == 1 and not torch.equal(parameters(trainer), start)


# --- whitening and schedules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_whitened_advantages_have_mean_0_and_deviation_1_over_the_tokens_of_the_loss(masked):
    config = replace(SMALL, **GAE, whiten_advantages=True, mask_truncated_completions=masked)
    trainer = make_trainer(config, dtype=torch.float64)
    rollouts = rollouts_of(make_trainer(dtype=torch.float64))
    graded = torch.arange(len(rollouts)) % 5 != 0
    rollouts = replace(rollouts, graded=graded, rewards=torch.where(graded, rollouts.rewards, math.nan).double())
    values = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(0)).double()
    values, bootstrap = torch.where(rollouts.mask, values, 0.0), torch.where(rollouts.truncated, 0.3, 0.0).double()
    plain = token_advantages(rollouts, replace(config, whiten_advantages=False), values, bootstrap)
    found = token_advantages(rollouts, config, values, bootstrap)
    mask = loss_mask(rollouts, masked)
    chosen = plain.advantages[mask]
    expected = (chosen - chosen.mean()) / chosen.std(correction=0)
    assert torch.allclose(found.advantages[mask], expected) and expected.std() > 0.9
    assert torch.equal(found.returns, plain.returns)  # the critic's target keeps its unit
    trainer.step()


def test_schedules_are_those_of_transformers():
    optimizer = torch.optim.SGD([torch.zeros(1)])
    for name in ("linear", "cosine", "constant"):
        config = TrainConfig(max_steps=10, warmup_steps=0, lr_scheduler_type=name)
        theirs = transformers.get_scheduler(name, optimizer, num_warmup_steps=0, num_training_steps=10).lr_lambdas[0]
        assert [learning_rate_factor(s, config) for s in range(10)] == pytest.approx([theirs(s) for s in range(10)])
    config = TrainConfig(max_steps=10, warmup_steps=4, lr_scheduler_type="cosine")
    assert [learning_rate_factor(s, config) for s in (0, 3, 5, 10)] == pytest.approx(
        [0.25, (1 + math.cos(0.3 * math.pi)) / 2, 0.5, 0.0]
    )


def test_the_rate_of_a_step_follows_from_the_number_of_steps_alone():
    config = replace(SMALL, **GAE, critic_learning_rate=5e-3, lr_scheduler_type="cosine", warmup_steps=2)
    trainer = make_trainer(config)
    trainer.steps_done = 4
    rate, critic_rate = (learning_rate_factor(4, config) * peak for peak in (1e-3, 5e-3))
    assert trainer.step()["learning_rate"] == rate
    assert trainer.learner.optimizer.param_groups[0]["lr"] == rate
    assert trainer.critic_learner.optimizer.param_groups[0]["lr"] == critic_rate


# --- a reference that follows, and gradient checkpointing -------------------------------------------------------------


def weights_of(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_reference_follows_the_policy_by_its_share(alpha):
    settings = {"sync_ref_model": True, "ref_model_mixup_alpha": alpha, "ref_model_sync_steps": 2}
    trainer = make_trainer(replace(SMALL, beta=0.05, **settings), dtype=torch.float64)
    expected, kl = weights_of(trainer.reference), []
    for step in range(1, 6):
        kl.append(trainer.step()["kl_ref"])
        if step % 2 == 0:
            expected = alpha * parameters(trainer) + (1 - alpha) * expected
        assert torch.allclose(weights_of(trainer.reference), expected, rtol=0, atol=1e-12)
    assert kl[1] > 1e-7 and (kl[2] < 1e-12) == (alpha == 1.0)


def test_a_run_goes_on_with_the_reference_that_it_had(tmp_path):
    config = replace(SMALL, beta=0.05, sync_ref_model=True, ref_model_sync_steps=1)
    whole, stopped, resumed = (make_trainer(config) for _ in range(3))
    expected = [untimed(whole.step()) for _ in range(3)]
    for _ in range(2):
        stopped.step()
    restore(resumed, write_checkpoint(stopped, tmp_path))
    assert torch.equal(weights_of(resumed.reference), weights_of(stopped.reference))
    assert untimed(resumed.step()) == expected[2]


def bytes_kept(trainer, rollouts):
    kept = []

    def pack(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.update(rollouts)
    return sum(kept)


@pytest.mark.parametrize("settings", [{}, GAE])
def test_gradient_checkpointing_keeps_less_and_changes_nothing(settings):
    runs, kept = [], []
    for gradient_checkpointing in (False, True):
        trainer = make_trainer(
            replace(SMALL, gradient_checkpointing=gradient_checkpointing, num_iterations=2, **settings)
        )
        runs.append(([untimed(trainer.step()) for _ in range(2)], parameters(trainer)))
        assert not any(module.training for module in trainer.model.modules())
        if not settings:
            kept.append(bytes_kept(trainer, rollouts_of(trainer)))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert not kept or kept[1] < kept[0] / 2


# --- settings that exclude each other ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_skipped_updates": 0}, "max_skipped_updates is 0"),
        ({"num_mini_batches": 0}, "num_mini_batches is 0"),
        ({"num_mini_batches": 3}, "a step has 512 completions, which num_mini_batches 3 does not divide"),
        ({"target_kl": 0.0}, "target_kl is 0.0"),
        ({"target_kl": 0.1, "num_iterations": 1}, "target_kl is 0.1, but a batch is used for one optimiser step"),
        (
            {"whiten_advantages": True},
            'whiten_advantages is for .*"group" has one per completion.*scale_rewards "batch"',
        ),
        (
            {"whiten_advantages": True, "advantage_estimator": "gae", "scale_rewards": "batch"},
            "whiten_advantages divides by a standard deviation already",
        ),
        ({"master_weights": True}, "master_weights is for bfloat16 and float16"),
        ({"dtype": "float16"}, "dtype float16 needs master_weights: .* epsilon"),
        ({"sync_ref_model": True}, "with beta 0 there is none"),
        ({"sync_ref_model": True, "beta": 0.1, "ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha is 0.0"),
        ({"sync_ref_model": True, "beta": 0.1, "use_peft": True}, "sync_ref_model mixes weights"),
        ({"lr_scheduler_type": "polynomial"}, "choose one of linear, cosine, constant"),
    ],
)
def test_settings_of_the_update_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        check_config(TrainConfig(**settings))


def test_adamw_in_float16_divides_by_zero():
    """The reason that is given for master weights: 1e-8 is 0 in float16, so a gradient of 0 gives 0 / 0."""
    layer = layer_of(torch.ones(1, 1), torch.float16)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.weight.grad = torch.zeros(1, 1, dtype=torch.float16)
    optimizer.step()
    assert layer.weight.isnan().all()


# --- a critic on the policy's trunk -----------------------------------------------------------------------------------

SHARED = {**GAE, "share_critic_trunk": True}


def fixed_rollouts(trainer):
    """Graded completions that do not depend on the trainer's number format, and their examples."""
    chosen = trainer.task.train[:8]
    rollouts = trainer_module.collect(make_trainer().sampler, trainer.tokenizer, chosen, 4, seed=0)
    return trainer_module.grade(rollouts, trainer.tokenizer, chosen, trainer.task.reward), chosen


def test_one_optimiser_has_the_policy_and_the_head_once():
    trainer = make_trainer(replace(SMALL, **SHARED))
    weights = {id(w) for w in (*trainer.model.parameters(), *trainer.critic.parameters())}
    stepped = [id(w) for group in trainer.learner.optimizer.param_groups for w in group["params"]]
    assert set(stepped) == weights and len(stepped) == len(weights) and trainer.critic_learner is None
    head = trainer.critic.head.weight.clone()
    trainer.step()
    trainer.step()
    assert not torch.equal(trainer.critic.head.weight, head)
    assert trainer.critic.trunk is trainer.model.model


def test_policy_and_critic_both_learn_on_one_trunk():
    config = replace(
        SMALL, max_steps=60, per_device_train_batch_size=64, num_iterations=2, learning_rate=3e-3, **SHARED
    )
    trainer = make_trainer(config)
    records = [trainer.step() for _ in range(40)]
    rewards = [record["reward"] for record in records]
    assert rewards[0] < 0.6 and sum(rewards[-5:]) / 5 > 1.5
    assert all(record["ratio_error"] == 0.0 and record["skipped_updates"] == 0 for record in records)
    variance = sum(record["reward_std"] ** 2 for record in records[-10:]) / 10
    assert sum(record["value_loss"] for record in records[-10:]) / 10 < 0.5 * variance


@pytest.mark.parametrize("settings", [{"gradient_checkpointing": True}, {**HALF, "dtype": "float16"}, HALF])
def test_the_step_on_one_trunk_in_its_other_forms(settings):
    """With checkpointing the same step; in half precision one in about the same direction, also for the head."""
    moved = []
    for others in ({}, settings):
        config = replace(SMALL, vf_coef=1.0, **SHARED, **others)
        trainer = make_trainer(config, dtype=getattr(torch, config.dtype))
        weights = [*trainer.model.parameters(), *trainer.critic.head.parameters()]
        torch.nn.init.normal_(trainer.critic.head.weight, generator=torch.Generator().manual_seed(0))
        rollouts = trainer.prepare(*fixed_rollouts(trainer), trainer_module.Stopwatch())
        while not trainer.learner.optimizer.state:  # float16's first loss scales may be too high
            trainer.update(rollouts)
        first = [moments["exp_avg"].flatten() for moments in trainer.learner.optimizer.state.values()]
        assert len(first) == len(weights)
        moved.append((torch.cat(first), torch.cat(first[-2:])))
    for one, other in zip(*moved, strict=True):
        if "dtype" not in settings:
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-8)
        assert torch.cosine_similarity(one, other, dim=0) > 0.99 and one.norm() > 0


def test_a_bad_gradient_of_the_values_skips_the_one_step():
    trainer = make_trainer(replace(SMALL, **SHARED))
    examples, _, rollouts = trainer.gather(trainer_module.Stopwatch())
    rollouts = trainer.prepare(rollouts, examples, trainer_module.Stopwatch())
    before = [w.clone() for w in (*trainer.model.parameters(), *trainer.critic.head.parameters())]
    metrics = trainer.update(replace(rollouts, returns=torch.where(rollouts.mask, math.inf, 0.0)))
    assert metrics["skipped_updates"] == 1 and not math.isfinite(metrics["grad_norm"])
    assert same([*trainer.model.parameters(), *trainer.critic.head.parameters()], before)


def test_the_head_is_in_no_saved_model_and_no_engine(tmp_path):
    trainer, plain = make_trainer(replace(SMALL, **SHARED)), make_trainer()
    trainer.step()
    checkpoint = write_checkpoint(trainer, tmp_path)
    assert load_file(checkpoint / "model.safetensors").keys() == plain.model.state_dict().keys()
    assert policy_weights(trainer.model).keys() == policy_weights(plain.model).keys()
    kept = load_file(checkpoint / "trainer" / "state.safetensors")
    assert {name for name in kept if name.startswith("critic")} == {"critic.weight", "critic.bias"}


@pytest.mark.parametrize("share_critic_trunk", [False, True])
def test_a_critic_on_another_trunk_than_the_setting_says_is_refused(share_critic_trunk):
    trainer = make_trainer(replace(SMALL, **GAE))
    critic = load_critic(trainer.model, shared=not share_critic_trunk)
    config = replace(trainer.config, share_critic_trunk=share_critic_trunk)
    parts = trainer.model, trainer.tokenizer, trainer.task, trainer.sampler
    with pytest.raises(
        ValueError, match=r"pass load_critic\(model" if share_critic_trunk else "set share_critic_trunk"
    ):
        trainer_module.Trainer(config, *parts, critic=critic)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share_critic_trunk": True}, 'share_critic_trunk .* "group" has none; .* set advantage_estimator to "gae"'),
        ({**SHARED, "critic_learning_rate": 1e-4}, "critic_learning_rate is 0.0001, but .* vf_coef"),
    ],
)
def test_settings_that_do_not_go_with_a_shared_trunk(settings, message):
    with pytest.raises(ValueError, match=message):
        check_config(TrainConfig(**settings))


# --- compiled layers ----------------------------------------------------------------------------------------------------

SEVERAL = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}  # micro-batches of many shapes


@pytest.fixture
def traced(monkeypatch):
    """Layers are traced as for the compiler, forward and backward, and run without one; counts the graphs."""
    made = trainer_module.compiled_forwards
    monkeypatch.setattr(trainer_module, "compiled_forwards", partial(made, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "settings", [{"beta": 0.05, "num_iterations": 2}, {**SHARED, "gradient_checkpointing": True}], ids=["grpo", "ppo"]
)
def test_steps_with_compiled_layers_are_the_steps_without(settings, traced):
    config = replace(SMALL, **SEVERAL, **settings)
    plain, fast = make_trainer(config), make_trainer(replace(config, torch_compile=True))
    shapes = set()
    for _ in range(3):
        expected, metrics = untimed(plain.step()), untimed(fast.step())
        assert metrics == pytest.approx(expected, abs=1e-5)
        assert torch.allclose(parameters(fast), parameters(plain), rtol=0, atol=1e-5)
        shapes.add(metrics["padding"])
    assert len(shapes) == 3 and traced() <= 3  # scoring, learning, and the line that is tried first
    if settings.get("beta"):
        assert metrics["ratio_error"] == 0.0 and metrics["kl_ref"] > 0


def test_the_sampler_and_the_checkpoint_know_nothing_of_it(traced, tmp_path):
    config = replace(SMALL, torch_compile=True)
    plain, fast = make_trainer(), make_trainer(config)
    outside, layers = [], fast.model.model
    generate = fast.sampler.generate
    object.__setattr__(
        fast.sampler, "generate", lambda *args: outside.append("forward" in vars(layers)) or generate(*args)
    )
    fast.step()
    assert outside == [False] and "forward" not in vars(layers) and fast.forwards.keys() == {layers}
    checkpoint = write_checkpoint(fast, tmp_path)
    assert load_file(checkpoint / "model.safetensors").keys() == plain.model.state_dict().keys()
    restore(plain, checkpoint)  # and goes on without it
    assert torch.equal(parameters(plain), parameters(fast))


def test_a_failure_leaves_the_layers_as_they_were(traced):
    trainer = make_trainer(replace(SMALL, torch_compile=True))
    with pytest.raises(RuntimeError, match="out of memory"), trainer_module.compiled(trainer.forwards):
        assert "forward" in vars(trainer.model.model)
        raise RuntimeError("out of memory")
    assert "forward" not in vars(trainer.model.model)


def test_without_a_compiler_one_line_says_so_before_the_run(tmp_path):
    """A C++ compiler that is not there, and no cache of what one made earlier."""
    place = {"CXX": "/no/such/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = ["train", "--torch-compile", "--device", "cpu", "--output-dir", str(tmp_path / "runs")]
    code = f"import sys; from lmrl.cli import main; sys.exit(main({command}))"
    here = {
        name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"
    }  # a test with vLLM sets it
    done = subprocess.run([sys.executable, "-c", code], env=here | place, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "runs").exists()
    line = done.stderr.splitlines()[-1]
    assert line.startswith("lmrl: torch_compile cannot compile for cpu here (") and "/no/such/g++" in line
    assert line.endswith("or leave torch_compile out")


def test_beside_an_engine_on_a_cpu_nothing_would_be_compiled_and_the_two_are_refused(monkeypatch, capsys, tmp_path):
    def loaded(config):
        raise AssertionError("the run went on to load its problems")

    monkeypatch.setattr(cli, "load_problems", loaded)
    options = ["--use-vllm", "--torch-compile", "--device", "cpu", "--output-dir", str(tmp_path / "runs")]
    for command in ("train", "check"):
        assert cli.main([command, *options]) == 2 and not (tmp_path / "runs").exists()
        assert capsys.readouterr().err.startswith("lmrl: torch_compile and use_vllm exclude each other on a CPU")
    monkeypatch.setattr(cli, "find_device", lambda name: "cuda")
    cli.require_compiling(TrainConfig(use_vllm=True, torch_compile=True))
