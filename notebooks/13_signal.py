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
# # 13. Why RL lives in post-training
#
# **The question.** Twelve sections took a policy for granted that already writes something sensible. Why not start with
# random weights, and let rewards do the rest? And once there is a policy: which prompts does it learn from, and how
# would one know whether it has learned anything that it could not do before?
#
# Names: a **group** is the $G$ completions sampled for one prompt, $R_1, \dots, R_G$ their rewards, $p$ the **pass
# rate**, the probability that a single completion of this prompt is right.

# %%
import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import ipywidgets as widgets
import torch
import transformers
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.baselines import group_advantages
from lmrl.batch import Rollouts, concatenate, used_columns
from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.loss import policy_loss, token_weights
from lmrl.policy import (
    ARITHMETIC_CHARACTERS,
    Addition,
    addition_problems,
    addition_reward,
    build_policy,
    build_tokenizer,
    completion_logits,
    completion_texts,
    demonstration_batch,
    pad_left,
    pad_right,
    supervised_loss,
    token_logprobs,
    warm_start_folder,
)
from lmrl.rollout import Sampler, TorchSampler
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, score_matrix
from lmrl.variance import group_moments, weighted_scores

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# ## How thin is the supervision?
#
# A verifier that answers right or wrong tells at most one bit per completion, and only if either answer was equally
# likely beforehand. At pass rate $p$ it is the entropy of the answer, in bits:
#
# $$h(p) = -p \log_2 p - (1 - p) \log_2 (1 - p) .$$


# %% tags=["export"]
def reward_bits(pass_rate: float | torch.Tensor) -> torch.Tensor:
    """The most that a reward of 0 or 1 can tell, in bits: the entropy of a coin, float64 of the shape given.

    Raises ValueError for a pass rate outside [0, 1]. Section 13.
    """
    p = torch.as_tensor(pass_rate, dtype=torch.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(
            f"a pass rate of {p[~((p >= 0) & (p <= 1))].flatten()[0].item()}; it is a probability, in [0, 1]"
        )
    return (torch.special.entr(p) + torch.special.entr(1 - p)) / math.log(2)


# %% [markdown]
# **Claim 13.1.** A step of reinforcement learning with 256 completions therefore has at most 256 bits to learn from. A
# step of pretraining on four million tokens has four million targets. Count each as one supervised event, and that is a
# factor of about four orders of magnitude. A target can say more than one bit, though: up to $\log_2 V = 17$ for a
# vocabulary of 128,000. And the 256 completions may have taken a million tokens to write (4,096 each, say), so per token
# that the model processes the count is another one again.

# %%
completions, targets, vocabulary = 256, 4_000_000, 128_000
reward_step = completions * reward_bits(0.5).item()
per_target = math.log2(vocabulary)
generated = completions * 4096
events = math.log10(targets / reward_step)
bits = math.log10(targets * per_target / reward_step)
bits_per_token = math.log10(per_target / (reward_step / generated))
print(f"{reward_step:.0f} bits against {targets:,} targets: 10^{events:.1f} in events, at most 10^{bits:.1f} in bits")
print(f"per token processed, at most 10^{bits_per_token:.1f} in bits")
print("bits per completion:", {f"p = {p}": round(reward_bits(p).item(), 3) for p in (0.5, 0.9, 1 / 64, 0.0)})
assert reward_step == 256 and 4 < events < 4.5 and 5 < bits < 5.5 and 4.5 < bits_per_token < 5
assert reward_bits(0.0) == reward_bits(1.0) == 0 and abs(reward_bits(1 / 64) - 0.116) < 1e-3

# %% [markdown]
# All of these are upper bounds on what a step could convey, and no measurement of what a model takes in. The factor
# depends on the length of the answers, too. In our two-digit additions a verdict comes every three or four tokens, and
# per completion the factor is one order of magnitude, not four. It is the long answers that make the supervision thin.

# %%
folder = warm_start_folder(seed=0)
tokenizer = AutoTokenizer.from_pretrained(folder)
policy = AutoModelForCausalLM.from_pretrained(folder).eval()
train, heldout = addition_problems()
answer_tokens = demonstration_batch(tokenizer, train)[3].sum().item() / len(train)
ours = answer_tokens * math.log2(len(tokenizer)) / reward_bits(0.45).item()
print(f"answers of {answer_tokens:.1f} tokens: a demonstration can tell {ours:.0f} times as much as a verdict")
assert 1 < ours < 100

# %% [markdown]
# ## A group that agrees teaches nothing
#
# Section 6 weights the gradient of completion $i$ by its advantage in the group,
#
# $$A_i = R_i - \frac1G \sum_{j=1}^{G} R_j .$$
#
# If all rewards in the group are equal, every $A_i$ is zero, and so is the sum of $A_i \nabla\log\pi_\theta$, whatever the
# policy is. Such a group is **tied**; one with two different rewards is **mixed**. All answers wrong is a tie, and so is
# all answers right.
#
# To find them in a batch, compare rewards with each other: a group is tied when its smallest reward is not below its
# largest. Testing whether their standard deviation is zero looks equivalent and is not, as section 6 showed: in
# floating point the mean of eight equal numbers need not be that number.
#
# A reward function may also decline to grade a completion; then `graded` is False there and the reward is NaN. Those
# rows are left out, so a group with one graded row, or none, is tied: nothing in it differs.


# %% tags=["export"]
def tied_groups(rewards: torch.Tensor, group: torch.Tensor, graded: torch.Tensor | None = None) -> torch.Tensor:
    """Which groups give no gradient, because no two of their graded rewards differ: bool [number of groups].

    rewards [B]; group [B] int64, any labels in any order; graded [B] bool, all rows if None. Entry i belongs to the
    i-th smallest label. A group with fewer than two graded rows is tied. Raises ValueError for unequal lengths and for
    a graded NaN. Section 13.
    """
    if graded is None:
        graded = torch.ones_like(group, dtype=torch.bool)
    if not len(rewards) == len(group) == len(graded):
        lengths = f"{len(rewards)}, {len(group)} and {len(graded)}"
        raise ValueError(f"rewards, group and graded have {lengths} rows; give one of each for every completion")
    if rewards[graded].isnan().any():
        raise ValueError(f"{int(rewards[graded].isnan().sum())} graded rewards are NaN; set graded to False there")
    labels, index = torch.unique(group, return_inverse=True)
    index = index[graded]
    low = rewards.new_full(labels.shape, math.inf).scatter_reduce(0, index, rewards[graded], "amin")
    high = rewards.new_full(labels.shape, -math.inf).scatter_reduce(0, index, rewards[graded], "amax")
    return low >= high


# %% [markdown]
# Five prompts with four completions each, their rows shuffled. Prompt 3 is tied at a reward that has no exact binary
# form, prompt 4 has a single graded row.

# %%
none = math.nan
table = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 1, 1], [0.1, 0.1, 0.1, 0.1], [1, none, none, none]])
shuffle = torch.randperm(20, generator=torch.Generator().manual_seed(0))
rewards, group = table.flatten()[shuffle], torch.arange(5).repeat_interleave(4)[shuffle]
graded = ~rewards.isnan()
tied = tied_groups(rewards, group, graded)
advantages = group_advantages(rewards, group, graded=graded)
for prompt, row in enumerate(table.tolist()):
    weights = [round(a, 2) for a in advantages[group == prompt].sort().values.tolist()]
    print(f"prompt {prompt}: rewards {[round(r, 1) for r in row]}, tied {bool(tied[prompt])}, advantages {weights}")
assert tied.tolist() == [True, True, False, True, True]
assert ((advantages != 0) == (~tied)[group]).all()

eight = torch.full((8,), 0.1)
assert eight.std(correction=0) > 0 and tied_groups(eight, torch.zeros(8, dtype=torch.int64)).all()

