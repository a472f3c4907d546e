import ast
import inspect
import json
import re
import sys
from dataclasses import fields

import pytest
import torch
from transformers import AutoModelForCausalLM

from lmrl.cli import COMMANDS, build_trainer, main, parse, read_settings
from lmrl.config import TrainConfig
from lmrl.policy import build_policy, build_tokenizer, warm_start_folder

QUICK = ["--max-steps", "2", "--per-device-train-batch-size", "32", "--num-eval-problems", "16", "--no-preflight"]


def run_cli(tmp_path, capsys, *options):
    code = main(["train", "--output-dir", str(tmp_path / "runs"), *QUICK, *options])
    return code, *capsys.readouterr()


def assert_refused(code, err, tmp_path, *words):
    lines = [line for line in err.splitlines() if line.startswith("lmrl: ")]
    assert code == 2 and len(lines) == 1, err
    for word in words:
        assert word in lines[0]
    assert not (tmp_path / "runs").exists()


def test_train_prints_before_and_after_and_where_the_results_are(tmp_path, capsys):
    code, out, err = run_cli(tmp_path, capsys, "--name", "r")
    assert code == 0
    assert "pass@1 on held-out problems: " in out and "well-formed answers" in out and "peak memory" in out
    assert f"{tmp_path / 'runs' / 'r'}/" in out
    assert "reward=" in err and "gen=" in err  # the progress bar
    AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "r" / "checkpoint")


def test_training_continues_from_a_folder(tmp_path, capsys):
    code, out, _ = run_cli(tmp_path, capsys, "--model", str(warm_start_folder(0)), "--beta", "0.01")
    assert code == 0
    metrics = (tmp_path / "runs" / "arithmetic-1" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[0])["kl_ref"] == pytest.approx(0.0, abs=1e-9)
    assert json.loads(metrics[1])["kl_ref"] > 1e-8  # the reference did not move with the policy


def test_the_temperature_reaches_sampler_scoring_and_reference(tmp_path, capsys):
    code, _, _ = run_cli(tmp_path, capsys, "--temperature", "0.5", "--beta", "0.1")
    metrics = json.loads((tmp_path / "runs" / "arithmetic-1" / "metrics.jsonl").read_text().splitlines()[0])
    assert code == 0 and metrics["sampler_gap"] < 1e-3 and metrics["kl_ref"] == pytest.approx(0.0, abs=1e-9)


def test_seed_and_dtype_reach_the_model(monkeypatch):
    folder, seeds = warm_start_folder(0), []
    monkeypatch.setattr("lmrl.cli.warm_start_folder", lambda seed: seeds.append(seed) or folder)
    trainer = build_trainer(TrainConfig(seed=7, dtype="bfloat16", name="not-there-yet"))
    assert seeds == [7] and trainer.model.dtype == torch.bfloat16


