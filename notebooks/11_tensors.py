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
# # 11. Back to tensors
#
# **The question.** Sections 1 to 10 gave us a sampler, a reward, an advantage and a clipped objective, each for tokens
# and answers. A trainer handles hundreds of answers of different lengths at once. What exactly are the tensors, and
# where can they be wrong without anyone noticing?
#
# The whole step fits on seven lines. The letters are $B$ rows (completions), $P$ prompt columns, $T$ completion columns
# and $G$ completions per prompt.
#
# | line | value | shape |
# |---|---|---|
# | sample $G$ completions for each prompt | ids, log-probs they were sampled with | `[B, T]` |
# | which entries are tokens that the policy chose | mask | bool `[B, T]` |
# | let the verifier read the texts | rewards $R$ | `[B]` |
# | compare within each prompt's group | advantages $A$ | `[B]` → `[B, T]` |
# | score the ids with the policy | $\log\pi_\theta(a_t\mid s_t)$ | `[B, T]` |
# | clipped surrogate, weighted over tokens | loss | scalar |
# | step | $\theta$ | |
#
# Three of these lines deserve a closer look: the mask, the weights, and the memory that the fifth line would like to use.

# %%
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.baselines import group_advantages
from lmrl.figures.style import COLORS, new_figure, show
from lmrl.policy import (
    Samples,
    addition_problems,
    addition_reward,
    completion_texts,
    length_mask,
    pad_left,
    sample,
    token_logprobs,
    warm_start_folder,
)
from lmrl.ppo import clipped_surrogate, importance_ratio
from lmrl.trust_region import kl_k3

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# ## One data structure, flowing one way
#
# Everything a step knows about its completions stands in one frozen record. Sampling fills the first fields; the
# rewards, the advantages and the old log-probs are `None` until their stage has run, and a stage returns a *new* record
# instead of changing the old one. So at each point of the program one can see what is known and who put it there.
#
# Token ids are never turned into text and back: several id sequences can spell the same text, and the policy must be
# trained on the one that it sampled.


# %% tags=["export"]
@dataclass(frozen=True)
class Rollouts:
    """A batch of completions and what is known about them (section 11).

    From the sampler: prompt_ids int64 and prompt_mask bool ``[B, P]``, left-padded; completion_ids int64 ``[B, T]``,
    right-padded; mask bool ``[B, T]``, True for tokens that the policy chose (the sampled stop token is one);
    truncated bool ``[B]``, cut at the length cap; sampler_logprobs float ``[B, T]``; group int64 ``[B]``, which rows
    answer the same prompt. From later stages, None until then: rewards float ``[B]`` (NaN where graded is False),
    graded bool ``[B]``, advantages, old_logprobs and ref_logprobs float ``[B, T]``.

    Index t of every ``[B, T]`` field is the t-th sampled token. Raises ValueError when shapes disagree.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    mask: Tensor
    truncated: Tensor
    sampler_logprobs: Tensor
    group: Tensor
    rewards: Tensor | None = None
    graded: Tensor | None = None
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    def __post_init__(self):
        for name, value in self.per_token().items():
            if value.shape != self.completion_ids.shape:
                shapes = f"{tuple(value.shape)}, completion_ids has {tuple(self.completion_ids.shape)}"
                raise ValueError(f"Rollouts: {name} has shape {shapes}; per-token fields are [B, T]")

    def __len__(self) -> int:
        return len(self.completion_ids)

    def known(self) -> dict[str, Tensor]:
        """The fields that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def per_token(self) -> dict[str, Tensor]:
        """The ``[B, T]`` fields that are not None, by name."""
        names = ("completion_ids", "mask", "sampler_logprobs", "advantages", "old_logprobs", "ref_logprobs")
        return {name: value for name, value in self.known().items() if name in names}

    def select(self, rows: Tensor) -> "Rollouts":
        """The rollouts of ``rows``, int64 indices or a bool mask ``[B]``."""
        return Rollouts(**{name: value[rows] for name, value in self.known().items()})

    def trim(self, width: int, prompt_width: int | None = None) -> "Rollouts":
        """The first ``width`` completion columns and the last ``prompt_width`` prompt columns (all, if not given)."""
        start = 0 if prompt_width is None else self.prompt_ids.shape[1] - prompt_width
        prompts = {"prompt_ids": self.prompt_ids[:, start:], "prompt_mask": self.prompt_mask[:, start:]}
        return replace(self, **prompts, **{name: value[:, :width] for name, value in self.per_token().items()})


