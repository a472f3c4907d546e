import re

import pytest

from lmrl.cli import PlanConfig, main
from lmrl.config import TrainConfig
from lmrl.policy import build_policy, build_tokenizer, warm_start_folder


def plan_cli(capsys, *options):
    code = main(["plan", *options])
    return code, *capsys.readouterr()


def total(table, what):
    """The number in the row of ``what``."""
    return next(float(row[36:46]) for row in table.splitlines() if what in row[:36])


def test_the_plan_of_the_default_job(capsys):
    code, out, err = plan_cli(capsys)
    assert code == 0 and err == ""
    assert out.startswith("qwen3, 84,288 parameters in float32: MiB on 1 GPU")
    assert "policy        gradients" in out and "reference" not in out and "critic" not in out
    *_, small, middle, large, assumed = out.splitlines()
    assert [line.split(":")[0] for line in (small, middle, large)] == ["24 GiB", "80 GiB", "141 GiB"]
    assert assumed.startswith("(with prompts of 8 tokens: an assumption; --max-prompt-length")
    assert "assumption" not in plan_cli(capsys, "--max-prompt-length", "8")[1]


@pytest.mark.parametrize("form", ["folder", "config.json"])
def test_a_folder_and_its_config_give_the_same_plan(capsys, tmp_path, form):
    build_policy(build_tokenizer()).config.save_pretrained(tmp_path)  # no weights
    path = tmp_path if form == "folder" else tmp_path / form
    _, config_only, _ = plan_cli(capsys, "--model", str(path))
    _, with_weights, _ = plan_cli(capsys, "--model", str(warm_start_folder(0)))
    assert config_only == with_weights and "84,288" in config_only


def test_the_settings_of_a_run_change_the_plan(capsys):
    _, base, _ = plan_cli(capsys)
    _, more, _ = plan_cli(capsys, "--beta", "0.1", "--critic", "--reward-model", "same", "--use-vllm")
    for owner in ("reference", "critic", "reward model", "engine"):
        assert owner in more and owner not in base
    _, longer, _ = plan_cli(capsys, "--max-completion-length", "16")
    assert total(longer, "activations") > 1.5 * total(base, "activations")
    _, half, _ = plan_cli(capsys, "--per-device-train-batch-size", "256")
    assert total(half, "activations") == pytest.approx(total(base, "activations") / 2, rel=0.01)
    assert total(half, "key-value cache") == pytest.approx(total(base, "key-value cache") / 2, rel=0.05)
    _, split, _ = plan_cli(capsys, "--per-device-train-batch-size", "256", "--gradient-accumulation-steps", "2")
    assert total(split, "key-value cache") == total(base, "key-value cache")
    _, checkpointed, _ = plan_cli(capsys, "--gradient-checkpointing")
    assert "layers' inputs" in checkpointed and "activations" not in checkpointed
    _, master, _ = plan_cli(capsys, "--dtype", "bfloat16", "--master-weights")
    assert "master weights" in master and total(master, "optimiser ") == total(base, "optimiser ")
    _, short, _ = plan_cli(capsys, "--dtype", "bfloat16")
    assert "bfloat16" in short and total(short, "optimiser ") < total(base, "optimiser ")


def test_with_an_adapter_the_plan_counts_what_learns(capsys):
    pytest.importorskip("peft")
    options = ["--beta", "0.1", "--advantage-estimator", "gae", "--scale-rewards", "none", "--dtype", "bfloat16"]
    _, whole, _ = plan_cli(capsys, *options, "--master-weights", "--reward-model", "same")
    lora = [*options, "--master-weights", "--reward-model", "same", "--use-peft"]
    code, out, err = plan_cli(capsys, *lora, "--lora-r", "4")
    assert code == 0 and err == ""
    learned = 4 * 2 * (2 * (64 + 64) + 2 * (64 + 64) + 3 * (64 + 128))  # rank 4, two layers: q o, k v, gate up down
    assert out.startswith(
        f"qwen3, {84_288 + learned:,} parameters in bfloat16, of which {learned:,} learn: MiB on 1 GPU"
    )
    assert total(out, "frozen weights") == pytest.approx(2 * 84_288 / 2**20, abs=0.01)
    assert total(out, "optimiser ") < total(whole, "optimiser ") / 8
    assert total(out, "reward model") == total(whole, "reward model")
    _, named, _ = plan_cli(capsys, *lora, "--lora-r", "4", "--lora-target-modules", "q_proj")
    assert f"of which {4 * 2 * (64 + 64):,} learn" in named
    code, _, err = plan_cli(capsys, *lora, "--lora-target-modules", "nowhere")
    assert code == 2 and "nowhere" in err and err.count("\n") == 1