# %% [markdown]
# The share of tied groups is the number to watch in a run: it says how much of the generation was paid for and thrown
# away. TRL logs it as `frac_reward_zero_std`, and so do we. Groups in which *nothing* was graded are a fault of the
# reward function, not of the prompt's difficulty, so they are left out of the share, above and below the line.


# %% tags=["export"]
def frac_reward_zero_std(rewards: torch.Tensor, group: torch.Tensor, graded: torch.Tensor | None = None) -> float:
    """The share of tied groups among the groups with a graded row; shapes and errors as in `tied_groups`.

    Groups without any graded row count in neither number. With none left it is 1.0: no group carries a signal.
    Section 13; the name is TRL's.
    """
    tied = tied_groups(rewards, group, graded)
    if graded is not None:
        tied = tied[torch.isin(group.unique(), group[graded])]
    return tied.double().mean().item() if len(tied) else 1.0


# %%
share = frac_reward_zero_std(rewards, group, graded)
print(f"tied: {share:.2f} of the groups")
assert share == 0.8
nothing_in_4 = graded & (group != 4)
assert frac_reward_zero_std(rewards, group, nothing_in_4) == 0.75
assert frac_reward_zero_std(rewards, group, torch.zeros_like(graded)) == 1.0

# %% [markdown]
# ## From random weights: exactly nothing
#
# Random weights write each token about uniformly. If the right answer has $n$ tokens out of a vocabulary of $V$, then
# $p \approx V^{-n}$. So all rewards are 0, all groups are tied, and the gradient is zero. **Claim 13.2** says that this
# is meant literally: not a small and noisy gradient, but the number 0 in every component. Here is one step as section 11
# put it together, on a policy with random weights.


# %% tags=["demo"]
def graded_completions(model, problems, num_generations, seed):
    """Rollouts of a policy on addition problems, with their rewards."""
    sampler = TorchSampler(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_length=4)
    prompts = [tokenizer(problem.prompt).input_ids for problem in problems]
    rollouts = sampler.generate(prompts, num_generations, seed)
    texts = completion_texts(tokenizer, rollouts.completion_ids, used_columns(rollouts.mask), rollouts.truncated)
    rewards = addition_reward([], texts, answer=[problems[g].answer for g in rollouts.group.tolist()])
    return replace(rollouts, rewards=torch.tensor(rewards), graded=torch.ones(len(rollouts), dtype=torch.bool))


def step(model, optimizer, rollouts):
    """One step on graded rollouts (sections 6, 10 and 11); returns the largest component of the gradient."""
    advantages = group_advantages(rollouts.rewards, rollouts.group)[:, None].expand(rollouts.mask.shape)
    weights = token_weights(rollouts.mask, "dapo", max_completion_length=4)
    logprobs = token_logprobs(model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)
    optimizer.zero_grad()
    policy_loss(logprobs, logprobs.detach(), advantages, weights).backward()
    optimizer.step()
    return max(parameter.grad.abs().max().item() for parameter in model.parameters())


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


# %%
newborn = build_policy(tokenizer, seed=0)
three_digits = [Addition(123 + i, 456 + 10 * i) for i in range(16)]
prompt_ids, prompt_mask, answer_ids, answer_mask = demonstration_batch(tokenizer, three_digits)
with torch.no_grad():
    logprobs = token_logprobs(newborn, prompt_ids, prompt_mask, answer_ids)
pass_rates = torch.where(answer_mask, logprobs, 0.0).sum(1).exp()
print(f"pass rate from random weights: {pass_rates.mean():.1e}, and V^-n is {len(tokenizer) ** -4.0:.1e}")

rollouts = graded_completions(newborn, three_digits, num_generations=8, seed=0)
before = weights_of(newborn)
optimizer = torch.optim.AdamW(newborn.parameters(), lr=1e-3, weight_decay=0.0)
largest = step(newborn, optimizer, rollouts)
print(f"rewards {rollouts.rewards.unique().tolist()}, largest component of the gradient {largest}, ", end="")
print(f"parameters bit-identical after the step: {torch.equal(weights_of(newborn), before)}")
assert (rollouts.rewards == 0).all() and (group_advantages(rollouts.rewards, rollouts.group) == 0).all()
assert largest == 0 and torch.equal(weights_of(newborn), before)

# %% [markdown]
# A zero gradient does not always mean that nothing moves. Two habits of AdamW go on without any signal: its weight decay
# shrinks every parameter by the factor $1 - \text{learning rate} \times \text{decay}$, and its momentum remembers earlier
# gradients. A run that logs movement of the weights may therefore be a run that learns nothing.

# %%
optimizer = torch.optim.AdamW(newborn.parameters(), lr=1e-3, weight_decay=0.1)
assert step(newborn, optimizer, rollouts) == 0
decayed = weights_of(newborn)
print(f"weight decay 0.1: every parameter times {(decayed.norm() / before.norm()).item():.6f}")
assert torch.allclose(decayed, before * (1 - 1e-3 * 0.1), rtol=1e-6, atol=0) and not torch.equal(decayed, before)

optimizer = torch.optim.AdamW(newborn.parameters(), lr=1e-3, weight_decay=0.0)
lucky = replace(rollouts, rewards=(torch.arange(len(rollouts)) == 0).float())  # as if one had been right
assert step(newborn, optimizer, lucky) > 0
moved = weights_of(newborn)
assert step(newborn, optimizer, rollouts) == 0 and not torch.equal(weights_of(newborn), moved)
print(f"momentum: the step after has gradient 0 and moves by {(weights_of(newborn) - moved).norm().item():.3f}")

# %% [markdown]
# ## How often does a group carry a signal?
#
# Let the reward be 1 for a right completion and 0 for a wrong one. The $G$ completions are independent, so
#
# $$P(\text{at least one is right}) = 1 - (1 - p)^G, \qquad P(\text{mixed}) = 1 - (1 - p)^G - p^G .$$
#
# In code, $(1-p)^G$ for a tiny $p$ is so close to 1 that subtracting it from 1 leaves rounding; `log1p` and `expm1` do
# not subtract. And the second formula is symmetric in $p$ and $1 - p$, so the smaller of the two will do.


# %% tags=["export"]
def _checked_rate(pass_rate, size):
    p, size = torch.as_tensor(pass_rate, dtype=torch.float64), torch.as_tensor(size)
    if not ((p >= 0) & (p <= 1)).all() or not (size >= 1).all():
        raise ValueError(f"pass rate {pass_rate} and group size {size.tolist()}: take 0 <= p <= 1 and at least 1")
    return p, size


def success_probability(pass_rate: float | torch.Tensor, size: int | torch.Tensor) -> torch.Tensor:
    """P(at least one of `size` completions is right) = 1 - (1 - p)^G, float64; the arguments broadcast.

    For a known pass rate this is pass@k with k = `size`. Raises ValueError for p outside [0, 1] and size below 1.
    Section 13.
    """
    p, size = _checked_rate(pass_rate, size)
    return -torch.expm1(size * torch.log1p(-p))


def mixed_probability(pass_rate: float | torch.Tensor, size: int | torch.Tensor) -> torch.Tensor:
    """P(a group of `size` holds a right and a wrong completion) = 1 - (1 - p)^G - p^G; as `success_probability`."""
    p, size = _checked_rate(pass_rate, size)
    rarer = torch.minimum(p, 1 - p)
    return (-torch.expm1(size * torch.log1p(-rarer)) - rarer**size).clamp(min=0)


# %% [markdown]
# **Claim 13.3.** The first is often given as the probability that a group carries a signal. With a group mean as the
# baseline it is the second: a group in which all are right is tied too. Both by brute force: list all $2^8$ outcomes of
# a group of eight, let `tied_groups` judge each, and add up their probabilities.

