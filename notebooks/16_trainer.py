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
# **The question.** Every part exists: a policy and its sampler (section 1), group advantages (6), a critic (7 and 8), KL
# and entropy (9), the clipped surrogate (10), tensors, masks and weights (11), loaded models (12), tied groups (13), the
# choices that make a recipe (14), tasks and verifiers (15). What is the loop that makes a language model learn from
# them, and how does one see that it does?
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
#
# Around this chain stands what a run of hours needs, and a run of a minute does not. The parts in order; each can be
# read alone:
#
# | part | its question | module |
# |---|---|---|
# | Settings | What describes a run, and which descriptions cannot work? | `lmrl.config` |
# | From prompts to advantages, and to a step | What does each link of the chain take and give? | `lmrl.trainer` |
# | The trainer | What does one step leave to the next? | `lmrl.trainer`, `lmrl.metrics` |
# | Measuring | Is it better at problems that nobody trained on? | `lmrl.trainer` |
# | What a run leaves behind | Where are the numbers, once the process is gone? | `lmrl.metrics` |
# | Checkpoint and resume | How does a killed run go on as if nothing had happened? | `lmrl.checkpoint` |
# | The run | What happens in which order, and on Ctrl-C? | `lmrl.trainer` |
# | Before the first step | What is wrong with the set-up, seen before the curves show it? | `lmrl.preflight` |
# | The command line | How is all this called? | `lmrl.cli`, `lmrl.report` |
# | PPO and GRPO, side by side | What do the metrics say? | |

# %%
import base64
import difflib
import errno
import fcntl
import hashlib
import inspect
import io
import itertools
import json
import threading
import re
import math
import operator
import os
import queue
import resource
import secrets
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple, NoReturn, get_args, get_origin
from unittest.mock import patch

import ipywidgets as widgets
import torch
import transformers
from IPython.display import Markdown, display
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

from lmrl.baselines import group_mean
from lmrl.batch import Rollouts, concatenate, micro_batches, padding_share, used_columns
from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.gae import gae, score_last_token, split_values
from lmrl.logprobs import completion_logprobs, completion_loss, require_output_head
from lmrl.loss import policy_loss, token_weights
from lmrl.memory import GPU_SIZES, Plan, Setup, as_it_is, fits, hints, parameter_count, plan, plan_table, shape_of
from lmrl.mismatch import correction_weights, mismatch_alarm, mismatch_metrics
from lmrl.models import (
    adapted_layers,
    add_adapter,
    disable_dropout,
    find_device,
    load_config,
    load_critic,
    load_policy,
    load_reference,
    load_tokenizer,
    merged,
    resolve_model_path,
    stop_token_ids,
)
from lmrl.packages import PIP_INSTALL, install_command
from lmrl.policy import (
    build_policy,
    build_tokenizer,
    completion_texts,
    completion_logits,
    gather_logprobs,
    masked_mean,
    pad_left,
    pad_right,
    replaced,
    save_model,
    tempered,
    token_logprobs,
    trunk,
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
from lmrl.rewards import (
    RewardError,
    RewardFunction,
    counts_of,
    describe,
    is_reward,
    load_reward,
    reward_name,
    score_completions,
)
from lmrl.rollout import Sampler, TorchSampler, require_fit, truncate
from lmrl.signal import Interval, dynamic_sampling, frac_reward_zero_std, interval_over_problems, pass_at_k, tied_groups
from lmrl.tasks import (
    Example,
    PromptError,
    Task,
    drop_long_prompts,
    encode_prompt,
    encode_prompts,
    load_task,
    require_columns,
    split_settings,
)
from lmrl.trust_region import kl_k1, kl_k3
from lmrl.values import Critic, build_critic, whiten
from lmrl.vllm_rollout import VLLMSampler, checksum, generators_kept, import_vllm, parameter_checksums

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
    """What to train on: "arithmetic", "countdown", "reasoning_gym:NAME", "jsonl:FILE" or "datasets:NAME" (section 15)."""
    model: str = "tiny"
    """"tiny" for section 1's warm-started policy, or a Hugging Face folder, a .gguf file, or a package that holds one."""
    reward: str | None = None
    """A reward in place of the task's: "path/to/file.py:function", a built-in one, or a sum, "0.8*NAME + 0.2*NAME"
    (section 15)."""
    name: str | None = None
    """Name of the run's folder; by default the task and the next free number (section 16)."""
    output_dir: str = "runs"
    """Folder that holds the runs (section 16)."""
    seed: int = 0
    """Seed of the warm start, the order of the prompts and the sampling (section 16)."""

    max_steps: int = 800
    """Steps: batches that are generated and learned from (section 16)."""
    per_device_train_batch_size: int = 512
    """Completions of the greatest length that go through the model at once (section 11)."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass, and compute the rest a second time: less memory (section 12)."""
    gradient_accumulation_steps: int = 1
    """Times as many completions per optimiser step, for the same memory (section 11)."""
    num_generations: int = 4
    """Completions per prompt, G (section 6)."""
    num_iterations: int = 2
    """Passes over each generated batch (section 10)."""
    num_mini_batches: int = 1
    """Parts of a batch, with an optimiser step for each in every pass (section 16)."""
    target_kl: float | None = None
    """Leave a batch when the policy is this far, in nats per token, from the one that it is compared with (section 16)."""
    max_completion_length: int = 4
    """Cap on the tokens of a completion (section 11)."""
    max_prompt_length: int | None = None
    """Prompts of more tokens are dropped with a count, never cut; by default all have to fit (section 15)."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in scoring (section 11)."""
    top_k: int = 0
    """Sample from the k likeliest tokens alone; 0 is all. Needs vllm_importance_sampling_correction (section 11)."""
    top_p: float = 1.0
    """Sample from the likeliest tokens of total probability p alone; 1 is all. Needs the correction too (section 11)."""
    min_p: float = 0.0
    """Sample from tokens of at least min_p times the greatest probability alone; 0 is all. Needs the correction too
    (section 11)."""
    use_vllm: bool = False
    """Generate with a vLLM engine instead of the model itself; --vllm for short (section 14)."""
    vllm_mode: str = "colocate"
    """Where the engine runs: "colocate" is in the trainer's process, on its GPU (section 14)."""
    vllm_gpu_memory_utilization: float = 0.3
    """The engine's share of the GPU's memory (section 14)."""
    vllm_max_model_length: int | None = None
    """The engine's cap on the tokens of prompt and completion; by default what fits (section 14)."""
    vllm_importance_sampling_correction: bool = False
    """Weigh advantages by the ratio of the policy's to the sampler's probabilities, whichever sampler it is (section 14)."""
    vllm_importance_sampling_mode: str = "sequence_mask"
    """"token_truncate", "token_mask", "sequence_truncate" or "sequence_mask": ratio of what, and what is done above the cap
    (section 14)."""
    vllm_importance_sampling_clip_max: float = 3.0
    """Cap on the ratio of the correction (section 14)."""
    vllm_enable_sleep_mode: bool = False
    """Leave the engine's share of a GPU to the trainer while it learns (section 14)."""

    learning_rate: float = 1e-3
    """Peak learning rate of AdamW (section 16)."""
    warmup_steps: int = 40
    """Steps over which the learning rate rises from zero (section 16)."""
    lr_scheduler_type: str = "linear"
    """After the warm-up: "linear" or "cosine" to zero, or "constant" (section 16)."""
    weight_decay: float = 0.0
    """AdamW's weight decay (section 16)."""
    adam_beta2: float = 0.99
    """AdamW's second-moment decay (section 16)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm (section 16)."""
    max_skipped_updates: int = 3
    """A gradient that is not finite skips its optimiser step; so many in a row stop the run (section 16)."""

    advantage_estimator: str = "group"
    """What a reward is compared with: the "group"'s mean, the others of the group ("leave_one_out"), the "batch"'s mean,
    "none", a critic ("gae", section 8), or fresh endings of every prefix ("monte_carlo", section 7)."""
    scale_rewards: str = "group"
    """"group" divides advantages by the group's standard deviation, "batch" by the batch's, "none" does not (section 6)."""
    whiten_advantages: bool = False
    """Give the advantages of a batch's tokens mean 0 and standard deviation 1, with "gae" or "monte_carlo" (section 7)."""
    importance_sampling_level: str = "token"
    """One ratio for every "token", or for every "sequence" (section 14)."""
    clip_type: str = "ppo"
    """"ppo" clips the ratio (section 10), "cispo" caps a token's weight and keeps its gradient (section 14), or "none"."""
    epsilon: float = 0.2
    """Clip range of the ratio (section 10)."""
    epsilon_high: float | None = None
    """Upper clip range, if different from epsilon (section 10)."""
    delta: float | None = None
    """Bound on the ratio of tokens with negative advantage (section 14)."""
    loss_type: str = "dapo"
    """How tokens are weighted: "dapo" or "bnpo" (every token alike), "grpo" or "dr_grpo" (section 11)."""
    beta: float = 0.0
    """Strength of the KL penalty to the starting policy; 0 needs no reference model (section 9)."""
    sync_ref_model: bool = False
    """Move the reference towards the policy every ref_model_sync_steps steps (section 16)."""
    ref_model_mixup_alpha: float = 0.6
    """The policy's share in the new reference; 1 is a copy of the policy (section 16)."""
    ref_model_sync_steps: int = 512
    """Steps between two moves of the reference (section 16)."""
    kl_estimator: str = "k3"
    """"k1", "k2" or "k3" of the sampled token, or "exact" over the vocabulary (sections 9 and 14)."""
    kl_in: str = "loss"
    """Where the penalty stands: in the "loss", or in the "reward", with k1 (section 14)."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus in the loss (section 14)."""
    top_entropy_quantile: float = 1.0
    """Learn only from this share of the tokens, those of the highest entropy; 1 is all (section 14)."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the cap out of the loss (section 11)."""
    overlong_buffer: int = 0
    """Tokens before the cap over which a punishment for length rises to 1; 0 is none (section 14)."""
    dynamic_sampling: bool = False
    """Draw prompts until enough groups have unequal rewards, and learn from those alone (section 13)."""
    gamma: float = 1.0
    """Discount per token, of "gae" (section 8)."""
    lam: float = 0.95
    """λ of "gae" (section 8)."""
    critic_learning_rate: float = 1e-3
    """Peak learning rate of the critic's own AdamW, for "gae" (section 10)."""
    share_critic_trunk: bool = False
    """Put the critic's head on the policy's trunk and step both as one, at learning_rate: no second trunk (section 16)."""
    vf_coef: float = 0.1
    """Weight of the critic's loss. A critic with its own AdamW feels no factor, but where max_grad_norm cuts (section 10)."""
    cliprange_value: float | None = 0.2
    """Range around the old value in which a prediction is rewarded for moving (section 10)."""
    num_value_samples: int = 4
    """Fresh endings of every prefix, for "monte_carlo" (section 7)."""

    preflight: bool = True
    """Look for faults of the set-up before the first step, and do not start with one (section 16)."""
    reward_timeout: float | None = None
    """Seconds that the reward function has for the completions of a step, or of an evaluation; later the run is saved and
    ends. By default there is no limit (section 16)."""
    num_eval_problems: int = 256
    """Held-out problems for pass@1, before and after (section 16)."""
    num_eval_generations: int = 4
    """Completions per held-out problem (section 16)."""
    report_to: str = "tensorboard"
    """Where metrics go besides metrics.jsonl: "tensorboard", "wandb", "trackio", several with commas, or "none" (section 16)."""
    save_steps: int = 100
    """Every so many steps, and at the end, held-out pass@1 is measured and a checkpoint is written (section 16)."""
    save_total_limit: int | None = 2
    """How many checkpoints are kept, the newest, besides the best; None is all (section 16)."""
    resume: str | None = None
    """Folder of a run that goes on, with its own settings, after its newest whole checkpoint (section 16)."""
    dtype: str = "float32"
    """Number format of the weights: "float32", "bfloat16", or "float16", which needs master_weights (section 16)."""
    master_weights: bool = False
    """float32 copies of bfloat16 or float16 weights, which are what the optimiser steps (section 12)."""
    use_peft: bool = False
    """Freeze the model and train a LoRA adapter; checkpoint/ is the model with the adapter merged (section 12)."""
    lora_r: int = 16
    """Rank of the adapter (section 12)."""
    lora_alpha: int = 32
    """The adapter's product BA is multiplied by lora_alpha / lora_r (section 12)."""
    lora_dropout: float = 0.0
    """Only 0: with dropout, log-probs of the same tokens differ from pass to pass (section 12)."""
    lora_target_modules: str = "all-linear"
    """Names of the layers that get the adapter, one or several; "all-linear" leaves out the output head (section 12)."""
    torch_compile: bool = False
    """Score and learn with compiled layers: up to a minute at the start, then less time for each step (section 16)."""
    device: str = "auto"
    """"auto" is a GPU if there is one, else the CPU (section 12)."""

    @property
    def completions_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def beta_in(self, place: str) -> float:
        """The strength of the KL penalty in the "loss" or in the "reward"; 0 if it stands in the other place."""
        return self.beta if self.kl_in == place else 0.0


# %% [markdown]
# One setting is a list: where the metrics go (below, TensorBoard and two others).


# %% tags=["export:config"]
TRACKERS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def tracker_names(report_to: str) -> list[str]:
    """The trackers in ``report_to``, names with commas between them or "none"; ValueError for another name (section 16)."""
    names = [] if report_to == "none" else [name.strip() for name in report_to.split(",")]
    if not set(names) <= TRACKERS.keys():
        raise ValueError(f"report_to is {report_to!r}; choose from {', '.join(TRACKERS)}, or none")
    return names


# %% [markdown]
# A setting that cannot work is refused before anything is loaded, with the number and the way out; so are settings that
# contradict each other (section 14). The trainer asks too.


# %% tags=["export:config"]
def check_config(config: TrainConfig) -> None:
    """Raise ValueError, with the value and the remedy, for settings that cannot work."""
    positive = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations")
    positive += ("max_completion_length", "temperature", "learning_rate", "save_steps", "max_grad_norm")
    positive += ("num_eval_problems", "num_eval_generations", "num_generations", "critic_learning_rate", "vf_coef")
    positive += ("vllm_importance_sampling_clip_max", "max_skipped_updates", "num_mini_batches")
    positive += ("lora_r", "lora_alpha", "ref_model_sync_steps")
    for name in positive:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be greater than 0")
    for name in ("seed", "warmup_steps", "weight_decay", "beta", "entropy_coef"):
        if not getattr(config, name) >= 0:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be 0 or more")
    for name in ("temperature", "weight_decay", "beta", "entropy_coef"):
        if math.isinf(getattr(config, name)):
            raise ValueError(f"{name} is {getattr(config, name)}; it must be finite")
    if config.save_total_limit is not None and not config.save_total_limit > 0:
        raise ValueError(f"save_total_limit is {config.save_total_limit}; keep at least 1, or null for all")
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
    if config.reward_timeout is not None and not 0 < config.reward_timeout <= 86_400:
        raise ValueError(
            f"reward_timeout is {config.reward_timeout}; give seconds, more than 0 and at most a day (86400), or leave it out"
        )
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
    if config.completions_per_step % config.num_mini_batches:
        raise ValueError(
            f"a step has {config.completions_per_step} completions, which num_mini_batches {config.num_mini_batches} does "
            "not divide; change it, or the size of the step"
        )
    if not 0 < config.vllm_gpu_memory_utilization <= 1:
        raise ValueError(
            f"vllm_gpu_memory_utilization is {config.vllm_gpu_memory_utilization}; it is a share of the GPU, so take "
            "0 < share <= 1, for example 0.3"
        )
    tracker_names(config.report_to)
    if config.max_prompt_length is not None and config.max_prompt_length < 1:
        raise ValueError(f"max_prompt_length is {config.max_prompt_length}; it must be at least 1, or left out")
    if config.vllm_max_model_length is not None and config.vllm_max_model_length <= config.max_completion_length:
        raise ValueError(
            f"vllm_max_model_length is {config.vllm_max_model_length} and max_completion_length "
            f"{config.max_completion_length}; that leaves no token for a prompt"
        )
    choices = {"lr_scheduler_type": ("linear", "cosine", "constant"), "dtype": ("float32", "bfloat16", "float16")}
    choices |= {"vllm_mode": ("colocate",)}
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} is {getattr(config, name)!r}; choose one of {', '.join(allowed)}")
    if config.name is not None and (config.name in ("", "..") or config.name != Path(config.name).name):
        raise ValueError(f"name is {config.name!r}; give a folder's name without slashes, and its place as output_dir")
    check_recipe(config)
    for applies, reason in impossible_updates(config):
        if applies:
            raise ValueError(reason)


# %% [markdown]
# The settings of the update are explained below, where they act; which of them exclude each other is said here.


# %% tags=["export:config"]
def impossible_updates(config: TrainConfig) -> list[tuple[bool, str]]:
    """What is wrong with settings of the update, and the remedy, each with whether it applies (section 16)."""
    c, tokens = config, config.advantage_estimator in ("gae", "monte_carlo")
    once = c.num_iterations * c.num_mini_batches == 1
    return [
        (
            c.target_kl is not None and not c.target_kl > 0,
            f"target_kl is {c.target_kl}; it must be greater than 0, or left out",
        ),
        (
            c.target_kl is not None and once,
            f"target_kl is {c.target_kl}, but a batch is used for one optimiser step, at which the policy has not moved yet; "
            "leave target_kl out, or raise num_iterations or num_mini_batches",
        ),
        (
            c.whiten_advantages and not tokens,
            f'whiten_advantages is for advantages that each token has of its own; advantage_estimator "{c.advantage_estimator}" '
            'has one per completion, for which advantage_estimator "batch" with scale_rewards "batch" does the same',
        ),
        (
            c.whiten_advantages and c.scale_rewards == "batch",
            'whiten_advantages divides by a standard deviation already; set scale_rewards to "none"',
        ),
        (
            c.master_weights and c.dtype == "float32",
            "master_weights is for bfloat16 and float16: float32 weights are already what the optimiser steps",
        ),
        (
            c.dtype == "float16" and not c.master_weights,
            "dtype float16 needs master_weights: in float16 AdamW's epsilon of 1e-8 is zero, and it divides by it; set "
            "master_weights, or take bfloat16",
        ),
        (
            c.lora_dropout != 0,
            f"lora_dropout is {c.lora_dropout}; with dropout the log-probs of the same tokens differ from pass to pass, so that "
            "ratios and KL are not those of the policy: leave it at 0",
        ),
        (
            not c.use_peft and (c.lora_r, c.lora_alpha, c.lora_target_modules) != (16, 32, "all-linear"),
            "settings of a LoRA adapter without use_peft; set use_peft, or leave them out",
        ),
        (
            c.share_critic_trunk and c.advantage_estimator != "gae",
            f'share_critic_trunk is for a critic, and advantage_estimator "{c.advantage_estimator}" has none; leave it out, or '
            'set advantage_estimator to "gae"',
        ),
        (
            c.share_critic_trunk and c.critic_learning_rate != TrainConfig.critic_learning_rate,
            f"critic_learning_rate is {c.critic_learning_rate}, but with share_critic_trunk one optimiser steps policy and critic, "
            "at learning_rate; leave critic_learning_rate out, and weigh the critic's loss by vf_coef",
        ),
        (
            c.sync_ref_model and c.beta == 0,
            "sync_ref_model moves the reference, but with beta 0 there is none; set beta, or leave sync_ref_model out",
        ),
        (
            c.sync_ref_model and not 0 < c.ref_model_mixup_alpha <= 1,
            f"ref_model_mixup_alpha is {c.ref_model_mixup_alpha}; it is the policy's share, so take 0 < share <= 1",
        ),
        (
            c.sync_ref_model and c.use_peft,
            "sync_ref_model mixes weights, but the product BA of mixed adapters is not the mix of their products; leave out "
            "sync_ref_model or use_peft",
        ),
    ]


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
# so, once. What it counts beside, such as time-outs or the parts of a weighted sum (section 15), is logged with the step.
#
# It is the user's code, and it may not come back at all: a lookup without a time limit, a pattern that backtracks forever. In
# the main thread an alarm ends such a call where it stands, an event loop around it or not. No other thread can be
# interrupted, so there the call gets a thread of its own, and we stop waiting for it.


# %% tags=["export"]
class TooSlow(BaseException):
    """Raised by `within`; no Exception, so that a function that catches those does not swallow it (section 16)."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in the body after ``seconds``, and again at its end if it was swallowed; main thread only (section 16)."""
    rung = False

    def ring(*_):
        nonlocal rung
        rung = True
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if rung:
        raise TooSlow


def within(seconds: float | None, function: Callable):
    """What ``function()`` returns or raises; `TooSlow` if that takes more than ``seconds``, None for no limit (section 16).

    In the main thread the call is ended, as soon as it is in Python code or waits; a computation inside a C library is
    not, and its time counts once it returns. In another thread the call cannot be ended: it is left behind, and goes on
    until it returns or the process ends. What it holds, a lock or a core, it keeps until then.
    """
    if seconds is None:
        return function()
    if threading.current_thread() is threading.main_thread():
        with alarm(seconds):
            return function()
    outcome = queue.SimpleQueue()

    def call():
        try:
            outcome.put((function(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise TooSlow from None
    if error is not None:
        raise error
    return result


# %% tags=["export"]
def decode(tokenizer, rollouts: Rollouts) -> list[str]:
    """The completions as texts, without the stop token that ended them (section 16)."""
    return completion_texts(tokenizer, rollouts.completion_ids, used_columns(rollouts.mask), rollouts.truncated)


def ask_reward(
    reward: RewardFunction, examples: list[Example], completions: list[str], seconds: float | None = None
) -> tuple[Tensor, Tensor]:
    """`score_completions` of one completion for each example, with its prompt and columns (section 16).

    RewardError if that takes more than ``seconds``.
    """
    columns = {name: [example.columns[name] for example in examples] for name in examples[0].columns}
    prompts = [example.prompt for example in examples]
    try:
        return within(seconds, lambda: score_completions(reward, prompts, completions, columns))
    except TooSlow:
        raise RewardError(
            f"reward function {reward_name(reward)}: no answer for {len(completions)} completions within {seconds:g} s; "
            "give it a time limit for each completion (section 15 shows how), or raise reward_timeout"
        ) from None


def grade(
    rollouts: Rollouts, tokenizer, examples: list[Example], reward: RewardFunction, seconds: float | None = None
) -> Rollouts:
    """The rollouts with ``rewards`` and ``graded`` ``[B]`` from the reward function, which has ``seconds`` (section 16)."""
    rows = [examples[g] for g in rollouts.group.tolist()]
    rewards, graded = ask_reward(reward, rows, decode(tokenizer, rollouts), seconds)
    if not graded.any():
        warnings.warn(
            "the reward function graded none of the completions: there is nothing to learn from", stacklevel=2
        )
    device = rollouts.group.device
    return replace(rollouts, rewards=rewards.to(device), graded=graded.to(device))


def reward_metrics(reward: RewardFunction) -> dict[str, float]:
    """The ``metrics`` of a reward function's last call, none if it has no such dictionary (sections 15 and 16).

    Raises RewardError for one that is not a finite number.
    """
    metrics = counts_of(reward)
    for name, value in metrics.items():
        if value is None or not is_reward(value):
            raise RewardError(f"reward function {reward_name(reward)}: its metric {name!r} is {value!r}, not a number")
    return {name: float(value) for name, value in metrics.items()}


# %% [markdown]
# **Rewards → advantages.** There are two kinds. If a completion is compared with others, all its tokens share one number
# (sections 6 and 14). If every token has a value to be compared with, from a critic or from fresh endings, each has its own
# (sections 7 and 8). What is taken from the reward, a punishment for length or the KL to the reference, is taken here: the
# metrics keep the reward that the task gave.
#
# Advantages of single tokens can be whitened: section 7's mean 0 and standard deviation 1, over all tokens that enter
# the loss and before the batch is cut into anything. TRL's PPO does that always, and can whiten the rewards before it as
# well. We do not: a reward that is divided by the spread of its batch is measured in another unit in every step, and the
# critic, whose target it is, would chase the unit.


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
    values are taken as exact, and λ as 0. Whitened over the batch if ``config.whiten_advantages``.
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
    if config.whiten_advantages:
        advantages = whiten(advantages, loss_mask(rollouts, config.mask_truncated_completions))
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
# **Which rows are worth a pass?** A completion of a tied group has advantage zero, and without a KL penalty, an entropy
# bonus or a critic it has no gradient at all: there is nothing to compute for it. The weights were fixed for the whole
# step, so leaving such rows out changes no other row's share. Late in training most groups are tied, and most of the
# work goes away.


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


@contextmanager
def named_step(number: int) -> Iterator[None]:
    """Let a FloatingPointError of a ``with`` block say in which step it came up (section 16)."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"step {number}: {error}") from error


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


def mean_metrics(records: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the records that have it: over the draws of a step, for what a reward counts (section 16)."""
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record[name] for record in records if name in record] for name in names}
    return {name: sum(column) / len(column) for name, column in values.items()}


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
# All state of a run is here: the weights, the optimiser, how many steps are done, which prompts are next, and the generators
# behind every random choice. Prompts are visited in shuffled passes over the data. The learning rate follows from the number
# of steps alone.


# %% tags=["export"]
def generator_for(seed: int, purpose: str) -> torch.Generator:
    """A CPU generator for one ``purpose`` of a run, independent of the others of the same ``seed`` (section 16)."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


class ShuffledBatches:
    """Endless batches of ``size`` indices below ``count``, each pass over all of them in a new order (section 16).

    ``waiting`` are the indices of the pass that are still to come: with the generator, the place in the data.
    """

    def __init__(self, count: int, size: int, generator: torch.Generator):
        self.count, self.size, self.generator, self.waiting = count, size, generator, []

    def __iter__(self) -> "ShuffledBatches":
        return self

    def __next__(self) -> list[int]:
        while len(self.waiting) < self.size:
            self.waiting += torch.randperm(self.count, generator=self.generator).tolist()
        batch, self.waiting = self.waiting[: self.size], self.waiting[self.size :]
        return batch


def learning_rate_factor(step: int, config: TrainConfig) -> float:
    """Factor on the learning rate at ``step`` (0-based): linear warm-up, times a decay to 0 at the end (section 16)."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    done = step / config.max_steps
    decay = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
    return warmup * decay[config.lr_scheduler_type]


# %% [markdown]
# ### One optimiser step
#
# What steps a model is an object of its own, since a critic has one too. It holds AdamW, and takes care of two things
# that go wrong in half precision or on a bad batch.
#
# **A gradient that is not finite.** Every log-prob may be fine and the gradient still `NaN`, or too large for its format. A
# step along it would put `NaN` into every weight, and into Adam's moments, which never lose it again. So that one step is
# skipped: weights and moments stay as they are, and `skipped_updates` counts it. Once is an accident. After
# `max_skipped_updates` in a row the run stops, for then the fault is not in the batch.
#
# **Steps that are too small for the format.** AdamW moves a weight by about the learning rate $\eta$. The bfloat16
# numbers around a weight $w$ are $2^{-8}$ to $2^{-7}$ of $|w|$ apart, and less than half of that is rounded away: with
# $\eta = 10^{-6}$ all weights above about $5\cdot10^{-4}$ stand still, however often they are pushed. With
# `master_weights` the optimiser therefore steps a copy in float32, where the small steps add up, and the model gets the
# copy, rounded, after every step. What that takes is section 12's table: 16 bytes for each parameter, as without half
# precision, but with its fast matrix products.
#
# **Gradients that are too small for the format.** float16 has more digits than bfloat16 and fewer exponents: below $6
# \cdot 10^{-8}$ there is nothing but zero, and many gradients are smaller. So the loss is multiplied by a scale $s$
# before the backward pass, and the float32 gradients divided by it before their norm is taken, so that `max_grad_norm`
# means the true gradient. $s$ is a power of two, which changes the exponent of a number and none of its digits. A scale
# that is too high shows as a gradient that is not finite: that step is skipped, and the next one has half the scale;
# after 2000 good steps twice the scale is tried. Our loss is proportional to the weights of the tokens, so the scale is
# a factor on those; it has to go in before section 11's fused loss, which has its gradients ready, and rounded, before
# anything is multiplied from outside.


# %% tags=["export"]
LOSS_SCALE, GOOD_STEPS = 2.0**16, 2000  # of float16: what is tried first; steps after which twice as much is tried


def float32_copies(weights: list[Tensor]) -> list[Tensor]:
    """A float32 copy of each of ``weights`` for the optimiser (section 16)."""
    return [weight.detach().to(torch.float32, copy=True) for weight in weights]


class Learner:
    """Steps the trainable weights of a model (section 16).

    ``optimizer`` is AdamW over ``masters``: the ``weights``, or their float32 copies with ``config.master_weights``. A loss is
    to be multiplied by ``scale``, 1 except in float16, before its backward pass. ``skipped_in_a_row`` and ``good_steps``
    count optimiser steps since the last one that was taken, or skipped.
    """

    def __init__(self, model, learning_rate: float, config: TrainConfig):
        self.config, self.learning_rate = config, learning_rate
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = float32_copies(self.weights) if config.master_weights else self.weights
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=learning_rate, betas=(0.9, config.adam_beta2), weight_decay=config.weight_decay
        )
        self.scaled = any(weight.dtype == torch.float16 for weight in self.weights)
        self.scale = LOSS_SCALE if self.scaled else 1.0
        self.good_steps = self.skipped_in_a_row = 0

    def start(self, step: int) -> float:
        """Take the learning rate of ``step`` (0-based), and return it."""
        rate = self.learning_rate * learning_rate_factor(step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    def step(self) -> float:
        """One optimiser step along the gradients of the weights, cut to ``max_grad_norm``; their norm before that.

        A norm that is not finite changes nothing. FloatingPointError at the last of ``max_skipped_updates`` in a row.
        """
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float().div_(self.scale)
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.config.max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self.round()
        self.count(math.isfinite(norm))
        return norm

    @torch.no_grad()
    def round(self) -> None:
        """Give the weights the values of their masters."""
        if self.masters is not self.weights:
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)
                master.grad = None

    def count(self, taken: bool) -> None:
        """Note whether a step was taken or skipped, and adjust the loss scale of float16."""
        self.good_steps = self.good_steps + 1 if taken else 0
        if taken:
            self.skipped_in_a_row = 0
            if self.scaled and self.good_steps % GOOD_STEPS == 0:
                self.scale *= 2
        elif self.scale > 1:
            self.scale /= 2
        else:
            self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.max_skipped_updates:  # lowered, maybe, at a resume
            raise FloatingPointError(
                f"{self.skipped_in_a_row} optimiser steps in a row were skipped, for their gradients were not finite; "
                "lower learning_rate (or use dtype float32), or look at the rewards"
            )


