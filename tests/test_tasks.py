import json
import random
import sys
import types
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmrl.models import stop_token_ids
from lmrl.policy import addition_problems, build_policy, build_tokenizer
from lmrl.rewards import CodeMatch, RewardError, WeightedRewards, exact_match, number_match, score_completions
from lmrl.tasks import (
    Example,
    Task,
    countdown_problem,
    countdown_reward,
    countdown_task,
    disjoint,
    drop_long_prompts,
    encode_prompt,
    encode_prompts,
    extract_answer,
    is_solution,
    jsonl_task,
    load_task,
    parse_settings,
    reasoning_gym_reward,
    require_columns,
    require_no_leak,
    rows_task,
    split_settings,
    wrong_columns,
)

TEXT = "".join(map(chr, range(32, 127))) + "\n"
needs_reasoning_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="pip install 'lmrl[tasks]'")


def grade(task: Task, completions, example):
    columns = {name: [value] * len(completions) for name, value in example.columns.items()}
    return score_completions(task.reward, [example.prompt] * len(completions), completions, columns)[0].tolist()


def prompts(examples):
    return [example.prompt for example in examples]


# ---------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_arithmetic_has_the_split_that_the_warm_start_was_trained_on(seed):
    task = load_task("arithmetic", seed=seed)
    train, heldout = addition_problems()
    assert prompts(task.train) == [problem.prompt for problem in train]
    assert prompts(task.heldout) == [problem.prompt for problem in heldout]


def test_arithmetic_reward():
    task = load_task("arithmetic")
    example = next(example for example in task.train if example.prompt == "12+34=")
    assert grade(task, ["46", "47", "46 "], example) == [1.0, 0.0, 0.0]
    assert task.stop == ()


# ------------------------------------------------------------------------------------------------------- names of tasks


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("arithmetics", "did you mean arithmetic"),
        ("arithmetic:easy", '"arithmetic", "countdown", "reasoning_gym:DATASET", "jsonl:FILE", "datasets:NAME"'),
        ("jsonl", "did you mean jsonl:FILE"),
        ("countdwon", "did you mean countdown"),
        ("reasoning_gym", '"reasoning_gym:DATASET"'),
        ("reasoning_gym:", '"reasoning_gym:DATASET"'),
        ("", '"reasoning_gym:DATASET"'),
    ],
)
def test_unknown_task(name, hint):
    with pytest.raises(ValueError, match="unknown task") as caught:
        load_task(name)
    assert hint in str(caught.value) and repr(name) in str(caught.value) and "\n" not in str(caught.value)


def test_arithmetic_has_no_settings():
    with pytest.raises(ValueError, match="no settings, but shots"):
        load_task("arithmetic", shots=2)


