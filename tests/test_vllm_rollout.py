"""The vLLM sampler: its parts alone, then all of it against the real engine, which starts four times for the whole file."""

import copy
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lmrl import vllm_rollout
from lmrl.checkpoint import restore, write_checkpoint
from lmrl.cli import main
from lmrl.config import TrainConfig, check_config
from lmrl.models import load_policy, load_tokenizer
from lmrl.policy import build_policy, completion_logits, gather_logprobs, token_logprobs, warm_start_folder
from lmrl.rollout import truncate
from lmrl.tasks import load_task
from lmrl.trainer import Trainer
from lmrl.vllm_rollout import (
    VLLMSampler,
    checksum,
    find_places,
    import_vllm,
    parameter_checksums,
    policy_weights,
    prompt_seeds,
    push_weights,
    read_completions,
)

EOS, PAD, LENGTH = 2, 0, 8


# The parts alone


def test_without_vllm_the_error_names_the_extra_and_the_way_for_a_cpu(monkeypatch):
    monkeypatch.setattr(vllm_rollout, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[vllm\]'.*make .venv/.vllm"):
        import_vllm()


def test_the_environment_is_set_before_vllm_is_imported_and_keeps_what_the_user_set(monkeypatch):
    seen = {}
    monkeypatch.setattr(vllm_rollout, "os", SimpleNamespace(environ={"VLLM_LOGGING_LEVEL": "INFO"}))
    monkeypatch.setattr(vllm_rollout, "find_spec", lambda name: True)
    monkeypatch.setattr(vllm_rollout, "import_module", lambda name: seen.update(vllm_rollout.os.environ))
    import_vllm("cuda")
    assert seen["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and seen["VLLM_NO_USAGE_STATS"] == "1"
    assert seen["VLLM_LOGGING_LEVEL"] == "INFO" and "TORCHDYNAMO_DISABLE" not in seen
    import_vllm("cpu")
    assert seen["TORCHDYNAMO_DISABLE"] == "1" and seen["VLLM_CPU_KVCACHE_SPACE"] == "1"


def completion(ids, reason, logprob=-0.5):
    steps = [{id: SimpleNamespace(logprob=logprob)} for id in ids]
    return SimpleNamespace(token_ids=ids, logprobs=steps, finish_reason=reason)


def output(*rows):
    return SimpleNamespace(outputs=list(rows))


def test_lengths_and_truncation_come_from_the_engine_and_the_stop_token_stays():
    """Pad and stop share an id here: the mask cannot have been made from ids."""
    rows = [completion([5, 6, 2], "stop"), completion([5, 6, 7, 8, 9], "length"), completion([2], "stop")]
    samples = read_completions([output(*rows[:2]), output(rows[2])], stop_ids=[2], pad_id=2)
    assert samples.ids.tolist() == [[5, 6, 2, 2, 2], [5, 6, 7, 8, 9], [2, 2, 2, 2, 2]]
    assert samples.lengths.tolist() == [3, 5, 1] and samples.truncated.tolist() == [False, True, False]
    assert samples.logprobs.dtype == torch.float32
    assert samples.logprobs.tolist() == [[-0.5] * n + [0] * (5 - n) for n in (3, 5, 1)]


def test_missing_logprobs_raise_and_are_never_zero():
    for spoil in (lambda row: None, lambda row: row.logprobs[:-1], lambda row: [{7: row.logprobs[0][5]}] * 2):
        row = completion([5, 2], "stop")
        row.logprobs = spoil(row)
        with pytest.raises(RuntimeError, match="no log-prob for a token of completion 0"):
            read_completions([output(row)], [2], 0)


@pytest.mark.parametrize("row", [completion([5, 6], "abort"), completion([5, 6], "stop"), completion([], "stop")])
def test_a_row_that_ended_otherwise_raises(row):
    with pytest.raises(RuntimeError, match="finish reason"):
        read_completions([output(row)], [2], 0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logprobs_that_are_not_finite_raise(value):
    with pytest.raises(FloatingPointError):
        read_completions([output(completion([5, 2], "stop", value))], [2], 0)


def test_seeds_follow_prompt_and_number_and_not_the_company():
    alone, company = prompt_seeds([[1, 2]], 4, seed=0), prompt_seeds([[3], [1, 2], [1, 2]], 4, seed=0)
    assert company[1] == alone[0] and company[2] == alone[0] + 4
    assert prompt_seeds([[1, 2]], 4, seed=1) != alone
    assert (
        prompt_seeds([np.array([1, 2])], 4, seed=np.int64(0)) == alone
    )  # as `row_uniforms`, whatever the kind of integer
    assert len({seed + k for seed in prompt_seeds([[i] for i in range(500)], 4, 0) for k in range(4)}) == 2000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_checksum_sees_every_bit_and_place(dtype):
    tensor = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor.T.contiguous().T)
    for i in range(6):
        for j in range(5):
            other = tensor.clone()
            other[i, j] = torch.nextafter(other[i, j], other[i, j] * 2)
            assert checksum(other) != checksum(tensor)
    assert checksum(tensor.flip(0)) != checksum(tensor) != checksum(tensor.T.contiguous())


FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_fused_layers_have_a_place_for_each_part():
    weights = {f"model.0.{part}_proj.weight": torch.zeros(rows, 2) for part, rows in (("v", 3), ("q", 8), ("k", 3))}
    places = find_places(weights | {"norm.weight": torch.zeros(2)}, {"model.0.qkv_proj.weight", "norm.weight"}, FUSED)
    assert [places[f"model.0.{part}_proj.weight"][1] for part in "qkv"] == [0, 8, 11]
    assert places["norm.weight"] == ("norm.weight", 0)


@pytest.mark.parametrize(
    "names, said",
    [
        (["q_proj.weight", "k_proj.weight", "v_proj.weight", "x.weight"], r"1 unknown to the engine \(x.weight\)"),
        (["q_proj.weight", "v_proj.weight"], r"1 missing from the policy \(k_proj.weight\)"),
        ([], r"1 missing from the policy \(qkv_proj.weight\)"),
    ],
)
def test_a_name_too_many_or_too_few_raises(names, said):
    with pytest.raises(ValueError, match=said):
        find_places({name: torch.zeros(2, 2) for name in names}, {"qkv_proj.weight"}, FUSED)


def test_a_policy_on_another_gpu_is_refused(start):
    policy = SimpleNamespace(device=torch.device("cuda:1"), get_input_embeddings=start[1].get_input_embeddings)
    with pytest.raises(ValueError, match="cuda:1.*CUDA_VISIBLE_DEVICES"):
        VLLMSampler(policy, [EOS], PAD, LENGTH)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 2.0}])
