import asyncio
import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmrl.baselines import group_advantages
from lmrl.policy import addition_reward
from lmrl.rewards import (
    RewardError,
    WeightedRewards,
    exact_match,
    extract_number,
    format_match,
    load_reward,
    number_match,
    score_completions,
)

PROMPTS, TEXTS = ["1+2=", "1+2=", "2+2="], ["3", "4", "4"]
COLUMNS = {"answer": ["3", "3", "4"]}


def score(reward, columns=COLUMNS):
    return score_completions(reward, PROMPTS, TEXTS, columns)


def returns(*scores):
    return lambda **_: list(scores)


def message(reward, columns=COLUMNS):
    with pytest.raises(RewardError) as caught:
        score(reward, columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- what is right


def test_rewards_are_float32_and_all_graded():
    rewards, graded = score(addition_reward)
    assert rewards.tolist() == [1.0, 0.0, 1.0] and rewards.dtype == torch.float32
    assert graded.tolist() == [True, True, True] and graded.dtype == torch.bool


def test_the_function_is_called_by_keyword_with_every_column():
    calls = []

    def reward(completions, prompts, **columns):
        calls.append((prompts, completions, columns))
        return [0.0] * 3

    score(reward, {"answer": ["3", "3", "4"], "level": [1, 1, 2]})
    assert calls == [(PROMPTS, TEXTS, {"answer": ["3", "3", "4"], "level": [1, 1, 2]})]


def test_none_is_nan_and_not_graded():
    rewards, graded = score(returns(1.0, None, 0.0))
    assert graded.tolist() == [True, False, True]
    assert rewards[graded].tolist() == [1.0, 0.0] and rewards[~graded].isnan().all()


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((True, False, True), [1.0, 0.0, 1.0]),
        ((np.bool_(True), np.float32(0.5), np.int64(-2)), [1.0, 0.5, -2.0]),
        ((2, -1, 0), [2.0, -1.0, 0.0]),
    ],
)
def test_other_numbers_become_floats(scores, expected):
    assert score(returns(*scores))[0].tolist() == expected


def test_no_completions():
    rewards, graded = score_completions(lambda **_: [], [], [], {})
    assert rewards.shape == graded.shape == (0,) and graded.dtype == torch.bool and rewards.dtype == torch.float32


def test_two_functions_of_one_name_have_a_metric_each():
    def same(number):
        def score(prompts, completions, **columns):
            return [number] * len(prompts)

        return score

    both = WeightedRewards([same(1.0), exact_match, same(3.0)])
    both(["1+2="], ["3"], answer=["3"])
    assert both.metrics == {"reward/score-1": 1.0, "reward/exact_match": 1.0, "reward/score-3": 3.0}


def test_a_weight_that_is_no_number_is_not_a_weight():
    with pytest.raises(ValueError, match="reward is '1.2.3.exact_match'; name a function in a file"):
        load_reward("1.2.3*exact_match")


def test_a_function_that_switches_gradients_off_does_so_for_itself():
    def frozen(prompts, completions, **columns):
        torch.set_grad_enabled(False)
        return [0.0] * len(prompts)

    try:
        score_completions(frozen, ["1+2="], ["3"], {})
        assert torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)


def test_a_function_that_changes_the_folder_does_so_for_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(Path.cwd())

    def moves(prompts, completions, **columns):
        os.chdir(tmp_path)
        return [0.0] * len(prompts)

    before = Path.cwd()
    score_completions(moves, ["1+2="], ["3"], {})
    assert Path.cwd() == before


def test_a_cancelled_task_is_the_functions_fault():
    async def cancelled():
        raise asyncio.CancelledError

    def score(prompts, completions, **columns):
        return asyncio.run(cancelled())

    with pytest.raises(RewardError, match="reward function score raised CancelledError"):
        score_completions(score, ["1+2="], ["3"], {})


@pytest.mark.parametrize("metrics", [None, [1], {1: 2.0}])
def test_metrics_that_are_none_are_refused_in_a_sum_as_alone(metrics):
    def score(prompts, completions, **columns):
        return [0.0] * len(prompts)

    score.metrics = metrics
    with pytest.raises(RewardError, match="reward function score: its metrics are .*not numbers by their names"):
        score_completions(WeightedRewards([exact_match, score]), ["1+2="], ["3"], {"answer": ["3"]})


