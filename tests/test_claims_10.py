import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.policy import (
    addition_problems,
    build_policy,
    build_tokenizer,
    length_mask,
    pad_left,
    sample,
    token_logprobs,
    warm_start_folder,
)
from lmrl.ppo import clipped, clipped_surrogate, importance_ratio, value_loss
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    flat_gradient,
    leaf_probabilities,
    sequence_kl,
    terminal_returns,
    visit_probabilities,
)
from lmrl.trust_region import entropy, kl_exact

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


@pytest.mark.parametrize("K", [0.05, 0.3, 1.0, 10.0, 1000.0])
def test_claim_10_4_a_tail_that_was_not_sampled_moves_the_kl_and_no_ratio(K):
    old = torch.tensor([0.5, 0.49, 0.01], dtype=float64)
    new = old.log() - torch.tensor([0.0, 0.0, K / 0.01], dtype=float64)
    ratio = importance_ratio(new.log_softmax(-1), old.log())[:2]
    assert ratio.tolist() == pytest.approx([1.01, 1.01], abs=2e-4)
    for advantage in (1.0, -1.0):
        assert not clipped(ratio, torch.full_like(ratio, advantage)).any()
    assert kl_exact(old.log(), new).item() == pytest.approx(K, abs=0.0101)


def largest_kl(epsilon, epsilon_high):
    """The KL of two tokens with the ratios 1 - epsilon and 1 + epsilon_high."""
    return -(epsilon_high * math.log(1 - epsilon) + epsilon * math.log(1 + epsilon_high)) / (epsilon + epsilon_high)


@given(st.integers(0, 10_000), st.integers(2, 6), st.floats(0.05, 0.6), st.floats(0.05, 0.6))
def test_claim_10_4_if_every_ratio_is_inside_the_kl_is_bounded(seed, vocab_size, epsilon, epsilon_high):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(vocab_size, generator=generator, dtype=float64).softmax(-1)
    up = epsilon_high * torch.rand(vocab_size, generator=generator, dtype=float64)
    up[0] = 0.0  # the first token goes down, the others up, by as much in total
    gained = (old * up).sum()
    scale = min(1.0, (old[0] * epsilon / gained).item())
    ratio = 1 + scale * up
    ratio[0] = 1 - scale * gained / old[0]
    assert ratio.min() >= 1 - epsilon - 1e-12 and ratio.max() <= 1 + epsilon_high
    kl = kl_exact(old.log(), (old * ratio).log())
    assert 0 < kl <= largest_kl(epsilon, epsilon_high) + 1e-12


def test_claim_10_4_the_bound_is_reached_and_is_about_0204():
    assert largest_kl(0.2, 0.2) == pytest.approx(0.0204, abs=5e-5)
    for epsilon, epsilon_high in [(0.2, 0.2), (0.2, 0.28), (0.5, 0.1)]:
        old = torch.tensor([epsilon_high, epsilon], dtype=float64) / (epsilon + epsilon_high)
        new = old * torch.tensor([1 - epsilon, 1 + epsilon_high], dtype=float64)
        assert kl_exact(old.log(), new.log()).item() == pytest.approx(largest_kl(epsilon, epsilon_high), abs=1e-12)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_claim_10_4_only_length_adds_up(length):
    """Every choice of two tokens moved to the ratios .8 and 1.2: the KL is the length times the bound."""
    old = enumerate_tree(lambda prefixes: torch.zeros(len(prefixes), 2, dtype=float64), length)
    edges = torch.tensor([0.4, 0.6], dtype=float64).log()
    moved = enumerate_tree(lambda prefixes: edges.expand(len(prefixes), 2), length)
    assert sequence_kl(old, moved).item() == pytest.approx(length * largest_kl(0.2, 0.2), abs=1e-10)
    assert length * largest_kl(0.2, 0.2) == pytest.approx(length * 0.0204, abs=length * 5e-5)


def per_sample(tree, terms):
    return (leaf_probabilities(tree).detach() * torch.where(tree.mask, terms, 0.0).sum(-1)).sum()


