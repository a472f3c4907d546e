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
# # 9. Why you cannot take a big step
#
# Sections 4 to 8 estimate the gradient of $J$, the expected reward: which way $\theta$ should move. How long may the
# move be?
#
# In supervised training the data stays what it is, whatever the step does to the model. Here the model wrote the data.
# The gradient was estimated from completions of one policy, and after the step there is another policy, about which
# that estimate says nothing. Two things can go wrong, and they need two different instruments: the **entropy**, which
# says how much variety is left in the samples, and the **KL divergence**, which says how far one policy is from
# another. This section derives both.
#
# Names used throughout:
#
# - $s$, a state: the prompt and the tokens written so far; $a$, a token; $V$, the number of tokens in the vocabulary;
# - $\pi_\theta(a \mid s)$, the probability that the policy with parameters $\theta$ writes $a$ next. In a fixed state
#   it is written $\pi(a)$, and it is the softmax of $V$ numbers, the **logits** $z$;
# - $\pi_{\text{old}}$, the policy that sampled the current batch; $\pi_{\text{ref}}$, the frozen model from which
#   training started;
# - $\delta$, a limit on a KL divergence (section 8's $\delta_t$, with an index, is something else); $\Delta$, a step, a
#   change of the logits or of $\theta$.

# %%
import math

import ipywidgets as widgets
import numpy as np
import torch
from matplotlib.figure import Figure

from lmrl.baselines import group_advantages
from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    flat_gradient,
    leaf_probabilities,
    row_gradients,
    score_matrix,
    sequence_kl,
    visit_probabilities,
)
from lmrl.variance import leaf_moments

# %% [markdown]
# ## Failure one: nothing left to compare
#
# $J$ is largest when all the probability lies on the best completion found so far, and nothing in the policy gradient
# objects to that. How much variety is left is measured by the entropy, the expected surprise of a token, in nats:
#
# $$H(\pi) = -\sum_{a} \pi(a)\,\log \pi(a).$$
#
# It is $\log V$ when all tokens are equally likely and $0$ when one token is certain. A token with probability $0$ (a
# logit of $-\infty$, as a sampler sets it to forbid a token) contributes $0$, the limit of $x \log x$. In code the
# product $0 \cdot (-\infty)$ is NaN, and so is its gradient, so the log-probability is replaced before it is
# multiplied.


