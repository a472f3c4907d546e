import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from lmrl.figures.rewards import fit_to_comparisons
from lmrl.policy import build_policy, build_tokenizer
from lmrl.reward_model import (
    ModelReward,
    best_of,
    bradley_terry_loss,
    bradley_terry_scores,
    build_reward_model,
    optimisation_path,
    reward_inputs,
    reward_scores,
    tilted_logprobs,
)
from lmrl.rewards import score_completions

float64 = torch.float64


# -------------------------------------------------------------------------------------------------------- Bradley–Terry


def test_the_loss_is_minus_the_log_of_the_probability_of_the_choice():
    chosen, rejected = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.0, 0.5, 3.0])
    expected = -(chosen - rejected).sigmoid().log()
    torch.testing.assert_close(bradley_terry_loss(chosen, rejected), expected)
    assert bradley_terry_loss(torch.zeros(1), torch.zeros(1)).item() == pytest.approx(math.log(2))


def test_the_loss_is_finite_for_any_scores_and_at_least_float32():
    far = torch.tensor([1e4, -1e4], dtype=torch.bfloat16)
    loss = bradley_terry_loss(far, -far)
    assert loss.dtype == torch.float32 and loss[0] == 0 and loss[1].item() == pytest.approx(2e4, rel=1e-2)
    assert bradley_terry_loss(far.double(), far.double()).dtype == float64


def test_the_gradient_pushes_the_chosen_up_and_the_rejected_down_by_the_same():
    chosen, rejected = torch.tensor([0.3], requires_grad=True), torch.tensor([1.0], requires_grad=True)
    up, down = torch.autograd.grad(bradley_terry_loss(chosen, rejected).sum(), [chosen, rejected])
    assert up.item() == pytest.approx(-torch.tensor(0.7).sigmoid().item()) and down.item() == pytest.approx(-up.item())


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match=r"shapes \[2\] and \[3\]; give pairs"):
        bradley_terry_loss(torch.zeros(2), torch.zeros(3))


@given(st.lists(st.floats(-4, 4), min_size=2, max_size=8))
def test_scores_are_recovered_up_to_the_mean(rewards):
    rewards = torch.tensor(rewards, dtype=float64)
    scores = bradley_terry_scores((rewards[:, None] - rewards).sigmoid())
    assert (scores - (rewards - rewards.mean())).abs().max() < 1e-8


def test_two_answers_by_hand():
    assert bradley_terry_scores(torch.tensor([[0, 3], [1, 0]])).tolist() == pytest.approx(
        [math.log(3) / 2, -math.log(3) / 2]
    )


def test_fitted_scores_are_at_the_minimum_of_the_loss():
    generator = torch.Generator().manual_seed(0)
    wins = torch.randint(0, 5, (6, 6), generator=generator).double() + 0.1
    for ridge in (0.0, 0.3):
        scores = bradley_terry_scores(wins, ridge).requires_grad_()
        off_diagonal = wins * (1 - torch.eye(6, dtype=float64))
        pairs = bradley_terry_loss(scores[:, None].expand(6, 6), scores.expand(6, 6))
        (slope,) = torch.autograd.grad((off_diagonal * pairs).sum() + ridge / 2 * (scores**2).sum(), scores)
        assert slope.abs().max() < 1e-9


def test_the_callers_wins_stay_what_they_were():
    wins = torch.ones(3, 3, dtype=float64)
    bradley_terry_scores(wins)
    assert (wins == 1).all()


def test_without_a_minimum_it_says_so_and_a_ridge_gives_one():
    always = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    with pytest.raises(ValueError, match="won or lost every comparison with the others; compare more, or give"):
        bradley_terry_scores(always)
    first, second = bradley_terry_scores(always, ridge=0.1).tolist()
    assert first == pytest.approx(-second) and 0.5 < first < 5


@pytest.mark.parametrize("count", [30, 300, 10000])
def test_the_slider_finds_a_fit_everywhere(count):
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.randn(27, generator=generator, dtype=float64).mul(2).softmax(-1)
    rewards = torch.randn(27, generator=generator, dtype=float64).mul(2)
    for seed in range(10):
        fit_to_comparisons(count, probabilities, rewards, seed)


# ------------------------------------------------------------------------------------------------------------- best of n


def test_best_of_n_is_the_mean_over_all_choices():
    generator = torch.Generator().manual_seed(0)
    scores, rewards = torch.randn(2, 3, 6, generator=generator)
    scores[0, 2] = scores[0, 4]  # a tie: the later one is the better
    for n in range(1, 7):
        choices = list(itertools.combinations(range(6), n))
        for row in range(3):
            best = [max(choice, key=lambda i: (scores[row, i].item(), i)) for choice in choices]
            mean = sum(rewards[row, i].item() for i in best) / len(choices)
            assert best_of(n, scores, rewards)[row].item() == pytest.approx(mean)
    for n in (0, 7):
        with pytest.raises(ValueError, match="choose n from 1 to 6"):
            best_of(n, scores, rewards)


# --------------------------------------------------------------------------------------------------------- tilted policy