def test_without_an_answer_there_is_no_grade():
    for match in (exact_match, number_match):
        assert match(["1+2="] * 3, ["None", "3", "4"], answer=[None, "3", 3]) == [None, 1.0, 0.0]


def test_what_a_function_does_to_its_arguments_stays_with_it():
    def careless(prompts, completions, answer, **columns):
        for turns, text in zip(prompts, completions):
            turns.append({"role": "assistant", "content": text})
        completions[0] = answer[0] = "changed"
        return [0.0] * len(prompts)

    prompts, columns = [[{"role": "user", "content": "1+2="}]], {"answer": ["3"]}
    for rewards in ([careless, exact_match], [exact_match, careless]):
        assert WeightedRewards(rewards)(prompts, ["3"], **columns) == [1.0]
        assert len(prompts[0]) == 1 and columns == {"answer": ["3"]}


@given(st.lists(st.none() | st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_every_list_of_finite_numbers_and_nones_passes_unchanged(scores):
    rewards, graded = score_completions(lambda **_: scores, [""] * len(scores), [""] * len(scores), {})
    assert [value if known else None for value, known in zip(rewards.tolist(), graded.tolist())] == scores


def test_pitfall_11_none_leaves_the_baseline():
    rewards, graded = score_completions(returns(1.0, 0.0, None, None), ["p"] * 4, ["c"] * 4, {})
    group = torch.zeros(4, dtype=torch.int64)
    assert group_advantages(rewards, group, scale="none", graded=graded).tolist() == [0.5, -0.5, 0.0, 0.0]


# ------------------------------------------------------------------------------------------------------- what is wrong


def test_an_exception_is_named_with_its_place_and_chained():
    def broken(completions, **columns):
        return [1 / 0]

    with pytest.raises(RewardError) as caught:
        score(broken)
    assert "reward function broken raised ZeroDivisionError: division by zero (test_rewards.py, line " in str(
        caught.value
    )
    assert "for 3 completions" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_of_several_lines_becomes_one():
    def broken(**columns):
        raise RuntimeError("first\nsecond")

    assert "RuntimeError: first second (" in message(broken)


def test_a_function_that_exits_is_an_error_not_the_end_of_the_run():
    def leaves(**_):
        raise SystemExit(0)

    assert "leaves raised SystemExit: 0" in message(leaves)


def test_a_function_may_empty_the_list_that_it_gets():
    def careless(completions, **_):
        return [float(len(completions.pop())) for _ in range(len(completions))]

    assert score(careless)[0].tolist() == [1.0, 1.0, 1.0]
    assert TEXTS == ["3", "4", "4"]


def test_a_column_that_the_function_does_not_take():
    def narrow(prompts, completions):
        return [0.0] * 3

    text = message(narrow)
    assert "TypeError" in text and "'answer'" in text and "narrow(prompts=…, completions=…, answer=…)" in text


def test_ctrl_c_is_not_a_reward_error():
    def interrupted(**columns):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


@pytest.mark.parametrize("scores", [[], [1.0], [1.0] * 4])
def test_wrong_count_names_both_numbers(scores):
    assert f"returned {len(scores)} rewards for 3 completions" in message(returns(*scores))


@pytest.mark.parametrize(
    "result", [None, 1.0, (1.0, 0.0, 1.0), torch.ones(3), np.ones(3), iter([1.0] * 3), {0: 1.0, 1: 0.0, 2: 0.0}]
)
def test_not_a_list(result):
    assert f"returned {type(result).__name__}; return a list" in message(lambda **_: result)


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, 1e39, 10**400, np.float64("nan"), "1.0", [1.0], 1j, torch.tensor(1.0)]
)
def test_not_a_finite_number_names_value_and_completion(bad):
    text = message(returns(1.0, None, bad))
    assert f"returned {repr(bad)[:60]} for the completion '4'" in text and "or None" in text


def test_a_callable_object_is_named_by_its_class():
    class Judge:
        def __call__(self, **columns):
            return []

    assert "reward function Judge returned 0 rewards" in message(Judge())


# -------------------------------------------------------------------------------------------------- functions in a file


@pytest.fixture
def reward_file(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Weight:\n    value: float = 2.0\n\n"
        "LIMIT = 3\n\ndef length(completions, **columns):\n    return [Weight().value * len(c) for c in completions]\n"
    )
    return file


def test_load_reward(reward_file):
    assert score(load_reward(f"{reward_file}:length"))[0].tolist() == [2.0, 2.0, 2.0]


