import torch

from lmrl.policy import build_policy, build_tokenizer
from lmrl.ppo import clipped, clipped_surrogate, importance_ratio
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    flat_gradient,
    leaf_probabilities,
)  # fmt: skip

float64 = torch.float64


def two_trees():
    """An old policy's tree, its rewards, and a policy moved away from it."""
    old = enumerate_tree(TabularPolicy(3, 3, seed=0), 3, eos_id=0)
    moved = enumerate_tree(TabularPolicy(3, 3, seed=1), 3, eos_id=0)
    return old, (old.ids == 1).sum(-1).double(), moved


def test_claim_10_1_the_ratio_has_mean_1_under_the_old_policy():
    old, _, moved = two_trees()
    ratio = importance_ratio(moved.logprobs, old.logprobs)
    assert ratio.max() > 2
    whole_completion = torch.where(old.mask, ratio, 1.0).prod(-1)
    assert abs(expectation(old, whole_completion) - 1) < 1e-10
    for state in range(len(old.depth)):  # per token: in every state that the old policy visits
        here = (old.states == state) & old.mask
        weight = torch.where(here, leaf_probabilities(old)[:, None], 0.0)
        assert abs((weight * ratio).sum() / weight.sum() - 1) < 1e-10


def test_claim_10_1_the_surrogate_has_the_policy_gradient_at_the_old_policy():
    policy = TabularPolicy(3, 3, seed=0)
    tree = enumerate_tree(policy, 3, eos_id=0)
    rewards = (tree.ids == 1).sum(-1).double()
    advantages = exact_values(tree, rewards).a[tree.states, tree.ids]
    exact = exact_gradient(tree, rewards, policy.parameters())
    ratio = importance_ratio(tree.logprobs, tree.logprobs.detach())
    for weight in (advantages, rewards[:, None].expand_as(ratio)):
        for terms in (ratio * weight, clipped_surrogate(ratio, weight)):
            summed = torch.where(tree.mask, terms, 0.0).sum(-1)
            gradient = flat_gradient((leaf_probabilities(tree).detach() * summed).sum(), policy.parameters())
            assert (gradient - exact).abs().max() < 1e-10


def test_claim_10_1_away_from_it_the_token_ratio_is_not_exact_and_the_product_is():
    old, rewards, moved = two_trees()
    change = expectation(moved, rewards) - expectation(old, rewards)
    ratio = importance_ratio(moved.logprobs, old.logprobs)
    advantages = exact_values(old, rewards).a[old.states, old.ids]
    per_token = expectation(old, torch.where(old.mask, (ratio - 1) * advantages, 0.0).sum(-1))
    product = expectation(old, torch.where(old.mask, ratio, 1.0).prod(-1) * rewards) - expectation(old, rewards)
    assert abs(product - change) < 1e-10
    assert abs(per_token - change) > 0.01


def slopes(ratio, advantage, **epsilons):
    ratio = torch.tensor(ratio, dtype=float64, requires_grad=True)
    advantages = torch.full_like(ratio, advantage)
    (slope,) = torch.autograd.grad(clipped_surrogate(ratio, advantages, **epsilons).sum(), ratio)
    return slope.tolist()


def test_claim_10_2_the_four_regions():
    beyond = torch.nextafter(torch.tensor(1.2, dtype=float64), torch.tensor(9.0, dtype=float64)).item()
    below = torch.nextafter(torch.tensor(0.8, dtype=float64), torch.tensor(0.0, dtype=float64)).item()
    assert slopes([1e-3, 0.5, 0.8, 1.0, 1.2], 2.0) == [2.0] * 5
    assert slopes([beyond, 1.5, 1e3], 2.0) == [0.0] * 3
    assert slopes([0.8, 1.0, 1.2, 1.5, 1e3], -2.0) == [-2.0] * 5
    assert slopes([1e-3, 0.5, below], -2.0) == [0.0] * 3
    assert slopes([1.28, 1.2801], 2.0, epsilon=0.2, epsilon_high=0.28) == [2.0, 0.0]


def test_claim_10_3_above_the_range_a_bad_token_is_still_penalised():
    logprobs = torch.tensor([1.3, 4.0, 30.0], dtype=float64).log().requires_grad_()
    ratio = importance_ratio(logprobs, torch.zeros_like(logprobs))
    advantages = torch.full_like(ratio, -0.7)
    in_ratio, in_logprob = torch.autograd.grad(clipped_surrogate(ratio, advantages).sum(), [ratio, logprobs])
    assert in_ratio.tolist() == [-0.7] * 3
    assert (in_logprob + 0.7 * ratio).abs().max() < 1e-10
    assert not clipped(ratio, advantages).any()


def test_claim_10_6_every_ratio_is_exactly_1_before_the_first_update():
    model = build_policy(build_tokenizer())
    ids = torch.randint(model.config.vocab_size, (4, 12), generator=torch.Generator().manual_seed(0))
    passes = [model(input_ids=ids).logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1) for _ in range(2)]
    for old_logprobs in (passes[0].detach(), passes[1].detach()):
        ratio = importance_ratio(passes[0], old_logprobs)
        assert (ratio == 1).all() and ratio.dtype == torch.float32 and ratio.requires_grad
