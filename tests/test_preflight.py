"""Every fault is planted from outside, and the lines that are not a pass must be the one that names it."""

import asyncio
import copy
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import lmrl.preflight
from lmrl.checkpoint import restore, write_checkpoint
from lmrl.cli import main
from lmrl.config import TrainConfig
from lmrl.models import (
    adapted_layers,
    add_adapter,
    disable_dropout,
    load_critic,
    load_policy,
    load_reference,
    load_tokenizer,
    stop_token_ids,
)
from lmrl.policy import build_policy, build_tokenizer, gather_logprobs, token_logprobs, warm_start_folder
from lmrl.preflight import (
    CHECKS,
    Probe,
    beginnings,
    check_sync,
    check_truncation,
    check_variety,
    check_weights,
    completions_of,
    flip_signs,
    names_of,
    plain_logits,
    preflight,
    preflight_table,
    require_preflight,
    surprise_score,
    surprises,
    weights_changed,
)
from lmrl.recipes import RECIPES
from lmrl.rollout import TorchSampler
from lmrl.tasks import Example, Task, load_task
from lmrl.trainer import TooSlow, Trainer, within
from lmrl.vllm_rollout import VLLMSampler

SMALL = TrainConfig(per_device_train_batch_size=64, num_generations=4, max_completion_length=4)


@cache
def arithmetic():
    return load_task("arithmetic")


def assemble(config, model, tokenizer, task, reference=None):
    stops = stop_token_ids(tokenizer, model, task.stop)
    settings = config.temperature, config.top_k, config.top_p, config.min_p
    sampler = TorchSampler(model, stops, tokenizer.pad_token_id, config.max_completion_length, *settings)
    if config.beta and reference is None:
        reference = load_reference(model)
    critic = load_critic(model, shared=config.share_critic_trunk) if config.advantage_estimator == "gae" else None
    return Trainer(config, model, tokenizer, task, sampler, reference, critic)


def tiny(task=None, reward=None, **settings):
    """Section 1's warm-started policy, ready to train."""
    folder, task = warm_start_folder(0), task or arithmetic()
    task = task if reward is None else replace(task, reward=reward)
    config = replace(SMALL, **settings)
    return assemble(config, load_policy(folder, dtype=config.dtype), load_tokenizer(folder), task)


TURNS = "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}<model>"


def vowels(prompts, completions, **columns):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def chat(template="{{ bos_token }}" + TURNS, prompts=None, **settings):
    """A random Llama with a chat template and two stop tokens, which it draws often enough."""
    tokenizer = build_tokenizer("abcdefghijklmnopqrstuvwxyz ?")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<end>", "<model>"]})
    tokenizer.chat_template = template
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes)).eval()
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id], repetition_penalty=1.1, top_k=20)
    prompts = prompts or [f"what is {'very ' * n}{a}?" for n in range(8) for a in ("red", "green", "blue")]
    examples = [Example(prompt, {}) for prompt in prompts]
    config = replace(SMALL, max_completion_length=64, **settings)
    return assemble(config, model, tokenizer, Task("colours", examples, examples[:1], vowels))


def worth_a_line(checks):
    return [check for check in checks if check.status in ("warn", "fail")]


def problems(trainer):
    return worth_a_line(preflight(trainer))


def assert_only(trainer, name, status, *words, **options):
    checks = preflight(trainer, **options)
    found = worth_a_line(checks)
    assert [(check.name, check.status) for check in found] == [(name, status)], "\n".join(map(str, found))
    line = str(found[0])
    assert "\n" not in line and found[0].remedy
    for word in words:
        assert word in line, line
    table = preflight_table(checks).splitlines()
    assert line in table and f"1 {status}" in table[-1]


# --- sound set-ups ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        tiny,
        chat,
        lambda: tiny(temperature=0.6, beta=0.1),
        lambda: tiny(dtype="bfloat16", beta=0.1),
        lambda: tiny(dtype="float16", master_weights=True, beta=0.1),
        lambda: tiny(**RECIPES["ppo"].settings),
        lambda: tiny(top_k=3, temperature=0.8, vllm_importance_sampling_correction=True),
        lambda: tiny(advantage_estimator="batch", scale_rewards="batch", per_device_train_batch_size=8),
        lambda: chat(temperature=1.5, beta=0.1, kl_estimator="exact"),
    ],
    ids=["tiny", "chat", "tempered", "bfloat16", "float16", "ppo", "top_k", "batch", "chat tempered"],
)
def test_a_sound_setup_passes_every_check(make):
    checks = preflight(make())
    assert {check.status for check in checks} == {"pass"}, preflight_table(checks)
    assert [check.name for check in checks] == list(CHECKS)


@pytest.mark.parametrize("make", [tiny, chat, lambda: tiny(**RECIPES["ppo"].settings)], ids=["tiny", "chat", "ppo"])
def test_it_leaves_no_trace(make):
    trainer, untouched = make(), make()
    trainer.step()
    untouched.step()

    def state():
        models = [model for model in (trainer.model, trainer.reference, trainer.critic) if model is not None]
        weights = {i: copy.deepcopy(model.state_dict()) for i, model in enumerate(models)}
        modes = [module.training for model in models for module in model.modules()]
        gradients = [weight.grad is None for model in models for weight in model.parameters()]
        learners = [learner for learner in (trainer.learner, trainer.critic_learner) if learner is not None]
        optimiser = [copy.deepcopy(learner.optimizer.state_dict()) for learner in learners]
        generators = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
        return (
            weights,
            modes,
            gradients,
            optimiser,
            generators,
            trainer.sampling.get_state(),
            trainer.batches.generator.get_state(),
        )

    torch.manual_seed(5)
    before = state()
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = -0.0  # a sign that a careless undo loses
        before[0][0]["lm_head.weight"][0, 0] = -0.0
    preflight(trainer)
    assert_same(before, state())
    trainer.model.load_state_dict(untouched.model.state_dict())
    metrics = [each.step() for each in (trainer, untouched)]
    assert untimed(metrics[0]) == untimed(metrics[1])
    assert_same(trainer.model.state_dict(), untouched.model.state_dict())
    assert next(trainer.batches) == next(untouched.batches)


