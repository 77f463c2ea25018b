"""Where a run's numbers go: metrics.csv always; Weights & Biases or TensorBoard beside it."""

from __future__ import annotations

import csv
import io
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from lm.config import ConfigError, LoggerConfig
from lm.files import write_text

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
        writer.writerow({key: _cell(row[key]) for key in COLUMNS if key in row})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())

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


def _cell(value: object) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def build_loggers(
    config: LoggerConfig,
    folder: Path,
    *,
    run: str,
    stage: int,
    first_step: int,
    settings: Mapping[str, Any],
) -> list[Logger]:
    """metrics.csv, and what `logger.name` adds.

    Weights & Biases never asks for a login: without one it writes offline into the run's folder
    (`wandb sync` uploads it later). A stage continues its own W&B run, whose id is its name.
    """
    loggers: list[Logger] = [MetricsFile(folder / "metrics.csv", first_step)]
    if config.name == "wandb":
        from pytorch_lightning.loggers import WandbLogger

        logged_in = bool(os.environ.get("WANDB_API_KEY")) or _has_netrc_login()
        loggers.append(
            WandbLogger(
                project=config.project,
                name=f"{run}/stage{stage}",
                id=f"{run}-stage{stage}",
                group=run,
                save_dir=folder,
                offline=not logged_in,
                resume="allow",
                config=dict(settings),
            )
        )
    if config.name == "tensorboard":
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise ConfigError(
                "logger=tensorboard: the package tensorboard is not installed; pip install it, "
                "or use logger=csv"
            ) from None
        from pytorch_lightning.loggers import TensorBoardLogger

        loggers.append(TensorBoardLogger(folder, name="tensorboard", version=""))
    return loggers


def _has_netrc_login() -> bool:
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return netrc.is_file() and "api.wandb.ai" in netrc.read_text(errors="replace")