# %% [markdown]
# Rollouts that were collected in several rounds are put together in one record. Their widths may differ, so prompts are
# padded on the left and completions on the right; and two rounds may number their groups alike, so groups are numbered
# anew.


# %% tags=["export"]
def concatenate(parts: list[Rollouts]) -> Rollouts:
    """The rows of all ``parts`` as one `Rollouts`, padded to the widest; groups of different parts stay apart (section 11).

    Groups are numbered from 0: part by part, and in a part by their old label. Padding has mask False and value 0.
    Raises ValueError without parts, or if a field is known in one part and not in another.
    """
    if not parts:
        raise ValueError("concatenate got no rollouts; give it at least one part")
    names = [sorted(part.known()) for part in parts]
    if any(known != names[0] for known in names):
        raise ValueError(f"the parts know different fields, {names}; take them all through the same stages first")
    first = 0
    padded = []
    for part in parts:
        labels, group = part.group.unique(return_inverse=True)
        left = max(p.prompt_ids.shape[1] for p in parts) - part.prompt_ids.shape[1]
        right = max(p.mask.shape[1] for p in parts) - part.mask.shape[1]
        prompt = {name: F.pad(getattr(part, name), (left, 0)) for name in ("prompt_ids", "prompt_mask")}
        tokens = {name: F.pad(value, (0, right)) for name, value in part.per_token().items()}
        padded.append({**part.known(), **prompt, **tokens, "group": first + group})
        first += len(labels)
    return Rollouts(**{name: torch.cat([part[name] for part in padded]) for name in names[0]})


# %% [markdown]
# The sampler of section 1 returns `Samples`; this turns them into `Rollouts`. The mask comes from the lengths, and the
# columns after the longest completion are dropped.


# %% tags=["export"]
def rollouts_from_samples(prompt_ids: Tensor, prompt_mask: Tensor, group: Tensor, samples: Samples) -> Rollouts:
    """`Rollouts` from section 1's `Samples`: the mask from lengths, trimmed to the longest completion (section 11)."""
    width = int(samples.lengths.max())
    return Rollouts(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=samples.ids[:, :width],
        mask=length_mask(samples.lengths, width),
        truncated=samples.truncated,
        sampler_logprobs=samples.logprobs[:, :width],
        group=group,
    )


# %% [markdown]
# ## The sampler's protocol
#
# The trainer does not care which engine generates. It hands over prompts as token ids, the number of completions per
# prompt and a seed, and gets `Rollouts` back; after a step it says "these are the new weights". Section 1's decode loop
# needs nothing to be told, since it samples from the very model that is trained; an inference engine such as vLLM keeps
# its own copy.


