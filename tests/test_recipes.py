"""lmrl.recipes: the small functions of the five choices, the table of recipes, and what is refused."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmrl import recipes
from lmrl.baselines import group_advantages, leave_one_out_advantages
from lmrl.loss import LOSS_TYPES, policy_loss, token_weights
from lmrl.policy import length_mask
from lmrl.ppo import clipped, clipped_surrogate, importance_ratio
from lmrl.recipes import DEFAULTS, RECIPES, check_recipe, sequence_ratio
from lmrl.tree import TabularPolicy, enumerate_tree, exact_values, leaf_probabilities, score_matrix
from lmrl.trust_region import kl_k1, kl_k2, kl_k3
from lmrl.variance import group_moments, weighted_scores

float64 = torch.float64
CONFIGS = Path(__file__).parents[1] / "configs"


# --- the ratio --------------------------------------------------------------------------------------------------------


def check_pitfall_24_the_sequence_ratio_is_another_algorithm():
    """Token ratios 1.1, 0.9, 1.5: their mean clipped surrogate is 3.2 / 3, GSPO's ratio 1.485^(1/3), not 1.485."""
    logprobs = torch.tensor([[1.1, 0.9, 1.5, 7.0]], dtype=float64).log()
    counts = torch.tensor([[True, True, True, False]])
    ratio = recipes.sequence_ratio(logprobs, torch.zeros_like(logprobs), counts)
    assert ratio[0, :3].tolist() == [pytest.approx(1.485 ** (1 / 3), abs=1e-12)] * 3
    assert ratio[0, 3] == 1
    assert not clipped(ratio, torch.ones_like(ratio), 0.2).any()


def test_pitfall_24_sequence_ratio():
    check_pitfall_24_the_sequence_ratio_is_another_algorithm()


@pytest.mark.parametrize(
    "faulty",
    [
        importance_ratio,
        lambda p, old, counts: (p - old).sum(-1, keepdim=True).exp().expand_as(p),
        lambda p, old, counts: (p - old).mean(-1, keepdim=True).exp().expand_as(p),
        lambda p, old, counts: sequence_ratio(old, p, counts),
    ],
    ids=["one per token", "product", "mean over padding", "inverted"],
)
def test_a_faulty_sequence_ratio_turns_the_check_red(monkeypatch, faulty):
    monkeypatch.setattr(recipes, "sequence_ratio", faulty)
    with pytest.raises(AssertionError):
        check_pitfall_24_the_sequence_ratio_is_another_algorithm()


