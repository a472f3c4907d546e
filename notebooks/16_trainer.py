# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16. The complete machine
#
# **The question.** Every part exists: a policy and its sampler (section 1), group advantages (6), a critic (7 and 8), KL and
# entropy (9), the clipped surrogate (10), tensors, masks and weights (11), loaded models (12), tied groups (13), the choices
# that make a recipe (14), tasks and verifiers (15). What is the loop that makes a language model learn from them, and how does one see that it does?
#
# One pass through the loop is a chain of functions. Each takes what it needs and returns something new; only the last
# one changes the world:
#
# $$\text{prompts} \to \text{rollouts} \to \text{rewards} \to \text{advantages} \to \text{loss} \to \text{step} \to
# \text{metrics}.$$
#
# The default is GRPO (Shao et al., 2024) in the form that the previous sections derived: a group mean as the baseline, the
# clipped ratio, and a loss in which every token of the step weighs the same. The other recipes, from REINFORCE to PPO with
# its critic, go through the same loop. They are section 14's choices, and here each choice is a setting.

# %%
import difflib
import hashlib
import itertools
import json
import math
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import torch
import transformers
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from lmrl.baselines import group_mean
from lmrl.batch import Rollouts, concatenate, micro_batches, padding_share, used_columns
from lmrl.figures.style import COLORS, new_figure, show
from lmrl.gae import gae, score_last_token, split_values
from lmrl.logprobs import completion_logprobs, completion_loss, require_output_head
from lmrl.loss import policy_loss, token_weights
from lmrl.memory import Setup, plan_table, shape_of
from lmrl.mismatch import correction_weights, mismatch_alarm, mismatch_metrics
from lmrl.models import (
    disable_dropout,
    find_device,
    load_config,
    load_policy,
    load_reference,
    load_tokenizer,
    resolve_model_path,
    stop_token_ids,
)
from lmrl.policy import (
    build_policy,
    build_tokenizer,
    completion_texts,
    masked_mean,
    pad_left,
    pad_right,
    save_model,
    warm_start_folder,
)
from lmrl.ppo import value_clipped, value_loss
from lmrl.recipes import (
    RATIOS,
    RECIPES,
    batch_std,
    check_recipe,
    clip_flags,
    completion_kl,
    completion_loss_with_kl,
    loss_functions,
    penalised_rewards,
    penalised_token_rewards,
    row_advantages,
    soft_overlong_punishment,
    top_entropy,
)
from lmrl.rewards import RewardFunction, load_reward, score_completions
from lmrl.rollout import Sampler, TorchSampler, require_fit
from lmrl.signal import dynamic_sampling, frac_reward_zero_std
from lmrl.tasks import Example, Task, encode_prompt, load_task
from lmrl.trust_region import kl_k1, kl_k3
from lmrl.values import Critic, build_critic
from lmrl.vllm_rollout import VLLMSampler, import_vllm

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# ## Settings
#
# A run is described by one frozen record. Where TRL has a name for a setting, this is the name. Two numbers deserve a
# word. `per_device_train_batch_size` is the number of *completions* that fit through the model at once if all are as long
# as they may be; of shorter ones more go together (section 11). Times `gradient_accumulation_steps` it is the number of
# completions of one optimiser step, and that must hold whole groups of `num_generations`.


# %% tags=["export:config"]
@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run (section 16). The defaults train the tiny policy on two-digit addition."""

    task: str = "arithmetic"
    """What to train on: "arithmetic", or "reasoning_gym:NAME" for a dataset of reasoning-gym."""
    model: str = "tiny"
    """"tiny" for section 1's warm-started policy, or a Hugging Face folder, a .gguf file, or a package that holds one."""
    reward: str | None = None
    """Your own reward function as "path/to/file.py:function", in place of the task's."""
    name: str | None = None
    """Name of the run's folder; by default the task and the next free number."""
    output_dir: str = "runs"
    """Folder that holds the runs."""
    seed: int = 0
    """Seed of the warm start, the order of the prompts and the sampling."""

    max_steps: int = 800
    """Steps: batches that are generated and learned from."""
    per_device_train_batch_size: int = 512
    """Completions of the greatest length that go through the model at once."""
    gradient_accumulation_steps: int = 1
    """Times as many completions per optimiser step, for the same memory."""
    num_generations: int = 4
    """Completions per prompt, G."""
    num_iterations: int = 2
    """Optimiser steps taken from each generated batch."""
    max_completion_length: int = 4
    """Cap on the tokens of a completion."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in scoring."""
    top_k: int = 0
    """Sample from the k likeliest tokens alone; 0 is all. Needs vllm_importance_sampling_correction (section 11)."""
    top_p: float = 1.0
    """Sample from the likeliest tokens of total probability p alone; 1 is all. Needs the correction too."""
    min_p: float = 0.0
    """Sample from tokens of at least min_p times the greatest probability alone; 0 is all. Needs the correction too."""
    use_vllm: bool = False
    """Generate with a vLLM engine instead of the model itself; --vllm for short (section 14)."""
    vllm_mode: str = "colocate"
    """Where the engine runs: "colocate" is in the trainer's process, on its GPU."""
    vllm_gpu_memory_utilization: float = 0.3
    """The engine's share of the GPU's memory."""
    vllm_max_model_length: int | None = None
    """The engine's cap on the tokens of prompt and completion; by default what fits."""
    vllm_importance_sampling_correction: bool = False
    """Weigh advantages by the ratio of the policy's to the sampler's probabilities, whichever sampler it is (section 14)."""
    vllm_importance_sampling_mode: str = "sequence_mask"
    """"token_truncate", "token_mask", "sequence_truncate" or "sequence_mask": ratio of what, and what is done above the cap."""
    vllm_importance_sampling_clip_max: float = 3.0
    """Cap on the ratio of the correction."""
    vllm_enable_sleep_mode: bool = False
    """Leave the engine's share of a GPU to the trainer while it learns."""

    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 40
    """Steps over which the learning rate rises from zero."""
    lr_scheduler_type: str = "linear"
    """After the warm-up: "linear" to zero, or "constant"."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    adam_beta2: float = 0.99
    """AdamW's second-moment decay."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    advantage_estimator: str = "group"
    """What a reward is compared with: the "group"'s mean, the others of the group ("leave_one_out"), the "batch"'s mean,
    "none", a critic ("gae", section 8), or fresh endings of every prefix ("monte_carlo", section 7)."""
    scale_rewards: str = "group"
    """"group" divides advantages by the group's standard deviation, "batch" by the batch's, "none" does not (section 6)."""
    importance_sampling_level: str = "token"
    """One ratio for every "token", or for every "sequence" (section 14)."""
    clip_type: str = "ppo"
    """"ppo" clips the ratio (section 10), "cispo" caps a token's weight and keeps its gradient (section 14), or "none"."""
    epsilon: float = 0.2
    """Clip range of the ratio (section 10)."""
    epsilon_high: float | None = None
    """Upper clip range, if different from epsilon."""
    delta: float | None = None
    """Bound on the ratio of tokens with negative advantage (section 14)."""
    loss_type: str = "dapo"
    """How tokens are weighted: "dapo" or "bnpo" (every token alike), "grpo" or "dr_grpo" (section 11)."""
    beta: float = 0.0
    """Strength of the KL penalty to the starting policy; 0 needs no reference model (section 9)."""
    kl_estimator: str = "k3"
    """"k1", "k2" or "k3" of the sampled token, or "exact" over the vocabulary (sections 9 and 14)."""
    kl_in: str = "loss"
    """Where the penalty stands: in the "loss", or in the "reward", with k1 (section 14)."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus in the loss (section 14)."""
    top_entropy_quantile: float = 1.0
    """Learn only from this share of the tokens, those of the highest entropy; 1 is all (section 14)."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the cap out of the loss."""
    overlong_buffer: int = 0
    """Tokens before the cap over which a punishment for length rises to 1; 0 is none (section 14)."""
    dynamic_sampling: bool = False
    """Draw prompts until enough groups have unequal rewards, and learn from those alone (section 13)."""
    gamma: float = 1.0
    """Discount per token, of "gae" (section 8)."""
    lam: float = 0.95
    """λ of "gae" (section 8)."""
    critic_learning_rate: float = 1e-3
    """Peak learning rate of the critic's own AdamW, for "gae"."""
    vf_coef: float = 0.1
    """Weight of the critic's loss. Its AdamW undoes any factor, so it only matters where max_grad_norm cuts (section 10)."""
    cliprange_value: float | None = 0.2
    """Range around the old value in which a prediction is rewarded for moving (section 10)."""
    num_value_samples: int = 4
    """Fresh endings of every prefix, for "monte_carlo" (section 7)."""

    num_eval_problems: int = 256
    """Held-out problems for pass@1, before and after."""
    num_eval_generations: int = 4
    """Completions per held-out problem."""
    save_steps: int = 100
    """A checkpoint is written every so many steps, and at the end."""
    dtype: str = "float32"
    """Number format of the weights: "float32" or "bfloat16"."""
    device: str = "auto"
    """"auto" is a GPU if there is one, else the CPU."""

    @property
    def completions_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def beta_in(self, place: str) -> float:
        """The strength of the KL penalty in the "loss" or in the "reward"; 0 if it stands in the other place."""
        return self.beta if self.kl_in == place else 0.0


