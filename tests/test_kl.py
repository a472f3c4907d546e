"""The exact KL without the logits, and the KL in the reward (lmrl.recipes)."""

import math

import pytest
import torch
from test_logprobs import MODELS, V, batch, build  # noqa: F401

import lmrl.logprobs
import lmrl.recipes
from lmrl.logprobs import OutputHead, completion_logprobs, completion_loss
from lmrl.policy import completion_logits
from lmrl.recipes import completion_kl, completion_loss_with_kl, fused_kl, penalised_rewards, penalised_token_rewards
from lmrl.trust_region import kl_exact

float64 = torch.float64


def moved(model):
    """The model, and a copy whose weights are a little off."""
    other = build(model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in other.parameters():
            weight += (
                0.1 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            )
    return build(model), other


def heads(seed=0, tokens=11, dtype=float64, **settings):
    """Hidden states and heads of a policy and of a reference that is wider."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (2 * torch.randn(shape, generator=generator, dtype=float64) / shape[-1] ** 0.5).to(dtype)

    policy, reference = (draw(tokens, 6), draw(V, 6)), (draw(tokens, 9), draw(V, 9))
    bias = draw(V) * 3
    hidden, weight, bias = (x.requires_grad_() for x in (policy[0], 3 * policy[1], bias))
    return hidden, OutputHead(weight, bias, **settings), reference[0], OutputHead(3 * reference[1])


def logits_of(hidden, head, temperature):
    logits = hidden @ head.weight.T + (0 if head.bias is None else head.bias)
    logits = logits * head.scale
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    return logits / temperature


# --- the exact KL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2048, V), (3, 5), (1, 1)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("settings", [{}, {"scale": 0.3}, {"softcap": 3.0, "scale": 1.5}])
def test_value_and_gradients_are_those_of_the_definition(settings, temperature, shape, monkeypatch):
    monkeypatch.setattr(lmrl.recipes, "tile_shape", lambda vocabulary: shape)
    hidden, head, *reference = heads(**settings)
    expected = kl_exact(logits_of(hidden, head, temperature), logits_of(*reference, temperature))
    found = fused_kl(hidden, head, *reference, temperature)
    assert found.mean() > 0.1 and torch.allclose(found, expected, rtol=0, atol=1e-10)
    inputs = hidden, head.weight, head.bias
    for a, b in zip(torch.autograd.grad(found.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs)):
        assert b.norm() > 0.1 and torch.allclose(a, b, rtol=0, atol=1e-10)


def test_the_first_argument_is_the_policy():
    """Policy (.5, .5), reference (.25, .75): 0.1438 nats, exchanged 0.1308."""
    policy, reference = ([[0.5], [0.5]], [[0.25], [0.75]])
    policy, reference = (OutputHead(torch.tensor(p, dtype=float64).log()) for p in (policy, reference))
    one = torch.ones(1, 1, dtype=float64)
    assert fused_kl(one, policy, one, reference).item() == pytest.approx(0.1438, abs=5e-5)
    assert fused_kl(one, reference, one, policy).item() == pytest.approx(0.1308, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_least_float32_exactly_0_for_equal_policies_and_never_far_below(dtype):
    hidden, head, *reference = heads(tokens=300, dtype=dtype)
    found = fused_kl(hidden, head, *reference)
    assert found.dtype == torch.float32
    definition = kl_exact(
        logits_of(hidden.double(), OutputHead(head.weight.double(), head.bias.double()), 1.0),
        logits_of(reference[0].double(), OutputHead(reference[1].weight.double()), 1.0),
    )
    assert torch.allclose(found.double(), definition, rtol=1e-5, atol=1e-5)
    same = fused_kl(hidden, head, hidden, head)
    assert (same == 0).all()
    gradients = torch.autograd.grad(same.sum(), (hidden, head.weight))
    assert all(gradient.dtype == dtype and gradient.abs().max() < 1e-4 for gradient in gradients)


def test_large_logits_and_no_tokens():
    hidden, head, *reference = heads()
    huge = OutputHead(head.weight * 1e4, head.bias)
    assert fused_kl(hidden, huge, *reference).isfinite().all()
    none = fused_kl(hidden[:0], head, reference[0][:0], reference[1])
    (gradient,) = torch.autograd.grad(none.sum(), head.weight)
    assert none.shape == (0,) and (gradient == 0).all()


@pytest.mark.parametrize("forbidden_by", ["policy", "both"])
def test_forbidden_tokens_have_no_part_in_it(forbidden_by, monkeypatch):
    """A bias of minus infinity, in whole tiles and in parts of one, is as if the vocabulary had not had the tokens."""
    monkeypatch.setattr(lmrl.recipes, "tile_shape", lambda vocabulary: (3, 4))
    hidden, head, ref_hidden, ref_head = heads()
    forbidden = torch.zeros(V, dtype=float64).index_fill(0, torch.tensor([0, 1, 2, 3, 6]), -math.inf)
    allowed = forbidden == 0
    shut = OutputHead(head.weight, head.bias + forbidden)
    open_head = OutputHead(head.weight[allowed], head.bias[allowed])
    if forbidden_by == "both":
        found = fused_kl(hidden, shut, ref_hidden, OutputHead(ref_head.weight, forbidden))
        expected = fused_kl(hidden, open_head, ref_hidden, OutputHead(ref_head.weight[allowed]))
    else:
        found = fused_kl(hidden, shut, ref_hidden, ref_head)
        logits = logits_of(hidden, shut, 1.0), logits_of(ref_hidden, ref_head, 1.0)
        logp, ref_logp = (x.log_softmax(-1)[:, allowed] for x in logits)
        expected = (logp.exp() * (logp - ref_logp)).sum(1)
    gradients = [torch.autograd.grad(x.sum(), (hidden, head.weight), retain_graph=True) for x in (found, expected)]
    assert torch.allclose(found, expected)
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))


def test_the_reference_gets_no_gradient_and_a_frozen_head_none():
    hidden, head, ref_hidden, ref_head = heads()
    weight = ref_head.weight.requires_grad_()
    frozen = OutputHead(head.weight.detach(), head.bias.detach())
    fused_kl(hidden, frozen, ref_hidden.requires_grad_(), OutputHead(weight)).sum().backward()
    assert hidden.grad.norm() > 0.1 and weight.grad is None and ref_hidden.grad is None and head.weight.grad is None


def test_two_vocabularies_are_refused():
    hidden, head, ref_hidden, ref_head = heads()
    with pytest.raises(ValueError, match=f"11 tokens over a vocabulary of {V}, the reference 11 over {V - 1}"):
        fused_kl(hidden, head, ref_hidden, OutputHead(ref_head.weight[1:]))
    with pytest.raises(ValueError, match="the reference 10 over"):
        fused_kl(hidden, head, ref_hidden[1:], ref_head)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_completion_kl_is_that_of_the_materialised_logits(name, temperature, batch):  # noqa: F811
    model, reference = moved(name)
    texts, mask = batch[:3], batch[3]
    logits, ref_logits = (completion_logits(m, *texts, temperature) for m in (model, reference))
    expected = torch.where(mask, kl_exact(logits, ref_logits.detach()), 0.0)
    found = completion_kl(model, reference, *batch, temperature)
    assert expected[mask].mean() > 1e-3 and torch.allclose(found, expected, rtol=0, atol=1e-10)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(x.sin().sum(), parameters, allow_unused=True) for x in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).norm() <= 1e-9 * (1 + b.norm())
    assert all(p.grad is None for p in reference.parameters())


def test_the_loss_with_the_kl_is_the_sum_of_its_parts(batch):  # noqa: F811
    model, reference = moved("qwen3 tied")
    weights = torch.linspace(0.1, 1, 15, dtype=float64).view(3, 5)
    slopes = torch.linspace(-1, 1, int(batch[3].sum()), dtype=float64)

    def token_loss(logprobs, entropy, rows):
        return (slopes[rows] * (logprobs - 0.1 * entropy)).sum()

    alone = completion_loss(model, *batch, token_loss, 0.6)
    expected = alone[0] + (weights * completion_kl(model, reference, *batch, 0.6)).sum()
    found, logprobs, entropies, kl = completion_loss_with_kl(model, reference, *batch, token_loss, weights, 0.6)
    parameters = list(model.parameters())
    gradients = [torch.autograd.grad(loss, parameters) for loss in (found, expected)]
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    # one pass through the trunk or two: its norms are in float32, and so is what they round
    assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(*gradients, strict=True))
    assert torch.allclose(kl, completion_kl(model, reference, *batch, 0.6), rtol=0, atol=1e-12)
    for a, b in zip((logprobs, entropies), completion_logprobs(model, *batch, 0.6)):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert not (logprobs.requires_grad or entropies.requires_grad or kl.requires_grad)


# --- the KL in the reward ---------------------------------------------------------------------------------------------


def test_the_penalty_of_a_row_and_of_a_token():
    nan = math.nan
    rewards = torch.tensor([1.0, 0.5, nan])
    kl = torch.tensor([[0.2, -0.1, nan], [0.3, nan, nan], [0.1, 0.1, 0.1]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    found = penalised_rewards(rewards, kl, mask, 0.5)
    assert found[:2].tolist() == pytest.approx([0.95, 0.35]) and found[2].isnan() and not found.requires_grad
    token_rewards = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = penalised_token_rewards(token_rewards, kl, mask, 0.5)
    expected = torch.tensor([[-0.1, 1.05, 0.0], [0.35, 0.0, 0.0], [-0.05, -0.05, -0.05]])
    assert torch.allclose(found, expected) and not found.requires_grad
    assert torch.equal(penalised_rewards(rewards[:2], kl[:2], mask[:2], 0.0), rewards[:2])
