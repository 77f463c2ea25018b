"""A run that takes a second: two stages of a two-layer model, on a file of its own."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.config.checks import schedule_of
from lm.config.compose import train_config
from lm.config.schema import (
    Config,
    DataConfig,
    ScheduleConfig,
    TrainerConfig,
    ValidationConfig,
)
from lm.model.checkpoint import load_checkpoint
from lm.model.language_model import ModelConfig
from lm.schedule import StageTable
from lm.training.loggers import COLUMNS, MEASURED
from lm.training.run import micro_batch

EXACT = [name for name in COLUMNS if name not in MEASURED]
STEPS = {1: 7, 2: 5}


def micro(folder: Path, changed: Mapping[str, Any] | None = None) -> Config:
    """What the shipped presets have, in small: dropout, gradient checkpointing, accumulation.

    Args:
        folder: gets the text and the runs.
        changed: other values, by dotted key.
    """
    text = folder / "text"
    if not text.exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(1)
        text.write_bytes(generator.choice(list(b"abcdefg \n"), 20_000).astype(np.uint8).tobytes())
    config = Config(
        name="micro",
        stage="all",
        runs_dir=str(folder / "runs"),
        model=ModelConfig(
            layers=2,
            heads=2,
            width=32,
            feedforward=64,
            dropout=0.2,
            attention_dropout=0.1,
            backend="dense",
        ),
        data=DataConfig(name="file", path=str(text)),
        schedule=ScheduleConfig(
            stages={
                "1": StageTable(sequence=32, windows=[3, 8], lr=1e-2, batch=4, steps=STEPS[1]),
                "2": StageTable(sequence=64, windows=[6, 16], lr=5e-3, batch=4, steps=STEPS[2]),
            },
            strides=[1, 2],
            dilated_heads=1,
            warmup_fraction=0.5,
        ),
        trainer=TrainerConfig(
            accelerator="cpu",
            precision="32-true",
            micro_batch=2,
            threads=1,
            log_every=2,
            save_every=2,
        ),
        validation=ValidationConfig(every=3, characters=200),
    )
    for key, value in (changed or {}).items():
        *path, name = key.split(".")
        part: Any = config
        for step in path:
            part = part[step] if isinstance(part, dict) else getattr(part, step)
        assert hasattr(part, name), key
        setattr(part, name, value)
    return config


SMALLER = [
    "experiment=enwik8_small",
    "stage=all",
    "model.layers=6",
    "model.width=16",
    "model.feedforward=32",
    "trainer.accelerator=cpu",
    "trainer.micro_characters=64",
    "trainer.threads=1",
    "validation.characters=100",
    "data=file",
    "~schedule.stages.3",
    "~schedule.stages.4",
    "~schedule.stages.5",
]
STAGES = {
    "1": "{sequence: 32, windows: [1, 2, 3, 4, 5, 6], lr: 2.5e-3, batch: 4, steps: 3}",
    "2": "{sequence: 64, windows: [2, 4, 6, 8, 10, 12], lr: 1.25e-3, batch: 2, steps: 2}",
}


def preset(folder: Path) -> Config:
    """The paper's small model as it is shipped, smaller in size only, with all in `folder`."""
    text = micro(folder).data.path
    stages = [f"schedule.stages.{number}={stage}" for number, stage in STAGES.items()]
    config = train_config([*SMALLER, *stages, f"data.path={text}", f"runs_dir={folder}/runs"])
    assert config.model.dropout == 0.2 and config.trainer.gradient_checkpointing
    for stage in schedule_of(config).stages:
        assert stage.batch > micro_batch(config, stage)
    assert config.trainer.save_every == config.validation.every == 1000
    return config


def stage_folders(config: Config) -> list[Path]:
    """Of the stages that have been begun."""
    return sorted((Path(config.runs_dir) / config.name).glob("stage*"))


def outcome(config: Config) -> dict[str, Any]:
    """Everything that a run leaves and that another one has to repeat to the bit."""
    result: dict[str, Any] = {}
    for folder in stage_folders(config):
        for name in ("last", "best"):
            path = folder / "checkpoints" / f"{name}.ckpt"
            if path.exists():
                result[f"{folder.name}/{name}"] = state(load_checkpoint(path))
        if (folder / "metrics.csv").exists():
            result[f"{folder.name}/metrics"] = metrics(folder)
        if (folder / "state.json").exists():
            result[f"{folder.name}/state"] = (folder / "state.json").read_text()
    return result


def state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """All of a checkpoint but the configuration, where folders are named."""
    return {key: plain(value) for key, value in checkpoint.items() if key != "config"}


def metrics(folder: Path) -> list[tuple[str, ...]]:
    """The columns of metrics.csv that a clock has no part in."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [tuple(row[name] for name in EXACT) for row in csv.DictReader(file)]


def plain(value: Any) -> Any:
    """Tensors by their bits, NaN equal to itself."""
    if isinstance(value, Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()}"
    if isinstance(value, Mapping):
        return {key: plain(value[key]) for key in value}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return repr(value)
