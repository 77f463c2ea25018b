"""What a run will cost, before it starts: python -m lm.plan experiment=enwik8_small.

For each stage: characters, FLOPs, memory per device by kind, hours and energy, on this device or,
with --device, on named ones. All other arguments are those of train.py. On this device the time is
put together from parts that are measured first (calibration.py); a named one's follows from its
data sheet and assumed shares of its peak (lm/costs/gpu_rates.py, --share).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from lm.config.checks import schedule_of
from lm.config.compose import train_config
from lm.config.schema import Config, ConfigError, UserError
from lm.costs.flops import flops_per_character
from lm.costs.gpu_rates import GPUS, Cut, StepTime
from lm.costs.memory import Memory, step_memory
from lm.machine.device import DTYPES, choose_device
from lm.machine.memory import FIRST_STEP, memory_in_use
from lm.model.language_model import ModelConfig, parameters
from lm.plan.calibration import Calibration
from lm.schedule import Stage
from lm.training.profiling import measured_stage
from lm.training.run import micro_batch


@runtime_checkable
class Estimator(Protocol):
    """A device whose step times can be estimated."""

    @property
    def name(self) -> str:
        """For a reader."""

    @property
    def watts(self) -> float:
        """Of one device under load; NaN: not known."""

    def step_time(self, model: ModelConfig, stage: Stage, cut: Cut, memory: Memory) -> StepTime:
        """Of one optimiser step on one device."""


@dataclass(frozen=True)
class StagePlan:
    """The cost of one stage on one kind of device.

    Attributes:
        characters: of the whole stage. flops: likewise, recomputation not counted.
        devices: how many share the work. sequences, pieces: a device's micro-batch, and how many
            of them are accumulated.
        memory: bytes per device at the peak. attention_share: of the step's time. hours: of the
            clock.
        kilowatt_hours: of all devices; NaN where the power is not known.
    """

    stage: int
    device: str
    characters: int
    flops: float
    devices: int
    sequences: int
    pieces: int
    memory: Memory
    step_seconds: float
    attention_share: float
    hours: float
    kilowatt_hours: float


def plan_stage(
    config: Config, stage: Stage, device: Estimator, *, compute: int, program: int
) -> StagePlan:
    """Estimate one stage.

    Args:
        compute: bytes of a number in matrix products, 4 or 2.
        program: bytes that a process takes without a model; 0 on a GPU.
    """
    world = config.trainer.devices * config.trainer.nodes
    sequences = micro_batch(config, stage)
    cut = Cut(sequences, stage.batch // (world * sequences), config.trainer.gradient_checkpointing)
    memory = step_memory(
        config.model,
        stage,
        parameters=parameters(config.model),
        sequences=sequences,
        compute=compute,
        checkpointing=cut.checkpointing,
        program=program,
        heap=program > 0,
    )
    time = device.step_time(config.model, stage, cut, memory)
    hours = stage.steps * time.total / 3600
    return StagePlan(
        stage=stage.number,
        device=device.name,
        characters=stage.characters,
        flops=3 * flops_per_character(config.model, stage) * stage.characters,
        devices=world,
        sequences=sequences,
        pieces=cut.pieces,
        memory=memory,
        step_seconds=time.total,
        attention_share=time.attention / time.total,
        hours=hours,
        kilowatt_hours=hours * world * device.watts / 1000,
    )


def table(plans: Sequence[StagePlan], weights: int) -> str:
    """Readable lines: hours and energy, then memory by kind."""
    lines = [
        f"{plans[0].device}: {plans[0].devices} device(s), {weights:,} parameters",
        f"{'stage':<7}{'characters':>17}{'FLOP':>10}{'a device':>11}{'s/step':>9}{'attention':>11}"
        f"{'hours':>9}{'kWh':>8}",
    ]
    for plan in plans:
        cut = f"{plan.sequences} x {plan.pieces}"
        lines.append(
            f"{plan.stage:<7}{plan.characters:>17,}{plan.flops:>10.2e}{cut:>11}"
            f"{plan.step_seconds:>9.3g}{plan.attention_share:>11.0%}"
            f"{plan.hours:>9.3g}{plan.kilowatt_hours:>8.3g}"
        )
    hours, energy = (sum(getattr(p, k) for p in plans) for k in ("hours", "kilowatt_hours"))
    lines.append(f"{'all':<7}{'':>58}{hours:>9.3g}{energy:>8.3g}")
    kinds = [field.name for field in dataclasses.fields(Memory)]
    lines.append("GB".ljust(7) + "".join(f"{kind:>12}" for kind in [*kinds, "peak"]))
    for plan in plans:
        sizes = [getattr(plan.memory, kind) for kind in kinds] + [plan.memory.total]
        lines.append(f"{plan.stage:<7}" + "".join(f"{size / 1e9:>12.2f}" for size in sizes))
    return "\n".join(lines)


def estimators(
    config: Config, named: Sequence[str], share: float | None
) -> Iterator[tuple[Estimator, int, int]]:
    """The named devices or, if none is named, this one.

    With each come the bytes of a number in its matrix products and those of a process at rest.
    """
    if not named:
        device = choose_device(
            config.trainer.accelerator, config.trainer.precision, config.trainer.threads
        )
        on_cpu = device.kind == "cpu"
        program = memory_in_use(torch.device("cpu")) + FIRST_STEP if on_cpu else 0
        yield Calibration(config.model, device), DTYPES[device.precision].itemsize, program
    elif config.trainer.precision == "32-true":
        raise ConfigError("trainer.precision=32-true: the named GPUs' rates are for 16 bits")
    for name in named:
        gpu = GPUS[name]
        yield (gpu if share is None else dataclasses.replace(gpu, share=share)), 2, 0


def plans_of(
    config: Config, named: Sequence[str] = (), share: float | None = None
) -> Iterator[tuple[Estimator, list[StagePlan]]]:
    """Plans of all stages, or of `config.stage`'s one, for each device that is asked for."""
    schedule = schedule_of(config)
    chosen = schedule.stages if config.stage == "all" else (schedule[int(config.stage)],)
    stages = [measured_stage(config, stage, micro_batch(config, stage)) for stage in chosen]
    for device, compute, program in estimators(config, named, share):
        yield (
            device,
            [
                plan_stage(config, stage, device, compute=compute, program=program)
                for stage in stages
            ],
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lm.plan", description="The cost of a run.")
    parser.add_argument(
        "--device",
        action="append",
        default=[],
        choices=GPUS,
        help="instead of this one; repeatable",
    )
    parser.add_argument("--share", type=float, help="part of the named GPU's peak that is reached")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("overrides", nargs="*", help="of train.py")
    options = parser.parse_intermixed_args(arguments)
    if options.share is not None and not 0 < options.share <= 1:
        parser.error(f"--share {options.share}: expected more than 0 and at most 1")
    given = any(override.startswith("stage=") for override in options.overrides)
    try:
        config = train_config([*options.overrides, *([] if given else ["stage=all"])])
        plans = list(plans_of(config, options.device, options.share))
    except UserError as error:
        sys.exit(f"error: {error}")
    if options.json:
        flat = [dataclasses.asdict(plan) for _, each in plans for plan in each]
        sys.stdout.write(json.dumps(flat, indent=2) + "\n")
        return
    weights = parameters(config.model)
    parts = [table(each, weights) for _, each in plans]
    parts += ["\n".join(device.lines()) for device, _ in plans if isinstance(device, Calibration)]
    sys.stdout.write("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
