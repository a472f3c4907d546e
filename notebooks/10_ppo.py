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
# # 10. PPO
#
# Writing completions costs far more time than a gradient step, so one would like to take several steps from each batch.
# After the first of them the batch was written by one policy and another one is being trained. What of the estimate is
# still true, what can be corrected, and when should one stop?
#
# Section 9 answered the last question with a limit on the KL, and a matrix to be inverted at every step. This section
# arrives at what is used in its place.
#
# Names:
#
# - $\pi_{\text{old}}$, the policy that wrote the batch; $\pi_\theta$, the policy being trained, which starts equal to it;
# - $s_t$ and $a_t$, the state (prompt and tokens so far) and the token at position $t$ of a completion;
# - $A_t$, the advantage of token $t$: how much better the outcome was than expected (sections 6 and 7). It is a number
#   computed once from the batch, positive for a token to be made likelier, negative for the opposite.

# %%
import math

import ipywidgets as widgets
import torch
import transformers
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.policy import addition_problems, length_mask, pad_left, sample, token_logprobs, warm_start_folder
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    flat_gradient,
    leaf_probabilities,
    row_gradients,
    sequence_entropy,
    sequence_kl,
    terminal_returns,
    visit_probabilities,
)
from lmrl.trust_region import entropy, kl_exact, kl_k3, log_ratio
from lmrl.values import value_terms
from lmrl.variance import leaf_moments

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# ## The correction
#
# Take one state. We want an average of some quantity $f(a)$ over tokens from $\pi_\theta$, and have tokens from
# $\pi_{\text{old}}$. Multiply and divide by $\pi_{\text{old}}(a)$:
#
# $$\mathbb{E}_{a \sim \pi_\theta}[f(a)] = \sum_a \pi_{\text{old}}(a)\,\frac{\pi_\theta(a)}{\pi_{\text{old}}(a)}\,f(a)
# = \mathbb{E}_{a \sim \pi_{\text{old}}}\big[r(a)\, f(a)\big], \qquad
# r(a) = \frac{\pi_\theta(a)}{\pi_{\text{old}}(a)} .$$
#
# The weight $r$ is the **importance ratio**. A token that the new policy likes twice as much counts twice. In code it is
# the exponential of a difference of log-probabilities, one for each token.


# %% tags=["export"]
def importance_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """r = π(a) / π_old(a) of tokens that π_old sampled: two [B, T] -> [B, T], at least float32 (float64 stays).

    One ratio per token, and exactly 1 where `counts`, bool [B, T], is False. `old_logprobs` carries no gradient. Raises
    ValueError if the shapes differ. Section 10.
    """
    difference = log_ratio(logprobs, old_logprobs)
    return (difference if counts is None else torch.where(counts, difference, 0.0)).exp()


# %% [markdown]
# **Claim 10.1.** Two consequences. With $f = 1$: under $\pi_{\text{old}}$ the ratio has mean 1, wherever $\theta$ has
# gone. With $f = A$ the average $L(\theta) = \mathbb{E}_{\pi_{\text{old}}}[r\,A]$, the **surrogate**, has at
# $\theta_{\text{old}}$ the gradient
#
# $$\nabla L = \mathbb{E}_{\pi_{\text{old}}}\!\left[\frac{\nabla \pi_\theta}{\pi_{\text{old}}} A\right]
# = \mathbb{E}_{\pi_{\text{old}}}\big[A\,\nabla \log \pi_\theta\big],$$
#
# which is the policy gradient of section 4: $\nabla\pi = \pi\,\nabla\log\pi$, and $r = 1$ there. So the first step of
# several is an ordinary one. Exactly, with five tokens and their rewards:

# %%
old = torch.tensor([1.0, 0.4, -0.3, 0.0, 2.0], dtype=torch.float64)
reward = torch.tensor([0.0, 1.0, 0.3, 0.0, 0.5], dtype=torch.float64)
old_probs, old_logprobs = old.softmax(-1), old.log_softmax(-1)
advantage = reward - (old_probs * reward).sum()

theta = old.clone().requires_grad_()
surrogate = (old_probs * importance_ratio(theta.log_softmax(-1), old_logprobs) * advantage).sum()
(gradient,) = torch.autograd.grad(surrogate, theta)
(policy_gradient,) = torch.autograd.grad((theta.softmax(-1) * reward).sum(), theta)
print("∇L at θ_old", [round(g, 4) for g in gradient.tolist()], "  ∇J", [round(g, 4) for g in policy_gradient.tolist()])
assert (gradient - policy_gradient).abs().max() < 1e-10

moved = old + torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0], dtype=torch.float64)
ratio = importance_ratio(moved.log_softmax(-1), old_logprobs)
mean = (old_probs * ratio).sum()
print("ratios after a large move", [round(r, 3) for r in ratio.tolist()], f"  mean under π_old {mean:.10f}")
assert abs(mean - 1) < 1e-10
assert abs((old_probs * ratio * reward).sum() - (moved.softmax(-1) * reward).sum()) < 1e-10

# %% [markdown]
# For a single token the correction is exact at any distance. For a completion it is not, and here the usual account is
# loose. A ratio per token corrects which token was chosen in a state. It does not correct *which states were visited*:
# the prefixes are still those that $\pi_{\text{old}}$ writes. The surrogate
# $L(\theta) = \mathbb{E}_{\pi_{\text{old}}}\big[\sum_t r_t A_t\big]$ is that of section 9, now written as an average over
# samples that a trainer has. On the tree both sides can be computed: the change of the expected reward $J$ when $\theta$
# moves away from $\theta_{\text{old}}$, and the change of the surrogate.

# %%
policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
tree = enumerate_tree(policy, max_length=3, eos_id=0)
rewards = (tree.ids == 1).sum(-1).double()  # the number of times that token 1 occurs
advantages = exact_values(tree, rewards).a[tree.states, tree.ids]
start, direction = policy.logits.detach().clone(), TabularPolicy(3, 3, seed=1).logits.detach()
gaps = []
for distance in (0.0, 0.1, 0.2, 0.4):
    policy.logits.data = start + distance * direction
    moved_tree = enumerate_tree(policy, max_length=3, eos_id=0)
    ratio = importance_ratio(moved_tree.logprobs, tree.logprobs.detach())
    terms = torch.where(tree.mask, (ratio - 1) * advantages, 0.0).sum(-1)
    change = (expectation(moved_tree, rewards) - expectation(tree, rewards)).item()
    gaps.append(abs(change - expectation(tree, terms).item()))
    print(f"moved by {distance}: J changes by {change:+.5f}, the surrogate by {expectation(tree, terms).item():+.5f}")
    if distance == 0:
        at_old = flat_gradient((tree.logprobs.sum(-1).exp().detach() * terms).sum(), policy.parameters())
        exact = flat_gradient(expectation(moved_tree, rewards), policy.parameters())
        assert (at_old - exact).abs().max() < 1e-10
