"""lmrl.trainer: each setting of section 14 does in a run what its formula says."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_trainer import SMALL, always_tied, count_sevens, make_trainer, parameters, untimed

import lmrl.trainer as trainer_module
from lmrl.batch import rollouts_from_samples
from lmrl.cli import read_settings
from lmrl.config import TrainConfig, check_config
from lmrl.figures.trainer import learning_curve
from lmrl.metrics import Stopwatch
from lmrl.mismatch import CORRECTION_MODES
from lmrl.policy import Samples, build_policy, completion_logits, is_number, pad_left
from lmrl.recipes import RECIPES
from lmrl.trainer import Trainer, collect, grade, run, sampled_values
from lmrl.trust_region import kl_exact
from lmrl.values import monte_carlo_outcomes

CONFIGS = Path(__file__).parents[1] / "configs"
GAE = {"advantage_estimator": "gae", "scale_rewards": "none"}
ONCE_NONE = {"clip_type": "none", "scale_rewards": "none"}
IN_REWARD = {"beta": 0.3, "kl_estimator": "k1", "kl_in": "reward"}


def exact_trainer(**settings):
    """A trainer in float64 that does not clip its gradient, with another reference and a critic that says something."""
    trainer = make_trainer(replace(SMALL, max_grad_norm=1e9, **settings), dtype=torch.float64)
    trainer.reference = build_policy(trainer.tokenizer, seed=5).double().requires_grad_(False)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(5)
        if trainer.critic is not None:
            trainer.critic.double().head.weight.add_(
                0.5 * torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).double()
            )
    return trainer


def prepared(trainer, seed=0):
    chosen = trainer.task.train[:8]
    rollouts = collect(trainer.sampler, trainer.tokenizer, chosen, trainer.config.num_generations, seed)
    rollouts = grade(rollouts, trainer.tokenizer, chosen, trainer.task.reward)
    return trainer.prepare(rollouts, chosen, Stopwatch())


def all_parameters(trainer):
    """Those of the policy and of the critic, if there is one."""
    critic = [] if trainer.critic is None else [p.detach().flatten() for p in trainer.critic.parameters()]
    return torch.cat([parameters(trainer), *critic])


def gradient(module):
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in module.parameters()]
    )


def assert_left_gradient(module, loss, twin):
    """What the update left in ``module`` is the gradient of ``loss``, written out for its copy ``twin``."""
    gradients = torch.autograd.grad(loss, list(twin.parameters()), retain_graph=True)
    expected = torch.cat([g.flatten() for g in gradients])
    assert expected.norm() > 1e-6 and (gradient(module) - expected).norm() < 1e-5 * expected.norm()


def row_logits(model, rollouts, row):
    """Logits of the distributions of a row's tokens, by a pass of its own without padding, and the tokens."""
    prompt, ids = rollouts.prompt_ids[row][rollouts.prompt_mask[row]], rollouts.completion_ids[row][rollouts.mask[row]]
    return model(input_ids=torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1], ids


def row_logprobs(model, rollouts, row):
    logits, ids = row_logits(model, rollouts, row)
    return logits.log_softmax(-1)[range(len(ids)), ids]


# --- the recipes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_takes_two_steps(name):
    config = read_settings(CONFIGS / f"{name}.yaml", TrainConfig)
    small = {"per_device_train_batch_size": 32, "max_completion_length": 5, "warmup_steps": 0, "max_steps": 10}
    trainer = make_trainer(replace(config, **small))
    before = parameters(trainer)
    for _ in range(2):
        metrics = trainer.step()
        assert all(math.isfinite(value) for value in metrics.values())
        aliased = config.beta_in("reward") == 0
        assert metrics["ratio_error"] == 0.0 if aliased else metrics["ratio_error"] < 1e-5
        assert metrics["clip_fraction"] >= 0.0 and metrics["sampler_gap"] < 1e-4
        before, moved = parameters(trainer), not torch.equal(parameters(trainer), before)
        assert moved


