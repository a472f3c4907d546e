import json

import pytest
import torch

from lmrl.batch import rollouts_from_samples
from lmrl.metrics import MetricsLog, json_line, optional_import, peak_memory, rollout_metrics, summarise
from lmrl.policy import Samples, length_mask, pad_left


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
    with pytest.raises(ImportError, match=r"no_such_module is not installed; pip install 'lmrl\[train\]'"):
        optional_import("no_such_module", "train")


def test_peak_memory_is_in_gibibytes():
    import resource

    assert 0.05 < peak_memory("cpu") < 64
    assert peak_memory("cpu") == pytest.approx(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, rel=0.1)
