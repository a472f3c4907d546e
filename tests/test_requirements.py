"""A test that needs Chromium or vLLM is skipped where it is missing, and fails where LMRL_REQUIRE names it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("require", "summary"), [("", "2 skipped"), ("browser", "1 skipped, 1 error")])
def test_missing_requirement(tmp_path, require, summary):
    """Neither is found: the PATH is empty, and the fixture's conftest hides vLLM."""
    environment = {"PATH": str(tmp_path), "LMRL_REQUIRE": require}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--color=no",
        "-rsE",
        "-p",
        "no:cacheprovider",
        "tests/fixtures/requirements",
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert f" {summary} in " in done.stdout
    assert done.returncode == (1 if require else 0)
    assert "apt-get install chromium" in done.stdout and "pip install -e '.[vllm]'" in done.stdout
