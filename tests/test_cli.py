import ast
import inspect
import json
import re
import subprocess
import sys
from dataclasses import asdict, fields

import pytest
import torch
from transformers import AutoModelForCausalLM

import lmrl.cli
from lmrl.cli import COMMANDS, build_trainer, main, parse, read_settings
from lmrl.config import TrainConfig
from lmrl.models import adapted_layers
from lmrl.policy import build_policy, build_tokenizer, warm_start_folder
from lmrl.trainer import free_run_folder

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


@pytest.fixture
def threads(monkeypatch):
    """The numbers of threads that are asked for, by one to whom OMP_NUM_THREADS is open; nothing is set."""
    asked = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


@pytest.mark.parametrize(("width", "expected"), [(64, [1]), (128, [])])
def test_a_very_small_model_gets_one_thread_wherever_it_comes_from(threads, monkeypatch, tmp_path, width, expected):
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    build_policy(tokenizer, hidden_size=width).save_pretrained(tmp_path)
    lmrl.cli.load_model(TrainConfig(model=str(tmp_path), device="cpu"))
    assert threads == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    lmrl.cli.load_model(TrainConfig(model=str(tmp_path), device="cpu"))
    lmrl.cli.load_model(TrainConfig(device="cpu"))
    assert threads == expected


def test_the_default_model_gets_one_thread_before_its_warm_start(threads, monkeypatch):
    folder, known = warm_start_folder(0), []
    monkeypatch.setattr("lmrl.cli.warm_start_folder", lambda seed: known.append(list(threads)) or folder)
    lmrl.cli.load_model(TrainConfig(device="cpu"))
    assert known == [[1]]


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
        (["--task", "jsonl:missing.jsonl"], ["no file missing.jsonl"]),
        (["--task", "countdown"], ["model 'tiny' reads only digits", "--model"]),
        (["--name", "a/b"], ["name is 'a/b'; give a folder's name without slashes"]),
        (["--learning-rate", "1e-3x"], ["--learning-rate is '1e-3x'; expected float"]),
        (["--learning-rate"], ["--learning-rate takes one value, but got none"]),
        (["--max-steps", "3", "foo"], ["--max-steps takes one value, but got 3 foo"]),
        (["--max-steps=2.5"], ["--max-steps is '2.5'; expected int"]),
        (["--epsilon-high", "much"], ["--epsilon-high is 'much'; expected float or null"]),
        (
            ["--dynamic-sampling", "yes"],
            ["--dynamic-sampling takes no value, but got yes; an option --no-… switches it off"],
        ),
        (["-x", "3"], ["but got -x 3"]),
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
    assert_refused(code, err, tmp_path, module, "pip install -c constraints.txt -e '.[train]'")


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


