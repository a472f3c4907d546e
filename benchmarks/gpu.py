"""Checks and times on a GPU what the tests can only run on a CPU; under four minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --small   # tiny shapes, to see that the script itself runs

1. Log-probs: each path, with and without the Triton kernels, against materialised logits in float64 (values, loss,
   gradients); then time and peak memory against materialised logits and a floor, the three matrix products that any
   implementation needs.
2. `lmrl check` on the tiny policy, in float32 and in bfloat16 with float32 master weights: nothing fails.
3. `lmrl train` on the tiny policy, a few steps each: bfloat16, float32, bfloat16 and float16 with master weights, a LoRA
   adapter, PPO on one trunk with gradient checkpointing; and with compiled layers the same steps as without.
4. A run that was stopped and resumed: the rewards of the run that was not.

Prints a line per check and a table of times. Exit code 0 if every check passed, 1 if one failed, 2 without the device.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from lmrl import kernels
from lmrl.cli import main as lmrl
from lmrl.logprobs import fused_logprobs, fused_token_loss
from lmrl.ppo import clipped_surrogate, importance_ratio

CHECK_SHAPES = [(1000, 512, 50_257)]  # tokens, width, vocabulary
SHAPES = [(2048, 1024, 32_000), (1024, 896, 151_936), (4096, 4096, 128_256)]
TINY_SHAPES = [(33, 16, 101)]


# --- the paths that are compared --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Inputs of a clipped loss over N sampled tokens: hidden ``[N, D]``, weight ``[V, D]``, the rest ``[N]``."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor

    def token_loss(self, logprobs, entropy, rows):
        ratio = importance_ratio(logprobs, self.old_logprobs[rows])
        return -(clipped_surrogate(ratio, self.advantages[rows])).sum() - 0.01 * entropy.sum()

    def to(self, dtype):
        """The same numbers, inputs in ``dtype``."""
        inputs = [value.detach().to(dtype).requires_grad_() for value in (self.hidden, self.weight)]
        return Problem(*inputs, self.targets, self.old_logprobs, self.advantages)


def make_problem(shape, dtype, device, seed=0):
    tokens, width, vocabulary = shape
    random = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(tokens, width, device=device, generator=random).to(dtype)
    weight = (torch.randn(vocabulary, width, device=device, generator=random) * 2 / math.sqrt(width)).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), device=device, generator=random)
    noise, advantages = torch.randn(2, tokens, device=device, generator=random)
    advantages += 1.0  # of both signs, but the loss is no small difference of large sums
    with torch.no_grad():
        old_logprobs = fused_logprobs(hidden, weight, targets)[0] + 0.02 * noise
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), targets, old_logprobs, advantages)


def finished(loss, logprobs):
    """What every path returns, after it has filled in the gradients to hidden and weight: loss and log-probs."""
    loss.backward()
    return loss.detach(), logprobs.detach()


def materialised(problem):
    """By way of all the logits: what everything else has to agree with."""
    logits = problem.hidden @ problem.weight.T
    table = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    logprobs = table.gather(1, problem.targets[:, None]).squeeze(1)
    entropy = -(table.exp() * table).sum(1)
    return finished(problem.token_loss(logprobs, entropy, slice(None)), logprobs)


def recomputing(problem):
    logprobs, entropy = fused_logprobs(problem.hidden, problem.weight, problem.targets)
    return finished(problem.token_loss(logprobs, entropy, slice(None)), logprobs)


def loss_in_forward(problem):
    loss, logprobs, _ = fused_token_loss(problem.hidden, problem.weight, problem.targets, problem.token_loss)
    return finished(loss, logprobs)


def without_triton(path):
    def torch_only(problem):
        with mock.patch("lmrl.logprobs.use_kernels", lambda logits: False):
            return path(problem)

    return torch_only


PATHS = {
    "materialised": materialised,
    "fused_logprobs": recomputing,
    "fused_logprobs, no Triton": without_triton(recomputing),
    "fused_token_loss": loss_in_forward,
    "fused_token_loss, no Triton": without_triton(loss_in_forward),
}


def value_and_gradients(path, problem):
    """The loss, the log-probs, and the gradients to hidden and weight."""
    problem.hidden.grad = problem.weight.grad = None
    loss, logprobs = path(problem)
    return {"loss": loss, "log-probs": logprobs, "d hidden": problem.hidden.grad, "d weight": problem.weight.grad}


def three_products(problem):
    """The floor: logits, and the two products of a gradient with the logits' shape."""
    logits = problem.hidden.detach() @ problem.weight.detach().T
    return logits @ problem.weight.detach(), logits.T @ problem.hidden.detach()


