"""From a configuration to a trained stage, or to all of them.

A run's folder::

    runs_dir/name/stage<k>/
        config.yaml        the resolved configuration
        environment.json   versions, device, git revision
        metrics.csv        one row per report
        state.json         step, steps, finished, best_bpc
        checkpoints/       last.ckpt, previous.ckpt, best.ckpt
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from pytorch_lightning.utilities import rank_zero_only

from data.corpus import Corpus, check_length, open_corpus
from kernels import describe_choice
from lm.callbacks import Metrics, Validation
from lm.checkpoint import load_weights
from lm.config import Config, ConfigError, UserError, check_train, data_root, schedule_of
from lm.device import Device, choose_device, write_environment
from lm.files import write_text
from lm.logs import build_loggers
from lm.model import LanguageModel, bands, flops_per_character, parameters
from lm.module import TrainingModule
from lm.progress import ProgressLine, say
from lm.saving import Checkpoints, Signals, Stopped
from lm.schedule import Stage
from lm.start import Start, data_record, plan_start, run_folder, stage_folder


def train(config: Config) -> None:
    """Train the stage that `config.stage` names, or all in order.

    A stage that was begun goes on from its last checkpoint; a finished one is left as it is.

    Raises:
        UserError, DataError, BackendError: before any training, if something does not fit.
    """
    check_train(config)
    schedule = schedule_of(config)
    chosen = list(schedule.stages) if config.stage == "all" else [schedule[int(config.stage)]]
    device = choose_device(config.trainer)
    micro = [micro_batch(config, stage) for stage in chosen]
    corpus = open_data(config)
    for stage in chosen:
        check_length(corpus.splits["train"], stage.sequence, f"stage {stage.number}")
    check_length(corpus.splits["valid"], 1, "validation")
    with locked(run_folder(config)):
        say("\n".join(corpus.describe()))
        for stage, sequences in zip(chosen, micro, strict=True):
            train_stage(config, stage, corpus, device, sequences)


def open_data(config: Config) -> Corpus:
    """The corpus of a configuration."""
    data = config.data
    train_part, valid_part, test_part = data.fractions
    return open_corpus(
        data.name,
        data_root(data),
        path=data.path,
        train_path=data.train_path,
        valid_path=data.valid_path,
        test_path=data.test_path,
        fractions=(train_part, valid_part, test_part),
        allow_nonstandard=data.allow_nonstandard,
    )


def micro_batch(config: Config, stage: Stage) -> int:
    """Sequences per device at a time.

    Raises:
        ConfigError: if the stage's batch cannot be divided so.
    """
    trainer = config.trainer
    world = trainer.devices * trainer.nodes
    key = f"schedule.stages.{stage.number}.batch={stage.batch}"
    if stage.batch % world:
        raise ConfigError(
            f"trainer.devices={trainer.devices}, trainer.nodes={trainer.nodes}: {world} processes "
            f"cannot share {key} equally; choose a number that divides it"
        )
    share = stage.batch // world
    if trainer.micro_batch is not None:
        if share % trainer.micro_batch:
            raise ConfigError(
                f"trainer.micro_batch={trainer.micro_batch}: must divide {share}, which is {key} "
                f"over {world} processes"
            )
        return trainer.micro_batch
    fitting = max(1, trainer.micro_characters // stage.sequence)
    return max(n for n in range(1, share + 1) if share % n == 0 and n <= fitting)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second run out of `folder`; the first process alone holds the lock."""
    if rank_zero_only.rank != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{folder}: another run is using this folder; wait for it, or choose another name="
        ) from None
    try:
        yield
    finally:
        lock.release()


def train_stage(
    config: Config, stage: Stage, corpus: Corpus, device: Device, sequences: int
) -> None:
    """Train one stage to its end, or say that it is finished."""
    folder = stage_folder(config, stage.number)
    if rank_zero_only.rank == 0 and folder.exists() and (config.overwrite or config.throwaway):
        shutil.rmtree(folder)
    start = plan_start(config, stage, corpus, folder)
    if start.resume is not None and start.resume["step"] >= stage.steps:
        say(
            f"stage {stage.number} is finished: {folder} holds step {start.resume['step']} of "
            f"{stage.steps}, best BPC {start.resume['bpc']:.4f}; overwrite=true starts it again"
        )
        return
    pl.seed_everything(config.seed, verbose=False)
    model = LanguageModel(
        config.model, bands(stage), gradient_checkpointing=config.trainer.gradient_checkpointing
    )
    if source := start.resume or start.weights:
        load_weights(model, source)
    module = TrainingModule(
        model,
        stage,
        config.optim,
        corpus.splits["train"].read(),
        seed=config.seed,
        micro_batch=sequences,
        resume=start.resume,
        optimizer_state=optimizer_state(config, start),
    )
    announce(config, stage, device, sequences, start)
    fit(config, stage, corpus, device, module, folder, start)