def test_own_reward_function(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def score(prompts, completions, **columns):\n    return [0.25] * len(completions)\n")
    code, out, _ = run_cli(tmp_path, capsys, "--reward", f"{file}:score")
    assert code == 0 and "mean reward: 0.250 before, 0.250 after" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "arithmetics"], ["unknown task 'arithmetics'", "did you mean arithmetic"]),
        (["--task", "reasoning_gym:chain_sums", "--model", "MODEL"], ["chain_sums", "chain_sum"]),
        (["--task", "reasoning_gym:chain_sum"], ["tiny", "--model"]),
        (["--model", "no/such/folder"], ["no/such/folder"]),
        (["--num-generations", "5"], ["32", "5", "does not divide"]),
        (["--max-steps", "0"], ["max_steps is 0"]),
        (["--reward", "nowhere.py:score"], ["nowhere.py"]),
        (["--device", "nope"], ["device 'nope' does not work here", "take auto, cpu or cuda"]),
        (["--device", "meta"], ["device 'meta' does not work here"]),
        (["--output-dir", "/dev/null"], ["cannot make the folder /dev/null/arithmetic-1", "--output-dir"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, words, tmp_path, capsys):
    options = [str(warm_start_folder(0)) if option == "MODEL" else option for option in options]
    code, _, err = run_cli(tmp_path, capsys, *options)
    assert_refused(code, err, tmp_path, *words)


def save(folder, model=True, **specials):
    tokenizer = build_tokenizer()
    for name, value in specials.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    if model:
        build_policy(build_tokenizer()).save_pretrained(folder)


def test_a_folder_without_weights(tmp_path, capsys):
    save(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    assert_refused(*run_cli(tmp_path, capsys, "--model", str(tmp_path / "m"))[::2], tmp_path, "weights")


@pytest.mark.parametrize("missing", ["pad_token", "eos_token"])
def test_a_tokenizer_without_pad_or_eos(missing, tmp_path, capsys):
    save(tmp_path / "m", **{missing: None})
    code, _, err = run_cli(tmp_path, capsys, "--model", str(tmp_path / "m"))
    assert_refused(code, err, tmp_path, missing.split("_")[0])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('truth')", ["KeyError", "truth"]),
        ("return [1.0]", ["1", "64"]),
        ("raise SystemExit(0)", ["SystemExit"]),
        ("return ['good'] * len(completions)", ["good"]),
        ("return [float('nan')] * len(completions)", ["nan"]),
    ],
)
def test_a_faulty_reward_function(body, words, tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(f"def score(prompts, completions, **columns):\n    {body}\n")
    code, _, err = run_cli(tmp_path, capsys, "--reward", f"{file}:score")
    assert_refused(code, err, tmp_path, "score", *words)


def test_a_name_that_is_taken_is_refused_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lmrl.cli.load_task", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "runs" / "r").mkdir(parents=True)
    code, _, err = run_cli(tmp_path, capsys, "--name", "r")
    assert code == 2 and "choose another --name" in err


@pytest.mark.parametrize("module", ["matplotlib.figure", "tensorboard"])
def test_a_missing_extra_is_named_before_there_is_a_folder(module, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("lmrl.figures.", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = run_cli(tmp_path, capsys)
    assert_refused(code, err, tmp_path, module, "lmrl[train]")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [(KeyboardInterrupt(), 130, "interrupted"), (torch.OutOfMemoryError(), 2, "out of memory; lower per_device")],
)
def test_what_may_happen_at_any_moment_is_one_line(error, code, words, tmp_path, capsys, monkeypatch):
    """Ctrl-C during the warm start or an evaluation, and memory that runs out."""

    def stop(trainer):
        raise error

    monkeypatch.setattr("lmrl.trainer.evaluate", stop)
    assert run_cli(tmp_path, capsys)[0] == code
    with monkeypatch.context() as patched:
        patched.setattr("lmrl.cli.load_task", lambda *_, **__: stop(None))
        result, _, err = run_cli(tmp_path, capsys)
    assert result == code and err.startswith("lmrl: ") and words in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [[], ["trian"]])
def test_without_a_command_it_says_how(arguments, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: lmrl") and all(f"\n  lmrl {command} " in err for command in COMMANDS)


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--learning-rat=1", "learning_rate"),
        ("--learningrate", "learning_rate"),
        ("--num-generation", "num_generations"),
        ("--run-nam", "run_name"),
        ("--no-dynamic-samplin", "dynamic_sampling"),
        ("--no-beta", "beta"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(option, near, tmp_path, capsys):
    assert_refused(*run_cli(tmp_path, capsys, option)[::2], tmp_path, "no setting", f"did you mean {near}?")


def test_what_is_no_option_is_refused(tmp_path, capsys):
    capsys.readouterr()
    assert main(["train", "runs/a"]) == 2
    assert "takes options alone, such as --model PATH, but got 'runs/a'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max_steps", "3", "--beta=0.1"], TrainConfig(max_steps=3, beta=0.1)),
        (["--kl-coef", "0.1", "--num_ppo_epochs", "4"], TrainConfig(beta=0.1, num_iterations=4)),
        (["--cliprange=0.3", "--response-length", "9"], TrainConfig(epsilon=0.3, max_completion_length=9)),
        (["--run-name", "r", "--model_name_or_path", "m"], TrainConfig(name="r", model="m")),
        (["--vllm", "--no-dynamic-sampling"], TrainConfig(use_vllm=True)),
    ],
)
def test_names_of_trl_are_taken_in_either_spelling(arguments, expected):
    assert parse("train", arguments) == expected


