"""When a run's state is saved: in its course, and however it ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lm.errors import ConfigError, WriteError
from lm.machine.files import write_text
from lm.model.checkpoint import save_checkpoint
from lm.model.language_model import ModelConfig, parameters
from lm.schedule import Stage
from lm.training.module import TrainingModule
from lm.training.nonfinite import refuse_weights

# Bytes per parameter: weights and AdamW's two moments, in float32.
BEST, LAST = 4, 12


class Checkpoints(pl.Callback):
    """Keeps last.ckpt (and the one before it) for a resume, and best.ckpt for what builds on it.

    They are written every `every` steps, after each validation, at the last step, and at the last
    step border when something ends the run; on the first process only, and always whole (see
    `lm.machine.files`). It is the last part of a border's work.

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
        self.saved: tuple[int, bool] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on there is something to save."""
        assert isinstance(pl_module, TrainingModule)
        self.saved = (pl_module.step, pl_module.border_pending)
        pl_module.stop.save = lambda: self.save(trainer, pl_module)

    def on_step(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Save, if it is time to; this ends the work that follows a step."""
        result = module.validation
        if result is not None and (self.best is None or result.bpc < self.best):
            if trainer.is_global_zero:
                content = self._content(module, trainer) | {"bpc": result.bpc}
                if module.optim.fresh:
                    content |= {"optimizer": None, "scaler": None}
                save_checkpoint(self.path("best"), content)
            self.best = result.bpc
        module.finish_border()
        last = module.step == module.stage.steps
        if last or result is not None or module.step % self.every == 0:
            self.save(trainer, module)

    def save(self, trainer: pl.Trainer, module: TrainingModule) -> None:
        """Write last.ckpt, if it does not hold this border; the one before is previous.ckpt."""
        border = (module.step, module.border_pending)
        if not trainer.is_global_zero or border == self.saved:
            return
        content = self._content(module, trainer)
        save_checkpoint(self.path("last"), content, keep=self.path("previous"))
        write_state(self.folder, content)
        self.saved = border

    def path(self, name: str) -> Path:
        """Of the checkpoint with this name."""
        return self.folder / "checkpoints" / f"{name}.ckpt"

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Whatever ends the run, its last step border is saved; the unfinished step is dropped.

        Not if an update was half done, nor after a write that failed.
        """
        assert isinstance(pl_module, TrainingModule)
        if self.saved is None or pl_module.updating or isinstance(exception, WriteError):
            return
        with pl_module.stop.lock:
            self.save(trainer, pl_module)

    def _content(self, module: TrainingModule, trainer: pl.Trainer) -> dict[str, Any]:
        refuse_weights(module.model)
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


def write_state(folder: Path, checkpoint: Mapping[str, Any]) -> None:
    """Say in state.json how far a stage is, for readers that do not want to load a checkpoint."""
    state = {
        "step": checkpoint["step"],
        "steps": checkpoint["stage"]["steps"],
        "finished": finished(checkpoint),
        "best_bpc": checkpoint["bpc"],
    }
    text = json.dumps(state) + "\n"
    path = folder / "state.json"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def finished(checkpoint: Mapping[str, Any]) -> bool:
    """Whether nothing of the checkpoint's stage is left to do."""
    done = checkpoint["step"] >= checkpoint["stage"]["steps"]
    return bool(done and not checkpoint["counters"]["border_pending"])


def check_room(folder: Path, model: ModelConfig, stage: Stage) -> None:
    """Refuse to begin where the checkpoints will not fit: last, previous, best and a new one.

    Raises:
        ConfigError: naming the folder, the room that there is, and the room that is needed.
    """
    there = sum(path.stat().st_size for path in folder.glob("checkpoints/*.ckpt"))
    place = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.exists())
    free = shutil.disk_usage(place).free
    needed = parameters(model) * (3 * LAST + BEST)
    if free + there < needed:
        raise ConfigError(
            f"runs_dir: {folder} has room for {free / 1e6:,.0f} MB, the checkpoints of stage "
            f"{stage.number} need {(needed - there) / 1e6:,.0f} MB more; make room or choose "
            "another runs_dir=FOLDER"
        )
