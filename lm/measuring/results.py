"""Results of evaluations: one JSON file each, and a table of all that are found.

`python -m lm.measuring.results runs/` prints the table as Markdown and writes it beside the runs,
as results.md and results.csv.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.config.schema import UserError
from lm.machine.files import write_text

# What makes two results the same one: a later evaluation replaces it.
IDENTITY = (
    "split_sha256",
    "model_sha256",
    "protocol",
    "window",
    "step",
    "context",
    "newlines",
    "max_chars",
    "precision",
    "backend",
)
COLUMNS = (
    ("run", "run"),
    ("stage", "stage"),
    ("training step", "training_step"),
    ("parameters", "parameters"),
    ("data", "data"),
    ("split", "split"),
    ("protocol", "protocol"),
    ("window", "window"),
    ("step", "step"),
    ("context", "context"),
    ("newlines", "newlines"),
    ("characters", "characters"),
    ("BPC", "bpc"),
    ("precision", "precision"),
    ("backend", "backend"),
    ("seconds", "seconds"),
)


class ResultError(UserError):
    """A file of results that cannot be used; the message names it."""


def result_name(record: Mapping[str, Any]) -> str:
    """Name of a result's file, without its ending: readable, and one per protocol and options."""
    identity = json.dumps([record[key] for key in IDENTITY])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return f"stage{record['stage']}-{record['split']}-{record['protocol']}-{digest}"


def write_result(folder: Path, record: Mapping[str, Any]) -> Path:
    """Add a result to a folder; the same evaluation of the same weights replaces itself."""
    path = folder / f"{result_name(record)}.json"
    write_text(path, one_line(record) + "\n")
    return path


def one_line(record: Mapping[str, Any]) -> str:
    """The record as one line of JSON. Raises ValueError for a number that is not finite."""
    return json.dumps(record, allow_nan=False)


def find_results(root: Path) -> list[dict[str, Any]]:
    """All results below `root`, best first within each split of each corpus.

    Raises:
        ResultError: if there are none, or a file among them is none.
    """
    records = [_read(path) for path in sorted(root.glob("**/results/*.json"))]
    if not records:
        raise ResultError(f"{root}: no results below it; python eval.py run=NAME makes one")
    return sorted(records, key=lambda r: (str(r["data"]), str(r["split"]), float(r["bpc"])))


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: not a result ({error}); delete or mend it") from error
    keys = {key for _, key in COLUMNS}
    if not isinstance(record, dict) or (missing := sorted(keys - record.keys())):
        lacks = "it is not an object" if not isinstance(record, dict) else f"lacks {missing[0]}"
        raise ResultError(f"{path}: not a result ({lacks}); delete or mend it")
    return record


def markdown_table(records: Sequence[Mapping[str, Any]]) -> str:
    """The table for people."""
    rows = [[name for name, _ in COLUMNS], ["---"] * len(COLUMNS)]
    rows += [[_shown(key, record[key]) for _, key in COLUMNS] for record in records]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def csv_table(records: Sequence[Mapping[str, Any]]) -> str:
    """The table for programs: full precision, and every key that any result has."""
    names = [key for _, key in COLUMNS]
    names += sorted({key for record in records for key in record} - set(names))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({k: json.dumps(v) if isinstance(v, list) else v for k, v in record.items()})
    return text.getvalue()


def _shown(key: str, value: object) -> str:
    if value is None:
        return ""
    if key == "bpc":
        return f"{value:.4f}"
    if key == "seconds":
        return f"{value:.0f}"
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: `python -m lm.measuring.results FOLDER`."""
    parser = argparse.ArgumentParser(prog="python -m lm.measuring.results", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the runs are")
    folder = parser.parse_args(arguments).folder
    try:
        records = find_results(folder)
    except UserError as error:
        sys.exit(f"error: {error}")
    table = markdown_table(records)
    write_text(folder / "results.md", table)
    write_text(folder / "results.csv", csv_table(records))
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
