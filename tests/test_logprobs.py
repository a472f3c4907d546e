"""Log-probs and entropies without the logits: equal to the materialised ones, for any shape, dtype, head and model."""

import math
from functools import partial

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import lmrl.logprobs
from lmrl.logprobs import (
    completion_logprobs,
    completion_loss,
    require_output_head,
)
from lmrl.policy import completion_logits, gather_logprobs, length_mask
from lmrl.trust_region import entropy

V, D = 37, 16
SMALL = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
GROUPED = SMALL | {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
GPT2 = {"vocab_size": V, "n_embd": D, "n_layer": 2, "n_head": 2, "n_positions": 64}
MODELS = {
    "qwen3": GROUPED | {"tie_word_embeddings": False},
    "qwen3 tied": GROUPED | {"tie_word_embeddings": True},
    "llama": GROUPED,
    "gemma2": GROUPED | {"final_logit_softcapping": 4.0},
    "gemma3_text": GROUPED | {"final_logit_softcapping": 3.0},
    "gemma3_text uncapped": GROUPED,
    "cohere": GROUPED | {"logit_scale": 0.25},
    "granite": GROUPED | {"logits_scaling": 4.0},
    "hyperclovax": GROUPED | {"logits_scaling": 0.5},
    "llama4_text": GROUPED | {"intermediate_size_mlp": 24, "num_local_experts": 2},
    "gpt2": GPT2,
    "opt": SMALL | {"ffn_dim": 24, "max_position_embeddings": 64, "word_embed_proj_dim": D},
    "phi": GROUPED,
    "gpt_neox": SMALL | {"max_position_embeddings": 64},
}


def build(name, dtype=torch.float64):
    """A small model with weights large enough that logits differ by several nats."""
    torch.manual_seed(0)
    family = name.split()[0]
    config = transformers.AutoConfig.for_model(family, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.mul_(40)
        if head.bias is not None:
            head.bias.normal_()
    return model.to(dtype)


@pytest.fixture
def batch():
    """Prompts ``[3, 4]`` with left padding, completions ``[3, 5]`` of 5, 2 and 0 tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts, completions = (torch.randint(1, V, (3, n), generator=generator) for n in (4, 5))
    return (
        prompts,
        length_mask(torch.tensor([4, 1, 3]), 4).flip(1),
        completions,
        length_mask(torch.tensor([5, 2, 0]), 5),
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_completion_logprobs_are_those_of_the_materialised_logits(name, temperature, batch):
    model, mask = build(name), batch[-1]
    logits = completion_logits(model, *batch[:3], temperature)
    expected = torch.where(mask, gather_logprobs(logits, batch[2]), 0.0), torch.where(mask, entropy(logits), 0.0)
    assert expected[1][mask].min() < 0.95 * math.log(V)  # the head is not close to uniform
    found = completion_logprobs(model, *batch, temperature)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad((x.sin() + y.cos()).sum(), parameters) for x, y in (expected, found)]
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-10)
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() <= 1e-10 * max(a.norm(), 1e-6)
    require_output_head(model)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_many_small_tiles_give_the_materialised_values_and_gradients(temperature, softcap, monkeypatch):
    """23 tokens of vocabulary in tiles of 8, 20 rows in blocks of 3; logits of tens of nats, the largest in any tile."""
    for shape in ("tile_shape", "loss_tile_shape"):
        monkeypatch.setattr(lmrl.logprobs, shape, lambda vocabulary: (3, 8))
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    hidden, weight, bias = (3 * draw(*shape) for shape in ((20, 6), (23, 6), (23,)))
    targets, slopes = torch.randint(23, (20,), generator=generator), draw(2, 20)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def token_loss(logprobs, entropies, rows):
        return (slopes[0, rows] * logprobs + slopes[1, rows] * entropies.square()).sum()

    logits = 0.5 * (hidden @ weight.T + bias)
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperature
    assert logits.argmax(1).div(8, rounding_mode="floor").unique().numel() == 3
    values = gather_logprobs(logits, targets), entropy(logits)
    expected = [token_loss(*values, slice(None)), *values]
    expected += torch.autograd.grad(expected[0], leaves)

    settings = {"temperature": temperature, "bias": bias, "softcap": softcap, "scale": 0.5}
    values = lmrl.logprobs.fused_logprobs(hidden, weight, targets, **settings)
    recomputed = [token_loss(*values, slice(None)), *values]
    recomputed += torch.autograd.grad(recomputed[0], leaves)
    at_once = list(lmrl.logprobs.fused_token_loss(hidden, weight, targets, token_loss, **settings))
    at_once += torch.autograd.grad(at_once[0], leaves)
    for found in (recomputed, at_once):
        for a, b in zip(expected, found, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((9, 64), (31, 64)))
    targets = torch.randint(31, (9,), generator=generator)
    found = lmrl.logprobs.fused_logprobs(hidden, weight, targets)
    logits = hidden.double() @ weight.double().T
    for value, exact in zip(found, (gather_logprobs(logits, targets), entropy(logits)), strict=True):
        assert value.dtype == torch.float32 and (value - exact).abs().max() < 2e-5


def case(n, v, d, *, dtype=torch.float64, seed=0):
    """Hidden states ``[n, d]``, weight ``[v, d]``, bias ``[v]``, targets ``[n]`` and slopes ``[2, n]``."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        2 * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((n, d), (v, d), (v,), (2, n))
    ]
    leaves = [x.to(dtype).requires_grad_() for x in tensors[:3]]
    return *leaves, torch.randint(v, (n,), generator=generator), tensors[3].to(dtype)


def materialised(hidden, weight, bias, targets, temperature):
    logits = (hidden @ weight.T + bias) / temperature
    return gather_logprobs(logits, targets), entropy(logits)


def both_operators(hidden, weight, bias, targets, slopes, temperature):
    """Log-probs, entropies and the three gradients of a loss that is linear in both, by each of the two operators."""
    settings, leaves = {"bias": bias, "temperature": temperature}, (hidden, weight, bias)
    a, b = slopes
    values = lmrl.logprobs.fused_logprobs(hidden, weight, targets, **settings)
    recomputed = *values, *torch.autograd.grad((a * values[0] + b * values[1]).sum(), leaves)

    def token_loss(logprobs, entropies, rows):
        return (a[rows] * logprobs + b[rows] * entropies).sum()

    loss, *values = lmrl.logprobs.fused_token_loss(hidden, weight, targets, token_loss, **settings)
    return recomputed, (*values, *torch.autograd.grad(loss, leaves))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 9),
    v=st.integers(1, 40),
    d=st.integers(1, 9),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 50)),
    temperature=st.sampled_from([1.0, 0.6]),
    seed=st.integers(0, 99),
)
def test_any_shape_in_any_tiles(n, v, d, tile, temperature, seed):
    *inputs, slopes = case(n, v, d, seed=seed)
    values = materialised(*inputs, temperature)
    expected = *values, *torch.autograd.grad((slopes[0] * values[0] + slopes[1] * values[1]).sum(), inputs[:3])
    with pytest.MonkeyPatch.context() as patch:
        for shape in ("tile_shape", "loss_tile_shape"):
            patch.setattr(lmrl.logprobs, shape, lambda vocabulary: tile)
        results = both_operators(*inputs, slopes, temperature)
    for found in results:
        for a, b in zip(expected, found, strict=True):
            assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck(softcap, monkeypatch):
    monkeypatch.setattr(lmrl.logprobs, "tile_shape", lambda vocabulary: (2, 4))
    hidden, weight, bias, targets, _ = case(3, 7, 4)

    def operator(hidden, weight, bias):
        return lmrl.logprobs.fused_logprobs(
            hidden, weight, targets, bias=bias, temperature=0.6, softcap=softcap, scale=0.5
        )

    assert torch.autograd.gradcheck(operator, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_at_least_as_good_as_materialised(dtype):
    *inputs, slopes = case(40, 300, 64, dtype=dtype)
    with torch.no_grad():
        inputs[1].mul_(0.2)
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    values = materialised(*exact, inputs[3], 1.0)
    expected = *values, *torch.autograd.grad((slopes[0] * values[0] + slopes[1] * values[1]).sum(), exact)
    logits = (inputs[0] @ inputs[1].T + inputs[2]).float()
    values = gather_logprobs(logits, inputs[3]), entropy(logits)
    usual = *values, *torch.autograd.grad((slopes[0] * values[0] + slopes[1] * values[1]).sum(), inputs[:3])
    for found in both_operators(*inputs, slopes, 1.0):
        assert [x.dtype for x in found] == 2 * [torch.float32] + 3 * [dtype]
        for a, b, c in zip(expected, found, usual, strict=True):
            assert (b - a).norm() <= (c - a).norm()


def test_autocast_does_not_reach_the_head():
    hidden, weight, _, targets, _ = case(6, 30, 8, dtype=torch.float32)
    plain = lmrl.logprobs.fused_logprobs(hidden, weight, targets)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lmrl.logprobs.fused_logprobs(hidden, weight, targets)[0], plain)