# --- checks -----------------------------------------------------------------------------------------------------------


class Report:
    """Prints checks as they come and remembers whether one failed."""

    def __init__(self):
        self.failed = 0

    def check(self, name, value, limit):
        passed = value <= limit  # False for NaN
        self.failed += not passed
        print(f"{'ok  ' if passed else 'FAIL'} {name:80} {value:.2e} (at most {limit:.2e})", flush=True)


def relative_errors(results, exact):
    return {
        name: float((results[name].double() - exact[name]).norm() / exact[name].norm().clamp(min=1e-30))
        for name in exact
    }


def check_logprobs(report, shapes, device):
    """float32 agrees with float64 to 1e-5; bfloat16 is no further from it than materialised bfloat16."""
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            problem = make_problem(shape, dtype, device)
            exact = value_and_gradients(materialised, problem.to(torch.float64))
            errors = {name: relative_errors(value_and_gradients(path, problem), exact) for name, path in PATHS.items()}
            for name in list(PATHS)[1:]:
                for quantity, error in errors[name].items():
                    limit = 1e-5 if dtype == torch.float32 else 1.1 * errors["materialised"][quantity] + 1e-3
                    report.check(f"{name} {str(dtype)[6:]} {shape}: {quantity}", error, limit)


# --- times ------------------------------------------------------------------------------------------------------------


def seconds_of(function, device, repeats):
    """Median seconds of a call, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def extra_memory(function, device):
    """Peak MiB that a call allocates on top of what is there; NaN on a CPU."""
    if device != "cuda":
        return math.nan
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def time_logprobs(report, shapes, device, repeats):
    print(f"\n{'dtype':9} {'N, D, V':22} {'path':27} {'ms':>9} {'x floor':>8} {'x materialised':>15} {'extra MiB':>10}")
    for dtype in (torch.bfloat16, torch.float32):
        for shape in shapes:
            memory = time_shape(make_problem(shape, dtype, device), device, repeats)
            if device == "cuda":
                share = memory["fused_token_loss"] / memory["materialised"]
                report.check(f"memory of fused_token_loss / materialised, {str(dtype)[6:]} {shape}", share, 0.5)


def time_shape(problem, device, repeats):
    """Print a row per path; returns the extra memory of each, in MiB."""
    floor = seconds_of(lambda: three_products(problem), device, repeats)
    shape = (*problem.hidden.shape, len(problem.weight))
    print(f"{str(problem.hidden.dtype)[6:]:9} {shape!s:22} {'three products':27} {floor * 1e3:9.2f} {1:8.2f}")
    seconds, memory = {}, {}
    for name, path in PATHS.items():
        problem.hidden.grad = problem.weight.grad = None
        memory[name] = extra_memory(lambda: value_and_gradients(path, problem), device)
        seconds[name] = seconds_of(lambda: value_and_gradients(path, problem), device, repeats)
        ratios = f"{seconds[name] / floor:8.2f} {seconds[name] / seconds['materialised']:15.2f}"
        print(f"{'':32} {name:27} {seconds[name] * 1e3:9.2f} {ratios} {memory[name]:10.0f}", flush=True)
    return memory


# --- the trainer ------------------------------------------------------------------------------------------------------


def options_of(settings, device):
    """The command line of the tiny policy's run with these settings; switches are those that are True."""
    common = {"num-eval-problems": 16, "beta": 0.01, "per-device-train-batch-size": 64 if device == "cpu" else 512}
    merged = {**common, "device": device, **settings}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in merged.items()]