def test_settings_in_a_name():
    assert parse_settings("a=1, b=x,c=0.5,d=True,e=-2") == {"a": 1, "b": "x", "c": 0.5, "d": True, "e": -2}
    assert parse_settings("") == {}
    for wrong in ("a", "=1", "a=1,b", "a b=1"):
        with pytest.raises(ValueError, match="is not of the form name=value"):
            parse_settings(wrong)


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ImportError, match=r"pip install -c constraints.txt -e '.\[tasks\]'"):
        load_task("reasoning_gym:chain_sum")


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("reasoning_gym:chain_summ", "did you mean chain_sum"),
        ("chain_sum", "did you mean reasoning_gym:chain_sum"),
        ("reasoning_gym:chain_sum:max_term=2", "it takes allow_negation, max_digits, max_terms"),
        ("reasoning_gym:chain_sum:max_terms=0", "max_terms must be >= min_terms"),
        ("reasoning_gym:chain_sum:max_terms", "not of the form name=value"),
        (
            "reasoning_gym:chain_sum:min_terms=1,max_terms=1,max_digits=1,train_size=1,heldout_size=1",
            "too few different problems",
        ),
    ],
)
def test_wrong_reasoning_gym_name(name, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        load_task(name)
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------- reasoning-gym

CASES = ["chain_sum", "chain_sum:max_terms=2,max_digits=1", "gcd:shots=4", "letter_counting", "coin_flip:shots=2"]


@needs_reasoning_gym
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_prompt_is_on_both_sides_and_none_twice(name, seed):
    task = load_task(f"reasoning_gym:{name}", seed=seed, train_size=200, heldout_size=60)
    train, heldout = prompts(task.train), prompts(task.heldout)
    assert set(train).isdisjoint(heldout)
    assert len(set(train)) == len(train) > 0 and len(set(heldout)) == len(heldout) > 0
    assert len(heldout) <= (len(train) + len(heldout) + 2) / 3


@needs_reasoning_gym
def test_the_generator_shares_problems_between_neighbouring_seeds_but_our_sides_do_not():
    import reasoning_gym

    first, second = (reasoning_gym.create_dataset("chain_sum", seed=seed, size=50) for seed in (0, 1))
    assert len({item["question"] for item in first} & {item["question"] for item in second}) >= 49
    tasks = [load_task("reasoning_gym:chain_sum", seed=seed, train_size=50, heldout_size=50) for seed in (0, 1)]
    shared = set(prompts(tasks[0].train + tasks[0].heldout)) & set(prompts(tasks[1].train + tasks[1].heldout))
    assert len(shared) < 10
    assert len(tasks[0].train) > 45


@needs_reasoning_gym
def test_the_same_seed_gives_the_same_task():
    first, second = (load_task("reasoning_gym:gcd", seed=3, train_size=20, heldout_size=20, shots=1) for _ in range(2))
    assert first.train == second.train and first.heldout == second.heldout
    assert load_task("reasoning_gym:gcd", seed=4, train_size=20, heldout_size=20, shots=1).train != first.train


@needs_reasoning_gym
@pytest.mark.parametrize("name", CASES)
def test_the_right_answer_scores_one_in_each_form(name):
    task = load_task(f"reasoning_gym:{name}", train_size=20, heldout_size=20)
    for example in task.heldout[:5]:
        right = example.columns["answer"]
        texts = [right, f" {right} ", f"so <answer> {right}</answer> is it", f"<answer>{right}", "no idea", ""]
        assert grade(task, texts, example) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


@needs_reasoning_gym
def test_each_completion_is_scored_with_its_own_entry():
    task = load_task("reasoning_gym:chain_sum", train_size=20, heldout_size=20)
    rows = task.train[:6]
    columns = {name: [row.columns[name] for row in rows] for name in rows[0].columns}
    answers = columns["answer"]
    assert score_completions(task.reward, prompts(rows), answers, columns)[0].tolist() == [1.0] * 6
    assert max(score_completions(task.reward, prompts(rows), answers[1:] + answers[:1], columns)[0].tolist()) < 1.0


@needs_reasoning_gym
def test_shots_come_first_are_the_same_everywhere_and_are_trained_on_nowhere():
    task = load_task("reasoning_gym:chain_sum:max_terms=2,max_digits=1,shots=3")
    heads = {example.prompt.rpartition("Question: ")[0] for example in task.train + task.heldout}
    (head,) = heads
    assert head.count("Question: ") == head.count("Answer: ") == 3
    shown = [part.partition("\nAnswer:")[0] for part in head.split("Question: ")[1:]]
    assert not {example.columns["question"] for example in task.train + task.heldout} & set(shown)
    assert task.train[0].prompt.endswith("\nAnswer:") and task.stop == ("\n\n",)


@needs_reasoning_gym
def test_without_shots_the_prompt_asks_for_tags():
    task = load_task("reasoning_gym:gcd", train_size=20, heldout_size=20)
    example = task.train[0]
    assert example.prompt == f"{example.columns['question']}\n\nWrite the final answer between <answer> and </answer>."
    assert task.stop == ()


@needs_reasoning_gym
@pytest.mark.parametrize("text", ["[[1,", "1/0", "12 x y", "x" * 10_000, "é∑"])
def test_a_scorer_that_trips_over_an_answer_scores_zero(text):
    task = load_task("reasoning_gym:prime_factorization", train_size=20, heldout_size=20)
    example = task.train[0]
    assert grade(task, [text, example.columns["answer"]], example) == [0.0, 1.0]


def test_a_scorer_that_trips_over_its_own_answer_is_an_error():
    reward = reasoning_gym_reward(lambda answer, entry: entry["missing"])
    with pytest.raises(KeyError):
        reward(["q"], ["3"], question=["q"], answer=["3"])


def test_disjoint_keeps_every_question_once_and_holds_out_at_most_a_quarter():
    def entries(*questions):
        return [{"question": str(question)} for question in questions]

    train, heldout = disjoint(entries(*range(12), 3, 3), entries(3, 4, 4, 20, 21, 22, 23), entries(0, 20))
    assert list(heldout) == ["3", "4", "21"]  # 14 different questions are left without those shown
    assert list(train) == ["1", "2", "5", "6", "7", "8", "9", "10", "11"]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("42", "42"),
        ("  42 \n", "42"),
        ("I think <answer>42</answer>.", "42"),
        ("<answer>1</answer> no, <answer>\n2\n</answer>", "2"),
        ("in <answer> tags: <answer>3</answer>", "3"),
        ("cut off <answer>4", "4"),
        ("<answer></answer>", ""),
        ("", ""),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


# --------------------------------------------------------------------------------------------------------- countdown (28)


def solves(text, numbers=(2, 3, 4), target=10):
    reward = countdown_reward(prompts=[""], completions=[text], numbers=[list(numbers)], target=[target])
    assert reward in ([0.0], [1.0])
    return reward == [1.0]


@pytest.mark.parametrize("text", ["2*3+4", "4+2*3", " (3 * 2) + 4 ", "so <answer>2*3+4</answer>.", "((2)*(3))+((4))"])
def test_pitfall_28_solutions(text):
    assert solves(text)


@pytest.mark.parametrize(
    "text",
    [
        "5+5",
        "10",
        "2*3+4+0",
        "2*3+4+3-3",
        "2*3*4/4+4",
        "3*4-2+0",
        "3*4-2+1-1",
        "2*3",
        "23-4*3-1",
        "24-3",
        "2+3*4",
        "2**3+4-2",
        "+2*3+4",
        "-(-2*3)+4",
        "2*3+4=10",
        "2*3+04",
        "2*3+4.0",
        "2_*3+4",
        "0x2*3+4",
        "3//2*4+6",
        "2(3)+4",
        "2*3+4 if 1 else 0",
        "(2*3)+4,",
        "__import__('os').getpid()",
        "1/0",
        "2/(3-3)+4",
        "",
        None,
        " ",
        '{"answer": [',
        "[[1,",
        "(" * 100 + "2*3+4" + ")" * 100,
        "2*3" + " " * 10_000 + "+4",
        "1+" * 5_000 + "1",
        "9" * 10_000,
        "\u0662*3+4",
        "\x002*3+4",
    ],
)
def test_pitfall_28_cheats_and_odd_texts_score_zero(text):
    assert not solves(text)


def test_a_number_given_twice_must_be_used_twice():
    assert solves("5+5", (5, 5), 10) and not solves("5+5", (5, 5, 1), 10) and not solves("5*2", (5, 5), 10)


def test_values_are_exact_fractions():
    assert solves("8/(3-8/3)", (8, 3, 8, 3), 24) and solves("1/3*3", (1, 3, 3), 1) and not solves("7/2", (7, 2), 3)


@given(st.text(alphabet="0123456789+-*/() ", max_size=40) | st.text(max_size=200))
def test_any_text_is_scored(text):
    assert is_solution(text, [2, 3, 4], 10) in (True, False)


def test_pitfall_28_ten_thousand_items_of_the_largest_size_have_solutions():
    rng = random.Random(0)
    for number in range(10_000):
        entry = countdown_problem(rng, numbers=6, largest=100, highest=1000)
        assert 1 <= entry["target"] <= 1000 and len(entry["numbers"]) == 6
        assert solves(entry["answer"], entry["numbers"], entry["target"]), entry
    assert entry["question"].endswith("The answer is the expression alone.")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("settings", ["", ":numbers=2,largest=9", ":numbers=4,largest=50,highest=500,shots=3"])
def test_countdown_holds_out_other_problems_in_any_order_of_the_numbers(seed, settings):
    task = load_task(f"countdown{settings}", seed=seed)

    def keys(side):
        return [(*sorted(example.columns["numbers"]), example.columns["target"]) for example in side]

    train, heldout = keys(task.train), keys(task.heldout)
    assert set(train).isdisjoint(heldout) and len(set(train)) == len(train) and len(set(heldout)) == len(heldout)
    assert 0 < len(heldout) <= 256 and 3 * len(heldout) <= len(train) <= 1000
    for example in task.heldout[:20]:
        right = example.columns["answer"]
        assert grade(task, [right, f"<answer>{right}</answer>", f"{right}+1"], example) == [1.0, 1.0, 0.0]
    assert load_task(f"countdown{settings}", seed=seed) == task != load_task(f"countdown{settings}", seed=seed + 7)
    shots = 3 if "shots" in settings else 0
    assert task.train[0].prompt.count("Question: ") == (shots + 1 if shots else 0)
    assert task.stop == (("\n\n",) if shots else ())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("countdown:numbers=abc", "numbers is 'abc', of type str; expected int"),
        ("countdown:numbers=2.5", "numbers is 2.5, of type float; expected int"),
        ("countdown:shots=True", "shots is True, of type bool; expected int"),
        ("countdown:train_size=-5", "train_size is -5; it cannot be below 0"),
        ("jsonl:p.jsonl:heldout_fraction=abc", "heldout_fraction is 'abc', of type str; expected float"),
        ("jsonl:p.jsonl:heldout=1", "heldout is 1, of type int; expected str"),
        ("jsonl:p.jsonl:answer=[1]", "answer is .1., of type list; expected str"),
        ("reasoning_gym:chain_sum:seed=3", "takes the seed of the run: --seed 3"),
        ("reasoning_gym:chain_sum:shots=a", "shots is 'a', of type str; expected int"),
    ],
)
def test_a_setting_of_another_type_is_named_with_its_type(settings, words):
    with pytest.raises(ValueError, match=words):
        load_task(settings)


