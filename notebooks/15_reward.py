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
# # 15. What we have not asked yet
#
# **The question.** Every equation of this course takes $R(x, y)$, the reward of answer $y$ to prompt $x$, as given.
# Where does it come from?
#
# Sometimes somebody can write it down. The sum of two numbers, a proof that a checker accepts, code that passes its
# tests: there $R$ is a program, a **verifier**, and it means what it says. For "is this a good answer?" there is no
# program, only people who prefer one answer to another; a network can be fitted to their choices, and then $R$ has
# errors that the policy will find.
#
# The first half of this section is about the first kind: what a reward function may say, how to read an answer, how
# to run a checker that one does not trust, and how prompts and verifiers become a task. The second half is about the
# second kind: fitting $R$ to comparisons, what happens when it is optimised too hard, and how to do without it.

# %%
import ast
import asyncio
import contextlib
import copy
import difflib
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import numbers
import operator
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import get_args

import ipywidgets as widgets
import numpy as np
import torch
import transformers
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import log_softmax, softplus
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lmrl.baselines import group_advantages
from lmrl.figures.style import COLORS, explore, new_figure, show
from lmrl.models import disable_dropout, find_device, load_reward_model, load_tokenizer
from lmrl.packages import install_command
from lmrl.policy import (
    addition_problems,
    addition_reward,
    completion_texts,
    is_number,
    pad_left,
    pad_right,
    pass_rate,
    sample,
    token_logprobs,
    trunk,
    warm_start_folder,
)
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    flat_gradient,
    leaf_logprobs,
    leaf_probabilities,
    row_gradients,
)
from lmrl.trust_region import kl_exact, log_ratio

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# ## A reward function
#
# A reward function reads texts and returns numbers. It never sees $\theta$, so nothing is differentiated through it: it
# may call a compiler, a checker or a colleague. Its signature is the one that TRL uses, so that a function written for
# one trainer serves the other:
#
# ```python
# def reward(prompts, completions, **columns) -> list[float | None]
# ```
#
# All arguments are lists of length $B$, one entry per completion. The columns are what the task knows about each
# prompt: the right answer, for example.


# %% tags=["export"]
RewardFunction = Callable[..., list[float | None]]


class RewardError(ValueError):
    """A reward function that raised, or returned something else than one number or None per completion (section 15)."""


# %% [markdown]
# Here are some answers of section 1's policy to one prompt, and four programs that could be called a verifier. They
# do not agree, and the policy will learn whichever it is given. The second is content with part of the digits. The
# third is content with any number: a *format* reward, which alone teaches nothing about addition. The fourth measures
# how far off the answer is, and for a text that is not a number it can say nothing.

# %%
folder = warm_start_folder(seed=0)
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
train, heldout = addition_problems()
problem = next(p for p in heldout if len(p.answer) == 3)
samples = sample(
    model,
    *pad_left([tokenizer(problem.prompt).input_ids] * 256, tokenizer.pad_token_id),
    max_new_tokens=4,
    stop_ids=[tokenizer.eos_token_id],
    temperature=1.5,
    generator=torch.Generator().manual_seed(0),
)
texts = completion_texts(tokenizer, samples.ids, samples.lengths, samples.truncated)
different = sorted(set(texts), key=lambda text: (is_number(text), texts.count(text)), reverse=True)
shown = [*different[:5], *[text for text in different if not is_number(text)][:3]]
verifiers = {
    "exactly right": lambda text: addition_reward([], [text], answer=[problem.answer])[0],
    "share of digits": lambda text: sum(a == b for a, b in zip(text, problem.answer)) / max(len(text), 3),
    "is a number": lambda text: float(is_number(text)),
    "closeness": lambda text: max(0.0, 1 - abs(int(text) - int(problem.answer)) / 10) if is_number(text) else None,
}
scores = {name: [verifier(text) for text in shown] for name, verifier in verifiers.items()}


# %% tags=["export:figures"]
def verdicts(completions: list[str], scores: dict[str, list[float | None]]):
    """A row per completion, a column per reward function: the darker the higher the reward."""
    figure, axes = new_figure(height=3.6)
    values = [
        [math.nan if column[row] is None else column[row] for column in scores.values()]
        for row in range(len(completions))
    ]
    shades = LinearSegmentedColormap.from_list("reward", ["white", COLORS["reward"]])
    axes.imshow(values, cmap=shades, vmin=0, vmax=1, aspect="auto")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            text = "None" if math.isnan(value) else f"{value:.2f}"
            axes.text(column, row, text, ha="center", va="center", color="white" if value > 0.75 else "black")
    axes.set_xticks(range(len(scores)), scores)
    axes.set_yticks(range(len(completions)), completions, family="monospace")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set(ylabel="completion")
    return figure


# %%
show(
    verdicts(shown, scores),
    caption=f"Four verifiers read the same answers to {problem.prompt} and disagree. What is paid for is learned.",
    alt="A table of eight completions by four reward functions, shaded by reward. Only the right sum has reward 1 in the "
    "first column; every number has reward 1 in the third; the fourth is None for texts that are not numbers.",
)
assert scores["exactly right"] != scores["is a number"]
assert [score is None for score in scores["closeness"]] == [not is_number(text) for text in shown]

# %% [markdown]
# ## None is not zero
#
# The last column has a third kind of verdict: `None`, *I cannot grade this*. It is not a reward of 0. Zero says that
# the answer is bad, and it pulls the group's baseline down with it. Take one prompt with four answers, of which a
# right and a wrong one were graded and two were not, and no division by the spread. With `None` the advantages are
# $\tfrac12, -\tfrac12, 0, 0$; filled with zeros they would be $\tfrac34, -\tfrac14, -\tfrac14, -\tfrac14$, and the
# policy would be pushed away from two answers about which nobody knows anything:

# %%
group = torch.zeros(4, dtype=torch.int64)
rewards, graded = torch.tensor([1.0, 0.0, math.nan, math.nan]), torch.tensor([True, True, False, False])
assert group_advantages(rewards, group, scale="none", graded=graded).tolist() == [0.5, -0.5, 0.0, 0.0]
assert group_advantages(rewards.nan_to_num(0.0), group, scale="none").tolist() == [0.75, -0.25, -0.25, -0.25]

# %% [markdown]
# ## Asking for rewards, and not trusting the answer
#
# A reward function is the part of a run that its user writes, and the part that is changed most often. Whatever it
# does wrong should be said in one line with its name, rather than end in a shape error ten functions later, or in a
# `NaN` that trains for an hour. So each call is checked: it did not raise, it returned a list, with one entry per
# completion, each a finite number or `None`. And what it does to the process, to gradients, to the current folder, is undone.


# %% tags=["export"]
def checked_scores(
    reward: RewardFunction, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> list[float | None]:
    """What ``reward`` returns for B completions: B finite numbers or Nones; RewardError for anything else (section 15).

    Calls ``reward(prompts=prompts, completions=completions, **columns)``; all are lists of length B, and copies, so that
    what the function does to them stays with it.
    """
    name = reward_name(reward)
    try:
        with (
            torch.set_grad_enabled(torch.is_grad_enabled()),
            contextlib.chdir("."),
        ):  # put back if the function changes them
            scores = reward(**copy.deepcopy({"prompts": prompts, "completions": completions, **columns}))
    except RewardError:  # one function inside another has said it already
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        arguments = ", ".join(f"{argument}=…" for argument in ("prompts", "completions", *columns))
        raise RewardError(
            f"reward function {name} raised {describe(error)}; called as {name}({arguments}) for "
            f"{len(completions)} completions, it must return a number or None for any text"
        ) from error
    if not isinstance(scores, list):
        raise RewardError(
            f"reward function {name} returned {type(scores).__name__}; return a list with one number per completion"
        )
    if len(scores) != len(completions):
        raise RewardError(
            f"reward function {name} returned {len(scores)} rewards for {len(completions)} completions; return one for "
            "each, in order, with None for those that cannot be graded"
        )
    for score, completion in zip(scores, completions, strict=True):
        if not is_reward(score):
            raise RewardError(
                f"reward function {name} returned {repr(score)[:60]} for the completion {completion[:60]!r}; "
                "a reward is a finite number, or None if the completion cannot be graded"
            )
    return [None if score is None else float(score) for score in scores]


def score_completions(
    reward: RewardFunction, prompts: list[str], completions: list[str], columns: dict[str, list]
) -> tuple[Tensor, Tensor]:
    """Rewards float32 ``[B]``, NaN where the function returned None, and graded bool ``[B]`` (section 15).

    True and False count as 1 and 0. Raises RewardError as `checked_scores`.
    """
    scores = checked_scores(reward, prompts, completions, columns)
    graded = torch.tensor([score is not None for score in scores], dtype=torch.bool)
    return torch.tensor([math.nan if score is None else score for score in scores]), graded


def reward_name(reward: RewardFunction) -> str:
    """What a reward function is called in messages and metrics (section 15)."""
    return getattr(reward, "__name__", type(reward).__name__)


def is_reward(score) -> bool:
    """Whether ``score`` is None or a number that is finite in float32 (section 15)."""
    if score is None or isinstance(score, (bool, np.bool_)):
        return True
    return isinstance(score, numbers.Real) and abs(score) <= torch.finfo(torch.float32).max


def describe(error: Exception) -> str:
    """Type, message and place of an exception on one line (section 15)."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}, line {frame.lineno})"


# %%
prompts, answers = [problem.prompt] * len(shown), [problem.answer] * len(shown)
rewards, graded = score_completions(addition_reward, prompts, shown, {"answer": answers})
assert rewards.tolist() == scores["exactly right"] and graded.all()

rewards, graded = score_completions(lambda completions, **_: scores["closeness"], prompts, shown, {})
assert torch.equal(rewards.isnan(), ~graded) and graded.tolist() == [is_number(text) for text in shown]

for wrong in (
    lambda completions, **_: [1 / len(text.strip("0123456789")) for text in completions],
    lambda completions, **_: [1.0],
    lambda completions, **_: torch.ones(len(completions)),
    lambda completions, **_: [math.inf] * len(completions),
):
    try:
        score_completions(wrong, prompts, shown, {"answer": answers})
    except RewardError as error:
        print(error)
    else:
        raise AssertionError("this reward function is wrong")

# %% [markdown]
# ## Several rewards at once
#
# The right answer is worth 1, the asked-for form 0.2: two functions and a weighted sum. The sum is again a reward
# function. If one of them says `None` it has no opinion, and the others decide; only if all say `None` is the
# completion not graded.


# %% tags=["export"]
def counts_of(reward: RewardFunction) -> dict:
    """The ``metrics`` of a reward function's last call, or none; RewardError if it is no such dictionary (section 15)."""
    metrics = getattr(reward, "metrics", {})
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise RewardError(
            f"reward function {reward_name(reward)}: its metrics are {metrics!r}, not numbers by their names"
        )
    return metrics


class WeightedRewards:
    """The weighted sum of several reward functions, itself a reward function (section 15).

    ``weights`` has one number per function, 1.0 each if None. A function that returns None for a completion is left out
    of its sum; None only if all are. ``metrics`` holds, after each call, the mean of every part over what it graded and
    the parts' own metrics. Raises ValueError for no function, or another number of weights, or weights that are not
    finite.
    """

    def __init__(self, rewards: list[RewardFunction], weights: list[float] | None = None):
        weights = [1.0] * len(rewards) if weights is None else list(weights)
        if len(weights) != len(rewards) or not rewards:
            raise ValueError(f"{len(rewards)} reward functions and {len(weights)} weights; give one weight for each")
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"the weights {weights} of the rewards are not all finite numbers")
        self.rewards, self.weights, self.metrics = list(rewards), weights, {}
        names = [reward_name(reward) for reward in rewards]
        self.names = [name if names.count(name) == 1 else f"{name}-{i}" for i, name in enumerate(names, start=1)]
        self.__name__ = " + ".join(f"{w:g}*{reward_name(reward)}" for w, reward in zip(weights, rewards, strict=True))

    def __call__(self, prompts, completions, **columns):
        parts = [checked_scores(reward, prompts, completions, columns) for reward in self.rewards]
        self.metrics = {}
        for reward, name, scores in zip(self.rewards, self.names, parts, strict=True):
            known = [score for score in scores if score is not None]
            if known:
                self.metrics[f"reward/{name}"] = sum(known) / len(known)
            self.metrics |= counts_of(reward)
        return [self.weigh(scores) for scores in zip(*parts, strict=True)]

    def weigh(self, scores: tuple[float | None, ...]) -> float | None:
        """The weighted sum of the scores that are not None; None if all are."""
        known = [weight * score for weight, score in zip(self.weights, scores, strict=True) if score is not None]
        return sum(known) if known else None


# %%
both = WeightedRewards(
    [
        addition_reward,
        lambda completions, **_: [None if text == "" else float(is_number(text)) for text in completions],
    ],
    weights=[1.0, 0.2],
)
right = problem.answer
assert both(prompts=[""] * 4, completions=[right, "7", "7=", ""], answer=[right] * 4) == [1.2, 0.2, 0.0, 0.0]
assert both.weigh((None, 1.0)) == 0.2 and both.weigh((None, None)) is None

# %% [markdown]
# ## Reading an answer
#
# A verifier compares, but first it has to find the answer in the text. The simplest way is to allow nothing else:
# equal texts, apart from white space at the ends. A format can be asked for with a regular expression, which must
# match the whole completion.


# %% tags=["export"]
def exact_match(prompts: list[str], completions: list[str], answer: list[str], **columns) -> list[float | None]:
    """1.0 where the completion is the answer, apart from white space around it, else 0.0 (section 15).

    None where there is no answer.
    """
    rows = zip(completions, answer, strict=True)
    return [None if right is None else float(text.strip() == str(right).strip()) for text, right in rows]


def format_match(pattern: str) -> RewardFunction:
    """A reward of 1.0 where the regular expression ``pattern`` matches the whole completion, else 0.0 (section 15).

    The dot matches line breaks too. Raises ValueError for a pattern that is not one.
    """
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"the format {pattern!r} is not a regular expression: {error}") from error

    def format_match(prompts, completions, **columns):
        return [float(expression.fullmatch(text) is not None) for text in completions]

    return format_match


# %%
tagged = format_match(r"<think>.*</think>\s*<answer>[^<]*</answer>")
assert tagged([""] * 2, ["<think>2\n+ 2</think> <answer>4</answer>", "<answer>4</answer>"]) == [1.0, 0.0]