# %% [markdown]
# A setting that cannot work is refused before anything is loaded, with the number and the way out; so are settings that
# contradict each other (section 14). The trainer asks too.


# %% tags=["export:config"]
def check_config(config: TrainConfig) -> None:
    """Raise ValueError, with the value and the remedy, for settings that cannot work."""
    positive = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations")
    positive += ("max_completion_length", "temperature", "learning_rate", "save_steps", "max_grad_norm")
    positive += ("num_eval_problems", "num_eval_generations", "num_generations", "critic_learning_rate", "vf_coef")
    positive += ("vllm_importance_sampling_clip_max",)
    for name in positive:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be greater than 0")
    for name in ("seed", "warmup_steps", "weight_decay", "beta", "entropy_coef"):
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be 0 or more")
    for name in ("temperature", "weight_decay", "beta", "entropy_coef"):
        if math.isinf(getattr(config, name)):
            raise ValueError(f"{name} is {getattr(config, name)}; it must be finite")
    if config.seed >= 2**63:
        raise ValueError(f"seed is {config.seed}; it must be below 2**63")
    for name in ("learning_rate", "critic_learning_rate"):
        if getattr(config, name) > 1:
            raise ValueError(
                f"{name} is {getattr(config, name)}; AdamW moves each weight by about that much per step, so take at most 1"
            )
    for name in ("gamma", "lam"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} is {getattr(config, name)}; take 0 to 1")
    if config.cliprange_value is not None and not config.cliprange_value > 0:
        raise ValueError(f"cliprange_value is {config.cliprange_value}; it must be greater than 0, or left out")
    if not 0 <= config.adam_beta2 < 1:
        raise ValueError(f"adam_beta2 is {config.adam_beta2}; take 0 <= adam_beta2 < 1, for example 0.99")
    if config.completions_per_step % config.num_generations:
        raise ValueError(
            f"a step has {config.completions_per_step} completions (per_device_train_batch_size "
            f"{config.per_device_train_batch_size} x gradient_accumulation_steps {config.gradient_accumulation_steps}), "
            f"which num_generations {config.num_generations} does not divide; change one of them"
        )
    if not 0 < config.vllm_gpu_memory_utilization <= 1:
        raise ValueError(
            f"vllm_gpu_memory_utilization is {config.vllm_gpu_memory_utilization}; it is a share of the GPU, so take "
            "0 < share <= 1, for example 0.3"
        )
    if config.vllm_max_model_length is not None and config.vllm_max_model_length <= config.max_completion_length:
        raise ValueError(
            f"vllm_max_model_length is {config.vllm_max_model_length} and max_completion_length "
            f"{config.max_completion_length}; that leaves no token for a prompt"
        )
    choices = {"lr_scheduler_type": ("linear", "constant"), "dtype": ("float32", "bfloat16")}
    choices |= {"vllm_mode": ("colocate",)}
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} is {getattr(config, name)!r}; choose one of {', '.join(allowed)}")
    if config.name is not None and (config.name in ("", "..") or config.name != Path(config.name).name):
        raise ValueError(f"name is {config.name!r}; give a folder's name without slashes, and its place as output_dir")
    check_recipe(config)


# %%
config = TrainConfig(max_steps=25, per_device_train_batch_size=256, num_eval_problems=128)
try:
    check_config(TrainConfig(per_device_train_batch_size=10, num_generations=4))
except ValueError as error:
    print(error)
else:
    raise AssertionError("ten completions are not whole groups of four")

# %% [markdown]
# ## From prompts to advantages
#
# **Prompts → rollouts.** The sampler gets token ids and a seed. All completions of a step are generated in one batch.


# %% tags=["export"]
def collect(sampler: Sampler, tokenizer, examples: list[Example], num_generations: int, seed: int) -> Rollouts:
    """``num_generations`` completions for each example, as `Rollouts` with B = len(examples) · G rows (section 16)."""
    return sampler.generate([encode_prompt(tokenizer, example.prompt) for example in examples], num_generations, seed)


# %% [markdown]
# **Rollouts → rewards.** The reward function reads texts, in TRL's signature: lists of prompts and completions, and the
# task's other columns by name. It may answer `None` for a completion that nobody can grade; if that is all of them, we say
# so, once.


# %% tags=["export"]
def decode(tokenizer, rollouts: Rollouts) -> list[str]:
    """The completions as texts, without the stop token that ended them (section 16)."""
    return completion_texts(tokenizer, rollouts.completion_ids, used_columns(rollouts.mask), rollouts.truncated)


def grade(rollouts: Rollouts, tokenizer, examples: list[Example], reward: RewardFunction) -> Rollouts:
    """The rollouts with ``rewards`` and ``graded`` ``[B]`` from the reward function (section 16)."""
    rows = [examples[g] for g in rollouts.group.tolist()]
    columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
    rewards, graded = score_completions(reward, [row.prompt for row in rows], decode(tokenizer, rollouts), columns)
    if not graded.any():
        warnings.warn(
            "the reward function graded none of the completions: there is nothing to learn from", stacklevel=2
        )
    device = rollouts.group.device
    return replace(rollouts, rewards=rewards.to(device), graded=graded.to(device))


# %% [markdown]
# **Rewards → advantages.** There are two kinds. If a completion is compared with others, all its tokens share one number
# (sections 6 and 14). If every token has a value to be compared with, from a critic or from fresh endings, each has its own
# (sections 7 and 8). What is taken from the reward, a punishment for length or the KL to the reference, is taken here: the
# metrics keep the reward that the task gave.


# %% tags=["export"]
def length_punishment(rollouts: Rollouts, config: TrainConfig) -> Tensor:
    """What is added to each reward for length, ``[B]`` from -1 to 0; all 0 without an ``overlong_buffer`` (section 14)."""
    lengths = rollouts.mask.sum(1)
    if config.overlong_buffer == 0:
        return torch.zeros_like(lengths, dtype=torch.float32)
    return soft_overlong_punishment(lengths, config.max_completion_length, config.overlong_buffer)


def completion_advantages(rollouts: Rollouts, config: TrainConfig) -> Rollouts:
    """The rollouts with ``advantages`` ``[B, T]`` that all tokens of a row share (sections 6 and 14)."""
    rewards = rollouts.rewards + length_punishment(rollouts, config)
    if config.beta_in("reward"):
        kl = kl_k1(rollouts.old_logprobs, rollouts.ref_logprobs)
        rewards = penalised_rewards(rewards, kl, rollouts.mask, config.beta)
    names = config.advantage_estimator, config.scale_rewards
    advantages = row_advantages(rewards, rollouts.group, *names, graded=rollouts.graded)
    return replace(rollouts, advantages=advantages[:, None].expand(rollouts.mask.shape))


def token_advantages(
    rollouts: Rollouts, config: TrainConfig, values: Tensor, bootstrap: Tensor | None = None
) -> Rollouts:
    """The rollouts with ``advantages``, ``values`` and ``returns`` ``[B, T]``, from V before every token (section 8).

    ``bootstrap`` ``[B]`` is a critic's V after the last token of truncated rows, which then get no reward. Without it the
    values are taken as exact, and λ as 0.
    """
    mask, bootstrapped = rollouts.mask, None if bootstrap is None else rollouts.truncated
    rewards = torch.where(rollouts.graded, rollouts.rewards, 0.0)
    rewards = score_last_token(rewards, mask, bootstrapped) + score_last_token(
        length_punishment(rollouts, config), mask
    )
    if config.beta_in("reward"):
        rewards = penalised_token_rewards(
            rewards, kl_k1(rollouts.old_logprobs, rollouts.ref_logprobs), mask, config.beta
        )
    lam = 0.0 if bootstrap is None else config.lam
    advantages, returns = gae(rewards, values, mask, gamma=config.gamma, lam=lam, bootstrap=bootstrap)
    if config.scale_rewards == "batch":
        advantages = advantages / batch_std(rollouts.rewards, rollouts.graded)
    return replace(rollouts, advantages=advantages, values=values, returns=returns)