def test_settings_that_make_no_sense_are_refused_before_an_engine_starts(start, settings):
    with pytest.raises(ValueError):
        VLLMSampler(start[1], [EOS], PAD, LENGTH, **settings)
    assert VLLMSampler.running is None


class PretendEngine:
    """An engine whose model has the policy's own names, with switches for what can go wrong."""

    def __init__(self, model):
        self.model, self.calls, self.forgets, self.resets = copy.deepcopy(model), [], None, True

    def apply_model(self, function):
        return [function(self.model)]

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        weights = dict(kwargs["weights_iterator"])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name != self.forgets:
                    parameter.copy_(weights[name])

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return self.resets

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self):
        self.calls.append("wake")

    def generate(self, prompts, parameters, use_tqdm):
        self.calls.append("generate")
        return [output(*[completion([3, EOS], "stop")] * 2) for _ in prompts]


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))


def test_every_parameter_is_compared_after_the_push(layer):
    engine = PretendEngine(layer)
    for name, parameter in layer.named_parameters():
        parameter.data += 1e-3
        engine.forgets = name
        with pytest.raises(RuntimeError, match=f"1 parameters of the engine differ.*{name}"):
            push_weights(engine, layer)
        engine.forgets = None
        push_weights(engine, layer)
    assert parameter_checksums(engine.model) == parameter_checksums(layer)


def test_a_prefix_cache_that_is_not_emptied_raises(layer):
    engine = PretendEngine(layer)
    engine.resets = False
    with pytest.raises(RuntimeError, match="prefix cache"):
        push_weights(engine, layer)


