"""Weights & Biases, offline: one run per stage, over a stop and on two processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.system.micro import metrics, micro, stage_folders
from tests.system.trial import Nursery, Trial

HEADER, BLOCK, PIECE = 7, 32_768, 7  # bytes: of the file, of its blocks, before each piece
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def test_a_stage_is_one_run_over_a_stop_and_on_two_processes(
    tmp_path: Path, nursery: Nursery
) -> None:
    micro(tmp_path)
    changed = {
        "logger.name": "wandb",
        "stage": "1",
        "schedule.stages.1.steps": 4,
        "trainer.devices": 2,
        "trainer.log_every": 1,
        "trainer.micro_batch": 1,
    }
    trial = Trial(str(tmp_path), changed, env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    fault = ("lm.training.module", "TrainingModule.training_step", 6, "terminate")
    stopped = replace(trial, faults=[fault])
    assert nursery.run(stopped) == [143], trial.log.read_text()
    assert nursery.run(trial) == [0], trial.log.read_text()
    folder = stage_folders(micro(tmp_path))[0]
    name = (folder / "wandb_id.txt").read_text().strip()
    files = sorted(tmp_path.rglob("*.wandb"))
    assert [path.name for path in files] == [f"run-{name}.wandb"] * 2  # one for each start
    assert {path.parent.parent for path in files} == {folder / "wandb"}
    rows = [row for path in files for row in history(path)]
    assert [row["trainer/global_step"] for row in rows] == [1, 2, 3, 4]
    assert [str(row["train_bpc"]) for row in rows] == [row[2] for row in metrics(folder)]


def history(path: Path) -> list[dict[str, Any]]:
    """The rows of numbers in an offline run's file."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return rows


def records(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind a header."""
    at, record = HEADER, b""
    while at + PIECE <= len(content):
        if (left := BLOCK - at % BLOCK) < PIECE:
            at += left
            continue
        size = int.from_bytes(content[at + 4 : at + 6], "little")
        kind = content[at + 6]
        record += content[at + PIECE : at + PIECE + size]
        at += PIECE + size
        if kind in (FULL, LAST):
            yield record
            record = b""
        else:
            assert kind in (FIRST, MIDDLE)