def assert_same(a, b):
    """Equal to the last bit, through dicts, lists and tensors."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert np.array_equal(a, b)


def untimed(metrics):
    return {name: value for name, value in metrics.items() if "seconds" not in name and name != "generation_share"}


def test_weights_come_back_after_an_exception():
    trainer = tiny()
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(KeyboardInterrupt), weights_changed(trainer.model):
        raise KeyboardInterrupt
    assert_same(before, trainer.model.state_dict())


# --- the instruments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_flipping_signs_twice_changes_nothing(dtype):
    weight = torch.tensor([[1.5, -0.0, float("nan"), float("-inf")], [0.1, 2.0, -3.0, 1e-7]]).to(dtype)
    flipped = weight.clone()
    flip_signs(flipped, 3)
    assert not flipped.equal(weight) and flipped.abs()[1].equal(weight.abs()[1])
    flip_signs(flipped, 3)
    assert_same(flipped[1], weight[1])
    assert flipped[0, 1].signbit() and flipped[0, 3] == float("-inf")


def test_every_trainable_parameter_is_changed_zeros_and_single_numbers_included():
    model = torch.nn.Linear(1, 3)
    model.scale, model.frozen = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.ones(2), False)
    torch.nn.init.zeros_(model.bias)
    before = copy.deepcopy(model.state_dict())
    with weights_changed(model):
        changed = {name for name, weight in model.state_dict().items() if not weight.equal(before[name])}
    assert changed == {"weight", "bias", "scale"}
    assert_same(before, model.state_dict())


def test_the_witness_is_the_materialised_oracle_row_by_row():
    trainer = chat()
    probe = Probe(trainer)
    rollouts, picked = probe.rollouts, probe.picked
    logits = plain_logits(trainer.model, rollouts, picked)
    plain = gather_logprobs(logits, rollouts.completion_ids[picked])
    texts = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids
    torch.testing.assert_close(plain, token_logprobs(trainer.model, *texts)[picked], atol=1e-5, rtol=0)
    lengths = rollouts.mask.sum(1)
    assert (picked.sum(1) == torch.where(lengths > 4, 5, lengths)).all()
    assert rollouts.prompt_mask.sum(1).unique().numel() > 3  # padding was put to the test
    assert not rollouts.prompt_mask.all() and rollouts.prompt_mask.all(1).any()


def test_surprise_of_draws_by_hand():
    """q = (3/4, 1/4): H = 0.5623, the variance of log q is (3/16) log²3, and a draw is -log q - H away from it."""
    logits, log3 = torch.tensor([[3.0, 1.0]]).log().repeat(4, 1), float(np.log(3))
    deviation = (3 / 16) ** 0.5 * log3
    likely, unlikely = -log3 / 4, 3 * log3 / 4
    for ids, total in (([0, 0, 0, 0], 4 * likely), ([0, 0, 0, 1], 0.0), ([1, 1, 1, 1], 4 * unlikely)):
        score = surprise_score(*surprises(logits, torch.tensor(ids)))
        assert score == pytest.approx(total / (2 * deviation), abs=1e-4)


def test_a_token_of_a_new_line_does_not_break_the_line():
    assert names_of(build_tokenizer("a\n"), [2, 4]) == "<eos> (id 2), \\n (id 4)"


# --- tokenizers, templates and prompts ------------------------------------------------------------------------------------


def test_a_pad_token_that_is_the_end_of_sequence():
    trainer = tiny()
    trainer.tokenizer.pad_token = trainer.tokenizer.eos_token
    assert_only(trainer, "pad token", "warn", "<eos> (id 2)", "a pad token of its own")


@pytest.mark.parametrize("count", [2, 3])
def test_a_template_with_several_bos(count):
    trainer = chat("{{ bos_token }}" * count + TURNS)
    assert_only(trainer, "one BOS", "warn", f"begins with {count} BOS (<bos>)", "remove one from the template")


def test_prompts_that_a_template_has_made_already():
    made = [
        f"<user>is {a} {b}?<end><model>" for a in ("red", "green", "blue") for b in ("warm", "cold", "sweet", "big")
    ]
    trainer = chat(prompts=made * 2)
    assert_only(
        trainer, "template", "warn", "16 of 16 prompts hold special tokens as text, such as <end>", "list of turns"
    )


# --- samplers -------------------------------------------------------------------------------------------------------------


@dataclass
class Wrapped:
    """A sampler whose rollouts go through a fault."""

    inner: TorchSampler
    change: object

    def generate(self, prompts, num_generations, seed):
        return self.change(self.inner.generate(prompts, num_generations, seed))

    def sync(self, model):
        self.inner.sync(model)


def with_sampler(trainer, change):
    trainer.sampler = Wrapped(trainer.sampler, change)
    return trainer


def stop_cut_off(rollouts):
    lengths = rollouts.mask.sum(1) - (~rollouts.truncated).long()
    return replace(rollouts, mask=torch.arange(rollouts.mask.shape[1]) < lengths[:, None])


def flags_forgotten(rollouts):
    return replace(rollouts, truncated=torch.zeros_like(rollouts.truncated))


def flags_everywhere(rollouts):
    return replace(rollouts, truncated=torch.ones_like(rollouts.truncated))


def second_bos(rollouts):
    ids = torch.cat([torch.ones_like(rollouts.prompt_ids[:, :1]), rollouts.prompt_ids], 1)
    return replace(rollouts, prompt_ids=ids, prompt_mask=torch.ones_like(ids, dtype=torch.bool))


def groups_interleaved(rollouts):
    return replace(rollouts, group=rollouts.group.view(-1, 4).T.flatten())


def no_logprobs(rollouts):
    return replace(rollouts, sampler_logprobs=torch.zeros_like(rollouts.sampler_logprobs))


def shifted_logprobs(rollouts):
    return replace(rollouts, sampler_logprobs=rollouts.sampler_logprobs.roll(1, 1))


def token_left_out(column):
    def change(rollouts):
        mask = rollouts.mask.clone()
        mask[:, column] = False
        return replace(rollouts, mask=mask)

    return change


@pytest.mark.parametrize("column", [0, 1])
def test_drawn_tokens_that_are_masked_out(column):
    trainer = with_sampler(tiny(), token_left_out(column))
    assert_only(trainer, "completions", "warn", "tokens before the ends of the completions are masked out", "mask True")


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (stop_cut_off, "stop token", ["have no trained stop token at their end", "<eos> (id 2)", "never learned"]),
        (flags_everywhere, "stop token", ["64 completions are marked as truncated", "cap of 4 tokens"]),
        (second_bos, "completions", ["64 of 64 completions continue another prompt", "no second BOS"]),
        (groups_interleaved, "completions", ["asked for 64, in order"]),
        (no_logprobs, "sampler gap", ["nats per token", "returned 0 for every token"]),
        (shifted_logprobs, "sampler gap", ["nats per token", "compute different things"]),
    ],
)
def test_what_a_sampler_returns(change, name, words):
    assert_only(with_sampler(tiny(), change), name, "fail", *words)


def test_flags_of_completions_that_were_cut_off():
    trainer = with_sampler(tiny(max_completion_length=2), flags_forgotten)
    assert_only(trainer, "stop token", "fail", "finished completions have no trained stop token")


def test_a_sampler_that_does_not_know_the_stop_tokens():
    trainer = tiny(max_completion_length=6)
    trainer.sampler = replace(trainer.sampler, stop_ids=[0])
    assert_only(trainer, "stop token", "fail", "of 64 completions go on after a stop token (<eos> (id 2))", "stop ids")


def test_a_sampler_that_raises_is_one_line_and_the_rest_waits():
    trainer = tiny()
    trainer.sampler = replace(trainer.sampler, max_completion_length=100)
    checks = {check.name: check for check in preflight(trainer)}
    assert checks["completions"].status == "fail" and "the model has 64 positions" in checks["completions"].finding
    assert {check.status for check in checks.values()} == {"pass", "fail", "skip"}
    assert checks["alignment"].finding == "not judged: first ratio" and checks["memory"].status == "pass"


def first_digit(prompts, completions, **columns):
    return [float(text[:1] > "5") for text in completions]


def sum_of_characters(prompts, completions, **columns):
    return [float(sum(map(ord, text))) for text in completions]


def test_many_completions_are_cut_off():
    trainer = tiny(reward=sum_of_characters, temperature=2.0, max_completion_length=1)
    stop, cut = problems(trainer)
    assert (stop.name, stop.status) == ("stop token", "warn") and (cut.name, cut.status) == ("truncation", "warn")
    assert (
        "no completion ends with a stop token (<eos> (id 2))" in stop.finding and "one token cannot be" in stop.finding
    )
    assert stop.remedy == "raise max_completion_length, which is 1"
    assert "100% of the completions are cut off at max_completion_length 1" in cut.finding
    trainer = tiny(reward=sum_of_characters, temperature=2.0, max_completion_length=1, mask_truncated_completions=True)
    _, cut = problems(trainer)
    assert cut.status == "fail" and "leaves 0 of 64 to learn from" in cut.finding


def all_but_four_cut_off(rollouts):
    stop = torch.tensor(build_tokenizer("0123456789+=").eos_token_id)
    ids = torch.where(torch.arange(len(rollouts))[:, None] < 4, stop, 5).expand_as(rollouts.completion_ids)
    return replace(rollouts, completion_ids=ids, truncated=ids[:, 0] != stop)


def test_nearly_all_completions_are_cut_off_and_masked():
    for masked, status in ((True, "fail"), (False, "warn")):
        trainer = with_sampler(tiny(max_completion_length=1, mask_truncated_completions=masked), all_but_four_cut_off)
        status_found, finding, _ = check_truncation(Probe(trainer))
        assert status_found == status and ("leaves 4 of 64 to learn from" in finding) is masked


def test_another_temperature_is_named():
    trainer = tiny()
    trainer.sampler = replace(trainer.sampler, temperature=0.6)
    assert_only(trainer, "temperature", "fail", "fit temperature 0.60, the setting is 1", "temperature=1,")
    trainer = tiny(temperature=0.6)
    trainer.sampler = replace(trainer.sampler, temperature=1.0)
    assert_only(trainer, "temperature", "fail", "fit temperature 1.00, the setting is 0.6", "temperature=0.6,")


def test_raw_logprobs_of_tempered_draws():
    """Pitfall 3: the engine draws at 0.6 and reports the log-probs of 1."""
    trainer = tiny(temperature=0.6)

    def untempered(rollouts):
        texts = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids
        return replace(rollouts, sampler_logprobs=token_logprobs(trainer.model, *texts).detach())

    assert_only(with_sampler(trainer, untempered), "temperature", "fail", "fit temperature 1.00, the setting is 0.6")


class Seedless(Wrapped):
    def generate(self, prompts, num_generations, seed):
        return self.inner.generate(prompts, num_generations, 7)


def group_repeated(rollouts):
    return replace(rollouts.select(torch.arange(len(rollouts)) // 4 * 4), group=rollouts.group)


def test_a_sampler_that_repeats_itself():
    trainer = with_sampler(tiny(), group_repeated)
    assert_only(trainer, "variety", "fail", "all 4 completions of each prompt are the same", "e^-", "greedy")
    trainer = tiny()
    trainer.sampler = Seedless(trainer.sampler, None)
    assert_only(trainer, "variety", "fail", "another seed gives the same 64 completions", "e^-", "with the seed")


def test_a_policy_that_is_nearly_certain_may_repeat_itself():
    probe = Probe(tiny(temperature=1e-3))
    rows = completions_of(probe.rollouts)
    assert rows == completions_of(probe.again) and rows[0] == rows[3] and check_variety(probe)[0] == "pass"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"temperature": 3.0}, "too unlikely: is it hotter"),
        ({"temperature": 0.3}, "too likely"),
        ({"temperature": 0.7}, "too likely: is it greedy, colder"),
        ({"top_p": 0.9}, "cut by top-p"),
    ],
)
def test_draws_from_another_distribution_than_is_reported(settings, word):
    trainer = tiny(reward=first_digit)

    def reported(rollouts):
        texts = rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids
        return replace(rollouts, sampler_logprobs=token_logprobs(trainer.model, *texts).detach())

    trainer.sampler = Wrapped(replace(trainer.sampler, **settings), reported)
    (line,) = [check for check in problems(trainer) if check.name not in ("signal", "truncation")]
    assert line.name == "draws" and line.status in ("warn", "fail") and word in str(line)


def test_enough_is_drawn_to_judge_the_draws_and_never_too_much():
    tokens, read = [], []
    for trainer, wanted in ((tiny(), 500), (tiny(), 10**6), (chat(), 10**6)):
        draws = beginnings(Probe(trainer), wanted)
        tokens.append(sum(int(rollouts.mask.sum()) for rollouts in draws))
        read.append(tokens[-1] + sum(int(rollouts.prompt_mask.sum()) for rollouts in draws))
    assert 500 <= tokens[0] < 800 and len(beginnings(Probe(tiny()), 10**6)) == 16 and 20_000 <= read[2] < 25_000


@dataclass
class Copy:
    """A sampler with weights of its own. ``skip`` leaves parameters out of a sync, ``lag`` takes what the last one brought,
    ``every=2`` is deaf to every other one."""

    inner: TorchSampler
    skip: tuple = ()
    lag: bool = False
    never: bool = False
    every: int = 1

    def __post_init__(self):
        self.syncs = 0
        self.inner = replace(self.inner, model=copy.deepcopy(self.inner.model))
        self.waiting = copy.deepcopy(self.inner.model.state_dict())

    def generate(self, prompts, num_generations, seed):
        return self.inner.generate(prompts, num_generations, seed)

    def sync(self, model):
        new = {n: w.clone() for n, w in model.state_dict().items() if not any(part in n for part in self.skip)}
        arriving, self.waiting = (self.waiting, new) if self.lag else (new, new)
        self.syncs += 1
        if not self.never and self.syncs % self.every == 1 % self.every:
            self.inner.model.load_state_dict(arriving, strict=False)


def with_copy(**faults):
    trainer = tiny()
    trainer.sampler = Copy(trainer.sampler, **faults)
    return trainer


def test_a_sampler_with_a_copy_that_is_kept_up_to_date():
    trainer = with_copy()
    assert problems(trainer) == []
    assert_same(trainer.sampler.inner.model.state_dict(), trainer.model.state_dict())


def test_a_sampler_that_hears_every_other_time_is_left_with_other_weights():
    words = "did not take the policy's weights back", "nats", "every time it is called"
    assert_only(with_copy(every=2), "weight sync", "fail", *words)


@pytest.mark.parametrize("fault", [{"lag": True}, {"never": True}])
def test_a_sampler_that_lags_one_sync_or_never_hears(fault):
    words = "after a sync of other weights", "nats per token", "it has the weights of before", "before it returns"
    assert_only(with_copy(**fault), "weight sync", "fail", *words)


def test_a_parameter_that_does_not_arrive_is_named():
    trainer = with_copy()
    probe = Probe(trainer)
    for name, _ in trainer.model.named_parameters():
        trainer.sampler.skip = (name,)
        status, finding, _ = check_sync(probe)
        assert status == "fail" and f": {name} did not arrive" in finding
    trainer.sampler.skip = ()
    assert check_sync(probe)[0] == "pass"


@pytest.mark.parametrize("part", ["self_attn", "mlp", "layers.0", "norm", "q_norm", "proj"])
def test_several_parameters_that_do_not_arrive(part):
    """Halves that would cancel, if all signs of a layer's matrices were flipped alike."""
    assert_only(with_copy(skip=(part,)), "weight sync", "fail", "did not arrive")


