"""The same work in lmrl and in TRL's GRPOTrainer: seconds per step, completions per second, learning curve, memory.

python benchmarks/peer_trl.py --trl-python ../trl/bin/python     # the interpreter of an environment that has TRL

Both train the same random Qwen2 on the CPU, in float32, with one character per token: 32 completions a step, 8 to a
prompt, 32 tokens at most, on-policy. The reward is the share of capital letters in a completion of full length. The sides
take turns, each run in a process of its own and with a seed of its own. TRL's gradient checkpointing, on by default, is
switched off, because lmrl's is. What differs: TRL divides advantages by the sample's standard deviation, lmrl by the
population's, √(7/8) of it, and AdamW undoes a factor on the gradient.
"""

import argparse
import itertools
import json
import os
import re
import resource
import statistics
import string
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SETTINGS = {  # names and meaning are the same in TRL's GRPOConfig and lmrl's TrainConfig
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "num_iterations": 1,
    "max_completion_length": 32,
    "temperature": 1.0,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "epsilon": 0.2,
    "beta": 0.0,
}
PROMPTS = [f"{a}+{b}=" for a in range(10, 42) for b in (3, 17)]
LARGE_VOCABULARY, WARM_UP = 32_000, 5


def build_model(vocabulary, seed):
    torch.manual_seed(seed)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **heads}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1))


