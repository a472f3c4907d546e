import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lmrl.policy import build_policy, build_tokenizer, length_mask, pad_left, sample
from lmrl.tree import completions, enumerate_tree, exact_values, prompted_policy
from lmrl.values import build_critic, monte_carlo_outcomes, next_chosen, value_terms, whiten

NAN = float("nan")


def mask_of(*rows):
    return torch.tensor(rows, dtype=torch.bool)


# The next chosen token


def test_next_chosen_passes_over_holes_and_padding():
    x = torch.tensor([[1.0, 2, NAN, NAN, 5, NAN], [NAN, 2, 3, 4, 5, 6]])
    mask = mask_of([1, 1, 0, 0, 1, 0], [0, 1, 1, 1, 1, 1])
    following = next_chosen(x, mask, torch.tensor([9.0, 8.0]))
    assert following[0, mask[0]].tolist() == [2, 5, 9]
    assert following[1, mask[1]].tolist() == [3, 4, 5, 6, 8]


@given(st.integers(0, 10_000))
def test_next_chosen_is_a_shift_of_the_row_without_its_masked_entries(seed):
    generator = torch.Generator().manual_seed(seed)
    x, after = torch.randn(3, 6, generator=generator), torch.randn(3, generator=generator)
    mask = torch.rand(3, 6, generator=generator) < 0.6
    following = next_chosen(torch.where(mask, x, NAN), mask, after)
    for row in range(3):
        cut = [*x[row, mask[row]].tolist(), after[row].item()]
        assert following[row, mask[row]].tolist() == cut[1:]


# Monte Carlo values


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer("ab")
    return tokenizer, build_policy(tokenizer, hidden_size=16, num_layers=1, num_heads=1, head_dim=16, seed=3)


def monte_carlo(tiny, prompts, max_completion_length, num_rollouts, score, seed=0):
    tokenizer, model = tiny
    prompt_ids, prompt_mask = pad_left([tokenizer(p).input_ids for p in prompts], tokenizer.pad_token_id)
    generator = torch.Generator().manual_seed(seed)
    how = {"stop_ids": [tokenizer.eos_token_id], "generator": generator}
    samples = sample(model, prompt_ids, prompt_mask, max_new_tokens=max_completion_length, **how)
    mask = length_mask(samples.lengths, max_completion_length)
    outcomes = monte_carlo_outcomes(
        model, prompt_ids, prompt_mask, samples.ids, mask, score,
        num_rollouts=num_rollouts, max_completion_length=max_completion_length, **how,
    )  # fmt: skip
    return samples, mask, outcomes


def test_monte_carlo_values_agree_with_the_tree(tiny):
    tokenizer, model = tiny
    prompts, cap, K = ["a", "abba"], 3, 2000
    ends_in_b = lambda rows, ids, lengths, truncated: (ids == 4).any(1).float() * (rows + 1)  # noqa: E731
    samples, mask, outcomes = monte_carlo(tiny, prompts, cap, K, ends_in_b)
    assert mask.sum() >= 4
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            tree = enumerate_tree(prompted_policy(model, torch.tensor(tokenizer(prompt).input_ids)), cap, 2)
        exact = exact_values(tree, ends_in_b(row, tree.ids, None, None))
        leaf = completions(tree).index(samples.ids[row, mask[row]].tolist())
        v = exact.v[tree.states[leaf, mask[row]]] / (row + 1)
        error = (v * (1 - v) / K).sqrt() * (row + 1)
        found = outcomes[row, mask[row]].mean(-1)
        assert ((found - v * (row + 1)).abs() <= 4 * error + 1e-6).all()


def test_monte_carlo_scores_whole_completions_within_the_cap(tiny):
    prompts, cap, K = ["a", "ab", "b", "ba"], 4, 5
    calls = []

    def score(rows, ids, lengths, truncated):
        calls.append((rows, ids, lengths, truncated))
        return rows.float()

    samples, mask, outcomes = monte_carlo(tiny, prompts, cap, K, score)
    assert len(calls) == int(mask.any(0).sum())
    for t, (rows, ids, lengths, truncated) in enumerate(calls):
        assert torch.equal(ids[:, :t], samples.ids[rows, :t]) and ids.shape[1] == cap
        assert (lengths > t).all() and (lengths <= cap).all()
        last = ids.gather(1, lengths[:, None] - 1).squeeze(1)
        assert torch.equal(truncated, (last != 2)) and (lengths[truncated] == cap).all()
    expected = torch.arange(4.0)[:, None, None].expand(4, cap, K)
    assert torch.equal(outcomes, torch.where(mask[..., None], expected, 0.0))


def test_monte_carlo_endings_are_fresh(tiny):
    _, mask, outcomes = monte_carlo(tiny, ["a"] * 8, 4, 16, lambda rows, ids, lengths, truncated: ids.sum(1).float())
    assert all(outcomes[row, 0].unique().numel() > 1 for row in range(8))


def test_monte_carlo_values_leave_the_sample_itself_out(tiny):
    """One ending per token: it equals the completion that it is compared with as often as two completions do."""
    identity = lambda rows, ids, lengths, truncated: (ids * 5 ** torch.arange(ids.shape[1])).sum(1).float()  # noqa: E731
    samples, _, outcomes = monte_carlo(tiny, ["a"] * 400, 3, 1, identity)
    own = identity(None, samples.ids, None, None)
    chance, found = ((own == other).float().mean() for other in (own.roll(1), outcomes[:, 0, 0]))
    assert 0 < chance < 0.7 and abs(found - chance) < 0.15


