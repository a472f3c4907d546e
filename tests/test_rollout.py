import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lmrl.policy import build_policy, build_tokenizer, complete, completion_logits, gather_logprobs, token_logprobs
from lmrl.rollout import NextToken, TorchSampler, has_next_token, require_fit, row_uniforms, truncate


def sampler_and_prompts(temperature=1.0, **settings):
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer, seed=1)
    sampler = TorchSampler(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, 5, temperature, **settings)
    return sampler, [tokenizer(text).input_ids for text in ("1+2=", "12+34=", "3+45=")]


SMALL = {
    "vocab_size": 15,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
FAMILIES = {  # every kind of cache: full, sliding window (shorter than the prompts), convolution, attention beside a state
    "qwen3": SMALL,
    "gpt2": {"vocab_size": 15, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "eos_token_id": 2},
    "gemma3_text": SMALL | {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": SMALL | {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": SMALL
    | {
        "head_dim": 8,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
    },
}


def family(name, dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **FAMILIES[name])).eval().to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)  # sharp enough that a wrong state shows
    return model


def completions(rollouts, group):
    """The completions of a group as lists of ids, with their log-probs."""
    rows = (rollouts.group == group).nonzero().squeeze(-1).tolist()
    return [
        (rollouts.completion_ids[i][rollouts.mask[i]].tolist(), rollouts.sampler_logprobs[i][rollouts.mask[i]])
        for i in rows
    ]


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


# --- a completion belongs to its seed, prompt and sample index --------------------------------------------------------

SHORT, LONG, OTHER = [1, 9], [1, 5, 6, 7, 8, 9, 3], [1, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_completion_does_not_depend_on_its_batch(name, dtype):
    """Alone, in other company, at another position, in a larger group: the same ids, and the same log-probs."""
    sampler = TorchSampler(family(name, dtype), [2], 0, 8)
    alone = completions(sampler.generate([SHORT], 4, seed=5), 0)
    assert len({tuple(ids) for ids, _ in alone}) > 1
    batches = {
        "longer company": (sampler.generate([SHORT, LONG], 4, seed=5), 0),
        "last": (sampler.generate([LONG, OTHER, SHORT], 4, seed=5), 2),
        "larger group": (sampler.generate([OTHER, SHORT], 7, seed=5), 1),
        "smaller group": (sampler.generate([SHORT, OTHER], 2, seed=5), 0),
    }
    for rollouts, group in batches.values():
        for (ids, logprobs), (other_ids, other_logprobs) in zip(alone, completions(rollouts, group)):
            assert ids == other_ids
            assert (logprobs - other_logprobs).abs().max() < (1e-10 if dtype == torch.float64 else 1e-5)
    assert [ids for ids, _ in completions(sampler.generate([SHORT], 4, seed=6), 0)] != [ids for ids, _ in alone]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_cache_gives_the_scored_logprobs(name):
    sampler = TorchSampler(family(name, torch.float64), [2, 7], 0, 8)
    rollouts = sampler.generate([SHORT, LONG, OTHER], 6, seed=0)
    assert rollouts.mask.sum(1).unique().numel() > 1  # rows left the batch at different times
    with torch.no_grad():
        scored = token_logprobs(sampler.model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)
    assert rollouts.sampler_logprobs.dtype == torch.float64
    assert (scored - rollouts.sampler_logprobs)[rollouts.mask].abs().max() < 1e-10


SHARED_KEYS = SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
LLAMA_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
LLAMA_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRITTEN_OUT = {
    "llama": SHARED_KEYS | {"rope_parameters": LLAMA_ROPE},
    "mistral": SHARED_KEYS | {"sliding_window": None},
    "qwen2": SHARED_KEYS,
    "qwen3": SHARED_KEYS | {"head_dim": 8},
}


def small_model(name, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings)).eval().double()