@pytest.mark.parametrize("estimator", ["none", "leave_one_out", "batch"])
def test_without_clip_and_ratio_a_step_is_reinforce(estimator):
    """-1/(B L) Σᵢ (Rᵢ - bᵢ) Σₜ log π, with no baseline, the mean of the others, or the mean of all."""
    once = {"clip_type": "none", "loss_type": "dr_grpo", "scale_rewards": "none"}
    trainer = exact_trainer(advantage_estimator=estimator, **once)
    rollouts, model = prepared(trainer), copy.deepcopy(trainer.model)
    trainer.update(rollouts)
    loss = 0.0
    for row, reward in enumerate(rollouts.rewards.tolist()):
        others = [
            r for i, r in enumerate(rollouts.rewards.tolist()) if rollouts.group[i] == rollouts.group[row] and i != row
        ]
        baseline = {
            "none": 0.0,
            "leave_one_out": sum(others) / len(others),
            "batch": float(rollouts.rewards.double().mean()),
        }[estimator]
        loss = loss - (reward - baseline) * row_logprobs(model, rollouts, row).sum()
    loss = loss / (len(rollouts) * trainer.config.max_completion_length)
    assert_left_gradient(trainer.model, loss, model)


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_batch_advantages_are_divided_by_the_batch(scale):
    trainer = exact_trainer(advantage_estimator="batch", scale_rewards=scale)
    rollouts = prepared(trainer)
    centred = rollouts.rewards - rollouts.rewards.mean()
    expected = centred / (rollouts.rewards.std(correction=0) if scale == "batch" else 1.0)
    assert torch.allclose(rollouts.advantages[:, 0], expected, atol=1e-6)


def test_the_kl_in_the_reward_is_taken_from_the_whole_completion_before_the_baseline():
    trainer = exact_trainer(**IN_REWARD, scale_rewards="none")
    rollouts = prepared(trainer)
    rewards = torch.stack(
        [
            rollouts.rewards[row]
            - 0.3 * (row_logprobs(trainer.model, rollouts, row) - row_logprobs(trainer.reference, rollouts, row)).sum()
            for row in range(len(rollouts))
        ]
    ).detach()
    expected = (rewards.view(-1, 4) - rewards.view(-1, 4).mean(1, keepdim=True)).flatten()
    assert torch.allclose(rollouts.advantages[:, 0], expected, atol=1e-5)
    assert not torch.allclose(rewards, rollouts.rewards.double(), atol=0.1)
    metrics = trainer.update(rollouts)
    assert metrics["ratio_error"] < 1e-9 and metrics["kl_ref"] > 0


@pytest.mark.parametrize("settings", [{}, IN_REWARD, {"overlong_buffer": 2}, {"scale_rewards": "batch"}])
def test_ppo_is_gae_and_the_value_loss_written_out(settings):
    """Rows that stop and rows that are cut, γ and λ below 1, advantages and the gradients of policy and critic."""
    config = {**GAE, "gamma": 0.9, "lam": 0.8, "vf_coef": 0.7, "cliprange_value": 0.01, **settings}
    trainer = exact_trainer(**config)
    rollouts, model, critic = prepared(trainer), copy.deepcopy(trainer.model), copy.deepcopy(trainer.critic)
    assert rollouts.truncated.any() and not rollouts.truncated.all()
    beta, buffer = trainer.config.beta, trainer.config.overlong_buffer
    policy_loss = critic_loss = 0.0
    for row, length in enumerate(rollouts.mask.sum(1).tolist()):
        prompt, ids = rollouts.prompt_ids[row][rollouts.prompt_mask[row]], rollouts.completion_ids[row, :length]
        states = critic(prompt[None], torch.ones(1, len(prompt)).bool(), ids[None])[0]
        old = states.detach()
        kl = (
            row_logprobs(model, rollouts, row) - row_logprobs(trainer.reference, rollouts, row)
            if beta
            else torch.zeros(length)
        )
        rewards = [-beta * x for x in kl.tolist()]
        if buffer:
            rewards[-1] += min(0.0, (5 - buffer - length) / buffer)
        if rollouts.truncated[row]:
            after = float(old[length])
        else:
            after, rewards[-1] = 0.0, rewards[-1] + float(rollouts.rewards[row])
        advantage, following = 0.0, after
        for t in reversed(range(length)):
            advantage = rewards[t] + 0.9 * following - float(old[t]) + 0.9 * 0.8 * advantage
            following = float(old[t])
            scale = float(rollouts.rewards.std(correction=0)) if trainer.config.scale_rewards == "batch" else 1.0
            assert float(rollouts.advantages[row, t]) == pytest.approx(advantage / scale, abs=1e-5)
            policy_loss = policy_loss - advantage / scale * row_logprobs(model, rollouts, row)[t]
            target, v = advantage + old[t], states[t]
            held = old[t] + (v - old[t]).clamp(-0.01, 0.01)
            critic_loss = critic_loss + 0.7 * 0.5 * torch.maximum((v - target) ** 2, (held - target) ** 2)
    tokens = int(rollouts.mask.sum())
    metrics = trainer.update(rollouts)
    assert metrics["value_loss"] == pytest.approx(critic_loss.item() / 0.7 / tokens, rel=1e-5)
    for module, twin, loss in ((trainer.model, model, policy_loss), (trainer.critic, critic, critic_loss)):
        assert_left_gradient(module, loss / tokens, twin)


