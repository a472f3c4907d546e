import math
from dataclasses import replace

import pytest
import torch
from test_trainer import SMALL, make_trainer, parameters, rollouts_of, untimed

from lmrl.checkpoint import restore, write_checkpoint
from lmrl.config import TrainConfig, check_config
from lmrl.models import adapted_layers, add_adapter, load_critic, load_policy, load_reference, merged
from lmrl.policy import build_policy, build_tokenizer
from lmrl.rollout import TorchSampler
from lmrl.trainer import Trainer, compiled_forwards
from lmrl.vllm_rollout import policy_weights

peft = pytest.importorskip("peft")
LORA = replace(SMALL, use_peft=True, learning_rate=1e-2, num_iterations=2)


def adapted(dtype=torch.float32, seed=0):
    return add_adapter(build_policy(build_tokenizer()).to(dtype), r=4, seed=seed)


def trained(model, seed=0):
    """The adapter as if it had learned: B is not 0."""
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B["default"].weight.normal_(std=0.1, generator=torch.Generator().manual_seed(seed))
    return model


def lora_trainer(model, config=LORA):
    base = make_trainer(SMALL)
    sampler = TorchSampler(model, [base.tokenizer.eos_token_id], base.tokenizer.pad_token_id, 5)
    reference = load_reference(model) if config.beta else None
    critic = load_critic(model, shared=config.share_critic_trunk) if config.advantage_estimator == "gae" else None
    return Trainer(config, model, base.tokenizer, base.task, sampler, reference, critic)


def frozen(model):
    return {name: weight.clone() for name, weight in model.named_parameters() if not weight.requires_grad}


def test_a_new_adapter_is_the_model_it_was_and_its_seed_is_its_own():
    plain, state = build_policy(build_tokenizer()), torch.get_rng_state()
    model = adapted()
    ids = torch.arange(3, 9)[None]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    build_policy(build_tokenizer())
    torch.set_rng_state(state)
    adapted(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert learning and all("lora_" in name for name in learning) and not any("lm_head" in name for name in learning)
    one, two, other = ([w for n, w in adapted(seed=s).named_parameters() if "lora_A" in n] for s in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, two)) and not torch.equal(one[0], other[0])


def test_only_named_layers_get_one():
    model = add_adapter(build_policy(build_tokenizer()), target_modules="q_proj, v_proj")
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"q_proj", "v_proj"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_merged_is_the_same_function_and_leaves_the_model_alone(dtype):
    model = trained(adapted(dtype))
    before, ids = {name: w.clone() for name, w in model.named_parameters()}, torch.arange(3, 9)[None]
    plain = merged(model)
    names = [name for name, _ in build_policy(build_tokenizer()).named_parameters()]
    assert [name for name, _ in plain.named_parameters()] == names == list(dict(plain.named_parameters()))
    tolerance = 1e-10 if dtype == torch.float64 else 0.05
    assert torch.allclose(plain(ids).logits, model(ids).logits, rtol=0, atol=tolerance)
    for name, layer in adapted_layers(model).items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected = layer.base_layer.weight.double() + 32 / 4 * b.double() @ a.double()
        found = plain.get_submodule(name).weight.double()
        assert torch.allclose(found, expected, rtol=0, atol=1e-10 if dtype == torch.float64 else 4e-3)
    assert (
        all(torch.equal(before[name], w) for name, w in model.named_parameters()) and len(adapted_layers(model)) == 14
    )
    assert merged(plain) is plain


def test_pitfall_21_base_weights_are_bit_identical_after_100_syncs():
    model = trained(adapted(torch.bfloat16))
    before, first = frozen(model), policy_weights(model)
    for _ in range(99):
        last = policy_weights(model)
    assert all(torch.equal(before[name], weight) for name, weight in frozen(model).items()) and len(before) > 10
    assert all(torch.equal(first[name], weight) for name, weight in last.items())


