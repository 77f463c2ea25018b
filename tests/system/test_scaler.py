"""Half precision: the loss scaler's state survives a stop, and overflows are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import MixedPrecision

import lm.training.run
import lm.training.stage
from lm.machine.device import Device
from lm.model.checkpoint import load_checkpoint
from lm.training.module import TrainingModule
from lm.training.run import train
from tests.system.micro import micro, outcome, stage_folders
from tests.system.test_resume import stop_in

FIRST_SCALE = 2.0**40  # overflows in the first steps


@pytest.fixture
def half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without bf16; the command itself refuses it on a CPU, where it is slow."""
    trainer = pl.Trainer

    def with_scaler(*, precision: str, plugins: list[Any], **rest: Any) -> pl.Trainer:
        assert precision == "16-mixed"
        scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=2)
        return trainer(plugins=[*plugins, MixedPrecision(precision, "cpu", scaler)], **rest)

    monkeypatch.setattr(lm.training.stage.pl, "Trainer", with_scaler)
    monkeypatch.setattr(
        lm.training.run, "choose_device", lambda *_: Device("cpu", "cpu", "16-mixed", 1e11)
    )


def test_the_loss_scale_goes_on_where_it_was(
    half_precision: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"stage": "1", "schedule.stages.1.steps": 30, "trainer.save_every": 10}
    changed |= {"validation.every": 30, "trainer.log_every": 10, "optim.max_bad_steps": 25}
    whole = micro(tmp_path / "whole", changed)
    train(whole)
    stopped = micro(tmp_path / "stopped", changed)
    for call in (20, 40):  # while the scale is falling, and later
        with monkeypatch.context() as patch:
            stop_in(patch, TrainingModule, "training_step", call)
            with pytest.raises(SystemExit):
                train(stopped)
    train(stopped)
    assert outcome(stopped) == outcome(whole)
    found = load_checkpoint(stage_folders(whole)[0] / "checkpoints" / "last.ckpt")
    bad = found["counters"]["bad_steps"]
    assert 0 < bad < 25
    assert 0 < found["scaler"]["scale"] < FIRST_SCALE
