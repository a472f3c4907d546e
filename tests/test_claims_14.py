"""The claims of section 14, as the notebook proves them."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmrl.baselines import group_advantages, leave_one_out_advantages
from lmrl.gae import gae, score_last_token
from lmrl.loss import policy_loss, token_weights
from lmrl.models import load_policy, load_tokenizer
from lmrl.policy import addition_problems, addition_reward, completion_texts, token_logprobs, warm_start_folder
from lmrl.ppo import clipped, importance_ratio
from lmrl.recipes import DEFAULTS, RECIPES, prompt_weight, recipe_moments, sequence_ratio, tabulate_prompts
from lmrl.reinforce import reinforce_terms
from lmrl.rollout import TorchSampler
from lmrl.tree import (
    TabularPolicy,
    enumerate_tree,
    exact_gradient,
    exact_values,
    expectation,
    leaf_logprobs,
    row_gradients,
    score_matrix,
    terminal_returns,
)
from lmrl.values import next_chosen
from lmrl.variance import group_moments, leaf_moments, weighted_scores

float64 = torch.float64
SIZES = [(3, 3, 0, 0), (2, 4, None, 1), (4, 2, 3, 2)]  # vocabulary, cap, stop token, seed


def problem(vocab_size, max_length, eos_id, seed):
    policy = TabularPolicy(vocab_size, max_length, seed=seed)
    tree = enumerate_tree(policy, max_length, eos_id)
    rewards = torch.rand(len(tree.ids), generator=torch.Generator().manual_seed(seed), dtype=float64)
    return policy, tree, rewards, exact_gradient(tree, rewards, policy.parameters())


# --- 14.1: one action -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_claim_14_1_a_completion_is_one_action_for_gamma_1_without_a_critic(size):
    policy, tree, rewards, gradient = problem(*size)
    one_action = row_gradients(rewards * leaf_logprobs(tree), policy.parameters())
    V = exact_values(tree, rewards).v[tree.states]
    apart = {}
    for name, advantages in {
        "gamma 1": terminal_returns(rewards, tree.mask),
        "discounted": terminal_returns(rewards, tree.mask, 0.9),
        "critic": rewards[:, None] - V,
    }.items():
        per_token = row_gradients(reinforce_terms(tree.logprobs, advantages).sum(1), policy.parameters())
        apart[name] = (per_token - one_action).abs().max()
        if name != "discounted":  # the critic changes every sample and not the mean
            assert leaf_moments(tree, per_token, gradient).bias.abs().max() < 1e-10
    assert apart["gamma 1"] < 1e-10 < 0.01 < min(apart["discounted"], apart["critic"])


def test_claim_14_1_by_gae_without_values():
    """γ = λ = 1 and no critic: section 8's machinery hands every token the reward."""
    _, tree, rewards, _ = problem(3, 3, 0, 0)
    advantages, _ = gae(
        score_last_token(rewards, tree.mask), torch.zeros(tree.mask.shape), tree.mask, gamma=1.0, lam=1.0
    )
    assert torch.equal(advantages, torch.where(tree.mask, rewards[:, None], 0.0))


# --- 14.2: how often the clip fires -----------------------------------------------------------------------------------