FORBIDDEN = torch.full((300,), -math.inf)
LARGE_LOGITS = {
    "all near 1000": torch.full((900,), 1000.0),
    "almost certain": torch.cat([torch.zeros(899), torch.full((1,), 40.0)]),
    "first tile forbidden": torch.cat([FORBIDDEN, torch.zeros(600)]),
    "last tile forbidden": torch.cat([torch.zeros(600), FORBIDDEN]),
    "some forbidden": torch.where(torch.arange(900) % 3 == 1, -math.inf, 0.0),
}


@pytest.mark.parametrize("name", LARGE_LOGITS)
def test_entropy_keeps_its_digits_and_forbidden_tokens_are_harmless(name, monkeypatch):
    """Values and gradients in float32 against the materialised logits in float64, in tiles of 300."""
    for shape in ("tile_shape", "loss_tile_shape"):
        monkeypatch.setattr(lmrl.logprobs, shape, lambda vocabulary: (3, 300))
    hidden, weight, _, _, slopes = case(9, 900, 8, dtype=torch.float32)
    hidden = (0.1 * hidden.detach()).requires_grad_()
    bias, targets = LARGE_LOGITS[name].clone().requires_grad_(), torch.tensor([300, 302, 599] * 3)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    logp = (exact[0] @ exact[1].T + exact[2]).log_softmax(-1)
    values = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
    expected = *values, *torch.autograd.grad((slopes[0] * values[0] + slopes[1] * values[1]).sum(), exact)
    for found in both_operators(hidden, weight, bias, targets, slopes, 1.0):
        assert (found[0] - expected[0]).abs().max() < 1e-4  # the logits' own rounding
        assert (found[1] - expected[1]).abs().max() < 2e-5 and found[1].min() >= 0
        for a, b in zip(expected[2:], found[2:], strict=True):
            assert (a - b).norm() < 2e-4 * a.norm()


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch 2.13 and later")
def test_against_torchs_own_linear_cross_entropy():
    hidden, weight, bias, targets, slopes = case(50, 130, 16)
    expected = -torch.nn.functional.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, reduction="none")
    slopes[1] = 0
    expected = expected, *torch.autograd.grad((slopes[0] * expected).sum(), (hidden, weight, bias))
    for found in both_operators(hidden, weight, bias, targets, slopes, 1.0):
        for a, b in zip(expected, (found[0], *found[2:]), strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_costs_no_product(frozen, monkeypatch):
    """A product of the backward pass is an `add_product`: only the wanted one is made."""
    shapes = []
    original = lmrl.logprobs.add_product

    def spy(total, a, b):
        shapes.append(tuple(total.shape))
        original(total, a, b)

    monkeypatch.setattr(lmrl.logprobs, "add_product", spy)
    hidden, weight, _, targets, _ = case(3, 7, 4)
    ({"hidden": hidden, "weight": weight}[frozen]).requires_grad_(False)
    trained = weight if frozen == "hidden" else hidden
    for loss in (
        lambda: lmrl.logprobs.fused_logprobs(hidden, weight, targets)[0].sum(),
        lambda: lmrl.logprobs.fused_token_loss(hidden, weight, targets, lambda logprobs, *_: logprobs.sum())[0],
    ):
        trained.grad = None
        loss().backward()
        assert trained.grad.abs().max() > 0 and {"hidden": hidden, "weight": weight}[frozen].grad is None
        assert shapes == [tuple(trained.shape)]
        shapes.clear()
    with torch.no_grad():
        lmrl.logprobs.fused_token_loss(hidden, weight, targets, lambda logprobs, *_: logprobs.sum())
    assert shapes == []


@pytest.mark.parametrize("mask_row", [[True, True, False], [True, False, False], [False, False, False]])
def test_nan_off_the_mask_does_not_leak(mask_row):
    """Hidden states that are NaN where the mask is False change neither values nor gradients."""
    hidden, weight, bias, _, _ = case(6, 11, 4)
    mask, ids = torch.tensor([mask_row, [False, True, False]]), torch.arange(6).view(2, 3)
    results = []
    for filler in (0.0, float("nan")):
        states = torch.where(mask[..., None], hidden.detach().view(2, 3, 4), filler).requires_grad_()
        logprobs, _ = lmrl.logprobs.fused_logprobs(states[mask], weight, ids[mask], bias=bias)
        logprobs = lmrl.logprobs.unflatten(logprobs, mask)
        results.append((logprobs, *torch.autograd.grad(logprobs.sum(), (states, weight, bias))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", ["qwen3", "qwen3 tied", "gemma2", "cohere"])
def test_completion_loss_has_the_value_and_gradients_of_the_materialised_loss(name, temperature, batch):
    model, mask = build(name), batch[-1]
    slopes = torch.linspace(-1, 1, int(mask.sum()), dtype=torch.float64)

    def token_loss(logprobs, entropies, rows):
        return (slopes[rows] * logprobs.exp() + entropies).sum()

    logits = completion_logits(model, *batch[:3], temperature)
    values = gather_logprobs(logits, batch[2])[mask], entropy(logits)[mask]
    expected = token_loss(*values, slice(None))
    loss, *found = completion_loss(model, *batch, token_loss, temperature)
    assert torch.allclose(loss, expected, rtol=0, atol=1e-10)
    for a, b in zip(values, found, strict=True):
        assert torch.allclose(a, b[mask], rtol=0, atol=1e-10) and not b.requires_grad and (b[~mask] == 0).all()
    parameters = list(model.parameters())
    for a, b in zip(*(torch.autograd.grad(x, parameters) for x in (expected, loss)), strict=True):
        assert (a - b).norm() <= 1e-10 * max(a.norm(), 1e-6)


def test_a_batch_without_a_token(batch):
    model, none = build("qwen3"), torch.zeros(3, 5, dtype=torch.bool)
    logprobs, entropies = completion_logprobs(model, *batch[:3], none)
    loss, *_ = completion_loss(model, *batch[:3], none, lambda logprobs, entropies, rows: logprobs.sum())
    assert not logprobs.any() and not entropies.any() and loss == 0
    (logprobs.sum() + loss).backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_errors():
    hidden, weight, _, targets, _ = case(3, 7, 4)
    for bad in (torch.tensor([0, 1, 7]), torch.tensor([0, -1, 2])):
        with pytest.raises(ValueError, match="7 tokens"):
            lmrl.logprobs.fused_logprobs(hidden, weight, bad)
    with pytest.raises(ValueError, match=r"\(3, 4\), \(7, 4\), \(2,\)"):
        lmrl.logprobs.fused_logprobs(hidden, weight, targets[:2])
    loss, *_ = lmrl.logprobs.fused_token_loss(hidden, weight, targets, lambda logprobs, *_: logprobs.sum())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="first backward pass"):
        loss.backward()


def test_a_head_that_output_head_does_not_know_is_refused():
    model = build("granite")
    model.config.logits_scaling = 1.0  # the model divides by it, and so would output_head: both are 1 now
    require_output_head(model)
    model.lm_head.register_forward_hook(lambda module, inputs, logits: 0.5 * logits)
    with pytest.raises(ValueError, match="GraniteForCausalLM.*transform"):
        require_output_head(model)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="Sequential, not a linear layer"):
        lmrl.logprobs.output_head(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bend", [lambda z: 1.05 * z, lambda z: 1.2 * z, lambda z: 10 * (z / 10).tanh()])
def test_a_slightly_different_head_is_refused(bend, dtype):
    model = build("qwen3", dtype)
    require_output_head(model)
    model.lm_head.register_forward_hook(lambda module, inputs, logits: bend(logits))
    with pytest.raises(ValueError, match="differ from the model's own by up to"):
        require_output_head(model)


def test_a_vocabulary_of_two_tokens_can_be_asked():
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **GROUPED | {"vocab_size": 2})
    require_output_head(AutoModelForCausalLM.from_config(config).eval())


def test_a_linear_layer_with_a_forward_of_its_own_is_refused():
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 0 * x.sum()

    model = build("qwen3")
    model.lm_head = Adapted(D, V, bias=False, dtype=torch.float64)
    with pytest.raises(ValueError, match="Adapted with a forward of its own.*merge the adapter"):
        lmrl.logprobs.output_head(model)


def test_a_model_without_a_trunk_is_refused():
    model = build("qwen3")
    with pytest.raises(ValueError, match="Qwen3Model: neither"):
        lmrl.logprobs.trunk(model.model)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"softcap": 0.0}, "softcap 0.0"),
        ({"bias": torch.zeros(1)}, r"bias has shape \(1,\)"),
        ({"bias": torch.zeros(8)}, r"bias has shape \(8,\)"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    hidden, weight, _, targets, _ = case(3, 7, 4)
    with pytest.raises(ValueError, match=message):
        lmrl.logprobs.fused_logprobs(hidden, weight, targets, **settings)
    with pytest.raises(ValueError, match=message):
        lmrl.logprobs.fused_token_loss(hidden, weight, targets, lambda logprobs, *_: logprobs.sum(), **settings)
    with pytest.raises(ValueError, match="torch.int32"):
        lmrl.logprobs.fused_logprobs(hidden, weight, targets.int())


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_mixed_dtypes_are_promoted(dtypes):
    hidden, weight, _, targets, slopes = case(5, 9, 4)
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x, dtype in zip((hidden, weight), dtypes))
    zero = torch.zeros(9, dtype=torch.float64).requires_grad_()
    values = materialised(hidden.double(), weight.double(), zero, targets, 1.0)
    leaves = hidden, weight, zero
    expected = *values, *torch.autograd.grad((slopes[0] * values[0] + slopes[1] * values[1]).sum(), leaves)
    for found in both_operators(hidden, weight, zero, targets, slopes, 1.0):
        assert [x.dtype for x in found] == [x.dtype for x in expected]
        for a, b in zip(expected[:2], found[:2], strict=True):
            assert (a - b).abs().max() < 1e-12
        for a, b in zip(expected[2:], found[2:], strict=True):
            assert (a - b).norm() <= 1e-6 * a.norm()


@pytest.mark.parametrize(
    "token_loss, message",
    [
        (lambda logprobs, *_: logprobs, r"shape \(3,\)"),
        (lambda logprobs, *_: 0.0, "returned 0.0"),
        (lambda logprobs, *_: None, "returned None"),
        (lambda logprobs, *_: torch.zeros(()), "does not depend"),
        (lambda logprobs, *_: torch.ones((), requires_grad=True) * 2, "does not depend"),
    ],
)
def test_a_token_loss_that_is_no_loss_is_refused(token_loss, message):
    hidden, weight, _, targets, _ = case(3, 7, 4)
    with pytest.raises(ValueError, match=message):
        lmrl.logprobs.fused_token_loss(hidden, weight, targets, token_loss)
