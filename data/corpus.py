"""A corpus: bytes in files, and the three ranges of them called train, valid and test.

Nothing is decoded. The vocabulary is always the 256 byte values, whatever a text holds.
"""

import math
import platform
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from data.archive import first_bytes
from data.digests import FRACTIONS
from data.errors import DataError, shown, unreadable
from data.official import OFFICIAL, Official
from data.prepare import prepare_official, prepare_stdlib
from data.provenance import Record
from data.store import Store, absolute
from data.verify import Wanted, examine

__all__ = ["SPLITS", "Corpus", "DataError", "Split", "check_length", "open_corpus"]

SPLITS = ("train", "valid", "test")
NAMES = (*OFFICIAL, "file", "stdlib")


@dataclass(frozen=True)
class Split:
    """The bytes [start, stop) of the file `path`; `sha256` is theirs."""

    name: str
    path: Path
    start: int
    stop: int
    sha256: str

    def __len__(self) -> int:
        """Bytes."""
        return self.stop - self.start

    def read(self) -> UInt8[np.ndarray, "bytes"]:
        """A read-only memory map of exactly this range: opens in no time, reads when used."""
        try:
            size = self.path.stat().st_size
            if size < self.stop:
                raise DataError(
                    f"{shown(self.path)} has {size} bytes by now, the {self.name} split needs "
                    f"{self.stop}: start again"
                )
            return np.memmap(self.path, np.uint8, "r", offset=self.start, shape=(len(self),))
        except OSError as error:
            raise unreadable(self.path, error) from error


@dataclass(frozen=True)
class Corpus:
    """Three splits.

    `symbols` counts the distinct byte values in train, for information only. `about` says in one
    line what the text is.
    """

    name: str
    splits: dict[str, Split]
    symbols: int
    about: str = ""

    def describe(self) -> list[str]:
        """Lines for people: what the text is, then path, range, bytes and sha256 per split."""
        lines = [f"{self.name}: {self.about}" if self.about else self.name]
        for split in self.splits.values():
            lines.append(
                f"{split.name}: {len(split)} bytes [{split.start}, {split.stop}) of "
                f"{shown(split.path)}, sha256 {split.sha256}"
            )
        return [*lines, f"symbols in train: {self.symbols} of 256 byte values"]


def open_corpus(
    name: str,
    root: Path | str,
    *,
    path: Path | str = "",
    train_path: Path | str = "",
    valid_path: Path | str = "",
    test_path: Path | str = "",
    fractions: Sequence[float] = FRACTIONS,
    allow_nonstandard: bool = False,
    cache: Path | str | None = None,
) -> Corpus:
    """Find, make or download a corpus, and verify it.

    What was verified once is not read again until its size or time of change differs.

    Args:
        name: "enwik8", "text8", "stdlib" (this Python's standard library) or "file".
        root: the folder of enwik8 and text8, and of what is prepared if it can be written.
        path: for "file": the text, cut by `fractions` into train, valid and test.
        train_path: for "file", with `valid_path` and `test_path`: one text per split instead.
        valid_path: see `train_path`.
        test_path: see `train_path`.
        fractions: for "file" with `path`: the shares of train, valid and test.
        allow_nonstandard: take another text in the place of enwik8 or text8, with a warning.
        cache: what is prepared goes there if `root` cannot be written; default
            $LONGCHAR_CACHE, else the user's cache folder, else a private temporary folder.

    Raises:
        DataError: with one line that says what was found, what was expected and what to do.
    """
    if name not in NAMES:
        raise DataError(f"data.name={name}: expected one of {', '.join(NAMES)}")
    paths = {"path": path, "train_path": train_path, "valid_path": valid_path}
    paths |= {"test_path": test_path}
    given = {key: absolute(value) for key, value in paths.items() if str(value)}
    _check_arguments(name, given, fractions, allow_nonstandard)
    store = Store(root, cache)
    if name == "file":
        return _open_file(given, fractions, store)
    if name == "stdlib":
        record = prepare_stdlib(store)
        return _corpus(name, record, f"standard library of Python {platform.python_version()}")
    return _open_official(OFFICIAL[name], allow_nonstandard, store)


