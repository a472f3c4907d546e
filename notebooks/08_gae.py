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
# # 8. TD, bootstrapping and GAE
#
# Section 7 ended with two estimates of the advantage of token $t$. One waits for the end of the completion and believes
# nothing but the reward: $R - \hat V(s_t)$. It is right on average and noisy. The other looks one token ahead and believes
# the critic: $\hat V(s_{t+1}) - \hat V(s_t)$. It is quiet, and wrong where the critic is. What lies between them, and
# where should one stand?
#
# Names, as before: $s_t$ is the state before token $t$, $a_t$ the token, $V$ the true value, $\hat V$ the critic's, and
# $T$ the number of tokens of a completion. New: $r_t$ is the reward that comes directly after token $t$.

# %%
import dataclasses

import ipywidgets as widgets
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.reinforce import reinforce_terms
from lmrl.tree import (
    TabularPolicy,
    Tree,
    enumerate_tree,
    exact_gradient,
    exact_values,
    leaf_probabilities,
    row_gradients,
    terminal_returns,
)
from lmrl.values import next_chosen
from lmrl.variance import leaf_moments

# %% [markdown]
# ## Where the reward is
#
# A completion is scored once, so $r_t = 0$ for all tokens but the last. The last token is the stop token, or for a
# completion that was cut off, the token at the cap. In a padded batch this is the easiest place to be off by one.
#
# `mask` is True on the tokens that the policy chose. The score goes to the last of them. Rows of the optional
# `bootstrapped` get no score; what they are comes below.


