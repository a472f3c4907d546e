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
    assert [line.split(":")[0] for line in out.splitlines()[-3:]] == ["24 GB", "80 GB", "141 GB"]


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
    assert little.splitlines()[-3] == "24 GB: fits on 1 GPU, 7.27 GiB on each, the engine's 7.20 included"
    _, much, _ = plan_cli(capsys, "--vllm", "--vllm-gpu-memory-utilization", "0.95")
    assert all("does not fit" in line for line in much.splitlines()[-3:])
    _, asleep, _ = plan_cli(capsys, "--vllm", "--vllm-enable-sleep-mode")
    weights = [line.split()[-1] for line in asleep.splitlines() if line.split()[:2] == ["engine", "weights"]]
    assert weights == ["reading", "writing"]
