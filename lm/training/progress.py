"""How far a run is: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lm.training.module import TrainingModule

_SHOWN = ("train_bpc", "val_bpc")


class ProgressLine(pl.Callback):
    """A progress bar on a terminal; on anything else, one plain line per report."""

    def __init__(self, label: str, first_step: int, steps: int) -> None:
        self.label = label
        self.steps = steps
        self.text = ""
        self.started = time.perf_counter()
        self.first_step = first_step
        self.bar: Progress | None = None

    def show(self, step: int, report: dict[str, Any]) -> None:
        """Take over the numbers of a report."""
        parts = [f"{name[:-4]} {report[name]:.4f}" for name in _SHOWN if name in report]
        parts.append(f"{report['characters_per_second']:,.0f} characters/s")
        parts.append(f"{report['share_of_peak']:.0%} of peak")
        parts.append(f"{report['memory_gb']:.1f} GB")
        if report["bad_steps"]:
            parts.append(f"{report['bad_steps']} steps dropped")
        self.text = " | ".join(parts)
        if self.bar is None:
            left = (time.perf_counter() - self.started) / max(step - self.first_step, 1)
            left *= self.steps - step
            say(f"{self.label} step {step}/{self.steps} | {self.text} | {_clock(left)} left")

    @rank_zero_only
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the bar, where there is a terminal to draw it on."""
        if sys.stdout.isatty():
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("BPC {task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(),
            )
            self.bar.start()
            self.bar.add_task(
                self.label, total=self.steps, completed=self.first_step, text="of the first steps"
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Move the bar."""
        assert isinstance(pl_module, TrainingModule)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=pl_module.step, text=self.text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar at the end."""
        self.close()

    def on_exception(self, *_: Any) -> None:
        """Close the bar before an error is printed."""
        self.close()


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


@rank_zero_only
def say(text: str, *, aside: bool = False) -> None:
    """Print on the first process only; `aside`: where errors go."""
    print(text, file=sys.stderr if aside else sys.stdout, flush=True)
