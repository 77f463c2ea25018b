"""Curves that explain a number of bits per character, as CSV and as a picture.

The first tells how well characters were predicted by how much context they were given. The second
scores the same characters again and again, each time with more context.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8

from lm.machine.files import replacing, write_text
from lm.measuring.bpc import NATS_PER_BIT, Score, Tally, summed
from lm.measuring.protocols import Window, first_scored, score_windows, share
from lm.model.language_model import LanguageModel


@dataclass(frozen=True)
class Point:
    """Bits per character of `count` characters that were given `context` or more of context.

    `until` is the first context that is no longer meant.
    """

    context: int
    until: int
    count: int
    bpc: float


def context_edges(longest: int, per_octave: int = 4) -> list[int]:
    """Rising contexts from 1 to `longest`, each about 2^(1/per_octave) times the one before."""
    steps = int(np.ceil(np.log2(max(longest, 1)) * per_octave)) + 1
    return sorted({int(2 ** (step / per_octave)) for step in range(steps)})


def curve_of(tally: Tally) -> list[Point]:
    """The tally's curve; bins without a character are left out."""
    untils = [*(int(edge) for edge in tally.edges[1:]), 0]
    return [
        Point(int(edge), until, int(count), float(nats) / NATS_PER_BIT / int(count))
        for edge, until, count, nats in zip(
            tally.edges, untils, tally.curve_counts, tally.curve_nats, strict=True
        )
        if count
    ]


def context_curve(
    model: LanguageModel,
    text: UInt8[np.ndarray, " bytes"],
    contexts: Sequence[int],
    *,
    context: int,
    blocks: int,
    block: int,
    left_out: int | None = None,
    chunk: int,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
) -> list[Point]:
    """Score the same characters with each of `contexts` before them.

    The characters are `blocks` runs of `block` characters, spread evenly over those that have the
    longest context before them. Of a run, the first character is given exactly the context, each
    later one a character more.

    Raises:
        ValueError: if the text is too short for the longest context.
    """
    ordered = sorted(set(contexts))
    lowest = max(ordered[-1] - 1, first_scored(context))
    room = len(text) - 1 - block - lowest
    if room < 0:
        raise ValueError(
            f"a context of {ordered[-1]} and a block of {block} need {ordered[-1] + block} bytes, "
            f"the text has {len(text)}"
        )
    firsts = sorted({lowest + room * n // max(blocks - 1, 1) for n in range(blocks)})
    mine = share(len(firsts), rank, world)
    points = []
    for given in ordered:
        windows = [Window(f - given + 1, f + block, f) for f in firsts[mine.start : mine.stop]]
        tally = Tally(left_out)
        score_windows(model, text, windows, tally, chunk=chunk, device=device)
        score: Score = summed(tally.score)
        points.append(Point(given, given + block, score.count, score.bpc))
    return points


def write_csv(path: Path, points: Sequence[Point]) -> None:
    """One row per point: context from, until (0: no end), characters, bits per character."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["context_from", "context_until", "characters", "bpc"])
    for point in points:
        writer.writerow([point.context, point.until, point.count, f"{point.bpc:.6f}"])
    write_text(path, text.getvalue())


def write_png(path: Path, points: Sequence[Point], title: str) -> None:
    """Draw the points over a logarithmic axis of contexts."""
    # Without pyplot there is no window system to look for, and no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([p.context for p in points], [p.bpc for p in points], marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("characters of context")
    axes.set_ylabel("bits per character")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    with replacing(path) as file:
        FigureCanvasAgg(figure).print_png(file)