def rows_seen(module):
    """How many tokens of a row ``module`` reads in each call; a list that grows."""
    widths = []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append((kwargs["input_ids"] if kwargs else args[0]).shape[-1]), with_kwargs=True
    )
    return widths


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_the_written_out_step_is_the_models(name):
    """Rows of unequal length, of which some end early: the same ids, and the same log-probs to rounding."""
    model = small_model(name, **WRITTEN_OUT[name])
    sampler = TorchSampler(model, [2, 7], 0, 12)
    assert has_next_token(model)
    written_out = sampler.generate([SHORT, LONG, OTHER], 6, seed=0)
    assert written_out.mask.sum(1).unique().numel() > 1
    widths = rows_seen(model)  # a hook: from here on the model itself is asked
    assert not has_next_token(model)
    asked = sampler.generate([SHORT, LONG, OTHER], 6, seed=0)
    assert widths == [7] + [1] * 11
    assert torch.equal(written_out.completion_ids, asked.completion_ids)
    assert (written_out.sampler_logprobs - asked.sampler_logprobs).abs().max() < 1e-12


def test_the_written_out_step_replaces_all_but_the_prompt():
    model, counts = small_model("qwen2", **SHARED_KEYS), []
    step = NextToken(model, 64)
    model.register_forward_pre_hook(lambda *_: counts.append(1))
    uniforms = row_uniforms([SHORT], 4, 8, seed=0)
    prompt = torch.tensor([SHORT]), torch.ones(1, 2, dtype=torch.bool)
    complete(step, *prompt, torch.zeros(4).long(), uniforms, stop_ids=[-1], distribution=torch.Tensor.double)
    assert counts == [1]


def test_a_cache_that_forgets_goes_to_the_model():
    model = small_model("mistral", **SHARED_KEYS | {"sliding_window": 3})
    sampler = TorchSampler(model, [2], 0, 8)
    assert has_next_token(model)  # what the cache is shows with the prompt
    rollouts = sampler.generate([SHORT, LONG], 4, seed=0)
    with torch.no_grad():
        scored = token_logprobs(model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids)
    assert (scored - rollouts.sampler_logprobs)[rollouts.mask].abs().max() < 1e-10


def replace_forward(module):
    module.forward = module.forward


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
def test_other_designs_are_not_written_out(name):
    assert not has_next_token(family(name, torch.float32))


@pytest.mark.parametrize(
    "touch",
    [
        lambda model: model.register_forward_hook(lambda *_: None),
        lambda model: model.model.register_forward_pre_hook(lambda *_: None),
        lambda model: model.model.layers[1].register_forward_hook(lambda *_: None),
        lambda model: replace_forward(model.model.layers[0].self_attn),
        lambda model: replace_forward(model.model.layers[0].self_attn.v_proj),
        lambda model: model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None),
        lambda model: replace_forward(model.model.rotary_emb),
        lambda model: model.set_attn_implementation("eager"),
    ],
)
def test_a_touched_model_is_not_written_out(touch):
    model = small_model("qwen3", **SHARED_KEYS)
    assert has_next_token(model)
    touch(model)
    assert not has_next_token(model)


def test_positions_that_depend_on_the_length_are_not_written_out():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not has_next_token(small_model("llama", **SHARED_KEYS | {"rope_parameters": rope}))


def test_a_prompt_that_occurs_twice_gets_the_next_samples():
    sampler, prompts = sampler_and_prompts()
    twice = sampler.generate([prompts[0], prompts[1], prompts[0]], 3, seed=0)
    once = sampler.generate([prompts[0]], 6, seed=0)
    first, second = ([ids for ids, _ in completions(twice, group)] for group in (0, 2))
    assert first != second and first + second == [ids for ids, _ in completions(once, 0)]