@pytest.mark.parametrize("rows", [32, 8])  # at once: the whole step, or in micro-batches
@pytest.mark.parametrize("vf_coef", [0.1, 3.0])
def test_on_a_shared_trunk_the_step_is_the_gradient_of_the_sum(vf_coef, rows):
    """L_π + c_V L_V over policy and head, written out row by row; the values are clipped, as those of a critic apart."""
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 32 // rows, "num_mini_batches": 1}
    trainer = exact_trainer(**GAE, share_critic_trunk=True, vf_coef=vf_coef, cliprange_value=0.01, **sizes)
    rollouts = prepared(trainer)
    # as after earlier steps: predictions that have left their old values, some by more than the clip range
    noise = 0.02 * torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(1))
    rollouts = replace(rollouts, values=rollouts.values + noise)
    twin = copy.deepcopy(torch.nn.ModuleList([trainer.model, trainer.critic]))
    model, critic = twin
    assert critic.trunk is model.model
    loss, clipped = 0.0, 0
    for row, length in enumerate(rollouts.mask.sum(1).tolist()):
        prompt, ids = rollouts.prompt_ids[row][rollouts.prompt_mask[row]], rollouts.completion_ids[row, :length]
        v = critic(prompt[None], torch.ones(1, len(prompt)).bool(), ids[None])[0, :length]
        old, target = rollouts.values[row, :length], rollouts.returns[row, :length]
        held = old + (v - old).clamp(-0.01, 0.01)
        clipped += int(((v - old).abs() > 0.01).sum())
        value_loss = 0.5 * torch.maximum((v - target) ** 2, (held - target) ** 2).sum()
        loss = loss - rollouts.advantages[row, :length] @ row_logprobs(model, rollouts, row) + vf_coef * value_loss
    tokens = int(rollouts.mask.sum())
    metrics = trainer.update(rollouts)
    assert_left_gradient(torch.nn.ModuleList([trainer.model, trainer.critic]), loss / tokens, twin)
    assert metrics["value_clip_fraction"] == pytest.approx(clipped / tokens) and 0.2 < clipped / tokens < 0.8
    assert "critic_grad_norm" not in metrics


def test_a_critic_learns_from_every_token_and_clips_its_second_pass():
    trainer = exact_trainer(**GAE, num_iterations=4, critic_learning_rate=0.05, cliprange_value=0.01)
    metrics = trainer.update(replace(prepared(trainer), advantages=torch.zeros(32, 5)))
    assert metrics["value_clip_fraction"] > 0.5 and metrics["grad_norm"] == 0.0
    assert trainer.step()["value_loss"] < metrics["value_loss"]


