"""Checkpoints in one process: what is in them, that it is whole, and that a restored trainer takes the same steps."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict, replace

import pytest
import torch
from test_trainer import SMALL, count_sevens, examples, make_trainer, parameters, untimed
from tokenizers.normalizers import Lowercase
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmrl.checkpoint import (
    EVALUATION,
    RECORD,
    best_checkpoint,
    changed_settings,
    checkpoints_of,
    damage,
    load_optimizer,
    locked,
    newest_checkpoint,
    optimizer_tensors,
    prune_checkpoints,
    publish,
    read_record,
    restore,
    save_checkpoint,
    trainer_tensors,
    write_checkpoint,
    write_pass_at_1,
)
from lmrl.config import TrainConfig
from lmrl.metrics import json_line, read_metrics
from lmrl.policy import build_tokenizer
from lmrl.tasks import Example
from lmrl.trainer import Trainer

FILES = {"config.json", "generation_config.json", "lmrl.json", "model.safetensors", "tokenizer.json"}
FILES |= {"tokenizer_config.json", "trainer/state.json", "trainer/state.safetensors", "SHA256SUMS"}


# --- what is remembered -------------------------------------------------------------------------------------------------


def adam_after_a_restart(remember):
    """Where gradients 1 and -1 lead with Adam at learning rate 0.1, in two processes."""
    weight, moments = torch.zeros(1, requires_grad=True), {}
    for gradient in (1.0, -1.0):
        optimizer = torch.optim.Adam([weight], lr=0.1)
        load_optimizer(optimizer, moments if remember else {})
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        moments = optimizer_tensors(optimizer)
    return weight.item()


def test_pitfall_22_forgotten_moments_end_elsewhere():
    assert adam_after_a_restart(remember=True) == pytest.approx(-0.0947, abs=1e-4)
    assert adam_after_a_restart(remember=False) == pytest.approx(0.0, abs=1e-6)


def ten_prompts(config):
    """A trainer over ten prompts, two in a step, and the list in which it notes those that it asks."""
    asked = []

    def spy(prompts, completions, **columns):
        asked.append(list(dict.fromkeys(prompts)))
        return count_sevens(prompts, completions)

    made = make_trainer(replace(config, max_steps=10, per_device_train_batch_size=8), reward=spy)
    task = replace(made.task, train=examples(10))
    return Trainer(made.config, made.model, made.tokenizer, task, made.sampler), asked


@pytest.mark.parametrize("stop", [2, 5, 7])  # within a pass over the data, at its end, in the next one
def test_pitfall_22_no_prompt_is_asked_twice_or_left_out(stop, tmp_path):
    whole, asked = ten_prompts(SMALL)
    for _ in range(10):
        whole.step()
    first, before = ten_prompts(SMALL)
    for _ in range(stop):
        first.step()
    second, after = ten_prompts(SMALL)
    restore(second, write_checkpoint(first, tmp_path))
    for _ in range(10 - stop):
        second.step()
    assert before + after == asked
    for one_pass in (asked[:5], asked[5:]):
        assert len(set(sum(one_pass, []))) == 10


RECIPES = {
    "grpo": {},
    "two passes, constant rate, weight decay": {
        "num_iterations": 2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "warmup_steps": 3,
    },
    "ppo": {"advantage_estimator": "gae", "scale_rewards": "none", "num_iterations": 2},
    "ppo on one trunk": {"advantage_estimator": "gae", "scale_rewards": "none", "share_critic_trunk": True},
    "a reference": {"beta": 0.05},
    "several draws": {"dynamic_sampling": True},
    "fresh endings": {"advantage_estimator": "monte_carlo", "scale_rewards": "none", "num_value_samples": 2},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 with masters": {"dtype": "bfloat16", "master_weights": True},
    "float16 with masters": {"dtype": "float16", "master_weights": True},
}


def trainer_of(settings):
    config = replace(SMALL, **settings)
    return make_trainer(config, dtype=getattr(torch, config.dtype))


def steps(trainer, count):
    return [untimed(trainer.step()) for _ in range(count)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_restored_trainer_takes_the_same_steps(name, tmp_path):
    whole = trainer_of(RECIPES[name])
    expected = steps(whole, 5)
    first, second = trainer_of(RECIPES[name]), trainer_of(RECIPES[name])
    metrics = steps(first, 2)
    restore(second, write_checkpoint(first, tmp_path))
    assert second.steps_done == 2
    assert metrics + steps(second, 3) == expected
    assert torch.equal(parameters(second), parameters(whole))
    ends = trainer_tensors(second), trainer_tensors(whole)
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_used_trainer_forgets_what_it_had(tmp_path):
    """Restoring puts everything in place, not only what a fresh trainer lacks."""
    first, second = make_trainer(), make_trainer(model_seed=1)
    steps(first, 1)
    steps(second, 3)
    restore(second, write_checkpoint(first, tmp_path))
    assert steps(second, 2) == steps(first, 2)


def test_the_loss_scale_and_the_counts_of_skipped_steps_are_kept(tmp_path):
    settings = {"dtype": "float16", "master_weights": True}
    first, second = trainer_of(settings), trainer_of(settings)
    first.learner.scale, first.learner.good_steps, first.learner.skipped_in_a_row = 8.0, 5, 2
    restore(second, write_checkpoint(first, tmp_path))
    assert (second.learner.scale, second.learner.good_steps, second.learner.skipped_in_a_row) == (8.0, 5, 2)


def test_the_sampler_is_told_of_the_weights(tmp_path):
    first, second = make_trainer(), make_trainer(model_seed=1)
    synced = []

    class Engine:
        def sync(self, model):
            synced.append(model.lm_head.weight.detach().clone())

    second.sampler = Engine()
    restore(second, write_checkpoint(first, tmp_path))
    assert len(synced) == 1 and torch.equal(synced[0], first.model.lm_head.weight)


# --- the files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path):
    """A run with checkpoints of steps 1, 2 and 3."""
    trainer = make_trainer(replace(SMALL, save_total_limit=None))
    for _ in range(3):
        trainer.step()
        save_checkpoint(trainer, tmp_path)
    return tmp_path


def names(folder):
    return [checkpoint.name for checkpoint in checkpoints_of(folder)]


def test_a_checkpoint_is_a_hugging_face_folder_and_nothing_in_it_is_pickled(run_folder):
    checkpoint = checkpoints_of(run_folder)[-1]
    assert {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()} == FILES
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    latest = AutoModelForCausalLM.from_pretrained(run_folder / "checkpoint")
    assert torch.equal(model.lm_head.weight, latest.lm_head.weight)
    assert AutoTokenizer.from_pretrained(checkpoint)("1+2=").input_ids
    record = read_record(checkpoint)
    assert record["step"] == 3 and record["config"]["num_generations"] == 4 and record["eval_pass_at_1"] is None


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum")
def test_the_sums_are_those_of_sha256sum(run_folder):
    checkpoint = newest_checkpoint(run_folder)
    command = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    subprocess.run(command, cwd=checkpoint, check=True, capture_output=True)
    (checkpoint / "config.json").write_text("{}")
    assert subprocess.run(command, cwd=checkpoint, capture_output=True).returncode == 1


@pytest.mark.parametrize("file", sorted(FILES))
@pytest.mark.parametrize("fault", ["one bit flipped", "torn", "missing"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(file, fault, run_folder):
    path = checkpoints_of(run_folder)[-1] / file
    content = path.read_bytes()
    if fault == "missing":
        path.unlink()
    elif fault == "torn":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert damage(path.parents[file.count("/")]) is not None
    with pytest.warns(UserWarning, match=f"step-000003 cannot be used: its ({re.escape(file)}|.* is not what)"):
        assert newest_checkpoint(run_folder).name == "step-000002"


def test_a_list_of_sums_that_ends_early_or_is_empty_is_not_taken(run_folder):
    checkpoint = checkpoints_of(run_folder)[-1]
    lines = (checkpoint / "SHA256SUMS").read_text().splitlines(keepends=True)
    for kept in range(len(lines)):
        (checkpoint / "SHA256SUMS").write_text("".join(lines[:kept]))
        assert damage(checkpoint) is not None
    (checkpoint / "SHA256SUMS").write_text("".join(lines))
    assert damage(checkpoint) is None


def test_what_a_file_manager_leaves_behind_does_no_harm(run_folder):
    checkpoint = checkpoints_of(run_folder)[-1]
    (checkpoint / ".DS_Store").write_text("icons")
    (run_folder / "checkpoints" / "step-by-step.txt").write_text("notes")
    assert newest_checkpoint(run_folder) == checkpoint


def test_if_none_is_whole_every_fault_is_named_and_nothing_is_deleted(run_folder):
    for checkpoint in checkpoints_of(run_folder):
        (checkpoint / "trainer/state.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="no checkpoint.*step-000003.*step-000001"):
        newest_checkpoint(run_folder)
    assert names(run_folder) == ["step-000001", "step-000002", "step-000003"]


def test_a_folder_without_checkpoints_says_what_to_give(tmp_path):
    with pytest.raises(ValueError, match="has no checkpoints/.*give the folder of a run"):
        newest_checkpoint(tmp_path)


def test_the_newest_and_the_best_are_kept(tmp_path):
    trainer = make_trainer(replace(SMALL, save_total_limit=2))
    kept = []
    for step, pass_at_1 in enumerate([0.2, 0.7, None, 0.5, 0.7, 0.1, 0.0], start=1):
        trainer.steps_done = step
        checkpoint = save_checkpoint(trainer, tmp_path)
        if pass_at_1 is not None:
            write_pass_at_1(checkpoint, pass_at_1)
        prune_checkpoints(tmp_path, 2)
        kept.append([int(name[-1]) for name in names(tmp_path)])
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]
    assert best_checkpoint(tmp_path).name == "step-000005"
    prune_checkpoints(tmp_path, None)
    assert len(names(tmp_path)) == 3
    prune_checkpoints(tmp_path, 1)
    assert names(tmp_path) == ["step-000005", "step-000007"]
    assert json.loads((tmp_path / "checkpoint" / "lmrl.json").read_text()) == {"step": 7}


def test_no_best_without_a_measurement(run_folder):
    assert best_checkpoint(run_folder) is None


def test_pass_at_1_comes_later_and_the_checkpoint_is_whole_before_and_after(run_folder):
    checkpoint = newest_checkpoint(run_folder)
    assert read_record(checkpoint)["eval_pass_at_1"] is None and damage(checkpoint) is None
    write_pass_at_1(checkpoint, 0.25)
    assert read_record(checkpoint)["eval_pass_at_1"] == 0.25 and best_checkpoint(run_folder) == checkpoint
    assert damage(checkpoint) is None
    (checkpoint / "trainer" / ".unfinished-evaluation.json").write_text("{")  # a kill while it is written again
    assert damage(checkpoint) is None and read_record(checkpoint)["eval_pass_at_1"] == 0.25
    (checkpoint / EVALUATION).write_text('{"eval_pa')  # a torn disk: not measured, and still whole
    assert read_record(checkpoint)["eval_pass_at_1"] is None and damage(checkpoint) is None


def test_a_checkpoint_of_an_earlier_version_has_its_pass_at_1_among_the_settings(run_folder):
    checkpoint = newest_checkpoint(run_folder)
    record = json.loads((checkpoint / "trainer/state.json").read_text())
    (checkpoint / "trainer/state.json").write_text(json.dumps({**record, "eval_pass_at_1": 0.5}))
    assert read_record(checkpoint)["eval_pass_at_1"] == 0.5 and best_checkpoint(run_folder) == checkpoint


def test_the_weights_are_written_once_and_have_two_names(run_folder):
    checkpoint, folder = newest_checkpoint(run_folder), run_folder / "checkpoint"
    publish(checkpoint, folder)
    published = {path.name for path in folder.iterdir()}
    assert published == {name for name in FILES if "/" not in name and name != "SHA256SUMS"}
    shared = {name for name in published if (folder / name).samefile(checkpoint / name)}
    assert shared == {"model.safetensors"}  # a text may be edited by hand
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data.zero_()
    model.save_pretrained(folder)  # what a user may do with a folder of theirs
    assert damage(checkpoint) is None and not AutoModelForCausalLM.from_pretrained(folder).lm_head.weight.any()


def test_where_a_file_has_one_name_alone_it_is_copied(run_folder, monkeypatch):
    def refuse(*names):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr("lmrl.checkpoint.os.link", refuse)
    checkpoint = newest_checkpoint(run_folder)
    publish(checkpoint, run_folder / "checkpoint")
    copy = run_folder / "checkpoint" / "model.safetensors"
    assert copy.read_bytes() == (checkpoint / copy.name).read_bytes() and not copy.samefile(checkpoint / copy.name)


# --- one process at a time ----------------------------------------------------------------------------------------------

HOLDER = """
import os, sys, time
from pathlib import Path
from lmrl.checkpoint import locked

