import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lmrl.policy import (
    Addition,
    addition_problems,
    addition_reward,
    build_policy,
    build_tokenizer,
    completion_logits,
    completion_texts,
    demonstration_batch,
    draw_token,
    gather_logprobs,
    is_number,
    length_mask,
    masked_mean,
    pad_left,
    pad_right,
    sample,
    save_model,
    supervised_loss,
    tempered,
    token_logprobs,
    warm_start_folder,
)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def policy(tokenizer):
    """A random policy with sharp enough logits that a wrong distribution shows."""
    model = build_policy(tokenizer, seed=3)
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    return model


def gpt2(vocab_size):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab_size, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


def draw(model, tokenizer, prompts, seed=0, cap=6, temperature=1.0):
    prompt_ids, prompt_mask = pad_left([tokenizer(prompt).input_ids for prompt in prompts], tokenizer.pad_token_id)
    samples = sample(
        model,
        prompt_ids,
        prompt_mask,
        max_new_tokens=cap,
        stop_ids=[tokenizer.eos_token_id],
        generator=torch.Generator().manual_seed(seed),
        temperature=temperature,
    )
    return prompt_ids, prompt_mask, samples


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_special_tokens_are_distinct_and_bos_comes_once(tokenizer):
    ids = tokenizer("12+34=").input_ids
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == "12+34="


@given(st.text("0123456789+=", max_size=20))
@settings(max_examples=50, deadline=None)
def test_tokenizer_round_trip(text):
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_unknown_character_is_an_error(tokenizer):
    with pytest.raises(Exception, match="UNK|unk"):
        tokenizer("12*34=")


# --- problems and verifier --------------------------------------------------------------------------------------------


def test_problem_text():
    assert Addition(57, 68).prompt == "57+68=" and Addition(57, 68).answer == "125"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_split_is_by_unordered_pair_and_complete(seed):
    train, heldout = addition_problems(seed)
    unordered = [{frozenset((p.a, p.b)) for p in side} for side in (train, heldout)]
    assert unordered[0].isdisjoint(unordered[1])
    assert len(set(train + heldout)) == len(train + heldout) == 90 * 90
    assert 0.09 < len(heldout) / (90 * 90) < 0.11


def test_reward_is_exact_equality():
    completions = ["46", "046", "46 ", "", "4<bos>6", "47"]
    assert addition_reward(["12+34="] * 6, completions, answer=["46"] * 6) == [1, 0, 0, 0, 0, 0]


def test_well_formed():
    assert is_number("120") and not any(map(is_number, ["", "1+2", "1<bos>2", "-3", "١٢"]))


def test_only_the_sampled_stop_token_is_removed(tokenizer):
    ids = torch.tensor([[7, 9, 2, 0], [7, 1, 9, 2], [7, 9, 7, 9], [2, 0, 0, 0]])
    texts = completion_texts(tokenizer, ids, torch.tensor([3, 4, 4, 1]), torch.tensor([False, False, True, False]))
    assert texts == ["46", "4<bos>6", "4646", ""]


# --- masks ------------------------------------------------------------------------------------------------------------


def test_padding_sides():
    assert pad_left([[5], [6, 7]], 0)[0].tolist() == [[0, 5], [6, 7]]
    assert pad_left([[5], [6, 7]], 0)[1].tolist() == [[False, True], [True, True]]
    assert pad_right([[5], [6, 7]], 0)[0].tolist() == [[5, 0], [6, 7]]


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5))
@settings(deadline=None)
def test_padding_keeps_every_token_even_if_it_equals_the_pad_id(rows):
    for pad in (pad_left, pad_right):
        ids, mask = pad(rows, pad_id=0)
        assert [ids[i][mask[i]].tolist() for i in range(len(rows))] == rows


def test_masked_mean_ignores_nan_and_empty_masks():
    values = torch.tensor([[1.0, float("nan")], [3.0, float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, False]])
    mean = masked_mean(values, mask)
    assert mean == 2.0
    assert torch.autograd.grad(mean, values)[0].tolist() == [[0.5, 0.0], [0.5, 0.0]]
    assert masked_mean(values, torch.zeros_like(mask)) == 0.0


# --- log-probs --------------------------------------------------------------------------------------------------------