# %% [markdown]
# A weight of 1 that is pushed down a hundred times by $10^{-4}$:

# %%
for dtype, master_weights in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
    layer = torch.nn.Linear(1, 1, bias=False, dtype=getattr(torch, dtype))
    torch.nn.init.ones_(layer.weight)
    learner = Learner(layer, 1e-4, replace(config, dtype=dtype, master_weights=master_weights))
    for _ in range(100):
        layer.weight.grad = torch.ones_like(layer.weight)
        learner.step()
    print(f"{dtype:9}{'+ master' if master_weights else '':9} {layer.weight.item()}")
    assert (layer.weight.item() == 1) == (dtype == "bfloat16" and not master_weights)

# %% [markdown]
# ### One step of the run
#
# A step may cut its batch, move its reference and save memory on the way. First these three, each a function of its own.
#
# **Mini-batches.** PPO cuts a batch into `num_mini_batches` parts and takes a step for each. Each step is a loss of its
# own, so the weights of its tokens are normalised over its own rows. The prompts of a batch came in random order, so
# that consecutive rows are as good as any. One thing changes that no error would show: from the second step on the
# policy is no longer the one that the ratio compares with, so that the old log-probs have to be known before the first.
# What is a statement about the batch, such as whitening, has been made before it is cut.


# %% tags=["export"]
def needs_old_logprobs(config: TrainConfig) -> bool:
    """Whether a setting needs the policy's log-probs or entropies before the update (section 16)."""
    correction, several = config.vllm_importance_sampling_correction, config.num_mini_batches > 1
    return correction or several or config.beta_in("reward") != 0 or config.top_entropy_quantile < 1


def mini_batches(rollouts: Rollouts, config: TrainConfig) -> list[list[tuple[Rollouts, Tensor]]]:
    """For each of ``num_mini_batches`` optimiser steps its micro-batches, rows without a gradient left out (section 16)."""
    batches = []
    for rows in torch.arange(len(rollouts), device=rollouts.mask.device).chunk(config.num_mini_batches):
        batch = rollouts.select(rows)
        mask = loss_mask(batch, config.mask_truncated_completions)
        weights = token_weights(mask, config.loss_type, config.max_completion_length)
        trained = rows_with_gradient(batch, weights, config)
        trained[0] |= ~trained.any()  # a step without any signal is still a step, with gradient zero
        batches.append(list(micro_batches(batch.select(trained), weights[trained], token_budget(batch, config))))
    return batches


# %% [markdown]
# **A reference that follows.** The KL to the starting policy ends a long run early. With `sync_ref_model` the reference goes
# along: every `ref_model_sync_steps` steps it becomes $\alpha \theta + (1 - \alpha) \theta_{\mathrm{ref}}$ with $\alpha$ =
# `ref_model_mixup_alpha` (Gorbatovski et al., 2024). The penalty is then for the way since the last moves.


# %% tags=["export"]
@torch.no_grad()
def move_reference(reference, model, alpha: float) -> None:
    """Set the weights of ``reference`` to ``alpha`` times those of ``model`` and 1 - ``alpha`` times its own (section 16)."""
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        dtype = torch.promote_types(old.dtype, torch.float32)
        old.copy_(torch.lerp(old.to(dtype), new.to(dtype), alpha))


# %% [markdown]
# **Gradient checkpointing** is section 12's: only the layers' inputs are kept, and the backward pass computes each layer
# again. The numbers are the same. transformers does it for layers in training mode alone, in which they have no cache;
# so that mode is on while `learn` runs, and for the layers themselves alone, and the sampler keeps its cache.


# %% tags=["export"]
@contextmanager
def checkpointed(layers: list[torch.nn.Module]) -> Iterator[None]:
    """Let gradient checkpointing act on ``layers`` in a ``with`` block; what is inside of them stays in eval mode."""
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


# %% [markdown]
# **Compiled layers.** PyTorch runs a layer as some hundred small operations, and writes and reads memory for each. With
# `torch_compile` it looks at the operations of the whole trunk first, and makes programs that do many of them at once:
# Triton kernels on a GPU, C++ on a CPU. One is made for scoring and one for learning when they are first needed, in the
# preflight or the first step, and policy, reference and critic share them where they are alike. Micro-batches have other shapes all the
# time, so the programs are asked for with `dynamic=True`, in which rows and lengths are variables; or each new shape would
# be a new program. The log-probs' part, behind the trunk, is section 11's, which has its kernels already. And
# the sampler keeps the layers as they are: it takes them one token at a time, with a cache that grows. So the compiled
# `forward` stands in its place while the trainer scores and learns, and not a moment longer; weights and their names are
# the same ones.
#
# What it brings depends on the machine. On one CPU core, with the default job, compiling took 25 seconds, and from then on
# scoring and learning took 0.13 seconds of a step in place of 0.17: after some 700 steps it has paid for itself. What it
# brings for a large model on a GPU has not been measured here. The numbers are those of the other kernels up to rounding, so a metric
# may differ in its last digits: the ratios of a first step are exactly 1 still, except where old log-probs come from scoring.
#
# Where nothing can be compiled, for want of a C++ compiler for example, a program of one line shows it before the run starts.
# Beside a vLLM engine on a CPU nothing would be, for section 14 switches the compiler off there; the command line refuses the two.


# %% tags=["export"]
def compiled_forwards(trunks: list[torch.nn.Module], backend: str = "inductor") -> dict[torch.nn.Module, Callable]:
    """A compiled ``forward`` for each of ``trunks``, for input of any number of rows and tokens (section 16).

    Raises ValueError, with the remedy, if PyTorch cannot compile for their device here.
    """
    device = next(trunks[0].parameters()).device
    try:
        torch.compile(torch.neg, backend=backend)(torch.ones(2, device=device))
    except Exception as error:  # of a compiler: PyTorch wraps what is wrong in kinds of its own
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"torch_compile cannot compile for {device.type} here ({reason}); install what compiles, g++ for a CPU and Triton "
            "for a GPU, or leave torch_compile out"
        ) from error
    return {part: torch.compile(part.forward, backend=backend, dynamic=True) for part in trunks}


@contextmanager
def compiled(forwards: dict[torch.nn.Module, Callable]) -> Iterator[None]:
    """Let modules use other ``forwards`` in a ``with`` block, the compiled ones (section 16)."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.enter_context(patch.object(module, "forward", forward))
        yield


# %% [markdown]
# **When to leave a batch.** With `target_kl`, no further step is taken from a batch as soon as the policy, in the
# forward pass before that step, is farther from the old one than that. The pass is wasted then; in exchange the KL is
# measured on all tokens of the step, and not guessed. `updates` is the number of optimiser steps that a batch gave.
#
# A batch may thus see several optimiser steps, and one number has to stand for all of them. Most are those of the last
# pass, where ratios and gradients have moved furthest. What describes the policy as the batch found it is from the
# first.


# %% tags=["export"]
def update_metrics(steps: list[dict[str, float]], num_mini_batches: int) -> dict[str, float]:
    """The metrics of an update from those of its optimiser steps: means over those of the last pass (section 16).

    Of the first pass, before the policy moves, are ``ratio_error`` (its first step), ``sampler_gap`` (the greatest), and
    what describes the policy and the critic as they were.
    """
    first, last = steps[:num_mini_batches], steps[-num_mini_batches:]
    metrics = {name: sum(step[name] for step in last) / len(last) for name in last[0]}
    for name in {"kl_ref", "trained_entropy", "value_loss"} & metrics.keys():
        metrics[name] = sum(step[name] for step in first) / len(first)
    norms = [step[name] for step in steps for name in ("grad_norm", "critic_grad_norm") if name in step]
    return metrics | {
        "ratio_error": steps[0]["ratio_error"],
        "sampler_gap": max(step["sampler_gap"] for step in first),
        "updates": len(steps),
        "skipped_updates": sum(not math.isfinite(norm) for norm in norms),
    }


# %% [markdown]
# **A critic on the policy's trunk.** A critic with a trunk of its own has no parameter in common with the policy: two
# losses, two optimisers. With `share_critic_trunk` the trunk's weights $\theta$ are in both losses, and the head $w$ in one, so
# that there is a single function to descend,
#
# $$L(\theta, w) = L_\pi(\theta) + c_V L_V(\theta, w), \qquad \nabla_\theta L = \nabla_\theta L_\pi + c_V \nabla_\theta L_V,
# \qquad \nabla_w L = c_V \nabla_w L_V .$$
#
# The backward passes of two losses add up their gradients by themselves. What has to change is who steps: one AdamW over
# $\theta$ and $w$ together, one norm, one step. Two of them over the same weights would step twice, each along a
# direction of length one, whatever $c_V$ (`vf_coef`) is. Now it is what decides how much of the trunk's step is the critic's. The
# trunk is passed once for each loss, so that only one of them has its activations in memory; what is saved is section
# 12's second trunk, with its gradients and its optimiser state. The head belongs to the trainer: no sampler and no saved model
# sees it.


# %% tags=["export"]
def shares_trunk(critic: Critic | None, model) -> bool:
    """Whether the critic's head stands on the trunk of ``model`` itself (section 16)."""
    return critic is not None and critic.trunk is trunk(model)


def require_shared_trunk(critic: Critic | None, model, share_critic_trunk: bool) -> None:
    """Raise ValueError, with the remedy, unless the critic shares the trunk of ``model`` as the setting says (section 16)."""
    if shares_trunk(critic, model) == share_critic_trunk:
        return
    if share_critic_trunk:
        raise ValueError(
            "share_critic_trunk is set, but the critic has a trunk of its own; pass load_critic(model, shared=True)"
        )
    raise ValueError(
        "the critic stands on the policy's own trunk, which two optimisers would step in turn; set share_critic_trunk, or "
        "pass load_critic(model)"
    )


# %% [markdown]
# A step never has a prompt twice. Who brings a file with fewer prompts than that gets the settings that work.


# %% tags=["export"]
def prompts_per_step(config: TrainConfig, task: Task) -> int:
    """Different prompts in a step; ValueError, with sizes that work, if ``task.train`` has fewer (section 16)."""
    prompts, there = config.completions_per_step // config.num_generations, len(task.train)
    if prompts <= there:
        return prompts
    needed = f"a step takes {prompts} prompts ({config.completions_per_step} completions / num_generations "
    needed += f"{config.num_generations}), but task {task.name} has {there} to train on"
    accumulation, whole = config.gradient_accumulation_steps, math.lcm(config.num_generations, config.num_mini_batches)
    unit = whole // math.gcd(whole, accumulation)  # the batch sizes that make whole groups and mini-batches
    largest = there * config.num_generations // accumulation // unit * unit
    if largest == 0:
        size = f"gradient_accumulation_steps 1, num_mini_batches 1 and per_device_train_batch_size {there * config.num_generations}"
        raise ValueError(f"{needed}; add prompts, or take at most {size}")
    less = f", or a smaller multiple of {unit}" if largest > unit else ""
    raise ValueError(f"{needed}; add prompts, or take per_device_train_batch_size {largest}{less}")


# %% [markdown]
# Now the object that holds it all together.
#
# `step` reads straight down, in the order of the chain at the top, and reports the seconds of its phases: where a step
# spends its time depends on the model and the lengths, and is worth a look in every run (claim 11.5). `gather` is the
# stage that may draw more than once: under dynamic sampling (section 13) the metrics are over all that was drawn, and if
# no group at all is mixed, all of it is kept and there is nothing to learn. `prepare` adds what the loss needs beside
# the rewards. `update` is the inner half: `learn` adds up the gradients of all micro-batches and takes one optimiser
# step, and `update` does that `num_iterations` times over the same batch. A critic learns from the same pieces, with a
# `Learner` of its own or, on a shared trunk, with the policy's.
#
# A step may fail on the way, most likely in the user's reward function. Until `update` begins, nothing has changed but the
# place in the prompts and in the random numbers. Both are put back, and the trainer is where it was before the step.


# %% tags=["export"]
class Trainer:
    """Every recipe of section 14 on one machine (section 16): the only object with state.

    ``model`` is any causal language model, ``sampler`` any `Sampler` over the same weights, ``reference`` a frozen
    model, needed when ``config.beta`` is not 0, ``critic`` a `Critic`, needed for ``advantage_estimator`` "gae". Dropout is
    off throughout. Raises ValueError when a step wants more different prompts than ``task.train`` has, reference or critic
    is missing, the critic's trunk is not the one that ``config.share_critic_trunk`` says, the longest prompt does not fit the model, or the model's logits are not those of its output head
    (`require_output_head`).
    """

    def __init__(
        self, config: TrainConfig, model, tokenizer, task: Task, sampler: Sampler, reference=None, critic=None
    ):
        check_config(config)
        self.dropped_prompts, self.reward_metrics = 0, []
        if config.max_prompt_length is not None:
            task, self.dropped_prompts = drop_long_prompts(task, tokenizer, config.max_prompt_length)
        if config.beta != 0.0 and reference is None:
            raise ValueError(f"beta is {config.beta}, which needs a reference model; pass one, or set beta to 0")
        if config.advantage_estimator == "gae" and critic is None:
            raise ValueError('advantage_estimator "gae" needs a critic; pass build_critic(model), or choose "group"')
        prompt_ids = encode_prompts(tokenizer, task)
        require_fit(model, pad_left(prompt_ids, tokenizer.pad_token_id)[0], config.max_completion_length)
        prompts = prompts_per_step(config, task)
        self.config, self.model, self.tokenizer, self.task = config, disable_dropout(model), tokenizer, task
        require_output_head(model)
        require_shared_trunk(critic, model, config.share_critic_trunk)
        self.sampler, self.reference, self.critic, self.prompts = sampler, reference, critic, prompts
        self.own_critic = critic.head if config.share_critic_trunk else critic  # what is not the policy's
        learned = torch.nn.ModuleList([model, self.own_critic]) if config.share_critic_trunk else model
        self.learner, self.critic_learner = Learner(learned, config.learning_rate, config), None
        if critic is not None and not config.share_critic_trunk:
            disable_dropout(critic.trunk)
            self.critic_learner = Learner(critic, config.critic_learning_rate, config)
        self.checkpointed = []
        if config.gradient_checkpointing:
            for part in [model] if self.critic_learner is None else [model, critic.trunk]:
                part.gradient_checkpointing_enable({"use_reentrant": False})
                self.checkpointed += [m for m in part.modules() if isinstance(m, GradientCheckpointingLayer)]
        parts = [trunk(part) for part in (model, reference) if part is not None]
        parts += [critic.trunk] if critic is not None else []
        self.forwards = compiled_forwards(parts) if config.torch_compile else {}
        self.batches = ShuffledBatches(len(task.train), prompts, generator_for(config.seed, "data"))
        self.sampling = generator_for(config.seed, "sampling")
        self.steps_done = 0

    @cached_property
    def fingerprints(self) -> dict[str, str | None]:
        """`fingerprints` of what no step changes, taken once."""
        return fingerprints(self)

    def step(self) -> dict[str, float]:
        """Generate, grade, learn: one pass of the loop. Returns its metrics."""
        watch, self.reward_metrics = Stopwatch(), []
        with named_step(self.steps_done + 1):
            with self.taken_or_not():
                examples, drawn, rollouts = self.gather(watch)
                rollouts = self.prepare(rollouts, examples, watch)
            with watch.phase("update"):
                learning = self.update(rollouts)
            self.sampler.sync(self.model)
        self.steps_done += 1
        if self.config.sync_ref_model and self.steps_done % self.config.ref_model_sync_steps == 0:
            move_reference(self.reference, self.model, self.config.ref_model_mixup_alpha)
        counted = mean_metrics(self.reward_metrics)
        return {"step": self.steps_done, **counted, **rollout_metrics(drawn), **learning, **watch.metrics()}

    @contextmanager
    def taken_or_not(self) -> Iterator[None]:
        """Put prompts and generators back if the body raises, so that the step can be taken later."""
        generators, waiting = (self.batches.generator, self.sampling), list(self.batches.waiting)
        states = [generator.get_state() for generator in generators]
        try:
            yield
        except BaseException:
            self.batches.waiting = waiting
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            raise

    def draw(self, watch: Stopwatch) -> tuple[list[Example], Rollouts]:
        """The next prompts, and graded completions for them."""
        examples = [self.task.train[i] for i in next(self.batches)]
        with watch.phase("generation"):
            rollouts = collect(
                self.sampler, self.tokenizer, examples, self.config.num_generations, self.next_sampling_seed()
            )
        with watch.phase("reward"):
            rollouts = grade(rollouts, self.tokenizer, examples, self.task.reward, self.config.reward_timeout)
            self.reward_metrics.append(reward_metrics(self.task.reward))
        return examples, rollouts

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
        with watch.phase("update"), compiled(self.forwards):
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
                parts = {"tokenizer": self.tokenizer, "examples": examples, "reward": self.task.reward}
                grade_endings = partial(grade, **parts, seconds=config.reward_timeout)
                seed = self.next_sampling_seed()
                values = (sampled_values(rollouts, self.sampler, grade_endings, config, seed),)
        estimate = token_advantages if values else completion_advantages
        return adjust_advantages(estimate(rollouts, config, *values), entropy, config)

    def update(self, rollouts: Rollouts) -> dict[str, float]:
        """``num_iterations`` passes over one batch, with an optimiser step for each mini-batch, or fewer by ``target_kl``."""
        batches, steps = mini_batches(rollouts, self.config), []
        rate = self.learner.start(self.steps_done)
        if self.critic_learner is not None:
            self.critic_learner.start(self.steps_done)
        for pieces in batches * self.config.num_iterations:
            with checkpointed(self.checkpointed), compiled(self.forwards):
                learned = self.learn(pieces, self.config.target_kl if steps else None)
            if learned is None:
                break
            steps.append(learned)
        pieces = [piece for batch in batches for piece in batch]
        mismatch = watch_sampler(concatenate([piece for piece, _ in pieces]))
        metrics = update_metrics(steps, len(batches))
        return {**metrics, **mismatch, "padding": padding_share(pieces), "learning_rate": rate}

    def learn(self, pieces: list[tuple[Rollouts, Tensor]], target_kl: float | None = None) -> dict[str, float] | None:
        """One optimiser step on a mini-batch, whose pieces get their ``old_logprobs``; beyond ``target_kl`` None instead."""
        config, scale = self.config, self.learner.scale
        for learner in filter(None, (self.learner, self.critic_learner)):
            learner.zero_grad()
        loss, passes = 0.0, []
        for i, (piece, weights) in enumerate(pieces):
            piece_loss, piece, metrics = micro_batch_pass(self.model, piece, weights * scale, config, self.reference)
            piece_loss.backward()
            pieces[i] = (piece, weights)
            passes.append((metrics, piece.mask))
            loss += float(piece_loss.detach()) / scale
        summary = summarise(passes)
        if target_kl is not None and summary["kl_old"] > target_kl:
            return None
        values = self.add_value_gradients(pieces) if config.advantage_estimator == "gae" else {}
        learned = {"loss": loss, "grad_norm": self.learner.step(), **summary}
        if self.critic_learner is not None:
            learned["critic_grad_norm"] = self.critic_learner.step()
        return learned | values

    def add_value_gradients(self, pieces: list[tuple[Rollouts, Tensor]]) -> dict[str, float]:
        """Add the gradients of the critic's loss on the pieces of a mini-batch to those that are there; its metrics."""
        passes, learner = [], self.critic_learner or self.learner
        for piece, weights in pieces:
            loss, metrics = critic_pass(self.critic, piece, weights * learner.scale, self.config)
            loss.backward()
            passes.append((metrics, weights > 0))
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
# Each of these numbers answers a question. The table has them all, with the range in which a run is usually well and the
# section that explains it; other recipes log a few more. A range is a rule of thumb, and leaving it a reason to look.
# `reward/NAME` is the mean of one of several weighted reward functions; what a function counts by itself, in a
# dictionary `metrics`, is logged under the names that it gives.


# %% tags=["export:metrics"]
class Metric(NamedTuple):
    """A line of the table of metrics: what it is, the range in which a run is usually well, and the section."""

    meaning: str
    healthy: str
    section: int


