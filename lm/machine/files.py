"""Files that are either whole or absent: written beside their target, flushed, then renamed.

Lightning's writer makes a second copy in memory, does not flush to the disk and keeps no earlier
file (docs/deviations.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lm.errors import ConfigError, UserError, WriteError

UNFINISHED = ".unfinished"


@contextmanager
def replacing(path: Path, keep: Path | None = None) -> Iterator[BinaryIO]:
    """A binary file that takes the name `path` only once all of it is on the disk.

    Whatever happens before that (an exception, a full disk, a killed process) leaves the old file
    as it was; an unfinished one is removed, here or by `remove_unfinished`. With `keep`, the old
    file is not lost but takes that name.

    Raises:
        WriteError: if the system refuses to make, write, flush or rename the file.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if keep is not None and path.exists():
                path.replace(keep)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        flush_folder(path.parent)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the system's refusal into one line that names the file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        refusal = system_error(error)
        if refusal is None:
            raise
        raise WriteError(f"{path}: cannot be written ({refusal.strerror or refusal})") from error


def check_folder(key: str, folder: Path) -> None:
    """Refuse a folder in which no files can be made, before any work is done for them.

    Raises:
        ConfigError: naming the key.
    """
    folder = folder.absolute()
    place = next(part for part in (folder, *folder.parents) if part.exists())
    if not place.is_dir():
        raise ConfigError(f"{key}: {place} is a file, expected a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: {place} cannot be written; choose another folder")


def check_file(key: str, path: Path) -> None:
    """Refuse a path where no file can be made, before any work is done for it.

    Raises:
        ConfigError: naming the key.
    """
    if path.is_dir():
        raise ConfigError(f"{key}: {path} is a folder, expected the path of a file")
    check_folder(key, path.parent)


def system_error(error: BaseException | None) -> OSError | None:
    """The OSError behind an exception: itself, or what it was raised from or while handling."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def flush_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` as UTF-8."""
    with replacing(path) as file:
        file.write(text.encode())


def append_text(path: Path, text: str) -> None:
    """Append `text` as UTF-8, flushed to the disk."""
    with explained(path), path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left of files that they were writing into `folder`."""
    for path in folder.glob(f".*{UNFINISHED}"):
        with explained(path):
            path.unlink(missing_ok=True)
