"""What the README shows is run."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_reward_function_follows_the_signature():
    (block,) = (block for block in BLOCKS if "def my_reward" in block)
    namespace = {}
    exec(block, namespace)
    assert namespace["my_reward"](prompts=["", ""], completions=["17", "1"], answer=["", ""]) == [1.0, 0.0]


def test_the_library_example_trains(capsys):
    (block,) = (block for block in BLOCKS if "Trainer(" in block)
    exec(block.replace("max_steps=20", "max_steps=2"), {})
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3 and "held-out pass@1: " in out


def test_every_command_of_the_readme_exists():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for script in re.findall(r"benchmarks/\w+\.py", README):
        assert (Path(__file__).parents[1] / script).exists(), script
    assert "@@" not in README