@pytest.fixture
def sleeper(layer, monkeypatch):
    """A sampler in sleep mode over the pretended engine, as on CUDA."""
    sampler = object.__new__(VLLMSampler)
    sampler.engine, sampler.device, sampler.stop_ids, sampler.pad_id = (
        PretendEngine(layer),
        torch.device("cpu"),
        [EOS],
        0,
    )
    sampler.max_model_length, sampler.max_completion_length, sampler.vocabulary = 8, 2, 5
    sampler.sleeps, sampler.asleep, sampler.shapes = True, False, {}
    monkeypatch.setattr(VLLMSampler, "parameters", lambda *_: None)
    sampler.sync(layer)
    return sampler


def test_the_engine_sleeps_through_the_training_phase_and_wakes_for_the_push(sleeper, layer):
    sleeper.engine.calls.clear()
    for _ in range(2):
        sleeper.generate([[1]], 2, seed=0)
        layer[0].weight.data += 1
        sleeper.sync(layer)
    once = ["generate", "sleep 1", "wake", "reload_weights", "reset"]
    assert sleeper.engine.calls == 2 * once
    sleeper.generate([[1]], 2, seed=0)
    sleeper.generate([[1]], 2, seed=0)
    assert sleeper.engine.calls[10:] == ["generate", "sleep 1", "wake", "generate", "sleep 1"]


def test_weights_lost_in_sleep_raise(sleeper):
    sleeper.generate([[1]], 2, seed=0)
    sleeper.engine.model[1].bias.data.zero_().add_(3)
    with pytest.raises(RuntimeError, match="before it slept"):
        sleeper.generate([[1]], 2, seed=0)


# The real engine


@pytest.fixture(scope="module")
def start():
    """The warm start's tokenizer, policy and weights. Its generation config ships what must not be inherited."""
    folder = warm_start_folder(0)
    tokenizer, policy = load_tokenizer(folder), load_policy(folder)
    policy.generation_config.update(do_sample=True, repetition_penalty=1.1, top_p=0.8, top_k=20)
    return tokenizer, policy, copy.deepcopy(policy.state_dict())


@pytest.fixture(scope="module")
def running(start):
    with VLLMSampler(start[1], [EOS], PAD, LENGTH, block_size=32) as sampler:
        yield sampler


@pytest.fixture
def sampler(running, start):
    yield running
    start[1].load_state_dict(start[2])
    running.sync(start[1])


@pytest.fixture
def policy(start):
    return start[1]


@pytest.fixture
def prompts(start):
    """Sixteen problems, and three prompts that fill more than one block of the engine's cache."""
    short = [start[0](f"{a}+{b}=").input_ids for a, b in zip(range(10, 26), range(99, 50, -3), strict=False)]
    return short + [start[0]((f"{a}+{a}={2 * a}") * 8).input_ids[:44] for a in (13, 27, 44)]


def scores(policy, rollouts, temperature=1.0):
    with torch.no_grad():
        return token_logprobs(policy, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, temperature)


def largest_gap(policy, rollouts, temperature=1.0):
    return (scores(policy, rollouts, temperature) - rollouts.sampler_logprobs)[rollouts.mask].abs().max().item()


def perturb(policy, scale=0.05):
    noise = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=noise)


vllm = pytest.mark.vllm


