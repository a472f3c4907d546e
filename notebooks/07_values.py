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
# # 7. Values, advantages, actor–critic
#
# A model is asked for 42 + 17 and writes `58`. The answer is wrong, and the reward says so once, for the whole text. But
# the 5 was right and the 8 was not. With a reward at the end and no discount, every token has the same return (section
# 2). Whatever baseline is subtracted from it, both digits are pushed in the same direction. How can each token get the
# weight that it earned?
#
# Section 6 left a door open: a baseline may be different in every state, as long as it does not look at the token that
# is chosen there. This section goes through it.

# %%
import copy
from collections.abc import Callable

import ipywidgets as widgets
import torch
import torch.nn.functional as F
import transformers
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.baselines import group_advantages
from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.policy import (
    addition_problems,
    addition_reward,
    completion_inputs,
    completion_texts,
    length_mask,
    masked_mean,
    pad_left,
    sample,
    trunk,
    warm_start_folder,
)
from lmrl.reinforce import reinforce_terms
from lmrl.tree import (
    TabularPolicy,
    completions,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    prompted_policy,
    row_gradients,
    terminal_returns,
)
from lmrl.variance import leaf_moments

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# ## What a prefix is worth
#
# Let $s_t$ be the state before token $t$, which is the prompt and the tokens written so far, $a_t$ the token, and $G_t$ the
# return from there on. The policy $\pi_\theta$ is written $\pi$ here, and $\nabla$ is the gradient in $\theta$. Section 2
# defined three functions:
#
# $$V(s) = \mathbb{E}[G_t \mid s_t = s], \qquad Q(s, a) = \mathbb{E}[G_t \mid s_t = s,\, a_t = a], \qquad
# A(s, a) = Q(s, a) - V(s).$$
#
# $V$ does not grade what has been written; it forecasts what **this** policy will make of it. Two prefixes that it ends
# equally well, on average, have the same $V$, however different they look. A slip that it always repairs costs nothing, and
# a flawless beginning that it never finishes is worth 0. And when the policy changes, $V$ changes, though the prefix does
# not.
#
# The advantage says how much better this token is than a token drawn by the policy is on average. **Claim 7.1** has two
# parts. That average itself is 0:
#
# $$\sum_a \pi(a \mid s)\, A(s, a) = \sum_a \pi(a \mid s)\, Q(s, a) - V(s) = 0. \tag{7.1}$$
#
# And since appending a token is deterministic and the reward comes at the end ($\gamma = 1$), $Q(s, a)$ is the value of
# the next state, $V(s \oplus a)$, or the reward itself if the text ends there. So the advantage is a **jump** of $V$:
#
# $$A(s_t, a_t) = V(s_{t+1}) - V(s_t), \qquad \text{with } R \text{ in the place of } V(s_{t+1}) \text{ after the last token.} \tag{7.2}$$
#
# In a batch, values are a tensor `[B, T]`: entry $t$ is the value of the state *before* token $t$, so it never depends on
# the token that it judges. Equation (7.2) then needs the entry of the next token. Rows end at different places, and
# the mask may have holes, where something else than the policy wrote (a tool's output, the next question of a user). The
# policy makes no choice there, so the next entry that matters is that of the next *chosen* token.


# %% tags=["export"]
def next_chosen(x: torch.Tensor, mask: torch.Tensor, after_last: torch.Tensor) -> torch.Tensor:
    """Each token's entry of the next chosen token: x [B, T], mask [B, T] bool, after_last [B] -> [B, T].

    Chosen are the tokens where the mask is True; masked ones are skipped, at the end and in holes. A row's last chosen
    token gets `after_last`. Masked entries of `x` are never read; masked positions of the result mean nothing. Section 7.
    """
    width = mask.shape[1]
    here = torch.where(mask, torch.arange(width, device=mask.device), width)
    following = F.pad(here[:, 1:], (0, 1), value=width).flip(1).cummin(1).values.flip(1)
    return torch.cat([x, after_last[:, None]], 1).gather(1, following)


# %% [markdown]
# The claim is checked on the tree of section 2: three tokens, of which `#` stops, at most three steps, and reward 1 for a
# text that contains `ab`.

# %%
tokens = ["#", "a", "b"]
policy = TabularPolicy(vocab_size=3, max_length=3, seed=0)
tree = enumerate_tree(policy, max_length=3, eos_id=0)
texts = ["".join(tokens[i] for i in ids) for ids in completions(tree)]
rewards = torch.tensor([float("ab" in text) for text in texts], dtype=torch.float64)
V, Q, A = exact_values(tree, rewards)
values = torch.where(tree.mask, V[tree.states], torch.nan)  # [L, T]; the padding is unreadable on purpose
advantages = torch.where(tree.mask, A[tree.states, tree.ids], 0.0)