# %% tags=["export:rollout"]
def require_fit(model, prompt_ids: torch.Tensor, max_completion_length: int) -> None:
    """ValueError if ``model`` lacks positions for the prompts ``[B, P]`` and a completion, or one of their tokens."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = prompt_ids.shape[1] + max_completion_length
    if limit is not None and length > limit:
        raise ValueError(
            f"a prompt of {prompt_ids.shape[1]} tokens and a completion of up to {max_completion_length} are {length}, but "
            f"the model has {limit} positions; lower max_completion_length or take shorter prompts"
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    if prompt_ids.max() >= vocabulary:
        raise ValueError(
            f"a prompt has token {int(prompt_ids.max())}, but the model has {vocabulary} tokens; the tokenizer is another model's"
        )


class Sampler(Protocol):
    """What the trainer asks of an engine that generates (section 11)."""

    def generate(self, prompts: list[list[int]], num_generations: int, seed: int) -> Rollouts:
        """``num_generations`` completions for each of ``prompts``, in order, groups numbered from 0."""

    def sync(self, model) -> None:
        """Take over the weights of ``model``."""


@dataclass(frozen=True)
class TorchSampler:
    """Generates with section 1's decode loop from ``model`` itself; one batch for all rows of a call (section 11).

    The same prompts, seed and weights give the same rollouts. Raises ValueError as `require_fit`, and FloatingPointError
    when the model's log-probs are not finite.
    """

    model: torch.nn.Module
    stop_ids: list[int]
    pad_id: int
    max_completion_length: int
    temperature: float = 1.0

    def generate(self, prompts: list[list[int]], num_generations: int, seed: int) -> Rollouts:
        group = torch.arange(len(prompts)).repeat_interleave(num_generations)
        prompt_ids, prompt_mask = pad_left([prompts[g] for g in group.tolist()], self.pad_id)
        require_fit(self.model, prompt_ids, self.max_completion_length)
        device = next(self.model.parameters()).device
        samples = sample(
            self.model,
            prompt_ids.to(device),
            prompt_mask.to(device),
            max_new_tokens=self.max_completion_length,
            stop_ids=self.stop_ids,
            generator=torch.Generator().manual_seed(seed),
            temperature=self.temperature,
        )
        if not samples.logprobs.isfinite().all():
            raise FloatingPointError(
                "the model's log-probs are not finite: look at its weights, lower learning_rate or raise temperature"
            )
        return rollouts_from_samples(prompt_ids.to(device), prompt_mask.to(device), group.to(device), samples)

    def sync(self, model) -> None:
        """Nothing to do: ``model`` is the one that samples."""


# %%
folder = warm_start_folder(seed=0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
train, heldout = addition_problems()
problems, G = train[:4], 8
sampler = TorchSampler(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_length=4)
rollouts = sampler.generate([tokenizer(problem.prompt).input_ids for problem in problems], G, seed=0)
print({name: tuple(value.shape) for name, value in vars(rollouts).items() if value is not None})

# %% [markdown]
# ## Masking is not a detail
#
# Prompt tokens were not chosen by the policy: they are state, not action, and get no gradient. Padding is not text.
# After the stop token there is nothing. But the stop token itself *was* chosen, and if it is masked, the model slowly
# forgets to stop. None of these mistakes crashes. The run trains, converges to something, and is quietly wrong.
#
# In the classic accident, pad and end-of-sequence share an id, and the mask is made by comparing ids:

# %%
eos = pad = 2
samples = Samples(
    ids=torch.tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2]]),
    logprobs=torch.zeros(3, 5),
    lengths=torch.tensor([3, 5, 1]),
    truncated=torch.tensor([False, True, False]),
)
prompt_ids, prompt_mask = pad_left([[2, 4], [4], [3]], pad)  # an end-of-sequence id inside a prompt ends nothing
example = rollouts_from_samples(prompt_ids, prompt_mask, torch.arange(3), samples)
assert example.mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
by_comparing_ids = example.completion_ids != pad
assert by_comparing_ids.int().tolist()[0] == [1, 1, 0, 0, 0]  # the sampled end-of-sequence token is lost

# %% [markdown]
# ## How much does a token count?
#
# The objective of section 10 is a sum of terms, one per token. To make a loss of it we must say how much each token
# weighs, and answers differ in length. Let $m_{it}\in\{0,1\}$ be the mask, $n_i=\sum_t m_{it}$ the length of answer
# $i$, and $B$ the number of answers. Published recipes use three kinds of weights:
#
# | `loss_type` | weight of token $(i,t)$ | in words |
# |---|---|---|
# | `grpo` | $\dfrac{m_{it}}{B\,n_i}$ | mean over the answer, then over answers |
# | `dapo` | $\dfrac{m_{it}}{\sum_j n_j}$ | mean over all tokens |
# | `dr_grpo` | $\dfrac{m_{it}}{B\,L}$, $L$ the length cap | a constant, the same in every step |
#
# They differ as soon as lengths differ. Under `grpo` a token of a 100-token answer counts twenty times as much as
# one of a 2,000-token answer (claim 11.4); under the other two they count the same.
#
# The function below returns the weights of a *whole optimiser step*. A micro-batch later takes its rows of them. A mean
# of micro-batch means would be something else whenever the micro-batches hold different numbers of tokens; weights that
# were fixed before the split cannot make that mistake. (TRL's `bnpo` is the token mean over the local micro-batch; with
# the normalisation made once per step, it is `dapo`.)

# %% tags=["export:loss"]
LOSS_TYPES = ("grpo", "dapo", "dr_grpo")


def token_weights(mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """How much each token counts in the loss of one optimiser step, float32 ``[B, T]`` (section 11).

    ``mask`` bool ``[B, T]`` covers the whole step: all micro-batches. Rows without a token leave the denominators too.
    Weights sum to 1 for "grpo" (Shao et al., 2024) and "dapo" (Yu et al., 2025), to at most 1 for "dr_grpo" (Liu et
    al., 2025), and to 0 for an empty mask. Raises ValueError for another ``loss_type``.
    """
    tokens = mask.sum(1, keepdim=True)
    rows = (tokens > 0).sum()
    if loss_type == "grpo":
        total = rows * tokens
    elif loss_type == "dapo":
        total = tokens.sum()
    elif loss_type == "dr_grpo":
        total = rows * max_completion_length
    else:
        raise ValueError(f"loss_type is {loss_type!r}; choose one of {', '.join(LOSS_TYPES)}")
    return mask.float() / total.clamp(min=1)


# %%
lengths = torch.tensor([100, 2000])
mask = length_mask(lengths, 2000)
weights = {kind: token_weights(mask, kind, 4000) for kind in LOSS_TYPES}
for kind, w in weights.items():
    print(f"{kind:8} short answer {w[0, 0]:.2e}, long answer {w[1, 0]:.2e}, ratio {w[0, 0] / w[1, 0]:.0f}")
assert math.isclose(weights["grpo"][0, 0] / weights["grpo"][1, 0], 20, rel_tol=1e-6)
assert weights["dapo"][0, 0] == weights["dapo"][1, 0] and weights["dr_grpo"][0, 0] == weights["dr_grpo"][1, 0]

# %% [markdown]
# The accident with the mean of means, in numbers: one micro-batch holds a single token of loss 4, another three tokens
# of loss 0. The token mean is 1, the mean of the two means is 2.

# %%
terms, mask = torch.tensor([[4.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), length_mask(torch.tensor([1, 3]), 3)
step = token_weights(mask, "dapo", 3)
by_micro_batch = sum((step[i] * terms[i]).sum() for i in range(2))
mean_of_means = sum((token_weights(mask[i : i + 1], "dapo", 3) * terms[i]).sum() for i in range(2)) / 2
assert by_micro_batch == 1.0 and mean_of_means == 2.0

# %% [markdown]
# ## The loss
#
# Now the pieces meet. With the ratio $r_{it}$ and the clipped surrogate of section 10, an optional penalty of
# strength $\beta$ from section 9, and the weights $w_{it}$,
#
# $$L(\theta)=-\sum_{i,t} w_{it}\Bigl[
# \min\bigl(r_{it}A_{it},\;\mathrm{clip}(r_{it},1-\varepsilon,1+\varepsilon)A_{it}\bigr)-\beta\,\mathrm{kl}_{it}\Bigr].$$
#
# Published algorithms differ in which ratio, which clip and which penalty they use, not in this line. So those are
# arguments, with section 10's and section 9's functions as defaults.
#
# Entries of weight zero are replaced *before* the exponential. Multiplying afterwards would let a `NaN` through, and
# its gradient even where the value looks fine.


# %% tags=["export:loss"]
def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    ref_logprobs: Tensor | None = None,
    ratio: Callable = importance_ratio,
    surrogate: Callable = clipped_surrogate,
    kl: Callable = kl_k3,
) -> Tensor:
    """The negative weighted sum of the surrogate less ``beta`` times the KL penalty, a scalar (section 11).

    All tensors are ``[B, T]``; ``weights`` are rows of `token_weights` for the whole step, so that the losses of
    micro-batches add up to the loss of the step. Where the weight is 0, nothing else is looked at. ``ref_logprobs`` is
    needed when ``beta`` is not 0, ValueError otherwise. Schulman et al., 2017; Shao et al., 2024.
    """
    counts = weights > 0
    logprobs, old_logprobs = torch.where(counts, logprobs, 0.0), torch.where(counts, old_logprobs, 0.0)
    terms = surrogate(ratio(logprobs, old_logprobs), torch.where(counts, advantages, 0.0), epsilon, epsilon_high)
    if beta != 0.0:
        if ref_logprobs is None:
            raise ValueError(f"policy_loss: beta is {beta} but ref_logprobs is None; score with the reference first")
        terms = terms - beta * kl(logprobs, torch.where(counts, ref_logprobs, 0.0))
    return -(weights * terms).sum()


# %% [markdown]
# Claim 11.3, on the rollouts above: fill every masked slot with `NaN`, and neither the loss nor its gradient moves. And
# the last chosen token, which is the stop token, does have a gradient.

# %%
texts = completion_texts(tokenizer, rollouts.completion_ids, rollouts.mask.sum(1), rollouts.truncated)
answers = [problems[g].answer for g in rollouts.group.tolist()]
rewards = torch.tensor(addition_reward([], texts, answer=answers))
advantages = group_advantages(rewards, rollouts.group)[:, None].expand_as(rollouts.mask)
with torch.no_grad():
    old = token_logprobs(model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)
weights = token_weights(rollouts.mask, "dapo", 4)

results = {}
for filler in (0.0, float("nan")):
    spoiled = [torch.where(rollouts.mask, value, filler) for value in (old, old, advantages)]
    logprobs = spoiled[0].clone().requires_grad_()
    loss = policy_loss(logprobs, *spoiled[1:], weights)
    results[filler == 0.0] = (loss.detach(), *torch.autograd.grad(loss, logprobs))
assert torch.equal(results[True][0], results[False][0]) and torch.equal(results[True][1], results[False][1])
ends = rollouts.mask.sum(1) - 1
finished = (~rollouts.truncated) & (advantages[:, 0] != 0)
assert (results[True][1][finished, ends[finished]] != 0).all()

# %% [markdown]
# ## Micro-batches
#
# A step's rows may not fit through the model at once. They are cut into micro-batches, and what a micro-batch costs is the
# area of its rectangle, rows times columns, padding included. So the cut goes by a budget of padded tokens and not by a
# number of rows. Rows of similar length stand together, longest first: then each rectangle is trimmed close to its rows,
# and a micro-batch that does not fit into memory is met at once and not after an hour.
#
# Because the weights were fixed for the step, the sum of the micro-batch losses *is* the loss of the step, whatever the cut.


# %% tags=["export"]
def cut_by_tokens(prompts: list[int], completions: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Row numbers in pieces of at most ``max_tokens`` padded tokens, longest completion first (section 11).

    The lists hold each row's prompt and completion length. A single row that is longer is a piece of its own.
    """
    piece, prompt_width, width = [], 0, 0
    for row in sorted(range(len(prompts)), key=lambda row: (completions[row], prompts[row]), reverse=True):
        prompt_width, width = max(prompt_width, prompts[row]), max(width, completions[row])
        if piece and (len(piece) + 1) * (prompt_width + width) > max_tokens:
            yield piece
            piece, prompt_width, width = [], prompts[row], completions[row]
        piece.append(row)
    if piece:
        yield piece


