"""The Triton kernels against the torch operator: in Triton's interpreter on the CPU, compiled on a GPU."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from lmrl.kernels import fold_kernel, gradient_kernel, launch_fold, launch_gradient
from lmrl.logprobs import OutputHead, fold, fused_logprobs, fused_token_loss, summary, tile_gradient

needs_triton = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="no Triton: it comes with CUDA's torch"
)


def test_without_a_gpu_the_kernels_run_in_the_interpreter():
    """The tests below again in a process of their own: Triton reads TRITON_INTERPRET when it is imported."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("no Triton: it comes with CUDA's torch")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "interpreted"]
    run = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0 and "skipped" not in run.stdout, run.stdout + run.stderr


interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the process started above")


def tiles(width, softcap, temperature, scale=0.5):
    """Two tiles of tempered logits ``[5, width]`` and targets, one of them in the first, one in the second, one in none."""
    generator = torch.Generator().manual_seed(width)
    logits = 5 * torch.randn(2, 5, width, generator=generator)
    if softcap:
        logits = softcap * (scale * logits / softcap).tanh() / temperature
    return logits, torch.tensor([0, width - 1, width, 2 * width - 1, 2 * width])


@interpreted
@pytest.mark.parametrize("width", [1, 7, 1024, 1500])
def test_interpreted_fold(width):
    logits, targets = tiles(width, None, 1.0)
    both = torch.zeros(2, 4, 8)  # the sums of five of eight tokens: a view with gaps, as in the operator
    both[:, 0] = -math.inf
    for start, tile in zip((0, width), logits):
        fold(tile, targets - start, both[0, :, 2:7])
        launch_fold(tile, targets - start, both[1, :, 2:7])
    torch.testing.assert_close(both[1, :, 2:7], both[0, :, 2:7], rtol=1e-5, atol=1e-5)
    assert torch.equal(both[:, 1:, [0, 1, 7]], torch.zeros(2, 3, 3))


@interpreted
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("width", [1, 7, 1500])
def test_interpreted_gradient(width, softcap, with_entropy):
    temperature, scale = 0.6, 0.5
    logits, targets = tiles(width, softcap, temperature, scale)
    head = OutputHead(torch.zeros(2 * width, 3), None, scale, softcap)
    sums = torch.zeros(4, 5)
    sums[0] = -math.inf
    for start, tile in zip((0, width), logits):
        fold(tile, targets - start, sums)
    _, entropy, logsumexp = summary(sums)
    slopes = torch.linspace(-1, 2, 10)[::2], torch.linspace(1, -3, 5) if with_entropy else None
    for start, tile in zip((0, width), logits):
        expected = tile_gradient(tile.clone(), targets - start, entropy, logsumexp, slopes, head, temperature)
        arguments = tile, targets - start, entropy, logsumexp, slopes
        settings = {"factor": scale / temperature, "bend": temperature / softcap if softcap else 0.0}
        found = launch_gradient(*arguments, **settings, dtype=torch.float32)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        rounded = launch_gradient(*arguments, **settings, dtype=torch.float16)
        torch.testing.assert_close(rounded, expected.half(), rtol=2e-3, atol=1e-4)


@needs_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(dtype):
    """For compute capability 9.0, as far as machine code."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    common = {"logits": "*fp32", "targets": "*i64", "width": "i32", "BLOCK": "constexpr"}
    per_row = dict.fromkeys(("entropy", "logsumexp", "d_logprobs", "d_entropy"), "*fp32")
    gradient = (
        common | per_row | {"gradient": f"*{dtype}", "factor": "fp32", "bend": "fp32", "HAS_ENTROPY": "constexpr"}
    )
    for kernel, signature, constants in (
        (fold_kernel, common | {"sums": "*fp32", "stride": "i32"}, {"BLOCK": 1024}),
        (gradient_kernel, gradient, {"BLOCK": 1024, "HAS_ENTROPY": True}),
        (gradient_kernel, gradient, {"BLOCK": 1024, "HAS_ENTROPY": False}),
    ):
        source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants)
        assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_operators_on_a_gpu(dtype, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, slopes = (torch.randn(*shape, generator=generator) for shape in ((70, 64), (9001, 64), (2, 70)))
    targets = torch.randint(9001, (70,), generator=generator)
    settings = {"temperature": 0.6, "softcap": softcap, "scale": 0.5}

    def results(device, dtype):
        leaves = [x.to(device, dtype).requires_grad_() for x in (hidden.to(weight), weight)]
        c = slopes.to(device)
        values = fused_logprobs(*leaves, targets.to(device), **settings)
        gradients = torch.autograd.grad((c[0] * values[0] + c[1] * values[1]).sum(), leaves)
        loss, *_ = fused_token_loss(
            *leaves, targets.to(device), lambda x, y, rows: (c[0, rows] * x + c[1, rows] * y).sum(), **settings
        )
        return [x.double().cpu() for x in (*values, *gradients, *torch.autograd.grad(loss, leaves))]

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.backends.cuda.matmul.allow_tf32 = False
    for exact, found in zip(results("cpu", torch.float64), results("cuda", dtype)):
        assert (found - exact).norm() <= tolerance * exact.norm()
