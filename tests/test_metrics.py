import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_trainer import SMALL, count_sevens, make_trainer

from lmrl.batch import rollouts_from_samples
from lmrl.checkpoint import newest_checkpoint, restore
from lmrl.config import TrainConfig, check_config
from lmrl.figures.trainer import learning_curve
from lmrl.metrics import (
    METRICS,
    MetricsLog,
    json_line,
    mean_metrics,
    metrics_table,
    optional_import,
    peak_memory,
    rollout_metrics,
    summarise,
    tracker_modules,
)
from lmrl.policy import Samples, length_mask, pad_left
from lmrl.rewards import RewardError, WeightedRewards
from lmrl.trainer import run


def test_token_means_are_over_the_step_not_over_micro_batches():
    passes = [
        ({"entropy": torch.tensor([[4.0, 9.0]])}, torch.tensor([[True, False]])),
        ({"entropy": torch.tensor([[0.0, 0.0, 0.0]])}, torch.tensor([[True, True, True]])),
    ]
    assert summarise(passes) == {"entropy": 1.0}


def test_extremes_are_maxima_and_masked_values_do_not_count():
    values = torch.tensor([[0.1, 0.5, float("nan")]])
    mask = torch.tensor([[True, True, False]])
    assert summarise([({"ratio_error": values, "sampler_gap": values}, mask)]) == {
        "ratio_error": pytest.approx(0.5),
        "sampler_gap": pytest.approx(0.5),
    }


def test_without_tokens_every_metric_is_zero():
    empty = torch.zeros(2, 3, dtype=torch.bool)
    assert summarise([({"entropy": torch.full((2, 3), float("nan")), "ratio_error": torch.ones(2, 3)}, empty)]) == {
        "entropy": 0.0,
        "ratio_error": 0.0,
    }


def rollouts_with(rewards, graded):
    rows = len(rewards)
    prompt_ids, prompt_mask = pad_left([[1]] * rows, 0)
    lengths = torch.arange(1, rows + 1)
    logprobs = torch.where(length_mask(lengths, rows), -2.0, float("nan"))
    samples = Samples(torch.zeros(rows, rows, dtype=torch.int64), logprobs, lengths, lengths == rows)
    rollouts = rollouts_from_samples(prompt_ids, prompt_mask, torch.arange(rows) // 2, samples)
    fields = {**vars(rollouts), "rewards": torch.tensor(rewards), "graded": torch.tensor(graded)}
    return type(rollouts)(**fields)


def test_rollout_metrics_exact():
    metrics = rollout_metrics(rollouts_with([1.0, 0.0, 1.0, 1.0], [True] * 4))
    assert metrics == {
        "reward": 0.75,
        "reward_std": pytest.approx(0.4330127),
        "frac_reward_zero_std": 0.5,
        "entropy": pytest.approx(2.0),
        "completion_length": 2.5,
        "truncated": 0.25,
        "ungraded": 0.0,
    }


def test_ungraded_rewards_are_left_out():
    metrics = rollout_metrics(rollouts_with([1.0, float("nan"), 0.0, 0.0], [True, False, True, True]))
    assert metrics["reward"] == pytest.approx(1 / 3) and metrics["ungraded"] == 0.25


def not_json(constant):
    raise ValueError(f"{constant} is not JSON")


def test_a_line_is_strict_json_with_null_for_what_is_not_finite():
    record = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.5, "e": 2, "f": "NaN", "g": True}
    line = json_line(record)
    assert line.endswith("\n") and line.count("\n") == 1
    expected = {**record, "a": None, "b": None, "c": None}
    assert json.loads(line, parse_constant=not_json) == expected


def test_a_metric_that_is_not_finite_is_null_in_the_file(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "kl_old": float("inf")})
    log.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=not_json) == {"step": 1, "kl_old": None}


def test_the_log_writes_each_step_at_once(tmp_path):
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "reward": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "reward": 0.5}
    log.write({"step": 2, "reward": 0.75})
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]


def test_a_missing_package_names_its_extra():
    with pytest.raises(
        ImportError, match=r"no_such_module is not installed: .*pip install -c constraints.txt -e '.\[train\]'"
    ):
        optional_import("no_such_module", "train")


def test_peak_memory_is_in_gibibytes():
    import resource

    assert 0.05 < peak_memory("cpu") < 64
    assert peak_memory("cpu") == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, rel=0.1)


# --- the table --------------------------------------------------------------------------------------------------------


def names_logged(metrics):
    return {"reward/NAME" if name.startswith("reward/") else name for name in metrics}