# The critic


def critic_of(model):
    critic = build_critic(model)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    return critic


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=32, n_embd=16, n_layer=1, n_head=2))


@pytest.mark.parametrize("build", [lambda: build_policy(build_tokenizer("abcdef")), gpt2], ids=["qwen3", "gpt2"])
@torch.no_grad()
def test_critic_has_one_value_for_every_state(build):
    torch.manual_seed(0)
    critic = critic_of(build())
    prompts, mask = pad_left([[1, 3, 4], [1, 5], [1]], 0)
    ids = torch.tensor([[3, 4, 5, 6], [6, 5, 4, 3], [3, 3, 3, 2]])
    values = critic(prompts, mask, ids)
    assert values.shape == (3, 5) and values.dtype == torch.float32 and not critic.training
    for t in range(4):  # the value before token t has not seen it, the next one has
        changed = ids.clone()
        changed[:, t] = (changed[:, t] + 1) % 9
        other = critic(prompts, mask, changed)
        torch.testing.assert_close(other[:, : t + 1], values[:, : t + 1], atol=1e-5, rtol=0)
        assert ((other[:, t + 1] - values[:, t + 1]).abs() > 1e-4).all()
    for row, length in enumerate((3, 2, 1)):  # a row alone, without padding
        alone = critic(prompts[row : row + 1, 3 - length :], mask[row : row + 1, 3 - length :], ids[row : row + 1])
        torch.testing.assert_close(alone[0], values[row], atol=1e-4, rtol=0)


def test_the_critic_of_llama_4_has_the_trunk_and_not_the_whole_model():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "intermediate_size_mlp": 24, "head_dim": 8, "vocab_size": 11}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama4_text", **sizes, **layers))
    ids = torch.tensor([[3, 4]])
    assert build_critic(model)(ids, torch.ones_like(ids, dtype=torch.bool), ids).shape == (1, 3)


def test_a_new_critic_says_zero_and_leaves_the_policy_alone(tiny):
    _, model = tiny
    before = {name: value.clone() for name, value in model.state_dict().items()}
    critic = build_critic(model)
    prompts, mask = pad_left([[1, 3]], 0)
    assert (critic(prompts, mask, torch.tensor([[3, 4]])) == 0).all()
    optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
    for _ in range(2):  # the trunk moves once the head is not 0
        value_terms(critic(prompts, mask, torch.tensor([[3, 4]])), torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(not torch.equal(p, before[f"model.{name}"]) for name, p in critic.trunk.named_parameters())


def test_values_are_float32_over_a_bfloat16_trunk(tiny):
    _, model = tiny
    critic = critic_of(model).to(torch.bfloat16)
    prompts, mask = pad_left([[1, 3], [1, 4]], 0)
    values = critic(prompts, mask, torch.tensor([[3, 4], [4, 2]]))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())  # the head itself computes in float32
    assert critic.double()(prompts, mask, torch.tensor([[3, 4], [4, 2]])).dtype == torch.float64


# The critic's loss


def test_value_terms():
    values = torch.tensor([[0.5, 1.0]], requires_grad=True)
    returns = torch.tensor([[1.0, 1.0]], requires_grad=True)
    terms = value_terms(values, returns)
    assert terms.tolist() == [[0.125, 0.0]]
    terms.sum().backward()
    assert values.grad.tolist() == [[-0.5, 0.0]] and returns.grad is None
    assert value_terms(values.bfloat16(), returns.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match=r"\[1, 2\] and returns \[2\]"):
        value_terms(values, torch.ones(2))


# Whitening


def test_whitening_ignores_padding():
    whitened = whiten(torch.tensor([[2.0, 4, 0, 0]]), mask_of([1, 1, 0, 0]))
    assert whitened.tolist() == [[-1, 1, 0, 0]]
    assert torch.equal(whiten(torch.tensor([[2.0, 4, NAN, NAN]]), mask_of([1, 1, 0, 0])), whitened)


def test_whitening_uses_the_population_standard_deviation():
    whitened = whiten(torch.tensor([[1.0, 0], [0, 0]]), torch.ones(2, 2, dtype=torch.bool))
    expected = [[math.sqrt(3), -1 / math.sqrt(3)], [-1 / math.sqrt(3)] * 2]
    torch.testing.assert_close(whitened, torch.tensor(expected))


@pytest.mark.parametrize("chosen", [[0, 0, 0], [0, 1, 0]])
def test_whitening_fewer_than_two_tokens_gives_zeros(chosen):
    assert whiten(torch.tensor([[3.0, 4, NAN]]), mask_of(chosen)).tolist() == [[0, 0, 0]]


def test_whitening_equal_advantages_gives_exact_zeros():
    assert (whiten(torch.full((2, 4), 0.1), torch.ones(2, 4, dtype=torch.bool)) == 0).all()


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_whitening_gives_mean_zero_and_deviation_one(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    advantages = (torch.randn(3, 5, generator=generator) * 7 + 2).to(dtype)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    whitened = whiten(torch.where(mask, advantages, NAN), mask)
    assert whitened.dtype == torch.promote_types(dtype, torch.float32) and (whitened[~mask] == 0).all()
    if mask.sum() > 1:
        assert abs(whitened[mask].mean()) < 1e-5 and abs(whitened[mask].std(correction=0) - 1) < 1e-5