def test_countdown_with_settings_that_cannot_be():
    for settings in ("numbers=1", "largest=0", "largest=20,highest=10"):
        with pytest.raises(ValueError, match="take numbers of at least 2"):
            load_task(f"countdown:{settings}")
    with pytest.raises(ValueError, match="has no setting digits; it takes train_size, heldout_size, shots, numbers"):
        load_task("countdown:digits=2")
    with pytest.raises(ValueError, match="too few different problems"):
        countdown_task(train_size=1, heldout_size=1)


# ------------------------------------------------------------------------------------------------------- files of problems


def lines(count, start=0):
    return [
        json.dumps({"prompt": f"{n} + 1?", "answer": f"so #### {n + 1}", "level": n % 3}) for n in range(start, count)
    ]


@pytest.fixture
def write(tmp_path):
    def write(*text, name="problems.jsonl"):
        (tmp_path / name).write_bytes(b"\n".join(t if isinstance(t, bytes) else t.encode() for t in text))
        return str(tmp_path / name)

    return write


def test_a_jsonl_file_is_a_task(write):
    path = write(*lines(200), "", "  ")
    task = load_task(f"jsonl:{path}")
    assert len(task.train) + len(task.heldout) == 200 and 8 < len(task.heldout) < 35
    example = next(e for e in task.train if e.prompt == "7 + 1?")
    assert example.columns == {"answer": "so #### 8", "level": 1}
    assert task.reward is number_match and grade(task, ["It is 8.", "9", "8 or 9"], example) == [1.0, 0.0, 0.0]
    assert task.name == f"jsonl:{path}"


