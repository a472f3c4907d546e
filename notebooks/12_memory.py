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
# # 12. The four models in the room
#
# **The question.** Supervised training holds one network in memory. How many does a reinforcement learning step hold,
# which of them learn, and what does each cost?
#
# Classic PPO for language models names four, and a fifth when a separate engine generates:
#
# | model | what it is for | learns? | needed when |
# |---|---|---|---|
# | policy $\pi_\theta$ | writes the answers | yes | always |
# | reference $\pi_{\mathrm{ref}}$ | where the policy started; the KL penalty measures the distance to it | no | $\beta > 0$ |
# | reward model | scores an answer | no | nobody can write the reward as a program |
# | critic $V_\phi$ | estimates the return, for the advantages | yes | the baseline is learned (PPO, not GRPO) |
# | inference engine | generates faster than the trainer could | no, it copies | generation is not the trainer's own |
#
# A trainer with a group baseline, a verifier and $\beta = 0$ needs the first row only. In this section we price a row,
# load the first two models from disk without surprises, and freeze the second.

# %%
import copy
import importlib
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.figures.style import COLORS, new_figure, show
from lmrl.policy import addition_problems, pad_left, pad_right, token_logprobs, warm_start_folder
from lmrl.trust_region import kl_k3

transformers.utils.logging.disable_progress_bar()

# %% [markdown]
# ## What a parameter costs
#
# A frozen model stores its weight and nothing else: 2 bytes in bfloat16. A model that learns with Adam stores, for
# every parameter $\theta_j$, also its gradient $g_j$ and two running means,
#
# $$m_j \leftarrow \beta_1 m_j + (1-\beta_1) g_j, \qquad v_j \leftarrow \beta_2 v_j + (1-\beta_2) g_j^2 .$$
#
# How many bytes that makes depends on the number formats. Three recipes are in use:
#
# | bytes per parameter | weight | gradient | master weight | $m$ | $v$ | sum |
# |---|---|---|---|---|---|---|
# | bfloat16 with a float32 master copy | 2 | 2 | 4 | 4 | 4 | 16 |
# | all float32 | 4 | 4 | – | 4 | 4 | 16 |
# | all bfloat16 | 2 | 2 | – | 2 | 2 | 8 |
#
# The first two cost the same, so the master copy does not save memory; it makes the matrix products fast and still lets
# small updates count. In the third an update smaller than about 1/256 of the weight is rounded away. Adam also
# keeps a step counter of 4 bytes per *tensor*, which is nothing for a large model.
#
# We do not have to believe the table. Here is a real policy after a real optimiser step, measured tensor by tensor:


