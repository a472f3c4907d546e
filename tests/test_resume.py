"""Whole runs that are killed, interrupted, damaged, moved, and go on."""

import errno
import itertools
import json
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import refusal
from test_trainer import SMALL, count_sevens, make_trainer, untimed

from lmrl.checkpoint import checkpoints_of, damage, newest_checkpoint, read_record, restore, step_of
from lmrl.cli import main
from lmrl.figures.trainer import learning_curve
from lmrl.policy import warm_start_folder
from lmrl.rewards import RewardError
from lmrl.trainer import run

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
import os, random, shutil, signal, sys, threading
from pathlib import Path

import lmrl.checkpoint, lmrl.cli, lmrl.figures.trainer, torch, torch.utils.tensorboard
from tqdm import tqdm

folder, kills, options = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
draw = random.Random(0)
torch.set_num_threads(1)
tqdm.set_lock(threading.RLock())  # tqdm's own is shared by all that are forked: the next one would wait for one that was killed
lmrl.cli.load_model(lmrl.cli.parse("train", options))  # what the libraries prepare at the first model


def child(pipe, calls):
    run = lmrl.cli.run
    tqdm.set_lock(threading.RLock())  # nobody holds it

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
    torch.set_num_threads(1)  # as the children
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


# --- the user's reward function -------------------------------------------------------------------------------------------


def raises(scores):
    raise KeyError("truth")


def hangs(scores):
    time.sleep(5)


def is_killed(scores):
    raise KeyboardInterrupt  # which nobody catches, as nobody catches a kill


FAULTS = {
    "raises": (raises, "raised KeyError"),
    "too few": (lambda scores: scores[:-1], "returned 31 rewards for 32|returned 15 rewards for 16"),
    "NaN": (lambda scores: [float("nan"), *scores[1:]], "returned nan"),
    "hangs": (hangs, "no answer for (32|16) completions within 2 s; .*or raise reward_timeout"),
    "killed": (is_killed, None),
}
LIMITED = replace(
    SMALL, save_steps=2, save_total_limit=None, reward_timeout=2.0
)  # 1 evaluation, then 2 steps and an evaluation, three times


def faulty(config, call=0, fault=None):
    """A trainer whose reward function has a fault at its ``call``."""
    calls = itertools.count(1)

    def sevens(prompts, completions, **columns):
        scores = count_sevens(prompts, completions)
        return fault(scores) if next(calls) == call else scores

    return make_trainer(config, sevens)


@pytest.fixture(scope="module")
def never_failed(tmp_path_factory):
    return run(faulty(replace(LIMITED, output_dir=str(tmp_path_factory.mktemp("runs")))), learning_curve).folder


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("call", "kept", "logged"), [(9, 5, 5), (7, 4, 4), (10, 6, 6), (2, 0, 0)], ids=["step", "save", "end", "first step"]
)
def test_a_reward_function_costs_no_step_whatever_it_does(call, kept, logged, fault, tmp_path, capsys, never_failed):
    """Also where it is asked by the evaluation at a save; and the run that goes on is the one that never failed."""
    function, words = FAULTS[fault]
    with pytest.raises(KeyboardInterrupt if fault == "killed" else RewardError, match=words):
        run(faulty(replace(LIMITED, output_dir=str(tmp_path)), call, function), learning_curve)
    folder = tmp_path / never_failed.name
    if fault == "killed" and call == 2:
        return  # before anything is saved
    if fault == "killed":
        kept -= kept % 2  # what the last steps have done is lost, what an evaluation was to come after is not
    else:
        assert f"saved after step {kept}; go on with: lmrl train --resume {folder}" in capsys.readouterr().err
    assert len(metrics_of(folder)) == logged and newest_checkpoint(folder).name == f"step-{kept:06d}"
    measured = read_record(newest_checkpoint(folder))["eval_pass_at_1"] is not None
    assert measured == (kept == 4 and call == 9)
    go_on(folder)
    for extra in (folder / "checkpoints" / name for name in ("step-000000", "step-000005")):
        shutil.rmtree(extra, ignore_errors=True)
    assert_same_run(folder, never_failed)
    results = [[read_record(c)["eval_pass_at_1"] for c in checkpoints_of(place)] for place in (folder, never_failed)]
    assert results[0] == results[1] and None not in results[0]


