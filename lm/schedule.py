"""The staged schedule: which windows, strides, lengths, rates and batches each stage uses.

Source: Longformer, section 4.2 and appendix A (tables 12 and 13). What the paper leaves open is
named in docs/deviations.md. Pure Python: nothing here knows of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class ScheduleError(ValueError):
    """A schedule that contradicts itself or the model; the message names the key."""


@dataclass
class StageTable:
    """What the configuration says of one stage; `windows` has one value per group of layers."""

    sequence: int
    windows: list[int]
    lr: float
    batch: int
    steps: int


@dataclass(frozen=True)
class Stage:
    """One stage (the paper's phase).

    Attributes:
        number: 1 for the first stage.
        sequence: characters of one training sequence.
        windows: past positions that each layer sees besides the position itself, bottom to top.
        strides: for each layer, the stride of each head (the paper's dilation + 1).
        lr: learning rate after the warm-up.
        batch: sequences of one optimiser step, over all devices.
        steps: optimiser steps.
        warmup: steps over which the learning rate rises linearly to `lr`.
    """

    number: int
    sequence: int
    windows: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    lr: float
    batch: int
    steps: int
    warmup: int

    @property
    def receptive_field(self) -> int:
        """Positions before a character that can reach it: the sum over layers of the reach."""
        return sum(w * max(s) for w, s in zip(self.windows, self.strides, strict=True))

    @property
    def reach(self) -> int:
        """The largest distance that one layer looks back."""
        return max(w * max(s) for w, s in zip(self.windows, self.strides, strict=True))

    @property
    def characters(self) -> int:
        """Characters that the whole stage trains on."""
        return self.steps * self.batch * self.sequence

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimiser step `step`, counted from 0.

        Linear warm-up, then constant (appendix A). A function of the step alone, so that a resumed
        run continues where it was.
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr


@dataclass(frozen=True)
class Schedule:
    """The stages in order; numbers run from 1 without a gap."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        numbers = [stage.number for stage in self.stages]
        if numbers != list(range(1, len(numbers) + 1)):
            raise ScheduleError(
                f"schedule.stages: found the keys {numbers}, expected 1, 2, 3, ... without a gap"
            )

    def __getitem__(self, number: int) -> Stage:
        if not 1 <= number <= len(self.stages):
            raise ScheduleError(
                f"stage={number}: this schedule has the stages 1 to {len(self.stages)}; "
                "choose one of them, or stage=all"
            )
        return self.stages[number - 1]

    def __len__(self) -> int:
        return len(self.stages)


def by_layer(values: Sequence[int], layers: int, key: str) -> tuple[int, ...]:
    """Spread one value per group of layers over equal groups, bottom to top."""
    if not values or layers % len(values):
        raise ScheduleError(
            f"{key}: {len(values)} groups cannot share {layers} layers equally; "
            "give a number of values that divides model.layers"
        )
    return tuple(value for value in values for _ in range(layers // len(values)))


def head_strides(stride: int, heads: int, dilated_heads: int) -> tuple[int, ...]:
    """Strides of one layer's heads: the last `dilated_heads` take `stride`, the others 1."""
    return (1,) * (heads - dilated_heads) + (stride,) * dilated_heads


def build_schedule(
    stages: Mapping[str, StageTable],
    *,
    strides: Sequence[int],
    dilated_heads: int,
    layers: int,
    heads: int,
    warmup_fraction: float = 0.1,
    warmup_max: int = 10_000,
) -> Schedule:
    """Build the schedule of a model from a table of stages.

    Args:
        stages: the table of each stage, by its number as text.
        strides: stride of the dilated heads, one per group of layers, bottom to top.
        dilated_heads: how many heads of a layer are dilated (the last ones).
        layers, heads: of the model.
        warmup_fraction, warmup_max: the warm-up takes this part of a stage's steps, at most
            `warmup_max` of them.

    Raises:
        ScheduleError: naming the key that does not fit.
    """
    if not 0 <= dilated_heads <= heads:
        raise ScheduleError(
            f"schedule.dilated_heads={dilated_heads}: expected 0 to {heads} (model.heads)"
        )
    per_layer = by_layer(strides, layers, "schedule.strides")
    layer_strides = tuple(head_strides(s, heads, dilated_heads) for s in per_layer)
    built = []
    for text, table in sorted(stages.items(), key=lambda item: _number(item[0])):
        key = f"schedule.stages.{text}"
        built.append(
            Stage(
                number=_number(text),
                sequence=table.sequence,
                windows=by_layer(table.windows, layers, f"{key}.windows"),
                strides=layer_strides,
                lr=table.lr,
                batch=table.batch,
                steps=table.steps,
                warmup=min(warmup_max, round(table.steps * warmup_fraction)),
            )
        )
    return Schedule(tuple(built))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ScheduleError(f"schedule.stages: found the key {text!r}, expected a whole number")
    return int(text)