# %%
outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=8)), dtype=torch.float64)
label = torch.arange(len(outcomes))[:, None].expand_as(outcomes).flatten()
mixed = ~tied_groups(outcomes.flatten(), label)
for p in (0.0, 1 / 64, 0.2, 0.5, 0.9, 0.99, 1.0):
    right = outcomes.sum(-1)
    probability = p**right * (1 - p) ** (8 - right)
    at_least_one, carries_signal = success_probability(p, 8).item(), mixed_probability(p, 8).item()
    print(f"p = {p:.4f}: at least one right {at_least_one:.4f}, mixed {carries_signal:.4f}")
    assert abs(at_least_one - probability[outcomes.any(-1)].sum()) < 1e-10
    assert abs(carries_signal - probability[mixed].sum()) < 1e-10
assert abs(mixed_probability(1e-20, 8) / 8e-20 - 1) < 1e-10 and 1 - (1 - 1e-20) ** 8 == 0

# %% [markdown]
# The two agree while success is rare and part when it is not. A prompt that the policy answers in nine of ten cases is
# mixed in 57 % of its groups, as one that it answers in one of ten.


# %% tags=["export:figures"]
def signal_probability(sizes: tuple[int, ...] = (2, 8, 64)) -> Figure:
    """P(at least one success) and P(mixed group) against the pass rate, for several group sizes."""
    fig, axes = new_figure(height=3.6)
    p = torch.special.expit(torch.linspace(-7.5, 7.5, 401, dtype=torch.float64))
    for size in sizes:
        mixed = mixed_probability(p, size)
        axes.plot(p, success_probability(p, size), color=COLORS["reference"], linestyle=":", zorder=3)
        axes.plot(p, mixed, color=COLORS["advantage"])
        where = (mixed > min(0.6, mixed.max() * 0.8)).nonzero()[-1]
        axes.annotate(f"G = {size}", (p[where], mixed[where]), xytext=(7, 0), textcoords="offset points")
    axes.text(0.985, 1.03, "at least one right", color=COLORS["reference"], ha="center")
    axes.text(0.5, 0.42, "mixed", color=COLORS["advantage"], ha="center")
    axes.set(xscale="logit", xlim=(p[0], p[-1]), ylim=(0, 1.12), xlabel="pass rate p", ylabel="probability")
    return fig


# %%
show(
    signal_probability(),
    caption="A group teaches when it is mixed. Larger groups widen the range of pass rates that teach, at both ends.",
    alt="Probability against pass rate for groups of 2, 8 and 64. The curves for at least one success rise to one and "
    "stay; those for a mixed group fall back to zero as the pass rate approaches one.",
)

# %% [markdown]
# What do the groups of one prompt look like? The number of right completions in a group follows a binomial distribution,
# and the two ends of it, none right and all right, are the tied groups.


# %% tags=["export:figures"]
def group_outcomes(pass_rate: float = 0.1, size: int = 8) -> Figure:
    """Left: P(mixed) against the pass rate, with this one marked. Right: how many of a group are right."""
    fig, (left, right) = new_figure(1, 2, height=3.2)
    fig.set_layout_engine(None)  # half the drawing time
    fig.subplots_adjust(left=0.09, right=0.98, bottom=0.16, top=0.88, wspace=0.28)
    p = torch.special.expit(torch.linspace(-9, 9, 181, dtype=torch.float64))
    here = mixed_probability(pass_rate, size).item()
    left.plot(p, mixed_probability(p, size), color=COLORS["advantage"], lw=2)
    left.plot(pass_rate, here, "o", color="black", ms=7)
    left.set(xscale="logit", xlim=(p[0], p[-1]), ylim=(0, 1.08), xlabel="pass rate p", ylabel="P(mixed)")
    left.set_xticks([0.001, 0.05, 0.5, 0.95, 0.999], ["0.001", "0.05", "0.5", "0.95", "0.999"])
    left.minorticks_off()
    left.set_title(f"mixed: {here:.1%} of the groups", loc="left")
    number = torch.arange(size + 1, dtype=torch.float64)
    chances = torch.distributions.Binomial(size, torch.tensor(pass_rate, dtype=torch.float64)).log_prob(number).exp()
    tied = (number == 0) | (number == size)
    for which, color in ((tied, "reference"), (~tied, "advantage")):
        right.vlines(number[which], 0, chances[which], color=COLORS[color], lw=min(14.0, 150 / size))
    for end, name in ((0, "none right"), (size, "all right")):
        chance = chances[end].item()
        place = {"ha": "left" if end == 0 else "right", "color": COLORS["reference"]}
        right.annotate(f"{name}\n{chance:.2g}", (end, chance), (0, 4), textcoords="offset points", **place)
    right.set(xlabel=f"right completions in a group of {size}", ylabel="probability")
    right.set_title("grey: tied", loc="left")
    right.set(ylim=(0, 1.35 * chances.max().item()), xlim=(-0.06 * size - 0.5, 1.06 * size + 0.5))
    return fig


# %%
show(
    group_outcomes(),
    caption="At a pass rate of 0.1 more than four groups of eight in ten have no right answer, and teach nothing.",
    alt="Left, the probability of a mixed group of eight against the pass rate, a hump, with a dot at pass rate 0.1. "
    "Right, the distribution of the number of right completions: 0.43 for none, the rest mixed, all right negligible.",
)

# %% [markdown]
# Move the pass rate towards 0 or 1, and one grey bar takes over. Then make the group larger: the bar shrinks. At a pass
# rate of 1/64, groups of 8 hardly ever teach, groups of 256 almost always; at $10^{-4}$ even 512 are not enough.

# %%
explore(
    lambda odds, size: group_outcomes(1 / (1 + 10**-odds), size),
    odds=widgets.FloatSlider(-1.0, min=-4, max=4, step=0.1, description="log10 of the odds p / (1 - p)"),
    size=widgets.SelectionSlider(options=[2, 4, 8, 16, 32, 64, 128, 256, 512], value=8, description="group size G"),
)

# %% [markdown]
# ## One success in sixty-four
#
# **Claim 13.4.** The pass rate may be low: once in sixty-four completions suffices to begin with. How many groups does
# such a prompt need until one is mixed? And for comparison, three tokens out of 128,000 from random weights?

# %%
for size in (8, 16, 64, 512):
    chance = mixed_probability(1 / 64, size).item()
    print(f"p = 1/64, G = {size:3}: mixed in {chance:.4f} of the groups, one in {1 / chance:.1f}")
scratch = 128_000.0**-3
print(f"three tokens out of 128,000, random weights: p = {scratch:.1e}, groups of 64 until one is mixed ", end="")
print(f"{1 / mixed_probability(scratch, 64).item():.0e}")
assert abs(mixed_probability(1 / 64, 8) - 0.1184) < 5e-5 and mixed_probability(1 / 64, 512) > 0.999
assert 1 / mixed_probability(scratch, 64) > 1e13

# %% [markdown]
# Now let a policy learn from there. The warm-started policy of section 1 answers some problems often and others almost
# never, and for each problem the pass rate can be read off exactly: it is the probability of the tokens of the one right
# answer, the stop token included. Take the four problems nearest to 1/64 and train on nothing else, with groups of 64.


# %% tags=["demo"]
@torch.no_grad()
def exact_pass_rates(model, problems):
    """The probability that one completion is right, for each problem, [N]: that of its answer's tokens."""
    prompt_ids, prompt_mask, answer_ids, answer_mask = demonstration_batch(tokenizer, problems)
    logprobs = token_logprobs(model, prompt_ids, prompt_mask, answer_ids)
    return torch.where(answer_mask, logprobs, 0.0).sum(1).exp().double()