with locked(Path(sys.argv[1])):
    child = os.fork()  # as of a pool of workers that the reward function has
    if child:
        print(child, flush=True)
    time.sleep(300)
"""


def lock_twice(folder):
    try:
        with locked(folder), locked(folder):
            return "locked"
    except BlockingIOError as error:
        return str(error)


def test_a_lock_names_its_process_and_is_gone_with_it_even_if_its_children_live(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        words = rf"another process \(number {process.pid} on .*\) writes to {tmp_path}; wait until it ends.*--resume"
        assert re.search(words, lock_twice(tmp_path))
        process.kill()
        process.wait()
        os.kill(child, 0)  # lives
        assert lock_twice(tmp_path) == "locked"  # the same process may ask again
        with locked(tmp_path):
            assert (tmp_path / ".lock").read_text().startswith(f"number {os.getpid()} on ")
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch):
    def unknown(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("lmrl.checkpoint.fcntl.lockf", unknown)
    with pytest.warns(UserWarning, match="cannot be locked .*not implemented.*no other process"), locked(tmp_path):
        pass


@pytest.mark.parametrize(
    "content", ["5", "null", '{"eval_pass_at_1": "x"}', '{"eval_pass_at_1": NaN}', "[1]", "{}", "{"]
)
def test_a_pass_at_1_that_is_none_is_not_known(run_folder, content):
    checkpoint = newest_checkpoint(run_folder)
    (checkpoint / "trainer" / "evaluation.json").write_text(content)
    assert read_record(checkpoint)["eval_pass_at_1"] is None
    assert best_checkpoint(run_folder) is None


@pytest.mark.parametrize("content", ["5", "null", "[1]", "{}"])
def test_a_record_that_is_none_is_named_and_not_the_best(run_folder, content):
    first, *_, last = checkpoints_of(run_folder)
    write_pass_at_1(first, 0.5)
    write_pass_at_1(last, 0.75)
    (last / "trainer/state.json").write_text(content)
    assert f"{last / 'trainer/state.json'} is not the record of a checkpoint; move {last} away" == refusal(
        read_record, last
    )
    assert best_checkpoint(run_folder) == first


def test_what_only_has_the_name_of_a_checkpoint_is_none(run_folder):
    real = checkpoints_of(run_folder)
    (run_folder / "checkpoints" / "step-000000").write_text("a file")
    (run_folder / "checkpoints" / "step-000009").symlink_to(real[-1])
    (run_folder / "checkpoints" / "step-²").mkdir()
    assert checkpoints_of(run_folder) == real
    prune_checkpoints(run_folder, 1)


def test_steps_are_numbers_also_beyond_six_digits(tmp_path):
    for step in (1_000_000, 999_999):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert names(tmp_path) == ["step-999999", "step-1000000"]


@pytest.mark.parametrize("failing", ["save_file", "save_model", "seal"])
def test_a_failed_write_leaves_the_last_checkpoints_and_no_litter(failing, run_folder, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    trainer = make_trainer()
    restore(trainer, newest_checkpoint(run_folder))
    trainer.step()
    monkeypatch.setattr(f"lmrl.checkpoint.{failing}", full)
    with pytest.raises(OSError, match="cannot write .*step-000004 .*No space left.*make room.*--resume"):
        save_checkpoint(trainer, run_folder)
    assert names(run_folder) == ["step-000001", "step-000002", "step-000003"]
    assert all(damage(checkpoint) is None for checkpoint in checkpoints_of(run_folder))
    assert not list(run_folder.rglob(".unfinished-*"))


def test_the_metrics_are_on_the_disk_before_their_checkpoint_is_there(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("lmrl.checkpoint.flush_to_disk", lambda path: flushed.append((path, names(tmp_path))))
    (tmp_path / "metrics.jsonl").write_text("")
    write_checkpoint(make_trainer(), tmp_path)
    assert (tmp_path / "metrics.jsonl", []) in flushed and (tmp_path, []) in flushed


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, "tests")
from test_trainer import make_trainer
from lmrl.checkpoint import save_checkpoint

trainer, folder = make_trainer(), Path(sys.argv[1])
trainer.step()
save_checkpoint(trainer, folder)
trainer.step()
for size in (100, 5_000, 200_000, 400_000):  # bytes that a file may have: the disk is full at different places
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        save_checkpoint(trainer, folder)
    except OSError as error:
        print(error)
"""


