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
# The whole step fits on nine lines. The letters are $N$ prompts, $G$ completions of each, $B = NG$ rows, $P$ prompt columns
# and $T$ completion columns.
#
# | line | value | shape |
# |---|---|---|
# | sample $G$ completions for each prompt | ids $a_t$, log-probs they were sampled with | `[B, T]` |
# | which entries are tokens that the policy chose | mask $m$ | bool `[B, T]` |
# | let the verifier read the texts | rewards $R$ | `[B]` |
# | compare within each prompt's group | advantages $A$ | `[B]` → `[B, T]` |
# | score the ids with the policy as it was, and with the reference | $\log\pi_{\text{old}}$, $\log\pi_{\text{ref}}$ | `[B, T]` |
# | say how much each token counts | weights $w$ | `[B, T]` |
# | score the ids with the policy, in pieces that fit into memory | $\log\pi_\theta(a_t\mid s_t)$ | `[b, t]` |
# | clipped surrogate and penalty, weighted | loss | scalar |
# | step | $\theta$ | |
#
# We build the lines one by one; near the end they stand together as a program that checks every shape. Four of them
# deserve a closer look: the mask, the weights, the memory that scoring would like to use, and the time that sampling takes.

# %%
import copy
import functools
import hashlib
import importlib.util
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import ipywidgets as widgets
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from lmrl.baselines import group_advantages
from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.policy import (
    Samples,
    addition_problems,
    addition_reward,
    build_policy,
    complete,
    completion_inputs,
    completion_logits,
    completion_texts,
    length_mask,
    masked_mean,
    pad_left,
    tempered,
    token_logprobs,
    trunk,
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
    graded bool ``[B]``; advantages, old_logprobs and ref_logprobs float ``[B, T]``; with a critic, what it said before each
    token and what it should have said, values and returns float ``[B, T]``.

    Index t of every ``[B, T]`` field is the t-th sampled token. Raises ValueError when shapes disagree or a mask is not bool.
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
    values: Tensor | None = None
    returns: Tensor | None = None

    def __post_init__(self):
        for name, value in self.per_token().items():
            if value.shape != self.completion_ids.shape:
                shapes = f"{tuple(value.shape)}, completion_ids has {tuple(self.completion_ids.shape)}"
                raise ValueError(f"Rollouts: {name} has shape {shapes}; per-token fields are [B, T]")
        for name in self.known().keys() & {"truncated", "group", "rewards", "graded"}:
            if getattr(self, name).shape != (len(self),):
                raise ValueError(
                    f"Rollouts: {name} has shape {tuple(getattr(self, name).shape)}, expected ({len(self)},)"
                )
        if self.prompt_mask.shape != self.prompt_ids.shape or len(self.prompt_ids) != len(self):
            shapes = f"{tuple(self.prompt_ids.shape)} and {tuple(self.prompt_mask.shape)}"
            raise ValueError(f"Rollouts: prompt_ids and prompt_mask have shapes {shapes}, expected [{len(self)}, P]")
        for name in ("mask", "prompt_mask"):
            if getattr(self, name).dtype != torch.bool:
                raise ValueError(f"Rollouts: {name} is {getattr(self, name).dtype}, expected bool")

    def __len__(self) -> int:
        return len(self.completion_ids)

    def known(self) -> dict[str, Tensor]:
        """The fields that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def per_token(self) -> dict[str, Tensor]:
        """The ``[B, T]`` fields that are not None, by name."""
        names = ("completion_ids", "mask", "sampler_logprobs", "advantages", "old_logprobs", "ref_logprobs")
        names += ("values", "returns")
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


# %% [markdown]
# **Which distribution?** A policy at temperature $\tau$ is the softmax of the logits over $\tau$. Three more settings cut off
# its tail: `top_k` keeps the $k$ likeliest tokens, `top_p` the likeliest ones that together reach the probability $p$, and
# `min_p` those with at least the fraction `min_p` of the largest probability. What is left is normalised again, and that
# *is* the distribution that is sampled from; its log-probs are what a sampler must report. Scoring such a completion with
# the full softmax gives smaller numbers, for another policy.


# %% tags=["export:rollout"]
def truncate(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> torch.Tensor:
    """Logits ``[B, V]``, already tempered, with -inf on every token that the settings cut off (section 11).

    In transformers' order: top_k (0 keeps all), then top_p of what is left, then min_p. (vLLM applies min_p first, which
    differs only together with top_p.) Tokens tied at top_k's edge are all kept; the likeliest token always is.
    """
    if top_k:
        smallest = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -math.inf)
    if top_p < 1:
        ordered, order = logits.sort()
        tail = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        tail[:, -1] = False
        logits = logits.masked_fill(torch.empty_like(tail).scatter_(1, order, tail), -math.inf)
    if min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -math.inf)
    return logits


# %%
logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
for settings in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.2}):
    probs = truncate(logits, **settings).softmax(-1)[0]
    print(settings, [round(p, 3) for p in probs.tolist()])
assert torch.allclose(truncate(logits, top_k=2).softmax(-1), torch.tensor([[0.625, 0.375, 0.0, 0.0]]))

# %% [markdown]
# **Which random numbers?** One row of uniform numbers decides a completion (section 1). If the rows were dealt out in the
# order of the batch, a completion would change with the company it keeps: one more prompt in front, and all are different.
# So the numbers of a completion are those of its *seed, prompt and sample index*. Batches can then be split, reordered or
# extended, and every completion stays what it was. A prompt that occurs twice in a call gets the next sample indices, not the
# same completions twice.


# %% tags=["export:rollout"]
def prompt_digest(prompt: Sequence[int], seed: int) -> bytes:
    """32 bytes, as if drawn at random for each prompt and seed (section 11)."""
    return hashlib.sha256(repr((int(seed), tuple(map(int, prompt)))).encode()).digest()


def row_uniforms(prompts: list[list[int]], num_generations: int, max_completion_length: int, seed: int) -> torch.Tensor:
    """Random numbers in [0, 1) for ``num_generations`` completions of each prompt, float64 ``[B, T]`` (section 11).

    A row depends on seed, prompt, sample index and T alone. The k-th occurrence of a prompt continues its sample index.
    """
    streams, drawn = {}, []
    for prompt in map(tuple, prompts):
        if prompt not in streams:
            streams[prompt] = np.random.default_rng(int.from_bytes(prompt_digest(prompt, seed), "big"))
        drawn.append(streams[prompt].random((num_generations, max_completion_length)))
    return torch.from_numpy(np.concatenate(drawn))


# %% [markdown]
# **One token is little work.** After the prompt, a step of decoding reads one token of each row. In a small model that is so
# little arithmetic that most of the time goes into preparing it: the forward pass of transformers serves every use of a
# model, and makes masks, tables of positions and copies of shared keys again for each token. So the step is written out here
# for the commonest design, that of Llama: a layer adds to $x$ first what attention says of the normed $x$, then what the
# MLP says of it. Attention has one query, the newest token's, and needs no causal mask, only that of the padding. Nothing is
# kept for a gradient, and a product by weights is asked for as such, without the call of a module. Weights and cache are the
# model's own, so there is nothing to synchronise.


# %% tags=["export:rollout"]
def project(linear, x: torch.Tensor) -> torch.Tensor:
    """What the module ``linear`` says of ``x``; without a module's call if it is no more than a product (section 11)."""
    return F.linear(x, linear.weight, linear.bias) if type(linear) is torch.nn.Linear else linear(x)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Queries and keys ``[B, heads, d]`` turned by their position's angles ``[B, 1, d]``. Su et al., 2021 (section 11).

    A pair (x, y), half a row apart, becomes (x cos - y sin, y cos + x sin); the first half of ``sin`` is negative for that.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class NextToken:
    """Llama's forward pass for one new token per row, called as the model is; `complete`'s prompts go to ``model`` itself.

    Its logits are the model's, up to rounding. For the models of `has_next_token`, and up to ``length`` positions (section 11).
    """

    def __init__(self, model, length: int):
        self.model = model
        weight = model.model.embed_tokens.weight
        cos, sin = model.model.rotary_emb(weight, torch.arange(length, device=weight.device)[None])
        first, second = sin[0].chunk(2, dim=-1)
        self.cos, self.sin = cos[0], torch.cat([-first, second], dim=-1)

    def __call__(self, *, input_ids, attention_mask, position_ids, past_key_values, **options):
        model, cache = self.model, past_key_values
        if cache is None or any(type(stored) is not DynamicLayer for stored in cache.layers):
            tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
            return model(**tensors, past_key_values=cache, **options)
        with torch.inference_mode():
            logits = self.step(input_ids[:, 0], attention_mask, position_ids[:, 0], cache)
        return CausalLMOutputWithPast(logits=logits[:, None], past_key_values=cache)

    def step(self, ids, attention_mask, positions, cache) -> torch.Tensor:
        """The logits ``[B, V]`` of what follows the ``ids`` ``[B]``, whose keys and values join the ``cache``."""
        trunk, mask = self.model.model, attention_mask.bool()[:, None, None]
        cos, sin = (table.index_select(0, positions)[:, None] for table in (self.cos, self.sin))
        x = trunk.embed_tokens(ids)
        for layer, stored in zip(trunk.layers, cache.layers, strict=True):
            x = x + self.attend(layer.self_attn, layer.input_layernorm(x), stored, mask, cos, sin)
            x = x + self.think(layer.mlp, layer.post_attention_layernorm(x))
        return project(self.model.lm_head, trunk.norm(x))

    def attend(self, attention, x, stored, mask, cos, sin) -> torch.Tensor:
        """What the ``attention`` of a layer says of ``x`` ``[B, D]``, whose keys and values join the ``stored`` ones."""
        rows, width = len(x), attention.head_dim
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (project(part, x).view(rows, -1, width) for part in parts)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = rotate(torch.cat([q, k], dim=1), cos, sin).split([q.shape[1], k.shape[1]], dim=1)
        keys, values = stored.update(k[:, :, None], v[:, :, None])
        queries = q.reshape(rows, keys.shape[1], -1, width)  # those that share keys together
        read = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=attention.scaling)
        return project(attention.o_proj, read.reshape(rows, -1))

    def think(self, mlp, x) -> torch.Tensor:
        """What the ``mlp`` of a layer says of ``x`` ``[B, D]``."""
        return project(mlp.down_proj, mlp.act_fn(project(mlp.gate_proj, x)) * project(mlp.up_proj, x))


