"""What protocol `stream` costs beside plain forward passes.

The command is `python -m lm.measuring.stream_cost NAME`.

Both read the same characters of the test split in turns, round after round, so that whatever slows
the machine slows them alike. A plain pass reads one sequence of the stage's length from nothing;
the stream also sees what lies before it, scores each character, and counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from data.corpus import DataError
from kernels import BackendError
from lm.config.command_schemas import ComputeConfig, EvalConfig, merged_data
from lm.config.corpus import corpus_of
from lm.config.schema import UserError
from lm.inference.trained_model import compute_device, open_model, open_source
from lm.measuring.protocols import CHUNK, stream
from lm.model.checkpoint import stage_of
from lm.model.language_model import LanguageModel


@dataclass(frozen=True)
class Comparison:
    """Median seconds for the same number of characters, each way."""

    characters: int
    stream: float
    plain: float

    @property
    def ratio(self) -> float:
        """Time of the stream as a multiple of the plain passes'."""
        return self.stream / self.plain


def compare(
    model: LanguageModel, text: np.ndarray, sequence: int, *, chunk: int, rounds: int
) -> Comparison:
    """Time both ways over `text`, a whole number of sequences, `rounds` times in turns.

    Args:
        model: in evaluation mode, on the CPU.
        text: bytes; its last one is only predicted.
        sequence: positions of a plain pass.
        chunk: positions of one pass of the stream.
        rounds: timed turns, after one that is not.
    """
    tokens = torch.from_numpy(text[:-1].astype(np.int64)).split(sequence)
    seconds: dict[str, list[float]] = {"stream": [], "plain": []}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            start = time.perf_counter()
            stream(model, text, chunk=chunk)
            middle = time.perf_counter()
            for piece in tokens:
                model(piece[None])
            seconds["stream"].append(middle - start)
            seconds["plain"].append(time.perf_counter() - middle)
    medians = {way: statistics.median(times[1:]) for way, times in seconds.items()}
    return Comparison(len(text) - 1, medians["stream"], medians["plain"])


def measure(config: EvalConfig, characters: int, rounds: int) -> str:
    """The comparison for a run's model, as a line.

    Raises:
        UserError, DataError: if the run or its corpus cannot be opened, or is too short.
    """
    device = compute_device(config.trainer)
    source = open_source(config)
    corpus = corpus_of(merged_data(source.checkpoint["config"]["data"], config.data))
    text = corpus.splits["test"].read()
    sequence = stage_of(source.checkpoint).sequence
    whole = min(characters, len(text) - 1) // sequence * sequence
    if not whole:
        raise UserError(
            f"--characters {characters:,}: found room for no sequence of stage "
            f"{source.checkpoint['stage']['number']}, {sequence:,} characters, in a test split of "
            f"{len(text):,} bytes; give at least {sequence:,}, or a run with shorter sequences"
        )
    model = open_model(source, device, config.backend)
    found = compare(model, text[: whole + 1], sequence, chunk=config.chunk, rounds=rounds)
    return (
        f"{source.label}: {found.characters:,} characters, {torch.get_num_threads()} threads: "
        f"stream {found.stream:.2f} s, plain passes of {sequence:,} {found.plain:.2f} s, "
        f"ratio {found.ratio:.2f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m lm.measuring.stream_cost", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("run", help="name of a finished run")
    parser.add_argument("--stage", type=int, help="a finished stage, if not the highest")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--characters", type=int, default=50_000, help="at most (default: 50000)")
    parser.add_argument("--rounds", type=int, default=5, help="timed turns (default: 5)")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="of the stream")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    config = EvalConfig(
        run=options.run,
        stage=options.stage,
        runs_dir=options.runs_dir,
        chunk=options.chunk,
        trainer=ComputeConfig(accelerator="cpu", threads=options.threads),
    )
    try:
        line = measure(config, options.characters, options.rounds)
    except (UserError, DataError, BackendError) as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
