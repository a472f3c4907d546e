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
# # 5. Why the estimator is so noisy
#
# Section 4 ended with an estimator of $\nabla J$ that is right on average: sample a completion $\tau$, multiply its score
# $s(\tau) = \nabla_\theta \log \pi_\theta(\tau)$ by its reward $R(\tau)$. But training does not see the average. It sees
# sixteen completions, or sixty-four, and takes a step. How far off is such a step, and what is it that makes it so?
#
# This section builds the instrument that answers such questions, for any estimator, without sampling error. Then it
# measures the three sources of noise one by one, and what it costs to drown them in samples.

# %%
import dataclasses
from typing import Callable

import ipywidgets as widgets
import torch
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.tree import (
    TabularPolicy,
    Tree,
    completions,
    enumerate_tree,
    exact_gradient,
    expectation,
    leaf_probabilities,
    score_matrix,
)

# %% [markdown]
# ## An instrument
#
# Let $\hat g$ be an estimator: a random vector with one component for each of the $P$ parameters, computed from sampled
# completions. Let $g$ be what it is meant to hit, here $\nabla J$. Four numbers describe how well it does:
#
# - its **mean** $\mathbb{E}[\hat g]$, and its **bias** $\mathbb{E}[\hat g] - g$, which no amount of sampling removes;
# - its **variance** $\mathbb{E}\,\|\hat g - \mathbb{E}[\hat g]\|^2$, the variances of all components added up. This is
#   the trace of the covariance matrix, and the mean squared distance between an estimate and the mean;
# - its **mean squared error** $\mathbb{E}\,\|\hat g - g\|^2 = \text{variance} + \|\text{bias}\|^2$;
# - its **signal-to-noise ratio** $\mathrm{SNR} = \|\mathbb{E}[\hat g]\| \,/\, \sqrt{\text{variance}}$. Below 1, the typical
#   estimate is further from the mean than the mean is long.


# %% tags=["export"]
@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """What an estimator does on average: its mean [P], its bias [P], and its variance summed over components. Section 5.

    Float64. The variance is the trace of the covariance matrix, in squared units of the gradient.
    """

    mean: torch.Tensor
    bias: torch.Tensor
    variance: float

    @property
    def mse(self) -> float:
        """Mean squared distance from the target: the variance plus the squared length of the bias."""
        return self.variance + self.bias.square().sum().item()

    @property
    def snr(self) -> float:
        """Length of the mean over the root of the variance; 0 for a mean of zero, inf for a mean without noise."""
        signal = self.mean.norm().item()
        noise = self.variance**0.5
        return signal / noise if noise else torch.inf if signal else 0.0

    def averaged(self, samples: int) -> "Moments":
        """The moments of the average of `samples` independent copies: variance / samples, all else the same."""
        return dataclasses.replace(self, variance=self.variance / samples)


# %% [markdown]
# For an estimator that uses one completion, all of this is a sum over the leaves of the tree. It is handed over as a
# table: row $\tau$ holds the estimate that completion $\tau$ would give.


# %% tags=["export"]
def leaf_moments(tree: Tree, estimates: torch.Tensor, target: torch.Tensor) -> Moments:
    """Exact moments of an estimator that draws one completion from `tree`: estimates [L, P], target [P]. Section 5.

    `target` is what the estimator is meant to hit, for example `exact_gradient(tree, rewards, parameters)`.
    """
    p, estimates = leaf_probabilities(tree).detach(), estimates.detach().double()
    mean = p @ estimates
    return Moments(mean, mean - target.detach(), (p @ (estimates - mean).square().sum(-1)).item())


# %% [markdown]
# The policy of the last sections: three tokens, of which `#` stops, at most three of them, and a reward of 1 for a text
# that contains `ab`.

# %%
tokens = ["#", "a", "b"]
policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
tree = enumerate_tree(policy, max_length=3, eos_id=0)
texts = ["".join(tokens[i] for i in ids) for ids in completions(tree)]
rewards = torch.tensor([float("ab" in text) for text in texts], dtype=torch.float64)
gradient = exact_gradient(tree, rewards, policy.parameters())
scores = score_matrix(tree, policy.parameters())  # [L, P]

reinforce = leaf_moments(tree, rewards[:, None] * scores, gradient)
print(f"pass rate J = {expectation(tree, rewards):.3f}, ‖∇J‖ = {gradient.norm():.4f}")
print(f"bias {reinforce.bias.norm():.0e}, variance {reinforce.variance:.4f}, SNR {reinforce.snr:.3f}")
assert reinforce.bias.abs().max() < 1e-10
assert reinforce.snr < 1

