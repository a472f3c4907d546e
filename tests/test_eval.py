"""`lmrl eval`: pass@k of a run or a model, with the run's own settings, and its answers to read."""

import json
import math
from dataclasses import replace
from math import comb

import pytest

from lmrl.cli import EvalConfig, main, parse
from lmrl.policy import warm_start_folder
from lmrl.trainer import Evaluation, evaluation_table, readable_samples

RUN = ["--max-steps", "2", "--per-device-train-batch-size", "32", "--num-eval-problems", "16"]
RUN += ["--num-eval-generations", "3", "--temperature", "0.7", "--max-completion-length", "3", "--seed", "0"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a short run whose sampling is not the default one."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", "--output-dir", str(folder), "--name", "r", *RUN]) == 0
    return folder / "r"


def eval_cli(capsys, *arguments):
    capsys.readouterr()
    code = main(["eval", *map(str, arguments)])
    return code, *capsys.readouterr()


def rows(file, when=None):
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in records if row.pop("when", None) == when]


def small_evaluation():
    """Three problems of four answers: none right, two right, all right."""
    answers = [["a"] * 4, ["b", "r", "b", "r"], ["r"] * 4]
    samples = [
        {"prompt": f"p{i}", "completion": text, "reward": float(text == "r"), "truncated": text == "a"}
        for i, texts in enumerate(answers)
        for text in texts
    ]
    right = [sum(row["reward"] == 1 for row in samples[4 * i : 4 * i + 4]) for i in range(3)]
    return Evaluation(0.5, 0.5, 2 / 3, 1 / 3, 0.0, right, samples)


def test_pass_at_k_is_the_share_of_choices_with_a_right_answer():
    passed = small_evaluation().pass_at()
    assert list(passed) == [1, 2, 4]
    for k, interval in passed.items():
        exact = sum(1 - comb(4 - c, k) / comb(4, k) for c in (0, 2, 4)) / 3
        assert interval.mean == pytest.approx(exact) and interval.low < exact < interval.high
    assert passed[1].mean == pytest.approx(1 / 2) and passed[2].mean == pytest.approx((5 / 6 + 1) / 3)


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (3, [1, 2]), (8, [1, 2, 4, 8])])
def test_k_goes_in_powers_of_two_up_to_the_number_of_answers(n, ks):
    samples = [{"prompt": "p", "completion": "", "reward": 0.0, "truncated": False}] * n
    assert list(Evaluation(0.0, 0.0, 0.0, 0.0, 0.0, [0], samples).pass_at()) == ks


def test_equal_answers_are_counted_together():
    result = small_evaluation()
    result.samples[5]["reward"] = math.nan
    result.samples[4]["prompt"] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    expected = ["=== problem 2: 2 of 4 right", "[system] s", "[user] u", "--- 2 ×, reward 0", "b"]
    expected += ["--- 1 ×, not gradable", "r", "--- 1 ×, reward 1", "r"]
    sections = readable_samples(result).split("\n\n")
    assert sections[1].splitlines() == expected
    assert sections[0] == "=== problem 1: 0 of 4 right\np0\n--- 4 ×, reward 0, cut off\na"


def test_with_its_own_number_of_answers_it_repeats_the_runs_last_measurement(finished, capsys):
    code, out, _ = eval_cli(capsys, finished, "--num-eval-generations", "3")
    assert code == 0
    folder = finished / "eval-1"
    after = rows(finished / "samples.jsonl", "after")
    assert rows(folder / "samples.jsonl") == after and len(after) == 48
    record = json.loads((folder / "eval.json").read_text())
    share = sum(row["reward"] == 1 for row in after) / 48
    assert record["results"]["pass@1"][0] == pytest.approx(share) and f"pass@1              {share:.3f} [" in out
    assert record["settings"]["temperature"] == 0.7 and "temperature 0.7" in out
    assert record["model"] == f"{finished / 'checkpoint'} (step 2)" and out.startswith(
        f"{record['model']} on arithmetic"
    )
    assert f"{folder}/" in out and "=== problem 16: " in (folder / "samples.txt").read_text()


def test_the_checkpoint_in_a_run_has_the_runs_settings_too_and_answers_are_added_not_replaced(finished, capsys):
    code, out, _ = eval_cli(capsys, finished / "checkpoint", "--output-dir", finished / "more")
    assert code == 0 and "16 answers each" in out and "pass@16" in out
    more, after = rows(finished / "more/eval-1/samples.jsonl"), rows(finished / "samples.jsonl", "after")
    assert [row for i, row in enumerate(more) if i % 16 < 3] == after
    eval_cli(capsys, finished, "--output-dir", finished / "more", "--eval-seed", "1")
    assert rows(finished / "more/eval-2/samples.jsonl") != more


def test_the_best_checkpoint_and_any_other_have_a_name(finished):
    step = str(finished / "checkpoints" / "step-000002")
    assert parse("eval", [step]).model == step and parse("eval", [step]).temperature == 0.7
    assert parse("eval", [str(finished / "checkpoints" / "best")]).model == step