def test_a_sampler_in_lower_precision():
    trainer = tiny()
    inner = replace(trainer.sampler, model=copy.deepcopy(trainer.model).to(torch.bfloat16))
    trainer.sampler = Copy(inner)
    assert_only(trainer, "sampler gap", "warn", "nats per token", "vllm_importance_sampling_correction")
    trainer.config = replace(trainer.config, vllm_importance_sampling_correction=True)
    assert problems(trainer) == []


@pytest.mark.vllm
def test_a_real_engine(monkeypatch):
    trainer = tiny(temperature=0.8, beta=0.1)
    stops = stop_token_ids(trainer.tokenizer, trainer.model)
    with VLLMSampler(trainer.model, stops, 0, trainer.config.max_completion_length, 0.8, block_size=32) as engine:
        trainer.sampler = engine
        assert problems(trainer) == []
        monkeypatch.setattr(engine, "sync", lambda model: None)
        assert_only(trainer, "weight sync", "fail", "it has the weights of before")


# --- models -----------------------------------------------------------------------------------------------------------------


def test_dropout_that_eval_mode_does_not_stop():
    trainer = tiny()
    trainer.model.model.norm.register_forward_hook(lambda *call: torch.nn.functional.dropout(call[-1], 0.1))
    assert_only(trainer, "first ratio", "fail", "scored three times without an update", "turn dropout off")