def test_gspo_is_the_formula_written_out():
    """-1/B Σᵢ min(s A, clip(s) A), s = exp(mean of the log-ratios), with old log-probs of another policy."""
    config = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.2}
    trainer = exact_trainer(**config)
    rollouts, model = prepared(trainer), copy.deepcopy(trainer.model)
    noise = 0.5 * torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(0)).double()
    logprobs = [row_logprobs(model, rollouts, row) for row in range(len(rollouts))]
    old = torch.zeros_like(noise).masked_scatter(rollouts.mask, torch.cat(logprobs).detach()) + noise
    loss, held = 0.0, 0.0
    for row, new in enumerate(logprobs):
        advantage, length = rollouts.advantages[row, 0], len(new)
        ratio = ((new - old[row, :length]).sum() / length).exp()
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.2) * advantage) / len(rollouts)
        held += length * float((ratio > 1.2) & (advantage > 0) | (ratio < 0.9) & (advantage < 0))
    metrics = trainer.update(replace(rollouts, old_logprobs=old))
    assert_left_gradient(trainer.model, loss, model)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    trained = (rollouts.advantages[:, 0] != 0) & (rollouts.mask.sum(1) > 0)
    assert 0 < metrics["clip_fraction"] == pytest.approx(held / int(rollouts.mask[trained].sum()))


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k2", "k3", "exact"])
def test_a_kl_in_the_loss_has_its_own_gradient(level, estimator):
    """With all rewards equal, the step is the gradient of β times the mean KL alone."""
    trainer = exact_trainer(beta=0.5, kl_estimator=estimator, importance_sampling_level=level)
    trainer.task = replace(trainer.task, reward=always_tied)
    rollouts, model = prepared(trainer), copy.deepcopy(trainer.model)
    metrics = trainer.update(rollouts)
    penalty = 0.0
    for row in range(len(rollouts)):
        logits, reference = (row_logits(m, rollouts, row)[0] for m in (model, trainer.reference))
        d = row_logprobs(model, rollouts, row) - row_logprobs(trainer.reference, rollouts, row)
        kl = {"k2": d**2 / 2, "k3": (-d).exp() - 1 + d, "exact": kl_exact(logits, reference)}[estimator]
        penalty = penalty + kl.sum() / rollouts.mask.sum()
    assert_left_gradient(trainer.model, 0.5 * penalty, model)
    assert metrics["kl_ref"] > 0
    if estimator != "k2":  # logged as k3, or exactly
        assert metrics["kl_ref"] == pytest.approx(penalty.item(), rel=1e-5)


def test_the_entropy_bonus_has_the_gradient_of_the_entropy():
    trainer = exact_trainer(entropy_coef=0.3)
    trainer.task = replace(trainer.task, reward=always_tied)
    rollouts, model = prepared(trainer), copy.deepcopy(trainer.model)
    metrics = trainer.update(rollouts)
    texts = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids
    logits = completion_logits(model, *texts)[rollouts.mask]
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert_left_gradient(trainer.model, -0.3 * entropy, model)
    assert metrics["loss"] == pytest.approx(-0.3 * metrics["trained_entropy"], rel=1e-5)


def test_only_tokens_of_high_entropy_keep_their_advantage():
    trainer = exact_trainer(top_entropy_quantile=0.3)
    rollouts = prepared(trainer)
    whole = prepared(exact_trainer())
    texts = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids
    entropy = torch.distributions.Categorical(logits=completion_logits(trainer.model, *texts)).entropy()
    kept = entropy[rollouts.mask] >= entropy[rollouts.mask].quantile(0.7)
    assert torch.equal(rollouts.advantages[rollouts.mask][kept], whole.advantages[whole.mask][kept])
    assert not rollouts.advantages[rollouts.mask][~kept].any()
    assert trainer.update(rollouts)["ratio_error"] < 1e-9


def test_soft_overlong_punishment_is_added_to_the_reward():
    trainer = exact_trainer(overlong_buffer=4, scale_rewards="none")
    trainer.task = replace(trainer.task, reward=always_tied)
    rollouts = prepared(trainer)
    punished = 1.0 - (rollouts.mask.sum(1) - 1) / 4  # nothing at one token, 1 at five
    expected = (punished.view(-1, 4) - punished.view(-1, 4).mean(1, keepdim=True)).flatten()
    assert torch.allclose(rollouts.advantages[:, 0], expected, atol=1e-6) and expected.any()
    assert (rollouts.rewards == 1.0).all()