def go_on(folder, trainer=None):
    trainer = trainer or faulty(replace(LIMITED, output_dir=str(folder.parent), resume=str(folder)))
    restore(trainer, newest_checkpoint(folder))
    return run(trainer, learning_curve)


def test_a_step_that_failed_can_be_taken_by_the_same_trainer():
    whole, broken = faulty(LIMITED), faulty(LIMITED, 2, raises)
    expected = [untimed(whole.step()) for _ in range(3)]
    found = [untimed(broken.step())]
    for again in (False, True):
        broken.task = replace(broken.task, reward=count_sevens if again else broken.task.reward)
        if not again:
            with pytest.raises(RewardError):
                broken.step()
    assert found + [untimed(broken.step()) for _ in range(2)] == expected


def test_a_reward_function_that_hangs_ends_the_command_and_the_run_is_saved(tmp_path, capsys):
    file = tmp_path / "slow.py"
    file.write_text(
        "import itertools, time\n"
        "calls = itertools.count()\n"
        "def score(prompts, completions, **columns):\n"
        "    if next(calls) == 2:\n"  # after the evaluation and a step
        "        time.sleep(300)\n"
        "    return [float('7' in text) for text in completions]\n"
    )
    options = ["--output-dir", str(tmp_path), "--name", "r", *QUICK, *few_prompts(tmp_path)]
    assert main(["train", *options, "--reward", f"{file}:score", "--reward-timeout", "2"]) == 2
    err = capsys.readouterr().err
    assert "lmrl: reward function score: no answer for 16 completions within 2 s; give it a time limit" in err
    assert "saved after step 1; go on with" in err and names(tmp_path / "r") == ["step-000001"]
    file.write_text(file.read_text().replace("== 2", "== -1"))
    assert resume(tmp_path / "r", "--reward-timeout", "60") == 0
    assert len(metrics_of(tmp_path / "r")) == 4


# --- a full disk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["checkpoint.publish", "trainer.write_pass_at_1", "metrics.MetricsLog.write", "trainer.start_run"])  # fmt: skip
def test_a_full_disk_is_told_with_what_to_do_whichever_file_it_meets(place, tmp_path, monkeypatch):
    def full(*arguments):
        if place == "trainer.start_run" or checkpoints_of(tmp_path / "r"):
            no_room = OSError(errno.ENOSPC, "No space left on device")
            raise shutil.Error([("from", "to", str(no_room))]) if place.endswith("publish") else no_room
        return original(*arguments)

    owner, _, name = f"lmrl.{place}".rpartition(".")
    original = getattr(pkgutil.resolve_name(owner), name)
    monkeypatch.setattr(f"lmrl.{place}", full)
    remedy = (
        "start the run again" if place == "trainer.start_run" else f"go on with lmrl train --resume {tmp_path / 'r'}"
    )
    config = replace(LIMITED, output_dir=str(tmp_path), name="r")
    with pytest.raises(OSError, match=f"cannot write .*No space left.*make room, then {remedy}$"):
        run(faulty(config), learning_curve)
    if place != "trainer.start_run":
        monkeypatch.undo()
        go_on(tmp_path / "r", faulty(replace(config, resume=str(tmp_path / "r"))))
        assert len(metrics_of(tmp_path / "r")) == config.max_steps


