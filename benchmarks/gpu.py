"""Checks and times on a GPU what the tests can only run on a CPU; under four minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --small   # tiny shapes, to see that the script itself runs

1. Log-probs: each path, with and without the Triton kernels, against materialised logits in float64 (values, loss,
   gradients); then time and peak memory against materialised logits and a floor, the three matrix products that any
   implementation needs.
2. `lmrl train` on the tiny policy: twenty steps in bfloat16, five in float32.
3. A resumed run: not yet, there is nothing to resume from.

Prints a line per check and a table of times. Exit code 0 if every check passed, 1 if one failed, 2 without the device.
"""

import argparse
import contextlib
import io
import json
import math
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


def train(folder, dtype, steps, device):
    """`lmrl train`: exit code, what it printed, and the metrics of its steps."""
    options = {"dtype": dtype, "max-steps": steps, "device": device, "output-dir": folder, "name": dtype, "beta": 0.01}
    options |= {"num-eval-problems": 16, "per-device-train-batch-size": 64 if device == "cpu" else 512}
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = lmrl(["train", *(f"--{name}={value}" for name, value in options.items())])
    metrics = Path(folder, dtype, "metrics.jsonl")
    return code, output.getvalue(), [json.loads(line) for line in metrics.open()] if metrics.exists() else []


def check_training(report, dtype, steps, device, largest_gap):
    with tempfile.TemporaryDirectory() as folder:
        code, output, records = train(folder, dtype, steps, device)
    name = f"{steps} steps of lmrl train in {dtype}"
    report.check(f"{name}: exit code", code, 0)
    if code != 0:
        print(output)
        return
    report.check(f"{name}: steps that are missing", steps - len(records), 0)
    report.check(f"{name}: numbers that are not finite", sum(v is None for r in records for v in r.values()), 0)
    report.check(f"{name}: error of the first ratios", max(r["ratio_error"] for r in records), 0)
    report.check(
        f"{name}: sampler's log-probs against the trainer's", max(r["sampler_gap"] for r in records), largest_gap
    )
    report.check(f"{name}: KL to the reference before the first step", abs(records[0]["kl_ref"]), 1e-9)
    print(f"     {statistics.median(r['seconds'] for r in records):.3f} s per step, reward {records[-1]['reward']:.2f}")


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
    check_training(report, "bfloat16", 2 if options.small else 20, options.device, largest_gap=0.5)
    check_training(report, "float32", 2 if options.small else 5, options.device, largest_gap=1e-3)
    print("skip resume: runs cannot be resumed yet")
    print(f"{report.failed} checks failed; {time.perf_counter() - started:.0f} s")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