def optimizer_state(config: Config, start: Start) -> dict[str, Any] | None:
    """AdamW's state to begin with: of a resume, or handed over if `optim.fresh` is false.

    Raises:
        UserError: if it should be handed over, and the checkpoint has none.
    """
    source = start.resume or (None if config.optim.fresh else start.weights)
    if source is None:
        return None
    if source["optimizer"] is None:
        raise UserError(
            "optim.fresh=false: the checkpoint to begin from has no optimiser state; train the "
            "stage before with optim.fresh=false too, or begin with optim.fresh=true"
        )
    return dict(source["optimizer"])


def announce(config: Config, stage: Stage, device: Device, sequences: int, start: Start) -> None:
    """Say what is about to run, and what it will cost."""
    world = config.trainer.devices * config.trainer.nodes
    flops = step_flops(config, stage)
    attention = describe_choice(
        config.model.backend, dim=config.model.width // config.model.heads, device=device.kind
    )
    lines = [
        f"stage {stage.number}: {stage.steps:,} steps {start.said}",
        f"  model: {parameters(config.model):,} parameters, {config.model.layers} layers, "
        f"{config.model.heads} heads, width {config.model.width}",
        f"  sequence {stage.sequence:,}, batch {stage.batch} = {world} x {sequences} x "
        f"{stage.batch // (world * sequences)} accumulated; "
        f"{stage.batch * stage.sequence:,} characters a step",
        f"  learning rate {stage.lr:g} after {stage.warmup:,} steps of warm-up",
        f"  device: {device.name}, {device.precision}, {device.peak / 1e9:,.0f} GFLOP/s measured",
        f"  {attention}",
        f"  {flops:.3g} FLOP a step; at 40% of the peak about "
        f"{stage.steps * flops / (0.4 * device.peak * world) / 3600:.2g} hours",
    ]
    lines += [f"  layer {n}: {text}" for n, text in band_lines(stage)]
    say("\n".join(lines))


def band_lines(stage: Stage) -> Iterator[tuple[str, str]]:
    """Windows and strides, equal neighbours together."""
    rows = [
        f"window {w}" + ("" if max(s) == 1 else f", strides {' '.join(map(str, s))}")
        for w, s in zip(stage.windows, stage.strides, strict=True)
    ]
    first = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[first]:
            yield (f"{first}" if first == index - 1 else f"{first}-{index - 1}"), rows[first]
            first = index


def step_flops(config: Config, stage: Stage) -> float:
    """Of one optimiser step, recomputation not counted."""
    return 3 * flops_per_character(config.model, stage) * stage.batch * stage.sequence


def fit(
    config: Config,
    stage: Stage,
    corpus: Corpus,
    device: Device,
    module: TrainingModule,
    folder: Path,
    start: Start,
) -> None:
    """Run Lightning's trainer over the steps that are left."""
    trainer_config, first = config.trainer, module.step
    world = trainer_config.devices * trainer_config.nodes
    valid = corpus.splits["valid"].read()
    if config.validation.characters:
        valid = valid[: config.validation.characters + 1]
    if rank_zero_only.rank == 0:
        write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
        write_environment(folder / "environment.json", device)
    progress = ProgressLine(f"stage {stage.number}", first, stage.steps)
    origin = {"config": dataclasses.asdict(config), "data": data_record(corpus)}
    callbacks = [
        Validation(valid, config.validation.every),
        Metrics(
            trainer_config.log_every,
            peak=device.peak,
            flops=step_flops(config, stage),
            show=progress.show,
        ),
        progress,
        Checkpoints(
            folder,
            trainer_config.save_every,
            origin,
            start.resume["bpc"] if start.resume else None,
        ),
        Signals(),
    ]
    trainer = pl.Trainer(
        accelerator=device.kind,
        devices=trainer_config.devices,
        num_nodes=trainer_config.nodes,
        strategy="ddp" if world > 1 else "auto",
        precision=device.precision,  # type: ignore[arg-type]
        max_steps=stage.steps - first,
        max_epochs=-1,
        accumulate_grad_batches=stage.batch // (world * module.micro_batch),
        callbacks=callbacks,
        logger=build_loggers(
            config.logger,
            folder,
            run=config.name,
            stage=stage.number,
            first_step=first - module.border_pending,
            settings=origin["config"],
        ),
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        deterministic=trainer_config.deterministic,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    try:
        trainer.fit(module)
    except Stopped as stop:
        say(
            f"stopped by {stop} at step {module.step} of stage {stage.number}; the same command "
            "goes on from there",
            file=sys.stderr,
        )
        sys.exit(128 + stop.number)