# --- one process at a time ------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_before_it_changes_anything_and_goes_on_after_a_kill(tmp_path, capsys):
    options = ["--output-dir", str(tmp_path), "--name", "r", *QUICK, *few_prompts(tmp_path)]
    command = [sys.executable, "-c", "from lmrl.cli import main; raise SystemExit(main())", "train", *options]
    process = subprocess.Popen(
        [*command, "--max-steps", "100000"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.time() + 300
    while not checkpoints_of(tmp_path / "r"):
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.05)
    try:
        process.send_signal(signal.SIGSTOP)  # it holds the lock and writes nothing
        files = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
        one_more = str(step_of(newest_checkpoint(tmp_path / "r")) + 1)  # without the lock it would be one step, not all
        assert resume(tmp_path / "r", "--max-steps", one_more) == 2
        err = capsys.readouterr().err
        assert f"lmrl: another process (number {process.pid} on " in err and f"writes to {tmp_path / 'r'}; wait" in err
        assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == files
    finally:
        process.kill()
        process.communicate()
    done = newest_checkpoint(tmp_path / "r")
    assert resume(tmp_path / "r", "--max-steps", str(step_of(done) + 1)) == 0


def test_a_trainer_that_was_restored_before_the_run_went_on_does_not_set_its_checkpoints_aside(tmp_path):
    first = run(faulty(replace(LIMITED, output_dir=str(tmp_path), max_steps=2)), learning_curve).folder
    settings = replace(LIMITED, output_dir=str(tmp_path), resume=str(first), lr_scheduler_type="linear")
    late = faulty(settings)
    restore(late, newest_checkpoint(first))
    go_on(first)
    files = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    assert "went on from step 2 to 6 meanwhile; resume it once more" in refusal(run, late, learning_curve)
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == files


def test_the_published_policy_is_that_of_the_checkpoint_after_a_kill_between_the_two(tmp_path):
    folder = start(tmp_path)
    older = checkpoints_of(folder)[0]
    shutil.copy(older / "model.safetensors", folder / "checkpoint" / "old")
    (folder / "checkpoint" / "old").replace(folder / "checkpoint" / "model.safetensors")
    assert resume(folder) == 0
    newest = checkpoints_of(folder)[-1] / "model.safetensors"
    assert (folder / "checkpoint" / "model.safetensors").read_bytes() == newest.read_bytes()
    assert not (folder / "checkpoint" / "old").exists()


# --- going on -----------------------------------------------------------------------------------------------------------


def test_a_finished_run_has_nothing_to_do_and_stays_as_it_is(tmp_path, capsys):
    folder = start(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*.json*") if path.is_file()}
    assert resume(folder) == 0
    assert "goes on after step 4 of 4" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in folder.rglob("*.json*") if path.is_file()} == before


def test_a_name_that_is_taken_can_be_gone_on_with_if_there_is_a_checkpoint(tmp_path, capsys):
    (tmp_path / "early").mkdir()
    arguments = ["train", "--output-dir", str(tmp_path), *QUICK]
    assert (
        main([*arguments, "--name", "early"]) == 2
        and "exists; choose another --name, or move" in capsys.readouterr().err
    )
    assert resume(tmp_path / "early") == 2 and "move this one away and start the run again" in capsys.readouterr().err
    folder = start(tmp_path)
    capsys.readouterr()
    assert main([*arguments, "--name", "r"]) == 2
    assert f"exists; go on with --resume {folder}, or choose another --name" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "[1]", "{", '{"before": {"a": 1}}'])
def test_held_out_results_that_are_not_the_runs_are_named(tmp_path, capsys, content):
    folder = start(tmp_path)
    (folder / "evaluation.json").write_text(content)
    assert resume(folder, "--max-steps", "6") == 2
    assert f"{folder}: evaluation.json and samples.jsonl are not those of this run" in capsys.readouterr().err


def test_held_out_results_of_an_earlier_version_are_read(tmp_path):
    folder, whole = start(tmp_path), start(tmp_path, "whole")
    results = json.loads((folder / "evaluation.json").read_text())
    for result in results.values():
        result["half_width"] = 0.1
    (folder / "evaluation.json").write_text(json.dumps(results))
    for place in (folder, whole):
        assert resume(place, "--max-steps", "5") == 0
    assert (folder / "evaluation.json").read_text() == (whole / "evaluation.json").read_text()


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
    yours = tmp_path / "yours.py"
    with warnings.catch_warnings(action="error"):
        assert resume(folder, "--max-steps", "6", "--reward", f"{yours}:score") == 0
    assert "yours.py:score" in capsys.readouterr().out and len(metrics_of(folder)) == 6
    yours.write_text(yours.read_text().replace("7", "8"))
    with pytest.warns(UserWarning, match="the reward function is not the one with which .*step-000006 was made"):
        assert resume(folder, "--max-steps", "8") == 0


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