def build_tokenizer(vocabulary):
    tokens = ["<pad>", "<eos>", *(chr(ord(" ") + i) for i in range(vocabulary - 2))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


class CapitalLetters:
    """The reward, which keeps the mean of every step."""

    __name__ = "capital_letters"

    def __init__(self):
        self.means = []

    def __call__(self, prompts, completions, **columns):
        counts = [sum(character in string.ascii_uppercase for character in completion) for completion in completions]
        rewards = [count / SETTINGS["max_completion_length"] for count in counts]
        self.means.append(statistics.mean(rewards))
        return rewards


def now():
    return time.perf_counter(), time.process_time()


def train_trl(vocabulary, seed, steps, reward):
    """Train; wall and CPU seconds before the first step and after each one."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *arguments, **state):
            clock.append(now())

        def on_step_end(self, *arguments, **state):
            clock.append(now())

    quiet = {"report_to": "none", "save_strategy": "no", "logging_strategy": "no"}
    plain = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "dataloader_pin_memory": False}
    table = InMemoryTable.from_pydict({"prompt": PROMPTS})  # not from_dict: its fingerprint fails with pyarrow 26
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=build_model(vocabulary, seed),
            processing_class=build_tokenizer(vocabulary),
            reward_funcs=reward,
            args=GRPOConfig(**SETTINGS, **quiet, **plain, output_dir=folder, max_steps=steps, seed=seed),
            train_dataset=Dataset(table, fingerprint="prompts"),
            callbacks=[Clock()],
        )
        trainer.train()
    return clock


def train_lmrl(vocabulary, seed, steps, reward):
    """Train; wall and CPU seconds before the first step and after each one."""
    from lmrl.config import TrainConfig
    from lmrl.rollout import TorchSampler
    from lmrl.tasks import Example, Task
    from lmrl.trainer import Trainer

    config = TrainConfig(**SETTINGS, max_steps=steps, seed=seed)
    model, tokenizer = build_model(vocabulary, seed), build_tokenizer(vocabulary)
    problems = [Example(prompt, {}) for prompt in PROMPTS]
    sampler = TorchSampler(model, [tokenizer.eos_token_id], tokenizer.pad_token_id, config.max_completion_length)
    trainer = Trainer(config, model, tokenizer, Task("capital letters", problems, problems, reward), sampler)
    clock = [now()]
    for _ in range(steps):
        trainer.step()
        clock.append(now())
    return clock


def high_water_mib():
    """Peak resident size of this process. Linux: not by getrusage, in which a child starts from its parent's peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def one_run(side, vocabulary, seed, steps):
    """What a child process does; the last line that it prints is the result as JSON."""
    reward = CapitalLetters()
    clock = {"trl": train_trl, "lmrl": train_lmrl}[side](vocabulary, seed, steps, reward)
    counted = [[b - a for a, b in itertools.pairwise(times)][WARM_UP:] for times in zip(*clock)]
    wall, cpu = (statistics.median(seconds) for seconds in counted)
    print(json.dumps({"wall": wall, "cpu": cpu, "rewards": reward.means, "peak": high_water_mib()}))


def child(python, side, vocabulary, seed, steps, threads):
    command = [python, __file__, "--run", side, *map(str, (vocabulary, seed, steps))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"the {side} side failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def versions_of_trl(python):
    """Versions of TRL, torch and transformers in the environment of ``python``; leaves with advice if it has no TRL."""
    code = "from importlib.metadata import version; print(*map(version, ('trl', 'torch', 'transformers')))"
    try:
        return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        torch_version, transformers_version = version("torch").split("+")[0], version("transformers")
        sys.exit(
            f"{python} has no TRL. Give TRL an environment of its own, with the same torch and transformers:\n"
            "  python -m venv build/trl\n"
            f"  build/trl/bin/pip install trl==1.16.0 torch=={torch_version} transformers=={transformers_version}\n"
            "  python benchmarks/peer_trl.py --trl-python build/trl/bin/python"
        )


def mean_and_error(values):
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def table(runs, large, steps):
    """The results as Markdown; ``runs`` and ``large`` hold a side's runs by its name."""

    def row(name, values, ratio=""):
        print(f"| {name} | {' | '.join(values)} | {ratio} |")

    def ratio(of, name):
        return f"{statistics.median(a[name] / b[name] for a, b in zip(of['trl'], of['lmrl'], strict=True)):.2f}"

    def speed(runs, where):
        for name, unit in (("wall", "seconds"), ("cpu", "CPU seconds")):
            middle = {side: statistics.median(run[name] for run in runs[side]) for side in runs}
            row(f"{unit} per step{where}", [f"{seconds:.3f}" for seconds in middle.values()], ratio(runs, name))
            if name == "wall":
                completions = SETTINGS["per_device_train_batch_size"]
                row(f"completions per second{where}", [f"{completions / seconds:.0f}" for seconds in middle.values()])

    row("", ["TRL", "lmrl"], "TRL / lmrl")
    print("|---|---|---|---|")
    speed(runs, "")
    for start in range(0, steps, 10):
        window = slice(start, min(start + 10, steps))
        means = [mean_and_error([statistics.mean(run["rewards"][window]) for run in runs[side]]) for side in runs]
        row(f"mean reward, steps {window.start + 1} to {window.stop}", means)
    where = f" at a vocabulary of {LARGE_VOCABULARY:,}"
    speed(large, where)
    peaks = [f"{statistics.median(run['peak'] for run in large[side]):.0f}" for side in large]
    row(f"peak memory{where}, MiB", peaks, ratio(large, "peak"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=sys.executable, help="Python of an environment that has TRL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--run", nargs=4, metavar=("SIDE", "VOCABULARY", "SEED", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        return one_run(arguments.run[0], *map(int, arguments.run[1:]))
    if arguments.steps <= WARM_UP or arguments.rounds < 1:
        parser.error(f"take at least one round, and more than {WARM_UP} steps: the first {WARM_UP} are not counted")
    trl, *both = versions_of_trl(arguments.trl_python)
    pythons = {"trl": arguments.trl_python, "lmrl": sys.executable}
    runs, large = ({side: [] for side in pythons} for _ in range(2))

    from tqdm import tqdm

    jobs = [(128, arguments.steps, runs)] * arguments.rounds + [(LARGE_VOCABULARY, WARM_UP + 5, large)]
    with tqdm(total=2 * len(jobs), disable=None) as bar:
        for seed, (vocabulary, steps, results) in enumerate(jobs):
            for side, python in pythons.items():
                bar.set_postfix_str(f"{side}, vocabulary {vocabulary}")
                results[side].append(child(python, side, vocabulary, seed, steps, arguments.threads))
                bar.update()
    print(
        f"TRL {trl}, torch {both[0]}, transformers {both[1]}; lmrl with {version('torch')}, {version('transformers')}."
    )
    print(f"Medians of {arguments.rounds} rounds of {arguments.steps} steps, {arguments.threads} thread(s).\n")
    table(runs, large, arguments.steps)


if __name__ == "__main__":
    main()
