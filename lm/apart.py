"""A trial run of train.py in a process of its own, for commands that measure one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lm.errors import UserError

ROOT = Path(__file__).parent.parent


@contextmanager
def trial_run(overrides: Sequence[str]) -> Iterator[list[Path]]:
    """Train with these arguments; the folders of the stages, which are gone after `with`.

    Raises:
        UserError: with the run's last line, if it failed.
    """
    with TemporaryDirectory() as folder:
        command = ["train.py", "throwaway=true", "init_from=scratch", *overrides]
        done = subprocess.run(
            [sys.executable, *command, f"runs_dir={folder}", "name=measured"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no message"]
            raise UserError(f"{' '.join(command)} failed ({done.returncode}): {said[-1]}")
        yield sorted((Path(folder) / "measured" / "trial").glob("stage*"))
