"""pyproject.toml, the pinned files and environment.yml say the same."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OTHER_EXTRAS = sorted(set(PROJECT["optional-dependencies"]) - {"dev"})
PINNED_FILES = ("torch", "lock", *OTHER_EXTRAS)
# PyPI and conda know both names; the two packages hold two copies of the same classes.
LIGHTNING_TWIN = "lightning"


def pinned(name: str) -> dict[str, Requirement]:
    """The requirements of one file, by name; hashes left out."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    lines = re.findall(r"^[^\s#][^\\\n]*", text, re.MULTILINE)
    return by_name(Requirement(line) for line in lines)


def by_name(requirements) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in requirements}


def version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{requirement} is not pinned"
    return specifier.version


def unmet(wanted: list[str], *files: str) -> list[str]:
    """The wanted requirements for which the files have no pin, or one that does not fit."""
    pins = {name: pin for file in files for name, pin in pinned(file).items()}
    return [
        text
        for text in wanted
        if (name := canonicalize_name(Requirement(text).name)) not in pins
        or not Requirement(text).specifier.contains(version(pins[name]), prereleases=True)
        or pins[name].marker
    ]


def test_every_dependency_is_pinned_to_a_version_that_fits():
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    assert not unmet(wanted, "torch", "lock")


@pytest.mark.parametrize("extra", OTHER_EXTRAS)
def test_an_extra_adds_to_the_lock_and_changes_nothing_in_it(extra):
    assert not unmet(PROJECT["optional-dependencies"][extra], extra)
    assert not set(pinned(extra)) & set(pinned("lock"))


def test_torch_stands_alone():
    torch = pinned("torch")
    assert set(torch) == {"torch"}
    assert "+" not in version(torch["torch"]), "a build for one device"
    by_device = [n for n in pinned("lock") if re.match(r"(torch|triton|nvidia-.*|cuda-.*)$", n)]
    assert not by_device


@pytest.mark.parametrize("name", [n for n in PINNED_FILES if n != "torch"])
def test_every_pin_has_hashes(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    for block in re.split(r"\n(?=\S)", text.strip()):
        if block.startswith("#"):
            continue
        first, *rest = [line.removesuffix("\\").strip() for line in block.splitlines()]
        version(Requirement(first))
        assert rest, f"{first} has no hash"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in rest), first


@pytest.mark.parametrize("name", PINNED_FILES)
def test_no_pinned_file_names_an_index(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in lines if re.search(r"://|index-url|find-links| @ ", line)]


def test_the_twin_of_pytorch_lightning_is_nowhere():
    for name in PINNED_FILES:
        assert LIGHTNING_TWIN not in pinned(name)
    assert importlib.util.find_spec(LIGHTNING_TWIN) is None
    importing = re.compile(rf"^\s*(import|from) {LIGHTNING_TWIN}\b", re.MULTILINE)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py")]:
        assert not importing.search(path.read_text()), path


def test_conda_has_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    *conda, pip = environment["dependencies"]
    assert conda == ["python=3.11", "pip"]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains("3.11")
    pins = by_name(Requirement(line) for line in pip["pip"])
    assert pins == pinned("torch") | pinned("lock")


def test_a_pin_that_does_not_fit_is_found():
    assert unmet(["torch>=1", "numpy>=1"], "torch", "lock") == []
    assert unmet(["numpy<1", "no-such-package", "torch>=99"], "torch", "lock") == [
        "numpy<1",
        "no-such-package",
        "torch>=99",
    ]
