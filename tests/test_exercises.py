"""Each exercise: its check refuses the stub and accepts the solution; the last one of a notebook is a planted bug."""

from pathlib import Path

import jupytext
import pytest

from tools.exercises import exercises, write_reader_version

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("[0-9][0-9]_*.py"))
EXERCISES = [exercise for notebook in NOTEBOOKS for exercise in exercises(notebook)]
BUGS = [exercises(notebook)[-1] for notebook in NOTEBOOKS if exercises(notebook)]


def run(*cells):
    namespace = {"__name__": "__main__"}
    for cell in cells:
        exec(cell, namespace)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.where)
def test_the_solution_passes_alone(exercise):
    run(exercise.solution, exercise.check)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.where)
def test_the_stub_fails(exercise):
    with pytest.raises((AssertionError, NotImplementedError)):
        run(exercise.stub, exercise.check)


@pytest.mark.parametrize("exercise", BUGS, ids=lambda exercise: exercise.where)
def test_a_planted_bug_runs_and_fails_at_the_oracle(exercise):
    run(exercise.stub)
    with pytest.raises(AssertionError):
        run(exercise.stub, exercise.check)


def test_the_readers_version_has_stubs_and_checks_but_no_solution(tmp_path):
    notebook = next(n for n in NOTEBOOKS if exercises(n))
    cells = jupytext.read(write_reader_version(notebook, tmp_path), fmt="py:percent").cells
    tags = [tag for cell in cells for tag in cell.metadata.get("tags", [])]
    assert "solution" not in tags and tags.count("exercise") == tags.count("check") == len(exercises(notebook))


def test_a_missing_solution_is_named(tmp_path):
    path = tmp_path / "01_x.py"
    path.write_text('# %% tags=["exercise"]\nx = 1\n\n# %% tags=["check"]\nassert x == 2\n')
    with pytest.raises(ValueError, match="01_x.py, exercise 1: the cells are exercise, check"):
        exercises(path)
