"""Log-probs and entropies without the logits: equal to the materialised ones, for any shape, dtype, head and model."""

import math

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

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
        model.get_output_embeddings().weight.mul_(40)
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