METRICS = {
    "step": Metric("steps taken", "", 16),
    "reward": Metric("mean reward of the step's completions, before any penalty", "rises", 15),
    "reward_std": Metric("standard deviation of these rewards", "above 0", 13),
    "reward/NAME": Metric("mean of one of several weighted reward functions", "rises", 15),
    "eval_pass_at_1": Metric("held-out pass@1, where a checkpoint is written", "rises with the reward", 16),
    "frac_reward_zero_std": Metric("share of groups whose rewards are all equal: no signal", "below 0.8", 13),
    "entropy": Metric(
        "entropy per sampled token, in nats, estimated from all of them", "falls slowly, stays above 0", 9
    ),
    "completion_length": Metric("mean tokens of a completion", "well below the cap", 11),
    "truncated": Metric("share of completions that the cap cut off", "below 0.1", 11),
    "ungraded": Metric("share of completions that nobody could grade", "below 0.1", 15),
    "loss": Metric("the loss of the last pass over the batch", "any: it measures no progress", 11),
    "grad_norm": Metric("norm of the policy's gradient before it is clipped, last pass", "steady, no jumps", 16),
    "critic_grad_norm": Metric("the same of a critic with a trunk of its own", "steady, no jumps", 16),
    "updates": Metric("optimiser steps taken from the batch", "as set; fewer after target_kl", 10),
    "skipped_updates": Metric("of these, skipped because the gradient was not finite", "0", 16),
    "ratio_error": Metric("greatest distance of a ratio from 1, first pass", "0, or below 1e-3", 10),
    "clip_fraction": Metric(
        "share of tokens whose gradient the clip cut, last pass (untied groups only)", "below 0.2", 10
    ),
    "kl_old": Metric(
        "KL per token between the policy of the last pass and that of the first (untied groups only)", "below 0.05", 9
    ),
    "kl_ref": Metric("KL per token from the reference, first pass", "starts at 0, grows slowly", 9),
    "sampler_gap": Metric(
        "greatest distance of the trainer's log-probs from the sampler's, first pass (untied groups only)",
        "below 1e-3 in float32",
        14,
    ),
    "trained_entropy": Metric("entropy per token that was trained on, exact, first pass", "falls slowly", 9),
    "value_loss": Metric("the critic's loss, first pass", "falls", 10),
    "value_clip_fraction": Metric("share of values whose gradient the clip cut, last pass", "below 0.2", 10),
    "mismatch/ratio_geometric": Metric(
        "policy's to sampler's probability, geometric mean (untied groups only)", "0.9 to 1.1", 14
    ),
    "mismatch/ratio_arithmetic": Metric("the same, arithmetic mean", "0.9 to 1.1, but blind", 14),
    "mismatch/delta_mean": Metric(
        "mean distance of the trainer's log-probs from the sampler's (untied groups only)", "below 0.01", 14
    ),
    "mismatch/delta_max": Metric("greatest of these distances", "below 1", 14),
    "mismatch/ess": Metric("effective share of completions after the correction", "above 0.9", 14),
    "padding": Metric("share of the micro-batches' area that no token fills", "below 0.5", 11),
    "learning_rate": Metric("the policy's learning rate", "as set", 16),
    "seconds": Metric("seconds of the step", "steady", 16),
    "generation_seconds": Metric("of these, generating", "", 11),
    "reward_seconds": Metric("of these, in the reward function", "far below seconds", 15),
    "update_seconds": Metric("of these, scoring and learning", "", 11),
    "generation_share": Metric("generating, as a share of seconds", "", 11),
}


def metrics_table() -> str:
    """METRICS as a Markdown table (section 16)."""
    rows = [f"| `{name}` | {' | '.join(map(str, metric))} |" for name, metric in METRICS.items()]
    return "\n".join(["| metric | what it is | healthy | section |", "|---|---|---|---|", *rows])


# %%
display(Markdown(metrics_table()))
assert metrics.keys() <= METRICS.keys()

# %% [markdown]
# ## Measuring: pass@1 on problems nobody trained on
#
# The measure of a policy is the probability that *one* sampled answer is right, on held-out problems. We draw several
# answers per problem and average. Answers to one problem are not independent of each other, so the 95 % interval comes
# from the spread of the per-problem shares; it is section 13's, which has a width where all answers are right, or none.
# The answers are written in portions of a step's size, so that measuring takes no more memory than training; a completion
# does not depend on its batch (section 11), so neither does the result.
#
# One answer is what a user gets. Several say what the policy *can* do: pass@k, the probability that one of $k$ answers is
# right. Section 13 has its unbiased estimate from $n \ge k$ answers, and the interval is the same.


# %% tags=["export"]
@dataclass(frozen=True)
class Evaluation:
    """Held-out results (section 16). pass_at_1: share of sampled answers with reward 1 or more; reward: mean reward;
    well_formed: share of answers that finished and have the task's form; truncated and ungraded: shares of answers; right:
    how many answers to each problem have reward 1 or more; samples: one dict per completion, a problem's together."""

    pass_at_1: float
    reward: float
    well_formed: float
    truncated: float
    ungraded: float
    right: list[int]
    samples: list[dict]

    def __str__(self) -> str:
        return str(self.pass_at()[1])

    def pass_at(self) -> dict[int, Interval]:
        """pass@k with its 95 % interval for k = 1, 2, 4, … up to the answers per problem (section 13)."""
        n = len(self.samples) // len(self.right)
        ks = [2**i for i in range(n.bit_length())]
        return {k: interval_over_problems(pass_at_k(torch.tensor(self.right), n, k)) for k in ks}


def evaluate(trainer: Trainer, seed: int = 0) -> Evaluation:
    """`measure` of the trainer's current policy on its task (section 16)."""
    return measure(trainer.sampler, trainer.tokenizer, trainer.task, trainer.config, seed)


def measure(sampler: Sampler, tokenizer, task: Task, config: TrainConfig, seed: int = 0) -> Evaluation:
    """Results on the task's first ``num_eval_problems`` held-out problems, ``num_eval_generations`` answers each (section 16).

    At most ``completions_per_step`` completions are generated at once (one prompt's, if those are more).
    """
    examples = task.heldout[: config.num_eval_problems]
    if not examples:
        raise ValueError(f"task {task.name} has no held-out problems to evaluate on; put some in its heldout")
    size = max(1, config.completions_per_step // config.num_eval_generations)
    chunks = [examples[start : start + size] for start in range(0, len(examples), size)]
    rollouts = concatenate([collect(sampler, tokenizer, chunk, config.num_eval_generations, seed) for chunk in chunks])
    rollouts = grade(rollouts, tokenizer, examples, task.reward, config.reward_timeout)
    texts, metrics = decode(tokenizer, rollouts), rollout_metrics(rollouts)
    right = ((rollouts.rewards >= 1.0) & rollouts.graded).view(len(examples), -1)
    formed = [not cut and task.well_formed(text) for cut, text in zip(rollouts.truncated.tolist(), texts, strict=True)]
    samples = [
        {"prompt": examples[g].prompt, "completion": text, "reward": reward, "truncated": cut}
        for g, text, reward, cut in zip(
            rollouts.group.tolist(), texts, rollouts.rewards.tolist(), rollouts.truncated.tolist(), strict=True
        )
    ]
    return Evaluation(
        pass_at_1=float(right.float().mean()),
        well_formed=sum(formed) / len(formed),
        **{name: metrics[name] for name in ("reward", "truncated", "ungraded")},
        right=right.sum(1).tolist(),
        samples=samples,
    )


# %%
before = evaluate(trainer)
print(f"pass@1 after one step: {before}, well formed {before.well_formed:.3f}")
print(*(f"pass@{k}: {interval}" for k, interval in before.pass_at().items()), sep="\n")
assert math.isclose(before.pass_at()[1].mean, before.pass_at_1, rel_tol=1e-6)

# %% [markdown]
# ## What a run leaves behind
#
# Metrics go to a JSON-lines file, one object per step, and to TensorBoard. The curves are drawn from the same records.
# JSON has no `NaN`; a number that is not finite, such as the reward of an ungraded answer, is written as `null`. A process
# that is killed may leave half a line behind, so that what is read back is checked line by line. Held-out pass@1 is known
# later than the rest of its step, and is added to the line: the file is written anew and takes the old one's place.


# %% tags=["export:metrics"]
def json_line(record: dict) -> str:
    """``record`` as one line of JSON, with null for numbers that are not finite (section 16)."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: Path, last_step: int | None = None) -> list[dict[str, float]]:
    """The records of a ``metrics.jsonl`` up to ``last_step``, or all of them, with NaN for null (section 16).

    A last line without its end, of a run that is writing or was killed, does not count. Raises ValueError that names the
    line which is not a record, or the step at which a file that is not empty ends too early.
    """
    records, step = [], 0
    for number, line in enumerate(path.read_text(errors="replace").split("\n")[:-1], start=1):
        if step == last_step:
            break
        try:
            record = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
            step = operator.index(record["step"])
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is not a record of metrics: {line[:60]!r}; repair it, or move the file away, and the "
                "run goes on without its past"
            ) from error
        records.append(record)
    if records and last_step is not None and step != last_step:
        raise ValueError(
            f"{path} ends with step {step}, but step {last_step} was reached; move it away, and the run goes on without its past"
        )
    return records


class MetricsLog:
    """Appends each step's metrics to ``metrics.jsonl`` in ``folder`` and to the trackers of ``report_to`` (section 16).

    ``records`` are those that the file has already; TensorBoard drops what it was told of later steps. ``settings`` are
    shown by trackers that show settings.
    """

    def __init__(
        self,
        folder: Path,
        records: list[dict[str, float]] | None = None,
        report_to: str = "tensorboard",
        settings: dict | None = None,
    ):
        self.records = list(records or [])
        self._trackers = [
            TensorBoard(module, folder, self.records)
            if name == "tensorboard"
            else Tracker(name, module, folder, settings)
            for name, module in tracker_modules(report_to).items()
        ]
        self._path = folder / "metrics.jsonl"
        self._lines = self._path.open("a")

    def write(self, metrics: dict[str, float]) -> None:
        self.records.append(metrics)
        self._lines.write(json_line(metrics))
        self._lines.flush()
        for tracker in self._trackers:
            tracker.write(metrics)

    def add(self, metrics: dict[str, float]) -> None:
        """Add ``metrics`` to those of their step, which is the last one; to the trackers alone if its record is gone."""
        if self.records:
            self.records[-1] = self.records[-1] | metrics
            self._lines.close()
            write_whole(self._path, "".join(map(json_line, self.records)))
            self._lines = self._path.open("a")
        for tracker in self._trackers:
            tracker.write(metrics)

    def close(self) -> None:
        self._lines.close()
        for tracker in self._trackers:
            tracker.close()


def optional_import(module: str, extra: str | None = None) -> ModuleType:
    """Import ``module``, or raise ImportError that names the extra, or the package itself, which brings it (section 16)."""
    try:
        return import_module(module)
    except ImportError as error:
        command = f"{PIP_INSTALL} {module}" if extra is None else install_command(extra)
        raise ImportError(f"{error.name} is not installed: {command}") from error


# %% [markdown]
# TensorBoard is the default tracker and reads files. Weights & Biases and Trackio are services, or a local database,
# with the same three functions: `init`, `log` and `finish`. They would take a run that goes on for a new one; so a name that
# no other run has lies in the run's folder. Steps that are taken again after a kill are logged twice, with the same values;
# W&B keeps the first.


# %% tags=["export:metrics"]
def tracker_modules(report_to: str) -> dict[str, ModuleType]:
    """The modules of `tracker_names`; ImportError for a package that is not installed (section 16)."""
    extras = {"tensorboard": "train"}
    return {name: optional_import(TRACKERS[name], extras.get(name)) for name in tracker_names(report_to)}


class TensorBoard:
    """Metrics as TensorBoard events in ``folder``, after those of ``records`` (section 16)."""

    def __init__(self, module: ModuleType, folder: Path, records: list[dict[str, float]]):
        purge_step = records[-1]["step"] + 1 if records else None
        self._board = module.SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                self._board.add_scalar(name, value, metrics["step"])

    def close(self) -> None:
        self._board.close()


def tracker_id(folder: Path) -> str:
    """The name of the run in ``folder`` that no other run has; ``tracker_id`` in the folder keeps it (section 16)."""
    path = folder / "tracker_id"
    if not path.exists():
        write_whole(path, f"{folder.name}-{secrets.token_hex(4)}\n")
    return path.read_text().strip()


class Tracker:
    """Metrics to Weights & Biases or Trackio, as a run of the project lmrl, which goes on if it was there (section 16)."""

    def __init__(self, name: str, module: ModuleType, folder: Path, settings: dict | None):
        self._module, own = module, tracker_id(folder)
        names = {"name": folder.name, "id": own.rpartition("-")[2]} if name == "wandb" else {"name": own}
        module.init(project="lmrl", **names, resume="allow", config=settings or {})

    def write(self, metrics: dict[str, float]) -> None:
        self._module.log({name: value for name, value in metrics.items() if name != "step"}, step=metrics["step"])

    def close(self) -> None:
        self._module.finish()


# %% [markdown]
# A run ends with a picture of six of its metrics. The numbers of a single step jump; the strong line is their running
# mean.


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


def running_mean(values: list[float], width: int = 15) -> list[float]:
    """Mean of up to ``width`` latest values at each step."""
    windows = [values[max(0, i - width + 1) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


# %% [markdown]
# For several runs there is one picture per metric, which `lmrl report` below puts on a page, or one panel per recipe, for
# `benchmarks/recipes.py`.


# %% tags=["export:figures"]
def metric_curve(runs: dict[str, tuple[list[float], list[float]]], points: bool = False) -> Figure:
    """One metric of several runs, ``(steps, values)`` each: all values faint, their running mean on top, or ``points``.

    The i-th run has `run_style`'s colour and dashes, whatever it is called. Single steps far outside leave the picture, which
    then says how far they go.
    """
    figure, axis = new_figure(height=2.3)
    means = []
    figure.set_size_inches(3.9, 2.3)
    for i, (steps, values) in enumerate(runs.values()):
        color, dashes = run_style(i)
        if points:
            axis.plot(steps, values, "o", color=color, markersize=5, linestyle=(0, dashes), linewidth=1.2)
            continue
        stride, smooth = max(1, len(steps) // 500), running_mean(values, max(15, len(steps) // 50))
        means += smooth
        axis.plot(steps[::stride], values[::stride], color=color, alpha=0.25, linewidth=0.7)
        axis.plot(steps[::stride], smooth[::stride], color=color, linewidth=1.8, linestyle=(0, dashes))
    values = [value for _, values in runs.values() for value in values if math.isfinite(value)]
    if values and not points:
        low, high = axis.set_ylim(*visible_range(values, [mean for mean in means if math.isfinite(mean)]))
        beyond = [f"{value:.3g}" for value in (min(values), max(values)) if not low <= value <= high]
        if beyond:
            axis.set_title(f"single steps reach {' and '.join(beyond)}", fontsize=8, loc="right", color="0.35")
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.set_xlabel("step")
    return figure


def visible_range(values: list[float], means: list[float]) -> tuple[float, float]:
    """Limits of an axis (section 16): all ``values``, or ``means`` and 98 % of them where the rest takes half of the picture.

    A difference of less than 1e-4 of the values is not blown up.
    """
    values, cut = sorted(values), len(values) // 100
    low, high = min([values[cut], *means]), max([values[-1 - cut], *means])
    if values[-1] - values[0] < 2 * (high - low):
        low, high = values[0], values[-1]
    margin = max(0.05 * (high - low), 1e-4 * max(abs(low), abs(high))) or 0.05
    return low - margin, high + margin


def run_style(i: int) -> tuple[str, tuple[int, ...]]:
    """Colour and dashes of the i-th of several runs, which differ in grey too (section 16)."""
    colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
    dashes = [(), (6, 2), (2, 2), (8, 2, 2, 2), (1, 1)]
    return colors[i % len(colors)], dashes[i % len(dashes)]


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


# %% [markdown]
# ## Checkpoint and resume
#
# Machines are taken away, disks fill, processes are killed in the middle of a line. A run that goes on afterwards should be
# the run that was never stopped: the same prompts, completions, metrics and weights, bit for bit. So a checkpoint holds
# whatever a step reads that an earlier step wrote. The weights are only a part of that.
#
# **The optimiser has a memory.** AdamW divides a running mean of the gradients by the root of a running mean of their
# squares, and corrects both for having begun at zero. Which parameter they belong to is a number; that is what we save.


# %% tags=["export:checkpoint"]
def optimizer_tensors(optimizer) -> dict[str, Tensor]:
    """The memory of ``optimizer``, by the parameter's number and its own name, such as "0.exp_avg" (section 16)."""
    memory = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, entry in memory.items() for name, value in entry.items()}


def load_optimizer(optimizer, tensors: dict[str, Tensor]) -> None:
    """Give ``optimizer`` the memory in ``tensors``, as `optimizer_tensors` names it; its rates stay (section 16)."""
    memory = {}
    for place, value in tensors.items():
        number, _, name = place.partition(".")
        memory.setdefault(int(number), {})[name] = value.clone()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": memory})


# %% [markdown]
# What if it is forgotten? Take a parameter at 0, the gradients $1$ and then $-1$, and learning rate $0.1$. The first step
# goes to $-0.1$. Adam remembers it and hardly turns back at the second; without the memory every step is a first step, of
# full length, and the second ends where the first began.

# %%
ends = {}
for remember in (True, False):
    weight, moments = torch.zeros(1, requires_grad=True), {}
    for gradient in (1.0, -1.0):
        optimizer = torch.optim.Adam([weight], lr=0.1)  # a new process
        load_optimizer(optimizer, moments if remember else {})
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        moments = optimizer_tensors(optimizer)
    ends[remember] = weight.item()
print(f"with its memory {ends[True]:.4f}, without {abs(ends[False]):.4f}")
assert abs(ends[True] + 0.0947) < 1e-4 and abs(ends[False]) < 1e-6

# %% [markdown]
# **What else does a step leave to the next?** The float32 copies of half-precision weights and the loss scale. The
# critic and its optimiser. What is left of the pass over the prompts, and the generators of data and of sampling. The
# learning rate is not on the list: it follows from the number of steps. Nor is anything of the sampler, PyTorch's or
# vLLM's: it gets a seed per call, drawn from the generator of the sampling, and its weights are the policy's. The
# reference, the prompts, and under an adapter the model's own weights stay what they were, so they are not copied;
# fingerprints, taken once in a run, tell whether it still finds the same.


# %% tags=["export:checkpoint"]
def learner_tensors(learner) -> dict[str, Tensor]:
    """What a `Learner` remembers: optimiser, float32 copies of weights, loss scale, counts of steps (section 16)."""
    counts = torch.tensor([learner.scale, learner.good_steps, learner.skipped_in_a_row], dtype=torch.float64)
    copies = {} if learner.masters is learner.weights else {f"{i}.master": m for i, m in enumerate(learner.masters)}
    return {**optimizer_tensors(learner.optimizer), **copies, "counts": counts}


@torch.no_grad()
def load_learner(learner, tensors: dict[str, Tensor]) -> None:
    """Give a `Learner` what `learner_tensors` saved (section 16)."""
    learner.scale, *counts = tensors["counts"].tolist()
    learner.good_steps, learner.skipped_in_a_row = map(int, counts)
    for number, master in enumerate(learner.masters):
        if f"{number}.master" in tensors:
            master.copy_(tensors[f"{number}.master"])
    memory = {name: value for name, value in tensors.items() if name != "counts" and not name.endswith(".master")}
    load_optimizer(learner.optimizer, memory)


def trainer_tensors(trainer) -> dict[str, Tensor]:
    """All that a step changes besides the policy and the number of steps, by part and name, on the CPU (section 16)."""
    waiting = torch.tensor(trainer.batches.waiting, dtype=torch.int64)
    parts = {
        "learner": learner_tensors(trainer.learner),
        "data": {"generator": trainer.batches.generator.get_state(), "waiting": waiting},
        "sampling": {"generator": trainer.sampling.get_state()},
    }
    if adapted_layers(trainer.model):
        parts["adapter"] = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    if trainer.config.sync_ref_model:
        parts["reference"] = dict(trainer.reference.named_parameters())
    if trainer.critic is not None:
        parts["critic"] = trainer.own_critic.state_dict()
    if trainer.critic_learner is not None:
        parts["critic_learner"] = learner_tensors(trainer.critic_learner)
    return {
        f"{part}.{name}": value.detach().cpu().contiguous()
        for part, tensors in parts.items()
        for name, value in tensors.items()
    }


def tokenizer_rules(tokenizer) -> str:
    """What a tokenizer does with a text besides its vocabulary: merges, normaliser, special tokens, … (section 16)."""
    rules = {"special tokens": tokenizer.special_tokens_map}
    if tokenizer.is_fast:
        rules |= json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}  # of a call
    return json.dumps(rules, default=str)


def fingerprints(trainer) -> dict[str, str | None]:
    """What has to be the same when a run goes on: of data, tokenizer, reference, and the policy's frozen weights (section 16)."""
    frozen = {name: checksum(weight) for name, weight in trainer.model.named_parameters() if not weight.requires_grad}
    examples, tokenizer = trainer.task.train, trainer.tokenizer
    columns = [json.dumps(example.columns, default=lambda value: type(value).__name__) for example in examples]
    contents = {"prompts": [example.prompt for example in examples], "answers or other columns": columns}
    contents["tokenizer"] = sorted(tokenizer.get_vocab().items()), tokenizer.chat_template
    contents["tokenizer rules"] = tokenizer_rules(tokenizer)
    contents["reference"], contents["frozen weights"] = None, frozen or None
    if trainer.reference is not None and not trainer.config.sync_ref_model:
        contents["reference"] = parameter_checksums(trainer.reference)
    return {what: content and hashlib.sha256(repr(content).encode()).hexdigest() for what, content in contents.items()}


def reward_text(reward: RewardFunction) -> str | None:
    """A hash of what a reward function, or each of several, does as text; None where there is no text (section 16)."""
    try:
        texts = [
            inspect.getsource(getattr(part, "__code__", type(part))) for part in getattr(reward, "rewards", [reward])
        ]
    except (OSError, TypeError):
        return None
    return hashlib.sha256(repr(texts).encode()).hexdigest()


# %% [markdown]
# **Whole or not at all.** A checkpoint is written to a hidden folder. It gets a list of its files' SHA-256, in the format
# of `sha256sum -c`, and is pushed out to the disk, as are the metrics of its steps. Only then it receives its name, by a
# rename, which a file system does entirely or not at all. Whatever happens before, a kill, a full disk, leaves the
# earlier ones as they were, and a full disk is told in one line with the command to go on, whichever file of the run it
# meets. Tensors are in safetensors and the rest in JSON: to load a checkpoint runs nobody's code, as unpickling one
# would.
#
# Held-out pass@1 is measured when the checkpoint is there, for measuring asks the user's reward function, and that may fail.
# So it comes in a file of its own, which is not among the sums.


# %% tags=["export:checkpoint"]
SUMS, TENSORS, RECORD = "SHA256SUMS", "trainer/state.safetensors", "trainer/state.json"
EVALUATION = "trainer/evaluation.json"


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal (section 16)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush_to_disk(path: Path) -> None:
    """Return when the file, or the folder's list of names, is on the disk and would survive a power cut (section 16)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old text or the new one, and never a part (section 16)."""
    unfinished = path.with_name(f".unfinished-{path.name}")
    unfinished.write_text(text)
    flush_to_disk(unfinished)
    unfinished.replace(path)


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cannot_write(path: Path, error: Exception, folder: Path) -> OSError:
    """The error of a write to the run in ``folder``, with what is there still and how to go on (section 16)."""
    go_on = f"go on with lmrl train --resume {folder}" if checkpoints_of(folder) else "start the run again"
    return OSError(f"cannot write {path} ({error}); its checkpoints are as they were: make room, then {go_on}")


@contextmanager
def told_of_a_full_disk(folder: Path) -> Iterator[None]:
    """Raise `cannot_write` where the body finds the disk of the run's ``folder`` full (section 16)."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL and not isinstance(error, shutil.Error):  # several files in one
            raise
        raise cannot_write(folder, error, folder) from error


def seal(folder: Path) -> None:
    """Add ``SHA256SUMS`` over all files of ``folder``, and return when everything is on the disk (section 16)."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    (folder / SUMS).write_text("".join(f"{sha256(folder / name)}  {name}\n" for name in names))
    for path in (*folder.rglob("*"), folder):
        flush_to_disk(path)


def save_policy(trainer, folder: Path) -> None:
    """`save_model` of the trainer's policy, an adapter merged into its weights (section 16)."""
    save_model(folder, merged(trainer.model), trainer.tokenizer, {"step": trainer.steps_done})