@vllm
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"top_p": 0.8},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 3},
        {"min_p": 0.1},
    ],
    ids=str,
)
def test_the_logprobs_are_those_of_the_distribution_that_was_sampled(sampler, policy, prompts, settings, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setattr(sampler, name, value)
    rollouts = sampler.generate(prompts, 8, seed=0)
    cuts = {name: value for name, value in settings.items() if name != "temperature"}
    temperature = settings.get("temperature", 1.0)
    with torch.no_grad():
        logits = completion_logits(
            policy, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, temperature
        )
    logits, ids = logits[rollouts.mask], rollouts.completion_ids[rollouts.mask]
    gap = gather_logprobs(truncate(logits, **cuts), ids) - rollouts.sampler_logprobs[rollouts.mask]
    assert gap.abs().max() < 1e-4
    if settings:  # else the raw log-probs are the same
        assert largest_gap(policy, rollouts) > 0.1


@vllm
def test_nothing_is_inherited_from_the_checkpoint(sampler, policy, prompts):
    effective = sampler.parameters(num_generations=3, seed=7)
    assert effective.repetition_penalty == 1.0 and effective.presence_penalty == effective.frequency_penalty == 0.0
    assert (effective.temperature, effective.top_p, effective.top_k, effective.min_p) == (1.0, 1.0, 0, 0.0)
    assert (effective.n, effective.max_tokens, effective.min_tokens) == (3, LENGTH, 0)
    assert sampler.engine.get_default_sampling_params().repetition_penalty == 1.0
    rollouts = sampler.generate(prompts, 8, seed=0)
    gap = (scores(policy, rollouts) - rollouts.sampler_logprobs)[rollouts.mask]
    assert gap.mean().abs() < 1e-3 and abs(gap.mean().exp() - 1) < 0.01


@vllm
def test_rollouts_are_whole(sampler, prompts):
    rollouts = sampler.generate(prompts, 8, seed=0)
    assert rollouts.group.tolist() == [i for i in range(len(prompts)) for _ in range(8)]
    for row, group in enumerate(rollouts.group.tolist()):
        assert rollouts.prompt_ids[row][rollouts.prompt_mask[row]].tolist() == prompts[group]
        ids = rollouts.completion_ids[row][rollouts.mask[row]].tolist()
        assert EOS not in ids[:-1]
        assert (ids[-1] == EOS) is not bool(rollouts.truncated[row])
        assert len(ids) == LENGTH if rollouts.truncated[row] else len(ids) <= LENGTH
    assert 0 < rollouts.truncated.float().mean() < 1


@vllm
def test_only_the_given_ids_stop(sampler, prompts, monkeypatch):
    """The model's own end of sequence is none unless it is asked for, and another id can be one."""
    monkeypatch.setattr(sampler, "stop_ids", [4])
    rollouts = sampler.generate(prompts, 8, seed=0)
    assert (rollouts.completion_ids[:, :-1] == EOS).any()
    ends = rollouts.completion_ids.gather(1, rollouts.mask.sum(1, keepdim=True) - 1).squeeze(1)
    assert (ends[~rollouts.truncated] == 4).all() and (~rollouts.truncated).any()


@vllm
def test_samples_differ_seeds_reproduce_and_company_does_not_matter(sampler, prompts):
    first, again, other = (sampler.generate(prompts, 8, seed) for seed in (0, 0, 1))
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert not torch.equal(first.completion_ids, other.completion_ids)
    differing = [len(set(map(tuple, rows.tolist()))) for rows in first.completion_ids.split(8)]
    assert sum(differing) / len(differing) > 2
    part = sampler.generate(prompts[3:5] * 2, 4, seed=0)
    assert torch.equal(part.completion_ids[:4], first.completion_ids[24:28, : part.mask.shape[1]])
    assert torch.equal(part.completion_ids[8:12], first.completion_ids[28:32, : part.mask.shape[1]])


@vllm
def test_the_global_generators_are_left_alone(sampler, policy, prompts):
    def draws():
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def seed():
        random.seed(3), np.random.seed(3), torch.manual_seed(3)

    seed()
    expected = draws()
    seed()
    sampler.generate(prompts, 2, seed=0)
    sampler.sync(policy)
    assert draws() == expected


@vllm
def test_after_a_step_the_engine_is_stale_and_after_sync_it_is_not(sampler, policy, prompts):
    sampler.generate(prompts, 4, seed=0)
    perturb(policy)
    assert largest_gap(policy, sampler.generate(prompts, 4, seed=0)) > 0.1
    sampler.sync(policy)
    assert largest_gap(policy, sampler.generate(prompts, 4, seed=0)) < 1e-4


@vllm
def test_the_prefix_cache_is_emptied(sampler, policy, prompts, monkeypatch):
    """Without the reset, long prompts are answered from the old policy's keys and values."""
    sampler.generate(prompts[-3:], 4, seed=0)
    perturb(policy)
    with monkeypatch.context() as patch:
        patch.setattr(sampler.engine, "reset_prefix_cache", lambda: True)
        sampler.sync(policy)
    assert largest_gap(policy, sampler.generate(prompts[:-3], 4, seed=0)) < 1e-4
    assert largest_gap(policy, sampler.generate(prompts[-3:], 4, seed=0)) > 0.01
    sampler.sync(policy)
    assert largest_gap(policy, sampler.generate(prompts[-3:], 4, seed=0)) < 1e-4


@vllm
def test_a_layer_that_did_not_arrive_is_found(sampler, policy, monkeypatch):
    """For each parameter: the engine is sent the old values under its name, and the comparison says so."""
    old = {name: weight.clone() for name, weight in policy_weights(policy).items()}
    perturb(policy)
    send = sampler.engine.collective_rpc
    for name in old:

        def send_old(method, kwargs):
            weights = dict(kwargs["weights_iterator"]) | {name: old[name]}
            return send(method, kwargs={"weights_iterator": iter(weights.items())})

        monkeypatch.setattr(sampler.engine, "collective_rpc", send_old)
        with pytest.raises(RuntimeError, match=name):
            sampler.sync(policy)
    monkeypatch.undo()
    sampler.sync(policy)


@vllm
@pytest.mark.parametrize("change", ["unknown", "missing", "renamed"])
def test_wrong_names_raise_and_change_nothing(sampler, policy, prompts, change, monkeypatch):
    before = sampler.generate(prompts, 2, seed=0)
    weights = {name: weight + 1 for name, weight in policy_weights(policy).items()}
    key = "model.layers.1.self_attn.k_proj.weight"
    if change != "unknown":
        weights["model.layers.1.self_attn.kk_proj.weight"] = weights.pop(key)
    if change == "missing":
        del weights["model.layers.1.self_attn.kk_proj.weight"]
    if change == "unknown":
        weights["model.layers.1.self_attn.kk_proj.weight"] = weights[key]
    monkeypatch.setattr(vllm_rollout, "policy_weights", lambda model: weights)
    with pytest.raises(ValueError, match=key if change == "missing" else "kk_proj"):
        sampler.sync(policy)
    assert torch.equal(sampler.generate(prompts, 2, seed=0).sampler_logprobs, before.sampler_logprobs)


@vllm
def test_a_policy_of_another_size_is_refused_and_changes_nothing(sampler, policy, prompts, start):
    with pytest.raises(ValueError, match=r"embed_tokens.weight has the shape \[15, 32\], but \[15, 64\] in the engine"):
        sampler.sync(build_policy(start[0], hidden_size=32))
    assert largest_gap(policy, sampler.generate(prompts, 2, seed=0)) < 1e-4


@vllm
@pytest.mark.parametrize(
    "prompt, said",
    [
        ([5] * 57, "57 tokens and a completion of up to 8 are 65, but the engine takes 1 to 64"),
        ([5] * 100, "100 tokens"),
        ([], "0 tokens"),
        ([1, 15], "tokens from 1 to 15, but the model has 0 to 14"),
        ([-1, 5], "tokens from -1"),
    ],
)
def test_what_would_end_the_engine_is_refused_first(sampler, policy, prompts, prompt, said):
    with pytest.raises(ValueError, match=said):
        sampler.generate([prompts[0], prompt], 2, seed=0)
    assert largest_gap(policy, sampler.generate([prompts[0], [5] * 56], 2, seed=0)) < 1e-4


@vllm
def test_one_engine_may_run_in_a_process(sampler, policy):
    with pytest.raises(RuntimeError, match="VLLMSampler.running.close()"):
        VLLMSampler(policy, [EOS], PAD, LENGTH)
    assert VLLMSampler.running is sampler


@vllm
def test_a_training_run_samples_from_its_own_policy(sampler, start):
    tokenizer, policy, _ = start
    config = TrainConfig(
        per_device_train_batch_size=64,
        num_iterations=1,
        max_completion_length=LENGTH,
        warmup_steps=0,
        learning_rate=1e-2,
    )
    trainer = Trainer(config, policy, tokenizer, load_task("arithmetic"), sampler)
    gaps = [trainer.step()["sampler_gap"] for _ in range(3)]
    assert max(gaps) < 1e-4
    sampler.sync, synced = lambda model: None, sampler.sync  # the same run without pushing
    try:
        gaps = [trainer.step()["sampler_gap"] for _ in range(2)]
    finally:
        sampler.sync = synced
    assert gaps[0] < 1e-4 and gaps[1] > 0.05


@vllm
def test_a_run_that_goes_on_sends_the_engine_the_same_requests(sampler, start, tmp_path):
    """What an engine draws follows from weights, prompts and the seed of each call; it has nothing of its own to save."""
    tokenizer, policy, weights = start
    config = TrainConfig(per_device_train_batch_size=32, max_completion_length=LENGTH, warmup_steps=0, use_vllm=True)
    whole = Trainer(config, policy, tokenizer, load_task("arithmetic"), sampler)
    whole.step()
    checkpoint = write_checkpoint(whole, tmp_path)
    expected = [whole.step() for _ in range(2)]
    policy.load_state_dict(weights)
    again = Trainer(config, policy, tokenizer, load_task("arithmetic"), sampler)
    restore(again, checkpoint)
    for metrics in expected:
        found = again.step()
        timed = {name for name in metrics if "seconds" in name or "share" in name}
        assert {name: found[name] for name in metrics.keys() - timed} == {
            name: metrics[name] for name in metrics.keys() - timed
        }


@vllm
def test_a_tied_head_is_pushed_and_a_second_engine_starts_after_the_first(running, prompts, monkeypatch):
    """The second policy also has biases, fused as the matrices are, and fewer heads for keys than for queries."""
    running.close()  # the last test that needs it
    assert VLLMSampler.running is None
    with pytest.raises(RuntimeError, match="closed; start another"):
        running.generate(prompts, 2, seed=0)
    sizes = {"vocab_size": 15, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    tied = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)).eval()
    with VLLMSampler(tied, [EOS], PAD, LENGTH) as sampler:
        perturb(tied, 0.3)
        sampler.sync(tied)
        assert largest_gap(tied, sampler.generate(prompts, 4, seed=0)) < 1e-4
        send = sampler.engine.collective_rpc

        def send_without_head(method, kwargs):
            weights = {name: weight for name, weight in kwargs["weights_iterator"] if name != "lm_head.weight"}
            return send(method, kwargs={"weights_iterator": iter(weights.items())})

        perturb(tied, 0.3)
        monkeypatch.setattr(sampler.engine, "collective_rpc", send_without_head)
        with pytest.raises(RuntimeError, match="lm_head.weight"):
            sampler.sync(tied)
        assert largest_gap(tied, sampler.generate(prompts, 4, seed=0)) > 0.1


