"""How fast the sliders of the notebooks answer: seconds from a new value to the new picture (drawing and PNG).

    python benchmarks/sliders.py             # all notebooks with sliders
    python benchmarks/sliders.py 05 10

Runs each notebook, and moves each control through up to six of its values; prints median and maximum per notebook.
"""

import io
import os
import statistics
import sys
import time
from pathlib import Path

import jupytext

import lmrl.figures.style as style
from lmrl.policy import warm_start_folder

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def values_of(control):
    """Up to six values that the control can take."""
    if hasattr(control, "options"):
        values = [option[1] if isinstance(option, tuple) else option for option in control._options_full]
    elif hasattr(control, "base"):
        values = [control.base ** (control.min + i / 5 * (control.max - control.min)) for i in range(6)]
    else:
        steps = int((control.max - control.min) / control.step)
        values = [control.min + control.step * (steps * i // 5) for i in range(6)]
    return values[:: max(1, len(values) // 6)]


def timed_explore(seconds):
    """A stand-in for `explore` that measures instead of displaying."""

    def explore(draw, **controls):
        current = {name: control.value for name, control in controls.items()}
        style.png(draw(**current))
        for name, control in controls.items():
            for value in values_of(control):
                started = time.perf_counter()
                style.png(draw(**{**current, name: value}))
                seconds.append(time.perf_counter() - started)

    return explore


def measure(path):
    seconds, namespace = [], {"__name__": "__main__"}
    style.explore = timed_explore(seconds)
    for cell in jupytext.read(path, fmt="py:percent").cells:
        if cell.cell_type == "code" and "exercise" not in cell.metadata.get("tags", []):
            exec(cell.source, namespace)
            namespace["explore"] = style.explore
            namespace["warm_start_folder"] = warm_start_folder  # section 1's own reads the notebook's source
    return seconds


def main():
    output = sys.stdout
    os.chdir(NOTEBOOKS)
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py")):
        if "\nexplore(" in path.read_text() and (not sys.argv[1:] or path.name[:2] in sys.argv[1:]):
            sys.stdout = io.StringIO()
            seconds = measure(path)
            sys.stdout = output
            print(f"{path.stem:16} median {statistics.median(seconds):.3f} s, maximum {max(seconds):.3f} s", flush=True)


if __name__ == "__main__":
    main()
