"""The claims of section 2, as the notebook proves them."""

import math

import pytest
import torch

from lmrl.policy import build_policy, build_tokenizer, token_logprobs
from lmrl.tree import (
    TabularPolicy,
    completions,
    enumerate_tree,
    exact_values,
    flat_gradient,
    leaf_logprobs,
    leaf_probabilities,
    prompted_policy,
    terminal_returns,
)

SIZES = [(2, 5, 0, 0), (3, 3, None, 1), (4, 4, 2, 3), (6, 2, 5, 4)]  # vocabulary, cap, stop token, seed


@pytest.mark.parametrize("vocab_size, cap, eos_id, seed", SIZES)
def test_claim_2_1_leaves_sum_to_one_and_logprobs_add_up(vocab_size, cap, eos_id, seed):
    policy = TabularPolicy(vocab_size, cap, seed=seed)
    tree = enumerate_tree(policy, cap, eos_id)
    assert abs(leaf_probabilities(tree).sum().item() - 1) < 1e-10
    for ids, logprob in zip(completions(tree), leaf_logprobs(tree).tolist()):
        factors = [
            policy(torch.tensor([ids[:t]], dtype=torch.int64)).softmax(-1)[0, a].item() for t, a in enumerate(ids)
        ]
        assert abs(math.log(math.prod(factors)) - logprob) < 1e-10


def test_claim_2_2_the_count_of_leaves():
    assert abs(math.log10(1e5) * 1000 - 5000) < 1e-9
    tree = enumerate_tree(TabularPolicy(5, 5), 5)
    assert abs(math.log10(len(tree.ids)) - 5 * math.log10(5)) < 1e-10
    assert len(enumerate_tree(TabularPolicy(5, 5), 5, eos_id=0).ids) == 1 + 4 + 16 + 64 + 256 * 5


@pytest.mark.parametrize("vocab_size, cap, eos_id, seed", SIZES)
def test_claim_2_3_every_token_has_the_same_return_only_without_discount(vocab_size, cap, eos_id, seed):
    tree = enumerate_tree(TabularPolicy(vocab_size, cap, seed=seed), cap, eos_id)
    rewards = torch.arange(1.0, len(tree.ids) + 1).double()
    returns = terminal_returns(rewards, tree.mask)
    assert torch.equal(returns[tree.mask], rewards[:, None].expand_as(returns)[tree.mask])
    discounted = terminal_returns(rewards, tree.mask, 0.9)
    several = tree.mask.sum(-1) > 1
    assert (discounted[several, 0] < discounted[several, 1]).all()
    root = exact_values(tree, rewards, 0.9).v[0]
    assert torch.isclose(
        root, leaf_probabilities(tree) @ (rewards * 0.9 ** (tree.mask.sum(-1) - 1).double()), rtol=0, atol=1e-10
    )


def test_claim_2_4_the_prompt_is_not_in_the_logprob_of_a_trajectory():
    tokenizer = build_tokenizer("ab")
    model = build_policy(tokenizer, hidden_size=32, num_layers=1, num_heads=1).double()
    prompt_ids = torch.tensor(tokenizer("ab")["input_ids"])
    tree = enumerate_tree(prompted_policy(model, prompt_ids), 2, eos_id=tokenizer.eos_token_id)
    assert abs(leaf_probabilities(tree).sum().item() - 1) < 1e-10

    prompts = prompt_ids.expand(len(tree.ids), -1)
    logprobs = token_logprobs(model, prompts, torch.ones_like(prompts).bool(), tree.ids)
    assert torch.allclose(torch.where(tree.mask, logprobs, 0.0), tree.logprobs, atol=1e-5)

    bos, rest = prompts[:, :1], prompts[:, 1:]
    scored = token_logprobs(model, bos, torch.ones_like(bos).bool(), torch.cat([rest, tree.ids], 1))
    of_prompt = scored[:, : rest.shape[1]].sum(-1)
    of_everything = of_prompt + torch.where(tree.mask, scored[:, rest.shape[1] :], 0.0).sum(-1)
    assert torch.allclose(of_everything - of_prompt, leaf_logprobs(tree), atol=1e-5)
    assert abs(of_everything.exp().sum() - of_prompt[0].exp()) < 1e-5 and of_prompt[0] < -1
    assert flat_gradient(of_prompt[0], model.parameters()).norm() > 0.1  # it would be trained, were it counted
