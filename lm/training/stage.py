"""One stage's training by Lightning's Trainer, which is told to leave files and signals to us."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytorch_lightning as pl
from omegaconf import OmegaConf

from data.corpus import Corpus
from lm.config.schema import Config
from lm.machine.device import Device, write_environment
from lm.machine.files import write_text
from lm.training.callbacks import Border, Metrics, Validation
from lm.training.loggers import build_loggers, close_loggers
from lm.training.module import TrainingModule
from lm.training.nonfinite import NonFiniteError
from lm.training.processes import Environment, Team
from lm.training.profiling import Profile
from lm.training.progress import ProgressLine
from lm.training.resume import data_record
from lm.training.saving import Checkpoints
from lm.training.signals import Signals
from lm.training.summary import step_flops


class KeepSignals(pl.Callback):
    """Puts our signal handlers back after Lightning has set its own."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lightning is done with it by now."""
        self.signals.install()


def fit(
    config: Config,
    corpus: Corpus,
    device: Device,
    team: Team,
    signals: Signals,
    module: TrainingModule,
    folder: Path,
    best: float | None,
) -> None:
    """Train over the steps that are left.

    Args:
        config, corpus, device, team, signals: of the run.
        module: where it stands.
        folder: of the stage.
        best: lowest validation result so far.

    Raises:
        NonFiniteError: if numbers are not finite and it is of no use to go on.
        WriteError: if a file could not be written.
        Stopped: if it was asked to end.
    """
    stage, first = module.stage, module.step
    valid = corpus.splits["valid"].read()
    if config.validation.characters:
        valid = valid[: config.validation.characters + 1]
    origin = {"config": asdict(config), "data": data_record(corpus)}
    if team.first:
        write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
        write_environment(folder / "environment.json", device)
    progress = ProgressLine(f"stage {stage.number}", first, stage.steps)
    checkpoints = Checkpoints(folder, config.trainer.save_every, origin, best)
    metrics = Metrics(
        config.trainer.log_every,
        peak=device.peak,
        flops=step_flops(config, stage),
        show=progress.show,
    )
    border = Border([Validation(valid, config.validation.every), metrics, checkpoints])
    profile = [Profile(config, device, folder)] if config.profile.steps else []
    loggers = build_loggers(
        config.logger,
        folder,
        run=config.name,
        stage=stage.number,
        first_step=first - module.border_pending,
        settings=asdict(config),
    )
    with quiet():
        trainer = pl.Trainer(
            accelerator=device.kind,
            devices=config.trainer.devices,
            num_nodes=config.trainer.nodes,
            strategy="ddp" if team.seat.world > 1 else "auto",
            plugins=[Environment(team.seat)],
            precision=device.precision,  # type: ignore[arg-type]
            max_steps=stage.steps - first,
            max_epochs=-1,
            accumulate_grad_batches=stage.batch // (team.seat.world * module.micro_batch),
            callbacks=[KeepSignals(signals), *profile, metrics, progress, checkpoints, border],
            logger=loggers,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            deterministic=config.trainer.deterministic,
            use_distributed_sampler=False,
            default_root_dir=folder,
        )
        try:
            trainer.fit(module)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; {advice(checkpoints)}") from error
        finally:
            module.stop.save = None
            close_loggers(done=module.step == stage.steps)
    assert module.step == stage.steps


def advice(checkpoints: Checkpoints) -> str:
    """What to do after numbers that were not finite."""
    path = checkpoints.path("last")
    if not path.exists():
        return (
            "there is no checkpoint yet; lower the learning rate or use trainer.precision=32-true"
        )
    step = checkpoints.saved[0] if checkpoints.saved else 0
    return (
        f"the last good checkpoint is {path} (step {step}); go on from it in another run with a "
        f"lower learning rate or trainer.precision=32-true: name=NEW init_from={path}"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what Lightning says at each start, and nothing else."""
    loggers = [logging.getLogger(f"{name}.utilities.rank_zero") for name in LIGHTNING]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning
        )
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


LIGHTNING = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
