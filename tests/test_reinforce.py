import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.reinforce import logit_score, reinforce_terms
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, exact_values, expectation, row_gradients

LOGPROBS = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])


def test_terms_by_hand():
    assert reinforce_terms(LOGPROBS, torch.tensor([2.0, -1.0])).tolist() == [[-2, -4], [3, 4]]
    assert reinforce_terms(LOGPROBS, torch.tensor([[2.0, 0.0], [1.0, -1.0]])).tolist() == [[-2, 0], [-3, 4]]


def test_gradient_is_the_advantage_and_flows_into_log_probs_only():
    logprobs, advantages = LOGPROBS.clone().requires_grad_(), torch.tensor([2.0, -1.0]).requires_grad_()
    reinforce_terms(logprobs, advantages).sum().backward()
    assert logprobs.grad.tolist() == [[2, 2], [-1, -1]]
    assert advantages.grad is None


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1, 2), (2, 3), ()])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"advantages have the shape .* log-probs \[2, 2\] they must be \[2\] or"):
        reinforce_terms(LOGPROBS, torch.zeros(shape))


@pytest.mark.parametrize("logprob_type", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("advantage_type", [torch.bfloat16, torch.float32, torch.float64])
def test_terms_are_at_least_float32(logprob_type, advantage_type):
    advantages = torch.tensor([1.5, -0.5])
    terms = reinforce_terms(LOGPROBS.to(logprob_type), advantages.to(advantage_type))
    assert terms.dtype == (torch.float64 if torch.float64 in (logprob_type, advantage_type) else torch.float32)
    assert torch.equal(terms.double(), (advantages[:, None] * LOGPROBS).double())


def test_logit_score_by_hand():
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    expected = torch.tensor([-0.5, 0.75, -0.25], dtype=torch.float64)
    assert torch.allclose(logit_score(logits, torch.tensor(1)), expected, rtol=0, atol=1e-10)


def test_logit_score_is_the_gradient_of_the_log_probability():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(5, (2, 3), generator=generator)
    logprobs = logits.log_softmax(-1).gather(-1, ids[..., None])
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    assert torch.allclose(logit_score(logits.detach(), ids), gradient, rtol=0, atol=1e-10)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.booleans(), st.integers(0, 1000))
def test_terms_are_unbiased_on_the_tree(vocab_size, max_length, stops, seed):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, 0 if stops else None)
    rewards = torch.randn(len(tree.ids), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gradient = exact_gradient(tree, rewards, policy.parameters())
    advantage = exact_values(tree, rewards).a[tree.states, tree.ids]
    for weights in (rewards, advantage):
        per_leaf = row_gradients(reinforce_terms(tree.logprobs, weights).sum(-1), policy.parameters())
        assert torch.allclose(expectation(tree, per_leaf), gradient, rtol=0, atol=1e-10)