# %% [markdown]
# Numbers in running text need more care, and the usual short patterns get something wrong: they take a lone comma for
# a number, they drop a minus sign and accept 3 for −3, or they look at the last few characters only. Our rule: if the
# text has the mark `####`, as the solutions of GSM8K do, the first number after the last mark counts, otherwise the
# last number of the text. A number may have commas between groups of three digits, decimals, an exponent, or be a
# fraction; a dollar or another currency may stand before it. A minus before it is a sign, unless what it follows
# makes it a subtraction (`10 - 3`), a range or a hyphen.


# %% tags=["export"]
NUMBER = re.compile(
    r"(?P<minus>(?<![\w)\]}])(?<![\d)\]}] )[-−–] ?)?(?:[$€£¥] ?(?P<inner_minus>[-−–])?)?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\w)\.\d+)"
    r"(?P<exponent>[eE][+-]?\d{1,2}(?!\d))?(?:/(?P<below>\d+))?"
)
LONGEST_NUMBER = 400  # characters; more of them is no answer, and slow to compute with


def number_value(match: re.Match) -> Fraction | None:
    """The value of a match of NUMBER; None for a division by zero, and for more than LONGEST_NUMBER characters."""
    if len(match[0]) > LONGEST_NUMBER or int(match["below"] or 1) == 0:
        return None
    value = Fraction(match["digits"].replace(",", "") + (match["exponent"] or "")) / int(match["below"] or 1)
    return -value if match["minus"] or match["inner_minus"] else value


def extract_number(text: str) -> Fraction | None:
    """The number that ``text`` answers with: the first after the last ``####``, else the last one; or None (section 15).

    Exact: "1,000", "-3", "$80,000", "- 1/2", "72.0", ".5" and "6e23" are read as what they say.
    """
    _, mark, rest = text.rpartition("####")
    values = [value for match in NUMBER.finditer(rest) if (value := number_value(match)) is not None]
    return values[0 if mark else -1] if values else None


def number_match(prompts: list[str], completions: list[str], answer: list[str], **columns) -> list[float | None]:
    """1.0 where the completion's number (`extract_number`) is the answer's, else 0.0 (section 15).

    None where the answer has no number.
    """
    right = [extract_number(str(text)) for text in answer]
    found = [extract_number(text) for text in completions]
    return [None if b is None else float(a == b) for a, b in zip(found, right, strict=True)]


# %%
for text, number in {
    "The total is 72 clips, altogether.": 72,
    "#### 1,000": 1000,
    "#### -3": -3,
    "That is $80,000, so": 80000,
    "- 1/2": Fraction(-1, 2),
    "72.0": 72,
    "3.": 3,
    "#### 42" + " and 7 more words" * 30: 42,
    "10 - 3": 3,
    "10 - 3 = 7": 7,
    "": None,
    ",": None,
}.items():
    assert extract_number(text) == number, text
assert number_match([""] * 3, ["3", "It is 1,000.", "6/8"], answer=["-3", "#### 1000", "0.75"]) == [0.0, 1.0, 1.0]


# %% [markdown]
# ## A checker that may never return
#
# Is $\frac{\sqrt{8}}{4}$ the same as $1/\sqrt 2$? The package math-verify reads both as expressions and lets a
# computer algebra system decide. The usual agreement with the model is that the answer stands in a box, `\boxed{…}`;
# the last box counts. We find it ourselves, so that a completion with five boxes has not given five answers.


# %% tags=["export"]
def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{…}`` in ``text``, with balanced braces; None if there is none (section 15)."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : end]
    return None


# %%
assert last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}") == r"\frac{1}{2}" and last_boxed(r"\boxed{\frac{1}{2}") is None

# %% [markdown]
# The trouble is $9^{9^{9^9}}$. A policy that samples at random will write such things sooner or later, and the
# algebra system sets out to compute it. The usual guard is an alarm signal, and Python lets only the main thread set
# one, while a trainer calls its rewards from threads and event loops. Waiting for a thread with a time limit is no
# guard either: the wait ends, the thread does not.
#
# What can always be ended is a process. One helper process loads the algebra system once. For each completion it
# forks a copy of itself, the copy asks the kernel to be killed when its time is over, computes, and ends with the
# verdict as its exit code. The caller only writes a line and reads a line, which any thread can do. If the trainer
# dies, the helper reads the end of its input and ends too. The helper's code is the text of this function, handed to
# a fresh Python, so nothing of the trainer is copied into it.


# %% tags=["export:sandbox"]
VERDICTS = {0: "right", 10: "wrong", 11: "no answer", 12: "unreadable", -14: "timeout"}  # exit codes; -14: by the alarm


def serve_verdicts(seconds, memory, workers):  # in a process of its own, so it brings its imports
    """Judge pairs [right, given] of LaTeX, a JSON list of them per line of stdin, with a line of exit codes for each.

    Every pair has a process that the kernel ends after ``seconds``, and ``memory`` bytes; ``workers`` run at a time.
    """
    import json
    import os
    import resource
    import signal
    import sys

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text):
        found = [LatexExtractionConfig(), ExprExtractionConfig()]
        return parse("\\boxed{" + text + "}", found, parsing_timeout=None, raise_on_error=True)

    def judge(right, given):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.setrecursionlimit(10_000)
        try:
            gold = read(right)
        except Exception:
            gold = []
        if not gold:
            return 12
        return 0 if verify(gold, read(given), timeout_seconds=None, raise_on_error=True) else 10

    def collect():
        process, status = os.wait()
        codes[running.pop(process)] = os.waitstatus_to_exitcode(status)

    for text in ("-1,000.5", r"\frac{\sqrt{2}}{3} x^2 + 1", "(1, 2)", r"\{1, 2\}", "x = 5"):
        verify(read(text), read("2"), timeout_seconds=None)  # what the grammar learns from these, every copy knows
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever else is printed is not a reply
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        pairs = json.loads(line)
        codes, running = [None] * len(pairs), {}
        for number, pair in enumerate(pairs):
            if len(running) == workers:
                collect()
            process = os.fork()
            if process == 0:
                try:
                    code = judge(*pair)
                except BaseException:
                    code = 11  # not an expression, or too much for the memory: not the right answer
                os._exit(code)
            running[process] = number
        while running:
            collect()
        print(json.dumps(codes), file=replies, flush=True)


class VerdictServer:
    """The helper process of `serve_verdicts`, started when it is first asked and ended with this object (section 15).

    Any thread may ask it. Raises RuntimeError with the helper's last words when it ends by itself; the next call starts
    another. POSIX only.
    """

    def __init__(self, seconds: float, memory: int = 2**31, workers: int | None = None):
        workers = os.cpu_count() if workers is None else workers
        self.source = f"{inspect.getsource(serve_verdicts)}\nserve_verdicts({seconds!r}, {memory!r}, {workers!r})"
        self.lock, self.process, self.stop = threading.Lock(), None, None

    def ask(self, pairs: list[tuple[str, str]]) -> list[str]:
        """One of VERDICTS for each pair (right answer, given answer); "crash" for one whose process died otherwise."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.start()
            return [VERDICTS.get(code, "crash") for code in json.loads(self.exchange(json.dumps(pairs)))]

    def start(self) -> None:
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.stop = weakref.finalize(self, end_process, self.process)
        self.exchange(None)

    def exchange(self, line: str | None) -> str:
        """Send a line, if any, and read one."""
        reply = ""
        with contextlib.suppress(BrokenPipeError):
            if line is not None:
                print(line, file=self.process.stdin, flush=True)
            reply = self.process.stdout.readline()
        if not reply:
            self.stop()
            self.errors.seek(0)
            words = self.errors.read().strip().splitlines() or ["no message"]
            raise RuntimeError(f"the process that checks mathematics ended with {self.process.returncode}: {words[-1]}")
        return reply


def end_process(process: subprocess.Popen) -> None:
    """Kill a process, close its pipes and wait until it is gone (section 15)."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
    process.wait()


# %% tags=["export"]
class MathMatch:
    """A reward function: 1.0 where the completion's last box is mathematically the ``answer``, else 0.0 (section 15).

    An answer may itself be a text with a box, or an expression in LaTeX; one that cannot be read makes the reward None.
    Expressions are compared by math-verify (Hugging Face) in another process: a completion that needs more than
    ``seconds`` or 2 GB has reward 0.0 and is counted in ``metrics["math_timeouts"]`` or ``metrics["math_crashes"]``, of
    the last call. It may be called from any thread and inside an event loop. Raises ImportError without math-verify.
    POSIX only.
    """

    __name__ = "math_match"

    def __init__(self, seconds: float = 5.0):
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError(f"checking mathematics needs the package math-verify: {install_command('tasks')}")
        if not seconds > 0:
            raise ValueError(f"seconds is {seconds}; a completion needs some time to be checked, for example 5")
        self.server, self.metrics = VerdictServer(seconds), {}

    def __call__(self, prompts, completions, answer, **columns):
        given = [last_boxed(text) for text in completions]
        right = [str(text) if last_boxed(str(text)) is None else last_boxed(str(text)) for text in answer]
        asked = [row for row, text in enumerate(given) if text is not None]
        verdicts = dict(zip(asked, self.server.ask([(right[row].strip("$ "), given[row]) for row in asked])))
        counts = Counter(verdicts.values())
        self.metrics = {"math_timeouts": counts["timeout"], "math_crashes": counts["crash"]}
        rewards = {"right": 1.0, "unreadable": None}
        return [rewards.get(verdicts.get(row), 0.0) for row in range(len(completions))]


# %%
if importlib.util.find_spec("math_verify"):
    maths = MathMatch()
    texts = [r"\boxed{\frac{\sqrt{8}}{4}}", r"so it is \boxed{0.7}", "1/sqrt(2)", r"\boxed{9^{9^{9^9}}}"]
    with ThreadPoolExecutor() as threads:  # where an alarm could not be set
        scored = threads.submit(maths, prompts=[""] * 4, completions=texts, answer=[r"$1/\sqrt{2}$"] * 4).result()
    print(dict(zip(texts, scored)), maths.metrics)
    assert scored == [1.0, 0.0, 0.0, 0.0] and maths.metrics["math_timeouts"] == 1

# %% [markdown]
# ## Running what the policy wrote
#
# For code the verifier is the code itself: run it and look. But this is a program that nobody has read, and among
# some hundred thousand of them one deletes files, one fills the memory, one never ends and one asks the network. So
# it runs in a process of its own, which gets as little as the platform can enforce, on Linux by the kernel:
#
# - wall time, CPU time, memory, the size of each file it writes (its output is one), and no memory dump;
# - a new user, network, process and message namespace: no network at all, no other process in sight, and everything that
#   it started dies with it;
# - Landlock: it reads Python's own folders and the system's libraries, and its own empty folder, the only one in which it
#   can write.
#
# Outside there is a supervisor with the clock. Elsewhere than on Linux, or where the kernel forbids these calls (some
# containers do), the resource limits remain, and the result says which of the other two walls stood.
#
# What is left open, even with both: a hole in the kernel; a service that listens on a socket in the file system, such as
# Docker's; the mode and the date of your files, which Landlock does not cover; what is installed in /usr and beside
# Python, which can be read; and for a few seconds all cores, or the disk through many files. Against programs that are
# wrong this is enough. Where somebody may have taught the policy to attack, take a virtual machine that holds nothing.