def test_tempered_logprobs_have_the_right_numbers():
    logits, ids = torch.tensor([2.0, 1.0, 0.0]), torch.arange(3)
    rows = logits.expand(3, 3)
    assert gather_logprobs(tempered(rows, 0.5), ids).tolist() == pytest.approx([-0.1429, -2.1429, -4.1429], abs=1e-4)
    assert gather_logprobs(tempered(rows, 1.0), ids).tolist() == pytest.approx([-0.4076, -1.4076, -2.4076], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logprobs_are_at_least_float32(dtype):
    assert tempered(torch.zeros(2, dtype=dtype), 1.0).dtype == torch.float32
    assert tempered(torch.zeros(2, dtype=torch.float64), 1.0).dtype == torch.float64


class NextIdModel(torch.nn.Module):
    """Puts all mass on id + 1 at every position: any shift of the log-probs by one shows."""

    def forward(self, input_ids, logits_to_keep, **_):
        logits = torch.full((*input_ids.shape, 32), -30.0).scatter(-1, (input_ids + 1)[..., None], 30.0)
        return type("Output", (), {"logits": logits[:, -logits_to_keep:]})


def test_alignment_first_and_last_token():
    prompt_ids, prompt_mask = pad_left([[3, 4], [9]], 0)
    completion_ids, mask = pad_right([[5, 6, 7], [10]], 0)
    logprobs = token_logprobs(NextIdModel(), prompt_ids, prompt_mask, completion_ids)
    assert logprobs[mask].abs().max() < 1e-6
    wrong = token_logprobs(NextIdModel(), prompt_ids, prompt_mask, completion_ids + 1)
    assert wrong[mask].max() < -50 or wrong[0, 0] < -50


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_left_padding_does_not_change_a_row(family, policy, tokenizer):
    model = policy if family == "qwen3" else gpt2(len(tokenizer))
    prompts = [tokenizer(text).input_ids for text in ("1+2=", "12+34=", "123456+7=")]
    completion_ids, mask = pad_right([[6, 2], [7, 9, 2], [5, 5, 5, 2]], tokenizer.pad_token_id)
    together = token_logprobs(model, *pad_left(prompts, tokenizer.pad_token_id), completion_ids)
    for i, prompt in enumerate(prompts):
        length = int(mask[i].sum())
        alone = token_logprobs(model, torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.bool),
                               completion_ids[i : i + 1, :length])  # fmt: skip
        assert torch.allclose(together[i, :length], alone[0], atol=1e-4)


def test_what_follows_the_end_is_irrelevant(policy, tokenizer):
    prompt_ids, prompt_mask = pad_left([tokenizer("1+2=").input_ids], 0)
    first = token_logprobs(policy, prompt_ids, prompt_mask, torch.tensor([[6, 2, 0, 0]]))
    other = token_logprobs(policy, prompt_ids, prompt_mask, torch.tensor([[6, 2, 9, 14]]))
    assert torch.equal(first[:, :2], other[:, :2])


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_draw_token_inverts_the_cumulative_sum():
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(4, 3)
    ids, logprobs = draw_token(logits, torch.tensor([0.0, 0.1999, 0.2001, 0.99]))
    assert ids.tolist() == [0, 0, 1, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.2, 0.2, 0.5, 0.3])


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(1001, 5)
    ids, _ = draw_token(logits, torch.linspace(0, 1 - 2**-24, 1001))
    assert set(ids.tolist()) == {1, 3}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_sampled_logprobs_equal_scored_logprobs(family, temperature, policy, tokenizer):
    model = policy if family == "qwen3" else gpt2(len(tokenizer))
    prompts = ["1+2=", "12+34=", "99+99="] * 16
    prompt_ids, prompt_mask, samples = draw(model, tokenizer, prompts, cap=8, temperature=temperature)
    mask = length_mask(samples.lengths, 8)
    assert samples.lengths.unique().numel() > 1  # rows did leave the batch at different times
    scored = token_logprobs(model, prompt_ids, prompt_mask, samples.ids, temperature)
    assert (scored - samples.logprobs)[mask].abs().max() < 1e-3  # float32 logits of size 50
    untempered = token_logprobs(model, prompt_ids, prompt_mask, samples.ids)
    assert temperature == 1.0 or (untempered - samples.logprobs)[mask].abs().max() > 0.01


