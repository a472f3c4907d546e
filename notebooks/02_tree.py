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
# # 2. A language model is already a policy
#
# Section 1 wrote a prompt $x$, tokens $y_1, y_2, \dots$, and a model $p_\theta(y_t \mid x, y_{<t})$. Reinforcement learning
# speaks of states, actions and policies. What has to be added to the one to get the other? Nothing; it is a change of
# names.
#
# | reinforcement learning | language model | symbol |
# |---|---|---|
# | state | the prompt and the tokens before the $t$-th | $s_t = (x, y_{<t})$ |
# | action | the $t$-th token, out of a vocabulary of $V$ | $a_t = y_t$ |
# | policy | the softmax over the vocabulary, with parameters $\theta$ | $\pi_\theta(a_t \mid s_t) = p_\theta(y_t \mid x, y_{<t})$ |
# | transition | append the token, written $\oplus$ | $s_{t+1} = s_t \oplus a_t$ |
# | trajectory | one completion of $T$ tokens, ended by a stop token or by a cap on $T$ | $\tau = (a_1, \dots, a_T)$ |
# | reward | a number for the finished completion | $R(\tau)$ |
#
# From here on a model's probability of the next token is written $\pi_\theta(a_t \mid s_t)$. The two ways of writing it
# mean the same.
#
# The transition is where this differs from a robot or a game. Whoever pushes a robot's arm waits to see what the world
# makes of it. Here the next state follows from the action by a rule that we know, and can replay as often as we like. A
# second run of the same policy differs from the first for one reason only: other tokens were drawn.
#
# For a policy small enough, that permits something unusual: to list **every** completion that it could ever produce,
# with its exact probability. That list is this section's module, and every estimator in the course is tested on it.

# %%
import copy
import dataclasses
import math
from typing import Callable, Iterable, NamedTuple

import ipywidgets as widgets
import torch
import torch.nn.functional as F
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.policy import build_policy, build_tokenizer, token_logprobs

# %% [markdown]
# ## The smallest policy
#
# After a fixed prompt, a state $s$ is a **prefix**: the tokens written so far. A language model is a function from a
# prefix to $V$ logits $z(s)$, one for each token $a$, and its softmax is the policy:
#
# $$\pi_\theta(a \mid s) = \frac{e^{z_a(s)}}{\sum_{a'} e^{z_{a'}(s)}}.$$
#
# The smallest such function is a table: every prefix has its own row of $V$ free numbers, and all rows together are
# $\theta$. Nothing is shared between prefixes, so what one state learns never disturbs another. Rows are numbered so
# that the row after appending token $a$ to row $r$ is $rV + a + 1$.


# %% tags=["export"]
class TabularPolicy(torch.nn.Module):
    """A softmax policy with one row of float64 logits for every prefix of fewer than `max_length` tokens.

    Calling it maps prefixes [M, t] int64 to logits [M, V]; `t` is below `max_length`. The parameter `logits` [rows, V]
    starts as standard normal draws from `seed`. Section 2.
    """

    def __init__(self, vocab_size: int, max_length: int, *, seed: int = 0):
        super().__init__()
        self.vocab_size = vocab_size
        rows = sum(vocab_size**t for t in range(max_length))
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.nn.Parameter(torch.randn(rows, vocab_size, generator=generator, dtype=torch.float64))

    def forward(self, prefixes: torch.Tensor) -> torch.Tensor:
        row = torch.zeros(len(prefixes), dtype=torch.int64)
        for token in prefixes.unbind(1):
            row = row * self.vocab_size + token + 1
        return self.logits[row]


# %% [markdown]
# Three tokens will do: `#` is the stop token, `a` and `b` are the others. A completion has at most three tokens.

# %%
tokens = ["#", "a", "b"]
policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
after_ab = policy(torch.tensor([[1, 2]])).softmax(-1)
print("π(# | ab), π(a | ab), π(b | ab) =", [round(p, 4) for p in after_ab[0].tolist()])
assert torch.isclose(after_ab.sum(), torch.ones((), dtype=torch.float64))

# %% [markdown]
# ## Every completion
#
# In general the probability of a trajectory has two kinds of factor: what the policy chose, and where the world then
# went, $p(s_{t+1} \mid s_t, a_t)$. Here the second kind is always 1, because appending is deterministic. What is left is
#
# $$\pi_\theta(\tau) = \prod_{t} \pi_\theta(a_t \mid s_t), \qquad
# \log \pi_\theta(\tau) = \sum_{t} \log \pi_\theta(a_t \mid s_t). \tag{2.1}$$
#
# Seen from the empty prefix, the completions form a tree. An inner node is a state, an edge is a token, a **leaf** is a
# finished completion. A path ends where it takes the stop token, or at the cap; in the second case the leaf is marked
# `truncated`.
#
# The leaves are stored the way a trainer stores a batch: one row for each of the $L$ leaves, padded to `[L, T]`, with a
# mask of the real tokens. Any function that works on a batch of sampled completions can then be applied to all
# completions at once.