def test_the_split_is_the_prompts_own(write):
    task = load_task(f"jsonl:{write(*lines(200))}", seed=0)
    assert load_task(f"jsonl:{write(*reversed(lines(200)), name='b.jsonl')}", seed=1).heldout[::-1] == task.heldout
    grown = load_task(f"jsonl:{write(*lines(400), name='c.jsonl')}")
    assert set(prompts(task.heldout)) < set(prompts(grown.heldout))
    assert set(prompts(grown.train)).isdisjoint(prompts(grown.heldout))
    half = load_task(f"jsonl:{write(*lines(400), name='d.jsonl')}:heldout_fraction=0.5")
    assert 150 < len(half.heldout) < 250 and set(prompts(half.heldout)) > set(prompts(grown.heldout))


def test_a_prompt_that_occurs_twice_is_on_one_side(write):
    task = load_task(f"jsonl:{write(*lines(100), *lines(100))}")
    assert set(prompts(task.train)).isdisjoint(prompts(task.heldout)) and len(task.train) + len(task.heldout) == 200


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_a_small_file_holds_out_at_least_one(write, count):
    task = load_task(f"jsonl:{write(*lines(count))}")
    assert len(task.heldout) >= 1 and len(task.train) >= 1


def test_a_held_out_file(write):
    path, other = write(*lines(20)), write(*lines(25, start=15), name="test.jsonl")
    task = load_task(f"jsonl:{path}:heldout={other}")
    assert len(task.train) == 15 and prompts(task.heldout) == [f"{n} + 1?" for n in range(15, 25)]


