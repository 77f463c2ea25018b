"""Write the pinned files from pyproject.toml: requirements/*.txt and environment.yml.

Run by `make lock`; needs uv on PATH. Pins that still fit are kept; `--upgrade` takes the newest
versions instead. What differs by device (torch, its CUDA libraries) is left to torch.txt.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = ROOT / "requirements" / "torch.txt"
LOCK = ROOT / "requirements" / "lock.txt"
EXTRAS = ("slurm", "tensorboard")
OLDEST_PYTHON = "3.11"
BY_DEVICE = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")

LOCK_HEADER = """\
# Written by scripts/lock.py from pyproject.toml (its dependencies and the extra dev): do not edit.
# Install after torch.txt with: pip install --no-deps --require-hashes -r requirements/lock.txt
"""
EXTRA_HEADER = """\
# Written by scripts/lock.py: what the extra {extra} of pyproject.toml adds to lock.txt.
# Install after it with: pip install --no-deps --require-hashes -r requirements/{extra}.txt
"""
CONDA_HEADER = f"""\
# Written by scripts/lock.py: the pins of requirements/torch.txt and lock.txt, for conda users.
name: longchar
channels:
  - conda-forge
dependencies:
  - python={OLDEST_PYTHON}
  - pip
  - pip:
"""


def resolve(extras: tuple[str, ...], constraints: tuple[Path, ...], upgrade: bool) -> list[str]:
    """The blocks "name==version ; marker \\ hashes" of everything that the extras need.

    Raises:
        SystemExit: uv is missing, or finds no solution (its own message has been printed).
    """
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("make lock: uv is not on PATH; install it (pip install uv) and run again")
    command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
    command += ["--python-version", OLDEST_PYTHON, "--no-header", "--no-annotate"]
    for extra in extras:
        command += ["--extra", extra]
    for file in constraints:
        command += ["--constraint", str(file)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        if LOCK.exists() and not upgrade:
            shutil.copy(LOCK, output)
        command += ["--output-file", str(output), str(ROOT / "pyproject.toml")]
        if subprocess.run(command, check=False).returncode:
            sys.exit("make lock: uv found no set of versions; its message stands above")
        blocks = re.split(r"\n(?=\S)", output.read_text().strip())
    return [block for block in blocks if not BY_DEVICE.match(block)]


def requirement(block: str) -> str:
    """The block's first line without its hashes: name==version ; marker."""
    return block.splitlines()[0].removesuffix("\\").strip()


def write(path: Path, text: str) -> None:
    """Leave a file that already says `text` as it is, so that make has nothing to rebuild."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main() -> None:
    """Resolve, then write all files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    upgrade = parser.parse_args().upgrade

    locked = resolve(("dev",), (TORCH,), upgrade)
    write(LOCK, LOCK_HEADER + "\n".join(locked) + "\n")
    for extra in EXTRAS:
        added = [b for b in resolve(("dev", extra), (TORCH, LOCK), upgrade) if b not in locked]
        header = EXTRA_HEADER.format(extra=extra)
        write(LOCK.with_name(f"{extra}.txt"), header + "\n".join(added) + "\n")

    torch = [line for line in TORCH.read_text().splitlines() if not line.startswith("#")]
    pins = torch + [requirement(block) for block in locked]
    lines = "".join(f"      - {pin}\n" for pin in pins)
    write(ROOT / "environment.yml", CONDA_HEADER + lines)


if __name__ == "__main__":
    main()