def call(arguments):
    """Exit code of an `lmrl` command, and what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        return lmrl(arguments), output.getvalue()


def records_of(run):
    metrics = run / "metrics.jsonl"
    return [json.loads(line) for line in metrics.open()] if metrics.exists() else []


def check_setup(report, settings, device):
    """`lmrl check`: a sampler, a trainer and a memory plan that agree on this device."""
    code, output = call(["check", *options_of(settings, device)])
    report.check(f"lmrl check {' '.join(options_of(settings, device)[4:])}: exit code", code, 0)
    if code != 0:
        print(output)


def check_training(report, name, steps, device, largest_gap, **settings):
    """A run of a few steps without a fault; its records."""
    settings = {"max-steps": steps, "name": "run", **settings}
    with tempfile.TemporaryDirectory() as folder:
        code, output = call(["train", f"--output-dir={folder}", *options_of(settings, device)])
        records = records_of(Path(folder, "run"))
    name = f"{steps} steps of lmrl train, {name}"
    report.check(f"{name}: exit code", code, 0)
    if code != 0:
        print(output)
        return []
    report.check(f"{name}: steps that are missing", steps - len(records), 0)
    # As long as float16's loss scale is too high, updates are skipped.
    skipped = sum(r["skipped_updates"] for r in records)
    report.check(f"{name}: skipped updates", skipped, 2 * steps - 1 if settings.get("dtype") == "float16" else 0)
    numbers = [v for r in records for key, v in r.items() if not (skipped and key == "grad_norm")]
    report.check(f"{name}: numbers that are not finite", sum(v is None for v in numbers), 0)
    report.check(f"{name}: error of the first ratios", max(r["ratio_error"] for r in records), 0)
    report.check(
        f"{name}: sampler's log-probs against the trainer's", max(r["sampler_gap"] for r in records), largest_gap
    )
    report.check(f"{name}: KL to the reference before the first step", abs(records[0]["kl_ref"]), 1e-9)
    seconds = statistics.median(r["seconds"] for r in records)
    print(f"     {seconds:.3f} s per step, the first {records[0]['seconds']:.1f}; reward {records[-1]['reward']:.2f}")
    return records


TRAINED = {  # name → its settings, and the greatest gap between the sampler's log-probs and the trainer's
    "bfloat16": ({"dtype": "bfloat16"}, 0.5),
    "float32": ({"dtype": "float32"}, 1e-3),
    "bfloat16 with master weights": ({"dtype": "bfloat16", "master-weights": True}, 0.5),
    "float16 with master weights": ({"dtype": "float16", "master-weights": True}, 0.1),
    "an adapter in bfloat16": ({"dtype": "bfloat16", "use-peft": True}, 0.5),
    "PPO on one trunk": (
        {
            "advantage-estimator": "gae",
            "scale-rewards": "none",
            "share-critic-trunk": True,
            "gradient-checkpointing": True,
        },
        1e-3,
    ),
}


def check_runs(report, steps, device):
    """The forms in which a run can be; an adapter only where peft is."""
    for name, (settings, largest_gap) in TRAINED.items():
        if settings.get("use-peft") and not importlib.util.find_spec("peft"):
            print("skip an adapter: the package peft is not here")
            continue
        check_training(report, name, 4 * steps if name == "bfloat16" else steps, device, largest_gap, **settings)


def check_compiled(report, steps, device):
    """Compiled layers take the steps that the others take; in float32, so that samples are the same for a few steps."""
    plain, fast = (
        check_training(
            report, f"float32 with torch_compile {on}", steps, device, 1e-3, **({"torch-compile": on} if on else {})
        )
        for on in (False, True)
    )
    far = max((abs(a["reward"] - b["reward"]) for a, b in zip(plain, fast, strict=True)), default=math.nan)
    report.check("compiled layers: rewards against those without", far, 0.01)


def check_resumed(report, steps, device):
    """A run whose last checkpoint is lost goes on from the one before, and takes the same steps once more."""
    settings = {"max-steps": 2 * steps, "save-steps": steps, "name": "run", "dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        codes = [call(["train", f"--output-dir={folder}", *options_of(settings, device)])[0]]
        first = records_of(run)
        shutil.rmtree(run / "checkpoints" / f"step-{2 * steps:06d}", ignore_errors=True)
        codes.append(call(["train", f"--resume={run}"])[0])
        second = records_of(run)
    report.check("a resumed run: exit codes", max(codes), 0)
    report.check("a resumed run: steps that are missing", abs(2 * steps - len(second)), 0)
    far = max((abs(a["reward"] - b["reward"]) for a, b in zip(first, second, strict=False)), default=math.nan)
    limit = 0.01 if device == "cuda" else 0  # a GPU adds in another order each time
    report.check("a resumed run: rewards against those before it was stopped", far, limit)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes and two steps")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py: PyTorch sees no CUDA device here", file=sys.stderr)
        return 2
    started, report = time.perf_counter(), Report()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, {'Triton' if kernels.triton else 'no Triton'}")
    check_logprobs(report, TINY_SHAPES if options.small else CHECK_SHAPES, options.device)
    time_logprobs(report, TINY_SHAPES if options.small else SHAPES, options.device, repeats=2 if options.small else 10)
    steps = 1 if options.small else 5
    for settings in ({"dtype": "float32"}, {"dtype": "bfloat16", "master-weights": True}):
        check_setup(report, settings, options.device)
    check_runs(report, steps, options.device)
    check_resumed(report, steps, options.device)
    if not options.small:  # a compiler takes half a minute, whatever the size
        check_compiled(report, steps, options.device)
    print(f"{report.failed} checks failed; {time.perf_counter() - started:.0f} s")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