def test_tilted_policy_by_hand():
    tilted = tilted_logprobs(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, math.log(3)]), beta=1.0)
    assert tilted.exp().tolist() == pytest.approx([0.25, 0.75])
    assert tilted_logprobs(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.0, 1.0]), 1e9).exp().tolist() == [0.5, 0.5]
    for beta in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match="the price of the KL is above 0"):
            tilted_logprobs(torch.zeros(2), torch.zeros(2), beta)


def test_an_answer_that_the_reference_never_writes_stays_impossible():
    tilted = tilted_logprobs(torch.tensor([1.0, 0.0]).log(), torch.tensor([0.0, 100.0]), beta=0.1)
    assert tilted.exp().tolist() == [1.0, 0.0]


def test_the_path_has_the_policies_of_its_betas():
    ref, betas = torch.tensor([0.7, 0.2, 0.1], dtype=float64), torch.tensor([5.0, 0.5], dtype=float64)
    true, learned = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=float64)
    kl, true_path, learned_path = optimisation_path(ref, true, learned, betas)
    assert kl.shape == true_path.shape == learned_path.shape == (4, 2)
    for row, column in itertools.product(range(4), range(2)):
        logprobs = tilted_logprobs(ref.log(), learned[row], betas[column].item())
        probabilities = logprobs.exp()
        assert kl[row, column].item() == pytest.approx((probabilities * (logprobs - ref.log())).sum().item())
        assert true_path[row, column].item() == pytest.approx((probabilities * true[row]).sum().item())
        assert learned_path[row, column].item() == pytest.approx((probabilities * learned[row]).sum().item())


# --------------------------------------------------------------------------------------------------- a model as a judge


@pytest.fixture(scope="module")
def judge():
    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer, hidden_size=16, num_layers=1, num_heads=1, head_dim=16)
    model = build_reward_model(policy, tokenizer)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    return tokenizer, policy, model


def test_a_reward_model_starts_on_a_copy_of_the_policy_with_a_head_of_zero(judge):
    tokenizer, policy, _ = judge
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    state = torch.get_rng_state()
    model = build_reward_model(policy, tokenizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.score.weight == 0).all() and model.config.num_labels == 1 and not model.training
    for name, tensor in model.base_model.state_dict().items():
        assert torch.equal(tensor, policy.base_model.state_dict()[name])
    with torch.no_grad():
        model.base_model.get_input_embeddings().weight.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert getattr(policy.config, "num_labels", 2) == 2


def test_inputs_are_prompt_completion_and_eos_with_one_bos(judge):
    tokenizer = judge[0]
    ids, mask = reward_inputs(tokenizer, ["1+2=", "10+20="], ["3", ""])
    assert tokenizer.convert_ids_to_tokens(ids[0]) == ["<bos>", *"1+2=3", "<eos>", "<pad>"]
    assert tokenizer.convert_ids_to_tokens(ids[1]) == ["<bos>", *"10+20=", "<eos>"]
    assert mask.tolist() == [[True] * 7 + [False], [True] * 8]


def test_the_score_is_that_of_the_last_token_whatever_the_padding(judge):
    tokenizer, _, model = judge
    prompts, texts = ["1+2=", "10+20=", "1+2="], ["3", "30", "4"]
    together = reward_scores(model, *reward_inputs(tokenizer, prompts, texts))
    alone = [reward_scores(model, *reward_inputs(tokenizer, [p], [t])).item() for p, t in zip(prompts, texts)]
    assert together.tolist() == pytest.approx(alone, abs=1e-5) and together.shape == (3,)
    assert len({round(score, 4) for score in alone}) == 3
    ids, mask = reward_inputs(tokenizer, prompts[:1], texts[:1])
    hidden = model.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    assert (hidden[0, -1] @ model.score.weight[0]).item() == pytest.approx(alone[0], abs=1e-5)


def test_a_saved_judge_is_a_reward_function(judge, tmp_path):
    tokenizer, policy, model = judge
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    reward = ModelReward(tmp_path, batch_size=2)
    prompts, texts = ["1+2=", "10+20=", "1+2=", "2+2=", "3+3="], ["3", "30", "4", "", "6"]
    values, graded = score_completions(reward, prompts, texts, {"answer": [""] * 5})
    expected = reward_scores(model, *reward_inputs(tokenizer, prompts, texts))
    torch.testing.assert_close(values, expected.detach())
    assert graded.all() and not any(parameter.requires_grad for parameter in reward.model.parameters())
    policy.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy").config.vocab_size == len(tokenizer)
    with pytest.raises(ValueError, match="not a reward model"):
        ModelReward(tmp_path / "policy")


def test_training_on_comparisons_orders_the_answers(judge):
    tokenizer, policy, _ = judge
    model = build_reward_model(policy, tokenizer)
    prompts = [f"{a}+1=" for a in range(10)] * 2
    ids, mask = reward_inputs(tokenizer, prompts, ["9"] * 10 + ["0"] * 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = bradley_terry_loss(*reward_scores(model, ids, mask).chunk(2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(2)) and losses[-1] < 0.1
    better, worse = reward_scores(model, ids, mask).chunk(2)
    assert (better > worse).all()