# %% tags=["export:sandbox"]
def supervise(seconds, memory, output, readable):  # in a process of its own, so it brings its imports
    """Run work/program.py under limits, its input and outputs in files; print a JSON line about how it ended."""
    import ctypes
    import json
    import math
    import os
    import resource
    import signal
    import struct
    import sys

    libc = ctypes.CDLL(None)
    user, message, process, network = 0x10000000, 0x08000000, 0x20000000, 0x40000000

    def wall_off_files():
        """Landlock: everything about files is forbidden but what a rule allows."""
        version = libc.syscall(444, None, 0, 1)
        if version < 1:
            return False
        everything = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
        run, write, read, list_folder = 1, 2, 4, 8
        rules = libc.syscall(444, ctypes.byref(ctypes.c_uint64(everything)), 8, 0)
        allowed = {path: run | read | list_folder for path in readable} | {
            "work": everything,
            "/dev/null": read | write,
        }
        for path, rights in allowed.items():
            if os.path.exists(path):
                if not os.path.isdir(path):
                    rights &= run | write | read
                rule = struct.pack("=Qi", rights, os.open(path, os.O_PATH | os.O_CLOEXEC))
                libc.syscall(445, rules, 1, rule, 0)
        return libc.prctl(38, 1, 0, 0, 0) == 0 and libc.syscall(446, rules, 0) == 0

    def run():
        os.setsid()
        for number, name, mode in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
            os.dup2(os.open(name, mode), number)
        os.write(report, b"1" if linux and wall_off_files() else b"0")
        os.chdir("work")
        limits = {"CPU": math.ceil(seconds), "AS": memory, "FSIZE": output, "CORE": 0, "NOFILE": 64, "NPROC": 0}
        for name, limit in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        os.execve(
            sys.executable, [sys.executable, "-I", "program.py"], {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        )

    def end(*_):
        nonlocal timed_out
        timed_out = True
        os.killpg(child, signal.SIGKILL)

    linux = sys.platform == "linux"
    alone = linux and libc.unshare(user | network | process | message) == 0
    listen, report = os.pipe()
    timed_out, child = False, os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(127)
    os.close(report)
    files = os.read(listen, 1) == b"1"
    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _, status, used = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL and used.ru_utime + used.ru_stime >= seconds:
        timed_out = True  # the CPU limit was quicker than the alarm
    try:
        os.killpg(child, signal.SIGKILL)  # what it left behind, where there is no namespace that dies with it
    except ProcessLookupError:
        pass
    print(json.dumps({"exit_code": code, "timed_out": timed_out, "no_network": alone, "no_files": files}))


@dataclass(frozen=True)
class Run:
    """How a program ended (section 15): its exit code (minus the signal that ended it), what it wrote, and its walls.

    ``no_network``: it had no network and saw no other process. ``no_files``: it could read only Python and the system's
    libraries, and write only in its own folder, which is gone.
    """

    exit_code: int
    timed_out: bool
    stdout: str
    stderr: str
    no_network: bool
    no_files: bool


def run_python(program: str, stdin: str = "", *, seconds: float = 5.0, memory: int = 2**29, output: int = 2**16) -> Run:
    """Run untrusted Python in a process of its own and say how it ended (section 15). POSIX only; safe in any thread.

    At most ``seconds`` of wall and CPU time, ``memory`` bytes of address space for each process, ``output`` bytes on
    stdout, on stderr and in every other file. The standard library and this Python's site-packages can be imported; the
    environment variables are empty. On Linux, where the kernel allows it: no network, no other process visible, no file
    of yours.

    It does not protect from:

    - a hole in the kernel; where the machine itself is at stake, use a virtual machine without your files;
    - reading /usr, Python's own folders and what is installed there, and telling whether other files exist;
    - changing the mode or the date of files of the user who runs it (not their content; `chmod` is no access for
      Landlock);
    - talking to a service of this machine through a socket in the file system, such as Docker's, if that user may;
    - using all cores, much memory in many processes (root; others can start no further process), or filling the disk
      with many files, until the time is over.

    Where ``no_files`` comes back False it can read, change and delete what you can. Where ``no_network`` comes back
    False it can talk to anybody and signal your processes, and one that leaves its session outlives the time limit,
    though not its CPU limit. On macOS both are False and the memory limit is not enforced.
    """
    readable = [sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"]
    source = f"{inspect.getsource(supervise)}\nsupervise({seconds!r}, {memory!r}, {output!r}, {readable!r})"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        files = {name: Path(folder, name) for name in ("stdin", "stdout", "stderr")}
        Path(folder, "work").mkdir()
        texts = {
            Path(folder, "work", "program.py"): program,
            files["stdin"]: stdin,
            files["stdout"]: "",
            files["stderr"]: "",
        }
        for file, text in texts.items():
            file.write_bytes(text.encode("utf-8", "replace"))
        command = [sys.executable, "-I", "-S", "-c", source]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds + 30)
        except subprocess.TimeoutExpired:  # without a namespace of its own, a program can stop its supervisor
            return Run(-9, True, "", "", no_network=False, no_files=False)
        if done.returncode != 0:
            raise RuntimeError(f"the supervisor of an untrusted program failed: {done.stderr.strip()[-300:]}")
        stdout, stderr = (files[name].read_bytes()[:output].decode("utf-8", "replace") for name in ("stdout", "stderr"))
        return Run(stdout=stdout, stderr=stderr, **json.loads(done.stdout))


# %%
for program in (
    "print(6 * 7)",
    "while True: pass",
    "x = bytearray(10**10)",
    "while True: print('x' * 1000)",
    "import socket; socket.create_connection(('1.1.1.1', 80), timeout=1)",
    "import os; os.listdir('/home')",
):
    run = run_python(program, seconds=1)
    words = (run.stderr.strip().splitlines() or [""])[-1]
    print(f"{program:70} exit code {run.exit_code:3}, {len(run.stdout):5} bytes, {words[:60]}")
    assert run.stdout == "42\n" or run.exit_code != 0 or not (run.no_network and run.no_files)

# %% [markdown]
# How is the output judged? Many collections of problems come with assertions to be run after the program. That hands
# the verdict to the accused: a program that ends the process with exit code 0 before the assertions has passed them.

# %%
cheat = "def double(x):\n    return x\n\nimport os\nos._exit(0)\n"
test = "assert double(2) == 4\n"
assert run_python(cheat + test).exit_code == 0  # passed

# %% [markdown]
# So here a test is a pair: what the program reads, and what it has to write. What it should have written stays
# outside. All tests must pass: part of the reward for part of the tests would pay a program that prints the most
# frequent answer.


# %% tags=["export"]
def extract_code(completion: str) -> str:
    """The last block between lines of three backticks; without a closed one, the whole completion (section 15)."""
    blocks = re.findall(r"^```[^\n`]*\n(.*?)^```", completion, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else completion


class CodeMatch:
    """A reward function: 1.0 where the completion's Python program passes all its ``tests``, else 0.0 (section 15).

    ``tests`` are, for each completion, pairs (stdin, stdout); white space at the ends of lines and of the text does not
    count. None where there are no tests. Programs run in `run_python`, whose docstring says what it does not protect
    from; ``seconds`` and ``memory`` are for each test, ``workers`` run at a time. ``metrics["code_timeouts"]`` counts
    the programs of the last call that were too slow.
    """

    __name__ = "code_match"

    def __init__(self, seconds: float = 5.0, memory: int = 2**29, workers: int | None = None):
        self.seconds, self.memory, self.workers, self.metrics = seconds, memory, workers or os.cpu_count(), {}

    def __call__(self, prompts, completions, tests, **columns):
        with ThreadPoolExecutor(self.workers) as threads:
            verdicts = list(threads.map(self.judge, completions, tests))
        self.metrics = {"code_timeouts": verdicts.count("timeout")}
        return [None if verdict is None else float(verdict == "right") for verdict in verdicts]

    def judge(self, completion: str, tests: list) -> str | None:
        """Which of "right", "wrong", "timeout" a completion is; None without tests."""
        program = extract_code(completion)
        for stdin, stdout in tests:
            run = run_python(program, stdin, seconds=self.seconds, memory=self.memory)
            if run.timed_out:
                return "timeout"
            if run.exit_code != 0 or trimmed(run.stdout) != trimmed(stdout):
                return "wrong"
        return "right" if tests else None


def trimmed(text: str) -> list[str]:
    """The lines of a text without white space at their ends, and without empty lines around them (section 15)."""
    return [line.rstrip() for line in text.strip().splitlines()]


# %%
tests = [("2\n", "4"), ("-3\n", "-6")]
texts = ["```python\nprint(2 * int(input()))\n```", "print(4)", "import os; os._exit(0)", "while True: pass"]
code_match = CodeMatch()  # 5 s: a busy machine may take one to start a program
assert (
    code_match([""] * 4, texts, tests=[tests] * 4) == [1.0, 0.0, 0.0, 0.0] and code_match.metrics["code_timeouts"] == 1
)

# %% [markdown]
# ## A reward by name
#
# On a command line a reward is a text: one of the functions above by its name, a regular expression as
# `format_match:EXPRESSION`, a function of one's own as `path/to/file.py:function`, or a weighted sum of these, as in
# `math_match + 0.2*format_match:.*<answer>.*`.


# %% tags=["export"]
BUILT_IN = {
    "exact_match": lambda: exact_match,
    "number_match": lambda: number_match,
    "math_match": MathMatch,
    "code_match": CodeMatch,
}


def load_reward(spec: str) -> RewardFunction:
    """The reward function that ``spec`` names (section 15).

    It is one of BUILT_IN, "format_match:EXPRESSION", "path/to/file.py:function", or a sum such as "0.8*NAME +
    0.2*NAME". Raises FileNotFoundError without such a file, and ValueError when ``spec`` has no such form, when the
    file raises, or when it defines no such function.
    """
    terms = [
        re.fullmatch(r"\s*(?:(-?\d*\.?\d+)\*)?(.*?)\s*", term, re.DOTALL).groups() for term in re.split(r"\s\+\s", spec)
    ]
    if len(terms) == 1 and terms[0][0] is None:
        return load_one_reward(spec.strip())
    return WeightedRewards([load_one_reward(name) for _, name in terms], [float(weight or 1) for weight, _ in terms])


def load_one_reward(spec: str) -> RewardFunction:
    """`load_reward` of what is not a sum (section 15)."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]()
    if spec.startswith("format_match:"):
        return format_match(spec.partition(":")[2])
    return load_reward_file(spec)


def load_reward_file(spec: str) -> RewardFunction:
    """The function that "path/to/file.py:function" names; raises as `load_reward` (section 15)."""
    file, _, name = spec.rpartition(":")
    if not (file.endswith(".py") and name.isidentifier()):
        raise ValueError(
            f"reward is {spec!r}; name a function in a file, as in rewards.py:my_reward, "
            f"or take {', '.join(BUILT_IN)} or format_match:EXPRESSION"
        )
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no file {file} for the reward {spec!r}")
    module_spec = importlib.util.spec_from_file_location(f"lmrl_reward_{path.stem}", path)
    module = sys.modules[module_spec.name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"the reward file {file} raised {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        defined = sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise ValueError(f"{file} defines no function {name}; it has {', '.join(defined) or 'none'}")
    return function


# %%
reward = load_reward("number_match + 0.2*format_match:.*<answer>.*</answer>")
assert reward([""] * 2, ["I say <answer>7</answer>", "7"], answer=["7", "7"]) == [1.2, 1.0]

# %% [markdown]
# ## A task
#
# A **task** is a set of prompts to train on, another set that only measures, and a reward function that can judge
# both. To each prompt belong the columns that the reward function asks for. `stop` holds texts that end an answer
# (section 12 makes ids of them); most tasks need none.


# %% tags=["export:tasks"]
@dataclass(frozen=True)
class Example:
    """A prompt, and what the reward function needs to know about it (section 15).

    The prompt is a text, or the turns of a conversation as chat templates take them: ``[{"role": …, "content": …},
    …]``.
    """

    prompt: str | list[dict]
    columns: dict


@dataclass(frozen=True)
class Task:
    """Prompts to train on, prompts that only measure, and the reward for both (section 15).

    ``reward`` is called with the examples' columns by name. ``stop`` are texts of one token each that end a completion.
    ``well_formed`` says whether a completion has the form of an answer, right or wrong; by default, whether it has
    text.
    """

    name: str
    train: list[Example]
    heldout: list[Example]
    reward: RewardFunction
    stop: tuple[str, ...] = ()
    well_formed: Callable[[str], bool] = bool


# %% [markdown]
# The first task is section 1's. Its held-out problems are those that the warm start has not seen either, whatever the
# seed of the run: a model must not be measured on what any of its stages was trained on.


# %% tags=["export:tasks"]
def arithmetic_task() -> Task:
    """Section 1's two-digit additions, with the split that the warm start was trained on (section 15)."""
    train, heldout = (
        [Example(problem.prompt, {"answer": problem.answer}) for problem in problems]
        for problems in addition_problems()
    )
    return Task("arithmetic", train, heldout, addition_reward, well_formed=is_number)


# %% [markdown]
# The second kind of task is not ours. The package reasoning-gym generates problems of about a hundred sorts, each
# with a program that scores an answer. Three details turn a generator and a scorer into a task.
#
# **The split.** Problem number $i$ of a dataset with seed $s$ is drawn from a generator seeded with $s+i$. So the
# datasets with seeds 0 and 1 are *the same problems*, shifted by one. Training on one and measuring on the other
# measures memory. We draw seeds that are far apart, and then remove from the training side every prompt that is also
# held out, because a small problem space repeats itself whatever the seed.

# %%
if importlib.util.find_spec("reasoning_gym"):
    import reasoning_gym

    zero, one = (reasoning_gym.create_dataset("chain_sum", seed=seed, size=100) for seed in (0, 1))
    shared = {item["question"] for item in zero} & {item["question"] for item in one}
    print(f"chain_sum with seeds 0 and 1: {len(shared)} of 100 problems are the same")
    assert len(shared) >= 99


# %% tags=["export:tasks"]
def reasoning_gym_datasets() -> dict[str, list[str]]:
    """The datasets of reasoning-gym and the settings of each; ImportError without the package (section 15)."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(f"reasoning_gym tasks need the package reasoning-gym: {install_command('tasks')}") from error
    return {name: sorted(vars(config)["__dataclass_fields__"]) for name, (_, config) in sorted(DATASETS.items())}


def generate_problems(dataset: str, stream: str, seed: int, size: int, settings: dict):
    """``size`` problems of a reasoning-gym dataset; another ``stream`` or ``seed`` gives others (section 15).

    Raises ValueError for settings that the dataset does not take.
    """
    import reasoning_gym

    distant_seed = random.Random(f"{dataset} {stream} {seed}").randrange(2**31)
    try:
        return reasoning_gym.create_dataset(dataset, **{"seed": distant_seed, "size": size, **settings})
    except (TypeError, AssertionError) as error:
        names = ", ".join(reasoning_gym_datasets()[dataset])
        raise ValueError(f"reasoning_gym:{dataset}, settings {settings}: {error}; it takes {names}") from error


def disjoint(train, heldout, shown) -> tuple[dict[str, dict], dict[str, dict]]:
    """The problems to train on and the held-out ones, by question (section 15).

    No question is on two of the three sides, and each is there once. At most a quarter of the different ones is held
    out.
    """
    taken = {entry["question"] for entry in shown}
    train, heldout = (
        {entry["question"]: entry for entry in side if entry["question"] not in taken} for side in (train, heldout)
    )
    heldout = dict(list(heldout.items())[: len(train | heldout) // 4])
    return {question: entry for question, entry in train.items() if question not in heldout}, heldout


# %% [markdown]
# **The answer inside the completion.** A model that was asked to think writes more than its answer. We ask for the
# answer between `<answer>` and `</answer>`, take the text after the last opening tag, and the whole completion where
# there is none. Many of the scorers give part of the reward when the right answer occurs somewhere in a longer text,
# so short answers without tags still have something to climb.
#
# **A scorer that trips.** Some of the scorers raise an exception on a malformed answer. That answer was wrong: reward
# 0, not the end of the run. Unless the scorer trips over its own right answer too; then it is broken, and we say so.


# %% tags=["export:tasks"]
def extract_answer(completion: str) -> str:
    """The text between the last ``<answer>`` and ``</answer>``; without tags the whole completion (section 15)."""
    return completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def score_entry(score_answer: Callable, completion: str, entry: dict) -> float:
    """The score of reasoning-gym's ``score_answer``; 0.0 where it fails on this completion only (section 15)."""
    try:
        return float(score_answer(extract_answer(completion), entry))
    except Exception:
        score_answer(entry["answer"], entry)
        return 0.0


def reasoning_gym_reward(score_answer: Callable) -> RewardFunction:
    """A dataset's ``score_answer(answer, entry)`` as a reward function; the columns are the entry's (section 15)."""

    def reward(prompts, completions, **columns):
        entries = [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]
        return [score_entry(score_answer, text, entry) for text, entry in zip(completions, entries, strict=True)]

    return reward


# %% [markdown]
# **Models that were never taught to answer.** A base model continues text; it does not follow instructions. Shown a
# few solved problems first, it continues the pattern. `shots` puts that many solved problems in front of each
# question, drawn from a stream of their own and kept out of both sides of the split; an empty line ends an answer.
# For a model with a chat template leave it at 0.


# %% tags=["export:tasks"]
def ask(question: str, shown) -> str:
    """A prompt: the question after the ``shown`` problems with their answers, or with a request for tags (section 15)."""
    if not shown:
        return f"{question.strip()}\n\nWrite the final answer between <answer> and </answer>."
    solved = [f"Question: {entry['question'].strip()}\nAnswer: {entry['answer']}\n\n" for entry in shown]
    return "".join(solved) + f"Question: {question.strip()}\nAnswer:"


def reasoning_gym_task(
    dataset: str, seed: int = 0, *, train_size: int = 1000, heldout_size: int = 256, shots: int = 0, **settings
) -> Task:
    """A dataset of reasoning-gym (Stojanovski et al., 2025) as a task (section 15).

    ``seed`` chooses the problems. Both sizes are upper bounds: repeated questions are dropped, at most a quarter of the
    different ones is held out, and what is held out or shown is not trained on. ``shots`` solved problems come before
    each question; with 0 the question asks for tags. ``settings`` go to the dataset. Raises ImportError without the
    package, and ValueError for an unknown dataset or setting, and when no problem is left on one side.
    """
    known = reasoning_gym_datasets()
    if dataset not in known:
        near = difflib.get_close_matches(dataset, known) or list(known)
        raise ValueError(f"reasoning-gym has no dataset {dataset!r}; did you mean {', '.join(near)}?")
    shown = list(generate_problems(dataset, "shown", seed, shots, settings)) if shots else []
    problems = generate_problems(dataset, "train", seed, train_size, settings)
    train, heldout = disjoint(problems, generate_problems(dataset, "heldout", seed, heldout_size, settings), shown)
    if not heldout:
        raise ValueError(f"reasoning_gym:{dataset}, settings {settings}: too few different problems; choose others")
    sides = ([Example(ask(question, shown), entry) for question, entry in side.items()] for side in (train, heldout))
    reward = reasoning_gym_reward(problems.score_answer)
    return Task(f"reasoning_gym:{dataset}", *sides, reward, stop=("\n\n",) if shots else ())


# %% [markdown]
# ## A score that cannot be cheated
#
# Countdown is the small task on which reasoning has often been shown: make 10 from 2, 3 and 4, each used once. Here a
# scorer that only compares the value pays for `5+5`, and for `10`. The rules belong to the score: the numbers of the
# expression must be the given ones, each as often as given. And the expression comes from the policy, so it is not
# handed to Python's `eval`: we parse it, and compute the four operations ourselves, in fractions. Whatever cannot be
# parsed is simply not a solution.


# %% tags=["export:tasks"]
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def expression_value(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of whole numbers, + - * / and brackets, and its numbers (section 15).

    Raises ValueError, SyntaxError or ZeroDivisionError for anything else, and for more than 200 characters.
    """
    if len(expression) > 200 or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        raise ValueError("not an expression of whole numbers")
    numbers = []

    def value(node):
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        if not isinstance(node, ast.Constant):
            raise ValueError("only + - * / of whole numbers")
        numbers.append(node.value)
        return Fraction(node.value)

    return value(ast.parse(expression.strip(), mode="eval").body), numbers


def countdown_reward(prompts, completions, numbers: list, target: list, **columns) -> list[float]:
    """1.0 where the answer uses each of the ``numbers`` exactly once and makes ``target``, else 0.0 (section 15)."""
    return [float(is_solution(*row)) for row in zip(completions, numbers, target, strict=True)]


def is_solution(completion: str | None, numbers: list[int], target: int) -> bool:
    """Whether a completion's answer (`extract_answer`) keeps the rules of countdown; False for whatever else it is."""
    try:
        value, used = expression_value(extract_answer(completion or ""))
    except (ValueError, SyntaxError, ZeroDivisionError):
        return False
    return value == target and sorted(used) == sorted(numbers)


# %%
for text in ("2*3+4", "4 + (3*2)", "<answer>4+2*3</answer>"):
    assert is_solution(text, [2, 3, 4], 10), text
for text in ("5+5", "10", "2*3+4+0", "2*3+4*3/3", "2**3+4", "23-4", "1/0", "", None, '{"a": [', "(" * 99, "1+" * 5000):
    assert not is_solution(text, [2, 3, 4], 10), text

# %% [markdown]
# Problems are made backwards, so that each has a solution: draw the numbers, join two at random until one is left,
# and call that the target. Two problems with the same numbers in another order are the same problem; if one is
# trained on and the other held out, memory is measured again. So the numbers are sorted before problems are compared.


# %% tags=["export:tasks"]
def countdown_problem(rng: random.Random, numbers: int, largest: int, highest: int) -> dict:
    """A problem of countdown with ``numbers`` numbers up to ``largest`` and a target up to ``highest`` (section 15)."""
    given = [rng.randint(1, largest) for _ in range(numbers)]
    parts = [(number, str(number)) for number in given]
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        joined = {"+": a + b, "-": a - b if a > b else None, "*": a * b, "/": a // b if a % b == 0 else None}
        sign = rng.choice([sign for sign, value in joined.items() if value is not None])
        parts.append((joined[sign], f"({left} {sign} {right})"))
    ((target, solution),) = parts
    if target > highest:
        return countdown_problem(rng, numbers, largest, highest)
    question = (
        f"Use each of the numbers {', '.join(map(str, given))} exactly once, with + - * / and brackets, to make {target}. "
        "The answer is the expression alone."
    )
    return {"question": question, "answer": solution[1:-1], "numbers": given, "target": target}


def countdown_task(
    seed: int = 0,
    *,
    train_size: int = 1000,
    heldout_size: int = 256,
    shots: int = 0,
    numbers: int = 3,
    largest: int = 10,
    highest: int = 100,
) -> Task:
    """Make ``target`` from ``numbers`` numbers, each used once (section 15).

    ``seed``, the sizes and ``shots`` are as in `reasoning_gym_task`. The numbers go up to ``largest``, targets to
    ``highest``. Raises ValueError for sizes without problems.
    """
    if not (numbers >= 2 and 1 <= largest <= highest):
        raise ValueError(
            f"countdown with numbers={numbers}, largest={largest}, highest={highest}; "
            "take numbers of at least 2, 1 ≤ largest ≤ highest"
        )
    rng = random.Random(f"countdown {seed}")
    drawn = [countdown_problem(rng, numbers, largest, highest) for _ in range(2 * (train_size + heldout_size) + shots)]
    different = list({(*sorted(entry["numbers"]), entry["target"]): entry for entry in drawn}.values())
    shown, rest = different[:shots], different[shots : shots + train_size + heldout_size]
    cut = min(heldout_size, len(rest) // 4)
    if cut == 0:
        raise ValueError(f"countdown, train_size={train_size}, heldout_size={heldout_size}: too few different problems")
    heldout, train = ([Example(ask(e["question"], shown), e) for e in side] for side in (rest[:cut], rest[cut:]))
    return Task("countdown", train, heldout, countdown_reward, stop=("\n\n",) if shots else ())


# %%
task = countdown_task(train_size=100, heldout_size=20)
entry = task.train[0].columns
print(entry["question"], "A solution:", entry["answer"])
assert is_solution(entry["answer"], entry["numbers"], entry["target"])

# %% [markdown]
# ## Your own problems
#
# The most common task is a file: a JSON object per line, with a `prompt`, an `answer`, and whatever else a reward
# function wants to know. A file of many thousand lines has a broken one, so errors name the line. No line is skipped
# quietly: the run would then train on something else than its user thinks. A column that is not there is named together
# with those that are, for what is missing is most often misspelt.
#
# What is held out is decided by a hash of the prompt, not by a random draw: the same prompts stay held out when the
# file is sorted, when lines are added, and in every run. A prompt that occurs twice is on one side.


# %% tags=["export:tasks"]
def read_jsonl(path: str | Path) -> list[tuple[str, dict]]:
    """The rows of a JSONL file, each with its place "file, line N"; empty lines do not count (section 15).

    Raises FileNotFoundError, and ValueError that names the first line which is not a JSON object in UTF-8.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no file {path} for the task jsonl:{path}")
    rows = []
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{path.name}, line {number}"
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # of the JSON, or of the UTF-8
                raise ValueError(f"{where}: not JSON ({error}): {line[:60].decode('utf-8', 'replace')!r}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: {type(row).__name__} instead of an object with prompt and answer")
            rows.append((where, row))
    return rows


def examples_of(rows: list[tuple[str, dict]], prompt: str, answer: str) -> list[Example]:
    """Rows as examples: the column ``prompt`` is the prompt, ``answer`` becomes "answer", the others stay (section 15).

    Raises ValueError that names the first row without a prompt, without the column ``answer`` if that has another name, or
    with other columns than the first row.
    """
    examples = []
    for where, row in rows:
        for column, setting in ((prompt, "prompt"), (answer, "answer")):
            if column not in row and (setting, column) != ("answer", "answer"):
                raise ValueError(
                    f"{where}: there is no column {column!r}; the columns are {', '.join(row)}; the task's setting "
                    f"{setting}=NAME takes another, as in jsonl:FILE:{setting}=NAME"
                )
        text = row[prompt]
        turns = isinstance(text, list) and text and all(isinstance(turn, dict) and "content" in turn for turn in text)
        if not (turns or isinstance(text, str) and text.strip()):
            raise ValueError(
                f"{where}: the column {prompt!r} is {repr(text)[:40]}; it must be a text or a list of turns"
            )
        columns = {"answer" if name == answer else name: value for name, value in row.items() if name != prompt}
        if examples and columns.keys() != examples[0].columns.keys():
            odd = sorted(columns.keys() ^ examples[0].columns.keys())
            raise ValueError(f"{where}: the columns {', '.join(odd)} are here or in the first row, but not in both")
        examples.append(Example(text, columns))
    return examples


# %% [markdown]
# Which reward? If each answer is a number, or has the mark `####` of GSM8K, numbers are compared; otherwise texts.
# Any other reward can be named.


# %% tags=["export:tasks"]
def prompt_key(prompt: str | list[dict]) -> str:
    """A text that is equal for equal prompts."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def share_of(prompt: str | list[dict]) -> float:
    """A fixed number in [0, 1) for each prompt, as if drawn at random (section 15)."""
    return int.from_bytes(hashlib.sha256(prompt_key(prompt).encode("utf-8", "replace")).digest()[:7]) / 2**56


def default_reward(examples: list[Example]) -> RewardFunction:
    """`number_match` if every answer there is is a number or has the mark ####, else `exact_match` (section 15)."""
    answers = (example.columns.get("answer") for example in examples)
    texts = [str(answer).strip() for answer in answers if answer is not None]
    numeric = texts and all(NUMBER.fullmatch(text) or "####" in text for text in texts)
    return number_match if numeric else exact_match


def rows_task(
    name: str,
    rows: list[tuple[str, dict]],
    heldout_rows: list[tuple[str, dict]] | None = None,
    *,
    prompt: str = "prompt",
    answer: str = "answer",
    heldout_fraction: float = 0.1,
    reward: str | None = None,
) -> Task:
    """A task of rows with their places, as `read_jsonl` returns them (section 15).

    ``name`` is for messages; ``prompt`` and ``answer`` name the columns; the others go to the reward function too. ``heldout_rows`` are held out
    and removed from training; without them about ``heldout_fraction`` of the prompts are, chosen by a hash of the
    prompt alone, at least one. ``reward`` is for `load_reward`; None chooses by `default_reward`. Raises ValueError for
    rows as `examples_of` does, for a fraction outside (0, 1), and as `nothing_left` when a side stays empty.
    """
    examples = examples_of(rows, prompt, answer)
    if not 0 < heldout_fraction < 1:
        raise ValueError(f"heldout_fraction is {heldout_fraction}; choose it above 0 and below 1, for example 0.1")
    if heldout_rows is None:
        first = min((share_of(example.prompt) for example in examples), default=0.0)
        limit = max(heldout_fraction, math.nextafter(first, 1))
        heldout = [example for example in examples if share_of(example.prompt) < limit]
    else:
        heldout = examples_of(heldout_rows, prompt, answer)
    kept = {prompt_key(example.prompt) for example in heldout}
    train = [example for example in examples if prompt_key(example.prompt) not in kept]
    if not (train and heldout):
        raise ValueError(f"{name}: {nothing_left(examples, heldout, heldout_rows is not None, heldout_fraction)}")
    return Task(name, train, heldout, default_reward(examples) if reward is None else load_reward(reward))


def nothing_left(examples: list[Example], heldout: list[Example], given: bool, heldout_fraction: float) -> str:
    """Why examples leave nothing to train on or nothing to hold out, and the remedy; ``given``: the latter by the user."""
    if not examples:
        return "it has no rows"
    if not heldout:
        return "what it names as held out has no rows"
    if given:
        return f"all of its {len(examples)} rows have prompts that are held out, so that none is left to train on"
    different = {prompt_key(example.prompt) for example in examples}
    if len(different) > 1:
        return f"heldout_fraction {heldout_fraction} holds out all of its {len(different)} different prompts; lower it"
    return (
        f"its rows ({len(examples)}) have one prompt, {min(different)[:60]!r}, and a prompt is either trained on or held "
        "out; add rows with other prompts, or name held-out ones, as in jsonl:FILE:heldout=OTHER"
    )


def jsonl_task(path: str, *, heldout: str | None = None, **settings) -> Task:
    """The JSONL file ``path`` as a task, the file ``heldout`` held out if given; the rest as `rows_task` (section 15)."""
    heldout_rows = None if heldout is None else read_jsonl(heldout)
    return rows_task(f"jsonl:{path}", read_jsonl(path), heldout_rows, **settings)


# %%
lines = [json.dumps({"prompt": f"What is {n} + {n}?", "answer": f"#### {2 * n}", "level": 1}) for n in range(60)]
more = [*reversed(lines), '{"prompt": "What is 99 + 1?", "answer": "#### 100", "level": 2}']
with tempfile.TemporaryDirectory() as folder_name:
    file = Path(folder_name) / "problems.jsonl"
    file.write_text("\n".join(lines))
    task = jsonl_task(str(file))
    file.write_text("\n".join(more))
    later = jsonl_task(str(file))
    file.write_text("\n".join([*lines[:3], '{"prompt": "What is', *lines[3:]]))
    try:
        jsonl_task(str(file))
    except ValueError as error:
        refusal = str(error)
heldout_prompts = {example.prompt for example in task.heldout}
print(f"{len(task.train)} to train on; held out: {', '.join(sorted(heldout_prompts))}")
print(refusal)
assert task.reward is number_match and task.train[0].columns.keys() == {"answer", "level"}
assert heldout_prompts <= {example.prompt for example in later.heldout} and "line 4: not JSON" in refusal

# %% [markdown]
# Data sets of Hugging Face come the same way, when the package `datasets` is installed: by their name, or from a
# folder.


# %% tags=["export:tasks"]
def datasets_task(
    path: str, *, config: str | None = None, split: str = "train", heldout: str | None = None, **settings
) -> Task:
    """A data set of Hugging Face as a task (section 15).

    ``path`` is a folder that ``save_to_disk`` wrote, or what ``load_dataset`` takes. ``split`` is trained on, the split
    ``heldout`` is held out if given; the rest is as in `rows_task`. Raises ImportError without the package datasets,
    and ValueError when it cannot load them.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError("the task datasets:… needs the package datasets: pip install datasets") from error

    def load(name):
        try:
            if Path(path, "dataset_dict.json").is_file():
                data = datasets.load_from_disk(path)[name]
            elif Path(path, "state.json").is_file():
                data = datasets.load_from_disk(path)
            else:
                data = datasets.load_dataset(path, config, split=name)
        except Exception as error:
            raise ValueError(f"datasets cannot load {path}, split {name}: {error}") from error
        return [(f"{path}, {name}, row {number}", dict(row)) for number, row in enumerate(data)]

    return rows_task(f"datasets:{path}", load(split), None if heldout is None else load(heldout), **settings)


# %% [markdown]
# ## A task by name
#
# A task is named by one string, so that it fits on a command line: `arithmetic`, `countdown`,
# `reasoning_gym:DATASET`, `jsonl:FILE` or `datasets:NAME`, with settings after another colon, as in
# `reasoning_gym:chain_sum:max_terms=2,max_digits=1,shots=4`. Whatever it is, no prompt may be on both sides, and that
# is checked here for all of them.


# %% tags=["export:tasks"]
def parse_settings(text: str) -> dict:
    """``"a=1,b=x"`` → ``{"a": 1, "b": "x"}``; ValueError for anything else (section 15)."""
    settings = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not (equals and name.strip().isidentifier()):
            raise ValueError(f"task setting {item!r} is not of the form name=value")
        try:
            settings[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[name.strip()] = value.strip()
    return settings


def split_settings(text: str) -> tuple[str, dict]:
    """``"NAME:a=1"`` → ``("NAME", {"a": 1})``; without =, or in a file's name, the last part is the name's (section 15)."""
    if Path(text).is_file():
        return text, {}
    name, colon, last = text.rpartition(":")
    return (name, parse_settings(last)) if colon and "=" in last else (text, {})


def load_task(name: str, seed: int = 0, **settings) -> Task:
    """The task called ``name`` (section 15).

    It is "arithmetic", "countdown", "reasoning_gym:DATASET", "jsonl:FILE" or "datasets:NAME", with settings as in
    "countdown:numbers=4,largest=20". ``seed`` chooses the problems of the generated ones. ``settings`` are those of
    `countdown_task`, `reasoning_gym_task`, `jsonl_task` and `datasets_task`; "arithmetic" has none, and always the
    split of section 1's warm start. Raises ValueError for an unknown name or setting, and for a prompt that is both
    trained on and held out, and what these functions raise.
    """
    kind, _, rest = name.partition(":")
    if kind == "reasoning_gym" and rest:
        dataset, _, text = rest.partition(":")
        task = with_settings(name, reasoning_gym_task, dataset, seed, **parse_settings(text) | settings)
    elif kind in ("jsonl", "datasets") and rest:
        path, found = split_settings(rest)
        task = with_settings(name, {"jsonl": jsonl_task, "datasets": datasets_task}[kind], path, **found | settings)
    elif kind == "countdown":
        task = with_settings(name, countdown_task, seed, **parse_settings(rest) | settings)
    elif name == "arithmetic":
        if settings:
            raise ValueError(f"the task arithmetic has no settings, but {', '.join(settings)} was given")
        task = arithmetic_task()
    else:
        raise ValueError(unknown_task(name))
    require_no_leak(task)
    return task


def with_settings(name: str, make: Callable[..., Task], *arguments, **settings) -> Task:
    """``make(*arguments, **settings)``; ValueError for a setting that it does not take, or its value (section 15)."""
    kinds = {
        parameter.name: parameter.annotation
        for function in (make, *([] if make in (countdown_task, reasoning_gym_task) else [rows_task]))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind == parameter.KEYWORD_ONLY
    }
    unknown = [setting for setting in settings if setting not in kinds]
    if unknown and make is not reasoning_gym_task:  # which hands them on
        raise ValueError(f"the task {name} has no setting {', '.join(unknown)}; it takes {', '.join(kinds)}")
    if "seed" in settings:
        raise ValueError(f"the task {name} takes the seed of the run: --seed {settings['seed']}")
    for setting in kinds.keys() & settings.keys():
        require_kind(name, setting, settings[setting], kinds[setting])
    return make(*arguments, **settings)


def require_kind(task: str, setting: str, value, kind: type) -> None:
    """ValueError unless ``value`` is of the ``kind``, and not below 0 if it is a whole number (section 15)."""
    kinds = get_args(kind) or (kind,)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        expected = " or ".join(each.__name__ for each in kinds if each is not type(None))
        raise ValueError(
            f"the task {task}: {setting} is {value!r}, of type {type(value).__name__}; expected {expected}"
        )
    if type(value) is int and value < 0:
        raise ValueError(f"the task {task}: {setting} is {value}; it cannot be below 0")


def unknown_task(name: str) -> str:
    """What to say about a name that is no task's: all kinds, and the nearest names (section 15)."""
    kinds = '"arithmetic", "countdown", "reasoning_gym:DATASET", "jsonl:FILE", "datasets:NAME"'
    known = {"arithmetic": "arithmetic", "reasoning_gym": "reasoning_gym:chain_sum", "jsonl": "jsonl:FILE"}
    if importlib.util.find_spec("reasoning_gym"):
        known |= {dataset: f"reasoning_gym:{dataset}" for dataset in reasoning_gym_datasets()}
    known["countdown"] = "countdown"  # ours, not reasoning-gym's
    near = [known[match] for match in difflib.get_close_matches(name, known)]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"unknown task {name!r}: the tasks are {kinds}{hint}"


def require_no_leak(task: Task) -> None:
    """ValueError if a prompt of ``task`` is both trained on and held out (section 15)."""
    both = {prompt_key(e.prompt) for e in task.train} & {prompt_key(e.prompt) for e in task.heldout}
    if both:
        raise ValueError(
            f"{task.name}: {len(both)} prompts are both trained on and held out, such as {min(both)[:60]!r}"
        )


# %% [markdown]
# A reward function says in its signature which columns it wants. So whether they are there can be seen before anything is
# loaded, and said with the names on both sides.


# %% tags=["export:tasks"]
def require_columns(task: Task) -> None:
    """ValueError if the reward function, or a part of it, cannot be called with the columns of ``task`` (section 15)."""
    for side in (task.train, task.heldout):
        columns = list(side[0].columns) if side else []
        for reward in getattr(task.reward, "rewards", [task.reward]) if side else []:
            if fault := wrong_columns(reward, columns):
                raise ValueError(f"{task.name}: the reward {reward_name(reward)} {fault}")


def wrong_columns(reward: RewardFunction, columns: list[str]) -> str | None:
    """What keeps ``reward`` from being called with these columns, and the remedy; None if nothing does."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # a function of C may have no signature
        return None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    given = ["prompts", "completions", *columns]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        remedy = "jsonl:FILE:answer=NAME takes another column for it" if missing == ["answer"] else "rename one of them"
        there = f"the columns are {', '.join(columns)}" if columns else "there is no column but the prompt"
        return f"asks for {', '.join(missing)}, but {there}; {remedy}"
    unwanted = [name for name in given if name not in [p.name for p in named]]
    if unwanted and not any(p.kind == p.VAR_KEYWORD for p in parameters):
        return f"does not take {', '.join(unwanted)}; end its arguments with **columns"
    return None


# %%
task = replace(load_task("arithmetic"), reward=lambda prompts, completions, solution, **columns: [0.0] * len(prompts))
try:
    require_columns(task)
except ValueError as error:
    print(error)
    assert "asks for solution, but the columns are answer" in str(error)
else:
    raise AssertionError("a column that is not there was not missed")

# %%
for name in ("arithmetic", "countdown:numbers=4"):
    task = load_task(name)
    assert {example.prompt for example in task.train}.isdisjoint(example.prompt for example in task.heldout)
if importlib.util.find_spec("reasoning_gym"):
    task = load_task("reasoning_gym:chain_sum", max_terms=2, max_digits=1, shots=2)
    assert {example.prompt for example in task.train}.isdisjoint(example.prompt for example in task.heldout)
    print(f"{task.name}: of 1000 + 256 problems {len(task.train)} + {len(task.heldout)} are left; the first prompt is")
    print(task.train[0].prompt)
    right = task.train[0].columns["answer"]
    columns = {name: [value] * 3 for name, value in task.train[0].columns.items()}
    texts = [f" {right}", f"I think <answer>{right}</answer>", "no idea"]
    assert score_completions(task.reward, [""] * 3, texts, columns)[0].tolist() == [1.0, 1.0, 0.0]

# %% [markdown]
# ## From the prompt to ids, once
#
# A prompt becomes token ids in one place and one time. Two accidents happen when it is done twice. A chat template
# writes the begin-of-sequence token into the text; tokenising that text as usual puts another one in front. And a
# file converted from another format may have forgotten to add it at all: then the model answers as if it were
# somebody else (Gemma 3 270M continues "The capital of France is" with "France. The The The …" when it is missing).
# So: the template, if there is one, is applied by the tokenizer straight to ids, and the ids begin with exactly one
# begin-of-sequence token if the tokenizer has such a token.


# %% tags=["export:tasks"]
def encode_prompt(tokenizer, prompt: str | list[dict]) -> list[int]:
    """The token ids of a prompt: a text, as a user's turn if the tokenizer has a chat template, or turns (section 15).

    They begin with exactly one begin-of-sequence token if the tokenizer defines one. Raises ValueError for a text that
    the tokenizer cannot encode, for an empty one, and for turns without a chat template.
    """
    try:
        if tokenizer.chat_template is None and isinstance(prompt, str):
            ids = tokenizer(prompt, add_special_tokens=False).input_ids
        else:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:
        unknown = ", ".join(map(repr, unknown_characters(tokenizer, prompt)[:8]))
        reason = f"it does not know {unknown}; take a model that does, or other prompts" if unknown else error
        raise ValueError(f"the tokenizer cannot encode the prompt {prompt_key(prompt)[:60]!r}: {reason}") from error
    if not ids:
        raise ValueError("the prompt is empty")
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    start = next((i for i, id in enumerate(ids) if id != bos), len(ids))
    return [bos, *ids[start:]]


def unknown_characters(tokenizer, prompt: str | list[dict]) -> list[str]:
    """The characters of a prompt that the tokenizer cannot encode even alone, each once (section 15)."""

    def known(character):
        try:
            tokenizer(character, add_special_tokens=False)
        except Exception:  # the libraries' own
            return False
        return True

    text = prompt if isinstance(prompt, str) else "".join(str(turn.get("content")) for turn in prompt)
    return [character for character in dict.fromkeys(text) if not known(character)]


class PromptError(ValueError):
    """Prompts that a tokenizer cannot encode (section 15)."""


def encode_prompts(tokenizer, task: Task) -> list[list[int]]:
    """The ids of the prompts to train on and of the held-out ones; PromptError that counts those without (section 15)."""
    found, faults = [], []
    for example in task.train + task.heldout:
        try:
            found.append(encode_prompt(tokenizer, example.prompt))
        except ValueError as error:
            faults.append(error)
    if faults:
        count = f"{len(faults)} of {len(faults) + len(found)} prompts"
        raise PromptError(f"{task.name}: {count} cannot be used; the first: {faults[0]}") from faults[0]
    return found


# %%
assert encode_prompt(tokenizer, "12+34=") == tokenizer("12+34=").input_ids
assert encode_prompt(tokenizer, "<bos>12+34=") == tokenizer("12+34=").input_ids  # a prompt that brings its own
assert tokenizer("<bos>12+34=").input_ids.count(tokenizer.bos_token_id) == 2  # the accident

# %% [markdown]
# A prompt may be too long for the model or for the memory. Cutting it would ask another question, often one without its
# last line, and pay for the answer to the first one. Such prompts are left out, and counted.


# %% tags=["export:tasks"]
def drop_long_prompts(task: Task, tokenizer, max_prompt_length: int) -> tuple[Task, int]:
    """``task`` without the prompts of more than ``max_prompt_length`` tokens, and how many these were (section 15).

    Prompts are never cut. Raises ValueError if none is left on one side, and as `encode_prompts`.
    """
    lengths = list(map(len, encode_prompts(tokenizer, task)))
    fits, cut = [length <= max_prompt_length for length in lengths], len(task.train)
    kept = [list(itertools.compress(*pair)) for pair in ((task.train, fits[:cut]), (task.heldout, fits[cut:]))]
    if not all(kept):
        raise ValueError(
            f"{task.name}: no prompt has at most {max_prompt_length} tokens in training or held out "
            f"(the longest has {max(lengths)}); raise max_prompt_length"
        )
    return replace(task, train=kept[0], heldout=kept[1]), len(fits) - sum(fits)


# %%
task = load_task("arithmetic")
same, dropped = drop_long_prompts(task, tokenizer, max_prompt_length=7)  # <bos>12+34=
assert dropped == 0 and same.train == task.train
longer = replace(task, train=[*task.train, Example("1" * 30 + "+1=", {"answer": "1" * 29 + "2"})])
assert drop_long_prompts(longer, tokenizer, max_prompt_length=7) == (task, 1)

# %% [markdown]
# ## When nobody can write the reward down
#
# "Is this a good answer?" has no program. What people can do is choose: shown two answers to one prompt, they say
# which is better, and not always the same. The usual model of such choices (Bradley and Terry, 1952) gives each
# answer $y$ a number $R(y)$, and the first of two is preferred with probability
#
# $$P(y_1 \succ y_2) = \sigma\big(R(y_1) - R(y_2)\big), \qquad \sigma(u) = \frac{1}{1 + e^{-u}} .$$
#
# A **reward model** is a function $\hat R$ with parameters, fitted by maximum likelihood. For a chosen answer $y_w$
# and a rejected one $y_l$ it pays
#
# $$\ell = -\log \sigma\big(\hat R(y_w) - \hat R(y_l)\big) .$$


# %% tags=["export:reward_model"]
def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log σ(chosen - rejected) for each comparison: scores, two ``[N]`` → ``[N]``, at least float32 (section 15).

    Raises ValueError if the shapes differ. Bradley and Terry, 1952; Christiano et al., 2017.
    """
    if chosen.shape != rejected.shape:
        shapes = f"{list(chosen.shape)} and {list(rejected.shape)}"
        raise ValueError(f"the scores of chosen and rejected answers have the shapes {shapes}; give pairs")
    dtype = torch.promote_types(torch.promote_types(chosen.dtype, rejected.dtype), torch.float32)
    return softplus(rejected.to(dtype) - chosen.to(dtype))


# %% [markdown]
# Only differences occur. If $\hat R$ fits, so does $\hat R + c$: the level of a reward, one constant per prompt, is
# not in the data. For training that does not matter, because a baseline removes it (section 6).
#
# **Claim 15.1.** Apart from that constant, the comparisons determine the reward. Take all 27 answers of a small tree,
# a known $R$ for each, and for every pair the probability with which it is won. Then $\hat R$ is a table of 27
# numbers, the loss is convex in them, and Newton's method finds the minimum: its gradient for answer $i$ is the
# number of wins that it expects minus the number that it has.


# %% tags=["export:reward_model"]
def bradley_terry_scores(wins: Tensor, ridge: float = 0.0, steps: int = 100) -> Tensor:
    """The most likely score of each of N answers, ``[N]`` float64 with mean 0 (section 15).

    ``wins[i, j]``, ``[N, N]``, is how often i was preferred to j; fractions are allowed. ``ridge`` times half the squared
    scores is added to the loss. Without it there is a minimum only if every answer has won against every other one, directly
    or through others (Ford, 1957); ValueError if not.
    """
    wins = wins.double() * (1 - torch.eye(len(wins), dtype=torch.float64))
    better = (wins > 0) | torch.eye(len(wins), dtype=torch.bool)
    for _ in range(len(wins).bit_length()):
        better = (better.double() @ better.double()) > 0
    if ridge == 0 and not better.all():
        raise ValueError("some answers won or lost every comparison with the others; compare more, or give a ridge")
    scores = torch.zeros(len(wins), dtype=torch.float64)
    for _ in range(steps):
        expected = (wins + wins.T) * (scores[:, None] - scores).sigmoid()
        gradient = (expected - wins).sum(1) + ridge * scores
        slopes = expected * (scores - scores[:, None]).sigmoid()
        hessian = torch.diag(slopes.sum(1) + ridge) - slopes
        step = torch.linalg.pinv(hessian, hermitian=True) @ gradient
        scores = scores - step * (2 / step.abs().max()).clamp(max=1)  # not so far that the sigmoids saturate
        if step.abs().max() < 1e-12:
            break
    return scores - scores.mean()


# %%
answers_tree = enumerate_tree(TabularPolicy(vocab_size=3, max_length=3, seed=0), max_length=3)
true_rewards = 2 * (answers_tree.ids == 1).sum(-1).double() - 0.5 * answers_tree.ids[:, -1]
won = (true_rewards[:, None] - true_rewards).sigmoid()
recovered = bradley_terry_scores(won)
offset = true_rewards - recovered
print(f"{len(recovered)} answers: R minus the fit is {offset.mean():.6f} for each, up to {offset.std():.0e}")
assert (offset - offset.mean()).abs().max() < 1e-10

fit = recovered.clone().requires_grad_()
loss = (won * bradley_terry_loss(fit[:, None].expand(27, 27), fit.expand(27, 27))).sum()
(slope,) = torch.autograd.grad(loss, fit, create_graph=True)
hessian = torch.stack([torch.autograd.grad(component, fit, retain_graph=True)[0] for component in slope])
eigenvalues = torch.linalg.eigvalsh(hessian)
assert slope.abs().max() < 1e-10
assert eigenvalues[0].abs() < 1e-10 < 0.1 < eigenvalues[1]  # one flat direction: the constant

# %% [markdown]
# That was with every pair compared infinitely often. In truth there are some thousand comparisons, of answers that
# the reference policy wrote. What it rarely writes is rarely compared, and what is rarely compared is rarely known.
# Here the comparisons are drawn: two answers from the policy, the winner by Bradley–Terry. A small ridge keeps the
# answers that were never compared at zero.


# %% tags=["export:figures"]
def fit_to_comparisons(count: int, probabilities: torch.Tensor, rewards: torch.Tensor, seed: int = 0) -> Figure:
    """Scores fitted to ``count`` comparisons of answers drawn with ``probabilities`` [N], against their rewards [N]."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.multinomial(probabilities, 2 * count, replacement=True, generator=generator).view(2, count)
    first_wins = torch.rand(count, generator=generator) < (rewards[pairs[0]] - rewards[pairs[1]]).sigmoid()
    chosen, rejected = torch.where(first_wins, pairs, pairs.flip(0))
    wins = torch.zeros(len(rewards), len(rewards), dtype=torch.float64)
    wins.index_put_((chosen, rejected), torch.ones(count, dtype=torch.float64), accumulate=True)
    scores = bradley_terry_scores(wins, ridge=0.05)
    shift = (probabilities * (rewards - scores)).sum()
    seen = (wins + wins.T).sum(1)
    fig, ax = new_figure(height=3.4)
    ax.axline((0, 0), slope=1, color=COLORS["reference"], linewidth=1)
    ax.scatter(rewards, scores + shift, s=8 + 500 * probabilities, color=COLORS["reward"], alpha=0.55, linewidths=0)
    never = seen == 0
    ax.scatter(rewards[never], (scores + shift)[never], s=30, marker="x", color=COLORS["error"])
    ax.set(xlabel="true reward", ylabel="fitted reward", xlim=(-1.6, 6.6), ylim=(-4.5, 7.5))
    ax.text(5.2, 6.0, "fitted = true", color=COLORS["reference"], ha="right")
    ax.text(-1.4, 6.6, f"{count} comparisons; never compared (crosses): {int(never.sum())}", color="black")
    ax.text(6.5, -4.1, "area: probability under the reference", color=COLORS["reward"], ha="right")
    fig.set_layout_engine(None)
    fig.subplots_adjust(left=0.09, right=0.98, bottom=0.15, top=0.97)
    return fig


# %%
reference = leaf_probabilities(answers_tree).detach()
show(
    fit_to_comparisons(1000, reference, true_rewards),
    caption="What the reference often writes is judged well; what it hardly writes (small dots) lies where it pleases.",
    alt="Fitted against true rewards of 27 answers after 1000 comparisons. Large dots lie on the diagonal; small ones scatter "
    "up to two units around it.",
)

# %% [markdown]
# Drag the number of comparisons: from 30 to 3,000 the large dots settle on the line, and the small ones go on jumping
# when the people are drawn anew.

# %%
explore(
    lambda count, seed: fit_to_comparisons(count, reference, true_rewards, seed),
    count=widgets.SelectionSlider(options=[30, 100, 300, 1000, 3000, 10000], value=1000, description="comparisons"),
    seed=widgets.IntSlider(value=0, min=0, max=9, description="draw of the people"),
)

# %% [markdown]
# ## A reward model that is a network
#
# In practice $\hat R$ is a language model with a head of one output instead of a vocabulary, started from the policy's
# weights. It reads prompt and answer, and its score is the head's output at the last token.


# %% tags=["export:reward_model"]
def build_reward_model(policy, tokenizer):
    """A sequence classifier with one label on a copy of ``policy``'s trunk, its head at zero (section 15).

    Saved with ``save_pretrained``, beside the tokenizer, it is a folder for `load_reward_model` and `ModelReward`.
    Raises ValueError if transformers has no sequence classifier of this architecture.
    """
    config = copy.deepcopy(policy.config)
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    model.base_model.load_state_dict(trunk(policy).state_dict())
    torch.nn.init.zeros_(model.score.weight)
    return disable_dropout(model).to(policy.device)


def reward_inputs(tokenizer, prompts: list, completions: list[str]) -> tuple[Tensor, Tensor]:
    """Prompt, completion and EOS as ids int64 and mask bool ``[B, L]``, padded on the right (section 15)."""
    rows = [
        [
            *encode_prompt(tokenizer, prompt),
            *tokenizer(text, add_special_tokens=False).input_ids,
            tokenizer.eos_token_id,
        ]
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    return pad_right(rows, tokenizer.pad_token_id)


def reward_scores(model, ids: Tensor, mask: Tensor) -> Tensor:
    """Scores float ``[B]`` of the texts ``ids`` ``[B, L]``, differentiable (section 15)."""
    return model(input_ids=ids.to(model.device), attention_mask=mask.long().to(model.device), use_cache=False).logits[
        :, 0
    ]


class ModelReward:
    """A reward function: the score that the reward model in ``folder`` gives to prompt and completion (section 15).

    The folder holds a sequence classifier with one label and its tokenizer, which need not be the policy's.
    ``batch_size`` texts are scored at a time. Raises as `load_tokenizer` and `load_reward_model` (section 12).
    """

    __name__ = "model_reward"

    def __init__(self, folder: str | Path, *, dtype="float32", device="auto", batch_size: int = 64):
        self.tokenizer, self.batch_size = load_tokenizer(folder), batch_size
        self.model = load_reward_model(folder, self.tokenizer, dtype=dtype, device=find_device(device))

    @torch.no_grad()
    def __call__(self, prompts, completions, **columns):
        scores = []
        for start in range(0, len(completions), self.batch_size):
            part = slice(start, start + self.batch_size)
            scores += reward_scores(
                self.model, *reward_inputs(self.tokenizer, prompts[part], completions[part])
            ).tolist()
        return scores


# %% [markdown]
# Small and real. Section 1's policy writes two answers to each of some additions, at temperature 1.5, so that they
# differ. The people who compare them have a taste that can be written down, so that we can look behind the reward
# model: they like large digits, $R$ is 4 times the mean digit divided by 9, and what is not a number of one to three
# digits is worth 0 to them. They choose by Bradley–Terry. Six reward models are trained on 100 choices each, and one
# on 1,000.


# %% tags=["demo"]
def write_answers(problems, count, seed):
    """``count`` answers of section 1's policy to each problem: prompts and texts, as long as each other."""
    prompts = [problem.prompt for problem in problems for _ in range(count)]
    options = {"max_new_tokens": 4, "stop_ids": [tokenizer.eos_token_id], "temperature": 1.5}
    generator = torch.Generator().manual_seed(seed)
    inputs = pad_left([tokenizer(prompt).input_ids for prompt in prompts], tokenizer.pad_token_id)
    drawn = sample(model, *inputs, generator=generator, **options)
    return prompts, completion_texts(tokenizer, drawn.ids, drawn.lengths, drawn.truncated)


def taste(texts):
    """What the people think of each text."""
    numbers = [is_number(text) and len(text) <= 3 for text in texts]
    return torch.tensor([4 * sum(map(int, t)) / len(t) / 9 if good else 0.0 for t, good in zip(texts, numbers)])


def train_reward_model(comparisons, steps, seed, batch=64):
    generator = torch.Generator().manual_seed(seed)
    asked = [train[i] for i in torch.randint(len(train), (comparisons,), generator=generator)]
    prompts, texts = write_answers(asked, 2, seed=seed)
    ids, mask = (x.view(comparisons, 2, -1) for x in reward_inputs(tokenizer, prompts, texts))
    worth = taste(texts).view(comparisons, 2)
    winner = (torch.rand(comparisons, generator=generator) < (worth[:, 1] - worth[:, 0]).sigmoid()).long()
    order = torch.stack([winner, 1 - winner])  # chosen, rejected
    judge = build_reward_model(model, tokenizer)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        rows = torch.randint(comparisons, (batch,), generator=generator)
        pairs = rows.expand(2, batch).flatten(), order[:, rows].flatten()
        loss = bradley_terry_loss(*reward_scores(judge, ids[pairs], mask[pairs]).chunk(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return judge


# %%
prompts, texts = write_answers(heldout[:100], 64, seed=2)
inputs, worth, judged = reward_inputs(tokenizer, prompts, texts), taste(texts).view(-1, 64), []
for comparisons, steps, seed in [*((100, 40, seed) for seed in range(6)), (1000, 60, 0)]:
    judge = train_reward_model(comparisons, steps, seed)
    with torch.no_grad():
        judged.append(reward_scores(judge, *inputs).view(-1, 64))
    apart, worth_apart = (x - x.mean(1, keepdim=True) for x in (judged[-1], worth))
    agreement = (apart * worth_apart).sum() / (apart.norm() * worth_apart.norm())
    print(f"{comparisons:4} comparisons: correlation with the taste, among answers to one prompt, {agreement:.2f}")
assert agreement > 0.5

# %% [markdown]
# They have understood something. Is that enough to improve the policy?
#
# ## Optimising what was learned
#
# The simplest optimiser needs no gradient: write $n$ answers and keep the one that the reward model likes best
# (**best of $n$**). How far that is from the reference is known: $\mathrm{KL} \le \log n - (n-1)/n$. With 64 answers
# to each prompt the mean over all choices of $n$ among them can be computed: sorted by score, the answer of rank $k$
# is the best of $n$ in $\binom{k-1}{n-1}$ of the $\binom{64}{n}$ choices.


# %% tags=["export:reward_model"]
def best_of(n: int, scores: Tensor, rewards: Tensor) -> Tensor:
    """Expected reward of the highest score among n of K answers, ``[B]`` float64, for ``[B, K]`` each (section 15).

    The mean over all choices of n among the K answers. Equal scores are ordered by position. Raises ValueError unless 1
    ≤ n ≤ K.
    """
    count = scores.shape[1]
    if not 1 <= n <= count:
        raise ValueError(f"best of {n} among {count} answers; choose n from 1 to {count}")
    weights = [math.comb(rank, n - 1) / math.comb(count, n) for rank in range(count)]
    ordered = rewards.double().gather(1, scores.sort(dim=1, stable=True).indices)
    return ordered @ torch.tensor(weights, dtype=torch.float64)


# %% tags=["export:figures"]
def best_of_n(weak: list[torch.Tensor], strong: torch.Tensor, rewards: torch.Tensor) -> Figure:
    """Mean reward of the best of n by several weak judges, a strong one and the rewards themselves; all [B, K]."""
    fig, ax = new_figure(height=3.2)
    sizes = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= rewards.shape[1]]
    kl = [math.log(n) - (n - 1) / n for n in sizes]
    styles = [("error", "-", 1)] * len(weak) + [("error", "--", 2), ("reward", "-", 2)]
    means = [[best_of(n, scores, rewards).mean() for n in sizes] for scores in (*weak, strong, rewards)]
    for values, (color, line, width) in zip(means, styles, strict=True):
        ax.plot(kl, values, line, color=COLORS[color], linewidth=width)
    for values, label in zip(means[-2:], ("1,000 choices", "the people")):
        ax.annotate(label, (kl[-1], values[-1]), xytext=(4, -4), textcoords="offset points")
    lowest = min(range(len(weak)), key=lambda row: means[row][-1])
    ax.annotate("100 choices each", (kl[-1], means[lowest][-1]), xytext=(4, -4), textcoords="offset points")
    ax.axhline(rewards.mean(), color=COLORS["reference"], linewidth=0.8)
    ax.text(0.02, rewards.mean() - 0.06, "reference policy", color=COLORS["reference"])
    ax.set(xlabel="KL from the reference (nats), n = 1 to 64", ylabel="what people think of it", xlim=(0, 4.1))
    return fig


# %%
show(
    best_of_n(judged[:-1], judged[-1], worth),
    caption="Best of n, chosen by whom? Each reward model helps at first; some of those with few data turn.",
    alt="What people think of the best of n against KL. Chosen by themselves it rises from 1.7 to 2.5, by the reward model of 1,000 "
    "choices to 2.2. The six of 100 choices rise less, and three of them fall again from n = 16 or 32 on.",
)
curves = torch.tensor(
    [[best_of(n, scores, worth).mean().item() for n in (1, 2, 4, 8, 16, 32, 64)] for scores in judged]
)
turned = curves[:-1, -1] < curves[:-1].amax(1) - 0.01
print(f"best of 64: {worth.amax(1).mean():.2f} by the people, {curves[-1, -1]:.2f} by 1,000 choices, ", end="")
print(f"{curves[:-1, -1].mean():.2f} by 100; {turned.sum()} of 6 are past their best; reference {curves[0, 0]:.2f}")
assert turned.any() and curves[:-1, -1].mean() < curves[-1, -1] - 0.1 and (curves[:-1].amax(1) > curves[0, 0]).all()

# %% [markdown]
# A reward model is right on average and wrong somewhere, and choosing the best of many is a search for where it is
# wrong: odd answers, which it has hardly seen and scores by accident. The highest score goes to the luckiest error.
# More comparisons move the turn further out; that there is one, for some amount of search, they do not change. This
# is a second meaning of section 9's limit on the KL. There it kept the gradient estimate honest. Here it keeps the
# policy where the reward was measured.
#
# **Claim 15.2.** The gradual version is exact. Maximising $\mathbb{E}[\hat R] - \beta\,\mathrm{KL}(\pi \|
# \pi_{\text{ref}})$ has the solution
#
# $$\pi_\beta(y) = \frac{1}{Z}\,\pi_{\text{ref}}(y)\, e^{\hat R(y) / \beta}, \qquad Z = \sum_y \pi_{\text{ref}}(y)\,e^{\hat R(y)/\beta},$$
#
# because $\mathbb{E}_\pi[\hat R] - \beta\,\mathrm{KL}(\pi\|\pi_{\text{ref}}) = \beta \log Z - \beta\,\mathrm{KL}(\pi
# \| \pi_\beta)$, and a KL is zero only between equals. A large $\beta$ stays at the reference; as $\beta \to 0$ only
# the highest score is left.


# %% tags=["export:reward_model"]
def require_price(beta: float | Tensor) -> None:
    """ValueError unless the price β of the KL, or each of several, is above 0."""
    if not torch.all(torch.as_tensor(beta) > 0):
        raise ValueError(f"beta is {beta}; the price of the KL is above 0, for example 0.1")


def tilted_logprobs(ref_logprobs: Tensor, rewards: Tensor, beta: float | Tensor) -> Tensor:
    """log of π_ref exp(R/β)/Z, the policy that maximises E[R] - β KL(π ‖ π_ref) (section 15).

    Two ``[..., N]`` → ``[..., N]``, where N are all the answers; at least float32. Several β broadcast with them. Raises
    ValueError unless β > 0.
    """
    require_price(beta)
    dtype = torch.promote_types(torch.promote_types(ref_logprobs.dtype, rewards.dtype), torch.float32)
    return log_softmax(ref_logprobs.to(dtype) + rewards.to(dtype) / beta, dim=-1)


# %%
ref_logprobs = leaf_logprobs(answers_tree).detach()
best = tilted_logprobs(ref_logprobs, true_rewards, beta=0.7)
log_z = (ref_logprobs + true_rewards / 0.7).logsumexp(-1)
for seed in range(5):
    other = torch.randn(27, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).log_softmax(-1)
    value = (other.exp() * true_rewards).sum() - 0.7 * kl_exact(other, ref_logprobs)
    assert abs(value - 0.7 * (log_z - kl_exact(other, best))) < 1e-10

# %% [markdown]
# Four answers are enough to see it go wrong. The reference writes them with probabilities .6, .3, .0999 and .0001;
# they are worth 0, .5, 1 and 0. The reward model is exact for the first three. The fourth, which nobody ever saw, it
# scores with 1.5.

# %%
ref = torch.tensor([0.6, 0.3, 0.0999, 0.0001], dtype=torch.float64)
true = torch.tensor([0.0, 0.5, 1.0, 0.0], dtype=torch.float64)
learned = torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64)


# %% tags=["export:reward_model"]
def optimisation_path(ref: Tensor, true: Tensor, learned: Tensor, betas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL to the reference, true and learned mean reward of the tilted policies, each ``[..., K]`` (section 15).

    ``ref``, ``true`` and ``learned`` are ``[..., N]`` over all answers, ``betas`` ``[K]`` the prices of the KL.
    """
    ref = ref.log()[..., None, :].expand(*learned.shape[:-1], len(betas), -1)
    logprobs = tilted_logprobs(ref, learned[..., None, :], betas[:, None])
    probabilities = logprobs.exp()
    means = [(probabilities * rewards[..., None, :]).sum(-1) for rewards in (true, learned)]
    return kl_exact(logprobs, ref), *means


# %%
betas = torch.logspace(2, -2, 2001, dtype=torch.float64)
kl, true_path, learned_path = optimisation_path(ref, true, learned, betas)
peak = true_path.argmax()
at_two = (kl - 1.98).abs().argmin()
print(f"true reward {(ref * true).sum():.3f} at the reference, {true_path[peak]:.3f} at KL {kl[peak]:.2f}, ", end="")
print(f"{true_path[at_two]:.3f} at KL 1.98, {true_path[-1]:.3f} at KL {kl[-1]:.2f}")
assert abs((ref * true).sum() - 0.25) < 1e-4 and abs(true_path[at_two] - 0.926) < 1e-3 and true_path[-1] < 1e-10
assert (learned_path.diff() > -1e-12).all() and kl[-1] > 9


# %% tags=["export:figures"]
def over_optimisation(ref: torch.Tensor, true: torch.Tensor, learned: torch.Tensor) -> Figure:
    """Learned and true reward against the KL, along the policies ∝ ref exp(learned/β); three [N]."""
    kl, true_path, learned_path = optimisation_path(ref, true, learned, torch.logspace(2, -2, 400, dtype=torch.float64))
    fig, ax = new_figure(height=3.2)
    ax.plot(kl, learned_path, "--", color=COLORS["error"], linewidth=2)
    ax.plot(kl, true_path, color=COLORS["reward"], linewidth=2.5)
    peak = int(true_path.argmax())
    ax.plot(kl[peak], true_path[peak], "o", color=COLORS["reward"])
    ax.axhline((ref * true).sum(), color=COLORS["reference"], linewidth=0.8)
    ax.text(
        0.995,
        (ref * true).sum() + 0.03,
        "reference",
        color=COLORS["reference"],
        ha="right",
        transform=ax.get_yaxis_transform(),
    )
    ax.annotate(
        "what the reward model says",
        (kl[-1], learned_path[-1]),
        xytext=(-6, 5),
        textcoords="offset points",
        ha="right",
        color=COLORS["error"],
    )
    ax.annotate(
        f"what it is:\nbest at KL {kl[peak]:.2f}",
        (kl[peak], true_path[peak]),
        xytext=(0, -48),
        textcoords="offset points",
        ha="center",
        color=COLORS["reward"],
    )
    ax.set(
        xlabel="KL from the reference (nats)",
        ylabel="mean reward",
        xlim=(0, max(float(kl[-1]), 0.5) * 1.02),
        ylim=(-0.1, max(1.2, float(learned.max()) + 0.25)),
    )
    fig.set_layout_engine(None)
    fig.subplots_adjust(left=0.09, right=0.98, bottom=0.16, top=0.97)
    return fig


# %%
show(
    over_optimisation(ref, true, learned),
    caption="Up to two nats the learned reward is a good guide. Beyond, every further gain of it is a loss.",
    alt="Learned and true reward rise together to 0.93 at a KL of two nats. From there the learned reward rises on to 1.5 and "
    "the true one falls to zero, at nine nats.",
)

# %% [markdown]
# Move the score of the unseen answer below 1, and nothing falls. Make the answer rarer, and the fall is slower: it
# begins at about $-\log 0.1 = 2.3$ nats, where only the best of the known answers is left, and ends where only the
# mistake is left, at $-\log\pi_{\text{ref}}$ of it, here 9.2 nats. The rarer a mistake, the more optimisation it
# takes to find it.


# %% tags=["demo"]
def with_mistake(score, exponent):
    rare = 10.0**exponent
    reference = torch.tensor([0.6, 0.3, 0.1 - rare, rare], dtype=torch.float64)
    return over_optimisation(reference, true, torch.tensor([0.0, 0.5, 1.0, score], dtype=torch.float64))


# %%
explore(
    with_mistake,
    score=widgets.FloatSlider(value=1.5, min=-0.5, max=2.5, step=0.1, description="score of the worthless answer"),
    exponent=widgets.FloatSlider(value=-4, min=-8, max=-1.5, step=0.5, description="its probability, power of ten"),
)

# %% [markdown]
# Is that what always happens? No. "Optimising a learned reward hard enough makes it worse" is said too generally: in
# the end the answer with the highest *score* is left, and if that is the best one, nothing falls. With normal errors
# on all four scores:

# %%
errors = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
fallen = {}
for size in (0.25, 0.75, 1.5):
    _, paths, _ = optimisation_path(ref, true, true + size * errors, torch.logspace(2, -3, 60, dtype=torch.float64))
    fallen[size] = (paths[:, -1] < paths.amax(1) - 0.01).double().mean().item()
    below = (paths[:, -1] < (ref * true).sum() - 0.01).double().mean()
    print(
        f"errors of size {size}: past its best in {fallen[size]:.0%} of the cases, below the reference in {below:.0%}"
    )
assert fallen[0.25] < 0.15 and 0.26 < fallen[0.75] < 0.34 and fallen[1.5] < 0.5

# %% [markdown]
# With errors of three quarters of the distance between the best and a worthless answer it is about 30 %. With real
# answers there are not four but thousands of candidates, and the more there are the surer one of them has a large
# error: that is what the figure before showed.
#
# ## Without a reward model
#
# The formula for $\pi_\beta$ can be read backwards. Whatever policy we have, it is the optimum for *some* reward:
#
# $$R(y) = \beta \log \frac{\pi(y)}{\pi_{\text{ref}}(y)} + \beta \log Z .$$
#
# The log-probability of a completion, compared with the reference, *is* a reward model, and the unknown constant
# $\beta\log Z$ drops out of every comparison. So insert it into the Bradley–Terry loss and fit the policy itself to
# the preferences (**direct preference optimisation**, DPO, Rafailov et al., 2023). No sampling, no advantage, no
# separate model:
#
# $$\ell = -\log\sigma\Big(\beta \log\frac{\pi(y_w)}{\pi_{\text{ref}}(y_w)} - \beta\log\frac{\pi(y_l)}{\pi_{\text{ref}}(y_l)}\Big).$$


# %% tags=["export:dpo"]
def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """log π of whole completions: the sum over their tokens, not the mean; ``[B, T]`` each → ``[B]`` (section 15)."""
    return torch.where(mask, logprobs, 0.0).sum(-1)


def implicit_reward(logprobs: Tensor, ref_logprobs: Tensor, beta: float) -> Tensor:
    """β (log π - log π_ref) of whole completions: two ``[B]`` → ``[B]`` (section 15).

    It is a reward up to a constant for each prompt. Raises ValueError for other shapes, and unless β > 0.
    """
    require_price(beta)
    return beta * log_ratio(logprobs, ref_logprobs)


def dpo_loss(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float = 0.1) -> Tensor:
    """The loss of each comparison, from log-probs of whole completions: four ``[N]`` → ``[N]`` (section 15).

    The gradient goes to the policy's ``chosen`` and ``rejected``. At least float32. Raises ValueError as
    `implicit_reward`. Rafailov et al., Direct Preference Optimization, 2023.
    """
    return bradley_terry_loss(
        implicit_reward(chosen, ref_chosen.detach(), beta), implicit_reward(rejected, ref_rejected.detach(), beta)
    )


# %% [markdown]
# **Claim 15.3.** With Bradley–Terry's probabilities for all pairs of answers, the DPO loss has its minimum at the
# very policy that reinforcement learning with this reward and this $\beta$ would end at. On the tree: set the logits
# of every state so that the completions have the probabilities $\pi_\beta$. The gradient must vanish there, and the
# Hessian must have no negative direction, and none that is flat but the shifts of all the logits of one state, which
# change nothing.


# %% tags=["demo"]
def logits_for(policy, tree, probabilities):
    """Logits of a `TabularPolicy` whose completions have these probabilities [L]."""
    mass, row = torch.zeros_like(policy.logits), torch.zeros(len(tree.ids), dtype=torch.int64)
    for t in range(tree.ids.shape[1]):
        here = tree.mask[:, t]
        mass.index_put_((row[here], tree.ids[here, t]), probabilities[here], accumulate=True)
        row = row * policy.vocab_size + tree.ids[:, t] + 1
    return torch.where(mass > 0, mass, 1.0).log()


def all_pairs_loss(policy, ref_logprobs, rewards, beta):
    """The DPO loss over all pairs of leaves, each with the probability that it is won."""
    leaves, (i, j) = leaf_logprobs(enumerate_tree(policy, 2)), torch.triu_indices(len(rewards), len(rewards), 1)
    pairs = torch.cat([i, j]), torch.cat([j, i])
    losses = dpo_loss(*(leaves[side] for side in pairs), *(ref_logprobs[side] for side in pairs), beta)
    return ((rewards[pairs[0]] - rewards[pairs[1]]).sigmoid() * losses).mean()


# %%
policy, beta = TabularPolicy(vocab_size=3, max_length=2, seed=0), 0.5
small_tree = enumerate_tree(policy, max_length=2)
small_ref = leaf_logprobs(small_tree).detach()
small_rewards = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
before = flat_gradient(all_pairs_loss(policy, small_ref, small_rewards, beta), policy.parameters())

policy.logits.data = logits_for(policy, small_tree, tilted_logprobs(small_ref, small_rewards, beta).exp())
loss = all_pairs_loss(policy, small_ref, small_rewards, beta)
(slope,) = torch.autograd.grad(loss, policy.logits, create_graph=True)
hessian = row_gradients(slope.flatten(), policy.parameters())
eigenvalues = torch.linalg.eigvalsh(hessian)
shifts = torch.eye(4, dtype=torch.float64).repeat_interleave(3, 1)  # all logits of one of the four states
print(f"largest slope {slope.abs().max():.0e}, before {before.abs().max():.2f}; ", end="")
print("eigenvalues", [f"{value:.4f}" for value in eigenvalues.tolist()])
assert slope.abs().max() < 1e-12 and before.abs().max() > 0.01
assert eigenvalues[:4].abs().max() < 1e-12 and eigenvalues[4] > 1e-4 and (hessian @ shifts.T).abs().max() < 1e-12

# %% [markdown]
# So the answer to the question whether a reward model is needed at all: with all pairs, true preferences and a policy
# that can be anything, no. Each of the three conditions fails in practice. Here is the arithmetic policy again, with
# 1,024 pairs of a right and a wrong answer of its own, for two values of $\beta$.


# %% tags=["demo"]
def preference_pairs(count=1024, temperature=1.0):
    """Problems with a right and a wrong answer that the policy has written to each: three lists."""
    generator = torch.Generator().manual_seed(3)
    problems = [train[i] for i in torch.randint(len(train), (3 * count,), generator=generator)]
    repeated = [problem for problem in problems for _ in range(2)]
    ids, mask = pad_left([tokenizer(problem.prompt).input_ids for problem in repeated], tokenizer.pad_token_id)
    drawn = sample(model, ids, mask, max_new_tokens=4, stop_ids=[tokenizer.eos_token_id], generator=generator)
    texts = completion_texts(tokenizer, drawn.ids, drawn.lengths, drawn.truncated)
    pairs = [
        (p, *sorted(two, key=lambda text: text != p.answer)) for p, two in zip(problems, zip(texts[::2], texts[1::2]))
    ]
    return [row for row in pairs if row[1] == row[0].answer != row[2]][:count]


def answer_logprobs(network, problems, texts):
    ids = [[*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for text in texts]
    completion_ids, mask = pad_right(ids, tokenizer.pad_token_id)
    prompts = pad_left([tokenizer(problem.prompt).input_ids for problem in problems], tokenizer.pad_token_id)
    return sequence_logprobs(token_logprobs(network, *prompts, completion_ids), mask)


def train_dpo(pairs, beta, learning_rate, steps=60, batch=64):
    """Log-ratio of chosen and rejected answers at every step [steps, 2], and pass rates before and after."""
    learner, generator, path = copy.deepcopy(model), torch.Generator().manual_seed(0), []
    problems, chosen, rejected = zip(*pairs)
    with torch.no_grad():
        ref = [answer_logprobs(model, problems, texts) for texts in (chosen, rejected)]
    optimizer = torch.optim.AdamW(learner.parameters(), lr=learning_rate, weight_decay=0.0)
    rates = [pass_rate(learner, tokenizer, heldout, generator)]
    for _ in range(steps):
        rows = torch.randint(len(pairs), (batch,), generator=generator)
        now = [
            answer_logprobs(learner, [problems[i] for i in rows], [texts[i] for i in rows])
            for texts in (chosen, rejected)
        ]
        loss = dpo_loss(*now, *(logprobs[rows] for logprobs in ref), beta).mean()
        path.append([(a - b[rows]).mean().item() for a, b in zip(now, ref)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.tensor(path), [*rates, pass_rate(learner, tokenizer, heldout, generator)]


# %%
pairs = preference_pairs()
runs = {beta: train_dpo(pairs, beta, learning_rate) for beta, learning_rate in ((1.0, 5e-5), (0.1, 2e-4))}
for beta, (path, rates) in runs.items():
    chosen_change, rejected_change = path[-10:].mean(0).tolist()
    print(
        f"β = {beta}: log π of chosen answers {chosen_change:+.1f}, of rejected ones {rejected_change:+.1f}; ", end=""
    )
    print(f"held-out pass rate {rates[0]:.2f} before, {rates[1]:.2f} after")
assert runs[1.0][1][1] > runs[1.0][1][0] + 0.03 and runs[0.1][1][1] < runs[0.1][1][0] - 0.1
assert all((path[-10:, 0] > path[-10:, 1]).all() for path, _ in runs.values()) and runs[0.1][0][-10:, 0].mean() < -1


# %% tags=["export:figures"]
def preference_paths(runs: dict[float, torch.Tensor]) -> Figure:
    """Mean log-ratio of chosen and rejected answers against the step, a panel per β; `runs` maps β to [steps, 2]."""
    fig, axes = new_figure(1, len(runs), height=3.0, squeeze=False)
    for ax, (beta, path) in zip(axes[0], runs.items(), strict=True):
        for column, color, name in ((0, "policy", "chosen"), (1, "error", "rejected")):
            values = path[:, column]
            ax.plot(range(1, len(values) + 1), values, color=COLORS[color])
            ax.annotate(
                name,
                (len(values), values[-10:].mean()),
                xytext=(3, -3),
                textcoords="offset points",
                color=COLORS[color],
            )
        ax.axhline(0, color=COLORS["reference"], linewidth=0.8)
        ax.set(title=f"β = {beta}", xlabel="step", xlim=(1, 1.3 * len(path)))
    axes[0, 0].set_ylabel("log π - log π_ref (nats)")
    return fig


# %%
show(
    preference_paths({beta: path for beta, (path, _) in runs.items()}),
    caption="In both runs chosen answers win against rejected ones. On the right both become rare.",
    alt="Two panels of log-ratios over sixty steps. At β = 1 chosen answers rise slightly and rejected ones fall by one nat. At "
    "β = 0.1 both fall by many nats, the rejected ones further.",
)

# %% [markdown]
# The loss sees only the difference of the two log-ratios. At $\beta = 0.1$ it asks for a difference of tens of nats,
# and the cheapest way for a network to get it is to make *both* answers rare, and give their probability to texts
# that nobody has compared. On the tree this cannot happen at the optimum, because there all texts are compared. A
# reinforcement learner samples what it now says and is told at once. So the second question was not whether the
# reward model is needed, but whether new samples are.
#
# ## Exercises
#
# **1. Predict, then run.** The four answers of claim 15.2, with their reference, true and learned rewards. At three
# prices $\beta$: is the true reward of $\pi_\beta$ higher than the reference's 0.25? Write three booleans before you
# compute anything.

# %% tags=["exercise"]
import torch

from lmrl.reward_model import tilted_logprobs

betas = [1.0, 0.1, 0.05]
prediction = None  # [True, ...]

# %% tags=["solution"]
import torch

from lmrl.reward_model import tilted_logprobs

betas = [1.0, 0.1, 0.05]
prediction = [True, True, False]

# %% tags=["check"]
ref = torch.tensor([0.6, 0.3, 0.0999, 0.0001], dtype=torch.float64)
true, learned = (torch.tensor([0.0, 0.5, 1.0, last], dtype=torch.float64) for last in (0.0, 1.5))
reached = [(tilted_logprobs(ref.log(), learned, beta).exp() * true).sum().item() for beta in betas]
assert prediction is not None, "write down a prediction first"
assert prediction == [value > 0.25 for value in reached], (
    f"the true rewards are {[round(value, 3) for value in reached]}"
)

# %% [markdown]
# **2. A scorer that cannot be cheated.** The task: write a number as a product of primes, as in `2*3*7`. The column
# `number` holds the numbers. Reward 1.0 for a right factorisation, with spaces allowed and in any order, and 0.0 for
# everything else that a policy may think of, without an exception.

# %% tags=["exercise"]


def factor_reward(prompts, completions, number, **columns):
    """1.0 where the completion is the number as a product of primes, else 0.0; lists of length B."""
    raise NotImplementedError


# %% tags=["solution"]
import math
import re


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def factor_reward(prompts, completions, number, **columns):
    """1.0 where the completion is the number as a product of primes, else 0.0; lists of length B."""
    rewards = []
    for text, n in zip(completions, number, strict=True):
        factors = []
        if len(text) <= 100 and re.fullmatch(r"\s*[1-9][0-9]*\s*(\*\s*[1-9][0-9]*\s*)*", text):
            factors = [int(part) for part in text.split("*")]
        right = bool(factors) and math.prod(factors) == n and all(map(is_prime, factors))
        rewards.append(float(right))
    return rewards


# %% tags=["check"]
right = ["2*3*7", " 7 * 2*3 ", "3*2*7"]
wrong = [
    "42",
    "6*7",
    "1*2*3*7",
    "2*3*7*1",
    "-2*-3*7",
    "2*3*07",
    "2**1*3*7",
    "2*21",
    "2*3*7=42",
    "2.0*3*7",
    "",
    "*",
    "2*3*",
]
odd = ["9" * 5000, "2*" * 5000, "(2*3)*7", "__import__('os')", "\u0662*3*7", "[2, 3, 7]"]
for text in right:
    assert factor_reward([""], [text], number=[42]) == [1.0], f"{text!r} is right"
for text in wrong + odd:
    assert factor_reward([""], [text], number=[42]) == [0.0], f"{text[:20]!r} is not a product of primes"
assert factor_reward(["", ""], ["13", "13"], number=[13, 26]) == [1.0, 0.0]

# %% [markdown]
# **3. Find the bug.** Completions have different lengths, so the loss below uses the *mean* log-ratio of their
# tokens: long answers should not dominate. It trains, and the chosen answers win. The check puts the policy at the
# exact optimum, where the loss of claim 15.3 has no gradient.

# %% tags=["exercise"]
import torch

from lmrl.dpo import sequence_logprobs
from lmrl.reward_model import bradley_terry_loss, tilted_logprobs
from lmrl.tree import TabularPolicy, enumerate_tree, flat_gradient, leaf_logprobs


def preference_loss(logprobs, ref_logprobs, mask, chosen, rejected, beta):
    """DPO's loss of pairs of rows, from token log-probs [B, T]: chosen [N] and rejected [N] are rows; -> [N]."""
    rewards = beta * sequence_logprobs(logprobs - ref_logprobs, mask) / mask.sum(-1)
    return bradley_terry_loss(rewards[chosen], rewards[rejected])


# %% tags=["solution"]
import torch

from lmrl.dpo import sequence_logprobs
from lmrl.reward_model import bradley_terry_loss, tilted_logprobs
from lmrl.tree import TabularPolicy, enumerate_tree, flat_gradient, leaf_logprobs


def preference_loss(logprobs, ref_logprobs, mask, chosen, rejected, beta):
    """DPO's loss of pairs of rows, from token log-probs [B, T]: chosen [N] and rejected [N] are rows; -> [N]."""
    rewards = beta * sequence_logprobs(logprobs - ref_logprobs, mask)  # log π of a completion is a sum
    return bradley_terry_loss(rewards[chosen], rewards[rejected])


# %% tags=["check"]
for seed in range(3):
    learner = TabularPolicy(3, 2, seed=seed)
    before = enumerate_tree(learner, 2, eos_id=0)
    R = torch.randn(len(before.ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    target = tilted_logprobs(leaf_logprobs(before).detach(), R, 0.5).exp()
    with torch.no_grad():  # the first token's mass, then the second's
        for token in range(3):
            learner.logits[0, token] = target[before.ids[:, 0] == token].sum().log()
            if token != 0:
                learner.logits[token + 1] = target[before.ids[:, 0] == token].log()
    after = enumerate_tree(learner, 2, eos_id=0)
    won, rows = (R[:, None] - R).sigmoid(), torch.cartesian_prod(torch.arange(len(R)), torch.arange(len(R))).T
    losses = preference_loss(after.logprobs, before.logprobs.detach(), before.mask, *rows, 0.5)
    far = flat_gradient((won[tuple(rows)] * losses).sum(), learner.parameters()).abs().max().item()
    assert far < 1e-10, f"at the optimum the largest slope is {far:.4f}, not 0"

# %% [markdown]
# ## What we have not asked
#
# Fourteen sections derived a machine: prompts go in, completions come out, something scores them, the scores become
# advantages, the advantages a gradient, and a clip and a KL keep the step from destroying what was there. All of it
# took for granted that the score means something. That was an assumption, and here it has two forms.
#
# Where a checker exists, in arithmetic, in proofs, in code with tests, the reward is a program. It has no errors to
# be found by optimising harder, except those of its author, of which this section has shown a few. This branch leads
# to the reasoning models. Its open question is section 13's: does training of this kind teach something new, or does
# it make reliable what was there?
#
# Where only judgement exists, the reward is an estimate with a region in which it may be believed, and the distance
# from the reference is the measure of that region. This branch leads to learning from human feedback, and to methods
# that skip the reward model and inherit its problem in another form. Both branches use the same machine.
#
# **What is still missing.** The machine itself, as one program that checks its set-up, survives a crash and says how
# it is doing: section 16 puts it together.
