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
# # 4. The policy gradient, derived
#
# A policy $\pi_\theta$ writes a completion $\tau$, and a black box returns its reward $R(\tau)$. We want to raise the
# expected reward $J(\theta)$ by following its gradient. But the black box cannot be differentiated, and the parameters
# $\theta$ are not in it anyway: they decide *which* completions are drawn. How does one differentiate through a draw?
#
# The answer takes eight lines. Each of them is evaluated here on a tree of all completions (section 2), so that "equals"
# is not a promise: the numbers on both sides are computed, and compared.

# %%
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, new_figure, show
from lmrl.policy import gather_logprobs, supervised_loss
from lmrl.tree import (
    TabularPolicy,
    completions,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    flat_gradient,
    leaf_probabilities,
    row_gradients,
    score_matrix,
)

# %% [markdown]
# The policy has three tokens, of which `#` stops, and writes at most three. A completion's reward is the share of its
# three places that hold a `b`, counted by ordinary Python.

# %%
tokens = ["#", "a", "b"]
policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
tree = enumerate_tree(policy, max_length=3, eos_id=0)
texts = ["".join(tokens[i] for i in ids) for ids in completions(tree)]
rewards = torch.tensor([text.count("b") / 3 for text in texts], dtype=torch.float64)
print({text: round(r, 2) for text, r in zip(texts, rewards.tolist())})

# %% [markdown]
# ## Eight lines
#
# **Line 1.** Write the expectation as a sum, to see where $\theta$ is. It is in the probabilities only.
#
# $$J(\theta) = \sum_\tau \pi_\theta(\tau)\, R(\tau) \tag{4.1}$$

# %%
probabilities = leaf_probabilities(tree)
line_1 = (probabilities * rewards).sum()
print(f"J = {line_1:.6f}")
assert torch.isclose(line_1, exact_values(tree, rewards).v[0], atol=1e-10)  # the value of the empty prefix

# %% [markdown]
# **Line 2.** The gradient of a sum is the sum of the gradients. $R(\tau)$ does not depend on $\theta$ and stays as it is.
#
# $$\nabla_\theta J = \sum_\tau \nabla_\theta \pi_\theta(\tau)\; R(\tau) \tag{4.2}$$
#
# Below, `slopes` has a row $\nabla_\theta \pi_\theta(\tau)$ for each completion. The sum must be what automatic
# differentiation makes of line 1.

# %%
slopes = row_gradients(probabilities, policy.parameters())  # [L, P]
line_2 = (slopes * rewards[:, None]).sum(0)
print(f"‖∇J‖ = {line_2.norm():.6f}")
assert torch.allclose(line_2, flat_gradient(line_1, policy.parameters()), atol=1e-10)

# %% [markdown]
# **Line 3.** This is where one gets stuck. We cannot list all completions of a real model; we can only draw some. Drawing
# estimates sums of the form $\sum_\tau \pi_\theta(\tau)\, f(\tau)$, with a probability in front, and line 2 is not of that
# form. The numbers $\nabla \pi_\theta(\tau)$ are no probabilities: some are negative, and over all $\tau$ they sum to 0,
# because the probabilities sum to 1 for every $\theta$.

# %%
print("sum of all ∇π:", f"{slopes.sum(0).abs().max():.0e};  negative entries: {(slopes < 0).double().mean():.0%}")
assert slopes.sum(0).abs().max() < 1e-10
assert (slopes < 0).any()

# %% [markdown]
# **Line 4.** The one idea. The derivative of a logarithm is $\nabla \log f = \nabla f / f$. Read backwards:
#
# $$\nabla_\theta \pi_\theta(\tau) = \pi_\theta(\tau)\, \nabla_\theta \log \pi_\theta(\tau) \tag{4.4}$$
#
# An absolute change is a level times a relative change. The relative one, $\nabla_\theta \log \pi_\theta(\tau)$, is called
# the **score** of $\tau$.

# %%
scores = score_matrix(tree, policy.parameters())  # [L, P]
assert torch.allclose(slopes, probabilities[:, None] * scores, atol=1e-10)

# %% [markdown]
# **Line 5.** Put line 4 into line 2. A probability is back in front.
#
# $$\nabla_\theta J = \sum_\tau \pi_\theta(\tau)\; \nabla_\theta \log \pi_\theta(\tau)\; R(\tau) \tag{4.5}$$