def test_pitfall_21_merging_in_place_would_wear_the_base_away():
    """What `merged` does not do: peft's merge and unmerge, in bfloat16."""
    model = trained(adapted(torch.bfloat16))
    before = frozen(model)
    for _ in range(10):
        for layer in adapted_layers(model).values():
            layer.merge()
            layer.unmerge()
    assert not all(torch.equal(before[name], weight) for name, weight in frozen(model).items())


@pytest.mark.parametrize("start", [adapted, lambda: trained(adapted())])
def test_pitfall_21_the_kl_starts_at_zero_whatever_the_adapter_had_learned(start):
    trainer = lora_trainer(start(), replace(LORA, beta=0.05))
    kl = [trainer.step()["kl_ref"] for _ in range(3)]
    assert kl[0] == 0.0 and kl[2] > 1e-6
    shared = {id(w) for w in trainer.model.parameters()} & {id(w) for w in trainer.reference.parameters()}
    assert len(shared) == len(frozen(trainer.model))  # all that is frozen, and nothing that learns


def test_pitfall_21_a_failure_in_the_reference_leaves_the_adapter_on(monkeypatch):
    trainer = lora_trainer(trained(adapted()), replace(LORA, beta=0.05))
    ids = torch.arange(3, 9)[None]
    before = trainer.model(ids).logits

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(trainer.reference.model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.step()
    assert torch.equal(trainer.model(ids).logits, before)


def test_pitfall_17_dropout_of_an_adapter_is_off():
    model = build_policy(build_tokenizer())
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules="all-linear", lora_dropout=0.5), model)
    trainer = lora_trainer(trained(model).train(), replace(LORA, beta=0.05))
    metrics = trainer.step()
    assert metrics["ratio_error"] == 0.0 and metrics["sampler_gap"] < 1e-4 and metrics["kl_ref"] == 0.0


def test_it_learns_and_nothing_but_the_adapter_moves():
    model = adapted()
    before = frozen(model)
    trainer = lora_trainer(model, replace(LORA, max_steps=30, per_device_train_batch_size=64, learning_rate=2e-2))
    rewards = [trainer.step()["reward"] for _ in range(30)]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    assert all(torch.equal(before[name], weight) for name, weight in frozen(model).items())
    assert sum(w.numel() for w in trainer.learner.weights) < 0.3 * sum(map(torch.numel, before.values()))


def test_an_update_of_the_adapter_is_that_of_its_matrices_by_hand():
    """The gradient of A and B by the chain rule from the gradient of the merged weight: α/r Bᵀ G and α/r G Aᵀ."""
    model = trained(adapted(torch.float64))
    trainer = lora_trainer(model, replace(LORA, num_iterations=1))
    rollouts = rollouts_of(trainer)
    trainer.learner.optimizer.step = lambda: None
    trainer.config = replace(trainer.config, max_grad_norm=math.inf)
    trainer.learner.config = trainer.config
    trainer.update(rollouts)
    whole = make_trainer(replace(SMALL, num_iterations=1), dtype=torch.float64)
    plain = merged(model).requires_grad_(True)
    whole.model.load_state_dict(plain.state_dict())
    whole.learner.optimizer.step = lambda: None
    whole.learner.config = trainer.config
    whole.update(rollouts)
    for name, layer in adapted_layers(model).items():
        gradient = whole.model.get_submodule(name).weight.grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert torch.allclose(a.grad, 8 * b.T @ gradient, rtol=1e-6, atol=1e-12)
        assert torch.allclose(b.grad, 8 * gradient @ a.T, rtol=1e-6, atol=1e-12) and b.grad.abs().max() > 1e-6


def test_a_critic_has_an_adapter_of_its_own():
    trainer = lora_trainer(adapted(), replace(LORA, advantage_estimator="gae", scale_rewards="none"))
    before = frozen(trainer.model)
    trainer.step()
    own = {id(w) for w in trainer.critic_learner.weights}
    assert own and not own & {id(w) for w in trainer.learner.weights}
    assert all(torch.equal(before[name], weight) for name, weight in frozen(trainer.model).items())


