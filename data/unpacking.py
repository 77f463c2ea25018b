"""The text of an archive: unpacked and verified once, made anew when the archive changes."""

from __future__ import annotations

import os
from io import BufferedIOBase, BufferedRandom
from pathlib import Path

from data.archive import unpack
from data.digests import FRACTIONS, Scan, digest_of
from data.errors import shown
from data.provenance import Record, Source, stamp
from data.store import Store, keyed, publish
from data.verify import Wanted, examine, examine_part

# A nonstandard archive may unpack to this many times the standard size; more is taken as a bomb.
NONSTANDARD_LIMIT = 10


def unpacked(archive: Path, kind: str, wanted: Wanted, store: Store) -> Record:
    """The verified text inside of `archive`, beside it or else in the cache.

    Raises:
        DataError: the archive is damaged, or its text is not `wanted`; nothing is left behind.
    """
    name = wanted.official.name

    def made() -> Record | None:
        for folder in store.readable():
            for text in (folder / name, folder / keyed(name, archive)):
                record = store.load(text)
                if record and made_from(archive, record) and unchanged(record.source):
                    record = examine(text, FRACTIONS, store)
                    wanted.check(archive, text, record.scan)
                    return record
        return None

    def write(folder: Path) -> Record:
        source = Source(stamp(archive), digest_of(archive))
        text = _target(folder, archive, name, store)
        with publish(text) as part, archive.open("rb") as file:
            facts = unpack_checked(file, archive, kind, part, wanted)
        return Record(stamp(text), facts, source)

    if record := made():
        return record
    with store.lock(keyed(name, archive)):
        return made() or store.save(store.write(write))


def unpack_checked(
    archive: BufferedIOBase, label: Path | str, kind: str, part: BufferedRandom, wanted: Wanted
) -> Scan:
    """Unpack into `part`, which is to be thrown away if this raises DataError."""
    limit = wanted.official.size * (NONSTANDARD_LIMIT if wanted.allow_nonstandard else 1)
    size = unpack(archive, shown(label), kind, wanted.official.name, part, limit)
    part.flush()
    wanted.check_size(label, Path(part.name), min(size, limit), more=size > limit)
    facts = examine_part(part)
    wanted.check(label, Path(part.name), facts)
    return facts


def made_from(archive: Path, record: Record) -> bool:
    """Whether the record's text was unpacked from a file of that path."""
    return record.source is not None and record.source.stamp.path == str(archive)


def unchanged(source: Source | None) -> bool:
    """Whether the source is still the file that was read: by its stamp, else by its digest."""
    if source is None:
        return False
    path = Path(source.stamp.path)
    return stamp(path) == source.stamp or digest_of(path) == source.sha256


def _target(folder: Path, archive: Path, name: str, store: Store) -> Path:
    """Beside its archive a text has the corpus's own name, unless a file of the user's has it."""
    plain = folder / name
    record = store.load(plain)
    ours = record is not None and made_from(archive, record)
    if archive.parent == folder and (ours or not os.path.lexists(plain)):
        return plain
    return folder / keyed(name, archive)