def test_every_metric_that_is_logged_is_in_the_table_and_every_one_there_is_logged(tmp_path):
    """By the default run, by PPO with its critic, and with a KL penalty and two reward functions."""
    result = run(make_trainer(replace(SMALL, max_steps=2, save_steps=1, output_dir=str(tmp_path))), learning_curve)
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    logged = set().union(*(names_logged(json.loads(line)) for line in lines))
    logged |= names_logged(make_trainer(replace(SMALL, advantage_estimator="gae", scale_rewards="none")).step())
    trainer = make_trainer(replace(SMALL, beta=0.1), reward=WeightedRewards([count_sevens, count_sevens]))
    logged |= names_logged(trainer.step())
    assert logged == METRICS.keys()


def test_the_table_is_markdown_with_one_line_per_metric():
    lines = metrics_table().splitlines()
    assert len(lines) == 2 + len(METRICS) and all(line.count("|") == 5 for line in lines)
    assert all(metric.meaning and 1 <= metric.section <= 16 for metric in METRICS.values())


# --- what a reward function counts ------------------------------------------------------------------------------------


def counting(counts):
    """A reward function that says at each call the next of ``counts``."""
    left = iter(counts)

    def reward(prompts, completions, **columns):
        reward.metrics = {"timeouts": next(left), "reward": -1}
        return [float(i % 2) for i in range(len(completions))]

    return reward


def test_what_a_reward_function_counts_is_logged_with_its_step():
    trainer = make_trainer(reward=counting([3, 5]))
    steps = [trainer.step() for _ in range(2)]
    assert [step["timeouts"] for step in steps] == [3.0, 5.0]
    assert [step["reward"] for step in steps] == [0.5, 0.5]  # a name of ours stays ours


def test_over_the_draws_of_a_step_it_is_the_mean():
    assert mean_metrics([{"a": 1.0}, {"a": 3.0, "b": 5.0}]) == {"a": 2.0, "b": 5.0} and mean_metrics([]) == {}
    tied = {"calls": 0}

    def reward(prompts, completions, **columns):
        tied["calls"] += 1
        reward.metrics = {"timeouts": tied["calls"]}
        return [float(i % 2 and tied["calls"] > 1) for i in range(len(completions))]

    assert make_trainer(replace(SMALL, dynamic_sampling=True), reward=reward).step()["timeouts"] == 1.5


def test_the_endings_of_monte_carlo_values_do_not_count():
    config = replace(SMALL, advantage_estimator="monte_carlo", scale_rewards="none")
    assert make_trainer(config, reward=counting([3, 5])).step()["timeouts"] == 3.0


@pytest.mark.parametrize("value", ["many", None, float("nan"), float("inf")])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(RewardError, match="reward: its metric 'timeouts' is .*not a number"):
        make_trainer(reward=counting([value])).step()


# --- trackers ---------------------------------------------------------------------------------------------------------


