import pytest
import torch

from lmrl.policy import build_policy, build_tokenizer, token_logprobs
from lmrl.rollout import TorchSampler, require_fit


def sampler_and_prompts(temperature=1.0):
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer, seed=1)
    sampler = TorchSampler(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, 5, temperature)
    return sampler, [tokenizer(text).input_ids for text in ("1+2=", "12+34=", "3+45=")]


def test_groups_are_in_prompt_order_and_prompts_are_kept():
    sampler, prompts = sampler_and_prompts()
    rollouts = sampler.generate(prompts, 4, seed=0)
    assert rollouts.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for row, group in enumerate(rollouts.group.tolist()):
        assert rollouts.prompt_ids[row][rollouts.prompt_mask[row]].tolist() == prompts[group]


def test_the_same_seed_gives_the_same_rollouts_and_another_one_does_not():
    sampler, prompts = sampler_and_prompts()
    first, again, other = (sampler.generate(prompts, 8, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert not torch.equal(first.completion_ids[:, 0], other.completion_ids[:, 0])


def test_completions_of_one_prompt_differ():
    sampler, prompts = sampler_and_prompts()
    rollouts = sampler.generate(prompts, 16, seed=0)
    assert len({tuple(row) for row in rollouts.completion_ids[:16].tolist()}) > 1


def test_the_sampler_tempers_what_it_reports():
    sampler, prompts = sampler_and_prompts(temperature=0.6)
    rollouts = sampler.generate(prompts, 8, seed=0)
    with torch.no_grad():
        scored = token_logprobs(sampler.model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, 0.6)
    assert (scored - rollouts.sampler_logprobs)[rollouts.mask].abs().max() < 1e-5


def test_ids_are_never_longer_than_the_cap():
    sampler, prompts = sampler_and_prompts()
    rollouts = sampler.generate(prompts, 32, seed=0)
    assert rollouts.completion_ids.shape[1] <= 5 and rollouts.truncated.any()
    assert (rollouts.mask.sum(1)[rollouts.truncated] == 5).all()


def test_sampling_sees_new_weights_without_a_sync():
    sampler, prompts = sampler_and_prompts()
    before = sampler.generate(prompts, 8, seed=0)
    with torch.no_grad():
        sampler.model.lm_head.weight.neg_()
    after = sampler.generate(prompts, 8, seed=0)
    assert not torch.equal(before.sampler_logprobs[:, 0], after.sampler_logprobs[:, 0])


def test_what_does_not_fit_the_model_is_refused_with_the_numbers():
    model = build_policy(build_tokenizer(), max_positions=10)
    require_fit(model, torch.tensor([[1, 3, 4, 5, 14]]), 5)
    with pytest.raises(
        ValueError, match="a prompt of 5 tokens and a completion of up to 6 are 11, but .* 10 positions"
    ):
        require_fit(model, torch.tensor([[1, 3, 4, 5, 14]]), 6)
    with pytest.raises(ValueError, match="a prompt has token 15, but the model has 15 tokens"):
        require_fit(model, torch.tensor([[1, 15]]), 5)


def test_a_policy_with_nan_weights_is_refused():
    sampler, prompts = sampler_and_prompts()
    with torch.no_grad():
        sampler.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="log-probs are not finite"):
        sampler.generate(prompts, 4, seed=0)
