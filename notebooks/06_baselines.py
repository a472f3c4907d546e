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
# # 6. Baselines, and why they are free
#
# Section 4 left us with an estimator of $\nabla_\theta J$, the gradient of the expected reward. Sample a completion
# $\tau$ from the policy $\pi_\theta$, score it with $R(\tau)$, and use
#
# $$\hat g = R(\tau)\, s(\tau), \qquad s(\tau) = \nabla_\theta \log \pi_\theta(\tau),$$
#
# where $s(\tau)$ is the score: the direction that makes $\tau$ more likely. Section 5 showed how noisy it is. Can some of
# that noise be removed without paying for more samples?

# %%
import itertools

import torch
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, new_figure, show
from lmrl.reinforce import reinforce_terms
from lmrl.tree import (
    TabularPolicy,
    completions,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    leaf_probabilities,
    row_gradients,
    score_matrix,
)

# %% [markdown]
# ## The constant that rides along
#
# **Claim 6.1.** Five completions score 0.7, 0.9, 0.2, 0.8 and 1.0. All weights are positive, so all five are made more
# likely, the worst one too. Subtract the average, 0.72, and the weights say what one would want them to say: better than
# usual, or worse than usual.
#
# Any number $b$ that is subtracted in this way is called a **baseline**, and what is left is the simplest form of an
# advantage. A reward can be missing: a completion that nobody could grade has a weight of 0, and stays out of the
# average.


# %% tags=["export"]
def subtract_baseline(
    rewards: torch.Tensor, baseline: float | torch.Tensor, graded: torch.Tensor | None = None
) -> torch.Tensor:
    """rewards [B] minus a baseline, a number or [B]; 0 where `graded` [B] is False. At least float32. Section 6."""
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    return (rewards if graded is None else torch.where(graded, rewards, baseline)) - baseline


# %%
five = torch.tensor([0.7, 0.9, 0.2, 0.8, 1.0], dtype=torch.float64)
print("weights before:", five.tolist())
print("weights after: ", [round(a, 10) for a in subtract_baseline(five, five.mean()).tolist()])
assert (five > 0).all()
expected = torch.tensor([-0.02, 0.18, -0.52, 0.08, 0.28], dtype=torch.float64)
assert torch.allclose(subtract_baseline(five, five.mean()), expected, atol=1e-10)

# %% [markdown]
# ## Why it is allowed
#
# What does subtracting $b$ change on average? The extra term is $b\, s(\tau)$, and its mean is
#
# $$\mathbb{E}[b\, \nabla \log \pi_\theta(\tau)] = b \sum_\tau \pi_\theta(\tau) \nabla \log \pi_\theta(\tau)
# = b \sum_\tau \nabla \pi_\theta(\tau) = b\, \nabla \sum_\tau \pi_\theta(\tau) = b\, \nabla 1 = 0. \tag{6.1}$$
#
# The first step takes the constant out, the second is $\pi \nabla \log \pi = \nabla \pi$ from section 4, and the last
# says that probabilities sum to 1 whatever $\theta$ is.
#
# The same three steps work inside one state. Let $b(s)$ be any function of the state $s$, the prefix that a token is
# appended to. Then $\sum_a \pi_\theta(a \mid s)\, b(s)\, \nabla \log \pi_\theta(a \mid s) = 0$ in every state, so every
# token may have a baseline of its own, as long as it was settled before the token was chosen.
#
# **Claim 6.2**, on the tree of a policy with three tokens (`#` stops), three steps, and reward 1 for a text that contains
# `ab`.

# %%
tokens = ["#", "a", "b"]
policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
tree = enumerate_tree(policy, max_length=3, eos_id=0)
texts = ["".join(tokens[i] for i in ids) for ids in completions(tree)]
rewards = torch.tensor([float("ab" in text) for text in texts], dtype=torch.float64)
gradient = exact_gradient(tree, rewards, policy.parameters())

