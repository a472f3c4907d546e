"""tests/README.md names tests that exist, and all the pitfalls."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS / "README.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.+?) \| (.*?) ?\| (.*?) ?\|$", TEXT, flags=re.MULTILINE)


def functions(file):
    return {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", TEXT)
    assert len(named) > 50
    assert [f"{file}::{name}" for file, name in named if name not in functions(file)] == []


def test_every_pitfall_has_a_test_or_is_open():
    assert [int(row[0]) for row in ROWS] == list(range(1, 34))
    for number, _, tests, still_open in ROWS:
        assert re.fullmatch(r"(`test_\w+\.py::\w+` ?)*", tests), number
        assert tests or still_open, number
