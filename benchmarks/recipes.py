"""Every recipe of configs/ on the default task: one table, and one picture with all learning curves.

    python benchmarks/recipes.py                          # every config, seeds 0, 1, 2, two runs at a time
    python benchmarks/recipes.py dapo grpo --seeds 0 --output-dir runs/recipes

Each run is `lmrl train --config configs/NAME.yaml --seed SEED` in a process of its own. Runs that are finished in the
output folder are not repeated, so an interrupted benchmark goes on where it stopped. Prints a Markdown table with held-out
pass@1 before and after, its 95 % interval over problems, and writes learning_curves.png to the output folder.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from lmrl.figures.trainer import recipe_curves
from lmrl.recipes import RECIPES
from lmrl.trainer import read_evaluation

CONFIGS = Path(__file__).parents[1] / "configs"


def finished(folder):
    return (folder / "learning_curve.png").exists()  # the last thing that a run writes


def train(name, seed, output_dir):
    """One run, unless it is there. Raises RuntimeError with the run's last words."""
    folder = output_dir / f"{name}-{seed}"
    if finished(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    program = "from lmrl.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", program, "train", "--config", str(CONFIGS / f"{name}.yaml"), "--seed", str(seed)]
    command += ["--name", folder.name, "--output-dir", str(output_dir)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{folder.name} ended with exit code {done.returncode}: {done.stderr[-1000:]}")


def read_steps(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def pass_at_1(folder):
    """Held-out pass@1 before, and after with its 95 % interval over problems."""
    before, after = (read_evaluation(folder, when).pass_at()[1] for when in ("before", "after"))
    return before.mean, after


def table(names, seeds, output_dir):
    """The README's table of all runs."""
    header = ["recipe", "paper", *(f"pass@1, seed {seed}" for seed in seeds), "mean after", "steps", "seconds"]
    rows = [header, ["---"] * len(header)]
    for name in names:
        folders = [output_dir / f"{name}-{seed}" for seed in seeds]
        results, runs = [pass_at_1(folder) for folder in folders], [read_steps(folder) for folder in folders]
        cells = [f"{before:.2f} → {after}" for before, after in results]
        seconds = sum(step["seconds"] for run in runs for step in run) / len(runs)
        mean = sum(after.mean for _, after in results) / len(results)
        rows.append([name, RECIPES[name].paper, *cells, f"{mean:.3f}", str(len(runs[0])), f"{seconds:.0f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), help="names; all of them by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output-dir", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    names, seeds, output_dir = arguments.recipes, arguments.seeds, arguments.output_dir
    runs = [(name, seed) for seed in seeds for name in names]
    with ThreadPoolExecutor(arguments.processes) as pool, tqdm(total=len(runs), unit="run") as bar:
        futures = {pool.submit(train, *run, output_dir): run for run in runs}
        for future in as_completed(futures):
            future.result()
            bar.set_postfix_str("{} seed {}".format(*futures[future]), refresh=False)
            bar.update()
    print(table(names, seeds, output_dir))
    rewards = {
        name: [[step["reward"] for step in read_steps(output_dir / f"{name}-{seed}")] for seed in seeds]
        for name in names
    }
    recipe_curves(rewards).savefig(output_dir / "learning_curves.png")
    print(f"curves: {output_dir / 'learning_curves.png'}")


if __name__ == "__main__":
    main()