def test_train_mode_with_dropout_left_on():
    trainer = tiny()
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    trainer.model.train()
    assert_only(trainer, "first ratio", "fail", "away from 1", "eval mode")
    assert trainer.model.training
    disable_dropout(trainer.model)
    assert problems(trainer) == []


def scale_logits(model, inputs, output):
    output.logits = output.logits * 1.3
    return output


def test_logits_that_are_changed_behind_the_head():
    trainer = tiny()
    trainer.model.register_forward_hook(scale_logits)
    assert_only(trainer, "alignment", "fail", "nats per token", "behind the output head")


def test_a_model_that_reads_its_padding():
    examples = [Example(f"{'1' * (1 + n % 4)}+{n}=", {}) for n in range(10, 40)]
    trainer = tiny(Task("lengths", examples, examples[:1], sum_of_characters))
    assert problems(trainer) == []
    forward = trainer.model.model.forward
    trainer.model.model.forward = lambda **inputs: forward(
        **{name: value for name, value in inputs.items() if name not in ("attention_mask", "position_ids")}
    )
    assert_only(trainer, "alignment", "fail", "nats per token", "depend on its padding")


def test_a_scoring_function_that_is_shifted(monkeypatch):
    """A fault of ours, seen by the plain call of the model: log-probs one token late."""
    score = lmrl.preflight.score
    monkeypatch.setattr(lmrl.preflight, "score", lambda *a: [x.roll(1, 1) for x in score(*a)])
    in_pieces = lmrl.preflight.in_pieces
    monkeypatch.setattr(lmrl.preflight, "in_pieces", lambda *a: [x.roll(1, 1) for x in in_pieces(*a)])
    assert [check.name for check in problems(tiny())] == ["alignment"]


