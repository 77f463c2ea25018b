"""Time and memory of training steps on this machine, through the project's own training code.

    python -m lm.measure_step                           the named cases, as a table
    python -m lm.measure_step --case n2048-fp32          some of them
    python -m lm.measure_step stage=3 trainer.threads=1  any configuration of train.py

A step is one micro-batch, forward and backward, with clipping and the optimiser, on random bytes.
Each case runs in a process of its own, so that its peak of memory is its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from lm.callbacks import Border
from lm.check import schedule_of
from lm.compose import train_config
from lm.config import Config, ConfigError, UserError
from lm.device import Device, choose_device
from lm.files import write_text
from lm.memory import memory_in_use, peak_memory, reset_peak_memory
from lm.model import LanguageModel, bands, flops_per_character
from lm.module import TrainingModule
from lm.profiling import Profile
from lm.run import micro_batch
from lm.schedule import Stage

ONE = "trainer.micro_batch=1"
OFF = "trainer.gradient_checkpointing=false"
# The small model, one sequence at a time: design targets and the paper's last stage.
CASES = {
    "n2048-fp32": ["stage=1", ONE, OFF, "trainer.precision=32-true"],
    "n2048-bf16": ["stage=1", ONE, OFF, "trainer.precision=bf16-mixed"],
    "n8192-fp32": ["stage=3", ONE, OFF, "trainer.precision=32-true"],
    "n8192-bf16": ["stage=3", ONE, OFF, "trainer.precision=bf16-mixed"],
    "stage5-fp32": ["stage=5", ONE, "trainer.precision=32-true"],
    "stage5-bf16": ["stage=5", ONE, "trainer.precision=bf16-mixed"],
    "n131072-bf16": [
        "stage=5",
        "schedule.stages.5.sequence=131072",
        ONE,
        "trainer.precision=bf16-mixed",
    ],
}
# Cases of minutes: measured when named, without a step to warm up.
LONG = ("stage5-fp32", "stage5-bf16", "n131072-bf16")


@dataclass(frozen=True)
class StepCost:
    """What one step of one micro-batch costs here.

    Attributes:
        stage: number. sequence: characters. sequences: in the micro-batch.
        seconds: of the step, the median of those timed.
        update_seconds: the part of clipping and the optimiser, once per step however many
            micro-batches are accumulated.
        program_bytes: in use before the model was made.
        peak_bytes: the most in use in the timed steps, `program_bytes` included.
        flops: useful ones: recomputation is not counted.
        matrix_rate: FLOP/s of torch.mm here, in the step's precision.
        attention_share: of the step's time in banded attention; NaN if not profiled.
        attention_flops_share: of `flops`, the visible pairs'.
        kinds: seconds by kind of work, of a further step under the profiler.
    """

    device: str
    precision: str
    threads: int
    gradient_checkpointing: bool
    stage: int
    sequence: int
    sequences: int
    seconds: float
    update_seconds: float
    program_bytes: int
    peak_bytes: int
    flops: float
    matrix_rate: float
    attention_share: float
    attention_flops_share: float
    kinds: dict[str, float]

    @property
    def speed(self) -> float:
        """Characters per second."""
        return self.sequence * self.sequences / self.seconds


class StepClock(pl.Callback):
    """Times optimiser steps and the part of them after the last backward."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.seconds: list[float] = []
        self.update_seconds: list[float] = []
        self._begin = self._update = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Start the clock of a step; after the warm-up, watch the memory anew."""
        assert isinstance(pl_module, TrainingModule)
        if pl_module.step == self.warm_up:
            reset_peak_memory(pl_module.device)
        self._begin = _now(pl_module.device)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The gradients are there; what follows is the update."""
        self._update = _now(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Stop the clock."""
        assert isinstance(pl_module, TrainingModule)
        end = _now(pl_module.device)
        if pl_module.step > self.warm_up:
            self.seconds.append(end - self._begin)
            self.update_seconds.append(end - self._update)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_step(
    config: Config, *, steps: int = 3, warm_up: int = 1, profiled: bool = True
) -> StepCost:
    """Train a few steps of `config.stage` in this process, one micro-batch each."""
    if config.stage == "all":
        raise ConfigError("stage=all: one stage at a time can be measured; give its number")
    device = choose_device(config.trainer)
    stage = schedule_of(config)[int(config.stage)]
    sequences = micro_batch(config, stage)
    total = warm_up + steps + profiled
    short = dataclasses.replace(stage, batch=sequences, steps=total)
    program = memory_in_use(torch.device(device.kind))
    module = build_module(config, short)
    clock = StepClock(warm_up)
    profile = Profile(warm_up + steps, 1) if profiled else None
    quiet_trainer(device, [clock, *([profile] if profile else [])], total).fit(module)
    breakdown = profile.breakdown if profile else None
    share = breakdown.share("banded attention") if breakdown else float("nan")
    flops, pairs = step_flops(config, short)
    return StepCost(
        device=device.name,
        precision=device.precision,
        threads=torch.get_num_threads(),
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        stage=stage.number,
        sequence=stage.sequence,
        sequences=sequences,
        seconds=statistics.median(clock.seconds[:steps]),
        update_seconds=statistics.median(clock.update_seconds[:steps]),
        program_bytes=program,
        peak_bytes=peak_memory(module.device),
        flops=flops,
        matrix_rate=device.peak,
        attention_share=share,
        attention_flops_share=pairs / flops,
        kinds=breakdown.kinds if breakdown else {},
    )


def build_module(config: Config, stage: Stage) -> TrainingModule:
    """The training module of one process on random bytes."""
    pl.seed_everything(config.seed, verbose=False)
    text = np.random.default_rng(config.seed).integers(0, 256, stage.sequence + 4096, np.uint8)
    model = LanguageModel(
        config.model, bands(stage), gradient_checkpointing=config.trainer.gradient_checkpointing
    )
    return TrainingModule(
        model, stage, config.optim, text, seed=config.seed, micro_batch=stage.batch
    )


def quiet_trainer(device: Device, callbacks: list[pl.Callback], steps: int) -> pl.Trainer:
    """Lightning's trainer as lm.run sets it up, without anything that writes."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    return pl.Trainer(
        accelerator=device.kind,
        devices=1,
        precision=device.precision,  # type: ignore[arg-type]
        max_steps=steps,
        max_epochs=-1,
        callbacks=[*callbacks, Border([])],
        logger=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def step_flops(config: Config, stage: Stage) -> tuple[float, float]:
    """Useful FLOPs of a step of `stage`, and those of them that visible pairs cost."""
    narrow = dataclasses.replace(stage, windows=(0,) * len(stage.windows))
    characters = 3 * stage.batch * stage.sequence
    whole = flops_per_character(config.model, stage)
    # A window of 0 still has one pair per query, and its own distance 0.
    one = 6 * config.model.width * config.model.layers
    distances = 2 * config.model.width**2 * sum(min(w, stage.sequence - 1) for w in stage.windows)
    bare = flops_per_character(config.model, narrow)
    return characters * whole, characters * (whole - bare + one - distances / stage.sequence)


def measure_apart(
    overrides: Sequence[str], *, steps: int = 3, warm_up: int = 1, profiled: bool = True
) -> StepCost:
    """`measure_step` in a process of its own.

    Raises:
        UserError: with the process's message, if it failed.
    """
    options = ["--here", "--steps", str(steps), "--warm-up", str(warm_up)]
    command = [sys.executable, "-m", "lm.measure_step", *options, *overrides]
    if not profiled:
        command.insert(3, "--no-profile")
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"measuring {' '.join(overrides)} failed ({done.returncode}): {said[-1]}")
    return StepCost(**json.loads(done.stdout.splitlines()[-1]))