# %% [markdown]
# The mean of the estimator is the average over all leaves of the gradient of each leaf's terms. First a constant
# $b = 0.7$, then a random $b(s)$, a different number in each state.

# %%
constant = subtract_baseline(rewards, 0.7)
random_b = torch.randn(len(tree.depth), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
per_state = rewards[:, None] - random_b[tree.states]
for name, advantages in (("constant", constant), ("of the state", per_state)):
    per_leaf = row_gradients(reinforce_terms(tree.logprobs, advantages).sum(-1), policy.parameters())
    error = (expectation(tree, per_leaf) - gradient).abs().max().item()
    print(f"baseline {name:12}: largest error of the mean {error:.0e}")
    assert error < 1e-10

# %% [markdown]
# What if the baseline looks at the action? Take $b = Q(s, a)$, the expected reward after this very token. It is the best
# guess one could make of $R$, and it removes not only the noise but the gradient itself: the mean of what is left is the
# zero vector.

# %%
values = exact_values(tree, rewards)
per_action = rewards[:, None] - values.q[tree.states, tree.ids]
per_leaf = row_gradients(reinforce_terms(tree.logprobs, per_action).sum(-1), policy.parameters())
mean = expectation(tree, per_leaf)
print(f"‖∇J‖ = {gradient.norm():.4f};  with b = Q(s, a) the mean has norm {mean.norm():.0e}")
assert mean.abs().max() < 1e-10 < gradient.norm()

# %% [markdown]
# ## Which baseline is best?
#
# The mean does not depend on $b$. The variance does. Sum the variances of all components of $\hat g = (R - b)\, s$:
#
# $$\mathrm{Var}(b) = \mathbb{E}\big[(R - b)^2 \|s\|^2\big] - \|\nabla J\|^2
# = \mathbb{E}\big[R^2 \|s\|^2\big] - 2b\, \mathbb{E}\big[R \|s\|^2\big] + b^2\, \mathbb{E}\big[\|s\|^2\big]
# {} - \|\nabla J\|^2. \tag{6.2}$$
#
# This is a parabola in $b$. Its lowest point is a weighted mean of the rewards, where long score vectors count for more:
#
# $$b^* = \frac{\mathbb{E}[R \|s\|^2]}{\mathbb{E}[\|s\|^2]} = J + \frac{\mathrm{Cov}(R, \|s\|^2)}{\mathbb{E}[\|s\|^2]}.
# \tag{6.3}$$


# %% tags=["export"]
def optimal_baseline(
    rewards: torch.Tensor, squared_norms: torch.Tensor, probabilities: torch.Tensor | None = None
) -> torch.Tensor:
    """E[R‖s‖²] / E[‖s‖²], the constant baseline of least total variance (equation 6.3), scalar.

    rewards [N]; squared_norms [N], the squared length of each completion's score; probabilities [N], or None for a
    plain average over samples. Section 6; Greensmith, Bartlett and Baxter 2004.
    """
    weights = squared_norms if probabilities is None else probabilities * squared_norms
    return (weights * rewards).sum() / weights.sum()


# %% [markdown]
# **Claim 6.3.** By the second form of (6.3) the minimum is at the mean reward $J$ exactly when the reward and the squared
# length of the score are uncorrelated, as they are when the two are independent. Three policies show what can happen:
#
# - *independent*: two tokens, of which the second is drawn uniformly and alone decides the reward. How long the score is
#   depends on the first;
# - *ordinary*: the policy from above;
# - *confident*: one token, right in nine cases of ten. The rare failure has by far the longer score.

# %%
independent = TabularPolicy(3, 2, seed=0)
independent.logits.data[1:] = 0
confident = TabularPolicy(2, 1)
confident.logits.data[0] = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
cases = {
    "independent": (independent, enumerate_tree(independent, 2), torch.tensor([0.0, 0.3, 1.0]).double().repeat(3)),
    "ordinary": (policy, tree, rewards),
    "confident": (confident, enumerate_tree(confident, 1), torch.tensor([1.0, 0.0]).double()),
}

# %% [markdown]
# For each, the variance is computed from its definition, on a grid of $b$, and compared with (6.2) and (6.3).

# %%
panels = {}
for name, (case_policy, case_tree, R) in cases.items():
    p = leaf_probabilities(case_tree).detach()
    scores = score_matrix(case_tree, case_policy.parameters())
    squared_norms = scores.square().sum(-1)
    J, best = p @ R, optimal_baseline(R, squared_norms, p)
    b = torch.cat([torch.tensor([0.0, J, best]), torch.linspace(-0.5, 1.5, 81)]).double()
    estimates = (R[:, None, None] - b[:, None]) * scores[:, None]  # [L, 84, P]
    means = (p[:, None, None] * estimates).sum(0)
    variance = (p[:, None, None] * (estimates - means).square()).sum((0, 2))
    panels[name] = (b[3:], variance[3:], dict(zip(("no baseline", "mean reward", "optimum"), zip(b, variance))))
    print(f"{name:11}  J = {J:.3f}  b* = {best:.3f}  variance at 0, J, b*: ", *(f"{v:.4f}" for v in variance[:3]))

    a2, a1, a0 = p @ squared_norms, p @ (R * squared_norms), p @ (R**2 * squared_norms)
    assert torch.allclose(means, means[:1].expand_as(means), atol=1e-10)  # the mean is the same for every b
    assert torch.allclose(variance, a0 - 2 * b * a1 + b**2 * a2 - means[0].square().sum(), atol=1e-10)
    assert torch.isclose(best, J + (a1 - J * a2) / a2, atol=1e-10)
    assert (variance[3:] >= variance[2] - 1e-10).all()
    assert torch.isclose(best, J, atol=1e-10) == (name == "independent")

# %% [markdown]
# The mean reward is the usual choice because it is cheap: the optimum needs the norms of gradients, one completion at a
# time. For the first two policies the mean costs little or nothing. The third is a warning that the article leaves out.
# There the mean reward, 0.9, is a far worse baseline than none at all, and the best is 0.1. The more often a policy is
# right, the more it matters that the score of a rare failure is long.


# %% tags=["export:figures"]
def baseline_figure(panels: dict[str, tuple]) -> Figure:
    """Total variance against the baseline; `panels` maps a title to (b [K], variance [K], {label: (b, variance)})."""
    fig, axes = new_figure(1, len(panels), height=3.4, squeeze=False)
    colors = {"no baseline": "reference", "mean reward": "reward", "optimum": "advantage"}
    places = {"no baseline": (-5, -13, "right"), "mean reward": (-14, 66, "center"), "optimum": (5, -15, "left")}
    for ax, (title, (b, variance, marks)) in zip(axes[0], panels.items()):
        ax.plot(b, variance, color=COLORS["error"], lw=2)
        for label, point in marks.items():
            x, y = map(float, point)
            color, (right, up, align) = COLORS[colors[label]], places[label]
            ax.plot(x, y, "o", ms=10 if label == "mean reward" else 6, color=color)
            line = {"arrowstyle": "-", "color": color, "shrinkB": 5} if up > 20 else None
            style = {"color": color, "ha": align, "fontsize": 9, "arrowprops": line}
            text = label if x == 0 else f"{label} {x:.2f}"
            ax.annotate(text, (x, y), xytext=(right, up), textcoords="offset points", **style)
        ax.set(title=title, xlabel="baseline b (units of the reward)", ylim=(-0.14 * variance.max(), None))
    axes[0, 0].set_ylabel("variance of one sample's gradient")
    return fig


# %%
show(
    baseline_figure({name: panels[name] for name in ("independent", "confident")}),
    caption="Variance is a parabola in b. Its minimum is at the mean reward if score size tells nothing about the reward.",
    alt="Two panels, each with a parabola of gradient variance against the baseline. Dots mark no baseline, the mean "
    "reward and the optimum. On the left the last two coincide at 0.43; on the right the optimum is at 0.10, close to "
    "no baseline, and the mean reward, at 0.90, lies far up the curve.",
)

# %% [markdown]
# ## Groups: a mean for each prompt
#
# The mean reward $J$ is not known; it has to be estimated from the same samples. Sample $G$ completions of one prompt and
# average their rewards. Why of one prompt? A baseline may depend on the state, and the prompt is part of the state. An
# easy prompt's completions should be compared with each other, not with those of a hard one.
#
# So each row of a batch carries a label, `group`, that says which prompt it answers. Rows can come in any order: after a
# shuffle, a row's neighbours are not its group.


# %% tags=["export"]
def _group_sum(values, group):
    """The sum over each row's group, [B]; groups are numbered below B."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def _select(rewards, graded):
    """Rewards in at least float32 with 0 where ungraded, and `graded` made explicit."""
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    graded = torch.ones_like(rewards, dtype=torch.bool) if graded is None else graded
    return torch.where(graded, rewards, 0.0), graded


def group_mean(rewards: torch.Tensor, group: torch.Tensor, graded: torch.Tensor | None = None) -> torch.Tensor:
    """Mean reward of each row's group, [B], over its graded rows; 0 for a group without any.

    rewards [B]; group [B] int64, any labels in any order; graded [B] bool. At least float32. Section 6.
    """
    rewards, graded = _select(rewards, graded)
    _, group = torch.unique(group, return_inverse=True)
    return _group_sum(rewards, group) / _group_sum(graded.to(rewards.dtype), group).clamp(min=1)


# %%
prompt = torch.tensor([0, 1, 0, 1])
four = torch.tensor([1.0, 5.0, 3.0, 5.0])
print("rewards", four.tolist(), "of prompts", prompt.tolist())
print("minus the mean of the prompt:", (four - group_mean(four, prompt)).tolist())
print("minus the mean of the batch: ", (four - four.mean()).tolist())
assert (four - group_mean(four, prompt)).tolist() == [-1, 0, 1, 0]

# %% [markdown]
# ## The mean that includes the sample itself
#
# There is a catch. A group's mean contains the reward of the very sample that it is subtracted from, so it is not
# settled before that sample was drawn, and (6.1) does not cover it. Let $\tau_1, \dots, \tau_G$ be the group, and split
# sample $i$'s own reward off its mean $\bar R$:
#
# $$R_i - \bar R = \Big(1 - \frac1G\Big) \Big(R_i - \frac{1}{G-1} \sum_{j \neq i} R_j\Big). \tag{6.4}$$
#
# The mean of the **others** is independent of sample $i$. It is a legal baseline, called leave-one-out. By (6.4) the
# mean with the sample included gives the same direction, shorter by a factor $1 - 1/G$. The bias is a shorter step, not
# a wrong one.
#
# Three more rules for real batches. If all graded rewards of a group are equal, nothing can be compared, and all
# weights are exactly 0. Equality of the rewards decides it, since in floating point the standard deviation of equal
# numbers need not come out as 0. If only one row could be graded, it has no others, and its weight is 0. And a
# group that consists of one row only is a mistake in the set-up, reported as such.


# %% tags=["export"]
def _numbered(group):
    """Labels [B] replaced by numbers from 0; ValueError for a label that occurs once."""
    labels, numbers, counts = torch.unique(group, return_inverse=True, return_counts=True)
    if (counts == 1).any():
        raise ValueError(
            f"group {labels[counts == 1][0].item()} has one completion: a baseline from the group needs at least two of "
            "the same prompt (num_generations >= 2)"
        )
    return numbers


def _extreme(rewards, group, graded, which):
    """The largest ("amax") or smallest ("amin") graded reward of each row's group, [B]."""
    worst = -torch.inf if which == "amax" else torch.inf
    return torch.full_like(rewards, worst).scatter_reduce(0, group, rewards.masked_fill(~graded, worst), which)[group]


def _centred(rewards, group, graded):
    """Rewards minus the group's mean, 0 where ungraded or tied; the other rows; the group's range; its graded count."""
    rewards, graded = _select(rewards, graded)
    high, low = (_extreme(rewards, group, graded, which) for which in ("amax", "amin"))
    varied = graded & ~(high <= low)  # a NaN reward counts as varied, and so stays visible
    count = _group_sum(graded.to(rewards.dtype), group).clamp(min=1)
    centred = torch.where(varied, rewards - _group_sum(rewards, group) / count, 0.0)
    return centred, varied, torch.where(varied, high - low, 1.0), count


def leave_one_out_advantages(
    rewards: torch.Tensor, group: torch.Tensor, graded: torch.Tensor | None = None
) -> torch.Tensor:
    """Each reward minus the mean of its group's other graded rewards, [B]; unbiased.

    rewards [B]; group [B] int64, any labels in any order; graded [B] bool. Ungraded rows, groups with fewer than two
    graded rows and groups of equal rewards get exactly 0. At least float32. Raises ValueError for a group of one row.
    Section 6; Kool, van Hoof and Welling 2019 (RLOO).
    """
    centred, _, _, count = _centred(rewards, _numbered(group), graded)
    return centred * count / (count - 1).clamp(min=1)


# %% [markdown]
# GRPO, the algorithm that this course ends up training with, also divides by the group's standard deviation, so that the
# weights have the same size whatever units the reward is in. We divide by the population standard deviation,
#
# $$\sigma = \sqrt{\frac1G \sum_{i=1}^G (R_i - \bar R)^2}.$$
#
# Others have $G - 1$ in the place of $G$, which makes all weights smaller by a factor $\sqrt{(G-1)/G}$.


# %% tags=["export"]
def group_advantages(
    rewards: torch.Tensor, group: torch.Tensor, *, scale: str = "group", graded: torch.Tensor | None = None
) -> torch.Tensor:
    """Each reward minus its group's mean, [B]; with scale="group" divided by the group's population standard deviation.

    rewards [B]; group [B] int64, any labels in any order; graded [B] bool. Ungraded rows, groups with fewer than two
    graded rows and groups of equal rewards get exactly 0; nothing is added to the divisor. At least float32. Raises
    ValueError for a group of one row and an unknown scale. Section 6; Shao et al. 2024 (GRPO), Liu et al. 2025
    (scale="none", Dr. GRPO).
    """
    if scale not in ("group", "none"):
        raise ValueError(f'scale is {scale!r}; it must be "group" or "none"')
    group = _numbered(group)
    centred, varied, spread, count = _centred(rewards, group, graded)
    if scale == "none":
        return centred
    unit = centred / spread  # within [-1, 1], so that the squares neither overflow nor vanish
    std = (_group_sum(unit.square(), group) / count).sqrt()
    return unit / torch.where(varied, std, 1.0)


def batch_mean_advantages(rewards: torch.Tensor, graded: torch.Tensor | None = None) -> torch.Tensor:
    """Each reward minus the mean of all graded rewards, [B]: the whole batch as one group. Section 6."""
    one_group = torch.zeros_like(rewards, dtype=torch.int64)
    return group_advantages(rewards, one_group, scale="none", graded=graded)


# %%
one_right = torch.tensor([1.0, 0.0, 0.0, 0.0])
same = torch.zeros(4, dtype=torch.int64)
print("centred       ", group_advantages(one_right, same, scale="none").tolist())
print("leave one out ", [round(a, 4) for a in leave_one_out_advantages(one_right, same).tolist()])
print("divided by std", [round(a, 4) for a in group_advantages(one_right, same).tolist()])
assert torch.allclose(group_advantages(one_right, same), torch.tensor([3.0, -1.0, -1.0, -1.0]) / 3**0.5)

tied = torch.full((8,), 0.1)
naive = (tied - tied.mean()) / tied.std(correction=0)
print("eight equal rewards: std", tied.std(correction=0).item(), " divided anyway", naive.tolist())
assert (naive != 0).all() and (group_advantages(tied, torch.zeros(8, dtype=torch.int64)) == 0).all()

missing = torch.tensor([1.0, 0.0, torch.nan, torch.nan])
graded = torch.tensor([True, True, False, False])
print("two not graded", group_advantages(missing, same, scale="none", graded=graded).tolist())
assert group_advantages(missing, same, scale="none", graded=graded).tolist() == [0.5, -0.5, 0, 0]

# %% [markdown]
# Had the two ungraded completions counted as 0, the weights would be 0.75, −0.25, −0.25, −0.25, and two texts that nobody
# has read would be pushed down.
#
# **Claim 6.4**, exactly. Take a policy with $L = 4$ completions and groups of $G = 3$. All $4^3 = 64$ groups that could
# be drawn are listed, each with its probability, and handed to the functions above as one batch of 64 groups.

# %%
small_policy = TabularPolicy(2, 2, seed=2)
small_tree = enumerate_tree(small_policy, 2)
small_scores = score_matrix(small_tree, small_policy.parameters())
p, G = leaf_probabilities(small_tree).detach(), 3
draws = torch.tensor(list(itertools.product(range(4), repeat=G)))  # [64, G], rows of the tree
labels = torch.arange(len(draws)).repeat_interleave(G)
graded_rewards = torch.tensor([1.0, 0.0, 0.2, 0.7], dtype=torch.float64)
small_gradient = exact_gradient(small_tree, graded_rewards, small_policy.parameters())

means = {}
for name, weigh in {
    "mean of all": lambda r, g: group_advantages(r, g, scale="none"),
    "mean of the others": leave_one_out_advantages,
    "divided by std": group_advantages,
}.items():
    advantages = weigh(graded_rewards[draws].flatten(), labels).view(-1, G)
    estimates = (advantages[..., None] * small_scores[draws]).mean(1)  # [64, P]
    means[name] = p[draws].prod(-1) @ estimates
    cosine = torch.cosine_similarity(means[name], small_gradient, dim=0)
    print(f"{name:18}: length {means[name].norm() / small_gradient.norm():.6f} of ‖∇J‖, cosine {cosine:.6f}")
assert torch.allclose(means["mean of all"], (1 - 1 / G) * small_gradient, atol=1e-10)
assert torch.allclose(means["mean of the others"], small_gradient, atol=1e-10)
batch = torch.rand(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
one_group = torch.zeros(6, dtype=torch.int64)
assert torch.allclose(leave_one_out_advantages(batch, one_group), 6 / 5 * (batch - batch.mean()), atol=1e-10)

# %% [markdown]
# The last line of the output is a warning. Dividing by the standard deviation is not a baseline: the divisor depends on
# the sample's own reward, and (6.1) says nothing about it. With these graded rewards the mean is no longer parallel to
# $\nabla J$. With rewards of 0 and 1 it still is, but its length then depends on how often the prompt is solved, so that
# prompts are weighted against each other. Section 14 takes this apart.

# %%
binary = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
advantages = group_advantages(binary[draws].flatten(), labels).view(-1, G)
binary_mean = p[draws].prod(-1) @ (advantages[..., None] * small_scores[draws]).mean(1)
binary_gradient = exact_gradient(small_tree, binary, small_policy.parameters())
ratio = binary_mean.norm() / binary_gradient.norm()
print(f"rewards of 0 and 1: the mean is {ratio:.4f} ∇J")
assert torch.allclose(binary_mean, ratio * binary_gradient, atol=1e-10)
assert torch.cosine_similarity(means["divided by std"], small_gradient, dim=0) < 1 - 1e-4

# %% [markdown]
# ## What is still missing
#
# Every token of a completion still gets the same weight, although a baseline is allowed to change from state to state;
# the best such baseline is the value of the prefix, which nobody hands us: section 7 defines it and learns it. The
# division by the standard deviation, used by GRPO and left unexplained here, is priced in section 14.