# %% tags=["export"]
@dataclasses.dataclass(frozen=True, eq=False)
class Tree:
    """All completions of a policy: L leaves of at most T tokens, and the S states where a token is chosen. Section 2.

    Log-probabilities are float64 and differentiable. Masked positions hold 0. Leaves are in lexicographic order,
    states in order of depth; state 0 is the empty prefix.
    """

    ids: torch.Tensor  # [L, T] int64
    mask: torch.Tensor  # [L, T] bool, True on the tokens of the completion
    truncated: torch.Tensor  # [L] bool, True where the cap ended it
    logprobs: torch.Tensor  # [L, T] log π(a_t | s_t)
    states: torch.Tensor  # [L, T] int64, the state in which token t was chosen
    prefixes: torch.Tensor  # [S, T] int64, padded
    depth: torch.Tensor  # [S] int64, length of the prefix
    log_policy: torch.Tensor  # [S, V] log π(a | s)
    children: torch.Tensor  # [S, V] int64, the next state, or S + the leaf's row


# %% [markdown]
# The tree grows as generation does. At each length, ask the policy for the logits of all unfinished prefixes at once,
# and give each of them $V$ children.

# %% tags=["export"]
MAX_LEAVES = 100_000


def enumerate_tree(policy: Callable[[torch.Tensor], torch.Tensor], max_length: int, eos_id: int | None = None) -> Tree:
    """The tree of all completions of at most `max_length` tokens.

    `policy` maps prefixes [M, t] int64 to logits [M, V]. Without `eos_id` every completion has `max_length` tokens and
    counts as truncated. Raises ValueError for a cap below 1, a stop token outside the vocabulary, and a tree of more
    than MAX_LEAVES leaves. Section 2.
    """
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    ids = torch.zeros(1, max_length, dtype=torch.int64)
    states, mask, alive = torch.zeros_like(ids), torch.zeros_like(ids).bool(), torch.ones(1).bool()
    prefixes, logits = [], []
    for t in range(max_length):
        first = sum(map(len, prefixes))
        prefixes.append(ids[alive])
        logits.append(policy(ids[alive, :t]).double())
        count, vocab_size = logits[-1].shape
        _check_size(len(ids) + count * (vocab_size - 1), vocab_size, max_length, eos_id)
        row = torch.arange(len(ids)).repeat_interleave(torch.where(alive, vocab_size, 1))
        ids, states, mask, alive = ids[row], states[row], mask[row], alive[row]
        ids[alive, t] = torch.arange(vocab_size).repeat(count)
        states[alive, t] = torch.arange(first, first + count).repeat_interleave(vocab_size)
        mask[alive, t] = True
        alive &= ids[:, t] != (-1 if eos_id is None else eos_id)
    log_policy = torch.cat(logits).log_softmax(-1)
    return Tree(
        ids=ids,
        mask=mask,
        truncated=alive,
        logprobs=torch.where(mask, log_policy[states, ids], 0.0),
        states=states,
        prefixes=torch.cat(prefixes),
        depth=torch.repeat_interleave(torch.tensor([len(level) for level in prefixes])),
        log_policy=log_policy,
        children=_children(ids, mask, states, len(log_policy), vocab_size),
    )


def _check_size(leaves, vocab_size, max_length, eos_id):
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_id is {eos_id}, outside the policy's vocabulary of {vocab_size} tokens")
    if leaves > MAX_LEAVES:
        raise ValueError(
            f"this tree has more than {MAX_LEAVES} leaves (vocabulary {vocab_size}, max_length {max_length}); "
            "enumerate a smaller policy, or sample"
        )


def _children(ids, mask, states, num_states, vocab_size):
    goes_on = F.pad(mask[:, 1:], (0, 1))
    leaf = num_states + torch.arange(len(ids))[:, None]
    following = torch.where(goes_on, F.pad(states[:, 1:], (0, 1)), leaf)
    children = torch.empty(num_states, vocab_size, dtype=torch.int64)
    children[states[mask], ids[mask]] = following[mask]
    return children


# %% [markdown]
# Summing (2.1) along each row gives the leaves' log-probabilities.


# %% tags=["export"]
def leaf_logprobs(tree: Tree) -> torch.Tensor:
    """log π(τ) of every leaf, [L]: the sum of its token log-probabilities. Section 2."""
    return tree.logprobs.sum(-1)


def leaf_probabilities(tree: Tree) -> torch.Tensor:
    """π(τ) of every leaf, [L]; they sum to 1. Section 2."""
    return leaf_logprobs(tree).exp()


def completions(tree: Tree) -> list[list[int]]:
    """The token ids of every leaf without padding, for reward functions. Section 2."""
    return [row[kept].tolist() for row, kept in zip(tree.ids, tree.mask)]


# %%
tree = enumerate_tree(policy, max_length=3, eos_id=0)
texts = ["".join(tokens[i] for i in ids) for ids in completions(tree)]
for text, probability, truncated in zip(texts, leaf_probabilities(tree).tolist(), tree.truncated.tolist()):
    print(f"{text:4} {probability:.4f}{'  truncated' if truncated else ''}")
print("sum", leaf_probabilities(tree).sum().item())

# %% [markdown]
# **Claim 2.1.** The probabilities sum to 1, and the log-probability of a trajectory is the sum of its token
# log-probabilities and nothing else. The second half is checked against a walk that does not use the tree: feed each
# completion to the policy one token at a time and multiply what it answers.