jumps = next_chosen(values, tree.mask, rewards) - values
assert (tree.log_policy.exp() * A).sum(-1).abs().max() < 1e-10
assert torch.allclose(jumps[tree.mask], advantages[tree.mask], atol=1e-10, rtol=0)
for text in ("ab#", "aab", "ba#"):
    row, length = texts.index(text), len(text)
    outlook = " → ".join(f"{v:.3f}" for v in [*values[row, :length].tolist(), rewards[row].item()])
    print(f"{text}: V {outlook};  A", [round(a, 3) for a in jumps[row, :length].tolist()])

# %% [markdown]
# Along a completion the advantages add up to $R - V(s_1)$: how much better the whole text did than the prompt promised.
# What a single scalar smeared over all tokens is now divided among them.
#
# ## The advantage in the place of the reward
#
# **Claim 7.2.** Put $A(s_t, a_t)$ where the reward was, and the mean of the estimate is still $\nabla J$. Two steps show it. Given $s_t$
# and $a_t$, the score of $a_t$ is known, and the mean of $R$ is $Q(s_t, a_t)$. Then $V(s_t)$ may be subtracted, because
# it does not depend on $a_t$ (claim 6.2):
#
# $$\nabla J = \mathbb{E}\Big[\sum_t R\, \nabla \log \pi(a_t \mid s_t)\Big]
# = \mathbb{E}\Big[\sum_t Q(s_t, a_t)\, \nabla \log \pi(a_t \mid s_t)\Big]
# = \mathbb{E}\Big[\sum_t A(s_t, a_t)\, \nabla \log \pi(a_t \mid s_t)\Big]. \tag{7.3}$$
#
# Section 4 had one weight for a completion, `[B]`; now each token has its own, `[B, T]`. The code does not change, since
# `reinforce_terms` takes weights of either shape.

# %%
gradient = exact_gradient(tree, rewards, policy.parameters())
weights = {"R": rewards, "Q": Q[tree.states, tree.ids], "R − V": rewards[:, None] - V[tree.states], "A": advantages}
moments = {}
for name, weight in weights.items():
    estimates = row_gradients(reinforce_terms(tree.logprobs, weight).sum(-1), policy.parameters())
    moments[name] = leaf_moments(tree, estimates, gradient)
    print(f"weight {name:5}: bias {moments[name].bias.norm():.0e}, variance {moments[name].variance:.4f}")
    assert moments[name].bias.abs().max() < 1e-10

# %% [markdown]
# Is the variance always smaller? That is often said, and it is not true. What holds:
#
# - $A$ is never worse than $R - V(s_t)$ for a tabular policy. $R - V$ is $A$ plus what happens *after* token $t$, which has mean
#   zero given $s_t$ and $a_t$ and is pure noise there. Replacing a random number by its mean given what is known cannot
#   raise a variance (the theorem of Rao and Blackwell);
# - $A$ is never worse than $R$ if the tabular policy is uniform. All scores in a state then have the same length, and the
#   mean is the best centre;
# - against $R$ in general there is no such law. Take a single token with $\pi = (0.9, 0.1)$ and rewards $(1, 0)$. The rare
#   failure has by far the longer score. With $R$ it is multiplied by 0, with $A$ by $-0.9$.

# %%
assert moments["A"].variance < moments["R − V"].variance
uniform = TabularPolicy(3, 3)
uniform.logits.data.zero_()
bandit = TabularPolicy(2, 1)
bandit.logits.data[0] = torch.tensor([0.9, 0.1], dtype=torch.float64).log()
for name, case, case_tree, R in (
    ("uniform", uniform, enumerate_tree(uniform, 3, 0), rewards),
    ("confident", bandit, enumerate_tree(bandit, 1), torch.tensor([1.0, 0.0], dtype=torch.float64)),
):
    case_gradient = exact_gradient(case_tree, R, case.parameters())
    case_A = exact_values(case_tree, R).a[case_tree.states, case_tree.ids]
    for label, weight in (("R", R), ("A", case_A)):
        estimates = row_gradients(reinforce_terms(case_tree.logprobs, weight).sum(-1), case.parameters())
        moments[name, label] = leaf_moments(case_tree, estimates, case_gradient).variance
    print(f"{name:9} policy: variance {moments[name, 'R']:.4f} with R, {moments[name, 'A']:.4f} with A")
assert moments["uniform", "A"] < moments["uniform", "R"] / 3 and moments["A"].variance < moments["R"].variance / 3
assert abs(moments["confident", "R"] - 0.0018) < 1e-10 and abs(moments["confident", "A"] - 0.1152) < 1e-10

