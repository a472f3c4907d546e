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
# Names:
#
# - $\pi_{\text{old}}$, the policy that wrote the batch; $\pi_\theta$, the policy being trained, which starts equal to it;
# - $s_t$ and $a_t$, the state (prompt and tokens so far) and the token at position $t$ of a completion;
# - $A_t$, the advantage of token $t$: how much better the outcome was than expected (sections 6 and 7). It is a number
#   computed once from the batch, positive for a token to be made likelier, negative for the opposite.

# %%
import torch
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, new_figure, show
from lmrl.policy import build_policy, build_tokenizer
from lmrl.tree import TabularPolicy, enumerate_tree, exact_values, expectation, flat_gradient
from lmrl.trust_region import kl_exact, kl_k3, log_ratio

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
def importance_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """r = π(a) / π_old(a) of tokens that π_old sampled: two [B, T] -> [B, T], at least float32 (float64 stays).

    One ratio per token. `old_logprobs` carries no gradient. Raises ValueError if the shapes differ. Section 10.
    """
    return log_ratio(logprobs, old_logprobs).exp()


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
# the prefixes are still those that $\pi_{\text{old}}$ writes. On section 2's tree both sides can be computed: the change
# of the expected reward $J$ when $\theta$ moves away from $\theta_{\text{old}}$, and what the surrogate
# $L(\theta) = \mathbb{E}_{\pi_{\text{old}}}\big[\sum_t r_t A_t\big]$ says it is.

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
# times for twice the way. Near enough, the surrogate is right; that is section 9's trust region again, for a second
# reason.
#
# Multiplying the ratios of all tokens would correct the states as well. Its price is variance. If one ratio has second
# moment $\mathbb{E}[r^2] = 1 + \chi^2$, the product over $T$ independent tokens has $(1 + \chi^2)^T$:

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
# | $A > 0$ | $r \le 1 + \epsilon_{\text{high}}$ | $rA$ | active | keep raising this token |
# | $A > 0$ | $r > 1 + \epsilon_{\text{high}}$ | $(1 + \epsilon_{\text{high}})A$ | zero | raised enough for this batch |
# | $A < 0$ | $r \ge 1 - \epsilon$ | $rA$ | active | keep lowering it |
# | $A < 0$ | $r < 1 - \epsilon$ | $(1 - \epsilon)A$ | zero | lowered enough for this batch |
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
def four_regions(epsilon: float = 0.2, epsilon_high: float | None = None) -> Figure:
    """The clipped objective and its slopes against the ratio, for a positive and a negative advantage."""
    fig, axes = new_figure(2, 2, height=4.8, sharex=True, sharey="row")
    ratio = torch.linspace(0, 2, 2001, dtype=torch.float64, requires_grad=True)
    for (top, bottom), advantage in zip(axes.T, (1.0, -1.0), strict=True):
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
        top.set(title=f"A = {advantage:+.0f}", xlim=(0, 2))
        bottom.set(xlabel="ratio r = π / π_old")
    return _label_regions(fig, axes, *clip_bounds(epsilon, epsilon_high))


def _label_regions(fig, axes, low, high):
    (up, down), (up_slope, down_slope) = axes
    up.set_ylabel("objective")
    up_slope.set(ylabel="gradient", ylim=(-2.2, 1.6))
    up.text(0.1, 0.95, "active:\nkeep raising")
    up.text(high + 0.05, high - 0.5, f"held above {high:g}")
    up.text(1.55, 1.75, "r A", ha="right")
    down.text(0.05, -low - 0.5, f"held below {low:g}")
    down.text(1.25, -0.9, "active:\nkeep lowering")
    down.text(0.35, -0.2, "r A")
    up_slope.text(0.05, 1.12, "in the ratio: A", color=COLORS["policy"])
    up_slope.text(0.35, 0.1, "in the log-prob: r A", color=COLORS["policy"])
    up_slope.text(high + 0.05, 0.12, "exactly 0")
    down_slope.text(0.05, 0.12, "exactly 0")
    down_slope.text(1.2, -0.85, "in the ratio: A", color=COLORS["policy"])
    down_slope.text(0.85, -2.0, "in the log-prob: r A", color=COLORS["policy"])
    for panel, edge in zip(axes.flat, (high, low, high, low), strict=True):
        panel.axvline(edge, color=COLORS["reference"], linewidth=0.8)
    return fig


# %%
show(
    four_regions(),
    caption="Each token is held on one side only: the side towards which its advantage pushes it.",
    alt="Four panels. For A = +1 the objective rises with the ratio up to 1.2 and is flat beyond; for A = -1 it is flat "
    "below 0.8 and falls without end beyond. Below, the gradients: A in the ratio, r A in the log-prob, zero where flat.",
)

# %% [markdown]
# ## Before the first update
#
# **Claim 10.6.** With a fresh batch $\theta = \theta_{\text{old}}$, so every ratio is 1. In floating point that has to be
# arranged. It is exact if the old log-probabilities *are* the first forward pass, detached from the gradient, and also
# if they come from a second pass over a batch of the same shape with dropout off. With dropout, another padding, or the
# sampler's own log-probabilities they differ in the last digits and more; section 14 measures by how much. Here is a
# transformer, untrained, and a batch of token ids.

# %%
model = build_policy(build_tokenizer())
ids = torch.randint(model.config.vocab_size, (4, 12), generator=torch.Generator().manual_seed(0))
logprobs = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
with torch.no_grad():
    second_pass = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
assert (importance_ratio(logprobs, logprobs.detach()) == 1).all()
assert (importance_ratio(logprobs, second_pass) == 1).all()

# %% [markdown]
# A ratio of 1 is a number, not a constant: its gradient is $\nabla \log\pi_\theta$, so the first step does move the
# policy. The old log-probabilities must then stay what they were. Were they taken again from the moved policy, every
# ratio would be 1 for ever and the clip would never act.

# %%
old_logprobs = logprobs.detach().clone()
advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].expand_as(logprobs)
clipped_surrogate(importance_ratio(logprobs, old_logprobs), advantages).mean().backward()
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 2.0 * parameter.grad
    moved = model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
ratio = importance_ratio(moved, old_logprobs)
print(f"after one step: ratios from {ratio.min():.3f} to {ratio.max():.3f}, ", end="")
print(f"clip fraction {clipped(ratio, advantages).float().mean():.2f}")
assert (old_logprobs == second_pass).all() and (ratio != 1).all()
assert clipped(ratio, advantages).any() and (importance_ratio(moved, moved) == 1).all()

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
# ## What is still missing
#
# These are terms of single tokens; how completions of different lengths are weighed into one loss is section 11. The
# clip is no bound on the KL, and the ratio repairs neither the visited states nor a sampler that computes in another
# precision than the trainer: section 14 counts what each costs.