def test_the_random_numbers_differ_by_seed_prompt_sample_and_token():
    base = row_uniforms([SHORT, LONG], 3, 5, seed=0)
    assert base.shape == (6, 5) and base.dtype == torch.float64
    assert base.unique().numel() == 30 and base.min() >= 0 and base.max() < 1
    assert torch.isin(row_uniforms([SHORT, LONG], 3, 5, seed=1), base).sum() == 0
    assert torch.equal(row_uniforms([LONG, SHORT], 5, 5, seed=0)[[5, 6, 7, 0, 1, 2]], base)
    assert torch.isin(row_uniforms([[1], [9]], 1, 5, seed=19), row_uniforms([[1, 9]], 2, 5, seed=19)).sum() == 0


def test_the_random_numbers_do_not_depend_on_the_kind_of_integer():
    expected = row_uniforms([SHORT], 2, 5, seed=3)
    assert torch.equal(row_uniforms(torch.tensor([SHORT]).numpy(), 2, 5, seed=torch.tensor(3).numpy()[()]), expected)


def test_each_distinct_prompt_is_read_once():
    sampler, prompts = sampler_and_prompts()
    shapes = []
    sampler.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    sampler.generate(prompts + prompts[:1], 8, seed=0)
    assert shapes[0] == (3, 7)
    assert all(width == 1 for _, width in shapes[1:])
    assert 32 >= shapes[1][0] > shapes[-1][0] and len(shapes) == 5  # finished rows have left


def test_several_stop_ids_end_a_row_and_stay_in_it():
    sampler = TorchSampler(family("qwen3", torch.float32), [2, 7, 11], 0, 8)
    rollouts = sampler.generate([SHORT, LONG], 64, seed=0)
    last = rollouts.completion_ids.gather(1, rollouts.mask.sum(1, keepdim=True) - 1).squeeze(1)
    assert set(last[~rollouts.truncated].tolist()) == {2, 7, 11}
    stops = torch.isin(rollouts.completion_ids, torch.tensor([2, 7, 11])) & rollouts.mask
    assert torch.equal(stops.sum(1) == 0, rollouts.truncated) and stops.sum(1).max() == 1


def test_a_stop_id_in_the_prompt_does_not_end_the_completion():
    sampler = TorchSampler(family("qwen3", torch.float32), [2, 7], 0, 8)
    rollouts = sampler.generate([[1, 2, 7, 9], [7, 7]], 32, seed=0)
    first = rollouts.completion_ids[:, 0]
    assert torch.equal(rollouts.mask.sum(1) == 1, torch.isin(first, torch.tensor([2, 7])))
    assert rollouts.prompt_mask.sum(1).tolist() == [4] * 32 + [2] * 32


# --- which distribution -----------------------------------------------------------------------------------------------

PROBS = torch.tensor([[0.05, 0.5, 0.15, 0.3]])


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({}, [0.05, 0.5, 0.15, 0.3]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 0.625, 0, 0.375]),
        ({"top_k": 9}, [0.05, 0.5, 0.15, 0.3]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, [0, 0.625, 0, 0.375]),
        ({"top_p": 0.9}, [0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"min_p": 0.2}, [0, 0.5 / 0.95, 0.15 / 0.95, 0.3 / 0.95]),
        ({"min_p": 0.5}, [0, 0.625, 0, 0.375]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.82}, [0, 0.625, 0, 0.375]),  # 0.82 of what top_k left, not of everything
        ({"top_p": 0.9, "min_p": 0.5}, [0, 0.625, 0, 0.375]),
    ],
)
def test_truncation_by_hand(settings, kept):
    assert torch.allclose(truncate(PROBS.log(), **settings).softmax(-1), torch.tensor([kept]).float(), atol=1e-6)


def test_ties_at_the_edge_of_top_k_stay():
    assert truncate(torch.tensor([[1.0, 2.0, 1.0, 0.0]]), top_k=2).isfinite().tolist() == [[True, True, True, False]]