# %% [markdown]
# This is section 6's warning again: the mean is not the baseline of least variance. The optimal one for the confident
# policy is 0.1, and 0 is nearer to it than 0.9. On the other two policies, which are less sure of themselves, $A$ has less
# than a third of the variance of $R$. And it does what no constant can: it tells tokens apart.
#
# ## Measuring V: finish the text many times
#
# $V$ is not given. But it is an average, so it can be sampled: stop at the state, let the policy finish the text $K$
# times, and average the rewards,
#
# $$V(s_t) \approx \frac1K \sum_{k=1}^K R\big(s_t \oplus \text{continuation}_k\big), \qquad
# \text{standard error } \sqrt{V(1 - V)/K} \text{ for rewards of 0 and 1.} \tag{7.4}$$
#
# The continuations are new. The completion's own ending is not one of them, or the baseline would look at the token
# after all. The function returns all $K$ outcomes, so that the standard error is at hand.


# %% tags=["export"]
@torch.no_grad()
def monte_carlo_outcomes(
    model,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completion_ids: torch.Tensor,
    mask: torch.Tensor,
    score: Callable[..., torch.Tensor],
    *,
    num_rollouts: int,
    max_completion_length: int,
    stop_ids: list[int],
    generator: torch.Generator,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Rewards of `num_rollouts` = K fresh endings from the state before every token, [B, T, K]; their mean estimates V.

    Prompts [B, P] are padded on the left, completions [B, T] on the right; masked entries of the result are 0. `score(rows
    [N], ids [N, L], lengths [N], truncated [N]) -> [N]` gets whole completions, and the row of the batch that each belongs
    to. An ending stops at one of `stop_ids`, or where the completion reaches `max_completion_length`. Section 7;
    Kazemnejad et al. 2024 (VinePPO).
    """
    outcomes = torch.zeros(*mask.shape, num_rollouts, device=mask.device)
    for t in range(mask.shape[1]):
        rows = mask[:, t].nonzero().squeeze(-1).repeat_interleave(num_rollouts)
        if len(rows) == 0:
            continue
        prefix = completion_ids[rows, :t]
        ending = sample(
            model,
            torch.cat([prompt_ids[rows], prefix], 1),
            torch.cat([prompt_mask[rows], torch.ones_like(prefix, dtype=torch.bool)], 1),
            max_new_tokens=max_completion_length - t,
            stop_ids=stop_ids,
            generator=generator,
            temperature=temperature,
        )
        rewards = score(rows, torch.cat([prefix, ending.ids], 1), t + ending.lengths, ending.truncated)
        outcomes[mask[:, t], t] = rewards.to(outcomes).view(-1, num_rollouts)
    return outcomes


# %% [markdown]
# Now a policy that has learned something: the adder of section 1 as its warm start leaves it, sometimes right and
# sometimes wrong. It answers 64 problems that it was not trained on, one answer each, and every prefix of every answer is
# finished 128 times.

# %%
folder = warm_start_folder(seed=0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
train, heldout = addition_problems()
problems = heldout[:64]
generator = torch.Generator().manual_seed(0)
prompt_ids, prompt_mask = pad_left([tokenizer(p.prompt).input_ids for p in problems], tokenizer.pad_token_id)
stop = {"stop_ids": [tokenizer.eos_token_id], "generator": generator}
samples = sample(model, prompt_ids, prompt_mask, max_new_tokens=4, **stop)
mask = length_mask(samples.lengths, 4)


# %% tags=["demo"]
def score(rows, ids, lengths, truncated):
    answers = [problems[row].answer for row in rows.tolist()]
    return torch.tensor(addition_reward([], completion_texts(tokenizer, ids, lengths, truncated), answer=answers))


# %%
reached = score(torch.arange(64), samples.ids, samples.lengths, samples.truncated)
outcomes = monte_carlo_outcomes(
    model, prompt_ids, prompt_mask, samples.ids, mask, score, num_rollouts=128, max_completion_length=4, **stop
)
mc_values = outcomes.mean(-1)
mc_advantages = torch.where(mask, next_chosen(mc_values, mask, reached) - mc_values, 0.0)
print(f"{int(mask.sum())} tokens, {reached.mean():.0%} of the answers right")

# %% [markdown]
# With 15 tokens and four steps this policy's tree can still be listed, so an answer can be held against the truth: the
# Monte Carlo values of its states must be within four standard errors of the exact ones. Three answers will serve as
# examples: a right one, one whose largest jump is at its first digit, and one where it is at the last.

# %%
biggest = mc_advantages.abs().argmax(1)
right = (reached == 1) & (samples.lengths == 4)
wrong_at_once = (reached == 0) & (biggest == 0)
wrong_at_last = (reached == 0) & (biggest == samples.lengths - 2) & (biggest > 0)
examples = [int(rows.float().argmax()) for rows in (right, wrong_at_once, wrong_at_last)]

row = examples[2]
length = int(samples.lengths[row])
with torch.no_grad():
    answer_tree = enumerate_tree(prompted_policy(model, prompt_ids[row][prompt_mask[row]]), 4, tokenizer.eos_token_id)
lengths = answer_tree.mask.sum(-1)
leaf_rewards = score(torch.full_like(lengths, row), answer_tree.ids, lengths, answer_tree.truncated)
leaf = ((lengths == length) & (answer_tree.ids == samples.ids[row]).all(-1)).nonzero().item()
exact = exact_values(answer_tree, leaf_rewards).v[answer_tree.states[leaf, :length]]
print("answer to", problems[row].prompt, tokenizer.batch_decode(samples.ids[row, :length, None]))
print("exact V      ", [round(v, 3) for v in exact.tolist()], f" from {len(leaf_rewards)} leaves")
print("Monte Carlo V", [round(v, 3) for v in mc_values[row, :length].tolist()])
assert ((mc_values[row, :length] - exact).abs() <= 4 * (exact * (1 - exact) / 128).sqrt() + 1e-3).all()

# %% [markdown]
# **Claim 7.4.** The movement of $V$ is concentrated: more than half of the tokens change it by less than 0.1, and three
# tenths of them do more than 70% of all the moving. Which ones are they?

# %%
moves = mc_advantages[mask].abs().sort(descending=True).values
largest = moves[: round(0.3 * len(moves))].sum() / moves.sum()
for small in (0.05, 0.1):
    print(f"{(moves < small).double().mean():.0%} of the tokens move V by less than {small}")
print(f"the 30% that move it most hold {largest:.0%} of all movement")
assert (moves < 0.1).double().mean() > 0.5 and largest > 0.7

words = [tokenizer.batch_decode(ids[:n, None]) for ids, n in zip(samples.ids, samples.lengths)]
movement = {}
for problem, written, jumps in zip(problems, words, mc_advantages.abs()):
    for t in range(len(written)):
        kind = ("end", "ones", "tens", "hundreds")[len(problem.answer) - t]  # what belongs there
        if not problem.answer.startswith("".join(written[:t])):
            kind = "after a wrong digit"
        movement.setdefault(kind, []).append(jumps[t].item())
for kind, sizes in movement.items():
    print(f"{kind:19}: {len(sizes):2} tokens, mean |A| {sum(sizes) / len(sizes):.3f}")
assert max(movement["after a wrong digit"]) == 0
assert max(movement, key=lambda kind: sum(movement[kind]) / len(movement[kind])) == "ones"

# %% [markdown]
# To stop after a complete answer, and to write the leading 1 of a sum above 99, are nearly free of risk. The digit at which
# this policy's answers are decided is the last one. And once a digit is wrong, $V$ is 0 and stays there. The tokens after it
# have advantage 0, where a single number for the whole text blames them as much as the digit that went wrong.


# %% tags=["export:figures"]
def value_figure(generations: list[tuple], moves: torch.Tensor) -> Figure:
    """V along generations with its jumps; and the share of all movement that the tokens which move V most hold.

    A generation is (prompt, its n tokens as text, V of their states and then the reward [n + 1], standard errors [n + 1]);
    moves [N] are advantages of many tokens.
    """
    panels = len(generations) + 1
    fig, axes = new_figure((panels + 1) // 2, 2, height=2.7 * ((panels + 1) // 2), squeeze=False)
    for i, (ax, generation) in enumerate(zip(axes.flat, generations)):
        _draw_value(ax, *generation)
        ax.set_ylabel("V = chance to be right" if i % 2 == 0 else "")
    _draw_share(axes.flat[len(generations)], moves.abs().sort(descending=True).values)
    return fig


def _draw_value(ax, prompt, tokens, values, errors):
    n, values, errors = len(tokens), values.tolist(), errors.tolist()
    for t, (v, error) in enumerate(zip(values, errors)):
        color = COLORS["reward" if t == n else "policy"]
        ax.fill_between([t, t + 1], v - 2 * error, v + 2 * error, color=color, alpha=0.2, lw=0)
        ax.plot([t, t + 1], [v, v], color=color, lw=3, solid_capstyle="butt")
    for t in range(1, n + 1):
        arrow = {"arrowstyle": "-|>", "color": COLORS["advantage"], "lw": 2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (t, values[t]), (t, values[t - 1]), arrowprops=arrow)
        jump = values[t] - values[t - 1]
        text = f"{jump:+.2f}".replace("-", "−") if abs(jump) >= 0.005 else "0"
        top = max(v + 2 * error for v, error in zip(values[t - 1 : t + 1], errors[t - 1 : t + 1]))
        ax.text(t, min(top, 1.1) + 0.05, text, ha="center", fontsize=9)
    ax.text(n + 0.5, values[n] + 0.06, f"R = {values[n]:g}", ha="center", color=COLORS["reward"])
    ax.set(xlim=(0, n + 1), ylim=(-0.08, 1.25), yticks=[0, 0.5, 1], title=f"{prompt}{''.join(tokens[:-1])}")
    ax.set_xticks(range(1, n + 1), tokens)
    ax.set_xlabel("tokens as they were written")


def _draw_share(ax, moves):
    percent = torch.arange(len(moves) + 1) / len(moves) * 100
    ax.plot(percent, F.pad(moves.cumsum(0) / moves.sum() * 100, (1, 0)), color=COLORS["advantage"], lw=2)
    ax.plot([0, 100], [0, 100], color=COLORS["reference"], ls="--", lw=1)
    ax.text(52, 25, "if all moved V\nequally", fontsize=9, color=COLORS["reference"])
    ax.set(xlim=(0, 100), ylim=(0, 105), xticks=[0, 50, 100], yticks=[0, 50, 100])
    ax.set(title="share of all movement of V [%]", xlabel="tokens that move V most [%]")


# %% [markdown]
# The picture shows three of the answers. A level is the value between two tokens, with a band of ±2 standard errors; an
# arrow is what the token below it did to the value, which is its advantage. A jump much smaller than the bands is noise.


# %% tags=["demo"]
def generation(i, k):
    """Answer i for the figure, its values from the first k endings."""
    v = torch.cat([outcomes[i, : len(words[i]), :k].mean(-1), reached[i : i + 1]])
    return problems[i].prompt, [word.replace("<eos>", "stop") for word in words[i]], v, (v * (1 - v) / k).sqrt()


def draw(answer, K):
    v = outcomes[..., :K].mean(-1)
    return value_figure([generation(answer, K)], (next_chosen(v, mask, reached) - v)[mask])


# %%
show(
    value_figure([generation(i, 128) for i in examples], mc_advantages[mask]),
    caption="A token's advantage is the jump of V. Few tokens jump, and after the first wrong digit none does.",
    alt="Three panels with V as a staircase along an answer to an addition, and one arrow for each token. Where the answer "
    "is right the arrows lead up to 1, mostly at one digit; where it is wrong one arrow leads down to 0 and the rest are flat. "
    "In the fourth panel the third of the tokens that move V most hold nearly nine tenths of the movement.",
)

# %% [markdown]
# Move the sliders: choose another answer, and the number $K$ of endings that $V$ is estimated from. With $K = 1$ the
# estimate is 0 or 1 in every state, so a token is credited with everything or with nothing, by the luck of one ending.

# %%
wide = {"style": {"description_width": "initial"}, "continuous_update": True}
endings = [1, 2, 4, 8, 16, 32, 64, 128]
explore(
    draw,
    answer=widgets.IntSlider(examples[0], 0, 63, description="answer", **wide),
    K=widgets.SelectionSlider(options=endings, value=128, description="endings per state, K", **wide),
)

# %% [markdown]
# ## Actor and critic
#
# An ending of the state before token $t$ has about $T - t + 1$ tokens, for an answer of $T$. So finishing every prefix $K$
# times writes $K(T + 1)/2$ times as many tokens as the answer has. The usual alternative is to learn $V$ next to the
# policy: the **actor** writes, the **critic** predicts what will come of it. A critic for a language model is the same
# transformer with another head, and with parameters $\phi$ of its own. Where the actor has one number for every token of
# the vocabulary, the critic has one number for the state:
#
# $$V_\phi(s_t) = w^\top h(s_t) + w_0,$$
#
# with $h(s_t)$ the last hidden state at the position *before* token $t$, the same that the actor's logits for token $t$
# come from; the head is the vector $w$ and the number $w_0$. One pass gives the values of all states. There is one more state than tokens, the one after the last;
# section 8 needs its value when a completion was cut off.
#
# The critic starts as a copy of the policy's own trunk, with a head of zeros: it predicts 0 until it has seen returns.
# Values are float32 whatever the trunk computes in, because bfloat16 keeps only two to three digits.


# %% tags=["export"]
class Critic(torch.nn.Module):
    """A value head on the trunk of a Hugging Face language model: one number for every state. Section 7.

    `trunk` maps ids to `last_hidden_state` [B, L, hidden_size]. The head starts at 0.
    """

    def __init__(self, trunk: torch.nn.Module, hidden_size: int):
        super().__init__()
        self.trunk = trunk
        self.head = torch.nn.Linear(hidden_size, 1, device=next(trunk.parameters()).device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(
        self, prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, completion_ids: torch.Tensor
    ) -> torch.Tensor:
        """Values [B, T + 1], at least float32: entry t < T is that of the state before token t, entry t after token t - 1.

        Prompts int64 and bool [B, P] are padded on the left, completions int64 [B, T] on the right.
        """
        inputs = completion_inputs(prompt_ids, prompt_mask, completion_ids)
        hidden = self.trunk(**inputs, use_cache=False).last_hidden_state[:, prompt_ids.shape[1] - 1 :]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return F.linear(hidden.to(dtype), self.head.weight.to(dtype), self.head.bias.to(dtype)).squeeze(-1)


def build_critic(model) -> Critic:
    """A critic with a copy of a causal language model's trunk, in eval mode. `model` is not changed. Section 7."""
    return Critic(copy.deepcopy(trunk(model)), model.config.get_text_config().hidden_size).eval()


# %% [markdown]
# The alignment is worth a check, since a critic that sees the token it is the baseline for is no legal baseline. In code
# the first token has the index 0. Replace the one with index 2 in every row: the values up to entry 2 must not notice,
# entry 3 must.

# %%
critic = build_critic(model)
torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
changed = samples.ids.clone()
changed[:, 2] = (changed[:, 2] + 1) % len(tokenizer)
with torch.no_grad():
    before, after = (critic(prompt_ids, prompt_mask, ids) for ids in (samples.ids, changed))
assert before.shape == (64, 5) and before.dtype == torch.float32
assert torch.equal(before[:, :3], after[:, :3]) and (before[:, 3] != after[:, 3]).all()
print(f"{sum(p.numel() for p in critic.parameters())} parameters; the policy has {model.num_parameters()}")

# %% [markdown]
# The critic is fitted to observed returns by regression. Each token contributes half the squared error,
#
# $$\tfrac12 \big(V_\phi(s_t) - G_t\big)^2, \tag{7.5}$$
#
# whose gradient in $V_\phi$ is the error itself, and whose minimum over all functions of the state is the mean of $G_t$
# given $s_t$: the value.


# %% tags=["export"]
def value_terms(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    """Half the squared error of every value, [B, T], to be minimised: two [B, T] -> [B, T], at least float32.

    Returns are data: no gradient flows into them. Raises ValueError if the shapes differ. Section 7.
    """
    if values.shape != returns.shape:
        raise ValueError(f"values are {list(values.shape)} and returns {list(returns.shape)}; both must be [B, T]")
    dtype = torch.promote_types(torch.promote_types(values.dtype, returns.dtype), torch.float32)
    return 0.5 * (values.to(dtype) - returns.detach().to(dtype)).square()


# %% [markdown]
# Fit it, on one answer to each of the training problems, for a few seconds. How good is it on the states of the 64
# held-out answers, whose values have just been measured?

# %%
fit_ids, fit_mask = pad_left([tokenizer(p.prompt).input_ids for p in train], tokenizer.pad_token_id)
fit = sample(model, fit_ids, fit_mask, max_new_tokens=4, **stop)
fit_texts = completion_texts(tokenizer, fit.ids, fit.lengths, fit.truncated)
fit_rewards = torch.tensor(addition_reward([], fit_texts, answer=[p.answer for p in train]))
chosen = length_mask(fit.lengths, 4)
print(f"{len(fit_rewards)} answers, {fit_rewards.mean():.0%} of them right")
returns = terminal_returns(fit_rewards, chosen)

critic = build_critic(model)
optimizer = torch.optim.AdamW(critic.parameters(), weight_decay=0.0)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=201)
for _ in range(200):
    i = torch.randint(len(train), (128,), generator=generator)
    predicted = critic(fit_ids[i], fit_mask[i], fit.ids[i])[:, :-1]
    loss = masked_mean(value_terms(predicted, returns[i]), chosen[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()

with torch.no_grad():
    learned = critic(prompt_ids, prompt_mask, samples.ids)[:, :-1]
for t in range(3):
    error = (learned - mc_values)[mask[:, t], t].square().mean()
    spread = mc_values[mask[:, t], t].var(correction=0)
    print(f"state s_{t + 1}: mean squared error of the critic {error:.3f}, of the best constant {spread:.3f}")
agreement = torch.corrcoef(torch.stack([learned[mask], mc_values[mask]]))[0, 1].item()
print(f"correlation with the measured values {agreement:.2f}")
assert 0.05 < agreement < 0.7

# %% [markdown]
# It has found something, and not much. This is no accident of a small model. To know whether `6` is a good beginning of
# the answer to 42 + 17, one has to add. A critic that always knew would be an adder itself, and it has one number per
# completion to become one.
#
# ## What a wrong critic does
#
# Does a wrong critic do harm, then? It is in every advantage, so one may fear that it bends the gradient. **Claim 7.3** says
# when it does. Let $\hat V = V + e$ be a critic with error $e(s)$.
#
# - *As a baseline*, in $R - \hat V(s_t)$, any error is harmless to the mean: $\hat V$ does not look at $a_t$, and (6.1)
#   does not ask whether a baseline is good. Only the variance changes, in either direction.
# - *As a stand-in for the future*, in $\hat V(s_{t+1}) - \hat V(s_t)$, the error at $s_{t+1}$ depends on $a_t$. Now the
#   gradient is biased. Replacing the rest of a rollout by a prediction is called **bootstrapping**.
#
# The same critic, with random errors of standard deviation 0.3, in both roles:

# %%
wrong = V + 0.3 * torch.randn(len(V), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
wrong_values = torch.where(tree.mask, wrong[tree.states], torch.nan)
roles = {
    "R − V̂": rewards[:, None] - wrong_values,
    "V̂' − V̂": next_chosen(wrong_values, tree.mask, rewards) - wrong_values,
}
bias = {}
for name, weight in roles.items():
    terms = reinforce_terms(tree.logprobs, torch.where(tree.mask, weight, 0.0))
    case_moments = leaf_moments(tree, row_gradients(terms.sum(-1), policy.parameters()), gradient)
    bias[name] = case_moments.bias.norm().item()
    print(f"{name:7}: bias {bias[name]:.0e} (‖∇J‖ = {gradient.norm():.3f}), variance {case_moments.variance:.4f}")
assert bias["R − V̂"] < 1e-10 and bias["V̂' − V̂"] > 0.1 * gradient.norm()

# %% [markdown]
# The variance can go either way, as the confident policy shows. The exact $V = 0.9$ is a poor baseline for it, so a
# critic that errs towards 0.1 does better than the truth, and one that errs the other way does worse.

# %%
bandit_tree, one_right = enumerate_tree(bandit, 1), torch.tensor([1.0, 0.0], dtype=torch.float64)
bandit_gradient = exact_gradient(bandit_tree, one_right, bandit.parameters())
for baseline in (0.1, 0.9, 1.5):
    estimates = row_gradients(reinforce_terms(bandit_tree.logprobs, one_right - baseline).sum(-1), bandit.parameters())
    moments[baseline] = leaf_moments(bandit_tree, estimates, bandit_gradient)
    print(f"V̂ = {baseline}: variance {moments[baseline].variance:.4f}")
    assert moments[baseline].bias.abs().max() < 1e-10
assert moments[0.1].variance < moments[0.9].variance < moments[1.5].variance

# %% [markdown]
# One kind of error survives bootstrapping. If $e$ is the same number $c$ in every state, it cancels in the difference,
# and only the last token keeps it, where $R$ takes the place of $\hat V$. If all completions have the same length, that is
# a constant for the last token whatever it is: a baseline. If a stop token can end the text, whether a token is the last
# one depends on the token, and the bias is back.

# %%
for name, eos_id in (("fixed length", None), ("with a stop token", 0)):
    case_tree = enumerate_tree(policy, 3, eos_id)
    R = torch.tensor([float("1, 2" in str(ids)) for ids in completions(case_tree)], dtype=torch.float64)  # has ab
    off = exact_values(case_tree, R).v[case_tree.states] + 0.3
    weight = torch.where(case_tree.mask, next_chosen(off, case_tree.mask, R) - off, 0.0)
    rows = row_gradients(reinforce_terms(case_tree.logprobs, weight).sum(-1), policy.parameters())
    bias[name] = (expectation(case_tree, rows) - exact_gradient(case_tree, R, policy.parameters())).norm().item()
    print(f"constant error 0.3, {name:17}: bias {bias[name]:.0e}")
assert bias["fixed length"] < 1e-10 < 0.01 < bias["with a stop token"]

# %% [markdown]
# So the fear is justified for one of two roles, and section 8 builds the dial between them.
#
# ## One scale for all tokens
#
# Advantages of a whole step are often brought to mean 0 and standard deviation 1 before they are used, so that the size
# of a step does not depend on the size of the rewards. This is called **whitening**. It is section 6's division with all
# chosen tokens of the step as one group, and the same rules apply: population statistics, equal advantages give exactly
# 0, and padding takes no part. Like every division by a number that depends on the sample, it is a choice and no baseline.


# %% tags=["export"]
def whiten(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Advantages with mean 0 and population standard deviation 1 over the tokens where the mask is True: [B, T] -> [B, T].

    Masked entries are never read and become 0; so does everything if all chosen advantages are equal, or there are fewer
    than two. Call it on the whole optimiser step at once. At least float32. Section 7.
    """
    chosen = advantages[mask]
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    if len(chosen) > 1:
        chosen = group_advantages(chosen, torch.zeros_like(chosen, dtype=torch.int64))
    else:
        chosen = torch.zeros_like(chosen)
    return torch.zeros_like(mask, dtype=chosen.dtype).masked_scatter(mask, chosen)


# %%
padded, two = torch.tensor([[2.0, 4.0, 0.0, 0.0]]), torch.tensor([[True, True, False, False]])
print("whitened", whiten(padded, two).tolist())
off_centre = padded[two] - padded.mean()
print("with the mean of the padded row instead:", (off_centre / off_centre.square().mean().sqrt()).tolist())
assert whiten(padded, two).tolist() == [[-1, 1, 0, 0]]
assert whiten(padded, torch.tensor([[True, False, False, False]])).tolist() == [[0, 0, 0, 0]]

# %% [markdown]
# ## Exercises
#
# **1. Predict, then run.** A policy writes two tokens and chooses `a` or `b` with probability ½ each time. Only `ab` is
# right. Before you compute anything: what is $V$ at the start, $V$ after `a`, the advantage of `a` at the start, and that
# of `b` after `a`?

# %% tags=["exercise"]
predicted = {"V(start)": None, "V(a)": None, "A(start, a)": None, "A(a, b)": None}  # your numbers

# %% tags=["solution"]
predicted = {"V(start)": 0.25, "V(a)": 0.5, "A(start, a)": 0.25, "A(a, b)": 0.5}

# %% tags=["check"]
import torch

from lmrl.tree import TabularPolicy, enumerate_tree, exact_values

coin = TabularPolicy(vocab_size=2, max_length=2)
coin.logits.data.zero_()
coin_values = exact_values(enumerate_tree(coin, 2), torch.tensor([0.0, 1.0, 0.0, 0.0]))  # aa, ab, ba, bb
after_a = 1
answers = {
    "V(start)": coin_values.v[0].item(),
    "V(a)": coin_values.v[after_a].item(),
    "A(start, a)": coin_values.a[0, 0].item(),
    "A(a, b)": coin_values.a[after_a, 1].item(),
}
assert predicted == answers, f"the tree says {answers}"

# %% [markdown]
# **2. Two looks at one future.** Someone has no critic and measures the advantage of each token by (7.2) from Monte Carlo
# values, each from its own $K$ endings. Write the variance of $\hat V(s_{t+1}) - \hat V(s_t)$ for rewards of 0 and 1, when
# the true values are `v_next` and `v`. Then: how many endings does it take to see a jump from 0.5 to 0.6 at two standard
# errors?


# %% tags=["exercise"]
def jump_variance(v, v_next, K):
    """Variance of the difference of two independent means of K outcomes, each 0 or 1."""
    raise NotImplementedError


endings_needed = None  # the smallest K with 2 standard errors <= 0.1


# %% tags=["solution"]
def jump_variance(v, v_next, K):
    """Variance of the difference of two independent means of K outcomes, each 0 or 1."""
    return (v * (1 - v) + v_next * (1 - v_next)) / K


endings_needed = 196


# %% tags=["check"]
import itertools

for v, v_next, K in itertools.product((0.5, 0.2), (0.6, 1.0), (1, 2, 3)):
    # every outcome of both estimates, with its probability
    moments = [0.0, 0.0]
    for ends in itertools.product((0, 1), repeat=2 * K):
        here, there = sum(ends[:K]), sum(ends[K:])
        p = v**here * (1 - v) ** (K - here) * v_next**there * (1 - v_next) ** (K - there)
        moments = [m + p * ((there - here) / K) ** power for m, power in zip(moments, (1, 2))]
    assert abs(moments[1] - moments[0] ** 2 - jump_variance(v, v_next, K)) < 1e-12
assert endings_needed == next(K for K in itertools.count(1) if 4 * jump_variance(0.5, 0.6, K) <= 0.1**2 + 1e-12)

# %% [markdown]
# **3. Find the bug.** A trainer subtracts the critic as a baseline. The critic returns `[B, T + 1]` values, one for each
# state. Training runs, the loss looks normal, and the policy hardly learns. By claim 7.3 even a poor critic should leave
# the mean of the gradient alone. Ask the tree what is wrong with these advantages, and repair them.


# %% tags=["exercise"]
def baseline_advantages(rewards, state_values, mask):
    """rewards [B], critic's values [B, T + 1], mask [B, T] -> advantages [B, T]."""
    values = state_values[:, 1:]
    return (rewards[:, None] - values) * mask


# %% tags=["solution"]
def baseline_advantages(rewards, state_values, mask):
    """rewards [B], critic's values [B, T + 1], mask [B, T] -> advantages [B, T]."""
    values = state_values[:, :-1]  # entry t + 1 has seen token t
    return (rewards[:, None] - values) * mask


# %% tags=["check"]
import torch
import torch.nn.functional as F

from lmrl.reinforce import reinforce_terms
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, exact_values, expectation, row_gradients

actor = TabularPolicy(3, 3, seed=4)
actor_tree = enumerate_tree(actor, 3, eos_id=0)
outcome = torch.rand(len(actor_tree.ids), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
guess = exact_values(actor_tree, outcome).v + 0.1  # a critic that is too optimistic
critic_says = torch.where(actor_tree.mask, guess[actor_tree.states], 0.0)
critic_says = F.pad(critic_says, (0, 1))
end = actor_tree.mask.sum(-1, keepdim=True)
critic_says = critic_says.scatter(1, end, outcome[:, None])  # it has read the finished text
weight = baseline_advantages(outcome, critic_says, actor_tree.mask)
mean = expectation(actor_tree, row_gradients(reinforce_terms(actor_tree.logprobs, weight).sum(-1), actor.parameters()))
bias = (mean - exact_gradient(actor_tree, outcome, actor.parameters())).norm().item()
assert bias < 1e-10, f"the gradient is biased by {bias:.4f}: the baseline depends on the token that it judges"

# %% [markdown]
# ## What is still missing
#
# There are now two estimates of an advantage, $R - \hat V(s_t)$ without bias and full of noise, and the critic's own jump,
# with little noise and its errors; section 8 finds everything between them, and where to stand. What a second network of
# the policy's size costs in memory is section 12's table, and whether it is worth it, section 14's question.