# %%
for leaf, ids in enumerate(completions(tree)):
    product = 1.0
    for t, token in enumerate(ids):
        product *= policy(torch.tensor([ids[:t]], dtype=torch.int64)).softmax(-1)[0, token].item()
    assert abs(math.log(product) - leaf_logprobs(tree)[leaf].item()) < 1e-10
assert abs(leaf_probabilities(tree).sum().item() - 1) < 1e-10

# %% [markdown]
# **Claim 2.2.** This is possible for toys only. With a vocabulary of $V = 10^5$ and $T = 10^3$ tokens there are $V^T$
# sequences of full length, a number with five thousand zeros.

# %%
digits = 1000 * math.log10(1e5)
print(f"V = 1e5, T = 1e3: 10^{digits:.0f} leaves;  this tree: {len(tree.ids)}")
assert abs(digits - 5000) < 1e-9
assert len(tree.ids) == 1 + 2 + 4 * 3  # stops at once, after one more token, or never before the third

# %% [markdown]
# ## Averages over completions are sums over leaves
#
# For any function $f$ of a completion, its average under the policy is
#
# $$\mathbb{E}_{\tau \sim \pi_\theta}[f(\tau)] = \sum_\tau \pi_\theta(\tau)\, f(\tau). \tag{2.2}$$
#
# With $f = R$ this is $J(\theta)$, the expected reward, which the next section makes the objective.


# %% tags=["export"]
def expectation(tree: Tree, values: torch.Tensor) -> torch.Tensor:
    """E[values] over the leaves: [L, ...] -> [...]. With the rewards [L] it is J. Differentiable. Section 2."""
    return torch.tensordot(leaf_probabilities(tree), values.double(), dims=1)


# %% [markdown]
# The reward here is an ordinary Python function of the finished text: 1 if it contains `ab`, otherwise 0. The policy's
# parameters do not occur in it.

# %%
rewards = torch.tensor([float("ab" in text) for text in texts], dtype=torch.float64)
J = expectation(tree, rewards)
print("J =", J.item(), " from", [text for text, r in zip(texts, rewards) if r])
assert torch.isclose(J, sum(p for text, p in zip(texts, leaf_probabilities(tree)) if "ab" in text))

# %% [markdown]
# ## One reward, at the end
#
# In general a reward $r_t$ may follow every action $a_t$. (The letter is needed here and in section 8; elsewhere $r_t$
# is a ratio.) The **return** $G_t$ adds up what follows token $t$, discounted by a factor $\gamma \in [0, 1]$ for each
# step of waiting:
#
# $$G_t = r_t + \gamma\, r_{t+1} + \gamma^2 r_{t+2} + \dots$$
#
# Text is scored once, when it is finished. With $T$ for the number of tokens of this completion, $r_t = 0$ but for the
# last token, where $r_T = R(\tau)$. So $G_t = \gamma^{T-t} R(\tau)$.


# %% tags=["export"]
def terminal_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """The return of every token when the reward comes with the last one: rewards [B], mask [B, T] -> [B, T].

    γ to the power of the number of completion tokens still to come, times the reward; 0 where masked. Section 2.
    """
    to_come = mask.flip(-1).cumsum(-1).flip(-1) - 1
    return torch.where(mask, rewards[:, None] * gamma ** to_come.to(rewards.dtype), 0.0)


# %% [markdown]
# **Claim 2.3.** With $\gamma = 1$ every token of a completion has the same return: nothing says which of them earned the
# reward. With $\gamma < 1$ later tokens have a larger share. Both are checked against the definition, summed from the end.

# %%
is_last = tree.mask & ~F.pad(tree.mask[:, 1:], (0, 1))
token_rewards = torch.where(is_last, rewards[:, None], 0.0)
for gamma in (1.0, 0.9):
    returns = token_rewards.clone()
    for t in reversed(range(2)):
        returns[:, t] += gamma * returns[:, t + 1]
    assert torch.allclose(returns, terminal_returns(rewards, tree.mask, gamma), rtol=0, atol=1e-10)
    row = texts.index("aab")
    print(f"γ = {gamma}: returns of the tokens of '{texts[row]}' = {returns[row].tolist()}")
assert (terminal_returns(rewards, tree.mask)[tree.mask] == rewards[:, None].expand_as(tree.mask)[tree.mask]).all()
assert terminal_returns(rewards, tree.mask, 0.9)[row].unique().numel() == 3

# %% [markdown]
# A discount is needed where rewards go on for ever, to keep their sum finite, and it is wanted where late is worse than
# early. A completion ends, and a long correct proof is as correct as a short one: both reasons are missing, and
# $\gamma = 1$ is the usual choice. It leaves all tokens tied, and sections 7 and 8 are about that.
#
# ## How good is a prefix?
#
# Three functions answer, and the rest of the course estimates them. The tree has them exactly.
#
# - $V(s)$, the **value**: the expected return from state $s$ on. (The $V$ without brackets is the vocabulary's size.)
# - $Q(s, a)$, the **action value**: the same, after token $a$ has been appended.
# - $A(s, a) = Q(s, a) - V(s)$, the **advantage**: how much better $a$ is than what the policy does on average.
#
# A value is an average over what may follow, so it can be computed backwards from the leaves:
#
# $$Q(s, a) = \begin{cases} R(\tau) & s \oplus a \text{ is the leaf } \tau \\ \gamma\, V(s \oplus a) & \text{otherwise}
# \end{cases} \qquad V(s) = \sum_a \pi_\theta(a \mid s)\, Q(s, a). \tag{2.3}$$