# %% tags=["export"]
def score_last_token(
    scores: torch.Tensor, mask: torch.Tensor, bootstrapped: torch.Tensor | None = None
) -> torch.Tensor:
    """Scores [B] as token rewards [B, T]: the row's score at its last chosen token, 0 elsewhere. Section 8.

    mask [B, T] bool. Rows where `bootstrapped` [B] bool is True get no score, since V stands for it. At least float32.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    if bootstrapped is not None:
        is_last &= ~bootstrapped[:, None]
    return torch.where(is_last, scores[:, None], 0.0)


# %%
answer = torch.tensor([[True, True, True, False, False]])  # two tokens, the stop token, and padding
print(score_last_token(torch.tensor([1.0]), answer).tolist())
assert score_last_token(torch.tensor([1.0]), answer).tolist() == [[0, 0, 1, 0, 0]]

# %% [markdown]
# ## One step
#
# The **temporal-difference error** (TD error) of token $t$ compares what the critic said before the token with what it says
# after it, plus the reward that came in between:
#
# $$\delta_t = r_t + \gamma \hat V(s_{t+1}) - \hat V(s_t), \qquad \hat V(s_{T+1}) = 0 \text{ after the end.} \tag{8.1}$$
#
# $\gamma$ is the discount of section 2. In the tensors, $s_{t+1}$ is the state before the next token that the policy chose.
# Section 7's `next_chosen` finds it: padding is passed over, and so are holes in the mask, where a tool or a user wrote.
# What was written there belongs to the step from one choice to the next. So $\gamma$ counts the policy's own tokens, a reward
# in a hole is not read (put it on the token before), and a row gives the same numbers as if its masked entries were cut out.


# %% tags=["export"]
def _select(rewards, values, mask, bootstrap):
    """Rewards and values with 0 where masked and the value after the last token, all in at least float32."""
    if not rewards.shape == values.shape == mask.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (rewards, values, mask))
        raise ValueError(f"rewards, values and mask have the shapes {shapes}; all three must be [B, T]")
    bootstrap = values.new_zeros(len(values)) if bootstrap is None else bootstrap
    if bootstrap.shape != mask.shape[:1]:
        raise ValueError(f"bootstrap has the shape {list(bootstrap.shape)}; it must be [B] = [{len(mask)}]")
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    rewards, values = (torch.where(mask, x.to(dtype), 0.0) for x in (rewards, values))
    return rewards, values, bootstrap.to(dtype)


@torch.no_grad()
def td_errors(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    bootstrap: torch.Tensor | None = None,
) -> torch.Tensor:
    """δ = r + γ V(next state) - V(state) of every token, [B, T]; 0 where masked. Section 8; Sutton 1988.

    rewards and values [B, T], entry t of the values for the state before token t; mask [B, T] bool. Masked entries are
    never read; the next state is that of the next chosen token. `bootstrap` [B] is the value after the last one, None
    for 0. At least float32, without gradient. Raises ValueError for other shapes.
    """
    rewards, values, bootstrap = _select(rewards, values, mask, bootstrap)
    return torch.where(mask, rewards + gamma * next_chosen(values, mask, bootstrap) - values, 0.0)


# %% [markdown]
# **Claim 8.1.** If the critic is exact, the mean of $\delta_t$ given the state and the token is the advantage. For text more
# is true. The next state is certain, so there is nothing to average: $\delta_t$ *is* the advantage, in every state and for
# every token. On a tree with three tokens, a stop token and random rewards:

# %%
policy = TabularPolicy(vocab_size=3, max_length=4, seed=0)
tree = enumerate_tree(policy, max_length=4, eos_id=0)
scores = torch.rand(len(tree.ids), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
rewards = score_last_token(scores, tree.mask)
for gamma in (1.0, 0.9):
    V, Q, A = exact_values(tree, scores, gamma)
    values = torch.where(tree.mask, V[tree.states], torch.nan)  # nobody may read the padding
    delta = td_errors(rewards, values, tree.mask, gamma=gamma)
    assert torch.allclose(delta[tree.mask], A[tree.states, tree.ids][tree.mask], atol=1e-10, rtol=0)
print(f"δ = A for all {int(tree.mask.sum())} tokens of {len(tree.ids)} completions")

# %% [markdown]
# This is section 7's bootstrapping: $\hat V(s_{t+1})$ stands for the rest of the completion. There is no end to wait for, and
# no noise from the tokens that are yet to be drawn. But the critic was assumed to be exact. One that is too hopeful in some
# state makes the token that leads there look good, in every batch, however large.
#
# **Claim 8.4.** For text this weighs more than elsewhere. In a game that pays at every step, each $r_t$ corrects the critic
# a little. Here $r_t = 0$ until the end, and with $\gamma = 1$
#
# $$\delta_t = \hat V(s_{t+1}) - \hat V(s_t) \quad (t < T), \qquad \delta_T = R - \hat V(s_T). \tag{8.2}$$
#
# All but the last are the critic's opinion of its own opinion.

# %%
critic = torch.randn(len(V), generator=torch.Generator().manual_seed(1), dtype=torch.float64)  # knows nothing
guesses = torch.where(tree.mask, critic[tree.states], torch.nan)
delta = td_errors(rewards, guesses, tree.mask, gamma=1.0)
not_last = tree.mask & (rewards == 0)
assert torch.allclose(delta[:, :-1][not_last[:, :-1]], guesses.diff()[not_last[:, :-1]], atol=1e-10, rtol=0)

# %% [markdown]
# ## From one step to all of them
#
# Why stop after one step, or only at the end? Take the rewards of $n$ steps, and let the critic speak for what follows:
#
# $$\hat A^{(n)}_t = \underbrace{r_t + \gamma r_{t+1} + \dots + \gamma^{n-1} r_{t+n-1} + \gamma^n \hat V(s_{t+n})}_{\text{the
# }n\text{-step return } G^{(n)}_t} - \hat V(s_t). \tag{8.3}$$
#
# $n = 1$ is $\delta_t$. When the end comes before $n$ steps are over, $\hat V$ is 0 from there on, and the estimate is the
# full return minus $\hat V(s_t)$. Looking $n$ steps ahead is looking one step ahead $n$ times: $G^{(0)}_t = \hat V(s_t)$, and
# $G^{(n)}_t = r_t + \gamma\, G^{(n-1)}_{t+1}$.


# %% tags=["export"]
@torch.no_grad()
def n_step_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    n: int,
    *,
    gamma: float,
    bootstrap: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rewards of n steps, then the value, minus the value of the state: [B, T]; 0 where masked. Section 8.

    Arguments as in `td_errors`, which is n = 1. Raises ValueError for n below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; it counts steps and must be at least 1")
    rewards, values, bootstrap = _select(rewards, values, mask, bootstrap)
    returns = values
    for _ in range(n):
        returns = rewards + gamma * next_chosen(returns, mask, bootstrap)
    return torch.where(mask, returns - values, 0.0)


# %% [markdown]
# Every $\hat A^{(n)}$ is also a sum of TD errors, since the values in between cancel (past the end $\delta$ is 0):
#
# $$\hat A^{(n)}_t = \delta_t + \gamma \delta_{t+1} + \dots + \gamma^{n-1} \delta_{t+n-1}. \tag{8.4}$$
#
# Which $n$? **Generalised advantage estimation** (GAE, Schulman et al. 2015) takes all of them, with weights that fall by a
# factor $\lambda \in [0, 1]$ from each to the next. The weights $(1 - \lambda) \lambda^{n-1}$ sum to 1 (for $\lambda = 1$, all
# the weight is on $n = \infty$). Put (8.4) in: $\gamma^l \delta_{t+l}$ occurs in all estimates with $n > l$, whose weights
# add up to $\lambda^l$. So
#
# $$\hat A^{\text{GAE}}_t = (1 - \lambda) \sum_{n \ge 1} \lambda^{n-1} \hat A^{(n)}_t = \sum_{l \ge 0} (\gamma\lambda)^l\,
# \delta_{t+l}, \tag{8.5}$$
#
# and the sum from $t$ on is $\delta_t$ plus $\gamma\lambda$ times the sum from $t + 1$ on:
#
# $$\hat A_t = \delta_t + \gamma\lambda\, \hat A_{t+1}. \tag{8.6}$$
#
# One pass from right to left. A masked entry passes on what it was given. What the critic is trained towards (section 7's
# `value_terms`) comes with it, and is called the $\lambda$-return: $\hat A_t + \hat V(s_t)$.


# %% tags=["export"]
@torch.no_grad()
def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates and λ-returns, the critic's targets: two [B, T]; 0 where masked.

    rewards and values [B, T], entry t of the values for the state before token t; mask [B, T] bool. A row's result is
    that of the row with its masked entries cut out, holes included: they are never read, and γ and λ count chosen
    tokens. `bootstrap` [B] is the value after the last chosen token: V for truncated rows, 0 for finished ones; None is 0
    for all. At least float32, without gradient. An unmasked NaN stays visible. Raises ValueError for other shapes, and γ
    or λ outside [0, 1]. Section 8; Schulman et al. 2015.
    """
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma is {gamma} and lam is {lam}; both must be in [0, 1]")
    delta = td_errors(rewards, values, mask, gamma=gamma, bootstrap=bootstrap)
    advantages, following = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        following = torch.where(mask[:, t], delta[:, t] + gamma * lam * following, following)
        advantages[:, t] = following
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