# %% tags=["demo"]
def size(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# %%
folder = warm_start_folder(seed=0)
tokenizer = AutoTokenizer.from_pretrained(folder)
original = AutoModelForCausalLM.from_pretrained(folder)
train, _ = addition_problems()
prompt = pad_left([tokenizer(train[0].prompt).input_ids], tokenizer.pad_token_id)
answer, _ = pad_right([tokenizer(train[0].answer, add_special_tokens=False).input_ids], tokenizer.pad_token_id)
measured = {}
for recipe, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16, "master": torch.bfloat16}.items():
    model = copy.deepcopy(original).to(dtype)
    weights = list(model.parameters())
    (-token_logprobs(model, *prompt, answer).sum()).backward()
    gradients = [weight.grad for weight in weights]
    masters = [weight.detach().float().requires_grad_() for weight in weights] if recipe == "master" else []
    for master, gradient in zip(masters, gradients):
        master.grad = gradient.float()
    adam = torch.optim.AdamW(masters or weights)
    adam.step()
    moments = [state[name] for state in adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    counters = [state["step"] for state in adam.state.values()]
    parameters = sum(weight.numel() for weight in weights)
    assert size(counters) == 4 * len(weights)
    measured[recipe] = size([*weights, *gradients, *masters, *moments]) / parameters
    print(f"{recipe:9} {measured[recipe]:4.0f} bytes per parameter, and {size(counters) / parameters:.4f} for counters")
assert measured == {"float32": 16, "bfloat16": 8, "master": 16}

# %% [markdown]
# The recipe with a master copy has one more cost that the table hides: torch's Adam wants the gradient in the format of
# the weight that it steps, so for the moment of the step a float32 gradient exists too. Everything else that a step
# needs — activations, logits, the key-value cache of generation — grows with the batch and not with the model, and comes
# on top.
#
# Two models that learn cost twice: a critic of the policy's size doubles the largest bar of the figure, and a reward
# model adds a frozen copy. A group baseline (section 6) removes the former, a verifier (section 15) the latter.


# %% tags=["export:figures"]
def bytes_per_parameter(models: dict[str, dict[str, float]], needed: set[str]):
    """A horizontal bar per model of the bytes per parameter it holds, by part; models not ``needed`` are outlined."""
    shades = {"weight": 1.0, "gradient": 0.75, "master weight": 0.55, "$m$": 0.4, "$v$": 0.25}
    figure, axes = new_figure(height=3.0)
    for row, (model, parts) in enumerate(models.items()):
        left, color = 0.0, COLORS["policy"] if len(parts) > 1 else COLORS["reference"]
        for part, width in parts.items():
            style = {"color": color, "alpha": shades[part]} if model in needed else {"fill": False, "edgecolor": color}
            axes.barh(row, width, left=left, height=0.7, linewidth=1, **style)
            dark = model in needed and shades[part] > 0.5
            axes.text(
                left + width / 2, row, part, ha="center", va="center", color="white" if dark else "black", fontsize=8
            )
            left += width
        note = f"{left:.0f} B" if model in needed else f"{left:.0f} B, not needed"
        axes.text(left + 0.2, row, note, va="center")
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    axes.set(xlabel="bytes per parameter (weights and optimiser state only)", xlim=(0, 20.5), xticks=range(0, 17, 4))
    return figure


# %%
learning = {"weight": 2, "gradient": 2, "master weight": 4, "$m$": 4, "$v$": 4}
assert sum(learning.values()) == measured["master"]
models = {"policy": learning, "reference": {"weight": 2}, "reward model": {"weight": 2}, "critic": learning}
show(
    bytes_per_parameter(models, needed={"policy", "reference"}),
    caption="What each model holds in the bfloat16 recipe with a float32 master copy. GRPO with a verifier keeps the "
    "filled bars; with β = 0 only the first.",
    alt="Four horizontal bars. Policy 16 bytes in five parts, filled. Reference 2 bytes, filled. Reward model 2 bytes and "
    "critic 16 bytes, both only outlined and marked as not needed.",
)

# %% [markdown]
# ## Finding the weights
#
# A run starts from weights on disk, in one of two forms: a Hugging Face folder (`config.json` and safetensors), or one
# `.gguf` file, the format of llama.cpp. Nothing is downloaded: a path that does not exist is a typing error or a
# download that has not been made, and both should be said at once.
#
# A few small models come as Python packages, which the course uses to try a real pretrained model offline. Such a
# package has a function `assemble()` that returns the path of its file; its name may stand in place of a path.


# %% tags=["export:models"]
def resolve_model_path(name: str | Path) -> Path:
    """The path of a model's folder or file (section 12).

    ``name`` is a path, or the name of an installed package whose ``assemble()`` returns one. Raises FileNotFoundError
    if it is neither.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    package = str(name).replace("-", "_")
    if package.isidentifier() and find_spec(package) and hasattr(importlib.import_module(package), "assemble"):
        return Path(importlib.import_module(package).assemble())
    raise FileNotFoundError(
        f"no model at {name}: there is no such folder or file, and no installed package of that name carries a model; "
        "lmrl downloads nothing, so fetch the model first and give its folder"
    )


# %% [markdown]
# A folder may hold both forms, or neither, or several `.gguf` files of different precision. We do not guess.


# %% tags=["export:models"]
def find_weights(path: str | Path) -> tuple[Path, str | None]:
    """Where the weights at ``path`` are: the folder, and the name of the .gguf file in it or None (section 12).

    Raises FileNotFoundError if there are none, ValueError if there are several .gguf files to choose from.
    """
    path = resolve_model_path(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is a file but not a .gguf; give a .gguf file or the folder of a model")
        return path.parent, path.name
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} has weights but no config.json, which says what they are the weights of")
        return path, None
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    if not ggufs:
        raise FileNotFoundError(
            f"no weights in {path}: looked for *.safetensors, pytorch_model*.bin and *.gguf directly inside it"
        )
    if len(ggufs) > 1:
        raise ValueError(f"{path} has {len(ggufs)} .gguf files ({', '.join(ggufs)}); give the path of one of them")
    return path, ggufs[0]


def gguf_options(gguf_file: str | None) -> dict[str, str]:
    """Options of ``from_pretrained`` for a .gguf file; ImportError if the packages that read it are missing."""
    if gguf_file is None:
        return {}
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise ImportError(f"reading {gguf_file} needs the package {missing[0]}: pip install 'lmrl[gguf]'")
    return {"gguf_file": gguf_file}


# %%
with tempfile.TemporaryDirectory() as empty:
    for wrong in ("no/such/folder", empty):
        try:
            find_weights(wrong)
        except FileNotFoundError as error:
            print(str(error).replace(empty, "EMPTY"))
        else:
            raise AssertionError(f"{wrong} has no weights")

# %% [markdown]
# ## The tokenizer
#
# Training needs two special tokens. `<eos>` is the action *stop*; without it no answer ever ends. `<pad>` makes
# a rectangle of rows. It is tempting to fill a missing pad with `<eos>`. Our masks come from lengths and would survive it,
# but the checkpoint that we write will be loaded by programs whose masks compare ids, and they would never train stopping.
# So a tokenizer without one of the two is refused, with the way to add it.


# %% tags=["export:models"]
def load_files(load: Callable, what: str, folder: Path, **options):
    """``load(folder, **options)`` without a download; any failure is a ValueError that says which files are bad."""
    try:
        return load(folder, local_files_only=True, **options)
    except Exception as error:  # damaged files raise many kinds, some of them the libraries' own
        detail = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"cannot load the {what} in {folder}, its files are damaged or unsuitable: {detail}"
        ) from error


def load_tokenizer(path: str | Path):
    """The tokenizer of the model at ``path``, a folder or .gguf file (section 12). Nothing is downloaded.

    Raises ValueError if it cannot be read or lacks a pad or an end-of-sequence token, and what `find_weights` raises.
    """
    folder, gguf_file = find_weights(path)
    options = gguf_options(gguf_file)
    tokenizer = load_files(AutoTokenizer.from_pretrained, "tokenizer", folder, padding_side="left", **options)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without its files
        raise ValueError(f"the tokenizer in {path} has no vocabulary; put the model's tokenizer files there")
    for name in ("pad", "eos"):
        if getattr(tokenizer, f"{name}_token_id") is None:
            raise ValueError(
                f"the tokenizer in {path} has no {name} token: name one that is in its vocabulary and that texts do not "
                f'use, for example tokenizer.{name}_token = "<{name}>", and save it there with tokenizer.save_pretrained'
            )
    return tokenizer


# %% [markdown]
# ## The policy
#
# Three things can go wrong silently while loading a policy.
#
# - **Weights that are missing from the file** are drawn at random, with a warning that scrolls by. We raise.
# - **A `.gguf` file holds quantised weights.** They must be unpacked to be trained and to be saved again; by default
#   transformers may keep them packed, and such a model cannot be saved.
# - **Dropout** makes the policy a different function at every call. The answer was sampled from one function, the
#   log-probs would be taken from another, and the ratio of the two, which should be exactly 1 before the first update,
#   would not be. Reinforcement learning has its own noise. We switch dropout off for good, also for those who call
#   `model.train()` later (gradient checkpointing, for example, wants that).


# %% tags=["export:models"]
def disable_dropout(model):
    """Set every dropout rate of ``model`` to 0 and put it in eval mode; returns it (section 12)."""
    for module in model.modules():
        rates = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        if isinstance(module, torch.nn.Dropout):
            rates.append("p")
        for name in rates:
            setattr(module, name, 0.0)
    return model.eval()


def load_policy(path: str | Path, *, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu"):
    """The causal language model at ``path``, trainable, without dropout, on ``device`` (section 12).

    ``path`` is a Hugging Face folder, or a .gguf file or a folder that holds one, whose weights are unpacked to
    ``dtype``. Nothing is downloaded. Raises ValueError if the model cannot be read or weights are missing from the file,
    ImportError if the packages that read .gguf files are, and what `find_weights` raises.
    """
    folder, gguf_file = find_weights(path)
    options = gguf_options(gguf_file)
    if gguf_file is not None:
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    options |= {"dtype": dtype, "output_loading_info": True}
    model, report = load_files(AutoModelForCausalLM.from_pretrained, "model", folder, **options)
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{path} is a {model.config.model_type}, whose recurrent state is not a key-value cache; take another"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of the weights that its config asks for ({missing[0]}, …); "
            "they would start at random: get the complete model, or fix its config"
        )
    return disable_dropout(model).to(device)


# %%
tokenizer, policy = load_tokenizer(folder), load_policy(folder)
policy.config.attention_dropout = 0.5
for layer in policy.model.layers:
    layer.self_attn.attention_dropout = 0.5
with torch.no_grad():
    twice = [token_logprobs(policy.train(), *prompt, answer) for _ in range(2)]
    assert not torch.equal(*twice)
    print("with dropout, the 'ratio' of two passes over the same tokens:", (twice[1] - twice[0]).exp())
    twice = [token_logprobs(disable_dropout(policy).train(), *prompt, answer) for _ in range(2)]
    assert torch.equal(*twice)

# %% [markdown]
# ## The reference
#
# The KL penalty of section 9 measures how far the policy has moved from where it began. For that the starting point must
# stay where it was: the **reference** is a copy of the policy before its first step, without gradients. It must be a copy
# and not a second name for the same weights, or the distance is zero for ever and the penalty does nothing.
#
# With $\beta = 0$ nothing asks for it; then do not load it.


# %% tags=["export:models"]
def load_reference(source, *, dtype: str | torch.dtype = torch.float32, device: str | torch.device = "cpu"):
    """A frozen model in eval mode, to measure the KL from (section 12).

    ``source`` is the policy before its first step, which is copied, or the path of a model, loaded as in `load_policy`
    with ``dtype`` and ``device``.
    """
    if isinstance(source, (str, Path)):
        model = load_policy(source, dtype=dtype, device=device)
    else:
        model = disable_dropout(copy.deepcopy(source))
    return model.requires_grad_(False)


# %% [markdown]
# Before the first step the KL is exactly zero. After a step of the policy it is not, and the reference has not moved:

# %%
policy = load_policy(folder)
reference = load_reference(policy)
with torch.no_grad():
    anchor = token_logprobs(reference, *prompt, answer)
logprobs = token_logprobs(policy, *prompt, answer)
assert torch.equal(logprobs, anchor) and (kl_k3(logprobs, anchor) == 0).all()

optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
(-logprobs.sum()).backward()
optimizer.step()
with torch.no_grad():
    moved = token_logprobs(policy, *prompt, answer)
    assert torch.equal(token_logprobs(reference, *prompt, answer), anchor)
assert (kl_k3(moved, anchor) > 0).all()
assert not any(weight.requires_grad or weight.grad is not None for weight in reference.parameters())
print("k3 per token after one step:", kl_k3(moved, anchor))

# %% [markdown]
# ## Where an answer ends
#
# Which tokens end an answer is a property of the model, and it is written down in up to three places that need not
# agree: the tokenizer's `<eos>`; the checkpoint's generation config, which may list several; and the chat template, which
# closes an assistant's turn with a token of its own (Gemma's `<end_of_turn>`, for example, is not its `<eos>`). A model
# that says the third while we wait for the first runs on to the length cap. We collect all of them, once, and hand them
# to the sampler as explicit ids; nothing else is taken from the generation config.
#
# A base model has no turns. It goes on to write the next question, unless a task says which text ends an answer (section
# 15), and the sampler can stop on that text if it is a single token.


# %% tags=["export:models"]
def turn_end_id(tokenizer) -> int | None:
    """The special token with which the chat template closes an assistant's turn, or None (section 12)."""
    if tokenizer.chat_template is None:
        return None
    answer = "ANSWER"
    turns = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": answer}]
    rest = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(answer)[2]
    ids = tokenizer(rest, add_special_tokens=False).input_ids
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


def stop_token_ids(tokenizer, model, stop: tuple[str, ...] = ()) -> list[int]:
    """The ids that end a completion, without repeats (section 12).

    They are the tokenizer's end of sequence, those of the model's generation config, the end of an assistant's turn, and
    the texts ``stop``. Raises ValueError if one of ``stop`` is not a single token.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    ids.append(turn_end_id(tokenizer))
    for text in stop:
        pieces = tokenizer(text, add_special_tokens=False).input_ids
        if len(pieces) != 1:
            raise ValueError(f"stop text {text!r} is {len(pieces)} tokens for this tokenizer; it must be exactly one")
        ids += pieces
    return [id for id in dict.fromkeys(ids) if id is not None]


# %%
assert stop_token_ids(tokenizer, policy) == [tokenizer.eos_token_id]
assert stop_token_ids(tokenizer, policy, stop=("=",)) == [
    tokenizer.eos_token_id,
    *tokenizer("=", add_special_tokens=False).input_ids,
]

# %% [markdown]
# **What is still missing.** We can load and freeze the models, but not yet say before a run how much memory it will take:
# the plan for any model size, with activations, logits and cache, and the critic and reward model, complete this section
# later. Whether the policy that we loaded ever succeeds, without which no reward says anything, is section 13's question.
