"""Bytes of memory that a training step takes, by kind, by counting.

Nothing here is measured. The bytes are those of the tensors that autograd keeps for backward, as
lm/model/language_model.py makes them; a test holds them against what autograd really keeps.

Letters: N positions of a micro-batch, M model width, F feed-forward width, H heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lm.model.language_model import SYMBOLS, ModelConfig
from lm.schedule import Stage

FLOAT = 4
# The C library gives memory from this size on back at once; smaller pieces leave gaps, on a CPU as
# much as HEAP blocks of the model keep for backward in such pieces (docs/scaling.md).
RETURNED = 2**25
HEAP = 3


@dataclass(frozen=True)
class Memory:
    """Bytes on one device at the peak of a training step.

    Attributes:
        program: of the process before there is a model: Python, torch, the kernels' runtime.
        weights: float32, and under mixed precision the casts that autograd keeps.
        optimiser: AdamW's two moments.
        gradients: of the weights; in a step of one micro-batch they grow as activations shrink.
        activations: kept for backward outside the attention, and the largest gradients among them.
        attention: queries, keys, values, outputs and relative keys kept for backward.
        positions: the table of sines, and its copy after dropout.
        logits: of the micro-batch with their softmax.
        heap: on a CPU, freed pieces between tensors, which the C library keeps.
    """

    program: int = 0
    weights: int = 0
    optimiser: int = 0
    gradients: int = 0
    activations: int = 0
    attention: int = 0
    positions: int = 0
    logits: int = 0
    heap: int = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Kept:
    """Bytes that the forward pass keeps for backward, of one block or of what lies around them.

    `inner` is the part of the activations before and after GELU, the largest tensors of a block.
    """

    activations: int
    attention: int = 0
    inner: int = 0


def kept_by_block(
    model: ModelConfig, sequence: int, sequences: int, window: int, compute: int
) -> Kept:
    """What one block keeps. `compute`: bytes of a number in its matrix products, 4 or 2.

    Per position: two residual streams with their LayerNorms' statistics, each matrix product's
    input, GELU's input, and the dropout masks, a byte an element. Under mixed precision
    attention's output is kept in both precisions.
    """
    n, m, f = sequence * sequences, model.width, model.feedforward
    mixed = compute < FLOAT
    drop = model.dropout > 0
    inputs = m + (m if mixed else 0) + m + f  # of q, k and v; o; inner; outer
    dropped = (2 * m + f) if drop else 0
    per_position = 2 * (m * FLOAT + 2 * FLOAT) + compute * (inputs + f) + dropped
    distances = min(window, sequence - 1) + 1
    attention = n * FLOAT * (4 * m + model.heads) + FLOAT * m * distances
    return Kept(n * per_position, attention, 2 * n * f * compute)


def kept_around_blocks(model: ModelConfig, positions: int, compute: int) -> Kept:
    """What is kept of the embedding, the last LayerNorm and the head's input."""
    m = model.width
    per_position = 4 + compute * m  # the tokens, the head's input
    per_position += 2 * m if model.dropout > 0 else 0
    if model.final_norm:
        per_position += m * FLOAT + 2 * FLOAT
    return Kept(positions * per_position)


def kept_of_loss(positions: int) -> int:
    """The log-softmax of the logits, the targets; and twice the logits while it is made."""
    return positions * (3 * SYMBOLS * FLOAT + 8)


def gradients_in_block(model: ModelConfig, positions: int, compute: int) -> int:
    """The largest set of gradients alive at once in a block beyond what it keeps.

    That is behind the feed-forward's outer product: the gradients of the residual stream, and of
    the hidden layer before and after its dropout, less what the outer product no longer keeps.
    """
    m, f = model.width, model.feedforward
    return positions * (2 * m * FLOAT + f * compute)


def matrix_parameters(model: ModelConfig) -> int:
    """Weights that enter matrix products in the precision of the computation."""
    m, f = model.width, model.feedforward
    return model.layers * (4 * m * m + 2 * m * f) + SYMBOLS * m


def step_memory(
    model: ModelConfig,
    stage: Stage,
    *,
    parameters: int,
    sequences: int,
    compute: int,
    checkpointing: bool,
    program: int = 0,
    heap: bool = False,
) -> Memory:
    """The memory of a training step of `sequences` sequences at a time.

    Args:
        parameters: number of weights.
        compute: bytes of a number in matrix products: 4, or 2 under mixed precision.
        checkpointing: only the blocks' inputs are kept, and one block at a time is recomputed.
        program: bytes that the process takes without a model.
        heap: tensors come from the C library, as on a CPU.
    """
    n = stage.sequence * sequences
    blocks = [kept_by_block(model, stage.sequence, sequences, w, compute) for w in stage.windows]
    around = kept_around_blocks(model, n, compute)
    largest = max(blocks, key=lambda kept: kept.activations + kept.attention)
    passing = gradients_in_block(model, n, compute)
    activations = around.activations + passing
    if checkpointing:
        activations += model.layers * n * model.width * FLOAT + largest.activations
        attention = largest.attention
    else:
        activations += sum(kept.activations for kept in blocks)
        attention = sum(kept.attention for kept in blocks)
    casts = matrix_parameters(model) * compute if compute < FLOAT else 0
    if checkpointing:
        casts //= model.layers
    gaps = 0
    if heap and n * model.width * FLOAT < RETURNED:
        gaps += HEAP * (largest.attention + largest.activations - largest.inner)
    if heap and n * model.feedforward * compute < RETURNED:
        gaps += HEAP * largest.inner
    reach = stage.reach if model.position_unit == "characters" else max(stage.windows)
    table = (reach + 1) * model.width * FLOAT
    return Memory(
        program=program,
        weights=parameters * FLOAT + casts,
        optimiser=2 * parameters * FLOAT,
        gradients=parameters * FLOAT,
        activations=activations,
        attention=attention,
        positions=table * (2 if model.dropout > 0 else 1),
        logits=kept_of_loss(n),
        heap=gaps,
    )
