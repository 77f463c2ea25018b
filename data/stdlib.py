"""The Python standard library's text: real text that every machine has, for demos and tests."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from io import BufferedIOBase
from pathlib import Path

from data.errors import DataError, shown, unreadable
from data.provenance import Source, Stamp

# Tests are left out as repetitive, installed packages since they differ between environments.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_folder() -> Path:
    """The folder of the standard library that runs this process."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files(folder: Path) -> list[str]:
    """The .py files below `folder`, as / separated paths from there, sorted by their bytes."""
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in names:
            path = Path(place, name)
            if name.endswith(".py") and path.is_file():
                files.append(path.relative_to(folder).as_posix())
    if not files:
        raise DataError(
            f"no .py file in {shown(folder)}: this Python's standard library has no source text; "
            "use data=file data.path=FILE with a text of your own"
        )
    return sorted(files, key=os.fsencode)


def listing(folder: Path, files: list[str]) -> Source:
    """What tells whether any of the files has changed: a digest of names, sizes and times."""
    digest, size, latest = hashlib.sha256(), 0, 0
    for name in files:
        status = (folder / name).stat()
        size += status.st_size
        latest = max(latest, status.st_mtime_ns)
        digest.update(os.fsencode(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return Source(Stamp(str(folder), size, latest), digest.hexdigest())


def concatenate(folder: Path, files: list[str], out: BufferedIOBase) -> None:
    """Write the files one after the other, byte for byte."""
    for name in files:
        try:
            out.write((folder / name).read_bytes())
        except OSError as error:
            raise unreadable(folder / name, error) from error