def test_other_names_of_columns_and_another_reward(write):
    rows = [json.dumps({"question": f"q{n}", "solution": "yes", "prompt": "unused"}) for n in range(30)]
    task = load_task(f"jsonl:{write(*rows)}:prompt=question,answer=solution")
    assert task.train[0].columns == {"answer": "yes", "prompt": "unused"} and task.reward is exact_match
    task = jsonl_task(write(*lines(9)), reward="number_match + 0.5*format_match:[0-9]+")
    assert grade(task, ["It is 1", "1"], Example("0 + 1?", {"answer": "1"})) == [1.0, 1.5]


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["1", "-2.5", "1,000"], number_match),
        ([1, 2.5, -3], number_match),
        (["a #### 1", "2", "3"], number_match),
        (["1", None, "3"], number_match),
        (["one", None, "three"], exact_match),
        (["1", "two", "3"], exact_match),
        (["1 apple", "2", "3"], exact_match),
        (["B", "C", "A"], exact_match),
    ],
)
def test_the_reward_that_fits_the_answers(write, answers, reward):
    rows = [json.dumps({"prompt": f"q{n}", "answer": answer}) for n, answer in enumerate(answers)]
    assert load_task(f"jsonl:{write(*rows)}").reward is reward


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": "a", "answer"', "not JSON"),
        ("prompt,answer", "not JSON"),
        ('{"prompt": ' + "[" * 100_000, "not JSON"),
        (b'{"prompt": "\xff", "answer": "1", "level": 0}', "not JSON"),
        ("[1, 2]", "list instead of an object"),
        ("3", "int instead of an object"),
        ('{"answer": "1", "level": 0}', "there is no column 'prompt'; the columns are answer, level; .*prompt=NAME"),
        ('{"prompt": null, "answer": "1", "level": 0}', "the column 'prompt' is None"),
        ('{"prompt": "", "answer": "1", "level": 0}', "the column 'prompt' is ''"),
        ('{"prompt": 3, "answer": "1", "level": 0}', "the column 'prompt' is 3"),
        ('{"prompt": [], "answer": "1", "level": 0}', r"the column 'prompt' is \[\]"),
        ('{"prompt": "a", "level": 0}', "the columns answer are"),
        ('{"prompt": "a", "answer": "1", "level": 0, "x": 1}', "the columns x are"),
    ],
)
def test_a_corrupted_line_is_named_with_its_number(write, line, what):
    path = write(*lines(4), "", line, *lines(9, start=4))
    with pytest.raises(ValueError, match=f"problems.jsonl, line 6: {what}") as caught:
        load_task(f"jsonl:{path}")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_a_task(write):
    with pytest.raises(FileNotFoundError, match="no file .*missing.jsonl"):
        load_task("jsonl:missing.jsonl")
    with pytest.raises(ValueError, match="problems.jsonl: it has no rows"):
        load_task(f"jsonl:{write('')}")
    alike = "one prompt, '0 [+] 1[?]', and a prompt is either trained on or held out; add rows with other prompts"
    for count in (1, 20):
        with pytest.raises(ValueError, match=rf"its rows \({count}\) have {alike}.*heldout=OTHER"):
            load_task(f"jsonl:{write(*lines(1) * count)}")
    path, empty = write(*lines(9)), write("", name="empty.jsonl")
    with pytest.raises(ValueError, match="all of its 9 rows have prompts that are held out"):
        load_task(f"jsonl:{path}:heldout={path}")
    with pytest.raises(ValueError, match="what it names as held out has no rows"):
        load_task(f"jsonl:{path}:heldout={empty}")
    with pytest.raises(ValueError, match="heldout_fraction 0.99 holds out all of its 9 different prompts; lower it"):
        load_task(f"jsonl:{path}:heldout_fraction=0.99")
    for fraction in (0, 1, -0.1):
        with pytest.raises(ValueError, match="heldout_fraction is"):
            load_task(f"jsonl:{write(*lines(9))}:heldout_fraction={fraction}")
    with pytest.raises(ValueError, match="has no setting fraction; it takes heldout, prompt, answer, heldout_fraction"):
        load_task(f"jsonl:{write(*lines(9))}:fraction=0.1")


