"""What is said of an evaluation: before it, at its end, and in the file that keeps it."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.corpus import Corpus
from lm.config.command_schemas import EvalConfig
from lm.config.schema import UserError
from lm.inference.trained_model import Source, backend_taken, model_sha256
from lm.machine.device import Device
from lm.measuring.bpc import NATS_PER_BIT, Tally
from lm.measuring.curves import Point, write_csv, write_png
from lm.measuring.protocols import first_scored
from lm.measuring.results import one_line, result_name, write_result
from lm.measuring.scored_text import Selection
from lm.model.checkpoint import stage_of
from lm.model.language_model import LanguageModel, parameters
from lm.schedule import Stage


def protocol_notes(config: EvalConfig, stage: Stage) -> list[str]:
    """What a reader of the number should know of the protocol and this model."""
    notes, field, given = [], stage.receptive_field, config.window - config.step
    if config.newlines == "skip":
        notes.append("newlines are read but left out of the number")
    if config.protocol != "stream" and field <= given:
        notes.append(
            f"the model's receptive field, {field:,}, fits into window - step = {given:,}: "
            "protocol=stream gives the same losses for less work"
        )
    if config.protocol == "stream" and field > given:
        notes.append(
            f"the model's receptive field, {field:,}, is larger than window - step = {given:,}: "
            "stream sees more than protocol=overlap would"
        )
    longest = stage.reach if config.protocol == "stream" else min(stage.reach, config.window - 1)
    if longest > stage.sequence:
        notes.append(
            f"one layer looks back up to {longest:,} characters; "
            f"sequences in training had {stage.sequence:,}"
        )
    return notes


def opening(
    config: EvalConfig, source: Source, selection: Selection, notes: list[str]
) -> list[str]:
    """What is said before the work begins."""
    split = selection.split
    return [
        f"{source.path}: {source.label}",
        f"{split.name}: bytes [{split.start}, {split.stop}) of {split.path}, sha256 {split.sha256}",
        f"protocol {config.protocol}, context {config.context}, newlines {config.newlines}: "
        f"{selection.targets:,} characters",
        *(f"note: {note}" for note in notes),
    ]


def make_record(
    config: EvalConfig,
    source: Source,
    model: LanguageModel,
    device: Device,
    corpus: Corpus,
    selection: Selection,
    tally: Tally,
    seconds: float,
    notes: list[str],
) -> dict[str, Any]:
    """Everything that is needed to quote the number.

    Raises:
        UserError: if nothing was scored, or a loss was not finite.
    """
    score, split, stage = tally.score, selection.split, stage_of(source.checkpoint)
    windowed = config.protocol != "stream"
    if not score.count:
        what = f"window={config.window}" if windowed else f"newlines={config.newlines}"
        raise UserError(
            f"no character was scored: with {what}, {len(selection.text)} bytes hold none"
        )
    if not np.isfinite(score.nats):
        raise UserError(f"{source.path}: a loss is not finite; these weights give no number")
    begin = first_scored(selection.context) + 1 - selection.context
    return {
        "bpc": score.bpc,
        "unit": "bits per byte",
        "characters": score.count,
        "bits": score.nats / NATS_PER_BIT,
        "newlines_left_out": tally.ignored,
        "characters_left_out": selection.targets - score.count - tally.ignored,
        "protocol": config.protocol,
        "window": config.window if windowed else None,
        "step": config.step if windowed else None,
        "min_context": config.window - config.step + 1 if windowed else None,
        "context": config.context,
        "newlines": config.newlines,
        "max_chars": config.max_chars,
        "data": corpus.name,
        "split": split.name,
        "split_bytes": [split.start, split.stop],
        "split_sha256": split.sha256,
        "scored_bytes": [
            split.start + begin,
            split.start + len(selection.text) - selection.context,
        ],
        "trained_on": source.checkpoint["data"]["name"],
        "run": source.checkpoint["config"].get("name"),
        "checkpoint": str(source.path),
        "model_sha256": model_sha256(model),
        "stage": stage.number,
        "training_step": source.checkpoint["step"],
        "parameters": parameters(model.config),
        "receptive_field": stage.receptive_field,
        "precision": device.precision,
        "backend": backend_taken(model),
        "device": device.name,
        "processes": config.trainer.devices * config.trainer.nodes,
        "torch": torch.__version__,
        "seconds": round(seconds, 3),
        "characters_per_second": round(score.count / seconds, 1),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "notes": notes,
    }


def results_folder(config: EvalConfig, source: Source) -> Path | None:
    """Where the result is kept, if anywhere."""
    if config.results:
        return Path(config.results)
    return source.run_folder / "results" if source.run_folder else None


def keep(
    config: EvalConfig, source: Source, record: dict[str, Any], curves: dict[str, list[Point]]
) -> None:
    """Print the result, and write it with its curves if there is a folder for it."""
    say(
        f"{record['bpc']:.6f} bits per character (byte) over {record['characters']:,} characters, "
        f"{record['seconds']:.1f} s, {record['characters_per_second']:,.0f} characters/s"
    )
    if record["characters_left_out"]:
        say(f"{record['characters_left_out']:,} characters are not scored by this protocol")
    folder = results_folder(config, source)
    if folder is None:
        say("not kept: give results=FOLDER to keep it with its curves")
    else:
        path = write_result(folder, record)
        for name, points in curves.items():
            write_csv(folder / f"{result_name(record)}-{name}.csv", points)
            title = f"{source.label}: {record['data']} {record['split']}, {record['protocol']}"
            write_png(folder / f"{result_name(record)}-{name}.png", points, title)
        say(f"kept: {path}, with curves as CSV and PNG beside it")
    say(one_line(record))


def say(text: str) -> None:
    """Write a line to the terminal at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
