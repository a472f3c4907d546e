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
# # 1. Where supervision runs out
#
# **The question.** A supervised language model learns from text that somebody wrote. What is left to learn from when
# nobody wrote the answer, and all we can do is look at the model's own answer and say how good it was?
#
# In this section we build a small language model that adds two numbers, teach it from demonstrations until it is right
# nearly half of the time, and then take the demonstrations away. Everything it learns after that, in this course, it
# learns from a single number per answer. The model is tiny, but it is not a toy of its own kind: it is a
# `Qwen3ForCausalLM` with a fast tokenizer, so every function below works unchanged on a downloaded model.
#
# By the end of the section you have seen
#
# - that the supervised gradient is exact and speaks at every position (claim 1.1),
# - that one reward at the end speaks about the answer as a whole and about no token in particular (claim 1.2),
# - that a reward can discourage, which no demonstration can (claim 1.3).
#
# A numbered **claim** is checked twice: by an `assert` in the cell that follows it here, for the one example shown, and
# for many examples in `tests/test_claims_01.py` under the same number. It is the same in every section.

# %%
import hashlib
import inspect
import io
import json
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ipywidgets as widgets
import torch
import transformers
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn.functional import log_softmax
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# One style for all figures of the course: a colour means the same thing everywhere, text is large enough at notebook
# width, and the background is white so that a figure can be read in a dark theme too.

# %% tags=["export:figures.style"]
COLORS = {
    "policy": "#0072B2",
    "reward": "#009E73",
    "advantage": "#E69F00",
    "reference": "#6E6E6E",
    "error": "#CC3311",
}
STYLE = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "figure.dpi": 110,
    "savefig.dpi": 150,
}


def new_figure(nrows: int = 1, ncols: int = 1, height: float = 3.2, **options):
    """A figure 7.5 inches wide in the course's style, and its axes; ``options`` go to ``plt.subplots``."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(nrows, ncols, figsize=(7.5, height), layout="constrained", **options)
    plt.close(figure)
    return figure, axes


def show(figure: Figure, caption: str, alt: str) -> None:
    """Display ``figure`` in a notebook with alternative text, and its caption below it."""
    from IPython.display import Markdown, display

    display(figure, metadata={"image/png": {"alt": alt}})
    display(Markdown(f"*{caption}*"))


def png(figure: Figure) -> bytes:
    """The figure as a PNG, packed fast rather than small: what a slider waits for."""
    file = io.BytesIO()
    figure.savefig(file, dpi=110, pil_kwargs={"compress_level": 1})
    return file.getvalue()


def explore(draw: Callable[..., Figure], **controls) -> None:
    """Show ``draw(**values)`` below ipywidgets ``controls`` and draw it again whenever one of them changes.

    ``controls`` are widgets with a ``value``, one for each argument of ``draw``. The picture is replaced in place.
    """
    import ipywidgets as widgets
    from IPython.display import display

    # At its own size, as a static figure: a box would otherwise stretch it to the width of the window, and blur it.
    picture = widgets.Image(format="png", layout={"align_self": "flex-start", "max_width": "100%"})

    def update(_=None):
        picture.value = png(draw(**{name: control.value for name, control in controls.items()}))

    for control in controls.values():  # labels in one column and in full, and a slider long enough to aim with
        control.style.description_width, control.layout.width = "17em", "42em"
        control.observe(update, names="value")
    update()
    display(widgets.VBox([*controls.values(), picture]))


# %% [markdown]
# ## A task with a checkable answer
#
# The task is two-digit addition, written as text: the **prompt** $x$ is `12+34=`, the right **completion** is `46`
# followed by a special end-of-sequence token that we write `<eos>`. It has what we need and little else: the answer is
# a few tokens long, each token can be right or wrong, and a one-line program can tell whether the whole is right.


# %% tags=["export"]
@dataclass(frozen=True)
class Addition:
    """One addition problem: prompt ``"12+34="``, answer ``"46"`` (section 1)."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)


# %% [markdown]
# Some problems are held out: no one trains on them, they only measure. Since $b+a$ gives away $a+b$, the split is made
# over *unordered* pairs, and both orders go to the same side.