@pytest.mark.parametrize(
    ("arguments", "said"), [([], ""), (["trian"], "lmrl: there is no command 'trian'; did you mean train?\n")]
)
def test_without_a_command_it_says_how(arguments, said, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{said}usage: lmrl") and all(f"\n  lmrl {command} " in err for command in COMMANDS)
    assert main(["chek"]) == 2 and "did you mean check?" in capsys.readouterr().err


def test_a_wrong_value_is_one_line_in_every_command(capsys):
    for command, option in (("report", "--num-problems"), ("plan", "--world-size"), ("eval", "--temperature")):
        capsys.readouterr()
        assert main([command, option, "x" * 300]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"lmrl: {option} is 'xxx") and err.count("\n") == 1


@pytest.mark.parametrize("task", ["arithmetics", "jsonl:missing.jsonl"])
@pytest.mark.parametrize("command", ["train", "check", "eval"])
def test_a_misspelt_task_is_reported_before_anything_is_loaded(task, command, capsys, monkeypatch):
    for work in ("optional_import", "find_device", "warm_start_folder", "import_vllm"):
        real = getattr(lmrl.cli, work)
        monkeypatch.setattr(f"lmrl.cli.{work}", lambda *a, real=real: real(*a) if a[0] == "tyro" else pytest.fail(a))
    assert main([command, "--task", task, "--vllm"]) == 2
    assert capsys.readouterr().err.startswith("lmrl: ")


def sums(tmp_path, numbers, **more):
    """A file of sums that the tiny policy can read; ``more`` are further columns."""
    file = tmp_path / "my.sums.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), **more} for n in numbers]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ([], "per_device_train_batch_size 36, or a smaller multiple of 4"),
        (["--num-generations", "8"], "per_device_train_batch_size 72, or a smaller multiple of 8"),
        (["--gradient-accumulation-steps", "2"], "per_device_train_batch_size 18, or a smaller multiple of 2"),
        (["--gradient-accumulation-steps", "32"], "per_device_train_batch_size 1"),
        (["--num-mini-batches", "32"], "per_device_train_batch_size 32"),
        (
            ["--num-mini-batches", "64"],
            "gradient_accumulation_steps 1, num_mini_batches 1 and per_device_train_batch_size 36",
        ),
    ],
)
def test_a_file_with_too_few_prompts_names_sizes_that_work(settings, remedy, tmp_path, capsys):
    file = sums(tmp_path, range(10, 20))
    arguments = ["--task", f"jsonl:{file}", "--per-device-train-batch-size", "128", *settings]
    code, _, err = run_cli(tmp_path, capsys, *arguments)
    assert_refused(code, err, tmp_path, "has 9 to train on; add prompts, or take ", f" {remedy}\n".strip())
    for name, value in re.findall(r"([a-z_]*(?:batch_size|steps|batches)) (\d+)", err.partition("or take")[2]):
        arguments += [f"--{name}", value]
    assert run_cli(tmp_path, capsys, *arguments)[0] == 0


def test_what_is_wrong_with_the_data_is_said_before_the_size_of_a_step(tmp_path, capsys):
    file = sums(tmp_path, range(10, 20))
    score = "def score(prompts, completions, truth, **columns):\n    return [0.0] * len(prompts)\n"
    (tmp_path / "mine.py").write_text(score)
    options = ["--task", f"jsonl:{file}", "--per-device-train-batch-size", "512"]
    wanted = ["my.sums.jsonl: the reward score asks for truth, but the columns are answer"]
    assert_refused(
        *run_cli(tmp_path, capsys, *options, "--reward", f"{tmp_path}/mine.py:score")[::2], tmp_path, *wanted
    )
    file.write_text(file.read_text().replace("=", "≈"))
    wanted = ["my.sums.jsonl: 10 of 10 prompts cannot be used", "it does not know '≈'"]
    assert_refused(*run_cli(tmp_path, capsys, *options)[::2], tmp_path, *wanted)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("arithmetic", "arithmetic"),
        ("jsonl:../data/my.sums.jsonl", "my.sums"),
        ("jsonl:/data/sums.jsonl:heldout=/data/other.jsonl,answer=a", "sums"),
        ("datasets:openai/gsm8k:config=main", "gsm8k"),
        ("datasets:folder/v1.5", "v1.5"),
        ("reasoning_gym:chain_sum:max_terms=2", "reasoning_gym-chain_sum-max_terms=2"),
    ],
)
def test_a_runs_name_is_that_of_one_folder(task, name):
    folder = free_run_folder(TrainConfig(task=task, output_dir="nowhere"))
    assert folder.parts == ("nowhere", f"{name}-1")


def test_a_run_on_a_file_lies_directly_under_the_runs(tmp_path, capsys):
    file = sums(tmp_path, range(10, 40))
    code, out, _ = run_cli(tmp_path, capsys, "--task", f"jsonl:{file}")
    assert code == 0 and (tmp_path / "runs" / "my.sums-1" / "metrics.jsonl").is_file() and "my.sums-1/" in out


def test_check_refuses_the_name_that_train_refuses(capsys):
    assert main(["check", "--name", "a/b"]) == 2
    assert "name is 'a/b'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train", "--help"], ["plan"]])
