"""Whether a text is what its name promises; what was found out is remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from data.digests import FRACTIONS, Scan, count_crlf, cut, first_outside, scan
from data.errors import DataError, shown
from data.official import Official
from data.provenance import Record, stamp
from data.store import Store


@dataclass(frozen=True)
class Wanted:
    """A public corpus, and whether a text that differs from it may take its place."""

    official: Official
    allow_nonstandard: bool = False

    def difference(self, facts: Scan) -> str:
        """How a text differs from the standard one; empty if it does not."""
        if facts.size != self.official.size:
            return f"size {facts.size}, expected {self.official.size}"
        if facts.sha256 != self.official.sha256:
            return f"sha256 {facts.sha256}, expected {self.official.sha256}"
        return ""

    def check(self, label: Path | str, text: Path, facts: Scan) -> None:
        """Raise DataError unless the text, called `label` in messages, may be used.

        Even a nonstandard one must keep to the corpus's alphabet.
        """
        self.check_size(label, text, facts.size)
        foreign = set().union(*facts.symbols) - set(self.official.alphabet)
        if foreign and (first := first_outside(text, self.official.alphabet)):
            offset, value = first
            raise DataError(
                f"{shown(label)}: byte 0x{value:02X} at offset {offset} is no symbol of "
                f"{self.official.name} (a-z and space); data=file data.path=FILE takes other texts"
            )
        difference = self.difference(facts)
        if difference and not self.allow_nonstandard:
            raise self._refusal(label, difference)

    def check_size(self, label: Path | str, text: Path, size: int, more: bool = False) -> None:
        """Raise DataError if the size alone says no. `more`: the true size is above `size`."""
        if more or (size != self.official.size and not self.allow_nonstandard):
            found = f"size more than {size}" if more else f"size {size}"
            pairs = count_crlf(text)
            raise self._refusal(
                label, f"{found}, expected {self.official.size}; {pairs} CR LF pairs found"
            )

    def _refusal(self, label: Path | str, difference: str) -> DataError:
        return DataError(
            f"{shown(label)} is not the standard {self.official.name}: {difference}; get "
            f"{self.official.url}, or set data.allow_nonstandard=true to use another text instead"
        )


def examine(path: Path, fractions: Sequence[float], store: Store) -> Record:
    """Digests and symbols of a text cut by `fractions`: remembered, or read now and remembered."""
    record = store.load(path)
    now = stamp(path)
    cuts = cut(now.size, fractions)
    if record and record.scan.cuts == cuts:
        return record
    facts = scan(path, cuts)
    if stamp(path) != now:
        raise DataError(f"{shown(path)} changed while it was read: start again")
    # Whoever wrote the text has remembered it meanwhile, and knows its source too.
    record = store.load(path) or record
    if record and record.scan.cuts == cuts:
        return record
    return store.save(Record(now, facts, record.source if record else None))


def examine_part(part: BufferedRandom) -> Scan:
    """Digests and symbols of a file that is still being written, cut in the standard way."""
    part.flush()
    path = Path(part.name)
    return scan(path, cut(path.stat().st_size, FRACTIONS))