print("gap, halving the distance twice:", [f"{gap:.6f}" for gap in reversed(gaps)])
assert gaps[0] < 1e-10 < gaps[1] and 3 < gaps[2] / gaps[1] < 5 and 3 < gaps[3] / gaps[2] < 5

# %% [markdown]
# At $\theta_{\text{old}}$ the two gradients are equal. Away from it the gap grows with the square of the distance: four
# times for twice the way. Near enough, the surrogate is right; that is section 9's reason for a trust region.
#
# Multiplying the ratios of all tokens would correct the states as well: it is the ratio of whole completions, and then
# the estimate is exact. Its price is variance. Section 5's instrument gives both, for three estimators of $\nabla J(\theta)$
# that use one completion of $\pi_{\text{old}}$ with up to five tokens: no ratio at all, a ratio per token, and the product.
# (The first two weigh a token by its advantage; the product weighs the completion by $R - J_{\text{old}}$, which is noisier
# from the start.)

# %%
longer = TabularPolicy(vocab_size=3, max_length=5, seed=0)
old_tree = enumerate_tree(longer, max_length=5, eos_id=0)
returns = (old_tree.ids == 1).sum(-1).double()
weights = exact_values(old_tree, returns).a[old_tree.states, old_tree.ids]
centred = (returns - expectation(old_tree, returns)).detach()
origin, direction = longer.logits.detach().clone(), TabularPolicy(3, 5, seed=1).logits.detach()
found = {}
for distance in (0.0, 0.4, 1.0):
    longer.logits.data = origin + distance * direction
    now = enumerate_tree(longer, max_length=5, eos_id=0)
    target = exact_gradient(now, returns, longer.parameters())
    token_scores = torch.stack([row_gradients(column, longer.parameters()) for column in now.logprobs.unbind(1)], 1)
    ratio = torch.where(old_tree.mask, importance_ratio(now.logprobs, old_tree.logprobs), 1.0).detach()  # [L, T]
    estimates = {
        "no ratio": (weights[..., None] * token_scores).sum(1),
        "per token": ((ratio * weights)[..., None] * token_scores).sum(1),
        "product": (ratio.prod(1) * centred)[:, None] * token_scores.sum(1),
    }
    for name, table in estimates.items():
        moments = found[name, distance] = leaf_moments(old_tree, table, target)
        bias = moments.bias.norm() / target.norm()
        print(f"moved by {distance}, {name:9}: bias {bias:5.1%} of ‖∇J‖, variance {moments.variance:6.2f}")
        assert (bias < 1e-10) == (name == "product" or distance == 0)
assert found["per token", 1.0].bias.norm() < 0.8 * found["no ratio", 1.0].bias.norm()
growth = {name: found[name, 1.0].variance / found[name, 0.0].variance for name in estimates}
assert growth["product"] > 10 > 2 > growth["per token"]

# %% [markdown]
# The ratio per token removes a part of the bias for little variance; the product removes all of it, and its variance
# explodes, already with five tokens. If one ratio has the second moment $\mathbb{E}[r^2] = 1 + \chi^2$, where $\chi^2$
# is its variance (its mean is 1), the product over $T$ independent tokens has $(1 + \chi^2)^T$. A variance of 0.02 is
# not much:

# %%
chi_squared = 0.02
for length in (1, 10, 100, 1000):
    print(f"T = {length:4}: second moment of the product {(1 + chi_squared) ** length:.3g}")
assert (1 + chi_squared) ** 1000 > 1e8

# %% [markdown]
# ## Where to stop
#
# Maximising $r A$ has no end. A token with $\pi_{\text{old}} = 0.01$ and a positive advantage could be driven to a ratio of
# 100 by a batch in which it may have occurred once. Proximal policy optimisation (PPO, Schulman et al., 2017) stops the
# *reward for moving* at a chosen ratio. With $\epsilon$ below 1 and $\epsilon_{\text{high}}$ (the same number unless
# given), each token contributes
#
# $$\min\Big(r A,\; \mathrm{clip}\big(r,\, 1 - \epsilon,\, 1 + \epsilon_{\text{high}}\big)\, A\Big),$$
#
# which is to be maximised. The $\min$ is more than a clip: of the two values the worse one counts. Going through the
# signs of $A$ gives four regions.
#
# | advantage | ratio | value | gradient | reading |
# |---|---|---|---|---|
# | $A > 0$ | $r \le 1 + \epsilon_{\text{high}}$ | $rA$ | active | a good token, pushed up |
# | $A > 0$ | $r > 1 + \epsilon_{\text{high}}$ | $(1 + \epsilon_{\text{high}})A$ | zero | up as far as one batch may take it |
# | $A < 0$ | $r \ge 1 - \epsilon$ | $rA$ | active | a bad token, pushed down |
# | $A < 0$ | $r < 1 - \epsilon$ | $(1 - \epsilon)A$ | zero | down as far as one batch may take it |
#
# The token is held only on the side towards which its advantage pushes it. Whether a token is clipped therefore depends
# on the sign of $A$; the ratio alone does not say.