def test_a_critic_on_the_policys_trunk_pulls_at_the_policys_adapter():
    config = replace(LORA, advantage_estimator="gae", scale_rewards="none", share_critic_trunk=True)
    trainer = lora_trainer(adapted(), config)
    trainer.task = replace(trainer.task, reward=lambda completions, **columns: [1.0] * len(completions))
    before, start = frozen(trainer.model), parameters(trainer)
    trainer.step()
    own = {id(w) for w in trainer.learner.weights}
    assert own == {id(w) for w in (*trainer.model.parameters(), *trainer.critic.head.parameters()) if w.requires_grad}
    assert not torch.equal(parameters(trainer), start)
    assert all(torch.equal(before[name], weight) for name, weight in frozen(trainer.model).items())


def test_an_adapter_in_compiled_layers():
    torch._dynamo.reset()
    plain, fast = (lora_trainer(trained(adapted()), replace(LORA, beta=0.05)) for _ in range(2))
    layers = [fast.model.model, fast.reference.model]
    fast.forwards = compiled_forwards(layers, backend="aot_eager")
    for _ in range(2):
        assert untimed(fast.step()) == pytest.approx(untimed(plain.step()), abs=1e-5)
    assert torch.allclose(parameters(fast), parameters(plain), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"beta": 0.05}, {"advantage_estimator": "gae", "scale_rewards": "none", "share_critic_trunk": True}],
    ids=["reference", "critic on its trunk"],
)
def test_a_checkpoint_is_a_whole_model_and_the_run_goes_on_from_its_adapter(tmp_path, settings):
    whole = lora_trainer(adapted(), replace(LORA, **settings))
    expected = [untimed(whole.step()) for _ in range(4)]
    stopped = lora_trainer(adapted(), replace(LORA, **settings))
    for _ in range(2):
        stopped.step()
    checkpoint = write_checkpoint(stopped, tmp_path)
    plain, ids = load_policy(checkpoint), torch.arange(3, 9)[None]
    assert torch.allclose(plain(ids).logits, stopped.model(ids).logits, atol=1e-5) and not adapted_layers(plain)
    resumed = lora_trainer(adapted(), replace(LORA, **settings))
    restore(resumed, checkpoint)
    assert torch.equal(parameters(resumed), parameters(stopped))
    assert [untimed(resumed.step()) for _ in range(2)] == expected[2:]
    assert torch.equal(parameters(resumed), parameters(whole))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_peft": True, "lora_dropout": 0.05}, "lora_dropout is 0.05; with dropout the log-probs .* leave it at 0"),
        ({"lora_r": 8}, "settings of a LoRA adapter without use_peft"),
        ({"use_peft": True, "lora_r": 0}, "lora_r is 0"),
    ],
)
def test_settings_of_the_adapter_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        check_config(TrainConfig(**settings))


@pytest.mark.parametrize("wrong", ["nowhere", "q_proj,nowhere", "mlp"])
def test_a_layer_that_is_not_there_is_one_line_with_those_that_are(wrong):
    words = rf"there is no linear layer '{wrong.rpartition(',')[2]}'; .* has q_proj, .*, or take all-linear$"
    with pytest.raises(ValueError, match=words):
        add_adapter(build_policy(build_tokenizer()), target_modules=wrong)


@pytest.mark.parametrize("right", ["layers.1.self_attn.q_proj", "lm_head"])
def test_a_layer_may_have_more_of_its_name_and_the_head_is_one(right):
    names = [name for name in adapted_layers(add_adapter(build_policy(build_tokenizer()), target_modules=right))]
    assert len(names) == 1 and names[0].endswith(right)


def test_without_peft_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("lmrl.models.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install -c constraints.txt -e '.\[lora\]'"):
        adapted()
