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
# Supervised training starts from random weights. Reinforcement learning of a language model starts from a model that
# somebody has already trained. Why not from scratch?
#
# Because the policy gradient is made of *differences between the rewards of the policy's own samples*. Where the samples
# do not differ in reward there is no step to take: not a small or a noisy one, none. This section counts how often that
# happens.
#
# Names: a **group** is the $G$ completions sampled for one prompt, $R_1, \dots, R_G$ their rewards, $p$ the **pass
# rate**, the probability that a single completion of this prompt is right.

# %%
import itertools
import math

import torch
from matplotlib.figure import Figure

from lmrl.baselines import group_advantages
from lmrl.figures.style import COLORS, new_figure, show

# %% [markdown]
# ## A group that agrees teaches nothing
#
# Section 6 weights the gradient of completion $i$ by its advantage in the group,
#
# $$A_i = R_i - \frac1G \sum_{j=1}^{G} R_j .$$
#
# If all rewards in the group are equal, every $A_i$ is zero, and so is the sum of $A_i \nabla\log\pi_\theta$, whatever the
# policy is. Such a group is **tied**. All answers wrong is a tie, and so is all answers right.
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
# ## How often does a group carry a signal?
#
# Let the reward be 1 for a right completion and 0 for a wrong one. The $G$ completions are independent, so
#
# $$P(\text{at least one is right}) = 1 - (1 - p)^G, \qquad P(\text{mixed}) = 1 - (1 - p)^G - p^G .$$
#
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
    at_least_one = probability[outcomes.any(-1)].sum().item()
    carries_signal = probability[mixed].sum().item()
    print(f"p = {p:.4f}: at least one right {at_least_one:.4f}, mixed {carries_signal:.4f}")
    assert abs(at_least_one - (1 - (1 - p) ** 8)) < 1e-10
    assert abs(carries_signal - (1 - (1 - p) ** 8 - p**8)) < 1e-10

# %% [markdown]
# The two agree while success is rare and part when it is not. A prompt that the policy answers in nine of ten cases is
# mixed in 57 % of its groups, as one that it answers in one of ten.


# %% tags=["export:figures"]
def signal_probability(sizes: tuple[int, ...] = (2, 8, 64)) -> Figure:
    """P(at least one success) and P(mixed group) against the pass rate, for several group sizes."""
    fig, axes = new_figure(height=3.6)
    p = torch.special.expit(torch.linspace(-7.5, 7.5, 401, dtype=torch.float64))
    for size in sizes:
        at_least_one = 1 - (1 - p) ** size
        mixed = at_least_one - p**size
        axes.plot(p, at_least_one, color=COLORS["reference"], linestyle=":", zorder=3)
        axes.plot(p, mixed, color=COLORS["advantage"])
        where = (at_least_one > min(0.6, mixed.max() * 0.8)).nonzero()[0]
        axes.annotate(f"G = {size}", (p[where], mixed[where]), xytext=(-6, 0), textcoords="offset points", ha="right")
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
# ## From random weights, and from a model that sometimes succeeds
#
# Random weights write each token about uniformly. If the right answer has $n$ tokens out of a vocabulary of $V$, then
# $p = V^{-n}$. Against that, one success in sixty-four completions is a comfortable place to start from.

# %%
scratch = 128_000.0**-3
print(f"three tokens out of 128,000, random weights: p = {scratch:.1e}, groups of 64 until one is mixed ", end="")
print(f"{-1 / math.expm1(64 * math.log1p(-scratch)):.0e}")
for size in (8, 16, 64, 512):
    print(f"p = 1/64, G = {size:3}: mixed in {1 - (63 / 64) ** size - (1 / 64) ** size:.4f} of the groups")
assert abs(1 - (63 / 64) ** 8 - (1 / 64) ** 8 - 0.1184) < 5e-5
assert 1 - (63 / 64) ** 512 - (1 / 64) ** 512 > 0.999

# %% [markdown]
# This is what pretraining and demonstrations buy: a pass rate that is not zero. And it is why the sampling budget of a
# step goes to prompts at a middling pass rate, or to larger groups for the hard ones.
#
# ## What is still missing
#
# Even a mixed group pays one number for a whole completion; rewards at every token, which would let reinforcement
# learning move into pretraining, are later parts of this section. What to do about the tied groups, such as
# sampling other prompts in their place, is a matter of recipes: section 14.