# %% tags=["export"]
class Values(NamedTuple):
    v: torch.Tensor  # [S]
    q: torch.Tensor  # [S, V]
    a: torch.Tensor  # [S, V]


def exact_values(tree: Tree, rewards: torch.Tensor, gamma: float = 1.0) -> Values:
    """V(s), Q(s, a) and A(s, a) = Q - V of every state, for leaf rewards [L]; float64, without gradient. Section 2."""
    policy = tree.log_policy.detach().exp()
    v = policy.new_zeros(len(policy))
    for depth in reversed(range(tree.ids.shape[1])):
        here = tree.depth == depth
        q = torch.cat([gamma * v, rewards.double()])[tree.children[here]]
        v[here] = (policy[here] * q).sum(-1)
    q = torch.cat([gamma * v, rewards.double()])[tree.children]
    return Values(v, q, q - v[:, None])


# %% [markdown]
# How often the policy passes through a state is the summed probability of the leaves behind it ($\tau \ni s$ reads: the
# path to leaf $\tau$ passes through state $s$):
#
# $$d(s) = \sum_{\tau \ni s} \pi_\theta(\tau).$$


# %% tags=["export"]
def visit_probabilities(tree: Tree) -> torch.Tensor:
    """d(s), the probability that a completion passes through each state, [S]. Differentiable. Section 2."""
    through = leaf_probabilities(tree)[:, None].expand_as(tree.mask)[tree.mask]
    return torch.zeros_like(tree.log_policy[:, 0]).index_add(0, tree.states[tree.mask], through)


# %% [markdown]
# Four checks, of which the last has nothing of (2.3) in it: the value at the root is $J$; the mean advantage is 0 in
# every state; $Q$ is the value of the next state; and in every state $V$ is the average return of the tokens chosen
# there, for any $\gamma$.

# %%
values = exact_values(tree, rewards)
choices = tree.log_policy.exp()
num_states = len(values.v)
assert torch.isclose(values.v[0], J, rtol=0, atol=1e-10)
assert (choices * values.a).sum(-1).abs().max() < 1e-10
inner = tree.children < num_states
assert torch.allclose(values.q[inner], values.v[tree.children[inner]], rtol=0, atol=1e-10)
for gamma in (1.0, 0.9):
    weighted = (leaf_probabilities(tree)[:, None] * terminal_returns(rewards, tree.mask, gamma))[tree.mask]
    total = torch.zeros_like(values.v).index_add(0, tree.states[tree.mask], weighted)
    assert torch.allclose(total / visit_probabilities(tree), exact_values(tree, rewards, gamma).v, rtol=0, atol=1e-10)

for state in range(num_states):
    prefix = "".join(tokens[i] for i in tree.prefixes[state, : tree.depth[state]].tolist())
    advantages = "  ".join(f"A({token}) = {a:+.3f}" for token, a in zip(tokens, values.a[state].tolist()))
    print(f"{prefix or '(start)':8} V = {values.v[state]:.3f}   {advantages}")

# %% [markdown]
# ## Diversity and drift
#
# Two more sums over leaves return throughout the course. The **entropy** says how spread out the completions are. The
# **Kullback–Leibler divergence** (KL) from $\pi$ to a second policy $\pi'$ says how far the two have drifted apart, on what
# the first one writes:
#
# $$H(\pi) = -\sum_\tau \pi(\tau) \log \pi(\tau), \qquad
# \mathrm{KL}(\pi \,\|\, \pi') = \sum_\tau \pi(\tau) \log \frac{\pi(\tau)}{\pi'(\tau)}.$$
#
# Logarithms are natural, so both are in **nats**: a fair choice between $n$ completions has an entropy of $\log n$.


# %% tags=["export"]
def sequence_entropy(tree: Tree) -> torch.Tensor:
    """Entropy of the whole completion in nats, scalar. Differentiable. Section 2."""
    p = leaf_probabilities(tree)
    return -(p * torch.where(p > 0, leaf_logprobs(tree), 0.0)).sum()


def sequence_kl(tree: Tree, other: Tree) -> torch.Tensor:
    """KL(tree ‖ other) of whole completions in nats, scalar. Differentiable in both.

    Raises ValueError if the two trees have different leaves. Section 2.
    """
    if not (torch.equal(tree.ids, other.ids) and torch.equal(tree.mask, other.mask)):
        raise ValueError("the two trees have different leaves: enumerate both with the same vocabulary, cap and eos_id")
    p = leaf_probabilities(tree)
    possible = p > 0
    log_ratio = torch.where(possible, leaf_logprobs(tree), 0.0) - torch.where(possible, leaf_logprobs(other), 0.0)
    return (p * log_ratio).sum()


