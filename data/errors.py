"""The error that a user of this package can mend, and paths as they are printed."""

from __future__ import annotations

from pathlib import Path


class DataError(Exception):
    """A text cannot be had, or is not what it should be.

    The message is one line that says why; it names arguments as a configuration does, data.path.
    """


def shown(path: Path | str) -> str:
    r"""`path` for a message: what is no UTF-8, and control characters, as \ escapes."""
    text = str(path).encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unreadable(path: Path | str, error: OSError) -> DataError:
    """The DataError for a file or folder that the system refuses to read."""
    return DataError(f"cannot read {shown(path)}: {error.strerror or error}")
