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
# A policy $\pi_\theta$ with parameters $\theta$ writes a completion $\tau$, and a black box returns its reward
# $R(\tau)$. We want to raise the expected reward $J(\theta)$ by following its gradient $\nabla_\theta J$. But the black
# box cannot be differentiated, and the parameters $\theta$ are not in it anyway: they decide *which* completions are
# drawn. How does one differentiate through a draw?
#
# The answer takes eight lines. Each of them is evaluated here on a tree of all completions (section 2), so that "equals"
# is not a promise: the numbers on both sides are computed, and compared.

# %%
import ipywidgets as widgets
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.policy import gather_logprobs, supervised_loss
from lmrl.tree import (
    TabularPolicy,
    Tree,
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
# **Line 1.** The expected reward is a sum over completions (section 2). $\theta$ occurs in the probabilities, and nowhere
# else. (Each line's equation carries the line's number.)
#
# $$J(\theta) = \sum_\tau \pi_\theta(\tau)\, R(\tau) \tag{4.1}$$

# %%
probabilities = leaf_probabilities(tree)
line_1 = (probabilities * rewards).sum()
print(f"J = {line_1:.6f}")
assert torch.isclose(line_1, exact_values(tree, rewards).v[0], rtol=0, atol=1e-10)  # the value of the empty prefix

# %% [markdown]
# **Line 2.** The gradient of a sum is the sum of the gradients. $R(\tau)$ does not contain $\theta$: for the gradient it is
# a constant, whatever program or person produced it.
#
# $$\nabla_\theta J = \sum_\tau \nabla_\theta \pi_\theta(\tau)\; R(\tau) \tag{4.2}$$
#
# Below, `slopes` has a row $\nabla_\theta \pi_\theta(\tau)$ for each completion. The sum must be what automatic
# differentiation makes of line 1.

# %%
slopes = row_gradients(probabilities, policy.parameters())  # [L, P]
line_2 = (slopes * rewards[:, None]).sum(0)
print(f"‖∇J‖ = {line_2.norm():.6f}")
assert torch.allclose(line_2, flat_gradient(line_1, policy.parameters()), rtol=0, atol=1e-10)

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
# **Line 4.** The one idea. The derivative of a logarithm is $\nabla \log f = \nabla f / f$, so $\nabla f = f\, \nabla \log f$:
#
# $$\nabla_\theta \pi_\theta(\tau) = \pi_\theta(\tau)\, \nabla_\theta \log \pi_\theta(\tau) \tag{4.4}$$
#
# On the left is by how much the probability changes, on the right by what fraction of itself. Section 2 called
# $\nabla_\theta \log \pi_\theta(\tau)$ the **score** of $\tau$.

# %%
scores = score_matrix(tree, policy.parameters())  # [L, P]
assert torch.allclose(slopes, probabilities[:, None] * scores, rtol=0, atol=1e-10)

# %% [markdown]
# **Line 5.** Put line 4 into line 2. Each term now comes with its own probability, which is what sampling needs.
#
# $$\nabla_\theta J = \sum_\tau \pi_\theta(\tau)\; \nabla_\theta \log \pi_\theta(\tau)\; R(\tau) \tag{4.5}$$

# %%
line_5 = (probabilities[:, None] * scores * rewards[:, None]).sum(0)
assert torch.allclose(line_5, line_2, rtol=0, atol=1e-10)

# %% [markdown]
# **Line 6.** Such a sum is an expectation, and the probabilities in it are the policy's own: the average over texts that
# the policy writes estimates it.
#
# $$\nabla_\theta J = \mathbb{E}_{\tau \sim \pi_\theta}\big[R(\tau)\, \nabla_\theta \log \pi_\theta(\tau)\big] \tag{4.6}$$
#
# **Claim 4.1** is this line against automatic differentiation of $J$. Sampling is checked too: with 20 000 draws every
# component must be within four standard errors (a constant component exactly).

# %%
line_6 = expectation(tree, rewards[:, None] * scores)
assert torch.allclose(line_6, line_5, rtol=0, atol=1e-10)
assert torch.allclose(line_6, exact_gradient(tree, rewards, policy.parameters()), rtol=0, atol=1e-10)

drawn = torch.multinomial(probabilities.detach(), 20_000, True, generator=torch.Generator().manual_seed(0))
samples = (rewards[:, None] * scores)[drawn]
standard_error = samples.std(0) / len(samples) ** 0.5
errors = (samples.mean(0) - line_6.detach()).abs()
print(f"largest error of the sampled mean: {(errors / standard_error.clamp(min=1e-12)).max():.2f} standard errors")
assert (errors <= 4 * standard_error + 1e-10).all()

# %% [markdown]
# **Line 7.** The probability of a completion is a product over its tokens, so its logarithm is a sum. Let $s_t$ be the
# prefix before token $a_t$, and $T$ the number of tokens. This is (2.1).
#
# $$\log \pi_\theta(\tau) = \sum_{t=1}^{T} \log \pi_\theta(a_t \mid s_t) \tag{4.7}$$
#
# The left side is computed as the logarithm of the product.

# %%
product = torch.where(tree.mask, tree.logprobs.exp(), 1.0).prod(-1)
assert torch.allclose(product.log(), tree.logprobs.sum(-1), rtol=0, atol=1e-10)
assert torch.allclose(row_gradients(product.log(), policy.parameters()), scores, rtol=0, atol=1e-10)

# %% [markdown]
# **Line 8.** Put line 7 into line 6. The score of a completion is the sum of the scores of its tokens, and the log-probs of
# tokens are what a language model returns.
#
# $$\nabla_\theta J = \mathbb{E}_{\tau \sim \pi_\theta}\Big[R(\tau) \sum_{t=1}^{T} \nabla_\theta \log \pi_\theta(a_t \mid
# s_t)\Big] \tag{4.8}$$
#
# This is the **policy gradient**. The estimator that samples it is called REINFORCE (Williams, 1992).

# %%
token_scores = [row_gradients(column, policy.parameters()) for column in tree.logprobs.unbind(1)]  # T times [L, P]
line_8 = expectation(tree, rewards[:, None] * sum(token_scores))
assert torch.allclose(line_8, line_6, rtol=0, atol=1e-10)

# %% [markdown]
# **Claim 4.2** was that all lines agree, where they are equalities: lines 2, 5, 6 and 8 are one vector, line 1 is its
# primitive, lines 4 and 7 hold for each completion, and line 3 is the obstacle, not an equality.
#
# The figure has a panel for each line. A vector cannot be drawn, so wherever a line has a gradient in it, its component
# along $\nabla J$ is shown; for $\nabla J$ itself that is its length. Follow that one number: it is a sum of bars that are
# no probabilities (line 2), an area in which each completion is as wide as it is probable (5), an average that samples
# approach (6), and a sum over the places in the text (8).


# %% tags=["export:figures"]
FORMULAS = {
    1: r"$J = \sum_\tau\,\pi(\tau)\,R(\tau)$",
    2: r"$\nabla J = \sum_\tau\,\nabla\pi(\tau)\,R(\tau)$",
    3: r"$\nabla\pi(\tau)$ is no probability",
    4: r"$\nabla\pi(\tau) = \pi(\tau)\,\nabla\log\,\pi(\tau)$",
    5: r"$\nabla J = \sum_\tau\,\pi(\tau)\,\nabla\log\,\pi(\tau)\,R(\tau)$",
    6: r"$\nabla J = \mathrm{E}\,[\,R(\tau)\,\nabla\log\,\pi(\tau)\,]$",
    7: r"$\log\,\pi(\tau) = \sum_t\,\log\,\pi(a_t|s_t)$",
    8: r"$\nabla J = \mathrm{E}\,[\,R(\tau)\,\sum_t\,\nabla\log\,\pi(a_t|s_t)\,]$",
}


def derivation_figure(tree: Tree, parameters, rewards: torch.Tensor, texts: list[str], lines=range(1, 9)) -> Figure:
    """The chosen lines of the derivation, two in a row, each with its picture and its value.

    Gradients are shown by their component along ∇J, so that lines 2, 5, 6 and 8 all have the value ‖∇J‖.
    """
    parameters = list(parameters)
    along = torch.nn.functional.normalize(exact_gradient(tree, rewards, parameters), dim=0)
    p = leaf_probabilities(tree)
    slopes, scores = row_gradients(p, parameters) @ along, score_matrix(tree, parameters) @ along
    by_token = [row_gradients(column, parameters) @ along for column in tree.logprobs.unbind(1)]
    p, logprobs = p.detach(), tree.logprobs.detach()
    draw = {
        1: lambda ax: _areas(ax, texts, p, rewards, COLORS["reward"]),
        2: lambda ax: _bars(ax, texts, slopes * rewards),
        3: lambda ax: _bars(ax, texts, slopes),
        4: lambda ax: _bars_and_dots(ax, texts, [slopes], p * scores),
        5: lambda ax: _areas(ax, texts, p, scores * rewards, COLORS["policy"]),
        6: lambda ax: _running_average(ax, scores * rewards, p),
        7: lambda ax: _bars_and_dots(ax, texts, logprobs.unbind(1), logprobs.exp().prod(-1).log()),
        8: lambda ax: _steps(ax, [(p * rewards * score).sum().item() for score in by_token]),
    }
    rows = (len(lines) + 1) // 2
    fig, axes = new_figure(rows, 2, height=2.4 * rows, squeeze=False)
    fig.set_layout_engine(None)  # a third of the drawing time
    fig.subplots_adjust(left=0.08, right=0.98, bottom=0.25 / rows, top=1 - 0.25 / rows, hspace=1.0, wspace=0.2)
    for line, ax in zip(lines, axes.flat):
        value = draw[line](ax)
        ax.set_title(f"{line}:  {FORMULAS[line]}\n{value}", loc="left", fontsize=10)
    return fig


def _text_axis(ax, texts):
    ax.set_xticks(range(len(texts)), texts, rotation=90, fontsize=8)
    ax.axhline(0, color="black", lw=0.8)


def _bars(ax, texts, heights):
    ax.bar(range(len(texts)), heights.tolist(), color=COLORS["policy"])
    _text_axis(ax, texts)
    return f"heights sum to {abs(heights.sum().item()):.4f}"


def _bars_and_dots(ax, texts, parts, dots):
    """Bars of `parts` stacked on each other, and a dot where the other side of the equation is."""
    bottom = torch.zeros_like(dots)
    for part in parts:
        ax.bar(
            range(len(texts)), part.tolist(), 0.8, bottom.tolist(), color=COLORS["policy"], edgecolor="white", lw=0.5
        )
        bottom = bottom + part
    ax.plot(range(len(texts)), dots.tolist(), "o", ms=4, color=COLORS["advantage"])
    _text_axis(ax, texts)
    return f"left: bars, right: dots; they differ by {(bottom - dots).abs().max():.0e}"


def _areas(ax, texts, widths, heights, color):
    left = 0.0
    for text, width, height in zip(texts, widths.tolist(), heights.tolist()):
        ax.bar(left, height, width, align="edge", color=color, edgecolor="white", lw=0.4)
        if width > 0.06 and height:
            offset, align = (2, "bottom") if height > 0 else (-3, "top")
            place = {"xytext": (0, offset), "textcoords": "offset points", "ha": "center", "va": align}
            ax.annotate(text, (left + width / 2, height), fontsize=8, **place)
        left += width
    ax.axhline(0, color="black", lw=0.8)
    ax.margins(y=0.15)
    ax.set_xlabel("width: π(τ)", fontsize=9)
    return f"area {widths @ heights:.4f}"


def _running_average(ax, values, probabilities, samples=2000):
    drawn = torch.multinomial(probabilities, samples, True, generator=torch.Generator().manual_seed(0))
    exact, count = probabilities @ values, torch.arange(10, samples + 1)
    average = values[drawn].cumsum(0)[9:] / count
    error = 2 * (probabilities @ (values - exact).square() / count).sqrt()
    ax.fill_between(count, exact - error, exact + error, color=COLORS["reference"], alpha=0.25, lw=0)
    ax.axhline(exact, color=COLORS["reference"], ls="--", lw=1)
    ax.semilogx(count, average, color=COLORS["policy"])
    ax.annotate("±2 standard errors", (0.98, 0.9), xycoords="axes fraction", fontsize=8, ha="right")
    ax.set_xlabel("completions sampled", fontsize=9)
    return f"exact {exact:.4f}; {samples:,} samples give {average[-1]:.4f}"


def _steps(ax, contributions):
    bottom = 0.0
    for t, height in enumerate(contributions, start=1):
        ax.bar(t, height, 0.8, bottom, color=COLORS["policy"])
        bottom += height
        ax.plot([t - 0.4, t + 1.4], [bottom] * 2, color="black", lw=0.8)
    ax.bar(len(contributions) + 1, bottom, 0.8, color=COLORS["reference"])
    names = [f"token {t}" for t in range(1, len(contributions) + 1)]
    ax.set_xticks(range(1, len(names) + 2), [*names, "all"], fontsize=9)
    ax.axhline(0, color="black", lw=0.8)
    return f"contributions add up to {bottom:.4f}"


# %%
show(
    derivation_figure(tree, policy.parameters(), rewards, texts),
    caption="Eight lines, one number: ‖∇J‖ as bars, as an area, as an average, and token by token.",
    alt="Eight panels, one for each line. Line 1 is an area of widths π and heights R. Lines 2 and 3 are bars, some of them "
    "negative; without R they sum to zero. In line 4 dots lie on the ends of bars. Line 5 is an area with the same value as "
    "line 2, and line 6 a running average that settles on it. In line 7 stacked token log-probs end at dots. In line 8 the "
    "contributions of three tokens add up to the value of lines 2, 5 and 6.",
)

# %% [markdown]
# Now step through the lines, each beside the one before it, and change $\theta$ as you go: the second slider adds a
# number to the logit of `b` in every state. Every value moves; what is equal stays equal. At the right end, where most
# texts are full of `b`, watch line 5: the gradient has become what is left of two larger areas of opposite sign.

# %%
towards_b = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
explore(
    lambda line, lean: derivation_figure(
        enumerate_tree(lambda prefixes: policy(prefixes) + lean * towards_b, 3, 0),
        policy.parameters(),
        rewards,
        texts,
        (line - 1, line),
    ),
    line=widgets.IntSlider(2, 2, 8, description="line"),
    lean=widgets.FloatSlider(
        0.0, min=-2, max=3, step=0.25, description="added to the logit of b", style={"description_width": "initial"}
    ),
)

# %% [markdown]
# ## In code
#
# Automatic differentiation wants a number to differentiate. Draw $N$ completions. Let $a_{i,t}$ be token $t$ of completion
# $\tau_i$, let $s_{i,t}$ be the prefix before it, let $A_i$ be a weight for the completion, and take
#
# $$\mathcal{L}(\theta) = -\frac1N \sum_{i=1}^N \sum_t A_i \log \pi_\theta(a_{i,t} \mid s_{i,t}). \tag{4.9}$$
#
# With $A_i = R(\tau_i)$ its gradient is minus the estimator of line 8; the sign is there because optimisers go
# downhill. (Why the letter $A$: from section 6 on the weight is an advantage. The code calls it that from the start.)
# Its *value* means nothing: it is no measure of progress. It is called a **surrogate** for that reason.
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
assert torch.allclose(
    row_gradients(losses, policy.parameters()), -rewards[:, None] * sum(token_scores), rtol=0, atol=1e-10
)
print(f"J = {line_1:.4f}, but the expected loss is {expectation(tree, losses):.4f}")

# %% [markdown]
# ## What it says
#
# A step along this gradient makes every token that was sampled more likely, in proportion to the reward that its completion
# received in the end. All other tokens pay for it, since probabilities sum to 1.
#
# How does that differ from supervised training? The score of a token $a$, as seen at the logits $z$ of its state, is
# (with $\mathrm{onehot}(a)$ for the vector that is 1 at $a$ and 0 elsewhere, and $\pi$ for the vector of all
# probabilities there)
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
# **Claim 4.4.** Hand the sampled completions to the supervised loss of section 1, as if somebody had written them. Its
# gradient is the score of the sampled tokens, with the sign of a loss. (The supervised loss is a mean over tokens;
# multiplying it by their number makes it a sum.)

# %%
logits = tree.log_policy.detach()[tree.states].requires_grad_()  # [L, T, V]
imitation = supervised_loss(gather_logprobs(logits, tree.ids), tree.mask) * tree.mask.sum()
(imitation_gradient,) = torch.autograd.grad(imitation, logits)
score = logit_score(logits.detach(), tree.ids)
assert torch.allclose(imitation_gradient[tree.mask], -score[tree.mask], rtol=0, atol=1e-10)

# %% [markdown]
# So $R = 1$ is imitation of one's own text, $R = 0$ ignores it, and $R = -1$ is the opposite of imitation (section 1), which
# no demonstration can ask for.
#
# ## Rare tokens
#
# A token that is rarely drawn gets few chances to be reinforced. The score makes up for that: in $\nabla \log \pi = \nabla
# \pi / \pi$ the probability of what was drawn stands in the denominator. Does a rare token then have a huge score?
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
assert torch.allclose(norms**2, 1 - 2 * example + example.square().sum(), rtol=0, atol=1e-10)
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
assert torch.allclose(start @ moved, start.log(), rtol=0, atol=1e-10)
assert favourite < start[0]

# %% [markdown]
# And yet many such steps do change the policy. With nothing to hold it, it wanders, and a wandering softmax ends up in a
# corner: whatever it happens to write becomes what it writes. The next cell follows many such policies, which start
# alike and draw different samples.


# %% tags=["export:figures"]
def self_imitation(first: float, steps: int, policies: int = 400, learning_rate: float = 1.0) -> torch.Tensor:
    """Logits [steps + 1, policies, 4] of one-token policies that get R = 1 for whatever they sample.

    Each starts with the probability `first` for the first of its four answers, and takes a step after every sample.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.tensor([first, *[(1 - first) / 3] * 3], dtype=torch.float64).log()
    path = [start.expand(policies, 4)]
    for _ in range(steps):
        answers = torch.multinomial(path[-1].softmax(-1), 1, generator=generator)[:, 0]
        path.append(path[-1] + learning_rate * logit_score(path[-1], answers))
    return torch.stack(path)


def drift_figure(path: torch.Tensor) -> Figure:
    """Twenty policies and the mean of all, step by step: the first answer's probability, and the entropy.

    path: logits [steps + 1, policies, V], as from `self_imitation`.
    """
    fig, axes = new_figure(1, 2, height=3.2)
    fig.set_layout_engine(None)
    fig.subplots_adjust(left=0.06, right=0.98, bottom=0.16, top=0.9, wspace=0.15)
    probability = path.softmax(-1)[..., 0]
    entropy = -(path.softmax(-1) * path.log_softmax(-1)).sum(-1)
    for ax, values in zip(axes, (probability, entropy)):
        steps, mean = range(len(path)), values.mean(1)
        half_width = 1.96 * values.std(1) / values.shape[1] ** 0.5
        ax.plot(steps, values[:, :20], color=COLORS["policy"], lw=0.7, alpha=0.4)
        ax.fill_between(steps, mean - half_width, mean + half_width, color=COLORS["error"], alpha=0.3, lw=0)
        ax.plot(steps, mean, color=COLORS["error"], lw=2)
        text = {"fontsize": 9, "color": COLORS["error"], "ha": "right", "bbox": {"fc": "white", "ec": "none", "pad": 1}}
        ax.annotate(f"mean {mean[-1]:.2f}", (len(path) - 1, mean[-1]), (-2, 8), textcoords="offset points", **text)
        ax.set_xlabel("steps, each with R = 1")
    axes[0].set_title("probability of the first answer", loc="left")
    axes[0].set_ylim(-0.03, 1.03)
    axes[1].set_title("entropy (nats)", loc="left")
    axes[1].set_ylim(-0.04, 1.45)
    return fig


# %% [markdown]
# Three starts, 400 policies each, at learning rate 1: four equally likely answers; a favourite of 0.7; a near certain one
# of 0.97. Intervals are of 95%.

# %%
drift = {}
for first, steps in ((0.25, 500), (0.7, 500), (0.97, 20)):
    path = self_imitation(first, steps)
    probability, entropy = path.softmax(-1)[..., 0], -(path.softmax(-1) * path.log_softmax(-1)).sum(-1)
    drift[first] = {"winners": path[-1].argmax(-1).bincount(minlength=4)}
    for name, values in (("first", probability), ("entropy", entropy)):
        mean, half_width = values[-1].mean().item(), 1.96 * values[-1].std().item() / 400**0.5
        drift[first][name] = (values[0, 0].item(), mean - half_width, mean + half_width)
    print(
        f"first answer {first}, {steps:3} steps: now the favourite of {drift[first]['winners'][0]} policies in 400; ",
        end="",
    )
    print("mean entropy {:.3f} -> {:.3f} to {:.3f} nats".format(*drift[first]["entropy"]))
assert drift[0.25]["entropy"][2] < 0.1  # from 1.386
assert (drift[0.25]["winners"] - 100).abs().max() < 4 * (400 * 0.25 * 0.75) ** 0.5  # each answer wins equally often
assert drift[0.7]["first"][2] < 0.7  # the favourite has lost
assert drift[0.97]["entropy"][1] > drift[0.97]["entropy"][0]  # and here the entropy has risen

# %%
show(
    drift_figure(self_imitation(0.7, 200)),
    caption="R = 1 for everything, from a favourite of 0.7. Each policy ends up sure of something; fewer and fewer of the "
    "first answer.",
    alt="Left, the first answer's probability in twenty policies: each soon sticks to the top or to the bottom, some change "
    "sides, and the mean falls from 0.70. Right, their entropies: noisy lines whose mean falls towards zero.",
)

# %% [markdown]
# Move the start to 0.25: the mean stays about there, and still each policy collapses. Lower the learning rate: the same
# happens more slowly. From 0.97, in 20 steps, the entropy rises.

# %%
explore(
    lambda first, learning_rate, steps: drift_figure(self_imitation(first, steps, learning_rate=learning_rate)),
    first=widgets.FloatSlider(
        0.7, min=0.25, max=0.97, step=0.01, description="first answer", style={"description_width": "initial"}
    ),
    learning_rate=widgets.FloatSlider(
        1.0, min=0.1, max=1.0, step=0.1, description="learning rate", style={"description_width": "initial"}
    ),
    steps=widgets.IntSlider(200, min=20, max=300, step=20, description="steps"),
)

# %% [markdown]
# So there is no pull towards the favourite. There is noise, and noise with nothing to oppose it collapses a policy onto an
# arbitrary answer. The remedy is to make the weights of equally good completions zero: section 6.
#
# ## Three conditions
#
# First, the samples have to come from $\pi_\theta$ itself. Generating text is expensive, so one would like to use it for
# more than one step; but after the first, the samples are those of an older policy $\pi_{\text{old}}$.
#
# **Claim 4.7.** Then line 6 is the wrong average, and the estimator is biased. Five weights for token $t$ are compared
# on the tree of $\pi_{\text{old}}$, exactly. With $r_t = \pi(a_t|s_t) / \pi_{\text{old}}(a_t|s_t)$ for the ratio of
# token $t$ (sections 2 and 8 use this letter for the reward after a token; everywhere else it is a ratio), they are:
#
# - $R$: nothing is corrected;
# - $R\, r_t$: the ratio of this token;
# - $R \prod_{i \le t} r_i$: the ratio of the prefix up to and including the token;
# - $R\, \pi(\tau) / \pi_{\text{old}}(\tau)$, that is $R \prod_i r_i$: the ratio of the whole completion;
# - $Q(s_t, a_t) \prod_{i \le t} r_i$: the prefix ratio again, with the reward that $\pi$ is to expect after token $t$
#   (section 2) in the place of $R$.

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
# Only the last two are exact. $R$ contains what $\pi_{\text{old}}$ wrote after token $t$, and a prefix ratio does not correct
# that; $Q$ has no such future in it. The ratio of PPO and GRPO is the token's own, and it is biased; section 10 uses it
# nevertheless and shows why it is kept close to 1.
#
# Second, line 6 is about the average of all samples. A training step sees a few, and their average can point anywhere;
# section 5 is about how far off it is.
#
# Third, a gradient is the slope at one $\theta$. It does not say how long a step may be before the slope has changed;
# section 9 is about that.
#
# ## Exercises
#
# **1. Predict, then run.** A policy of one token chooses among three answers with probabilities 0.5, 0.3 and 0.2. Only the
# first is right: $R = 1, 0, 0$. What is $\nabla J$ in the three logits? Work it out from line 6 and (4.10) before you run
# the check, and explain why the two wrong answers do not get the same number.

# %% tags=["exercise"]
predicted_gradient = None  # three numbers, as a list

# %% tags=["solution"]
# Only the first answer contributes: 0.5 · (onehot − π). A wrong answer is lowered in proportion to its own probability.
predicted_gradient = [0.5 * (1 - 0.5), 0.5 * (0 - 0.3), 0.5 * (0 - 0.2)]

# %% tags=["check"]
import torch

from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient

assert predicted_gradient is not None, "put your prediction in"
quiz_policy = TabularPolicy(3, 1)
quiz_policy.logits.data[0] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
quiz_rewards = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
quiz_gradient = exact_gradient(enumerate_tree(quiz_policy, 1), quiz_rewards, quiz_policy.parameters())
difference = (torch.tensor(predicted_gradient, dtype=torch.float64) - quiz_gradient).abs().max()
assert difference < 1e-10, f"the tree says {quiz_gradient.tolist()}"

# %% [markdown]
# **2. Only what comes after.** This section's reward is a sum: each `b` earns 1/3 at the moment when it is written. A token
# cannot have caused what was earned before it. Write the weights that give to each token only the rewards from its own
# place on, and let the check tell you whether the mean of the estimator is still $\nabla J$.

# %% tags=["exercise"]
import torch


def rewards_to_go(token_rewards: torch.Tensor) -> torch.Tensor:
    """Sum of a row's rewards from each token on: [B, T] -> [B, T]; masked tokens have reward 0."""
    raise NotImplementedError("what was earned before token t is not in its weight")


# %% tags=["solution"]
import torch


def rewards_to_go(token_rewards: torch.Tensor) -> torch.Tensor:
    """Sum of a row's rewards from each token on: [B, T] -> [B, T]; masked tokens have reward 0."""
    return token_rewards.flip(-1).cumsum(-1).flip(-1)


# %% tags=["check"]
import torch

from lmrl.reinforce import reinforce_terms
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, leaf_probabilities, row_gradients

for seed in range(3):
    speaker = TabularPolicy(3, 3, seed=seed)
    oracle = enumerate_tree(speaker, 3, eos_id=0)
    earned = ((oracle.ids == 2) & oracle.mask).double() / 3
    weights = rewards_to_go(earned)
    assert weights.shape == earned.shape and not (weights[:, 1:] == weights[:, :1]).all(), "one weight for all tokens"
    estimates = row_gradients(reinforce_terms(oracle.logprobs, weights).sum(-1), speaker.parameters())
    error = leaf_probabilities(oracle) @ estimates - exact_gradient(oracle, earned.sum(-1), speaker.parameters())
    assert error.abs().max() < 1e-10, f"the mean misses ∇J by {error.norm():.4f}"

# %% [markdown]
# **3. Find the bug.** The surrogate of a batch, from the logits that section 1's `completion_logits` returns and the sampled
# ids. It trains: the loss moves, and the policy with it. The oracle finds that the mean of the estimator is not
# $\nabla J$. Where does each token's log-probability come from?

# %% tags=["exercise"]
import torch

from lmrl.policy import gather_logprobs
from lmrl.reinforce import reinforce_terms


def surrogate(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """REINFORCE surrogate of each row, [B]: completion logits [B, T, V], ids [B, T], mask [B, T], rewards [B]."""
    logprobs = gather_logprobs(logits[:, :-1], ids[:, 1:])  # position t predicts token t + 1
    return torch.where(mask[:, 1:], reinforce_terms(logprobs, rewards), 0.0).sum(-1)


# %% tags=["solution"]
import torch

from lmrl.policy import gather_logprobs
from lmrl.reinforce import reinforce_terms


def surrogate(logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """REINFORCE surrogate of each row, [B]: completion logits [B, T, V], ids [B, T], mask [B, T], rewards [B]."""
    logprobs = gather_logprobs(logits, ids)  # completion_logits has made the shift already
    return torch.where(mask, reinforce_terms(logprobs, rewards), 0.0).sum(-1)


# %% tags=["check"]
import torch

from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, leaf_probabilities, row_gradients

for seed in range(3):
    speaker = TabularPolicy(3, 3, seed=seed)
    oracle = enumerate_tree(speaker, 3, eos_id=0)
    scored = torch.rand(len(oracle.ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    per_row = surrogate(oracle.log_policy[oracle.states], oracle.ids, oracle.mask, scored)
    mean = leaf_probabilities(oracle) @ row_gradients(per_row, speaker.parameters())
    exact = exact_gradient(oracle, scored, speaker.parameters())
    cosine = torch.cosine_similarity(mean, exact, dim=0)
    assert (mean - exact).abs().max() < 1e-10, f"the mean is not ∇J: their cosine is {cosine:.3f}"

# %% [markdown]
# ## What is still missing
#
# The estimator is unbiased, but with a few completions it can be wildly off: section 5 measures how noisy it is, and
# sections 6 to 8 take noise out without new samples. How far a step may go before the samples no longer describe the
# policy is the question of section 9.