def test_the_gradient_at_a_token_is_the_ratio_times_that_of_its_log_prob():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 4, generator=generator, dtype=float64)
    logprobs = (old + 0.3 * torch.randn(3, 4, generator=generator, dtype=float64)).requires_grad_()
    counts = length_mask(torch.tensor([4, 2, 0]), 4)
    ratio = recipes.sequence_ratio(logprobs, old, counts)
    (slope,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert torch.allclose(slope, torch.where(counts, ratio.detach(), 0.0), rtol=0, atol=1e-12)
    plain = torch.where(counts, logprobs - old, 0.0).sum(1) / counts.sum(1).clamp(min=1)
    (whole,) = torch.autograd.grad((counts.sum(1) * plain.exp()).sum(), logprobs)
    assert torch.allclose(slope, whole, rtol=0, atol=1e-12)  # of n s, with s written as one number per row


def test_the_sequence_ratio_is_exactly_1_at_the_start_and_never_reads_what_does_not_count():
    logprobs = torch.tensor([[-0.3, -1.7, math.nan, math.inf]], requires_grad=True)
    counts = torch.tensor([[True, True, False, False]])
    ratio = recipes.sequence_ratio(logprobs, logprobs.detach(), counts)
    assert (ratio == 1).all() and ratio.dtype == torch.float32
    (slope,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert slope.tolist() == [[1, 1, 0, 0]]
    assert recipes.sequence_ratio(logprobs.bfloat16(), logprobs.bfloat16(), counts).dtype == torch.float32


# --- the surrogates ---------------------------------------------------------------------------------------------------


def slopes(surrogate, ratio, advantages, *epsilons):
    logprobs = torch.as_tensor(ratio, dtype=float64).log().requires_grad_()
    advantages = torch.as_tensor(advantages, dtype=float64)
    (slope,) = torch.autograd.grad(surrogate(logprobs.exp(), advantages, *epsilons).sum(), logprobs)
    return slope.tolist()


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    for A in (1.0, -2.0):
        expected = [A * r for r in (0.1, 1.0, 1.25, 1.28)]
        assert slopes(recipes.cispo_surrogate, [0.1, 1.0, 1.25, 3.0], [A] * 4, 0.2, 0.28) == pytest.approx(expected)
    assert slopes(recipes.cispo_surrogate, [3.0], [1.0]) == pytest.approx([1.2])


def test_cispo_is_finite_where_the_ratio_underflows():
    ratio = torch.tensor([0.0, 1e-44], requires_grad=True)
    (slope,) = torch.autograd.grad(recipes.cispo_surrogate(ratio, torch.ones(2)).sum(), ratio)
    assert slope.isfinite().all()


def test_unclipped_is_the_ratio_times_the_advantage():
    assert slopes(recipes.unclipped_surrogate, [0.1, 9.0], [1.0, -2.0]) == pytest.approx([0.1, -18.0])


def test_two_sided_holds_what_section_10_leaves_open():
    ratio, advantages = [0.5, 1.5, 1.5, 3.9, 4.1, 4.1], [-1.0, 1.0, -1.0, -1.0, -1.0, 1.0]
    two_sided = partial(recipes.two_sided_surrogate, delta=4.0)
    assert slopes(clipped_surrogate, ratio, advantages) == pytest.approx([0, 0, -1.5, -3.9, -4.1, 0])
    assert slopes(two_sided, ratio, advantages) == pytest.approx([0, 0, -1.5, -3.9, 0, 0])
    flags = recipes.clip_flags(
        torch.tensor(ratio), torch.tensor(advantages), SimpleNamespace(clip_type="ppo", epsilon=0.2, epsilon_high=None, delta=4.0)
    )  # fmt: skip
    assert flags.tolist() == [slope == 0 for slope in slopes(two_sided, ratio, advantages)]


def check_pitfall_23_the_metric_is_where_the_gradient_is_zero():
    """ε .2: (1.5, +1) and (.5, −1) are held, the other two are not."""
    ratio, advantages = torch.tensor([1.5, 1.5, 0.5, 0.5]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    c = SimpleNamespace(clip_type="ppo", epsilon=0.2, epsilon_high=None, delta=None)
    flags = recipes.clip_flags(ratio, advantages, c)
    assert flags.tolist() == [True, False, False, True] and flags.float().mean() == 0.5
    assert (torch.tensor(slopes(clipped_surrogate, ratio, advantages)) == 0).tolist() == flags.tolist()


def test_pitfall_23_clip_metric():
    check_pitfall_23_the_metric_is_where_the_gradient_is_zero()


def test_a_metric_that_ignores_the_sign_turns_the_check_red(monkeypatch):
    monkeypatch.setattr(recipes, "clipped", lambda ratio, A, low, high: (ratio - 1).abs() > low)
    with pytest.raises(AssertionError):
        check_pitfall_23_the_metric_is_where_the_gradient_is_zero()


def test_the_clip_metric_of_the_other_clips():
    ratio, advantages = torch.tensor([0.1, 1.25, 1.3]), torch.tensor([-1.0, 1.0, -1.0])
    c = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": None}
    assert recipes.clip_flags(ratio, advantages, SimpleNamespace(clip_type="cispo", **c)).tolist() == [
        False,
        False,
        True,
    ]
    assert recipes.clip_flags(ratio, advantages, SimpleNamespace(clip_type="none", **c)).tolist() == [False] * 3


# --- advantages -------------------------------------------------------------------------------------------------------

REWARDS = torch.tensor([1.0, 5.0, 3.0, 5.0])
GROUP = torch.tensor([7, 2, 7, 2])  # pitfall 10: prompts a, b, a, b


@pytest.mark.parametrize(
    "names, expected",
    [
        (("none", "none"), [1, 5, 3, 5]),
        (("group", "none"), [-1, 0, 1, 0]),
        (("group", "group"), [-1, 0, 1, 0]),
        (("leave_one_out", "none"), [-2, 0, 2, 0]),
        (("batch", "none"), [-2.5, 1.5, -0.5, 1.5]),
        (("batch", "batch"), [x / 2.75**0.5 for x in (-2.5, 1.5, -0.5, 1.5)]),
        (("group", "batch"), [x / 2.75**0.5 for x in (-1, 0, 1, 0)]),
        (("leave_one_out", "batch"), [x / 2.75**0.5 for x in (-2, 0, 2, 0)]),
    ],
)
def test_advantages_in_numbers(names, expected):
    assert recipes.row_advantages(REWARDS, GROUP, *names).tolist() == pytest.approx(expected)


def test_ungraded_rows_leave_baseline_and_divisor():
    rewards, graded = torch.tensor([1.0, 0.0, math.nan, math.nan]), torch.tensor([True, True, False, False])
    group = torch.zeros(4, dtype=torch.int64)
    for names, expected in (
        (("none", "none"), [1, 0, 0, 0]),
        (("batch", "batch"), [1, -1, 0, 0]),
        (("group", "batch"), [1, -1, 0, 0]),
        (("leave_one_out", "none"), [1, -1, 0, 0]),
    ):
        assert recipes.row_advantages(rewards, group, *names, graded).tolist() == pytest.approx(expected)
    nobody = torch.zeros(4, dtype=torch.bool)
    assert recipes.row_advantages(rewards, group, "batch", "batch", nobody).tolist() == [0] * 4


@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(reward, size):
    rewards, group = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    for names in (("group", "group"), ("group", "batch"), ("leave_one_out", "batch"), ("batch", "batch")):
        assert (recipes.row_advantages(rewards, group, *names) == 0).all()


@pytest.mark.parametrize("names", [("mean", "none"), ("batch", "group"), ("gae", "none"), ("group", "std")])
def test_unknown_advantages_are_named(names):
    with pytest.raises(ValueError, match=f"advantage_estimator is '{names[0]}' and scale_rewards '{names[1]}'; choose"):
        recipes.row_advantages(REWARDS, GROUP, *names)


@pytest.mark.parametrize("estimator", ["group", "leave_one_out"])
def test_a_group_of_one_is_an_error(estimator):
    with pytest.raises(ValueError):
        recipes.row_advantages(REWARDS, torch.arange(4), estimator, "none")


def test_soft_overlong_punishment():
    """DAPO: cap 20480, buffer 4096."""
    lengths = torch.tensor([1, 16384, 18432, 20480, 20481])
    assert recipes.soft_overlong_punishment(lengths, 20480, 4096).tolist() == [0, 0, -0.5, -1, -1]
    for buffer in (0, 7):
        with pytest.raises(ValueError, match=f"buffer is {buffer} and cap 6"):
            recipes.soft_overlong_punishment(lengths, 6, buffer)


# --- tokens of high entropy -------------------------------------------------------------------------------------------

ENTROPIES = torch.tensor([[0.9, 0.1, 0.5, 0.1], [0.5, 0.7, 9.9, math.nan]])
TWO_ROWS = torch.tensor([[True, True, True, True], [True, True, False, False]])


@pytest.mark.parametrize(
    "quantile, kept",
    [
        (1e-6, [[1, 0, 0, 0], [0, 0, 0, 0]]),  # never none
        (1 / 3, [[1, 0, 0, 0], [0, 1, 0, 0]]),
        (0.5, [[1, 0, 1, 0], [1, 1, 0, 0]]),  # the third and the fourth tie
        (5 / 6, [[1, 1, 1, 1], [1, 1, 0, 0]]),
        (1.0, [[1, 1, 1, 1], [1, 1, 0, 0]]),
    ],
)
def test_top_entropy_by_hand(quantile, kept):
    assert recipes.top_entropy(ENTROPIES, TWO_ROWS, quantile).int().tolist() == kept


@given(
    st.integers(1, 60).flatmap(lambda n: st.lists(st.integers(0, 9), min_size=n, max_size=n)),
    st.integers(1, 100),
    st.randoms(use_true_random=False),
)
def test_top_entropy_is_a_threshold_that_splits_no_tie_and_looks_at_no_order(values, percent, random):
    values = torch.tensor(values, dtype=torch.float32)[None]
    everything = torch.ones_like(values, dtype=torch.bool)
    kept = recipes.top_entropy(values, everything, percent / 100)
    needed = -(-len(values[0]) * percent // 100)  # the ceiling, in integers
    assert kept.sum() >= needed
    assert kept.all() or values[kept].min() > values[~kept].max()
    assert (values > values[kept].min()).sum() < needed  # without the tokens that tie it would be too few
    order = torch.tensor(random.sample(range(len(values[0])), len(values[0])))
    assert torch.equal(recipes.top_entropy(values[:, order], everything, percent / 100), kept[:, order])


def test_top_entropy_without_tokens_and_without_sense():
    assert not recipes.top_entropy(ENTROPIES, torch.zeros_like(TWO_ROWS), 0.5).any()
    assert torch.equal(recipes.top_entropy(torch.zeros(2, 4), TWO_ROWS, 0.2), TWO_ROWS)  # all alike
    for quantile in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=f"quantile is {quantile}"):
            recipes.top_entropy(ENTROPIES, TWO_ROWS, quantile)


def test_entropy_slope_of_a_token_that_cannot_be_written():
    logits = torch.tensor([1.0, 0.5, -math.inf], dtype=float64)
    advantages = torch.tensor([0.3, -0.5, 100.0], dtype=float64)
    for natural in (False, True):
        slope = recipes.entropy_slope(logits.log_softmax(-1), advantages, natural)
        expected = recipes.entropy_slope(logits[:2].log_softmax(-1), advantages[:2], natural)
        assert slope.item() == pytest.approx(expected.item(), abs=1e-12)


# --- recipes ----------------------------------------------------------------------------------------------------------


def test_the_names_and_where_each_departs_from_the_defaults():
    names = "reinforce rloo reinforce_pp ppo grpo dr_grpo dapo bnpo gspo cispo vineppo"
    assert list(RECIPES) == names.split()
    for recipe in RECIPES.values():
        check_recipe(recipe.choices)
        assert recipe.paper and recipe.settings
        assert all(DEFAULTS[name] != value for name, value in recipe.settings.items())


@pytest.mark.parametrize("name", RECIPES)
def test_the_config_of_a_recipe_is_its_row(name):
    text = (CONFIGS / f"{name}.yaml").read_text()
    settings = yaml.safe_load(text)
    assert {key: value for key, value in settings.items() if key in DEFAULTS} == RECIPES[name].settings
    assert RECIPES[name].paper in text


def test_every_config_is_a_recipe():
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(RECIPES)


def test_recipes_differ_where_their_papers_do():
    c = {name: recipe.choices for name, recipe in RECIPES.items()}
    assert {name for name in c if c[name].advantage_estimator == "gae"} == {"ppo"}
    assert {name for name in c if c[name].importance_sampling_level == "sequence"} == {"gspo"}
    assert {name for name in c if c[name].loss_type == "grpo"} == {"grpo", "gspo"}
    assert {name for name in c if c[name].beta and c[name].kl_in == "reward"} == {"rloo", "reinforce_pp", "ppo"}
    assert {name for name in c if c[name].dynamic_sampling} == {"dapo"}
    assert len({str(recipe.settings) for recipe in RECIPES.values()}) == len(RECIPES)


def test_names_become_the_functions_of_policy_loss():
    tables = {
        ("importance_sampling_level", "sequence"): ("ratio", recipes.sequence_ratio),
        ("clip_type", "cispo"): ("surrogate", recipes.cispo_surrogate),
        ("clip_type", "none"): ("surrogate", recipes.unclipped_surrogate),
        ("kl_estimator", "k1"): ("kl", kl_k1),
        ("kl_estimator", "k2"): ("kl", kl_k2),
    }
    plain = {"ratio": importance_ratio, "surrogate": clipped_surrogate, "kl": kl_k3}
    assert recipes.loss_functions(SimpleNamespace(**DEFAULTS)) == plain
    for (setting, value), (argument, function) in tables.items():
        assert recipes.loss_functions(SimpleNamespace(**DEFAULTS | {setting: value})) == plain | {argument: function}
    assert set(recipes.loss_functions(SimpleNamespace(**DEFAULTS | {"kl_estimator": "exact"}))) == {
        "ratio",
        "surrogate",
    }
    two_sided = recipes.loss_functions(SimpleNamespace(**DEFAULTS | {"delta": 4.0}))["surrogate"]
    assert slopes(two_sided, [5.0], [-1.0]) == [0]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_loss_with_a_gradient(name):
    choices, mask = RECIPES[name].choices, length_mask(torch.tensor([2, 3]), 3)
    logprobs = torch.full((2, 3), -0.7, requires_grad=True)
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    weights = token_weights(mask, choices.loss_type, 4)
    functions = recipes.loss_functions(choices)
    loss = policy_loss(logprobs, logprobs.detach(), advantages, weights, epsilon=choices.epsilon, **functions)
    (slope,) = torch.autograd.grad(loss, logprobs)
    assert torch.allclose(slope, -weights * advantages)


def test_the_choices_of_the_loss_type_are_section_11s():
    assert set(recipes.VALUES["loss_type"]) == {*LOSS_TYPES, "bnpo"}


# --- what is refused --------------------------------------------------------------------------------------------------

GAE = {"advantage_estimator": "gae", "scale_rewards": "none"}
ENDINGS = {"advantage_estimator": "monte_carlo", "scale_rewards": "none"}
REFUSED = [
    ({"advantage_estimator": "mean"}, "advantage_estimator is 'mean'; choose one of group"),
    ({"importance_sampling_level": "word"}, "importance_sampling_level is 'word'"),
    ({"clip_type": "hard"}, "clip_type is 'hard'"),
    ({"loss_type": "sum"}, "loss_type is 'sum'"),
    ({"kl_estimator": "k4"}, "kl_estimator is 'k4'"),
    ({"kl_in": "both"}, "kl_in is 'both'; choose one of loss, reward"),
    ({"vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode is 'token'"),
    ({"epsilon": 1.5}, "epsilon is 1.5"),
    ({"num_generations": 1}, "num_generations is 1; a group baseline"),
    ({"advantage_estimator": "batch"}, 'scale_rewards "group" belongs to advantage_estimator "group"'),
    ({"advantage_estimator": "none", "scale_rewards": "batch"}, 'scale_rewards is "batch" but advantage_estimator "none"'),
    ({"advantage_estimator": "none"}, 'scale_rewards is "group" but advantage_estimator "none".*set scale_rewards to "none"'),
    ({**GAE, "dynamic_sampling": True}, "dynamic_sampling leaves out groups"),
    ({"gamma": 0.9}, "gamma is 0.9, but only"),
    ({**GAE, "vf_coef": 0.0}, "vf_coef is 0.0; .* needs a critic"),
    ({"advantage_estimator": "monte_carlo", "scale_rewards": "none", "num_value_samples": 0}, "num_value_samples is 0"),
    ({"delta": 4.0, "clip_type": "cispo"}, "delta is 4.0 but clip_type"),
    ({"delta": 1.2}, "delta is 1.2; .* greater than 1.2"),
    ({"clip_type": "none", "epsilon_high": 0.28}, "epsilon_high is 0.28 but"),
    ({"beta": 0.1, "kl_in": "reward"}, 'kl_estimator "k3" in the reward'),
    ({"beta": 0.1, "kl_in": "reward", "kl_estimator": "exact"}, 'kl_estimator "exact" in the reward'),
    ({"beta": 0.1, "kl_estimator": "k1"}, 'kl_estimator "k1" in the loss has an expected gradient of zero'),
    ({"beta": 0.1, "kl_in": "reward", "kl_estimator": "k1", "advantage_estimator": "monte_carlo",
      "scale_rewards": "none"}, 'kl_in "reward" does not reach'),
    ({"beta": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, 'kl_in "reward" with scale_rewards "group" blows the KL up'),
    ({**ENDINGS, "overlong_buffer": 2}, "overlong_buffer does not reach the fresh endings"),
    ({**ENDINGS, "top_p": 0.9, "vllm_importance_sampling_correction": True}, "top_p 0.9, .*the fresh endings"),
    ({"top_p": 0.9}, "top_k 0, top_p 0.9, min_p 0.0: with its tail cut off"),
    ({"top_k": 5}, "with its tail cut off"),
    ({"min_p": 0.1}, "with its tail cut off"),
    ({"overlong_buffer": 5}, "overlong_buffer is 5; take 0 .* 4"),
    ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0"),
]  # fmt: skip


@pytest.mark.parametrize("settings, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        check_recipe(SimpleNamespace(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"advantage_estimator": "none", "scale_rewards": "none", "num_generations": 1},
        {**GAE, "num_generations": 1, "gamma": 0.9},
        {"top_p": 0.9, "vllm_importance_sampling_correction": True},
        {"kl_in": "reward"},  # beta is 0: there is no KL to misplace
        {"beta": 0.1, "kl_estimator": "exact"},
        {"beta": 0.1, "kl_in": "reward", "kl_estimator": "k1", "scale_rewards": "batch"},
        {**GAE, "overlong_buffer": 2},
        {"importance_sampling_level": "sequence", "clip_type": "cispo"},
    ],
)
def test_not_refused(settings):
    check_recipe(SimpleNamespace(**settings))


# --- the exact rows ---------------------------------------------------------------------------------------------------


def test_a_divisor_of_the_batch_has_no_exact_row_but_with_its_mean():
    """The rows of all possible steps are listed together, so their standard deviation is not that of one batch."""
    _, _, _, prompts = one_prompt(0, [0.2, 1.0, 0.5])
    for estimator in ("group", "leave_one_out", "gae"):
        choices = SimpleNamespace(**DEFAULTS | {"advantage_estimator": estimator, "scale_rewards": "batch"})
        with pytest.raises(ValueError, match=f'no exact row with "{estimator}"'):
            recipes.recipe_moments(prompts, choices, 2)


def test_exchangeable_groups_count_every_order_once():
    groups, orders = recipes.exchangeable_groups(3, 4)
    assert len(groups) == 15 and orders.sum() == 3**4
    assert orders[(groups == torch.tensor([0, 0, 1, 2])).all(1)].item() == 12


def one_prompt(seed, rewards):
    policy = TabularPolicy(2, 2, seed=seed)
    tree = enumerate_tree(policy, 2, eos_id=0)
    rewards = torch.tensor(rewards, dtype=float64)
    return policy, tree, rewards, recipes.tabulate_prompts([tree], [policy.logits], [rewards])


@pytest.mark.parametrize("seed, size", [(0, 2), (1, 3), (2, 4)])
@pytest.mark.parametrize("name", ["reinforce", "rloo", "dr_grpo"])
def test_rows_agree_with_section_5s_sum_over_all_groups(name, seed, size):
    policy, tree, rewards, prompts = one_prompt(seed, [0.2, 1.0, 0.5])
    weigh = {
        "reinforce": lambda R, group: R,
        "rloo": leave_one_out_advantages,
        "dr_grpo": partial(group_advantages, scale="none"),
    }[name]
    estimator = weighted_scores(score_matrix(tree, [policy.logits]) / 2, rewards, weigh)  # L = 2
    expected = group_moments(tree, estimator, prompts.gradient, size)
    found = recipes.recipe_moments(prompts, RECIPES[name].choices, size)
    assert torch.allclose(found.mean, expected.mean, rtol=0, atol=1e-7)
    assert found.variance == pytest.approx(expected.variance, abs=1e-7)


def test_the_noise_of_monte_carlo_values_by_sampling_them():
    """20,000 steps of one completion with K = 3 fresh endings per state, drawn from the tree, against the exact variance."""
    policy, tree, rewards, prompts = one_prompt(3, [0.2, 1.0, 0.5])
    choices = SimpleNamespace(
        **DEFAULTS | RECIPES["vineppo"].settings | {"num_value_samples": 3, "loss_type": "dr_grpo"}
    )
    found = recipes.recipe_moments(prompts, choices, 1)
    generator, draws = torch.Generator().manual_seed(0), 20_000
    p = leaf_probabilities(tree).detach()
    leaves = torch.multinomial(p, draws, True, generator=generator)
    estimates = torch.zeros(len(tree.log_policy), draws, dtype=float64)
    for state in range(len(tree.log_policy)):
        behind = torch.where(((tree.states == state) & tree.mask).any(1), p, 0.0)
        fresh = torch.multinomial(behind, 3 * draws, True, generator=generator).view(3, draws)
        estimates[state] = rewards[fresh].mean(0)
    values = torch.where(tree.mask[leaves], estimates[tree.states[leaves], torch.arange(draws)[:, None]], 0.0)
    following = torch.stack([torch.where(tree.mask[leaves, 1], values[:, 1], rewards[leaves]), rewards[leaves]], 1)
    advantages = torch.where(tree.mask[leaves], following - values, 0.0)
    updates = (advantages[..., None] * prompts.scores[leaves]).sum(1) / 2
    squares = (updates - found.mean).square().sum(1)
    assert (updates.mean(0) - found.mean).norm() < 4 * (found.variance / draws) ** 0.5
    assert abs(squares.mean() - found.variance) < 4 * squares.std() / draws**0.5
    assert (
        found.variance
        > 1.02
        * recipes.recipe_moments(prompts, SimpleNamespace(**vars(choices) | {"num_value_samples": 30}), 1).variance
    )


def test_a_critic_that_is_off_biases_only_below_lambda_1():
    _, _, _, prompts = one_prompt(0, [0.2, 1.0, 0.5])
    off = 0.3 * torch.randn(prompts.mask.shape, generator=torch.Generator().manual_seed(0), dtype=float64)
    off[1:, 0] = off[0, 0]  # the first state is one state
    off[2, 1] = off[1, 1]
    ppo = RECIPES["ppo"].settings | {"loss_type": "dr_grpo"}
    for lam, biased in ((1.0, False), (0.95, True)):
        choices = SimpleNamespace(**DEFAULTS | ppo | {"lam": lam})
        mean = recipes.recipe_moments(prompts, choices, 2, off).mean
        assert ((mean - prompts.gradient / 2).norm() > 1e-5) == biased
    perfect = recipes.recipe_moments(prompts, SimpleNamespace(**DEFAULTS | ppo), 2)
    assert torch.allclose(perfect.mean, prompts.gradient / 2, rtol=0, atol=1e-7)


def test_dynamic_sampling_draws_no_tied_group():
    _, tree, _, prompts = one_prompt(0, [0.0, 1.0, 0.0])
    rows, chances = recipes.possible_steps(prompts, 2, dynamic_sampling=True)
    drawn = prompts.rewards[0][rows]
    assert chances.sum().item() == pytest.approx(1) and (chances[drawn[:, 0] == drawn[:, 1]] == 0).all()
    plain = recipes.possible_steps(prompts, 2)[1]
    assert plain.sum().item() == pytest.approx(1) and plain.min() > 0


def test_the_tables_of_a_prompt_are_the_trees():
    policy, tree, rewards, prompts = one_prompt(1, [0.2, 1.0, 0.5])
    assert torch.equal(prompts.values[tree.mask], exact_values(tree, rewards).v[tree.states][tree.mask])
    assert (prompts.spread[tree.mask] > 0).all()
    whole = torch.where(tree.mask[..., None], prompts.scores, 0.0).sum(1)
    assert torch.allclose(whole, score_matrix(tree, [policy.logits]), rtol=0, atol=1e-12)


def test_the_table_of_recipes_names_each_once():
    lines = recipes.recipe_table().splitlines()
    assert len(lines) == 2 + len(RECIPES) and len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {name}" for name in RECIPES]
    by_name = dict(zip(RECIPES, lines[2:]))
    assert "tied groups" in by_name["dapo"] and "0.04 k3, loss" in by_name["grpo"] and "weight ≤ 5" in by_name["cispo"]