def train_on(model, problems, num_generations, steps, seed=0):
    """Exact pass rates before the first step and after each, [steps + 1, N], and the share of tied groups, [steps]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    rates, tied = [exact_pass_rates(model, problems)], []
    for i in range(steps):
        rollouts = graded_completions(model, problems, num_generations, seed=1000 * seed + i)
        tied.append(frac_reward_zero_std(rollouts.rewards, rollouts.group))
        step(model, optimizer, rollouts)
        rates.append(exact_pass_rates(model, problems))
    return torch.stack(rates), tied


# %%
rates = exact_pass_rates(policy, train)
hard = [train[i] for i in (rates.log() - math.log(1 / 64)).abs().argsort()[:4]]
print("problems:", ", ".join(problem.prompt + problem.answer for problem in hard))
learner = AutoModelForCausalLM.from_pretrained(folder).eval()
from_one_in_64, tied = train_on(learner, hard, num_generations=64, steps=25)
from_scratch, tied_scratch = train_on(build_policy(tokenizer, seed=0), three_digits[:4], num_generations=64, steps=3)
for i in (0, 5, 10, 25):
    print(f"after {i:2} steps: pass rates {[round(p, 3) for p in from_one_in_64[i].tolist()]}")
print(f"random weights: {from_scratch[0].mean():.1e} before, {from_scratch[-1].mean():.1e} after; tied {tied_scratch}")
assert abs(from_one_in_64[0] - 1 / 64).max() < 1e-3 and from_one_in_64[-1].mean() > 0.5
assert tied_scratch == [1.0] * 3 and torch.equal(from_scratch[0], from_scratch[-1])


# %% tags=["export:figures"]
def learning_from(rates, scratch: float) -> Figure:
    """Exact pass rates of each problem [steps + 1, N] against the step, and the constant one of random weights."""
    fig, axes = new_figure(height=3.0)
    axes.plot(rates, color=COLORS["policy"], alpha=0.5, lw=1.2)
    axes.plot(rates.mean(1), color=COLORS["policy"], lw=2.5)
    axes.axhline(scratch, color=COLORS["error"], linestyle="--")
    axes.annotate("warm start, problems of pass rate 1/64", (2, rates[0].mean()), (3, 0.004), color=COLORS["policy"])
    axes.text(len(rates) - 1, 1.6 * scratch, "random weights", color=COLORS["error"], ha="right")
    axes.set(yscale="log", ylim=(0.3 * scratch, 2), xlabel="step", ylabel="exact pass rate")
    return fig


# %%
show(
    learning_from(from_one_in_64, from_scratch.mean().item()),
    caption="From one success in sixty-four a policy climbs within a few steps; from random weights it stays where it is.",
    alt="Pass rate on a logarithmic axis against the step. Four thin lines and their mean rise from 1/64 to near one; a "
    "dashed line for random weights is flat near 0.00002.",
)

# %% [markdown]
# This is what pretraining and demonstrations buy: a pass rate that is not zero. With each further token of the answer,
# random weights need another factor of $V$ more tries; a model that has read text spends its tries on the few continuations
# that are plausible.
#
# ## What to do with the tied groups
#
# They cost as much to write as the others. Dynamic sampling (DAPO, Yu et al., 2025) filters them out and samples other
# prompts in their place, until the batch is full of mixed groups. The filter first: which rows stand in a mixed group?


# %% tags=["export"]
def mixed_rows(rewards: torch.Tensor, group: torch.Tensor, graded: torch.Tensor | None = None) -> torch.Tensor:
    """The rows whose group is not tied, bool [B]; shapes and errors as in `tied_groups`. Section 13; Yu et al. 2025."""
    return ~tied_groups(rewards, group, graded)[group.unique(return_inverse=True)[1]]


# %% [markdown]
# Is it allowed to choose the data by its rewards? Write $\hat g$ for a group's estimate of the gradient. A tied group has
# $\hat g = 0$, so leaving it out removes nothing from the sum, and
#
# $$\mathbb{E}[\hat g \mid \text{mixed}] = \frac{\mathbb{E}[\hat g]}{P(\text{mixed})} .$$
#
# The direction stays, the length grows. That holds across prompts as well: a hard prompt comes through the filter less
# often, and by just as much its gradient is larger when it does. Dynamic sampling is a change of the step's length, and of
# the noise, not of what is being maximised. Exactly, on a tree with groups of three:

# %%
speaker = TabularPolicy(2, 2, seed=2)
tree = enumerate_tree(speaker, 2)
leaf_rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
scores, gradient = score_matrix(tree, speaker.parameters()), exact_gradient(tree, leaf_rewards, speaker.parameters())

weigh = partial(group_advantages, scale="none")
everything = group_moments(tree, weighted_scores(scores, leaf_rewards, weigh), gradient, 3)
mixed_only = weighted_scores(
    scores, leaf_rewards, lambda rewards, group: mixed_rows(rewards, group) * weigh(rewards, group)
)
kept = group_moments(tree, mixed_only, gradient, 3)
pass_rate = (tree.logprobs.sum(1).exp() @ leaf_rewards).item()
chance = mixed_probability(pass_rate, 3).item()
conditional = kept.mean / chance
print(
    f"p = {pass_rate:.3f}, mixed {chance:.3f}: mean of mixed groups {(conditional.norm() / gradient.norm()).item():.4f} ‖∇J‖"
)
assert torch.allclose(kept.mean, everything.mean, rtol=0, atol=1e-12)
assert torch.allclose(conditional, (1 - 1 / 3) / chance * gradient, rtol=0, atol=1e-10)

# %% [markdown]
# The sampling happens inside the stage that collects. The function below is handed a way to get more graded groups,
# `draw`, and knows nothing of engines and tasks. It asks for `groups` groups at a time, keeps the mixed ones in the order
# in which they came, and stops when it has enough: the first so many mixed groups are a fair sample of mixed groups, which
# is what the argument above needs. If the policy solves everything, or nothing, no number of rounds will do; hence `max_rounds`, after which it
# returns what it has and says so.
#
# Everything that was drawn comes back too, because a batch of mixed groups only would make a poor report: its share of
# tied groups is zero by construction, and its mean reward is not that of the policy.


# %% tags=["export"]
@dataclass(frozen=True)
class DynamicBatch:
    """What `dynamic_sampling` returns (section 13). `rollouts`: the mixed groups to learn from, at most as many as were
    asked for; `drawn`: all rollouts of all rounds, for metrics; `groups_drawn`: how many groups were paid for."""

    rollouts: Rollouts
    drawn: Rollouts
    groups_drawn: int
    rounds: int


def dynamic_sampling(draw: Callable[[int], Rollouts], groups: int, max_rounds: int = 10) -> DynamicBatch:
    """Draw `groups` groups at a time until `groups` of them are mixed, or `max_rounds` rounds are over.

    `draw(groups)` returns graded `Rollouts` of that many *new* groups: other prompts, or another seed. The result's
    rollouts are trimmed and their groups numbered from 0 in the order drawn; surplus groups of the last round are left
    out. When the rounds run out it warns and returns the mixed groups that there are, possibly none. Raises ValueError
    for numbers below 1 and for rollouts without rewards. Section 13; Yu et al., DAPO, 2025.
    """
    if groups < 1 or max_rounds < 1:
        raise ValueError(f"groups is {groups} and max_rounds {max_rounds}; both must be at least 1")
    parts, mixed = [], 0
    while mixed < groups and len(parts) < max_rounds:
        parts.append(draw(groups))
        if parts[-1].rewards is None:
            raise ValueError("draw returned rollouts without rewards; grade them before they are filtered")
        mixed += int((~tied_groups(parts[-1].rewards, parts[-1].group, parts[-1].graded)).sum())
    drawn = concatenate(parts)
    groups_drawn = len(drawn.group.unique())
    if mixed < groups:
        warnings.warn(
            f"{mixed} of {groups_drawn} groups are mixed after {max_rounds} rounds, and {groups} were asked for: choose "
            "prompts nearer to a pass rate of one half, larger groups, or more rounds",
            stacklevel=2,
        )
    labels = drawn.group[mixed_rows(drawn.rewards, drawn.group, drawn.graded)].unique()[:groups]
    rollouts = concatenate([drawn.select(torch.isin(drawn.group, labels))])
    used = rollouts.mask.any(0).nonzero()
    return DynamicBatch(rollouts.trim(int(used.max()) + 1 if len(used) else 0), drawn, groups_drawn, len(parts))


# %% [markdown]
# With the warm-started policy on the harder tenth of the problems, in groups of eight, new problems in each round. As every
# pass rate is known, the share of mixed groups is known as well, and the cost can be foretold.

# %%
harder = rates.argsort()[: len(train) // 10]
order = torch.randperm(len(harder), generator=torch.Generator().manual_seed(0))
fresh = iter([train[i] for i in harder[order]])
seeds = itertools.count()
batch = dynamic_sampling(
    lambda groups: graded_completions(policy, list(itertools.islice(fresh, groups)), 8, seed=next(seeds)), groups=48
)
expected = mixed_probability(rates[harder], 8).mean().item()
observed = 1 - frac_reward_zero_std(batch.drawn.rewards, batch.drawn.group)
print(f"{batch.groups_drawn} groups drawn in {batch.rounds} rounds, mixed {observed:.2f} (exactly {expected:.2f})")
print(
    f"mean reward {batch.drawn.rewards.mean():.2f} of what was drawn, {batch.rollouts.rewards.mean():.2f} of what is kept"
)
assert len(batch.rollouts) == 48 * 8 and batch.rollouts.group.unique().tolist() == list(range(48))
assert frac_reward_zero_std(batch.rollouts.rewards, batch.rollouts.group) == 0.0
assert abs(observed - expected) < 4 * (expected * (1 - expected) / batch.groups_drawn) ** 0.5

# %% [markdown]
# ## pass@k: what could be found with more tries
#
# Section 9 measured by pass@k, the probability that at least one of $k$ completions is right, what a policy can still
# find. If the pass rate is known, it is $1 - (1 - p)^k$. Usually it is not: there are $n$ samples, $c$ of them right.
# Putting $c/n$ in the place of $p$ is biased, because the function is concave for $k > 1$: the average of the values
# lies below the value at the average. Instead, count (Chen et al., 2021): among the $\binom{n}{k}$ ways to choose $k$ of the
# $n$ samples, $\binom{n-c}{k}$ miss all right ones, so
#
# $$\widehat{\text{pass@}k} = 1 - \binom{n-c}{k} \Big/ \binom{n}{k} = 1 - \prod_{j=0}^{k-1} \Big(1 - \frac{c}{n - j}\Big) .$$
#
# Any $k$ of the samples are $k$ fresh completions, so the average over all choices is unbiased. The binomials are too large for
# floating point; the product is not. With fewer than $k$ wrong samples one of its factors is zero, and the result is 1.


# %% tags=["export"]
def pass_at_k(correct: torch.Tensor, samples: int | torch.Tensor, k: int) -> torch.Tensor:
    """Unbiased estimate of pass@k for each problem, float64 [N]: 1 - C(n - c, k) / C(n, k).

    correct [N], how many of a problem's samples are right; samples, how many there are, a number or [N]. Raises
    ValueError for no problems, k below 1, above the number of samples or not whole, and counts outside 0 … n. Section 13;
    Chen et al., Evaluating Large Language Models Trained on Code, 2021.
    """
    c = torch.as_tensor(correct, dtype=torch.float64)
    n = torch.as_tensor(samples, dtype=torch.float64, device=c.device).expand_as(c)
    if c.numel() == 0:
        raise ValueError("pass@k of no problems; give the counts of at least one")
    if k != int(k) or not 1 <= k <= n.min():
        raise ValueError(
            f"pass@{k} from {int(n.min())} samples per problem; take a whole number 1 <= k <= samples, or sample more"
        )
    if not ((c >= 0) & (c <= n)).all():
        raise ValueError(
            f"counts of right samples go from {int(c.min())} to {int(c.max())}, outside 0 … {int(n.min())}"
        )
    misses = c[..., None] / (n[..., None] - torch.arange(int(k), device=c.device))
    return torch.expm1(torch.log1p(-misses.clamp(max=1)).sum(-1)).abs()


# %% [markdown]
# Unbiased, exactly: average over the binomial distribution of $c$, and compare with $1 - (1 - p)^k$. The plug-in is far off
# for a rare success and a large $k$.

# %%
n, p = 16, 0.05
counts = torch.arange(n + 1, dtype=torch.float64)
chances = torch.distributions.Binomial(n, torch.tensor(p, dtype=torch.float64)).log_prob(counts).exp()
for k in (1, 4, 16):
    exact, plug_in = success_probability(p, k).item(), (chances @ success_probability(counts / n, k)).item()
    unbiased = (chances @ pass_at_k(counts, n, k)).item()
    print(f"pass@{k:2}: exact {exact:.4f}, mean of the estimate {unbiased:.4f}, mean of the plug-in {plug_in:.4f}")
    assert abs(unbiased - exact) < 1e-10 and (k == 1 or plug_in < exact - 0.005)
assert pass_at_k(torch.tensor([1.0]), 10**6, 5 * 10**5).item() == 0.5

# %% [markdown]
# And an interval? The number reported is a mean over problems, and it speaks about problems that were not in the set. So
# the $N$ problems are the sample, and their estimates, independent of each other, the values. The usual interval,
# $\pm 1.96$ standard errors, fails where it is needed most: with no problem solved it has width zero. We use Wilson's
# interval for a share, which does not. It assumes the variance of a coin, $m(1-m)$ at mean $m$, the largest that values
# between 0 and 1 can have. Multiplying it by the ratio of the observed variance to that one takes into account what
# several samples per problem have told. If all values are 0, or all are 1, the ratio is 1. With 60 problems of very
# different difficulty it covers the truth in 94 to 95 % of the cases (`tests/test_signal.py`); where a few rare hard problems
# decide, in 89 %, and the usual one in 86 %.


# %% tags=["export"]
class Interval(NamedTuple):
    """A mean and its 95 % interval (section 13)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def interval_over_problems(values: torch.Tensor) -> Interval:
    """Mean of per-problem values in [0, 1], [N], with the 95 % interval for problems of the same kind. Section 13.

    Wilson's interval with the variance of a coin scaled to the observed one (ddof 1), unscaled where all values are the
    same: that a few problems agree does not say that all do. Raises ValueError for no values, or values outside [0, 1]. Wilson 1927.
    """
    values = values.double()
    if len(values) == 0 or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"{len(values)} values; give at least one, each in [0, 1] (NaN is not)")
    mean = values.mean().item()
    coin = mean * (1 - mean)
    ratio = 1.0 if values.min() == values.max() else values.var().item() / coin
    z = 1.96**2 * ratio / len(values)
    centre, half = (mean + z / 2) / (1 + z), math.sqrt(z * coin + z**2 / 4) / (1 + z)
    return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))