# %% tags=["export"]
def clip_bounds(epsilon: float, epsilon_high: float | None = None) -> tuple[float, float]:
    """(1 - epsilon, 1 + epsilon_high); without `epsilon_high`, epsilon on both sides. Section 10.

    Raises ValueError unless 0 < epsilon < 1 and epsilon_high > 0.
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}; choose it above 0 and below 1, for example 0.2")
    if epsilon_high is None:
        epsilon_high = epsilon
    if not epsilon_high > 0:
        raise ValueError(f"epsilon_high is {epsilon_high}; choose it above 0, for example 0.28, or leave it out")
    return 1 - epsilon, 1 + epsilon_high


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float = 0.2, epsilon_high: float | None = None
) -> torch.Tensor:
    """Where the clip holds a token and its gradient is zero: two [B, T] -> bool [B, T].

    Ratio above 1 + epsilon_high and advantage above 0, or ratio below 1 - epsilon and advantage below 0. A token with
    advantage 0 has nothing to hold and is False. Raises ValueError for other shapes and as `clip_bounds`. Section 10.
    """
    if ratio.shape != advantages.shape:
        shapes = f"{list(ratio.shape)} and {list(advantages.shape)}"
        raise ValueError(f"ratio and advantages have the shapes {shapes}; give every token its own advantage, [B, T]")
    low, high = clip_bounds(epsilon, epsilon_high)
    return ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))


# %% [markdown]
# The objective then reads as the table does: the bound where the clip holds, the ratio elsewhere. Written with $\min$ it
# would have the same values, but within rounding of an edge the two arguments can be equal, and automatic
# differentiation would split the gradient between them.


# %% tags=["export"]
def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, epsilon: float = 0.2, epsilon_high: float | None = None
) -> torch.Tensor:
    """min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) per token, to be maximised: two [B, T] -> [B, T].

    The gradient in the ratio is A, and exactly zero where `clipped`. Raises ValueError as `clipped` does.
    Section 10; Schulman et al., Proximal Policy Optimization Algorithms, 2017; epsilon_high: Yu et al., DAPO, 2025.
    """
    low, high = clip_bounds(epsilon, epsilon_high)
    held = clipped(ratio, advantages, epsilon, epsilon_high)
    return torch.where(held, ratio.detach().clamp(low, high), ratio) * advantages


# %%
ratio = torch.linspace(0, 3, 301, dtype=torch.float64).repeat(3, 1)
advantages = torch.tensor([[1.7], [-0.6], [0.0]], dtype=torch.float64).expand_as(ratio)
textbook = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
assert (clipped_surrogate(ratio, advantages, 0.2, 0.28) - textbook).abs().max() < 1e-10

# %% [markdown]
# **Claim 10.2.** One token in each region, with $\epsilon = 0.2$. The loss is minus the objective.

# %%
ratio = torch.tensor([1.5, 1.5, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
loss = -clipped_surrogate(ratio, advantages)
(slope,) = torch.autograd.grad(-loss.sum(), ratio)
is_clipped = clipped(ratio, advantages)
for row in zip(ratio.tolist(), advantages.tolist(), loss.tolist(), slope.tolist(), is_clipped.tolist(), strict=True):
    print("r = %.1f, A = %+.0f: loss %+.1f, slope of the objective %+.0f, clipped %s" % row)
assert torch.allclose(loss.detach(), torch.tensor([-1.2, 1.5, -0.5, 0.8], dtype=torch.float64), rtol=0, atol=1e-10)
assert is_clipped.tolist() == [True, False, False, True] and is_clipped.double().mean() == 0.5
assert slope.tolist() == [0.0, -1.0, 1.0, 0.0]

# %% [markdown]
# At the edges themselves the gradient is still active; one representable number beyond, it is exactly zero.

# %%
for dtype in (torch.float32, torch.float64):
    for numbers in [(1.2, 1.0, 9.0, 0.37), (0.8, 1.0, 0.0, -0.37)]:
        edge, inside, outside, advantage = torch.tensor(numbers, dtype=dtype)
        ratio = torch.stack([torch.nextafter(edge, inside), edge, torch.nextafter(edge, outside)]).requires_grad_()
        advantages = advantage.expand_as(ratio)
        (slope,) = torch.autograd.grad(clipped_surrogate(ratio, advantages).sum(), ratio)
        assert slope.tolist() == [advantage, advantage, 0]
        assert clipped(ratio, advantages).tolist() == [False, False, True]

# %% [markdown]
# **Claim 10.3.** The third and fourth rows of the table leave one side open on purpose. If a token with $A < 0$ has
# become *more* likely, however much more, nothing is clipped and the objective keeps pulling it back. How hard? Its slope
# in the ratio is $A$, the same everywhere. What the network feels is the slope in its log-probability, and since
# $\partial r / \partial \log\pi_\theta = r$, that is $rA$ and grows with the ratio: one runaway token can dominate a
# step.

# %%
logprob = torch.tensor([0.5, 1.3, 4.0, 30.0], dtype=torch.float64).log().requires_grad_()
ratio = importance_ratio(logprob, torch.zeros_like(logprob))
objective = clipped_surrogate(ratio, torch.full_like(ratio, -1.0)).sum()
in_ratio, in_logprob = torch.autograd.grad(objective, [ratio, logprob])
for row in zip(ratio.tolist(), in_ratio.tolist(), in_logprob.tolist(), strict=True):
    print("ratio %4.1f: slope in the ratio %+.0f, in the log-prob %+.1f" % row)
assert in_ratio.tolist() == [0, -1, -1, -1]
assert (in_logprob[1:] + ratio[1:]).abs().max() < 1e-10


# %% tags=["export:figures"]
def four_regions(epsilon: float = 0.2, epsilon_high: float | None = None, signs: tuple = (1.0, -1.0)) -> Figure:
    """The clipped objective and its slopes against the ratio, one column for each advantage in `signs`, +1 or -1."""
    fig, axes = new_figure(2, len(signs), height=4.8, sharex=True, sharey="row", squeeze=False)
    ratio = torch.linspace(0, 2, 801, dtype=torch.float64, requires_grad=True)
    for (top, bottom), advantage in zip(axes.T, signs, strict=True):
        advantages = torch.full_like(ratio, advantage)
        objective = clipped_surrogate(ratio, advantages, epsilon, epsilon_high)
        (slope,) = torch.autograd.grad(objective.sum(), ratio)
        held = clipped(ratio, advantages, epsilon, epsilon_high)
        r = ratio.detach()
        top.plot(r, advantages * r, color=COLORS["reference"], linestyle=":")
        for part, color in ((~held, COLORS["policy"]), (held, COLORS["reference"])):
            top.plot(r[part], objective[part].detach(), color=color, linewidth=2.5)
            bottom.plot(r[part], slope[part], color=color, linewidth=2.5)
            bottom.plot(r[part], (r * slope)[part], color=color, linestyle="--")
        top.set(title=f"A = {advantage:+.0f}", xlim=(0, 2), ylim=(-2.2, 2.2))
        bottom.set(xlabel="ratio r = π / π_old", ylim=(-2.2, 1.6))
        _label_regions(top, bottom, advantage, *clip_bounds(epsilon, epsilon_high))
    axes[0, 0].set_ylabel("objective")
    axes[1, 0].set_ylabel("gradient")
    fig.set_layout_engine(None)  # fixed margins: under a slider the layout would take as long as the drawing
    fig.subplots_adjust(left=0.09, right=0.97, bottom=0.1, top=0.94, wspace=0.1, hspace=0.1)
    return fig


def _label_regions(top, bottom, advantage, low, high):
    if advantage > 0:
        texts = [(0.1, 0.95, "active:\npushed up"), (1.53, high - 0.75, f"held\nabove {high:.3g}")]
        slopes = [(0.05, 1.2, "in the ratio: A"), (0.05, -0.75, "dashed, in\nthe log-prob: r A")]
        edge, zero = high, (high + 0.05, 0.12)
        top.text(1.6, 1.8, "r A", ha="right")
    else:
        texts = [(1.25, -0.9, "active:\npushed down"), (0.03, -low - 0.85, f"held\nbelow {low:.3g}")]
        slopes = [(1.2, -0.8, "in the ratio: A"), (0.05, -2.0, "dashed, in\nthe log-prob: r A")]
        edge, zero = low, (0.05, 0.12)
        top.text(0.35, -0.2, "r A")
    for x, y, text in texts:
        top.text(x, y, text)
    for x, y, text in slopes:
        bottom.text(x, y, text, color=COLORS["policy"], bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    bottom.text(*zero, "exactly 0")
    for panel in (top, bottom):
        panel.axvline(edge, color=COLORS["reference"], linewidth=0.8)


# %%
show(
    four_regions(),
    caption="Each token is held on one side only: the side towards which its advantage pushes it.",
    alt="Four panels. For A = +1 the objective rises with the ratio up to 1.2 and is flat beyond; for A = -1 it is flat "
    "below 0.8 and falls without end beyond. Below, the gradients: A in the ratio, r A in the log-prob, zero where flat.",
)

# %% [markdown]
# Move the sliders. $\epsilon_{\text{high}}$ shifts the edge on the left only, for tokens that are raised; $\epsilon$ shifts
# the one on the right only, for tokens that are lowered.

# %%
explore(
    four_regions,
    epsilon=widgets.FloatSlider(
        value=0.2, min=0.05, max=0.5, step=0.05, description="ε", style={"description_width": "initial"}
    ),
    epsilon_high=widgets.FloatSlider(
        value=0.2, min=0.05, max=0.5, step=0.05, description="ε_high", style={"description_width": "initial"}
    ),
    signs=widgets.ToggleButtons(
        options=[("both", (1.0, -1.0)), ("A > 0", (1.0,)), ("A < 0", (-1.0,))],
        description="sign of A",
        style={"description_width": "initial"},
    ),
)

# %% [markdown]
# ## What the clip buys
#
# Does it matter? Take a single prompt with eight possible answers, which a noisy grader accepts with probabilities from
# 0.3 to 0.7. Twenty batches of sixteen samples; from each batch, a number of gradient steps ("passes"), with the clip and
# without; all of it for 400 seeds.


# %% tags=["demo"]
def train(passes, clip, seeds=400, samples=16, batches=20, learning_rate=1.0):
    """Mean reward and entropy after each batch, two [batches, seeds]."""
    generator = torch.Generator().manual_seed(0)
    accepted = torch.linspace(0.3, 0.7, 8, dtype=torch.float64)
    logits, record = torch.zeros(seeds, 8, dtype=torch.float64), []
    for _ in range(batches):
        answers = torch.multinomial(logits.softmax(-1), samples, True, generator=generator)
        rewards = (torch.rand(seeds, samples, generator=generator, dtype=torch.float64) < accepted[answers]).double()
        advantages = rewards - rewards.mean(1, keepdim=True)
        old_logprobs = logits.log_softmax(-1).gather(1, answers)
        for _ in range(passes):
            logits.requires_grad_()
            ratio = importance_ratio(logits.log_softmax(-1).gather(1, answers), old_logprobs)
            terms = clipped_surrogate(ratio, advantages) if clip else ratio * advantages
            (gradient,) = torch.autograd.grad(terms.mean(1).sum(), logits)
            logits = (logits + learning_rate * gradient).detach()
        record.append((logits.softmax(-1) @ accepted, entropy(logits)))
    return [torch.stack(values) for values in zip(*record)]


# %%
learned = {(passes, clip): train(passes, clip) for passes in (1, 10, 30) for clip in (True, False)}
for (passes, clip), (reward_path, entropy_path) in learned.items():
    final, error = reward_path[-1].mean(), 2 * reward_path[-1].std() / 400**0.5
    print(f"{passes:2} passes, {'clip   ' if clip else 'no clip'}: reward {final:.3f} ± {error:.3f}, ", end="")
    print(f"entropy {entropy_path[-1].mean():.2f} nats")
last = {run: paths[0][-1].mean().item() for run, paths in learned.items()}
assert abs(last[1, True] - last[1, False]) < 1e-10  # one pass: every ratio is 1, nothing to clip
assert last[30, True] > last[30, False] + 0.02 and learned[30, False][1][-1].mean() < 0.3
assert last[10, False] > last[10, True] and abs(last[30, True] - last[10, True]) < 0.02


# %% tags=["export:figures"]
def many_passes(runs: dict[str, tuple], colors: list[str]) -> Figure:
    """Mean reward and entropy against the batch; `runs` maps a label to two [batches, seeds]."""
    fig, axes = new_figure(1, 2, height=3.0)
    for (label, paths), color, line in zip(runs.items(), colors, ("-", "--", ":")):
        for ax, values in zip(axes, paths):
            batch, mean = range(1, len(values) + 1), values.mean(1)
            error = 2 * values.std(1) / values.shape[1] ** 0.5
            ax.fill_between(batch, mean - error, mean + error, color=COLORS[color], alpha=0.25, lw=0)
            ax.plot(batch, mean, line, color=COLORS[color])
            ax.annotate(label, (batch[-1], mean[-1]), xytext=(4, -4), textcoords="offset points", color=COLORS[color])
    for ax, label in zip(axes, ("mean reward", "entropy (nats)")):
        ax.set(xlabel="batches", ylabel=label, xlim=(1, 29), xticks=[1, 5, 10, 15, 20])
    return fig


# %%
show(
    many_passes(
        {"1 pass": learned[1, True], "30 with clip": learned[30, True], "30 without": learned[30, False]},
        ["reference", "policy", "error"],
    ),
    caption="Thirty passes over each batch: without the clip the first batches decide everything, and then it is over.",
    alt="Left: mean reward over twenty batches. Thirty passes without the clip rise at once and stop at 0.59; with the "
    "clip they pass it at 0.63; a single pass is at 0.54. Right: without the clip the entropy is almost gone.",
)

# %% [markdown]
# Without the clip, thirty passes make the policy believe sixteen coin tosses, and then there is no variety left with which
# to find out better. With it the number of passes hardly matters. It is no free gain: at ten passes the run without a
# clip is ahead, because it moves faster and does not yet move too far. The clip is an insurance.

# %% [markdown]
# ## Before the first update
#
# **Claim 10.6.** With a fresh batch $\theta = \theta_{\text{old}}$, so every ratio is 1. In floating point that has to be
# arranged. It is exact if the old log-probabilities *are* the first forward pass, detached from the gradient, and also
# if they come from a second pass over a batch of the same shape with dropout off. Here is section 1's arithmetic policy,
# with a batch that it has sampled.

# %%
folder = warm_start_folder(seed=0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
problems = addition_problems()[1][:64]
prompts = pad_left([tokenizer(problem.prompt).input_ids for problem in problems], tokenizer.pad_token_id)
stop, generator = [tokenizer.eos_token_id], torch.Generator().manual_seed(0)
samples = sample(model, *prompts, max_new_tokens=4, stop_ids=stop, generator=generator)
mask = length_mask(samples.lengths, 4)

logprobs = token_logprobs(model, *prompts, samples.ids)
with torch.no_grad():
    second_pass = token_logprobs(model, *prompts, samples.ids)
assert (importance_ratio(logprobs, logprobs.detach()) == 1).all()
assert (importance_ratio(logprobs, second_pass) == 1).all()

# %% [markdown]
# Everything else is only nearly 1. Three ways to obtain log-probabilities of the same tokens under the same weights, in
# float32: the same pass with four more columns of padding, the numbers that the sampler reported (it decodes token by
# token with a cache), and a pass with dropout left on, at a rate of only 1 %.

# %%
dropout_model = AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.01).train()
wider = torch.nn.functional.pad(prompts[0], (4, 0)), torch.nn.functional.pad(prompts[1], (4, 0))
torch.manual_seed(0)
with torch.no_grad():
    measured = {
        "another padding": token_logprobs(model, *wider, samples.ids),
        "cached decoding": samples.logprobs,
        "dropout 0.01": token_logprobs(dropout_model, *prompts, samples.ids),
    }
furthest = {}
for name, old_logprobs in measured.items():
    ratio = importance_ratio(logprobs.detach(), old_logprobs)[mask]
    furthest[name] = (ratio - 1).abs().max().item()
    outside = ((ratio < 0.8) | (ratio > 1.2)).float().mean()
    print(f"{name}: largest |r - 1| {furthest[name]:.1e}, outside [0.8, 1.2]: {outside:.1%} of the tokens")
assert max(furthest["another padding"], furthest["cached decoding"]) < 1e-4
assert furthest["dropout 0.01"] > 0.2

# %% [markdown]
# Rounding is harmless here: five digits are right. (In bfloat16, and between two engines, it is not; section 14 measures
# that.) Dropout is a different matter. It scores the batch with a network that nobody sampled from, and tokens are
# clipped before anything has been learned. So the old pass and the trained one both run with dropout off.
#
# A ratio of 1 is a number, not a constant: its gradient is $\nabla \log\pi_\theta$, so the first step does move the
# policy. The old log-probabilities must then stay what they were. Were they taken again from the moved policy, every
# ratio would be 1 for ever and the clip would never act.

# %%
old_logprobs = logprobs.detach().clone()
advantages = torch.tensor([1.0, -1.0]).repeat(32)[:, None].expand_as(logprobs)
terms = clipped_surrogate(importance_ratio(logprobs, old_logprobs), advantages)
torch.where(mask, terms, 0.0).sum().backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 3e-5 * parameter.grad
    moved = token_logprobs(model, *prompts, samples.ids)
ratio, is_clipped = importance_ratio(moved, old_logprobs), clipped(importance_ratio(moved, old_logprobs), advantages)
print(f"after one step: ratios from {ratio[mask].min():.3f} to {ratio[mask].max():.3f}, ", end="")
print(f"clip fraction {is_clipped[mask].float().mean():.2f}")
assert (old_logprobs == second_pass).all() and (ratio[mask] != 1).float().mean() > 0.9
assert is_clipped[mask].any() and (importance_ratio(moved, moved) == 1).all()

# %% [markdown]
# Two things to keep apart. The ratio is taken **per token**. Summing the log-probabilities of a completion before the
# exponential gives one ratio for the whole completion, and another algorithm: its tokens are clipped together or not at
# all.

# %%
token_ratios = torch.tensor([1.1, 0.9, 1.5], dtype=torch.float64)
per_token = clipped_surrogate(token_ratios, torch.ones_like(token_ratios)).mean()
whole = clipped_surrogate(token_ratios.prod(), torch.ones((), dtype=torch.float64))
print(f"per token {per_token:.4f}; the product {token_ratios.prod():.3f} is clipped to {whole:.1f}")
assert abs(per_token - 3.2 / 3) < 1e-10 and abs(token_ratios.prod() - 1.485) < 1e-10 and abs(whole - 1.2) < 1e-10

# %% [markdown]
# And the same two log-probabilities measure how far the step went. The samples are $\pi_{\text{old}}$'s, so section 9's
# estimators give $\mathrm{KL}(\pi_{\text{old}} \,\|\, \pi_\theta)$ with the *old* log-probability as the first argument:
# $k_3 = r - 1 - \log r$.

# %%
far = old + torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0], dtype=torch.float64)
k3 = kl_k3(old.log_softmax(-1), far.log_softmax(-1))
ratio = importance_ratio(far.log_softmax(-1), old.log_softmax(-1))
assert (k3 - (ratio - 1 - ratio.log())).abs().max() < 1e-10
assert abs((old_probs * k3).sum() - kl_exact(old, far)) < 1e-10

# %% [markdown]
# ## The critic's term
#
# PPO has a critic (section 7) and trains it on the same batch. Write $V_t$ for its prediction in state $s_t$,
# $V^{\text{old}}_t$ for the prediction made when the batch was written, and $G_t$ for the return that it should have
# predicted (section 8 says which). Squared error, with a clip of its own: the prediction should not leave the range
# $V^{\text{old}}_t \pm c$ in one batch. As with the policy, the worse of two values counts:
#
# $$\ell_t = \tfrac12 \max\Big( (V_t - G_t)^2,\;
# \big(\mathrm{clip}(V_t,\, V^{\text{old}}_t - c,\, V^{\text{old}}_t + c) - G_t\big)^2 \Big).$$
#
# What is clipped is the prediction, not the error.


# %% tags=["export"]
def _value_range(values, old_values, cliprange_value):
    """The values and the two ends of their range, in at least float32."""
    if values.shape != old_values.shape:
        shapes = f"{list(values.shape)} and {list(old_values.shape)}"
        raise ValueError(f"values and old_values have the shapes {shapes}; both must be [B, T]")
    if cliprange_value is None:
        cliprange_value = math.inf
    if not cliprange_value > 0:
        raise ValueError(f"cliprange_value is {cliprange_value}; choose it above 0, or None for no clip")
    dtype = torch.promote_types(torch.promote_types(values.dtype, old_values.dtype), torch.float32)
    old_values = old_values.detach().to(dtype)
    return values.to(dtype), old_values - cliprange_value, old_values + cliprange_value


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, cliprange_value: float | None = 0.2
) -> torch.Tensor:
    """½ max((V - G)², (clip(V, V_old - c, V_old + c) - G)²) per token, to be minimised: three [B, T] -> [B, T].

    `cliprange_value` c has the unit of the reward; None is the plain squared error. The gradient goes to `values` only,
    and is zero where V has left the range on the side of G. At least float32. Raises ValueError for other shapes, and
    unless c > 0. Section 10; the clip is that of the code published with Schulman et al., 2017.
    """
    if returns.shape != values.shape:
        shapes = f"{list(returns.shape)} and {list(values.shape)}"
        raise ValueError(f"returns and values have the shapes {shapes}; give every token its own return, [B, T]")
    values, low, high = _value_range(values, old_values, cliprange_value)
    return torch.maximum(value_terms(values, returns), value_terms(values.clamp(low, high), returns))


# %% [markdown]
# Its metric asks whether the *prediction* has left its range. Asked of the value after clipping, it would be 0 for ever.


# %% tags=["export"]
def value_clipped(values: torch.Tensor, old_values: torch.Tensor, cliprange_value: float | None = 0.2) -> torch.Tensor:
    """Where a prediction has moved further than cliprange_value from the old one: two [B, T] -> bool [B, T].

    Not all of these are without gradient: see `value_loss`, which also names the errors. Section 10.
    """
    values, low, high = _value_range(values, old_values, cliprange_value)
    return (values < low) | (values > high)


# %%
values = torch.tensor([1.0, 0.1, -1.0], dtype=torch.float64, requires_grad=True)
before, returns = torch.zeros_like(values), torch.ones_like(values)
losses = value_loss(values, before, returns)
(slope,) = torch.autograd.grad(losses.sum(), values)
flags = value_clipped(values, before).tolist()
for row in zip(values.tolist(), losses.tolist(), slope.tolist(), flags, strict=True):
    print("old 0, return 1, now %+.1f: loss %.3f, slope %+.1f, out of range %s" % row)
assert torch.allclose(losses, torch.tensor([0.32, 0.405, 2.0], dtype=torch.float64), rtol=0, atol=1e-10)
assert slope.tolist() == [0.0, -0.9, -2.0] and flags == [True, False, True]

# %% [markdown]
# The first prediction is perfect and is charged for it: it got there in one batch. Its gradient is zero. The third left
# the range on the wrong side, and keeps its gradient, as a token with $A < 0$ and a large ratio does.
#
# A trap: $\epsilon$ is a ratio and has no unit, but $c$ is measured in rewards. With rewards around 100 and $c = 0.2$ the
# critic gets no gradient as soon as it has moved by 0.2, and crawls.

# %%
crawling = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
error = value_loss(crawling, torch.zeros(1, dtype=torch.float64), torch.tensor([100.0], dtype=torch.float64))
(slope,) = torch.autograd.grad(error.sum(), crawling)
print(f"predicted 0.3 where 100 is right: loss {error.item():.0f}, slope {slope.item():.0f}")
assert slope.item() == 0

# %% [markdown]
# ## The whole objective
#
# **Claim 10.5.** PPO as it is implemented maximises three terms per token, with the weights $c_V$ (`vf_coef`) and $c_H$
# (`entropy_coef`):
#
# $$\underbrace{\min\big(r_t A_t,\ \mathrm{clip}(r_t)\, A_t\big)}_{\text{raise what went well}}
# \;-\; c_V \underbrace{\ell_t}_{\text{predict better}}
# \;+\; c_H \underbrace{H\big(\pi_\theta(\cdot \mid s_t)\big)}_{\text{stay varied}} ,$$
#
# with $\mathrm{clip}(r_t)$ short for the clip between the two bounds above, and $H$ for section 9's entropy of the next
# token. The loss is minus that, so in a loss the signs are $-,\ +,\ -$. The third term pays for variety, so that the
# collapse of section 9 has its price. Each sign is checked on the tree. There the gradient of every term has an exact
# value that it must hit: the first $\nabla J$; the second $d(s)\,(V(s) - V^\pi(s))$ in the critic's prediction for
# state $s$, which points away from the true value $V^\pi$, so that the minus leads there; the third, in the logits of a state,
# $-\pi(a)\,(\log\pi(a) + H)$ times $d(s)$, which raises the tokens rarer than $e^{-H}$ and lowers the commoner ones.


# %% tags=["demo"]
def per_sample(tree, terms):
    """The sum over a completion's tokens, averaged over the completions that the policy writes; d(s) is held fixed."""
    return (leaf_probabilities(tree).detach() * torch.where(tree.mask, terms, 0.0).sum(-1)).sum()