def test_an_edited_file_is_read_again(reward_file):
    load_reward(f"{reward_file}:length")
    reward_file.write_text("def length(completions, **columns):\n    return [7] * len(completions)  # longer\n")
    assert score(load_reward(f"{reward_file}:length"))[0].tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("number_match", [1.0, 0.0, 1.0]),
        (" exact_match ", [1.0, 0.0, 0.0]),
        ("format_match:[0-9]", [1.0, 1.0, 0.0]),
        ("number_match + 0.5*format_match:[0-9]", [1.5, 0.5, 1.0]),
        ("2*number_match", [2.0, 0.0, 2.0]),
        ("number_match + -1*exact_match", [0.0, 0.0, 1.0]),
        ("FILE + .5*number_match", [2.5, 2.0, 4.5]),
    ],
)
def test_rewards_by_name(reward_file, spec, expected):
    reward = load_reward(spec.replace("FILE", f"{reward_file}:length"))
    assert score_completions(reward, PROMPTS, ["3", "4", "=4"], COLUMNS)[0].tolist() == expected


def test_code_match_by_name():
    assert type(load_reward("code_match")).__name__ == "CodeMatch"


@pytest.mark.parametrize("spec", ["", "length", "my_rewards.py", "my_rewards:length", "my_rewards.py:", "a.py:b c"])
def test_reward_that_is_not_of_the_form(spec):
    with pytest.raises(ValueError, match="name a function in a file, as in rewards.py:my_reward"):
        load_reward(spec)


def test_reward_file_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*missing.py"):
        load_reward(f"{tmp_path}/missing.py:length")


@pytest.mark.parametrize("name", ["lenght", "LIMIT"])
def test_reward_file_without_the_function_lists_what_it_has(reward_file, name):
    with pytest.raises(ValueError, match=f"defines no function {name}; it has .*length"):
        load_reward(f"{reward_file}:{name}")


@pytest.mark.parametrize(
    "text", ["import not_installed_anywhere\n", "def length(:\n", "raise RuntimeError('no')\n", "exit(0)\n"]
)
def test_reward_file_that_raises(reward_file, text):
    reward_file.write_text(text)
    with pytest.raises(ValueError, match=r"reward file .*my_rewards.py raised \w+: ") as caught:
        load_reward(f"{reward_file}:length")
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------ several at once


def column(*scores):
    def reward(completions, **_):
        return list(scores)

    return reward


def test_pitfall_11_one_function_abstains_and_the_sum_is_that_of_the_others():
    reward = WeightedRewards([column(1.0, None, None), column(0.5, 0.5, None), column(0, 3, None)], [1.0, 0.2, -1.0])
    values, graded = score(reward)
    assert values[:2].tolist() == pytest.approx([1.1, -2.9]) and values[2].isnan()
    assert graded.tolist() == [True, True, False]


def test_weights_default_to_one_and_columns_reach_every_part():
    seen = []

    def other(prompts, completions, answer, level):
        seen.append((prompts, completions, answer, level))
        return [1.0] * 3

    columns = COLUMNS | {"level": [1, 2, 3]}
    assert score(WeightedRewards([addition_reward, other]), columns)[0].tolist() == [2.0, 1.0, 2.0]
    assert seen == [(PROMPTS, TEXTS, COLUMNS["answer"], [1, 2, 3])]


def test_metrics_are_the_means_of_what_each_part_graded():
    half, silent = column(1.0, None, 0.0), column(None, None, None)
    half.__name__, silent.__name__ = "half", "silent"
    half.metrics = {"timeouts": 3}
    reward = WeightedRewards([half, silent, addition_reward])
    score(reward)
    assert reward.metrics == {"reward/half": 0.5, "reward/addition_reward": pytest.approx(2 / 3), "timeouts": 3}
    assert reward.__name__ == "1*half + 1*silent + 1*addition_reward"


