import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

from lmrl.memory import Growth, ModelShape, Setup, plan, shape_of, training_bytes

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 200,
}
SMALL |= {"num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "llama tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=32),
    "gpt2": GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=200, bos_token_id=None, eos_token_id=None),
}
RECIPES = {
    "float32": (torch.float32, False, 16),
    "master": (torch.bfloat16, True, 16),
    "bfloat16": (torch.bfloat16, False, 8),
}
STEP = Setup(completions=8, batch=4, max_prompt_length=20, max_completion_length=30)


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_after_a_step(config, dtype, master):
    """Bytes of weights, gradients, masters and Adam's state of a real model after a real step, and its counts."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model(input_ids=torch.arange(8)[None]).logits.float().logsumexp(-1).sum().backward()
    weights = list(model.parameters())
    masters = [weight.detach().float().requires_grad_() for weight in weights] if master else []
    for copied, weight in zip(masters, weights):
        copied.grad = weight.grad.float()
    adam = torch.optim.AdamW(masters or weights)
    adam.step()
    held = {
        "weights": size(weights),
        "gradients": size(weight.grad for weight in weights),
        "master weights": size(masters),
        "optimiser": size(tensor for state in adam.state.values() for tensor in state.values()),
    }
    return held, sum(weight.numel() for weight in weights), len(weights)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_claim_12_1_measured_bytes_are_the_formula(name, recipe):
    dtype, master, per_parameter = RECIPES[recipe]
    held, parameters, tensors = held_after_a_step(CONFIGS[name], dtype, master)
    assert held == training_bytes(parameters, tensors, dtype, master_weights=master)
    assert sum(held.values()) == per_parameter * parameters + 4 * tensors
    planned = plan(shape_of(CONFIGS[name], dtype), replace(STEP, master_weights=master))
    assert planned.of("policy") == sum(held.values())


def hand_made(trunk, head, dtype=torch.bfloat16):
    """A model of any size: ``trunk`` parameters and a head of its own of ``head`` parameters (0: tied)."""
    return ModelShape(
        "any", dtype, trunk + head, 10, trunk, trunk + head, 0, 1, 64, 100, (), Growth(0.0, 0.0), Growth(0.0, 0.0)
    )


@given(st.integers(10**6, 10**12), st.sampled_from(list(RECIPES)))
@settings(max_examples=50, deadline=None)
def test_claim_12_1_a_frozen_copy_costs_its_weights_at_any_size(parameters, recipe):
    dtype, master, per_parameter = RECIPES[recipe]
    planned = plan(hand_made(parameters, 0, dtype), replace(STEP, master_weights=master, reference=True))
    assert planned.of("policy") == per_parameter * parameters + 40
    assert planned.of("reference") == dtype.itemsize * parameters


@given(st.integers(10**6, 10**12), st.sampled_from(list(RECIPES)), st.integers(1, 64))
@settings(max_examples=50, deadline=None)
def test_claim_12_2_dropping_the_critic_halves_what_learns(parameters, recipe, world_size):
    dtype, master, _ = RECIPES[recipe]
    setup = replace(STEP, master_weights=master, world_size=world_size)
    policy = hand_made(parameters, 0, dtype)
    with_critic = plan(policy, replace(setup, critic=True)).of("policy", "critic")
    assert plan(policy, setup).of("policy", "critic") / with_critic == pytest.approx(0.5, abs=1e-3)


def test_claim_12_2_almost_halves_where_the_head_is_not_tied():
    policy = hand_made(trunk=900, head=100)
    with_critic = plan(policy, replace(STEP, critic=True)).of("policy", "critic")
    assert plan(policy, STEP).of("policy") == 8 * 1000 + 40
    assert with_critic == 8 * 1000 + 40 + 8 * (900 + 64 + 1) + 40


@given(st.integers(10**6, 10**12), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=50, deadline=None)
def test_claim_12_2_a_verifier_removes_one_more_frozen_copy(parameters, dtype):
    policy = hand_made(parameters, 0, dtype)
    everything = replace(STEP, critic=True, reference=True, reward_model=policy)
    saved = plan(policy, everything).peak - plan(policy, replace(everything, reward_model=None)).peak
    assert saved == dtype.itemsize * (parameters + 64)  # the trunk, and one row for the vocabulary
