"""Floating-point operations of a forward pass, by counting; a multiply-add counts as 2."""

from __future__ import annotations

from lm.model.language_model import SYMBOLS, ModelConfig
from lm.schedule import Stage


def flops_per_character(model: ModelConfig, stage: Stage) -> float:
    """Of one forward pass per character; a training step costs three times this.

    Four times with gradient checkpointing. Attention's visible pairs are counted exactly for the
    stage's sequence; the projection of r is per distance, and shared by the characters.
    """
    dense = model.layers * block_flops(model) + 2 * SYMBOLS * model.width
    whole = attention_flops(model, stage) + distance_flops(model, stage)
    return dense + whole / stage.sequence


def block_flops(model: ModelConfig) -> float:
    """Of a block's matrix products per position, forward, without attention's pairs."""
    return 2 * (4 * model.width**2 + 2 * model.width * model.feedforward)


def pair_flops(model: ModelConfig) -> float:
    """Of one visible pair of one head: content, relative term, weighted sum."""
    return 6 * (model.width // model.heads)


def attention_flops(model: ModelConfig, stage: Stage) -> float:
    """Of the visible pairs of one sequence in a forward pass; the projection of r is not in it."""
    pairs = sum(
        visible_pairs(stage.sequence, window, stride)
        for window, strides in zip(stage.windows, stage.strides, strict=True)
        for stride in strides
    )
    return pair_flops(model) * pairs


def distance_flops(model: ModelConfig, stage: Stage) -> float:
    """Of the projection of r in a forward pass, in float32, however many sequences there are."""
    distances = sum(min(window, stage.sequence - 1) + 1 for window in stage.windows)
    return 2 * model.width**2 * distances


def visible_pairs(positions: int, window: int, stride: int) -> int:
    """Number of (query, key) pairs that one head sees in a sequence."""
    total = 0
    for residue in range(min(stride, positions)):
        length = (positions - residue + stride - 1) // stride
        full = max(length - window, 0)
        ramp = min(window, length)
        total += full * (window + 1) + ramp * (ramp + 1) // 2
    return total