# %%
policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
tree = enumerate_tree(policy, max_length=3, eos_id=0)
rewards = (tree.ids == 1).sum(-1).double()
true_values, visits = exact_values(tree, rewards), visit_probabilities(tree).detach()
critic = torch.randn(len(visits), generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
parameters = [policy.logits, critic]

predicted = critic[tree.states]
ratio = importance_ratio(tree.logprobs, tree.logprobs.detach())
surrogate = clipped_surrogate(ratio, true_values.a[tree.states, tree.ids])
misprediction = value_loss(predicted, predicted, terminal_returns(rewards, tree.mask))
variety = entropy(tree.log_policy)[tree.states]

vf_coef, entropy_coef = 0.5, 0.01
loss = -per_sample(tree, surrogate - vf_coef * misprediction + entropy_coef * variety)
parts = [flat_gradient(per_sample(tree, term), parameters) for term in (surrogate, misprediction, variety)]
count = policy.logits.numel()
assert (parts[0][:count] - exact_gradient(tree, rewards, [policy.logits])).abs().max() < 1e-10
assert (parts[1][count:] - visits * (critic - true_values.v).detach()).abs().max() < 1e-10
assert parts[0][count:].abs().max() == parts[1][:count].abs().max() == parts[2][count:].abs().max() == 0
combined = parts[0] - vf_coef * parts[1] + entropy_coef * parts[2]
assert (flat_gradient(loss, parameters) + combined).abs().max() < 1e-10

log_policy = tree.log_policy.detach()
by_hand = -visits[:, None] * log_policy.exp() * (log_policy + entropy(log_policy)[:, None])  # [S, V]
visited = parts[2][:count].view(-1, 3).abs().sum(-1) > 0
assert (parts[2][:count].view(-1, 3)[visited] - by_hand).abs().max() < 1e-10

# %% [markdown]
# A step down the loss therefore does three things, and the wrong sign on any term shows at once:

# %%
start, h = policy.logits.detach().clone(), 1e-4
step = -h * flat_gradient(-per_sample(tree, surrogate), [policy.logits]).view_as(start)
policy.logits.data = start + step
gain = expectation(enumerate_tree(policy, 3, eos_id=0), rewards) - expectation(tree, rewards)
step = -h * flat_gradient(-per_sample(tree, variety), [policy.logits]).view_as(start)
policy.logits.data = start + step
spread = (visits * entropy(enumerate_tree(policy, 3, eos_id=0).log_policy)).sum() - per_sample(tree, variety)
policy.logits.data = start
nearer = critic.detach() - h * parts[1][count:]
error = (visits * ((nearer - true_values.v) ** 2 - (critic.detach() - true_values.v) ** 2)).sum()
print(f"J {gain.item():+.1e}, squared error of the critic {error.item():+.1e}, entropy {spread.item():+.1e}")
assert gain > 0 > error and spread > 0

# %% [markdown]
# Two remarks. The bonus counts the entropy of the states that the old policy visits, and does not know that a different
# policy visits others: its gradient is not that of the entropy of whole completions. And it works against the first
# term. In a single state the sum $\sum_a \pi(a) R(a) + c_H H(\pi)$ is largest not at the best token but at $\pi \propto
# e^{R / c_H}$. With rewards of 0 and 1 and $c_H = 0.01$ that is as good as certain; the bonus bites where tokens differ by
# little.

# %%
whole = flat_gradient(sequence_entropy(tree), [policy.logits])
assert (parts[2][:count] - whole).abs().max() > 0.01
R = torch.tensor([0.0, 1.0, 0.3], dtype=torch.float64)
for c in (0.5, 0.01):
    best = (R / c).requires_grad_()
    (flat,) = torch.autograd.grad((best.softmax(-1) * R).sum() + c * entropy(best), best)
    print(f"c_H = {c}: best policy {[round(p, 3) for p in best.softmax(-1).tolist()]}")
    assert flat.abs().max() < 1e-10

# %% [markdown]
# ## The clip is not a trust region
#
# **Claim 10.4.** The clip looks at the ratios of the tokens in the batch. The KL is an average over all tokens, and the
# ones that were not sampled have no ratio. Let the old policy be (.5, .49, .01) and suppose that the batch holds only the
# first two tokens, as a batch of sixty-four tokens does about every second time. Now an update lowers the third logit by
# $K / 0.01$. Both sampled ratios become 1.01. The KL becomes $K$, almost, however large $K$ is:
# $\mathrm{KL} = K + \log\mathbb{E}[e^\Delta] \approx K - 0.01$.

# %%
old_probs = torch.tensor([0.5, 0.49, 0.01], dtype=torch.float64)
print(f"no third token among 64: {0.99**64:.2f}")
for K in (0.1, 1.0, 10.0):
    new = old_probs.log() - torch.tensor([0.0, 0.0, K / 0.01], dtype=torch.float64)
    ratio = importance_ratio(new.log_softmax(-1), old_probs.log())[:2]
    kl, seen = kl_exact(old_probs.log(), new), kl_k3(old_probs.log(), new.log_softmax(-1))[:2].mean()
    held = clipped(ratio, torch.ones(2, dtype=torch.float64)) | clipped(ratio, -torch.ones(2, dtype=torch.float64))
    print(f"K = {K:4}: sampled ratios {ratio[0]:.4f} {ratio[1]:.4f}, KL {kl:.4f}, k3 of the batch {seen:.6f}")
    assert not held.any() and abs(ratio - 1.01).max() < 1e-3
    assert abs(kl - K) < 0.011 and seen < 1e-4

# %% [markdown]
# Note the last column: an estimate of the KL from the same batch does not see it either. It is unbiased, which means that
# the rare batch with the third token would report an enormous value. Stopping the passes when the measured KL is too
# large, as many implementations do, catches the drift of sampled tokens, not this.
#
# What if every ratio stayed inside, sampled or not? Then the KL *is* bounded. It is the mean of $-\log r$ under
# $\pi_{\text{old}}$, the mean of $r$ is 1, and $-\log r$ is convex, so the worst case has all ratios at the two ends:
#
# $$\mathrm{KL} \le -\frac{\epsilon_{\text{high}} \log(1 - \epsilon) + \epsilon \log(1 + \epsilon_{\text{high}})}
# {\epsilon + \epsilon_{\text{high}}},$$
#
# for $\epsilon = 0.2$ on both sides $-\tfrac12 \log 0.96 = 0.0204$ nats. That is per token; a completion adds them up.

# %%
epsilon = 0.2
bound = -0.5 * math.log(1 - epsilon**2)
two = torch.tensor([0.5, 0.5], dtype=torch.float64)
worst = kl_exact(two.log(), (two * torch.tensor([1 - epsilon, 1 + epsilon], dtype=torch.float64)).log())
print(f"bound {bound:.4f}, reached {worst:.4f};  for a thousand tokens {1000 * bound:.0f} nats")
assert abs(bound - 0.0204) < 5e-5 and abs(worst - bound) < 1e-10

generator, tested = torch.Generator().manual_seed(0), 0
shifts = 0.08 * torch.randn(200, *start.shape, generator=generator, dtype=torch.float64)
for shift in shifts:
    policy.logits.data = start + shift
    moved = enumerate_tree(policy, max_length=3, eos_id=0)
    every_ratio = (moved.log_policy - tree.log_policy).exp()
    if ((every_ratio > 1 - epsilon) & (every_ratio < 1 + epsilon)).all():
        tested += 1
        assert sequence_kl(tree, moved) < bound * (leaf_probabilities(tree) * tree.mask.sum(-1)).sum()
policy.logits.data = start
print(f"{tested} of 200 random moves keep every ratio inside; all are within the bound times the mean length")
assert tested > 5

# %% [markdown]
# What the clip does, then: token by sampled token, and only after the edge has been crossed, it takes away the reward
# for moving further. That costs nothing, and keeps most steps short. A limit on the KL it is not.
#
# ## Exercises
#
# **1. Predict, then run.** Six tokens with $\epsilon = 0.2$ and $\epsilon_{\text{high}} = 0.28$. Which of them still have a
# gradient? Write six booleans before you run anything.

# %% tags=["exercise"]
import torch

from lmrl.ppo import clipped_surrogate

ratios = [1.25, 1.30, 1.30, 0.75, 0.75, 0.85]
advantages = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
prediction = None  # [True, False, ...]

# %% tags=["solution"]
import torch

from lmrl.ppo import clipped_surrogate

ratios = [1.25, 1.30, 1.30, 0.75, 0.75, 0.85]
advantages = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
prediction = [True, False, True, True, False, True]

# %% tags=["check"]
r = torch.tensor(ratios, requires_grad=True)
(slope,) = torch.autograd.grad(clipped_surrogate(r, torch.tensor(advantages), 0.2, 0.28).sum(), r)
assert prediction is not None, "write down a prediction first"
assert prediction == (slope != 0).tolist(), f"token by token: {(slope != 0).tolist()}"

# %% [markdown]
# **2. Several steps, one batch.** Write the inner loop of PPO for one state: from samples of the policy with the logits
# `logits`, take `passes` gradient steps of size `learning_rate` that *raise* the mean clipped surrogate. Mind which
# log-probabilities stay fixed.

# %% tags=["exercise"]
import torch

from lmrl.ppo import clipped, clipped_surrogate, importance_ratio


def update(logits, ids, advantages, passes, learning_rate):
    """New logits [V] after `passes` steps from the tokens ids [N] with advantages [N], sampled at `logits` [V]."""
    raise NotImplementedError


# %% tags=["solution"]
import torch

from lmrl.ppo import clipped, clipped_surrogate, importance_ratio


def update(logits, ids, advantages, passes, learning_rate):
    """New logits [V] after `passes` steps from the tokens ids [N] with advantages [N], sampled at `logits` [V]."""
    old_logprobs = logits.log_softmax(-1)[ids]
    for _ in range(passes):
        logits = logits.detach().requires_grad_()
        ratio = importance_ratio(logits.log_softmax(-1)[ids], old_logprobs)
        (gradient,) = torch.autograd.grad(clipped_surrogate(ratio, advantages).mean(), logits)
        logits = logits + learning_rate * gradient
    return logits.detach()


# %% tags=["check"]
begin = torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64)
ids, weights = torch.tensor([0, 1, 1, 2]), torch.tensor([-1.0, 1.0, 0.5, -0.5], dtype=torch.float64)
one, hundred = update(begin, ids, weights, 1, 0.1), update(begin, ids, weights, 100, 0.5)
onehot = torch.nn.functional.one_hot(ids, 3).double()
assert torch.allclose(one, begin + 0.1 * (weights[:, None] * (onehot - begin.softmax(-1))).mean(0), rtol=0, atol=1e-10)
ratio = (hundred.softmax(-1) / begin.softmax(-1))[ids]
assert clipped(ratio, weights).all(), f"after 100 steps every token should be held, but the ratios are {ratio.tolist()}"
assert ratio.max() < 1.6, f"held tokens hardly move on, but the ratios are {ratio.tolist()}"
assert torch.equal(begin, torch.tensor([0.5, 0.0, -0.5], dtype=torch.float64)), "the old logits have been changed"

