"""What a run says before it begins: what will be trained, from where, and what it will cost."""

from __future__ import annotations

from collections.abc import Iterator

from lm.config import Config
from lm.device import Device
from lm.model import flops_per_character, parameters
from lm.progress import say
from lm.schedule import Stage


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
