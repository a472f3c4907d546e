import sys
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmrl.models import stop_token_ids
from lmrl.policy import addition_problems, build_policy, build_tokenizer
from lmrl.rewards import score_completions
from lmrl.tasks import (
    Task,
    disjoint,
    encode_prompt,
    extract_answer,
    load_task,
    parse_settings,
    reasoning_gym_reward,
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
        ("arithmetic:easy", '"arithmetic" and "reasoning_gym:DATASET"'),
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
    with pytest.raises(ImportError, match=r"pip install 'lmrl\[tasks\]'"):
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
