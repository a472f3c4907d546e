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
# # 3. The objective
#
# Section 2 has a policy $\pi_\theta$ that writes completions $\tau$, and a number $R(\tau)$ for each finished one. What
# exactly should training raise?
#
# Score every completion that the policy could write, weigh each score with the probability of that completion, and add
# up. With one prompt,
#
# $$J(\theta) = \mathbb{E}_{\tau \sim \pi_\theta}[R(\tau)] = \sum_\tau \pi_\theta(\tau)\, R(\tau), \tag{3.1}$$
#
# and with prompts $x$ drawn from a data set $\mathcal{D}$, the average of that over prompts,
# $J(\theta) = \mathbb{E}_{x \sim \mathcal{D}}\, \mathbb{E}_{\tau \sim \pi_\theta(\cdot \mid x)}[R(x, \tau)]$. One prompt is
# enough for everything in this section.
#
# It looks harmless. Three things about it shape the rest of the course: it can only be sampled, $\theta$ sits in an unusual
# place, and a high value says less about a policy than one would think.

# %%
import math
from typing import Callable, NamedTuple

import ipywidgets as widgets
import torch
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.policy import build_policy, build_tokenizer, completion_texts, sample
from lmrl.tree import (
    TabularPolicy,
    Tree,
    completions,
    enumerate_tree,
    exact_gradient,
    expectation,
    leaf_probabilities,
    prompted_policy,
)

# %% [markdown]
# ## Exactly
#
# Of the reward nothing need be known but its values: hand it a finished text, and a number comes back. A test suite may
# be inside, or a person, or a list of right answers. On a tree it is called once for each leaf.


# %% tags=["export"]
def leaf_rewards(tree: Tree, reward: Callable[[list[int]], float]) -> torch.Tensor:
    """The reward of every leaf, [L] float64; `reward` gets a completion's token ids, without padding. Section 3."""
    return torch.tensor([reward(ids) for ids in completions(tree)], dtype=torch.float64)


# %% [markdown]
# Two tokens at most, out of `#` (stop), `a` and `b`: that makes seven completions. The right answer is `ba`. The checker
# gives 0.7 for its second letter in the second place, and 0.3 for its first letter in the first.

# %%
tokens = ["#", "a", "b"]
policy = TabularPolicy(vocab_size=3, max_length=2)
policy.logits.data = torch.tensor(
    [[-1, 1, -1], [0, 0, 0], [-1, 2, -2], [0, 3, -1]]
).double()  # start, –, after a, after b
tree = enumerate_tree(policy, max_length=2, eos_id=0)
texts = ["".join(tokens[i] for i in ids) for ids in completions(tree)]
rewards = leaf_rewards(tree, lambda ids: 0.3 * (ids[0] == 2) + 0.7 * (ids[1:] == [1]))
J = expectation(tree, rewards)
for text, probability, reward in zip(texts, leaf_probabilities(tree).tolist(), rewards.tolist()):
    print(f"{text:3} π = {probability:.3f}   R = {reward:.1f}   π·R = {probability * reward:.4f}")
print(f"J = {J:.4f}")
assert abs(sum(p * r for p, r in zip(leaf_probabilities(tree).tolist(), rewards.tolist())) - J) < 1e-10

# %% [markdown]
# ## By sampling
#
# A real policy's completions cannot be listed. They can be drawn: take $N$ of them, score them, and average,
#
# $$\hat J = \frac1N \sum_{i=1}^N R(\tau_i), \qquad \tau_i \sim \pi_\theta. \tag{3.2}$$
#
# Its mean is $J$, and since the draws are independent its variance is $\mathrm{Var}[R]/N$. The root of that, with the
# variance estimated from the same $N$ rewards, is the **standard error**:
#
# $$\mathrm{se} = \sqrt{\frac{1}{N} \cdot \frac{1}{N-1} \sum_{i=1}^N \big(R(\tau_i) - \hat J\big)^2}.$$


# %% tags=["export"]
class Estimate(NamedTuple):
    """A sampled mean and its standard error, in units of the reward. Section 3."""

    mean: float
    standard_error: float