def micro_batches(rollouts: Rollouts, weights: Tensor, max_tokens: int) -> Iterator[tuple[Rollouts, Tensor]]:
    """Cut rollouts and their token weights ``[B, T]`` into pieces of at most ``max_tokens`` padded tokens (section 11).

    Rows are sorted by length. Each piece is trimmed to its longest prompt and to the last column in which one of its rows
    has a token; a single row beyond the budget is a piece of its own. Every row is in exactly one piece.
    """
    prompts = rollouts.prompt_mask.sum(1).tolist()
    completions = used_columns(rollouts.mask).tolist()
    for rows in cut_by_tokens(prompts, completions, max_tokens):
        prompt_width, width = max(prompts[row] for row in rows), max(completions[row] for row in rows)
        index = torch.tensor(rows, device=weights.device)
        yield rollouts.select(index).trim(width, prompt_width), weights[index, :width]


def used_columns(mask: Tensor) -> Tensor:
    """Columns up to the last True of each row, int64 ``[B]``, of a bool mask ``[B, T]`` that may have holes."""
    return mask.flip(1).cumsum(1).bool().sum(1)


def padding_share(pieces: list[tuple[Rollouts, Tensor]]) -> float:
    """The share of padding among all tokens, prompts included, that the `micro_batches` ``pieces`` hold (section 11)."""
    area = sum(piece.prompt_mask.numel() + piece.mask.numel() for piece, _ in pieces)
    used = sum(int(piece.prompt_mask.sum() + used_columns(piece.mask).sum()) for piece, _ in pieces)
    return (area - used) / max(area, 1)


