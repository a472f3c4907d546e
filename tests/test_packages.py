"""How the package says where a missing package comes from."""

import re
import tomllib
from pathlib import Path

from lmrl.packages import PIP_INSTALL, install_command

ROOT = Path(__file__).parents[1]


def test_the_command_of_an_extra():
    assert install_command("lora") == ".venv/bin/python -m pip install -c constraints.txt -e '.[lora]'"
    assert install_command("lora").startswith(PIP_INSTALL) and (ROOT / "constraints.txt").is_file()


def test_every_extra_that_an_error_names_is_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    texts = [path.read_text() for path in (ROOT / "lmrl").rglob("*.py")]
    named = {
        extra
        for text in texts
        for extra in re.findall(r"(?:install_command|optional_import)\(.*?[\"'](\w+)[\"']\)", text)
    }
    assert {"gguf", "lora", "tasks", "train"} <= named <= extras.keys()