def table(costs: dict[str, StepCost]) -> str:
    """Readable lines, one per case."""
    lines = [
        f"{'case':<14}{'characters':>11}{'precision':>12}{'threads':>8}{'kept':>6}{'s/step':>9}"
        f"{'char/s':>9}{'of mm':>7}{'attention':>11}{'of FLOPs':>10}{'peak GB':>9}"
    ]
    for name, cost in costs.items():
        lines.append(
            f"{name:<14}{cost.sequences * cost.sequence:>11,}{cost.precision:>12}"
            f"{cost.threads:>8}{'input' if cost.gradient_checkpointing else 'all':>6}"
            f"{cost.seconds:>9.2f}{cost.speed:>9,.0f}"
            f"{cost.flops / cost.seconds / cost.matrix_rate:>7.0%}{cost.attention_share:>11.0%}"
            f"{cost.attention_flops_share:>10.0%}{cost.peak_bytes / 1e9:>9.2f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.measure_step", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--case", action="append", choices=CASES, help="may be given repeatedly")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them")
    parser.add_argument("--no-profile", action="store_true", help="no step under the profiler")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of train.py, for one configuration")
    options = parser.parse_intermixed_args(arguments)
    try:
        run(options)
    except UserError as error:
        sys.exit(f"error: {error}")


def run(options: argparse.Namespace) -> None:
    """Measure what was asked for, print the table, write the JSON."""
    profiled = not options.no_profile
    if options.here:
        config = train_config(options.overrides)
        cost = measure_step(config, steps=options.steps, warm_up=options.warm_up, profiled=profiled)
        sys.stdout.write(json.dumps(dataclasses.asdict(cost)) + "\n")
        return
    chosen = options.case or [name for name in CASES if name not in LONG]
    cases = {"given": options.overrides} if options.overrides else {n: CASES[n] for n in chosen}
    costs = {}
    for name, overrides in cases.items():
        steps, warm_up = (1, 0) if name in LONG else (options.steps, options.warm_up)
        costs[name] = measure_apart(
            overrides, steps=steps, warm_up=warm_up, profiled=profiled and name not in LONG
        )
    sys.stdout.write(table(costs) + "\n")
    if options.json:
        content = {name: dataclasses.asdict(cost) for name, cost in costs.items()}
        write_text(options.json, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