# %% [markdown]
# Estimates from 64 held-out problems with 32 samples each, beside the truth: the exact mean over *all* held-out problems,
# from their exact pass rates.

# %%
chosen = heldout[:64]
rollouts = graded_completions(policy, chosen, num_generations=32, seed=0)
right = rollouts.rewards.view(64, 32).sum(1)
population = exact_pass_rates(policy, heldout)
for k in (1, 8, 32):
    interval, exact = interval_over_problems(pass_at_k(right, 32, k)), success_probability(population, k).mean()
    print(f"pass@{k:2} {interval}, exactly {exact:.3f}")
    assert interval.low < exact < interval.high
print("no problem of 64 solved:", interval_over_problems(torch.zeros(64)))
try:
    pass_at_k(right, 32, 64)
except ValueError as error:
    print(error)
else:
    raise AssertionError("64 tries cannot be judged from 32 samples")

# %% [markdown]
# ## Sharper, or better?
#
# Does training on rewards teach what the model could not do, or does it make likelier what it could? **Claim 13.5.**
# Trained models can win at pass@1 and lose at large $k$ to the model they started from. Section 9 had an example in which
# that can be computed: three prompts, two answers, A right for the first two and B for the third, and one preference $u$
# for A that the prompts share.


# %% tags=["demo"]
offsets = torch.tensor([0.3, 0.0, -0.3], dtype=torch.float64)
a_is_right = torch.tensor([True, True, False])


