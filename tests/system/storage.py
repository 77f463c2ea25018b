"""Places that refuse: a disk that fills up, and folders that take no files, also from root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

SIZE = 4_000_000
OVERRIDE, READ_SEARCH = 1, 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
CAPABILITIES = 0x20080522  # version 3 of the system's interface


class SmallDisk:
    """A file system of `SIZE` bytes where one can be mounted; else a folder that imitates one.

    There a file is full from its beginning: it is the system's /dev/full.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(folder)]
        self.mounted = allowed(command)
        self._taken: list[Path] = []

    def fill(self, later: Path) -> None:
        """Leave no room; `later` is the file that is going to be written."""
        if self.mounted:
            self._taken = [self.folder / "filler"]
            with contextlib.suppress(OSError), self._taken[0].open("wb", 0) as filler:
                while True:
                    filler.write(bytes(4096))
        else:
            self._taken = [later.with_name(f".{later.name}.{os.getpid()}.unfinished")]
            self._taken[0].symlink_to("/dev/full")

    def free(self) -> None:
        """Give the room back."""
        for path in self._taken:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Take the file system away."""
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)


@contextlib.contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """Inside, nobody can make a file in `folder`; where that cannot be, as `forbidden`."""
    if not allowed(["chattr", "+i", str(folder)]):
        with forbidden(folder):
            yield
        return
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


@contextlib.contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    """Inside, permissions keep this user, also root, from making a file in `folder`."""
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    before = capabilities()
    change_capabilities(
        [part & ~(1 << OVERRIDE | 1 << READ_SEARCH) for part in before[:1]] + before[1:]
    )
    try:
        yield
    finally:
        change_capabilities(before)
        folder.chmod(mode)


def capabilities() -> list[int]:
    """The effective, permitted and inheritable sets of this thread: low words, then high ones."""
    data = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    assert ctypes.CDLL(None).capget(header, data) == 0
    return list(data)


def change_capabilities(sets: list[int]) -> None:
    """Give up capabilities for a while, or take them back."""
    data = (ctypes.c_uint32 * 6)(*sets)
    header = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
    assert ctypes.CDLL(None).capset(header, data) == 0


def allowed(command: list[str]) -> bool:
    """Whether the system does this for us."""
    if platform.system() != "Linux" or shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
