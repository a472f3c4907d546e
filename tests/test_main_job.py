"""The main job on its defaults, one seed: `benchmarks/main_job.py` runs three, and the control with shuffled rewards."""

import json

from transformers import AutoModelForCausalLM

from lmrl.cli import build_trainer
from lmrl.config import TrainConfig
from lmrl.figures.trainer import learning_curve
from lmrl.trainer import run


def test_the_default_job_learns_two_digit_addition(tmp_path):
    trainer = build_trainer(TrainConfig(seed=0, output_dir=str(tmp_path)))
    prompts = {example.prompt for example in trainer.task.train}
    for example in trainer.task.heldout:
        a, b = example.prompt.rstrip("=").split("+")
        assert f"{a}+{b}=" not in prompts and f"{b}+{a}=" not in prompts
    result = run(trainer, learning_curve)
    assert 0.2 < result.before.pass_at_1 < 0.5
    assert result.after.pass_at_1 >= 0.9
    assert result.before.well_formed > 0.9 and result.after.well_formed > 0.9
    metrics = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(step["ratio_error"] for step in metrics) == 0.0
    assert max(step["sampler_gap"] for step in metrics) < 1e-3
    AutoModelForCausalLM.from_pretrained(result.folder / "checkpoint")
