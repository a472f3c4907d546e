"""Whole runs that are killed, interrupted, damaged, moved, and go on."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file
from test_trainer import untimed

from lmrl.checkpoint import checkpoints_of, damage, read_record
from lmrl.cli import main
from lmrl.policy import warm_start_folder

QUICK = ["--max-steps", "4", "--per-device-train-batch-size", "16", "--num-eval-problems", "8", "--save-steps", "2"]
QUICK += ["--no-preflight"]


def few_prompts(folder):
    """Options for the tiny policy on fifty prompts, which are read faster than all of two-digit addition."""
    rows = ({"prompt": f"{a}+{a + 7}=", "answer": str(2 * a + 7)} for a in range(10, 60))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--task", f"jsonl:{folder / 'prompts.jsonl'}", "--model", str(warm_start_folder(0))]


def start(tmp_path, name="r", *options):
    arguments = ["--output-dir", str(tmp_path), "--name", name, *QUICK, *few_prompts(tmp_path), *options]
    assert main(["train", *arguments]) == 0
    return tmp_path / name


def resume(folder, *options):
    return main(["train", "--resume", str(folder), *options])


def metrics_of(folder):
    return [untimed(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names(folder):
    return [checkpoint.name for checkpoint in checkpoints_of(folder)]


def assert_same_run(folder, whole):
    """Metrics, samples, settings, weights and all that the trainer remembers: the same bits."""
    assert metrics_of(folder) == metrics_of(whole)
    assert (folder / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert (folder / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()
    assert names(folder) == names(whole)
    for checkpoint, expected in zip(checkpoints_of(folder), checkpoints_of(whole), strict=True):
        assert damage(checkpoint) is None
        for file in ("model.safetensors", "trainer/state.safetensors"):
            assert (checkpoint / file).read_bytes() == (expected / file).read_bytes(), (checkpoint, file)
    model = folder / "checkpoint" / "model.safetensors"
    assert model.read_bytes() == (whole / "checkpoint" / "model.safetensors").read_bytes()
    assert not list(folder.rglob(".unfinished-*"))


# --- SIGKILL ------------------------------------------------------------------------------------------------------------

# Children are forked from a process that has imported everything, so that a start takes a fraction of a second. A child tells
# its parent when it comes to a random call of a Python function, in a step, a save, or while it picks the run up; the parent's
# SIGKILL meets it a little later, wherever it is then.
KILLER = """
import os, random, shutil, signal, sys
from pathlib import Path


import lmrl.checkpoint, lmrl.cli, lmrl.figures.trainer, torch, torch.utils.tensorboard

folder, kills, options = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
draw = random.Random(0)
torch.set_num_threads(1)
lmrl.cli.load_parts(lmrl.cli.parse("train", options))  # what the libraries prepare at the first model


def child(pipe, calls):
    run = lmrl.cli.run

    def count(frame, event, argument):
        nonlocal calls
        calls -= event == "call"
        if calls == 0:
            sys.setprofile(None)
            os.write(pipe, b".")

    def counted(*arguments):
        if calls:
            sys.setprofile(count)
        return run(*arguments)

    lmrl.cli.run = counted
    new = ["--output-dir", str(folder.parent), "--name", folder.name, *options]
    go_on = ["--resume", str(folder)] if lmrl.checkpoint.checkpoints_of(folder) else new
    os._exit(lmrl.cli.main(["train", *go_on]))


def spawn(calls):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        child(writer, calls)
    os.close(writer)
    return pid, reader


for _ in range(kills):
    if folder.exists() and not lmrl.checkpoint.checkpoints_of(folder):
        shutil.rmtree(folder)
    pid, reader = spawn(draw.randrange(1, 90_000))
    reached = os.read(reader, 1)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    unfinished = len(list(folder.glob("checkpoints/.unfinished-*/*")))
    done = [checkpoint.name for checkpoint in lmrl.checkpoint.checkpoints_of(folder)][-1:]
    print("killed" if reached and os.WIFSIGNALED(status) else f"ended {status}", *done, unfinished, flush=True)
    os.close(reader)