# --- the sampler is not the trainer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", CORRECTION_MODES)
def test_the_correction_weighs_the_advantages(mode):
    """With a sampler that cuts off the tail of the distribution: its log-probs are greater than the policy's."""
    settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 0.9}
    trainer = exact_trainer(
        vllm_importance_sampling_correction=True, top_p=0.8, advantage_estimator="none", **ONCE_NONE
    )
    trainer.config = replace(trainer.config, **settings)
    trainer.sampler = replace(trainer.sampler, top_p=0.8)
    rollouts = prepared(trainer)
    for row, length in enumerate(rollouts.mask.sum(1).tolist()):
        gap = row_logprobs(trainer.model, rollouts, row) - rollouts.sampler_logprobs[row, :length]
        ratio = (gap.sum().expand(length) if mode.startswith("sequence") else gap).exp().detach()
        bounded = ratio.clamp(max=0.9) if mode.endswith("truncate") else ratio * (ratio <= 0.9)
        expected = rollouts.rewards[row] * bounded
        assert torch.allclose(rollouts.advantages[row, :length], expected, rtol=0, atol=1e-5)
    assert rollouts.advantages.any()
    with pytest.warns(UserWarning, match="times the sampler's probability"):
        metrics = trainer.update(rollouts)
    assert metrics["mismatch/ratio_geometric"] < 0.9 and metrics["ratio_error"] < 1e-9


