"""When a run's state is saved, and how a signal ends it without losing a step."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytorch_lightning as pl

from lm.callbacks import StepCallback
from lm.checkpoint import save_checkpoint
from lm.files import write_text
from lm.module import TrainingModule


class Checkpoints(StepCallback):
    """Keeps last.ckpt (and the one before it) for a resume, and best.ckpt for what builds on it.

    They are written every `every` steps, after each validation, and at the last step; on the
    first process only, and always whole (see `lm.files`). It has to be the last of the callbacks.

    Args:
        folder: of the stage.
        every: optimiser steps.
        origin: what a checkpoint says of the run: config and data.
        best: lowest validation result so far, or None.
    """

    def __init__(
        self, folder: Path, every: int, origin: Mapping[str, Any], best: float | None
    ) -> None:
        self.folder = folder
        self.every = every
        self.origin = origin
        self.best = best

    def on_step(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Save, if it is time to; this is the end of the step's work."""
        module.border_pending = False
        result = module.validation
        if result is not None and (self.best is None or result.bpc < self.best):
            self.best = result.bpc
            if trainer.is_global_zero:
                content = self._content(module, trainer)
                if module.optim.fresh:
                    content |= {"optimizer": None, "scaler": None}
                save_checkpoint(self.path("best"), content)
        last = module.step == module.stage.steps
        if last or result is not None or module.step % self.every == 0:
            self.save(trainer, module)

    def save(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Write last.ckpt; what had that name becomes previous.ckpt."""
        if not trainer.is_global_zero:
            return
        content = self._content(module, trainer)
        save_checkpoint(self.path("last"), content, keep=self.path("previous"))
        state = {
            "step": module.step,
            "steps": module.stage.steps,
            "finished": module.step == module.stage.steps,
            "best_bpc": self.best,
        }
        write_text(self.folder / "state.json", json.dumps(state) + "\n")

    def path(self, name: str) -> Path:
        """Of the checkpoint with this name."""
        return self.folder / "checkpoints" / f"{name}.ckpt"

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """A stopped run saves its last step border; the unfinished step is dropped."""
        assert isinstance(pl_module, TrainingModule)
        if isinstance(exception, Stopped) and pl_module.step > 0:
            self.save(trainer, pl_module)

    def _content(self, module: TrainingModule, trainer: pl.Trainer) -> dict[str, Any]:
        optimizer = trainer.optimizers[0]
        return {
            **self.origin,
            "model": asdict(module.model.config),
            "stage": asdict(module.stage),
            "step": module.step,
            "bpc": self.best,
            "weights": module.model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "counters": module.counters(),
            "scaler": trainer.precision_plugin.state_dict() or None,
        }


class Stopped(BaseException):
    """A signal asked the run to end; its state at the last step border is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals(pl.Callback):
    """Ctrl-C and SIGTERM end the run at once, but never while an update is half done.

    The unfinished step is dropped by raising `Stopped`; `Checkpoints` then saves. A second Ctrl-C
    ends the process without saving (what is on the disk stays whole).
    """

    def __init__(self) -> None:
        self.wanted: int | None = None
        self.before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over from Lightning."""
        assert isinstance(pl_module, TrainingModule)

        def handle(number: int, _: FrameType | None) -> None:
            if self.wanted is not None:
                if number == signal.SIGINT:
                    signal.signal(number, signal.SIG_DFL)
                    signal.raise_signal(number)
                return
            self.wanted = number
            launcher = trainer.strategy.launcher
            if trainer.is_global_zero and hasattr(launcher, "kill"):
                launcher.kill(number)
            if not pl_module.updating:
                raise Stopped(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, handle)

    def on_train_batch_end(self, *_: Any) -> None:
        """A signal that came during an update takes effect after it."""
        if self.wanted is not None:
            raise Stopped(self.wanted)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Give the signals back."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