# %% [markdown]
# **3. Find the bug.** The objective below was written with the sign of $A$ in mind: for $A < 0$ everything is mirrored, so
# the minimum became a maximum. On a fresh batch its gradient is right. The check moves the policy the wrong way first:
# every good token has become rarer, every bad one likelier. Then nothing may be held, and the gradient must be that of
# section 9's exact surrogate $L$, which the tree has without any ratio.

# %% tags=["exercise"]
import torch

from lmrl.ppo import importance_ratio
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_values,
    flat_gradient,
    leaf_probabilities,
    visit_probabilities,
)


def objective(ratio, advantages):
    """The clipped surrogate for ε = 0.2, to be maximised: two [B, T] -> [B, T]."""
    plain, bounded = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
    return torch.where(advantages > 0, torch.minimum(plain, bounded), torch.maximum(plain, bounded))


# %% tags=["solution"]
import torch

from lmrl.ppo import importance_ratio
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_values,
    flat_gradient,
    leaf_probabilities,
    visit_probabilities,
)


def objective(ratio, advantages):
    """The clipped surrogate for ε = 0.2, to be maximised: two [B, T] -> [B, T]."""
    plain, bounded = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
    return torch.minimum(plain, bounded)  # the worse of the two, for either sign


# %% tags=["check"]
for seed in range(3):
    learner = TabularPolicy(3, 2, seed=seed)
    before = enumerate_tree(learner, 2)
    advantage = exact_values(before, (before.ids == 1).sum(-1)).a  # above 0 for token 1, below 0 for the others
    weight, visits = leaf_probabilities(before).detach()[:, None], visit_probabilities(before).detach()[:, None]
    for lowered in (0.0, 1.0):
        learner.logits.data[:, 1] -= lowered
        after = enumerate_tree(learner, 2)
        ratio = importance_ratio(after.logprobs, before.logprobs.detach())
        terms = objective(ratio, advantage[before.states, before.ids])
        found = flat_gradient((weight * terms).sum(), learner.parameters())
        oracle = flat_gradient((visits * after.log_policy.exp() * advantage).sum(), learner.parameters())
        far = (found - oracle).abs().max().item()
        assert far < 1e-10, f"logits of the good token lowered by {lowered}: the gradient is off by {far:.3f}"

# %% [markdown]
# ## What is still missing
#
# These are terms of single tokens; how completions of different lengths are weighed into one loss is section 11. The
# ratio repairs neither the visited states nor a sampler that computes in another precision than the trainer, and the
# clip is no bound on the KL: section 14 counts what each costs.
