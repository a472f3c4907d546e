"""Notebooks as tests: what pytest collects, and that each fixture notebook with a hidden fault fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
FIXTURES = "tests/fixtures/notebooks"


def run_pytest(*arguments):
    """pytest at the root of the repository, in a process of its own; its exit code and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "--color=no", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcomes():
    """(Fixture notebook, cell) → PASSED or FAILED; the output."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / FIXTURES).glob("*.py"))
    _, output = run_pytest("--nbval", "-v", "--nbval-cell-timeout=10", *files)
    found = re.findall(rf"^{FIXTURES}/(\w+)::py::Cell (\d+) (\w+)", output, re.MULTILINE)
    return {(name, int(cell)): outcome for name, cell, outcome in found}, output


@pytest.mark.parametrize(
    ("name", "cell", "message"),
    [
        ("raises", 2, "AssertionError"),
        ("syntax_error", 1, "SyntaxError"),
        ("fails_to_raise", 2, "The cell is tagged raises-exception and raised nothing"),
        ("unknown_magic", 1, "The cell ended with UsageError: Line magic function `%no_such_magic` not found."),
        ("magic_instead_of_error", 1, "The cell is tagged raises-exception and raised nothing"),
        ("sleeps", 1, "Timeout of 10 seconds exceeded"),
    ],
)
def test_faulty_cell_fails(outcomes, name, cell, message):
    results, output = outcomes
    assert results[name, cell] == "FAILED"
    report = output.split(f"{name}.py::Cell {cell} ___")[1].split("\n___")[0]
    assert message in report


def test_sound_cells_pass(outcomes):
    """Output in two chunks, timings, a magic, an expected exception; the solution runs and the exercise does not."""
    results, _ = outcomes
    cells = {cell: outcome for (name, cell), outcome in results.items() if name == "passes"}
    assert cells == {cell: "PASSED" for cell in (1, 2, 3, 4, 5, 7, 8, 9)}
    assert results["raises", 1] == results["fails_to_raise", 1] == "PASSED"


@pytest.mark.parametrize("where", [["--ignore-glob=tests/test_*"], ["notebooks/"], ["notebooks/01_policy.py"]])
def test_every_notebook_is_collected_once(where):
    """At the root, too, where the test modules are left out here only because importing them takes long."""
    code, output = run_pytest("--nbval", "--collect-only", "-q", *where)
    cells = re.findall(r"^(\S+)::Cell 1$", output, re.MULTILINE)
    every = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.py"))
    assert code == 0, output
    assert sorted(cells) == (where if where == ["notebooks/01_policy.py"] else every)


def test_notebooks_are_left_alone_without_nbval():
    code, output = run_pytest("--collect-only", "-q", "notebooks/")
    assert code == pytest.ExitCode.NO_TESTS_COLLECTED, output


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.py")), ids=lambda path: path.stem)
def test_notebooks_are_valid_ask_for_python3_and_hold_no_widgets(path):
    notebook = jupytext.read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
