"""What a run says before it begins: what will be trained, from where, and what it will cost."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lm.config.schema import Config
from lm.costs.flops import flops_per_character
from lm.costs.memory import FLOAT, step_memory
from lm.machine.device import DTYPES, Device
from lm.machine.memory import FIRST_STEP, memory_in_use, memory_left
from lm.model.language_model import parameters
from lm.schedule import Stage
from lm.training.progress import say


def announce(config: Config, stage: Stage, device: Device, sequences: int, origin: str) -> None:
    """Say what is about to run, from where (`origin`), and what it will cost."""
    world = config.trainer.devices * config.trainer.nodes
    flops = step_flops(config, stage)
    lines = [
        f"stage {stage.number}: {stage.steps:,} steps {origin}",
        f"  model: {parameters(config.model):,} parameters, {config.model.layers} layers, "
        f"{config.model.heads} heads, width {config.model.width}",
        f"  sequence {stage.sequence:,}, batch {stage.batch} = {world} x {sequences} x "
        f"{stage.batch // (world * sequences)} accumulated; "
        f"{stage.batch * stage.sequence:,} characters a step",
        f"  learning rate {stage.lr:g} after {stage.warmup:,} steps of warm-up",
        f"  device: {device.name}, {device.precision}, {device.peak / 1e9:,.0f} GFLOP/s measured",
        f"  {flops:.3g} FLOP a step; at 40% of the peak about "
        f"{stage.steps * flops / (0.4 * device.peak * world) / 3600:.2g} hours",
    ]
    lines += memory_lines(config, stage, device, sequences)
    lines += [f"  layer {n}: {text}" for n, text in band_lines(stage)]
    say("\n".join(lines))


def memory_lines(config: Config, stage: Stage, device: Device, sequences: int) -> Iterator[str]:
    """The memory of each process at its peak, and a warning if there is less. The model exists."""
    where = torch.device(device.kind)
    weights = parameters(config.model)
    used = memory_in_use(where)
    program = max(used + FIRST_STEP - weights * FLOAT, 0) if device.kind == "cpu" else 0
    peak = step_memory(
        config.model,
        stage,
        parameters=weights,
        sequences=sequences,
        compute=DTYPES[device.precision].itemsize,
        checkpointing=config.trainer.gradient_checkpointing,
        program=program,
        heap=device.kind == "cpu",
    ).total
    yield f"  about {peak / 1e9:.2g} GB of memory at the peak"
    left = used + memory_left(where)
    if peak > left:
        yield (
            f"  warning: that is more than the {left / 1e9:.2g} GB that there are; give "
            "trainer.micro_batch=1 and trainer.gradient_checkpointing=true, or a shorter sequence"
        )


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
