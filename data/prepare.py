"""Find, verify, unpack, fetch: from a corpus's name to a checked file of plain bytes.

`python -m data.prepare NAME --root FOLDER` does it by hand and prints what a run would read.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from data.archive import SUFFIXES, first_bytes, kind_of
from data.digests import FRACTIONS
from data.errors import DataError, shown
from data.fetch import download
from data.provenance import Record, stamp
from data.stdlib import concatenate, listing, stdlib_files, stdlib_folder
from data.store import Store, keyed, publish
from data.unpacking import unchanged, unpack_checked, unpacked
from data.verify import Wanted, examine, examine_part

log = logging.getLogger(__name__)


def prepare_official(wanted: Wanted, store: Store) -> Record:
    """The verified text of a public corpus, found under root or cache, else downloaded.

    Found files are tried in order (raw, zip, gz, xz; root before cache). One that is refused is
    passed over, with a warning, only if another one is good; if all are refused, nothing is
    downloaded and the reasons are the error.
    """
    store.check_root()
    if found := _found(wanted, store):
        return found
    with store.lock(wanted.official.name):
        return _found(wanted, store) or _fetched(wanted, store)


def prepare_stdlib(store: Store) -> Record:
    """The standard library's text, made anew if any of its files has changed."""
    folder = stdlib_folder()
    files = stdlib_files(folder)
    source = listing(folder, files)
    name = keyed("stdlib", folder)

    def made() -> Record | None:
        for place in store.readable():
            record = store.load(place / name)
            if record and record.source == source:
                return examine(record.path, FRACTIONS, store)
        return None

    def write(place: Path) -> Record:
        with publish(place / name) as part:
            concatenate(folder, files, part)
            facts = examine_part(part)
        return Record(stamp(place / name), facts, source)

    if record := made():
        return record
    with store.lock("stdlib"):
        return made() or store.save(store.write(write))


def _found(wanted: Wanted, store: Store) -> Record | None:
    refused = []
    for path in _candidates(wanted, store):
        try:
            record = _accepted(path, wanted, store)
        except DataError as error:
            refused.append(str(error))
            continue
        for reason in refused:
            warnings.warn(f"{reason}; {shown(record.path)} is used instead", stacklevel=2)
        return record
    if refused:
        raise DataError("; ".join(refused))
    return None


def _candidates(wanted: Wanted, store: Store) -> Iterator[Path]:
    name = wanted.official.name
    for folder in store.readable():
        raw = folder / name
        if os.path.lexists(raw) and not _outdated(store.load(raw), wanted):
            yield raw
        for suffix in SUFFIXES:
            if os.path.lexists(archive := folder / (name + suffix)):
                yield archive


def _outdated(record: Record | None, wanted: Wanted) -> bool:
    """Whether a nonstandard text was unpacked from an archive that has changed since."""
    if record is None or record.source is None or not wanted.difference(record.scan):
        return False
    return Path(record.source.stamp.path).is_file() and not unchanged(record.source)


def _accepted(path: Path, wanted: Wanted, store: Store) -> Record:
    official = wanted.official
    kind = kind_of(path)
    if kind == "html":
        start = first_bytes(path, 24).decode("ascii", "backslashreplace").strip()
        raise DataError(
            f"{shown(path)} is an HTML page (starts with {start!r}), not {official.name}: "
            f"remove it and get {official.url}"
        )
    if kind != "raw":
        return unpacked(path, kind, wanted, store)
    size = stamp(path).size
    if size != official.size and path.suffix in SUFFIXES:
        raise DataError(
            f"{shown(path)} holds no zip, gzip or xz data (starts with {first_bytes(path, 16)!r}) "
            f"and is no raw {official.name}: size {size}, expected {official.size}"
        )
    wanted.check_size(path, path, size)  # before reading all of it
    record = examine(path, FRACTIONS, store)
    wanted.check(path, path, record.scan)
    return record


def _fetched(wanted: Wanted, store: Store) -> Record:
    official = wanted.official
    log.info("fetching %s (%d bytes)", official.url, official.archive_size)
    # The archive has no name, so that nothing of it can be left behind.
    with tempfile.TemporaryFile() as archive:
        try:
            download(official.url, official.archive_size, official.archive_sha256, archive)
        except DataError as error:
            raise DataError(_by_hand(wanted, store, str(error))) from error

        def write(folder: Path) -> Record:
            archive.seek(0)
            text = folder / official.name
            with publish(text) as part:
                facts = unpack_checked(archive, official.url, "zip", part, Wanted(official))
            return Record(stamp(text), facts)

        return store.save(store.write(write))


def _by_hand(wanted: Wanted, store: Store, reason: str) -> str:
    official = wanted.official
    place = shown(store.root / official.name)
    return (
        f"{official.name} is not in {shown(store.root)} and cannot be downloaded ({reason}): "
        f"get {official.url} ({official.archive_size} bytes, sha256 {official.archive_sha256}) "
        f"and save it as {place}.zip, or the unpacked text ({official.size} bytes, sha256 "
        f"{official.sha256}) as {place}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare one corpus and print its description."""
    from data.corpus import open_corpus

    parser = argparse.ArgumentParser(prog="python -m data.prepare", description=main.__doc__)
    parser.add_argument("name", metavar="NAME", help="enwik8, text8 or stdlib")
    parser.add_argument("--root", required=True, help="the data folder")
    parser.add_argument("--cache", help="default: $LONGCHAR_CACHE, else the user's cache folder")
    parser.add_argument("--allow-nonstandard", action="store_true", help="take other texts too")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        corpus = open_corpus(
            options.name,
            options.root,
            allow_nonstandard=options.allow_nonstandard,
            cache=options.cache,
        )
    except DataError as error:
        sys.exit(f"error: {error}")
    sys.stdout.writelines(line + "\n" for line in corpus.describe())


if __name__ == "__main__":
    main()
