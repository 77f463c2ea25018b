"""Measuring steps instead of training (debug=profile): their time and memory, and where both go.

A measured step is one micro-batch per device, forward and backward, with clipping and the
optimiser. Some steps warm up, some are timed, and some more run under torch's profiler, which
slows them down; the numbers come from the timed ones, the shares of the kinds of work from the
recorded ones.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.profiler import ProfilerActivity, profile

from lm.config.schema import Config
from lm.costs.flops import attention_flops, flops_per_character
from lm.machine.device import Device
from lm.machine.files import write_text
from lm.machine.memory import peak_memory, reset_peak_memory
from lm.schedule import Stage
from lm.training.breakdown import ATTENTION, Breakdown, break_down
from lm.training.module import TrainingModule
from lm.training.progress import say


@dataclass(frozen=True)
class StepCost:
    """What one measured step costs.

    Attributes:
        threads: of each process. processes: one device each.
        sequence: characters. sequences: in each device's micro-batch.
        seconds: the median of the timed steps.
        update_seconds: the part after backward: clipping and the optimiser.
        peak_bytes: the most that the first process had in use in the timed steps.
        flops: of all processes; recomputation is not counted.
        attention_flops: the part of them that visible pairs cost.
        matrix_rate: FLOP/s of torch.mm on one device, in the step's precision.
        kinds: shares of the recorded steps' time by kind of work; empty if none was recorded.
    """

    device: str
    precision: str
    threads: int
    processes: int
    gradient_checkpointing: bool
    stage: int
    sequence: int
    sequences: int
    seconds: float
    update_seconds: float
    peak_bytes: int
    flops: float
    attention_flops: float
    matrix_rate: float
    kinds: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> StepCost:
        """From a profile.json."""
        return cls(**json.loads(path.read_text()))

    @property
    def attention_share(self) -> float:
        """Of the recorded time, from 0 to 1; NaN if nothing was recorded."""
        return self.kinds.get(ATTENTION, 0.0) if self.kinds else float("nan")

    @property
    def speed(self) -> float:
        """Characters per second, of all processes together."""
        return self.processes * self.sequence * self.sequences / self.seconds

    @property
    def share_of_peak(self) -> float:
        """Useful FLOPs per second beside those of torch.mm, from 0 to 1."""
        return self.flops / self.seconds / (self.processes * self.matrix_rate)

    def lines(self) -> list[str]:
        """The same for a reader."""
        kept = "each block's input" if self.gradient_checkpointing else "everything"
        return [
            f"stage {self.stage}: {self.processes} x {self.sequences} x {self.sequence:,} "
            f"characters a step, {self.precision}, {kept} kept for backward",
            f"{self.device}",
            f"{self.seconds:.3f} s a step, of it {self.update_seconds:.3f} s after backward",
            f"{self.speed:,.0f} characters/s, {self.share_of_peak:.0%} of torch.mm's rate",
            f"attention: {self.attention_flops / self.flops:.0%} of the FLOPs, "
            f"{self.attention_share:.0%} of the recorded time",
            f"peak memory {self.peak_bytes / 1e9:.2f} GB",
        ]


def measured_stage(config: Config, stage: Stage, sequences: int) -> Stage:
    """The stage with just the steps to be measured, if `config.profile` asks for it."""
    wanted = config.profile
    if not wanted.steps:
        return stage
    world = config.trainer.devices * config.trainer.nodes
    steps = wanted.warm_up + wanted.steps + wanted.recorded
    return dataclasses.replace(stage, batch=world * sequences, steps=steps)


class Profile(pl.Callback):
    """Times the steps of a stage made by `measured_stage`, records the last ones, and reports.

    Args:
        config, device: of the run.
        folder: where profile.json, profile.txt and trace.json go.
    """

    def __init__(self, config: Config, device: Device, folder: Path) -> None:
        self.config = config
        self.device = device
        self.folder = folder
        self.seconds: list[float] = []
        self.update_seconds: list[float] = []
        self.peak_bytes = 0
        self.breakdown: Breakdown | None = None
        self._profile: profile | None = None
        self._begin = self._update = 0.0

    @property
    def first_recorded(self) -> int:
        """How many steps come before those under the profiler."""
        return self.config.profile.warm_up + self.config.profile.steps

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Start the clock; watch the memory anew after the warm-up; record if it is time to."""
        assert isinstance(pl_module, TrainingModule)
        if pl_module.step == self.config.profile.warm_up:
            reset_peak_memory(pl_module.device)
        if pl_module.step == self.first_recorded and trainer.is_global_zero:
            kinds = [ProfilerActivity.CPU]
            if self._on_gpu:
                kinds.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=kinds)
            self._profile.start()
        if pl_module.step <= self.first_recorded:
            self._begin = self._now()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The gradients are there; what follows is the update."""
        self._update = self._now()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Stop the clock."""
        assert isinstance(pl_module, TrainingModule)
        end = self._now()
        if self.config.profile.warm_up < pl_module.step <= self.first_recorded:
            self.seconds.append(end - self._begin)
            self.update_seconds.append(end - self._update)
            self.peak_bytes = peak_memory(pl_module.device)
        if self._profile is not None and pl_module.step == pl_module.stage.steps:
            self._profile.stop()
            count = self.config.profile.recorded
            self.breakdown = break_down(
                self._profile.events(), (end - self._begin) / count, count, on_gpu=self._on_gpu
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it all down, on the first process, and say where."""
        assert isinstance(pl_module, TrainingModule)
        if not trainer.is_global_zero:
            return
        cost = self._cost(pl_module, trainer.world_size)
        content = json.dumps(dataclasses.asdict(cost), indent=2)
        said = cost.lines()
        names = ["profile.txt", "profile.json"]
        if self.breakdown is not None and self._profile is not None:
            said += ["", *self.breakdown.table().splitlines()]
            names.append("trace.json")
            self._profile.export_chrome_trace(str(self.folder / "trace.json"))
        text = "\n".join(said)
        write_text(self.folder / "profile.txt", f"{text}\n\n{self._calls()}")
        write_text(self.folder / "profile.json", content + "\n")
        say(f"{text}\nwritten to {self.folder}: {', '.join(names)}")

    @property
    def _on_gpu(self) -> bool:
        return self.device.kind == "cuda"

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _calls(self) -> str:
        """The operators that took longest, one per line."""
        if self._profile is None:
            return ""
        order = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        return self._profile.key_averages().table(sort_by=order, row_limit=40)

    def _cost(self, module: TrainingModule, world: int) -> StepCost:
        stage = module.stage
        characters = stage.batch * stage.sequence
        return StepCost(
            device=self.device.name,
            precision=self.device.precision,
            threads=torch.get_num_threads(),
            processes=world,
            gradient_checkpointing=self.config.trainer.gradient_checkpointing,
            stage=stage.number,
            sequence=stage.sequence,
            sequences=module.micro_batch,
            seconds=statistics.median(self.seconds),
            update_seconds=statistics.median(self.update_seconds),
            peak_bytes=self.peak_bytes,
            flops=3 * flops_per_character(self.config.model, stage) * characters,
            attention_flops=3 * attention_flops(self.config.model, stage) * stage.batch,
            matrix_rate=self.device.peak,
            kinds=self.breakdown.shares() if self.breakdown else {},
        )