# %% [markdown]
# Whether a model has this design is known by its class. A hook or a replaced `forward`, which the written-out step
# might pass by, counts against it; then, as for all other designs, `complete` calls the model itself.


# %% tags=["export:rollout"]
NEXT_TOKEN_MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def has_next_token(model) -> bool:
    """Whether `NextToken` computes what ``model`` does (section 11)."""
    if type(model).__name__ not in NEXT_TOKEN_MODELS or model.config._attn_implementation != "sdpa":
        return False
    touched = any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    return not touched and model.model.rotary_emb.rope_type in ("default", "linear", "llama3", "yarn")


# %% [markdown]
# The sampler reads each *distinct* prompt once, whatever the number of its completions.


# %% tags=["export:rollout"]
def check_sampling(max_completion_length: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """ValueError for settings with which no sampler can sample (section 11)."""
    if max_completion_length < 1:
        raise ValueError(f"max_completion_length is {max_completion_length}; a completion has at least 1 token")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; choose it above 0 (top_k=1 is greedy)")
    if top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(
            f"top_k {top_k}, top_p {top_p}, min_p {min_p}: choose top_k from 0 (off), top_p in (0, 1] and min_p in [0, 1]"
        )


@dataclass(frozen=True)
class TorchSampler:
    """Generates with section 1's `complete` from ``model`` itself, any causal model, all rows at once (section 11).

    ``temperature`` comes first, then `truncate`; the log-probs are those of the distribution so made. A completion is
    decided by weights, settings, seed, prompt and sample index, and not by its batch. Raises ValueError for settings or
    prompts that make no sense and as `require_fit`, FloatingPointError when the model's log-probs are not finite.
    """

    model: torch.nn.Module
    stop_ids: list[int]
    pad_id: int
    max_completion_length: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        check_sampling(self.max_completion_length, self.temperature, self.top_k, self.top_p, self.min_p)

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits ``[B, V]`` that are sampled from, in at least float32."""
        return truncate(tempered(logits, self.temperature), self.top_k, self.top_p, self.min_p)

    def generate(self, prompts: list[list[int]], num_generations: int, seed: int) -> Rollouts:
        if not prompts or not all(prompts) or num_generations < 1:
            shortest = min(map(len, prompts), default=0)
            raise ValueError(
                f"generate: {len(prompts)} prompts, the shortest of {shortest} tokens, {num_generations} completions each; "
                "give at least one of each"
            )
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        prompt_ids, prompt_mask = pad_left([list(prompt) for prompt in place], self.pad_id)
        require_fit(self.model, prompt_ids, self.max_completion_length)
        group = torch.arange(len(prompts)).repeat_interleave(num_generations)
        rows = torch.tensor([place[tuple(prompt)] for prompt in prompts])[group]
        uniforms = row_uniforms(prompts, num_generations, self.max_completion_length, seed)
        device = next(self.model.parameters()).device
        prompt_ids, prompt_mask, rows = prompt_ids.to(device), prompt_mask.to(device), rows.to(device)
        length = prompt_ids.shape[1] + self.max_completion_length
        samples = complete(
            NextToken(self.model, length) if has_next_token(self.model) else self.model,
            prompt_ids,
            prompt_mask,
            rows,
            uniforms.to(device),
            stop_ids=self.stop_ids,
            distribution=self.distribution,
        )
        if not samples.logprobs.isfinite().all():
            raise FloatingPointError(
                "the model's log-probs are not finite: look at its weights, lower learning_rate or raise temperature"
            )
        return rollouts_from_samples(prompt_ids[rows], prompt_mask[rows], group.to(device), samples)

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
print({name: tuple(value.shape) for name, value in rollouts.known().items()})

# %% [markdown]
# The written-out step says what the model says:

# %%
uniforms = row_uniforms([[0]], num_generations=len(rollouts), max_completion_length=4, seed=1)
inputs = rollouts.prompt_ids, rollouts.prompt_mask, torch.arange(len(rollouts)), uniforms
decode = {"stop_ids": [tokenizer.eos_token_id], "distribution": torch.Tensor.float}
written_out, asked = (complete(step, *inputs, **decode) for step in (NextToken(model, 64), model))
assert has_next_token(model) and torch.equal(written_out.ids, asked.ids)
assert (written_out.logprobs - asked.logprobs).abs().max() < 1e-5

# %% [markdown]
# Ask again with the prompts in another order and fewer completions of each: those that are drawn are the same ones.

# %%
backwards = sampler.generate([tokenizer(problem.prompt).input_ids for problem in reversed(problems)], 3, seed=0)
for g in range(4):
    first, again = rollouts.select(rollouts.group == g), backwards.select(backwards.group == 3 - g)
    width = again.mask.shape[1]
    assert torch.equal(first.mask[:3, :width], again.mask)
    assert torch.equal(first.completion_ids[:3, :width], again.completion_ids)

# %% [markdown]
# ## Which tokens are actions
#
# The policy gradient has one term per action, and the tensors hold much that is no action: the prompt, which is the first
# state; padding, which only makes the rows equally long; and whatever an engine wrote behind the end of an answer. The
# mask says which entries are actions. The last of them is the stop token. Whoever leaves it out never rewards ending an
# answer, and the model slowly forgets to. No mask raises an error, and with a wrong one the loss still looks like a loss.
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
# Here is the batch as the trainer sees it: which entries are state, which were chosen, and which are nothing.


# %% tags=["export:figures"]
def batch_cells(rollouts: Rollouts):
    """The cells of a small batch by kind: prompt, chosen token, stop token, padding."""
    figure, axes = new_figure(height=1.9)
    prompt_width = rollouts.prompt_ids.shape[1]
    chosen_style = {"boxstyle": "square,pad=0.35", "facecolor": COLORS["policy"], "edgecolor": "white"}
    for i, (prompt, mask, cut) in enumerate(zip(rollouts.prompt_mask, rollouts.mask, rollouts.truncated, strict=True)):
        last = int(mask.sum()) - 1
        letters = ["x" if real else "·" for real in prompt]
        letters += ["·" if not real else "E" if t == last and not cut else "y" for t, real in enumerate(mask)]
        for column, letter in enumerate(letters):
            chosen = letter in "yE"
            style = (
                {"color": "white", "weight": "bold", "bbox": chosen_style} if chosen else {"color": COLORS["reference"]}
            )
            axes.text(column, i, letter, ha="center", va="center", **style)
    axes.axvline(prompt_width - 0.5, color="black", linewidth=0.8)
    axes.set(xlim=(-0.7, len(letters) - 0.3), ylim=(len(rollouts) - 0.4, -0.6), ylabel="row")
    axes.set_title("prompt | completion", loc="left")
    axes.set_xticks([])
    axes.set_yticks(range(len(rollouts)))
    return figure


# %%
show(
    batch_cells(example),
    caption="Filled cells are trained: y a chosen token, E a chosen stop token. The others are not: x prompt, · padding. The "
    "stop token is inside the mask even where pad and stop share an id; the second row was cut off and has none.",
    alt="Three rows of a batch. Left of a line, prompt tokens x behind padding dots; right of it, filled cells y for chosen "
    "tokens, E at the end of rows one and three, dots after it.",
)

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
# the normalisation made once per step it is `dapo`, and the name is understood as that.)

# %% tags=["export:loss"]
LOSS_TYPES = ("grpo", "dapo", "dr_grpo")  # those that differ


def token_weights(mask: Tensor, loss_type: str, max_completion_length: int) -> Tensor:
    """How much each token counts in the loss of one optimiser step, float32 ``[B, T]`` (section 11).

    ``mask`` bool ``[B, T]`` covers the whole step: all micro-batches. Rows without a token leave the denominators too.
    Weights sum to 1 for "grpo" (Shao et al., 2024) and "dapo" (Yu et al., 2025), to at most 1 for "dr_grpo" (Liu et
    al., 2025), and to 0 for an empty mask. "bnpo" is another name for "dapo". Raises ValueError for another ``loss_type``.
    """
    tokens = mask.sum(1, keepdim=True)
    rows = (tokens > 0).sum()
    if loss_type == "grpo":
        total = rows * tokens
    elif loss_type in ("dapo", "bnpo"):
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
# The same weights seen from the other side: what share of the step's loss does a whole answer get? Under `grpo` each gets
# the same, and its tokens divide it. Under `dapo` the long answer gets as much as it has tokens, and so changes what is left
# for the others. Under `dr_grpo` a token's weight depends on no length at all, its own or another's; the shares need not
# sum to 1, and a step of short answers has a smaller gradient.
#
# None of them is right and the others wrong. The gradient of section 4 sums over tokens and averages over answers: up to a
# constant that is `dr_grpo`. The other two divide by a length that depends on the sample, which is a choice and a bias.


# %% tags=["export:figures"]
def token_and_answer_weights(lengths: list[int], weights: dict[str, Tensor]):
    """For answers of ``lengths`` and ``weights`` ``[B]`` of one token per loss type: weight of a token, share of an answer."""
    figure, (left, right) = new_figure(1, 2, height=3.2, sharey=True)
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.13, right=0.98, top=0.9, bottom=0.16, wspace=0.06)
    most = 1000 * max(float(token.max()) for token in weights.values())
    shades = dict(zip(weights, (COLORS["advantage"], COLORS["policy"], COLORS["reference"]), strict=True))
    for k, (kind, token) in enumerate(weights.items()):
        y = [i + 0.27 * (k - 1) for i in range(len(lengths))]
        share = token * torch.tensor(lengths)
        left.barh(y, 1000 * token, height=0.24, color=shades[kind])
        right.barh(y, share, height=0.24, color=shades[kind])
        for i, place in enumerate(y):
            left.text(1000 * token[i] + 0.01 * most, place, f"{kind} {1000 * token[i]:.2g}", va="center", fontsize=8)
            right.text(share[i] + 0.01, place, f"{kind} {share[i]:.0%}", va="center", fontsize=8)
    left.set_yticks(range(len(lengths)), [f"{n} tokens" for n in lengths])
    left.set(xlim=(0, 1.5 * most), xlabel="weight × 1000", ylim=(len(lengths) - 0.5, -0.5))
    left.set_title("one token", loc="left")
    right.set(xlim=(0, 1.25), xlabel="share of the loss")
    right.set_title("the whole answer", loc="left")
    return figure


# %% tags=["demo"]
def weigh(short: int, long: int, cap: int) -> Figure:
    lengths = [short, long]
    mask = length_mask(torch.tensor(lengths).clamp(max=cap), cap)
    found = {kind: token_weights(mask, kind, cap)[:, 0] for kind in LOSS_TYPES}
    return token_and_answer_weights(mask.sum(1).tolist(), found)


# %%
show(
    weigh(100, 2000, 4000),
    caption="Two answers in one step, length cap 4,000. Under grpo a token of the short answer counts 20 times as much; under "
    "the other two both count the same, and the long answer is most of the loss.",
    alt="Bars for an answer of 100 and one of 2000 tokens. Left, weight of one token per loss type: grpo 5 against 0.25 thousandths, "
    "the others equal. Right, share of the loss: grpo half each, dapo 5 and 95 per cent, dr_grpo 1 and 25 per cent.",
)

# %% [markdown]
# Make the long answer longer and watch the *short* one's tokens: under `dapo` they lose weight, under the other two they
# do not. Then raise the cap: only `dr_grpo` changes.

# %%
explore(
    weigh,
    short=widgets.IntSlider(100, min=10, max=1000, step=10, description="short answer [tokens]"),
    long=widgets.IntSlider(2000, min=10, max=4000, step=10, description="long answer [tokens]"),
    cap=widgets.IntSlider(4000, min=1000, max=8000, step=100, description="length cap [tokens]"),
)

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
    micro-batches add up to the loss of the step. Where the weight is 0, nothing else is looked at. ``ratio(logprobs,
    old_logprobs, counts)`` also learns which tokens count, for a ratio over whole rows. ``ref_logprobs`` is needed when
    ``beta`` is not 0, ValueError otherwise. Schulman et al., 2017; Shao et al., 2024.
    """
    counts = weights > 0
    logprobs, old_logprobs = torch.where(counts, logprobs, 0.0), torch.where(counts, old_logprobs, 0.0)
    ratios = ratio(logprobs, old_logprobs, counts)
    terms = surrogate(ratios, torch.where(counts, advantages, 0.0), epsilon, epsilon_high)
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
    parts = list(micro_batches(rollouts, weights, budget))
    for piece, piece_weights in parts:
        logprobs = token_logprobs(model, piece.prompt_ids, piece.prompt_mask, piece.completion_ids)
        policy_loss(logprobs, piece.old_logprobs, piece.advantages, piece_weights).backward()
    gradients[budget] = torch.cat([p.grad.flatten() for p in model.parameters()])
    error = (gradients[budget] - gradients[1000]).norm() / gradients[1000].norm()
    shape = f"{len(parts):2} micro-batches, {padding_share(parts):.0%} padding"
    print(f"{budget:4} tokens: {shape}, gradient differs by {error:.1e}")
    assert error < 1e-5

# %% [markdown]
# With answers of four tokens there is little to gain. Lengths in practice have a long tail; here are 32 answers with lengths
# from an exponential distribution. Cut in the order in which they come, eight rows each, every piece is as wide as its
# longest row. Sorted and cut by the area that eight rows of full length would have, fewer pieces hold the same tokens.


# %% tags=["export:figures"]
def cut_rectangles(prompts: list[int], completions: list[int], cuts: dict[str, list[list[int]]]):
    """One panel per way to cut: each piece as the rectangle of tokens and padding that goes through the model."""
    figure, panels = new_figure(1, len(cuts), height=3.4, sharex=True, sharey=True)
    figure.set_layout_engine(None)
    figure.subplots_adjust(left=0.05, right=0.98, top=0.9, bottom=0.15, wspace=0.06)
    shades = ["white", "#f3c7bd", COLORS["reference"], COLORS["policy"]]
    left, width = max(prompts), max(prompts) + max(completions)
    for axes, (name, pieces) in zip(panels, cuts.items(), strict=True):
        lines = []
        for piece in pieces:
            first, last = left - max(prompts[row] for row in piece), left + max(completions[row] for row in piece)
            for row in piece:
                line = np.zeros(width, dtype=int)
                line[first:last] = 1
                line[left - prompts[row] : left], line[left : left + completions[row]] = 2, 3
                lines.append(line)
            lines.append(np.zeros(width, dtype=int))
        cells = np.array(lines)
        axes.imshow(np.array([to_rgb(shade) for shade in shades])[cells], aspect="auto", interpolation="nearest",
                    extent=(-left, width - left, len(cells), 0))  # fmt: skip
        padding = (cells == 1).sum() / (cells > 0).sum()
        axes.set_title(f"{name}: {len(pieces)} pieces, {padding:.0%} padding", loc="left", fontsize=10)
        axes.set(xlabel="prompt | completion [tokens]", ylim=(len(prompts) + max(map(len, cuts.values())), 0))
        axes.set_yticks([])
    panels[0].set_ylabel("rows")
    return figure


# %% tags=["demo"]
def cut_two_ways(mean: int, rows_in_budget: int) -> Figure:
    generator = torch.Generator().manual_seed(0)
    completions = torch.empty(32).exponential_(1 / mean, generator=generator).ceil().clamp(1, 64).int().tolist()
    prompts = torch.randint(6, 13, (32,), generator=generator).tolist()
    in_order = [list(range(32))[i : i + rows_in_budget] for i in range(0, 32, rows_in_budget)]
    by_tokens = list(cut_by_tokens(prompts, completions, rows_in_budget * (max(prompts) + 64)))
    return cut_rectangles(prompts, completions, {"in order": in_order, "by tokens": by_tokens})


# %%
show(
    cut_two_ways(16, 8),
    caption="Grey: prompts. Blue: completions. Pale: padding, which costs as much as a token. A budget of eight rows of full "
    "length (cap 64), cut two ways.",
    alt="Two panels of 32 horizontal bars in groups. In order: four groups with much pale padding. By tokens: bars sorted by "
    "length, fewer groups, little padding.",
)

# %% [markdown]
# Lower the mean length: the cut in order keeps its number of pieces, the one by tokens needs fewer and fewer. A budget of
# very few rows makes either cut tight, at the price of many passes.

# %%
explore(
    cut_two_ways,
    mean=widgets.IntSlider(16, min=2, max=60, description="mean completion length [tokens]"),
    rows_in_budget=widgets.IntSlider(8, min=1, max=32, description="budget [rows of full length]"),
)

# %% [markdown]
# ## The logits are the memory event
#
# Scoring needs two numbers per token, its log-prob and the entropy of the distribution that it was drawn from. The
# straightforward way to them passes through $V$ numbers per token. For 256 answers of 4,096 tokens and a vocabulary of
# 128,000, in a format of 2 bytes (claim 11.1):

# %%
size = 256 * 4096 * 128_000 * 2
print(f"{size / 1e9:.0f} GB of logits, for {256 * 4096 * 4 / 1e6:.0f} MB of log-probs")
assert round(size / 1e9) == 268

# %% [markdown]
# ## Log-probs without the logits
#
# In our tiny model $V = 15$ and nothing happens. For a real vocabulary the logits are the largest tensor of the step. Let
# $h\in\mathbb R^D$ be the hidden state at one position, after the last layer of the network, and
# $W\in\mathbb R^{V\times D}$ the output head. With $z = Wh$ (tempered, where $\tau\ne1$), the target $y$ and
# $p=\mathrm{softmax}(z)$,
#
# $$\log p_y = z_y - \ell,\qquad \ell = \log\sum_v e^{z_v},\qquad
# H = -\sum_v p_v\log p_v = \ell - \sum_v p_v z_v .$$
#
# First the head itself. A few published models scale or bend their logits, and that belongs to the policy just as the
# temperature does.


# %% tags=["export:logprobs"]
@dataclass(frozen=True)
class OutputHead:
    """From hidden states to logits: ``x = scale * (hidden @ weight.T + bias)``, then ``softcap * tanh(x / softcap)``.

    weight float ``[V, D]``; bias float ``[V]`` or None; softcap None where the logits are not capped (section 11).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def tile(self, columns: slice) -> "OutputHead":
        """The head of the tokens ``columns`` of the vocabulary alone."""
        return replace(self, weight=self.weight[columns], bias=None if self.bias is None else self.bias[columns])

    def settings(self, temperature: float) -> dict:
        """The keyword arguments of `fused_logprobs` and `fused_token_loss`: all of the head but its weight."""
        return {"bias": self.bias, "softcap": self.softcap, "scale": self.scale, "temperature": temperature}


def output_head(model) -> OutputHead:
    """The output head of an ``AutoModelForCausalLM`` (section 11).

    Knows the scales of Cohere (``logit_scale``), Granite and HyperCLOVA X (``logits_scaling``) and Falcon-H1
    (``lm_head_multiplier``) and the soft caps of Gemma and RecurrentGemma. ValueError if the head is not a plain linear
    layer. Whether there is something else between the hidden states and the logits, `require_output_head` finds out.
    """
    layer, config = model.get_output_embeddings(), model.config.get_text_config()
    if not isinstance(layer, torch.nn.Linear):
        raise ValueError(f"{type(model).__name__}: the output head is a {type(layer).__name__}, not a linear layer")
    if type(layer).forward is not torch.nn.Linear.forward:
        raise ValueError(
            f"{type(model).__name__}: the output head is a {type(layer).__name__} with a forward of its own, as adapters and "
            "quantisation have; merge the adapter into the weight, or leave the head out of it"
        )
    factors = [getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier")]
    scaling = getattr(config, "logits_scaling", 1.0)  # Granite divides by it, HyperCLOVA X multiplies
    factors.append(scaling if config.model_type.startswith("hyperclovax") else 1 / scaling)
    scale = math.prod(factor for factor in factors if factor is not None)
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return OutputHead(layer.weight, layer.bias, scale, softcap)


# %% [markdown]
# All three sums can be taken over the vocabulary in pieces, called **tiles**. Keep, for the tiles seen so far, the
# largest logit $m$ and
#
# $$s=\sum_v e^{z_v-m},\qquad u=\sum_v (z_v-m)\,e^{z_v-m}.$$
#
# When a tile raises the maximum to $m'$, every $z_v-m$ changes by $m-m'$: $u$ becomes $e^{m-m'}\,(u+(m-m')\,s)$, $s$
# becomes $e^{m-m'}s$, and the tile's own terms are added. At the end
#
# $$\ell = m+\log s,\qquad \log p_y = (z_y-m)-\log s,\qquad H = \log s - u/s .$$
#
# This is the online softmax (Milakov and Gimelshein, 2018), with one more sum. The logits of a tile can be forgotten as
# soon as they are folded in. Why not $\sum_v z_v e^{z_v-m}$ for the entropy, and $\ell-u/s$ at the end? Logits may all be
# near 1,000. Then the difference of two numbers near 1,000 should give an entropy near 0, and in float32 little of it
# is left. Now $\log s\ge 0$ and $-u/s\ge 0$ are added, nothing cancels, and an entropy is never negative.
#
# A logit may be $-\infty$, the mark of a forbidden token. Its term is 0, but $0\cdot(-\infty)$ is not a number. So
# differences are cut off at $-10^4$, where the exponential is 0 in any format.


# %% tags=["export:logprobs"]
FLOOR = -1e4  # exp(FLOOR) is 0 in float32 and float64
_ = torch.ones(1).exp().log()  # MKL's first exp of a process, if it is a large one, can be a coarse one


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other float (section 11)."""
    return torch.promote_types(dtype, torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix ``a @ b``, summed and returned in at least float32 (section 11)."""
    dtype = at_least_float32(b.dtype)
    if b.is_cuda and b.dtype != dtype:
        return torch.mm(a.to(b.dtype), b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, which is in at least float32 (section 11)."""
    if total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total += product(a, b)


def tile_logits(hidden: Tensor, head: OutputHead, temperature: float) -> Tensor:
    """Tempered logits of ``hidden [n, D]`` under the head of one tile, float32 (float64 stays) ``[n, v]`` (section 11)."""
    logits = product(hidden, head.weight.T)
    if head.bias is not None:
        logits += head.bias
    if head.softcap is not None:
        return logits.mul_(head.scale / head.softcap).tanh_().mul_(head.softcap / temperature)
    return logits if head.scale == temperature else logits.mul_(head.scale / temperature)


def pick(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """For targets counted from a tile's first token: index into the tile ``[n, 1]``, and is the target there ``[n]``."""
    return targets.clamp(0, width - 1)[:, None], (targets >= 0) & (targets < width)


def fold(logits: Tensor, targets: Tensor, sums: Tensor) -> None:
    """Add a tile ``logits [n, v]`` to ``sums [4, n]`` in place: m, s, u and the target's logit (section 11).

    ``targets`` int64 ``[n]`` count from the tile's first token. Milakov and Gimelshein, 2018.
    """
    if use_kernels(logits):
        return launch_fold(logits, targets, sums)
    m, s, u, z = sums
    index, here = pick(targets, logits.shape[1])
    z.copy_(torch.where(here, logits.gather(1, index)[:, 0], z))
    higher = torch.maximum(m, logits.amax(1)).clamp_(min=torch.finfo(m.dtype).min)
    drop = (m - higher).clamp_(min=FLOOR)
    shrink, below = drop.exp(), (logits - higher[:, None]).clamp_(min=FLOOR)
    terms = below.exp()
    u.add_(s * drop).mul_(shrink).add_(below.mul_(terms).sum(1))
    s.mul_(shrink).add_(terms.sum(1))
    m.copy_(higher)


def empty_sums(hidden: Tensor) -> Tensor:
    """What `fold` starts from: no tile seen, ``[4, N]``."""
    sums = torch.zeros(4, len(hidden), dtype=at_least_float32(hidden.dtype), device=hidden.device)
    sums[0] = -math.inf
    return sums


def summary(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, and log-sum-exp, each ``[N]``, from the sums over all tiles (section 11)."""
    m, s, u, z = sums
    return z - m - s.log(), s.log() - u / s, m + s.log()


# %% [markdown]
# Now backwards. Differentiating the three formulas,
#
# $$\frac{\partial \log p_y}{\partial z_v} = \mathbb 1[v=y] - p_v,\qquad
# \frac{\partial H}{\partial z_v} = -p_v\,(\log p_v + H).$$
#
# Both need only $z_v$, $\ell$ and $H$. So a tile's gradient follows from its logits alone, and if those were forgotten,
# they are computed again.


# %% tags=["export:logprobs"]
def tile_gradient(
    logits: Tensor, targets: Tensor, entropy: Tensor, logsumexp: Tensor, slopes: tuple, head: OutputHead, temperature
) -> Tensor:
    """Gradient of the loss to ``hidden @ weight.T + bias`` for one tile, ``[n, v]``; ``logits`` are used up (section 11).

    ``slopes`` are the derivatives of the loss to log-probs and entropy, ``[n]``; the second is None if it is zero.
    """
    if use_kernels(logits):
        bend = 0.0 if head.softcap is None else temperature / head.softcap
        dtype, factor = head.weight.dtype, head.scale / temperature
        return launch_gradient(logits, targets, entropy, logsumexp, slopes, factor=factor, bend=bend, dtype=dtype)
    d_logprob, d_entropy = slopes
    bend = None if head.softcap is None else 1 - (logits * (temperature / head.softcap)).square_()
    index, here = pick(targets, logits.shape[1])
    logp = logits.sub_(logsumexp[:, None])
    if d_entropy is None:
        gradient = logp.exp_().mul_(-d_logprob[:, None])
    else:
        factor = (logp.clamp_(min=FLOOR) + entropy[:, None]).mul_(d_entropy[:, None]).add_(d_logprob[:, None])
        gradient = factor.mul_(logp.exp_()).neg_()
    gradient.scatter_add_(1, index, torch.where(here, d_logprob, 0.0)[:, None])
    if bend is not None:
        gradient.mul_(bend)
    return gradient if head.scale == temperature else gradient.mul_(head.scale / temperature)


# %% [markdown]
# On a GPU the same two steps are a small kernel each, written in Triton: torch would read and write the tile in memory
# once for every operation in them, and at that speed a pass over the tile takes as long as the matrix product that made
# it. The products stay with cuBLAS. One program of the first kernel walks along one row of the tile; one program of the
# second turns one block of a row into gradient, in the number format that the next product wants. Without Triton or
# without CUDA the functions above do the work.


# %% tags=["export:kernels"]
triton = importlib.import_module("triton") if importlib.util.find_spec("triton") else None
tl = importlib.import_module("triton.language") if triton else None
constexpr = tl.constexpr if triton else None
BLOCK = 1024


def kernel(function: Callable) -> Callable:
    """``triton.jit`` where there is Triton."""
    return triton.jit(function) if triton else function


def use_kernels(logits: Tensor) -> bool:
    """Whether a tile of logits goes through Triton: it is on a GPU, in float32, and Triton is installed (section 11)."""
    return triton is not None and logits.is_cuda and logits.dtype == torch.float32


@kernel
def fold_kernel(logits, targets, sums, stride, width, BLOCK: constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    m, s, u = tl.load(sums + row), tl.load(sums + stride + row), tl.load(sums + 2 * stride + row)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        z = tl.load(logits + columns, mask=inside, other=-float("inf"))
        higher = tl.maximum(tl.maximum(m, tl.max(z, 0)), -3.4e38)
        drop, below = m - higher, z - higher
        drop, below = tl.where(drop < -1e4, -1e4, drop), tl.where(below < -1e4, -1e4, below)  # FLOOR
        shrink, terms = tl.exp(drop), tl.exp(below)
        u = (u + s * drop) * shrink + tl.sum(below * terms, 0)
        s = s * shrink + tl.sum(terms, 0)
        m = higher
    tl.store(sums + row, m)
    tl.store(sums + stride + row, s)
    tl.store(sums + 2 * stride + row, u)
    if (target >= 0) & (target < width):
        tl.store(sums + 3 * stride + row, tl.load(logits + target))


def launch_fold(logits: Tensor, targets: Tensor, sums: Tensor) -> None:
    """`fold` in one pass over a contiguous float32 tile ``[n, v]``; arguments as there (section 11)."""
    rows, width = logits.shape
    if rows:
        fold_kernel[(rows,)](logits, targets.contiguous(), sums, sums.stride(0), width, BLOCK=BLOCK)


@kernel
def gradient_kernel(
    logits,
    gradient,
    targets,
    entropy,
    logsumexp,
    d_logprobs,
    d_entropy,
    width,
    factor,
    bend,
    HAS_ENTROPY: constexpr,
    BLOCK: constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    z = tl.load(logits + row * width + columns, mask=inside, other=0.0)
    z = tl.where(z < -1e30, -1e30, z)  # 0 times -inf is not a number
    logp = z - tl.load(logsumexp + row)
    d_logprob = tl.load(d_logprobs + row)
    slope = d_logprob
    if HAS_ENTROPY:
        slope += tl.load(d_entropy + row) * (logp + tl.load(entropy + row))
    result = tl.where(columns == tl.load(targets + row), d_logprob, 0.0) - slope * tl.exp(logp)
    result *= factor * (1 - z * bend * z * bend)
    tl.store(gradient + row * width + columns, result.to(gradient.dtype.element_ty), mask=inside)


def launch_gradient(
    logits: Tensor, targets: Tensor, entropy: Tensor, logsumexp: Tensor, slopes: tuple, *, factor, bend, dtype
) -> Tensor:
    """`tile_gradient` in one pass over a contiguous float32 tile ``[n, v]``, returned in ``dtype`` (section 11).

    ``factor`` is scale / temperature; ``bend`` is temperature / softcap, 0 without a cap; other arguments as there.
    """
    rows, width = logits.shape
    gradient = torch.empty_like(logits, dtype=dtype)
    if rows:
        d_logprobs, d_entropy = slopes
        per_row = [x.contiguous() for x in (targets, entropy, logsumexp, d_logprobs)]
        last = per_row[-1] if d_entropy is None else d_entropy.contiguous()
        grid, options = (rows, triton.cdiv(width, BLOCK)), {"HAS_ENTROPY": d_entropy is not None, "BLOCK": BLOCK}
        gradient_kernel[grid](logits, gradient, *per_row, last, width, float(factor), float(bend), **options)
    return gradient


# %% [markdown]
# Two operators are made of these pieces. The first returns log-probs and entropies and knows nothing of the loss; in
# the backward pass each tile is computed a second time. That costs four products of size $NDV$ where materialised logits
# cost three, and no memory beyond a tile and the gradients themselves.
#
# Tiles of the vocabulary are the outer loop, blocks of tokens the inner one: so each piece of $W$ is read once, and its
# gradient stays in the cache until it is complete. How large should a tile be? Large enough that the matrix products run
# at full speed, small enough that the sums after them find the logits still in the cache. Measured on one core with
# $D = 1024$, relative to the four products on whole matrices:
#
# | tokens × vocabulary | 1024 × 4096 | 512 × 4096 | 1024 × 2048 | 512 × 2048 | 1024 × 1024 | 256 × 1024 |
# |---|---|---|---|---|---|---|
# | time | 1.11 | 1.11 | 1.01 | 1.04 | 1.01 | 1.12 |


# %% tags=["export:logprobs"]
def tile_shape(vocabulary: int) -> tuple[int, int]:
    """Tokens and vocabulary entries of one tile (section 11)."""
    return 1024, min(vocabulary, 2048)


def pieces(total: int, size: int) -> list[slice]:
    """Consecutive slices of at most ``size`` that cover ``range(total)``."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


# %% [markdown]
# The gradient of a tile, $g$ in `[n, v]`, then has two places to go: $gW$ to the hidden states of its $n$ tokens, and
# $g^\top h$ to the $v$ rows of the head. Both are sums, over the tiles and over the tokens, and are kept in float32: in
# bfloat16, a small term added to a large sum is lost. What is frozen is not computed.


# %% tags=["export:logprobs"]
class Gradients:
    """The gradients that are wanted to hidden states, weight and bias, summed in at least float32 (section 11)."""

    def __init__(self, hidden: Tensor, head: OutputHead, wanted: tuple[bool, ...]):
        self.hidden, self.head = hidden, head
        dtype = at_least_float32(head.weight.dtype)
        self.inputs = [x if want else None for x, want in zip((hidden, head.weight, head.bias), wanted)]
        self.sums = [None if x is None else torch.zeros_like(x, dtype=dtype) for x in self.inputs]

    def add(self, gradient: Tensor, rows: slice, columns: slice) -> None:
        """Add what follows from the ``gradient [n, v]`` of one tile."""
        d_hidden, d_weight, d_bias = self.sums
        if d_hidden is not None:
            add_product(d_hidden[rows], gradient, self.head.weight[columns])
        if d_weight is not None:
            add_product(d_weight[columns], gradient.T, self.hidden[rows])
        if d_bias is not None:
            d_bias[columns] += gradient.sum(0)

    def finished(self) -> list[Tensor | None]:
        """Each sum in the dtype of its input, None where it is not wanted."""
        return [None if x is None else total.to(x.dtype) for x, total in zip(self.inputs, self.sums)]


# %% [markdown]
# The first operator. PyTorch's autograd is told what to keep between the passes (the inputs and two numbers per token)
# and how to go back.


# %% tags=["export:logprobs"]
class FusedLogprobs(torch.autograd.Function):
    """`fused_logprobs` for autograd: a tile's logits are computed in the forward pass and again in the backward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, softcap, scale):
        head, sums = OutputHead(weight, bias, scale, softcap), empty_sums(hidden)
        tokens, width = tile_shape(len(weight))
        for columns in pieces(len(weight), width):
            tile = head.tile(columns)
            for rows in pieces(len(hidden), tokens):
                logits = tile_logits(hidden[rows], tile, temperature)
                fold(logits, targets[rows] - columns.start, sums[:, rows])
        logprobs, entropy, logsumexp = summary(sums)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, logsumexp)
        ctx.temperature, ctx.softcap, ctx.scale = temperature, softcap, scale
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_logprobs, d_entropy):
        hidden, weight, bias, targets, entropy, logsumexp = ctx.saved_tensors
        d_logprobs = torch.zeros_like(entropy) if d_logprobs is None else d_logprobs
        head = OutputHead(weight, bias, ctx.scale, ctx.softcap)
        gradients = Gradients(hidden, head, ctx.needs_input_grad[:3])
        tokens, width = tile_shape(len(weight))
        for columns in pieces(len(weight), width):
            tile = head.tile(columns)
            for rows in pieces(len(hidden), tokens):
                logits = tile_logits(hidden[rows], tile, ctx.temperature)
                slopes = d_logprobs[rows], None if d_entropy is None else d_entropy[rows]
                arguments = targets[rows] - columns.start, entropy[rows], logsumexp[rows], slopes
                gradients.add(tile_gradient(logits, *arguments, tile, ctx.temperature), rows, columns)
        return *gradients.finished(), None, None, None, None


def check_tokens(hidden: Tensor, weight: Tensor, targets: Tensor, temperature=1.0, bias=None, softcap=None) -> None:
    """ValueError unless hidden is ``[N, D]``, weight ``[V, D]``, bias ``[V]``, targets ``[N]`` within ``[0, V)``."""
    if hidden.ndim != 2 or hidden.shape[1:] != weight.shape[1:] or hidden.shape[:1] != targets.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (hidden, weight, targets))
        raise ValueError(f"hidden, weight and targets have shapes {shapes}; expected [N, D], [V, D] and [N]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}, the vocabulary has {len(weight)} tokens")
    if not temperature > 0 or (softcap is not None and not softcap > 0):
        raise ValueError(
            f"temperature is {temperature}, softcap {softcap}; choose them above 0 (softcap None is no cap)"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets are {targets.dtype}, expected int64")
    if len(targets) and not (targets.min() >= 0 and targets.max() < len(weight)):
        raise ValueError(
            f"targets run from {targets.min()} to {targets.max()}, the vocabulary has {len(weight)} tokens"
        )


def promoted(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the widest of their dtypes."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return [x.to(dtype) for x in tensors]


# %% [markdown]
# What the reader calls checks its arguments first, since a target outside of the vocabulary would be in no tile and its
# log-prob silently wrong. Autocast is switched off inside: it would put the products back into half precision.


# %% tags=["export:logprobs"]
def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution in nats, both ``[N]``, without the logits (section 11).

    ``hidden`` float ``[N, D]``, ``weight`` float ``[V, D]``, ``targets`` int64 ``[N]``, ``bias`` float ``[V]``; the other
    arguments as in `OutputHead`. Results are float32 (float64 stays) for any input, and both can be differentiated, once,
    with respect to hidden, weight and bias. N may be 0. ValueError for shapes that do not fit, targets outside
    ``[0, V)``, and a temperature or softcap that is not positive. Milakov and Gimelshein, 2018; Wijmans et al., 2024, who fuse the cross-entropy alone.
    """
    check_tokens(hidden, weight, targets, temperature, bias, softcap)
    hidden, weight = promoted(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        return FusedLogprobs.apply(hidden, weight, bias, targets, temperature, softcap, scale)


# %% [markdown]
# The second operator needs to know the loss, and is faster. If the loss is a sum of terms, one per token, each made of
# that token's log-prob and entropy, then a block of tokens can be finished at once: logits, log-probs, the derivatives
# $\partial L/\partial\log p_y$ and $\partial L/\partial H$ of its tokens, gradients, next block. Nothing is computed
# twice. All gradients are ready when the forward pass ends, and the backward pass only hands them out. (Liger does this for
# several losses, each written out by hand.)
#
# The policy loss below is such a sum, because old log-probs, advantages and weights of the step are known beforehand. No
# formula is written twice for it: the derivatives of $L$ with respect to the $n$ log-probs and entropies of a block are
# autograd's, and only the way from there to the parameters is ours.


# %% tags=["export:logprobs"]
def token_slopes(token_loss: Callable, logprobs: Tensor, entropy: Tensor, rows: slice) -> tuple[Tensor, tuple]:
    """``token_loss`` of some tokens, a scalar, and its derivatives to their log-probs and entropies, ``[n]``."""
    with torch.enable_grad():
        leaves = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
        loss = token_loss(*leaves, rows)
        if not (isinstance(loss, Tensor) and loss.ndim == 0):
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ValueError(f"token_loss returned {got}; return a scalar tensor, the sum over its tokens")
        slopes = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else (None, None)
    d_logprobs, d_entropy = slopes
    if d_logprobs is None and d_entropy is None:
        raise ValueError("token_loss does not depend on the log-probs or entropies that it is given")
    return loss.detach(), (torch.zeros_like(logprobs) if d_logprobs is None else d_logprobs, d_entropy)


# %% [markdown]
# The second operator's loop has the same parts in another order.


# %% tags=["export:logprobs"]
class FusedTokenLoss(torch.autograd.Function):
    """`fused_token_loss` for autograd: the forward pass computes the gradients, the backward pass returns them."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, token_loss, temperature, softcap, scale, differentiate):
        head = OutputHead(weight, bias, scale, softcap)
        gradients = Gradients(hidden, head, [differentiate and need for need in ctx.needs_input_grad[:3]])
        loss, sums = hidden.new_zeros((), dtype=at_least_float32(hidden.dtype)), empty_sums(hidden)
        results = torch.empty_like(sums[:2])
        tokens, width = loss_tile_shape(len(weight))
        for rows in pieces(len(hidden), tokens):
            tiles = []
            for columns in pieces(len(weight), width):
                tiles.append((columns, tile_logits(hidden[rows], head.tile(columns), temperature)))
                fold(tiles[-1][1], targets[rows] - columns.start, sums[:, rows])
            logprobs, entropy, logsumexp = summary(sums[:, rows])
            results[0, rows], results[1, rows] = logprobs, entropy
            term, slopes = token_slopes(token_loss, logprobs, entropy, rows)
            loss += term
            for columns, logits in tiles:
                arguments = targets[rows] - columns.start, entropy, logsumexp, slopes, head, temperature
                gradients.add(tile_gradient(logits, *arguments), rows, columns)
        ctx.gradients = gradients.finished()
        ctx.mark_non_differentiable(results)
        return loss, results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_loss, _):
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of fused_token_loss were handed out by the first backward pass")
        if d_loss != 1:
            gradients = [None if gradient is None else gradient.mul_(d_loss) for gradient in gradients]
        return *gradients, None, None, None, None, None, None


# %% [markdown]
# Here the blocks of tokens are the outer loop, and all logits of a block are held at once. A large block reads and writes
# the head's gradient less often: against the three products, blocks of 128 tokens took 1.17 times as long, of 160 or 512
# tokens 1.12 to 1.14 times. A small block holds less: 160 tokens of a vocabulary of 151,936 are 93 MiB. So 64 MiB of
# logits, but at least 160 tokens.


# %% tags=["export:logprobs"]
def loss_tile_shape(vocabulary: int) -> tuple[int, int]:
    """Tokens of one block of `fused_token_loss`, more if the vocabulary is small, and entries of one tile (section 11)."""
    return max(160, 2**24 // vocabulary), min(vocabulary, 2048)


def fused_token_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_loss: Callable[[Tensor, Tensor, slice], Tensor],
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A loss that is a sum over tokens, and the log-probs and entropies it was made of, without the logits (section 11).

    ``token_loss(logprobs [n], entropy [n], rows)`` gives the summed loss of the tokens ``rows``, a slice of ``range(N)``,
    differentiable by autograd; other parameters that it uses get no gradient. ValueError if it is not a scalar tensor made
    of log-probs or entropies. Returns the loss (scalar), log-probs ``[N]`` and entropies ``[N]``, the last two detached,
    in float32 (float64 stays). The gradients are computed in this call and can be handed out once. Other arguments and
    errors as in `fused_logprobs`. N may be 0.
    """
    check_tokens(hidden, weight, targets, temperature, bias, softcap)
    hidden, weight = promoted(hidden, weight)
    differentiate = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        arguments = hidden, weight, bias, targets, token_loss, temperature, softcap, scale, differentiate
        loss, (logprobs, entropy) = FusedTokenLoss.apply(*arguments)
    return loss, logprobs, entropy


# %% [markdown]
# For a model, then: the backbone is called for hidden states, the head is not called at all, and only positions that the
# mask selects are projected. Prompts and padding never meet the vocabulary.


# %% tags=["export:logprobs"]
def hidden_states(model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor) -> Tensor:
    """What the output head of ``model`` sees for every completion token, ``[B, T, D]`` (section 11).

    Aligned like `completion_logits`: entry ``[i, t]`` belongs to the distribution of token t. Arguments as there.
    """
    inputs = completion_inputs(prompt_ids, prompt_mask, completion_ids)
    states = trunk(model)(**inputs, use_cache=False).last_hidden_state
    return states[:, prompt_ids.shape[1] - 1 : -1]


# %% [markdown]
# This one is for every log-prob of the trainer: the policy's, the old policy's and the reference's.


# %% tags=["export:logprobs"]
def completion_logprobs(
    model,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-prob of every completion token and entropy of its distribution, float32 ``[B, T]``, 0 off the mask (section 11).

    ``mask`` bool ``[B, T]``; the other arguments as in `completion_logits`. Equals `token_logprobs` on the mask; both results
    can be differentiated. Errors as in `output_head` and `fused_logprobs`.
    """
    head, hidden = output_head(model), hidden_states(model, prompt_ids, prompt_mask, completion_ids)
    flat = fused_logprobs(hidden[mask], head.weight, completion_ids[mask], **head.settings(temperature))
    return tuple(unflatten(values, mask) for values in flat)


# %% [markdown]
# And this one for the policy's loss, in one pass.


# %% tags=["export:logprobs"]
def completion_loss(
    model,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    mask: Tensor,
    token_loss: Callable[[Tensor, Tensor, slice], Tensor],
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """A loss that is a sum over the tokens of ``mask``; log-probs and entropies ``[B, T]``, detached (section 11).

    ``token_loss(logprobs [n], entropy [n], rows)`` as in `fused_token_loss`: ``rows`` is a slice of the flat list
    ``values[mask]`` of tokens, row by row. Other arguments as in `completion_logprobs`.
    """
    head, hidden = output_head(model), hidden_states(model, prompt_ids, prompt_mask, completion_ids)
    arguments = hidden[mask], head.weight, completion_ids[mask], token_loss
    loss, *flat = fused_token_loss(*arguments, **head.settings(temperature))
    return loss, *(unflatten(values, mask) for values in flat)


def unflatten(values: Tensor, mask: Tensor) -> Tensor:
    """Put ``values [n]`` where ``mask [B, T]`` is True, row by row, and 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)


# %% [markdown]
# A model with a head of another kind would get log-probs that look right and are not. The trainer asks once, before the
# first step:


# %% tags=["export:logprobs"]
def require_output_head(model) -> None:
    """ValueError unless `output_head` reproduces the model's log-probs of a whole vocabulary (section 11).

    A forward pass over three tokens. They must agree within 0.001 nats, in half precision within 3 % of the largest logit.
    """
    head = output_head(model)
    ids = torch.arange(3, device=head.weight.device)[None] % len(head.weight)
    inputs = ids[:, :2], torch.ones_like(ids[:, :2], dtype=torch.bool), ids[:, 2:]
    with torch.no_grad():
        expected = completion_logits(model, *inputs)[0]
        found = tile_logits(hidden_states(model, *inputs)[0], head, temperature=1.0)
    far = (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()
    half = head.weight.dtype in (torch.bfloat16, torch.float16)
    if not far <= (0.03 * expected.abs().max() if half else 1e-3):
        raise ValueError(
            f"{type(model).__name__}: log-probs from hidden states and output head differ from the model's own by up to "
            f"{far:.2g} nats; does it transform its logits in a way that output_head does not know?"
        )


# %% [markdown]
# Claim 11.2: fused equals materialised. In float64, for values, entropies and all gradients, with a temperature and
# a vocabulary that no tile size divides; and for the warm-started policy, over its parameters, in float32.

# %%
generator = torch.Generator().manual_seed(0)
N, D, V, tau = 300, 32, 5003, 0.6
hidden, weight = (torch.randn(n, D, generator=generator, dtype=torch.float64).requires_grad_() for n in (N, V))
targets, slopes = torch.randint(V, (N,), generator=generator), torch.randn(2, N, generator=generator).double()
logp = (hidden @ weight.T / tau).log_softmax(-1)
expected = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
expected += torch.autograd.grad((slopes[0] * expected[0] + slopes[1] * expected[1]).sum(), (hidden, weight))

found = fused_logprobs(hidden, weight, targets, temperature=tau)
found += torch.autograd.grad((slopes[0] * found[0] + slopes[1] * found[1]).sum(), (hidden, weight))
loss, *at_once = fused_token_loss(
    hidden, weight, targets, lambda lp, h, rows: (slopes[0, rows] * lp + slopes[1, rows] * h).sum(), temperature=tau
)
at_once += torch.autograd.grad(loss, (hidden, weight))
for name, a, b, c in zip(("log-probs", "entropies", "to hidden", "to weight"), expected, found, at_once, strict=True):
    print(f"{name:10} largest difference {(a - b).abs().max():.0e} recomputed, {(a - c).abs().max():.0e} at once")
    assert max((a - b).abs().max(), (a - c).abs().max()) < 1e-10

# %%
batch = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids
parameters = list(model.parameters())
fused, _ = completion_logprobs(model, *batch, rollouts.mask, tau)
exact = torch.where(rollouts.mask, token_logprobs(model, *batch, tau), 0.0)
pairs = zip(*(torch.autograd.grad(x.sum(), parameters) for x in (exact, fused)), strict=True)
assert (fused - exact).abs().max() < 1e-5 and all((a - b).norm() < 1e-5 * a.norm() for a, b in pairs)

# %% [markdown]
# Claim 11.1, the other half: what the two ways need, measured side by side. Each runs in a process of its own, forward
# and backward for 8,192 tokens, hidden size 64 and a vocabulary of 16,384, and reports how far its peak memory grew.

# %%
program = """
import re, resource, sys, torch
from pathlib import Path
from lmrl.logprobs import fused_logprobs, fused_token_loss
from lmrl.policy import gather_logprobs

hidden, weight = torch.randn(8192, 64).requires_grad_(), torch.randn(16384, 64).requires_grad_()
targets = torch.randint(16384, (8192,))
ways = {
    "materialised": lambda h, t: gather_logprobs(h @ weight.T, t).sum(),
    "recomputed": lambda h, t: fused_logprobs(h, weight, t)[0].sum(),
    "at once": lambda h, t: fused_token_loss(h, weight, t, lambda logprobs, entropy, rows: logprobs.sum())[0],
}

def peak():  # bytes; Linux hands getrusage's figure down from parent to child, so there we ask the kernel for our own
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

ways[sys.argv[1]](hidden[:2], targets[:2]).backward()
before = peak()
ways[sys.argv[1]](hidden, targets).backward()
print(peak() - before)
"""
ways = ("materialised", "recomputed", "at once")
peaks = {way: int(subprocess.check_output([sys.executable, "-c", program, way])) for way in ways}
print({way: f"{peak / 2**20:.0f} MiB" for way, peak in peaks.items()}, f"logits: {8192 * 16384 * 4 / 2**20:.0f} MiB")
assert peaks["materialised"] > 1.9 * 8192 * 16384 * 4
assert max(peaks["recomputed"], peaks["at once"]) < 0.5 * 8192 * 16384 * 4

# %% [markdown]
# The materialised way holds the logits, their log-softmax and, going back, a gradient of the same size. What the others
# cost in time is in `benchmarks/logprobs.py`, next to the matrix products that nobody can do without.
#
# ## The step, in shapes
#
# Everything is in place. This is one whole step of GRPO with a KL penalty, on 16 prompts with 8 completions each, in the
# order of the table at the top. Every shape that it names is asserted.

# %%
prompts = [tokenizer(problem.prompt).input_ids for problem in train[:16]]
answers = [problem.answer for problem in train[:16]]
N, G, cap, beta = 16, 8, 4, 0.02
learner, reference = copy.deepcopy(model), model
sampler = TorchSampler(learner, [tokenizer.eos_token_id], tokenizer.pad_token_id, cap)
optimizer = torch.optim.AdamW(learner.parameters(), lr=1e-4, weight_decay=0.0)

clock = [time.perf_counter()]
rollouts = sampler.generate(prompts, G, seed=1)
B, P, T = len(rollouts), rollouts.prompt_ids.shape[1], rollouts.mask.shape[1]
assert B == N * G and T <= cap
assert rollouts.prompt_ids.shape == rollouts.prompt_mask.shape == (B, P)
assert rollouts.completion_ids.shape == rollouts.mask.shape == rollouts.sampler_logprobs.shape == (B, T)
clock.append(time.perf_counter())

texts = completion_texts(tokenizer, rollouts.completion_ids, rollouts.mask.sum(1), rollouts.truncated)
rewards = torch.tensor(addition_reward([], texts, answer=[answers[g] for g in rollouts.group.tolist()]))
advantages = group_advantages(rewards, rollouts.group)
assert rewards.shape == advantages.shape == rollouts.truncated.shape == rollouts.group.shape == (B,)
rollouts = replace(rollouts, rewards=rewards, advantages=advantages[:, None].expand(B, T))
clock.append(time.perf_counter())

batch = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, rollouts.mask
with torch.no_grad():
    old_logprobs, entropies = completion_logprobs(learner, *batch)
    ref_logprobs, _ = completion_logprobs(reference, *batch)
assert old_logprobs.shape == ref_logprobs.shape == entropies.shape == (B, T)
rollouts = replace(rollouts, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
clock.append(time.perf_counter())

weights = token_weights(rollouts.mask, "dapo", cap)
assert weights.shape == (B, T) and abs(weights.sum() - 1) < 1e-5
parts, losses = list(micro_batches(rollouts, weights, max_tokens=32 * (P + cap))), []
for piece, piece_weights in parts:
    logprobs, _ = completion_logprobs(learner, piece.prompt_ids, piece.prompt_mask, piece.completion_ids, piece.mask)
    assert logprobs.shape == piece.old_logprobs.shape == piece_weights.shape == (len(piece), piece.mask.shape[1])
    loss = policy_loss(
        logprobs, piece.old_logprobs, piece.advantages, piece_weights, beta=beta, ref_logprobs=piece.ref_logprobs
    )
    assert loss.shape == ()
    loss.backward()
    losses.append(loss.item())
optimizer.step()
clock.append(time.perf_counter())
print(f"N {N}, G {G}, B {B}, P {P}, T {T}; {int(rollouts.mask.sum())} chosen tokens in {len(parts)} micro-batches")
print(f"mean reward {rewards.mean():.3f}, entropy {masked_mean(entropies, rollouts.mask):.3f} nats per token")

# %% [markdown]
# What can be known beforehand is checked. At the first step all ratios are 1 and the reference is the policy itself, so
# that the loss is minus the weighted mean of the advantages, whatever the cut. The sampler's log-probs, found one token at a
# time with a cache, are the trainer's, found in one pass without it. And afterwards the policy has moved.

# %%
assert abs(sum(losses) + (weights * rollouts.advantages).sum()) < 1e-5
assert (old_logprobs - rollouts.sampler_logprobs)[rollouts.mask].abs().max() < 1e-4
with torch.no_grad():
    new_logprobs, _ = completion_logprobs(learner, *batch)
moved = masked_mean(kl_k3(old_logprobs, new_logprobs), rollouts.mask)  # the samples are from the old policy
print(f"KL of the old policy from the new one, estimated: {moved:.1e} nats per token")
assert moved > 0

# %% [markdown]
# ## Where the time goes
#
# The same step, timed by its four parts:

# %%
seconds = dict(zip(("generate", "grade", "score", "update"), np.diff(clock), strict=True))
for name, value in seconds.items():
    print(f"{name:8} {1000 * value:6.1f} ms {value / sum(seconds.values()):4.0%}")
assert math.isclose(sum(seconds.values()), clock[-1] - clock[0]) and min(seconds.values()) > 0

# %% [markdown]
# **Claim 11.5** says that generation dominates a synchronous step, one that trains only after the last completion has
# ended. With answers of at most four tokens it need not, and the numbers above say what it is here. The claim is about *long*
# completions, and there are two reasons for it.
#
# Generating $T$ tokens takes $T$ passes through the model, one after the other, each for a single token per row. Scoring and
# its gradient take one pass for all $T$. The arithmetic is of the same order, but a pass has a price of its own: here the
# calls, on a GPU above all the weights, which are read from memory once per pass. The fewer rows share it, the worse.
#
# And lengths have a tail. Rows that have ended leave the batch, and the last ones run almost alone, at nearly the price of
# a full batch.
#
# So we measure: 16 rows that never stop, for several length caps, against one forward and backward pass over the same
# tokens.

# %%
caps = [4, 16, 64, 128]
untrained = build_policy(tokenizer, max_positions=256)
seconds = {"generate": [], "update": []}
for length in caps:
    endless = TorchSampler(untrained, [len(tokenizer)], tokenizer.pad_token_id, length)  # a stop id that nobody samples
    tries = []
    for seed in range(2):
        marks = [time.perf_counter()]
        drawn = endless.generate(prompts, 1, seed)
        marks.append(time.perf_counter())
        logprobs, _ = completion_logprobs(
            untrained, drawn.prompt_ids, drawn.prompt_mask, drawn.completion_ids, drawn.mask
        )
        (-logprobs.mean()).backward()
        marks.append(time.perf_counter())
        tries.append(np.diff(marks))
    assert drawn.mask.shape == (16, length) and drawn.mask.all()
    best = np.min(tries, axis=0)
    seconds["generate"].append(best[0])
    seconds["update"].append(best[1])
    print(f"{length:3} tokens: generation {best[0]:.3f} s, update {best[1]:.3f} s, share {best[0] / best.sum():.0%}")


# %% tags=["export:figures"]
def time_and_tail(caps: list[int], seconds: dict[str, list[float]], running: Tensor):
    """Left: seconds of generation and update against completion length. Right: rows still ``running`` at each token."""
    figure, (left, right) = new_figure(1, 2, height=3.2)
    for name, color in (("generate", COLORS["policy"]), ("update", COLORS["advantage"])):
        left.plot(caps, seconds[name], "o-", color=color)
        left.text(caps[-1] * 1.15, seconds[name][-1], name, color=color, va="center")
    decades = [10**power for power in range(-4, 5)]
    lowest, highest = min(seconds["update"]), max(seconds["generate"])
    left.set(xscale="log", yscale="log", xlabel="completion length [tokens]", ylabel="time [s]")
    left.set_yticks(decades, [f"{decade:g}" for decade in decades])
    left.set_ylim(max(d for d in decades if d < lowest), min(d for d in decades if d > highest))
    left.set_xlim(caps[0] / 1.3, caps[-1] * 5)
    left.set_xticks(caps, caps)
    left.minorticks_off()
    left.set_title("16 rows of one length", loc="left")
    right.fill_between(range(len(running)), running, step="post", color=COLORS["policy"], alpha=0.4)
    used = running.sum() / (len(running) * running[0])
    right.text(len(running) * 0.3, running[0] * 0.8, f"on average {used:.0%} are running")
    right.set(xlabel="token", ylabel="rows still running", ylim=(0, None))
    right.set_title("256 rows of different lengths", loc="left")
    return figure


# %%
lengths = (
    torch.empty(256).exponential_(1 / 1000, generator=torch.Generator().manual_seed(0)).ceil().long().clamp(max=4096)
)
show(
    time_and_tail(caps, seconds, length_mask(lengths, 4096).sum(0)),
    caption="Left, measured: generation takes a pass per token, the update one pass for all, and the gap widens. "
    "Right: 256 completions with a mean of 1,000 tokens and a cap of 4,096; most of the time a few stragglers run.",
    alt="Left, time against completion length on log axes; the line of generation lies above that of the update and rises "
    "faster. Right, the number of running rows falls from 256 steeply, with a long low tail up to 4096 tokens.",
)

# %% [markdown]
# The trainer of section 16 reports the share of every step as `generation_share`. When it nears 1, the obvious
# remedy is to train on slightly older completions while new ones are being written. Then the policy that wrote them is not
# the one that is trained, and the ratio of section 10 has work to do from the first pass on.
#
# ## Exercises
#
# **1. Predict, then run.** A step has two answers, of 2 and of 6 tokens, with a length cap of 8. What share of the loss does
# the *longer* answer get under each loss type? Three fractions.

# %% tags=["exercise"]
prediction = {"grpo": None, "dapo": None, "dr_grpo": None}

# %% tags=["solution"]
prediction = {"grpo": 1 / 2, "dapo": 6 / 8, "dr_grpo": 6 / 16}

# %% tags=["check"]
import torch

from lmrl.loss import token_weights
from lmrl.policy import length_mask

for kind, guess in prediction.items():
    share = token_weights(length_mask(torch.tensor([2, 6]), 8), kind, 8)[1].sum().item()
    assert guess is not None, "write down a prediction first"
    assert abs(guess - share) < 1e-6, f"{kind}: the longer answer gets {share}"

# %% [markdown]
# **2. Write it.** An engine returns rows of ids, filled up with the pad id, which is also one of the stop ids. It does not
# return lengths. Make the mask: every token up to the *first* stop token, and that one too; all of a row without one.

# %% tags=["exercise"]
import torch


def mask_up_to_stop(ids, stop_ids):
    """Bool [B, T] from ids int64 [B, T]."""
    raise NotImplementedError


# %% tags=["solution"]
import torch


def mask_up_to_stop(ids, stop_ids):
    """Bool [B, T] from ids int64 [B, T]."""
    stopped = torch.isin(ids, torch.tensor(stop_ids))
    return stopped.cumsum(1) - stopped.long() == 0  # no stop token *before* this one


# %% tags=["check"]
from lmrl.policy import build_policy, build_tokenizer
from lmrl.rollout import TorchSampler

ids = torch.tensor([[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2], [5, 7, 2, 2, 2]])
assert mask_up_to_stop(ids, [2]).sum(1).tolist() == [3, 5, 1, 3], "the stop token itself was chosen"
assert mask_up_to_stop(ids, [2, 7]).sum(1).tolist() == [3, 3, 1, 2], "several stop ids"
small = TorchSampler(build_policy(build_tokenizer()), [2, 7], 2, 6)
sampled = small.generate([[1, 5], [1, 6, 7]], 32, seed=0)
padded = torch.where(sampled.mask, sampled.completion_ids, 2)
assert torch.equal(mask_up_to_stop(padded, [2, 7]), sampled.mask)

# %% [markdown]
# **3. Find the bug.** This accumulates the gradient of the token-mean loss over micro-batches. With a single micro-batch it
# is right, and with several it looks reasonable: each loss is a mean, and so is their average. The check computes the
# gradient of the mean over all tokens of the step, in one piece.

# %% tags=["exercise"]
import torch

from lmrl.batch import micro_batches
from lmrl.loss import policy_loss, token_weights
from lmrl.policy import token_logprobs


def step_gradient(model, rollouts, max_tokens):
    """The gradient of one step, accumulated over micro-batches of `max_tokens`: a flat tensor."""
    model.zero_grad()
    cut = list(micro_batches(rollouts, rollouts.mask.float(), max_tokens))
    for piece, _ in cut:
        weights = token_weights(piece.mask, "dapo", 6)
        logprobs = token_logprobs(model, piece.prompt_ids, piece.prompt_mask, piece.completion_ids)
        (policy_loss(logprobs, logprobs.detach(), piece.advantages, weights) / len(cut)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# %% tags=["solution"]
import torch

from lmrl.batch import micro_batches
from lmrl.loss import policy_loss, token_weights
from lmrl.policy import token_logprobs


def step_gradient(model, rollouts, max_tokens):
    """The gradient of one step, accumulated over micro-batches of `max_tokens`: a flat tensor."""
    model.zero_grad()
    weights = token_weights(rollouts.mask, "dapo", 6)  # of the whole step, before it is cut
    for piece, piece_weights in micro_batches(rollouts, weights, max_tokens):
        logprobs = token_logprobs(model, piece.prompt_ids, piece.prompt_mask, piece.completion_ids)
        policy_loss(logprobs, logprobs.detach(), piece.advantages, piece_weights).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# %% tags=["check"]
from dataclasses import replace

from lmrl.policy import build_policy, build_tokenizer
from lmrl.rollout import TorchSampler

tiny = build_policy(build_tokenizer()).double()
sampled = TorchSampler(tiny, [2, 7, 9], 0, 6).generate([[1, 5], [1, 6, 7]], 8, seed=0)
noise = torch.randn(16, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
sampled = replace(sampled, advantages=noise.expand(sampled.mask.shape))
scored = token_logprobs(tiny, sampled.prompt_ids, sampled.prompt_mask, sampled.completion_ids)
mean = (scored * sampled.advantages)[sampled.mask].sum() / sampled.mask.sum()
oracle = -torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(tiny.parameters()))])
for max_tokens in (1000, 30, 8):
    far = ((step_gradient(tiny, sampled, max_tokens) - oracle).norm() / oracle.norm()).item()
    assert far < 1e-6, f"micro-batches of {max_tokens} tokens: the gradient is off by {far:.0%}"

# %% [markdown]
# **What is still missing.** The step knows its tensors, but not yet which models stand around it, what they cost in memory
# and how they are loaded: that is section 12. Section 16 puts these nine lines into a loop that saves and resumes, and section
# 14 corrects for an engine whose log-probs are not quite the trainer's.