# %%
line_5 = (probabilities[:, None] * scores * rewards[:, None]).sum(0)
assert torch.allclose(line_5, line_2, atol=1e-10)

# %% [markdown]
# **Line 6.** So it is an expectation under the policy itself, and text drawn from the policy estimates it.
#
# $$\nabla_\theta J = \mathbb{E}_{\tau \sim \pi_\theta}\big[R(\tau)\, \nabla_\theta \log \pi_\theta(\tau)\big] \tag{4.6}$$
#
# **Claim 4.1** is this line against automatic differentiation of $J$. Sampling is checked too: with 20 000 draws every
# component must be within four standard errors (a constant component exactly).

# %%
line_6 = expectation(tree, rewards[:, None] * scores)
assert torch.allclose(line_6, line_5, atol=1e-10)
assert torch.allclose(line_6, exact_gradient(tree, rewards, policy.parameters()), atol=1e-10)

drawn = torch.multinomial(probabilities.detach(), 20_000, True, generator=torch.Generator().manual_seed(0))
samples = (rewards[:, None] * scores)[drawn]
standard_error = samples.std(0) / len(samples) ** 0.5
errors = (samples.mean(0) - line_6.detach()).abs()
print(f"largest error of the sampled mean: {(errors / standard_error.clamp(min=1e-12)).max():.2f} standard errors")
assert (errors <= 4 * standard_error + 1e-10).all()

# %% [markdown]
# **Line 7.** The probability of a completion is a product over its tokens, so its logarithm is a sum. Let $s_t$ be the
# prefix before token $a_t$. In general there are also factors for what the world does next; appending a token is
# deterministic, so here they are all 1.
#
# $$\log \pi_\theta(\tau) = \sum_{t=1}^{T} \log \pi_\theta(a_t \mid s_t) \tag{4.7}$$
#
# The left side is computed as the logarithm of the product.

# %%
product = torch.where(tree.mask, tree.logprobs.exp(), 1.0).prod(-1)
assert torch.allclose(product.log(), tree.logprobs.sum(-1), atol=1e-10)
assert torch.allclose(row_gradients(product.log(), policy.parameters()), scores, atol=1e-10)

# %% [markdown]
# **Line 8.** Put line 7 into line 6. Every term is something that a forward pass has already computed.
#
# $$\nabla_\theta J = \mathbb{E}_{\tau \sim \pi_\theta}\Big[R(\tau) \sum_{t=1}^{T} \nabla_\theta \log \pi_\theta(a_t \mid
# s_t)\Big] \tag{4.8}$$
#
# This is the **policy gradient**. The estimator that samples it is called REINFORCE (Williams, 1992).

# %%
token_scores = [row_gradients(column, policy.parameters()) for column in tree.logprobs.unbind(1)]  # T times [L, P]
line_8 = expectation(tree, rewards[:, None] * sum(token_scores))
assert torch.allclose(line_8, line_6, atol=1e-10)

# %% [markdown]
# **Claim 4.2** was that all lines agree, where they are equalities: lines 2, 5, 6 and 8 are one vector, line 1 is its
# primitive, lines 4 and 7 hold for each completion, and line 3 is the obstacle, not an equality. In the figure the same
# number appears three times: as a sum of bars that are not probabilities, as an area, and as an average that can be
# sampled. A vector cannot be drawn, so the picture shows its component along $\nabla J$ itself.


# %% tags=["export:figures"]
def derivation_figure(texts: list, rewards, probabilities, scores, drawn) -> Figure:
    """Lines 2, 5 and 6 of the derivation, as the component along the gradient: bars, areas, and a running average.

    rewards [L], probabilities [L], scores [L, P], drawn [N] rows of sampled completions.
    """
    gradient = (probabilities * rewards) @ scores
    values = rewards * (scores @ gradient) / gradient.norm()  # [L]
    fig, axes = new_figure(1, 3, height=3.4)
    _bars(axes[0], texts, (probabilities * values).tolist())
    _areas(axes[1], texts, probabilities.tolist(), values.tolist())
    _running_average(axes[2], values, probabilities, drawn)
    fig.supylabel("component along ∇J", fontsize=10)
    return fig


def _bars(ax, texts, heights):
    ax.bar(texts, heights, color=COLORS["policy"])
    ax.tick_params("x", rotation=90, labelsize=8)
    ax.axhline(0, color="black", lw=0.8)
    ax.set_title(f"line 2: ∇π(τ) R(τ)\nheights sum to {sum(heights):.4f}", fontsize=10)