# %% [markdown]
# Since $\log \pi(\tau)$ is a sum over tokens, both split into one term for each state, weighted by how often the state is
# visited. With $\pi(\cdot \mid s)$ for the distribution over the next token in state $s$,
#
# $$H(\pi) = \sum_s d(s)\, H\big(\pi(\cdot \mid s)\big), \qquad
# \mathrm{KL}(\pi \,\|\, \pi') = \sum_s d(s)\, \mathrm{KL}\big(\pi(\cdot \mid s) \,\|\, \pi'(\cdot \mid s)\big).$$
#
# The right-hand sides need only one distribution over the vocabulary at a time. A trainer can measure those; it can
# never list the leaves.

# %%
other = enumerate_tree(TabularPolicy(3, 3, seed=1), max_length=3, eos_id=0)
d = visit_probabilities(tree)
entropies = -(choices * tree.log_policy).sum(-1)
divergences = (choices * (tree.log_policy - other.log_policy)).sum(-1)
print(f"H = {sequence_entropy(tree):.4f} nats, KL = {sequence_kl(tree, other):.4f} nats")
assert torch.isclose(sequence_entropy(tree), (d * entropies).sum(), rtol=0, atol=1e-10)
assert torch.isclose(sequence_kl(tree, other), (d * divergences).sum(), rtol=0, atol=1e-10)
assert sequence_kl(tree, tree) == 0

# %% [markdown]
# ## Gradients
#
# Everything above is differentiable in the policy's parameters, so automatic differentiation gives the exact gradient
# $\nabla_\theta J$: the direction in which $J$ rises fastest, and what every estimator later tries to hit. It is
# returned as one flat vector, all parameters laid end to end. Their number is $P$ wherever gradients are concerned. (In
# the shape of a batch of prompts, `[B, P]`, $P$ is the number of columns.)


