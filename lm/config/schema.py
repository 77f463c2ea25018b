"""The typed schema of a training run's configuration.

Hydra merges conf/*.yaml and the command line into these dataclasses, so a wrong name or type fails
before anything runs. What a value must satisfy beyond its type is checked in `lm.config.checks`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass

from omegaconf import MISSING, DictConfig, OmegaConf

from lm.errors import ConfigError, UserError
from lm.model.language_model import ModelConfig
from lm.schedule import StageTable

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "LoggerConfig",
    "OptimConfig",
    "ProfileConfig",
    "ScheduleConfig",
    "TrainerConfig",
    "UserError",
    "ValidationConfig",
    "added_keys",
    "to_config",
]

MOST_THREADS = 1024
LARGEST_SEED = 2**64 - 1


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
        compile: torch.compile for the dense part of the blocks; the first step waits for it.
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
    compile: bool = False
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
class ProfileConfig:
    """Measuring steps instead of training (debug=profile); see `lm.training.profiling`.

    Attributes:
        steps: to time, each of one micro-batch per device; 0: train.
        warm_up: steps before them.
        recorded: steps after them, under torch's profiler.
    """

    steps: int = 0
    warm_up: int = 1
    recorded: int = 1


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
    profile: ProfileConfig = field(default_factory=ProfileConfig)


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
    for name in map(str, node):
        key = f"{prefix}{name}"
        if name not in known:
            yield key
        elif isinstance(node[name], DictConfig) and is_dataclass(
            part := OmegaConf.get_type(node, name)
        ):
            yield from added_keys(node[name], part, f"{key}.")