def _areas(ax, texts, widths, heights):
    left = 0.0
    for text, width, height in zip(texts, widths, heights):
        ax.bar(left, height, width, align="edge", color=COLORS["policy"], edgecolor="white", lw=0.4)
        if width > 0.07 and height:
            offset, align = (2, "bottom") if height > 0 else (-3, "top")
            middle, place = (left + width / 2, height), {"xytext": (0, offset), "textcoords": "offset points"}
            ax.annotate(text, middle, fontsize=8, ha="center", va=align, **place)
        left += width
    area = sum(width * height for width, height in zip(widths, heights))
    ax.axhline(0, color="black", lw=0.8)
    ax.set_title(f"line 5: ∇log π(τ) R(τ)\narea is {area:.4f}", fontsize=10)
    ax.set_xlabel("width: π(τ)")


def _running_average(ax, values, probabilities, drawn):
    exact = probabilities @ values
    count = torch.arange(10, len(drawn) + 1)
    average = values[drawn].cumsum(0)[9:] / count
    error = 2 * (probabilities @ (values - exact).square() / count).sqrt()
    ax.fill_between(count, exact - error, exact + error, color=COLORS["reference"], alpha=0.25, lw=0)
    ax.axhline(exact, color=COLORS["reference"], ls="--", lw=1)
    ax.semilogx(count, average, color=COLORS["policy"])
    ax.annotate(
        "±2 standard errors", (count[0], exact + error[0]), xytext=(12, -2), textcoords="offset points", fontsize=9
    )
    ax.set_title(f"line 6: average over samples\n{len(drawn):,} of them give {average[-1]:.4f}", fontsize=10)
    ax.set_xlabel("completions sampled")


# %%
show(
    derivation_figure(texts, rewards, probabilities.detach(), scores, drawn),
    caption="One number, three times. Only when the probability has become a width can the sum be sampled.",
    alt="Three panels. Bars of the product of slope and reward, one for each completion, one of them negative. Bars of "
    "score times reward whose widths are the probabilities. A running average that settles on the exact value.",
)

# %% [markdown]
# ## In code
#
# Automatic differentiation wants a number to differentiate. Draw $N$ completions, let $A_i$ be the weight of completion
# $i$, and take
#
# $$\mathcal{L}(\theta) = -\frac1N \sum_{i=1}^N \sum_t A_i \log \pi_\theta(a_{i,t} \mid s_{i,t}). \tag{4.9}$$
#
# With $A_i = R(\tau_i)$ its gradient is minus the estimator of line 8; the sign is there because optimisers go
# downhill. Its *value* means nothing: it is no measure of progress. It is called a **surrogate** for that reason.
#
# The module exports the terms of the double sum, one for each token, as a tensor `[B, T]`: `B` rows, `T` tokens. How they
# are added up turns out to matter, and is left to section 11. The weight may differ from token to token; sections 6 to 8
# will use that. No gradient flows into it.


