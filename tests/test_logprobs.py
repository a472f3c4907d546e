"""Log-probs and entropies without the logits: equal to the materialised ones, for any shape, dtype, head and model."""

import math
from functools import partial

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import lmrl.logprobs
from lmrl.logprobs import (
    completion_logprobs,
    require_output_head,
)
from lmrl.policy import completion_logits, gather_logprobs, length_mask
from lmrl.trust_region import entropy

V, D = 37, 16
SMALL = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
GROUPED = SMALL | {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 64}
MODELS = {
    "qwen3": GROUPED | {"tie_word_embeddings": False},
    "qwen3 tied": GROUPED | {"tie_word_embeddings": True},
    "llama": GROUPED,
    "gemma2": GROUPED | {"final_logit_softcapping": 4.0},
    "gemma3_text": GROUPED | {"final_logit_softcapping": 3.0},
    "gemma3_text uncapped": GROUPED,
    "cohere": GROUPED | {"logit_scale": 0.25},
    "granite": GROUPED | {"logits_scaling": 4.0},
    "gpt2": GPT2,
    "opt": SMALL | {"ffn_dim": 24, "max_position_embeddings": 64, "word_embed_proj_dim": D},
    "phi": GROUPED,
    "gpt_neox": SMALL | {"max_position_embeddings": 64},
}


def build(name, dtype=torch.float64):
    """A small model with weights large enough that logits differ by several nats."""
    torch.manual_seed(0)
    family = name.split()[0]
    config = transformers.AutoConfig.for_model(family, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.mul_(40)
        if head.bias is not None:
            head.bias.normal_()
    return model.to(dtype)


@pytest.fixture
def batch():
    """Prompts ``[3, 4]`` with left padding, completions ``[3, 5]`` of 5, 2 and 0 tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts, completions = (torch.randint(1, V, (3, n), generator=generator) for n in (4, 5))
    return (
        prompts,
        length_mask(torch.tensor([4, 1, 3]), 4).flip(1),
        completions,
        length_mask(torch.tensor([5, 2, 0]), 5),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_completion_logprobs_are_those_of_the_materialised_logits(name, temperature, batch):
    model, mask = build(name), batch[-1]
    logits = completion_logits(model, *batch[:3], temperature)
    expected = torch.where(mask, gather_logprobs(logits, batch[2]), 0.0), torch.where(mask, entropy(logits), 0.0)
    assert expected[1][mask].min() < 0.95 * math.log(V)  # the head is not close to uniform
    found = completion_logprobs(model, *batch, temperature)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad((x.sin() + y.cos()).sum(), parameters) for x, y in (expected, found)]
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= 1e-10 * max(a.norm(), 1e-6)
    require_output_head(model)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_many_small_tiles_give_the_materialised_values_and_gradients(temperature, softcap, monkeypatch):
    """23 tokens of vocabulary in tiles of 8, 20 rows in blocks of 3; logits of tens of nats, the largest in any tile."""
    for shape in ("tile_shape", "loss_tile_shape"):
        monkeypatch.setattr(lmrl.logprobs, shape, lambda vocabulary: (3, 8))
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    hidden, weight, bias = (3 * draw(*shape) for shape in ((20, 6), (23, 6), (23,)))
    targets, slopes = torch.randint(23, (20,), generator=generator), draw(2, 20)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def token_loss(logprobs, entropies, rows):
        return (slopes[0, rows] * logprobs + slopes[1, rows] * entropies.square()).sum()

    logits = 0.5 * (hidden @ weight.T + bias)
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperature
    assert logits.argmax(1).div(8, rounding_mode="floor").unique().numel() == 3
    values = gather_logprobs(logits, targets), entropy(logits)
    expected = [token_loss(*values, slice(None)), *values]
    expected += torch.autograd.grad(expected[0], leaves)

    settings = {"temperature": temperature, "bias": bias, "softcap": softcap, "scale": 0.5}
    values = lmrl.logprobs.fused_logprobs(hidden, weight, targets, **settings)
    recomputed = [token_loss(*values, slice(None)), *values]
    recomputed += torch.autograd.grad(recomputed[0], leaves)
    at_once = list(lmrl.logprobs.fused_token_loss(hidden, weight, targets, token_loss, **settings))
    at_once += torch.autograd.grad(at_once[0], leaves)
    for found in (recomputed, at_once):
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((9, 64), (31, 64)))
    targets = torch.randint(31, (9,), generator=generator)
    found = lmrl.logprobs.fused_logprobs(hidden, weight, targets)
    logits = hidden.double() @ weight.double().T
    for value, exact in zip(found, (gather_logprobs(logits, targets), entropy(logits)), strict=True):
        assert value.dtype == torch.float32 and (value - exact).abs().max() < 2e-5