def test_a_reference_that_is_another_policy_or_the_policy_itself():
    trainer = tiny(beta=0.1)
    trainer.reference = load_reference(build_policy(trainer.tokenizer, seed=1))
    assert_only(trainer, "reference", "fail", "nats per token before the first step", "load_reference(model)")
    trainer.steps_done = 5
    assert problems(trainer) == []
    trainer.reference = trainer.model
    assert_only(trainer, "reference", "fail", "move by", "when the policy's weights change", "frozen copy")


def test_a_critic_whose_values_are_not_finite():
    trainer = tiny(**RECIPES["ppo"].settings)
    with torch.no_grad():
        trainer.critic.head.weight[0, 0] = float("nan")
    assert_only(trainer, "critic", "fail", "values are not finite", "build_critic(model)")


def frozen(trainer):
    trainer.model.model.layers.requires_grad_(False)


def head_replaced(trainer):
    trainer.model.lm_head.weight = torch.nn.Parameter(trainer.model.lm_head.weight.detach().clone())


@torch.no_grad()
def loaded_under_masters(trainer):
    trainer.model.lm_head.weight.mul_(1.1)


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (frozen, {}, "22 parameters were frozen or replaced since, such as model.layers.0."),
        (head_replaced, {}, "1 parameters were frozen or replaced since, such as lm_head.weight"),
        (loaded_under_masters, {"dtype": "bfloat16", "master_weights": True}, "1 parameters are not what their master"),
    ],
)
def test_weights_that_the_optimiser_does_not_hold(change, settings, words):
    trainer = tiny(**settings)
    change(trainer)
    assert_only(trainer, "weights", "fail", words, "then make the Trainer")


def critic_frozen(trainer):
    trainer.critic.requires_grad_(False)


def critic_head_replaced(trainer):
    trainer.critic.head.weight = torch.nn.Parameter(trainer.critic.head.weight.detach().clone())


@torch.no_grad()
def loaded_under_the_critics_masters(trainer):
    trainer.critic.head.weight.fill_(1.1)


