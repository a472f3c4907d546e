import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.baselines import group_advantages
from lmrl.loss import LOSS_TYPES, policy_loss, token_weights
from lmrl.policy import (
    Addition,
    addition_problems,
    addition_reward,
    build_policy,
    build_tokenizer,
    completion_texts,
    demonstration_batch,
    token_logprobs,
    warm_start_folder,
)
from lmrl.rollout import TorchSampler
from lmrl.signal import (
    frac_reward_zero_std,
    mixed_probability,
    next_token_logprobs,
    pass_at_k,
    reward_bits,
    rlp_rewards,
    rpt_rewards,
    success_probability,
    think,
    tied_groups,
)
from lmrl.tree import TabularPolicy, enumerate_tree, exact_gradient, leaf_probabilities


def graded_completions(model, tokenizer, problems, num_generations, seed):
    sampler = TorchSampler(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_length=4)
    rollouts = sampler.generate([tokenizer(p.prompt).input_ids for p in problems], num_generations, seed)
    texts = completion_texts(tokenizer, rollouts.completion_ids, rollouts.mask.sum(1), rollouts.truncated)
    rewards = torch.tensor(addition_reward([], texts, answer=[problems[g].answer for g in rollouts.group.tolist()]))
    return replace(rollouts, rewards=rewards)


def train_step(model, optimizer, rollouts, loss_type="dapo"):
    advantages = group_advantages(rollouts.rewards, rollouts.group)[:, None].expand(rollouts.mask.shape)
    weights = token_weights(rollouts.mask, loss_type, 4)
    logprobs = token_logprobs(model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)
    optimizer.zero_grad()
    policy_loss(logprobs, logprobs.detach(), advantages, weights).backward()
    optimizer.step()


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def exact_pass_rates(model, tokenizer, problems):
    prompt_ids, prompt_mask, answer_ids, answer_mask = demonstration_batch(tokenizer, problems)
    with torch.no_grad():
        logprobs = token_logprobs(model, prompt_ids, prompt_mask, answer_ids)
    return torch.where(answer_mask, logprobs, 0.0).sum(1).exp()


def test_claim_13_1_four_orders_of_magnitude_in_events_and_more_in_bits():
    bits = 256 * reward_bits(0.5).item()
    assert bits == 256
    assert math.log10(4_000_000 / bits) == pytest.approx(4.2, abs=0.05)
    assert math.log10(4_000_000 * math.log2(128_000) / bits) == pytest.approx(5.4, abs=0.05)


@pytest.mark.parametrize("p, bits", [(0.0, 0.0), (1.0, 0.0), (0.5, 1.0), (0.25, 0.8112781), (1 / 64, 0.1161151)])
def test_claim_13_1_a_verdict_tells_at_most_one_bit(p, bits):
    assert reward_bits(p).item() == pytest.approx(bits, abs=1e-7)
    assert reward_bits(1 - p).item() == pytest.approx(bits, abs=1e-7)


@pytest.mark.parametrize("seed, loss_type", list(enumerate(LOSS_TYPES)))
def test_claim_13_2_from_random_weights_nothing_moves_but_what_the_optimiser_adds(seed, loss_type):
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer, seed=seed)
    problems = [Addition(123 + i, 456 + 10 * i) for i in range(8)]
    rollouts = graded_completions(model, tokenizer, problems, 8, seed)
    assert (rollouts.rewards == 0).all() and tied_groups(rollouts.rewards, rollouts.group).all()
    assert (group_advantages(rollouts.rewards, rollouts.group) == 0).all()

    start = weights_of(model)
    train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), rollouts, loss_type)
    assert all((p.grad == 0).all() for p in model.parameters())
    assert torch.equal(weights_of(model), start)

    train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), rollouts, loss_type)
    assert all((p.grad == 0).all() for p in model.parameters())
    assert torch.allclose(weights_of(model), start * (1 - 1e-4), rtol=1e-6, atol=0)
    assert not torch.equal(weights_of(model), start)

    lucky = replace(rollouts, rewards=(torch.arange(len(rollouts)) == 0).float())
    train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), lucky, loss_type)
    assert not torch.allclose(weights_of(model), start * (1 - 1e-4), rtol=1e-4, atol=0)  # the step can move weights


def all_outcomes(size):
    """Every group of `size` binary rewards, [2^size, size], and which of them are not tied."""
    outcomes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=size)), dtype=torch.float64)
    group = torch.arange(len(outcomes)).repeat_interleave(size)
    return outcomes, ~tied_groups(outcomes.flatten(), group)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("p", [0.0, 1 / 64, 0.2, 0.5, 0.9, 1.0])
def test_claim_13_3_at_least_one_success_and_a_mixed_group(size, p):
    outcomes, mixed = all_outcomes(size)
    right = outcomes.sum(-1)
    probability = p**right * (1 - p) ** (size - right)
    assert abs(probability.sum() - 1) < 1e-10
    assert abs(probability[right > 0].sum() - success_probability(p, size)) < 1e-10
    assert abs(probability[mixed].sum() - mixed_probability(p, size)) < 1e-10


