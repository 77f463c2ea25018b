"""The evaluation protocols: which characters are scored, and what the model is shown for each.

The byte at position p of a text is read to predict the byte at p + 1, so a text of N bytes has
N - 1 targets. The leading `context` bytes of a text may be for reading only: then the targets are
those after them. docs/evaluation.md explains the protocols in plain words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from lm.measuring.bpc import Score, Tally, character_nats
from lm.model.language_model import LanguageModel
from lm.model.stream import StreamState, receptive_field

CHUNK = 4096


def first_scored(context: int) -> int:
    """The first position whose prediction is scored."""
    return max(context, 1) - 1


def targets_of(size: int, context: int) -> int:
    """How many targets a text of `size` bytes has behind its `context`."""
    return max(0, size - max(context, 1))


def share(items: int, rank: int, world: int) -> range:
    """The consecutive part of `items` things that process `rank` of `world` works on."""
    return range(items * rank // world, items * (rank + 1) // world)


def stream(
    model: LanguageModel,
    text: UInt8[np.ndarray, " bytes"],
    *,
    context: int = 0,
    chunk: int = CHUNK,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    tally: Tally | None = None,
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
        tally: what to count with, if more than the score is wanted.
    """
    tally = Tally() if tally is None else tally
    first, last = first_scored(context), len(text) - 1
    origin = first // chunk
    part = share(-(-last // chunk) - origin, rank, world)
    if not part:
        return tally.score
    stop = min(last, (origin + part.stop) * chunk)
    first = max(first, (origin + part.start) * chunk)
    state = StreamState(model)
    begin = max(0, first - receptive_field(model)) // chunk * chunk
    for start in range(begin, stop, chunk):
        piece = _tokens(text[start : min(start + chunk, stop) + 1], device)[None]
        logits = state.advance(piece[:, :-1], first - begin)
        if predicted := logits.shape[1]:
            targets = piece[:, -predicted:]
            end = start + piece.shape[1]
            tally.add(character_nats(logits, targets), targets, range(end - predicted, end))
    return tally.score


@dataclass(frozen=True)
class Window:
    """The model reads positions start .. stop - 1; predictions from `first` on are scored."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Grid:
    """Overlapping windows over a text, in which each target is scored once.

    Window i scores the `step` targets after those of window i - 1, so that each of them is given
    at least window - step + 1 characters. Without context, the first window scores all of its own
    and the last one is as long as the text allows. Behind a context every window reads `window`
    positions, if the context has so many.

    Attributes:
        size: bytes of the text, its context included.
        context: leading bytes that are read but not scored.
        window: positions that a window reads.
        step: positions between two windows.
        full_only: the paper's protocol: only full windows count, and only the last `step` of each.
    """

    size: int
    context: int
    window: int
    step: int
    full_only: bool = False

    def __len__(self) -> int:
        """How many windows there are, before `full_only`."""
        targets = targets_of(self.size, self.context)
        if not self.context:
            targets = max(targets - self.window, 0) + min(targets, self.step)
        return (targets + self.step - 1) // self.step

    def windows(self, indices: range) -> Iterator[Window]:
        """The windows with these numbers; with `full_only`, those of them that count."""
        for index in indices:
            window = self._window(index)
            if not self.full_only:
                yield window
            elif window.stop - window.start == self.window:
                first = window.stop - self.step
                if first >= window.first:
                    yield Window(window.start, window.stop, first)

    def _window(self, index: int) -> Window:
        last = self.size - 1
        if self.context:
            first = first_scored(self.context) + index * self.step
            stop = min(first + self.step, last)
            return Window(max(0, stop - self.window), stop, first)
        start = index * self.step
        stop = min(start + self.window, last)
        return Window(start, stop, start + self.window - self.step if index else 0)


def score_windows(
    model: LanguageModel,
    text: UInt8[np.ndarray, " bytes"],
    windows: Iterable[Window],
    tally: Tally,
    *,
    batch: int | None = None,
    chunk: int = CHUNK,
    device: torch.device | str = "cpu",
) -> Score:
    """Score windows, several of one shape at a time; each layer skips what no scored one can see.

    Args:
        model: in evaluation mode, on `device`.
        text: what the windows lie in.
        windows: from `Grid.windows`, for example.
        tally: what to count with.
        batch: windows per forward pass; None: as many as keep within `chunk` positions.
        chunk: positions of a window per forward pass.
        device: of the model.
    """
    state, field = StreamState(model), receptive_field(model)
    for (given, length), alike in groupby(windows, lambda w: (w.first - w.start, w.stop - w.first)):
        seen = min(given, field)
        rows = batch or max(1, chunk // (seen + length))
        while group := list(islice(alike, rows)):
            state.restart(len(group))
            pieces = [text[w.first - seen : w.stop + 1] for w in group]
            tokens = _tokens(np.stack(pieces), device)
            _score_rows(state, tokens, seen, given, chunk, tally)
    return tally.score


def _score_rows(
    state: StreamState,
    tokens: Int64[Tensor, "batch bytes"],
    first: int,
    given: int,
    chunk: int,
    tally: Tally,
) -> None:
    """Score the targets of `tokens` after position `first`, which has `given` positions before."""
    last = tokens.shape[1] - 1
    for start in range(0, last, chunk):
        stop = min(start + chunk, last)
        logits = state.advance(tokens[:, start:stop], first)
        if predicted := logits.shape[1]:
            targets = tokens[:, stop + 1 - predicted : stop + 1]
            end = given - first + stop + 1
            tally.add(character_nats(logits, targets), targets, range(end - predicted, end))


def _tokens(text: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(text.astype(np.int64)).to(device)
