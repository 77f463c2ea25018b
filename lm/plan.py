"""What a run will cost, before it starts: python -m lm.plan experiment=enwik8_small.

For each stage: characters, FLOPs, memory per device by kind, hours and energy, on this device and,
with --device, on a named one. All other arguments are those of train.py. The hours are estimates
from rates and shares of peak (lm/rates.py); --share gives another share, and
`python -m lm.measure_step` measures single steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lm.check import schedule_of
from lm.compose import train_config
from lm.config import Config, ConfigError, UserError
from lm.costs import Memory, step_memory
from lm.device import choose_device
from lm.memory import memory_in_use
from lm.model import flops_per_character, parameters
from lm.rates import GPUS, Rates, measured_rates, step_time
from lm.run import micro_batch
from lm.schedule import Stage

# Bytes of what a process loads with its first step on a CPU: kernels, their runtime, oneDNN.
FIRST_STEP = 70_000_000
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class StagePlan:
    """The cost of one stage on one kind of device.

    Attributes:
        characters: of the whole stage. flops: likewise, recomputation not counted.
        devices: how many share the work. sequences, pieces: a device's micro-batch, and how many
            of them are accumulated.
        memory: bytes per device at the peak. hours: of the clock.
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
    hours: float
    kilowatt_hours: float


def plan_stage(
    config: Config,
    stage: Stage,
    rates: Rates,
    *,
    compute: int,
    program: int,
    share: float | None = None,
) -> StagePlan:
    """Estimate one stage; `compute` is the bytes of a number in matrix products, 4 or 2."""
    world = config.trainer.devices * config.trainer.nodes
    sequences = micro_batch(config, stage)
    pieces = stage.batch // (world * sequences)
    checkpointing = config.trainer.gradient_checkpointing
    weights = parameters(config.model)
    memory = step_memory(
        config.model,
        stage,
        parameters=weights,
        sequences=sequences,
        compute=compute,
        checkpointing=checkpointing,
        program=program,
    )
    seconds = step_time(
        config.model,
        stage,
        rates,
        sequences=sequences,
        pieces=pieces,
        checkpointing=checkpointing,
        parameters=weights,
        kept=memory.activations,
        share=share,
    ).total
    hours = stage.steps * seconds / 3600
    return StagePlan(
        stage=stage.number,
        device=rates.name,
        characters=stage.characters,
        flops=3 * flops_per_character(config.model, stage) * stage.characters,
        devices=world,
        sequences=sequences,
        pieces=pieces,
        memory=memory,
        step_seconds=seconds,
        hours=hours,
        kilowatt_hours=hours * world * rates.watts / 1000,
    )


def table(plans: Sequence[StagePlan], weights: int) -> str:
    """Readable lines: hours and energy, then memory by kind."""
    lines = [
        f"{plans[0].device}: {plans[0].devices} device(s), {weights:,} parameters",
        f"{'stage':<7}{'characters':>17}{'FLOP':>10}{'a device':>11}{'s/step':>9}{'hours':>9}"
        f"{'kWh':>8}",
    ]
    for plan in plans:
        cut = f"{plan.sequences} x {plan.pieces}"
        lines.append(
            f"{plan.stage:<7}{plan.characters:>17,}{plan.flops:>10.2e}{cut:>11}"
            f"{plan.step_seconds:>9.3g}{plan.hours:>9.3g}{plan.kilowatt_hours:>8.3g}"
        )
    hours, energy = (sum(getattr(p, k) for p in plans) for k in ("hours", "kilowatt_hours"))
    lines.append(f"{'all':<7}{'':>47}{hours:>9.3g}{energy:>8.3g}")
    kinds = [field.name for field in dataclasses.fields(Memory)]
    lines.append("GB".ljust(7) + "".join(f"{kind:>12}" for kind in [*kinds, "peak"]))
    for plan in plans:
        sizes = [getattr(plan.memory, kind) for kind in kinds] + [plan.memory.total]
        lines.append(f"{plan.stage:<7}" + "".join(f"{size / 1e9:>12.2f}" for size in sizes))
    return "\n".join(lines)


def plans_of(config: Config, named: str | None, share: float | None) -> list[list[StagePlan]]:
    """Plans of all stages, or of `config.stage`'s one: on this device, then on the named one."""
    device = choose_device(config.trainer)
    dtype = MIXED.get(device.precision, torch.float32)
    here = measured_rates(device.kind, device.name, dtype)
    program = memory_in_use(torch.device(device.kind))
    if device.kind == "cpu":
        program += FIRST_STEP
    cases = [(here, dtype.itemsize, program)]
    if named is not None:
        if config.trainer.precision == "32-true":
            raise ConfigError("trainer.precision=32-true: the named GPUs' rates are for 16 bits")
        cases.append((GPUS[named], 2, 0))
    schedule = schedule_of(config)
    stages = schedule.stages if config.stage == "all" else (schedule[int(config.stage)],)
    return [
        [
            plan_stage(config, stage, rates, compute=compute, program=base, share=share)
            for stage in stages
        ]
        for rates, compute, base in cases
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lm.plan", description="The cost of a run.")
    parser.add_argument("--device", choices=GPUS, help="estimate for this GPU too")
    parser.add_argument("--share", type=float, help="part of the peak that dense work reaches")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("overrides", nargs="*", help="of train.py")
    options = parser.parse_intermixed_args(arguments)
    if options.share is not None and not 0 < options.share <= 1:
        parser.error(f"--share {options.share}: expected more than 0 and at most 1")
    given = any(override.startswith("stage=") for override in options.overrides)
    try:
        config = train_config([*options.overrides, *([] if given else ["stage=all"])])
        plans = plans_of(config, options.device, options.share)
    except UserError as error:
        sys.exit(f"error: {error}")
    if options.json:
        flat = [dataclasses.asdict(plan) for each in plans for plan in each]
        sys.stdout.write(json.dumps(flat, indent=2) + "\n")
        return
    weights = parameters(config.model)
    sys.stdout.write("\n\n".join(table(each, weights) for each in plans) + "\n")


if __name__ == "__main__":
    main()
