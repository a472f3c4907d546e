"""benchmarks/gpu.py: on a GPU as it is, elsewhere with tiny shapes, so that it runs on the day there is one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import gpu  # noqa: E402


def test_its_pieces_run_on_a_cpu(capsys):
    assert gpu.main(["--device", "cpu", "--small"]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out and "0 checks failed" in out
    for words in ("fused_token_loss bfloat16", "three products", "4 steps of lmrl train, bfloat16: exit code"):
        assert words in out
    for words in (
        "lmrl check",
        "float16 with master weights",
        "an adapter",
        "PPO on one trunk",
        "a resumed run: rewards",
    ):
        assert words in out


def test_a_wrong_gradient_and_a_nan_fail(capsys, monkeypatch):
    def halved(problem):
        results = gpu.materialised(problem)
        problem.hidden.grad /= 2
        problem.weight.grad /= 2
        return results

    def undefined(problem):
        loss, logprobs = gpu.materialised(problem)
        return loss, logprobs * float("nan")

    monkeypatch.setattr(gpu, "PATHS", {"materialised": gpu.materialised, "halved": halved, "undefined": undefined})
    report = gpu.Report()
    gpu.check_logprobs(report, gpu.TINY_SHAPES, "cpu")
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert report.failed == len(failed) == 2 * 3
    assert sum("halved" in line and ": d " in line for line in failed) == 4
    assert sum("undefined" in line and "log-probs" in line for line in failed) == 2


def test_a_run_that_fails_is_a_failed_check(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "lmrl", lambda arguments: print("lmrl: out of memory") or 2)
    report = gpu.Report()
    assert gpu.check_training(report, "float32", 2, "cpu", largest_gap=1e-3) == []
    assert report.failed == 1 and "lmrl: out of memory" in capsys.readouterr().out


def test_without_triton_covers_the_backward_pass(monkeypatch):
    asked = []
    monkeypatch.setattr("lmrl.logprobs.use_kernels", lambda logits: asked.append(1) or False)
    problem = gpu.make_problem(gpu.TINY_SHAPES[0], torch.float32, "cpu")
    for name in ("fused_logprobs", "fused_token_loss"):
        asked.clear()
        gpu.value_and_gradients(gpu.PATHS[f"{name}, no Triton"], problem)
        assert not asked
        gpu.value_and_gradients(gpu.PATHS[name], problem)
        assert asked


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_at_once():
    result = subprocess.run([sys.executable, "benchmarks/gpu.py"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "benchmarks/gpu.py: PyTorch sees no CUDA device here\n"


@pytest.mark.gpu
def test_everything_on_a_gpu():
    assert gpu.main([]) == 0