def check_length(split: Split, positions_needed: int, what: str) -> None:
    """Raise DataError if `split` is too short for a sequence of that many positions.

    A sequence needs one byte more, since each position predicts the next byte. `what` names who
    needs it ("stage 5").
    """
    needed = positions_needed + 1
    if len(split) < needed:
        raise DataError(
            f"{what} needs {needed} bytes of the {split.name} split (a sequence of "
            f"{positions_needed} and the byte after it), found {len(split)} in "
            f"{shown(split.path)}: use a longer text or shorter sequences"
        )


def _open_official(official: Official, allow_nonstandard: bool, store: Store) -> Corpus:
    wanted = Wanted(official, allow_nonstandard)
    record = prepare_official(wanted, store)
    difference = wanted.difference(record.scan)
    if not difference:
        return _corpus(official.name, record, "the standard text")
    about = (
        f"NOT the standard text ({difference}), cut 90/5/5: its scores compare with no published "
        "ones"
    )
    warnings.warn(f"{official.name}: {about} [{shown(record.path)}]", stacklevel=3)
    return _corpus(official.name, record, about)


def _open_file(given: dict[str, Path], fractions: Sequence[float], store: Store) -> Corpus:
    for key, text in given.items():
        try:
            first_bytes(text)  # an error for what is no file, or cannot be read
        except DataError as error:
            raise DataError(f"data.{key}: {error}; give another data.{key}=FILE") from error
    if "path" in given:
        return _corpus("file", examine(given["path"], fractions, store), "a text of your own")
    records = [examine(given[f"{name}_path"], (1.0,), store) for name in SPLITS]
    splits = [_split(name, record, index=0) for name, record in zip(SPLITS, records, strict=True)]
    symbols = len(records[0].scan.symbols[0])
    return Corpus("file", dict(zip(SPLITS, splits, strict=True)), symbols, "texts of your own")


def _corpus(name: str, record: Record, about: str) -> Corpus:
    splits = {key: _split(key, record, index) for index, key in enumerate(SPLITS)}
    facts = record.scan
    about = f"{about}, {facts.size} bytes, sha256 {facts.sha256}"
    return Corpus(name, splits, len(facts.symbols[0]), about)


def _split(name: str, record: Record, index: int) -> Split:
    start, stop = record.scan.cuts[index : index + 2]
    if start == stop:
        raise DataError(f"{name} split is empty: {shown(record.path)} has {record.scan.size} bytes")
    return Split(name, record.path, start, stop, record.scan.digests[index])


def _check_arguments(
    name: str, given: dict[str, Path], fractions: Sequence[float], allow_nonstandard: bool
) -> None:
    three = {f"{split}_path" for split in SPLITS}
    if name == "file":
        if not ({"path"} == set(given) or three == set(given)):
            found = ", ".join(f"data.{key}" for key in given) or "none"
            raise DataError(
                "data.name=file needs either data.path or all of data.train_path, data.valid_path "
                f"and data.test_path; given: {found}"
            )
    elif given:
        keys = ", ".join(f"data.{key}" for key in given)
        raise DataError(f"{keys}: only for data=file, not for data={name}")
    if allow_nonstandard and name not in OFFICIAL:
        official = " and ".join(OFFICIAL)
        raise DataError(f"data.allow_nonstandard: only for {official}, not for data={name}")
    shares = tuple(fractions)
    if len(shares) != len(SPLITS) or not all(share > 0 for share in shares):
        raise DataError(f"data.fractions={list(shares)}: expected three numbers above 0")
    if not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise DataError(f"data.fractions={list(shares)} sum to {sum(shares)}, expected 1")
    if shares != FRACTIONS and (name != "file" or "path" not in given):
        raise DataError(f"data.fractions={list(shares)}: only for data=file with data.path")
