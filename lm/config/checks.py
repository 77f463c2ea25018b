"""What a configuration's values have to satisfy beyond their types; errors name the key."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lm.config.schema import LARGEST_SEED, MOST_THREADS, Config, ScheduleConfig
from lm.errors import ConfigError
from lm.model.language_model import ModelConfig
from lm.schedule import Schedule, ScheduleError, build_schedule

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed")
LONGEST_NAME = 200  # bytes; file systems take 255
# Far beyond any use, and small enough that products of them are exact everywhere.
MOST, WIDEST = 2**31 - 1, 2**20


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
    }.items():
        if optional is not None:
            _at_least(key, optional, 1)
    if trainer.threads is not None:
        _within("trainer.threads", trainer.threads, 1, MOST_THREADS)
    _at_least("validation.characters", config.validation.characters, 0)
    for name in ("steps", "warm_up", "recorded"):
        _at_least(f"profile.{name}", getattr(config.profile, name), 0)
    if config.profile.steps and not config.throwaway:
        raise ConfigError(
            f"profile.steps={config.profile.steps}: measures instead of training, in a folder of "
            "its own; give debug=profile"
        )
    _within("seed", config.seed, 0, LARGEST_SEED)
    _at_least("optim.weight_decay", optim.weight_decay, 0)
    _at_least("optim.clip", optim.clip, 0)
    if not (math.isfinite(optim.eps) and optim.eps > 0):
        raise ConfigError(f"optim.eps={optim.eps}: expected more than 0")
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


def _check_name(name: str) -> None:
    if not name or name.strip(". ") != name or any(c in name for c in "/\\\0\n"):
        raise ConfigError(
            f"name={name!r}: expected the name of a folder inside runs_dir, without a slash"
        )
    if (size := len(name.encode("utf-8", "surrogateescape"))) > LONGEST_NAME:
        raise ConfigError(
            f"name={name[:20]}...: has {size} bytes, a folder's name has at most {LONGEST_NAME}"
        )


def _check_stages(table: ScheduleConfig) -> None:
    for number, stage in table.stages.items():
        key = f"schedule.stages.{number}"
        for name in ("sequence", "batch", "steps"):
            _within(f"{key}.{name}", getattr(stage, name), 1, MOST)
        for window in stage.windows:
            _within(f"{key}.windows", window, 0, WIDEST)
        if not (math.isfinite(stage.lr) and stage.lr > 0):
            raise ConfigError(f"{key}.lr={stage.lr}: expected more than 0")
    for stride in table.strides:
        _within("schedule.strides", stride, 1, WIDEST)
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


def _within(key: str, value: int, least: int, most: int) -> None:
    _at_least(key, value, least)
    if value > most:
        raise ConfigError(f"{key}={value}: expected at most {most}")