def test_a_full_disk_never_costs_the_last_good_checkpoint(tmp_path):
    """The system itself refuses to write more: PyTorch, tokenizers and safetensors each have an error of their own for it."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 4, done.stderr
    for line in lines:
        assert "cannot write" in line and "step-000002" in line and "make room" in line
    assert names(tmp_path) == ["step-000001"] and damage(newest_checkpoint(tmp_path)) is None
    assert not list(tmp_path.rglob(".unfinished-*"))


# --- what may change ----------------------------------------------------------------------------------------------------


def record_of(config, step=4):
    return {"step": step, "config": json.loads(json.dumps(asdict(config)))}


def refusal(function, *arguments):
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return "nothing is refused"


def test_the_same_settings_have_no_changes():
    assert changed_settings(record_of(SMALL), replace(SMALL, resume="runs/r")) == []


def test_settings_that_end_and_save_a_run_may_change_and_are_named():
    config = replace(SMALL, max_steps=9, save_steps=1, num_eval_problems=4, device="cpu")
    lines = changed_settings(record_of(SMALL), config)
    assert lines[0] == "max_steps: 6 -> 9, and the learning rate falls towards the new end"
    assert lines[1:] == ["num_eval_problems: 8 -> 4", "save_steps: 4 -> 1", "device: auto -> cpu"]
    constant = replace(SMALL, lr_scheduler_type="constant")
    assert changed_settings(record_of(constant), replace(constant, max_steps=9)) == ["max_steps: 6 -> 9"]


def test_half_as_much_at_once_and_twice_as_often_is_the_same_run():
    halved = replace(SMALL, per_device_train_batch_size=16, gradient_accumulation_steps=2)
    assert len(changed_settings(record_of(SMALL), halved)) == 2
    with pytest.raises(ValueError, match="completions per step: 32 -> 16"):
        changed_settings(record_of(SMALL), replace(SMALL, per_device_train_batch_size=16))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "other"),
        ("task", "countdown"),
        ("seed", 1),
        ("name", "x"),
        ("num_generations", 8),
        ("temperature", 0.5),
        ("learning_rate", 1e-5),
        ("advantage_estimator", "batch"),
        ("loss_type", "grpo"),
        ("beta", 0.1),
        ("dtype", "bfloat16"),
        ("use_vllm", True),
    ],
)
def test_what_makes_another_run_is_refused_with_both_values(name, value):
    message = refusal(changed_settings, record_of(SMALL), replace(SMALL, **{name: value}))
    assert f"{name}: {getattr(SMALL, name)} -> {value}" in message and "Leave that out, or start a new run" in message


def test_what_changes_no_number_may_change():
    """That checkpointing changes none: test_gradient_checkpointing_keeps_less_and_changes_nothing."""
    config = replace(SMALL, gradient_checkpointing=True, max_skipped_updates=1)
    lines = changed_settings(record_of(SMALL), config)
    assert lines == ["gradient_checkpointing: False -> True", "max_skipped_updates: 3 -> 1"]
    learner = make_trainer(config).learner
    learner.skipped_in_a_row = 2  # of the run before
    with pytest.raises(FloatingPointError, match="3 optimiser steps in a row were skipped"):
        learner.count(False)


def test_a_run_cannot_end_before_where_it_is():
    with pytest.raises(ValueError, match="max_steps is 3, and the run has done 4 steps already"):
        changed_settings(record_of(SMALL), replace(SMALL, max_steps=3))


def test_a_setting_that_an_older_run_did_not_know_had_its_default():
    record = record_of(SMALL)
    del record["config"]["num_value_samples"]
    assert changed_settings(record, SMALL) == []
    with pytest.raises(ValueError, match="num_value_samples: 4 -> 5"):
        changed_settings(record, replace(SMALL, num_value_samples=5))


def test_every_setting_that_may_change_exists():
    from lmrl.checkpoint import MAY_CHANGE

    assert MAY_CHANGE <= asdict(TrainConfig()).keys()


def test_other_prompts_or_another_reference_are_refused_and_change_nothing(tmp_path):
    settings = replace(SMALL, beta=0.1)
    first = make_trainer(settings)
    steps(first, 1)
    checkpoint = write_checkpoint(first, tmp_path)
    other = make_trainer(settings)
    other.reference.lm_head.weight.data[0, 0] += 1e-6
    assert re.search("the run.s reference changed since .*step-000001 was written", refusal(restore, other, checkpoint))
    other = make_trainer(settings)
    other.task.train[3] = Example("9+9=", {"answer": "18"})
    assert "the run's prompts changed" in refusal(restore, other, checkpoint)
    other = make_trainer(settings)
    other.task.train[3] = replace(other.task.train[3], columns={"answer": "7"})
    assert "the run's answers or other columns changed" in refusal(restore, other, checkpoint)
    other = make_trainer(settings)
    other.tokenizer = build_tokenizer("0123456789=+")  # other ids for = and +
    assert "the run's tokenizer changed" in refusal(restore, other, checkpoint)
    assert torch.equal(parameters(other), parameters(make_trainer(settings))) and other.steps_done == 0


def test_other_rules_of_the_tokenizer_are_refused_and_a_padded_call_or_an_older_record_is_not(tmp_path):
    first = make_trainer()
    checkpoint = write_checkpoint(first, tmp_path)
    other = make_trainer()
    other.tokenizer.backend_tokenizer.normalizer = Lowercase()
    assert "the run's tokenizer rules changed" in refusal(restore, other, checkpoint)
    padded = make_trainer()
    padded.tokenizer(["1", "12"], padding=True, truncation=True, max_length=3)
    assert refusal(restore, padded, checkpoint) == "nothing is refused"
    record = json.loads((checkpoint / "trainer/state.json").read_text())
    del record["tokenizer rules"]
    (checkpoint / "trainer/state.json").write_text(json.dumps(record))
    assert refusal(restore, other, checkpoint) == "nothing is refused"


def test_fingerprints_are_taken_once_in_a_run(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr("lmrl.checkpoint.tokenizer_rules", lambda tokenizer: taken.append(1) or "")
    trainer = make_trainer()
    for _ in range(2):
        write_checkpoint(trainer, tmp_path)
    assert taken == [1]


def test_frozen_weights_are_not_copied_and_have_to_be_the_same(tmp_path):
    def frozen(model_seed):
        trainer = make_trainer(model_seed=model_seed)
        trainer.model.model.layers[0].requires_grad_(False)
        return trainer

    checkpoint = write_checkpoint(frozen(0), tmp_path)
    assert refusal(restore, frozen(0), checkpoint) == "nothing is refused"
    assert "the run's frozen weights changed" in refusal(restore, frozen(1), checkpoint)


def test_the_warning_of_another_reward_function_names_the_callers_file(tmp_path):
    first = make_trainer()
    other = make_trainer(reward=lambda prompts, completions, **columns: [0.0] * len(completions))
    checkpoint = write_checkpoint(first, tmp_path)
    with pytest.warns(UserWarning, match="the reward function is not the one") as told:
        restore(other, checkpoint)
    assert [warning.filename for warning in told] == [__file__]


def test_a_checkpoint_of_an_earlier_version_knows_no_reward_function(tmp_path):
    checkpoint = write_checkpoint(make_trainer(), tmp_path)
    record = json.loads((checkpoint / RECORD).read_text())
    del record["reward text"], record["tokenizer rules"]
    (checkpoint / RECORD).write_text(json.dumps(record))
    with warnings.catch_warnings(action="error"):
        assert refusal(restore, make_trainer(), checkpoint) == "nothing is refused"


def test_restore_refuses_other_settings(tmp_path):
    first = make_trainer()
    checkpoint = write_checkpoint(first, tmp_path)
    with pytest.raises(ValueError, match="seed: 0 -> 3"):
        restore(make_trainer(replace(SMALL, seed=3)), checkpoint)


# --- the metrics --------------------------------------------------------------------------------------------------------


@pytest.fixture
def metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json_line({"step": step, "reward": step / 7}) for step in range(1, 6)))
    return path


def test_metrics_are_read_up_to_a_step_and_a_torn_end_is_left_out(metrics_file):
    expected = [{"step": step, "reward": step / 7} for step in range(1, 6)]
    assert read_metrics(metrics_file, 0) == []
    assert read_metrics(metrics_file) == expected and read_metrics(metrics_file, 3) == expected[:3]
    with metrics_file.open("a") as file:
        file.write('{"step": 6, "rew')
    assert read_metrics(metrics_file) == expected and read_metrics(metrics_file, 5) == expected


@pytest.mark.parametrize(
    "damaged", ['{"step": 2, "rew', "[1, 2]", "\x00\x00\x00", '{"reward": 1.0}', "5", '{"step": "2"}', "[" * 100_000]
)
def test_a_corrupted_line_is_named(damaged, metrics_file):
    lines = metrics_file.read_text().splitlines()
    metrics_file.write_text("\n".join([lines[0], damaged, *lines[2:]]) + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is no.*; repair it, or move the file away"):
        read_metrics(metrics_file, 3)
    assert len(read_metrics(metrics_file, 1)) == 1  # beyond the checkpoint it does not matter


def test_metrics_that_end_before_the_checkpoint_are_refused_but_may_be_gone(metrics_file):
    with pytest.raises(ValueError, match="ends with step 5, but step 7 was reached"):
        read_metrics(metrics_file, 7)
    metrics_file.write_text("")
    assert read_metrics(metrics_file, 7) == []
