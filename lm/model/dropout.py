"""Dropout of the dense part: torch's own on GPUs, and one for CPUs.

On a CPU torch draws the numbers behind a mask one after another on one thread, which is a sixth to
a third of a training step. Here 16 random bits decide on an element, four elements to a word of
numpy's generator SFC64, and the mask is kept for backward in one byte an element.

The mask is a function of one number from torch's generator and of the element's place: it is the
same on any number of threads, and again when gradient checkpointing recomputes it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor
from torch.autograd.function import once_differentiable

STEPS = 2**16  # values that the 16 bits of an element have
# Elements that are worked on at once: what lies between two operations should stay in the cache.
PIECE = 2**20


def dropout(x: Float[Tensor, "*places"], p: float, training: bool) -> Float[Tensor, "*places"]:
    """Each element is 0 with probability `p`, else divided by 1 - p; `x` itself if not training.

    On a CPU the probability is rounded to a multiple of 2^-16, and the factor is that of the
    rounded one, so that the mean stays.
    """
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return _Dropout.apply(x, p, draw_seed())


def plain_dropout(x: Float[Tensor, "*places"], p: float, seed: int) -> Float[Tensor, "*places"]:
    """The same in plain operations, for a seed as `draw_seed` gives it: the judge of the fast one.

    numpy's words are read as signed 16-bit numbers; the lowest p * 2^16 of them drop their element.
    """
    words = np.random.SFC64(seed).random_raw(math.ceil(x.numel() / 4))
    numbers = torch.from_numpy(words.view(np.int16).astype(np.int64))[: x.numel()] + STEPS // 2
    dropped = _dropped(p)
    return torch.where(numbers.view(x.shape) < dropped, 0.0, x * (STEPS / (STEPS - dropped)))


def draw_seed() -> int:
    """The next number of torch's generator."""
    return int(torch.randint(2**63 - 1, ()))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.factor = STEPS / (STEPS - _dropped(p))
        kept = _draw(x, p, seed)
        ctx.save_for_backward(kept)
        return _scale(x, kept, ctx.factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return _scale(gradient, kept, ctx.factor), None, None


def _dropped(p: float) -> int:
    """How many of an element's 2^16 values drop it; never all of them."""
    return min(round(p * STEPS), STEPS - 1)


def _draw(x: Tensor, p: float, seed: int) -> Int8[Tensor, " elements"]:
    """1 for each element that is kept, 0 for the others."""
    generator, lowest = np.random.SFC64(seed), _dropped(p) - STEPS // 2
    kept = torch.empty(x.numel(), dtype=torch.int8)
    for part in kept.split(PIECE):
        words = torch.from_numpy(generator.random_raw(math.ceil(part.numel() / 4)).view(np.int16))
        # In place: a comparison that makes booleans takes ten times as long.
        part.copy_(words[: part.numel()].ge_(lowest))
    return kept


def _scale(x: Tensor, kept: Int8[Tensor, " elements"], factor: float) -> Tensor:
    """`x` times `factor` where it is kept, else 0, in one pass over memory."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    zero = x.new_zeros(())
    parts = (tensor.view(-1).split(PIECE) for tensor in (x.contiguous(), kept, out))
    for source, mask, target in zip(*parts, strict=True):
        torch.addcmul(zero, source, mask.to(x.dtype), value=factor, out=target)
    return out