def chance_of_right(u):
    """The probability of the right answer for each prompt, [3]; u [1] shared, or [3] with one for each."""
    chance_of_a = torch.sigmoid(u + offsets)
    return torch.where(a_is_right, chance_of_a, 1 - chance_of_a)


def trained(u, steps=8, learning_rate=20.0):
    """Pass rates before the first exact gradient step on pass@1 and after each, [steps + 1, 3]."""
    path = [chance_of_right(u)]
    for _ in range(steps):
        u = u.detach().requires_grad_()
        (slope,) = torch.autograd.grad(chance_of_right(u).mean(), u)
        u = u + learning_rate * slope
        path.append(chance_of_right(u).detach())
    return torch.stack(path)


# %%
shared = trained(torch.zeros(1, dtype=torch.float64))
own = trained(torch.zeros(3, dtype=torch.float64))
for k in (1, 2, 8, 64):
    before, after = (success_probability(path, k).mean().item() for path in (shared[0], shared[-1]))
    print(
        f"pass@{k:2}: {before:.3f} before, {after:.3f} after;  own parameters {success_probability(own[-1], k).mean():.3f}"
    )
gain = [success_probability(shared[-1], k).mean() - success_probability(shared[0], k).mean() for k in range(1, 65)]
assert gain[0] > 0.1 and max(gain[1:]) < 0
assert all(success_probability(own[-1], k).mean() > success_probability(own[0], k).mean() for k in range(1, 9))

# %% [markdown]
# From $k = 2$ on the untrained policy is ahead. The third prompt was outvoted; nothing was unlearned by accident. With a
# preference for each prompt the trained policy is ahead at every $k$, so neither outcome is a law of reinforcement
# learning. What decides is whether prompts have to share what they learn, and pass@1 alone does not show it. In the
# figure the lines are exact, and the dots are what an evaluation would see: 200 problems of each kind, 64 samples each, and
# the interval over problems.


# %% tags=["export:figures"]
def pass_at_k_curves(policies: dict[str, tuple], problems: int = 200, samples: int = 64) -> Figure:
    """pass@k against k: exact lines, and estimates from `samples` samples of problems of each kind with their interval.

    `policies` maps a name to (pass rates [kinds], name of a colour, k at which the line is labelled)."""
    fig, axes = new_figure(height=3.4)
    generator, ks = torch.Generator().manual_seed(0), [1, 2, 4, 8, 16, 32, 64]
    for name, (rates, color, place) in policies.items():
        rates = rates.double()
        axes.plot(ks, [success_probability(rates, k).mean() for k in ks], color=COLORS[color], lw=2)
        each = rates.repeat(problems)
        right = (torch.rand(len(each), samples, generator=generator, dtype=torch.float64) < each[:, None]).sum(1)
        seen = torch.tensor([interval_over_problems(pass_at_k(right, samples, k)) for k in ks])
        bars = (seen[:, :2] - seen[:, [1, 0]]).abs()[:, 0], (seen[:, 2] - seen[:, 0])
        axes.errorbar(ks, seen[:, 0], torch.stack(bars), fmt="o", ms=4, lw=1, capsize=3, color=COLORS[color])
        height = success_probability(rates, place).mean().item()
        axes.annotate(name, (place, height), (6, -14), textcoords="offset points", color=COLORS[color])
    axes.set(xscale="log", xlabel="k, tries per problem", ylabel="pass@k", ylim=(0.4, 1.04))
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    return fig


# %%
show(
    pass_at_k_curves({"before": (shared[0], "reference", 2), "after": (shared[-1], "policy", 4)}),
    caption="Training moved pass@1 up and everything from pass@2 on down: the answers it made likelier were already there.",
    alt="pass@k against k on a logarithmic axis. The line before training rises from 0.55 to 1 at k = 8; the line after "
    "training starts at 0.66 and rises slowly, below it from k = 2 on. Dots with small intervals lie on both lines.",
)

# %% [markdown]
# Move the slider through the training steps: pass@1 hardly changes after the fourth, while the right end of the line keeps
# sinking. Give each prompt its own parameter, and both ends rise.

# %%
explore(
    lambda steps, sharing: pass_at_k_curves(
        {"before": (shared[0], "reference", 2), "after": ((shared if sharing else own)[steps], "policy", 4)}
    ),
    steps=widgets.IntSlider(4, min=0, max=8, description="gradient steps"),
    sharing=widgets.ToggleButtons(options={"shared": True, "one each": False}, description="parameter of the prompts"),
)

# %% [markdown]
# ## A reward at every token
#
# The two obstacles were few bits and no success. Both come from the one verdict at the end. **Claim 13.6.** Two methods of
# 2025 take ordinary text and make a reward of every token in it. Let $x_1, x_2, \dots$ be the text, and
# $s_t = x_{<t}$ what precedes token $t$. The policy may first write a *thought* $c \sim \pi(\cdot \mid s_t)$. Then
#
# - **RPT**, reinforcement pre-training (Dong et al., 2025): the policy predicts the next token,
#   $y \sim \pi(\cdot \mid s_t, c)$, and earns $1$ if $y = x_t$, else $0$. The text itself is the verifier;
# - **RLP**, reinforcement learning pre-training (Hatamizadeh et al., 2025): nothing is predicted, and the reward is the
#   information gained by thinking, $\log \pi(x_t \mid s_t, c) - \log \bar\pi(x_t \mid s_t)$ in nats, where $\bar\pi$ is a
#   policy that does not think: in the paper a slow moving average of $\pi$.
#
# Each needs the policy's next-token distribution after a context, and thoughts, which any sampler can write.


# %% tags=["export"]
def think(
    sampler: Sampler, contexts: list[list[int]], num_generations: int, seed: int, *, opening: int, closing: int
) -> list[list[int]]:
    """Each context with a sampled thought behind it: len(contexts) · num_generations rows, a context's rows together.

    A thought stands between the tokens `opening` and `closing`. It is what `sampler` writes after `opening` until it
    stops, for which `closing` should be one of its stop tokens, or until its cap. Section 13.
    """
    contexts = [context + [opening] for context in contexts]
    rollouts = sampler.generate(contexts, num_generations, seed)
    ends = (used_columns(rollouts.mask) - (~rollouts.truncated).long()).tolist()
    rows = zip(rollouts.group.tolist(), rollouts.completion_ids.tolist(), ends, strict=True)
    return [contexts[group] + ids[:end] + [closing] for group, ids, end in rows]


@torch.no_grad()
def next_token_logprobs(model, contexts: list[list[int]]) -> torch.Tensor:
    """log π(· | context) for each of N contexts of token ids, [N, V], at least float32. Section 13."""
    ids, mask = (tensor.to(model.device) for tensor in pad_left(contexts, 0))
    return completion_logits(model, ids, mask, ids[:, :1])[:, 0].log_softmax(-1)