def test_a_byte_order_mark_and_windows_line_ends_are_read(write):
    path = write(b"\xef\xbb\xbf" + "\r\n".join(lines(20)).encode())
    assert len(load_task(f"jsonl:{path}").train) > 5


def test_a_colon_in_a_path(write, tmp_path):
    assert split_settings("C:/a.jsonl") == ("C:/a.jsonl", {})
    assert split_settings("C:/a.jsonl:prompt=q") == ("C:/a.jsonl", {"prompt": "q"})


def test_a_file_that_is_there_is_no_setting(tmp_path):
    file = tmp_path / "run:lr=3.jsonl"
    assert split_settings(f"{file}:answer=a")[0] == str(file)
    assert split_settings(str(file)) == (str(tmp_path / "run"), {"lr": "3.jsonl"})
    file.write_text("")
    assert split_settings(str(file)) == (str(file), {})


def test_a_reward_that_misses_its_column_says_so(write):
    rows = [json.dumps({"prompt": f"q{n}", "label": "yes", "level": 1}) for n in range(30)]
    path = write(*rows)
    task = load_task(f"jsonl:{path}")
    said = "problems.jsonl: the reward exact_match asks for answer, but the columns are label, level; .*answer=NAME"
    with pytest.raises(ValueError, match=said):
        require_columns(task)
    with pytest.raises(RewardError, match="missing 1 required positional argument: 'answer'"):
        grade(task, ["yes"], task.train[0])
    require_columns(load_task(f"jsonl:{path}:answer=label"))
    with pytest.raises(ValueError, match="line 1: there is no column 'labl'; the columns are prompt, label, level"):
        load_task(f"jsonl:{path}:answer=labl")


def misspelt(prompts, completions, answr, level=0, **columns):
    return [0.0] * len(prompts)


def only_the_answer(completions, answer):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (misspelt, "t: the reward misspelt asks for answr, but the columns are answer, level; rename"),
        (WeightedRewards([exact_match, misspelt]), "the reward misspelt asks for answr"),
        (only_the_answer, "only_the_answer does not take prompts, level; end its arguments with [*][*]columns"),
        (lambda p, completions, **columns: [0.0], "asks for p, but the columns are"),
    ],
)
def test_columns_that_a_reward_cannot_be_called_with(reward, said):
    side = [Example("q", {"answer": "1", "level": 1})]
    with pytest.raises(ValueError, match=said):
        require_columns(Task("t", side, side, reward))


def test_columns_of_the_held_out_side_count_too():
    sides = [Example("q", {"answer": "1"})], [Example("p", {"label": "1"})]
    with pytest.raises(ValueError, match="asks for answer, but the columns are label"):
        require_columns(Task("t", *sides, exact_match))
    with pytest.raises(ValueError, match="asks for answer, but there is no column but the prompt"):
        require_columns(Task("t", [Example("q", {})], [], exact_match))


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "reasoning_gym:gcd"])
def test_every_task_has_the_columns_of_its_reward(name):
    if name.startswith("reasoning_gym") and not find_spec("reasoning_gym"):
        pytest.skip("no reasoning_gym")
    require_columns(load_task(name))
    assert wrong_columns(CodeMatch(), ["tests"]) is None and "asks for tests" in wrong_columns(CodeMatch(), ["answer"])