@pytest.mark.parametrize(
    ("change", "settings", "words"),
    [
        (critic_frozen, {}, "parameters were frozen or replaced since, such as critic."),
        (critic_head_replaced, {}, "1 parameters were frozen or replaced since, such as critic.head.weight"),
        (
            critic_head_replaced,
            {"share_critic_trunk": True},
            "1 parameters were frozen or replaced since, such as critic.",
        ),
        (
            loaded_under_the_critics_masters,
            {"dtype": "bfloat16", "master_weights": True},
            "1 parameters are not what their master",
        ),
    ],
)
def test_weights_of_the_critic_that_its_optimiser_does_not_hold(change, settings, words):
    trainer = tiny(**RECIPES["ppo"].settings | settings)
    change(trainer)
    assert_only(trainer, "weights", "fail", words, "then make the Trainer")


def test_a_step_of_the_critic_that_rounding_loses():
    trainer = tiny(
        **RECIPES["ppo"].settings | {"dtype": "bfloat16", "learning_rate": 1e-2, "critic_learning_rate": 1e-6}
    )
    assert_only(trainer, "weights", "warn", "of critic_learning_rate 1e-06 is rounded", "or raise critic_learning_rate")


def test_a_step_that_rounding_loses():
    """In bfloat16 the neighbours of 1 and -2 are at least 2^-7 away, so that 2^-8 is lost there; those of 0.25 are nearer."""
    small = {"dtype": "bfloat16", "learning_rate": 1e-6}
    assert_only(tiny(**small), "weights", "warn", "learning_rate 1e-06 is rounded to nothing in", "set master_weights")
    assert check_weights(Probe(tiny(**small, master_weights=True)))[0] == "pass"
    trainer = tiny(dtype="bfloat16", learning_rate=2**-8)
    trainer.learner.weights = trainer.learner.masters = [torch.tensor([1.0, -2.0, 0.25, 0.0], dtype=torch.bfloat16)]
    trainer.model.requires_grad_(False)
    assert "nothing in 50% of 4 weights" in check_weights(Probe(trainer))[1]


MOVED = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
MOVED |= {"warmup_steps": 0, "learning_rate": 3e-4}


def reference_line(trainer):
    checks = preflight(trainer)
    assert {check.status for check in checks} == {"pass"}, preflight_table(checks)
    return next(check.finding for check in checks if check.name == "reference")


def kl_in(finding):
    return float(finding.removeprefix("KL to the reference is ").split()[0])


def test_a_reference_that_moves_at_the_start_and_at_a_resume(tmp_path):
    """KL 0, then what the third step made of it, for the reference is the policy after the second: both restored."""
    trainer, resumed = tiny(**MOVED), tiny(**MOVED)
    assert (
        reference_line(trainer)
        == "KL to the reference is 0 nats per token after 0 steps, and it does not move with the policy"
    )
    for _ in range(3):
        trainer.step()
    restore(resumed, write_checkpoint(trainer, tmp_path))
    finding = reference_line(resumed)
    assert finding == reference_line(trainer) and kl_in(finding) > 1e-5 and "after 3 steps" in finding
    start = load_policy(warm_start_folder(0))
    assert not torch.equal(resumed.reference.lm_head.weight, start.lm_head.weight)
    probe = Probe(resumed)
    gaps = [probe.scored - probe.score(reference) for reference in (resumed.reference, start)]
    near, far = (float((torch.exp(-gap) - 1 + gap)[probe.rollouts.mask].mean()) for gap in gaps)
    assert f"{near:.1g} nats" in finding and far > 1.5 * near  # from the start it is farther: the reference has moved
    resumed.reference = resumed.model
    assert_only(resumed, "reference", "fail", "move by", "frozen copy")


# --- adapters -------------------------------------------------------------------------------------------------------------------


def adapted_trainer(**settings):
    """The warm-started policy under a LoRA adapter that has not learned; the reference is the policy without it."""
    pytest.importorskip("peft")
    folder, config = warm_start_folder(0), replace(SMALL, use_peft=True, lora_r=4, beta=0.1, **settings)
    model = add_adapter(load_policy(folder), r=4, seed=0)
    return assemble(config, model, load_tokenizer(folder), arithmetic())


def test_an_adapter_passes_every_check_at_the_start_and_at_a_resume(tmp_path):
    trainer, resumed = (adapted_trainer(learning_rate=3e-3, warmup_steps=0) for _ in range(2))
    assert kl_in(reference_line(trainer)) == 0.0
    for _ in range(2):
        trainer.step()
    before = copy.deepcopy(trainer.model.state_dict())
    restore(resumed, write_checkpoint(trainer, tmp_path))
    finding = reference_line(resumed)
    assert finding == reference_line(trainer) and kl_in(finding) > 1e-5 and "after 2 steps" in finding
    assert_same(before, resumed.model.state_dict())
    assert untimed(resumed.step()) == untimed(trainer.step())


def test_faults_of_an_adapter():
    """A reference that is the adapted policy, one of another model, and a sampler that never gets the adapter."""
    trainer = adapted_trainer()
    reference, trainer.reference = trainer.reference, trainer.model
    assert_only(trainer, "reference", "fail", "move by", "frozen copy")
    trainer.reference = load_reference(build_policy(trainer.tokenizer, seed=1))
    assert_only(trainer, "reference", "fail", "before the first step")
    trainer.reference, trainer.sampler = reference, replace(trainer.sampler, model=load_policy(warm_start_folder(0)))
    found = problems(trainer)
    assert [check.name for check in found] == ["weight sync"] and found[0].status == "fail"


def test_a_trained_adapter_is_not_where_a_run_may_begin():
    trainer = adapted_trainer()
    with torch.no_grad():
        for layer in adapted_layers(trainer.model).values():
            layer.lora_B["default"].weight.fill_(0.01)
    trainer.reference = load_reference(load_policy(warm_start_folder(0)))
    assert_only(trainer, "reference", "fail", "before the first step", "the starting policy")