# %% [markdown]
# VinePPO's values: the mean reward of $K$ fresh endings of every prefix that was written. The sampler is the one that wrote
# the completions, whatever it is; it sees each prefix as a prompt, once for all completions that share it. An ending may
# have no more tokens than were left for it, and what runs over is cut.


# %% tags=["export"]
def finish(sampler: Sampler, prefixes: list[tuple[int, tuple, tuple]], config: TrainConfig, seed: int) -> Rollouts:
    """``num_value_samples`` whole completions for each (example, prompt ids, prefix ids); groups are examples."""
    endings = sampler.generate([[*prompt, *prefix] for _, prompt, prefix in prefixes], config.num_value_samples, seed)
    device, cut, texts = endings.group.device, [], []
    columns = endings.group, endings.completion_ids, endings.mask.sum(1), endings.truncated
    for i, ids, length, truncated in zip(*(column.tolist() for column in columns), strict=True):
        text = [*prefixes[i][2], *ids[:length]]
        texts.append(text[: config.max_completion_length])
        cut.append(truncated or len(text) > config.max_completion_length)
    ids, mask = (x.to(device) for x in pad_right(texts, 0))
    return Rollouts(
        prompt_ids=endings.prompt_ids,
        prompt_mask=endings.prompt_mask,
        completion_ids=ids,
        mask=mask,
        truncated=torch.tensor(cut, device=device),
        sampler_logprobs=torch.zeros(ids.shape, device=device),
        group=torch.tensor([prefix[0] for prefix in prefixes], device=device)[endings.group],
    )


def sampled_values(
    rollouts: Rollouts, sampler: Sampler, grade_endings: Callable[[Rollouts], Rollouts], config: TrainConfig, seed: int
) -> Tensor:
    """V before every token as the mean reward of fresh endings of the prefix, ``[B, T]``, 0 off the mask (section 7).

    ``grade_endings`` gives rollouts of the same prompts their rewards. Kazemnejad et al., 2024 (VinePPO).
    """
    places, table = rollouts.mask.nonzero().tolist(), {}
    lengths = rollouts.prompt_mask.sum(1).tolist()
    prompts = [tuple(ids[-length:]) for ids, length in zip(rollouts.prompt_ids.tolist(), lengths, strict=True)]
    completions, groups = rollouts.completion_ids.tolist(), rollouts.group.tolist()
    states = [(groups[row], prompts[row], tuple(completions[row][:t])) for row, t in places]
    number = [table.setdefault(state, len(table)) for state in states]
    endings = grade_endings(finish(sampler, list(table), config, seed))
    state_of_ending = torch.arange(len(table), device=endings.group.device).repeat_interleave(config.num_value_samples)
    values = group_mean(endings.rewards, state_of_ending, endings.graded)[:: config.num_value_samples]
    return torch.zeros(rollouts.mask.shape, device=values.device).masked_scatter(rollouts.mask, values[number])


# %% [markdown]
# **Which tokens enter the loss?** Those that the policy chose, in completions that were graded, and, if the setting
# says so, not in completions that were cut off. What leaves here leaves numerator and denominator both.


# %% tags=["export"]
def loss_mask(rollouts: Rollouts, mask_truncated_completions: bool) -> Tensor:
    """Bool ``[B, T]``: the tokens that enter the loss (section 16)."""
    rows = rollouts.graded & ~(rollouts.truncated & mask_truncated_completions)
    return rollouts.mask & rows[:, None]


# %% [markdown]
# Two settings change the advantages of single tokens and not the mask, so that the tokens stay in the denominator and under
# a KL penalty: only the tokens of the highest entropy learn (14.7), and the sampler's error is weighed out (14.6).


# %% tags=["export"]
def adjust_advantages(rollouts: Rollouts, entropy: Tensor | None, config: TrainConfig) -> Rollouts:
    """The rollouts with advantages for the tokens of high ``entropy`` ``[B, T]`` alone, times the correction (section 14).

    Both only if their settings ask for it; the correction needs ``old_logprobs``.
    """
    advantages = rollouts.advantages
    if config.top_entropy_quantile < 1:
        mask = loss_mask(rollouts, config.mask_truncated_completions)
        advantages = advantages * top_entropy(entropy, mask, config.top_entropy_quantile)
    if config.vllm_importance_sampling_correction:
        pair = rollouts.old_logprobs, rollouts.sampler_logprobs, rollouts.mask
        mode, cap = config.vllm_importance_sampling_mode, config.vllm_importance_sampling_clip_max
        advantages = advantages * correction_weights(*pair, mode, cap)
    return replace(rollouts, advantages=advantages)


# %% [markdown]
# ## From advantages to a step
#
# **How much fits through the model at once?** Not a number of rows but an area, padding included: section 11 cuts by it.
#
# **Scoring.** Some numbers are wanted for every sampled token before the update: log-probs under the reference, if there is
# a KL penalty; under the policy itself, if a setting needs its log-probs or entropies beforehand; the critic's values. The
# pieces are sorted by length, so each number is put back where its token stands.


# %% tags=["export"]
def token_budget(rollouts: Rollouts, config: TrainConfig) -> int:
    """Padded tokens per forward pass: ``per_device_train_batch_size`` completions of full length (section 16)."""
    return config.per_device_train_batch_size * (rollouts.prompt_ids.shape[1] + config.max_completion_length)


@torch.no_grad()
def in_pieces(compute: Callable[[Rollouts], tuple], rollouts: Rollouts, max_tokens: int) -> list[Tensor]:
    """What ``compute`` says of each token, ``[b, t]`` tensors for a piece, as tensors ``[B, T]`` (section 16).

    The pieces have ``max_tokens`` padded tokens. Where no piece has a token, the results are 0.
    """
    positions = torch.arange(rollouts.mask.numel(), device=rollouts.mask.device).view(rollouts.mask.shape)
    places, values = [], []
    for piece, at in micro_batches(rollouts, positions, max_tokens):
        places.append(at.flatten())
        values.append([value.flatten() for value in compute(piece)])
    columns = [torch.cat(column) for column in zip(*values, strict=True)]
    return [column.new_zeros(rollouts.mask.shape).put_(torch.cat(places), column) for column in columns]


def score(model, rollouts: Rollouts, temperature: float, max_tokens: int) -> list[Tensor]:
    """Log-probs of the sampled tokens under ``model``, and entropies, ``[B, T]`` each, 0 off the mask (section 16).

    They are float32 for a model of any lower precision.
    """

    def compute(piece):
        return completion_logprobs(
            model, piece.prompt_ids, piece.prompt_mask, piece.completion_ids, piece.mask, temperature
        )

    return in_pieces(compute, rollouts, max_tokens)


def predict_values(critic: Critic, rollouts: Rollouts, max_tokens: int) -> tuple[Tensor, Tensor]:
    """The critic's V before every token ``[B, T]``, and `gae`'s bootstrap ``[B]`` (sections 7 and 8)."""

    def compute(piece):
        states = critic(piece.prompt_ids, piece.prompt_mask, piece.completion_ids)
        values, bootstrap = split_values(states, piece.mask, piece.truncated)
        return values, bootstrap[:, None].expand_as(values)

    values, bootstrap = in_pieces(compute, rollouts, max_tokens)
    return torch.where(rollouts.mask, values, 0.0), bootstrap[:, 0]


# %% [markdown]
# **Which rows are worth a pass?** A completion of a tied group has advantage zero, and without a KL penalty, an entropy bonus
# or a critic it has no gradient at all: there is nothing to compute for it. The weights were fixed for the whole step, so
# leaving such rows out changes no other row's share. Late in training most groups are tied, and most of the work goes away.


# %% tags=["export"]
def rows_with_gradient(rollouts: Rollouts, weights: Tensor, config: TrainConfig) -> Tensor:
    """Bool ``[B]``: rows in which some token has a weight and something to learn from (section 16).

    That is an advantage; a KL penalty, an entropy bonus or a critic learn from every token.
    """
    every = config.beta_in("loss") != 0 or config.entropy_coef != 0 or config.advantage_estimator == "gae"
    return ((weights != 0) & ((rollouts.advantages != 0) | every)).any(1)