@pytest.mark.parametrize("vocab_size, max_length, eos_id, seed", [(3, 3, 0, 0), (2, 4, 0, 1), (4, 2, None, 2)])
def test_claim_10_5_three_terms_with_these_signs(vocab_size, max_length, eos_id, seed):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, eos_id)
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(tree.ids), generator=generator, dtype=float64)
    values, visits = exact_values(tree, rewards), visit_probabilities(tree).detach()
    critic = torch.randn(len(visits), generator=generator, dtype=float64).requires_grad_()
    parameters, count = [policy.logits, critic], policy.logits.numel()
    predicted = critic[tree.states]
    terms = [
        clipped_surrogate(importance_ratio(tree.logprobs, tree.logprobs.detach()), values.a[tree.states, tree.ids]),
        value_loss(predicted, predicted, terminal_returns(rewards, tree.mask)),
        entropy(tree.log_policy)[tree.states],
    ]
    raise_good, predict, vary = (flat_gradient(per_sample(tree, term), parameters) for term in terms)
    assert (raise_good[:count] - exact_gradient(tree, rewards, [policy.logits])).abs().max() < 1e-10
    assert (predict[count:] - visits * (critic.detach() - values.v)).abs().max() < 1e-10
    log_policy = tree.log_policy.detach()
    by_hand = -visits[:, None] * log_policy.exp() * (log_policy + entropy(log_policy)[:, None])
    assert vary[:count].view(-1, vocab_size).sum(-1).abs().max() < 1e-10
    table = vary[:count].view(-1, vocab_size)
    rows = torch.zeros(len(visits), dtype=torch.int64)  # the row of the table that belongs to each state
    for t in range(max_length):
        rows = torch.where(t < tree.depth, rows * vocab_size + tree.prefixes[:, t] + 1, rows)
    assert (table[rows] - by_hand).abs().max() < 1e-10
    loss = -per_sample(tree, terms[0] - 0.5 * terms[1] + 0.01 * terms[2])
    whole = flat_gradient(loss, parameters)
    assert (whole + raise_good - 0.5 * predict + 0.01 * vary).abs().max() < 1e-10

    def after(direction):
        """J, the critic's weighted squared error and the entropy of the visited states after a small step."""
        moved = enumerate_tree(
            lambda p: policy(p) + 1e-4 * direction[:count].view(-1, vocab_size)[row_of(p)], max_length, eos_id
        )
        error = (visits * (critic.detach() + 1e-4 * direction[count:] - values.v) ** 2).sum()
        return expectation(moved, rewards).item(), error.item(), (visits * entropy(moved.log_policy)).sum().item()

    def row_of(prefixes):
        row = torch.zeros(len(prefixes), dtype=torch.int64)
        for token in prefixes.unbind(1):
            row = row * vocab_size + token + 1
        return row

    now = after(torch.zeros_like(whole))
    assert after(raise_good)[0] > now[0] and after(-predict)[1] < now[1] and after(vary)[2] > now[2]


def test_claim_10_5_the_bonus_trades_reward_for_entropy():
    """In one state the sum of reward and bonus is stationary at softmax(R / c)."""
    rewards = torch.tensor([0.0, 1.0, 0.3], dtype=float64)
    for c in (1.0, 0.3, 0.05):
        logits = (rewards / c).requires_grad_()
        objective = (logits.softmax(-1) * rewards).sum() + c * entropy(logits)
        assert torch.autograd.grad(objective, logits)[0].abs().max() < 1e-10


def test_claim_10_6_every_ratio_is_exactly_1_before_the_first_update():
    model = build_policy(build_tokenizer())
    ids = torch.randint(model.config.vocab_size, (4, 12), generator=torch.Generator().manual_seed(0))
    passes = [model(input_ids=ids).logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1) for _ in range(2)]
    for old_logprobs in (passes[0].detach(), passes[1].detach()):
        ratio = importance_ratio(passes[0], old_logprobs)
        assert (ratio == 1).all() and ratio.dtype == torch.float32 and ratio.requires_grad


def test_claim_10_6_loose_otherwise():
    """Another padded length and cached decoding change digits, dropout changes the policy."""
    folder = warm_start_folder(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    dropout = AutoModelForCausalLM.from_pretrained(folder, attention_dropout=0.01).train()
    rows = [tokenizer(problem.prompt).input_ids for problem in addition_problems()[1][:48]]
    ids, mask = pad_left(rows, tokenizer.pad_token_id)
    wider = torch.nn.functional.pad(ids, (4, 0)), torch.nn.functional.pad(mask, (4, 0))
    stop, generator = [tokenizer.eos_token_id], torch.Generator().manual_seed(0)
    samples = sample(model, ids, mask, max_new_tokens=4, stop_ids=stop, generator=generator)
    chosen = length_mask(samples.lengths, 4)
    torch.manual_seed(0)
    with torch.no_grad():
        now = token_logprobs(model, ids, mask, samples.ids)
        assert (importance_ratio(now, token_logprobs(model, ids, mask, samples.ids)) == 1).all()
        others = [token_logprobs(model, *wider, samples.ids), samples.logprobs]
        off = [(importance_ratio(now, other)[chosen] - 1).abs().max().item() for other in others]
        noisy = importance_ratio(now, token_logprobs(dropout, ids, mask, samples.ids))[chosen]
    assert 0 < max(off) < 1e-4
    assert ((noisy < 0.8) | (noisy > 1.2)).any()
    dropout.eval()
    with torch.no_grad():
        assert (importance_ratio(now, token_logprobs(dropout, ids, mask, samples.ids)) == 1).all()