def stand_in(monkeypatch, name):
    """A module in place of the package ``name``, and the list of its calls."""
    calls = []
    module = SimpleNamespace(
        init=lambda **options: calls.append(("init", options)),
        log=lambda metrics, step: calls.append(("log", step, metrics)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_metrics_go_to_every_tracker_that_is_named(name, tmp_path, monkeypatch):
    calls = stand_in(monkeypatch, name)
    log = MetricsLog(tmp_path / ".", report_to=f"tensorboard, {name}", settings={"beta": 0.1})
    log.write({"step": 3, "reward": 0.5})
    log.close()
    own = (tmp_path / "tracker_id").read_text().strip()
    assert re.fullmatch(f"{tmp_path.name}-[0-9a-f]{{8}}", own)
    names = {"name": tmp_path.name, "id": own[-8:]} if name == "wandb" else {"name": own}
    init = {"project": "lmrl", **names, "resume": "allow", "config": {"beta": 0.1}}
    assert calls == [("init", init), ("log", 3, {"reward": 0.5}), ("finish",)]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


def test_a_run_tells_its_tracker_its_settings(tmp_path, monkeypatch):
    calls = stand_in(monkeypatch, "wandb")
    run(make_trainer(replace(SMALL, max_steps=1, report_to="wandb", output_dir=str(tmp_path))), learning_curve)
    assert calls[0][1]["config"]["max_steps"] == 1 and calls[1][1] == 1 and calls[-1] == ("finish",)
    assert not list(tmp_path.glob("*/events.*"))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_that_goes_on_is_the_same_run_for_its_tracker_and_another_is_not(name, tmp_path, monkeypatch):
    """Also in a folder that has got another name."""
    calls = stand_in(monkeypatch, name)
    config = replace(SMALL, max_steps=1, report_to=name, output_dir=str(tmp_path / "here"))
    folder = run(make_trainer(config), learning_curve).folder.rename(tmp_path / "moved")
    trainer = make_trainer(replace(config, max_steps=2, resume=str(folder)))
    restore(trainer, newest_checkpoint(folder))
    run(trainer, learning_curve)
    run(make_trainer(config), learning_curve)  # in the place of the first
    key = "id" if name == "wandb" else "name"
    first, again, other = [call[1][key] for call in calls if call[0] == "init"]
    assert first == again and first != other
    logged = [(call[1], list(call[2])[:1]) for call in calls if call[0] == "log"]
    assert [step for step, _ in logged] == [1, 1, 2, 2, 1, 1] and logged[1] == (1, ["eval_pass_at_1"])


TRACKED = """
import sys
from dataclasses import replace
sys.path.insert(0, "tests")
from test_trainer import SMALL, make_trainer
from lmrl.checkpoint import newest_checkpoint, restore
from lmrl.figures.trainer import learning_curve
from lmrl.trainer import run

name, place = sys.argv[1:]
config = replace(SMALL, max_steps=2, report_to=name, output_dir=place)
folder = run(make_trainer(config), learning_curve).folder
trainer = make_trainer(replace(config, max_steps=4, resume=str(folder)))
restore(trainer, newest_checkpoint(folder))
run(trainer, learning_curve)
"""


def tracked(name, tmp_path):
    """A run of two steps that goes on for two more, under the real package, without a network."""
    own = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path), "TRACKIO_DIR": str(tmp_path)}
    command = [sys.executable, "-c", TRACKED, name, str(tmp_path / "runs")]
    subprocess.run(command, env={**os.environ, **own}, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return (tmp_path / "runs" / "arithmetic-1" / "tracker_id").read_text().strip()


@pytest.mark.skipif(find_spec("wandb") is None, reason="pip install wandb")
def test_the_real_wandb_has_one_run(tmp_path):
    own = tracked("wandb", tmp_path)
    parts = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(parts) == 2 and len(list((tmp_path / "wandb").glob(f"offline-run-*/run-{own[-8:]}.wandb"))) == 2


@pytest.mark.skipif(find_spec("trackio") is None, reason="pip install trackio")
def test_the_real_trackio_has_one_run(tmp_path):
    own = tracked("trackio", tmp_path)
    with closing(sqlite3.connect(tmp_path / "lmrl.db")) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step, id").fetchall()
    assert {name for name, *_ in rows} == {own} and [step for _, step, _ in rows] == [1, 2, 2, 3, 4, 4]
    assert b"eval_pass_at_1" in rows[2][2] and b"reward" in rows[3][2]


def test_what_is_known_later_is_added_to_the_record_of_its_step(tmp_path):
    log = MetricsLog(tmp_path, report_to="tensorboard")
    for step in (1, 2):
        log.write({"step": step, "reward": 0.5})
    log.add({"step": 2, "eval_pass_at_1": 0.25})
    log.write({"step": 3, "reward": 0.5})
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "reward": 0.5},
        {"step": 2, "reward": 0.5, "eval_pass_at_1": 0.25},
        {"step": 3, "reward": 0.5},
    ]
    assert log.records == lines and not list(tmp_path.glob(".unfinished-*"))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval_pass_at_1")] == [(2, 0.25)]


def test_without_a_record_of_the_step_what_is_known_later_goes_to_the_trackers_alone(tmp_path):
    log = MetricsLog(tmp_path, report_to="none")
    log.add({"step": 2, "eval_pass_at_1": 0.25})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "" and log.records == []


def test_none_is_the_file_alone(tmp_path):
    log = MetricsLog(tmp_path, report_to="none")
    log.write({"step": 1, "reward": 0.5})
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_tracker_that_is_unknown_or_not_installed(monkeypatch):
    with pytest.raises(ValueError, match="report_to is 'wandbs'; choose from tensorboard, wandb, trackio, or none"):
        check_config(TrainConfig(report_to="wandbs"))
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ImportError, match=r"trackio is not installed: .venv/bin/python -m pip install trackio"):
        tracker_modules("tensorboard,trackio")


@pytest.mark.parametrize("name", ["clip_fraction", "kl_old", "sampler_gap", "mismatch/ratio_geometric"])
def test_the_table_says_what_is_measured_on_untied_groups_alone(name):
    assert "untied groups only" in METRICS[name].meaning
