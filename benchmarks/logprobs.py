"""Log-probs without the logits: time relative to materialised logits and to the matrix products, and memory.

python benchmarks/logprobs.py              # 2 interleaved rounds, one thread: under six minutes
python benchmarks/logprobs.py --rounds 7 --only fused materialised   # medians of 7, of the rows with these words alone

Each row computes the value and the gradients (hidden states, weight) of a clipped PPO loss in float32. mm3 is the three
matrix products that materialised logits need, mm4 has one recomputation more; "floor" is the time relative to the one
that applies. With one thread, seconds are those of the CPU, so that neighbours disturb less. Memory is the growth of the peak resident size of a process that does nothing else, the weight's
gradient included. TRL and Liger take part where they are installed.
"""

import argparse
import importlib.util
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from lmrl.logprobs import fused_logprobs, fused_token_loss
from lmrl.ppo import clipped_surrogate

SHAPES = {"N 2048, D 1024, V 32000": (2048, 1024, 32_000), "N 1024, D 896, V 151936": (1024, 896, 151_936)}


def problem(name):
    """Hidden states, weight, targets, and the loss of some tokens: PPO's, with ratios near 1."""
    tokens, width, vocabulary = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.empty(vocabulary, width).normal_(generator=generator).mul_(width**-0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    noise, advantages = 0.1 * torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator)

    def token_loss(logprobs, _=None, rows=slice(None)):
        ratio = (logprobs - logprobs.detach() + noise[rows]).exp()
        return -clipped_surrogate(ratio, advantages[rows]).sum() / tokens

    return hidden, weight, targets, token_loss


def products(count):
    """``count`` of the products, written over the same tensors again and again."""

    def run(hidden, weight, targets, token_loss):
        with torch.no_grad():
            for _ in range(count - 2):
                logits = hidden @ weight.T
            hidden.grad, weight.grad = logits @ weight, logits.T @ hidden

    return run


def materialised(hidden, weight, targets, token_loss):
    token_loss((hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]).backward()


def selective(hidden, weight, targets, token_loss):
    """Target's logit less the log-sum-exp of each row, over full logits: as TRL does in float32."""
    logits = hidden @ weight.T
    logsumexp = torch.stack([row.logsumexp(-1) for row in logits])
    token_loss(logits.gather(1, targets[:, None])[:, 0] - logsumexp).backward()


def checkpointed(hidden, weight, targets, token_loss):
    def block(hidden, targets):
        return (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    pieces = zip(hidden.split(256), targets.split(256))
    token_loss(torch.cat([checkpoint(block, *piece, use_reentrant=False) for piece in pieces])).backward()


def fused(hidden, weight, targets, token_loss):
    token_loss(fused_logprobs(hidden, weight, targets)[0]).backward()


def fused_loss(hidden, weight, targets, token_loss):
    fused_token_loss(hidden, weight, targets, token_loss)[0].backward()


def torch_linear(hidden, weight, targets, token_loss):
    options = torch.nn.LinearCrossEntropyOptions()
    token_loss(-F.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)).backward()


def trl_chunked(hidden, weight, targets, token_loss):
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    token_loss(ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 8192, None, 1.0, ())[0]).backward()


def liger_grpo(hidden, weight, targets, token_loss):
    """Its own clipped loss, on rows of 64 tokens."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    shape = len(targets) // 64, 64
    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False)
    loss(hidden.view(*shape, -1), weight, targets.view(shape), torch.ones(shape), torch.ones(shape[0]))[0].backward()


ROWS = {  # what → (function, floor, package)
    "mm3": (products(3), "mm3", None),
    "mm4": (products(4), "mm4", None),
    "materialised log-softmax + gather": (materialised, "mm3", None),
    "selective log-softmax, full logits": (selective, "mm3", None),
    "checkpointed blocks of 256 tokens": (checkpointed, "mm4", None),
    "lmrl fused_logprobs": (fused, "mm4", None),
    "lmrl fused_token_loss": (fused_loss, "mm3", None),
    "torch F.linear_cross_entropy, chunked": (
        torch_linear,
        "mm3",
        "torch" if hasattr(F, "linear_cross_entropy") else "-",
    ),
    "TRL's chunked log-prob kernel": (trl_chunked, "mm4", "trl"),
    "Liger's chunked GRPO loss": (liger_grpo, "mm3", "liger_kernel"),
}


def available():
    return [name for name, (_, _, package) in ROWS.items() if package is None or importlib.util.find_spec(package)]


def seconds(row, arguments):
    arguments[0].grad = arguments[1].grad = None
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    ROWS[row][0](*arguments)
    return clock() - start


def peak_mib(shape, row):
    """Growth of the peak resident size in a fresh process."""
    command = [sys.executable, __file__, "--measure", shape, row]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def high_water_mib():
    """Peak resident size of this process. Linux: not by getrusage, in which a child starts from its parent's peak."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(shape, row):
    hidden, weight, targets, token_loss = problem(shape)
    few = hidden[:64].detach().requires_grad_(), weight[:64].detach().requires_grad_(), targets[:64] % 64
    seconds(row, (*few, lambda logprobs, *_: logprobs.sum()))  # loads what there is to load
    before = high_water_mib()
    seconds(row, (hidden, weight, targets, token_loss))
    print(high_water_mib() - before)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="rows whose names hold one of the words"
    )
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure(*arguments.measure)
    torch.set_num_threads(arguments.threads)
    needed = "mm3", "mm4", "materialised log-softmax + gather"
    rows = [name for name in available() if name in needed or any(word in name for word in arguments.only)]
    progress = tqdm(total=len(SHAPES) * len(rows) * (arguments.rounds + 1), disable=None)
    for shape in SHAPES:
        inputs, times, memory = problem(shape), {row: [] for row in rows}, {}
        for row in rows:
            progress.set_postfix_str(f"memory: {row}")
            memory[row] = peak_mib(shape, row)
            progress.update()
        for _ in range(arguments.rounds):
            for row in rows:
                progress.set_postfix_str(row)
                times[row].append(seconds(row, inputs))
                progress.update()

        def ratio(row, floor):
            return statistics.median(a / b for a, b in zip(times[row], times[floor]))

        print(f"\n{shape}: float32, {arguments.threads} thread(s), median of {arguments.rounds} rounds")
        print(f"{'':38} seconds  to materialised  to its floor   peak MiB")
        for row in rows:
            floor = ROWS[row][1]
            numbers = f"{statistics.median(times[row]):7.2f} {ratio(row, 'materialised log-softmax + gather'):16.2f}"
            print(f"{row:38} {numbers} {ratio(row, floor):7.2f} {floor}  {memory[row]:9.0f}", flush=True)
    progress.close()


if __name__ == "__main__":
    main()
