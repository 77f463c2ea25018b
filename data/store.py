"""Where prepared texts and records lie, and how they get there: whole or not at all.

Folders, best first: the data folder (`root`), the cache folder, a private temporary folder. Things
are looked for in all of them and written to the first that takes them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedRandom
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from data.errors import DataError, shown, unreadable
from data.provenance import Record, decode, encode, stamp

LOCK_TIMEOUT_S = 1000.0
ABANDONED_S = 86_400.0
T = TypeVar("T")


class Store:
    """The folders of one corpus.

    Args:
        root: the data folder; it need not exist, and is made when something is written.
        cache: the cache folder; default $LONGCHAR_CACHE, else the user's cache folder.
    """

    def __init__(self, root: Path | str, cache: Path | str | None = None) -> None:
        self.root = absolute(root)
        self.cache = _cache_folder(cache)
        self._wanted = [folder for folder in (self.root, self.cache) if folder]
        self._warned = False

    def check_root(self) -> None:
        """Raise DataError if root is there, but is no folder that can be looked into."""
        try:
            mode = self.root.stat().st_mode
            if not stat.S_ISDIR(mode):
                raise DataError(f"data.root={shown(self.root)} is a file, expected a folder")
            next(self.root.iterdir(), None)
        except FileNotFoundError:
            return
        except OSError as error:
            raise unreadable(self.root, error) from error

    def readable(self) -> list[Path]:
        """The folders that can be looked into, best first, each once."""
        folders = dict.fromkeys((*self._wanted, private_folder()))
        return [folder for folder in folders if _allows(folder, os.R_OK | os.X_OK)]

    def write(self, write: Callable[[Path], T]) -> T:
        """What `write(folder)` returns for the first folder that lets it write."""
        try:
            for folder in self._wanted:
                if _takes_files(folder):
                    try:
                        return write(folder)
                    except PermissionError:
                        continue  # a file of this name is somebody else's
            private = private_folder()
            self._warn_once(private)
            return write(private)
        except OSError as error:
            raise DataError(f"cannot keep what was prepared: {error}") from error

    def _warn_once(self, private: Path) -> None:
        if not self._warned:
            refused = " or ".join(shown(folder) for folder in self._wanted)
            warnings.warn(
                f"cannot write to {refused}: what is prepared goes to {shown(private)}; "
                "LONGCHAR_CACHE can name a lasting folder",
                stacklevel=2,
            )
        self._warned = True

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Let one process of this user and machine at a time prepare `name` for this root.

        The lock spares double work. Nothing depends on it, since files appear by rename.
        """
        path = private_folder() / f"{keyed(name, self.root)}.lock"
        try:
            with FileLock(path, timeout=LOCK_TIMEOUT_S):
                yield
        except Timeout as error:
            raise DataError(
                f"another process has been preparing {name} for {LOCK_TIMEOUT_S:.0f} s "
                f"(it holds {shown(path)}): stop it, or wait and start again"
            ) from error

    def load(self, text: Path) -> Record | None:
        """The record of `text`, or None if there is none or the file has changed since."""
        if not _allows(text, os.R_OK):
            return None
        for folder in self.readable():
            sidecar = _sidecar(folder, text)
            if _allows(sidecar, os.R_OK):
                record = decode(sidecar.read_bytes())
                if record and record.stamp == stamp(text):
                    return record
        return None

    def save(self, record: Record) -> Record:
        """Remember `record`, and give it back."""

        def into(folder: Path) -> Record:
            with publish(_sidecar(folder, record.path)) as file:
                file.write(encode(record))
            return record

        return self.write(into)


@contextmanager
def publish(path: Path) -> Iterator[BufferedRandom]:
    """A file under a temporary name (its `name`) that becomes `path` at the end, whole and safe.

    If the block raises, nothing is left. Leftovers of killed processes go after a day.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    # Not tempfile: its files are closed to other users, who may share the folder.
    part = path.with_name(f".{secrets.token_hex(8)}.longchar.part")
    try:
        with part.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def keyed(name: str, path: Path) -> str:
    """A file name for something called `name` that belongs to `path`."""
    return f"{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}"


def absolute(path: Path | str) -> Path:
    """`path` from the working folder, with ~ read as the home folder."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise DataError(f"{shown(path)}: {error}") from error


def private_folder() -> Path:
    """This user's own folder among the temporary files, made if need be."""
    try:
        folder = Path(tempfile.gettempdir()) / f"longchar-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise DataError(
            f"no temporary folder can be used ({error}): set TMPDIR to a folder that can"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise DataError(f"{shown(folder)} belongs to another user: set TMPDIR to another folder")
    return folder


def _sweep(folder: Path) -> None:
    for old in folder.glob(".*.longchar.part"):
        # Another process may be sweeping too, or the file be another user's: theirs to remove.
        with suppress(FileNotFoundError, PermissionError):
            if time.time() - old.stat().st_mtime > ABANDONED_S:
                old.unlink()


def _cache_folder(cache: Path | str | None) -> Path | None:
    if chosen := cache or os.environ.get("LONGCHAR_CACHE"):
        return absolute(chosen)
    try:
        return user_cache_path("longchar").absolute()
    except RuntimeError:
        return None  # the user has no home folder: what needs a cache falls to the private one


def _sidecar(folder: Path, text: Path) -> Path:
    return folder / f"{keyed(text.name[:40], text)}.longchar.json"


def _allows(path: Path, mode: int) -> bool:
    return os.access(path, mode)


def _takes_files(folder: Path) -> bool:
    """Whether files can be made in `folder`, found by making one that never gets a name.

    A folder that nobody has the right to write to counts as closed, even if root could write.
    """
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        if not existing.stat().st_mode & 0o222:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