pid, reader = spawn(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_twenty_kills_change_nothing(tmp_path):
    options = [*QUICK, *few_prompts(tmp_path), "--max-steps", "50", "--save-total-limit", "3", "--warmup-steps", "5"]
    command = [sys.executable, "-c", KILLER, str(tmp_path / "killed"), "20", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    kills = [line for line in done.stdout.splitlines() if line.startswith("killed")]
    assert len(kills) == 20, done.stdout
    assert main(["train", "--output-dir", str(tmp_path), "--name", "whole", *options]) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    assert any(not line.endswith(" 0") for line in kills), "none met a checkpoint that was being written"


# --- signals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_saves_and_the_run_goes_on(number, tmp_path):
    """After a step that is not one of save_steps, so that the run stops where it would not have saved."""
    options = ["--output-dir", str(tmp_path), "--name", "r", *QUICK, *few_prompts(tmp_path)]
    options += ["--max-steps", "400", "--save-steps", "400"]
    command = [sys.executable, "-c", "from lmrl.cli import main; raise SystemExit(main())", "train", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "r" / "metrics.jsonl", time.time() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "finishing this step" in err, err
    assert f"go on with: lmrl train --resume {tmp_path / 'r'}" in out
    done = len(metrics_of(tmp_path / "r"))
    assert 2 <= done < 400 and names(tmp_path / "r") == [f"step-{done:06d}"]
    assert read_record(checkpoints_of(tmp_path / "r")[0])["eval_pass_at_1"] is None
    assert resume(tmp_path / "r", "--max-steps", str(done + 2)) == 0
    assert [record["step"] for record in metrics_of(tmp_path / "r")] == list(range(1, done + 3))


# --- going on -----------------------------------------------------------------------------------------------------------


def test_a_finished_run_has_nothing_to_do_and_stays_as_it_is(tmp_path, capsys):
    folder = start(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*.json*") if path.is_file()}
    assert resume(folder) == 0
    assert "goes on after step 4 of 4" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.rglob("*.json*") if path.is_file()} == before


def test_a_run_that_lacks_only_its_end_gets_it(tmp_path):
    """Killed after the last checkpoint and before what comes after it."""
    folder, whole = start(tmp_path), start(tmp_path, "whole")
    for path in (folder / "learning_curve.png", folder / "samples.jsonl"):
        rows = [] if path.suffix == ".png" else path.read_text().splitlines(keepends=True)
        path.unlink()
        if rows:
            path.write_text("".join(row for row in rows if json.loads(row)["when"] == "before"))
    shutil.rmtree(folder / "checkpoint")
    assert resume(folder) == 0
    assert_same_run(folder, whole)
    assert (folder / "learning_curve.png").exists()


def test_more_steps_at_a_constant_rate_are_those_of_the_longer_run(tmp_path, capsys):
    rate = ["--lr-scheduler-type", "constant", "--warmup-steps", "2"]
    whole = start(tmp_path, "whole", *rate, "--max-steps", "8")
    folder = start(tmp_path, "r", *rate)
    assert resume(folder, "--max-steps", "8") == 0
    assert "max_steps: 4 -> 8" in capsys.readouterr().out
    assert metrics_of(folder) == metrics_of(whole)
    assert json.loads((folder / "config.json").read_text())["max_steps"] == 8
    assert json.loads((folder / "config.json").read_text())["resume"] is None


@pytest.mark.parametrize("options", [["--beta", "0.05"], ["--advantage-estimator", "gae", "--scale-rewards", "none"]])
def test_a_torn_checkpoint_is_set_aside_and_its_steps_are_taken_again(options, tmp_path):
    """Also with a reference and with a critic, which the command line builds anew."""
    folder, whole = start(tmp_path, "r", *options), start(tmp_path, "whole", *options)
    shutil.rmtree(folder / "checkpoints" / "step-000004" / "trainer")
    with pytest.warns(UserWarning, match="step-000004 cannot be used: its trainer/state.json is missing"):
        assert resume(folder) == 0
    assert_same_run(folder, whole)
    assert len(list(folder.glob("checkpoints/damaged-step-000004-*"))) == 1


def test_what_was_logged_after_the_checkpoint_is_cut_off_in_tensorboard_too(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = start(tmp_path)
    shutil.rmtree(folder / "checkpoints" / "step-000004")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # the kill came here
    assert resume(folder) == 0
    events = EventAccumulator(str(folder)).Reload().Scalars("reward")
    assert [event.step for event in events] == [1, 2, 3, 4]
    assert [event.value for event in events] == pytest.approx([record["reward"] for record in metrics_of(folder)])


def test_a_folder_that_was_moved_goes_on_where_it_is(tmp_path):
    folder = start(tmp_path)
    moved = tmp_path / "elsewhere" / "s"
    moved.parent.mkdir()
    folder.rename(moved)
    assert resume(moved, "--max-steps", "6") == 0
    assert len(metrics_of(moved)) == 6 and not folder.exists()


def test_a_reward_of_ones_own_that_has_moved(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def score(prompts, completions, **columns):\n    return [float('7' in c) for c in completions]\n")
    folder = start(tmp_path, "r", "--reward", f"{file}:score")
    file.rename(tmp_path / "yours.py")
    assert resume(folder, "--max-steps", "6") == 2
    assert "mine.py" in capsys.readouterr().err
    assert resume(folder, "--max-steps", "6", "--reward", f"{tmp_path / 'yours.py'}:score") == 0
    assert "yours.py:score" in capsys.readouterr().out and len(metrics_of(folder)) == 6


def test_without_a_first_checkpoint_nothing_goes_on_and_nothing_is_deleted(tmp_path, capsys):
    folder = start(tmp_path)
    shutil.rmtree(folder / "checkpoints")
    files = sorted(folder.rglob("*"))
    for place in (folder, folder / "checkpoint"):
        assert resume(place) == 2
        assert f"lmrl: {place} has no checkpoints/" in capsys.readouterr().err
    assert resume(tmp_path / "nowhere") == 2
    assert f"lmrl: there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == files


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--learning-rate", "0.5"], ["learning_rate: 0.001 -> 0.5", "Leave that out"]),
        (["--seed", "3"], ["seed: 0 -> 3"]),
        (["--name", "s"], ["name: r -> s"]),
        (["--max-steps", "3"], ["max_steps is 3, and the run has done 4 steps"]),
        (["--save-total-limit", "0"], ["save_total_limit is 0"]),
        (["--config", "configs/dapo.yaml"], ["--config takes one file", "--resume takes the folder"]),
    ],
)
def test_what_would_be_another_run_is_refused_before_anything_changes(options, words, tmp_path, capsys, finished):
    files = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert resume(finished, *options) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lmrl: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), lines
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == files


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return start(tmp_path_factory.mktemp("runs"))


def test_a_corrupted_line_of_the_metrics_is_named_and_moving_them_away_helps(tmp_path, capsys):
    folder = start(tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    assert resume(folder, "--max-steps", "6") == 2
    assert "metrics.jsonl, line 2 is not a record" in capsys.readouterr().err
    (folder / "metrics.jsonl").rename(tmp_path / "old.jsonl")
    assert resume(folder, "--max-steps", "6") == 0
    assert [record["step"] for record in metrics_of(folder)] == [5, 6]
    assert resume(folder, "--max-steps", "8") == 0
    assert [record["step"] for record in metrics_of(folder)] == [5, 6, 7, 8]


def test_held_out_results_are_logged_at_every_save_and_the_best_is_known(tmp_path):
    folder = start(tmp_path)
    logged = {record["step"]: record.get("eval_pass_at_1") for record in metrics_of(folder)}
    kept = {read_record(checkpoint)["step"]: read_record(checkpoint) for checkpoint in checkpoints_of(folder)}
    assert logged[1] is None and logged[3] is None
    assert {step: kept[step]["eval_pass_at_1"] for step in (2, 4)} == {2: logged[2], 4: logged[4]}
    after = json.loads((folder / "evaluation.json").read_text())["after"]
    assert after["pass_at_1"] == logged[4]


def test_the_moments_are_in_the_checkpoint_by_parameter(finished):
    tensors = load_file(checkpoints_of(finished)[-1] / "trainer/state.safetensors")
    assert {"learner.0.exp_avg", "learner.0.exp_avg_sq", "data.waiting", "sampling.generator"} <= tensors.keys()
    assert "critic.head.weight" not in tensors


def test_the_best_checkpoint_is_named_if_it_is_not_the_last(tmp_path, capsys):
    """A reward that falls from one evaluation to the next: before, step 2, step 4."""
    file = tmp_path / "falling.py"
    file.write_text(
        "from itertools import count\n"
        "calls = count()\n"
        "def score(prompts, completions, **columns):\n"
        "    return [float(next(calls) < 80) for _ in completions]\n"
    )
    folder = start(
        tmp_path, "r", "--reward", f"{file}:score", "--num-eval-problems", "4", "--num-eval-generations", "4"
    )
    measured = [read_record(checkpoint)["eval_pass_at_1"] for checkpoint in checkpoints_of(folder)]
    assert measured[0] > measured[1]
    assert (
        f"best of the measured: {folder}/checkpoints/step-000002, pass@1 {measured[0]:.3f}" in capsys.readouterr().out
    )


def test_several_processes_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--output-dir", str(tmp_path / "runs"), *QUICK]) == 2
    assert "one process on one device" in capsys.readouterr().err and not (tmp_path / "runs").exists()