@given(
    st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 45), st.floats(0.01, 1), st.floats(0, 1), st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_truncation_agrees_with_transformers(seed, vocabulary, top_k, top_p, min_p, ties):
    logits = 3 * torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if ties else logits
    warpers = LogitsProcessorList([TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)])
    if top_k:
        warpers.insert(0, TopKLogitsWarper(top_k))
    assert torch.equal(truncate(logits, top_k, top_p, min_p), warpers(torch.zeros(5, 1, dtype=torch.int64), logits))


@pytest.mark.parametrize(
    "settings", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 6, "top_p": 0.6, "min_p": 0.2}]
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_reported_logprobs_are_those_of_the_truncated_distribution(settings, temperature):
    sampler, prompts = sampler_and_prompts(temperature, **settings)
    with torch.no_grad():
        sampler.model.lm_head.weight.mul_(5)
    rollouts = sampler.generate(prompts, 16, seed=0)
    with torch.no_grad():
        full = completion_logits(
            sampler.model, rollouts.prompt_ids, rollouts.prompt_mask, rollouts.completion_ids, temperature
        )
    real = rollouts.mask
    kept = truncate(full[real], **settings)
    assert kept.isinf().any()
    ids, reported = rollouts.completion_ids[real], rollouts.sampler_logprobs[real]
    assert (gather_logprobs(kept, ids) - reported).abs().max() < 1e-4
    assert (gather_logprobs(full[real], ids) - reported).max() < 1e-4  # the whole softmax gives each token less
    assert (gather_logprobs(full[real], ids) - reported).min() < -0.05


def test_truncated_samples_follow_the_renormalised_distribution():
    """First tokens of 20,000 samples with top_p 0.9, min_p 0.1 at temperature 0.7: chi-square, 10 degrees of freedom."""
    tokenizer = build_tokenizer()
    sampler = TorchSampler(build_policy(tokenizer, seed=3), [2], 0, 1, 0.7, top_p=0.9, min_p=0.1)
    with torch.no_grad():
        sampler.model.lm_head.weight.mul_(5)
    prompt = tokenizer("12+34=").input_ids
    rollouts = sampler.generate([prompt], 20_000, seed=0)
    with torch.no_grad():
        raw = sampler.model(input_ids=torch.tensor([prompt])).logits[:, -1]
    exact = sampler.distribution(raw).softmax(-1)[0]
    observed = torch.bincount(rollouts.completion_ids[:, 0], minlength=15)
    kept = exact > 0
    assert kept.sum() == 11 and observed[~kept].sum() == 0
    chi2 = ((observed - 20_000 * exact) ** 2 / (20_000 * exact))[kept].sum()
    assert chi2 < 29.6


def test_the_checkpoints_generation_settings_are_not_used():
    sampler, prompts = sampler_and_prompts()
    before = sampler.generate(prompts, 8, seed=0)
    settings = {
        "do_sample": True,
        "temperature": 0.3,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.2,
        "repetition_penalty": 1.1,
    }
    sampler.model.generation_config = GenerationConfig(**settings)
    after = sampler.generate(prompts, 8, seed=0)
    assert torch.equal(before.completion_ids, after.completion_ids)
    assert torch.equal(before.sampler_logprobs, after.sampler_logprobs)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, count, message",
    [
        ([], 2, "0 prompts, the shortest of 0 tokens, 2 completions each"),
        ([[1, 5], []], 2, "2 prompts, the shortest of 0 tokens"),
        ([[1, 5]], 0, "1 prompts, the shortest of 2 tokens, 0 completions each"),
    ],
)
def test_nothing_to_generate_is_an_error_with_the_numbers(prompts, count, message):
    with pytest.raises(ValueError, match=message):
        sampler_and_prompts()[0].generate(prompts, count, seed=0)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_completion_length": 0}, "max_completion_length is 0"),
        ({"temperature": 0.0}, "temperature is 0.0; choose it above 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"min_p": 1.5}, "min_p 1.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TorchSampler(None, [2], 0, **({"max_completion_length": 5} | settings))