# lmrl train --vllm


def arguments(folder, *more):
    small = ["--max-steps", "2", "--per-device-train-batch-size", "64", "--num-eval-problems", "32"]
    return ["train", "--vllm", "--output-dir", str(folder), "--name", "run", *small, *more]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps with the engine."""
    assert VLLMSampler.running is None
    folder = tmp_path_factory.mktemp("runs")
    assert main(arguments(folder)) == 0
    assert VLLMSampler.running is None
    return folder / "run"


@vllm
def test_the_default_task_trains_with_vllm_from_the_command_line(trained):
    records = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert 0 < max(record["sampler_gap"] for record in records) < 1e-4
    assert json.loads((trained / "config.json").read_text())["use_vllm"] is True
    assert (trained / "evaluation.json").is_file()


@vllm
def test_eval_with_vllm_repeats_the_last_measurement_of_a_run(trained, capsys, monkeypatch):
    engines, start_engine = [], vllm_rollout.start_engine
    monkeypatch.setattr(vllm_rollout, "start_engine", lambda *a, **k: engines.append(1) or start_engine(*a, **k))
    assert main(["eval", str(trained), "--num-eval-generations", "4"]) == 0
    assert len(engines) == 1 and VLLMSampler.running is None
    after, again = (
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in (trained / "samples.jsonl", trained / "eval-1" / "samples.jsonl")
    )
    assert again == [row for row in after if row.pop("when") == "after"] and len(again) == 32 * 4
    result = json.loads((trained / "evaluation.json").read_text())["after"]
    assert f"pass@1              {result['pass_at_1']:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_without_vllm_the_command_says_so_in_one_line_before_there_is_a_folder(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vllm_rollout, "find_spec", lambda name: None)
    monkeypatch.setattr("lmrl.cli.warm_start_folder", lambda seed: pytest.fail("a model was loaded"))
    assert main([command, *arguments(tmp_path)[1:]]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "pip install -e '.[vllm]'" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"vllm_mode": "server"}, "vllm_mode is 'server'; choose one of colocate"),
        ({"vllm_gpu_memory_utilization": 0.0}, "vllm_gpu_memory_utilization is 0.0"),
        ({"vllm_gpu_memory_utilization": 30}, "vllm_gpu_memory_utilization is 30"),
        ({"vllm_max_model_length": 4}, "vllm_max_model_length is 4 and max_completion_length 4"),
    ],
)
def test_impossible_engine_settings_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        check_config(TrainConfig(use_vllm=True, **settings))