def test_claim_13_3_the_two_part_where_success_is_common():
    def probabilities(p):
        return success_probability(p, 8).item(), mixed_probability(p, 8).item()

    assert probabilities(0.9) == pytest.approx((1.0, 0.5695), abs=5e-5)
    assert probabilities(1 / 64) == pytest.approx((0.1184, 0.1184), abs=5e-5)


def test_claim_13_3_the_metric_is_the_share_of_groups_without_signal():
    outcomes, mixed = all_outcomes(4)
    group = torch.arange(16).repeat_interleave(4)
    assert frac_reward_zero_std(outcomes.flatten(), group) == 2 / 16 == 1 - mixed.double().mean()


def test_claim_13_4_the_probability_of_a_signal_from_8_to_512_completions():
    sizes = torch.tensor([8, 16, 32, 64, 128, 256, 512])
    expected = [0.1184, 0.2227, 0.3959, 0.6350, 0.8668, 0.9823, 0.9997]
    assert mixed_probability(1 / 64, sizes).tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("size", [8, 64])
def test_claim_13_4_a_policy_that_is_right_once_in_64_learns(seed, size):
    """Two tokens of eight, uniform, one right answer of 64: the exact pass rate after 60 steps of 512 completions."""
    policy = TabularPolicy(8, 2)
    policy.logits.data.zero_()
    right = 8 * (seed + 1) + seed + 2  # the row of the right leaf
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    generator, path = torch.Generator().manual_seed(seed), []
    for _ in range(60):
        tree = enumerate_tree(policy, 2)
        path.append(leaf_probabilities(tree)[right].item())
        leaves = torch.multinomial(leaf_probabilities(tree).detach(), 512, True, generator=generator)
        advantages = group_advantages((leaves == right).double(), torch.arange(512) // size, scale="none")
        optimizer.zero_grad()
        (-(advantages * tree.logprobs.sum(1)[leaves]).mean()).backward()
        optimizer.step()
    assert path[0] == pytest.approx(1 / 64) and path[-1] > 0.9


def test_claim_13_4_the_tiny_policy_learns_problems_of_pass_rate_one_in_64():
    folder = warm_start_folder(seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    train, _ = addition_problems()
    rates = exact_pass_rates(model, tokenizer, train)
    hard = [train[i] for i in (rates.log() - math.log(1 / 64)).abs().argsort()[:2]]
    assert exact_pass_rates(model, tokenizer, hard).tolist() == pytest.approx([1 / 64] * 2, rel=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    for step in range(12):
        train_step(model, optimizer, graded_completions(model, tokenizer, hard, 128, seed=step))
    assert exact_pass_rates(model, tokenizer, hard).min() > 0.3


def shared_preference(u, offsets, a_is_right):
    chance_of_a = torch.sigmoid(u + offsets)
    return torch.where(a_is_right, chance_of_a, 1 - chance_of_a)


@given(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3), st.floats(5, 40))
@settings(max_examples=25, deadline=None)
def test_claim_13_5_pass_at_1_up_and_pass_at_large_k_down(offsets, learning_rate):
    """Section 9's construction: two prompts outvote the third, whatever their offsets and the size of the step."""
    offsets, a_is_right = torch.tensor(offsets, dtype=torch.float64), torch.tensor([True, True, False])
    u = torch.zeros(1, dtype=torch.float64)
    before = shared_preference(u, offsets, a_is_right)
    for _ in range(8):
        u = u.detach().requires_grad_()
        (slope,) = torch.autograd.grad(shared_preference(u, offsets, a_is_right).mean(), u)
        u = u + learning_rate * slope
    after = shared_preference(u, offsets, a_is_right).detach()
    assert success_probability(after, 1).mean() > success_probability(before, 1).mean()
    for k in (8, 32):
        assert success_probability(after, k).mean() < success_probability(before, k).mean()


def test_claim_13_5_on_the_tree_by_the_unbiased_estimator():
    """A shared table answers 9.1's prompts: the tree's leaves, 16 samples of each prompt, all outcomes by their chance."""
    offsets, a_is_right = torch.tensor([0.3, 0.0, -0.3], dtype=torch.float64), torch.tensor([True, True, False])
    u = torch.zeros(1, dtype=torch.float64, requires_grad=True)

    def trees():
        return [
            enumerate_tree(lambda prefixes, o=o: torch.stack([u + o, 0 * u], -1).expand(len(prefixes), 2), 1)
            for o in offsets
        ]

    def rewards(right):
        return torch.tensor([1.0, 0.0] if right else [0.0, 1.0], dtype=torch.float64)

    def estimated(k, n=16):
        counts, total = torch.arange(n + 1, dtype=torch.float64), 0.0
        for tree, right in zip(trees(), a_is_right, strict=True):
            p = (leaf_probabilities(tree).detach() @ rewards(right)).clamp(0, 1)
            total += torch.distributions.Binomial(n, p).log_prob(counts).exp() @ pass_at_k(counts, n, k) / 3
        return total.item()

    before = estimated(1), estimated(8)
    for _ in range(8):
        slope = sum(exact_gradient(t, rewards(right), [u]) for t, right in zip(trees(), a_is_right, strict=True)) / 3
        u.data += 20 * slope
    assert before == pytest.approx((0.550, 0.998), abs=5e-4)
    assert (estimated(1), estimated(8)) == pytest.approx((0.662, 0.774), abs=5e-4)


@pytest.fixture(scope="module")
def reader():
    tokenizer = build_tokenizer("0123456789+=()")
    return tokenizer, *tokenizer.convert_tokens_to_ids(["(", ")"])


def text_and_positions(tokenizer, text="23+21=44"):
    ids = tokenizer(text).input_ids + [tokenizer.eos_token_id]
    return [ids[:t] for t in range(1, len(ids))], torch.tensor(ids[1:])


@pytest.mark.parametrize("seed", [0, 1])
def test_claim_13_6_both_rewards_exist_at_every_token_from_random_weights(reader, seed):
    tokenizer, opening, closing = reader
    model = build_policy(tokenizer, seed=seed)
    contexts, targets = text_and_positions(tokenizer)
    sampler = TorchSampler(model, [closing, tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_length=2)
    thoughtful = think(sampler, contexts, 64, seed, opening=opening, closing=closing)
    targets, position = targets.repeat_interleave(64), torch.arange(len(targets)).repeat_interleave(64)
    after = next_token_logprobs(model, thoughtful)
    rpt = rpt_rewards(after, targets, torch.Generator().manual_seed(seed))
    rlp = rlp_rewards(after, next_token_logprobs(model, contexts).repeat_interleave(64, 0), targets)
    assert rpt.shape == rlp.shape == (len(contexts) * 64,)
    assert frac_reward_zero_std(rpt, position) == 0 and frac_reward_zero_std(rlp, position) == 0
    verdicts = graded_completions(model, tokenizer, [Addition(23, 21)], 64, seed)
    assert frac_reward_zero_std(verdicts.rewards, verdicts.group) == 1


def test_claim_13_6_each_reward_is_its_definition_by_hand(reader):
    """One position, one thought, from the model's own logits; no padding, no batch, no helper."""
    tokenizer, opening, closing = reader
    model = build_policy(tokenizer, seed=3)
    contexts, targets = text_and_positions(tokenizer)
    inside = [[opening, 5, 7, closing], [opening, closing]]
    rows = [context + thought for context in contexts for thought in inside]
    after, plain = next_token_logprobs(model, rows), next_token_logprobs(model, contexts)
    rewards = rlp_rewards(after, plain.repeat_interleave(2, 0), targets.repeat_interleave(2)).view(-1, 2)
    for t in (0, 4, len(contexts) - 1):
        for j, thought in enumerate(inside):
            with torch.no_grad():
                logits = [model(torch.tensor([ids])).logits[0, -1] for ids in (contexts[t] + thought, contexts[t])]
            with_thought, without = (z.log_softmax(-1)[targets[t]] for z in logits)
            assert rewards[t, j].item() == pytest.approx((with_thought - without).item(), abs=1e-5)
    chance = after.exp().gather(1, targets.repeat_interleave(2)[:, None]).squeeze(1)
    many = torch.stack(
        [rpt_rewards(after, targets.repeat_interleave(2), torch.Generator().manual_seed(i)) for i in range(800)]
    )
    assert set(many.unique().tolist()) == {0.0, 1.0}
    assert ((many.mean(0) - chance).abs() < 5 * (chance * (1 - chance) / 800).sqrt()).all()


@pytest.mark.parametrize("seed", range(3))
def test_claim_13_6_no_mean_gain_over_the_average_prediction(seed):
    """All thoughts of a tabular policy, exactly: by concavity the mean gain is below 0, and 0 if thoughts change nothing."""
    policy = TabularPolicy(4, 3, seed=seed)
    log_policy = policy.logits.detach().log_softmax(-1)
    thoughts, after = log_policy[0], log_policy[1:5]  # π(c), and π(x | c) for each thought c
    average = (thoughts[:, None] + after).logsumexp(0)
    gains = rlp_rewards(after.repeat_interleave(4, 0), average.expand(16, 4), torch.arange(4).repeat(4)).view(4, 4)
    mean = thoughts.exp() @ gains  # for each next token
    assert (mean < 0).all()
    unmoved = rlp_rewards(average.expand(4, 4), average.expand(4, 4), torch.arange(4))
    assert unmoved.abs().max() == 0