# %% [markdown]
# **Claim 8.2.** The three forms are one: the weighted $n$-step estimates, the sum of TD errors, and the recursion. Random
# numbers everywhere, rewards at every token, and masks with padding and holes. The sum is written without tensors, on
# rows whose masked entries have been cut out. (After $T$ steps all $\hat A^{(n)}$ are equal, so the last one takes
# the weights of all that follow, $\lambda^{T-1}$.)

# %%
generator = torch.Generator().manual_seed(0)
B, T = 6, 7
r, v, after = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((B, T), (B, T), (B,)))
mask = torch.rand(B, T, generator=generator) < 0.7
for gamma, lam in ((1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (1.0, 1.0), (0.0, 0.3)):
    recursion, _ = gae(r, v, mask, gamma=gamma, lam=lam, bootstrap=after)
    n_steps = [n_step_advantages(r, v, mask, n, gamma=gamma, bootstrap=after) for n in range(1, T + 1)]
    weighted = (1 - lam) * sum(lam ** (n - 1) * n_steps[n - 1] for n in range(1, T)) + lam ** (T - 1) * n_steps[-1]
    assert torch.allclose(recursion, weighted, atol=1e-10, rtol=0)
    for row in range(B):
        rewards_row, values_row = r[row, mask[row]].tolist(), [*v[row, mask[row]].tolist(), after[row].item()]
        d = [reward + gamma * new - old for reward, old, new in zip(rewards_row, values_row, values_row[1:])]
        sums = [sum((gamma * lam) ** l * x for l, x in enumerate(d[t:])) for t in range(len(d))]  # noqa: E741
        assert torch.allclose(recursion[row, mask[row]], torch.tensor(sums, dtype=torch.float64), atol=1e-10, rtol=0)
print("the three forms agree;", f"{int((~mask).sum())} of {mask.numel()} entries were masked")

# %% [markdown]
# **Claim 8.3.** The two ends of the family are the two estimates that we started from. With $\lambda = 0$ only $\delta_t$
# is left. With $\gamma = \lambda = 1$ the sum telescopes to $R - \hat V(s_t)$: the critic is a baseline and nothing else,
# and GAE has no critic left to trust. Then the $\lambda$-return is the return. All this for any critic, such as the one
# from above that knows nothing:

# %%
short, _ = gae(rewards, guesses, tree.mask, gamma=1.0, lam=0.0)
long, targets = gae(rewards, guesses, tree.mask, gamma=1.0, lam=1.0)
assert torch.allclose(short, delta, atol=1e-10, rtol=0)
assert torch.allclose(long[tree.mask], (scores[:, None] - guesses)[tree.mask], atol=1e-10, rtol=0)
assert torch.allclose(targets, terminal_returns(scores, tree.mask), atol=1e-10, rtol=0)

# %% [markdown]
# ## Three ways to be off by one
#
# *Padding leaks.* The recursion runs from the right, so it meets the padding first. A critic is a network and puts out
# some number on padding too. Here a row of two tokens is padded with one whose "value" is 100. If the last real token reads
# it as the value of the next state, all tokens learn from it.

# %%
r, v, mask = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 100.0]]), torch.tensor([[True, True, False]])
right, _ = gae(r, v, mask, gamma=1.0, lam=0.95)
leaky, _ = gae(r, v, torch.ones_like(mask), gamma=1.0, lam=0.95)
for name, estimate in (("right", right), ("padding taken for text", leaky)):
    print(f"{name:22}", [round(a, 4) for a in estimate[0].tolist()])