# %% tags=["export"]
def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy of softmax(logits) in nats: logits [.., V] -> [..], at least float32 (float64 stays). Section 9.

    A logit of -inf is a token of probability 0; value and gradient stay finite.
    """
    logprobs = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    probs = logprobs.exp()
    return -(probs * logprobs.masked_fill(probs == 0, 0)).sum(-1)


# %%
three_policies = torch.tensor([[0, 0, 0, 0], [9, 0, 0, 0], [0, 0, -math.inf, -math.inf]], requires_grad=True)
print("entropy:", [round(h, 4) for h in entropy(three_policies).tolist()])
assert torch.allclose(entropy(three_policies), torch.tensor([math.log(4), 0.0037, math.log(2)]), atol=1e-4)
entropy(three_policies).sum().backward()
assert three_policies.grad.isfinite().all()

# %% [markdown]
# Why does low entropy stop training? Section 6 compares the $G$ completions of a prompt with each other, and
# completions that are all the same have nothing to be compared with. Take three possible answers with logits
# $c \cdot (2, 1, 0)$ and let $c$ grow, which is what repeated steps towards the first answer do. The probability that
# eight samples are not all the same answer is $1 - \sum_a \pi(a)^8$.

# %%
sharpness = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
logits = sharpness[:, None] * torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
contrast = 1 - (torch.softmax(logits, -1) ** 8).sum(-1)
for row in zip(sharpness.tolist(), entropy(logits).tolist(), contrast.tolist(), strict=True):
    print("c = %.0f   entropy %.4f nats   two different answers among eight: %.4f" % row)
assert (entropy(logits).diff() < 0).all() and (contrast.diff() < 0).all()
assert contrast[0] > 0.9 and contrast[-1] < 0.003

# %% [markdown]
# At $c = 8$ fewer than three groups in a thousand still contain two different answers. The gradient that could undo
# the collapse is gone together with the variety.
#
# **Claim 9.1.** Training does this by itself, and the expected reward does not show it. Take three prompts with two
# possible answers, A and B. A is right for the first two prompts, B for the third. The policy prefers A with log-odds
# $u + 0.3$, $u$ and $u - 0.3$; the preference $u$ is its one parameter, shared by the prompts as a network's weights are.
#
# What could still be found with more tries is measured by **pass@k**, the probability that at least one of $k$ samples
# is right: $1 - (1 - p)^k$ for a prompt that a single sample solves with probability $p$. With $k = 1$ it is $J$.


# %% tags=["demo"]
offsets = torch.tensor([0.3, 0.0, -0.3], dtype=torch.float64)
a_is_right = torch.tensor([True, True, False])


def chance_of_right(u):
    """The probability of the right answer for each prompt: u [.., 1], or [.., 3] with one for each, -> [.., 3]."""
    chance_of_a = torch.sigmoid(u + offsets)
    return torch.where(a_is_right, chance_of_a, 1 - chance_of_a)


def report(u):
    """pass@1, pass@8 and the entropy in nats, averaged over the prompts, [3, ..]."""
    right = chance_of_right(u)
    return torch.stack([right, 1 - (1 - right) ** 8, entropy(torch.stack([right, 1 - right], -1).log())]).mean(-1)


def ascend(u, learning_rate=20.0, steps=8):
    """Exact gradient steps on pass@1; the reports before the first and after each, [steps + 1, 3]."""
    reports = [report(u)]
    for _ in range(steps):
        u.requires_grad_()
        (slope,) = torch.autograd.grad(report(u)[0], u)
        u = (u + learning_rate * slope).detach()
        reports.append(report(u))
    return torch.stack(reports)


# %%
exact = ascend(torch.zeros(1, dtype=torch.float64))
for step, row in enumerate(exact.tolist()):
    print("after %d steps: pass@1 %.3f   pass@8 %.3f   entropy %.3f nats" % (step, *row))
wanted = torch.tensor([[0.550, 0.998, 0.686], [0.662, 0.774, 0.155]], dtype=torch.float64)
assert torch.allclose(exact[[0, -1]], wanted, rtol=0, atol=5e-4)
assert (exact[:, 0].diff() > 0).all() and (exact[:, 1:].diff(dim=0) < 0).all()
assert exact[-1, 0] - exact[4, 0] < 0.005 and exact[4, 1] - exact[-1, 1] > 0.05

# %% [markdown]
# pass@1 is up by a fifth and has stopped moving; pass@8 has lost a fifth, and the entropy is still falling. The policy
# has learned to say A, also where A is wrong: the third prompt was outvoted.
#
# Those were exact gradients. Here are sampled ones: groups of eight for each prompt, centred by section 6, over 400
# seeds.

# %%
seeds, G = 400, 8
generator = torch.Generator().manual_seed(0)
group = torch.arange(3 * seeds).repeat_interleave(G)
u = torch.zeros(seeds, 1, dtype=torch.float64)
sampled, tied = [report(u)], []
for _ in range(8):
    right = chance_of_right(u)[..., None]  # [seeds, 3, 1]
    rewards = (torch.rand(seeds, 3, G, generator=generator, dtype=torch.float64) < right).double()
    advantages = group_advantages(rewards.flatten(), group, scale="none").view_as(rewards)
    score = torch.where(a_is_right[:, None], rewards - right, right - rewards)  # of the answer that was written, in u
    u = u + 20 * (advantages * score).mean((1, 2))[:, None]
    sampled.append(report(u))
    tied.append((advantages == 0).all(-1).double().mean().item())
sampled = torch.stack(sampled)  # [9, 3, seeds]
mean, error = sampled[-1].mean(-1), 2 * sampled[-1].std(-1) / seeds**0.5
for name, m, e in zip(("pass@1", "pass@8", "entropy"), mean.tolist(), error.tolist()):
    print(f"{name} {m:.3f} ± {e:.3f}")
print("groups in which all answers earn the same:", [f"{share:.2f}" for share in tied])
assert mean[0] - error[0] > 0.64 and mean[1] + error[1] < 0.85 and mean[2] + error[2] < 0.25
assert tied[0] < 0.05 and tied[-1] > 0.6


# %% tags=["export:figures"]
def entropy_collapse(exact, sampled) -> Figure:
    """pass@1, pass@8 and entropy against the step: exact [S, 3] as lines, sampled [S, 3, seeds] as quartile bands."""
    fig, (left, right) = new_figure(1, 2, height=2.9)
    places = [(left, "pass@1", "reward", (4.2, 0.60)), (left, "pass@8", "advantage", (4.8, 0.93))]
    for i, (ax, name, color, place) in enumerate([*places, (right, "entropy", "policy", (4.4, 0.42))]):
        low, high = sampled[:, i].quantile(torch.tensor([0.25, 0.75], dtype=sampled.dtype), dim=-1)
        ax.fill_between(range(len(exact)), low, high, color=COLORS[color], alpha=0.25, lw=0)
        ax.plot(exact[:, i], color=COLORS[color], lw=2)
        ax.annotate(name, place, color=COLORS[color])
    left.set(xlabel="gradient steps", ylabel="probability", ylim=(0.5, 1.02))
    right.set(xlabel="gradient steps", ylabel="entropy (nats)", ylim=(0, 0.72))
    return fig


# %%
show(
    entropy_collapse(exact, sampled),
    caption="What one sample earns stops rising while what eight samples can find keeps falling. Band: half of the runs.",
    alt="Left: pass@1 rises from 0.55 to 0.66 and is flat after four steps; pass@8 falls from 1 to 0.77. Right: the "
    "entropy falls from 0.69 to 0.16. Sampled runs follow the exact lines.",
)

# %% [markdown]
# One reservation. Falling entropy does not by itself make pass@8 worse. Here it does because the prompts share $u$ and
# pull it in opposite directions. Give each prompt its own $u$, and the entropy falls as well, but on the right answers:

# %%
apart = ascend(torch.zeros(3, dtype=torch.float64))
print("own parameters: pass@1 %.3f   pass@8 %.3f   entropy %.3f nats" % tuple(apart[-1].tolist()))
assert apart[-1, 1] > apart[0, 1] and apart[-1, 2] < 0.25

# %% [markdown]
# So entropy is a warning, not a verdict. It is logged at every step because it falls before the reward stops.
#
# ## Failure two: a small step in θ can be a large step in π
#
# The other danger is the length of the step. A learning rate bounds how far the parameters move. What has to stay
# valid is the estimate, and that depends on how far the *distribution* moves, measured by the Kullback–Leibler
# divergence from one policy $\pi$ to another, $\pi'$:
#
# $$\mathrm{KL}(\pi \,\|\, \pi') = \sum_a \pi(a)\,\log\frac{\pi(a)}{\pi'(a)} .$$
#
# It is $0$ only if the two are equal, and positive otherwise. It is the average, over tokens that the *first* policy
# writes, of how much more likely the first policy finds them than the second. The order matters: the first argument is
# the one that samples. Tokens that the first never writes contribute nothing; a token that it does write and the second
# cannot makes the sum infinite.


# %% tags=["export"]
def kl_exact(logits: torch.Tensor, ref_logits: torch.Tensor) -> torch.Tensor:
    """KL(softmax(logits) ‖ softmax(ref_logits)) in nats: two [.., V] -> [..], at least float32 (float64 stays).

    A logit of -inf is a token of probability 0. The result is 0 for equal logits, and inf where the first policy has a
    token that the second lacks. Raises ValueError if the shapes differ. Section 9.
    """
    if logits.shape != ref_logits.shape:
        shapes = f"{list(logits.shape)} and {list(ref_logits.shape)}"
        raise ValueError(f"logits have the shapes {shapes}; both must be [.., V] over one vocabulary")
    dtype = torch.promote_types(torch.promote_types(logits.dtype, ref_logits.dtype), torch.float32)
    logprobs = torch.log_softmax(logits, -1, dtype=dtype)
    ref_logprobs = torch.log_softmax(ref_logits, -1, dtype=dtype)
    probs = logprobs.exp()
    never = probs == 0
    return (probs * (logprobs.masked_fill(never, 0) - ref_logprobs.masked_fill(never, 0))).sum(-1)


# %% [markdown]
# **Claim 9.2.** Now two steps of the same length, 1, from one policy over three tokens. The first two tokens are equally likely, the
# third is rare. One step takes from the first token and gives to the second; the other lowers the rare token against
# both.

# %%
old = torch.tensor([0.0, 0.0, -6.0], dtype=torch.float64)
trade = torch.tensor([-1.0, 1.0, 0.0], dtype=torch.float64) / math.sqrt(2)
lower = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64) / math.sqrt(6)
assert abs(trade.norm() - 1) < 1e-12 and abs(lower.norm() - 1) < 1e-12

kl_trade, kl_lower = kl_exact(old, old + trade).item(), kl_exact(old, old + lower).item()
print(f"policy {[round(p, 4) for p in torch.softmax(old, -1).tolist()]}")
print(f"trade between the common tokens: KL {kl_trade:.4f} nats")
print(f"lower the rare token:            KL {kl_lower:.5f} nats, {kl_trade / kl_lower:.0f} times less")
assert kl_trade > 10 * kl_lower
assert kl_exact(old, old + 1).item() < 1e-15  # the same number added to every logit changes nothing

# %% [markdown]
# The reason can be read off exactly. Adding $\Delta(a)$ to the logits turns $\pi(a)$ into
# $\pi(a)\,e^{\Delta(a)} / \mathbb{E}_{\pi}[e^{\Delta}]$, where $\mathbb{E}_\pi$ is the average over $a \sim \pi$.
# Put this into the definition:
#
# $$\mathrm{KL}(\pi \,\|\, \pi_\Delta) = \log \mathbb{E}_{\pi}\!\left[e^{\Delta}\right] - \mathbb{E}_{\pi}[\Delta]
# \;\approx\; \tfrac12\,\mathrm{Var}_{\pi}[\Delta] \quad\text{for small } \Delta .$$
#
# The step counts by its variance *under the policy*: a change to a token that is hardly ever written costs hardly
# anything, a change that splits the common tokens costs the most. The squared length $\sum_a \Delta(a)^2$ counts every
# token alike, which is why it is the wrong ruler.

# %%
for step in (trade, lower):
    probs = torch.softmax(old, -1)
    cumulant = (probs * step.exp()).sum().log() - (probs * step).sum()
    assert abs(cumulant - kl_exact(old, old + step)) < 1e-10
    half_variance = ((probs * step**2).sum() - (probs * step).sum() ** 2) / 2
    print(f"KL {cumulant:.5f}, half the variance {half_variance:.5f}")

# %% [markdown]
# ## The ruler, in general
#
# The parameters of a real policy are not its logits. The formula survives, with another variance. Let $\theta$ move by
# $\Delta$, and expand $\log\pi_{\theta+\Delta}$ in $\mathrm{KL} = -\mathbb{E}_{\pi_\theta}[\log\pi_{\theta+\Delta} -
# \log\pi_\theta]$ to second order:
#
# $$\mathrm{KL}(\pi_\theta \,\|\, \pi_{\theta+\Delta}) \approx -\Delta^\top \mathbb{E}[\nabla\log\pi]
# - \tfrac12\,\Delta^\top\, \mathbb{E}[\nabla^2\log\pi]\, \Delta .$$
#
# The first mean is zero: scores average to zero (section 2). In the second, $\nabla^2 \log\pi = \nabla^2\pi / \pi -
# \nabla\log\pi\,\nabla\log\pi^\top$, and the mean of $\nabla^2\pi/\pi$ is $\nabla^2 \sum \pi = 0$ again. What is left is
# the **Fisher matrix**, the covariance of the score:
#
# $$\mathrm{KL}(\pi_\theta \,\|\, \pi_{\theta+\Delta}) \approx \tfrac12\, \Delta^\top F \Delta, \qquad
# F = \mathbb{E}_{\pi_\theta}\big[\nabla\log\pi\; \nabla\log\pi^\top\big]. \tag{9.1}$$
#
# So $\Delta^\top F \Delta$ is the variance of $\Delta^\top \nabla\log\pi$, which for logits is the variance of $\Delta(a)$.


# %% tags=["export"]
def fisher_matrix(probabilities: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """F = Σ p s sᵀ, [P, P], of N outcomes: probabilities [N] that sum to 1, and their scores ∇log π, [N, P].

    The outcomes can be tokens in one state, or all leaves of a tree (`leaf_probabilities` and `score_matrix`). For small
    P only: the matrix is stored. No gradient flows through it. Section 9, equation 9.1.
    """
    p, scores = probabilities.detach(), scores.detach()
    return scores.T @ (p[:, None] * scores)


# %% [markdown]
# On section 2's tree the outcomes are whole completions. As the KL does, the Fisher matrix then splits into one term for
# each state, weighted by the probability $d(s)$ of visiting it. Inside a state, in the logits, it is
# $\mathrm{diag}(\pi) - \pi\pi^\top$.

# %%
policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
tree = enumerate_tree(policy, max_length=3, eos_id=0)
fisher = fisher_matrix(leaf_probabilities(tree), score_matrix(tree, policy.parameters()))
probs = tree.log_policy.detach().exp()  # [S, V]
in_state = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None, :]  # [S, V, V]
by_state = visit_probabilities(tree).detach()[:, None, None] * in_state
blocks = fisher.view(13, 3, 13, 3)  # 13 rows of the table, some of them behind a stop token and never visited
visited = (blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)).flatten(1).abs().sum(-1) > 0
assert visited.sum() == len(by_state)
assert torch.allclose(torch.block_diag(*by_state), blocks[visited][:, :, visited].reshape(21, 21), rtol=0, atol=1e-10)
print(f"{len(fisher)} parameters, rank {torch.linalg.matrix_rank(fisher, hermitian=True)}: two for each of 7 states")

# %% [markdown]
# The rank is less than the number of parameters, because some changes of $\theta$ do not change the policy at all: a
# constant added to all logits of a state, or logits of a state that is never reached.
#
# **Claim 9.3.** How good is the approximation? If it is right to second order, what it leaves out shrinks with the third
# power of the step. Take one random direction, lengths from $10^{-3}$ to $10^{-1}$, and fit a line through logarithms.

# %%
start = policy.logits.detach().clone()
direction = torch.randn(start.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
direction /= direction.norm()
lengths, left_out = np.logspace(-3, -1, 9), []
for length in lengths:
    policy.logits.data = start + length * direction
    kl = sequence_kl(tree, enumerate_tree(policy, max_length=3, eos_id=0)).item()
    left_out.append(abs(kl - length**2 * (direction.flatten() @ fisher @ direction.flatten()).item() / 2))
policy.logits.data = start
(slope, _), covariance = np.polyfit(np.log(lengths), np.log(left_out), 1, cov=True)
print(f"step {lengths[-1]:.1f}: KL {kl:.2e}, of which left out {left_out[-1]:.1e}")
print(f"slope {slope:.4f} ± {2 * covariance[0, 0] ** 0.5:.4f}")
assert abs(slope - 3) < 0.05

# %% [markdown]
# The exponent is not always 3. The exact expression above continues: the logarithm of $\mathbb{E}[e^\Delta]$ is the sum of
# the cumulants of $\Delta$ under $\pi$, and after half the variance comes a sixth of the third cumulant,
# $\mathbb{E}[(\Delta - \mathbb{E}\Delta)^3]$. If $\Delta$ is distributed symmetrically, as in any step from a uniform
# policy over two tokens, the third cumulant is zero, and the remainder is of fourth order.

# %%
for name, z, step in [
    ("uniform over two", torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)),
    ("(.8, .2)", torch.tensor([0.8, 0.2], dtype=torch.float64).log(), torch.tensor([1.0, -1.0], dtype=torch.float64)),
]:
    p, t = z.softmax(-1), torch.from_numpy(np.logspace(-2, -1, 9))[:, None]
    centred = step - (p * step).sum()
    variance, third = (p * centred**2).sum(), (p * centred**3).sum()
    remainder = (kl_exact(z.expand(9, 2), z + t * step) - t[:, 0] ** 2 * variance / 2).abs()
    slope = np.polyfit(t[:, 0].log().numpy(), remainder.log().numpy(), 1)[0]
    print(f"{name}: third cumulant {third:+.3f}, slope {slope:.3f}")
    assert abs(slope - (4 if abs(third) < 1e-12 else 3)) < 0.1

# %% [markdown]
# The picture shows it for three tokens. Each panel draws the same three policies. On the left, their logits (adding a
# constant to all three changes nothing, so two dimensions are enough); on the right, their probabilities, one corner
# per token. Solid: all steps of one length in the logits. Dashed: all steps of one KL. Dotted: the ellipse
# $\tfrac12\Delta^\top F \Delta = \delta$ that approximates it.


# %% tags=["export:figures"]
def equal_steps(length: float = 0.8, delta: float = 0.02) -> Figure:
    """Three policies over three tokens: steps of one length in the logits, steps of one KL(old || new) = delta, and the
    ellipse that the Fisher matrix makes of the latter."""
    plane = torch.tensor([[-1, 1, 0], [-1, -1, 2]], dtype=torch.float64) / torch.tensor([[2.0], [6.0]]).sqrt()
    corners = torch.tensor([[0, 0], [1, 0], [0.5, 0.75**0.5]], dtype=torch.float64)
    angles = torch.linspace(0, 2 * math.pi, 181, dtype=torch.float64)[:, None]
    rays = torch.cat([angles.cos(), angles.sin()], 1)
    fig, (left, right) = new_figure(1, 2, height=3.5)
    for centre in torch.tensor([[-0.6, 1.0], [2.8, -0.3], [-0.4, -3.6]], dtype=torch.float64):
        probs = torch.softmax(centre @ plane, -1)
        fisher = fisher_matrix(probs, (torch.eye(3, dtype=torch.float64) - probs) @ plane.T)
        ellipse = (2 * delta / (rays @ fisher * rays).sum(1, keepdim=True)).sqrt()
        region = _kl_radius(centre @ plane, rays @ plane, delta)
        for radius, color, line in [(length, "policy", "-"), (region, "reference", "--"), (ellipse, "error", ":")]:
            points, style = centre + radius * rays, {"color": COLORS[color], "linestyle": line, "lw": 1.3}
            left.plot(*points.T, **style)
            right.plot(*(torch.softmax(points @ plane, -1) @ corners).T, **style)
        left.plot(*centre, "o", color="black", markersize=3)
        right.plot(*(probs @ corners), "o", color="black", markersize=3)
    return _label_equal_steps(fig, left, right, corners, length, delta)


def _kl_radius(logits, rays, delta):
    """How far one can go from logits [V] along each of rays [N, V] until KL(old || new) is delta, [N, 1]."""
    low, high = torch.zeros(len(rays), 1, dtype=torch.float64), torch.full((len(rays), 1), 100.0, dtype=torch.float64)
    for _ in range(40):
        middle = (low + high) / 2
        outside = kl_exact(logits.expand_as(rays), logits + middle * rays)[:, None] > delta
        low, high = torch.where(outside, low, middle), torch.where(outside, middle, high)
    return low


def _label_equal_steps(fig, left, right, corners, length, delta):
    left.set(title="logits", xlim=(-2.6, 7.6), ylim=(-7.6, 2.6), xlabel="token 2 against token 1")
    left.set_ylabel("token 3 against both")
    left.set_aspect("equal")
    for y, label, color, line in [
        (-5.0, f"length {length:.2g}", "policy", "-"),
        (-6.0, f"KL {delta:.2g} nats", "reference", "--"),
        (-7.0, f"½ ΔᵀFΔ = {delta:.2g}", "error", ":"),
    ]:
        left.plot([1.8, 3.2], [y, y], color=COLORS[color], linestyle=line)
        left.text(3.5, y, label, color=COLORS[color], va="center", fontsize=9)
    right.plot(*corners[[0, 1, 2, 0]].T, color="black", linewidth=0.8)
    for token, (x, y) in enumerate(corners.tolist(), start=1):
        right.text(x, y + (0.02 if y else -0.03), f"token {token}", ha="center", va="bottom" if y else "top")
    right.set(title="probabilities", xlim=(-0.1, 1.1), ylim=(-0.12, 1))
    right.set_aspect("equal")
    right.axis("off")
    fig.set_layout_engine(None)  # fixed margins: under a slider the layout would take as long as the drawing
    fig.subplots_adjust(left=0.08, right=0.99, bottom=0.15, top=0.92, wspace=0.05)
    return fig


# %%
show(
    equal_steps(),
    caption="Equal circles in the logits are very unequal steps of the policy; a KL budget gives steps of like size.",
    alt="Left: three equal circles and three very unequal dashed regions in the plane of logits, with dotted ellipses "
    "close to them. Right: the same in the triangle of probabilities, where the circles become one large, one small and "
    "one flat region.",
)

# %% [markdown]
# Move the sliders. A longer circle grows on the left and is stretched out of shape on the right. With a larger budget the
# dashed regions leave their ellipses: the second order is no longer enough.

# %%
explore(
    equal_steps,
    length=widgets.FloatSlider(
        value=0.8, min=0.2, max=1.5, step=0.1, description="length of the step", style={"description_width": "initial"}
    ),
    delta=widgets.FloatLogSlider(
        value=0.02, base=10, min=-2.5, max=-1, step=0.05, description="KL δ", style={"description_width": "initial"}
    ),
)

# %% [markdown]
# ## What the budget is for
#
# Between two batches nothing is sampled, so the true change of $J$ is not known while $\theta$ moves. What is known is an
# estimate from the old batch. On the tree the two can be compared. The change of $J$ is exactly (Kakade and Langford,
# 2002)
#
# $$J(\theta) - J(\theta_{\text{old}}) = \sum_s d_{\theta}(s) \sum_a \pi_\theta(a \mid s)\, A_{\text{old}}(s, a),
# \tag{9.2}$$
#
# where $d_\theta(s)$ is the probability that $\pi_\theta$ visits state $s$, and $A_{\text{old}}$ the advantage under
# $\pi_{\text{old}}$ (both from section 2). A new policy gains what the old one would have called an advantage, in the
# states where the *new* one goes. A batch from the old policy knows only where the *old* one goes, and that is the
# **surrogate**:
#
# $$L(\theta) = \sum_s d_{\text{old}}(s) \sum_a \pi_\theta(a \mid s)\, A_{\text{old}}(s, a). \tag{9.3}$$
#
# **Claim 9.4.** At $\theta_{\text{old}}$ the two have the same value, 0, and the same gradient. The difference is in $d$,
# and what multiplies it, $\sum_a \pi_\theta A_{\text{old}}$, is itself zero there.

# %%
rewards = (tree.ids == 1).sum(-1).double()  # the number of times that token 1 occurs
advantage = exact_values(tree, rewards).a  # [S, V]
visits = visit_probabilities(tree).detach()
gradient = exact_gradient(tree, rewards, policy.parameters())
surrogate = (visits[:, None] * tree.log_policy.exp() * advantage).sum()
assert abs(surrogate.item()) < 1e-10
assert (flat_gradient(surrogate, policy.parameters()) - gradient).abs().max() < 1e-10

uphill = (gradient / gradient.norm()).view_as(start)
lengths, gaps = np.logspace(-2, 0, 7), []
for length in lengths:
    policy.logits.data = start + length * uphill
    moved = enumerate_tree(policy, max_length=3, eos_id=0)
    change = (expectation(moved, rewards) - expectation(tree, rewards)).item()
    gain = (moved.log_policy.exp() * advantage).sum(-1)  # [S]
    assert abs((visit_probabilities(moved) * gain).sum().item() - change) < 1e-10
    gaps.append(abs((visits * gain).sum().item() - change))
    print(f"length {length:.3f}: J changes by {change:.5f}, the surrogate by {(visits * gain).sum().item():.5f}")
policy.logits.data = start
(slope, _), covariance = np.polyfit(np.log(lengths[:5]), np.log(gaps[:5]), 1, cov=True)
print(f"the gap grows with the power {slope:.3f} ± {2 * covariance[0, 0] ** 0.5:.3f} of the length")
assert abs(slope - 2) < 0.15

# %% [markdown]
# To first order the surrogate is $J$. The error is of second order, and it is governed by how much the visits have
# changed, so by how far the policy has moved. That is why a budget for the move makes sense.
#
# ## A step for a budget
#
# Which step of KL $\delta$ gains the most? To lowest order, maximise $g^\top \Delta$ with $g = \nabla J$ under
# $\tfrac12\Delta^\top F\Delta = \delta$. With a Lagrange multiplier $\mu$, $g = \mu F \Delta$, and the budget sets the
# length:
#
# $$\Delta = \sqrt{\frac{2\delta}{g^\top F^{+} g}}\; F^{+} g . \tag{9.4}$$
#
# This is the **natural gradient** (Amari, 1998). $F^+$ is the inverse of $F$ where $F$ has one; in the directions that do
# not change the policy, the step is zero.


# %% tags=["export"]
def natural_step(gradient: torch.Tensor, fisher: torch.Tensor, delta: float) -> torch.Tensor:
    """The step Δ [P] that gains the most to first order among those with ½ ΔᵀFΔ = delta nats; 0 for a gradient of 0.

    gradient [P]; fisher [P, P], symmetric, singular or not. Raises ValueError unless delta > 0. Section 9, equation 9.4;
    Amari 1998, Kakade 2001; the step of TRPO (Schulman et al., 2015) before its line search.
    """
    if not delta > 0:
        raise ValueError(f"delta is {delta}; a KL budget is above 0, for example 0.01 nats")
    direction = torch.linalg.pinv(fisher, hermitian=True) @ gradient
    gain = gradient @ direction
    return direction * (0.0 if gain == 0 else (2 * delta / gain).sqrt())


# %%
step = natural_step(gradient, fisher, 0.001)
policy.logits.data = start + step.view_as(start)
kl = sequence_kl(tree, enumerate_tree(policy, max_length=3, eos_id=0)).item()
policy.logits.data = start
print(f"budget 0.001 nats, spent {kl:.6f}")
assert abs(kl / 0.001 - 1) < 0.05

# %% [markdown]
# **Claim 9.5.** Is it better than a plain step? Two prompts, equally frequent, and one parameter for each, on very
# different scales: $\theta = (x, y)$ starts at $(0.1,\, 0)$. The first has logits $8x \cdot (-1, 0, 1)$ and pays for the
# middle token; the second has logits $(0.2\,y - 1,\; 0)$ and pays for the first. Compare the natural step with a plain
# one, along $g$, of the *same length in the parameters*.


# %% tags=["demo"]
def two_prompts(theta):
    """The logits of both prompts."""
    ends = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    return 8 * theta[0] * ends, torch.stack([0.2 * theta[1] - 1, torch.zeros_like(theta[1])])


def mean_reward(theta):
    first, second = two_prompts(theta)
    return (first.softmax(-1)[1] + second.softmax(-1)[0]) / 2


def mean_kl(old, new):
    """KL(old || new), averaged over the prompts."""
    return sum(map(kl_exact, two_prompts(old), two_prompts(new))) / 2


# %%
theta = torch.tensor([0.1, 0.0], dtype=torch.float64, requires_grad=True)
token_logprobs = torch.cat([z.log_softmax(-1) for z in two_prompts(theta)])
fisher_of_two = fisher_matrix(token_logprobs.exp() / 2, row_gradients(token_logprobs, [theta]))
(slope_of_two,) = torch.autograd.grad(mean_reward(theta), theta)
theta = theta.detach()
print("gradient", [round(g, 4) for g in slope_of_two.tolist()], " Fisher matrix", fisher_of_two.diagonal().tolist())
gains = {}
for delta in (1e-6, 1e-4, 1e-2):
    natural = natural_step(slope_of_two, fisher_of_two, delta)
    plain = slope_of_two * natural.norm() / slope_of_two.norm()
    gains[delta] = [(mean_reward(theta + step) - mean_reward(theta)).item() for step in (natural, plain)]
    spent = [mean_kl(theta, theta + step).item() for step in (natural, plain)]
    print(f"δ = {delta:.0e}", end="")
    for name, gain, kl in zip(("natural", "plain"), gains[delta], spent):
        print(f"   {name}: J {gain:+.4f} for KL {kl:.1e}", end="" if name == "natural" else "\n")
assert abs(gains[1e-4][0] - 0.0048) < 1e-4 and abs(gains[1e-4][1] + 0.0039) < 1e-4
assert abs(gains[1e-2][0] - 0.052) < 1e-3 and abs(gains[1e-2][1] + 0.135) < 1e-3

# %% [markdown]
# The parameter $x$ moves its logits forty times as much as $y$ does. The plain step spends its length there, runs through the
# optimum at $x = 0$ and out on the other side. The natural step knows from $F$ what $x$ costs, and goes along $y$.
#
# That is not a law. As $\delta \to 0$ the plain step improves $J$ too; in the first line of the output it gains more,
# since no step of the same length gains more to first order than the one along the gradient. It also spends thousands
# of times the KL. At equal *KL* the comparison turns round:

# %%
assert gains[1e-6][1] > gains[1e-6][0] > 0
natural = natural_step(slope_of_two, fisher_of_two, 1e-6)
short = slope_of_two * (2e-6 / (slope_of_two @ fisher_of_two @ slope_of_two)).sqrt()
assert abs(mean_kl(theta, theta + short) / 1e-6 - 1) < 0.01
at_equal_kl = [(mean_reward(theta + step) - mean_reward(theta)).item() for step in (natural, short)]
print("KL 1e-6 each: natural %+.2e, plain %+.2e" % tuple(at_equal_kl))
assert at_equal_kl[0] > at_equal_kl[1] > 0

# %% [markdown]
# Trust region policy optimisation (TRPO, Schulman et al., 2015) is this step, with a line search behind it: maximise the
# surrogate while the KL from $\pi_{\text{old}}$, averaged over the states in the batch, stays below $\delta$. Its paper
# proves that $J$ cannot fall if one maximises $L$ minus a large constant times the *largest* KL of any state. What is run,
# with the mean KL and with estimates, has no such guarantee. And $F^+ g$ has to be found for all parameters of the
# network; exercise 2 shows how that is done without ever storing $F$. Section 10 is about what is done instead.
#
# ## Two KL terms with two jobs
#
# | | trust region | reference |
# |---|---|---|
# | the divergence | $\mathrm{KL}(\pi_{\text{old}} \,\Vert\, \pi_\theta)$ | $\mathrm{KL}(\pi_\theta \,\Vert\, \pi_{\text{ref}})$ |
# | measured from | the policy that wrote this batch | the model from which training started |
# | refreshed | with every batch | never |
# | purpose | the estimate stays valid during the update | the policy stays near fluent language |
# | appears as | a constraint, or the clip of section 10 | a penalty, $J - \beta\,\mathrm{KL}$ with a weight $\beta$ |
#
# In both, the first argument is the policy whose samples are averaged. When a batch has just been collected the first is
# exactly zero, however far training has come.
#
# **Claim 9.6.** Neither does the other's work. Four runs of fifteen exact steps on the tree, with and without each: the
# budget $\delta = 0.02$ or else a plain step of the learning rate 5, and the penalty $\beta = 0.5$ or none. The reference
# is the policy at the start.

# %%
start_tree = enumerate_tree(TabularPolicy(3, 3, seed=0), max_length=3, eos_id=0)
runs = {}
for budget, beta in [(0.02, 0.0), (0.02, 0.5), (None, 0.0), (None, 0.5)]:
    learner, spent = TabularPolicy(3, 3, seed=0), []
    parameters = list(learner.parameters())
    for _ in range(15):
        now = enumerate_tree(learner, max_length=3, eos_id=0)
        uphill = flat_gradient(expectation(now, rewards) - beta * sequence_kl(now, start_tree), parameters)
        ruler = fisher_matrix(leaf_probabilities(now), score_matrix(now, parameters))
        learner.logits.data += (natural_step(uphill, ruler, budget) if budget else 5 * uphill).view_as(learner.logits)
        spent.append(sequence_kl(now, enumerate_tree(learner, max_length=3, eos_id=0)).item())
    now = enumerate_tree(learner, max_length=3, eos_id=0)
    runs[budget, beta] = (max(spent), sequence_kl(now, start_tree).item(), spent[0])
    print(f"budget {str(budget):5} penalty {beta}: J {expectation(now, rewards).item():.2f}   ", end="")
    print("largest KL of one step %.3f   KL from the reference %.2f nats" % runs[budget, beta][:2])
for beta in (0.0, 0.5):  # the budget bounds the step, with a penalty and without
    assert runs[0.02, beta][0] < 0.03 and runs[None, beta][0] > 0.5
for budget in (0.02, None):  # the penalty bounds the distance, with a budget and without
    assert runs[budget, 0.5][1] < 1.5 < 2.5 < runs[budget, 0.0][1]
assert abs(runs[None, 0.5][2] - runs[None, 0.0][2]) < 1e-10
assert abs(runs[0.02, 0.0][1] - 2.75) < 0.01 and abs(runs[None, 0.0][1] - 2.75) < 0.01

# %% [markdown]
# Small steps add up: with the budget alone the policy ends 2.75 nats from where it started, as far as without any
# bound. The penalty alone ends nearer, but a single step of it may be as wild as without: its first step is the same to
# the last digit, since at the reference the penalty's gradient is zero.

# %% [markdown]
# ## The KL from one sampled token
#
# The sum over the vocabulary needs the logits of two models at every position. What a trainer keeps is one number per
# sampled token and model, its log-probability. Write
#
# $$d = \log \pi(a) - \log \pi_{\text{ref}}(a), \qquad a \sim \pi .$$
#
# ($d$ alone is this difference; $d(s)$, with a state, stays the visit probability.) The definition of the KL says that
# $\mathrm{KL}(\pi \,\|\, \pi_{\text{ref}}) = \mathbb{E}_\pi[d]$, so $d$ itself is an unbiased estimate. Following
# Schulman (*Approximating KL divergence*, 2020) it is called $k_1$, and it has two relatives:
#
# $$k_1 = d, \qquad k_2 = \tfrac12 d^2, \qquad k_3 = e^{-d} - 1 + d .$$
#
# - $k_1$ is unbiased, and negative wherever the reference likes the token better than the policy does.
# - $k_2$ is never negative. It is biased; near the reference it is right to second order, as
#   $\tfrac12\mathrm{Var}[\Delta]$ was.
# - $k_3$ is $k_1$ plus something whose expectation is zero:
#   $\mathbb{E}_\pi[e^{-d}] = \sum_a \pi(a)\,\frac{\pi_{\text{ref}}(a)}{\pi(a)} = 1$. So it is unbiased
#   too, provided that the policy can write every token that the reference can. And $e^{x} \ge 1 + x$ makes it
#   non-negative, sample by sample.
#
# Numerically, $e^{-d} - 1$ is computed by `expm1`: near the reference the difference would lose all its digits in
# float32.


# %% tags=["export"]
def log_ratio(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """logprobs - other_logprobs of the same sampled tokens: two [B, T] -> [B, T], at least float32 (float64 stays).

    Both are widened before the subtraction. Raises ValueError if the shapes differ. Section 9.
    """
    if logprobs.shape != other_logprobs.shape:
        shapes = f"{list(logprobs.shape)} and {list(other_logprobs.shape)}"
        raise ValueError(f"log-probs have the shapes {shapes}; both must be [B, T] of the same tokens")
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, other_logprobs.dtype), torch.float32)
    return logprobs.to(dtype) - other_logprobs.to(dtype)


# %% tags=["export"]
def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """k1 = d, an unbiased estimate of KL(policy ‖ reference) in nats, of either sign: two [B, T] -> [B, T].

    d = logprobs - ref_logprobs, of tokens that the policy sampled. As a loss term its expected gradient is zero.
    At least float32. Raises ValueError if the shapes differ. Section 9; Schulman, Approximating KL divergence, 2020.
    """
    return log_ratio(logprobs, ref_logprobs)


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """k2 = d²/2, biased and never negative; shapes, dtypes and errors as in `kl_k1`. Section 9; Schulman, 2020."""
    return log_ratio(logprobs, ref_logprobs).square() / 2


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """k3 = exp(-d) - 1 + d, unbiased and never negative; shapes, dtypes and errors as in `kl_k1`.

    In float32 it is inf where the reference finds a token more than exp(88) times likelier. Section 9; Schulman, 2020.
    """
    d = log_ratio(logprobs, ref_logprobs)
    return torch.expm1(-d) + d


# %% [markdown]
# One token first. The policy gives it probability $\tfrac12$, the reference $\tfrac14$.

# %%
logprob = torch.tensor(0.5, dtype=torch.float64).log().requires_grad_()
ref_logprob = torch.tensor(0.25, dtype=torch.float64).log()
for kl, value, slope in [(kl_k1, 0.6931, 1.0), (kl_k2, 0.2402, 0.6931), (kl_k3, 0.1931, 0.5)]:
    estimate = kl(logprob, ref_logprob)
    (derivative,) = torch.autograd.grad(estimate, logprob)
    print(f"{kl.__name__}: {estimate:.4f}, derivative by the policy's log-prob {derivative:.4f}")
    assert abs(estimate - value) < 5e-5 and abs(derivative - slope) < 5e-5

# %% [markdown]
# Exchange the arguments, and the numbers are different ones. In expectation the exchange is worse than inaccurate:
# averaged over the policy's samples, a swapped $k_1$ is *minus* the KL, so a trainer that charges it pays for drift.

# %%
assert abs(kl_k1(ref_logprob, logprob) - -0.6931) < 5e-5
assert abs(kl_k3(ref_logprob, logprob) - 0.3069) < 5e-5

both = torch.tensor([0.5, 0.5], dtype=torch.float64)
both_ref = torch.tensor([0.25, 0.75], dtype=torch.float64)
kl = kl_exact(both.log(), both_ref.log())
swapped = (both * kl_k1(both_ref.log(), both.log())).sum()
print(f"KL(policy || reference) {kl:.4f}, KL(reference || policy) {kl_exact(both_ref.log(), both.log()):.4f}, ", end="")
print(f"mean of the swapped k1 {swapped:.4f}")
assert abs(kl - 0.1438) < 5e-5 and abs(swapped + kl) < 1e-10
assert abs(kl_exact(both_ref.log(), both.log()) - kl) > 0.01

# %% [markdown]
# With two tokens the expectation and the variance of every estimator are sums of two terms, so nothing has to be
# sampled.

# %%
print("policy (.5, .5), reference (.25, .75)")
for estimator in (kl_k1, kl_k2, kl_k3):
    values = estimator(both.log(), both_ref.log())
    mean = (both * values).sum()
    std = (both * (values - mean) ** 2).sum().sqrt()
    print(f"{estimator.__name__}: values {values[0]:+.4f} {values[1]:+.4f}   mean {mean:.4f}   std {std:.4f}")
k1, k2, k3 = (estimator(both.log(), both_ref.log()) for estimator in (kl_k1, kl_k2, kl_k3))
assert abs((both * k1).sum() - kl) < 1e-10 and abs((both * k3).sum() - kl) < 1e-10
assert abs((both * k2).sum() - kl) > 0.01
assert k1.min() < 0 and k2.min() >= 0 and k3.min() >= 0
assert abs(k3.std(correction=0) / k1.std(correction=0) - 0.09) < 0.005

# %% [markdown]
# Here $k_3$ has a tenth of $k_1$'s spread at the same mean. That is so near the reference. Far from it, where the
# reference favours a token that the policy rarely writes, $e^{-d}$ is rare and large, and $k_3$ is the worst of the
# three.

# %%
far = torch.tensor([0.01, 0.99], dtype=torch.float64)
uniform = torch.tensor([0.5, 0.5], dtype=torch.float64)
stds = []
for estimator in (kl_k1, kl_k2, kl_k3):
    values = estimator(far.log(), uniform.log())
    stds.append((far * (values - (far * values).sum()) ** 2).sum().sqrt())
print("policy (.01, .99), reference (.5, .5): std of k1, k2, k3:", [round(std.item(), 4) for std in stds])
assert stds[2] > 9 * stds[0] > 9 * 0.4


# %% tags=["export:figures"]
def kl_estimators() -> Figure:
    """k1, k2, k3 against the log-ratio d, and their standard deviations as a policy leaves a uniform reference."""
    fig, (left, right) = new_figure(1, 2, height=3.4)
    d = torch.linspace(-2.5, 2.5, 201, dtype=torch.float64)
    sharpness = torch.linspace(0.02, 5, 250, dtype=torch.float64)
    logprobs = torch.log_softmax(sharpness[:, None] * torch.linspace(1, -1, 5, dtype=torch.float64), -1)
    uniform = torch.full_like(logprobs, -math.log(5))
    for estimator, line in [(kl_k1, ":"), (kl_k2, "--"), (kl_k3, "-")]:
        left.plot(d, estimator(d, torch.zeros_like(d)), color=COLORS["reference"], linestyle=line)
        values = estimator(logprobs, uniform)
        mean = (logprobs.exp() * values).sum(1, keepdim=True)
        std = (logprobs.exp() * (values - mean) ** 2).sum(1).sqrt()
        right.plot(sharpness, std, color=COLORS["reference"], linestyle=line)
    left.set(title="one token", xlabel="d = log π − log π_ref (nats)", ylabel="estimate (nats)", ylim=(-2.7, 5))
    right.set(title="spread over five tokens", yscale="log", ylim=(1e-3, 60))
    right.set(xlabel="c, in logits = c · (1, ½, 0, −½, −1)", ylabel="standard deviation (nats)")
    places = {left: [(-2.1, -1.3), (-2.5, 1.9), (-1.6, 3.6)], right: [(0.3, 0.6), (3.4, 0.3), (3.2, 8)]}
    for axes, points in places.items():
        for name, point in zip(("k1", "k2", "k3"), points, strict=True):
            axes.text(*point, name)
    return fig


# %%
show(
    kl_estimators(),
    caption="Only k1 goes below zero. Beside the reference k2 and k3 spread least; away from it k3 spreads the most.",
    alt="Left: k1 is a straight line through zero, k2 a parabola, k3 a curve that rises steeply for negative d. "
    "Right: standard deviations on a logarithmic scale; k2 and k3 start far below k1, and k3 overtakes both.",
)

# %% [markdown]
# ## A good estimate can have the wrong gradient
#
# A penalty on the KL can be put in two places. **In the loss**, $k$ is differentiated as a function of $\theta$ at the
# sampled tokens. **In the reward**, $-\beta k$ is a plain number that is added to the reward, and the policy gradient
# of section 4 does the rest. The wanted gradient is $\nabla\,\mathrm{KL}(\pi \,\|\, \pi_{\text{ref}})$; for one token the
# expectations of what one gets are
#
# $$\begin{aligned}
# \mathbb{E}_\pi[\nabla k_1] &= \mathbb{E}_\pi[\nabla\log\pi] = \nabla \textstyle\sum_a \pi(a) = 0, \\
# \mathbb{E}_\pi[\nabla k_2] &= \mathbb{E}_\pi[d\,\nabla\log\pi] = \nabla\,\mathrm{KL}(\pi \,\|\, \pi_{\text{ref}}), \\
# \mathbb{E}_\pi[\nabla k_3] &= \mathbb{E}_\pi[(1 - e^{-d})\,\nabla\log\pi]
#   = -\textstyle\sum_a \pi_{\text{ref}}(a)\,\nabla\log\pi(a) = \nabla\,\mathrm{KL}(\pi_{\text{ref}} \,\|\, \pi),
# \end{aligned}$$
#
# and in the reward $\mathbb{E}_\pi[k\,\nabla\log\pi]$, which is the wanted one for $k_1$ only. The unbiased $k_1$
# does nothing in the loss except add noise: its derivative does not even contain the reference. The biased $k_2$ is
# right there. The unbiased $k_3$, the one in GRPO's loss (Shao et al., 2024), follows the gradient of the *other* KL.

# %%
logits = torch.tensor([1.0, 0.4, -0.3, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
ref_logprobs = torch.log_softmax(torch.tensor([0.0, 1.0, 0.5, -1.0, 0.2], dtype=torch.float64), -1)
logprobs = torch.log_softmax(logits, -1)
probs = logprobs.exp().detach()
(reverse,) = torch.autograd.grad(kl_exact(logits, ref_logprobs), logits)
(forward,) = torch.autograd.grad(kl_exact(ref_logprobs, logits), logits)
in_loss, in_reward = {}, {}
for estimator in (kl_k1, kl_k2, kl_k3):
    estimate = estimator(logprobs, ref_logprobs)
    name = estimator.__name__
    (in_loss[name],) = torch.autograd.grad((probs * estimate).sum(), logits, retain_graph=True)
    (in_reward[name],) = torch.autograd.grad((probs * estimate.detach() * logprobs).sum(), logits, retain_graph=True)
    print(f"{name} in the loss {[round(g, 3) for g in in_loss[name].tolist()]}, ", end="")
    print(f"in the reward {[round(g, 3) for g in in_reward[name].tolist()]}")
print("∇KL(policy || ref)", [round(g, 3) for g in reverse.tolist()])
print("∇KL(ref || policy)", [round(g, 3) for g in forward.tolist()])
assert in_loss["kl_k1"].abs().max() < 1e-10
assert (in_loss["kl_k2"] - reverse).abs().max() < 1e-10
assert (in_loss["kl_k3"] - forward).abs().max() < 1e-10 and (forward - reverse).abs().max() > 0.05
assert (in_reward["kl_k1"] - reverse).abs().max() < 1e-10
assert min((in_reward[k] - reverse).abs().max() for k in ("kl_k2", "kl_k3")) > 0.1

# %% [markdown]
# And the noise? Section 5's instrument, for one sampled token. Each estimator is a weight times the score: $1$ for $k_1$ in
# the loss, $1 - e^{-d}$ for $k_3$ in the loss, $d$ for $k_2$ in the loss. And $d$ for $k_1$ in the reward: those two are
# one estimator.

# %%
one_token = enumerate_tree(lambda prefixes: logits.expand(len(prefixes), -1), max_length=1)
scores = score_matrix(one_token, [logits])
d = log_ratio(logprobs, ref_logprobs).detach()
weights = {"1": torch.ones_like(d), "d": d, "1 - exp(-d)": 1 - (-d).exp()}
moments = {name: leaf_moments(one_token, weight[:, None] * scores, reverse) for name, weight in weights.items()}
for name, m in moments.items():
    print(f"weight {name:11}: bias {m.bias.norm():.3f}, variance {m.variance:.3f}  (‖∇KL‖ = {reverse.norm():.3f})")
assert abs(moments["1"].bias.norm() - reverse.norm()) < 1e-10 and moments["1"].variance > 0.5
assert moments["d"].bias.norm() < 1e-10 and moments["1 - exp(-d)"].bias.norm() > 0.1

# %% [markdown]
# $k_3$ in the loss is still a pull towards the reference: both divergences are zero there and nowhere else, and close to
# it their gradients agree, because both are $\tfrac12\mathrm{Var}[\Delta]$ to second order. Here is the difference
# between the two gradients, relative to the wanted one, as the policy approaches the reference.

# %%
for distance in (1.0, 0.1, 0.01):
    near = (ref_logprobs + distance * (logits.detach() - ref_logprobs)).requires_grad_()
    (reverse,) = torch.autograd.grad(kl_exact(near, ref_logprobs), near)
    (forward,) = torch.autograd.grad(kl_exact(ref_logprobs, near), near)
    difference = (forward - reverse).norm() / reverse.norm()
    print(f"at {distance:.2f} of the way out: {difference:.4f}")
    assert difference < 0.5 * distance

# %% [markdown]
# All of this is one token in one state. A completion has many, and then the states that the policy visits depend on
# $\theta$ as well; which of these statements survive is counted in section 14.
#
# ## Exercises
#
# **1. Predict, then run.** One token has probability $p$; its logit is raised by 0.1, and nothing else is touched. At
# which $p$ is the KL of this step largest, and how many nats is it then? Fill in both numbers before you run anything.

# %% tags=["exercise"]
import torch

from lmrl.trust_region import kl_exact

prediction = None  # (p, KL in nats), for example (0.1, 0.02)

# %% tags=["solution"]
import torch

from lmrl.trust_region import kl_exact

prediction = (0.5, 0.5 * 0.25 * 0.1**2)  # half the variance of a step that is 0.1 with probability p

# %% tags=["check"]
p = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
before = torch.stack([p, 1 - p], -1).log()
kl = kl_exact(before, before + torch.tensor([0.1, 0.0], dtype=torch.float64))
assert prediction is not None, "write down a prediction first"
assert abs(prediction[0] - p[kl.argmax()].item()) < 0.03, f"the largest KL is at p = {p[kl.argmax()]:.2f}"
assert abs(prediction[1] / kl.max().item() - 1) < 0.05, f"it is {kl.max():.5f} nats"

# %% [markdown]
# **2. The Fisher matrix without the matrix.** With $P$ parameters $F$ has $P^2$ entries, but a solver such as conjugate
# gradients only ever asks for products $F v$. For the logits of one state, write this product without a $V \times V$
# matrix. Hint: $\Delta^\top F \Delta$ is a variance, so what is its covariance with $v$?

# %% tags=["exercise"]
import torch

from lmrl.trust_region import fisher_matrix


def fisher_product(probs, v):
    """F v for the logits of one state: probs [V], v [V] -> [V], in memory proportional to V."""
    raise NotImplementedError


# %% tags=["solution"]
import torch

from lmrl.trust_region import fisher_matrix


def fisher_product(probs, v):
    """F v for the logits of one state: probs [V], v [V] -> [V], in memory proportional to V."""
    return probs * (v - probs @ v)


# %% tags=["check"]
for seed in range(5):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(7, generator=generator, dtype=torch.float64).softmax(-1)
    v = torch.randn(7, generator=generator, dtype=torch.float64)
    scores = torch.eye(7, dtype=torch.float64) - probs
    assert torch.allclose(fisher_product(probs, v), fisher_matrix(probs, scores) @ v, rtol=0, atol=1e-10)
assert fisher_product(torch.full((100_000,), 1e-5), torch.ones(100_000)).abs().max() < 1e-6

# %% [markdown]
# **3. Find the bug.** A run drifts away from its reference, and no $\beta$ holds it. The penalty below is added to the
# loss, completion by completion, and its value is right: averaged over the policy's samples it is the KL. Hold its
# *gradient* against the oracle, and repair it.

# %% tags=["exercise"]
import torch

from lmrl.tree import TabularPolicy, enumerate_tree, flat_gradient, leaf_logprobs, sequence_kl
from lmrl.trust_region import kl_k1, kl_k2, kl_k3


def penalty(logprobs, ref_logprobs):
    """A term for each sampled completion; its expected gradient shall be ∇KL(policy || reference): two [N] -> [N]."""
    return kl_k1(logprobs, ref_logprobs)


# %% tags=["solution"]
import torch

from lmrl.tree import TabularPolicy, enumerate_tree, flat_gradient, leaf_logprobs, sequence_kl
from lmrl.trust_region import kl_k1, kl_k2, kl_k3


def penalty(logprobs, ref_logprobs):
    """A term for each sampled completion; its expected gradient shall be ∇KL(policy || reference): two [N] -> [N]."""
    return kl_k2(logprobs, ref_logprobs)  # d ∇log π; the gradient of k1 is ∇log π, whose mean is zero


# %% tags=["check"]
for seed in range(3):
    learner, other = TabularPolicy(3, 2, seed=seed), TabularPolicy(3, 2, seed=seed + 10)
    learner_tree, other_tree = enumerate_tree(learner, 2, eos_id=0), enumerate_tree(other, 2, eos_id=0)
    logprobs, ref_logprobs = leaf_logprobs(learner_tree), leaf_logprobs(other_tree).detach()
    expected = (logprobs.exp().detach() * penalty(logprobs, ref_logprobs)).sum()
    found = flat_gradient(expected, learner.parameters())
    oracle = flat_gradient(sequence_kl(learner_tree, other_tree), learner.parameters())
    assert torch.allclose(found, oracle, rtol=0, atol=1e-10), f"‖found‖ {found.norm():.4f}, ‖∇KL‖ {oracle.norm():.4f}"


# %% [markdown]
# ## What is still missing
#
# There is a ruler now, but nothing that keeps an update within it: section 10 reuses one batch for several steps and
# builds an approximate trust region into the objective itself. Whether a KL penalty belongs in the reward or in the
# loss of a whole completion, and what an update spends of the entropy, is settled in section 14.
