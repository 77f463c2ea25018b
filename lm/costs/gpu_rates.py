"""What a GPU's data sheet says, and the time of a training step that follows from it.

For the device at hand `lm.plan.calibration` measures; for others there are only these peaks, times
the shares of them that work of this kind is assumed to reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from lm.costs.flops import block_flops, distance_flops, pair_flops, visible_pairs
from lm.costs.memory import Memory
from lm.model.language_model import SYMBOLS, ModelConfig
from lm.schedule import Stage

# Parts of a device's peak. The attention's is its limit for wide windows; narrow ones reach less.
DENSE_SHARE = 0.4
ATTENTION_SHARE = 0.3
HALF_WINDOW = 50
# Times that each byte kept for backward is read or written in a step beside matrix products.
PASSES = 6
# Reads and writes of an update: AdamW reads four numbers and writes three, clipping has two more.
UPDATE = 9


@dataclass(frozen=True)
class Cut:
    """How one device works through its part of a step.

    Attributes:
        sequences: of a micro-batch. pieces: micro-batches that are accumulated.
        checkpointing: blocks are computed again for backward.
    """

    sequences: int
    pieces: int
    checkpointing: bool


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step on one device, by kind of work, one after another.

    Attributes:
        dense: all that is done per character, and the projection of r.
        attention: the visible pairs. memory: reading, writing or getting memory beside that.
        update: clipping and the optimiser.
    """

    dense: float
    attention: float
    memory: float
    update: float

    @property
    def total(self) -> float:
        """All kinds together."""
        return self.dense + self.attention + self.memory + self.update


@dataclass(frozen=True)
class Rates:
    """What a device does in a second.

    Attributes:
        matrix: floating-point operations of matrix products in 16 bits.
        matrix_float: the same in float32, which attention computes in.
        memory: bytes read or written.
        watts: of one device under load. capacity: bytes of memory.
        share: part of the matrix peak that dense work reaches; attention's changes in proportion.
    """

    name: str
    matrix: float
    matrix_float: float
    memory: float
    watts: float
    capacity: float
    share: float = DENSE_SHARE

    def step_time(self, model: ModelConfig, stage: Stage, cut: Cut, memory: Memory) -> StepTime:
        """Estimate one optimiser step; transfers between devices are not in it."""
        passes = 4 if cut.checkpointing else 3
        n, m = cut.sequences * stage.sequence, model.width
        blocks = n * block_flops(model) * model.layers
        dense = (passes * blocks + 3 * 2 * n * SYMBOLS * m) / (self.matrix * self.share)
        dense += passes * distance_flops(model, stage) / (self.matrix_float * self.share)
        attention = 0.0
        for window, strides in zip(stage.windows, stage.strides, strict=True):
            pairs = sum(visible_pairs(stage.sequence, window, s) for s in strides)
            reached = ATTENTION_SHARE * (window + 1) / (window + 1 + HALF_WINDOW)
            reached *= self.share / DENSE_SHARE
            flops = pair_flops(model) * pairs * cut.sequences
            attention += passes * flops / (self.matrix_float * reached)
        kept = memory.activations + memory.attention + memory.logits
        return StepTime(
            dense=cut.pieces * dense,
            attention=cut.pieces * attention,
            memory=cut.pieces * PASSES * kept / self.memory,
            update=UPDATE * memory.weights / self.memory,
        )


# Peaks without sparsity, memory rate and board power as NVIDIA's data sheets give them.
GPUS = {
    "A100": Rates("A100 SXM 80 GB", 312e12, 19.5e12, 2.04e12, 400, 80e9),
    "H100": Rates("H100 SXM 80 GB", 989e12, 67e12, 3.35e12, 700, 80e9),
    "H200": Rates("H200 SXM 141 GB", 989e12, 67e12, 4.8e12, 700, 141e9),
    "RTX8000": Rates("Quadro RTX 8000", 130.5e12, 16.3e12, 0.672e12, 295, 48e9),
}