@given(
    st.lists(st.lists(st.none() | st.floats(-9, 9), min_size=3, max_size=3), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_the_sum_is_over_what_is_there_whatever_the_order(parts, random):
    weights = [random.uniform(-2, 2) for _ in parts]
    order = random.sample(range(len(parts)), len(parts))
    rewards = [column(*part) for part in parts]
    values, graded = score(WeightedRewards(rewards, weights))
    shuffled = WeightedRewards([rewards[i] for i in order], [weights[i] for i in order])
    torch.testing.assert_close(score(shuffled)[0], values, equal_nan=True)
    for row, known in enumerate(zip(*parts, strict=True)):
        assert graded[row] == any(value is not None for value in known)
        if graded[row]:
            terms = [w * v for w, v in zip(weights, known, strict=True) if v is not None]
            assert values[row].item() == pytest.approx(sum(terms), rel=1e-5, abs=1e-5)


def test_an_error_names_the_part_not_the_sum():
    def broken(**_):
        raise KeyError("level")

    assert message(WeightedRewards([addition_reward, broken])).startswith("reward function broken raised KeyError")
    assert "function reward returned 1 rewards for 3 completions" in message(WeightedRewards([column(1.0)]))


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_weights_that_do_not_fit(weights):
    with pytest.raises(ValueError, match="weights"):
        WeightedRewards([addition_reward, exact_match], weights)
    with pytest.raises(ValueError, match="0 reward functions"):
        WeightedRewards([])


# -------------------------------------------------------------------------------------------------- reading answers (13)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The total is 72 clips, altogether.", 72),
        ("#### 1,000", 1000),
        ("#### -3", -3),
        ("$80,000, so", 80000),
        ("- 1/2", Fraction(-1, 2)),
        ("72.0", 72),
        ("3.", 3),
        ("#### 42" + "x" * 500, 42),
        ("#### 42 " + "and 7 more. " * 50, 42),
        ("", None),
        (",", None),
        ("no number, at all - none.", None),
        ("#### none, though 3 was mentioned", 3),
        ("3 #### none", None),
        ("#### 1 #### 2", 2),
        ("-$80.50", Fraction(-161, 2)),
        ("$-80.50", Fraction(-161, 2)),
        ("\u22123", -3),
        ("10 - 3", 3),
        ("10-3", 3),
        ("(4) - 3", 3),
        ("between 3-5", 5),
        ("GPT-4", 4),
        ("x = -5", -5),
        ("x=-5", -5),
        ("5\n-3", -3),
        ("12,345,678.25", Fraction(4938271300, 400)),
        ("1,2", 2),
        ("1,0000", 0),
        (".5", Fraction(1, 2)),
        ("6e23", 6 * 10**23),
        ("1e-2", Fraction(1, 100)),
        ("1/0", None),
        ("2 and 1/0", 2),
        ("0.1", Fraction(1, 10)),
        ("€5", 5),
        ("50%", 50),
        ("1.2.3", 3),
        ("9" * 10_000, None),
        ("1e999999999", 999999999),
    ],
)
def test_pitfall_13_number_extraction(text, number):
    assert extract_number(text) == number


@given(st.text(alphabet="0123456789,.-/$#eE+ (x\n", max_size=60) | st.text(max_size=60))
def test_any_text_is_a_number_or_none(text):
    assert extract_number(text) is None or isinstance(extract_number(text), Fraction)


@given(st.integers(-(10**9), 10**9), st.sampled_from(["{}", "so it is {:,}.", "#### {:,} of 5 or -6", "${}", "= {}"]))
def test_a_written_number_is_read(number, form):
    assert extract_number(form.format(number)) == number


def test_a_long_text_of_marks_and_digits_is_read_quickly():
    assert extract_number("#### 1,111 " * 20_000) == 1111
    assert extract_number("1," * 20_000) == 1
    assert extract_number("-" * 20_000 + "7") == -7


def test_number_match_is_exact_and_says_when_it_cannot_grade():
    values, graded = score_completions(
        number_match, [""] * 4, ["-3", "3", "0.3333", "4"], {"answer": ["#### -3", -3, "1/3", "four"]}
    )
    assert values[:3].tolist() == [1.0, 0.0, 0.0] and graded.tolist() == [True, True, True, False]


def test_exact_match_ignores_white_space_around_only():
    assert exact_match([""] * 4, [" 46\n", "4 6", "046", "46"], answer=["46", "46", "46", 46]) == [1.0, 0.0, 0.0, 1.0]


def test_format_match_takes_the_whole_completion_and_line_breaks():
    reward = format_match("<a>.*</a>")
    assert score_completions(reward, [""] * 4, ["<a>\n1\n</a>", "<a></a>", " <a></a>", "<a></a>x"], {})[0].tolist() == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match=r"the format '\(' is not a regular expression"):
        format_match("(")