# --- rewards ------------------------------------------------------------------------------------------------------------------


def raises(prompts, completions, **columns):
    raise KeyError("truth")


def raises_with_a_semicolon(prompts, completions, **columns):
    raise ValueError("no number; look")


def other_columns(prompts, completions, truth):
    return [1.0] * len(completions)


def too_few(prompts, completions, **columns):
    return [1.0]


def not_a_number(prompts, completions, **columns):
    return [float("nan")] * len(completions)


def trips_over_nothing(prompts, completions, **columns):
    return [float(text[0] > "5") for text in completions]


def all_none(prompts, completions, **columns):
    return [None] * len(completions)


def mostly_none(prompts, completions, **columns):
    return [float(i % 2) if i % 4 < 2 and i % 16 < 12 else None for i in range(len(completions))]


def constant(prompts, completions, **columns):
    return [0.25] * len(completions)


def of_the_prompt(prompts, completions, **columns):
    return [float(len(set(prompt))) for prompt in prompts]


def one_late(prompts, completions, **columns):
    rewards = sum_of_characters(prompts, completions)
    return [rewards[-1], *rewards[:-1]]


def best_first(prompts, completions, **columns):
    return sorted(sum_of_characters(prompts, completions), reverse=True)


def left_over():
    kept = []

    def reward(prompts, completions, **columns):
        kept.extend(sum_of_characters(prompts, completions))
        return kept[: len(completions)]

    return reward


def coin(prompts, completions, **columns):
    return [float(random.random() < 0.5) for _ in completions]


@pytest.mark.parametrize("reward", [one_late, best_first, left_over(), coin])
def test_rewards_that_are_not_the_completions_own(reward):
    words = "of 64 completions get another reward when they are given in reverse", "the k-th completion"
    assert_only(tiny(reward=reward), "reward", "warn", *words)


@pytest.mark.parametrize(
    ("reward", "name", "status", "words"),
    [
        (
            raises,
            "reward",
            "fail",
            ["reward function raises raised KeyError: 'truth'", "test_preflight.py, line", "for any text"],
        ),
        (
            raises_with_a_semicolon,
            "reward",
            "fail",
            ["no number; look (test_preflight.py, line", "→ called as", "for any text"],
        ),
        (other_columns, "reward", "fail", ["unexpected keyword argument", "called as other_columns(", "answer=…"]),
        (too_few, "reward", "fail", ["returned 1 rewards for 64 completions", "return one for each"]),
        (not_a_number, "reward", "fail", ["returned nan", "a reward is a finite number, or None"]),
        (trips_over_nothing, "reward", "fail", ["IndexError", "asked about an empty completion", "for any text"]),
        (all_none, "reward", "fail", ["none of 64 completions could be graded", "None cases"]),
        (mostly_none, "reward", "warn", ["40 of 64 not gradable", "None cases"]),
        (constant, "signal", "fail", ["equal in 80 of 80 groups; '", "' got 0.25 ", "more num_generations than 4"]),
        (of_the_prompt, "signal", "fail", ["equal in 80 of 80 groups"]),
    ],
)
def test_reward_functions(reward, name, status, words):
    assert_only(tiny(reward=reward), name, status, *words)


def hangs(prompts, completions, **columns):
    time.sleep(60)


def hangs_and_swallows(prompts, completions, **columns):
    end = time.monotonic() + 3  # in a thread it cannot be stopped, and is not to outlive the test
    try:
        while time.monotonic() < end:
            pass
    except Exception:
        pass
    return [0.0] * len(completions)


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


async def in_a_loop(function):
    return function()