def test_names_of_trl_in_a_file(tmp_path):
    text = "kl_coef: 0.1\nnum_ppo_epochs: 4\nmodel_name_or_path: m\n"
    expected = TrainConfig(beta=0.1, num_iterations=4, model="m")
    assert read_settings(settings_file(tmp_path, text), TrainConfig) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_help_gives_every_setting_its_meaning_and_section(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert stop.value.code == 0 and COMMANDS[command].meaning in text
    for name, meaning in settings_help(COMMANDS[command].settings).items():
        assert f"--{name.replace('_', '-')}" in text
        assert re.search(r"\(.*sections? [0-9 and]+\)\.?$|section \d+", meaning), name
        assert meaning[:40] in text, name


def settings_help(settings):
    """Field → the text below it, of a dataclass and those that it extends."""
    found = {}
    for kind in reversed(settings.__mro__[:-1]):
        body = ast.parse(inspect.getsource(kind)).body[0].body
        for node, text in zip(body, body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[node.target.id] = " ".join(text.value.value.split())
    assert found.keys() == {field.name for field in fields(settings)}
    return found


# --- settings from a file -----------------------------------------------------------------------------------------------


def settings_file(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    return str(tmp_path / "mine.yaml")


def test_a_file_gives_the_defaults_and_options_win(tmp_path):
    file = settings_file(
        tmp_path, "loss_type: grpo\nbeta: 1e-2  # text in YAML 1.1\nepsilon_high: null\nnum_iterations: 3\n"
    )
    expected = TrainConfig(loss_type="grpo", beta=0.01, num_iterations=5)
    for option in (["--config", file], [f"--config={file}"]):
        assert parse("train", [*option, "--num-iterations", "5"]) == expected
        assert parse("train", ["--num-iterations", "5", *option]) == expected
    assert parse("train", []) == TrainConfig()
    assert parse("plan", ["--config", file, "--vllm"]).use_vllm


def test_a_run_from_a_file_and_again_from_its_own_settings(tmp_path, capsys):
    file = settings_file(tmp_path, "advantage_estimator: gae\nscale_rewards: none\n")
    assert run_cli(tmp_path, capsys, "--config", file, "--name", "first")[0] == 0
    settings = tmp_path / "runs" / "first" / "config.json"
    assert json.loads(settings.read_text())["advantage_estimator"] == "gae"
    assert run_cli(tmp_path, capsys, "--config", str(settings), "--name", "second")[0] == 0
    curves = [(tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines() for name in ("first", "second")]
    assert [json.loads(line)["reward"] for line in curves[0]] == [json.loads(line)["reward"] for line in curves[1]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("loss_typ: grpo", ["no setting 'loss_typ'", "did you mean loss_type?"]),
        ("epsilon_hihg: 0.3", ["did you mean epsilon_high?"]),
        ("max_steps: many", ["max_steps is 'many'; expected int"]),
        ("max_steps: 2.5", ["max_steps is 2.5; expected int"]),
        ("dynamic_sampling: 1", ["dynamic_sampling is 1; expected bool"]),
        ("num_iterations: true", ["num_iterations is True; expected int"]),
        ("beta: high", ["beta is 'high'; expected float"]),
        ("beta: null", ["beta is None; expected float"]),
        ("epsilon_high: high", ["epsilon_high is 'high'; expected float or null"]),
        ("- loss_type", ["holds a list"]),
        ("a: [", ["is not YAML"]),
        ("beta: 0.1\nkl_estimator: k1", ["expected gradient of zero"]),
    ],
)
def test_a_faulty_file_is_one_line(text, words, tmp_path, capsys):
    code, _, err = run_cli(tmp_path, capsys, "--config", settings_file(tmp_path, text))
    assert_refused(code, err, tmp_path, *words)


def test_a_file_that_is_no_text_is_one_line(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"name: \xe9t\xe9\n")
    code, _, err = run_cli(tmp_path, capsys, "--config", str(path))
    assert_refused(code, err, tmp_path, "settings.yaml is not YAML")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--config", "no/such.yaml"], "No such file or directory: 'no/such.yaml'"),
        (["--config"], "--config takes one file"),
        (["--config=a", "--config=b"], "--config takes one file"),
    ],
)
def test_a_file_that_is_not_there_is_one_line(options, words, tmp_path, capsys):
    assert_refused(*run_cli(tmp_path, capsys, *options)[::2], tmp_path, words)


def test_an_empty_file_is_the_defaults(tmp_path):
    assert read_settings(settings_file(tmp_path, "# nothing\n"), TrainConfig) == TrainConfig()
