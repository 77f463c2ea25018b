"""The evaluation protocols: which characters are scored, and what the model is shown for each.

A text of N bytes has the targets 1 .. N - 1: the byte at position p is read to predict the byte at
p + 1. docs/evaluation.md explains the protocols in plain words.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from lm.metrics import Score, character_nats
from lm.model import LanguageModel
from lm.stream import StreamState, receptive_field

CHUNK = 4096


def stream(
    model: LanguageModel,
    text: UInt8[np.ndarray, " bytes"],
    *,
    context: int = 0,
    chunk: int = CHUNK,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
) -> Score:
    """Score each target once, with all the context that the model can see.

    The text is cut on one absolute grid of chunks. Each of `world` processes takes consecutive
    chunks and first reads the receptive field before them, so any number of processes gives the
    same numbers to rounding.

    Args:
        model: in evaluation mode, on `device`.
        text: what is read.
        context: how many leading bytes are read but not scored; with 0 the first byte is not
            scored either, since nothing predicts it: there are len(text) - 1 targets.
        chunk: positions per forward pass.
        device: of the model.
        rank, world: which share of the chunks to score; add the scores up with `summed`.
    """
    first, last = max(context, 1) - 1, len(text) - 1  # positions whose prediction is scored
    chunks = range(first // chunk, -(-last // chunk))
    share = chunks[len(chunks) * rank // world : len(chunks) * (rank + 1) // world]
    score = Score()
    if not share:
        return score
    first = max(first, share.start * chunk)
    state = StreamState(model)
    begin = max(0, first - receptive_field(model)) // chunk * chunk
    for start in range(begin, share.stop * chunk, chunk):
        piece = _tokens(text[start : start + chunk + 1], device)
        logits = state.advance(piece[None, :-1], first - begin)
        if predicted := logits.shape[1]:
            nats = character_nats(logits[0], piece[-predicted:])
            score += Score(float(nats.sum()), predicted)
    return score


def _tokens(text: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(text).astype(np.int64)).to(device)