def write_checkpoint(trainer, folder: Path) -> Path:
    """Write ``checkpoints/step-NNNNNN`` in the run's ``folder`` and return it: a Hugging Face folder, and ``trainer/``.

    ``trainer/state.safetensors`` has the `trainer_tensors`; ``trainer/state.json`` the step, the settings and the
    `fingerprints`. Raises OSError, and leaves what was there, if it cannot be written (section 16).
    """
    checkpoint = folder / "checkpoints" / f"step-{trainer.steps_done:06d}"
    record = {"step": trainer.steps_done, **trainer.fingerprints, "config": asdict(trainer.config)}
    record["reward text"] = reward_text(trainer.task.reward)
    try:
        for path in (*folder.glob("metrics.jsonl"), folder):  # metrics that end before the checkpoint do not go on
            flush_to_disk(path)
        checkpoint.parent.mkdir(exist_ok=True)
        with TemporaryDirectory(dir=checkpoint.parent, prefix=".unfinished-") as scratch:
            new = Path(scratch) / "new"
            save_policy(trainer, new)
            (new / "trainer").mkdir()
            save_file(trainer_tensors(trainer), new / TENSORS)
            (new / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            seal(new)
            if checkpoint.exists():
                checkpoint.rename(Path(scratch) / "old")
            new.rename(checkpoint)
            flush_to_disk(checkpoint.parent)
    except Exception as error:  # of a full disk: the libraries have kinds of their own
        raise cannot_write(checkpoint, error, folder) from error
    return checkpoint


def write_pass_at_1(checkpoint: Path, pass_at_1: float) -> None:
    """Enter the held-out pass@1 of the policy in a checkpoint that was written before (section 16)."""
    write_whole(checkpoint / EVALUATION, json.dumps({"eval_pass_at_1": pass_at_1}) + "\n")


# %% [markdown]
# **Which one to load?** The newest that still is what was written. A disk may tear a file, a person may touch one. So the
# sums are compared before anything is read, and what does not agree is named.


# %% tags=["export:checkpoint"]
def damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None if all are as they were written (section 16)."""
    try:
        sums = dict(line.split("  ", 1)[::-1] for line in (checkpoint / SUMS).read_text().splitlines())
    except (OSError, ValueError):
        return f"its {SUMS} is missing or torn"
    files = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    present = {file.as_posix() for file in files if not file.name.startswith(".")} - {SUMS, EVALUATION}
    for name in sorted({RECORD, TENSORS, *sums, *present}):
        if name not in present:
            return f"its {name} is missing"
        if sums.get(name) != sha256(checkpoint / name):
            return f"its {name} is not what was written"
    return None


def checkpoints_of(folder: Path) -> list[Path]:
    """The checkpoints in a run's ``folder``, the oldest first, damaged ones included (section 16)."""
    named = (path for path in (folder / "checkpoints").glob("step-*") if re.fullmatch("[0-9]+", path.name[5:]))
    return sorted((path for path in named if path.is_dir() and not path.is_symlink()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written, from its name (section 16)."""
    return int(checkpoint.name[5:])


def newest_checkpoint(folder: Path) -> Path:
    """The newest checkpoint of the run in ``folder`` that is whole; warns of those that are not (section 16).

    Raises ValueError if there is none.
    """
    require_checkpoints(folder)
    problems = []
    for checkpoint in reversed(checkpoints_of(folder)):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        problems.append(f"{checkpoint} cannot be used: {problem}")
        warnings.warn(problems[-1], stacklevel=2)
    raise ValueError(f"no checkpoint in {folder} is whole: {'; '.join(problems)}")


def require_checkpoints(folder: Path) -> None:
    """Raise ValueError, with the remedy, for a folder in which no run came to its first checkpoint (section 16)."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; give the folder of a run, for example runs/arithmetic-1")
    if not checkpoints_of(folder):
        raise ValueError(
            f"{folder} has no checkpoints/step-…, so nothing can go on there: give the folder of a run that came to its first "
            "checkpoint, or move this one away and start the run again, with a smaller save_steps"
        )


def read_record(checkpoint: Path) -> dict:
    """Step, settings, fingerprints and held-out pass@1 of a checkpoint, None if it is not known (section 16).

    Raises ValueError, with the remedy, for a file that holds something else.
    """
    record = json.loads((checkpoint / RECORD).read_text())
    if not isinstance(record, dict) or not {"step", "config"} <= record.keys():
        raise ValueError(f"{checkpoint / RECORD} is not the record of a checkpoint; move {checkpoint} away")
    found = record.get("eval_pass_at_1")  # of an earlier version
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((checkpoint / EVALUATION).read_text())["eval_pass_at_1"]
    finite = isinstance(found, (int, float)) and math.isfinite(found)
    return {**record, "eval_pass_at_1": float(found) if finite else None}


# %% [markdown]
# **How many to keep?** The newest few, in case the last one is damaged, and the best one. Reinforcement learning can end
# worse than it was in the middle, and held-out pass@1, measured at every save, tells where that was. The newest policy is
# also `checkpoint/`, the folder to take away. Its weights are not written a second time: a file may have two names.


# %% tags=["export:checkpoint"]
def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the run in ``folder`` with the highest held-out pass@1, the newest of equals (section 16)."""
    measured = []
    for checkpoint in checkpoints_of(folder):
        try:
            record = read_record(checkpoint)
        except (OSError, ValueError):
            continue
        if record["eval_pass_at_1"] is not None:
            measured.append((record["eval_pass_at_1"], record["step"], checkpoint))
    return max(measured)[-1] if measured else None


def prune_checkpoints(folder: Path, limit: int | None) -> None:
    """Remove all checkpoints of the run in ``folder`` but the newest ``limit`` and the best (section 16)."""
    best = best_checkpoint(folder)
    for checkpoint in checkpoints_of(folder)[: -limit if limit else 0]:
        if checkpoint != best:
            gone = checkpoint.rename(checkpoint.with_name(f".unfinished-{checkpoint.name}"))
            shutil.rmtree(gone)


def link_weights(source: str, target: str) -> None:
    """Give a safetensors file a second name, where the file system can; copy it elsewhere, and any other file (section 16)."""
    if source.endswith(".safetensors"):
        with suppress(OSError):
            return os.link(source, target)
    shutil.copy2(source, target)


def publish(checkpoint: Path, folder: Path) -> None:
    """Make ``folder`` the Hugging Face folder that ``checkpoint`` is; it is replaced only by a complete one (section 16)."""
    with replaced(folder) as new:
        shutil.copytree(checkpoint, new, ignore=shutil.ignore_patterns("trainer", SUMS), copy_function=link_weights)


def save_checkpoint(trainer, folder: Path) -> Path:
    """`write_checkpoint`, `publish` it as ``checkpoint``, then `prune_checkpoints`; the new checkpoint (section 16)."""
    checkpoint = write_checkpoint(trainer, folder)
    publish(checkpoint, folder / "checkpoint")
    prune_checkpoints(folder, trainer.config.save_total_limit)
    return checkpoint


# %% [markdown]
# **Who writes?** One process. Two that go on with the same run would each write half of its lines. So a run holds a lock on
# a file in its folder. The lock is the system's, not the file's: it is gone when the process is, however it ended, and
# processes that it started do not inherit it. A second lock of the same process is the same lock, and goes with the first
# that is given back.


# %% tags=["export:checkpoint"]
@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to the run in ``folder`` (section 16).

    Raises BlockingIOError, with the remedy, if one is at it. A file system without locks gets a warning instead.
    """
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise BlockingIOError(
                f"another process ({file.read()}) writes to {folder}; wait until it ends or stop it, and nothing is lost: "
                "then go on with --resume"
            ) from error
        except OSError as error:
            warnings.warn(f"{folder} cannot be locked ({error}); see that no other process writes to it", stacklevel=3)
        file.truncate(0)
        file.write(f"number {os.getpid()} on {os.uname().nodename}")
        file.flush()
        yield


# %% [markdown]
# **What may change on the way?** Where the run ends, how often it is saved and measured, on what device, compiled or not,
# with how much kept for the backward pass, how many completions go through the model at once, and after how many skipped
# updates the run gives up. Any other setting makes another run; it is refused, by name.


# %% tags=["export:checkpoint"]
MAY_CHANGE = {"max_steps", "save_steps", "save_total_limit", "num_eval_problems", "num_eval_generations", "device"}
MAY_CHANGE |= {"torch_compile", "gradient_checkpointing", "max_skipped_updates"}
MAY_CHANGE |= {"per_device_train_batch_size", "gradient_accumulation_steps"}  # with the same product
MAY_CHANGE |= {"vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_enable_sleep_mode"}
MAY_CHANGE |= {"reward", "reward_timeout", "report_to", "preflight"}  # a file that has moved, and what no step reads


def changed_settings(record: dict, config: TrainConfig) -> list[str]:
    """The settings of ``config`` that are not those of the checkpoint's ``record``, as "name: old -> new" (section 16).

    Raises ValueError if the run would be another one, or if it has come further than ``config.max_steps``.
    """
    old = {**asdict(TrainConfig()), **record["config"]}
    new = json.loads(json.dumps(asdict(config)))
    changed = [name for name in new if name != "resume" and new[name] != old[name]]
    lines = {name: f"{name}: {old[name]} -> {new[name]}" for name in changed}
    wrong = [lines[name] for name in changed if name not in MAY_CHANGE]
    completions = old["per_device_train_batch_size"] * old["gradient_accumulation_steps"]
    if completions != config.completions_per_step:
        wrong.append(f"completions per step: {completions} -> {config.completions_per_step}")
    if wrong:
        raise ValueError(
            f"a run that goes on keeps its settings, but {'; '.join(wrong)}. Leave that out, or start a new run from this "
            "one's weights: --model with the path of its checkpoint/"
        )
    if record["step"] > config.max_steps:
        raise ValueError(f"max_steps is {config.max_steps}, and the run has done {record['step']} steps already")
    if "max_steps" in lines and config.lr_scheduler_type != "constant":
        lines["max_steps"] += ", and the learning rate falls towards the new end"
    return list(lines.values())


# %% [markdown]
# **Going on.** The trainer is built as at the start of the run, from the same model, so that a reference and a critic
# are there; then everything that a step changes is put in its place.


# %% tags=["export:checkpoint"]
@torch.no_grad()
def restore(trainer, checkpoint: Path) -> None:
    """Put a ``trainer`` that was made as at the start of its run where it was at ``checkpoint`` (section 16).

    Raises ValueError, and changes nothing, if prompts, reference or settings are not those of the run.
    """
    record, tensors = read_record(checkpoint), load_file(checkpoint / TENSORS)
    changed_settings(record, trainer.config)
    for what, fingerprint in trainer.fingerprints.items():
        if record.get(what, fingerprint) != fingerprint:  # an earlier version has fewer
            raise ValueError(
                f"the run's {what} changed since {checkpoint} was written; give back what there was, or start a new run"
            )
    text = reward_text(trainer.task.reward)
    if record.get("reward text", text) != text:
        warnings.warn(
            f"the reward function is not the one with which {checkpoint} was made: rewards before and after are of two kinds, "
            "and the best checkpoint may be of either",
            stacklevel=3,  # beyond no_grad
        )

    def part(name: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}

    if adapted_layers(trainer.model):  # on the weights that the run began with
        trainer.model.load_state_dict(part("adapter"), strict=False)
    else:
        trainer.model.load_state_dict(load_policy(checkpoint, dtype=trainer.model.dtype).state_dict())
    load_learner(trainer.learner, part("learner"))
    if trainer.config.sync_ref_model:
        trainer.reference.load_state_dict(part("reference"), strict=False)
    if trainer.critic is not None:
        trainer.own_critic.load_state_dict(part("critic"))
    if trainer.critic_learner is not None:
        load_learner(trainer.critic_learner, part("critic_learner"))
    trainer.batches.generator.set_state(tensors["data.generator"])
    trainer.batches.waiting = tensors["data.waiting"].tolist()
    trainer.sampling.set_state(tensors["sampling.generator"])
    trainer.steps_done = record["step"]
    trainer.sampler.sync(trainer.model)


# %% [markdown]
# Does it hold? One trainer takes four steps. Another takes two and writes a checkpoint; a third, which never saw the
# first two, goes on from it. And a checkpoint in which a single bit has flipped is noticed.

# %%
short = replace(config, max_steps=4, per_device_train_batch_size=64)
trainers = [
    Trainer(short, policy, tokenizer, task, replace(sampler, model=policy))
    for policy in (load_policy(folder), load_policy(folder), load_policy(folder))
]
rewards = [trainers[0].step()["reward"] for _ in range(4)]
rewards_again = [trainers[1].step()["reward"] for _ in range(2)]
with TemporaryDirectory() as place:
    checkpoint = write_checkpoint(trainers[1], Path(place))
    restore(trainers[2], checkpoint)
    (checkpoint / TENSORS).write_bytes(b"\0" + (checkpoint / TENSORS).read_bytes()[1:])
    print(damage(checkpoint))
rewards_again += [trainers[2].step()["reward"] for _ in range(2)]
weights, weights_again = (list(trainers[i].model.parameters()) for i in (0, 2))
print("rewards", rewards, rewards_again)
assert rewards == rewards_again and all(map(torch.equal, weights, weights_again))

# %% [markdown]
# ## The run
#
# Ctrl-C should lose nothing, and neither should the SIGTERM with which a cluster takes its machine back. The first one lets
# the current step finish, then the run saves and leaves; a second one leaves at once.


# %% tags=["export"]
class InterruptRequest:
    """Context manager that turns the first SIGINT or SIGTERM into ``requested = True`` (section 16)."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "InterruptRequest":
        signals = signal.SIGINT, signal.SIGTERM
        self._previous = {number: signal.signal(number, self._on_interrupt) for number in signals}
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_interrupt(self, *_) -> None:
        self.requested = True
        self.__exit__()
        tqdm.write(
            "interrupted: finishing this step, then saving (press Ctrl-C again to leave at once)", file=sys.stderr
        )


# %% [markdown]
# The run itself: measure, make the folder, take steps under a progress bar, save and measure now and then and at the
# end. The folder is made only after everything that can be wrong with the set-up has had its chance to fail, the reward
# function included. A run that goes on takes over its folder instead: what was logged after the checkpoint is cut off,
# for it will be written again.
#
# Saving comes before measuring, and a reward function that fails in a step ends the run at the step before, which is saved:
# the user's code can fail at any time and costs no step. What it left unmeasured is measured when the run goes on.


# %% tags=["export"]
@dataclass(frozen=True)
class RunResult:
    """What `run` returns: the folder, held-out results before and after, and whether a signal ended it early."""

    folder: Path
    before: Evaluation
    after: Evaluation
    interrupted: bool


def run(trainer: Trainer, plot: Callable) -> RunResult:
    """Train up to ``config.max_steps`` steps and leave everything in the run's folder (section 16).

    ``plot`` draws the curves; `lmrl.figures.trainer.learning_curve` is the one. The folder gets config.json, metrics.jsonl,
    TensorBoard events, learning_curve.png, evaluation.json, samples.jsonl, checkpoints/, and checkpoint/, the Hugging Face
    folder of the newest. A reward function that fails ends the run with its error, after all steps were saved; any other
    failure leaves the last checkpoint as it was, and OSError tells of a full disk. With ``config.resume`` the run in that
    folder goes on; the trainer is one that was restored from its newest checkpoint. BlockingIOError if another process is at
    that run.
    """
    config = trainer.config
    if config.resume is None:
        before, records = evaluate(trainer), []
        folder = new_run_folder(config)
    else:
        folder = Path(config.resume)
    with told_of_a_full_disk(folder), locked(folder):
        if config.resume is None:
            start_run(folder, config, before)
        else:
            before, records = reopen_run(trainer, folder)
        with closing(MetricsLog(folder, records, config.report_to, asdict(config))) as log:
            after, interrupted = take_steps(trainer, folder, log)
        after = after or evaluate(trainer)
        write_evaluations(folder, {"before": before, "after": after})
        measured = {record["step"]: record["eval_pass_at_1"] for record in log.records if "eval_pass_at_1" in record}
        curve = plot(log.records, {0: before.pass_at_1, **measured, trainer.steps_done: after.pass_at_1})
        curve.savefig(folder / "learning_curve.png")
    return RunResult(folder, before, after, interrupted)


# %% tags=["export"]
def take_steps(trainer: Trainer, folder: Path, log: MetricsLog) -> tuple[Evaluation | None, bool]:
    """The steps of a run, with its records and checkpoints, up to ``config.max_steps`` or a signal (section 16).

    Returns the held-out results after the last step, None if they were not measured, and whether a signal came.
    """
    config, after = trainer.config, None
    progress = tqdm(total=config.max_steps, initial=trainer.steps_done, desc=folder.name, unit="step")
    with InterruptRequest() as interrupt, progress as bar:
        try:
            if is_unmeasured(trainer, folder):
                after = measure_checkpoint(trainer, folder, log)
            while trainer.steps_done < config.max_steps and not interrupt.requested:
                metrics, after = trainer.step(), None
                log.write(metrics)
                bar.set_postfix(progress_fields(metrics), refresh=False)
                bar.update()
                if is_save_step(trainer):
                    save_checkpoint(trainer, folder)
                    after = measure_checkpoint(trainer, folder, log)
        except RewardError:
            save_once(trainer, folder)
            where = f"saved after step {trainer.steps_done}; go on with: lmrl train --resume {folder}"
            tqdm.write(where, file=sys.stderr)
            raise
        save_once(trainer, folder)
    return after, interrupt.requested


def is_save_step(trainer: Trainer) -> bool:
    """Whether a checkpoint is written, and held-out pass@1 measured, after the step that was just taken (section 16)."""
    return trainer.steps_done % trainer.config.save_steps == 0 or trainer.steps_done == trainer.config.max_steps


def save_once(trainer: Trainer, folder: Path) -> None:
    """`save_checkpoint`, unless the newest checkpoint has all steps already (section 16)."""
    if [step_of(checkpoint) for checkpoint in checkpoints_of(folder)[-1:]] != [trainer.steps_done]:
        save_checkpoint(trainer, folder)


def measure_checkpoint(trainer: Trainer, folder: Path, log: MetricsLog) -> Evaluation:
    """Held-out results of the policy that was just saved, entered into the log and its checkpoint (section 16)."""
    after = evaluate(trainer)
    log.add({"step": trainer.steps_done, "eval_pass_at_1": after.pass_at_1})
    write_pass_at_1(checkpoints_of(folder)[-1], after.pass_at_1)
    prune_checkpoints(folder, trainer.config.save_total_limit)
    return after


def is_unmeasured(trainer: Trainer, folder: Path) -> bool:
    """Whether the trainer stands at a checkpoint that should have been measured and was not (section 16)."""
    if trainer.steps_done == 0 or not is_save_step(trainer):
        return False
    return read_record(checkpoints_of(folder)[-1])["eval_pass_at_1"] is None


# %% tags=["export"]
def start_run(folder: Path, config: TrainConfig, before: Evaluation) -> None:
    """Write what is known before the first step: the settings, and the held-out results (section 16)."""
    write_config(folder, config)
    write_evaluations(folder, {"before": before})


def reopen_run(trainer: Trainer, folder: Path) -> tuple[Evaluation, list]:
    """Bring the run in ``folder`` back to the trainer's step: its held-out results before, and its records (section 16).

    What a kill left unfinished is removed or made up for, and checkpoints of later steps, which are damaged, are renamed.
    Raises ValueError if a later one is whole: the run went on since the trainer was restored.
    """
    step = trainer.steps_done
    before, metrics = read_evaluation(folder, "before"), folder / "metrics.jsonl"
    damaged = [checkpoint for checkpoint in checkpoints_of(folder) if step_of(checkpoint) > step]
    if damaged and damage(damaged[-1]) is None:
        raise ValueError(f"{folder} went on from step {step} to {step_of(damaged[-1])} meanwhile; resume it once more")
    metrics.touch()  # who moves it away goes on without its past
    records = read_metrics(metrics, step)
    for path in list(folder.rglob(".unfinished-*")):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for later in damaged:
        later.rename(later.with_name(f"damaged-{later.name}-{time.time_ns()}"))
    write_whole(metrics, "".join(map(json_line, records)))
    write_config(folder, replace(trainer.config, resume=None))
    publish(checkpoints_of(folder)[-1], folder / "checkpoint")
    prune_checkpoints(folder, trainer.config.save_total_limit)
    return before, records


# %% tags=["export"]
def free_run_folder(config: TrainConfig) -> Path:
    """The run's folder, not yet there: ``config.name``, or the task and the next free number (section 16)."""
    parent = Path(config.output_dir)
    if config.name is not None:
        folder = parent / config.name
        if folder.exists():
            going_on = f"go on with --resume {folder}, or " if checkpoints_of(folder) else ""
            raise FileExistsError(f"{folder} exists; {going_on}choose another --name, or move it away")
        return folder
    return numbered_folder(parent, task_name(config.task))


def task_name(task: str) -> str:
    """A task as the name of one folder: of a file or a data set its own name, without the path (section 16)."""
    kind, _, rest = task.partition(":")
    if kind in ("jsonl", "datasets"):
        path = Path(split_settings(rest)[0])
        task = path.stem if kind == "jsonl" else path.name
    return re.sub(r"[:/\\]+", "-", task)


def numbered_folder(parent: Path, name: str) -> Path:
    """The first of ``name-1``, ``name-2``, … in ``parent`` that is not there (section 16)."""
    return next(folder for n in itertools.count(1) if not (folder := parent / f"{name}-{n}").exists())


def new_run_folder(config: TrainConfig) -> Path:
    """Create and return the run's folder; OSError, with the remedy, where that is not possible (section 16)."""
    folder = free_run_folder(config)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"cannot make the folder {folder} ({error.strerror}); choose another --output-dir") from error
    return folder


def write_config(folder: Path, config: TrainConfig) -> None:
    """The settings of a run as its ``config.json`` (section 16)."""
    write_whole(folder / "config.json", json.dumps(asdict(config), indent=2) + "\n")


def write_samples(path: Path, evaluations: dict[str, Evaluation]) -> None:
    """One JSON line per held-out completion, with ``when`` it was sampled (section 16)."""
    rows = ({"when": when, **row} for when, evaluation in evaluations.items() for row in evaluation.samples)
    write_whole(path, "".join(map(json_line, rows)))


def write_evaluations(folder: Path, evaluations: dict[str, Evaluation]) -> None:
    """Held-out results by ``when`` they were measured: ``samples.jsonl``, and the rest as ``evaluation.json`` (section 16)."""
    write_samples(folder / "samples.jsonl", evaluations)
    numbers = {
        when: {name: value for name, value in vars(evaluation).items() if name != "samples"}
        for when, evaluation in evaluations.items()
    }
    write_whole(folder / "evaluation.json", json.dumps(numbers) + "\n")


def read_evaluation(folder: Path, when: str) -> Evaluation:
    """What `write_evaluations` wrote under ``when``; a reward of null stays None (section 16).

    Raises ValueError, with the remedy, if that is not there.
    """
    try:
        numbers = json.loads((folder / "evaluation.json").read_text())[when]
        numbers.pop("half_width", None)  # that earlier versions wrote
        rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
        return Evaluation(**numbers, samples=[row for row in rows if row.pop("when") == when])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{folder}: evaluation.json and samples.jsonl are not those of this run ({type(error).__name__}: {error}); give "
            f"them back, or start a new run from its weights: --model {folder / 'checkpoint'}"
        ) from error


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
# ### A first look
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
# PPO is the same trainer with other settings, a reference for the KL in its reward, and a critic. Its advantages come
# from `gae` (section 8). Its old log-probs have to be known before the pass that learns, because the KL is a part of the
# reward; the first ratios are 1 nevertheless. Three steps, to see that it runs; the closing part lets it learn.

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
# The same on one trunk, with a new policy: what learns is the policy and 65 numbers. It is a bargain with a price. In the 50
# steps of the closing part (one seed), `vf_coef` 0.1 left the policy as good as a critic of its own did, a mean reward of 0.65 and
# 0.64 in the last ten steps, but the critic was worse than a constant, with a loss of 0.146 where the constant has 0.114.
# With `vf_coef` 1 the critic was better than that, 0.108 to 0.119, and the policy learned less, 0.60.

# %%
fresh = load_policy(folder)
parts = replace(sampler, model=fresh), load_reference(fresh), load_critic(fresh, shared=True)
together = Trainer(replace(ppo, share_critic_trunk=True), fresh, tokenizer, task, *parts)
metrics = together.step()
learners = together.learner, trainer.learner, trainer.critic_learner
learned = [sum(weight.numel() for weight in learner.weights) for learner in learners]
print(f"on one trunk {learned[0]:,} numbers learn; apart {learned[1]:,} of the policy and {learned[2]:,} of the critic")
assert learned[0] == learned[1] + 65 and together.critic_learner is None and metrics["ratio_error"] < 1e-5

# %% [markdown]
# ## Before the first step
#
# Most mistakes in a set-up raise no error: the run trains, a little worse, and the curves show it hours later or never.
# Yet nearly all of them can be seen in a few completions, if one looks at the right numbers. So before its first step a
# run looks. A **check** is a short function that returns what a line needs: a status, what was found with its number,
# and, unless all is well, what to do about it. A check that makes no sense because another failed is skipped: one fault,
# one line.


# %% tags=["export:preflight"]
@dataclass(frozen=True)
class Check:
    """A line of the preflight (section 16). ``status`` is "pass", "warn", "fail", or "skip" for what could not be judged;
    ``finding`` says what was found, with its number, and ``remedy`` what to do about it."""

    name: str
    status: str
    finding: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f" → {self.remedy}" if self.remedy else ""
        return f"{self.status}  {self.name:{max(map(len, CHECKS))}}  {self.finding}{remedy}"


# %% [markdown]
# **What the checks look at.** Up to 16 training prompts, the shortest and the longest among them, with whole groups of
# completions from the run's own sampler; as many as make 64 completions, and never more than a step has. The seeds are fixed
# ones: the run's generators are not asked, so that it draws afterwards what it would have drawn without us.
#
# The independent witness is the model itself, called in the plainest way: one row alone, no padding, no mask, no positions,
# and the logits as it returns them. It is asked for a few tokens of each row, the first four and the last, because a fault
# of alignment shows at the ends.