def rpt_rewards(logprobs: torch.Tensor, targets: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """1.0 where a token drawn from `logprobs` [N, V] is the text's own, `targets` [N] int64, else 0.0, [N].

    `logprobs` are those after the thought. Section 13; Dong et al., Reinforcement Pre-Training, 2025.
    """
    drawn = torch.multinomial(logprobs.exp().cpu(), 1, generator=generator).to(targets.device)
    return (drawn.squeeze(1) == targets).float()


def rlp_rewards(logprobs: torch.Tensor, plain_logprobs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The nats by which a thought raised the log-probability of the text's own token `targets` [N] int64, [N].

    `logprobs` [N, V] after the thought, `plain_logprobs` [N, V] without one, from the policy that does not think.
    Section 13; Hatamizadeh et al., RLP: Reinforcement as a Pretraining Objective, 2025.
    """
    return (logprobs - plain_logprobs).gather(1, targets[:, None]).squeeze(1)


# %% [markdown]
# The setting is a toy. The policy is the tiny one, the text a line of arithmetic such as `23+21=44`, and a thought has *one*
# token, in brackets: before the 1 of that line the policy reads `23+2(7)` after the thought 7, and `23+2` without. The
# policy without thoughts is the same policy, not an average over time. In return, everything is exact: with a vocabulary of
# 17, brackets included, all thoughts can be listed.
#
# First RPT from random weights, where a verdict on the answer had nothing to say.


# %% tags=["demo"]
def line_of(problem):
    """The token ids of a line, from the first token to the last."""
    return reader(problem.prompt + problem.answer).input_ids + [reader.eos_token_id]


def positions(problem):
    """The contexts of all tokens of a line but the first, and the tokens themselves, [T]."""
    ids = line_of(problem)
    return [ids[:t] for t in range(1, len(ids))], torch.tensor(ids[1:])


def all_thoughts(model, contexts):
    """Log-probabilities of the one-token thoughts [T, V], and of the next token after each [T, V, V]."""
    thoughts = next_token_logprobs(model, [context + [opening] for context in contexts])
    inside = [[opening, c, closing] if c not in stops else [opening, closing] for c in range(len(reader))]
    after = next_token_logprobs(model, [context + thought for context in contexts for thought in inside])
    return thoughts, after.view(*thoughts.shape, -1)


def match_probabilities(thoughts, after, targets):
    """Expected RPT reward at each position, [T]: over the thoughts of `all_thoughts` and the predictions, exactly."""
    at_target = after.gather(2, targets[:, None, None].expand(-1, after.shape[1], 1)).squeeze(2)
    return (thoughts + at_target).exp().sum(1)


# %%
reader = build_tokenizer(ARITHMETIC_CHARACTERS + "()")
opening, closing = reader.convert_tokens_to_ids(["(", ")"])
stops = [closing, reader.eos_token_id]
newborn = build_policy(reader, seed=0)
problem = heldout[3]
contexts, targets = positions(problem)
chance = match_probabilities(*all_thoughts(newborn, contexts), targets)
print("text:", problem.prompt + problem.answer)
print("mixed among groups of 8, token by token:", [round(m, 2) for m in mixed_probability(chance, 8).tolist()])
verdict = exact_pass_rates(newborn, [problem])
print(f"a verdict on the answer: mixed in {mixed_probability(verdict, 8).item():.4f} of the groups")
assert (mixed_probability(chance, 8) > 0.2).all() and mixed_probability(verdict, 8) < 0.01

sampler = TorchSampler(newborn, stops, reader.pad_token_id, max_completion_length=1)
thoughtful = think(sampler, contexts, 500, seed=0, opening=opening, closing=closing)
print("sampled:", "  ".join(reader.decode(row[1:]) for row in thoughtful[2000:2003]))
rewards = rpt_rewards(
    next_token_logprobs(newborn, thoughtful), targets.repeat_interleave(500), torch.Generator().manual_seed(0)
).view(-1, 500)
assert (rewards.mean(1) - chance).abs().max() < 5 * (0.25 / 500) ** 0.5

# %% [markdown]
# Every token can be hit by chance, with a probability near $1/V$, because one token has to be found and not a whole
# answer. In a vocabulary of 128,000 that chance is small again, so in practice RPT, too, starts from a trained model. What
# is gained is the exponent: $V^{-1}$ in place of $V^{-n}$.
#
# For RLP the policy needs some idea of the text. We pretrain it for 200 steps on whole lines, half of them with a bracket
# somewhere that holds a random digit. It learns the form of a line, a little arithmetic, and that brackets are passed over.


# %% tags=["demo"]
def text_with_brackets(problem, generator):
    """A line, and in every second one a random digit in brackets at a random place."""
    ids = line_of(problem)
    bracket, place, digit = torch.rand(3, generator=generator).tolist()
    place = 1 + int(place * (len(ids) - 1))
    thought = [opening, reader.convert_tokens_to_ids(str(int(10 * digit))), closing] if bracket < 0.5 else []
    return ids[:place] + thought + ids[place:]


# %%
base = build_policy(reader, seed=0)
optimizer = torch.optim.AdamW(base.parameters(), lr=4e-3, weight_decay=0.0)
generator = torch.Generator().manual_seed(0)
for _ in range(200):
    chosen = torch.randint(len(train), (64,), generator=generator).tolist()
    text_ids, text_mask = pad_right([text_with_brackets(train[i], generator) for i in chosen], reader.pad_token_id)
    logprobs = token_logprobs(base, text_ids[:, :1], text_mask[:, :1], text_ids[:, 1:])
    loss = supervised_loss(logprobs, text_mask[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.2f} nats per token, uniform {math.log(len(reader)):.2f}")
assert loss < 1.8


# %% tags=["demo"]
def gains_over(baseline, after, targets):
    """The RLP reward of every one-token thought, [T, V]: baseline [T, V] without thought, after [T, V, V] with it."""
    V = len(reader)
    rewards = rlp_rewards(after.flatten(0, 1), baseline.repeat_interleave(V, 0), targets.repeat_interleave(V))
    return rewards.view(-1, V)


def line_rewards(model, problem):
    """What `dense_rewards` draws, for one line of text."""
    contexts, targets = positions(problem)
    thoughts, after = all_thoughts(model, contexts)
    gains = gains_over(next_token_logprobs(model, contexts), after, targets)
    tokens = reader.convert_ids_to_tokens(targets.tolist())
    return tokens, match_probabilities(thoughts, after, targets), thoughts.exp(), gains


# %%
plain = next_token_logprobs(base, contexts)
thoughts, after = all_thoughts(base, contexts)
gains = gains_over(plain, after, targets)
mean_gain = (thoughts.exp() * gains).sum(1)
spread = ((thoughts.exp() * (gains - mean_gain[:, None]).square()).sum(1)).sqrt()
for t, target in enumerate(targets.tolist()):
    token = reader.convert_ids_to_tokens(target)
    print(
        f"{token:6} surprisal {-plain[t, target]:5.2f}  mean gain {mean_gain[t]:+6.2f}  spread over thoughts {spread[t]:.2f}"
    )
assert (spread > 0).all()

# %% [markdown]
# A reward at every position, and thoughts that earn differently at each: that is the dense signal. It is small here. This
# policy has seen that brackets hold nothing of interest, so no thought changes much. Nobody has taught it to think. RLP
# would begin to, by making those thoughts likelier that earn more than the others at their position: section 6's group
# advantages, with a position of the text in the place of a prompt. None of these groups is tied.

# %%
thoughtful = think(replace(sampler, model=base), contexts, 8, seed=0, opening=opening, closing=closing)
repeated = targets.repeat_interleave(8)
rewards = rlp_rewards(next_token_logprobs(base, thoughtful), plain.repeat_interleave(8, 0), repeated)
at_position = torch.arange(len(targets)).repeat_interleave(8)
print("tied groups, a group for each token:", frac_reward_zero_std(rewards, at_position))
assert frac_reward_zero_std(rewards, at_position) == 0 and rewards.abs().max() > 0.01

# %% [markdown]
# Can an average thought help at all? Suppose that the plain policy already predicted the average over its thoughts,
# $\bar\pi(x \mid s) = \sum_c \pi(c \mid s)\, \pi(x \mid s, c)$. The logarithm is concave, so
#
# $$\sum_c \pi(c \mid s) \log \pi(x_t \mid s, c) - \log \bar\pi(x_t \mid s) \le 0 ,$$
#
# for every token of every text. A positive mean gain is possible only if thinking computes something that the direct
# prediction has not, which is what long thoughts are for. With that policy in the place of the plain one:

# %%
average = (thoughts[:, :, None] + after).logsumexp(1)  # log of the average prediction, [T, V]
mean_versus_average = (thoughts.exp() * gains_over(average, after, targets)).sum(1)
print("mean gain against the average prediction:", [round(g, 2) for g in mean_versus_average.tolist()])
assert (mean_versus_average <= 1e-6).all()


# %% tags=["export:figures"]
def dense_rewards(tokens: list[str], match: torch.Tensor, thoughts: torch.Tensor, gains: torch.Tensor) -> Figure:
    """Rewards per token of a text: probability of the RPT reward, match [T], and the RLP reward of each thought.

    thoughts [T, V] are the thoughts' probabilities, gains [T, V] their rewards. A dot is a thought of more than 1 %."""
    fig, (upper, lower) = new_figure(2, 1, height=4.6, sharex=True, height_ratios=[1, 1.5])
    at = torch.arange(len(tokens))
    upper.bar(at, match, color=COLORS["reward"], width=0.6)
    upper.set(ylim=(0, 1.05), ylabel="P(reward 1)")
    upper.set_title("RPT: the predicted token is the text's", loc="left")
    likely = thoughts > 0.01
    where = likely.nonzero()[:, 0]
    lower.scatter(where, gains[likely], 6 + 300 * thoughts[likely], color=COLORS["policy"], alpha=0.4, lw=0)
    mean = (thoughts * gains).sum(1)
    lower.hlines(mean, at - 0.3, at + 0.3, color=COLORS["reward"], lw=2.5)
    lower.axhline(0, color="black", lw=0.8)
    lower.set(ylabel="gain (nats)", xlabel="token to be predicted")
    lower.set_title("RLP: a dot for each thought of more than 1 %, a bar for the mean of all", loc="left")
    lower.set_xticks(at, tokens)
    return fig


# %%
show(
    dense_rewards(*line_rewards(base, problem)),
    caption="Both rewards exist at every token of the text, and RLP's differs between thoughts; a verdict comes once per line.",
    alt="Two panels over the tokens of one line of arithmetic. Above, bars with the probability that the prediction after a "
    "thought is right: near one for plus, equals and the end, near 0.1 for digits. Below, dots for the information gain of "
    "each thought, around zero or a little below, with a line for their mean.",
)

# %% [markdown]
# Other lines of text, and random weights in place of the pretrained ones: at random every thought earns about nothing, and
# the chance of a match is the same everywhere.

# %%
explore(
    lambda line, pretrained: dense_rewards(*line_rewards(base if pretrained else newborn, heldout[line])),
    line=widgets.IntSlider(3, min=0, max=20, description="held-out line"),
    pretrained=widgets.ToggleButtons(options={"pretrained": True, "random": False}, description="weights"),
)

# %% [markdown]
# ## Exercises
#
# **1. Predict, then run.** A prompt is solved once in sixty-four tries. How many completions must a group have for it to
# be mixed with probability one half? And how many if the prompt is *failed* once in sixty-four tries? Write down two numbers,
# to within three.

# %% tags=["exercise"]
import torch

from lmrl.signal import mixed_probability

prediction = None  # (completions at p = 1/64, completions at p = 63/64)

# %% tags=["solution"]
import torch

from lmrl.signal import mixed_probability

# (63/64)^G = 1/2 gives G = 64 log 2, about 44; and a mixed group does not care which of the two answers is the rare one
prediction = (45, 45)

# %% tags=["check"]
assert prediction is not None, "write down a prediction first"
sizes = torch.arange(1, 200)
for guess, p in zip(prediction, (1 / 64, 63 / 64), strict=True):
    needed = sizes[mixed_probability(p, sizes) >= 0.5][0].item()
    assert abs(guess - needed) <= 3, f"at p = {p:.4f} it takes {needed} completions"

# %% [markdown]
# **2. The best of k.** Rewards are not always 0 or 1. Estimate the expected *largest* reward among $k$ completions from
# $n$ samples, without bias, as pass@k does for 0 and 1. Hint: sort the rewards; in how many of the $\binom{n}{k}$ choices is
# the $i$-th smallest the largest?

# %% tags=["exercise"]
import math

import torch

from lmrl.signal import pass_at_k


def best_at_k(rewards, k):
    """Unbiased estimate of the expected largest of k rewards: rewards [n] float64, 1 <= k <= n, -> float."""
    raise NotImplementedError


# %% tags=["solution"]
import math

import torch

from lmrl.signal import pass_at_k


def best_at_k(rewards, k):
    """Unbiased estimate of the expected largest of k rewards: rewards [n] float64, 1 <= k <= n, -> float."""
    n = len(rewards)
    choices = torch.tensor([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)], dtype=torch.float64)
    return (rewards.sort().values @ choices).item()  # the i-th from 0 is the largest with k - 1 of the i below it


# %% tags=["check"]
import itertools

graded = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
for k in range(1, 8):
    subsets = [max(chosen) for chosen in itertools.combinations(graded.tolist(), k)]
    assert abs(best_at_k(graded, k) - sum(subsets) / len(subsets)) < 1e-10, (
        f"k = {k}: the mean over all choices differs"
    )
    verdicts = torch.tensor([1, 0, 0, 1, 0, 0, 0], dtype=torch.float64)
    assert abs(best_at_k(verdicts, k) - pass_at_k(torch.tensor([2]), 7, k).item()) < 1e-10

# %% [markdown]
# **3. Find the bug.** A filter for groups without signal. "All wrong" and "all right" have the mean rewards 0 and 1, and
# it served well until the reward got a penalty of −1 for answers in the wrong format. Nothing crashed; the runs became worse.
# The check holds the filtered estimator against the oracle: over all groups of the tree, what the filter leaves must add up
# to $(1 - 1/G)\,\nabla J$, since groups without a signal contribute nothing.

# %% tags=["exercise"]
import torch

from lmrl.baselines import group_advantages, group_mean


def keep(rewards, group):
    """The rows of groups that carry a signal: rewards [B], group [B] int64 -> bool [B]."""
    mean = group_mean(rewards, group)
    return (mean > 0) & (mean < 1)


# %% tags=["solution"]
import torch

from lmrl.baselines import group_advantages
from lmrl.signal import mixed_rows


def keep(rewards, group):
    """The rows of groups that carry a signal: rewards [B], group [B] int64 -> bool [B]."""
    return mixed_rows(rewards, group)  # two different rewards, whatever their mean


# %% tags=["check"]
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, score_matrix
from lmrl.variance import group_moments, weighted_scores

for G, scored in [(2, [1.0, 0.0, 0.0, 1.0]), (2, [1.0, 0.0, -1.0, 0.0]), (3, [1.0, 0.5, -1.0, 0.0])]:
    learner = TabularPolicy(2, 2, seed=G)
    oracle, scored = enumerate_tree(learner, 2), torch.tensor(scored, dtype=torch.float64)
    exact = exact_gradient(oracle, scored, learner.parameters())

    def filtered(rewards, group):
        return torch.where(keep(rewards, group), group_advantages(rewards, group, scale="none"), 0.0)

    estimator = weighted_scores(score_matrix(oracle, learner.parameters()), scored, filtered)
    found = group_moments(oracle, estimator, exact, G).mean
    share = (found @ exact / exact.square().sum()).item()
    assert torch.allclose(found, (1 - 1 / G) * exact, rtol=0, atol=1e-10), (
        f"rewards {scored.tolist()}, G = {G}: the filter leaves {share:.3f} ∇J of {1 - 1 / G:.3f} ∇J"
    )
    same = torch.full((4,), 0.1, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    assert not keep(*same).any(), "a group of equal rewards has no signal, whatever their value"

# %% [markdown]
# ## What is still missing
#
# Which prompts carry a signal is known now, and what it costs to look for them; the published recipes that combine such
# choices, and the places where their arguments give way, are section 14. The rewards themselves, so far exact comparisons
# with a known answer, are section 15, and the loop that would call `dynamic_sampling` in its collecting stage is section 16.
