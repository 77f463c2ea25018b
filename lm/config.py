"""The typed schema of every command's configuration, and the checks that cross its fields.

Hydra merges conf/*.yaml and the command line into these dataclasses, so a wrong name or type fails
before anything runs. What a value must satisfy beyond its type is checked in `check_train`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

from omegaconf import MISSING, DictConfig, OmegaConf
from platformdirs import user_cache_path

from lm.model import ModelConfig
from lm.schedule import Schedule, ScheduleError, StageTable, build_schedule


class UserError(Exception):
    """Something the user can mend; entry points print it as one line and exit with 1."""


class ConfigError(UserError):
    """A configuration value that cannot be used; the message begins with its key."""


@dataclass
class DataConfig:
    """Which bytes: enwik8, text8, file (`path`, or one path per split) or stdlib.

    `root` is the folder of enwik8 and text8; empty: $LONGCHAR_DATA, else the user's cache folder.
    """

    name: str = "enwik8"
    root: str = ""
    path: str = ""
    train_path: str = ""
    valid_path: str = ""
    test_path: str = ""
    fractions: list[float] = field(default_factory=lambda: [0.9, 0.05, 0.05])
    allow_nonstandard: bool = False


@dataclass
class ScheduleConfig:
    """The table of stages; see `lm.schedule.build_schedule`."""

    stages: dict[str, StageTable] = MISSING
    strides: list[int] = MISSING
    dilated_heads: int = MISSING
    warmup_fraction: float = 0.1
    warmup_max: int = 10_000


@dataclass
class OptimConfig:
    """AdamW and gradient clipping.

    Attributes:
        decay: which parameters are decayed: matrices or all.
        clip: largest norm of the gradient of all parameters together; 0: no clipping.
        fresh: begin each stage with empty optimiser state (false: hand it over).
        max_bad_steps: stop after so many non-finite steps in a row.
    """

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay: str = "matrices"
    clip: float = 0.25
    fresh: bool = True
    max_bad_steps: int = 20


@dataclass
class TrainerConfig:
    """Devices, precision, and how a step is cut into pieces that fit.

    Attributes:
        devices: processes on each of `nodes` nodes; each has one device.
        precision: auto, 32-true, bf16-mixed or 16-mixed. auto: bf16 where the device computes in
            it, else fp16 on a GPU, else fp32. Attention is fp32 in all.
        micro_batch: sequences per device at a time; null: as many as keep within
            `micro_characters` and divide the device's share of the batch.
        threads: of torch and the kernels on the CPU; null: torch's own choice.
        deterministic: the same bits on CUDA too, slower.
        gradient_checkpointing: keep only the blocks' inputs, recompute the rest.
        log_every, save_every: in optimiser steps.
    """

    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    precision: str = "auto"
    micro_batch: int | None = None
    micro_characters: int = 16_384
    threads: int | None = None
    deterministic: bool = False
    gradient_checkpointing: bool = True
    log_every: int = 50
    save_every: int = 1000


@dataclass
class ValidationConfig:
    """Validation while training: protocol `stream` on the first `characters` of a split.

    Attributes:
        every: in optimiser steps; one always runs at the last step.
        characters: how many targets; 0: the whole split.
    """

    every: int = 1000
    characters: int = 500_000


@dataclass
class LoggerConfig:
    """metrics.csv is always written; `name` adds wandb or tensorboard."""

    name: str = "csv"
    project: str = "longchar"


@dataclass
class Config:
    """One training run: `python train.py`.

    Attributes:
        name: of the run's folder, runs_dir/name.
        stage: a stage's number, or all.
        init_from: where a stage's weights come from: empty (the stage before it), scratch, or a
            checkpoint's path.
        overwrite: delete what the stage's folder holds and start it again.
        throwaway: the run is a trial: its folder is emptied at start, and nothing builds on it.
    """

    name: str = MISSING
    stage: str = "1"
    seed: int = 1
    runs_dir: str = "runs"
    init_from: str = ""
    overwrite: bool = False
    throwaway: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def to_config(node: DictConfig, kind: type) -> object:
    """The typed object of a merged configuration; a missing value is an error naming its key."""
    missing = sorted(OmegaConf.missing_keys(node))
    if missing:
        raise ConfigError(f"{missing[0]}: no value given; set it on the command line or a preset")
    for key in added_keys(node, kind):
        raise ConfigError(f"{key}: unknown key; --cfg job shows the keys that there are")
    return OmegaConf.to_object(node)


def added_keys(node: DictConfig, kind: type, prefix: str = "") -> Iterator[str]:
    """Keys that the command line added (+key=value) and the schema does not know."""
    known = {field.name for field in fields(kind)}
    for name in node:
        key = f"{prefix}{name}"
        if name not in known:
            yield key
        elif isinstance(node[name], DictConfig) and (part := OmegaConf.get_type(node, name)):
            if is_dataclass(part):
                yield from added_keys(node[name], part, f"{key}.")


def check_train(config: Config) -> None:
    """Refuse what cannot run.

    Raises:
        ConfigError: naming the key, what was found, and what was expected.
    """
    check_model(config.model)
    trainer, optim = config.trainer, config.optim
    _choice("data.name", config.data.name, ("enwik8", "text8", "file", "stdlib"))
    _choice("optim.decay", optim.decay, ("matrices", "all"))
    _choice("logger.name", config.logger.name, ("csv", "wandb", "tensorboard"))
    _choice("trainer.accelerator", trainer.accelerator, ("auto", "cpu", "gpu"))
    _choice("trainer.precision", trainer.precision, PRECISIONS)
    for key, value in {
        "trainer.devices": trainer.devices,
        "trainer.nodes": trainer.nodes,
        "trainer.micro_characters": trainer.micro_characters,
        "trainer.log_every": trainer.log_every,
        "trainer.save_every": trainer.save_every,
        "validation.every": config.validation.every,
        "optim.max_bad_steps": optim.max_bad_steps,
    }.items():
        _at_least(key, value, 1)
    for key, optional in {
        "trainer.micro_batch": trainer.micro_batch,
        "trainer.threads": trainer.threads,
    }.items():
        if optional is not None:
            _at_least(key, optional, 1)
    _at_least("validation.characters", config.validation.characters, 0)
    _at_least("seed", config.seed, 0)
    _at_least("optim.weight_decay", optim.weight_decay, 0)
    _at_least("optim.clip", optim.clip, 0)
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas={optim.betas}: expected two numbers from 0 to below 1")
    if len(config.data.fractions) != 3:
        raise ConfigError(
            f"data.fractions={config.data.fractions}: expected three numbers, for train, valid "
            "and test"
        )
    _check_name(config.name)
    _check_stages(config.schedule)
    schedule = schedule_of(config)
    if config.stage != "all":
        if not config.stage.isdecimal():
            raise ConfigError(f"stage={config.stage}: expected 1 to {len(schedule)}, or all")
        try:
            schedule[int(config.stage)]
        except ScheduleError as error:
            raise ConfigError(str(error)) from None


PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed")


def check_model(model: ModelConfig) -> None:
    """The part of `check_train` that concerns the model alone."""
    for name in ("layers", "heads", "width", "feedforward"):
        _at_least(f"model.{name}", getattr(model, name), 1)
    if model.width % model.heads:
        raise ConfigError(
            f"model.heads={model.heads}: must divide model.width={model.width}; "
            "each head takes an equal part of the width"
        )
    if model.width % 2:
        raise ConfigError(
            f"model.width={model.width}: must be even; a position has a sine for each cosine"
        )
    for name in ("dropout", "attention_dropout"):
        value = getattr(model, name)
        if not 0 <= value < 1:
            raise ConfigError(f"model.{name}={value}: expected at least 0 and less than 1")
    if not (math.isfinite(model.init_std) and model.init_std > 0):
        raise ConfigError(f"model.init_std={model.init_std}: expected more than 0")
    _choice("model.position_unit", model.position_unit, ("characters", "steps"))
    _choice("model.backend", model.backend, ("auto", "tvm", "chunks", "loop", "dense"))


def schedule_of(config: Config) -> Schedule:
    """The schedule that the configuration describes, for its model."""
    table = config.schedule
    try:
        return build_schedule(
            table.stages,
            strides=table.strides,
            dilated_heads=table.dilated_heads,
            layers=config.model.layers,
            heads=config.model.heads,
            warmup_fraction=table.warmup_fraction,
            warmup_max=table.warmup_max,
        )
    except ScheduleError as error:
        raise ConfigError(str(error)) from None


def data_root(config: DataConfig) -> Path:
    """The folder of enwik8 and text8: the key, $LONGCHAR_DATA, or the user's cache folder."""
    chosen = config.root or os.environ.get("LONGCHAR_DATA", "")
    return Path(chosen) if chosen else user_cache_path("longchar") / "data"


def _check_name(name: str) -> None:
    if not name or name.strip(". ") != name or any(c in name for c in "/\\\0\n"):
        raise ConfigError(
            f"name={name!r}: expected the name of a folder inside runs_dir, without a slash"
        )


def _check_stages(table: ScheduleConfig) -> None:
    for number, stage in table.stages.items():
        key = f"schedule.stages.{number}"
        for name in ("sequence", "batch", "steps"):
            _at_least(f"{key}.{name}", getattr(stage, name), 1)
        for window in stage.windows:
            _at_least(f"{key}.windows", window, 0)
        if not (math.isfinite(stage.lr) and stage.lr > 0):
            raise ConfigError(f"{key}.lr={stage.lr}: expected more than 0")
    for stride in table.strides:
        _at_least("schedule.strides", stride, 1)
    if not 0 <= table.warmup_fraction <= 1:
        raise ConfigError(
            f"schedule.warmup_fraction={table.warmup_fraction}: expected between 0 and 1"
        )
    _at_least("schedule.warmup_max", table.warmup_max, 0)


def _choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value}: expected one of {', '.join(choices)}")


def _at_least(key: str, value: int | float, least: int) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{key}={value}: expected at least {least}")