def monte_carlo(rewards: torch.Tensor) -> Estimate:
    """J and its standard error from the rewards [N] of independently sampled completions. Section 3.

    Raises ValueError for fewer than two rewards: one sample says nothing about its error.
    """
    if len(rewards) < 2:
        raise ValueError(f"a standard error needs at least 2 rewards, and there are {len(rewards)}")
    rewards = rewards.double()
    return Estimate(rewards.mean().item(), (rewards.std() / len(rewards) ** 0.5).item())


def sample_leaves(tree: Tree, count: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of the tree drawn from the policy, independently, [count] int64. Section 3."""
    return torch.multinomial(leaf_probabilities(tree).detach(), count, replacement=True, generator=generator)


# %% [markdown]
# **Claim 3.1.** The weights in (3.1) are those with which the policy writes. So the average over texts that it writes
# must agree with the list, within four standard errors. First with leaves drawn from the tree:

# %%
for N in (64, 512, 4096):
    drawn = sample_leaves(tree, N, torch.Generator().manual_seed(0))
    estimate = monte_carlo(rewards[drawn])
    print(f"N = {N:4}: {estimate.mean:.4f} ± {estimate.standard_error:.4f}   (exact {J:.4f})")
    assert abs(estimate.mean - J) < 4 * estimate.standard_error

# %% [markdown]
# Then with the real thing: a small transformer, its own decode loop from section 1, text out of its tokenizer, and a
# reward that reads the text. The tree of the same model says what should come out.

# %%
tokenizer = build_tokenizer("ab")
model = build_policy(tokenizer, hidden_size=32, num_layers=1, num_heads=1, seed=0)
prompt_ids = torch.tensor([tokenizer("ab").input_ids])
with torch.no_grad():
    model_tree = enumerate_tree(prompted_policy(model, prompt_ids[0]), 3, tokenizer.eos_token_id)
model_J = expectation(model_tree, leaf_rewards(model_tree, lambda ids: float("b" in tokenizer.decode(ids))))

prompts = prompt_ids.expand(4000, -1)
samples = sample(
    model,
    prompts,
    torch.ones_like(prompts).bool(),
    max_new_tokens=3,
    stop_ids=[tokenizer.eos_token_id],
    generator=torch.Generator().manual_seed(0),
)
sampled_texts = completion_texts(tokenizer, samples.ids, samples.lengths, samples.truncated)
estimate = monte_carlo(torch.tensor([float("b" in text) for text in sampled_texts]))
print(
    f"{len(model_tree.ids)} leaves: J = {model_J:.4f};  4000 completions: {estimate.mean:.4f} ± {estimate.standard_error:.4f}"
)
assert abs(estimate.mean - model_J) < 4 * estimate.standard_error

# %% [markdown]
# A warning about small samples. Eight right answers out of eight have a standard error of zero, which is not how well $J$
# is known. The formula trusts the spread of the sample, and a small sample may not have met the rare answers yet.
#
# ## Where θ is
#
# Put the supervised objective of section 1 next to the new one. A completion $y$ has a fixed frequency $q(y)$ in the
# data, and
#
# $$L(\theta) = \sum_y \underbrace{q(y)}_{\text{fixed}}\ \underbrace{\big(-\log p_\theta(y)\big)}_{\text{moves with }\theta},
# \qquad
# J(\theta) = \sum_\tau \underbrace{\pi_\theta(\tau)}_{\text{moves with }\theta}\ \underbrace{R(\tau)}_{\text{fixed}}.$$
#
# Both are weighted sums. On the left $\theta$ changes what is summed, and the weights stay. On the right $\theta$
# changes the weights, which are called the **measure**, and what is summed stays.
#
# **Claim 3.2.** $J$ moves when $\theta$ moves, and $R$ never does. Let $\theta$ be a single number that is added to the logit
# of `b` everywhere. The checker is not asked again: its seven answers stay what they were, and it has no derivative, being
# a comparison of lists. Still $J$ has one.

# %%
tilt = torch.tensor([0, 0, 1])
theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
for value in (-2.0, 0.0, 2.0, 4.0):
    theta.data.fill_(value)
    tilted = enumerate_tree(lambda prefixes: policy(prefixes).detach() + theta * tilt, 2, 0)
    again = leaf_rewards(tilted, lambda ids: 0.3 * (ids[0] == 2) + 0.7 * (ids[1:] == [1]))
    slope = exact_gradient(tilted, rewards, [theta])
    print(f"θ = {value:4}: J = {expectation(tilted, rewards):.4f}, dJ/dθ = {slope.item():+.4f}, R = {again.tolist()}")
    assert torch.equal(again, rewards) and not rewards.requires_grad

# %% [markdown]
# That has a consequence for the data. In supervised training a data set can be kept and swept many times. Here it is
# drawn from the very thing that is being changed: samples taken at one $\theta$ estimate $J$ at that $\theta$, and go on
# doing so however far $\theta$ has moved.

# %%
at = {}
for value in (0.0, 4.0):
    theta.data.fill_(value)
    at[value] = enumerate_tree(lambda prefixes: policy(prefixes).detach() + theta * tilt, 2, 0)
old_samples = sample_leaves(at[0.0], 4096, torch.Generator().manual_seed(1))
kept = monte_carlo(rewards[old_samples])
J_old, J_new = (expectation(at[value], rewards).item() for value in (0.0, 4.0))
print(f"samples of θ = 0 say {kept.mean:.4f} ± {kept.standard_error:.4f};  J(0) = {J_old:.4f}, J(4) = {J_new:.4f}")
assert abs(kept.mean - J_old) < 4 * kept.standard_error < abs(kept.mean - J_new)

# %% [markdown]
# ## What J does not say
#
# $J$ is one number, and very different policies share it.
#
# **Claim 3.3.** Compare two policies. *Diverse* gives five answers equally often, three of which score 1 and two 0.
# *Constant* always gives one and the same answer, which scores 0.6. Both have $J = 0.6$.
#
# How much can a group of $G$ samples with the rewards $R_1, \dots, R_G$ teach? A training step compares them with each
# other, so what counts is how far the rewards in a group lie from the group's own mean $\bar R$. On average, the mean
# squared distance is
#
# $$\mathbb{E}\Big[\frac1G \sum_{i=1}^G (R_i - \bar R)^2\Big] = \mathbb{E}[R^2] - \mathbb{E}[\bar R^2]
# = \mathrm{Var}[R] - \frac{\mathrm{Var}[R]}{G} = \Big(1 - \frac1G\Big) \mathrm{Var}[R]. \tag{3.3}$$
#
# (Both squares contain the same $J^2$, and the mean of $G$ independent rewards has a $G$-th of the variance.) We call it
# the **group signal**.


# %% tags=["export"]
def group_signal(probabilities: torch.Tensor, rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Expected mean squared distance of a group's rewards from their mean, (1 - 1/G) Var[R]: two [.., L] -> [..].

    In squared units of the reward; 0 when all completions that can occur score the same. Section 3, equation 3.3.
    """
    mean = (probabilities * rewards).sum(-1, keepdim=True)
    return (1 - 1 / group_size) * (probabilities * (rewards - mean).square()).sum(-1)


# %% [markdown]
# The formula is compared with all groups of two and of four that could be drawn.

# %%
diverse = torch.full((5,), 0.2, dtype=torch.float64), torch.tensor([1, 1, 1, 0, 0], dtype=torch.float64)
constant = torch.eye(5, dtype=torch.float64)[0], torch.tensor([0.6, 1, 1, 0, 0], dtype=torch.float64)
for name, (p, R) in {"diverse": diverse, "constant": constant}.items():
    for G in (2, 4):
        groups = torch.cartesian_prod(*[torch.arange(5)] * G)  # [5**G, G]
        listed = p[groups].prod(1) @ R[groups].var(1, correction=0)
        print(f"{name:8}  J = {p @ R:.1f}   G = {G}: group signal {group_signal(p, R, G):.4f}")
        assert abs(listed - group_signal(p, R, G)) < 1e-10
        assert abs(p @ R - 0.6) < 1e-10
assert abs(group_signal(*diverse, 2) - 0.12) < 1e-10 and abs(group_signal(*diverse, 4) - 0.18) < 1e-10
assert group_signal(*constant, 4) == 0

# %% [markdown]
# The article that this course follows lets both policies answer rightly or wrongly, the constant one rightly in 60% of
# cases. With one prompt that cannot be: a constant answer scored 0 or 1 has $J = 0$ or $J = 1$. Hence the graded reward
# above. With several prompts it can. Answer each of five prompts always in the same way, three of them rightly: $J$ is
# 0.6 over the prompts and 0 or 1 for each of them, and no group of any prompt has a signal.
#
# Now train both. The rule is the one that the next sections arrive at, as far as it is needed here: draw a group of
# eight, and raise the logit of each answer that was drawn by $(R_i - \bar R)/8$.

# %%
for name, (p, R) in {"diverse": diverse, "constant": constant}.items():
    z, generator = p.log(), torch.Generator().manual_seed(0)
    for _ in range(200):
        drawn = torch.multinomial(z.softmax(0), 8, replacement=True, generator=generator)
        advantages = R[drawn] - R[drawn].mean()
        z = z + torch.zeros(5).double().index_add(0, drawn, advantages / 8)
    print(f"{name:8}  J from {p @ R:.2f} to {z.softmax(0) @ R:.3f}")
    assert (z.softmax(0) @ R > 0.95) if name == "diverse" else torch.equal(z, p.log())

# %% [markdown]
# One learns, and the other has not moved by a bit, although an answer that scores 1 exists. It will never be written, so
# nobody will ever know.
#
# ## The greedy trap
#
# Why would a policy become constant? Because (3.1) rewards it for that. Among all policies $J$ is largest where all mass is
# on the best completion; and the best completion that *training can see* is the best one that has been written so far.
#
# **Claim 3.4.** Four completions have the rewards $R = (1, 0.7, 0.2, 0)$ and the policy
# $\pi_0 = (0.01, 0.3, 0.3, 0.39)$. The best is rare; the second contributes most to $J$. Move a fraction $\alpha$ of all
# mass to that one, $\pi = (1 - \alpha)\, \pi_0 + \alpha\, e$, where $e = (0, 1, 0, 0)$.

# %%
start, R = torch.tensor([[0.01, 0.3, 0.3, 0.39], [1.0, 0.7, 0.2, 0.0]], dtype=torch.float64)
alphas = torch.tensor([0.0, 0.5, 0.9, 0.99, 1.0], dtype=torch.float64)
known = torch.eye(4, dtype=torch.float64)[(start * R).argmax()]
mixed = (1 - alphas[:, None]) * start + alphas[:, None] * known  # [5, 4]
J_mixed, entropy, signal = mixed @ R, torch.special.entr(mixed).sum(-1), group_signal(mixed, R, 8)
for row in zip(alphas.tolist(), J_mixed.tolist(), entropy.tolist(), signal.tolist()):
    print("α = %.2f   J = %.3f   entropy = %.3f nats   group signal at G = 8: %.4f" % row)
assert (J_mixed.diff() > 0).all() and (entropy.diff() < 0).all()
assert abs(J_mixed[3] - 0.696) < 5e-4 and abs(entropy[3] - 0.047) < 5e-4
assert abs(signal[3] - 0.0023) < 5e-5
assert abs(J_mixed[-1] - 0.7) < 1e-10 and entropy[-1] == 0 and signal[-1] < 1e-12

# %% [markdown]
# $J$ goes up all the way, from 0.28 to 0.7, and a report that shows only $J$ shows a success. Entropy and group signal go to
# zero, and with them the chance to get from 0.7 to 1.
#
# How would one get there? For a policy of one choice, the slope of $J$ in the logit of answer $a$ is
#
# $$\frac{\partial J}{\partial z_a} = \sum_{a'} \pi_{a'} \big(\mathbb{1}[a = a'] - \pi_a\big) R_{a'} = \pi_a\, (R_a - J), \tag{3.4}$$
#
# since $\partial \pi_{a'} / \partial z_a = \pi_{a'} (\mathbb{1}[a = a'] - \pi_a)$, with $\mathbb{1}[a = a']$ for 1
# where the two answers are the same and 0 elsewhere. An answer is pushed by how much better it is than the average,
# times its own probability. The best answer of all, at probability $10^{-4}$, gets next to no push.

# %%
for p in mixed[:-1]:
    bandit = TabularPolicy(4, 1)
    bandit.logits.data[0] = p.log()
    slopes = exact_gradient(enumerate_tree(bandit, 1), R, bandit.parameters())
    print(f"π of the best {p[0]:.4f}, slope in its logit {slopes[0]:.6f}")
    assert torch.allclose(slopes, p * (R - p @ R), rtol=0, atol=1e-10)

# %% [markdown]
# It is sometimes said that the better answer need only be *sampled* once to be learned. Here are 1000 runs from each start,
# with groups of eight, at a small learning rate for 1000 steps and at a large one for 300. A run has *found* the best answer
# if it wrote it at least once, and *learned* it if it ends with more than half of the mass.

# %%
found_learned = {}
for rate, steps in ((1.0, 1000), (10.0, 300)):
    for alpha, p in zip(alphas[:-1].tolist(), mixed):
        z, generator = p.log().repeat(1000, 1), torch.Generator().manual_seed(0)
        found = torch.zeros(1000, dtype=torch.bool)
        for _ in range(steps):
            drawn = torch.multinomial(z.softmax(1), 8, replacement=True, generator=generator)
            found |= (drawn == 0).any(1)
            advantages = R[drawn] - R[drawn].mean(1, keepdim=True)
            z = z.scatter_add(1, drawn, rate / 8 * advantages)
        learned = z.softmax(1)[:, 0] > 0.5
        found_learned[rate, alpha] = found.double().mean().item(), learned.double().mean().item()
        print(
            f"rate {rate:4}, α = {alpha:.2f}: found by {found.double().mean():5.1%}, learned by {learned.double().mean():5.1%}"
        )
for (rate, alpha), (found, learned) in found_learned.items():
    assert learned + 4 * (0.25 / 1000) ** 0.5 < found  # four standard errors, at most
assert found_learned[1.0, 0.0][0] > 0.95 and found_learned[1.0, 0.0][1] < 0.01
assert found_learned[10.0, 0.99][0] < found_learned[10.0, 0.0][0] and found_learned[10.0, 0.99][1] == 0
assert abs(found_learned[10.0, 0.0][1] - 1 / 20) < 0.03

# %% [markdown]
# At the small rate nearly every run from $\pi_0$ finds the best answer, and none learns it. A find is one push; before
# the next find the second-best answer has had many, and each of them makes the next find rarer. At the large rate a
# lucky early find can win, from $\pi_0$ in about one run of twenty; from inside the trap, at $\alpha = 0.99$, it never
# did. Sampling is necessary for learning, and far from enough.
#
# ## The picture
#
# Seven completions, and the tilt $\theta$ from above. The green outlines are rewards: they stay where they are whatever
# $\theta$ is. The blue bars are probabilities. The solid part is their product, and $J$ is the sum of the solid parts. (The
# group signal in the title is that of groups of eight.)


# %% tags=["export:figures"]
def overlap_figure(thetas, probabilities, rewards, texts: list[str], theta: float = 0.0, trap: float = 0.0) -> Figure:
    """Probabilities against rewards at `theta`, with J and entropy along θ.

    thetas [K]; probabilities [K, L]; rewards [L]. A share `trap` of the mass goes to the completion with the largest π·R.
    """
    known = torch.eye(len(rewards), dtype=probabilities.dtype)[(probabilities * rewards).argmax(1)]
    mixed = (1 - trap) * probabilities + trap * known
    now = (thetas - theta).abs().argmin()
    fig, (bars, *curves) = new_figure(1, 3, height=3.3, width_ratios=[2.2, 1, 1])
    fig.set_layout_engine(None)  # half the drawing time
    fig.subplots_adjust(left=0.06, right=0.98, bottom=0.15, top=0.87, wspace=0.3)
    _overlap(bars, mixed[now], rewards, texts)
    signal = group_signal(mixed[now], rewards, 8)
    bars.set_title(f"J = Σ π·R = {mixed[now] @ rewards:.3f},  group signal {signal:.4f}")
    for ax, title, values, color, top in (
        (curves[0], "J", mixed @ rewards, "reward", 1.05),
        (curves[1], "entropy in nats", torch.special.entr(mixed).sum(1), "policy", math.log(len(rewards))),
    ):
        ax.plot(thetas, values, color=COLORS[color], lw=2)
        ax.plot(thetas[now], values[now], "o", color="black", ms=7)
        ax.set(title=title, xlabel="θ", ylim=(-0.03, top), xlim=(thetas[0], thetas[-1]))
    return fig


def _overlap(ax, probabilities, rewards, texts):
    x = range(len(texts))
    ax.bar(x, rewards, width=0.86, fill=False, edgecolor=COLORS["reward"], lw=1.5)
    ax.bar(x, probabilities, width=0.5, color=COLORS["policy"], alpha=0.3)
    ax.bar(x, probabilities * rewards, width=0.5, color=COLORS["policy"])
    ax.set_xticks(x, texts)
    ax.set(ylim=(0, 1.16), xlabel="completion")
    for place, (text, color) in enumerate((("outlines: R", "reward"), ("bars: π,  solid part: π·R", "policy"))):
        ax.text(0.01 + 0.31 * place, 0.99, text, color=COLORS[color], transform=ax.transAxes, va="top", weight="bold")


# %%
thetas = torch.linspace(-2, 6, 81, dtype=torch.float64)
family = []
for value in thetas:
    tilted = enumerate_tree(lambda prefixes: policy(prefixes) + value * tilt, 2, 0)
    family.append(leaf_probabilities(tilted).detach())
family = torch.stack(family)  # [81, 7]
known = [texts[i] for i in (family * rewards).argmax(1)]  # the completion that contributes most to J, for each θ
changes = [round(thetas[i].item(), 1) for i in range(1, len(known)) if known[i] != known[i - 1]]
print(f"J is largest at θ = {thetas[(family @ rewards).argmax()]:.1f}")
print(f"{known[0]} contributes most below θ = {changes[0]}, then {known[40]}, and from θ = {changes[1]} on {known[-1]}")
assert [known[0], known[40], known[-1]] == ["aa", "ba", "bb"] and len(changes) == 2

show(
    overlap_figure(thetas, family, rewards, texts, theta=2.0),
    caption="J is the overlap of what the policy writes and what the checker likes. θ moves the blue bars only.",
    alt="Left: seven completions, each with a green outline as high as its reward and a blue bar as high as its "
    "probability, the product filled in. Middle: J against θ, rising to a maximum near θ = 2.5 and falling after it. "
    "Right: entropy against θ, with a hump at about the same place.",
)
show(
    overlap_figure(thetas, family, rewards, texts, theta=0.0, trap=0.99),
    caption="The greedy trap at θ = 0: J is 0.7, hardly anything else is ever written, and θ no longer moves anything.",
    alt="The same three panels with nearly all probability on aa, whose reward is 0.7. J is a flat 0.7 up to θ = 1.6, "
    "then 1 where ba is the best known, then 0.3 where bb is; entropy is flat and close to zero.",
)

# %% [markdown]
# Now move the sliders. With the trap at 0, follow the dot over the hump of $J$ and watch the outlines stand still. Then push
# the trap to 0.99 and move $\theta$ again: up to $\theta \approx 1.6$ nothing happens any more. Where `ba` contributes most to $J$
# the same push is no trap, and beyond $\theta \approx 5.2$ it is a worse one, onto `bb`. It depends on what was known when the
# mass was moved.

# %%
explore(
    lambda theta, trap: overlap_figure(thetas, family, rewards, texts, theta, trap),
    theta=widgets.FloatSlider(
        value=0, min=-2, max=6, step=0.1, description="tilt θ towards b", style={"description_width": "initial"}
    ),
    trap=widgets.FloatSlider(
        value=0,
        min=0,
        max=0.99,
        step=0.01,
        description="greedy trap: mass moved",
        style={"description_width": "initial"},
    ),
)

# %% [markdown]
# ## Exercises
#
# **1. Predict, then run.** A prompt is solved with probability 0.5, and scored 0 or 1. What is the group signal at $G = 8$? And
# does a prompt that is solved nine times out of ten have more of it, or less?

# %% tags=["exercise"]
signal_at_half = None  # your number
more_at_nine_tenths = None  # True or False

# %% tags=["solution"]
signal_at_half = 7 / 8 * 0.25  # Var[R] = p (1 - p)
more_at_nine_tenths = False

# %% tags=["check"]
import torch
from lmrl.objective import group_signal

half, nine_tenths = group_signal(torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([1.0, 0.0]), 8).tolist()
assert None not in (signal_at_half, more_at_nine_tenths), "write your answers first"
assert abs(signal_at_half - half) < 1e-3, "not this number; equation 3.3 has the variance of a coin in it"
assert more_at_nine_tenths == (nine_tenths > half)

# %% [markdown]
# **2. How many samples?** Write a function that says how many completions have to be drawn so that the standard error of
# $\hat J$ is at most a given number. It may look at the whole tree.

# %% tags=["exercise"]
from lmrl.tree import expectation


def samples_needed(tree, rewards, standard_error):
    """The smallest N, at least 2, for which the standard deviation of the mean of N rewards is at most this."""
    raise NotImplementedError


# %% tags=["solution"]
import math

from lmrl.tree import expectation


def samples_needed(tree, rewards, standard_error):
    """The smallest N, at least 2, for which the standard deviation of the mean of N rewards is at most this."""
    J = expectation(tree, rewards)
    variance = expectation(tree, (rewards - J).square()).item()
    return max(2, math.ceil(variance / standard_error**2))


# %% tags=["check"]
import torch
from lmrl.objective import monte_carlo, sample_leaves
from lmrl.tree import TabularPolicy, enumerate_tree, leaf_probabilities

a_tree = enumerate_tree(TabularPolicy(3, 3, seed=0), 3, eos_id=0)
R = torch.linspace(0, 1, len(a_tree.ids), dtype=torch.float64)
p = leaf_probabilities(a_tree).detach()
deviation = (p @ R**2 - (p @ R) ** 2).sqrt().item()
for goal in (0.2, 0.03, 0.004):
    N = samples_needed(a_tree, R, goal)
    assert deviation / N**0.5 <= goal, f"the mean of {N} rewards still has a deviation of {deviation / N**0.5:.4f}"
    assert N == 2 or deviation / (N - 1) ** 0.5 > goal, f"{N - 1} would have been enough"
drawn = sample_leaves(a_tree, N, torch.Generator().manual_seed(0))
assert abs(monte_carlo(R[drawn]).standard_error / goal - 1) < 0.05  # what a user would see

# %% [markdown]
# **3. Find the bug.** The checker is slow, and the same completion is often sampled more than once. So somebody keeps the
# scores in a dictionary, and reports the mean of what is in there. Every score is right. Hold the reported mean against $J$,
# over all groups of three that could be drawn, and repair it so that each text is still scored only once.


# %% tags=["exercise"]
def mean_reward(texts, checker):
    """The average reward of the sampled texts; the checker is called once for each different text."""
    scores = {}
    for text in texts:
        if text not in scores:
            scores[text] = checker(text)
    return sum(scores.values()) / len(scores)


# %% tags=["solution"]
def mean_reward(texts, checker):
    """The average reward of the sampled texts; the checker is called once for each different text."""
    scores = {}
    for text in texts:
        if text not in scores:
            scores[text] = checker(text)
    return sum(scores[text] for text in texts) / len(texts)  # a text counts as often as it was written


# %% tags=["check"]
import itertools

import torch
from lmrl.objective import leaf_rewards
from lmrl.tree import TabularPolicy, completions, enumerate_tree, expectation, leaf_probabilities

a_tree = enumerate_tree(TabularPolicy(2, 2, seed=0), 2, eos_id=0)
answers, p = [tuple(ids) for ids in completions(a_tree)], leaf_probabilities(a_tree).tolist()
J = expectation(a_tree, leaf_rewards(a_tree, lambda ids: float(sum(ids)))).item()
reported = 0.0
for group in itertools.product(range(len(p)), repeat=3):
    scored = []
    mean = mean_reward([answers[i] for i in group], lambda text: scored.append(text) or float(sum(text)))
    reported += p[group[0]] * p[group[1]] * p[group[2]] * mean
    assert len(scored) == len(set(group)), "score each text once"
assert abs(reported - J) < 1e-10, f"the average report is {reported:.4f}, and J is {J:.4f}"

# %% [markdown]
# ## What is still missing
#
# $J$ can be estimated from samples, but not yet raised: its parameters are in the sampling, where no derivative reaches, and
# section 4 gets them out. That $J$ can rise while the ability to learn goes is only shown here; section 9 measures it during
# training and holds it up.