# %%
rollouts = replace(rollouts, advantages=advantages, old_logprobs=old)
gradients = {}
for budget in (1000, 100, 20):
    model.zero_grad()
    pieces = list(micro_batches(rollouts, weights, budget))
    for piece, piece_weights in pieces:
        logprobs = token_logprobs(model, piece.prompt_ids, piece.prompt_mask, piece.completion_ids)
        policy_loss(logprobs, piece.old_logprobs, piece.advantages, piece_weights).backward()
    gradients[budget] = torch.cat([p.grad.flatten() for p in model.parameters()])
    error = (gradients[budget] - gradients[1000]).norm() / gradients[1000].norm()
    print(
        f"{budget:4} tokens: {len(pieces):2} micro-batches, {padding_share(pieces):.0%} padding, gradient differs by {error:.1e}"
    )
    assert error < 1e-5

# %% [markdown]
# ## The logits are the memory event
#
# Scoring needs one number per token, but the straightforward way to it passes through $V$ numbers per token. For 256
# answers of 4,096 tokens and a vocabulary of 128,000, in a format of 2 bytes (claim 11.1):

# %%
size = 256 * 4096 * 128_000 * 2
print(f"{size / 1e9:.0f} GB of logits, for {256 * 4096 * 4 / 1e6:.0f} MB of log-probs")
assert round(size / 1e9) == 268