def test_lengths_stop_tokens_and_truncation_agree(policy, tokenizer):
    _, _, samples = draw(policy, tokenizer, ["12+34="] * 200, cap=6)
    eos = tokenizer.eos_token_id
    assert samples.truncated.any() and not samples.truncated.all()
    for ids, length, truncated in zip(samples.ids.tolist(), samples.lengths.tolist(), samples.truncated, strict=True):
        assert eos not in ids[: length - 1]
        assert truncated == (ids[length - 1] != eos)
        assert not truncated or length == 6
        assert ids[length:] == [0] * (6 - length)


def test_samples_follow_the_policy(policy, tokenizer):
    """First-token frequencies of 20,000 samples against the exact distribution: chi-square, 14 degrees of freedom."""
    count = 20_000
    prompt_ids, prompt_mask, samples = draw(policy, tokenizer, ["12+34="] * count, cap=1)
    exact = completion_logits(policy, prompt_ids[:1], prompt_mask[:1], samples.ids[:1]).softmax(-1)[0, 0]
    observed = torch.bincount(samples.ids[:, 0], minlength=len(exact)).double()
    frequent = exact * count > 5
    chi2 = ((observed - exact * count) ** 2 / (exact * count))[frequent].sum()
    assert chi2 < 36.1  # the 99.9 % quantile; the seed is fixed


def test_a_completion_does_not_depend_on_its_neighbours(policy, tokenizer):
    model = policy.double()
    try:
        prompts = ["12+34=", "5+6=", "99+99=", "1+1="]
        _, _, together = draw(model, tokenizer, prompts, cap=6)
        uniforms = torch.rand(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for i, prompt in enumerate(prompts):
            ids = torch.tensor([tokenizer(prompt).input_ids])
            for t in range(int(together.lengths[i])):
                logits = model(input_ids=ids).logits[:, -1]
                token, _ = draw_token(logits, uniforms[i, t : t + 1])
                assert token == together.ids[i, t]
                ids = torch.cat([ids, token[:, None]], dim=1)
    finally:
        policy.float()


def test_several_stop_ids(policy, tokenizer):
    prompt_ids, prompt_mask = pad_left([tokenizer("12+34=").input_ids] * 100, 0)
    stops = [tokenizer.eos_token_id, 5, 9]
    samples = sample(policy, prompt_ids, prompt_mask, max_new_tokens=5, stop_ids=stops,
                     generator=torch.Generator().manual_seed(0))  # fmt: skip
    last = samples.ids.gather(1, samples.lengths[:, None] - 1).squeeze(1)
    assert {2, 5} <= set(last[~samples.truncated].tolist()) <= set(stops)
    assert not torch.isin(last[samples.truncated], torch.tensor(stops)).any()


# --- supervised training ----------------------------------------------------------------------------------------------


def test_the_supervised_loss_is_the_mean_negative_logprob():
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, float("nan")]])
    assert supervised_loss(logprobs, torch.tensor([[True, True], [True, False]])) == 2.0


def test_demonstrations_end_with_a_trained_eos(tokenizer):
    _, _, ids, mask = demonstration_batch(tokenizer, [Addition(10, 20), Addition(90, 90)])
    assert ids.tolist() == [[6, 3, 2, 0], [4, 11, 3, 2]]
    assert mask.tolist() == [[True, True, True, False], [True] * 4]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_that_cannot_be_written_is_noticed_before_training(place, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMRL_CACHE", str(tmp_path / place))
    monkeypatch.setattr("lmrl.policy.train_on_demonstrations", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(OSError, match="cannot write to .*file.*; name another folder in LMRL_CACHE"):
        warm_start_folder(0)


def test_save_model_replaces_a_folder_only_when_complete(tmp_path, tokenizer, monkeypatch):
    first, second = build_policy(tokenizer, seed=0), build_policy(tokenizer, seed=1)
    save_model(tmp_path / "m", first, tokenizer, {"step": 1})

    def broken(folder):
        raise OSError("no space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", broken)
    with pytest.raises(OSError, match="no space"):
        save_model(tmp_path / "m", second, tokenizer, {"step": 2})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert torch.equal(loaded.lm_head.weight, first.lm_head.weight)
    monkeypatch.undo()
    save_model(tmp_path / "m", second, tokenizer, {"step": 2})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert torch.equal(loaded.lm_head.weight, second.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
