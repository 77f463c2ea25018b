"""What kind of file a file is, told from its content, and the text inside of an archive.

A member is streamed into a file of the caller's: names inside of an archive are never used as
paths, and no more is unpacked than the caller allows.
"""

from __future__ import annotations

import gzip
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable
from io import BufferedIOBase
from pathlib import Path, PurePosixPath
from typing import Any

from data.digests import CHUNK
from data.errors import DataError, shown, unreadable

SUFFIXES = (".zip", ".gz", ".xz")
_MAGIC = {
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
}
_OPENERS: dict[str, Callable[[Any], Any]] = {"gzip": gzip.open, "xz": lzma.open}
# What the standard library raises for damaged, truncated, encrypted and unknown contents.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    gzip.BadGzipFile,
    struct.error,
    EOFError,
    RuntimeError,
    ValueError,
)


def kind_of(path: Path) -> str:
    """By the first bytes: "zip", "gzip", "xz", "html", or "raw" for anything else."""
    head = first_bytes(path)
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    opening = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return "html" if opening.startswith((b"<!doctype", b"<html")) else "raw"


def first_bytes(path: Path, count: int = 64) -> bytes:
    """The first bytes of a regular file; DataError for a folder, or what cannot be read."""
    try:
        if path.is_dir():
            raise DataError(f"{shown(path)} is a folder, expected a file")
        if path.exists() and not path.is_file():
            raise DataError(f"{shown(path)} is not a regular file")
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise unreadable(path, error) from error


def unpack(
    archive: BufferedIOBase, label: str, kind: str, name: str, out: BufferedIOBase, limit: int
) -> int:
    """Write the text inside of `archive` to `out`, at most `limit` bytes of it.

    Args:
        archive: open at its start, of `kind` "zip", "gzip" or "xz".
        label: what messages call the archive.
        name: of the wanted member of a zip file, in whatever folder it lies there.

    Returns:
        The number of bytes in the text; anything above `limit` means only "more than that".

    Raises:
        DataError: damaged, or a zip file with no or several possible members.
        OSError: the output cannot be written.
    """
    try:
        if kind != "zip":
            with _OPENERS[kind](archive) as text:
                return _copy(text.read, out, limit)
        with (
            zipfile.ZipFile(archive) as container,
            container.open(_member(container, label, name)) as text,
        ):
            return _copy(text.read, out, limit)
    except _DAMAGE as error:
        raise DataError(f"{label} is a truncated or damaged {kind} file: {error}") from error


def _copy(read: Callable[[int], bytes], out: BufferedIOBase, limit: int) -> int:
    written = 0
    while chunk := read(min(CHUNK, limit + 1 - written)):
        written += len(chunk)
        out.write(chunk)
    return written


def _member(container: zipfile.ZipFile, label: str, name: str) -> zipfile.ZipInfo:
    files = [
        entry
        for entry in container.infolist()
        if not entry.is_dir() and not entry.filename.startswith("__MACOSX/")
    ]
    named = [entry for entry in files if PurePosixPath(entry.filename).name == name]
    choice = named or files
    if len(choice) != 1:
        found = ", ".join(shown(entry.filename) for entry in files[:5]) or "nothing"
        raise DataError(f"{label} holds {found}: expected one file, named {name}")
    return choice[0]