# %% [markdown]
# In our tiny model $V = 15$ and nothing happens. For a real vocabulary this section will get a version that never holds
# the logits; `token_logprobs` stays as its oracle.
#
# ## The picture
#
# Left, the batch as the trainer sees it: which squares are state, which were chosen, and which are nothing. Right,
# what a token weighs depending on the length of the answer it stands in.


# %% tags=["export:figures"]
def batch_and_weights(rollouts: Rollouts, lengths: Tensor, weights: dict[str, Tensor]):
    """Left: the cells of a batch by kind. Right: weight of one token against answer length, per loss type."""
    figure, (left, right) = new_figure(1, 2, height=3.4, width_ratios=[1.1, 1])
    prompt_width = rollouts.prompt_ids.shape[1]
    ends = rollouts.mask.sum(1) - 1
    for i in range(len(rollouts)):
        for t in range(prompt_width):
            real = bool(rollouts.prompt_mask[i, t])
            left.text(t, i, "x" if real else "·", ha="center", va="center", color=COLORS["reference"])
        for t in range(rollouts.mask.shape[1]):
            chosen, column = bool(rollouts.mask[i, t]), prompt_width + t
            if not chosen:
                left.text(column, i, "·", ha="center", va="center", color=COLORS["reference"])
                continue
            stop = t == int(ends[i]) and not bool(rollouts.truncated[i])
            left.text(
                column,
                i,
                "E" if stop else "y",
                ha="center",
                va="center",
                color="white",
                weight="bold",
                bbox={"boxstyle": "square,pad=0.3", "facecolor": COLORS["policy"], "edgecolor": "white"},
            )
    left.axvline(prompt_width - 0.5, color="black", linewidth=0.8)
    left.set(xlim=(-0.7, prompt_width + rollouts.mask.shape[1] - 0.3), ylim=(len(rollouts) - 0.4, -0.6))
    left.set(title="Filled = trained: y chosen, E stop token", xlabel="x prompt, · padding", ylabel="row")
    left.set_xticks([])
    left.set_yticks(range(len(rollouts)))
    for (kind, values), style, y in zip(weights.items(), ("-", "--", ":"), (1.35, 1.35, 0.6), strict=True):
        right.plot(lengths, values, style, color=COLORS["advantage"] if kind == "grpo" else COLORS["policy"])
        right.text(lengths[0], values[0] * y, kind, va="bottom" if y > 1 else "top")
    right.set(xscale="log", yscale="log", title="Weight of one token", xlabel="answer length [tokens]", ylabel="weight")
    right.set_ylim(min(v.min() for v in weights.values()) / 3, max(v.max() for v in weights.values()) * 4)
    return figure


# %%
lengths = torch.tensor([100, 200, 500, 1000, 2000])
mask = length_mask(lengths, 2000)
show(
    batch_and_weights(example, lengths, {kind: token_weights(mask, kind, 4000)[:, 0] for kind in LOSS_TYPES}),
    caption="Left: the mask follows the lengths, so the stop token E is trained even where pad and stop share an id. "
    "Right: averaging over the answer first makes a token of a short answer count more; the other two do not.",
    alt="Left, three rows of a batch with prompt, chosen tokens, stop token and padding marked. Right, token weight "
    "against answer length on log axes: grpo falls like one over the length, dapo and dr_grpo are flat.",
)

# %% [markdown]
# **What is still missing.** The logits are still materialised and the micro-batches are cut in the order of the rows; a
# later part of this section computes the log-probs without the logits and cuts by length. Who the models in the room
# are, what they cost and how they are loaded is section 12; section 16 puts the seven lines into a loop.