# %% [markdown]
# **One micro-batch.** The loss is section 11's `policy_loss` of the ratio, clip and KL that the settings name; no line of it
# knows an algorithm. It is a sum over tokens, and mostly the term of one token needs only its own log-prob, besides numbers
# that are known beforehand. So section 11's short way applies, which takes the loss in small blocks of tokens and has the
# gradient before the next block begins. A ratio over whole sequences goes the longer way.
#
# The first time a batch is used, the log-probs are also the *old* log-probs, detached: nothing was updated in between,
# so a second pass would compute the same numbers again. That is why the ratios of a first step are exactly 1 and not
# just close to it. (Where they had to be known beforehand, they are close to it.)
#
# A `NaN` among real tokens stops the run and says where. Masked ones never get this far.


# %% tags=["export"]
def weighted_loss(logprobs: Tensor, entropy: Tensor, tokens: dict[str, Tensor], config: TrainConfig) -> Tensor:
    """The summed loss of some tokens, a scalar, from tensors of one shape, ``weights`` among them (sections 11 and 14).

    Log-probs without ``old_logprobs`` are their own old log-probs. An exact KL is not in it.
    """
    loss = policy_loss(
        logprobs,
        tokens.get("old_logprobs", logprobs.detach()),
        tokens["advantages"],
        tokens["weights"],
        epsilon=config.epsilon,
        epsilon_high=config.epsilon_high,
        beta=0.0 if config.kl_estimator == "exact" else config.beta_in("loss"),
        ref_logprobs=tokens.get("ref_logprobs"),
        **loss_functions(config),
    )
    if config.entropy_coef != 0.0:
        loss = loss - config.entropy_coef * (tokens["weights"] * entropy).sum()
    return loss


def token_loss_of(piece: Rollouts, weights: Tensor, config: TrainConfig) -> Callable:
    """The `weighted_loss` of some of the piece's tokens, in the form that `completion_loss` asks for (section 16)."""
    fields = {name: value[piece.mask] for name, value in {**piece.per_token(), "weights": weights}.items()}

    def token_loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return weighted_loss(logprobs, entropy, {name: value[rows] for name, value in fields.items()}, config)

    return token_loss


def piece_loss_of(model, piece: Rollouts, weights: Tensor, config: TrainConfig, reference=None) -> list[Tensor]:
    """A micro-batch's share of the loss; log-probs and entropies ``[B, T]``, detached, and the KL if it is exact."""
    texts = piece.prompt_ids, piece.prompt_mask, piece.completion_ids, piece.mask
    exact = config.kl_estimator == "exact" and config.beta_in("loss") != 0
    if config.importance_sampling_level == "sequence":
        logprobs, entropy = completion_logprobs(model, *texts, config.temperature)
        loss = weighted_loss(logprobs, entropy, {**piece.per_token(), "weights": weights}, config)
        results = [loss, logprobs.detach(), entropy.detach()]
        if exact:
            kl = completion_kl(model, reference, *texts, config.temperature)
            results = [loss + config.beta * (weights * kl).sum(), *results[1:], kl.detach()]
        return results
    token_loss = token_loss_of(piece, weights, config)
    if exact:
        kl_weights = config.beta * weights
        return completion_loss_with_kl(model, reference, *texts, token_loss, kl_weights, config.temperature)
    return completion_loss(model, *texts, token_loss, config.temperature)


def micro_batch_pass(
    model, piece: Rollouts, weights: Tensor, config: TrainConfig, reference=None
) -> tuple[Tensor, Rollouts, dict[str, Tensor]]:
    """Forward one micro-batch: its share of the step's loss, the piece with ``old_logprobs``, and its token metrics.

    ``weights`` ``[B, T]`` are the piece's rows of `token_weights`. The metrics are detached ``[B, T]`` tensors (section
    16). ``reference`` is asked only for an exact KL. Raises FloatingPointError when a real token's log-prob is not finite.
    """
    loss, logprobs, entropy, *kl = piece_loss_of(model, piece, weights, config, reference)
    require_finite("the policy's log-probs", logprobs, piece.mask)
    if piece.old_logprobs is None:
        piece = replace(piece, old_logprobs=logprobs)
    metrics = {**token_metrics(logprobs, piece, config), "trained_entropy": entropy}
    return loss, piece, metrics | ({"kl_ref": kl[0]} if kl else {})


@torch.no_grad()
def token_metrics(logprobs: Tensor, piece: Rollouts, config: TrainConfig) -> dict[str, Tensor]:
    """What to watch, per token ``[B, T]``: ratio error, clipping, KLs, the sampler's log-prob gap (section 16)."""
    ratio = RATIOS[config.importance_sampling_level](logprobs, piece.old_logprobs, piece.mask)
    metrics = {
        "ratio_error": (ratio - 1).abs(),
        "clip_fraction": clip_flags(ratio, piece.advantages, config).float(),
        "kl_old": kl_k3(piece.old_logprobs, logprobs),
        "sampler_gap": (logprobs - piece.sampler_logprobs).abs(),
    }
    if piece.ref_logprobs is not None:
        metrics["kl_ref"] = kl_k3(logprobs, piece.ref_logprobs)
    return metrics


def critic_pass(
    critic: Critic, piece: Rollouts, weights: Tensor, config: TrainConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's share of the step's loss on one micro-batch, and metrics ``[B, T]`` (sections 10 and 16)."""
    counts = weights > 0
    values = torch.where(counts, critic(piece.prompt_ids, piece.prompt_mask, piece.completion_ids)[:, :-1], 0.0)
    old, returns = (torch.where(counts, x, 0.0) for x in (piece.values, piece.returns))
    losses = value_loss(values, old, returns, config.cliprange_value)
    metrics = {
        "value_loss": losses.detach(),
        "value_clip_fraction": value_clipped(values.detach(), old, config.cliprange_value).float(),
    }
    return config.vf_coef * (weights * losses).sum(), metrics


def watch_sampler(trained: Rollouts) -> dict[str, float]:
    """Section 14's metrics of the mismatch between ``old_logprobs`` and the sampler's; warns with its alarm."""
    if not trained.mask.any():
        return {}
    metrics = mismatch_metrics(trained.old_logprobs, trained.sampler_logprobs, trained.mask)
    if alarm := mismatch_alarm(metrics):
        warnings.warn(alarm, stacklevel=3)
    return metrics


def require_finite(what: str, values: Tensor, mask: Tensor) -> None:
    """Raise FloatingPointError if an unmasked entry of ``values`` ``[B, T]`` is NaN or infinite."""
    bad = int((mask & ~values.isfinite()).sum())
    if bad:
        raise FloatingPointError(
            f"{what}: {bad} of {int(mask.sum())} values are not finite; lower learning_rate (or use dtype float32)"
        )


def clip_gradient(what: str, model, max_norm: float) -> float:
    """Scale the gradient of ``model`` down to ``max_norm``; its norm before. FloatingPointError if that is not finite."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    require_finite(what, norm[None], torch.ones_like(norm, dtype=torch.bool)[None])
    return float(norm)


# %% [markdown]
# **What a pass tells us.** The token metrics of all micro-batches are joined before anything is averaged: like the loss,
# a metric is a statement about the step. These metrics are over the tokens that were trained on; what was sampled is
# measured on the rollouts, all of them. The entropy comes in both kinds: `entropy` is estimated from all sampled tokens,
# `trained_entropy` is computed from the whole distribution, but only at the tokens that were trained on. `padding` is the
# share of the micro-batches' area that no token fills.


# %% tags=["export:metrics"]
def summarise(passes: list[tuple[dict[str, Tensor], Tensor]]) -> dict[str, float]:
    """Means over all real tokens of several micro-batches; ``ratio_error`` and ``sampler_gap`` are maxima (section 16).

    ``passes`` holds pairs of token metrics ``[B, T]`` and their mask ``[B, T]``. Without any token, everything is 0.
    """
    summary = {}
    for name in passes[0][0]:
        values = torch.cat([metrics[name][mask] for metrics, mask in passes])
        if len(values) == 0:
            summary[name] = 0.0
        else:
            summary[name] = float(values.max() if name in ("ratio_error", "sampler_gap") else values.mean())
    return summary


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """What the sampler and the verifier produced: reward, tied groups, entropy, length, truncation (section 16).

    The entropy per token is estimated by the mean of -log-prob over all sampled tokens: unbiased, and no pass of its own.
    """
    rewards = rollouts.rewards[rollouts.graded]
    return {
        "reward": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std(correction=0)) if len(rewards) else 0.0,
        "frac_reward_zero_std": frac_reward_zero_std(rollouts.rewards, rollouts.group, rollouts.graded),
        "entropy": float(masked_mean(-rollouts.sampler_logprobs, rollouts.mask)),
        "completion_length": float(rollouts.mask.sum(1).float().mean()),
        "truncated": float(rollouts.truncated.float().mean()),
        "ungraded": float((~rollouts.graded).float().mean()),
    }