def test_mismatch_is_logged_every_step_and_small_without_an_engine():
    trainer = make_trainer(replace(SMALL, num_iterations=2))
    for _ in range(2):
        metrics = trainer.step()
        assert metrics["mismatch/ratio_geometric"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["mismatch/ess"] == pytest.approx(1.0, abs=1e-4)
        assert (
            0 < metrics["mismatch/delta_mean"] <= metrics["mismatch/delta_max"] == pytest.approx(metrics["sampler_gap"])
        )


# --- VinePPO ------------------------------------------------------------------------------------------------------------


class Rambler:
    """Writes five sevens after any prompt and never stops."""

    def __init__(self, tokenizer):
        self.seven, self.asked = tokenizer("7", add_special_tokens=False).input_ids[0], []

    def generate(self, prompts, num_generations, seed):
        self.asked.append(prompts)
        ids, mask = pad_left([p for p in prompts for _ in range(num_generations)], 0)
        shape = len(ids), 5
        samples = Samples(
            torch.full(shape, self.seven), torch.zeros(shape), torch.full(shape[:1], 5), torch.ones(shape[:1]).bool()
        )
        return rollouts_from_samples(ids, mask, torch.arange(len(prompts)).repeat_interleave(num_generations), samples)

    def sync(self, model):
        pass


def test_endings_fill_what_was_left_and_no_more():
    """A prefix of t tokens is followed by 5 - t sevens: its value is the sevens in it and those. One state, one prompt."""
    trainer = make_trainer(replace(SMALL, advantage_estimator="monte_carlo", scale_rewards="none"))
    chosen = trainer.task.train[:3]
    rollouts = grade(collect(trainer.sampler, trainer.tokenizer, chosen, 4, 0), trainer.tokenizer, chosen, count_sevens)
    rambler = Rambler(trainer.tokenizer)
    values = sampled_values(
        rollouts, rambler, lambda r: grade(r, trainer.tokenizer, chosen, count_sevens), trainer.config, 0
    )
    sevens = (rollouts.completion_ids == rambler.seven).cumsum(1)
    before = torch.cat([torch.zeros(12, 1), sevens[:, :-1]], 1)
    expected = torch.where(rollouts.mask, before + 5 - torch.arange(rollouts.mask.shape[1]), 0.0)
    assert torch.equal(values, expected)
    asked = [tuple(prompt) for prompt in rambler.asked[0]]
    assert len(rambler.asked) == 1 and len(set(asked)) == len(asked) < int(rollouts.mask.sum())


def test_values_of_fresh_endings_are_section_7s():
    """In the mean over many endings, against section 7's estimate, which caps the length in its own way."""
    K = 500
    trainer = make_trainer(
        replace(
            SMALL, advantage_estimator="monte_carlo", scale_rewards="none", num_value_samples=K, max_completion_length=3
        )
    )
    chosen = trainer.task.train[:2]
    rollouts = grade(collect(trainer.sampler, trainer.tokenizer, chosen, 2, 0), trainer.tokenizer, chosen, count_sevens)
    grade_endings = lambda r: grade(r, trainer.tokenizer, chosen, count_sevens)  # noqa: E731
    values = sampled_values(rollouts, trainer.sampler, grade_endings, trainer.config, 0)
    seven = trainer.tokenizer("7", add_special_tokens=False).input_ids[0]

    def sevens(rows, ids, lengths, truncated):
        return ((ids == seven) & (torch.arange(ids.shape[1]) < lengths[:, None])).sum(1).float()

    texts = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, rollouts.mask
    outcomes = monte_carlo_outcomes(
        trainer.model,
        *texts,
        sevens,
        num_rollouts=K,
        max_completion_length=3,
        stop_ids=[trainer.tokenizer.eos_token_id],
        generator=torch.Generator().manual_seed(1),
    )
    error = 5 * (2 * outcomes.var(-1) / K).sqrt()
    assert ((values - outcomes.mean(-1)).abs() <= error + 1e-6)[rollouts.mask].all() and error.any()


def test_vineppo_advantages_are_differences_of_values():
    trainer = make_trainer(replace(SMALL, advantage_estimator="monte_carlo", scale_rewards="none"))
    rollouts = prepared(trainer)
    for row, length in enumerate(rollouts.mask.sum(1).tolist()):
        following = torch.cat([rollouts.values[row, 1:length], rollouts.rewards[row : row + 1]])
        expected = following - rollouts.values[row, :length]
        assert torch.allclose(rollouts.advantages[row, :length], expected, atol=1e-6)
    first = [group.unique() for group in rollouts.values[:, 0].view(-1, 4)]
    assert all(len(values) == 1 for values in first)  # one prompt is one state


def test_endings_that_nobody_can_grade_leave_the_mean():
    def only_short(prompts, completions, **columns):
        return [1.0 if len(completion) < 4 else None for completion in completions]

    trainer = make_trainer(replace(SMALL, advantage_estimator="monte_carlo", scale_rewards="none"), reward=only_short)
    rollouts = prepared(trainer)
    assert set(rollouts.values[rollouts.mask].tolist()) == {0.0, 1.0}
    assert all(math.isfinite(value) for value in trainer.step().values())


# --- dynamic sampling ---------------------------------------------------------------------------------------------------


def test_dynamic_sampling_reports_what_was_drawn_and_trains_on_what_is_mixed():
    def often_tied(prompts, completions, **columns):
        easy = [int(prompt.split("+")[0]) % 3 != 0 for prompt in prompts]
        return [1.0 if tied else float(is_number(text)) for tied, text in zip(easy, completions)]

    trainer = make_trainer(replace(SMALL, dynamic_sampling=True), reward=often_tied)
    seen, rounds, draw = [], [], trainer.draw
    trainer.draw = lambda watch: rounds.append(draw(watch)) or rounds[-1]
    trainer.update = lambda rollouts: seen.append(rollouts) or {}
    metrics = trainer.step()
    assert len(rounds) > 1 and len(seen[0].group.unique()) == 8
    spread = seen[0].rewards.view(8, 4)
    assert (spread.amax(1) > spread.amin(1)).all() and (seen[0].advantages[:, 0] != 0).any()
    drawn = torch.cat([rollouts.rewards for _, rollouts in rounds])
    assert metrics["reward"] == pytest.approx(float(drawn.mean()))
    tied = drawn.view(-1, 4).amax(1) == drawn.view(-1, 4).amin(1)
    assert metrics["frac_reward_zero_std"] == pytest.approx(float(tied.float().mean())) != 0.0


def test_a_step_without_any_mixed_group_changes_nothing():
    trainer = make_trainer(replace(SMALL, dynamic_sampling=True), reward=always_tied)
    before = parameters(trainer)
    with pytest.warns(UserWarning, match="0 of 80 groups are mixed after 10 rounds"):
        metrics = trainer.step()
    assert metrics["frac_reward_zero_std"] == 1.0 and metrics["grad_norm"] == 0.0
    assert torch.equal(parameters(trainer), before)


# --- all of them --------------------------------------------------------------------------------------------------------

CASES = {
    "critic": {**GAE, "num_iterations": 2},
    "critic, kl in reward": {**GAE, **IN_REWARD, "overlong_buffer": 2},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "sequence, exact kl": {"importance_sampling_level": "sequence", "beta": 0.2, "kl_estimator": "exact"},
    "exact kl": {"beta": 0.2, "kl_estimator": "exact"},
    "kl in reward": {**IN_REWARD, "scale_rewards": "none"},
    "entropy": {"entropy_coef": 0.1},
    "sequence, entropy": {"importance_sampling_level": "sequence", "entropy_coef": 0.1},
    "top entropy": {"top_entropy_quantile": 0.4, "beta": 0.1},
    "cispo": {"clip_type": "cispo", "epsilon_high": 0.05},
    "delta": {"delta": 1.3, "epsilon": 0.05},
    "correction": {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_mask"},
    "batch": {"advantage_estimator": "batch", "scale_rewards": "batch"},
}


@pytest.mark.parametrize("name", CASES)
def test_accumulation_changes_nothing_whatever_the_settings(name):
    results = []
    for size in (32, 5, 1):
        trainer = exact_trainer(**{"num_iterations": 2, **CASES[name]})
        trainer.config = replace(trainer.config, per_device_train_batch_size=size)
        metrics = trainer.update(prepared(trainer))
        metrics.pop("padding")
        results.append((all_parameters(trainer), untimed(metrics)))
    for weights, metrics in results[1:]:
        assert torch.allclose(weights, results[0][0], rtol=0, atol=1e-9)
        assert metrics == pytest.approx(results[0][1], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_rows_without_gradient_may_be_left_out_whatever_the_settings(name, monkeypatch):
    results = []
    for everything in (False, True):
        if everything:
            monkeypatch.setattr(trainer_module, "rows_with_gradient", lambda r, w, c: torch.ones(len(r)).bool())
        trainer = exact_trainer(**{"num_iterations": 2, **CASES[name]})
        rollouts = prepared(trainer)
        tied = rollouts.group[:, None] % 2 == 0
        trainer.update(replace(rollouts, advantages=torch.where(tied, 0.0, rollouts.advantages)))
        results.append(all_parameters(trainer))
    assert torch.allclose(*results, rtol=0, atol=1e-9)


def test_a_run_with_a_critic_leaves_its_metrics(tmp_path):
    config = replace(SMALL, **GAE, max_steps=2, output_dir=str(tmp_path))
    result = run(make_trainer(config), learning_curve)
    assert '"value_loss"' in (result.folder / "metrics.jsonl").read_text()


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_generations": 1}, "a group baseline compares answers to the same prompt and needs at least 2"),
        ({"num_generations": 0, "advantage_estimator": "none"}, "num_generations is 0; it must be greater than 0"),
        ({"beta": 0.1, "kl_estimator": "k1"}, '"k1" in the loss has an expected gradient of zero'),
        ({"beta": 0.1, "kl_in": "reward"}, 'kl_estimator "k3" in the reward'),
        ({"advantage_estimator": "gae"}, 'scale_rewards "group" belongs to advantage_estimator "group"'),
        ({**GAE, "dynamic_sampling": True}, "dynamic_sampling leaves out groups of equal rewards"),
        ({"top_p": 0.9}, "with its tail cut off the sampler is another policy"),
        ({"delta": 1.1}, "delta is 1.1; it bounds the ratio above the clip"),
        ({"overlong_buffer": 9}, "overlong_buffer is 9"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0"),
        ({"clip_type": "soft"}, "clip_type is 'soft'; choose one of ppo, cispo, none"),
        ({**GAE, "gamma": 1.1}, "gamma is 1.1; take 0 to 1"),
        ({**GAE, "cliprange_value": 0.0}, "cliprange_value is 0.0"),
        ({"critic_learning_rate": 2.0}, "critic_learning_rate is 2.0; .* at most 1"),
        (
            {"vllm_importance_sampling_clip_max": 0.0},
            "vllm_importance_sampling_clip_max is 0.0; it must be greater than 0",
        ),
        (
            {"vllm_importance_sampling_mode": "row"},
            "vllm_importance_sampling_mode is 'row'; choose one of token_truncate",
        ),
        ({"entropy_coef": -0.1}, "entropy_coef is -0.1"),
    ],
)
def test_contradictions_are_refused_with_the_reason(settings, reason):
    with pytest.raises(ValueError, match=reason):
        check_config(TrainConfig(**settings))


def test_gae_without_a_critic_is_refused():
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r'"gae" needs a critic; pass build_critic\(model\)'):
        Trainer(replace(SMALL, **GAE), trainer.model, trainer.tokenizer, trainer.task, trainer.sampler)
