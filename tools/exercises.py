"""Write the reader's version of the notebooks, without the solutions, to build/exercises/.

    python tools/exercises.py

An exercise is three code cells in a row, tagged `exercise` (the stub), `solution` and `check`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import jupytext

ROOT = Path(__file__).parents[1]
PARTS = ["exercise", "solution", "check"]


@dataclass(frozen=True)
class Exercise:
    """The sources of one exercise's three cells, and where it stands."""

    where: str
    stub: str
    solution: str
    check: str


def tagged_cells(document):
    """The part and the source of each exercise cell, in order."""
    for cell in document.cells:
        parts = [part for part in PARTS if part in cell.metadata.get("tags", [])]
        if parts:
            yield parts[0], cell.source


def exercises(path):
    """The exercises of one notebook; ValueError if a stub, its solution and its check do not follow each other."""
    cells = list(tagged_cells(jupytext.read(path, fmt="py:percent")))
    triples = [cells[i : i + 3] for i in range(0, len(cells), 3)]
    for number, triple in enumerate(triples, start=1):
        if [part for part, _ in triple] != PARTS:
            found = ", ".join(part for part, _ in triple)
            raise ValueError(f"{path.name}, exercise {number}: the cells are {found}; they must be {', '.join(PARTS)}")
    return [
        Exercise(f"{path.stem}-{number}", *(source for _, source in triple))
        for number, triple in enumerate(triples, start=1)
    ]


def write_reader_version(path, folder):
    """Copy the notebook to ``folder`` without its solutions; returns the path written."""
    exercises(path)
    document = jupytext.read(path, fmt="py:percent")
    document.cells = [cell for cell in document.cells if "solution" not in cell.metadata.get("tags", [])]
    folder.mkdir(parents=True, exist_ok=True)
    jupytext.write(document, folder / path.name, fmt="py:percent")
    return folder / path.name


if __name__ == "__main__":
    for notebook in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.py")):
        try:
            print(write_reader_version(notebook, ROOT / "build" / "exercises").relative_to(ROOT))
        except ValueError as error:
            sys.exit(str(error))
