"""Where a run's numbers go: metrics.csv always; Weights & Biases or TensorBoard beside it."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import secrets
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from lm.config.schema import ConfigError, LoggerConfig
from lm.machine.files import append_text, write_text

COLUMNS = (
    "step",
    "characters",
    "train_bpc",
    "val_bpc",
    "val_characters",
    "lr",
    "grad_norm",
    "bad_steps",
    "characters_per_second",
    "share_of_peak",
    "memory_gb",
    "seconds",
)
MEASURED = COLUMNS[-4:]


class MetricsFile(Logger):
    """A CSV file that is appended to; a resumed run first drops the rows past its checkpoint.

    (Lightning's own CSV logger empties the folder of a run that is started again.)
    """

    def __init__(self, path: Path, first_step: int) -> None:
        super().__init__()
        self.path = path
        self.first_step = first_step
        self._ready = False

    @property
    def name(self) -> str:
        """Of the file."""
        return self.path.name

    @property
    def version(self) -> int:
        """There is one version: a run continues its own file."""
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> None:
        """Nothing to share with other code."""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """The run's configuration has a file of its own."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row, flushed to the disk."""
        if not self._ready:
            self._begin()
        row = {"step": step, **metrics}
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writerow({key: _cell(key, row[key]) for key in COLUMNS if key in row})
        append_text(self.path, text.getvalue())

    def _begin(self) -> None:
        """Write the header, or keep what lies before the step at which the run goes on."""
        header = ",".join(COLUMNS)
        kept = [header]
        if self.first_step and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines()[1:]:
                step = line.split(",", 1)[0]
                whole = line.count(",") == len(COLUMNS) - 1
                if whole and step.isdecimal() and int(step) <= self.first_step:
                    kept.append(line)
        write_text(self.path, "\n".join(kept) + "\n")
        self._ready = True


def _cell(key: str, value: object) -> str:
    """Timings are rounded; what a resumed run has to repeat is written to the last bit."""
    return f"{value:.7g}" if isinstance(value, float) and key in MEASURED else str(value)


def build_loggers(
    config: LoggerConfig,
    folder: Path,
    *,
    run: str,
    stage: int,
    first_step: int,
    settings: Mapping[str, Any],
) -> list[Logger]:
    """metrics.csv, and what `logger.name` adds."""
    loggers: list[Logger] = [MetricsFile(folder / "metrics.csv", first_step)]
    if config.name == "wandb":
        loggers.append(_wandb_logger(config, folder, run, stage, settings))
    if config.name == "tensorboard":
        loggers.append(_tensorboard_logger(folder))
    return loggers


def close_loggers(*, done: bool) -> None:
    """End a stage's W&B run, so that no number is lost and the next stage gets its own."""
    if (wandb := sys.modules.get("wandb")) and wandb.run is not None:
        wandb.finish(exit_code=0 if done else 1)


def _wandb_logger(
    config: LoggerConfig, folder: Path, run: str, stage: int, settings: Mapping[str, Any]
) -> Logger:
    """Weights & Biases never asks for a login: without one it writes offline into the folder.

    (`wandb sync` uploads it later.) A stage that goes on continues its own W&B run, whose id is
    kept in the stage's folder.
    """
    from pytorch_lightning.loggers import WandbLogger

    logged_in = bool(os.environ.get("WANDB_API_KEY")) or _has_netrc_login()
    return WandbLogger(
        project=config.project,
        name=f"{run}/stage{stage}",
        id=_wandb_id(folder / "wandb_id.txt"),
        group=run,
        save_dir=folder,
        offline=not logged_in and "WANDB_MODE" not in os.environ,
        resume="allow",
        config=dict(settings),
    )


@rank_zero_only
def _wandb_id(path: Path) -> str:
    """A random name, the same for as long as the stage's folder exists."""
    if not path.exists():
        write_text(path, secrets.token_hex(6) + "\n")
    return path.read_text(encoding="utf-8").strip()


def _has_netrc_login() -> bool:
    netrc = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # noqa: PTH111
    return netrc.is_file() and "api.wandb.ai" in netrc.read_text(errors="replace")


def _tensorboard_logger(folder: Path) -> Logger:
    from pytorch_lightning.loggers import TensorBoardLogger

    return TensorBoardLogger(folder, name="tensorboard", version="")


def check_logger(config: LoggerConfig) -> None:
    """Raise ConfigError if a package that the logger needs is missing."""
    if config.name in ("wandb", "tensorboard") and importlib.util.find_spec(config.name) is None:
        raise ConfigError(
            f"logger={config.name}: the package {config.name} is not installed; pip install it, "
            "or use logger=csv"
        )
