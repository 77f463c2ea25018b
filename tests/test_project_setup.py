"""`make setup`: what is built when, with a stand-in for Python that only writes down its calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

# Answers the version check, makes an environment whose Python is itself, and logs the rest.
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-V "*) echo "Python 3.9.2"; exit ;;
    "-c "*) exit ${TOO_OLD:-0} ;;
    "-m venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo venv >> log; exit ;;
esac
shift 2
echo "$@" >> log
test "$*" != "$FAILING"
"""
LOCKED = "install --quiet --no-deps --require-hashes -r requirements/lock.txt"
DEFAULT = ["venv", "install --quiet -r requirements/torch.txt", LOCKED, "check"]


class Checkout:
    """A copy of what `make setup` reads, in a folder whose name has a space."""

    def __init__(self, folder: Path):
        self.folder = folder / "check out"
        (self.folder / "requirements").mkdir(parents=True)
        shutil.copy(ROOT / "Makefile", self.folder)
        for name in ("torch", "lock", "slurm"):
            (self.folder / "requirements" / f"{name}.txt").touch()
        self.python = folder / "bin dir" / "python"
        self.python.parent.mkdir()
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        outside = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
        return subprocess.run(
            ["make", f"PYTHON={self.python}", *arguments],
            cwd=self.folder,
            env=outside | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """What has been done since the last look."""
        log = self.folder / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def outdate(self, name: str) -> None:
        stamp = (self.folder / ".venv" / "ready").stat().st_mtime + 1
        os.utime(self.folder / "requirements" / name, (stamp, stamp))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_torch_comes_first_then_the_lock_and_only_once(checkout):
    assert checkout.make("setup").returncode == 0
    assert checkout.calls() == DEFAULT
    assert checkout.make("setup").returncode == 0
    assert checkout.calls() == []


@pytest.mark.parametrize("name", ["torch.txt", "lock.txt"])
def test_changed_pins_build_it_anew(checkout, name):
    checkout.make("setup")
    checkout.calls()
    checkout.outdate(name)
    checkout.make("setup")
    assert checkout.calls() == DEFAULT


def test_an_interrupted_set_up_begins_again(checkout):
    assert checkout.make("setup", FAILING=LOCKED).returncode != 0
    assert checkout.calls() == DEFAULT[:3]
    assert checkout.make("setup").returncode == 0
    assert checkout.calls() == DEFAULT


def test_another_torch_is_installed_and_remembered(checkout):
    other = "torch==2.13.0 --index-url https://nowhere.invalid/cpu"
    checkout.make("setup")
    checkout.calls()
    expected = ["venv", f"install --quiet {other}", LOCKED, "check"]
    checkout.make("setup", f"TORCH={other}")
    assert checkout.calls() == expected
    checkout.make("setup", f"TORCH={other}")
    checkout.make("setup")
    assert checkout.calls() == []
    checkout.outdate("lock.txt")
    checkout.make("setup")
    assert checkout.calls() == expected


def test_an_extra_lies_on_top(checkout):
    checkout.make("setup-slurm")
    extra = "install --quiet --no-deps --require-hashes -r requirements/slurm.txt"
    assert checkout.calls() == [*DEFAULT, extra, "check"]
    checkout.make("setup-slurm")
    assert checkout.calls() == []


def test_an_old_python_is_refused_in_one_line(checkout):
    result = checkout.make("setup", TOO_OLD="1")
    assert result.returncode != 0
    assert "is Python 3.9.2; expected Python 3.11 or newer" in result.stderr.splitlines()[0]
    assert checkout.calls() == []


def test_a_missing_python_is_named(checkout):
    result = checkout.make("setup", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "PYTHON=no-such-python: not found" in result.stderr.splitlines()[0]