# %% tags=["export:preflight"]
def probe_examples(trainer: Trainer) -> tuple[list[Example], list[list[int]]]:
    """Training examples from the shortest prompt to the longest, among a thousand, and their ids (section 16)."""
    train, size = trainer.task.train, trainer.config.num_generations
    candidates = train[:: -(-len(train) // 1000)]
    ids = [encode_prompt(trainer.tokenizer, example.prompt) for example in candidates]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    count = min(trainer.prompts, len(order), 16, max(2, 64 // size))
    chosen = [order[place] for place in torch.linspace(len(order) - 1, 0, count).long().tolist()]
    return [candidates[i] for i in chosen], [ids[i] for i in chosen]


def first_and_last_tokens(mask: Tensor) -> Tensor:
    """Bool ``[B, T]``: the first four tokens and the last of up to 64 rows (section 16)."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    picked = mask & ((columns < 4) | (columns == used_columns(mask)[:, None] - 1))
    picked[64:] = False
    return picked


@torch.no_grad()
def plain_logits(model, rollouts: Rollouts, picked: Tensor) -> Tensor:
    """The logits that the ``picked`` ``[B, T]`` tokens were drawn from, ``[n, V]``, every row alone and unpadded."""
    found = []
    for row in picked.any(1).nonzero().flatten().tolist():
        prompt = rollouts.prompt_ids[row][rollouts.prompt_mask[row]]
        completion = rollouts.completion_ids[row, : int(used_columns(picked)[row])]
        logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
        found.append(logits[len(prompt) - 1 : -1][picked[row, : len(completion)]])
    return torch.cat(found)


# %% [markdown]
# What several checks need is computed once, when the first of them asks. The trainer's own way of scoring is here twice,
# as a `score` without gradients and as the pass that learns.


# %% tags=["export:preflight"]
class Probe:
    """A few prompts of a trainer, their completions, and what model and trainer say about these (section 16)."""

    def __init__(self, trainer: Trainer, reward_seconds: float | None = None):
        self.trainer, self.config, self.model = trainer, trainer.config, trainer.model
        self.tokenizer, self.sampler = trainer.tokenizer, trainer.sampler
        self.reward_seconds = reward_seconds or trainer.config.reward_timeout or 60.0
        self.stop_ids = stop_token_ids(trainer.tokenizer, trainer.model, trainer.task.stop)
        self.examples, self.prompts = probe_examples(trainer)

    def generate(self, prompts: list[list[int]], seed: int) -> Rollouts:
        """Completions from the sampler; RuntimeError if they are others than asked for, or none."""
        rollouts = self.sampler.generate(prompts, self.config.num_generations, seed)
        asked = [g for g in range(len(prompts)) for _ in range(self.config.num_generations)]
        if rollouts.group.tolist() != asked or not rollouts.mask.any():
            raise RuntimeError(
                f"the sampler returned {len(rollouts)} completions in groups {rollouts.group.unique().tolist()[:4]}, …, with "
                f"{int(rollouts.mask.sum())} tokens; it was asked for {len(asked)}, in order, in groups 0, 1, …"
            )
        return rollouts

    @cached_property
    def rollouts(self) -> Rollouts:
        return self.generate(self.prompts, seed=1)

    @cached_property
    def again(self) -> Rollouts:
        """Other completions of the same prompts."""
        return self.generate(self.prompts, seed=1000)

    @cached_property
    def graded(self) -> Rollouts:
        return self.grade(self.rollouts, self.examples)

    def grade(self, rollouts: Rollouts, examples: list[Example]) -> Rollouts:
        """The rollouts with rewards; a line says so if nothing was gradable, so that no warning has to."""
        with warnings.catch_warnings(action="ignore"):
            return grade(rollouts, self.tokenizer, examples, self.trainer.task.reward, self.reward_seconds)

    @cached_property
    def picked(self) -> Tensor:
        return first_and_last_tokens(self.rollouts.mask)

    @cached_property
    def logits(self) -> Tensor:
        return plain_logits(self.model, self.rollouts, self.picked)

    @cached_property
    def scored(self) -> Tensor:
        return self.score(self.model)

    def score(self, model) -> Tensor:
        """Log-probs ``[B, T]`` of the rollouts, as the trainer computes old and reference log-probs."""
        with compiled(self.trainer.forwards):
            return score(model, self.rollouts, self.config.temperature, token_budget(self.rollouts, self.config))[0]

    @torch.enable_grad()
    def learn(self, piece: Rollouts) -> tuple[Tensor]:
        """Log-probs of a piece, as the pass that learns computes them; its gradient is thrown away."""
        texts = piece.prompt_ids, piece.prompt_mask, piece.completion_ids, piece.mask
        with compiled(self.trainer.forwards):
            results = completion_loss(self.model, *texts, lambda logprobs, *_: logprobs.sum(), self.config.temperature)
        return (results[1],)

    def materialise(self, piece: Rollouts) -> tuple[Tensor]:
        """Log-probs of a piece from all its logits, by section 1's `token_logprobs`."""
        texts = piece.prompt_ids, piece.prompt_mask, piece.completion_ids
        return (token_logprobs(self.model, *texts, self.config.temperature),)

    def by_pieces(self, compute: Callable) -> Tensor:
        """`learn` or `materialise` of all rollouts, in the pieces of the run."""
        return in_pieces(compute, self.rollouts, token_budget(self.rollouts, self.config))[0]

    @cached_property
    def temperature(self) -> float:
        """The temperature at which the model agrees best with the sampler: the setting, or one that is clearly better."""
        return fitted_temperature(self.logits, self.rollouts, self.picked, self.config)


# %% [markdown]
# How far may two computations of one log-prob differ? In float32 by rounding, so a thousandth of a nat on average is a
# lot; in half precision the logits themselves have steps of some hundredths.


# %% tags=["export:preflight"]
def allowed_difference(model) -> float:
    """Mean difference in nats that rounding explains: 0.001, and 0.05 in half precision (section 16)."""
    return 0.05 if model.dtype in (torch.bfloat16, torch.float16) else 0.001


# %% [markdown]
# **The texts.** One begin-of-sequence token, and the chat template applied once. `encode_prompt` (section 15) removes a
# second BOS that a template writes, but a server that uses the same template will not. A prompt that holds the
# template's own markers as text has probably been through it already.


# %% tags=["export:preflight"]
def texts_of(prompt: str | list[dict]) -> list[str]:
    """The text of a prompt, or of each of its turns (section 16)."""
    return [prompt] if isinstance(prompt, str) else [str(turn["content"]) for turn in prompt]


def check_bos(probe: Probe) -> tuple[str, ...]:
    """One begin-of-sequence token, from prompt and template."""
    tokenizer, bos = probe.tokenizer, probe.tokenizer.bos_token
    if bos is None:
        return "pass", "the tokenizer has no BOS, and none is added"
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "text"}]
        written = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        count = next(n for n in itertools.count() if not written.startswith(bos * (n + 1)))
        if count > 1:
            return (
                "warn",
                f"the chat template begins with {count} BOS ({bos}); lmrl keeps one of them, other programs will not",
                "remove one from the template, and save the tokenizer",
            )
    return "pass", f"each prompt begins with 1 BOS ({bos}, id {tokenizer.bos_token_id})"


# %% tags=["export:preflight"]
def check_markers(probe: Probe) -> tuple[str, ...]:
    """No prompt has been through the chat template before."""
    tokenizer = probe.tokenizer
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    found = [{mark for text in texts_of(e.prompt) for mark in special if mark in text} for e in probe.examples]
    marked = sum(map(bool, found))
    if marked and tokenizer.chat_template is not None:
        return (
            "warn",
            f"{marked} of {len(found)} prompts hold special tokens as text, such as {min(set().union(*found))}, and the chat "
            "template is put around them",
            "hand over the user's words or a list of turns, not a text that a template has made",
        )
    template = "no chat template" if tokenizer.chat_template is None else "the chat template is applied once"
    shortest, longest = min(map(len, probe.prompts)), max(map(len, probe.prompts))
    return "pass", f"{template}; prompts of {shortest} to {longest} tokens"


# %% [markdown]
# **The end of a completion.** Padding with the end-of-sequence token is common, and harmless here, where masks come from
# lengths; it is still worth a warning, because a tool that compares ids with the padding takes the stop token out of the
# loss, and with it the lesson to stop (section 1). What the sampler returned shows whether this one keeps it, and whether
# its mask leaves out other tokens that the policy drew.


# %% tags=["export:preflight"]
def names_of(tokenizer, ids: list[int]) -> str:
    """Token ids with their texts, for a message (section 16)."""
    return ", ".join(f"{repr(tokenizer.convert_ids_to_tokens(i))[1:-1]} (id {i})" for i in ids)


def check_pad(probe: Probe) -> tuple[str, ...]:
    """Padding is not the end of a completion."""
    pad, stops = probe.tokenizer.pad_token_id, names_of(probe.tokenizer, probe.stop_ids)
    if pad in probe.stop_ids:
        return (
            "warn",
            f"the pad token {names_of(probe.tokenizer, [pad])} also ends a completion; lmrl takes masks from lengths and "
            "trains it all the same, other programs take it out of the loss",
            "give the tokenizer a pad token of its own, one that texts do not use, and save it",
        )
    return "pass", f"{names_of(probe.tokenizer, [pad])} pads and ends nothing; completions end with {stops}"


def check_completions(probe: Probe) -> tuple[str, ...]:
    """The sampler continues the prompts that it was given, and all that it drew is trained."""
    rollouts, lengths = probe.rollouts, probe.rollouts.prompt_mask.sum(1).tolist()
    read = [ids[-length:] for ids, length in zip(rollouts.prompt_ids.tolist(), lengths, strict=True)]
    others = sum(ids != probe.prompts[g] for ids, g in zip(read, rollouts.group.tolist(), strict=True))
    if others:
        return (
            "fail",
            f"{others} of {len(rollouts)} completions continue another prompt than the one that was asked for",
            "the sampler must take the ids as they are: no second BOS, no decoding and encoding, nothing cut",
        )
    mean, drawn = float(rollouts.mask.sum(1).float().mean()), int(used_columns(rollouts.mask).sum())
    if left_out := drawn - int(rollouts.mask.sum()):
        return (
            "warn",
            f"{left_out} of {drawn} tokens before the ends of the completions are masked out, and so are not trained",
            "right for words that are not the policy's, such as a tool's answer; set the mask True where it drew",
        )
    return "pass", f"{len(rollouts)} for {len(probe.prompts)} prompts, {mean:.1f} tokens on average"


# %% [markdown]
# Stop tokens and the flag of truncation belong together: a completion ends with the one, or it has the other, at the cap.


# %% tags=["export:preflight"]
def check_stop(probe: Probe) -> tuple[str, ...]:
    """Finished completions end with a stop token that is trained."""
    rollouts, ends = probe.rollouts, used_columns(probe.rollouts.mask) - 1
    stops = torch.isin(rollouts.completion_ids, torch.tensor(probe.stop_ids, device=ends.device)) & rollouts.mask
    stopped = stops.gather(1, ends.clamp(min=0)[:, None])[:, 0]
    finished, wanted = int((~rollouts.truncated).sum()), names_of(probe.tokenizer, probe.stop_ids)
    if past := int((stops.sum(1) > stopped).sum()):
        return (
            "fail",
            f"{past} of {len(rollouts)} completions go on after a stop token ({wanted})",
            "give the sampler all of these stop ids",
        )
    if lost := int((~rollouts.truncated & ~stopped).sum()):
        return (
            "fail",
            f"{lost} of {finished} finished completions have no trained stop token at their end ({wanted})",
            "the sampler must return the stop token that it drew, with mask True: else stopping is never learned",
        )
    wrong = rollouts.truncated & (stopped | (ends + 1 < probe.config.max_completion_length))
    if wrong.any():
        return (
            "fail",
            f"{int(wrong.sum())} completions are marked as truncated, but end with a stop token or before the cap of "
            f"{probe.config.max_completion_length} tokens",
            "the sampler's flag must be True exactly where the cap ended the completion",
        )
    if not finished:
        cap = probe.config.max_completion_length
        answer = ": one token cannot be the answer and the stop token" if cap == 1 else ""
        return (
            "warn",
            f"no completion ends with a stop token ({wanted}), so that stopping cannot be learned{answer}",
            f"raise max_completion_length, which is {cap}",
        )
    return "pass", f"{finished} of {finished} finished completions end with a trained stop token"


# %% tags=["export:preflight"]
def check_truncation(probe: Probe) -> tuple[str, ...]:
    """Few completions are cut off."""
    share, cap = float(probe.rollouts.truncated.float().mean()), probe.config.max_completion_length
    finding = f"{share:.0%} of the completions are cut off at max_completion_length {cap}"
    remedy = "raise max_completion_length, ask for shorter answers, or look whether the model knows its stop tokens "
    remedy += f"({names_of(probe.tokenizer, probe.stop_ids)})"
    if share >= 0.9 and probe.config.mask_truncated_completions:
        left = int((~probe.rollouts.truncated).sum())
        finding += f", and mask_truncated_completions leaves {left} of {len(probe.rollouts)} to learn from"
        return "fail", finding, remedy
    return ("warn", finding, remedy) if share > 0.25 else ("pass", finding)


# %% [markdown]
# **The trainer's log-probs.** Scored twice and once more in the pass that learns, the same tokens must have the same
# log-probs: then the first ratios are 1. Dropout, or anything else that is random in the model, breaks it. And they must be
# what the plain call says, at every token: a shift, padding that is read, or logits that are changed behind the output head
# would show here.


# %% tags=["export:preflight"]
def check_ratio(probe: Probe) -> tuple[str, ...]:
    """The same tokens have the same log-probs in every pass."""
    passes = torch.stack([probe.scored, probe.score(probe.model), probe.by_pieces(probe.learn)])[:, probe.rollouts.mask]
    error = float((passes.amax(0) - passes.amin(0)).expm1().max())
    if not error <= allowed_difference(probe.model):
        return (
            "fail",
            f"the same tokens, scored three times without an update, have ratios up to {error:.2g} away from 1",
            "something in the model is random: turn dropout off (disable_dropout(model)) and keep it in eval mode",
        )
    return "pass", f"scored three times, all ratios are {f'within {error:.1g} of' if error else 'exactly'} 1"


# %% tags=["export:preflight"]
def check_alignment(probe: Probe) -> tuple[str, ...]:
    """The trainer's log-probs are the model's own."""
    picked, ids = probe.picked, probe.rollouts.completion_ids[probe.picked]
    plain = gather_logprobs(tempered(probe.logits, probe.config.temperature), ids)
    gap = (probe.scored[picked] - plain).abs()
    finding = (
        f"trainer and a plain call of the model differ by {gap.mean():.1g} nats per token, at most {gap.max():.1g}"
    )
    if gap.mean() <= allowed_difference(probe.model) and gap.max() <= 20 * allowed_difference(probe.model):
        return "pass", finding
    padded = probe.by_pieces(probe.materialise)[picked]
    if (padded - plain).abs().mean() < gap.mean() / 2:
        return "fail", finding, "the model changes its logits behind the output head, which section 11's log-probs skip"
    return (
        "fail",
        finding,
        "a row's log-probs depend on its padding: the model must use attention_mask and position_ids",
    )


# %% [markdown]
# **The sampler's log-probs.** They are compared with what the plain call gives at the run's temperature, top-k, top-p
# and min-p. If they are far off, the first question is whether *another* temperature fits them, and which.


# %% tags=["export:preflight"]
def sampling_logits(logits: Tensor, config: TrainConfig, temperature: float) -> Tensor:
    """What a sampler with the run's settings but this ``temperature`` draws from, ``[n, V]`` (section 16)."""
    return truncate(tempered(logits, temperature), config.top_k, config.top_p, config.min_p)


def sampler_difference(
    logits: Tensor, rollouts: Rollouts, picked: Tensor, config: TrainConfig, temperature: float
) -> Tensor:
    """|model - sampler| in nats for the ``picked`` tokens; without those that the model's top-k or top-p cuts off."""
    logprobs = gather_logprobs(sampling_logits(logits, config, temperature), rollouts.completion_ids[picked])
    return (logprobs - rollouts.sampler_logprobs[picked]).abs()[logprobs > -math.inf]


def fitted_temperature(logits: Tensor, rollouts: Rollouts, picked: Tensor, config: TrainConfig) -> float:
    """The temperature from an eighth to eight times the setting that fits the sampler's log-probs (section 16).

    The setting itself, unless another brings the mean difference down to a third.
    """

    def difference(temperature):
        return float(sampler_difference(logits, rollouts, picked, config, temperature).mean())

    fit, span = config.temperature, 8.0
    if difference(fit) <= 1e-3:
        return fit
    for _ in range(4):
        fit = min((fit * span ** (k / 8) for k in range(-8, 9)), key=difference)
        span = span ** (1 / 6)
    inside = 1 / 7 < fit / config.temperature < 7
    return fit if inside and difference(fit) < difference(config.temperature) / 3 else config.temperature


# %% tags=["export:preflight"]
def check_temperature(probe: Probe) -> tuple[str, ...]:
    """No other temperature than the setting fits the sampler."""
    wanted, found = probe.config.temperature, probe.temperature
    if found != wanted:
        return (
            "fail",
            f"the sampler's log-probs fit temperature {found:.2f}, the setting is {wanted:g}",
            f"give the sampler temperature={wanted:g}, and have it return the log-probs of what it sampled from",
        )
    return "pass", f"no temperature fits the sampler's log-probs better than the setting, {wanted:g}"


# %% [markdown]
# **Are the draws draws?** A sampler that repeats one completion for the whole group, or ignores its seed, draws too
# little: no reward differs in a group, or every step sees the same completions. A policy that is nearly certain does so
# rightly; its own log-probs tell the two apart. Only what it would do less than once in a million times is a failure.


# %% tags=["export:preflight"]
def completions_of(rollouts: Rollouts) -> list[list[int]]:
    """The token ids of each completion (section 16)."""
    return [ids[mask].tolist() for ids, mask in zip(rollouts.completion_ids, rollouts.mask, strict=True)]


def check_variety(probe: Probe) -> tuple[str, ...]:
    """Completions of one prompt, and of two seeds, differ as far as the policy lets them."""
    rollouts, mask, size = probe.rollouts, probe.rollouts.mask, probe.config.num_generations
    rows, again = completions_of(rollouts), completions_of(probe.again)
    first = torch.arange(len(rows)) // size * size
    logprobs = torch.maximum(probe.scored, rollouts.sampler_logprobs).where(mask, 0.0).sum(1).cpu()
    of_group, of_seed = float(logprobs[first != torch.arange(len(rows))].sum()), float(logprobs.sum())
    if rows == [rows[i] for i in first.tolist()] and of_group < math.log(1e-6):
        finding = (
            f"all {size} completions of each prompt are the same; from the policy that has probability e^{of_group:.0f}"
        )
        return "fail", finding, "is the sampler greedy, or does it repeat one draw? It must draw num_generations times"
    if rows == again and of_seed < math.log(1e-6):
        finding = (
            f"another seed gives the same {len(rows)} completions; from the policy that has probability e^{of_seed:.0f}"
        )
        return "fail", finding, "the sampler must draw with the seed that generate() is given"
    return "pass", f"{len(set(map(tuple, rows)))} different ones among {len(rows)} completions"


# %% [markdown]
# Log-probs can be right and the draws still come from elsewhere: an engine that samples at one temperature and reports at
# another, or takes the likeliest token. If a token is drawn from $q$, the expectation of its $-\log q$ is the entropy
# $H(q)$. So the sum of $-\log q(a_t) - H(q_t)$ over the tokens has mean 0, and a variance that is known too, $\sum_t
# \mathrm{Var}_{q_t}[\log q_t]$; in units of its root, a sum beyond ±6 does not happen by chance. (Only the beginnings of
# the rows count: a last token was picked because it is the last, that is, often a stop token.)
#
# The score of a small fault grows as the root of the number of tokens. A sampler that draws the arithmetic answers at
# temperature 0.7 and reports the log-probs of 1 is near -2 after the 219 tokens of 64 completions, which says nothing,
# and near -8 after 3,600. So more is drawn until 3,600 tokens are judged, at most fifteen times, and not beyond 20,000
# tokens with their prompts: a large model is not asked for minutes.


# %% tags=["export:preflight"]
def surprises(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """-log q - H(q) of drawn tokens, and the variance of log q, ``[n]`` each; ``logits [n, V]``, ``ids [n]``."""
    logq = logits.log_softmax(-1)
    q, logq = logq.exp(), logq.clamp(min=-1e4)
    entropy = -(q * logq).sum(-1)
    variance = (q * logq.square()).sum(-1) - entropy.square()
    return -gather_logprobs(logits, ids).clamp(min=-1e4) - entropy, variance


def surprise_score(surprise: Tensor, variance: Tensor) -> float:
    """How far the sum of `surprises` ``[n]`` is from 0, in standard deviations (section 16)."""
    inside = surprise < 1e3  # the others are at the edge of top-k or top-p, or were not drawn from q
    return float(surprise[inside].sum() / variance[inside].sum().clamp(min=1e-6).sqrt())


# %% tags=["export:preflight"]
def beginnings(probe: Probe, tokens: int = 3600) -> list[Rollouts]:
    """Up to 16 draws that hold ``tokens``, of up to 64 rows each and cut to the columns that suffice (section 16)."""
    draws, judged, read = [], 0, 0
    more = (probe.generate(probe.prompts, seed=1000 * number) for number in range(2, 16))
    for drawn in itertools.chain([probe.rollouts, probe.again], more):
        read += int(drawn.mask.sum() + drawn.prompt_mask.sum())
        rows = torch.arange(min(64, len(drawn)), device=drawn.mask.device)
        draws.append(drawn.select(rows).trim(min(64, -(-tokens // len(rows)))))
        judged += int(draws[-1].mask.sum())
        if judged >= tokens or read >= 20_000:
            break
    return draws


@torch.no_grad()
def surprises_of(probe: Probe, rollouts: Rollouts, temperature: float) -> Tensor:
    """`surprises` of all tokens, ``[2, n]``, by the model with the run's settings but this temperature (section 16)."""

    def compute(piece):
        logits = completion_logits(probe.model, piece.prompt_ids, piece.prompt_mask, piece.completion_ids)
        logits = sampling_logits(logits.flatten(0, 1), probe.config, temperature)
        return surprises(logits, piece.completion_ids.flatten())

    return torch.stack(in_pieces(compute, rollouts, max_tokens=512))[:, rollouts.mask]


def check_draws(probe: Probe) -> tuple[str, ...]:
    """Tokens are drawn from the distribution that is reported."""
    draws = beginnings(probe)
    found = [
        torch.cat([surprises_of(probe, rollouts, temperature) for rollouts in draws], 1)
        for temperature in {probe.config.temperature, probe.temperature}
    ]
    z = min((surprise_score(*each) for each in found), key=abs)
    finding = (
        f"{found[0].shape[1]} drawn tokens are as likely as tokens of the policy are, to {z:+.1f} standard deviations"
    )
    if abs(z) <= 4:
        return "pass", finding
    kind = "too likely: is it greedy, colder, or cut by top-p" if z < 0 else "too unlikely: is it hotter"
    remedy = f"the sampler draws tokens that are {kind} than the log-probs that it reports?"
    return "fail" if abs(z) > 6 else "warn", finding, remedy


# %% [markdown]
# What is left at the temperature that fits is the gap that section 14 corrects, if it is small: up to a tenth of a nat
# it is a matter of precision, beyond it sampler and trainer compute different things.


# %% tags=["export:preflight"]
def check_gap(probe: Probe) -> tuple[str, ...]:
    """The sampler's log-probs are the trainer's."""
    arguments = probe.logits, probe.rollouts, probe.picked, probe.config
    gap = sampler_difference(*arguments, probe.temperature)
    finding = f"sampler and trainer differ by {gap.mean():.1g} nats per token, at most {gap.max():.1g}"
    if gap.mean() <= allowed_difference(probe.model):
        return "pass", finding
    if not gap.mean() <= 0.1:
        remedy = "the two compute different things: compare weights, tokens and sampling settings (section 14)"
        if not (probe.rollouts.sampler_logprobs[probe.rollouts.mask] != 0).any():
            remedy = "the sampler returned 0 for every token: have it return the log-probs that it sampled with"
        return "fail", finding, remedy
    if probe.config.vllm_importance_sampling_correction:
        return "pass", f"{finding}; the correction weighs it out"
    return "warn", finding, "is the sampler's precision lower? set vllm_importance_sampling_correction (section 14)"


# %% [markdown]
# **Does the optimiser step the model?** It holds the weights that were trainable when the trainer was made, or float32 copies
# of them. Weights that are frozen or replaced afterwards it does not reach, and copies of earlier values would undo what was
# loaded since. And a step must not be lost in rounding: AdamW changes a weight by about the learning rate, and in bfloat16
# a weight of 0.02 does not notice a change of less than 0.00006. A critic has an optimiser of its own, with a rate of its own.


# %% tags=["export:preflight"]
def check_learner(learner: Learner, names: dict[str, Tensor], setting: str) -> tuple[str, ...]:
    """Whether it steps the parameters of these ``names``, those that are trainable, and by enough (section 16)."""
    stepped = {id(weight) for weight in learner.weights}
    missed = [name for name, weight in names.items() if weight.requires_grad != (id(weight) in stepped)]
    remedy = "freeze, replace or load weights first, then make the Trainer"
    if missed:
        return "fail", f"{len(missed)} parameters were frozen or replaced since, such as {missed[0]}", remedy
    pairs = zip(learner.weights, learner.masters, strict=True)
    if stale := sum(master is not weight and not master.to(weight.dtype).equal(weight) for weight, master in pairs):
        return (
            "fail",
            f"{stale} parameters are not what their master weights say, which the first step brings back",
            remedy,
        )
    count, rate = sum(weight.numel() for weight in learner.masters), learner.learning_rate
    share = sum(int((weight + rate == weight).sum()) for weight in learner.masters) / count
    finding = f"a step of {setting} {rate:g} is rounded to nothing in {share:.0%} of {count} weights"
    if share > 0.5:
        return "warn", finding, f"set master_weights, which are float32, or raise {setting}"
    return "pass", finding


@torch.no_grad()
def check_weights(probe: Probe) -> tuple[str, ...]:
    """The optimiser steps the trainable weights of model and critic, and by enough."""
    trainer, names = probe.trainer, dict(probe.model.named_parameters())
    own = {} if trainer.own_critic is None else dict(trainer.own_critic.named_parameters(prefix="critic"))
    if trainer.critic_learner is None:
        return check_learner(trainer.learner, names | own, "learning_rate")
    policy = check_learner(trainer.learner, names, "learning_rate")
    critic = check_learner(trainer.critic_learner, own, "critic_learning_rate")
    return max(critic, policy, key=lambda found: ("pass", "warn", "fail").index(found[0]))


# %% [markdown]
# **Does a sync reach every weight?** One has to change the weights to see it, and leave no trace. There is a change that can
# be undone to the last bit and needs no copy: flip signs. Every parameter gets half of its columns negated, another half
# for each, and the same flips bring it back; only a parameter that is all zero, as a fresh adapter's or bias, is filled and
# emptied again. The change is so rough that a single norm's weight left behind shows in the log-probs. Then the sampler is
# told, draws, and is compared with the changed model. If it is off, two more questions find the cause: does it agree with
# the weights *before* the sync? With the changed ones, but for one parameter? And after the next sync it has to draw from the
# policy again: a sampler that kept the changed weights would begin the run with them.


# %% tags=["export:preflight"]
@torch.no_grad()
def flip_signs(weight: Tensor, number: int) -> None:
    """Negate about half of the columns of ``weight``, which ones depends on ``number``; twice changes nothing."""
    generator = torch.Generator().manual_seed(number)
    signs = 1 - 2 * torch.randint(2, weight.shape[-1:], generator=generator)
    signs.view(-1)[:1] = -1
    weight.mul_(signs.to(weight))


@contextmanager
def weights_changed(model, but: str | None = None) -> Iterator[None]:
    """Every trainable parameter of ``model`` changed beyond recognition, and back again bit for bit (section 16).

    The one called ``but`` stays as it is.
    """
    weights = [(i, *pair) for i, pair in enumerate(model.named_parameters()) if pair[1].requires_grad]
    weights = [(i, weight.detach()) for i, name, weight in weights if name != but]
    empty = [(weight, weight.clone()) for _, weight in weights if not weight.any()]
    try:
        for weight, _ in empty:
            weight.fill_(0.1)
        for number, weight in weights:
            flip_signs(weight, number)
        yield
    finally:
        for number, weight in weights:
            flip_signs(weight, number)
        for weight, zeros in empty:
            weight.copy_(zeros)


# %% tags=["export:preflight"]
def check_sync(probe: Probe) -> tuple[str, ...]:
    """New weights reach the sampler, every one, and the policy's come back to it."""
    model, config = probe.model, probe.config

    def difference(rollouts, weights):
        picked = first_and_last_tokens(rollouts.mask)
        with weights:
            logits = plain_logits(model, rollouts, picked)
        return float(sampler_difference(logits, rollouts, picked, config, probe.temperature).mean())

    try:
        with weights_changed(model):
            probe.sampler.sync(model)
            changed = probe.generate(probe.prompts[:2], seed=2)
    finally:
        probe.sampler.sync(model)
    back = probe.generate(probe.prompts[:2], seed=2)
    before = float(sampler_difference(probe.logits, probe.rollouts, probe.picked, config, probe.temperature).mean())
    gap, limit = difference(changed, weights_changed(model)), 3 * max(before, allowed_difference(model))
    if gap <= limit:
        after = difference(back, nullcontext())
        if after <= limit:
            return (
                "pass",
                f"with other weights, sampler and trainer differ by {gap:.1g} nats per token, then {after:.1g}",
            )
        return (
            "fail",
            f"the sampler did not take the policy's weights back: after a second sync the two differ by {after:.2g} nats",
            "sync(model) must take over every parameter, every time it is called",
        )
    finding = (
        f"after a sync of other weights, sampler and trainer differ by {gap:.2g} nats per token ({before:.1g} before)"
    )
    if difference(changed, nullcontext()) <= limit:
        return "fail", f"{finding}: it has the weights of before", "sync(model) must take them over before it returns"
    for name, weight in model.named_parameters():
        if weight.requires_grad and difference(changed, weights_changed(model, name)) < gap / 3:
            return "fail", f"{finding}: {name} did not arrive", "sync(model) must take over every parameter"
    return "fail", f"{finding}: several parameters did not arrive", "sync(model) must take over every parameter"


# %% [markdown]
# **The reference** is the policy before its first step, so the KL to it starts at 0; and it stays there, so other
# weights of the policy must not move it.


# %% tags=["export:preflight"]
def check_reference(probe: Probe) -> tuple[str, ...]:
    """The KL to the reference starts at 0, and the reference stays."""
    reference, mask = probe.trainer.reference, probe.rollouts.mask
    if reference is None:
        return "pass", "none, as beta is 0"
    logprobs = probe.score(reference)
    kl = float(masked_mean(kl_k3(probe.scored, logprobs), mask))
    with weights_changed(probe.model):
        moved = float((probe.score(reference) - logprobs)[mask].abs().max())
    if moved > 0:
        return (
            "fail",
            f"the reference's log-probs move by {moved:.2g} nats when the policy's weights change",
            "it must be a frozen copy: load_reference(model)",
        )
    finding = f"KL to the reference is {kl:.1g} nats per token"
    if probe.trainer.steps_done == 0 and not kl <= allowed_difference(probe.model) ** 2:
        return (
            "fail",
            f"{finding} before the first step",
            "the reference must be the starting policy: load_reference(model)",
        )
    return "pass", f"{finding} after {probe.trainer.steps_done} steps, and it does not move with the policy"


# %% [markdown]
# **The critic**, where there is one, gives a number to every token.


# %% tags=["export:preflight"]
@torch.no_grad()
def check_critic(probe: Probe) -> tuple[str, ...]:
    """The critic's values are finite."""
    critic, rollouts = probe.trainer.critic, probe.rollouts
    if critic is None:
        return "pass", "none, as the advantages need no values"
    values = predict_values(critic, rollouts, token_budget(rollouts, probe.config))[0][rollouts.mask]
    if bad := int((~values.isfinite()).sum()):
        remedy = "look at the weights of the critic and of its head: build_critic(model) makes a new one"
        return "fail", f"{bad} of {len(values)} values are not finite", remedy
    return "pass", f"values from {values.min():.2g} to {values.max():.2g}"


# %% [markdown]
# **The reward** meets the completions that it will meet in the run, under a time limit, and after them two that come
# sooner or later: an empty one, and one of random tokens. It is also asked about all of them in the opposite order: a list
# of rewards that is one place late, sorted, or left over from the last call still has the right length and mean, and
# teaches noise.


# %% tags=["export:preflight"]
def grade_odd_texts(probe: Probe) -> None:
    """Ask the reward for an empty completion and one of random tokens; raises what it raises (section 16)."""
    size, generator = probe.config.max_completion_length, torch.Generator().manual_seed(0)
    noise = probe.tokenizer.decode(torch.randint(len(probe.tokenizer), (size,), generator=generator))
    try:
        examples = [probe.examples[0], probe.examples[-1]]
        ask_reward(probe.trainer.task.reward, examples, ["", noise], probe.reward_seconds)
    except RewardError as error:
        finding = f"{str(error).rpartition('; ')[0]}, asked about an empty completion and {noise[:30]!r}"
        raise RewardError(
            f"{finding}; a policy says such things: have it return a number or None for any text"
        ) from error


# %% tags=["export:preflight"]
def rewards_that_depend_on_order(probe: Probe) -> int:
    """How many completions get another reward when the reward function is given all of them in reverse (section 16)."""
    backwards = torch.arange(len(probe.rollouts), device=probe.rollouts.group.device).flip(0)
    again = probe.grade(probe.rollouts.select(backwards), probe.examples).select(backwards)
    graded = probe.graded.graded
    return int(((again.graded != graded) | (graded & (again.rewards != probe.graded.rewards))).sum())


def check_reward(probe: Probe) -> tuple[str, ...]:
    """The reward function answers, in time, for any text, and for each text by itself."""
    count, started = len(probe.rollouts), time.perf_counter()
    try:
        graded = probe.graded
        seconds = time.perf_counter() - started
        grade_odd_texts(probe)
        moved = rewards_that_depend_on_order(probe)
    except RewardError as error:
        finding, _, remedy = str(error).rpartition("; ")
        return "fail", finding, remedy
    missing, rewards = int((~graded.graded).sum()), graded.rewards[graded.graded]
    if missing == count:
        return "fail", f"none of {count} completions could be graded: all None", "look at the reward's None cases"
    finding = (
        f"{rewards.min():.3g} to {rewards.max():.3g}, mean {rewards.mean():.3g}, {missing} of {count} not gradable, "
    )
    finding += f"{seconds / count * probe.config.completions_per_step:.1g} s per step"
    if missing > count / 2:
        return "warn", finding, "more than half of the completions teach nothing: look at the reward's None cases"
    if moved:
        return (
            "warn",
            f"{finding}; {moved} of {count} completions get another reward when they are given in reverse",
            "right for rewards that are random or compare completions; else the list is shifted, sorted or an old one: "
            "the k-th reward belongs to the k-th completion",
        )
    return "pass", finding


# %% [markdown]
# **Is there anything to learn?** Only where rewards differ within a group (section 6), or, for the estimators that compare
# otherwise, within the batch. If all are equal, up to 64 further prompts are asked before this is called a fault.


# %% tags=["export:preflight"]
BY_GROUP = ("group", "leave_one_out")


def tied(rollouts: Rollouts, config: TrainConfig) -> Tensor:
    """`tied_groups` of graded rollouts; the batch is one group if the advantages are not a group's own (section 16)."""
    group = rollouts.group if config.advantage_estimator in BY_GROUP else torch.zeros_like(rollouts.group)
    return tied_groups(rollouts.rewards, group, rollouts.graded)


def check_signal(probe: Probe) -> tuple[str, ...]:
    """Rewards differ where advantages are made of them."""
    found, size = tied(probe.graded, probe.config), len(probe.examples)
    others = probe.trainer.task.train[:64]
    for start in range(0, len(others), size):
        if not found.all():
            break
        examples = others[start : start + size]
        prompts = [encode_prompt(probe.tokenizer, example.prompt) for example in examples]
        found = torch.cat([found, tied(probe.grade(probe.generate(prompts, seed=3), examples), probe.config)])
    count, equal, size = len(found), int(found.sum()), probe.config.num_generations
    finding, remedy = f"the rewards are equal in {equal} of {count} batches", ""
    if probe.config.advantage_estimator in BY_GROUP:
        finding, remedy = finding.replace("batches", "groups"), f", or more num_generations than {size} (section 13)"
    remedy = (
        "they teach nothing: is the reward right? Then take prompts that succeed sometimes, or steps between" + remedy
    )
    if equal == count:
        row = int(probe.graded.graded.nonzero()[0])
        text, reward = decode(probe.tokenizer, probe.graded)[row], float(probe.graded.rewards[row])
        return "fail", f"{finding}; {text[:40]!r} got {reward:.3g}", remedy
    return ("warn", finding, remedy) if equal > 0.75 * count else ("pass", finding)


# %% [markdown]
# **The memory** of a step is section 12's plan, with the lengths of this run, less what is there already.


# %% tags=["export:preflight"]
def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on ``device``; None where that is not known (section 16)."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    lines = Path("/proc/meminfo")
    found = (
        re.search(r"MemAvailable: +(\d+) kB", lines.read_text()) if lines.exists() and device.type == "cpu" else None
    )
    return int(found[1]) * 1024 if found else None


def setup_of(config: TrainConfig, **others) -> Setup:
    """Section 12's `Setup` of a run with these settings; ``others`` are its fields that no setting gives (section 16)."""
    settings = {field.name: getattr(config, field.name) for field in fields(Setup) if hasattr(config, field.name)}
    settings |= {"completions": config.completions_per_step, "batch": config.per_device_train_batch_size}
    return Setup(**settings | others)


def adapter_of(config: TrainConfig) -> Callable:
    """What makes a loaded model the one that learns: gives it its adapter with ``config.use_peft`` (section 16)."""
    if not config.use_peft:
        return as_it_is
    lora = {"r": config.lora_r, "alpha": config.lora_alpha, "target_modules": config.lora_target_modules}
    return partial(add_adapter, **lora, seed=config.seed)


def check_memory(probe: Probe) -> tuple[str, ...]:
    """A step fits into what is free."""
    trainer = probe.trainer
    models = {"reference": trainer.reference is not None, "critic": trainer.critic is not None}
    try:
        setup = setup_of(probe.config, max_prompt_length=max(map(len, probe.prompts)), **models)
        shape = shape_of(probe.model.config, probe.model.dtype, adapter_of(probe.config))
        residents = plan(shape, setup).residents
    except ValueError as error:
        return "skip", str(error)
    peak = Plan(tuple(part for part in residents if part.owner != "engine")).peak  # an engine has its share by now
    models = [model for model in (probe.model, trainer.reference, trainer.critic) if model is not None]
    weights = {weight.data_ptr(): weight.nbytes for model in models for weight in model.parameters()}
    needed, free = peak - sum(weights.values()), free_memory(probe.model.device)
    if free is None:
        return "skip", f"a step takes {needed / 2**30:.2f} GiB more; what is free is not known here"
    finding = f"a step takes {needed / 2**30:.2f} GiB more, and {free / 2**30:.2f} GiB are free"
    if needed <= 0.9 * free:
        return "pass", finding
    remedy = "lower per_device_train_batch_size and raise gradient_accumulation_steps; `lmrl plan` shows what takes it"
    return "warn" if needed <= free else "fail", finding, remedy


# %% [markdown]
# **All of them**, in order, each with those that must not have failed before it. What a check raises is a failure too, and
# its message is the finding. The global generators are given back as they were.


# %% tags=["export:preflight"]
CHECKS = {
    "one BOS": (check_bos, ()),
    "template": (check_markers, ()),
    "pad token": (check_pad, ()),
    "completions": (check_completions, ()),
    "stop token": (check_stop, ("completions",)),
    "first ratio": (check_ratio, ("completions",)),
    "truncation": (check_truncation, ("stop token", "first ratio")),
    "alignment": (check_alignment, ("first ratio",)),
    "temperature": (check_temperature, ("alignment",)),
    "variety": (check_variety, ("first ratio",)),
    "draws": (check_draws, ("stop token", "alignment", "variety")),
    "sampler gap": (check_gap, ("alignment",)),
    "weights": (check_weights, ()),
    "weight sync": (check_sync, ("sampler gap",)),
    "reference": (check_reference, ("first ratio",)),
    "critic": (check_critic, ("first ratio",)),
    "reward": (check_reward, ("completions",)),
    "signal": (check_signal, ("stop token", "variety", "reward")),
    "memory": (check_memory, ()),
}


def preflight(trainer: Trainer, reward_seconds: float | None = None) -> list[Check]:
    """Every check of a trainer that is ready to start, in the order of CHECKS (section 16).

    Weights, optimisers, generators and the order of the prompts are afterwards what they were, to the last bit. The reward
    function has ``reward_seconds`` for up to 64 completions, by default ``config.reward_timeout``, or 60. It may be called
    from any thread; outside of the main thread a reward function that does not answer is left running (`within`).
    """
    found = {}
    with generators_kept():
        probe = Probe(trainer, reward_seconds)
        for name, (function, needs) in CHECKS.items():
            blocked = [need for need in needs if found[need].status in ("fail", "skip")]
            found[name] = (
                Check(name, "skip", f"not judged: {blocked[0]}") if blocked else ask_check(name, function, probe)
            )
    return list(found.values())


def ask_check(name: str, function: Callable, probe: Probe) -> Check:
    """The line of one check; an exception is its finding (section 16)."""
    try:
        return Check(name, *function(probe))
    except Exception as error:
        return Check(name, "fail", describe(error), "look there; where that is no code of yours, lmrl is at fault")


# %% [markdown]
# `lmrl check` prints all lines, `lmrl train` those that are not a pass, and does not start on a failure.


# %% tags=["export:preflight"]
def preflight_table(checks: list[Check]) -> str:
    """One aligned line for each check, and the count of each status (section 16)."""
    statuses = [check.status for check in checks]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in ("pass", "warn", "fail", "skip"))
    return "\n".join([*map(str, checks), f"{len(checks)} checks: {counts}"])


def require_preflight(trainer: Trainer) -> None:
    """Print the warnings and failures of `preflight` to stderr; ValueError if there is a failure (section 16)."""
    checks = preflight(trainer)
    for check in checks:
        if check.status in ("warn", "fail"):
            print(check, file=sys.stderr)
    failed = [check.name for check in checks if check.status == "fail"]
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(checks)} checks of the set-up failed ({', '.join(failed)}) and nothing was started; "
            "`lmrl check` with the same options shows all of them, `lmrl train --no-preflight` starts without"
        )


# %% [markdown]
# Here is the PPO trainer from above, with its reference and three steps behind it:

# %%
checks = preflight(trainer)
print(preflight_table(checks))
assert {check.status for check in checks} == {"pass"}

# %% [markdown]
# And three ways to break it: a sampler at another temperature, a reward that says the same of everything, and a sampler that
# never hears of new weights. Each leaves one line.

# %%
broken = {
    "temperature": {"sampler": replace(sampler, temperature=0.6)},
    "signal": {"task": replace(task, reward=lambda completions, **columns: [0.5] * len(completions))},
    "weight sync": {"sampler": replace(sampler, model=load_reference(trainer.model))},
}
for name, parts in broken.items():
    working = {part: getattr(trainer, part) for part in parts}
    vars(trainer).update(parts)
    lines = [check for check in preflight(trainer) if check.status in ("warn", "fail")]
    vars(trainer).update(working)
    print(*lines, sep="\n")
    assert [line.name for line in lines] == [name]

# %% [markdown]
# ## The command line
#
# `lmrl train` builds the pieces from a `TrainConfig`, hands them to the trainer and prints where the results are. What
# the user handed over wrongly becomes one line and exit code 2; a fault of ours keeps its traceback. The problems and the
# reward come first: they are the user's own, so that most mistakes are there, and nothing else has to be loaded to see them.
#
# A very small model gets one thread on a CPU. Threads wait for each other after every operation, and where the operation is
# small and another program has the core, they wait long. Measured on two cores, one of them busy with other work, for steps of
# completions of 32 tokens: with 80,000 parameters two threads took 0.7 to 0.9 of the time of one for 64 to 256 completions,
# and for 32 completions, in two rounds, 9 and 66 times as long. From 160,000 to 2 million parameters they took 0.6 to 1.1 of it,
# and up to 1.9 in the busier round. So the limit lies between; who sets `OMP_NUM_THREADS` has chosen.


# %% tags=["export:cli"]
ONE_THREAD = 150_000  # a model with fewer parameters gets one


def build_trainer(config: TrainConfig) -> Trainer:
    """Load task, model, tokenizer and sampler as ``config`` says and hand them to a `Trainer` (section 16)."""
    check_config(config)
    require_compiling(config)
    checkpoint = None if config.resume is None else checkpoint_to_resume(config)
    if checkpoint is None:
        free_run_folder(config)
    task = load_problems(config)
    require_packages(config)
    tokenizer, model = load_model(config)
    model = adapter_of(config)(model)
    sampler = build_sampler(replace(config, use_vllm=False), task, tokenizer, model)
    reference = load_reference(model) if config.beta != 0.0 else None
    critic = load_critic(model, shared=config.share_critic_trunk) if config.advantage_estimator == "gae" else None
    trainer = Trainer(config, model, tokenizer, task, sampler, reference, critic)
    if checkpoint is not None:
        restore(trainer, checkpoint)
    if config.use_vllm:  # last, for an engine takes a while to start
        trainer.sampler = build_sampler(config, task, tokenizer, model)
    return trainer


def checkpoint_to_resume(config: TrainConfig) -> Path:
    """The newest whole checkpoint of the run in ``config.resume``; says what the run will change (section 16)."""
    checkpoint = newest_checkpoint(Path(config.resume))
    record = read_record(checkpoint)
    changes = changed_settings(record, config)
    print(f"{config.resume} goes on after step {record['step']} of {config.max_steps}", *changes, sep="\n  ")
    return checkpoint


def load_problems(config: TrainConfig) -> Task:
    """The task that ``config`` names, with the reward that it names (section 16)."""
    if config.model == "tiny" and config.task.partition(":")[0] in ("countdown", "reasoning_gym"):
        raise ValueError(f"model 'tiny' reads only digits, + and =; pass --model for task {config.task}")
    task = load_task(config.task, seed=config.seed)
    if config.reward is not None:
        task = replace(task, reward=load_reward(config.reward))
    try:
        require_columns(task)
    except ValueError as error:
        if config.reward is None:
            raise
        raise ValueError(f"{error}; or leave {config.reward} out: --reward None takes the task's own reward") from error
    return task


def require_compiling(config: TrainConfig) -> None:
    """ValueError for compiled layers beside an engine on a CPU, where nothing would be compiled (section 16)."""
    if config.torch_compile and config.use_vllm and find_device(config.device).startswith("cpu"):
        raise ValueError(
            "torch_compile and use_vllm exclude each other on a CPU: the engine is started with PyTorch's compiler switched "
            "off for the whole process (section 14), so that nothing would be compiled; leave one of them out"
        )


def require_packages(config: TrainConfig) -> None:
    """Import what a run needs later, so that a missing package is named before there is a folder (section 16)."""
    optional_import("lmrl.figures.trainer", "train")
    tracker_modules(config.report_to)


def load_model(config: TrainConfig) -> tuple:
    """The tokenizer and the model that ``config`` names; ImportError before that if it names vLLM in vain (section 16)."""
    device, tiny = find_device(config.device), config.model == "tiny"
    chosen = "OMP_NUM_THREADS" in os.environ  # by the user: vLLM's import sets it too
    if config.use_vllm:
        import_vllm(device.split(":")[0])
    if tiny and not chosen:
        torch.set_num_threads(1)  # the warm start learns, too
    path = warm_start_folder(config.seed) if tiny else resolve_model_path(config.model)
    tokenizer, model = load_tokenizer(path), load_policy(path, dtype=config.dtype, device=device)
    if model.device.type == "cpu" and parameter_count(model) < ONE_THREAD and not chosen:
        torch.set_num_threads(1)
    return tokenizer, model


def build_sampler(config: TrainConfig, task: Task, tokenizer, model) -> Sampler:
    """The sampler of ``model`` that ``config`` asks for: its own, or a vLLM engine, which is to be closed (section 16)."""
    sampling = (model, stop_token_ids(tokenizer, model, task.stop), tokenizer.pad_token_id)
    sampling += (config.max_completion_length, config.temperature, config.top_k, config.top_p, config.min_p)
    if not config.use_vllm:
        return TorchSampler(*sampling)
    return VLLMSampler(
        *sampling,
        gpu_memory_utilization=config.vllm_gpu_memory_utilization,
        max_model_length=config.vllm_max_model_length,
        enable_sleep_mode=config.vllm_enable_sleep_mode,
    )


def closed_at_the_end(sampler: Sampler):
    """``sampler`` as what a ``with`` takes: an engine is closed at its end, the model's own sampler needs nothing."""
    return sampler if isinstance(sampler, VLLMSampler) else nullcontext()


# %% tags=["export:cli"]
def train(config: TrainConfig) -> int:
    """Run ``lmrl train``; returns the exit code: 0, or 130 after Ctrl-C or SIGTERM (section 16)."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "lmrl train is one process on one device: start it without torchrun; several come in section 17"
        )
    if config.resume is not None:
        require_checkpoints(Path(config.resume))
    with nullcontext() if config.resume is None else locked(Path(config.resume)):  # before its newest is looked for
        return run_and_tell(config)


def run_and_tell(config: TrainConfig) -> int:
    """`run`, with what it needs built before and its results printed after; the exit code of `train` (section 16)."""
    trainer = build_trainer(config)
    if config.max_prompt_length is not None:
        left = f"{len(trainer.task.train)} prompts to train on and {len(trainer.task.heldout)} held out are left"
        print(f"{trainer.dropped_prompts} prompts of more than {config.max_prompt_length} tokens dropped; {left}")
    with closed_at_the_end(trainer.sampler):
        if config.preflight and config.resume is None:  # a run that goes on has left its beginning
            require_preflight(trainer)
        result = run(trainer, optional_import("lmrl.figures.trainer", "train").learning_curve)
    step = f"after {trainer.steps_done} of {config.max_steps} steps"
    print(f"pass@1 on held-out problems: {result.before} before, {result.after} {step}")
    print(f"well-formed answers: {result.before.well_formed:.3f} before, {result.after.well_formed:.3f} after")
    print(f"mean reward: {result.before.reward:.3f} before, {result.after.reward:.3f} after")
    print(f"peak memory: {peak_memory(trainer.model.device.type):.2f} GiB")
    print(f"results: {result.folder}/ (learning_curve.png, metrics.jsonl, samples.jsonl, checkpoint/)")
    best = best_checkpoint(result.folder)
    if best is not None and step_of(best) != trainer.steps_done:
        print(f"best of the measured: {best}, pass@1 {read_record(best)['eval_pass_at_1']:.3f}")
    if result.interrupted:
        print(f"go on with: lmrl train --resume {result.folder}")
    return 130 if result.interrupted else 0


# %% [markdown]
# `lmrl check` takes the settings of `lmrl train`, and does of it what comes before the first step. Prompts that the tokenizer
# cannot read leave nothing to judge: they are the one failure in its table.


# %% tags=["export:cli"]
def check_setup(config: TrainConfig) -> int:
    """Run ``lmrl check``; returns the exit code: 1 if a check failed, else 0 (section 16)."""
    check_config(config)  # its name too, though a folder of that name may be there already
    try:
        trainer = build_trainer(config if config.resume else replace(config, name=None))
        with closed_at_the_end(trainer.sampler):
            checks = preflight(trainer)
    except PromptError as error:
        unjudged = [Check(name, "skip", "not judged: prompts") for name in CHECKS]
        checks = [Check("prompts", "fail", str(error), "repair these prompts, or leave them out"), *unjudged]
    print(preflight_table(checks))
    return int(any(check.status == "fail" for check in checks))


# %% [markdown]
# `lmrl eval` measures what a run left behind, or any other model. Given the folder of a run, or a checkpoint in it, it
# takes the run's settings: the same task, the same held-out problems, the same sampling. With the run's own number of
# answers it therefore repeats the run's last measurement to the digit; by default it draws more of them, for pass@k. What
# was measured is named with its step, on the screen and in eval.json: the folder `checkpoint/` holds another one later. The
# run's own reward function stays too, also on another `--task`, and is named; `--reward None` takes the task's.


# %% tags=["export:cli"]
@dataclass(frozen=True)
class EvalConfig(TrainConfig):
    """The settings of `lmrl eval` (section 16): those of `lmrl train`, of which it reads the model's, the task's and the
    sampling's, and these. After `lmrl eval RUN` the run's own settings are the defaults."""

    model: str = "tiny"
    """A run's folder, a checkpoint in it, its checkpoints/best, or any model that `lmrl train` takes (section 16)."""
    num_eval_generations: int = 16
    """Answers per held-out problem, n: pass@k is estimated for k up to n (section 13)."""
    eval_seed: int = 0
    """Seed of the answers. The problems depend on seed, and should stay those of the run (section 16)."""
    output_dir: str = "runs"
    """Folder in which the results get a folder eval-1, eval-2, …; by default the run's (section 16)."""


def settings_of_run(models: list[str], default: EvalConfig) -> EvalConfig:
    """The settings to evaluate a model with: its run's, if it is the folder of a run or within one (section 16).

    For any other model they are ``default``. Raises ValueError for several models, FileNotFoundError for a run that has
    no checkpoint yet.
    """
    if len(models) > 1:
        raise ValueError(f"lmrl eval measures one model at a time, but got {', '.join(models)}")
    path = Path(models[0])
    run = next((folder for folder in (path, *path.parents[:2]) if (folder / "metrics.jsonl").is_file()), None)
    if run is None:
        return replace(default, model=models[0])
    checkpoint = {run: run / "checkpoint", run / "checkpoints/best": best_checkpoint(run)}.get(path, path)
    if checkpoint is None or not checkpoint.is_dir():
        kept = ", ".join(folder.name for folder in checkpoints_of(run))
        raise FileNotFoundError(
            f"the run {run} has no {path if checkpoint is None else checkpoint}"
            + (f"; it kept {kept}" if kept else " yet (see save_steps)")
        )
    settings = asdict(read_settings(run / "config.json", TrainConfig))
    settings |= {"model": str(checkpoint), "output_dir": str(run)}
    return EvalConfig(**settings | {"num_eval_generations": default.num_eval_generations})


# %% tags=["export:cli"]
def name_and_step(model: str) -> str:
    """``model``, and of a checkpoint the step after which it was written (section 16)."""
    file = Path(model) / "lmrl.json"
    return f"{model} (step {json.loads(file.read_text())['step']})" if file.is_file() else model


def evaluate_model(config: EvalConfig) -> int:
    """Run ``lmrl eval``; returns the exit code (section 16). ValueError for settings that cannot work."""
    check_config(config)
    task, measured = load_problems(config), name_and_step(config.model)
    tokenizer, model = load_model(config)
    if config.max_prompt_length is not None:
        task, _ = drop_long_prompts(task, tokenizer, config.max_prompt_length)
    sampler = build_sampler(config, task, tokenizer, disable_dropout(model))
    with closed_at_the_end(sampler):
        result = measure(sampler, tokenizer, task, config, config.eval_seed)
    answers = f"{len(result.right)} held-out problems, {config.num_eval_generations} answers each"
    print(f"{measured} on {config.task}: {answers}, temperature {config.temperature:g}")
    if config.reward is not None:
        print(f"graded by {config.reward}; --reward None takes the task's own reward")
    print(evaluation_table(result))
    folder = numbered_folder(Path(config.output_dir), "eval")
    folder.mkdir(parents=True)
    (folder / "samples.txt").write_text(readable_samples(result))
    (folder / "samples.jsonl").write_text("".join(map(json_line, result.samples)))
    numbers = {f"pass@{k}": interval for k, interval in result.pass_at().items()}
    numbers |= {name: getattr(result, name) for name in ("reward", "well_formed", "truncated", "ungraded")}
    record = {"model": measured, "results": numbers, "settings": asdict(config)}
    (folder / "eval.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"results: {folder}/ (samples.txt to read, samples.jsonl, eval.json)")
    return 0


# %% [markdown]
# The samples are the most useful output of a measurement: a reward that is cheated shows there first. So they are also
# written to be read, a problem at a time, with equal answers counted together.


# %% tags=["export"]
def evaluation_table(result: Evaluation) -> str:
    """The numbers of an evaluation, one a line; intervals are 95 %, over problems (section 16)."""
    rows = [(f"pass@{k}", interval) for k, interval in result.pass_at().items()]
    rows += [("mean reward", f"{result.reward:.3f}"), ("well-formed", f"{result.well_formed:.3f}")]
    rows += [("cut off at the cap", f"{result.truncated:.3f}"), ("not gradable", f"{result.ungraded:.3f}")]
    return "\n".join(f"{name:<20}{value}" for name, value in rows)


def readable_samples(result: Evaluation) -> str:
    """The samples as a text: each problem, how often it was solved, and its different answers by frequency (section 16)."""
    lines, n = [], len(result.samples) // len(result.right)
    for i, right in enumerate(result.right):
        answers = result.samples[i * n : (i + 1) * n]
        lines += [f"=== problem {i + 1}: {right} of {n} right", prompt_text(answers[0]["prompt"])]
        for text, words in counted_answers(answers):
            lines += [f"--- {words}", text]
        lines.append("")
    return "\n".join(lines)


def counted_answers(answers: list[dict]) -> list[tuple[str, str]]:
    """The different answers among samples of one problem, the most frequent first, with number and reward (section 16)."""
    counts = Counter((row["completion"], row["reward"], row["truncated"]) for row in answers)
    described = []
    for (text, reward, truncated), count in counts.most_common():
        grade = "not gradable" if reward is None or math.isnan(reward) else f"reward {reward:g}"
        described.append((text, f"{count} ×, {grade}{', cut off' if truncated else ''}"))
    return described


def prompt_text(prompt: str | list[dict]) -> str:
    """A prompt to read: a text as it is, a conversation with a line for each role (section 16)."""
    return (
        prompt if isinstance(prompt, str) else "\n".join(f"[{turn.get('role')}] {turn['content']}" for turn in prompt)
    )


# %%
print(evaluation_table(before))
print(readable_samples(before).partition("=== problem 3")[0])

# %% [markdown]
# `lmrl plan` takes the settings of `lmrl train`, and a few that a plan alone needs, and prints section 12's table:
# change the verb of a command to know what it will take, and what would help where that is too much. It loads no weights.
# With `--use-peft` it gives the model without weights its adapter, so that what is frozen counts as that. As in TRL,
# `per_device_train_batch_size` is the batch of each of `--world-size` GPUs: more of them make a step of more completions.


# %% tags=["export:cli"]
@dataclass(frozen=True)
class PlanConfig(TrainConfig):
    """The settings of a plan (section 12): those of `lmrl train`, of which it reads what changes memory, and these."""

    max_prompt_length: int | None = None
    """Tokens of the longest prompt; by default 8 for the tiny policy, and 512 or as many as fit for others (section 12)."""
    critic: bool = False
    """A critic with a trunk of its own, as PPO has; advantage_estimator "gae" brings it along (section 12)."""
    reward_model: str | None = None
    """A reward model: a folder or config.json, or "same" for one of the policy's size (section 12)."""
    optim: str = "adamw"
    """"adamw" or "sgd" (section 12)."""
    fused_logits: bool = True
    """Log-probs without the logits of a whole batch, as the trainer has them (section 11)."""
    world_size: int = 1
    """GPUs, each with per_device_train_batch_size completions at once; by FSDP they share the models (section 12)."""


def plan_memory(config: PlanConfig) -> int:
    """Run ``lmrl plan``; returns the exit code (section 16). ValueError for settings that cannot work."""
    check_config(config)
    tiny, dtype = config.model == "tiny", getattr(torch, config.dtype)
    model = build_policy(build_tokenizer()).config if tiny else load_config(config.model)
    policy, reward_model = shape_of(model, dtype, adapter_of(config)), None
    if config.reward_model is not None:
        reward_model = shape_of(model if config.reward_model == "same" else load_config(config.reward_model), dtype)
    room = 512 if policy.positions is None else policy.positions - config.max_completion_length
    default = 8 if tiny else max(1, min(512, room))
    setup = setup_of(
        config,
        completions=config.completions_per_step * config.world_size,
        max_prompt_length=default if config.max_prompt_length is None else config.max_prompt_length,
        reference=config.beta != 0.0,
        critic=config.critic or config.advantage_estimator == "gae",
        reward_model=reward_model,
    )
    print(plan_table(policy, setup))
    if config.max_prompt_length is None:
        print(
            f"(with prompts of {setup.max_prompt_length} tokens: an assumption; --max-prompt-length says how long they are)"
        )
    if not all(fits(policy, setup, size) for size in GPU_SIZES):
        adapter = None if config.use_peft or find_spec("peft") is None else adapter_of(replace(config, use_peft=True))
        adapted = None if adapter is None else shape_of(model, dtype, adapter)
        print(*(f"{line}\n" for line in hints(policy, setup, adapted)), sep="", end="")
    return 0


# %% [markdown]
# One run says little. What a setting does shows when two runs stand side by side, and `lmrl report RUN RUN …` puts them
# on one page: the curves of every metric, the settings in which they differ, and answers to the same problems before and
# after. The page is one file without any link, so that it can be kept, or sent to someone. First, what a run left behind
# is read back. The answers in samples.jsonl are those of one problem after those of another, the same number to each.
# A file that is no run's is named.


# %% tags=["export:report"]
@dataclass(frozen=True)
class RunRecord:
    """What the folder of a run holds (section 16): its settings, a record of metrics per step, its held-out answers by when
    they were sampled, and of every `lmrl eval` in it the model and its pass@k."""

    name: str
    settings: dict
    metrics: list[dict[str, float]]
    samples: dict[str, list[dict]]
    evaluations: dict[str, tuple[str, dict[str, Interval]]]

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """The steps at which ``metric`` was logged, and its values; for "pass@1" those on held-out problems."""
        points = [(record["step"], record[metric]) for record in self.metrics if metric in record]
        if metric == "pass@1":
            before, after = self.pass_at_1("before"), self.pass_at_1("after")
            points = [(0, before.mean)] if before else []
            points += [(record["step"], record[EVALUATED]) for record in self.metrics if EVALUATED in record]
            points += [(self.metrics[-1]["step"], after.mean)] if after else []
        return [step for step, _ in points], [value for _, value in points]

    def problems(self, when: str) -> list[list[dict]]:
        """The answers sampled ``when``, "before" or "after", by problem; two problems may have the same prompt."""
        rows, n = (
            self.samples.get(when, []),
            self.settings.get("num_eval_generations", TrainConfig.num_eval_generations),
        )
        return [rows[start : start + n] for start in range(0, len(rows), n)]

    def pass_at_1(self, when: str) -> Interval | None:
        """Held-out pass@1 "before" or "after", with its 95 % interval; None if it was not measured."""
        shares = [sum((row["reward"] or 0) >= 1 for row in rows) / len(rows) for rows in self.problems(when)]
        return interval_over_problems(torch.tensor(shares)) if shares else None


EVALUATED = "eval_pass_at_1"


def read_run(folder: str) -> RunRecord:
    """The run in ``folder``, finished or not; FileNotFoundError for another folder, ValueError for a faulty file (section 16)."""
    place = Path(folder)
    if not (place / "metrics.jsonl").is_file() or not (place / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: it needs config.json and metrics.jsonl")
    metrics, samples = read_metrics(place / "metrics.jsonl"), {}
    if not metrics:
        raise ValueError(f"{folder} has no step yet; its metrics.jsonl is empty")
    if (place / "samples.jsonl").is_file():
        samples = read_answers(place / "samples.jsonl")
    settings = read_object(place / "config.json")
    evaluations = {path.parent.name: read_measurement(path) for path in sorted(place.glob("*/eval.json"))}
    return RunRecord(place.resolve().name, settings, metrics, samples, evaluations)


def read_object(path: Path) -> dict:
    """The JSON object in the file ``path``; ValueError for anything else (section 16)."""
    try:
        found = json.loads(path.read_text(errors="replace"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give the run its own file back") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object; give the run its own file back")
    return found


def read_answers(path: Path) -> dict[str, list[dict]]:
    """The lines of a ``samples.jsonl`` by when they were sampled; ValueError names one that is no answer (section 16)."""
    samples = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            prompt_text(row["prompt"]), counted_answers([row])  # as the page will show it
            samples.setdefault(row["when"], []).append(row)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is not an answer as a run writes it: {line[:60]!r}; move the file away, and the "
                "report goes without answers"
            ) from error
    return samples


def read_measurement(path: Path) -> tuple[str, dict[str, Interval]]:
    """The model and its pass@k in an ``eval.json``; ValueError, with the remedy, if it is none (section 16)."""
    try:
        record = json.loads(path.read_text())
        passed = {k: Interval(*map(float, value)) for k, value in record["results"].items() if k.startswith("pass@")}
        return record.get("model") or record["settings"]["model"], passed  # earlier versions wrote no step
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} is not what lmrl eval writes ({type(error).__name__}: {error}); move it away, and the report goes "
            "without it"
        ) from error


def read_runs(folders: Iterable[str]) -> list[RunRecord]:
    """The runs in ``folders``, each once; their names are as long an end of their paths as tells them apart (section 16)."""
    places = {Path(folder).resolve(): folder for folder in folders}
    length = next(n for n in itertools.count(1) if len({place.parts[-n:] for place in places}) == len(places))
    return [replace(read_run(folder), name=str(Path(*place.parts[-length:]))) for place, folder in places.items()]


# %% [markdown]
# Then the pieces of the page: a table of settings, the pictures, and the answers.


# %% tags=["export:report"]
FIRST_CURVES = ("reward", "pass@1", "entropy", "completion_length", "kl_ref", "kl_old", "clip_fraction", "sampler_gap")
FIRST_CURVES += ("mismatch/ratio_geometric",)


def setting_rows(runs: list[RunRecord]) -> list[tuple[str, list[str], bool]]:
    """Every setting of the runs: its name, its value in each, and whether they differ; those that do come first."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = [(name, [str(run.settings.get(name, "–")) for run in runs]) for name in names]
    return sorted(((name, values, len(set(values)) > 1) for name, values in rows), key=lambda row: not row[2])


def curve_names(runs: list[RunRecord]) -> list[str]:
    """What is drawn: FIRST_CURVES, then every other metric that a run logged (section 16)."""
    logged = dict.fromkeys(name for run in runs for record in run.metrics for name in record)
    names = [*FIRST_CURVES, *(name for name in METRICS if name in logged), *logged]
    return [name for name in dict.fromkeys(names) if name in (logged.keys() | {"pass@1"}) - {"step", EVALUATED}]


def inlined(figure) -> str:
    """A matplotlib figure as the source of an HTML image, an SVG inside the address (section 16)."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def draw_curves(runs: list[RunRecord]) -> list[dict]:
    """Name, meaning and picture of every curve (section 16)."""
    metric_curve, curves = optional_import("lmrl.figures.trainer", "train").metric_curve, []
    for name in curve_names(runs):
        lines = {str(i): run.curve(name) for i, run in enumerate(runs)}
        if any(steps for steps, _ in lines.values()):
            documented = {"pass@1": EVALUATED}.get(name, "reward/NAME" if name.startswith("reward/") else name)
            metric = METRICS.get(documented)
            picture = inlined(metric_curve(lines, points=name == "pass@1"))
            curves.append({"name": name, "metric": metric, "picture": picture})
    return curves


def answer_rows(run: RunRecord, problems: int) -> list[dict]:
    """The first ``problems`` held-out problems with the run's answers, counted, before and after (section 16)."""
    pairs = itertools.zip_longest(run.problems("before"), run.problems("after"), fillvalue=[])
    return [
        {
            "prompt": prompt_text((old or new)[0]["prompt"]),
            "before": counted_answers(old),
            "after": counted_answers(new),
        }
        for old, new in itertools.islice(pairs, problems)
    ]


# %% [markdown]
# The page itself is a Jinja template, which escapes whatever a model wrote.


# %% tags=["export:report"]
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ runs | map(attribute="name") | join(", ") }}</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 78rem; margin: 0 auto; padding: 0 1rem 3rem; }
  h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
  table { border-collapse: collapse; } th, td { text-align: left; padding: .25rem .9rem .25rem 0; vertical-align: top; }
  tr { border-bottom: 1px solid #ddd; } .scroll { overflow-x: auto; } .differs { background: #fff3d6; }
  .numbers td { white-space: nowrap; } .numbers { margin-bottom: 1rem; }
  .key { position: sticky; top: 0; background: #fffffff2; padding: .4rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; }
  .key svg { width: 2.6rem; height: .8rem; margin-right: .4rem; }
  .curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1.2rem 1.5rem; }
  figure { margin: 0; } figure img { width: 100%; } figcaption { font-size: .85rem; color: #555; }
  figcaption b { color: #222; font-size: .95rem; }
  summary { cursor: pointer; font-weight: 600; margin: 1rem 0; } code { font-size: .9em; overflow-wrap: anywhere; }
  .row { display: grid; grid-template-columns: repeat(3, 1fr); gap: .4rem 1.2rem; border-top: 1px solid #ddd; padding: .4rem 0; }
  .row h4 { display: none; margin: 0; font-size: .85rem; } .row:first-of-type h4 { display: block; }
  .answer { display: grid; grid-template-columns: minmax(0, 1fr) 8rem; gap: .8rem; }
  pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14rem; overflow-y: auto; font-size: .85rem; }
  small { color: #555; } @media (max-width: 40rem) { .row { grid-template-columns: 1fr; } .row h4 { display: block; } }
</style>
<h1>{{ runs | map(attribute="name") | join(", ") }}</h1>
<div class="scroll"><table class="numbers">
<tr><th>run<th>steps<th>held-out pass@1 before<th>after<th>reward, last 20 steps<th>time</tr>
{% for run in runs %}<tr><td>{{ run.name }}<td>{{ run.metrics[-1].step | int }}<td>{{ run.pass_at_1("before") or "–" }}
<td>{{ run.pass_at_1("after") or "–" }}<td>{{ latest(run) }}<td>{{ duration(run) }}</tr>{% endfor %}
</table></div>
{% for run in runs %}{% for name, (model, passed) in run.evaluations.items() %}<div class="scroll"><table class="numbers">
<tr><th>{{ run.name }}/{{ name }}{% for metric in passed %}<th>{{ metric }}{% endfor %}</tr>
<tr><td>{{ model }}{% for interval in passed.values() %}<td>{{ interval }}{% endfor %}</tr></table></div>{% endfor %}{% endfor %}
<h2>Curves</h2>
<div class="key">{% for run in runs %}{% set color, dashes = style(loop.index0) %}<span><svg viewBox="0 0 42 12">
<line x1="0" y1="6" x2="42" y2="6" stroke="{{ color }}" stroke-width="3" stroke-dasharray="{{ dashes | join(" ") }}"/></svg>
{{ run.name }}</span>{% endfor %}</div>
{% macro draw(curves) %}<div class="curves">{% for curve in curves %}
<figure><figcaption><b>{{ curve.name }}</b> {{ curve.metric.meaning if curve.metric }}</figcaption>
<img src="{{ curve.picture }}" alt="{{ curve.name }} against the step">
{% if curve.metric %}<figcaption>{% if curve.metric.healthy %}healthy: {{ curve.metric.healthy }} · {% endif -%}
section {{ curve.metric.section }}</figcaption>{% endif %}</figure>
{% endfor %}</div>{% endmacro %}
{{ draw(curves[:shown]) }}
{% if curves[shown:] %}<details><summary>{{ curves[shown:] | length }} more curves</summary>{{ draw(curves[shown:]) }}</details>{% endif %}
<h2>Settings</h2>
{% macro table(rows) %}<div class="scroll"><table>
<tr><th>setting{% for run in runs %}<th>{{ run.name }}{% endfor %}</tr>
{% for name, values, differs in rows %}<tr{% if differs %} class="differs"{% endif %}><td><code>{{ name }}</code>
{% for value in values %}<td><code>{{ value }}</code>{% endfor %}</tr>{% endfor %}
</table></div>{% endmacro %}
{% if runs | length > 1 %}{{ table(settings | selectattr(2)) }}{% endif %}
<details><summary>all settings{{ ", those that differ marked" if runs | length > 1 }}</summary>{{ table(settings) }}</details>
<h2>Answers to held-out problems</h2>
{% for run in runs %}<section><h3>{{ run.name }}</h3>
{% for row in answers(run) %}<div class="row"><div><h4>problem</h4><pre>{{ row.prompt }}</pre></div>
{% for when in ("before", "after") %}<div><h4>{{ when }}</h4>
{% for text, words in row[when] %}<div class="answer"><pre>{{ text }}</pre><small>{{ words }}</small></div>{% endfor %}</div>
{% endfor %}</div>{% else %}<p>There are none yet.</p>{% endfor %}</section>{% endfor %}
</html>
"""


def report_page(runs: list[RunRecord], problems: int = 8) -> str:
    """The HTML page that compares ``runs``, with answers to the first ``problems`` held-out problems (section 16)."""
    jinja2 = optional_import("jinja2", "train")
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)

    def latest(run):
        rewards = [record["reward"] for record in run.metrics[-20:] if "reward" in record]
        return f"{sum(rewards) / len(rewards):.3f}" if rewards else "–"

    def duration(run):
        seconds = sum(record.get("seconds", 0) for record in run.metrics)
        return (
            f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min" if seconds >= 3600 else f"{seconds / 60:.1f} min"
        )

    curves = draw_curves(runs)
    return template.from_string(PAGE).render(
        runs=runs,
        latest=latest,
        duration=duration,
        style=optional_import("lmrl.figures.trainer", "train").run_style,
        curves=curves,
        shown=sum(curve["name"] in FIRST_CURVES for curve in curves),
        settings=setting_rows(runs),
        answers=lambda run: answer_rows(run, problems),
    )


# %% tags=["export:cli"]
@dataclass(frozen=True)
class ReportConfig:
    """The settings of `lmrl report` (section 16)."""

    runs: tuple[str, ...] = ()
    """The runs' folders; they may also stand before the options (section 16)."""
    output: str = "report.html"
    """The page (section 16)."""
    num_problems: int = 8
    """Held-out problems whose answers are shown, before and after (section 16)."""


def write_report(config: ReportConfig) -> int:
    """Run ``lmrl report``; returns the exit code (section 16)."""
    if not config.runs:
        raise ValueError("lmrl report needs the folder of a run, or of several: lmrl report runs/a runs/b")
    Path(config.output).write_text(report_page(read_runs(config.runs), config.num_problems))
    print(f"report: {config.output}")
    return 0


# %% [markdown]
# A recipe is a file of settings. `--config configs/dapo.yaml` takes them as the defaults of the command line, whose
# options still win; a run's own `config.json` is such a file too. A name that no setting has is refused, with the
# nearest that one has, in the file and on the command line alike, and so is a setting that a file has twice: YAML would
# take the last and say nothing. A few settings have another name in TRL, or in its PPO trainer; those are taken too. So are
# lists where there may be several words, of the layers with an adapter and of where the metrics go: a list in a file, and
# on the command line one word after the other.


# %% tags=["export:cli"]
TRL_NAMES = {
    "model_name_or_path": "model",
    "run_name": "name",
    "num_ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "kl_coef": "beta",
    "cliprange": "epsilon",
    "vllm": "use_vllm",
}


LISTS = ("lora_target_modules", "report_to")  # texts that may be several words: a list in a file, words after an option


def joined(words: list) -> str:
    """Several words as the text that a setting holds, with commas between; a single one is itself (section 16)."""
    return ",".join(str(word).strip() for word in words)


def setting_name(name: str, settings: type) -> str:
    """The field of the dataclass ``settings`` that ``name`` means, in TRL's spelling or ours; hyphens are underscores.

    Raises ValueError with the nearest name for one that there is not (section 16).
    """
    own = {field.name: field.name for field in fields(settings)}
    known = {theirs: ours for theirs, ours in TRL_NAMES.items() if ours in own} | own
    key = name.replace("-", "_")
    if key not in known:
        raise ValueError(f"there is no setting {name!r}; did you mean {nearest(key, known)}?")
    return known[key]


def nearest(name: str, known: Iterable[str]) -> str:
    """The first of ``known`` with the initials ``name``, as learning_rate has lr, else the one most like it (section 16)."""
    initials = [each for each in known if "".join(word[:1] for word in each.split("_")) == name]
    return (initials or difflib.get_close_matches(name, known, 1, 0.0))[0]


def read_settings(path: str | Path, settings: type, default=None):
    """The dataclass ``settings``, or its instance ``default``, with the values of the YAML or JSON file ``path`` (section 16).

    Raises ValueError for a file that is not a mapping, a name that ``settings`` lacks, a setting that stands there twice, or
    a value of another type, OSError for a file that cannot be read.
    """
    yaml = optional_import("yaml", "train")
    if not Path(path).is_file():
        what = "is a folder" if Path(path).is_dir() else "is not there"
        raise FileNotFoundError(f"{path} {what}; expected a YAML or JSON file with lines of the form 'setting: value'")
    try:
        text = Path(path).read_text()
        values, tree = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of UTF-8, or a number of thousands of digits
        raise ValueError(f"{path} is not YAML: {error}") from error
    values = {} if tree is None else values
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; expected lines of the form 'setting: value'")
    types, found = {field.name: field.type for field in fields(settings)}, {}
    lines = [] if tree is None else [(key.value, key.start_mark.line + 1) for key, _ in tree.value]
    try:
        once([(setting_name(written, settings), written, line) for written, line in lines])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for written, value in values.items():
        name = setting_name(str(written), settings)
        value = joined(value) if name in LISTS and type(value) is list else value
        found[name] = typed(path, written, value, get_args(types[name]) or (types[name],))
    return replace(settings() if default is None else default, **found)


def once(settings: list[tuple[str, str, int]]) -> None:
    """ValueError if two of these settings, each with how it is written and in which line, are the same (section 16)."""
    seen = {}
    for name, written, line in settings:
        if name in seen:
            raise ValueError(f"{seen[name]} and {written} (line {line}) are the same setting; leave one of them out")
        seen[name] = f"{written} (line {line})"


def typed(path: str | Path, name: str, value, types: tuple[type, ...]):
    """``value`` if it is of one of ``types``; numbers become float where that is asked for, also "1e-3" (YAML's text)."""
    if float in types and type(value) in (int, str):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{path}: {name} is a number of {len(str(value))} digits, which no float holds") from None
        except ValueError:
            pass
    if type(value) not in types:
        raise ValueError(f"{path}: {name} is {value!r}; expected {names_of_types(types)}")
    return value


def names_of_types(types: tuple[type, ...]) -> str:
    """Types in words, as in "float or null"."""
    return " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)


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
# The commands by name. What each takes is a dataclass, from which its `--help` is made: every setting with its meaning, its
# default and the section that explains it.


# %% tags=["export:cli"]
@dataclass(frozen=True)
class Command:
    """A command of `lmrl` (section 16): the dataclass of its settings, and ``run``, which takes them and returns the exit
    code. ``about`` makes settings of the ``subject`` that stands before the options, and of the others' defaults."""

    settings: type
    run: Callable[..., int]
    meaning: str
    subject: str = ""
    about: Callable | None = None


COMMANDS = {
    "train": Command(TrainConfig, train, "learn; leaves a folder with metrics, samples and a checkpoint"),
    "check": Command(TrainConfig, check_setup, "what is wrong with a set-up; starts nothing"),
    "eval": Command(
        EvalConfig, evaluate_model, "pass@1, pass@2, … and the answers to read", "RUN_OR_MODEL", settings_of_run
    ),
    "plan": Command(PlanConfig, plan_memory, "the memory that a run will need; loads no weights"),
    "report": Command(
        ReportConfig,
        write_report,
        "one HTML page: curves, settings and answers of runs",
        "RUN [RUN …]",
        lambda runs, default: replace(default, runs=tuple(runs)),
    ),
}


def usage() -> str:
    """How each command is called (section 16)."""
    lines = [
        "usage: lmrl COMMAND [--config FILE.yaml] [--setting value …]     (lmrl COMMAND --help has all its settings)"
    ]
    lines += [f"  {f'lmrl {name} {command.subject}':<26}{command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join(lines)


# %% [markdown]
# An option is looked up before anything reads it, so that a slip of the pen is one line with the nearest name. What stands
# before the options is the run or the model that the command is about; what follows an option are its values. All errors have
# one form, and so do those of a value. `--help` is what tyro makes of the dataclass.


# %% tags=["export:cli"]
def parse(command: str, arguments: list[str]):
    """The settings of ``command``: its options, on top of ``--config FILE`` or of the run that it is about (section 16).

    Raises ValueError for an option that is no setting, with the nearest name, for a value of another type, and for a wrong
    use of --config or --resume.
    """
    settings, files, found = COMMANDS[command].settings, [], {}
    subjects = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    for option, values in options_of(arguments[len(subjects) :]):
        if option in ("-h", "--help"):
            show_help(command)
        elif option in ("--config", "--resume"):
            files.append((option, *values))
        else:
            name, switched_off = option_name(option, settings)
            values = [joined(values)] if values and name in LISTS else values
            found[name] = option_value(option, values, settings.__dataclass_fields__[name].type, switched_off)
    if len(files) > 1 or not all(len(file) == 2 and file[1] for file in files):
        raise ValueError(
            "--config takes one file of settings, for example --config configs/dapo.yaml; in its place --resume takes the "
            "folder of a run, which has its own"
        )
    if subjects and COMMANDS[command].about is None:
        raise ValueError(f"lmrl {command} takes options alone, such as --model PATH, but got {subjects[0]!r}")
    if command == "eval" and files and files[0][0] == "--resume":
        raise ValueError("lmrl eval goes on with nothing; leave --resume out and name the run: lmrl eval RUN")
    default = COMMANDS[command].about(subjects, settings()) if subjects else settings()
    # What was named is measured, whatever a file says.
    measured = {"model": default.model} if subjects and command == "eval" else {}
    for name, file in files:
        default = read_settings(file, settings, default) if name == "--config" else settings_to_resume(file, settings)
    return replace(default, **measured | found)


def show_help(command: str) -> NoReturn:
    """Print every setting of ``command`` with its meaning and its default, and exit (section 16)."""
    tyro, about = optional_import("tyro", "train"), COMMANDS[command]
    meaning = f"lmrl {command}: {about.meaning}. --config FILE.yaml gives settings that options override."
    tyro.cli(about.settings, args=["--help"], prog=f"lmrl {command} {about.subject}".strip(), description=meaning)


def options_of(arguments: list[str]) -> list[tuple[str, list[str]]]:
    """``--a 1 --b=2 --c`` → ``[("--a", ["1"]), ("--b", ["2"]), ("--c", [])]`` (section 16)."""
    found = []
    for argument in arguments:
        if argument.startswith("--") or argument == "-h":
            option, equals, value = argument.partition("=")
            found.append((option, [value] if equals else []))
        elif not found:
            raise ValueError(f"{argument!r} is no option; options begin with --, as --model does")
        else:
            found[-1][1].append(argument)
    return found


def option_value(option: str, values: list[str], kind, switched_off: bool):
    """The value of a setting of type ``kind`` from what follows its ``option``; ValueError if it is none (section 16)."""
    if kind is bool:
        if values:
            raise ValueError(f"{option} takes no value, but got {' '.join(values)}; an option --no-… switches it off")
        return not switched_off
    if get_origin(kind) is tuple:
        return tuple(values)
    if len(values) != 1:
        raise ValueError(f"{option} takes one value, but got {' '.join(values) or 'none'}")
    types = get_args(kind) or (kind,)
    if type(None) in types and values[0] in ("None", "null"):
        return None
    for each in types:
        with suppress(ValueError, TypeError):
            return each(values[0])
    raise ValueError(f"{option} is {values[0]!r}; expected {names_of_types(types)}")


def settings_to_resume(folder: str, settings: type):
    """The settings with which the run in ``folder`` goes on: its own, and ``resume`` (section 16)."""
    require_checkpoints(Path(folder))
    return replace(read_settings(Path(folder) / "config.json", settings), resume=folder)


def option_name(option: str, settings: type) -> tuple[str, bool]:
    """The setting that ``--name`` or ``--no-name`` means, and whether it is the latter; ValueError with the nearest name."""
    name, negated = option.removeprefix("--"), option.removeprefix("--no-")
    switches = [field.name for field in fields(settings) if field.type is bool]
    if name != negated and option.startswith("--no-") and setting_name(negated, settings) in switches:
        return setting_name(negated, settings), True
    return setting_name(name, settings), False


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the command ``lmrl``; returns the exit code (section 16)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    transformers.utils.logging.disable_progress_bar()
    if not arguments or arguments[0] not in COMMANDS:
        asked = arguments[:1] in (["-h"], ["--help"])
        if arguments and not asked:
            command = f"there is no command {arguments[0]!r}; did you mean {nearest(arguments[0], COMMANDS)}?"
            print(f"lmrl: {command}", file=sys.stderr)
        print(usage(), file=sys.stderr)
        return 0 if asked else 2
    try:
        try:
            return COMMANDS[arguments[0]].run(parse(arguments[0], arguments[1:]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # who reads, as `head` does, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a program that SIGPIPE ended
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
# ## PPO and GRPO, side by side
#
# Now the machine gets two recipes (section 14) and nothing else that differs: PPO with its critic, GAE and a KL to the
# start in the reward, and GRPO with its group means and that KL in the loss. Both begin at the same warm start and see
# 50 batches of the same prompts in the same order, 256 completions in each. A learning rate of $10^{-3}$, reached in ten
# steps, is bold; for a policy of this size it is right, and it lets us see in one minute what otherwise takes hours.


# %% tags=["demo"]
def from_the_warm_start(recipe):
    """The records of a short run of a recipe, and the held-out results before and after it."""
    policy = load_policy(folder)
    settings = replace(config, max_steps=50, warmup_steps=10, num_eval_problems=256, **RECIPES[recipe].settings)
    critic = build_critic(policy) if settings.advantage_estimator == "gae" else None
    parts = replace(sampler, model=policy), load_reference(policy), critic
    trainer = Trainer(settings, policy, tokenizer, task, *parts)
    before = evaluate(trainer)
    return [trainer.step() for _ in range(settings.max_steps)], before, evaluate(trainer)


# %% tags=["export:figures"]
def side_by_side(runs: dict[str, list[dict[str, float]]], width: int = 9) -> Figure:
    """Six metrics of several runs against the step: faint as logged, strong as the mean of the ``width`` latest steps.

    In the panel of the critic's loss a dotted line is half the variance of the rewards, the loss of a critic that says
    their mean everywhere.
    """
    panels = {
        "reward": "reward",
        "kl_ref": "KL to the start [nats per token]",
        "entropy": "entropy [nats per token]",
        "clip_fraction": "share of clipped tokens",
        "frac_reward_zero_std": "share of tied groups",
        "value_loss": "loss of the critic",
    }
    figure, axes = new_figure(2, 3, height=4.2)
    for axis, (metric, title) in zip(axes.flat, panels.items(), strict=True):
        axis.set_title(title, fontsize=9)
        for i, (name, records) in enumerate(runs.items()):
            curve, (color, dashes) = [record[metric] for record in records if metric in record], run_style(i)
            steps, smooth = range(1, len(curve) + 1), running_mean(curve, width)
            axis.plot(steps, curve, color=color, alpha=0.3, linewidth=0.7)
            axis.plot(steps, smooth, color=color, linewidth=1.8, linestyle=(0, dashes))
            if metric == "reward":
                axis.text(0.97, 0.05 + 0.11 * i, name, color=color, ha="right", transform=axis.transAxes)
            if metric == "value_loss" and curve:
                variance = running_mean([record["reward_std"] ** 2 / 2 for record in records], width)
                axis.plot(steps, variance, color="black", linewidth=1.2, linestyle=":")
                axis.text(len(curve), max(curve), "dotted: a constant critic", ha="right", va="top", fontsize=8)
        axis.set_ylim(bottom=0.3 if metric == "reward" else 0)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.06, right=0.985, bottom=0.11, top=0.94, wspace=0.22, hspace=0.3)
    return figure


# %%
results = {recipe: from_the_warm_start(recipe) for recipe in ("ppo", "grpo")}
runs = {recipe.upper(): records for recipe, (records, _, _) in results.items()}
for name, (_, before, after) in zip(runs, results.values(), strict=True):
    print(f"{name:5} held-out pass@1 {before} → {after}")
    assert after.pass_at()[1].low > before.pass_at()[1].high
show(
    side_by_side(runs),
    caption="PPO and GRPO from one warm start, one seed: faint each step, strong the mean of the latest nine. In reward "
    "they cannot be told apart. The critic needs some ten steps to be better than a constant.",
    alt="Six panels against the step, a solid line for PPO and a dashed one for GRPO. The reward rises from 0.45 to above 0.6 "
    "in both. The KL to the start rises in the first fifteen steps and then stays, with one high step; the entropy falls "
    "slowly; the share of clipped tokens goes to zero. The critic's loss begins at twice the dotted line of a constant "
    "critic and ends a little below it, at 0.1.",
)

# %% [markdown]
# The same as numbers, each the mean over ten steps:

# %%
names = ["reward", "kl_ref", "kl_old", "entropy", "clip_fraction", "frac_reward_zero_std", "grad_norm", "value_loss"]
print(f"{'':28}" + "".join(f"{f'steps {start + 1}-{start + 10}':>13}" for start in range(0, 50, 10)))
for name, (run_name, records) in itertools.product(names, runs.items()):
    curve = [record[name] for record in records if name in record]
    if curve:
        print(f"{name:22}{run_name:6}" + "".join(f"{sum(curve[i : i + 10]) / 10:13.4f}" for i in range(0, 50, 10)))

# %% [markdown]
# How does one read this? First the machine, then what it learned, then what that cost.
#
# **Is it the machine?** Before the learning comes what must be so whatever is learned: first ratios at 1, the sampler's
# log-probs at the trainer's, no step skipped, no answer cut off by the cap, a KL that starts at 0.

# %%
for name, records in runs.items():
    worst = {key: max(record[key] for record in records) for key in ("ratio_error", "sampler_gap", "skipped_updates")}
    print(
        f"{name:5}", *(f"{key} {value:.1e}" for key, value in worst.items()), f"cut off {records[-1]['truncated']:.3f}"
    )
    assert worst["ratio_error"] < 1e-5 and worst["sampler_gap"] < 1e-3 and worst["skipped_updates"] == 0
    assert records[0]["kl_ref"] < 1e-6

# %% [markdown]
# **Does it learn?** Yes, both: held-out pass@1 after the run is above its interval from before. Which is better? These
# numbers do not say. The intervals are over problems, for one seed, and the difference is a fraction of their width;
# another seed moves it as well. And a step's reward is a mean of 256 zeros and ones, with a standard error of about
# $0.5 / \sqrt{256} \approx 0.03$, and more, as answers to one prompt are alike: the faint zigzag is that.
#
# **What does it pay?** In KL, all of it early: by steps 11 to 20 it is about where it stays, and half of the gain in
# reward is made. The other half comes at no further distance from the start. A single high step is no alarm. The
# measured KL is a mean of $k_3$, which is exponential in the log-ratio, so that a few tokens that have become rare can
# carry it (section 9); look whether it comes back with the next batch. In entropy the price is small: there is still
# variety to learn from, and so the share of tied groups is far from 1.
#
# **Does it still move?** The clipped share and `kl_old` fall to zero at the end, and that is *not* convergence. They
# measure the length of a step, and the learning rate has fallen to zero; the norm of the gradient has not fallen at all.
# This norm has another lesson. GRPO's is about twice PPO's, because it divides advantages by the standard deviation of a
# group, which is at most one half. So `max_grad_norm` 1 shortens most of its gradients and few of PPO's: one value of a
# setting, two meanings.
#
# **Is the critic worth its room?** Compare its loss with that of a constant critic, half the variance of the returns,
# which is about that of the rewards (1 minus the quotient is exercise 2). In the first ten steps it is worse than a constant; at the end it explains some
# part of the variance, a small one. PPO's baseline is hardly better here than a mean, and each step takes longer for it.

# %%
for name, records in runs.items():
    cut = sum(record["grad_norm"] > config.max_grad_norm for record in records) / len(records)
    seconds = sum(record["update_seconds"] for record in records) / len(records)
    print(f"{name:5} gradients shortened in {cut:.0%} of the steps; {seconds:.2f} seconds of a step for the update")
for place, part in {"first": runs["PPO"][:10], "last": runs["PPO"][-10:]}.items():
    constant = sum(record["reward_std"] ** 2 / 2 for record in part)
    explained = 1 - sum(record["value_loss"] for record in part) / constant
    print(f"the critic explains {explained:+.0%} of the variance in the {place} ten steps")
    assert explained < 0 if place == "first" else 0 < explained < 0.5
means = {name: sum(record["grad_norm"] for record in records) / 50 for name, records in runs.items()}
assert means["GRPO"] > 1.3 * means["PPO"]
for records in runs.values():
    assert sum(r["clip_fraction"] for r in records[-10:]) < 0.5 * sum(r["clip_fraction"] for r in records[:10])
    assert sum(r["grad_norm"] for r in records[-10:]) > 0.7 * sum(r["grad_norm"] for r in records[:10])

# %% [markdown]
# One setting of this picture is in no configuration file: the window. The mean of the $w$ latest steps is quieter, and
# late: on a straight slope it shows what was $(w - 1) / 2$ steps ago. Pull it to 1, and every panel is the raw zigzag;
# pull it to 25, and a high step becomes a long plateau, and the critic seems to need twice as long to pass the constant.

# %%
assert running_mean(list(range(50)), 9)[-1] == 49 - (9 - 1) / 2
explore(
    lambda width: side_by_side(runs, width),
    width=widgets.IntSlider(9, 1, 25, description="steps in the mean", continuous_update=True),
)

# %% [markdown]
# ## Exercises
#
# **1. Predict, then run.** These settings are PPO's way to use a batch. How many prompts does a step ask, how many
# completions does it get, how many of them are behind one optimiser step, how many optimiser steps does the batch give,
# and at what learning rate is the *second* batch of the run learned from?

# %% tags=["exercise"]
from lmrl.config import TrainConfig

settings = TrainConfig(
    max_steps=10,
    warmup_steps=0,
    learning_rate=1e-3,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=2,
    num_generations=8,
    num_iterations=2,
    num_mini_batches=4,
)
prediction = None  # [prompts, completions, completions per optimiser step, optimiser steps, learning rate]

# %% tags=["solution"]
from lmrl.config import TrainConfig

settings = TrainConfig(
    max_steps=10,
    warmup_steps=0,
    learning_rate=1e-3,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=2,
    num_generations=8,
    num_iterations=2,
    num_mini_batches=4,
)
prediction = [8, 64, 16, 8, 9e-4]  # the learning rate falls by steps of the run, not by steps of the optimiser

# %% tags=["check"]
import math

from lmrl.models import load_policy, load_tokenizer, stop_token_ids
from lmrl.policy import warm_start_folder
from lmrl.rollout import TorchSampler
from lmrl.tasks import load_task
from lmrl.trainer import Stopwatch, Trainer

assert prediction is not None, "write down five numbers first"
tokenizer, model = load_tokenizer(warm_start_folder(seed=0)), load_policy(warm_start_folder(seed=0))
sampler = TorchSampler(model, stop_token_ids(tokenizer, model), tokenizer.pad_token_id, settings.max_completion_length)
trainer = Trainer(settings, model, tokenizer, load_task("arithmetic"), sampler)
_, _, rollouts = trainer.gather(Stopwatch())
trainer.step()
metrics = trainer.step()
per_update = settings.num_iterations * len(rollouts) // metrics["updates"]
found = [len(rollouts.group.unique()), len(rollouts), per_update, metrics["updates"], metrics["learning_rate"]]
assert len(prediction) == 5 and all(map(math.isclose, prediction, found)), f"the trainer says {found}"

# %% [markdown]
# **2. What the critic explains.** The dotted line above needs a reader who compares two curves. The number that
# practitioners log instead is the share of the returns' variance that the critic explains, over the tokens of the mask:
#
# $$1 - \frac{\mathrm{mean}\,(G_t - V_t)^2}{\mathrm{Var}\,(G_t)} .$$
#
# A perfect critic has 1, a constant one that says the mean return 0, and one that has learned nothing yet less than 0.
# Write it; nothing that stands outside of the mask may reach it, NaN neither. (Some libraries put the variance of $G -
# V$ above the line. Then a critic that is off by a constant looks perfect.)

# %% tags=["exercise"]
import torch


def explained_variance(values, returns, mask):
    """1 - mean (G - V)² / Var G over the tokens of ``mask``: three [B, T] -> a scalar; the variance with ddof 0."""
    raise NotImplementedError


# %% tags=["solution"]
import torch


def explained_variance(values, returns, mask):
    """1 - mean (G - V)² / Var G over the tokens of ``mask``: three [B, T] -> a scalar; the variance with ddof 0."""
    values, returns = values[mask], returns[mask]
    return 1 - (returns - values).square().mean() / returns.var(correction=0)


# %% tags=["check"]
from dataclasses import replace

from lmrl.config import TrainConfig
from lmrl.models import load_policy, load_reference, load_tokenizer, stop_token_ids
from lmrl.policy import warm_start_folder
from lmrl.recipes import RECIPES
from lmrl.rollout import TorchSampler
from lmrl.tasks import load_task
from lmrl.trainer import Stopwatch, Trainer
from lmrl.values import build_critic

returns = torch.tensor([[1.0, 0.0, torch.nan], [1.0, 1.0, 0.0]], dtype=torch.float64)
mask = torch.tensor([[True, True, False], [True, True, True]])
mean = returns[mask].mean()
for values, expected in (
    (returns, 1.0),
    (torch.full_like(returns, mean.item()), 0.0),
    (returns + 0.5, 1 - 0.25 / 0.24),
    (returns / 2, 1 - 0.6 / 4 / 0.24),
):
    found = float(explained_variance(values, returns, mask))
    assert abs(found - expected) < 1e-10, f"explained variance {found:.4f}, and not {expected:.4f}"

tokenizer, model = load_tokenizer(warm_start_folder(seed=0)), load_policy(warm_start_folder(seed=0))
sampler = TorchSampler(model, stop_token_ids(tokenizer, model), tokenizer.pad_token_id, 4)
settings = replace(TrainConfig(max_steps=10, per_device_train_batch_size=64), **RECIPES["ppo"].settings)
parts = tokenizer, load_task("arithmetic"), sampler, load_reference(model), build_critic(model)
trainer, watch = Trainer(settings, model, *parts), Stopwatch()
examples, _, rollouts = trainer.gather(watch)
rollouts = trainer.prepare(rollouts, examples, watch)
found = float(explained_variance(rollouts.values, rollouts.returns, rollouts.mask))
assert found < 0, f"a critic that has learned nothing explains {found:.2f} of the variance"

# %% [markdown]
# **3. Find the bug.** The checkpoint below keeps weights, optimiser, generators and the number of steps. Its author
# tested it: twelve training prompts, four in each step, saved after step 3; the run went on as if it had never been
# stopped. Saved after step 2 it goes on too, without any error, and learns. The check holds both against a run that was
# not stopped.

# %% tags=["exercise"]
from copy import deepcopy


def save(trainer):
    """All that the next step reads and an earlier one wrote."""
    return deepcopy(
        {
            "weights": trainer.model.state_dict(),
            "optimizer": trainer.learner.optimizer.state_dict(),
            "data": trainer.batches.generator.get_state(),
            "sampling": trainer.sampling.get_state(),
            "steps_done": trainer.steps_done,
        }
    )


def resume(trainer, state):
    """Put a new ``trainer`` where the saved one was."""
    trainer.model.load_state_dict(state["weights"])
    trainer.learner.optimizer.load_state_dict(state["optimizer"])
    trainer.batches.generator.set_state(state["data"])
    trainer.sampling.set_state(state["sampling"])
    trainer.steps_done = state["steps_done"]


# %% tags=["solution"]
from copy import deepcopy


def save(trainer):
    """All that the next step reads and an earlier one wrote."""
    return deepcopy(
        {
            "weights": trainer.model.state_dict(),
            "optimizer": trainer.learner.optimizer.state_dict(),
            "data": trainer.batches.generator.get_state(),
            "waiting": trainer.batches.waiting,  # what is left of the pass: empty only after every third step
            "sampling": trainer.sampling.get_state(),
            "steps_done": trainer.steps_done,
        }
    )


def resume(trainer, state):
    """Put a new ``trainer`` where the saved one was."""
    trainer.model.load_state_dict(state["weights"])
    trainer.learner.optimizer.load_state_dict(state["optimizer"])
    trainer.batches.generator.set_state(state["data"])
    trainer.batches.waiting = state["waiting"]
    trainer.sampling.set_state(state["sampling"])
    trainer.steps_done = state["steps_done"]


# %% tags=["check"]
from dataclasses import replace

import torch

from lmrl.config import TrainConfig
from lmrl.models import load_policy, load_tokenizer, stop_token_ids
from lmrl.policy import warm_start_folder
from lmrl.rollout import TorchSampler
from lmrl.tasks import load_task
from lmrl.trainer import Trainer


def new_trainer():
    folder = warm_start_folder(seed=0)
    tokenizer, model = load_tokenizer(folder), load_policy(folder)
    task = load_task("arithmetic")
    settings = TrainConfig(max_steps=6, warmup_steps=0, per_device_train_batch_size=16, num_generations=4)
    sampler = TorchSampler(model, stop_token_ids(tokenizer, model), tokenizer.pad_token_id, 4)
    return Trainer(settings, model, tokenizer, replace(task, train=task.train[:12]), sampler)


for saved_after in (3, 2):
    stopped, again, never_stopped = new_trainer(), new_trainer(), new_trainer()
    for _ in range(saved_after):
        stopped.step()
    resume(again, save(stopped))
    for _ in range(saved_after, 5):
        again.step()
    for _ in range(5):
        never_stopped.step()
    pairs = zip(again.model.parameters(), never_stopped.model.parameters(), strict=True)
    far = max((a - b).abs().max().item() for a, b in pairs)
    assert far == 0, f"saved after step {saved_after}: after step 5 a weight differs by {far:.1e}"
    assert torch.equal(again.sampling.get_state(), never_stopped.sampling.get_state())

# %% [markdown]
# ## What is still missing
#
# One process on one device did all of this: it had to wait for the sampler while it could have learned, and a model that
# does not fit there cannot be trained at all. Section 17 spreads the same loop over several devices and lets sampler and
# trainer work at the same time, which makes batches that are older than the policy, and brings section 14's corrections
# back.