def test_a_conversation_as_a_prompt(write):
    turns = [[{"role": "system", "content": "short"}, {"role": "user", "content": f"q{n}"}] for n in range(30)]
    task = load_task(f"jsonl:{write(*[json.dumps({'prompt': t, 'answer': '1'}) for t in turns])}")
    assert task.train[0].prompt[0] == {"role": "system", "content": "short"}
    assert len(task.train) + len(task.heldout) == 30


def test_datasets_by_name_and_the_split_that_is_held_out(monkeypatch):
    calls = []

    def load_dataset(path, config, split):
        calls.append((path, config, split))
        return [{"question": f"{split} {n}", "answer": str(n)} for n in range(30)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    task = load_task("datasets:openai/gsm8k:config=main,prompt=question,heldout=test")
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert prompts(task.heldout)[0] == "test 0" and prompts(task.train)[0] == "train 0" and len(task.heldout) == 30
    assert task.reward is number_match and task.name == "datasets:openai/gsm8k"
    task = load_task("datasets:openai/gsm8k:prompt=question")
    assert 0 < len(task.heldout) < 30 and calls[2:] == [("openai/gsm8k", None, "train")]


def test_datasets_that_fail_say_which(monkeypatch):
    def load_dataset(path, config, split):
        raise FileNotFoundError("not on the hub")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="datasets cannot load nobody/nothing, split train: not on the hub"):
        load_task("datasets:nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        load_task("datasets:nobody/nothing")


@pytest.mark.skipif(find_spec("datasets") is None, reason="pip install datasets")
@pytest.mark.parametrize("nested", [False, True])
def test_datasets_from_a_folder(tmp_path, nested):
    import datasets

    columns = {"prompt": [f"q{n}" for n in range(30)], "answer": [str(n) for n in range(30)]}
    table = datasets.table.InMemoryTable.from_pydict(columns)
    data = datasets.Dataset(table, fingerprint="given")  # the hash of its own needs versions that fit each other
    (datasets.DatasetDict(train=data) if nested else data).save_to_disk(tmp_path / "data")
    task = load_task(f"datasets:{tmp_path / 'data'}")
    assert len(task.train) + len(task.heldout) == 30 and task.train[0].columns.keys() == {"answer"}


def test_a_leak_is_refused():
    example = Example("1+1=", {"answer": "2"})
    with pytest.raises(ValueError, match=r"t: 1 prompts are both trained on and held out, such as '1\+1='"):
        require_no_leak(Task("t", [example, Example("2+2=", {})], [Example("1+1=", {"answer": "3"})], exact_match))


def test_every_task_is_checked_for_a_leak(monkeypatch):
    task = load_task("arithmetic")
    leaky = Task("arithmetic", [*task.train, task.heldout[0]], task.heldout, task.reward)
    monkeypatch.setattr("lmrl.tasks.arithmetic_task", lambda: leaky)
    with pytest.raises(ValueError, match="1 prompts are both"):
        load_task("arithmetic")


def test_rows_without_the_reward_named_twice():
    rows = [(f"row {n}", {"prompt": f"q{n}", "answer": "1"}) for n in range(9)]
    with pytest.raises(ValueError, match="name a function in a file"):
        rows_task("t", rows, reward="nonsense")


# --------------------------------------------------------------------------------------------------- prompts to ids (27)


def chat_tokenizer(template):
    tokenizer = build_tokenizer(TEXT)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<end>", "<model>"]})
    tokenizer.chat_template = template
    return tokenizer


TURNS = (
    "{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)


@pytest.mark.parametrize("template", [TURNS, "{{ bos_token }}" + TURNS, "{{ bos_token }}{{ bos_token }}" + TURNS])
def test_a_template_is_applied_once_with_one_bos_and_its_markers_as_ids(template):
    tokenizer = chat_tokenizer(template)
    ids = encode_prompt(tokenizer, "12+34=")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<bos>", "<user>", *"12+34=", "<end>", "<model>"]


@pytest.mark.parametrize("prompt", ["12+34=", "<bos>12+34=", "<bos><bos>12+34="])
def test_one_bos_without_a_template(prompt):
    tokenizer = build_tokenizer()
    ids = encode_prompt(tokenizer, prompt)
    assert ids == tokenizer("12+34=").input_ids and ids.count(tokenizer.bos_token_id) == 1


def test_a_tokenizer_that_forgets_its_bos_gets_one():
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    assert tokenizer("1+2=").input_ids[0] != tokenizer.bos_token_id
    assert encode_prompt(tokenizer, "1+2=") == build_tokenizer()("1+2=").input_ids


def test_a_tokenizer_without_bos_gets_none():
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.bos_token = None
    assert encode_prompt(tokenizer, "1+2=") == tokenizer("1+2=").input_ids


def test_an_eos_that_the_tokenizer_appends_is_not_part_of_the_prompt():
    from tokenizers import processors

    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert tokenizer("1+2=").input_ids[-1] == tokenizer.eos_token_id
    assert encode_prompt(tokenizer, "1+2=") == build_tokenizer()("1+2=").input_ids


def test_a_prompt_that_cannot_be_encoded():
    with pytest.raises(ValueError, match="cannot encode the prompt 'State the answer'"):
        encode_prompt(build_tokenizer(), "State the answer")


def test_an_empty_prompt():
    with pytest.raises(ValueError, match="prompt is empty"):
        encode_prompt(build_tokenizer(), "")


@given(st.text(alphabet="0123456789+=", min_size=1, max_size=20))
def test_ids_spell_the_prompt(prompt):
    tokenizer = build_tokenizer()
    ids = encode_prompt(tokenizer, prompt)
    assert ids[0] == tokenizer.bos_token_id and tokenizer.decode(ids[1:]) == prompt


def test_a_task_s_stop_texts_become_ids():
    tokenizer = build_tokenizer()
    task = Task("t", [], [], lambda **_: [], stop=("=",))
    ids = stop_token_ids(tokenizer, build_policy(tokenizer), stop=task.stop)
    assert ids == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("=")]


def test_turns_are_encoded_by_the_template_only():
    turns = [{"role": "user", "content": "1+1="}, {"role": "user", "content": "2+2="}]
    tokenizer = chat_tokenizer(TURNS)
    tokens = tokenizer.convert_ids_to_tokens(encode_prompt(tokenizer, turns))
    assert tokens == ["<bos>", "<user>", *"1+1=", "<end>", "<user>", *"2+2=", "<end>", "<model>"]
    with pytest.raises(ValueError, match="cannot encode the prompt .*chat_template"):
        encode_prompt(build_tokenizer(), turns)


def test_pitfall_27_long_prompts_are_dropped_with_a_count_and_never_cut():
    tokenizer, task = build_tokenizer(), load_task("arithmetic")
    long = [Example("1" * n + "+1=", {"answer": ""}) for n in (3, 4, 5, 90)]
    mixed = Task("t", [*long[:2], *task.train[:3], long[2]], [*task.heldout[:3], long[3]], task.reward, stop=("=",))
    kept, dropped = drop_long_prompts(mixed, tokenizer, max_prompt_length=7)
    assert dropped == 3 and kept.train == [long[0], *task.train[:3]] and kept.heldout == task.heldout[:3]
    assert kept.stop == ("=",) and drop_long_prompts(mixed, tokenizer, 100) == (mixed, 0)
    assert drop_long_prompts(mixed, tokenizer, 8)[1] == 2  # <bos> counts
    with pytest.raises(ValueError, match=r"no prompt has at most 5 tokens .*the longest has 94"):
        drop_long_prompts(mixed, tokenizer, 5)


def test_characters_that_the_tokenizer_does_not_know_are_named_and_the_prompts_counted():
    tokenizer = build_tokenizer()
    known, unknown = Example("1+1=", {}), Example("ab 1+ba", {})
    assert encode_prompts(tokenizer, Task("t", [known], [known], exact_match)) == [encode_prompt(tokenizer, "1+1=")] * 2
    said = "t: 2 of 3 prompts cannot be used; the first: .*cannot encode the prompt 'ab 1[+]ba': it does not know 'a', 'b', ' '"
    with pytest.raises(ValueError, match=said):
        encode_prompts(tokenizer, Task("t", [known, unknown], [unknown], exact_match))
