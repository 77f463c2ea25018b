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

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from data.corpus import Corpus, check_length
from kernels import describe_choice
from lm.config.checks import check_train, schedule_of
from lm.config.corpus import corpus_of, with_absolute_paths
from lm.config.schema import Config, ConfigError, UserError
from lm.machine.cluster import Seat
from lm.machine.device import Device, choose_device
from lm.machine.files import explained
from lm.model.checkpoint import load_checkpoint, load_weights
from lm.model.compilation import check_compiler, compile_blocks
from lm.model.language_model import LanguageModel, bands
from lm.schedule import Stage
from lm.training.loggers import check_logger
from lm.training.module import TrainingModule
from lm.training.processes import Team, joined
from lm.training.profiling import measured_stage
from lm.training.progress import say
from lm.training.resume import (
    Start,
    check_places,
    plan_start,
    prepare_folder,
    run_folder,
    stage_folder,
)
from lm.training.saving import check_room
from lm.training.signals import Signals, Stop, Stopped
from lm.training.stage import fit
from lm.training.summary import announce


def train(config: Config, seat: Seat | None = None) -> None:
    """Train the stage that `config.stage` names, or all in order.

    A stage that was begun goes on from its last checkpoint; a finished one is left as it is.

    Args:
        config: the run.
        seat: of this process, if another process of the run has started it.

    Raises:
        UserError, DataError, BackendError: before any training, if something does not fit.
        SystemExit: after a signal, with a status that is not zero.
    """
    signals = Signals(Stop())
    try:
        with signals:
            train_stages(config, signals, seat)
    except Exception as error:
        if signals.noted is None:
            raise
        # The first process has ended, as the signal asked for, and the connection with it.
        sys.stderr.write(f"stopped by {signals.noted}: {type(error).__name__}: {error}\n")
        sys.exit(signals.noted.code)
    except Stopped as stopped:
        say(f"stopped by {stopped}; {how_to_go_on(config)}", aside=True)
        signals.requeue(stopped)
        sys.exit(stopped.code)


def how_to_go_on(config: Config) -> str:
    """What a stopped run needs to go on."""
    if config.throwaway:
        return "a trial run begins anew each time"
    changed = " without overwrite=true" if config.overwrite else ""
    return f"the same command{changed} goes on from the last step"


def train_stages(config: Config, signals: Signals, seat: Seat | None) -> None:
    """Check everything, then train."""
    check_train(config)
    check_logger(config.logger)
    check_places(config)
    config = replace(config, data=with_absolute_paths(config.data))
    schedule = schedule_of(config)
    chosen = list(schedule.stages) if config.stage == "all" else [schedule[int(config.stage)]]
    device = choose_device(
        config.trainer.accelerator, config.trainer.precision, config.trainer.threads
    )
    if config.model.backend != "auto":
        head_width = config.model.width // config.model.heads
        describe_choice(config.model.backend, dim=head_width, device=device.kind)
    if config.trainer.compile:
        check_compiler(device.kind)
    sequences = [micro_batch(config, stage) for stage in chosen]
    chosen = [measured_stage(config, *each) for each in zip(chosen, sequences, strict=True)]
    corpus = corpus_of(config.data)
    for stage in chosen:
        check_length(corpus.splits["train"], stage.sequence, f"stage {stage.number}")
    check_length(corpus.splits["valid"], 1, "validation")
    if not run_folder(config).exists():
        plan_start(config, chosen[0], corpus, config.init_from)
        check_room(stage_folder(config, chosen[0].number), config.model, chosen[0])
    with (
        joined(config, device.kind, signals, seat) as team,
        locked(run_folder(config), team),
    ):
        say("\n".join(corpus.describe()))
        for stage, together in zip(chosen, sequences, strict=True):
            train_stage(config, stage, corpus, device, team, signals, together)


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
    fitting = min(share, max(1, trainer.micro_characters // stage.sequence))
    return max(n for n in range(1, fitting + 1) if share % n == 0)


@contextmanager
def locked(folder: Path, team: Team) -> Iterator[None]:
    """Keep a second run out of `folder`; the first process alone holds the lock."""
    lock = FileLock(folder / ".lock")

    def acquire() -> None:
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise UserError(
                    f"{folder}: another run is using this folder; wait for it, or choose "
                    "another name="
                ) from None

    team.decide(acquire)
    try:
        yield
    finally:
        lock.release()


def train_stage(
    config: Config,
    stage: Stage,
    corpus: Corpus,
    device: Device,
    team: Team,
    signals: Signals,
    micro_batch: int,
) -> None:
    """Train one stage to its end, or say that it is finished."""
    folder = stage_folder(config, stage.number)
    # Of all stages, only the first begins from what the command names.
    init_from = "" if config.stage == "all" and stage.number > 1 else config.init_from

    def plan() -> dict[str, Any]:
        start = plan_start(config, stage, corpus, init_from)
        prepare_folder(config, stage, start)
        return asdict(start)

    start = Start(**team.decide(plan))
    if start.kind == "finished":
        say(f"stage {stage.number} is finished: {start.said}; overwrite=true starts it again")
        return
    source = load_checkpoint(Path(start.path)) if start.path else None
    resume = source if start.kind == "resume" else None
    torch.manual_seed(config.seed)
    model = LanguageModel(
        config.model, bands(stage), gradient_checkpointing=config.trainer.gradient_checkpointing
    )
    if source is not None:
        load_weights(model, source)
    if config.trainer.compile:
        compile_blocks(model, device.kind)
    module = TrainingModule(
        model,
        stage,
        config.optim,
        corpus.splits["train"].read(),
        seed=config.seed,
        micro_batch=micro_batch,
        stop=signals.stop,
        resume=resume,
        optimizer_state=optimizer_state(config, source, resume is not None),
    )
    announce(config, stage, device, micro_batch, start.said)
    best = resume["bpc"] if resume else None
    fit(config, corpus, device, team, signals, module, folder, best)


def optimizer_state(
    config: Config, source: Mapping[str, Any] | None, resume: bool
) -> dict[str, Any] | None:
    """AdamW's state to begin with: of a resume, or handed over if `optim.fresh` is false.

    Raises:
        UserError: if it should be handed over, and the checkpoint has none.
    """
    if source is None or (config.optim.fresh and not resume):
        return None
    if source["optimizer"] is None:
        raise UserError(
            "optim.fresh=false: the checkpoint to begin from has no optimiser state; train the "
            "stage before with optim.fresh=false too, or begin with optim.fresh=true"
        )
    return dict(source["optimizer"])
