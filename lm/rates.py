"""How fast a device works, measured here or by its maker's sheet, and a step's time from that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from lm.dropout import dropout
from lm.model import SYMBOLS, ModelConfig, visible_pairs
from lm.schedule import Stage

# Parts of a device's peak. The attention's is its limit for wide windows; narrow ones reach less.
DENSE_SHARE = 0.85
ATTENTION_SHARE = 0.70
HALF_WINDOW = 50
# Times that each byte kept for backward is read or written in a step beside matrix products.
PASSES = 6


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        matrix: floating-point operations of matrix products in the step's precision.
        matrix_float: the same in float32, which attention computes in.
        memory: bytes read or written.
        random: dropout's random numbers; 0: they cost nothing beside the memory.
        watts: of one device under load; NaN: not known.
        capacity: bytes of memory; 0: not known.
    """

    name: str
    matrix: float
    matrix_float: float
    memory: float
    random: float = 0.0
    watts: float = float("nan")
    capacity: float = 0.0


# Peaks without sparsity, memory rate and board power as NVIDIA's data sheets give them.
GPUS = {
    "A100": Rates("A100 SXM 80 GB", 312e12, 19.5e12, 2.04e12, watts=400, capacity=80e9),
    "H100": Rates("H100 SXM 80 GB", 989e12, 67e12, 3.35e12, watts=700, capacity=80e9),
    "H200": Rates("H200 SXM 141 GB", 989e12, 67e12, 4.8e12, watts=700, capacity=141e9),
    "RTX8000": Rates("Quadro RTX 8000", 130.5e12, 16.3e12, 0.672e12, watts=295, capacity=48e9),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step on one device, by kind of work."""

    dense: float
    attention: float
    dropout: float
    memory: float
    update: float

    @property
    def total(self) -> float:
        """All kinds, one after another."""
        return self.dense + self.attention + self.dropout + self.memory + self.update


def measured_rates(kind: str, name: str, dtype: torch.dtype) -> Rates:
    """The rates of this device, each the best of a few tries (about a second)."""
    size = 1024 if kind == "cpu" else 4096
    matrix = {}
    for each in {dtype, torch.float32}:
        a = torch.ones(size, size, dtype=each, device=kind)
        matrix[each] = 2 * size**3 / _seconds(partial(torch.mm, a, a), kind)
    x = torch.ones(2**23, device=kind)
    y = torch.empty_like(x)
    memory = 2 * x.nbytes / _seconds(lambda: y.copy_(x), kind)
    random = x[: 2**20].numel() / _seconds(lambda: dropout(x[: 2**20], 0.2, True), kind)
    return Rates(name, matrix[dtype], matrix[torch.float32], memory, random)


def _seconds(work: Callable[[], object], kind: str) -> float:
    """The median of the faster half of the tries."""
    tries = []
    for _ in range(12):
        start = time.perf_counter()
        work()
        if kind == "cuda":
            torch.cuda.synchronize()
        tries.append(time.perf_counter() - start)
    return statistics.median(sorted(tries)[:6])


def attention_share(window: int) -> float:
    """Part of the float32 peak that banded attention reaches at a window."""
    return ATTENTION_SHARE * (window + 1) / (window + 1 + HALF_WINDOW)


def step_time(
    model: ModelConfig,
    stage: Stage,
    rates: Rates,
    *,
    sequences: int,
    pieces: int,
    checkpointing: bool,
    parameters: int,
    kept: int,
    share: float | None = None,
) -> StepTime:
    """Estimate one optimiser step.

    Args:
        sequences, pieces: of a micro-batch, and micro-batches of the step, on one device.
        kept: bytes that autograd keeps of a micro-batch.
        share: part of the matrix peak that dense work reaches, instead of the calibrated one;
            attention's changes in proportion.
    """
    n = sequences * stage.sequence
    dense_share = DENSE_SHARE if share is None else share
    passes = 4 if checkpointing else 3
    m, f = model.width, model.feedforward
    blocks = 2 * n * model.layers * (4 * m * m + 2 * m * f)
    distances = 2 * m * m * sum(min(w, stage.sequence - 1) + 1 for w in stage.windows)
    head = 2 * n * SYMBOLS * m
    attention = 0.0
    for window, strides in zip(stage.windows, stage.strides, strict=True):
        pairs = sum(visible_pairs(stage.sequence, window, stride) for stride in strides)
        flops = 6 * (m // model.heads) * pairs * sequences
        rate = rates.matrix_float * attention_share(window) * dense_share / DENSE_SHARE
        attention += passes * flops / rate
    dropped = model.layers * n * (2 * m + f) * (passes - 2) + 2 * n * m + (stage.reach + 1) * m
    random = dropped / rates.random if model.dropout and rates.random else 0.0
    dense = (passes * blocks + 3 * head) / (rates.matrix * dense_share)
    dense += passes * distances / (rates.matrix_float * dense_share)
    return StepTime(
        dense=pieces * dense,
        attention=pieces * attention,
        dropout=pieces * random,
        memory=pieces * PASSES * kept * (passes - 2) / rates.memory,
        update=(7 + 2) * 4 * parameters / rates.memory,
    )