def test_a_critic_on_the_policys_trunk_is_a_row_of_numbers(capsys):
    ppo = ["--advantage-estimator", "gae", "--scale-rewards", "none"]
    _, apart, _ = plan_cli(capsys, *ppo)
    _, shared, _ = plan_cli(capsys, *ppo, "--share-critic-trunk")
    assert total(apart, "critic        weights") > 0.2 and total(shared, "critic        weights") == 0.0
    assert total(shared, "peak") == pytest.approx(total(plan_cli(capsys)[1], "peak"), abs=0.02)


def test_the_batch_is_that_of_each_gpu(capsys, tmp_path):
    _, one, _ = plan_cli(capsys)
    _, two, _ = plan_cli(capsys, "--world-size", "2")
    assert "on 1 GPU for a step of 512 completions" in one and "on each of 2 GPUs for a step of 1,024" in two
    assert total(two, "activations") == total(one, "activations")
    assert total(two, "optimiser ") < 0.6 * total(one, "optimiser ")
    build_policy(build_tokenizer(), max_positions=2048).config.save_pretrained(tmp_path)
    long = ["--model", str(tmp_path), "--max-completion-length", "1024", "--num-generations", "4"]
    _, out, _ = plan_cli(capsys, *long, "--per-device-train-batch-size", "2048", "--world-size", "2")
    rows, steps = re.search(r"batch_size (\d+), gradient_accumulation_steps (\d+)", out).groups()
    assert int(rows) * int(steps) == 2048


def test_a_plan_reads_the_settings_of_a_run():
    assert issubclass(PlanConfig, TrainConfig)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "no/such"], "no model at no/such"),
        (["--dtype", "float16"], "dtype float16 needs master_weights"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--num-generations", "3"], "num_generations 3 does not divide"),
        (["--master-weights"], "master_weights is for bfloat16"),
        (["--optim", "lion"], "optim is 'lion'"),
        (["--world-size", "0"], "world_size is 0"),
        (["--max-prompt-length", "0"], "max_prompt_length is 0; it must be at least 1"),
        (["--max-prompt-length", "61"], "are 65, but the model has 64 positions"),
        (["--reward-model", "no/such"], "no model at no/such"),
        (
            ["--max-completion-length", "64"],
            "is 64, and the model has 64 positions (max_position_embeddings), which leaves",
        ),
    ],
)
def test_wrong_settings_are_one_line(capsys, options, words):
    code, out, err = plan_cli(capsys, *options)
    assert code == 2 and out == ""
    assert err.startswith("lmrl: ") and err.count("\n") == 1 and words in err


def test_help_lists_the_settings(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert stopped.value.code == 0
    for name in ("--max-prompt-length", "--per-device-train-batch-size", "--world-size"):
        assert name in out


def test_the_share_of_the_engine_is_a_setting(capsys):
    _, little, _ = plan_cli(capsys, "--vllm")
    assert little.splitlines()[-4] == "24 GiB: fits on 1 GPU, 7.27 GiB on each, the engine's 7.20 included"
    _, much, _ = plan_cli(capsys, "--vllm", "--vllm-gpu-memory-utilization", "0.95")
    assert all("does not fit" in line for line in much.splitlines()[-4:-1])
    _, asleep, _ = plan_cli(capsys, "--vllm", "--vllm-enable-sleep-mode")
    weights = [line.split()[-1] for line in asleep.splitlines() if line.split()[:2] == ["engine", "weights"]]
    assert weights == ["reading", "writing", "syncing"]


def test_where_it_does_not_fit_each_setting_that_helps_is_planned(capsys, tmp_path):
    pytest.importorskip("peft")
    config = build_policy(build_tokenizer(), max_positions=2048).config
    config.save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--max-completion-length", "1024", "--num-generations", "4"]
    large = [*options, "--per-device-train-batch-size", "2048"]
    _, out, _ = plan_cli(capsys, *large)
    assert "24 GiB: fits on 1 GPU," not in out
    found = re.findall(r"^  24 GiB: (.+) GiB with (.+), (fits|not enough)$", out, flags=re.MULTILINE)
    (told, batch, verdict), (checkpointed_peak, name, _), *_ = found
    assert verdict == "fits" and name == "gradient_checkpointing"
    rows, steps = re.fullmatch(r"per_device_train_batch_size (\d+), gradient_accumulation_steps (\d+)", batch).groups()
    options += ["--per-device-train-batch-size", rows, "--gradient-accumulation-steps", steps]
    _, smaller, _ = plan_cli(capsys, *options)
    assert int(rows) * int(steps) == 2048 and "  24 GiB" not in smaller
    assert total(smaller, "peak") == pytest.approx(float(told), abs=0.01) and float(told) < 0.9 * 24
    _, checkpointed, _ = plan_cli(capsys, *large, "--gradient-checkpointing")
    assert total(checkpointed, "peak") == pytest.approx(float(checkpointed_peak), abs=0.01)
    assert "with gradient_checkpointing" not in checkpointed
    assert "with use_peft" not in plan_cli(capsys, *large, "--use-peft")[1]
