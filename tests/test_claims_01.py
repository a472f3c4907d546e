"""Claims of section 1, for random models, texts and rewards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from lmrl.policy import (
    build_policy,
    build_tokenizer,
    completion_logits,
    gather_logprobs,
    length_mask,
    pad_left,
    token_logprobs,
)


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(2, 9))
@settings(max_examples=40, deadline=None)
def test_claim_1_1_supervised_gradient_is_softmax_minus_onehot(seed, length, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, length, vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(vocabulary, (1, length), generator=generator)
    (gradient,) = torch.autograd.grad(-gather_logprobs(logits, targets).sum(), logits)
    assert torch.allclose(gradient, logits.softmax(-1) - one_hot(targets, vocabulary), rtol=0, atol=1e-10)


def test_claim_1_1_holds_for_the_model_and_is_the_same_every_time():
    """No sampling is involved: two computations agree to the last bit."""
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer).double()
    prompt_ids, prompt_mask = pad_left([tokenizer("12+34=").input_ids], 0)
    targets = torch.tensor([[7, 9, 2]])

    def gradient():
        logits = completion_logits(model, prompt_ids, prompt_mask, targets).detach().requires_grad_()
        return torch.autograd.grad(-gather_logprobs(logits, targets).sum(), logits)[0], logits

    (first, logits), (second, _) = gradient(), gradient()
    assert torch.equal(first, second)
    assert torch.allclose(first, logits.softmax(-1) - one_hot(targets, len(tokenizer)), rtol=0, atol=1e-10)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_claim_1_2_one_reward_weighs_every_token_alike(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = length_mask(torch.tensor(lengths), max(lengths))
    rewards = torch.randint(2, (len(lengths),), generator=generator).double()
    logprobs = -torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    logprobs.requires_grad_()
    weighted = (torch.where(mask, logprobs, 0.0).sum(1) * rewards).sum()
    (weights,) = torch.autograd.grad(weighted, logprobs)
    assert torch.equal(weights, rewards[:, None] * mask)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_claim_1_3_a_negative_reward_is_minus_the_imitation_gradient(seed):
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer, seed=seed).double()
    prompt_ids, prompt_mask = pad_left([tokenizer("7+5=").input_ids], 0)
    text = torch.randint(3, 15, (1, 4), generator=torch.Generator().manual_seed(seed))
    parameters = list(model.parameters())

    def gradient(reward):
        logprob = token_logprobs(model, prompt_ids, prompt_mask, text).sum()
        return torch.autograd.grad(reward * logprob, parameters)

    imitate, unlearn = gradient(1.0), gradient(-1.0)
    assert all(torch.equal(down, -up) for down, up in zip(unlearn, imitate, strict=True))
    assert any(up.abs().max() > 1e-6 for up in imitate)