def test_a_model_that_is_no_runs_has_the_default_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = str(warm_start_folder(0))
    assert parse("eval", [folder]) == EvalConfig(model=folder)
    assert parse("eval", [folder, "--task", "countdown"]) == EvalConfig(model=folder, task="countdown")
    (tmp_path / "mine.yaml").write_text("temperature: 0.5\n")
    assert parse("eval", [folder, "--config", "mine.yaml"]) == EvalConfig(model=folder, temperature=0.5)


def test_a_runs_settings_are_all_taken_but_the_number_of_answers(tmp_path):
    own = {"temperature": 0.7, "max_completion_length": 3, "seed": 5, "task": "countdown", "num_eval_generations": 2}
    (tmp_path / "config.json").write_text(json.dumps(own))
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoint").mkdir()
    expected = EvalConfig(
        **own | {"num_eval_generations": 16}, model=str(tmp_path / "checkpoint"), output_dir=str(tmp_path)
    )
    assert parse("eval", [str(tmp_path)]) == expected
    assert parse("eval", [str(tmp_path), "--seed", "6"]) == replace(expected, seed=6)
    (tmp_path / "mine.yaml").write_text("model: other\neval_seed: 5\ntemperature: 0.5\nnum_eval_generations: 4\n")
    ours = replace(expected, eval_seed=5, temperature=0.5, num_eval_generations=4, seed=6)
    assert parse("eval", [str(tmp_path), "--config", str(tmp_path / "mine.yaml"), "--seed", "6"]) == ours


def test_an_own_reward_function(tmp_path, finished, capsys):
    (tmp_path / "mine.py").write_text("def half(prompts, completions, **columns):\n    return [0.5] * len(prompts)\n")
    options = ["--reward", f"{tmp_path / 'mine.py'}:half", "--num-eval-problems", "4", "--output-dir", tmp_path]
    code, out, _ = eval_cli(capsys, finished, *options)
    assert code == 0 and "mean reward         0.500" in out and "pass@1              0.000 [0.000, " in out


def test_a_runs_own_reward_is_named_and_can_be_left_out_on_another_task(tmp_path, finished, capsys):
    (tmp_path / "r" / "checkpoint").mkdir(parents=True)
    for path in (finished / "checkpoint").iterdir():
        (tmp_path / "r" / "checkpoint" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "r" / "metrics.jsonl").touch()
    (tmp_path / "mine.py").write_text(
        "def zero(prompts, completions, answer, **columns):\n    return [0.0] * len(answer)\n"
    )
    own = json.loads((finished / "config.json").read_text()) | {"reward": f"{tmp_path / 'mine.py'}:zero"}
    (tmp_path / "r" / "config.json").write_text(json.dumps(own))
    lines = [json.dumps({"prompt": f"{a}+10=", "truth": str(a + 10)}) for a in range(20, 60)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines) + "\n")
    few = ["--num-eval-problems", "4", "--num-eval-generations", "2"]
    code, out, _ = eval_cli(capsys, tmp_path / "r", *few)
    assert code == 0 and f"graded by {own['reward']}; --reward None takes the task's own reward\n" in out
    other = ["--task", f"jsonl:{tmp_path / 'sums.jsonl'}:answer=truth"]
    code, out, _ = eval_cli(capsys, tmp_path / "r", *few, *other, "--reward", "None")
    assert code == 0 and "graded by" not in out
    code, _, err = eval_cli(capsys, tmp_path / "r", *few, "--task", f"jsonl:{tmp_path / 'sums.jsonl'}")
    assert code == 2 and "asks for answer" in err and f"leave {own['reward']} out: --reward None" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no model at nowhere"),
        (["a", "b"], "one model at a time"),
        (["tiny", "--resume", "a"], "leave --resume out"),
        (["tiny", "--num-eval-problems", "0"], "num_eval_problems is 0"),
        (["tiny", "--temperatur", "1"], "did you mean temperature?"),
        (["tiny", "--task", "countdown"], "model 'tiny' reads only digits"),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = eval_cli(capsys, *arguments)
    assert code == 2 and err.startswith("lmrl: ") and words in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_checkpoint(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    assert "checkpoint yet (see save_steps)" in eval_cli(capsys, tmp_path)[2]
    assert "checkpoints/best yet (see save_steps)" in eval_cli(capsys, tmp_path / "checkpoints" / "best")[2]


def test_a_checkpoint_that_is_no_longer_there(finished, capsys):
    code, _, err = eval_cli(capsys, finished / "checkpoints" / "step-000099")
    assert code == 2 and "has no" in err and "step-000099; it kept step-" in err


def test_the_tiny_policy_reads_a_file_of_sums(tmp_path, capsys):
    lines = [json.dumps({"prompt": f"{a}+{10}=", "answer": str(a + 10)}) for a in range(20, 60)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines) + "\n")
    task = f"jsonl:{tmp_path / 'sums.jsonl'}"
    code, out, _ = eval_cli(capsys, "tiny", "--task", task, "--output-dir", tmp_path, "--num-eval-generations", "2")
    assert code == 0 and "well-formed" in out


def test_the_table_has_every_number():
    table = evaluation_table(small_evaluation())
    assert "pass@4" in table and "cut off at the cap  0.333" in table and "not gradable        0.000" in table