# %% [markdown]
# Unbiased, and of little use: with one completion the noise is several times longer than the signal.
#
# ## Estimators that see a group
#
# Training draws $N$ completions at a time. If the estimator is a plain average of $N$ independent terms, nothing needs to
# be computed again: the variance of an independent sum is the sum of the variances, so that of the average is
#
# $$\mathrm{Var}\Big[\frac1N \sum_{i=1}^N \hat g_i\Big] = \frac{1}{N^2} \cdot N \cdot \mathrm{Var}[\hat g]
# = \frac{\mathrm{Var}[\hat g]}{N}, \tag{5.1}$$
#
# which is `averaged`. But what if the terms depend on each other, because each reward is compared with the other
# rewards of the group, as in the sections to come? Then the oracle lists every group that could be drawn, all $L^N$ of
# them, with probability $\prod_i \pi(\tau_i)$ each. The estimator is any function of the sampled leaves.

# %% tags=["export"]
MAX_GROUPS = 2_000_000
Estimator = Callable[[torch.Tensor], torch.Tensor]  # sampled leaves [M, N] int64 -> estimates [M, P]


def group_moments(tree: Tree, estimator: Estimator, target: torch.Tensor, samples: int) -> Moments:
    """Exact moments of an estimator that draws `samples` completions from `tree`, over all L**samples groups.

    `estimator` maps M groups of sampled leaves, rows of the tree [M, samples] int64, to their estimates [M, P]; it is
    called twice for each group. `target` [P] is what it is meant to hit. Raises ValueError if there are more than
    MAX_GROUPS groups, or `samples` is below 1. Section 5.
    """
    p = leaf_probabilities(tree).detach()
    if samples < 1 or len(p) ** samples > MAX_GROUPS:
        raise ValueError(
            f"{samples} completions out of {len(p)} make {len(p)}**{samples} groups; the limit is {MAX_GROUPS} groups, "
            "and at least one completion"
        )
    groups = torch.cartesian_prod(*[torch.arange(len(p))] * samples).view(-1, samples)
    chunks = groups.split(max(1, 2**22 // (samples * target.numel())))
    mean = sum(p[leaves].prod(-1) @ estimator(leaves).detach().double() for leaves in chunks)
    variance = sum(p[leaves].prod(-1) @ (estimator(leaves).detach() - mean).square().sum(-1) for leaves in chunks)
    return Moments(mean, mean - target.detach(), variance.item())


# %% [markdown]
# Most estimators of this course are an average of scores with weights that come from the rewards of the group. A
# function that turns rewards into weights is all that differs between them.


# %% tags=["export"]
def weighted_scores(scores: torch.Tensor, rewards: torch.Tensor, weigh: Callable) -> Estimator:
    """The estimator mean_i weight_i · score_i over a group, for `group_moments`: scores [L, P], rewards [L]. Section 5.

    `weigh` maps rewards [B] and group labels [B] int64 to weights [B], as the functions of section 6 do.
    """

    def estimator(leaves):
        group = torch.arange(len(leaves)).repeat_interleave(leaves.shape[1])
        weights = weigh(rewards[leaves].flatten(), group).view(leaves.shape)
        return (weights[..., None] * scores[leaves]).mean(1)

    return estimator


# %% [markdown]
# With the rewards themselves as weights this is REINFORCE, and listing all groups must agree with (5.1). With $N = 4$
# there are $15^4 = 50\,625$ groups.

# %%
plain = weighted_scores(scores, rewards, lambda rewards, group: rewards)
for N in (1, 2, 3, 4):
    listed = group_moments(tree, plain, gradient, N)
    print(f"N = {N}: variance {listed.variance:.6f} over all groups, {reinforce.averaged(N).variance:.6f} by (5.1)")
    assert abs(listed.variance - reinforce.averaged(N).variance) < 1e-10
    assert listed.bias.abs().max() < 1e-10

# %% [markdown]
# Listing stops being possible at a handful of completions. One more family has a closed form: estimators that average
# something over all **pairs** of completions in the group. Let $h(\tau, \tau')$ be the estimate from a pair, and
# $h_1(\tau) = \mathbb{E}_{\tau'}[h(\tau, \tau')]$ its mean when only the first is known. Of the products of two pairs
# that make up the variance, those without a common completion cancel, and counting the others gives
#
# $$\mathrm{Var}_N = \frac{4 (N - 2)\, \mathrm{Var}[h_1(\tau)] + 2\, \mathrm{Var}[h(\tau, \tau')]}{N (N - 1)} \tag{5.2}$$
#
# (Hoeffding, 1948, who called such averages U-statistics). Section 6 has a use for it: comparing each reward with the
# mean of the others is comparing all pairs.


# %% tags=["export"]
def pair_moments(tree: Tree, estimator: Estimator, target: torch.Tensor, samples: int) -> Moments:
    """Exact moments of the average of a pair estimator over all ordered pairs in a group of any size `samples`.

    `estimator` maps pairs of leaves [M, 2] int64 to [M, P]; target [P]. The leave-one-out estimator of a group is such
    an average. Raises ValueError if `samples` is below 2. Section 5, equation 5.2; Hoeffding 1948.
    """
    if samples < 2:
        raise ValueError(f"samples is {samples}; a pair needs at least 2")
    p, leaves = leaf_probabilities(tree).detach(), torch.arange(len(tree.ids))

    def symmetric(pairs):
        return (estimator(pairs) + estimator(pairs.flip(1))).detach().double() / 2

    pair = group_moments(tree, symmetric, target, 2)
    given_one = torch.stack([p @ symmetric(torch.stack([leaf.expand_as(leaves), leaves], 1)) for leaf in leaves])
    single = leaf_moments(tree, given_one, target)
    variance = (4 * (samples - 2) * single.variance + 2 * pair.variance) / (samples * (samples - 1))
    return dataclasses.replace(pair, variance=variance)


# %% [markdown]
# The check: weigh each score by its reward minus the mean of the other rewards. Pairs give the same variance as all
# groups do, and then also the variance at sizes that nobody could list.

# %%
pairs = weighted_scores(scores, rewards, lambda rewards, group: rewards - rewards.view(-1, 2).flip(1).flatten())
for N in (2, 3, 4):
    versus_others = weighted_scores(
        scores, rewards, lambda R, group: ((N * R.view(-1, N) - R.view(-1, N).sum(1, keepdim=True)) / (N - 1)).flatten()
    )
    listed, by_pairs = group_moments(tree, versus_others, gradient, N), pair_moments(tree, pairs, gradient, N)
    print(f"N = {N}: variance {listed.variance:.6f} over all groups, {by_pairs.variance:.6f} by (5.2)")
    assert abs(listed.variance - by_pairs.variance) < 1e-10
    assert listed.bias.abs().max() < 1e-10

# %% [markdown]
# ## Longer than any tree
#
# One more case can be computed exactly, and it reaches thousands of tokens. Let the policy be **memoryless**: every
# token is drawn from the same distribution $\pi$ over $V$ tokens, with one shared vector of logits for parameters. A
# token $a$ then adds $\sigma_a = \mathrm{onehot}(a) - \pi$ to the score (equation 4.10), wherever it stands. And let a
# small machine read the text from left to right, with a state $q$ that each token changes, and a reward that depends on
# the last state only: "the first token was right" needs three states (nothing read yet, right, wrong), "how many were
# right" needs $T + 1$.
#
# For each state carry three sums over all texts that lead to it: the probability $p(q)$, the mean score $m(q)$, and the
# mean squared length of the score $r(q)$. A token takes a text from $q$ to $q'$ and its score from $s$ to $s + \sigma_a$, so
#
# $$p(q') = \sum_{q, a \to q'} \pi_a\, p(q), \qquad
# m(q') = \sum_{q, a \to q'} \pi_a\, \big(m(q) + p(q)\, \sigma_a\big), \qquad
# r(q') = \sum_{q, a \to q'} \pi_a\, \big(r(q) + 2\, m(q) \cdot \sigma_a + p(q)\, \|\sigma_a\|^2\big). \tag{5.3}$$
#
# After $T$ tokens, $\mathbb{E}[R s] = \sum_q R(q)\, m(q)$ and $\mathbb{E}\,\|R s\|^2 = \sum_q R(q)^2\, r(q)$. The work
# grows like $T$, and not like $V^T$.


# %% tags=["export"]
def memoryless_moments(
    probabilities: torch.Tensor, next_state: torch.Tensor, rewards: torch.Tensor, length: int
) -> Moments:
    """Exact moments of REINFORCE from one completion of `length` independent tokens with shared logits. Section 5.

    probabilities [V] of a token; next_state [Q, V] int64, how a token changes the state of the machine that reads the
    text, from state 0; rewards [Q] for ending in each state, minus a constant baseline if there is one. Parameters are
    the V logits. The bias is zero.
    """
    (states, vocab), probs = next_state.shape, probabilities.double()
    token_scores = torch.eye(vocab, dtype=torch.float64) - probs  # σ
    reached = torch.zeros(states, 1, dtype=torch.float64)
    reached[0] = 1
    sums = torch.cat([reached, torch.zeros(states, vocab + 1, dtype=torch.float64)], 1)  # p, m and r of each state
    for _ in range(length):
        p, m, r = sums[:, None].expand(-1, vocab, -1).split([1, vocab, 1], -1)  # [Q, V, ...]
        r = r + 2 * (m * token_scores).sum(-1, keepdim=True) + p * token_scores.square().sum(-1, keepdim=True)
        moved = probs[:, None] * torch.cat([p, m + p * token_scores, r], -1)
        sums = torch.zeros_like(sums).index_add(0, next_state.flatten(), moved.flatten(0, 1))
    mean = rewards.double() @ sums[:, 1:-1]
    mean_square = rewards.double().square() @ sums[:, -1]
    return Moments(mean, torch.zeros_like(mean), (mean_square - mean.square().sum()).item())


# %% [markdown]
# It must agree with the tree where there is one: here for texts of five tokens, of which the first decides.

# %%
probabilities = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
first_decides = torch.tensor(
    [[1, 2, 2], [1, 1, 1], [2, 2, 2]]
)  # state 1: it was right, which is token 0; 2: it was not
right = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)

logits = probabilities.log().requires_grad_()
five_tokens = enumerate_tree(lambda prefixes: logits.expand(len(prefixes), -1), max_length=5)
five_rewards = (five_tokens.ids[:, 0] == 0).double()
listed = leaf_moments(
    five_tokens,
    five_rewards[:, None] * score_matrix(five_tokens, [logits]),
    exact_gradient(five_tokens, five_rewards, [logits]),
)
computed = memoryless_moments(probabilities, first_decides, right, 5)
print(f"SNR {listed.snr:.6f} from {len(five_tokens.ids)} leaves, {computed.snr:.6f} from {len(right)} states")
assert torch.allclose(listed.mean, computed.mean, rtol=0, atol=1e-10)
assert abs(listed.variance - computed.variance) < 1e-10

# %% [markdown]
# ## First source of noise: samples that say nothing
#
# Let the reward be 0 or 1, and let $p = J$ be the **pass rate**, the probability of a 1.
#
# **Claim 5.1.** A completion with $R = 0$ contributes $0 \cdot s(\tau)$, the zero vector. So a fraction $1 - p$ of all
# completions is generated, checked and then multiplied by zero.

# %%
estimates = rewards[:, None] * scores
p = leaf_probabilities(tree).detach()
silent = p[(estimates == 0).all(1)].sum()
print(f"pass rate {expectation(tree, rewards):.4f}, share of completions that contribute nothing {silent:.4f}")
assert abs(silent - (1 - expectation(tree, rewards))) < 1e-10

# %% [markdown]
# **Claim 5.2.** At a pass rate of 0 or 1 the prompt teaches nothing: all completions have the same reward, and there is
# nothing to prefer. But the two ends are not alike. At $p = 0$ every term is zero. At $p = 1$ every term is $1 \cdot s(\tau)$:
# only the *mean* of the terms is zero, and each sample still pushes. It pushes harder than at any other pass rate, since no
# term is silenced, and all of it is noise.

# %%
cases = {"p = 0": torch.zeros_like(rewards), "as it is": rewards, "p = 1": torch.ones_like(rewards)}
ends = {
    name: leaf_moments(tree, R[:, None] * scores, exact_gradient(tree, R, policy.parameters()))
    for name, R in cases.items()
}
for name, moments in ends.items():
    print(f"{name:8}  ‖mean‖ {moments.mean.norm():.4f}   variance {moments.variance:.4f}")
assert ends["p = 0"].variance == 0 and (ends["p = 0"].mean == 0).all()
assert ends["p = 1"].mean.norm() < 1e-10 and ends["p = 1"].variance > ends["as it is"].variance

# %% [markdown]
# Subtract the mean reward of the group, as section 6 will, and $p = 1$ becomes as silent as $p = 0$: all weights are
# $1 - 1$. In the code below the weight of a sample is its reward minus the mean of its group of four.

# %%
centred = weighted_scores(
    scores, cases["p = 1"], lambda R, group: (R.view(-1, 4) - R.view(-1, 4).mean(1, keepdim=True)).flatten()
)
silenced = group_moments(tree, centred, torch.zeros_like(gradient), 4)
print(f"p = 1, minus the group's mean: variance {silenced.variance}")
assert silenced.variance == 0 and (silenced.mean == 0).all()

# %% [markdown]
# A training step gets nothing from such a prompt. *Dynamic sampling* (DAPO, Yu et al., 2025) replaces it by another
# one, for which the rewards of the group differ.
#
# ## Second source: one number for many parameters
#
# The score has a component for each parameter. The reward is one number, and a pass-or-fail reward with pass rate $p$
# carries at most $H_2(p) = -p \log_2 p - (1-p) \log_2 (1-p)$ bits, never more than one. Compare a demonstration of a thousand
# tokens which the model finds moderately surprising, with a log-probability of $-1$ nat for each token.

# %%
p_solved = torch.tensor(0.4, dtype=torch.float64)
reward_bits = torch.special.entr(torch.stack([p_solved, 1 - p_solved])).sum() / torch.tensor(2.0).log()
demonstration_bits = 1000 / torch.tensor(2.0).log()
print(f"one reward at p = 0.4: {reward_bits:.2f} bits;  one demonstration: {demonstration_bits:.0f} bits")
assert reward_bits < 1 < demonstration_bits / 1000

# %% [markdown]
# ## Third source: length
#
# The score of a completion is a sum over its tokens, $s = \sum_t \sigma_{a_t}$. Suppose that only the first token decides
# the reward. The other $T - 1$ are innocent, and their scores, which are zero on average, come along as noise. How much
# noise? For the memoryless policy the squared length of a sum of independent terms of mean zero is the sum of the squared
# lengths. With $\pi_1$ the probability of the right first token and
# $v = \mathbb{E}\,\|\sigma_a\|^2 = 1 - \sum_a \pi_a^2$,
#
# $$\nabla J = \pi_1 \sigma_1, \qquad
# \mathbb{E}\,\|R s\|^2 = \pi_1 \big( \|\sigma_1\|^2 + (T - 1)\, v \big).$$
#
# The mean does not depend on $T$, and the noise grows by the same amount with every token:
#
# $$\mathrm{SNR}^{-2} = \frac{\mathbb{E}\,\|Rs\|^2 - \|\nabla J\|^2}{\|\nabla J\|^2}
# = \Big(\frac{1}{\pi_1} - 1\Big) + \frac{v}{\pi_1 \|\sigma_1\|^2}\,(T - 1). \tag{5.4}$$
#
# **Claim 5.3.** So SNR falls like $1/\sqrt{T}$. What is exact is that $\mathrm{SNR}^{-2}$ is an affine function of $T$;
# the power law is what that looks like when $T$ is large.

# %%
lengths = [2**k for k in range(6, 13)]  # 64 … 4096
by_length = {T: memoryless_moments(probabilities, first_decides, right, T) for T in lengths}
sigma_1 = torch.tensor([0.5, -0.3, -0.2], dtype=torch.float64)
v = 1 - probabilities.square().sum()
for T, moments in by_length.items():
    affine = (1 / 0.5 - 1) + v / (0.5 * sigma_1.square().sum()) * (T - 1)
    print(f"T = {T:4}   SNR {moments.snr:.5f}   SNR⁻² {moments.snr**-2:9.2f}   by (5.4) {affine:9.2f}")
    assert abs(moments.snr**-2 / affine - 1) < 1e-10

x = torch.tensor(lengths).double().log()
y = torch.tensor([moments.snr for moments in by_length.values()], dtype=torch.float64).log()
slope = (x - x.mean()) @ y / (x - x.mean()).square().sum()
print(f"slope of log SNR against log T: {slope:.4f}")
assert abs(slope + 0.5) < 0.02

# %% [markdown]
# The last column is also the number of completions whose average has an SNR of 1. When one token in 4096 decides, that is
# thirteen thousand.
#
# ## Is it length, then?
#
# The article states $1/\sqrt T$ as the law of long completions. It is the law of a signal that does *not grow* with $T$.
# It is not the tokens' number that hurts, but how many of them have nothing to do with the reward. Three other rewards,
# computed by the same recursion:
#
# - *mean*: the reward is the share of right tokens, with and without the mean reward as a baseline;
# - *all*: every token must be right;
# - *all, p = 0.4*: the same, with a policy so good that the pass rate is 0.4 at every length.
#
# For *all*, only one text is rewarded. Its score is the same each time, so the noise is only in *whether* it comes:
# $\mathrm{SNR}^{-2} = 1/p - 1$, with $p = \pi_1^T$ for the pass rate.

# %%
all_right = torch.tensor([[0, 1, 1], [1, 1, 1]])  # state 0: no mistake so far
laws = {"first token": [], "mean": [], "mean − J": [], "all": [], "all, p = 0.4": []}
lengths = [1, 4, 16, 64, 256]
for T in lengths:
    counter = torch.arange(T + 1)[:, None] + torch.tensor([1, 0, 0])  # how many were right so far
    share = torch.arange(T + 1).double() / T
    wrong = (1 - 0.4 ** (1 / T)) / 2
    better = torch.tensor([1 - 2 * wrong, wrong, wrong], dtype=torch.float64)
    for name, problem in {
        "first token": (probabilities, first_decides, right),
        "mean": (probabilities, counter.clamp(max=T), share),
        "mean − J": (probabilities, counter.clamp(max=T), share - 0.5),
        "all": (probabilities, all_right, torch.tensor([1.0, 0.0])),
        "all, p = 0.4": (better, all_right, torch.tensor([1.0, 0.0])),
    }.items():
        laws[name].append(memoryless_moments(*problem, T).snr)

print("SNR at T =    ", *(f"{T:9}" for T in lengths))
for name, values in laws.items():
    print(f"{name:14}", *(f"{value:9.2g}" for value in values))
assert laws["mean"][-2] / laws["mean"][-1] - 2 < 0.02  # four times the length, half the ratio
assert abs(laws["mean − J"][-2] / laws["mean − J"][-1] - 1) < 0.01  # flat
assert all(abs((2.0**T - 1) * snr**2 - 1) < 1e-10 for T, snr in zip(lengths, laws["all"]))
assert all(abs(snr - (0.4 / 0.6) ** 0.5) < 1e-10 for snr in laws["all, p = 0.4"])

# %% [markdown]
# The share of right tokens has the same law as the first token, but for another reason: without a baseline the noise is
# that of a nearly constant reward of $\tfrac12$, and once $J$ is subtracted the ratio no longer depends on the length at
# all. Where every token must be right, length is fatal if it lowers the pass rate, and harmless if it does not.
#
# There is a second thing that the law depends on: whether the tokens share their parameters. Above, the same three logits
# serve every position, and the pushes of all tokens add up. Give every position logits of its own, and each learns from
# its own share of the reward only, a $1/T$-th. Two tokens, equally likely, and the tree:

# %%
for T in range(1, 8):
    shared = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    own = torch.zeros(T, 2, dtype=torch.float64, requires_grad=True)
    of_shared = enumerate_tree(lambda prefixes: shared.expand(len(prefixes), -1), T)
    of_own = enumerate_tree(lambda prefixes: own[prefixes.shape[1]].expand(len(prefixes), -1), T)
    share = (of_own.ids == 0).double().mean(1)
    snr = {}
    for name, a_tree, parameter, b in (
        ("shared", of_shared, shared, 0.0),
        ("own", of_own, own, 0.0),
        ("own − J", of_own, own, 0.5),
    ):
        terms = (share - b)[:, None] * score_matrix(a_tree, [parameter])
        snr[name] = leaf_moments(a_tree, terms, exact_gradient(a_tree, share, [parameter])).snr
    print(f"T = {T}: SNR⁻²", {name: round(value**-2, 6) for name, value in snr.items()})
    assert abs(snr["own"] ** -2 - (T**2 + T - 1)) < 1e-8
    assert T == 1 or abs(snr["own − J"] ** -2 - (T - 1)) < 1e-8

# %% [markdown]
# With own logits $\mathrm{SNR}^{-2}$ is $T^2 + T - 1$, a ratio that falls like $1/T$; a baseline brings it back to
# $1/\sqrt{T-1}$. A transformer is somewhere in between. So the statement to keep is: **noise comes from every token,
# signal only from those that the reward depends on.** Sections 7 and 8 act on exactly this, by weighing each token with
# what came of it.
#
# ## What more samples buy
#
# By (5.1) the error of an average of $N$ completions, $\sqrt{\mathrm{Var}/N}$, falls like $1/\sqrt N$.
#
# **Claim 5.4.** Halving it costs four times the completions. The exact half of the claim is one line. For the measured
# half, 400 averages are drawn for each $N$, with their root mean squared distance from $\nabla J$ and its standard error.

# %%
for N in (1, 10, 100):
    assert abs(reinforce.averaged(4 * N).mse ** 0.5 / reinforce.averaged(N).mse ** 0.5 - 0.5) < 1e-10

generator = torch.Generator().manual_seed(0)
sizes, measured, relative_error = [1, 4, 16, 64, 256], [], []
for N in sizes:
    drawn = torch.multinomial(p, 400 * N, replacement=True, generator=generator).view(400, N)
    squared = (estimates[drawn].mean(1) - gradient).square().sum(1)
    exact = reinforce.averaged(N).mse
    standard_error = (squared.std() / 400**0.5).item()
    measured.append(squared.mean().sqrt())
    relative_error.append(standard_error / squared.mean() / 2)  # of the root, hence half
    print(f"N = {N:3}: error {squared.mean() ** 0.5:.4f} measured, {exact**0.5:.4f} exact")
    assert abs(squared.mean() - exact) < 4 * standard_error

x = torch.tensor(sizes).double().log()
weights = (x - x.mean()) / (x - x.mean()).square().sum()
slope, half_width = weights @ torch.stack(measured).log(), 1.96 * (weights * torch.stack(relative_error)).norm()
print(f"slope of log error against log N: {slope:.3f} ± {half_width:.3f}")
assert abs(slope + 0.5) < 2 * half_width < 0.05

# %% [markdown]
# Generating completions is most of the time of a training step, so this is an expensive way to get rid of noise. Sections
# 6 to 8 look for cheaper ones.
#
# ## The picture
#
# The memoryless policy has three logits and scores that sum to zero, so its gradients lie in a plane, and the whole cloud
# of estimates can be drawn without leaving anything out. On the left, one dot for each completion. On the right, the error
# of an average of $N$: eight averages as they grow, and the exact root mean square.


# %% tags=["export:figures"]
def noise_figure(right: tuple[int, ...] = (0,), length: int = 8, seed: int = 0) -> Figure:
    """Gradient estimates around ∇J, and the error of their average against N.

    Completions of `length` tokens drawn from (.5, .3, .2); the reward is 1 if the first token is in `right`.
    """
    probabilities = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    machine = torch.tensor([[1 if token in right else 2 for token in range(3)], [1] * 3, [2] * 3])
    exact = memoryless_moments(probabilities, machine, torch.tensor([0.0, 1.0, 0.0]), length)
    plane = torch.tensor([[1, -1, 0], [1, 1, -2]], dtype=torch.float64) / torch.tensor([[2.0], [6.0]]).sqrt()
    samples = _sample_estimates(probabilities, right, length, 8 * 1000, seed) @ plane.T
    fig, (left, curve) = new_figure(1, 2, height=3.7)
    fig.set_layout_engine(None)  # half the drawing time
    fig.subplots_adjust(left=0.08, right=0.96, bottom=0.14, top=0.91, wspace=0.2)
    _cloud(left, samples[:400], plane @ exact.mean, length)
    left.set_title(f"p = {probabilities[list(right)].sum():.1f}, T = {length}: SNR = {exact.snr:.3f}")
    _error_curve(curve, samples.view(8, 1000, 2), plane @ exact.mean, exact)
    return fig


def _sample_estimates(probabilities, right, length, count, seed):
    generator = torch.Generator().manual_seed(seed)
    first = torch.multinomial(probabilities, count, replacement=True, generator=generator)
    others = torch.full((count,), length - 1.0, dtype=torch.float64)  # how many tokens are left to draw
    a = torch.binomial(others, probabilities[0].expand(count), generator=generator)
    b = torch.binomial(others - a, (probabilities[1] / probabilities[1:].sum()).expand(count), generator=generator)
    scores = torch.stack([a, b, others - a - b], 1) + torch.eye(3)[first] - length * probabilities
    return torch.where(torch.isin(first, torch.tensor(right))[:, None], scores, 0.0)


def _cloud(ax, samples, gradient, length):
    points, counts = samples.unique(dim=0, return_counts=True)
    silent, size = (points == 0).all(1), 2 + 2.5 * counts
    ax.scatter(*points[~silent].T, s=size[~silent], color=COLORS["policy"], alpha=0.55, lw=0)
    ax.scatter(*points[silent].T, s=size[silent], facecolor="none", edgecolor=COLORS["reference"], lw=1.5)
    average = samples.cumsum(0) / torch.arange(1, len(samples) + 1)[:, None]
    ax.plot(*average[10:].T, color=COLORS["advantage"], lw=1.2)
    reach = 2.4 * (0.3 * length) ** 0.5 + 0.5
    if gradient.norm() > 1e-9:
        ax.quiver(0, 0, *gradient, angles="xy", scale_units="xy", scale=1, width=0.012, zorder=3)
    ax.text(0.02, 0.02, "∇J: the black arrow" if gradient.norm() > 1e-9 else "∇J = 0", transform=ax.transAxes)
    share = counts[silent].sum() / len(samples)
    notes = [(f"ring: {share:.0%} of 400 estimates are 0", "reference")] if share else []
    dots = "dots: the others" if share else "dots: 400 estimates"
    notes += [(dots, "policy"), ("line: running mean of all", "advantage")] if share < 1 else []
    for row, (text, name) in enumerate(notes):
        style = {"color": COLORS[name], "weight": "bold", "bbox": {"fc": "white", "ec": "none", "pad": 0.5}}
        ax.text(0.02, 0.99 - 0.07 * row, text, transform=ax.transAxes, va="top", **style)
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    ax.set(xlabel="gradient, first axis", ylabel="second axis")


def _error_curve(ax, runs, gradient, exact):
    N = torch.logspace(0, 3, 41).round().long().unique()
    errors = (runs.cumsum(1) / torch.arange(1, 1001)[:, None] - gradient).norm(dim=-1)[:, N - 1]
    ax.set(xscale="log", yscale="log", xlim=(1, 1000), ylim=(3e-3, 30), xlabel="completions N")
    for axis, ticks in ((ax.xaxis, (1, 10, 100, 1000)), (ax.yaxis, (0.01, 0.1, 1, 10))):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    if not exact.variance:
        ax.text(0.5, 0.5, "every estimate is 0,\nand so is its error", transform=ax.transAxes, ha="center")
        return
    ax.set_title("distance of the mean of N from ∇J")
    ax.plot(N, errors.T, color=COLORS["error"], lw=0.6, alpha=0.4)
    ax.plot(N, [exact.averaged(n).mse ** 0.5 for n in N.tolist()], color=COLORS["error"], lw=2.5)
    ax.text(0.97, 0.97, "bold: exact, falls like 1/√N\nthin: eight runs", transform=ax.transAxes, ha="right", va="top")
    if gradient.norm() > 1e-9:
        ax.axhline(gradient.norm(), color=COLORS["reference"], ls="--", lw=1.2)
        ax.text(0.03, 0.03, f"dashed: ‖∇J‖, reached at N = {exact.snr**-2:.0f}", transform=ax.transAxes)


# %%
show(
    noise_figure(length=8),
    caption="Half of the estimates are zero. The others scatter five times as far as ∇J is long.",
    alt="Left: estimates as dots in a plane, as large as they are frequent, a large grey ring at the origin, and in it a short "
    "black arrow for the gradient. Right: the error of the mean of N estimates on logarithmic axes, a straight line down "
    "that crosses the length of the gradient at N = 24, and eight single runs scattered around it.",
)
show(
    noise_figure(length=512),
    caption="The same problem in texts 64 times as long. The arrow is as long as before; the cloud has outgrown it.",
    alt="The same two panels. The axes of the cloud reach seven times as far, the arrow is a speck at the origin, and the "
    "line of the error stays above the length of the gradient for all N up to 1000.",
)

# %% [markdown]
# Now move the two sliders. Longer texts push the red line up and leave the dashed one where it is. At a pass rate of 0
# everything is at the origin; at 1 the cloud is at its widest, and there is no arrow. (Which first tokens count as right
# sets the pass rate. The policy stays the same.)

# %%
explore(
    noise_figure,
    right=widgets.SelectionSlider(
        options={"0": (), "0.2": (2,), "0.3": (1,), "0.5": (0,), "0.7": (0, 2), "0.8": (0, 1), "1": (0, 1, 2)},
        value=(0,),
        description="pass rate p",
        style={"description_width": "initial"},
    ),
    length=widgets.SelectionSlider(
        options=[2**k for k in range(10)], value=8, description="tokens T", style={"description_width": "initial"}
    ),
)

# %% [markdown]
# ## Exercises
#
# **1. Predict, then run.** In texts of 64 tokens, of which the first decides, the average of 207 completions has
# $\mathrm{SNR} = 1$. How many completions does it take at 2048 tokens? Five per cent off is close enough.

# %% tags=["exercise"]
prediction = None  # your number

# %% tags=["solution"]
prediction = 206.6 * 2048 / 64  # SNR⁻² is affine in T, and at this length nearly proportional to it

# %% tags=["check"]
import torch
from lmrl.variance import memoryless_moments

answer = memoryless_moments(
    torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    torch.tensor([[1, 2, 2], [1, 1, 1], [2, 2, 2]]),
    torch.tensor([0.0, 1.0, 0.0]),
    2048,
)
assert prediction is not None, "write your number first"
assert abs(prediction * answer.snr**2 - 1) < 0.05, f"an average of {prediction:.0f} does not have an SNR near 1"

# %% [markdown]
# **2. The price of a ratio.** Write a function that says how many completions have to be averaged, at least, for a given
# signal-to-noise ratio. It gets the `Moments` of one completion.

# %% tags=["exercise"]
from lmrl.variance import Moments


def completions_needed(one: Moments, snr: float) -> int:
    """The smallest N for which the average of N independent estimates has at least this SNR."""
    raise NotImplementedError


# %% tags=["solution"]
import math

from lmrl.variance import Moments


def completions_needed(one: Moments, snr: float) -> int:
    """The smallest N for which the average of N independent estimates has at least this SNR."""
    return max(1, math.ceil((snr / one.snr) ** 2))


# %% tags=["check"]
import torch
from lmrl.variance import Moments

for variance in (0.3, 7.0, 99.0):
    one = Moments(torch.tensor([0.6, 0.8]), torch.zeros(2), variance)
    for snr in (0.5, 1.3, 4.1):
        N = completions_needed(one, snr)
        assert one.averaged(N).snr >= snr, f"{N} completions give {one.averaged(N).snr:.3f}, which is below {snr}"
        assert N == 1 or one.averaged(N - 1).snr < snr, f"{N - 1} completions would have been enough"

# %% [markdown]
# **3. Find the bug.** Somebody read that completions with reward 0 contribute nothing, and left them out: the forward and
# backward passes now run over the successes alone, and the loss is averaged over those. Training became faster, and the
# gradient larger. Is it still $\nabla J$? Let the instrument say, then repair the estimator without undoing the saving.

# %% tags=["exercise"]
import torch


def estimate(rewards, scores):
    """The gradient estimate from each of M groups of N completions: rewards [M, N], scores [M, N, P] -> [M, P]."""
    successes = rewards > 0  # [M, N]
    terms = torch.where(successes[..., None], rewards[..., None] * scores, 0.0)
    return terms.sum(1) / successes.sum(1, keepdim=True).clamp(min=1)


# %% tags=["solution"]
import torch


def estimate(rewards, scores):
    """The gradient estimate from each of M groups of N completions: rewards [M, N], scores [M, N, P] -> [M, P]."""
    successes = rewards > 0  # [M, N]
    terms = torch.where(successes[..., None], rewards[..., None] * scores, 0.0)
    return terms.sum(1) / rewards.shape[1]  # a completion without reward adds nothing, but it counts


# %% tags=["check"]
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, score_matrix
from lmrl.variance import group_moments

a_policy = TabularPolicy(3, 2, seed=3)
a_tree = enumerate_tree(a_policy, 2, eos_id=0)
R = (a_tree.ids[:, 0] == 1).double()
s = score_matrix(a_tree, a_policy.parameters())
goal = exact_gradient(a_tree, R, a_policy.parameters())
for N in (1, 2, 3, 4):
    found = group_moments(a_tree, lambda leaves: estimate(R[leaves], s[leaves]), goal, N)
    assert found.bias.norm() < 1e-10, f"N = {N}: the mean is {found.mean.norm() / goal.norm():.2f} times as long as ∇J"

# %% [markdown]
# With the bug, the mean of a group is $\nabla J$ times $(1 - (1-p)^N)/p$: a learning rate that depends on the prompt's pass
# rate, highest for the prompts that are solved least.

# %%
J = expectation(tree, rewards)
for N in (1, 2, 3):
    over_successes = weighted_scores(
        scores,
        rewards,
        lambda R, group: (N * R.view(-1, N) / R.view(-1, N).sum(1, keepdim=True).clamp(min=1)).flatten(),
    )
    factor = (1 - (1 - J) ** N) / J
    assert torch.allclose(group_moments(tree, over_successes, gradient, N).mean, factor * gradient, rtol=0, atol=1e-10)
    print(f"N = {N}: the mean is {factor:.3f} ∇J")

# %% [markdown]
# ## What is still missing
#
# The instrument shows where the noise is, and more samples are the dearest way to lower it; section 6 subtracts a number
# that costs nothing. The noise of innocent tokens remains, because all of a completion's tokens share one weight; sections
# 7 and 8 give each its own.
