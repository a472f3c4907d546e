"""The generated package: dependencies point backwards, there is no cycle, and importing it needs no extra."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ["tyro", "tensorboard", "matplotlib", "reasoning_gym", "math_verify", "gguf", "vllm", "jupytext", "ipywidgets"]


def package_modules(root):
    """Dotted name inside lmrl → syntax tree, without the two __init__.py."""
    paths = [path for path in (root / "lmrl").rglob("*.py") if path.name != "__init__.py"]
    names = [".".join(path.relative_to(root / "lmrl").with_suffix("").parts) for path in paths]
    return {name: ast.parse(path.read_text()) for name, path in zip(names, paths)}


def section(tree):
    """The section that the docstring names, as in 'from section 4, notebooks/04_reinforce.py'."""
    return int(re.search(r"from section (\d+), notebooks/\d\d_\w+\.py", ast.get_docstring(tree) or "")[1])


def imported(tree, modules):
    """The modules of lmrl that a module imports anywhere in its text, absolutely or relatively."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in modules if f"lmrl.{name}" in found}


def forward_imports(modules):
    return [
        f"lmrl.{name} (section {section(tree)}) imports lmrl.{other} (section {section(modules[other])})"
        for name, tree in modules.items()
        for other in imported(tree, modules)
        if section(modules[other]) > section(tree)
    ]


def import_order(modules):
    """A topological order; raises graphlib.CycleError if there is none."""
    return list(graphlib.TopologicalSorter({n: imported(tree, modules) for n, tree in modules.items()}).static_order())


def test_dependencies_point_backwards():
    modules = package_modules(ROOT)
    assert modules
    assert forward_imports(modules) == []


def test_no_cycles():
    import_order(package_modules(ROOT))


def test_the_two_checks_see_a_violation():
    def module(number, code):
        return ast.parse(f'"""Generated from section {number}, notebooks/{number:02}_x.py."""\n{code}')

    late = {"a": module(1, "def f():\n    from lmrl.b import g"), "b": module(2, "")}
    assert forward_imports(late) == ["lmrl.a (section 1) imports lmrl.b (section 2)"]
    circle = {"a": module(1, "from lmrl import b"), "b": module(1, "import lmrl.a")}
    try:
        import_order(circle)
    except graphlib.CycleError:
        return
    raise AssertionError("a cycle went unseen")


def test_matplotlib_is_imported_by_figures_only():
    for name, tree in package_modules(ROOT).items():
        text = ast.unparse(tree)
        assert name.startswith("figures.") or "import matplotlib" not in text and "from matplotlib" not in text, name


def run(code):
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_import_lmrl_is_light_and_lazy():
    run("import lmrl, sys; assert 'torch' not in sys.modules; assert lmrl.policy is sys.modules['lmrl.policy']")


def test_modules_import_without_the_extras():
    """Every module but the figures imports where only torch, transformers and numpy are installed."""
    names = [name for name in package_modules(ROOT) if not name.startswith("figures.")]
    run(
        f"""
import importlib, sys
for extra in {EXTRAS}:
    sys.modules[extra] = None
for name in {names}:
    importlib.import_module("lmrl." + name)
"""
    )
