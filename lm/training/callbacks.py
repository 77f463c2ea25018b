"""What happens between two optimiser steps: validation and numbers, then saving (`saving`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytorch_lightning as pl
import torch

from lm.machine.memory import peak_memory
from lm.measuring.bpc import summed
from lm.measuring.protocols import stream
from lm.training.module import TrainingModule
from lm.training.nonfinite import NonFiniteError


@runtime_checkable
class StepPart(Protocol):
    """A part of the work between two steps; it runs on every process."""

    def on_step(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """React to step number `module.step`."""


class Border(pl.Callback):
    """Does what follows each complete optimiser step: all parts in order, the last one saves.

    If a run was stopped between a step and the end of this work, it is done when the run goes on.
    """

    def __init__(self, parts: Sequence[StepPart]) -> None:
        self.parts = parts

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Work at the ends of steps, not at those of micro-batches inside a step."""
        assert isinstance(pl_module, TrainingModule)
        if pl_module.between_steps:
            self._work(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make up for what the stopped run did not get to."""
        assert isinstance(pl_module, TrainingModule)
        if pl_module.border_pending:
            pl_module.stop.hold()
            self._work(trainer, pl_module)

    def _work(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        for part in self.parts:
            part.on_step(trainer, module)
        module.stop.release()


class Validation:
    """Every so many steps, and at the last: protocol `stream` on the head of the valid split."""

    def __init__(self, text: np.ndarray, every: int) -> None:
        self.text = text
        self.every = every

    def on_step(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Validate, if it is time to.

        Raises:
            NonFiniteError: if the result is not finite: then the weights are of no use.
        """
        module.validation = None
        if module.step % self.every and module.step != module.stage.steps:
            return
        module.eval()
        with module.stop.let_through(), torch.inference_mode():
            part = stream(
                module.model,
                self.text,
                device=module.device,
                rank=trainer.global_rank,
                world=trainer.world_size,
            )
        module.train()
        result = summed(part)
        if not math.isfinite(result.nats):
            raise NonFiniteError(
                f"step {module.step} of stage {module.stage.number}: the validation's result is "
                "not finite"
            )
        module.validation = result


class Metrics(pl.Callback):
    """Hands the numbers of every `every`-th step to the loggers, and to `show`.

    Args:
        every: optimiser steps between two reports.
        peak: floating-point operations per second that this device is capable of.
        flops: of one training step, all processes together.
        show: called with each report on the first process.
    """

    def __init__(
        self, every: int, *, peak: float, flops: float, show: Callable[[int, dict], None]
    ) -> None:
        self.every = every
        self.peak = peak
        self.flops = flops
        self.show = show
        self.seconds = 0.0
        self.steps = 0
        self.mark: float | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Start the clock; validation and saving lie outside it."""
        if self.mark is None:
            self.mark = time.perf_counter()

    def on_step(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Stop the clock and report, if it is time to."""
        if self.mark is not None:
            self.seconds += time.perf_counter() - self.mark
            self.steps += 1
            self.mark = None
        last = module.step == module.stage.steps
        if module.step % self.every and not last and module.validation is None:
            return
        report = self._report(trainer, module)
        for logger in trainer.loggers:
            logger.log_metrics(report, step=module.step)
        if trainer.is_global_zero:
            self.show(module.step, report)
        self.seconds, self.steps = 0.0, 0
        module.reported = True

    def _report(self, trainer: pl.Trainer, module: TrainingModule) -> dict[str, Any]:
        per_step = module.stage.batch * module.stage.sequence
        speed = self.steps / self.seconds if self.steps else float("nan")
        report: dict[str, Any] = {
            "characters": module.step * per_step,
            "lr": module.stage.learning_rate(module.step - 1),
            "grad_norm": module.grad_norm,
            "bad_steps": module.bad_steps,
            "characters_per_second": speed * per_step,
            "share_of_peak": speed * self.flops / (self.peak * trainer.world_size),
            "memory_gb": peak_memory(module.device) / 1e9,
            "seconds": self.seconds,
        }
        if module.train_score.count:
            report["train_bpc"] = module.train_score.bpc
        if module.validation is not None:
            report["val_bpc"] = module.validation.bpc
            report["val_characters"] = module.validation.count
        return report