assert torch.allclose(right, torch.tensor([[0.95, 1.0, 0.0]])) and leaky[0, 1] > 5
spoiled = [torch.where(mask, x, torch.nan) for x in (r, v)]
assert torch.equal(gae(*spoiled, mask, gamma=1.0, lam=0.95)[0], right)

# %% [markdown]
# *The score comes late.* If it lands one slot after the last token, it is masked away and nothing is learned. If the mask
# is wrong in the same way, everything is learned one token late.

# %%
r, v = score_last_token(torch.tensor([1.0]), answer), torch.zeros(1, 5)
on_time, _ = gae(r, v, answer, gamma=1.0, lam=0.95)
masked_away, _ = gae(r.roll(1), v, answer, gamma=1.0, lam=0.95)
late, _ = gae(r.roll(1), v, answer | answer.roll(1), gamma=1.0, lam=0.95)
for name, estimate in (("on time", on_time), ("masked away", masked_away), ("one late", late)):
    print(f"{name:12}", [round(a, 4) for a in estimate[0].tolist()])
assert torch.allclose(on_time, torch.tensor([[0.9025, 0.95, 1.0, 0.0, 0.0]]))
assert (masked_away == 0).all() and torch.allclose(late[0, :3], torch.tensor([0.857375, 0.9025, 0.95]))

# %% [markdown]
# *The reward is taken for the return.* With $\gamma = \lambda = 1$ the advantage is what is still to come minus $\hat V$, not
# the token's own reward minus $\hat V$.

# %%
r, v, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.5, 0.8]]), torch.ones(1, 3, dtype=torch.bool)
right, _ = gae(r, v, mask, gamma=1.0, lam=1.0)
for name, estimate in (("right", right), ("wrong", r - v)):
    print(name, [round(a, 4) for a in estimate[0].tolist()])
assert torch.allclose(right, torch.tensor([[0.8, 0.5, 0.2]]))

# %% [markdown]
# ## Cut off is not finished
#
# A completion that hits the length cap did not end; we stopped watching. Scored as if it had ended, every token of it is
# told that it led to 0. The alternative is to bootstrap once more: after the last token put the critic's value of the
# state where the text was cut, and no score. That is `bootstrap`, with $\hat V(s_{T+1})$ for truncated rows and 0 for finished
# ones. Section 7's critic returns the values of all $T + 1$ states; this splits them.