# %% tags=["export"]
def addition_problems(
    seed: int = 0, *, low: int = 10, high: int = 99, heldout_fraction: float = 0.1
) -> tuple[list[Addition], list[Addition]]:
    """All additions of two numbers in ``[low, high]``, split into (train, heldout) by unordered pair (section 1).

    Both orders of a pair are on the same side, so the held-out answers cannot be read off the training problems.
    """
    pairs = [(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]
    random.Random(seed).shuffle(pairs)
    cut = round(heldout_fraction * len(pairs))

    def both_orders(chosen):
        return [Addition(*pair) for a, b in chosen for pair in dict.fromkeys([(a, b), (b, a)])]

    return both_orders(pairs[cut:]), both_orders(pairs[:cut])


# %%
train, heldout = addition_problems(seed=0)
assert {frozenset((p.a, p.b)) for p in train}.isdisjoint(frozenset((p.a, p.b)) for p in heldout)
assert len(train) + len(heldout) == 90 * 90
print(f"{len(train)} training problems, {len(heldout)} held out, for example {heldout[0].prompt}{heldout[0].answer}")

# %% [markdown]
# ## Text as numbers
#
# A language model reads and writes **tokens**: integers that index a finite **vocabulary** of size $V$. Ours are
# single characters, plus three special tokens that must never be confused with one another:
#
# - `<pad>` fills up short rows so that a batch is a rectangle,
# - `<bos>` begins every prompt,
# - `<eos>` is what the model says when it is done.
#
# Many published models use one id for `<pad>` and `<eos>`. Then a mask that asks "is this id the pad id?" also removes
# the end-of-sequence token that the model chose, and stopping is never trained. We keep them distinct, and below we
# never ask that question anyway.

# %% tags=["export"]
ARITHMETIC_CHARACTERS = "0123456789+="


def build_tokenizer(characters: str = ARITHMETIC_CHARACTERS) -> PreTrainedTokenizerFast:
    """A fast tokenizer with one token per character and distinct ``<pad>`` 0, ``<bos>`` 1, ``<eos>`` 2 (section 1).

    Encoding puts exactly one ``<bos>`` in front. A character outside ``characters`` raises an exception.
    """
    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: i for i, token in enumerate(special + list(characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


# %%
tokenizer = build_tokenizer()
print(tokenizer("12+34=").input_ids, "→", repr(tokenizer.decode(tokenizer("12+34=").input_ids)))

# %% [markdown]
# ## The model
#
# A **language model** with parameters $\theta$ maps a prompt $x$ and the tokens so far $y_{<t}$ to a probability for
# every possible next token,
#
# $$p_\theta(v \mid x, y_{<t}) = \frac{e^{z_v}}{\sum_{u} e^{z_u}}, \qquad z \in \mathbb R^{V} \text{ the logits.}$$
#
# Everything that can be learned is in $\theta$: here the weights of the network.
#
# Ours is a two-layer transformer with about 84,000 parameters. The head dimension is 32 because inference engines such as
# vLLM support that one and not smaller ones.


# %% tags=["export"]
def build_policy(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    head_dim: int = 32,
    max_positions: int = 64,
    seed: int = 0,
) -> Qwen3ForCausalLM:
    """A randomly initialised float32 ``Qwen3ForCausalLM`` for ``tokenizer``'s vocabulary, in eval mode (section 1)."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


# %%
model = build_policy(tokenizer)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary V = {model.config.vocab_size}")

# %% [markdown]
# ## Batches, and the masks that make them honest
#
# Answers differ in length, tensors do not. Prompts are padded on the left, so that every completion starts in the same
# column; completions are padded on the right. From here on $B$ is the number of rows and $T$ the number of completion
# columns, and every quantity per token is a tensor `[B, T]` in which column $t$ belongs to the $t$-th completion token.


# %% tags=["export"]
def pad_left(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token rows of unequal length → ids int64 ``[B, L]`` and mask bool ``[B, L]``, real tokens on the right."""
    width = max(map(len, rows), default=0)
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows], dtype=torch.int64)
    return ids, length_mask(torch.tensor([len(row) for row in rows]), width).flip(1)


def pad_right(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Token rows of unequal length → ids int64 ``[B, L]`` and mask bool ``[B, L]``, real tokens on the left."""
    width = max(map(len, rows), default=0)
    ids = torch.tensor([list(row) + [pad_id] * (width - len(row)) for row in rows], dtype=torch.int64)
    return ids, length_mask(torch.tensor([len(row) for row in rows]), width)


# %% [markdown]
# The **mask** says which entries are tokens. It is made from lengths and never by comparing ids with the pad or the
# end-of-sequence id: an id says what a token is, not whether somebody chose it.


# %% tags=["export"]
def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Lengths int64 ``[B]`` → mask bool ``[B, width]``, True for the first ``lengths[i]`` entries (section 1)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


# %% [markdown]
# Averages run over real tokens only. What is masked is replaced *before* any arithmetic: a `NaN` times zero is still
# `NaN`, so multiplying by the mask is not enough.


# %% tags=["export"]
def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` where ``mask`` is True, a scalar; 0 for an empty mask. Masked NaNs do not leak (section 1)."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


# %%
ids, mask = pad_right([[5, 6, 2], [2]], pad_id=2)  # even when pad = EOS, as in many checkpoints …
assert mask.tolist() == [[True, True, True], [True, False, False]]  # … the sampled EOS stays
assert masked_mean(torch.tensor([[1.0, 2.0, 3.0], [6.0, float("nan"), 7.0]]), mask) == 3.0

# %% [markdown]
# ## The log-probability of a completion
#
# The model gives the log-probability of each token in one forward pass over prompt and completion. Position $t$ of a
# causal model predicts token $t+1$, so the logits for the $T$ completion tokens are those at the last $T+1$ positions,
# without the very last one. This shift by one is made here, once, and nowhere else.
#
# Two details decide whether the numbers are right. Padding on the left must be hidden from attention, and positions
# must count real tokens, or a row's log-probs would depend on its neighbours in the batch. Padding on the right needs
# neither: causal attention never looks ahead.
#
# What computes the hidden states, below the layer that makes logits of them, is the model's **trunk**; later sections put
# other heads on it.
#
# A **temperature** $\tau$ divides the logits, $z \to z/\tau$. A policy that is sampled at $\tau$ *is* the tempered
# distribution, so its log-probs must be tempered too: the division happens in this one function, for everyone. (The
# code says `temperature`. From section 2 on, $\tau$ without a division is a trajectory.)


# %% tags=["export"]
def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by ``temperature``, in at least float32 (float64 stays float64) (section 1)."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature


def completion_inputs(prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor) -> dict[str, Tensor]:
    """What a causal model needs to score completions: ids, attention mask and positions, ``[B, P + T]`` (section 1)."""
    attention_mask = torch.cat([prompt_mask, torch.ones_like(completion_ids, dtype=torch.bool)], dim=1).long()
    return {
        "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
    }


def trunk(model) -> torch.nn.Module:
    """The model without its output head, which returns hidden states; ValueError if there is none to be found (section 1)."""
    for part in (model.base_model, getattr(model, "model", None)):  # Llama 4's base_model is the whole model
        if part is not None and part is not model:
            return part
    raise ValueError(f"{type(model).__name__}: neither .base_model nor .model is the network below the output head")


def completion_logits(
    model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Tempered logits of every completion token, float32 ``[B, T, V]`` (section 1).

    ``prompt_ids`` int64 and ``prompt_mask`` bool ``[B, P]`` are padded on the left, ``completion_ids`` int64 ``[B, T]``
    on the right. Entry ``[i, t]`` is the distribution from which token t of row i was drawn.
    """
    inputs = completion_inputs(prompt_ids, prompt_mask, completion_ids)
    output = model(**inputs, logits_to_keep=completion_ids.shape[1] + 1, use_cache=False)
    return tempered(output.logits[:, :-1], temperature)


# %% tags=["export"]
def gather_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-softmax of ``logits`` ``[..., V]`` at ``ids`` int64 ``[...]`` → ``[...]`` (section 1)."""
    return log_softmax(logits, dim=-1).gather(-1, ids[..., None]).squeeze(-1)


def token_logprobs(
    model, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probability of every completion token, float32 ``[B, T]`` (section 1); shapes as in `completion_logits`.

    It holds the whole ``[B, T, V]`` of logits: simple, exact, and the oracle for section 11's version that does not.
    """
    return gather_logprobs(
        completion_logits(model, prompt_ids, prompt_mask, completion_ids, temperature), completion_ids
    )


# %% [markdown]
# Checked on the trap itself: a row must score the same alone and in company of a longer prompt.

# %%
prompts = [tokenizer(text).input_ids for text in ("1+2=", "12+34=")]
answers, _ = pad_right([[6, tokenizer.eos_token_id], [7, 9, tokenizer.eos_token_id]], tokenizer.pad_token_id)
with torch.no_grad():
    together = token_logprobs(model, *pad_left(prompts, tokenizer.pad_token_id), answers)
    alone = token_logprobs(model, *pad_left(prompts[:1], tokenizer.pad_token_id), answers[:1, :2])
assert torch.allclose(together[0, :2], alone[0], atol=1e-5)

# %% [markdown]
# ## Learning from demonstrations
#
# A **demonstration** is a pair $(x, y^*)$: a prompt and a completion that somebody wrote. Supervised fine-tuning
# minimises its negative log-likelihood,
#
# $$L(\theta) = -\sum_{t=1}^{T} \log p_\theta(y^*_t \mid x, y^*_{<t}).$$
#
# For a batch, the code averages over all tokens of all demonstrations; that is the sum times a constant.


# %% tags=["export"]
def supervised_loss(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Negative log-likelihood per token, a scalar; ``logprobs`` float and ``mask`` bool are ``[B, T]`` (section 1)."""
    return -masked_mean(logprobs, mask)


# %% [markdown]
# What does its gradient say? Write $p$ for the softmax of the logits $z$ at one position, $y^*$ for the demonstrated
# token there, and $\mathbb 1[v = y^*]$ for 1 where $v$ is that token and 0 elsewhere (the vector of these is `onehot`).
# Then
#
# $$\frac{\partial}{\partial z_v}\bigl(-\log p_{y^*}\bigr) = p_v - \mathbb 1[v = y^*].$$
#
# At *every* position it names the one coordinate that should have had more mass, and by how much; every other
# coordinate goes down in proportion to its probability. Nothing is sampled, nothing is estimated. Claim 1.1, to the
# last digit:

# %%
demonstration = [tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id] for text in ("46",)]
prompt_ids, prompt_mask = pad_left([tokenizer("12+34=").input_ids], tokenizer.pad_token_id)
target_ids, target_mask = pad_right(demonstration, tokenizer.pad_token_id)

logits = completion_logits(model, prompt_ids, prompt_mask, target_ids).detach().double().requires_grad_()
loss = -gather_logprobs(logits, target_ids).sum()
(gradient,) = torch.autograd.grad(loss, logits)
onehot = torch.nn.functional.one_hot(target_ids, len(tokenizer))
assert torch.allclose(gradient, logits.softmax(-1) - onehot, atol=1e-12)
supervised_gradient = gradient[0].detach()

# %% [markdown]
# ## A warm start
#
# Reinforcement learning needs a policy that succeeds sometimes: from random weights every answer scores zero and there
# is nothing to compare (section 13 makes this exact). So we train on demonstrations first and stop early, when
# nearly half of the answers are right. First the demonstrations as tensors:


# %% tags=["export"]
def demonstration_batch(
    tokenizer: PreTrainedTokenizerFast, problems: list[Addition]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prompt ids and mask ``[B, P]`` (left-padded), answer ids and mask ``[B, T]`` with the EOS inside (section 1)."""
    prompts = [tokenizer(problem.prompt).input_ids for problem in problems]
    answers = [
        tokenizer(problem.answer, add_special_tokens=False).input_ids + [tokenizer.eos_token_id] for problem in problems
    ]
    return *pad_left(prompts, tokenizer.pad_token_id), *pad_right(answers, tokenizer.pad_token_id)


# %% [markdown]
# To know when to stop we must let the model *answer*, and there it is already: the moment we stop supervising, we
# need a way to sample. Sampling draws one token at a time, from the model's own distribution, and feeds it back.
#
# **One token.** Let $u$ be uniform on $[0, 1)$. The token is the first one at which the cumulative probability exceeds
# $u$. All randomness of a completion is a row of such numbers, drawn before the first token, so that what is sampled
# does not depend on who else is in the batch.


# %% tags=["export"]
def draw_token(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from the softmax of ``logits`` ``[B, V]`` by inverting its cumulative sum at ``uniform`` ``[B]`` (section 1).

    Returns ids int64 ``[B]`` and their log-probs ``[B]``. A token of probability zero is never drawn.
    """
    logprobs = log_softmax(logits, dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    threshold = uniform.double() * cumulative[:, -1]
    ids = torch.searchsorted(cumulative, threshold[:, None], right=True)
    ids = ids.clamp(max=logits.shape[-1] - 1)  # a NaN is beyond the last token; it stays visible in the log-prob
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)


# %% [markdown]
# **A batch of completions.** A prompt is read once, however many completions it gets; afterwards each step reads only the
# newest token of each completion, because the keys and values of all earlier ones are cached. A row that has said `<eos>`
# leaves the batch, and the cache with it. What comes back are the ids, the log-probs they were sampled with, the lengths
# (the sampled `<eos>` included), and whether a row was **truncated**: cut off at the cap before it had finished.


# %% tags=["export"]
@dataclass(frozen=True)
class Samples:
    """Sampled completions (section 1): everything that is known about them, nothing re-derived from the ids.

    ids int64 ``[B, T]`` (0 after the end), logprobs ``[B, T]`` (0 after the end) in at least float32, lengths int64
    ``[B]`` with the sampled stop token included, truncated bool ``[B]``: cut at the cap before a stop token.
    """

    ids: Tensor
    logprobs: Tensor
    lengths: Tensor
    truncated: Tensor


@torch.no_grad()
def complete(
    model,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    rows: Tensor,
    uniforms: Tensor,
    *,
    stop_ids: list[int],
    distribution: Callable[[Tensor], Tensor],
) -> Samples:
    """Completion i continues prompt ``rows[i]`` with the random numbers ``uniforms[i]``, one per token (section 1).

    ``prompt_ids`` int64 and ``prompt_mask`` bool ``[N, P]``, left-padded; ``rows`` int64 ``[B]``; ``uniforms`` float64
    ``[B, T]`` in [0, 1). ``distribution`` turns the model's logits ``[N or B, V]`` into those that are sampled from. A row
    ends with the first of ``stop_ids`` that it samples, or after T tokens.
    """
    (count, cap), device = uniforms.shape, prompt_ids.device
    stop = torch.tensor(stop_ids, device=device)
    ids = torch.zeros(count, cap, dtype=torch.int64, device=device)
    logprobs = torch.zeros(count, cap, dtype=torch.float64, device=device)
    lengths = torch.full((count,), cap, device=device)
    truncated = torch.ones(count, dtype=torch.bool, device=device)

    running = torch.arange(count, device=device)
    inputs, cache, attention_mask = prompt_ids, None, prompt_mask.long()
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    for t in range(cap):
        output = model(
            input_ids=inputs,
            attention_mask=attention_mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = distribution(output.logits[:, -1])
        token, logprob = draw_token(logits if t else logits[rows], uniforms[running, t])
        ids[running, t], logprobs[running, t] = token, logprob.double()
        stopped = torch.isin(token, stop)
        going = (~stopped).nonzero().squeeze(-1)  # the one synchronisation per token
        some_stopped = len(going) < len(running)
        if some_stopped:
            lengths[running] = torch.where(stopped, t + 1, lengths[running])
            truncated[running] = ~stopped
        if len(going) == 0 or t + 1 == cap:
            break
        cache, inputs, positions = output.past_key_values, token[:, None], positions[:, -1:] + 1
        if t == 0 or some_stopped:
            kept = going if t else rows[going]
            cache.reorder_cache(kept)  # the one selection of rows that every kind of cache has
            running, inputs = running[going], inputs[going]
            positions, attention_mask = positions[kept], attention_mask[kept]
        attention_mask = torch.cat([attention_mask, torch.ones_like(inputs)], dim=1)
    return Samples(ids, logprobs.to(logits.dtype), lengths, truncated)


# %% [markdown]
# Mostly we want one completion per row, from the policy as it is at some temperature.


# %% tags=["export"]
def sample(
    model,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    *,
    max_new_tokens: int,
    stop_ids: list[int],
    generator: torch.Generator,
    temperature: float = 1.0,
) -> Samples:
    """Draw one completion per row of ``prompt_ids`` ``[B, P]`` from the tempered policy, as `complete` (section 1).

    ``generator`` is a CPU generator; all its numbers are drawn before the first token.
    """
    uniforms = torch.rand(len(prompt_ids), max_new_tokens, generator=generator, dtype=torch.float64)
    device = prompt_ids.device
    rows = torch.arange(len(prompt_ids), device=device)
    tempering = partial(tempered, temperature=temperature)
    return complete(
        model, prompt_ids, prompt_mask, rows, uniforms.to(device), stop_ids=stop_ids, distribution=tempering
    )


# %% [markdown]
# The sampler reports the log-probs with which it drew. Scoring the same ids with a plain forward pass must give the
# same numbers, at temperature 1 and at another one; a shift by one, a lost mask or a temperature on one side only
# would show here.

# %%
prompt_ids, prompt_mask = pad_left([tokenizer(p.prompt).input_ids for p in heldout[:32]], tokenizer.pad_token_id)
for temperature in (1.0, 0.6):
    samples = sample(
        model,
        prompt_ids,
        prompt_mask,
        max_new_tokens=4,
        stop_ids=[tokenizer.eos_token_id],
        generator=torch.Generator().manual_seed(0),
        temperature=temperature,
    )
    with torch.no_grad():
        scored = token_logprobs(model, prompt_ids, prompt_mask, samples.ids, temperature)
    difference = torch.where(length_mask(samples.lengths, 4), scored - samples.logprobs, 0.0).abs().max()
    print(f"temperature {temperature}: largest |scored − sampled| log-prob {difference:.1e}")
    assert difference < 1e-5

# %% [markdown]
# ## The reward is a program
#
# Now the other half. A **verifier** looks at the finished text and returns one number, the **reward** $R$. Ours is one
# comparison. It is called with lists, as a user's own reward function will be, and it never sees $\theta$.


# %% tags=["export"]
def addition_reward(prompts: list[str], completions: list[str], answer: list[str], **columns) -> list[float]:
    """1.0 where the completion is exactly the answer, else 0.0; lists of length B (section 1)."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def is_number(completion: str) -> bool:
    """Whether a completion is well formed as an answer: digits and nothing else (section 1)."""
    return re.fullmatch(r"[0-9]+", completion) is not None


# %% [markdown]
# The verifier reads text, the policy wrote ids. We remove the one stop token that ended a row and nothing more. Had we
# told the tokenizer to skip *all* special tokens, `4<bos>6` would read `46`, and the policy would be paid for it.


# %% tags=["export"]
def completion_texts(tokenizer, ids: Tensor, lengths: Tensor, truncated: Tensor) -> list[str]:
    """Decode sampled ids ``[B, T]`` for a verifier: without the sampled stop token, other special tokens visible."""
    ends = (lengths - (~truncated).long()).tolist()
    rows = [row[:end] for row, end in zip(ids.tolist(), ends, strict=True)]
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# %%
row = torch.tensor([[7, 1, 9, 2]])  # 4 <bos> 6 <eos>
text = completion_texts(tokenizer, row, torch.tensor([4]), torch.tensor([False]))
assert text == ["4<bos>6"] and addition_reward(["12+34="], text, answer=["46"]) == [0.0]


# %% [markdown]
# The **pass rate** is the share of sampled answers that the verifier accepts.


# %% tags=["export"]
def pass_rate(model, tokenizer, problems: list[Addition], generator: torch.Generator) -> float:
    """Share of problems whose one sampled completion is right, at temperature 1 (section 1)."""
    prompts = [problem.prompt for problem in problems]
    samples = sample(
        model,
        *pad_left([tokenizer(prompt).input_ids for prompt in prompts], tokenizer.pad_token_id),
        max_new_tokens=4,
        stop_ids=[tokenizer.eos_token_id],
        generator=generator,
    )
    texts = completion_texts(tokenizer, samples.ids, samples.lengths, samples.truncated)
    rewards = addition_reward(prompts, texts, answer=[problem.answer for problem in problems])
    return sum(rewards) / len(rewards)


# %% [markdown]
# Supervised training itself is the loop you know. It looks at the pass rate on *training* problems every ten steps
# and stops at the target, so the held-out problems have no say in when to stop.


# %% tags=["export"]
def train_on_demonstrations(
    model,
    tokenizer,
    problems: list[Addition],
    *,
    target: float,
    seed: int,
    batch_size: int = 128,
    max_steps: int = 3000,
) -> float:
    """Minimise `supervised_loss` in place until the pass rate reaches ``target``; returns that pass rate (section 1).

    Raises RuntimeError when ``max_steps`` steps do not reach it.
    """
    data = demonstration_batch(tokenizer, problems)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    with tqdm(total=target, desc="warm start: pass rate", bar_format="{desc} {n:.2f}/{total} [{elapsed}]") as bar:
        for step in range(1, max_steps + 1):
            chosen = torch.randint(len(problems), (batch_size,), generator=generator)
            prompt_ids, prompt_mask, answer_ids, answer_mask = (tensor[chosen] for tensor in data)
            loss = supervised_loss(token_logprobs(model, prompt_ids, prompt_mask, answer_ids), answer_mask)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 10 == 0:
                rate = pass_rate(model, tokenizer, problems[:1024], generator)
                bar.update(rate - bar.n)
                if rate >= target:
                    return rate
    raise RuntimeError(f"the warm start reached a pass rate of {rate:.2f}, not {target}, in {max_steps} steps")


# %% [markdown]
# Half a minute of training is worth keeping. The result goes to a cache folder under a name made from the seed, the
# settings and the code that trained it: change any of them, and it is trained again.


# %% tags=["export"]
def cache_folder() -> Path:
    """Where warm starts are kept: the environment variable ``LMRL_CACHE``, or ``~/.cache/lmrl``."""
    return Path(os.environ.get("LMRL_CACHE", Path.home() / ".cache" / "lmrl"))


def require_writable(folder: Path) -> None:
    """Make ``folder`` if it is missing; OSError, with the remedy, if files cannot be written there (section 1)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror}); name another folder in LMRL_CACHE") from error


def warm_start_folder(seed: int = 0, *, target: float = 0.45) -> Path:
    """A Hugging Face folder with the tiny policy, trained on demonstrations to ``target`` pass rate (section 1).

    Trained on the first call and cached; ``lmrl.json`` in it records the seed and the pass rate reached.
    """
    code = "".join(map(inspect.getsource, (build_tokenizer, build_policy, train_on_demonstrations)))
    recipe = json.dumps({"seed": seed, "target": target, "torch": torch.__version__, "code": code})
    folder = cache_folder() / f"warm-start-{seed}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not folder.exists():
        require_writable(folder.parent)
        tokenizer = build_tokenizer()
        model = build_policy(tokenizer, seed=seed)
        rate = train_on_demonstrations(model, tokenizer, addition_problems()[0], target=target, seed=seed)
        if not folder.exists():  # another process may have been faster
            save_model(folder, model, tokenizer, {"seed": seed, "target": target, "pass_rate": rate})
    return folder


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A place for a new ``folder``, which is replaced when the body has filled it without an error (section 1)."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unfinished-") as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        yield new
        if folder.exists():
            folder.rename(old)
        new.rename(folder)


def save_model(folder: Path, model, tokenizer, record: dict) -> None:
    """Write a Hugging Face folder with ``record`` as ``lmrl.json``; ``folder`` is replaced only by a complete one.

    A reader never sees a half-written folder, and an error while writing leaves the old one as it was (section 1).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replaced(folder) as new:
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / "lmrl.json").write_text(json.dumps(record) + "\n")


# %%
folder = warm_start_folder(seed=0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder).eval()
generator = torch.Generator().manual_seed(1)
rates = [pass_rate(model, tokenizer, heldout, generator) for _ in range(4)]
print(f"pass rate on {len(heldout)} held-out problems, four samples each: {sum(rates) / 4:.3f}")
assert 0.2 < sum(rates) / 4 < 0.5

# %% [markdown]
# ## What breaks when the demonstrations are gone
#
# Take $y^*$ away. The model answers, the verifier returns $R$. That removes three things that supervised training takes
# for granted. Getting along without them is what the sections to come are about.
#
# 1. **A target.** The loss above contains $y^*$. Without it there is no formula left to evaluate (sections 3 and 4).
# 2. **A signal at every token.** $R$ comes once, after the last token, and is silent about which token earned it (sections
#    5 to 8).
# 3. **A fixed data set.** The model learns from what it wrote, and what it writes changes as it learns (sections 9 and 10).
#
# Here are two answers to the same prompt, one accepted and one not:

# %%
problem = next(p for p in heldout if len(p.answer) == 3)
samples = sample(
    model,
    *pad_left([tokenizer(problem.prompt).input_ids] * 64, tokenizer.pad_token_id),
    max_new_tokens=4,
    stop_ids=[tokenizer.eos_token_id],
    generator=torch.Generator().manual_seed(0),
)
texts = completion_texts(tokenizer, samples.ids, samples.lengths, samples.truncated)
rewards = addition_reward([problem.prompt] * 64, texts, answer=[problem.answer] * 64)
right, wrong = rewards.index(1.0), rewards.index(0.0)
for i in (right, wrong):
    print(f"{problem.prompt}{texts[i]:4}  R = {rewards[i]:.0f}")

# %% [markdown]
# What can be done with $R$? The one thing we know how to do is raise or lower the log-probability of a text. So weight
# the text's log-probability with its reward, $R \sum_t \log p_\theta(y_t \mid x, y_{<t})$, and climb. (Why this is the
# right thing and not just a thing is section 4.) Its derivative with respect to the log-prob of token $t$ is $R$, for
# every $t$: claim 1.2. The accepted answer has weight 1 on each of its tokens and the refused one 0 on each, although
# only some of the refused tokens were wrong. Which tokens deserve the credit is the **credit assignment problem**.

# %%
pair = torch.tensor([right, wrong])
logprobs = samples.logprobs[pair].requires_grad_()
mask = length_mask(samples.lengths[pair], 4)
reward = torch.tensor(rewards)[pair]
(weights,) = torch.autograd.grad((torch.where(mask, logprobs, 0.0).sum(1) * reward).sum(), logprobs)
assert torch.equal(weights, reward[:, None] * mask)
print(weights)

# %% [markdown]
# And the other side of it. All that a demonstration does is to raise the text it shows. A negative reward lowers a
# text, and one that the model itself came up with: with $R = -1$ the gradient is exactly minus the gradient of
# imitating the same text. Claim 1.3, over all parameters of the model:

# %%
row = torch.tensor([wrong])
prompt_ids, prompt_mask = pad_left([tokenizer(problem.prompt).input_ids], tokenizer.pad_token_id)

logprob = torch.where(
    length_mask(samples.lengths[row], 4), token_logprobs(model, prompt_ids, prompt_mask, samples.ids[row]), 0.0
).sum()
parameters = list(model.parameters())
imitate = torch.autograd.grad(logprob, parameters, retain_graph=True)
unlearn = torch.autograd.grad(-1.0 * logprob, parameters)
assert all(torch.equal(down, -up) for down, up in zip(unlearn, imitate, strict=True))

# %% [markdown]
# ## The two regimes in one picture


# %% tags=["export:figures"]
def two_regimes(
    gradient: Tensor, target: list[str], vocabulary: list[str], rows: list[list[str]], rewards: list[float]
):
    """Left: supervised gradient ``[T, V]`` per position. Right: sampled token rows, each with its one reward."""
    figure, (left, right) = new_figure(1, 2, height=3.4, width_ratios=[1.25, 1])
    figure.set_layout_engine(None)  # half the drawing time
    figure.subplots_adjust(left=0.09, right=0.98, top=0.9, bottom=0.16, wspace=0.08)
    image = left.imshow(gradient.T, cmap="PuOr", vmin=-1, vmax=1, aspect="auto")
    for t, token in enumerate(target):
        v = vocabulary.index(token)
        shade = "white" if gradient[t, v] < -0.5 else "black"
        left.text(t, v, f"{gradient[t, v]:.2f}", ha="center", va="center", color=shade, fontsize=9)
    left.set_xticks(range(len(target)), target)
    left.set_yticks(range(len(vocabulary)), vocabulary, fontsize=8)
    left.set(title="Demonstration: a gradient everywhere", xlabel="demonstrated token $y^*_t$", ylabel="vocabulary")
    figure.colorbar(image, ax=left, label="$\\partial$ loss / $\\partial$ logit")

    right.set(title="Reward: one number at the end", xlim=(-0.6, 5.2), ylim=(len(rows) - 0.4, -0.8))
    for i, (row, reward) in enumerate(zip(rows, rewards, strict=True)):
        for t, token in enumerate(row):
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": COLORS["policy"]}
            right.text(t, i, token, ha="center", va="center", bbox=box)
            right.text(t, i + 0.3, "?", ha="center", va="center", color=COLORS["reference"])
        right.text(4.6, i, f"R = {reward:.0f}", ha="center", va="center", color=COLORS["reward"], weight="bold")
    right.axis("off")
    return figure


# %%
vocabulary = [*ARITHMETIC_CHARACTERS[:10], "<eos>"]
columns = tokenizer.convert_tokens_to_ids(vocabulary)
rows = [tokenizer.convert_ids_to_tokens(samples.ids[i, : samples.lengths[i]].tolist()) for i in (right, wrong)]
show(
    two_regimes(supervised_gradient[:, columns], ["4", "6", "<eos>"], vocabulary, rows, [1.0, 0.0]),
    caption="Left, 12+34 before any training: every position is told which logit to raise (one dark cell per column; the "
    "others go down a little). Right, two answers to another problem: a reward arrives once, after the last token, and "
    "leaves open which token earned it.",
    alt="Left, a heat map of the supervised gradient with one strongly negative cell per demonstrated token. Right, two "
    "sampled answers as rows of tokens with question marks, the first with R = 1 and the second with R = 0.",
)

# %% [markdown]
# The same picture, computed anew for another problem and another temperature. Raise the temperature: the two answers fall
# apart into random digits, and the supervised gradient grows, because the policy gives the demonstrated tokens less.


# %% tags=["demo"]
def regimes(number: int, temperature: float) -> Figure:
    chosen = heldout[number]
    prompt = pad_left([tokenizer(chosen.prompt).input_ids], tokenizer.pad_token_id)
    _, _, target, _ = demonstration_batch(tokenizer, [chosen])
    leaf = completion_logits(model, *prompt, target, temperature).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(-gather_logprobs(leaf, target).sum(), leaf)
    pair = sample(
        model,
        *(tensor.expand(2, -1) for tensor in prompt),
        max_new_tokens=4,
        stop_ids=[tokenizer.eos_token_id],
        generator=torch.Generator().manual_seed(number),
        temperature=temperature,
    )
    texts = completion_texts(tokenizer, pair.ids, pair.lengths, pair.truncated)
    answers = [tokenizer.convert_ids_to_tokens(ids[:n]) for ids, n in zip(pair.ids.tolist(), pair.lengths.tolist())]
    scores = addition_reward([chosen.prompt] * 2, texts, answer=[chosen.answer] * 2)
    tokens = tokenizer.convert_ids_to_tokens(target[0].tolist())
    return two_regimes(gradient[0][:, columns], tokens, vocabulary, answers, scores)


# %%
explore(
    regimes,
    number=widgets.SelectionSlider(
        options=[(problem.prompt, i) for i, problem in enumerate(heldout[:21])], description="held-out problem"
    ),
    temperature=widgets.FloatSlider(1.0, min=0.2, max=3.0, step=0.1, description="temperature"),
)

# %% [markdown]
# ## The question that can be answered
#
# Which digit belongs in the third place? The verifier does not say. But in a pile of sampled answers one can count: do
# those with a certain digit there earn more than the others? Every method of this course is a way of making that
# comparison with less noise. Here are the 64 answers to the prompt above, sorted by their third token:

# %%
third, long_enough = samples.ids[:, 2], samples.lengths > 2
for token in third[long_enough].unique().tolist():
    chosen = long_enough & (third == token)
    mean = torch.tensor(rewards)[chosen].mean()
    print(
        f"third token {tokenizer.convert_ids_to_tokens(token)!r}: {int(chosen.sum()):2} answers, mean reward {mean:.2f}"
    )
right_token = tokenizer.convert_tokens_to_ids(problem.answer[2])
assert torch.tensor(rewards)[long_enough & (third == right_token)].mean() >= sum(rewards) / len(rewards)

# %% [markdown]
# The right digit stands out, although no one has named it. Its mean can be below 1: then another token was wrong in some
# of these answers, and the reward, being one number, counts that against this token too.

# %% [markdown]
# ## Exercises
#
# **1. Predict, then run.** The supervised gradient at one position is a vector over the vocabulary. Before computing
# anything: what is the sum of its entries?

# %% tags=["exercise"]
prediction = None  # your number

# %% tags=["solution"]
prediction = 0.0  # the softmax sums to 1, and so does the one-hot vector

# %% tags=["check"]
import torch

from lmrl.policy import gather_logprobs

logits = torch.randn(1, 1, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
(gradient,) = torch.autograd.grad(-gather_logprobs(logits, torch.tensor([[4]])).sum(), logits)
assert prediction is not None and abs(gradient.sum() - prediction) < 1e-12

# %% [markdown]
# **2. Write it.** The weight of a token under the temperature $\tau$. Return the log-probabilities of all tokens for
# `logits` `[V]` when the policy is sampled at `temperature`.

# %% tags=["exercise"]
import torch


def tempered_logprobs(logits, temperature):
    raise NotImplementedError("one line")


# %% tags=["solution"]
import torch


def tempered_logprobs(logits, temperature):
    return (logits / temperature).log_softmax(-1)


# %% tags=["check"]
import torch

logprobs = tempered_logprobs(torch.tensor([2.0, 1.0, 0.0]), 0.5)
assert torch.allclose(logprobs, torch.tensor([-0.1429, -2.1429, -4.1429]), atol=1e-4)
assert torch.allclose(logprobs.exp().sum(), torch.tensor(1.0))

# %% [markdown]
# **3. Find the bug.** This function scores a completion. It runs, its numbers look like log-probs, and training with it
# would go on quietly. The check compares it with `token_logprobs`, and, so that you can see what is wrong, with a model
# that knows exactly one thing: the token after $v$ is $v+1$.

# %% tags=["exercise"]
import torch

from lmrl.policy import gather_logprobs


def score(model, prompt_ids, completion_ids):
    """Log-probs [B, T] of the completion; no padding."""
    logits = model(input_ids=torch.cat([prompt_ids, completion_ids], dim=1)).logits
    return gather_logprobs(logits[:, -completion_ids.shape[1] :], completion_ids)


# %% tags=["solution"]
import torch

from lmrl.policy import gather_logprobs


def score(model, prompt_ids, completion_ids):
    """Log-probs [B, T] of the completion; no padding."""
    logits = model(input_ids=torch.cat([prompt_ids, completion_ids], dim=1)).logits
    return gather_logprobs(logits[:, -completion_ids.shape[1] - 1 : -1], completion_ids)


# %% tags=["check"]
import torch

from lmrl.policy import build_policy, build_tokenizer, token_logprobs


class Successor(torch.nn.Module):
    def forward(self, input_ids):
        onehot = torch.nn.functional.one_hot(input_ids + 1, 16)
        return type("Output", (), {"logits": 30.0 * onehot})


assert score(Successor(), torch.tensor([[3, 4]]), torch.tensor([[5, 6, 7]])).abs().max() < 1e-6
characters = build_tokenizer()
untrained = build_policy(characters)
prompt, completion = torch.tensor([characters("12+34=").input_ids]), torch.tensor([[7, 9, 2]])
oracle = token_logprobs(untrained, prompt, torch.ones_like(prompt, dtype=torch.bool), completion)
assert torch.allclose(score(untrained, prompt, completion), oracle, atol=1e-5)

# %% [markdown]
# **What is still missing.** We have a policy, a sampler and a reward, and no derivation of what to do with them. The
# next section says what kind of object the model already is (section 2), section 3 states the objective, and section 4
# derives the gradient that we guessed here.
