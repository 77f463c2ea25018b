"""One pass over a text: the digest and the symbols of each of its ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path

from data.errors import DataError, shown, unreadable

CHUNK = 1 << 20
FRACTIONS = (0.9, 0.05, 0.05)


@dataclass(frozen=True)
class Scan:
    """Facts about the bytes of one file.

    `cuts` are the edges of its consecutive ranges, from 0 to the file's size; `digests` and
    `symbols` (the distinct byte values, sorted) belong to the ranges; `sha256` to the whole.
    """

    sha256: str
    cuts: tuple[int, ...]
    digests: tuple[str, ...]
    symbols: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.cuts[-1]


def cut(size: int, fractions: Sequence[float]) -> tuple[int, ...]:
    """Edges of consecutive ranges that cover [0, size) once, in proportion to `fractions`.

    A fraction counts as the decimal number that it prints as, so that 0.9 of 10^8 is 90,000,000.
    """
    shares = [Fraction(repr(float(share))) for share in fractions]
    whole = sum(shares)
    return (0, *(int(size * edge / whole) for edge in accumulate(shares)))


def scan(path: Path, cuts: Sequence[int]) -> Scan:
    """Read `path` once. `cuts` as in `Scan`; the file must have exactly cuts[-1] bytes."""
    whole = hashlib.sha256()
    digests, symbols = [], []
    try:
        with path.open("rb") as file:
            for start, stop in pairwise(cuts):
                part, known = hashlib.sha256(), b""
                left = stop - start
                while left and (chunk := file.read(min(left, CHUNK))):
                    whole.update(chunk)
                    part.update(chunk)
                    # Deleting the symbols known already leaves next to nothing: quick in C.
                    known = bytes(sorted({*known, *chunk.translate(None, known)}))
                    left -= len(chunk)
                if left:
                    raise DataError(f"{shown(path)} became shorter while it was read")
                digests.append(part.hexdigest())
                symbols.append(known)
            if file.read(1):
                raise DataError(f"{shown(path)} became longer while it was read")
    except OSError as error:
        raise unreadable(path, error) from error
    return Scan(whole.hexdigest(), tuple(cuts), tuple(digests), tuple(symbols))


def count_crlf(path: Path) -> int:
    """Number of CR LF pairs, also those that lie across two chunks of the reading."""
    pairs, last = 0, b""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            pairs += chunk.count(b"\r\n") + (last == b"\r" and chunk[:1] == b"\n")
            last = chunk[-1:]
    return pairs


def first_outside(path: Path, alphabet: bytes) -> tuple[int, int] | None:
    """Offset and value of the first byte that is not in `alphabet`, or None."""
    offset = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            if foreign := chunk.translate(None, alphabet):
                return offset + chunk.index(foreign[:1]), foreign[0]
            offset += len(chunk)
    return None


def digest_of(path: Path) -> str:
    """The sha256 of a whole file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error
