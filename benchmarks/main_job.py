"""The main job of the README: the default `lmrl train` for several seeds, and a control that must not learn.

    python benchmarks/main_job.py            # seeds 0, 1, 2, each with its control
    python benchmarks/main_job.py --seeds 0

The control trains on the same rewards, shuffled between the completions of a step: same numbers, no information.
Prints one line per run with held-out pass@1 and its 95 % interval before and after, and seconds of training.
"""

import argparse
import random
import time
from dataclasses import replace

import transformers
from tqdm import trange

from lmrl.cli import build_trainer
from lmrl.config import TrainConfig
from lmrl.trainer import evaluate


def shuffled(reward, seed):
    """The same reward function with its values permuted between completions."""
    order = random.Random(seed)

    def shuffled_reward(prompts, completions, **columns):
        values = list(reward(prompts, completions, **columns))
        order.shuffle(values)
        return values

    return shuffled_reward


def train(seed, control):
    trainer = build_trainer(TrainConfig(seed=seed))
    task = trainer.task
    before = evaluate(trainer)
    started = time.perf_counter()
    if control:
        trainer.task = replace(task, reward=shuffled(task.reward, seed))
    for _ in trange(trainer.config.max_steps, desc=f"seed {seed}{' control' if control else ''}", mininterval=5):
        trainer.step()
    seconds = time.perf_counter() - started
    trainer.task = task
    after = evaluate(trainer)
    print(
        f"seed {seed} {'shuffled' if control else 'true':8} rewards: pass@1 {before} -> {after}, "
        f"well-formed {before.well_formed:.3f} -> {after.well_formed:.3f}, {seconds:.0f} s of training",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--no-control", action="store_true")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    for seed in arguments.seeds:
        for control in (False,) if arguments.no_control else (False, True):
            train(seed, control)


if __name__ == "__main__":
    main()
