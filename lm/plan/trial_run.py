"""A trial run of train.py, or another command, in a process of its own, to be measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lm.errors import UserError

ROOT = Path(__file__).parents[2]


def output_of(arguments: Sequence[str], *hidden: str) -> str:
    """What Python prints when it runs with these arguments in the checkout.

    Args:
        arguments: named in the error, too. hidden: further ones, which are not.

    Raises:
        UserError: with the last line of its errors, if it failed.
    """
    done = subprocess.run(
        [sys.executable, *arguments, *hidden], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{' '.join(arguments)} failed ({done.returncode}): {said[-1]}")
    return done.stdout


@contextmanager
def trial_run(overrides: Sequence[str]) -> Iterator[list[Path]]:
    """Train with these arguments; the folders of the stages, which are gone after `with`.

    Raises:
        UserError: with the run's last line, if it failed.
    """
    with TemporaryDirectory() as folder:
        command = ["train.py", "throwaway=true", "init_from=scratch", *overrides]
        output_of(command, f"runs_dir={folder}", "name=measured")
        yield sorted((Path(folder) / "measured" / "trial").glob("stage*"))