PLACES = {
    "main thread": lambda function: function(),
    "event loop": lambda function: asyncio.run(in_a_loop(function)),  # as in Jupyter
    "thread": in_a_thread,
    "event loop of a thread": lambda function: in_a_thread(lambda: asyncio.run(in_a_loop(function))),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("reward", [hangs, hangs_and_swallows])
def test_a_reward_function_that_hangs(reward, place):
    words = "no answer for 64 completions within 0.3 s", "time limit for each completion"
    PLACES[place](lambda: assert_only(tiny(reward=reward), "reward", "fail", *words, reward_seconds=0.3))


@pytest.mark.parametrize("place", PLACES)
def test_the_time_limit_gives_back_what_a_function_says_in_time(place):
    assert PLACES[place](lambda: within(60.0, lambda: 7)) == 7
    assert PLACES[place](lambda: within(None, lambda: 7)) == 7
    with pytest.raises(KeyError, match="truth"):
        PLACES[place](lambda: within(60.0, lambda: raises([], [])))
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_function_that_swallows_the_alarm_and_answers_late_is_too_slow_all_the_same():
    def stubborn():
        try:
            time.sleep(60)
        except BaseException:
            return 0.0

    try:
        outcome = within(0.1, stubborn)
    except TooSlow:
        outcome = "too slow"
    assert outcome == "too slow"


def test_the_setting_of_the_run_is_the_limit_of_the_check_too():
    words = "no answer for 64 completions within 0.2 s", "raise reward_timeout"
    assert_only(tiny(reward=hangs, reward_timeout=0.2), "reward", "fail", *words)
    assert Probe(tiny()).reward_seconds == 60.0 and Probe(tiny(reward_timeout=7.0)).reward_seconds == 7.0


def test_rewards_that_rarely_differ():
    def reward(prompts, completions, **columns):
        sums = sum_of_characters(prompts, completions)
        return [score * (prompt == chosen) for score, prompt in zip(sums, prompts, strict=True)]

    trainer = tiny(reward=reward)
    chosen = Probe(trainer).examples[3].prompt
    trainer.sampler = replace(trainer.sampler, temperature=1.0)
    assert_only(trainer, "signal", "warn", "equal in 15 of 16 groups", "prompts that succeed sometimes")


def test_equal_rewards_of_a_batch():
    trainer = tiny(reward=constant, advantage_estimator="batch", scale_rewards="batch")
    assert_only(trainer, "signal", "fail", "equal in 5 of 5 batches")


# --- memory ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "status"), [(1.2, "pass"), (1.05, "warn"), (0.5, "fail")])
def test_memory_that_is_not_there(share, status, monkeypatch):
    trainer = tiny(per_device_train_batch_size=4096)
    monkeypatch.setattr("lmrl.preflight.free_memory", lambda device: 2**60)
    (line,) = [check for check in preflight(trainer) if check.name == "memory"]
    needed = float(line.finding.split()[3])
    monkeypatch.setattr("lmrl.preflight.free_memory", lambda device: int(share * needed * 2**30))
    if status == "pass":
        assert problems(trainer) == []
    else:
        assert_only(trainer, "memory", status, f"takes {needed:.2f} GiB more, and", "lower per_device_train_batch_size")


def test_memory_that_nobody_knows(monkeypatch):
    monkeypatch.setattr("lmrl.preflight.free_memory", lambda device: None)
    (line,) = [check for check in preflight(tiny()) if check.status != "pass"]
    assert line.name == "memory" and line.status == "skip" and "not known here" in line.finding


# --- the table and the command ----------------------------------------------------------------------------------------------------


def test_the_table_is_aligned_one_line_each_with_the_counts_below():
    trainer = tiny(reward=constant)
    *lines, last = preflight_table(preflight(trainer)).splitlines()
    width = max(map(len, CHECKS))
    assert len(lines) == len(CHECKS) and last == "19 checks: 18 pass, 0 warn, 1 fail, 0 skip"
    for line, name in zip(lines, CHECKS, strict=True):
        assert line[4:6] == "  " and line[6 : 6 + width].strip() == name and line[6 + width : 8 + width] == "  "
        assert line[8 + width] != " "


def test_a_refusal_prints_what_is_wrong_and_names_the_ways_on(capsys):
    trainer = tiny(reward=raises)
    trainer.tokenizer.pad_token = trainer.tokenizer.eos_token
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"1 of 19 checks of the set-up failed \(reward\).*--no-preflight"):
        require_preflight(trainer)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["warn", "fail"]
    trainer.task = replace(trainer.task, reward=sum_of_characters)
    require_preflight(trainer)
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["warn"]


QUICK = ["--max-steps", "1", "--per-device-train-batch-size", "32", "--num-eval-problems", "8"]


def reward_file(tmp_path, body):
    file = tmp_path / "mine.py"
    file.write_text(f"def score(prompts, completions, **columns):\n    {body}\n")
    return f"{file}:score"


def test_lmrl_check_exits_0_or_1_and_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["check", *QUICK]) == 0
    assert "19 checks: 19 pass, 0 warn, 0 fail, 0 skip" in capsys.readouterr().out
    assert main(["check", *QUICK, "--reward", reward_file(tmp_path, "return [1.0]")]) == 1
    assert "fail  reward" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_lmrl_check_of_prompts_that_the_model_cannot_read_prints_its_table(tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"prompt": "{a}+{a}=x", "answer": "{2 * a}"}}\n' for a in range(10, 60)))
    for options in ([], ["--max-prompt-length", "20"]):
        assert main(["check", *QUICK, "--task", f"jsonl:{file}", *options]) == 1
        out, err = capsys.readouterr()
        line, *others = out.splitlines()
        assert line.startswith("fail  prompts  ") and "50 of 50 prompts" in line and "it does not know 'x'" in line
        assert "→ repair these prompts" in line and all(other.startswith("skip  ") for other in others[:-1])
        assert others[-1] == "20 checks: 0 pass, 0 warn, 1 fail, 19 skip" and "lmrl: " not in err


def test_lmrl_check_of_a_run_that_is_to_go_on(tmp_path, capsys):
    options = ["--output-dir", str(tmp_path), "--name", "r", *QUICK, "--beta", "0.1", "--warmup-steps", "0"]
    assert main(["train", *options]) == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["check", "--resume", str(tmp_path / "r")]) == 0
    out = capsys.readouterr().out
    assert "KL to the reference is " in out and "after 1 steps" in out and "19 checks: 19 pass" in out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_lmrl_train_refuses_what_fails_and_can_be_told_not_to_look(tmp_path, capsys):
    options = [
        *QUICK,
        "--output-dir",
        str(tmp_path / "runs"),
        "--reward",
        reward_file(tmp_path, "return [0.5] * len(completions)"),
    ]
    assert main(["train", *options]) == 2
    out, err = capsys.readouterr()
    assert "fail  signal" in err and "the rewards are equal in" in err and "lmrl: 1 of 19 checks" in err and out == ""
    assert not (tmp_path / "runs").exists()
    assert main(["train", *options, "--no-preflight"]) == 0
    assert "signal" not in capsys.readouterr().err


def test_lmrl_train_says_nothing_when_all_is_well(tmp_path, capsys):
    assert main(["train", *QUICK, "--output-dir", str(tmp_path / "runs")]) == 0
    err = capsys.readouterr().err
    assert "pass  " not in err and "warn  " not in err
