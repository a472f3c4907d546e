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
# The sections so far end in a direction: an estimate of the gradient of $J$, the expected reward. How far may one walk
# along it?
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
#   training started.

# %%
import math

import torch
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, new_figure, show

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
# the collapse is gone together with the variety; entropy is logged at every step because it falls before the reward
# does.
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
# Now two steps of the same length, 1, from one policy over three tokens. The first two tokens are equally likely, the
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
# The picture shows it for three tokens. Each panel draws the same three policies. On the left, their logits (adding a
# constant to all three changes nothing, so two dimensions are enough); on the right, their probabilities, one corner
# per token. Solid: all steps of one length in the logits. Dashed: all steps of one KL.


# %% tags=["export:figures"]
def equal_steps(length: float = 0.8, delta: float = 0.02) -> Figure:
    """Three policies over three tokens: steps of one length in the logits, and steps of one KL(old || new) = delta."""
    plane = torch.tensor([[-1, 1, 0], [-1, -1, 2]], dtype=torch.float64) / torch.tensor([[2.0], [6.0]]).sqrt()
    corners = torch.tensor([[0, 0], [1, 0], [0.5, 0.75**0.5]], dtype=torch.float64)
    angles = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)[:, None]
    rays = torch.cat([angles.cos(), angles.sin()], 1)
    fig, (left, right) = new_figure(1, 2, height=3.5)
    for centre in torch.tensor([[-0.6, 1.0], [2.8, -0.3], [-0.4, -3.6]], dtype=torch.float64):
        low, high = torch.zeros_like(angles), torch.full_like(angles, 100.0)
        for _ in range(50):
            middle = (low + high) / 2
            logits = (centre + middle * rays) @ plane
            outside = kl_exact((centre @ plane).expand_as(logits), logits)[:, None] > delta
            low, high = torch.where(outside, low, middle), torch.where(outside, middle, high)
        for radius, color, line in [(length, COLORS["policy"], "-"), (low, COLORS["reference"], "--")]:
            points = centre + radius * rays
            left.plot(*points.T, color=color, linestyle=line)
            right.plot(*(torch.softmax(points @ plane, -1) @ corners).T, color=color, linestyle=line)
        left.plot(*centre, "o", color="black", markersize=3)
        right.plot(*(torch.softmax(centre @ plane, -1) @ corners), "o", color="black", markersize=3)
    return _label_equal_steps(fig, left, right, corners, length, delta)


def _label_equal_steps(fig, left, right, corners, length, delta):
    left.set(title="logits", xlim=(-2.6, 7.6), ylim=(-7.6, 2.6), xlabel="token 2 against token 1")
    left.set_ylabel("token 3 against both")
    left.set_aspect("equal")
    left.text(0.4, 1.3, f"steps of length {length}", color=COLORS["policy"], va="center")
    left.text(0.2, -5.5, f"steps of KL {delta} nats", color=COLORS["reference"], va="center")
    right.plot(*corners[[0, 1, 2, 0]].T, color="black", linewidth=0.8)
    for token, (x, y) in enumerate(corners.tolist(), start=1):
        right.text(x, y + (0.02 if y else -0.03), f"token {token}", ha="center", va="bottom" if y else "top")
    right.set(title="probabilities", ylim=(-0.12, 1))
    right.set_aspect("equal")
    right.axis("off")
    return fig


# %%
show(
    equal_steps(),
    caption="Equal circles in the logits are very unequal steps of the policy; a KL budget gives steps of like size.",
    alt="Left: three equal circles and three very unequal dashed regions in the plane of logits. Right: the same in the "
    "triangle of probabilities, where the circles become one large, one small and one flat region.",
)

# %% [markdown]
# So a step is measured by the KL it causes. Trust region policy optimisation (TRPO, Schulman et al., 2015) makes it a
# constraint: maximise the surrogate of section 4 while the KL from $\pi_{\text{old}}$, averaged over the states in the
# batch, stays below a budget $\delta$. Solving that needs the Fisher matrix of all parameters; section 10 is about what
# is done instead.
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
# In both, the first argument is the policy whose samples are averaged. Neither says anything about the other: when a
# batch has just been collected the first is exactly zero, however far training has come.

# %%
ref = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
current = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
assert kl_exact(current, current) == 0
print(f"a fresh batch: trust region {kl_exact(current, current):.4f}, reference {kl_exact(current, ref):.4f} nats")
assert kl_exact(current, ref) > 1

# %% [markdown]
# ## The KL from one sampled token
#
# The sum over the vocabulary needs the logits of two models at every position. What a trainer keeps is one number per
# sampled token and model, its log-probability. Write
#
# $$d = \log \pi(a) - \log \pi_{\text{ref}}(a), \qquad a \sim \pi .$$
#
# The definition above says $\mathrm{KL}(\pi \,\|\, \pi_{\text{ref}}) = \mathbb{E}_\pi[d]$, so $d$ itself is an unbiased
# estimate. Following Schulman (*Approximating KL divergence*, 2020) it is called $k_1$, and it has two relatives:
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
# ## What is still missing
#
# There is a ruler now, but nothing that keeps an update within it: section 10 reuses one batch for several steps and
# builds an approximate trust region into the objective itself. Whether a KL penalty belongs in the reward or in the
# loss of a whole completion, and what an update spends of the entropy, is settled in section 14.
