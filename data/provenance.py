"""What is remembered about a text between runs, so that it is not read again to be checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.digests import Scan
from data.errors import unreadable

FORMAT = 1


@dataclass(frozen=True)
class Stamp:
    """A file's size and time of change: while they stay, its content is taken as unchanged."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Source:
    """What a text was made from; `sha256` is the archive's, or that of a list of files."""

    stamp: Stamp
    sha256: str


@dataclass(frozen=True)
class Record:
    """A text, what a pass over it found, and its source if this package wrote it."""

    stamp: Stamp
    scan: Scan
    source: Source | None = None

    @property
    def path(self) -> Path:
        """Where the text lies."""
        return Path(self.stamp.path)


def stamp(path: Path) -> Stamp:
    """The stamp of the file as it is now; DataError if there is none."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return Stamp(str(path), status.st_size, status.st_mtime_ns)


def encode(record: Record) -> bytes:
    """`record` as JSON, with the symbols in hexadecimal."""
    fields = asdict(record)
    fields["scan"]["symbols"] = [symbols.hex() for symbols in record.scan.symbols]
    return json.dumps({"format": FORMAT, **fields}, indent=1).encode()


def decode(text: bytes) -> Record | None:
    """The record in `text`; None if it is damaged or of another format, which costs a new pass."""
    try:
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            return None
        facts, source = fields["scan"], fields["source"]
        return Record(
            _stamp(fields["stamp"]),
            Scan(
                sha256=str(facts["sha256"]),
                cuts=tuple(int(edge) for edge in facts["cuts"]),
                digests=tuple(str(digest) for digest in facts["digests"]),
                symbols=tuple(bytes.fromhex(symbols) for symbols in facts["symbols"]),
            ),
            source and Source(_stamp(source["stamp"]), str(source["sha256"])),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _stamp(fields: dict[str, Any]) -> Stamp:
    return Stamp(str(fields["path"]), int(fields["size"]), int(fields["mtime_ns"]))