def test_a_reader_who_leaves_ends_it_quietly(arguments):
    code = f"import sys; from lmrl.cli import main; sys.exit(main({arguments}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--learning-rat=1", "learning_rate"),
        ("--learningrate", "learning_rate"),
        ("--num-generation", "num_generations"),
        ("--lr=1e-5", "learning_rate"),
        ("--wd", "weight_decay"),
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
        (
            ["--no-preflight", "--epsilon-high=0.3", "--name", "-1"],
            TrainConfig(preflight=False, epsilon_high=0.3, name="-1"),
        ),
        (["--epsilon-high", "null", "--cliprange-value=None"], TrainConfig(cliprange_value=None)),
        (["--learning-rate", "1e-5", "--seed=3"], TrainConfig(learning_rate=1e-5, seed=3)),
        (
            ["--use_peft", "--lora_target_modules", "q_proj", "v_proj", "--seed", "3"],
            TrainConfig(use_peft=True, lora_target_modules="q_proj,v_proj", seed=3),
        ),
        (["--lora-target-modules=q_proj,v_proj"], TrainConfig(lora_target_modules="q_proj,v_proj")),
        (["--lora_target_modules", "all-linear"], TrainConfig()),
        (["--report_to", "tensorboard", "wandb"], TrainConfig(report_to="tensorboard,wandb")),
    ],
)
def test_names_of_trl_are_taken_in_either_spelling(arguments, expected):
    assert parse("train", arguments) == expected


def test_names_of_trl_in_a_file(tmp_path):
    text = "kl_coef: 0.1\nnum_ppo_epochs: 4\nmodel_name_or_path: m\n"
    expected = TrainConfig(beta=0.1, num_iterations=4, model="m")
    assert read_settings(settings_file(tmp_path, text), TrainConfig) == expected


@pytest.mark.parametrize("written", ["[q_proj, v_proj]", "\n- q_proj\n- v_proj", "q_proj,v_proj"])
def test_the_layers_of_an_adapter_may_be_a_list_in_a_file(written, tmp_path):
    pytest.importorskip("peft")
    text = f"use_peft: true\nlora_target_modules: {written}\nreport_to: [tensorboard]\n"
    config = read_settings(settings_file(tmp_path, text), TrainConfig)
    assert config == TrainConfig(use_peft=True, lora_target_modules="q_proj,v_proj")
    layers = adapted_layers(build_trainer(config).model)
    assert {name.rpartition(".")[2] for name in layers} == {"q_proj", "v_proj"} and len(layers) == 4
    assert read_settings(settings_file(tmp_path, json.dumps(asdict(config))), TrainConfig) == config


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
        ("0", ["holds a int"]),
        ("null", ["holds a NoneType"]),
        ("a: [", ["is not YAML"]),
        ("seed: " + "1" * 5000, ["is not YAML"]),
        ("learning_rate: " + "1" * 400, ["learning_rate is a number of 400 digits, which no float holds"]),
        ("beta: 0.1\nmax_steps: 3\nbeta: 0.1", ["beta (line 1) and beta (line 3) are the same setting"]),
        ("# mine\nkl_coef: 0.1\nbeta: 0.2", ["kl_coef (line 2) and beta (line 3) are the same setting"]),
        ("max-steps: 1\nmax_steps: 2", ["max-steps (line 1) and max_steps (line 2)"]),
        ('{"beta": 0.1,\n "beta": 0.2}', ["beta (line 1) and beta (line 2)"]),
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
        (
            ["--config", "no/such.yaml"],
            "no/such.yaml is not there; expected a YAML or JSON file with lines of the form",
        ),
        (["--config", "/"], "/ is a folder; expected a YAML or JSON file"),
        (["--config"], "--config takes one file"),
        (["--config=a", "--config=b"], "--config takes one file"),
    ],
)
def test_a_file_that_is_not_there_is_one_line(options, words, tmp_path, capsys):
    assert_refused(*run_cli(tmp_path, capsys, *options)[::2], tmp_path, words)


def test_an_empty_file_is_the_defaults(tmp_path):
    assert read_settings(settings_file(tmp_path, "# nothing\n"), TrainConfig) == TrainConfig()


def test_what_begins_like_no_option_is_none(capsys):
    assert main(["check", "-x", "3"]) == 2
    assert "'-x' is no option; options begin with --" in capsys.readouterr().err