class Stopwatch:
    """Seconds of a step and of its phases, each of which may come several times (section 16)."""

    def __init__(self):
        self.started = time.perf_counter()
        self.seconds = {"generation": 0.0, "reward": 0.0, "update": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of a ``with`` block towards the phase ``name``."""
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        """The seconds so far, in all and by phase, and the share of the generation."""
        total = time.perf_counter() - self.started
        phases = {f"{name}_seconds": seconds for name, seconds in self.seconds.items()}
        return {"seconds": total, **phases, "generation_share": self.seconds["generation"] / total}


def peak_memory(device: str) -> float:
    """Peak memory in GiB: of the process on a CPU, of PyTorch's allocations on a GPU (section 16)."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# %% [markdown]
# ## The trainer
#
# All state of a run is here: the weights, the optimiser, how far the learning rate has come, which prompts are next,
# and the generators behind every random choice. Prompts are visited in shuffled passes over the data.


# %% tags=["export"]
def generator_for(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator for one ``purpose`` of a run, independent of the others of the same ``seed`` (section 16)."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def shuffled_batches(count: int, size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Endless batches of ``size`` indices below ``count``, each pass over all of them in a new order (section 16)."""
    waiting = []
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=generator).tolist()
        yield waiting[:size]
        waiting = waiting[size:]


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Factor on the learning rate at ``step`` (0-based): linear warm-up, then linear decay or constant (section 16)."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    return warmup * (1 - step / config.max_steps) if config.lr_scheduler_type == "linear" else warmup


# %% [markdown]
# `step` reads straight down, in the order of the chain at the top, and reports the seconds of its phases: where a step
# spends its time depends on the model and the lengths, and is worth a look in every run (claim 11.5). `gather` is the
# stage that may draw more than once: under dynamic sampling (section 13) the metrics are over all that was drawn, and if no
# group at all is mixed, all of it is kept and there is nothing to learn. `prepare` adds what the loss needs beside the
# rewards.
# `update` is the inner half: gradients of all micro-batches add up, then one optimiser step, `num_iterations` times
# over the same batch. A critic has an optimiser of its own and learns from the same pieces.


# %% tags=["export"]
def needs_old_logprobs(config: TrainConfig) -> bool:
    """Whether a setting needs the policy's log-probs or entropies before the update (section 16)."""
    correction = config.vllm_importance_sampling_correction
    return correction or config.beta_in("reward") != 0 or config.top_entropy_quantile < 1


def adamw(model, learning_rate: float, config: TrainConfig):
    """AdamW over the trainable parameters of ``model``, and its learning-rate schedule (section 16)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = (0.9, config.adam_beta2)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=betas, weight_decay=config.weight_decay)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, config))


# %% tags=["export"]
class Trainer:
    """Every recipe of section 14 on one machine (section 16): the only object with state.

    ``model`` is any causal language model, ``sampler`` any `Sampler` over the same weights, ``reference`` a frozen
    model, needed when ``config.beta`` is not 0, ``critic`` a `Critic`, needed for ``advantage_estimator`` "gae". Dropout is
    off throughout. Raises ValueError when a step wants more different prompts than ``task.train`` has, reference or critic
    is missing, the longest prompt does not fit the model, or the model's logits are not those of its output head
    (`require_output_head`).
    """

    def __init__(
        self, config: TrainConfig, model, tokenizer, task: Task, sampler: Sampler, reference=None, critic=None
    ):
        check_config(config)
        prompts = config.completions_per_step // config.num_generations
        if prompts > len(task.train):
            raise ValueError(
                f"a step takes {prompts} prompts ({config.completions_per_step} completions / num_generations "
                f"{config.num_generations}), but task {task.name} has {len(task.train)}; lower "
                "per_device_train_batch_size or gradient_accumulation_steps"
            )
        if config.beta != 0.0 and reference is None:
            raise ValueError(f"beta is {config.beta}, which needs a reference model; pass one, or set beta to 0")
        if config.advantage_estimator == "gae" and critic is None:
            raise ValueError('advantage_estimator "gae" needs a critic; pass build_critic(model), or choose "group"')
        prompt_ids = [encode_prompt(tokenizer, example.prompt) for example in task.train + task.heldout]
        require_fit(model, pad_left(prompt_ids, tokenizer.pad_token_id)[0], config.max_completion_length)
        self.config, self.model, self.tokenizer, self.task = config, disable_dropout(model), tokenizer, task
        require_output_head(model)
        self.sampler, self.reference, self.critic, self.prompts = sampler, reference, critic, prompts
        self.optimizer, self.schedule = adamw(model, config.learning_rate, config)
        if critic is not None:
            disable_dropout(critic.trunk)
            self.critic_optimizer, self.critic_schedule = adamw(critic, config.critic_learning_rate, config)
        self.batches = shuffled_batches(len(task.train), prompts, generator_for(config.seed, "data"))
        self.sampling = generator_for(config.seed, "sampling")
        self.steps_done = 0

    def step(self) -> dict[str, float]:
        """Generate, grade, learn: one pass of the loop. Returns its metrics."""
        watch = Stopwatch()
        examples, drawn, rollouts = self.gather(watch)
        rollouts = self.prepare(rollouts, examples, watch)
        with watch.phase("update"):
            learning = self.update(rollouts)
        self.sampler.sync(self.model)
        self.steps_done += 1
        return {"step": self.steps_done, **rollout_metrics(drawn), **learning, **watch.metrics()}

    def draw(self, watch: Stopwatch) -> tuple[list[Example], Rollouts]:
        """The next prompts, and graded completions for them."""
        examples = [self.task.train[i] for i in next(self.batches)]
        with watch.phase("generation"):
            rollouts = collect(
                self.sampler, self.tokenizer, examples, self.config.num_generations, self.next_sampling_seed()
            )
        with watch.phase("reward"):
            return examples, grade(rollouts, self.tokenizer, examples, self.task.reward)

    def next_sampling_seed(self) -> int:
        return int(torch.randint(2**31, (), generator=self.sampling))

    def gather(self, watch: Stopwatch) -> tuple[list[Example], Rollouts, Rollouts]:
        """The examples that the groups number, all rollouts drawn for this step, and those to learn from.

        Groups of several draws number no list of examples, and nothing that goes with dynamic sampling asks for one.
        """
        if not self.config.dynamic_sampling:
            examples, drawn = self.draw(watch)
            return examples, drawn, drawn
        batch = dynamic_sampling(lambda groups: self.draw(watch)[1], self.prompts)
        return [], batch.drawn, batch.rollouts if len(batch.rollouts) else batch.drawn

    def prepare(self, rollouts: Rollouts, examples: list[Example], watch: Stopwatch) -> Rollouts:
        """The rollouts with the reference's and the old log-probs, where a setting needs them, and with advantages."""
        config, budget, values, entropy = self.config, token_budget(rollouts, self.config), (), None
        with watch.phase("update"):
            if config.beta != 0.0 and config.kl_estimator != "exact":
                logprobs, _ = score(self.reference, rollouts, config.temperature, budget)
                rollouts = replace(rollouts, ref_logprobs=logprobs)
            if needs_old_logprobs(config):
                logprobs, entropy = score(self.model, rollouts, config.temperature, budget)
                rollouts = replace(rollouts, old_logprobs=logprobs)
            if config.advantage_estimator == "gae":
                values = predict_values(self.critic, rollouts, budget)
        if config.advantage_estimator == "monte_carlo":
            with watch.phase("generation"):
                grade_endings = partial(grade, tokenizer=self.tokenizer, examples=examples, reward=self.task.reward)
                seed = self.next_sampling_seed()
                values = (sampled_values(rollouts, self.sampler, grade_endings, config, seed),)
        estimate = token_advantages if values else completion_advantages
        return adjust_advantages(estimate(rollouts, config, *values), entropy, config)

    def update(self, rollouts: Rollouts) -> dict[str, float]:
        """``num_iterations`` optimiser steps on one batch. A gradient that is not finite raises and changes nothing."""
        config = self.config
        mask = loss_mask(rollouts, config.mask_truncated_completions)
        weights = token_weights(mask, config.loss_type, config.max_completion_length)
        trained = rows_with_gradient(rollouts, weights, config)
        trained[0] |= ~trained.any()  # a step without any signal is still a step, with gradient zero
        pieces = list(micro_batches(rollouts.select(trained), weights[trained], token_budget(rollouts, config)))
        padding, summaries = padding_share(pieces), []
        for _ in range(config.num_iterations):
            self.optimizer.zero_grad()
            loss, passes = 0.0, []
            for i, (piece, piece_weights) in enumerate(pieces):
                piece_loss, piece, metrics = micro_batch_pass(self.model, piece, piece_weights, config, self.reference)
                piece_loss.backward()
                pieces[i] = (piece, piece_weights)
                passes.append((metrics, piece.mask))
                loss += float(piece_loss.detach())
            norm = clip_gradient("the gradient", self.model, config.max_grad_norm)
            self.optimizer.step()
            summaries.append({"loss": loss, "grad_norm": norm, **summarise(passes)})
            if config.advantage_estimator == "gae":
                summaries[-1] |= self.update_critic(pieces)
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        if self.critic is not None:
            self.critic_schedule.step()
        of_first_pass = ("ratio_error", "sampler_gap", "kl_ref", "trained_entropy", "value_loss")
        first = {name: summaries[0][name] for name in of_first_pass if name in summaries[0]}
        mismatch = watch_sampler(concatenate([piece for piece, _ in pieces]))
        return {**summaries[-1], **first, **mismatch, "padding": padding, "learning_rate": rate}

    def update_critic(self, pieces: list[tuple[Rollouts, Tensor]]) -> dict[str, float]:
        """One optimiser step of the critic on the pieces of a batch."""
        self.critic_optimizer.zero_grad()
        passes = []
        for piece, weights in pieces:
            loss, metrics = critic_pass(self.critic, piece, weights, self.config)
            loss.backward()
            passes.append((metrics, weights > 0))
        clip_gradient("the critic's gradient", self.critic, self.config.max_grad_norm)
        self.critic_optimizer.step()
        return summarise(passes)


# %% [markdown]
# Now build one by hand, as a user of the library would, and take a single step. Two numbers can be checked at once. The
# ratios of the first pass are exactly 1. And the sampler's log-probs, computed token by token with a cache, agree with
# the trainer's, computed in one pass over the whole sequence: a wrong shift, mask or temperature anywhere between
# them would show here.

# %%
folder = warm_start_folder(seed=0)
tokenizer, model = load_tokenizer(folder), load_policy(folder)
task = load_task("arithmetic")
sampler = TorchSampler(
    model, stop_token_ids(tokenizer, model), tokenizer.pad_token_id, config.max_completion_length, config.temperature
)
trainer = Trainer(config, model, tokenizer, task, sampler)
metrics = trainer.step()
for name, value in metrics.items():
    print(f"{name:22} {value:.4g}")
assert metrics["ratio_error"] == 0.0
assert metrics["sampler_gap"] < 1e-4
phases = [metrics[f"{phase}_seconds"] for phase in ("generation", "reward", "update")]
assert sum(phases) <= metrics["seconds"]

# %% [markdown]
# ## Measuring: pass@1 on problems nobody trained on
#
# The measure of a policy is the probability that *one* sampled answer is right, on held-out problems. We draw several
# answers per problem and average. Answers to one problem are not independent of each other, so the 95 % interval comes
# from the spread of the per-problem means: with $n$ problems of means $\bar R_j$ it is
# $\pm 1.96\,\mathrm{sd}(\bar R_j)/\sqrt n$. The answers are written in portions of a step's size, so that measuring takes
# no more memory than training; a completion does not depend on its batch (section 11), so neither does the result.


# %% tags=["export"]
@dataclass(frozen=True)
class Evaluation:
    """Held-out results (section 16). pass_at_1: share of sampled answers with reward 1 or more, with half_width its 95 %
    interval over problems; reward: mean reward; well_formed: share of answers that finished and have the task's form;
    samples: one dict per completion."""

    pass_at_1: float
    half_width: float
    reward: float
    well_formed: float
    samples: list[dict]

    def __str__(self) -> str:
        return f"{self.pass_at_1:.3f} ± {self.half_width:.3f}"


def evaluate(trainer: Trainer, seed: int = 0) -> Evaluation:
    """pass@1 of the trainer's current policy on its task's first held-out problems (section 16).

    At most ``completions_per_step`` completions are generated at once (one prompt's, if those are more).
    """
    config, task = trainer.config, trainer.task
    examples = task.heldout[: config.num_eval_problems]
    if not examples:
        raise ValueError(f"task {task.name} has no held-out problems to evaluate on; put some in its heldout")
    size = max(1, config.completions_per_step // config.num_eval_generations)
    chunks = [examples[start : start + size] for start in range(0, len(examples), size)]
    rollouts = concatenate(
        [collect(trainer.sampler, trainer.tokenizer, chunk, config.num_eval_generations, seed) for chunk in chunks]
    )
    rollouts = grade(rollouts, trainer.tokenizer, examples, task.reward)
    texts = decode(trainer.tokenizer, rollouts)
    passed = ((rollouts.rewards >= 1.0) & rollouts.graded).float().view(len(examples), -1).mean(1)
    formed = [not cut and task.well_formed(text) for cut, text in zip(rollouts.truncated.tolist(), texts, strict=True)]
    samples = [
        {"prompt": examples[g].prompt, "completion": text, "reward": reward, "truncated": cut}
        for g, text, reward, cut in zip(
            rollouts.group.tolist(), texts, rollouts.rewards.tolist(), rollouts.truncated.tolist(), strict=True
        )
    ]
    return Evaluation(
        pass_at_1=float(passed.mean()),
        half_width=1.96 * float(passed.std(correction=0)) / math.sqrt(len(examples)),
        reward=rollout_metrics(rollouts)["reward"],
        well_formed=sum(formed) / len(formed),
        samples=samples,
    )


# %%
before = evaluate(trainer)
print(f"pass@1 after one step: {before}, well formed {before.well_formed:.3f}")

# %% [markdown]
# ## What a run leaves behind
#
# Metrics go to a JSON-lines file, one object per step, and to TensorBoard. The curves are drawn from the same records.
# JSON has no `NaN`; a number that is not finite, such as the reward of an ungraded answer, is written as `null`.


# %% tags=["export:metrics"]
def json_line(record: dict) -> str:
    """``record`` as one line of JSON, with null for numbers that are not finite (section 16)."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


class MetricsLog:
    """Appends each step's metrics to ``metrics.jsonl`` and to TensorBoard events in ``folder`` (section 16)."""

    def __init__(self, folder: Path):
        self.records: list[dict[str, float]] = []
        self._lines = (folder / "metrics.jsonl").open("a")
        self._board = optional_import("torch.utils.tensorboard", "train").SummaryWriter(str(folder))

    def write(self, metrics: dict[str, float]) -> None:
        self.records.append(metrics)
        self._lines.write(json_line(metrics))
        self._lines.flush()
        for name, value in metrics.items():
            if name != "step":
                self._board.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._lines.close()
        self._board.close()


def optional_import(module: str, extra: str):
    """Import ``module``, or raise ImportError that names the extra which brings it (section 16)."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"{error.name} is not installed; pip install 'lmrl[{extra}]'") from error


# %% tags=["export:figures"]
def learning_curve(records: list[dict[str, float]], held_out: dict[int, float] | None = None) -> Figure:
    """Six panels of a run's metrics against the step; ``held_out`` maps steps to pass@1, drawn as points."""
    panels = [
        ("reward", "reward (dots: held-out pass@1)", "reward"),
        ("entropy", "entropy [nats per token]", "policy"),
        ("completion_length", "length [tokens]", "policy"),
        ("frac_reward_zero_std", "share of tied groups", "advantage"),
        ("clip_fraction", "share of clipped tokens", "advantage"),
        ("kl_ref" if "kl_ref" in records[0] else "kl_old", "KL [nats per token]", "reference"),
    ]
    figure, axes = new_figure(2, 3, height=4.2, sharex=True)
    steps = [record["step"] for record in records]
    for axis, (name, title, color) in zip(axes.flat, panels, strict=True):
        values = [record[name] for record in records]
        axis.plot(steps, values, color=COLORS[color], alpha=0.35, linewidth=0.8)
        axis.plot(steps, running_mean(values), color=COLORS[color], linewidth=1.8)
        axis.set_title(title, fontsize=9)
        axis.set_ylim(bottom=0)
    if held_out:
        axes[0, 0].plot(list(held_out), list(held_out.values()), "o", color="black", markersize=5)
    for axis in axes[1]:
        axis.set_xlabel("step")
    return figure


def recipe_curves(rewards: dict[str, list[list[float]]], columns: int = 4) -> Figure:
    """The reward of every step, smoothed, one panel per recipe with a line per run; behind them the means of the others."""
    rows = math.ceil(len(rewards) / columns)
    figure, axes = new_figure(rows, columns, height=1.5 * rows + 0.3, sharex=True, sharey=True, squeeze=False)
    curves = {name: [running_mean(run) for run in runs] for name, runs in rewards.items()}
    means = {name: [sum(step) / len(step) for step in zip(*runs)] for name, runs in curves.items()}
    for axis, name in itertools.zip_longest(axes.flat, rewards):
        if name is None:
            axis.set_axis_off()
            continue
        for mean in means.values():
            axis.plot(range(1, len(mean) + 1), mean, color="0.85", linewidth=0.8)
        for run in curves[name]:
            axis.plot(range(1, len(run) + 1), run, color=COLORS["reward"], linewidth=1.2, alpha=0.9)
        axis.set_title(name, fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("reward")
    for column in axes.T:
        [axis for axis in column if axis.axison][-1].tick_params(labelbottom=True)
        [axis for axis in column if axis.axison][-1].set_xlabel("step")
    return figure


def running_mean(values: list[float], width: int = 15) -> list[float]:
    """Mean of up to ``width`` latest values at each step."""
    windows = [values[max(0, i - width + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


# %% [markdown]
# Ctrl-C should lose nothing. The first one lets the current step finish, then the run saves and leaves; a second
# one leaves at once.


# %% tags=["export"]
class InterruptRequest:
    """Context manager that turns the first SIGINT into ``requested = True`` instead of an exception (section 16)."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "InterruptRequest":
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *exception) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, *_) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._previous)
        tqdm.write(
            "interrupted: finishing this step, then saving (press Ctrl-C again to leave at once)", file=sys.stderr
        )


# %% [markdown]
# The run itself: measure, make the folder, take steps under a progress bar, save, measure again. The folder is made only
# after everything that can be wrong with the set-up has had its chance to fail, the reward function included.


# %% tags=["export"]
@dataclass(frozen=True)
class RunResult:
    """What `run` returns: the folder, held-out results before and after, and whether Ctrl-C ended it early."""

    folder: Path
    before: Evaluation
    after: Evaluation
    interrupted: bool


def run(trainer: Trainer, plot: Callable) -> RunResult:
    """Train for ``config.max_steps`` steps and leave everything in the run's folder (section 16).

    ``plot`` draws the curves; `lmrl.figures.trainer.learning_curve` is the one.
    The folder gets config.json, metrics.jsonl, TensorBoard events, learning_curve.png, samples.jsonl and checkpoint/, a
    Hugging Face folder. A step that fails leaves the last checkpoint as it was.
    """
    config = trainer.config
    before = evaluate(trainer)
    folder = new_run_folder(config)
    (folder / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    log = MetricsLog(folder)
    with InterruptRequest() as interrupt, tqdm(total=config.max_steps, desc=folder.name, unit="step") as bar:
        while trainer.steps_done < config.max_steps and not interrupt.requested:
            metrics = trainer.step()
            log.write(metrics)
            bar.set_postfix(progress_fields(metrics), refresh=False)
            bar.update()
            if trainer.steps_done % config.save_steps == 0 and trainer.steps_done < config.max_steps:
                save_checkpoint(trainer, folder)
        save_checkpoint(trainer, folder)
    log.close()
    after = evaluate(trainer)
    write_samples(folder / "samples.jsonl", {"before": before, "after": after})
    curve = plot(log.records, {0: before.pass_at_1, trainer.steps_done: after.pass_at_1})
    curve.savefig(folder / "learning_curve.png")
    return RunResult(folder, before, after, interrupt.requested)


# %% tags=["export"]
def free_run_folder(config: TrainConfig) -> Path:
    """The run's folder, not yet there: ``config.name``, or the task and the next free number (section 16)."""
    parent = Path(config.output_dir)
    if config.name is not None:
        folder = parent / config.name
        if folder.exists():
            raise FileExistsError(f"{folder} exists; choose another --name, or move it away")
    else:
        task = config.task.replace(":", "-")
        folder = next(f for n in itertools.count(1) if not (f := parent / f"{task}-{n}").exists())
    return folder


def new_run_folder(config: TrainConfig) -> Path:
    """Create and return the run's folder; OSError, with the remedy, where that is not possible (section 16)."""
    folder = free_run_folder(config)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {folder} ({error.strerror}); choose another --output-dir") from error
    return folder


def save_checkpoint(trainer: Trainer, folder: Path) -> None:
    """Write the policy as a Hugging Face folder ``checkpoint``, replacing the previous one only when it is complete."""
    save_model(folder / "checkpoint", trainer.model, trainer.tokenizer, {"step": trainer.steps_done})


def write_samples(path: Path, evaluations: dict[str, Evaluation]) -> None:
    """One JSON line per held-out completion, with ``when`` it was sampled (section 16)."""
    rows = ({"when": when, **row} for when, evaluation in evaluations.items() for row in evaluation.samples)
    path.write_text("".join(map(json_line, rows)))


def progress_fields(metrics: dict[str, float]) -> dict[str, str]:
    """The metrics that the progress bar shows, short (section 16)."""
    return {
        "reward": f"{metrics['reward']:.2f}",
        "len": f"{metrics['completion_length']:.1f}",
        "H": f"{metrics['entropy']:.2f}",
        "KL": f"{metrics.get('kl_ref', metrics['kl_old']):.1e}",
        "clip": f"{metrics['clip_fraction']:.3f}",
        "tied": f"{metrics['frac_reward_zero_std']:.2f}",
        "gen": f"{metrics['generation_share']:.0%}",
    }


# %% [markdown]
# ## A short run
#
# Twenty-five steps of 256 completions are enough to see the curves move; `make train` takes the same code to the end.

# %%
records = [metrics] + [trainer.step() for _ in range(config.max_steps - 1)]
after = evaluate(trainer)
print(f"held-out pass@1 {before} → {after}")
show(
    learning_curve(records, {1: before.pass_at_1, config.max_steps: after.pass_at_1}),
    caption="The first steps of a run. Reward rises on training and on held-out problems; as each batch is used twice, the "
    "second pass sees ratios that left 1: a small KL to the policy that sampled, and a few clipped tokens.",
    alt="Six panels against the training step: reward rising from 0.4, entropy and length nearly flat, the share of tied "
    "groups, and the share of clipped tokens and the KL, both small and falling with the learning rate.",
)
assert max(record["ratio_error"] for record in records) == 0.0

# %% [markdown]
# PPO is the same trainer with other settings, a reference for the KL in its reward, and a critic. The first update changes
# nothing else: its advantages come from `gae` (section 8), its ratios from the same pass.

# %%
ppo = replace(config, **RECIPES["ppo"].settings)
critic, reference = build_critic(model), load_reference(model)
trainer = Trainer(ppo, model, tokenizer, task, sampler, reference, critic)
for _ in range(3):
    metrics = trainer.step()
    print(
        {name: round(metrics[name], 4) for name in ("reward", "value_loss", "kl_ref", "ratio_error", "clip_fraction")}
    )
    assert metrics["ratio_error"] < 1e-5

# %% [markdown]
# ## The command line
#
# `lmrl train` builds the pieces from a `TrainConfig`, hands them to the trainer and prints where the results are. What
# the user handed over wrongly becomes one line and exit code 2; a fault of ours keeps its traceback.


# %% tags=["export:cli"]
def build_trainer(config: TrainConfig) -> Trainer:
    """Load task, model, tokenizer and sampler as ``config`` says and hand them to a `Trainer` (section 16)."""
    check_config(config)
    free_run_folder(config)
    device = find_device(config.device)
    task = load_task(config.task, seed=config.seed)
    if config.model == "tiny" and task.name != "arithmetic":
        raise ValueError(f"model 'tiny' reads only digits, + and =; pass --model for task {config.task}")
    if config.reward is not None:
        task = replace(task, reward=load_reward(config.reward))
    if config.model == "tiny":
        torch.set_num_threads(1)  # at this size a second thread gains nothing, and on a busy machine they wait in turns
        path = warm_start_folder(config.seed)
    else:
        path = resolve_model_path(config.model)
    tokenizer = load_tokenizer(path)
    model = load_policy(path, dtype=config.dtype, device=device)
    stop_ids = stop_token_ids(tokenizer, model, task.stop)
    sampling = (model, stop_ids, tokenizer.pad_token_id, config.max_completion_length, config.temperature)
    sampling += (config.top_k, config.top_p, config.min_p)
    reference = load_reference(model) if config.beta != 0.0 else None
    critic = build_critic(model) if config.advantage_estimator == "gae" else None
    trainer = Trainer(config, model, tokenizer, task, TorchSampler(*sampling), reference, critic)
    if config.use_vllm:  # last, for an engine takes a while to start
        trainer.sampler = VLLMSampler(
            *sampling,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            max_model_length=config.vllm_max_model_length,
            enable_sleep_mode=config.vllm_enable_sleep_mode,
        )
    return trainer


# %% tags=["export:cli"]
def train(config: TrainConfig) -> int:
    """Run ``lmrl train``; returns the exit code: 0, or 130 after Ctrl-C (section 16)."""
    plot = optional_import("lmrl.figures.trainer", "train").learning_curve
    optional_import("torch.utils.tensorboard", "train")  # needed later: fail now, before there is a folder
    if config.use_vllm:
        import_vllm(find_device(config.device).split(":")[0])
    trainer = build_trainer(config)
    with trainer.sampler if config.use_vllm else nullcontext():
        result = run(trainer, plot)
    step = f"after {trainer.steps_done} of {config.max_steps} steps"
    print(f"pass@1 on held-out problems: {result.before} before, {result.after} {step}")
    print(f"well-formed answers: {result.before.well_formed:.3f} before, {result.after.well_formed:.3f} after")
    print(f"mean reward: {result.before.reward:.3f} before, {result.after.reward:.3f} after")
    print(f"peak memory: {peak_memory(trainer.model.device.type):.2f} GiB")
    print(f"results: {result.folder}/ (learning_curve.png, metrics.jsonl, samples.jsonl, checkpoint/)")
    return 130 if result.interrupted else 0


# %% [markdown]
# `lmrl plan` takes the settings of `lmrl train`, and a few that a plan alone needs, and prints section 12's table: change the verb
# of a command to know what it will take. It loads no weights.


# %% tags=["export:cli"]
@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """The settings of a plan (section 12): those of `lmrl train`, of which it reads what changes memory, and these."""

    max_prompt_length: int | None = None
    """Tokens of the longest prompt; by default 8 for the tiny policy, and 512 or as many as fit for others."""
    critic: bool = False
    """A critic with a trunk of its own, as PPO has; advantage_estimator "gae" brings it along."""
    reward_model: str | None = None
    """A reward model: a folder or config.json, or "same" for one of the policy's size."""
    master_weights: bool = False
    """float32 copies of bfloat16 weights for the optimiser."""
    optim: str = "adamw"
    """"adamw" or "sgd"."""
    fused_logits: bool = True
    """Section 11's log-probs; without, the logits of a batch are held in full."""
    world_size: int = 1
    """GPUs that share the step: its completions, and by FSDP the models."""


def plan_memory(config: PlanConfig) -> int:
    """Run ``lmrl plan``; returns the exit code (section 16). ValueError for settings that cannot work."""
    check_config(config)
    tiny, dtype = config.model == "tiny", getattr(torch, config.dtype)
    policy = shape_of(build_policy(build_tokenizer()).config if tiny else load_config(config.model), dtype)
    reward_model = policy
    if config.reward_model != "same":
        reward_model = None if config.reward_model is None else shape_of(load_config(config.reward_model), dtype)
    room = 512 if policy.positions is None else policy.positions - config.max_completion_length
    default = 8 if tiny else max(1, min(512, room))
    setup = Setup(
        completions=config.completions_per_step,
        batch=config.per_device_train_batch_size,
        max_prompt_length=default if config.max_prompt_length is None else config.max_prompt_length,
        max_completion_length=config.max_completion_length,
        num_generations=config.num_generations,
        master_weights=config.master_weights,
        optim=config.optim,
        reference=config.beta != 0.0,
        critic=config.critic or config.advantage_estimator == "gae",
        reward_model=reward_model,
        use_vllm=config.use_vllm,
        vllm_gpu_memory_utilization=config.vllm_gpu_memory_utilization,
        vllm_enable_sleep_mode=config.vllm_enable_sleep_mode,
        fused_logits=config.fused_logits,
        world_size=config.world_size,
    )
    print(plan_table(policy, setup))
    return 0


# %% [markdown]
# A recipe is a file of settings. `--config configs/dapo.yaml` takes them as the defaults of the command line, whose options
# still win; a run's own `config.json` is such a file too. A name that no setting has is refused, with the nearest that
# one has.


# %% tags=["export:cli"]
def read_settings(path: str | Path, settings: type):
    """The dataclass ``settings`` with the values of the YAML or JSON file ``path`` (section 16).

    Raises ValueError for a file that is not a mapping, a name that ``settings`` lacks, or a value of another type, OSError
    for a file that cannot be read.
    """
    yaml = optional_import("yaml", "train")
    try:
        values = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; expected lines of the form 'setting: value'")
    known = {field.name: field.type for field in fields(settings)}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1, 0.0)[0]
            raise ValueError(f"{path}: there is no setting {name!r}; did you mean {near}?")
        values[name] = typed(path, name, value, get_args(known[name]) or (known[name],))
    return settings(**values)


def typed(path: str | Path, name: str, value, types: tuple[type, ...]):
    """``value`` if it is of one of ``types``; numbers become float where that is asked for, also "1e-3" (YAML's text)."""
    if float in types and type(value) in (int, str):
        try:
            return float(value)
        except ValueError:
            pass
    if type(value) not in types:
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
        raise ValueError(f"{path}: {name} is {value!r}; expected {wanted}")
    return value


# %%
with TemporaryDirectory() as place:
    file = Path(place) / "mine.yaml"
    file.write_text("advantage_estimator: leave_one_out\nscale_rewards: none\n")
    print(read_settings(file, TrainConfig).advantage_estimator)
    file.write_text("advantage_estimater: leave_one_out\n")
    try:
        read_settings(file, TrainConfig)
    except ValueError as error:
        print(str(error).rpartition("/")[2])
    else:
        raise AssertionError("an unknown name was taken")

# %% [markdown]
# Both commands by name, and what ends them:


# %% tags=["export:cli"]
COMMANDS = {"train": (TrainConfig, train), "plan": (PlanConfig, plan_memory)}
USAGE = "usage: lmrl train|plan [--config FILE.yaml] [options]   (lmrl train --help lists them)"


def parse(command: str, arguments: list[str]):
    """The settings of ``command`` from its options, on top of those of ``--config FILE`` (section 16)."""
    tyro = optional_import("tyro", "train")
    settings, options, files, rest = COMMANDS[command][0], iter(arguments), [], []
    for option in options:
        if option == "--config" or option.startswith("--config="):
            files.append(option.partition("=")[2] or next(options, ""))
        else:
            rest.append("--use-vllm" if option == "--vllm" else option)
    if len(files) > 1 or files == [""]:
        raise ValueError("--config takes one file of settings, for example --config configs/dapo.yaml")
    default = read_settings(files[0], settings) if files else settings()
    return tyro.cli(settings, args=rest, prog=f"lmrl {command}", default=default, description=USAGE)


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the command ``lmrl``; returns the exit code (section 16)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    transformers.utils.logging.disable_progress_bar()
    if not arguments or arguments[0] not in COMMANDS:
        print(USAGE, file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    try:
        return COMMANDS[arguments[0]][1](parse(arguments[0], arguments[1:]))
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"lmrl: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (MemoryError, torch.OutOfMemoryError):
        print("lmrl: out of memory; lower per_device_train_batch_size or num_eval_problems", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lmrl: interrupted; what is saved stays as it is", file=sys.stderr)
        return 130


# %% [markdown]
# **What is still missing.** A run cannot be resumed, and nothing checks the set-up before an expensive one starts; later parts
# of this section bring both. Section 17 leaves the single machine.