# %% tags=["export"]
def reinforce_terms(logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Advantage times log-probability of every token, [B, T], to be maximised; at least float32.

    logprobs [B, T] of the sampled tokens; advantages [B], the same for all tokens of a row, or [B, T]. The gradient of
    the sum over a row is the REINFORCE estimator. Advantages are data: no gradient flows into them. Raises ValueError
    for other shapes. Section 4; Williams 1992.
    """
    if advantages.shape not in (logprobs.shape, logprobs.shape[:1]):
        raise ValueError(
            f"advantages have the shape {list(advantages.shape)}; with log-probs {list(logprobs.shape)} they must be "
            f"{list(logprobs.shape[:1])} or {list(logprobs.shape)}"
        )
    if advantages.dim() < logprobs.dim():
        advantages = advantages[:, None]
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, advantages.dtype), torch.float32)
    return advantages.detach().to(dtype) * logprobs


# %% [markdown]
# **Claim 4.3.** The loss differentiates to the estimator, sample by sample: the gradient of each row's loss is
# $-R(\tau) \sum_t \nabla \log \pi_\theta(a_t \mid s_t)$.

# %%
losses = -reinforce_terms(tree.logprobs, rewards).sum(-1)  # [L], one loss for each completion
assert torch.allclose(row_gradients(losses, policy.parameters()), -rewards[:, None] * sum(token_scores), atol=1e-10)
print(f"J = {line_1:.4f}, but the expected loss is {expectation(tree, losses):.4f}")

# %% [markdown]
# ## What it says
#
# Take the log-probability of everything you just wrote, weigh it by how well it went, and go uphill.
#
# How does this differ from supervised training? The score of a token, as seen at the logits $z$, is
#
# $$\nabla_z \log \pi(a) = \mathrm{onehot}(a) - \pi, \tag{4.10}$$
#
# the sampled token minus the whole distribution. In section 1 this was the supervised gradient, up to its sign, with
# the demonstrated token in the place of the sampled one.


# %% tags=["export"]
def logit_score(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Gradient of log softmax(logits)[id] in the logits, onehot(id) - softmax(logits): [.., V], [..] -> [.., V].

    Section 4, equation 4.10.
    """
    return F.one_hot(ids, logits.shape[-1]) - logits.softmax(-1)


# %% [markdown]
# **Claim 4.4.** Pretend that the sampled completions are demonstrations, and differentiate the supervised loss of section
# 1. That is the score of the sampled tokens, with the sign of a loss. (The supervised loss is a mean over tokens;
# multiplying it by their number makes it a sum.)

# %%
logits = tree.log_policy.detach()[tree.states].requires_grad_()  # [L, T, V]
imitation = supervised_loss(gather_logprobs(logits, tree.ids), tree.mask) * tree.mask.sum()
(imitation_gradient,) = torch.autograd.grad(imitation, logits)
score = logit_score(logits.detach(), tree.ids)
assert torch.allclose(imitation_gradient[tree.mask], -score[tree.mask], atol=1e-10)

# %% [markdown]
# So $R = 1$ is imitation of one's own text, $R = 0$ ignores it, and $R = -1$ unlearns it, which no demonstration can ask
# for.
#
# ## Why the logarithm
#
# A token that is rarely drawn gets few chances to be reinforced. The score makes up for that: $\nabla \log \pi = \nabla
# \pi / \pi$ divides by the probability of what happened. Does a rare token then have a huge score?
#
# **Claim 4.6.** It has a larger one than a common token, but not a huge one. From (4.10)
#
# $$\|\nabla_z \log \pi(a)\|^2 = 1 - 2\pi(a) + \sum_{a'} \pi(a')^2, \tag{4.11}$$
#
# which grows as $\pi(a)$ falls, and never exceeds 2. The article speaks of dividing by $\pi$, as if the score grew like
# $1/\pi$. It does not: at the logits $\nabla \pi(a)$ has itself a factor $\pi(a)$, which cancels it.

# %%
example = torch.tensor([0.9, 0.09, 0.009, 0.001], dtype=torch.float64)
norms = logit_score(example.log().expand(4, 4), torch.arange(4)).norm(dim=-1)
for probability, norm in zip(example.tolist(), norms.tolist()):
    print(f"π(a) = {probability:5.3f}   ‖score‖ = {norm:.4f}   1/π = {1 / probability:.0f}")
assert torch.allclose(norms**2, 1 - 2 * example + example.square().sum(), atol=1e-10)
assert (norms.diff() > 0).all() and (norms < 2**0.5).all()

# %% [markdown]
# ## If every completion were right
#
# Suppose $R = 1$ for everything. It is tempting to say that the policy then drifts towards what it already prefers.
#
# **Claim 4.5** is that statement, and as said it is false. The exact gradient is zero: $J = 1$ whatever $\theta$ is.

# %%
everything_right = torch.ones(len(tree.ids), dtype=torch.float64)
assert exact_gradient(tree, everything_right, policy.parameters()).abs().max() < 1e-10

# %% [markdown]
# What about single steps? Take a policy of one token with probabilities $\pi = (0.7, 0.1, 0.1, 0.1)$. Draw a token, and
# move the logits by its score. All four outcomes can be listed. The logits stay where they are **on average**; and the
# probability of the favourite goes down on average, since the softmax is curved.

# %%
start = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
moved = start.log() + logit_score(start.log().expand(4, 4), torch.arange(4))  # [4 outcomes, 4 logits]
favourite = (start @ moved.softmax(-1))[0].item()
print(f"the favourite's probability: {start[0]:.4f} before the step, {favourite:.4f} on average after it")
assert torch.allclose(start @ moved, start.log(), atol=1e-10)
assert favourite < start[0]

# %% [markdown]
# And yet many such steps do change the policy. With nothing to hold it, it wanders, and a wandering softmax ends up in a
# corner: whatever it happens to write becomes what it writes. Here are 400 policies, 500 steps of one sample each at
# learning rate 1, from a uniform start over four answers; entropy is in nats. Then 400 more, 20 steps from a start that
# is nearly certain, where the entropy rises.

# %%
generator = torch.Generator().manual_seed(0)
drift = {}
for first, steps in ((0.25, 500), (0.97, 20)):
    begin = torch.tensor([first, *[(1 - first) / 3] * 3], dtype=torch.float64).log()
    z = begin.expand(400, 4).clone()
    for _ in range(steps):
        answer = torch.multinomial(z.softmax(-1), 1, generator=generator)
        z += logit_score(z, answer[:, 0])
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    half_width = 1.96 * (entropy.std() / 400**0.5).item()
    winners = z.argmax(-1).bincount(minlength=4)
    before = -(begin.exp() * begin).sum().item()
    drift[first] = (before, entropy.mean().item(), half_width, winners)
    print(
        f"from π = {first}: entropy {before:.3f} -> {entropy.mean():.3f} ± {half_width:.3f}; favourites {winners.tolist()}"
    )
before, after, half_width, winners = drift[0.25]
assert after + half_width < 0.1  # from 1.386
assert (winners - 100).abs().max() < 4 * (400 * 0.25 * 0.75) ** 0.5  # each answer wins equally often
before, after, half_width, _ = drift[0.97]
assert after - half_width > before

# %% [markdown]
# So there is no pull towards the favourite. There is noise, and noise with nothing to oppose it collapses a policy onto an
# arbitrary answer. The remedy is to make the weights of equally good completions zero: section 6.
#
# ## What the derivation assumed
#
# First, that the samples come from $\pi_\theta$ itself. Generation is expensive, so the samples of an older policy $\mu$
# get reused.
#
# **Claim 4.7.** Then line 6 is the wrong average, and the estimator is biased. Five weights for
# token $t$ are compared on the tree of $\mu$, exactly:
#
# - $R$: nothing is corrected;
# - $R\, \pi(a_t|s_t) / \mu(a_t|s_t)$: the ratio of this token;
# - $R\, \pi(\tau) / \mu(\tau)$: the ratio of the whole completion;
# - $R \prod_{i \le t} \pi(a_i|s_i) / \mu(a_i|s_i)$: the ratio of the prefix up to and including the token;
# - the same with $Q(s_t, a_t)$, the reward to be expected from $\pi$ after token $t$, in the place of $R$.

# %%
old = enumerate_tree(TabularPolicy(3, 3, seed=1), max_length=3, eos_id=0)
ratio = (tree.logprobs - old.logprobs).detach().exp()  # masked positions have log-probs of 0, so a ratio of 1
prefix = ratio.cumprod(-1)
Q = exact_values(tree, rewards).q[tree.states, tree.ids]
weights = {
    "R, uncorrected": rewards,
    "R × token ratio": rewards[:, None] * ratio,
    "R × prefix ratio": rewards[:, None] * prefix,
    "R × completion ratio": rewards * prefix[:, -1],
    "Q × prefix ratio": Q * prefix,
}
bias = {}
for name, weight in weights.items():
    per_leaf = row_gradients(reinforce_terms(tree.logprobs, weight).sum(-1), policy.parameters())
    bias[name] = (expectation(old, per_leaf) - line_8).norm().item()
    print(f"{name:21} bias {bias[name]:.1e}  (‖∇J‖ = {line_8.norm():.4f})")
assert all(bias[name] > 0.005 for name in ("R, uncorrected", "R × token ratio", "R × prefix ratio"))
assert all(bias[name] < 1e-10 for name in ("R × completion ratio", "Q × prefix ratio"))

# %% [markdown]
# Only the last two are exact. $R$ contains what $\mu$ wrote after token $t$, and a prefix ratio does not correct that; $Q$
# has no such future in it. The ratio of PPO and GRPO is the token's own, and it is biased; section 10 uses it nevertheless
# and shows why it is kept close to 1.
#
# Second, the estimator is right on average, and nothing was said about a single step. Third, the gradient is a
# direction; nothing says how far to go.
#
# ## What is still missing
#
# The estimator is unbiased, but with a few completions it can be wildly off: section 5 measures how noisy it is, and
# sections 6 to 8 take noise out without new samples. How far a step may go before the samples no longer describe the
# policy is the question of section 9.
