"""Speed of the default job: completions per second, seconds per step and per phase, and the share of generation.

python benchmarks/step.py                # 20 steps after 5 of warm-up; medians, with the quartiles
"""

import argparse
import statistics

import torch
import transformers

from lmrl.cli import build_trainer
from lmrl.config import TrainConfig


def spread(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} (quartiles {low:.3f} to {high:.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    trainer = build_trainer(TrainConfig())
    for _ in range(5):
        trainer.step()
    records = [trainer.step() for _ in range(arguments.steps)]
    completions = trainer.config.completions_per_step
    print(f"{completions} completions per step, {torch.get_num_threads()} threads, {arguments.steps} steps")
    print(f"seconds per step:          {spread([r['seconds'] for r in records])}")
    for phase in ("generation", "reward", "update"):
        print(f"  {f'in {phase}:':25}{spread([r[f'{phase}_seconds'] for r in records])}")
    print(f"completions per second:    {spread([completions / r['seconds'] for r in records])}")
    print(f"share of generation:       {spread([r['generation_share'] for r in records])}")


if __name__ == "__main__":
    main()