# %% tags=["export"]
def flat_gradient(value: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Gradient of a scalar, [P]: all parameters laid end to end, zeros where unused. The graph is kept. Section 2."""
    gradients = torch.autograd.grad(value, list(parameters), retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def exact_gradient(tree: Tree, rewards: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """∇J for leaf rewards [L], as one vector [P]. Section 2."""
    return flat_gradient(expectation(tree, rewards), parameters)


# %% [markdown]
# The mean of an estimator needs $\nabla J$; its variance needs what each single completion would contribute. Most of that
# is the **score** of the completion, $\nabla_\theta \log \pi_\theta(\tau)$: the direction in which to move $\theta$ so
# that $\tau$ becomes more likely. The score matrix has one row for each leaf.


# %% tags=["export"]
def row_gradients(values: torch.Tensor, parameters: Iterable[torch.Tensor], chunk: int = 128) -> torch.Tensor:
    """Gradient of each of N numbers: values [N] -> [N, P], `chunk` rows at a time. The graph is kept. Section 2."""
    parameters, rows = list(parameters), []
    for selector in torch.eye(len(values), dtype=values.dtype).split(chunk):
        gradients = torch.autograd.grad(
            values, parameters, selector, retain_graph=True, is_grads_batched=True, materialize_grads=True
        )
        shapes = [(len(selector), *parameter.shape) for parameter in parameters]  # an unused one comes without rows
        rows.append(torch.cat([g.expand(shape).flatten(1) for g, shape in zip(gradients, shapes)], 1))
    return torch.cat(rows)


def score_matrix(tree: Tree, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The score ∇log π(τ) of every leaf, [L, P]. Section 2."""
    return row_gradients(leaf_logprobs(tree), parameters)


# %% [markdown]
# The exact gradient is checked without automatic differentiation: move one parameter by $\pm h$, enumerate both trees,
# and divide the difference of the two $J$ by $2h$.

# %%
gradient = exact_gradient(tree, rewards, policy.parameters())
scores = score_matrix(tree, policy.parameters())
entries, h = policy.logits.data.view(-1), 1e-5
for k in range(len(entries)):
    entries[k] += h
    above = expectation(enumerate_tree(policy, 3, 0), rewards).item()
    entries[k] -= 2 * h
    below = expectation(enumerate_tree(policy, 3, 0), rewards).item()
    entries[k] += h
    assert abs((above - below) / (2 * h) - gradient[k].item()) < 1e-9
print(f"{len(entries)} parameters, ‖∇J‖ = {gradient.norm():.4f}, score matrix {tuple(scores.shape)}")

# %% [markdown]
# Scores have a property that will be used in every later section: their mean is zero, because the probabilities sum to
# 1 wherever $\theta$ goes.
#
# $$\mathbb{E}[\nabla \log \pi(\tau)] = \sum_\tau \pi(\tau) \frac{\nabla \pi(\tau)}{\pi(\tau)}
# = \nabla \sum_\tau \pi(\tau) = \nabla 1 = 0.$$

# %%
assert expectation(tree, scores).abs().max() < 1e-10

# %% [markdown]
# ## A real language model, and its prompt
#
# Nothing above asked what computes the logits. Here is a real transformer, a `Qwen3ForCausalLM` with five tokens in its
# vocabulary, held in float64. A prompt is set before every prefix, which is all that it takes to condition on one.


# %% tags=["export"]
def prompted_policy(model: torch.nn.Module, prompt_ids: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A causal language model after a fixed prompt [P], as a function from prefixes [M, t] to logits [M, V]. Section 2."""

    def policy(prefixes):
        prompt = prompt_ids.expand(len(prefixes), -1)
        return model(input_ids=torch.cat([prompt, prefixes], 1), use_cache=False).logits[:, -1]

    return policy


# %%
tokenizer = build_tokenizer("ab")
model = build_policy(tokenizer, hidden_size=32, num_layers=1, num_heads=1, seed=0).double().eval()
prompt_ids = torch.tensor(tokenizer("ab")["input_ids"])
model_tree = enumerate_tree(prompted_policy(model, prompt_ids), max_length=3, eos_id=tokenizer.eos_token_id)
lengths = model_tree.mask.sum(-1)
model_rewards = (lengths == 2).double()  # 1 for stopping after one token
model_values = exact_values(model_tree, model_rewards)
print(f"{len(model_tree.ids)} leaves, {len(model_tree.depth)} states, P(two tokens) = {model_values.v[0]:.4f}")
assert abs(leaf_probabilities(model_tree).sum().item() - 1) < 1e-10
assert torch.isclose(model_values.v[0], expectation(model_tree, model_rewards), rtol=0, atol=1e-10)

# %% [markdown]
# The tree calls the model once for each length. The trainer's own function, `token_logprobs` from section 1, reads each
# padded row in one pass. They agree on every token of every completion, to the precision of float32: Qwen3's
# normalisation layers compute in it whatever the weights are held in. What is summed over the tree stays exact.

# %%
prompts = prompt_ids.expand(len(model_tree.ids), -1)
in_one_pass = token_logprobs(model, prompts, torch.ones_like(prompts).bool(), model_tree.ids)
difference = torch.where(model_tree.mask, in_one_pass - model_tree.logprobs, 0.0)
print(f"largest difference of a log-prob: {difference.abs().max():.0e}")
assert difference.abs().max() < 1e-5

# %% [markdown]
# Its gradient is checked along the gradient's own direction, where the slope of $J$ must be the gradient's length. The
# step is longer than before, because of that precision.

# %%
model_gradient = exact_gradient(model_tree, model_rewards, model.parameters())
start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
moved = []
for h in (1e-3, -1e-3, 0.0):  # the last one restores the model
    torch.nn.utils.vector_to_parameters(start + h * F.normalize(model_gradient, dim=0), model.parameters())
    moved.append(expectation(enumerate_tree(prompted_policy(model, prompt_ids), 3, 2), model_rewards).item())
slope = (moved[0] - moved[1]) / 2e-3
print(f"{len(start)} parameters, slope by differences {slope:.5f}, ‖∇J‖ = {model_gradient.norm():.5f}")
assert abs(slope / model_gradient.norm().item() - 1) < 1e-3

# %% [markdown]
# **Claim 2.4.** The prompt is state, not action. The policy did not choose it, so its tokens are not in
# $\log \pi_\theta(\tau)$: the sum (2.1) starts at the first generated token, $a_1$. The model can of course also score the
# prompt's own tokens. Were they counted, every leaf would be multiplied by the same $p_\theta(x)$, and the "probabilities"
# would sum to $p_\theta(x)$ instead of 1.

# %%
bos, rest = prompts[:, :1], prompts[:, 1:]
scored = token_logprobs(model, bos, torch.ones_like(bos).bool(), torch.cat([rest, model_tree.ids], 1))
of_prompt = scored[:, : rest.shape[1]].sum(-1)
of_completion = torch.where(model_tree.mask, scored[:, rest.shape[1] :], 0.0).sum(-1)
assert torch.allclose(of_completion, leaf_logprobs(model_tree), atol=1e-5)
counted = (of_prompt + of_completion).exp().sum()
print(f"p(x) = {of_prompt[0].exp():.4f}; with the prompt counted, the leaves sum to {counted:.4f}")
assert torch.isclose(counted, of_prompt[0].exp(), atol=1e-5)

# %% [markdown]
# It would also be trained. A prompt token counted as an action adds $R(\tau)\,\nabla \log p_\theta(x)$ to every
# completion's push on $\theta$: on average $J\,\nabla \log p_\theta(x)$, a pull towards writing the question, which has
# nothing to do with answering it.

# %%
pull = model_values.v[0] * flat_gradient(of_prompt[0], model.parameters())
print(f"‖∇J‖ = {model_gradient.norm():.4f}, ‖J ∇log p(x)‖ = {pull.norm():.4f}")
assert pull.norm() > 0.1 * model_gradient.norm()

# %% [markdown]
# ## The picture
#
# All of it at once: each branch is as wide as the probability that the policy passes along it, and what flows into a
# state flows out of it again. Rewards stand at the leaves. So $J$ can be read off: it is how much of the flow arrives at
# a green bar, times the bar's length.


# %% tags=["export:figures"]
def tree_figure(tree: Tree, rewards: torch.Tensor, tokens: list[str]) -> Figure:
    """The tree with branches as wide as they are probable; beside each leaf its text, probability and reward."""
    num_states, num_leaves = len(tree.depth), len(tree.ids)
    probability = torch.cat([visit_probabilities(tree), leaf_probabilities(tree)]).tolist()
    x = torch.cat([tree.depth, tree.mask.sum(-1)]).tolist()
    y = [0.0] * num_states + list(range(num_leaves, 0, -1))
    for state in reversed(range(num_states)):
        below = [y[child] for child in tree.children[state].tolist()]
        y[state] = sum(below) / len(below)
    fig, ax = new_figure(height=0.25 * num_leaves + 0.9)
    fig.set_layout_engine(None)  # a quarter of the drawing time
    fig.subplots_adjust(left=0.02, right=0.99, bottom=0.11, top=0.93)
    color, branches = COLORS["policy"], []
    for state in range(num_states):
        start = y[state] + probability[state]
        for token, child in zip(tokens, tree.children[state].tolist()):
            p = probability[child]
            branches.append(_branch(x[state], start - p, x[child], y[child], p))
            middle = 0.12 * (start - p) + 0.88 * y[child]
            ax.text(x[child] - 0.22, middle, token, ha="center", va="center", fontsize=9)
            start -= 2 * p
    ax.add_collection(PolyCollection(branches, facecolor=color, edgecolor=color, lw=0.6, alpha=0.6))
    _label_leaves(ax, tree, rewards, tokens, x[num_states:], y[num_states:])
    J, entropy = expectation(tree, rewards).item(), sequence_entropy(tree).item()
    ax.set_title(f"J = {J:.3f},  entropy {entropy:.2f} nats", loc="left")
    return fig


def _branch(x0, y0, x1, y1, half_width):
    """Outline of a bent band from (x0, y0) to (x1, y1)."""
    t = torch.linspace(0, 1, 13)
    x, y = x0 + (x1 - x0) * t, y0 + (y1 - y0) * t**2 * (3 - 2 * t)
    return torch.stack([torch.cat([x, x.flip(0)]), torch.cat([y + half_width, y.flip(0) - half_width])], 1)


def _label_leaves(ax, tree, rewards, tokens, x, y):
    right, top = max(x), max(y) + 1
    rows = zip(completions(tree), x, y, leaf_probabilities(tree).tolist(), rewards.tolist())
    for ids, depth, height, p, reward in rows:
        text = "".join(tokens[i] for i in ids)
        ax.text(depth + 0.06, height, text, va="center", weight="bold" if reward else "normal", fontsize=9)
        ax.text(right + 0.75, height, f"{p:.3f}", va="center", ha="right", fontsize=9)
        ax.text(right + 1.15, height, f"{reward:.2g}", va="center", ha="right", fontsize=9)
    ax.text(right + 0.75, top, "π(τ)", va="center", ha="right", fontsize=9)
    ax.text(right + 1.15, top, "R(τ)", va="center", ha="right", fontsize=9)
    ax.barh(y, [0.5 * reward for reward in rewards.tolist()], 0.6, left=right + 1.22, color=COLORS["reward"])
    ax.set(xlim=(-0.05, right + 1.75), ylim=(0.2, top + 0.5), yticks=[], xticks=range(right + 1))
    ax.set_xlabel("tokens generated", loc="left")
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.spines.bottom.set_bounds(0, right)


# %%
show(
    tree_figure(tree, rewards, tokens),
    caption="Every completion of a three-token policy. A branch is as wide as it is probable; rewards are at the leaves only.",
    alt="A tree that grows from left to right out of one band, which divides at every token into narrower bands. Each of "
    "the fifteen leaves has its text, its probability and its reward: a bar of length 1 where the text contains ab, and "
    "nothing elsewhere.",
)

# %% [markdown]
# To train a policy is to redirect this flow. The tree and the rewards stay; only the widths change, and they always sum
# to 1, so that what one completion gains the others lose. With the exact gradient at hand it can be watched. The cell
# below climbs each of three rewards for fifteen steps $\theta \leftarrow \theta + 2\, \nabla_\theta J$ and keeps the
# policies.

# %%
reward_choices = {
    "contains ab": rewards,
    "share of b": torch.tensor([text.count("b") / 3 for text in texts], dtype=torch.float64),
    "stops by itself": 1 - tree.truncated.double(),
}
climbs = {}
for name, R in reward_choices.items():
    climber, climbs[name] = copy.deepcopy(policy), []
    for _ in range(16):
        climbs[name].append(copy.deepcopy(climber).requires_grad_(False))
        uphill = exact_gradient(enumerate_tree(climber, 3, 0), R, climber.parameters())
        climber.logits.data += 2 * uphill.view_as(climber.logits)
    path = [expectation(enumerate_tree(step, 3, 0), R).item() for step in climbs[name]]
    print(f"{name:15} J from {path[0]:.3f} to {path[-1]:.3f}")
    assert all(later > earlier for earlier, later in zip(path, path[1:]))

# %% [markdown]
# Move the steps and see the flow turn towards the bars, and the entropy fall with it. Then move the temperature, by which
# all logits are divided: near 0 the whole flow takes one path, and at high temperature all branches of a state become
# equally wide, whatever was learned.

# %%
explore(
    lambda reward, steps, temperature: tree_figure(
        enumerate_tree(lambda prefixes: climbs[reward][steps](prefixes) / temperature, 3, 0),
        reward_choices[reward],
        tokens,
    ),
    reward=widgets.Dropdown(options=list(reward_choices), description="reward"),
    steps=widgets.IntSlider(0, 0, 15, description="uphill steps", style={"description_width": "initial"}),
    temperature=widgets.FloatLogSlider(
        1.0, min=-1, max=1, step=0.05, description="temperature", style={"description_width": "initial"}
    ),
)

# %% [markdown]
# ## Exercises
#
# **1. Predict, then run.** A policy knows nothing: each of its $V = 4$ tokens, one of which stops, has probability 1/4 in
# every state, and the cap is three tokens. How many leaves has its tree, and how probable is it that a completion is cut
# off by the cap? Put your two numbers in before you run the check.

# %% tags=["exercise"]
predicted_leaves = None
predicted_truncation = None

# %% tags=["solution"]
predicted_leaves = 1 + 3 + 3 * 3 * 4  # stopped after one token, after two; or two other tokens and then any
predicted_truncation = (3 / 4) ** 3  # three times not the stop token; its third token may also be the stop token

# %% tags=["check"]
from lmrl.tree import TabularPolicy, enumerate_tree, leaf_probabilities

assert predicted_leaves is not None and predicted_truncation is not None, "put your predictions in"
ignorant = TabularPolicy(4, 3)
ignorant.logits.data.zero_()
ignorant_tree = enumerate_tree(ignorant, 3, eos_id=0)
cut_off = leaf_probabilities(ignorant_tree)[ignorant_tree.truncated].sum().item()
assert predicted_leaves == len(ignorant_tree.ids), f"{len(ignorant_tree.ids)} leaves"
assert abs(predicted_truncation - cut_off) < 1e-10, f"a completion is cut off with probability {cut_off}"

# %% [markdown]
# **2. Length without leaves.** The expected length of a completion is a sum over leaves, $\sum_\tau \pi(\tau)\, T(\tau)$.
# Write it as a sum over states, with `visit_probabilities` and nothing else from the tree. (How many states does a
# completion of $T$ tokens pass through?)

# %% tags=["exercise"]
from lmrl.tree import Tree, visit_probabilities


def expected_length(tree: Tree):
    raise NotImplementedError("a sum over states")


# %% tags=["solution"]
from lmrl.tree import Tree, visit_probabilities


def expected_length(tree: Tree):
    return visit_probabilities(tree).sum()  # every token is chosen in one state


# %% tags=["check"]
from lmrl.tree import TabularPolicy, enumerate_tree, expectation

for vocab_size, cap, seed in ((3, 3, 0), (2, 5, 1), (4, 2, 2)):
    some_tree = enumerate_tree(TabularPolicy(vocab_size, cap, seed=seed), cap, eos_id=0)
    by_leaves = expectation(some_tree, some_tree.mask.sum(-1)).item()
    assert abs(expected_length(some_tree) - by_leaves) < 1e-10, f"the leaves say {by_leaves}"

# %% [markdown]
# **3. Find the bug.** This function scores a batch of completions that are padded, as in many published models, with the
# stop token itself. It runs, and its numbers are all plausible. Add up the probabilities that it gives to all the leaves
# of a tree, see what is wrong with the sum, and repair the function.

# %% tags=["exercise"]
import torch

from lmrl.policy import gather_logprobs


def completion_logprobs(logits: torch.Tensor, ids: torch.Tensor, eos_id: int) -> torch.Tensor:
    """log π(τ) of each row, [B]: logits [B, T, V] of its tokens, ids [B, T] padded on the right with eos_id."""
    mask = ids != eos_id
    return torch.where(mask, gather_logprobs(logits, ids), 0.0).sum(-1)


# %% tags=["solution"]
import torch

from lmrl.policy import gather_logprobs


def completion_logprobs(logits: torch.Tensor, ids: torch.Tensor, eos_id: int) -> torch.Tensor:
    """log π(τ) of each row, [B]: logits [B, T, V] of its tokens, ids [B, T] padded on the right with eos_id."""
    stop = ids == eos_id
    mask = stop.cumsum(-1) - stop.long() == 0  # no stop token before this one; the first one was chosen, and counts
    return torch.where(mask, gather_logprobs(logits, ids), 0.0).sum(-1)


# %% tags=["check"]
import torch

from lmrl.tree import TabularPolicy, enumerate_tree, leaf_logprobs

for seed in range(3):
    oracle = enumerate_tree(TabularPolicy(3, 3, seed=seed), 3, eos_id=2)
    padded = torch.where(oracle.mask, oracle.ids, 2)
    computed = completion_logprobs(oracle.log_policy[oracle.states], padded, eos_id=2)
    total = computed.exp().sum().item()
    assert abs(total - 1) < 1e-10, f"the probabilities of all completions sum to {total:.3f}: was a choice left out?"
    assert torch.allclose(computed, leaf_logprobs(oracle), rtol=0, atol=1e-10), (
        "they sum to 1, but are not those of the tree"
    )

# %% [markdown]
# ## What is still missing
#
# The tree says how good a policy is, but not yet which quantity training should raise, nor what of it can be known
# without listing the leaves: section 3. How to get $\nabla J$ from samples alone, when the tree has $10^{5000}$ leaves, is
# section 4.