# %% tags=["export"]
def split_values(
    state_values: torch.Tensor, mask: torch.Tensor, truncated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A critic's [B, T + 1] as the values before each token [B, T], and `gae`'s bootstrap [B]. Section 8.

    The bootstrap is the value of the state after the last chosen token for truncated rows (bool [B]), exactly 0 for others.
    """
    after_last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1, keepdim=True)
    return state_values[:, :-1], torch.where(truncated, state_values.gather(1, after_last).squeeze(1), 0.0)


# %% [markdown]
# Two rows that look alike, one finished with score 0 and one cut off; the critic says 0.5 everywhere. The finished one fell
# short of what was expected. About the other nothing new is known, and its advantages are 0.

# %%
state_values, mask = torch.full((2, 3), 0.5), torch.ones(2, 2, dtype=torch.bool)
truncated = torch.tensor([False, True])
values, bootstrap = split_values(state_values, mask, truncated)
r = score_last_token(torch.zeros(2), mask, bootstrapped=truncated)
cut, _ = gae(r, values, mask, gamma=1.0, lam=1.0, bootstrap=bootstrap)
print("finished", cut[0].tolist(), "  cut off", cut[1].tolist())
assert cut.tolist() == [[-0.5, -0.5], [0.0, 0.0]]

# %% [markdown]
# Our PPO bootstraps truncated rows by default. It is a choice: where being too long *is* a failure, a score of 0 says so.
#
# ## Where to stand
#
# What does the dial trade? With a reward at the end and $\gamma = 1$, equation (8.5) can be sorted by what it believes. For
# a token with $m$ tokens from itself to the end,
#
# $$\hat A_t = -\hat V(s_t) + (1 - \lambda) \sum_{l=1}^{m-1} \lambda^{l-1}\, \hat V(s_{t+l}) + \lambda^{m-1} R. \tag{8.7}$$
#
# The reward has the weight $\lambda^{m-1}$ and brings the noise of the rollout. The critic's later values have the rest and
# bring its errors. The first term is there for every $\lambda$.

# %%
lam = 0.7
estimate, _ = gae(rewards, guesses, tree.mask, gamma=1.0, lam=lam)
row = int(tree.mask.sum(-1).argmax())
believed = -guesses[row, 0] + lam**3 * scores[row]
believed += (1 - lam) * sum(lam ** (l - 1) * guesses[row, l] for l in (1, 2, 3))  # noqa: E741
assert torch.isclose(estimate[row, 0], believed, atol=1e-10, rtol=0)

# %% [markdown]
# Now let the critic be wrong, $\hat V(s) = V(s) + e(s)$, with errors that are independent from state to state, of mean 0
# and variance $\sigma^2$. Sample $N$ completions that all pass through state $s$ and take token $a$ there, and average their
# estimates of $A(s, a)$. The mean squared error (MSE) of that average, over completions and critics, has three parts:
#
# $$\text{MSE} = \underbrace{\sigma^2 \sum_{s'} \mathbb{E}[w(s')]^2}_{\text{shared}}
# + \frac1N \Big(\underbrace{\mathrm{Var}\big[\hat A^{\text{exact } V}\big]}_{\text{noise}}
# + \underbrace{\sigma^2 \sum_{s'} \mathrm{Var}[w(s')]}_{\text{own}}\Big), \tag{8.8}$$
#
# where $w(s')$ is the weight of $e(s')$ in $\hat A_t$, which depends on where the rollout goes. *Noise* is the rollout's own;
# *own* is the error of those states that only some of the rollouts visit; *shared* is what all of them have in common, a
# bias, and $N$ does not touch it. That is so if the critic's error **persists**, as it does with a network: asked twice
# about one state, it gives one answer. If the errors were **redrawn** for every rollout, all three would fall like $1/N$.
#
# Everything here is a sum over leaves. `gae` is linear in the values, so $w(s')$ is what it makes of a critic that says 1 in
# $s'$ and 0 elsewhere, and no error needs to be drawn.


# %% tags=["export"]
@dataclasses.dataclass(frozen=True)
class GaeError:
    """The squared error of GAE under a critic with independent errors, in parts (equation 8.8). Section 8.

    `noise` is the variance of one rollout's estimate with the exact V; per unit of the critic's error variance, `shared` is
    what all rollouts from one state and token have in common, and `own` is what each has for itself.
    """

    noise: float
    shared: float
    own: float

    def bias_squared(self, sigma: float, rollouts: int = 1, persistent: bool = True) -> float:
        """The part of the error that rollouts share; it falls with their number only if the error is redrawn."""
        return sigma**2 * self.shared / (1 if persistent else rollouts)

    def variance(self, sigma: float, rollouts: int = 1) -> float:
        """The part that differs between rollouts, for the mean of `rollouts` of them."""
        return (self.noise + sigma**2 * self.own) / rollouts

    def mse(self, sigma: float, rollouts: int = 1, persistent: bool = True) -> float:
        """Mean squared error of the mean of `rollouts` estimates of A(s, a)."""
        return self.bias_squared(sigma, rollouts, persistent) + self.variance(sigma, rollouts)


def gae_error(tree: Tree, rewards: torch.Tensor, lam: float) -> GaeError:
    """Exact error of `gae` with γ = 1 at `lam`, averaged over the tokens that the policy writes; rewards [L]. Section 8.

    Independent zero-mean errors in every state of the tree; the value after the end is not estimated and has none.
    """
    (num_states, vocab_size), (leaves, width) = tree.log_policy.shape, tree.mask.shape
    exact = exact_values(tree, rewards).v[tree.states]
    estimate, _ = gae(score_last_token(rewards.double(), tree.mask), exact, tree.mask, gamma=1.0, lam=lam)
    unit = F.one_hot(tree.states, num_states).double().permute(2, 0, 1).reshape(-1, width)  # [S * L, T]
    weights, _ = gae(torch.zeros_like(unit), unit, tree.mask.repeat(num_states, 1), gamma=1.0, lam=lam)
    columns = torch.cat([estimate[None], weights.view(num_states, leaves, width)])[:, tree.mask].T  # [tokens, 1 + S]

    pair = (tree.states * vocab_size + tree.ids)[tree.mask]  # the state and the token chosen in it, as one number
    p = leaf_probabilities(tree).detach()[:, None].expand_as(tree.mask)[tree.mask]
    frequency = p.new_zeros(num_states * vocab_size).index_add(0, pair, p)
    mean, square = (
        p.new_zeros(len(frequency), columns.shape[1]).index_add(0, pair, p[:, None] * x) / frequency[:, None]
        for x in (columns, columns.square())
    )
    share = frequency / frequency.sum()
    variance = share @ (square - mean.square())
    return GaeError(variance[0].item(), (share @ mean[:, 1:].square()).sum().item(), variance[1:].sum().item())


# %% [markdown]
# The policy for the numbers below is uniform over three tokens and writes exactly four. A coin, thrown once for each of its
# 81 completions, decides whether it is worth 1 or 0. The error is averaged over all states and tokens, as often as the
# policy visits them.

# %%
uniform = TabularPolicy(vocab_size=3, max_length=4)
uniform.logits.data.zero_()
dial_tree = enumerate_tree(uniform, max_length=4)
dial_scores = torch.rand(81, generator=torch.Generator().manual_seed(0), dtype=torch.float64).lt(0.5).double()
lams = torch.linspace(0, 1, 101).tolist()
errors = [gae_error(dial_tree, dial_scores, lam) for lam in lams]

# %% [markdown]
# First a check by simulation: 2000 critics are drawn, and for each the squared error of *one* rollout is averaged
# over all leaves. It must agree with $N = 1$ in (8.8) within four standard errors.

# %%
dial_V, _, dial_A = exact_values(dial_tree, dial_scores)
drawn = dial_V + 0.3 * torch.randn(2000, len(dial_V), generator=generator, dtype=torch.float64)
r = score_last_token(dial_scores, dial_tree.mask).repeat(2000, 1)
estimate, _ = gae(r, drawn[:, dial_tree.states].flatten(0, 1), torch.ones_like(r).bool(), gamma=1.0, lam=0.7)
squared = (estimate.view(2000, 81, 4) - dial_A[dial_tree.states, dial_tree.ids]).square().mean((1, 2))
standard_error = squared.std() / 2000**0.5
print(f"λ = 0.7, σ = 0.3: simulated {squared.mean():.4f} ± {standard_error:.4f}, exact {errors[70].mse(0.3):.4f}")
assert (squared.mean() - errors[70].mse(0.3)).abs() < 4 * standard_error

# %% [markdown]
# **Claim 8.5.** If the critic is right everywhere, $\lambda = 0$ makes no error at all, and a larger $\lambda$ only adds
# noise. As soon as the critic errs, the best $\lambda$ lies inside, and the worse the critic, the farther to the right.

# %%
assert errors[0].noise < 1e-10
table = {}
for sigma in (0.0, 0.1, 0.2, 0.3, 0.5, 1.0):
    best = min(range(101), key=lambda i: errors[i].mse(sigma))
    table[sigma] = round(lams[best], 2)
print("best λ for the critic's error σ:", table)
assert list(table.values()) == [0.0, 0.1, 0.28, 0.43, 0.63, 0.85]

# %% [markdown]
# **Claim 8.6.** And it depends on how much data there is. Averaging over $N$ rollouts removes noise, not bias. So with a
# persistent error the best $\lambda$ moves towards 1 as the batch grows. An error that is redrawn each time leaves it where
# it was.

# %%
table = {}
for N in (1, 4, 16, 64, 1024):
    best = [min(range(101), key=lambda i: errors[i].mse(0.1, N, persistent)) for persistent in (True, False)]
    table[N] = tuple(round(lams[i], 2) for i in best)
print("best λ at σ = 0.1 for N rollouts (persistent, redrawn):", table)
assert list(table.values()) == [(0.1, 0.1), (0.29, 0.1), (0.54, 0.1), (0.76, 0.1), (0.97, 0.1)]


# %% tags=["export:figures"]
def dial_figure(lams: list[float], errors: list, sigma: float, rollouts: int) -> Figure:
    """Bias, variance and error of the mean of N estimates against λ; left: critic error redrawn, right: persistent.

    errors: one `GaeError` for each λ.
    """
    fig, axes = new_figure(1, 2, height=3.4)
    for ax, persistent in zip(axes, (False, True)):
        bias = [error.bias_squared(sigma, rollouts, persistent) for error in errors]
        variance = [error.variance(sigma, rollouts) for error in errors]
        total = [error.mse(sigma, rollouts, persistent) for error in errors]
        best, label_height = min(range(len(lams)), key=total.__getitem__), -0.04 * max(total)
        lines = [
            ("bias²", bias, "reference", "--"),
            ("variance", variance, "policy", ":"),
            ("error", total, "error", "-"),
        ]
        for name, line, color, style in sorted(lines, key=lambda entry: entry[1][-1]):
            ax.plot(lams, line, color=COLORS[color], ls=style, lw=2)
            label_height = max(line[-1], label_height + 0.08 * max(total))  # labels clear of each other and the axis
            ax.text(1.03, label_height, name, color=COLORS[color], va="center")
        ax.plot(lams[best], total[best], "o", color="black", ms=7)
        kind = "persistent" if persistent else "redrawn"
        ax.set(xlim=(0, 1.3), ylim=(0, 1.1 * max(total)), xlabel="λ", xticks=[0, 0.5, 1])
        ax.locator_params("y", nbins=4)
        ax.set_title(f"critic error {kind}: best λ = {lams[best]:.2f}", fontsize=10.5)
    axes[0].set_ylabel("squared error of Â [reward²]")
    return fig


# %%
show(
    dial_figure(lams, errors, sigma=0.1, rollouts=16),
    caption="The same size of critic error, 16 rollouts. Redrawn, it averages out as noise does; if it persists, trust it less.",
    alt="Two panels with squared error against λ. Bias squared falls and variance rises with λ; their sum, the error, has its "
    "minimum at 0.10 on the left, where the critic's error is redrawn, and at 0.54 on the right, where it persists.",
)

# %% [markdown]
# Move $\sigma$ to 0: the bias is gone and the minimum sits at 0. Then set it to 0.1 and raise the number of rollouts: on
# the left only the scale of the axis changes, on the right the minimum walks to the right.

# %%
wide = {"style": {"description_width": "initial"}, "continuous_update": True}
explore(
    lambda sigma, rollouts: dial_figure(lams, errors, sigma, rollouts),
    sigma=widgets.FloatSlider(0.2, min=0.0, max=1.0, step=0.05, description="critic error σ", **wide),
    rollouts=widgets.SelectionSlider(options=[4**k for k in range(6)], value=1, description="rollouts N", **wide),
)

# %% [markdown]
# This assumes that errors in different states have nothing to do with each other. At the other extreme, the critic is wrong
# by the same number $c$ everywhere. Then bootstrapping costs nothing: in (8.7) all but $-c\, \lambda^{m-1}$ cancels, and
# $\lambda = 0$ stays best however large $c$ is. What hurts is a critic that is wrong about one state *compared with* the next.

# %%
for c in (0.1, 1.0):
    r, off = score_last_token(dial_scores, dial_tree.mask), dial_V[dial_tree.states] + c
    gaps = [
        gae(r, off, dial_tree.mask, gamma=1.0, lam=lam)[0] - dial_A[dial_tree.states, dial_tree.ids] for lam in lams
    ]
    constant_error = [gap.square().mean().item() for gap in gaps]
    assert min(constant_error) == constant_error[0] < constant_error[1]

# %% [markdown]
# ## What the gradient feels
#
# At $\lambda = 1$ the picture still shows a squared bias of $\sigma^2$, for a persistent error. It comes from the first term of (8.7), the error in $\hat V(s_t)$. It
# is an error of the advantage, and harmless: a function of the state alone, it leaves the gradient unbiased (claim 7.3).
# It is the same for all $\lambda$, so it moves no minimum either. Here is the gradient itself, for one wrong critic with
# errors of 0.3 on the tree with the stop token:

# %%
gradient = exact_gradient(tree, scores, policy.parameters())
wrong = exact_values(tree, scores).v
wrong += 0.3 * torch.randn(len(wrong), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
moments = {}
for lam in (0.0, 0.5, 0.9, 0.95, 1.0):
    estimate, _ = gae(rewards, wrong[tree.states], tree.mask, gamma=1.0, lam=lam)
    terms = reinforce_terms(tree.logprobs, estimate).sum(-1)
    moments[lam] = leaf_moments(tree, row_gradients(terms, policy.parameters()), gradient)
    print(
        f"λ = {lam:4}: bias {moments[lam].bias.norm():.4f}, variance {moments[lam].variance:.4f}; ‖∇J‖ = {gradient.norm():.4f}"
    )
assert moments[1.0].bias.norm() < 1e-10 < 0.05 * gradient.norm() < moments[0.0].bias.norm()

# %% [markdown]
# The bias falls as $\lambda$ rises and is exactly 0 at the end. And with a critic this wrong there is not even variance to be
# saved on the left: its errors differ from rollout to rollout, too.
#
# In practice $\lambda$ is set to 0.95 or 1, far to the right of the best value for a good critic. Both things that push it
# there are above. Critics of language models are poor: section 7's was, halfway through an answer, little better than a
# constant. And a network's errors persist, so a large batch does not average them out. At the right end, with a single
# reward, what is left of GAE is $R - \hat V(s_t)$: a baseline, for which a second network of the policy's size has to be
# trained. Many recipes drop the critic for this reason.
#
# ## Exercises
#
# **1. Predict, then run.** Three tokens, rewards $(0, 0, 1)$, critic $(0.2, 0.5, 0.8)$, $\gamma = 1$. What are the three
# advantages for $\lambda = 0$, and what for $\lambda = 1$?

# %% tags=["exercise"]
predicted_td = None  # three numbers
predicted_full = None

# %% tags=["solution"]
predicted_td = [0.3, 0.3, 0.2]  # 0.5 - 0.2, 0.8 - 0.5, 1 - 0.8
predicted_full = [0.8, 0.5, 0.2]  # 1 minus each

# %% tags=["check"]
import torch

from lmrl.gae import gae

three = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.5, 0.8]]), torch.ones(1, 3, dtype=torch.bool)
for prediction, lam in ((predicted_td, 0.0), (predicted_full, 1.0)):
    computed, _ = gae(*three, gamma=1.0, lam=lam)
    assert prediction is not None, "put your prediction in"
    assert torch.allclose(torch.tensor([prediction]), computed), f"λ = {lam}: {computed.tolist()}"

# %% [markdown]
# **2. The targets have a recursion of their own.** The critic's target, the $\lambda$-return $G_t = \hat A_t + \hat V(s_t)$, can
# be computed without the advantages: $G_t$ is $r_t$ plus $\gamma$ times a mixture of $\hat V(s_{t+1})$ and $G_{t+1}$. Find the
# weights from (8.6) and write it for full rows; after the last token both are `bootstrap`.

# %% tags=["exercise"]
import torch

from lmrl.gae import gae


def lambda_returns(rewards, values, bootstrap, gamma, lam):
    """rewards, values [B, T], bootstrap [B] -> returns [B, T], without gae."""
    raise NotImplementedError("one pass from the right")


# %% tags=["solution"]
import torch

from lmrl.gae import gae


def lambda_returns(rewards, values, bootstrap, gamma, lam):
    """rewards, values [B, T], bootstrap [B] -> returns [B, T], without gae."""
    returns, target, value = torch.zeros_like(rewards), bootstrap, bootstrap
    for t in reversed(range(rewards.shape[1])):
        target = rewards[:, t] + gamma * ((1 - lam) * value + lam * target)
        value = values[:, t]
        returns[:, t] = target
    return returns


# %% tags=["check"]
draws = torch.Generator().manual_seed(0)
some = [torch.randn(4, 6, generator=draws), torch.randn(4, 6, generator=draws)]
last_value, whole = torch.randn(4, generator=draws), torch.ones(4, 6, dtype=torch.bool)
for gamma, lam in ((1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (1.0, 1.0)):
    _, expected = gae(*some, whole, gamma=gamma, lam=lam, bootstrap=last_value)
    assert torch.allclose(lambda_returns(*some, last_value, gamma, lam), expected, atol=1e-5), (gamma, lam)

# %% [markdown]
# **3. Find the bug.** This is how GAE is often written: a loop over columns, and a mask at the end. It passes every test on
# rows of full length. With a stop token and a critic that is *exact*, the mean of the estimate must be the advantage, in
# every state and for every token. Hold it against the tree, then repair it.

# %% tags=["exercise"]
import torch


def masked_gae(rewards, values, mask, gamma, lam):
    """rewards, values [B, T], padded on the right, mask [B, T] -> advantages [B, T]."""
    advantages, last = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    width = rewards.shape[1]
    for t in reversed(range(width)):
        next_value = values[:, t + 1] if t + 1 < width else torch.zeros_like(last)
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last = delta + gamma * lam * last
        advantages[:, t] = last
    return advantages * mask


# %% tags=["solution"]
import torch


def masked_gae(rewards, values, mask, gamma, lam):
    """rewards, values [B, T], padded on the right, mask [B, T] -> advantages [B, T]."""
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)  # before, not after
    advantages, last = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    width = rewards.shape[1]
    for t in reversed(range(width)):
        next_value = values[:, t + 1] if t + 1 < width else torch.zeros_like(last)
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        last = delta + gamma * lam * last
        advantages[:, t] = last
    return advantages * mask


# %% tags=["check"]
import torch

from lmrl.gae import score_last_token
from lmrl.tree import TabularPolicy, enumerate_tree, exact_values, leaf_probabilities

oracle_tree = enumerate_tree(TabularPolicy(3, 4, seed=5), 4, eos_id=0)
chosen = oracle_tree.mask
worth = torch.rand(len(chosen), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
oracle = exact_values(oracle_tree, worth)
on_padding = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
critic_output = torch.where(chosen, oracle.v[oracle_tree.states], on_padding)
p = leaf_probabilities(oracle_tree).detach()[:, None].expand_as(chosen)[chosen]
place = (oracle_tree.states * 3 + oracle_tree.ids)[chosen]
visits = torch.zeros(oracle.a.numel(), dtype=torch.float64).index_add(0, place, p)
for lam in (0.0, 0.5, 0.95):
    found = masked_gae(score_last_token(worth, chosen), critic_output, chosen, 1.0, lam)[chosen]
    mean = torch.zeros_like(visits).index_add(0, place, p * found) / visits
    worst = (mean - oracle.a.flatten()).abs().max().item()
    assert worst < 1e-10, f"λ = {lam}: the mean is off by up to {worst:.3f} though the critic is exact"

# %% [markdown]
# ## What is still missing
#
# There is now a weight for every token, but nothing says how far to go along the gradient that it gives before the batch no
# longer describes the policy: section 9 measures that distance, and section 10 uses it. Whether a critic is worth its
# memory and its bias when a group of completions gives a baseline for free is settled in sections 12 and 14.