def run(learning_rate, passes=3, batches=3):
    """Clip fraction and ratio - 1 of the tokens with an advantage, for each pass over each batch, pooled over batches."""
    folder = warm_start_folder(seed=0)
    model, tokenizer = load_policy(folder), load_tokenizer(folder)
    sampler = TorchSampler(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, max_completion_length=4)
    problems = addition_problems()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    held, moved = [[] for _ in range(passes)], [[] for _ in range(passes)]
    for batch in range(batches):
        asked = problems[16 * batch : 16 * (batch + 1)]
        rollouts = sampler.generate([tokenizer(p.prompt).input_ids for p in asked], 8, seed=batch)
        texts = completion_texts(tokenizer, rollouts.completion_ids, rollouts.mask.sum(1), rollouts.truncated)
        rewards = torch.tensor(addition_reward([], texts, answer=[asked[g].answer for g in rollouts.group.tolist()]))
        advantages = group_advantages(rewards, rollouts.group)[:, None].expand(rollouts.mask.shape)
        old = None
        for number in range(passes):
            logprobs = token_logprobs(model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)
            old = logprobs.detach() if old is None else old
            optimizer.zero_grad()
            policy_loss(logprobs, old, advantages, token_weights(rollouts.mask, "dapo", 4)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            chosen = rollouts.mask & (advantages != 0)
            ratio = importance_ratio(logprobs.detach(), old)
            held[number].append(clipped(ratio, advantages)[chosen])
            moved[number].append((ratio - 1).abs()[chosen])
    return [torch.cat(x).float().mean().item() for x in held], [torch.cat(x).median().item() for x in moved]


def test_claim_14_2_the_clip_fires_on_a_minority_that_grows_with_the_passes_and_the_step():
    small, small_moves = run(1e-4)
    large, _ = run(1e-3)
    assert small[0] == large[0] == 0 and small_moves[0] == 0  # the first pass: every ratio is exactly 1
    assert 0 < small[1] < 0.1 and small[1] < small[2] < 0.2 and small_moves[2] < 0.02
    assert 2 * small[1] < large[1] < 0.5


# --- 14.3: baselines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, G", [((2, 2, 0, 0), 4), ((3, 2, None, 1), 3), ((2, 3, None, 2), 2)])
def test_claim_14_3_means_of_the_group(size, G):
    policy, tree, rewards, gradient = problem(*size)
    scores = score_matrix(tree, policy.parameters())
    others = group_moments(tree, weighted_scores(scores, rewards, leave_one_out_advantages), gradient, G)
    assert others.bias.abs().max() < 1e-10
    centred = partial(group_advantages, scale="none")
    everyone = group_moments(tree, weighted_scores(scores, rewards, centred), gradient, G)
    assert torch.allclose(everyone.mean, (1 - 1 / G) * gradient, rtol=0, atol=1e-10)
    assert everyone.snr == pytest.approx(others.snr)


def test_claim_14_3_dividing_by_the_std_rescales_binary_rewards_by_prompt():
    for p, factor in ((0.05, 2.47), (0.2, 2.11), (0.5, 1.86)):
        policy = TabularPolicy(2, 1)
        policy.logits.data[0] = torch.tensor([p, 1 - p], dtype=float64).log()
        tree, rewards = enumerate_tree(policy, 1), torch.tensor([1.0, 0.0], dtype=float64)
        gradient = exact_gradient(tree, rewards, policy.parameters())
        scores = score_matrix(tree, policy.parameters())
        moments = group_moments(tree, weighted_scores(scores, rewards, group_advantages), gradient, 8)
        weight = prompt_weight(torch.tensor([p]), 8, "group").item()
        assert weight == pytest.approx(factor, abs=0.005)
        assert torch.allclose(moments.mean, weight * gradient, rtol=0, atol=1e-6)
        by_formula = sum(math.comb(8, k) * p**k * (1 - p) ** (8 - k) * (k * (8 - k)) ** 0.5 / 8 for k in range(9)) / (
            p * (1 - p)
        )
        assert weight == pytest.approx(by_formula)


@given(st.floats(0.01, 0.99), st.integers(2, 10))
@settings(deadline=None)
def test_claim_14_3_without_the_divisor_every_prompt_counts_alike(p, size):
    rate = torch.tensor([p], dtype=float64)
    assert prompt_weight(rate, size, "none").item() == pytest.approx(1 - 1 / size)
    tied = p**size + (1 - p) ** size
    dynamic = prompt_weight(rate, size, "group", dynamic_sampling=True).item()
    assert dynamic == pytest.approx(prompt_weight(rate, size, "group").item() / (1 - tied))


def test_claim_14_3_dividing_by_the_std_bends_graded_rewards():
    policy = TabularPolicy(4, 1)
    policy.logits.data[0] = torch.tensor([0.1, 0.3, 0.35, 0.25], dtype=float64).log()
    tree, rewards = enumerate_tree(policy, 1), torch.tensor([1.0, 0.1, 0.0, 0.4], dtype=float64)
    gradient, scores = exact_gradient(tree, rewards, policy.parameters()), score_matrix(tree, policy.parameters())
    for G, expected in ((2, 0.117), (4, 0.066)):
        mean = group_moments(tree, weighted_scores(scores, rewards, group_advantages), gradient, G).mean
        assert 1 - torch.cosine_similarity(mean, gradient, dim=0).item() == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("size", SIZES)
def test_claim_14_3_monte_carlo_values_that_include_the_sample_shrink_the_gradient(size):
    policy, tree, rewards, gradient = problem(*size)
    V = exact_values(tree, rewards).v[tree.states]
    for K in (1, 2, 5):
        for share, factor in ((0.0, 1.0), (1 / K, 1 - 1 / K)):
            values = share * rewards[:, None] + (1 - share) * V  # on average over the fresh endings
            advantages = torch.where(tree.mask, next_chosen(values, tree.mask, rewards) - values, 0.0)
            mean = expectation(
                tree, row_gradients(reinforce_terms(tree.logprobs, advantages).sum(1), policy.parameters())
            )
            assert torch.allclose(mean, factor * gradient, rtol=0, atol=1e-10)


def variances(policy, tree, rewards, size):
    """Exact variance of an update by the mean of the others, K = 1, 4, 16 and 1000 endings, and with V known."""
    prompts = tabulate_prompts([tree], [policy.logits], [rewards])
    kinds = [{"advantage_estimator": "leave_one_out"}, {"advantage_estimator": "gae", "lam": 0.0}]
    kinds += [{"advantage_estimator": "monte_carlo", "num_value_samples": K} for K in (1, 4, 16, 1000)]
    found = []
    for kind in kinds:
        choices = SimpleNamespace(**DEFAULTS | {"scale_rewards": "none", "loss_type": "dr_grpo"} | kind)
        moments = recipe_moments(prompts, choices, size)
        assert torch.allclose(moments.mean, prompts.gradient / tree.mask.shape[1], rtol=0, atol=1e-6)
        found.append(moments.variance)
    return found


def test_claim_14_3_monte_carlo_values_need_more_than_one_ending():
    policy, tree, _, _ = problem(3, 3, 0, 0)
    late = torch.tensor([float("12" in "".join(map(str, row))) for row in tree.ids.tolist()], dtype=float64)
    others, known, *mc = variances(policy, tree, late, 4)
    assert [round(x / others, 2) for x in mc[:3]] == [1.19, 0.54, 0.38]
    assert mc[3] == pytest.approx(known, rel=0.01)
    early = (tree.ids == 1).any(1).double()  # often decided before the end: then the values have no noise
    others, _, *mc = variances(policy, tree, early, 4)
    assert round(mc[0] / others, 2) == 0.89


@pytest.mark.parametrize("seed", range(3))
def test_claim_14_3_for_a_single_token_one_ending_never_pays(seed):
    policy, tree, rewards, _ = problem(3, 1, None, seed)
    others, known, *mc = variances(policy, tree, rewards, 4)
    assert mc[0] > others > known and mc == sorted(mc, reverse=True)


# --- 14.8: granularity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_claim_14_8_gspo_at_the_start_is_the_policy_gradient_by_length(size):
    policy, tree, rewards, gradient = problem(*size)
    ratio = sequence_ratio(tree.logprobs, tree.logprobs.detach(), tree.mask)
    lengths = tree.mask.sum(1)
    updates = row_gradients(torch.where(tree.mask, ratio * rewards[:, None], 0.0).sum(1) / lengths, policy.parameters())
    assert torch.allclose(
        updates, rewards[:, None] * score_matrix(tree, policy.parameters()) / lengths[:, None], atol=1e-10
    )
    if size[2] is None:  # one length
        assert torch.allclose(expectation(tree, updates), gradient / size[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_claim_14_8_the_ratio_and_its_gradient_per_token(size):
    policy, old, _, _ = problem(*size)
    old_logprobs = old.logprobs.detach()
    policy.logits.data += 0.5 * TabularPolicy(size[0], size[1], seed=9).logits.detach()
    now = enumerate_tree(policy, size[1], size[2])
    lengths = now.mask.sum(1, keepdim=True)
    ratio = sequence_ratio(now.logprobs, old_logprobs, now.mask)
    whole = ((now.logprobs - old_logprobs).sum(1, keepdim=True) / lengths).exp()
    assert torch.allclose(torch.where(now.mask, ratio, 0.0), torch.where(now.mask, whole, 0.0), rtol=0, atol=1e-10)
    by_token = row_gradients(torch.where(now.mask, ratio, 0.0).sum(1), policy.parameters())
    by_root = row_gradients((lengths * whole).sum(1), policy.parameters())
    assert torch.allclose(by_token, by_root, rtol=0, atol=1e-10)
    assert torch.allclose(by_token, whole.detach() * score_matrix(now, policy.parameters()), rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [(3, 3, None, 0), (2, 4, None, 1), (2, 5, None, 2)])
def test_claim_14_8_its_mean_under_the_old_policy_is_below_1(size):
    policy, old, _, _ = problem(*size)
    before = 1.0
    for distance in (0.3, 0.6, 1.2):
        policy.logits.data = TabularPolicy(*size[:2], seed=size[3]).logits.detach()
        policy.logits.data += distance * TabularPolicy(*size[:2], seed=9).logits.detach()
        now = enumerate_tree(policy, size[1])
        token = expectation(old, importance_ratio(now.logprobs, old.logprobs).detach())
        assert torch.allclose(token, torch.ones_like(token), rtol=0, atol=1e-10)
        mean = expectation(old, sequence_ratio(now.logprobs, old.logprobs, old.mask).detach())[0].item()
        assert mean < before - 1e-3
        before = mean


def test_claim_14_8_a_completion_is_held_as_a_whole():
    logprobs = torch.tensor([[1.1, 0.9, 1.5], [1.3, 1.3, 1.0]], dtype=float64).log()
    counts = torch.ones(2, 3, dtype=torch.bool)
    one = torch.ones_like(logprobs)
    by_token = clipped(importance_ratio(logprobs, torch.zeros_like(logprobs)), one, 0.18)
    by_row = clipped(sequence_ratio(logprobs, torch.zeros_like(logprobs), counts), one, 0.18)
    assert by_token.tolist() == [[False, False, True], [True, True, False]]
    assert by_row.tolist() == [[False] * 3, [True] * 3]  # geometric means 1.141 and 1.191
    assert RECIPES["gspo"].choices.importance_sampling_level == "sequence"
