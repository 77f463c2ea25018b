"""The backends beside what they are meant to reach on a CPU: python -m kernels.bench.targets."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.bench.cases import (
    CLOCKS,
    MM_FLOPS,
    PASSES,
    Case,
    Timed,
    case_runs,
    matrix_product,
    say,
    time_in_turns,
)
from kernels.bench.memory import measure_memory

_DESCRIPTION = """\
What the tvm backend, and in the last group chunks, reaches beside what it is meant to, with 8 heads
of 64 and relative terms:

speed    useful operations per second (table.py says what counts) as a share of torch.mm's
strides  time per visible pair of heads of stride 4, as a multiple of heads of stride 1
threads  time on one thread over time on two, also with a single head, beside torch.mm's
memory   beyond inputs, output and gradients, as a share of 3 k + 2 r forward, 8 k + 4 r both
chunks   of the chunks backend: strides as above, and memory at 8192, 2048 over that at 8192, 512

Runs that are compared take turns. On a machine that does other things too, only `--clock cpu` tells
something, on one thread, for speed and strides.
"""
_NO_MEMORY = "memory cannot be measured here: there is no /proc/self/clear_refs"
GROUPS = ("speed", "strides", "threads", "memory", "chunks")
# (n, window, dropout): the shares of torch.mm wanted in forward, and in forward and backward.
SPEED = {
    (2048, 32, 0.0): (0.35, 0.30),
    (2048, 128, 0.0): (0.60, 0.50),
    (2048, 512, 0.0): (0.80, 0.70),
    (2048, 512, 0.2): (0.75, 0.65),
    (8192, 512, 0.0): (0.80, 0.70),
    (8192, 512, 0.2): (0.75, 0.65),
    (23040, 2048, 0.0): (0.80, 0.70),
    (23040, 2048, 0.2): (0.75, 0.65),
}
STRIDES = ((8192, 512), (8192, 2048))
CHUNKS_STRIDES = ((8192, 32), (8192, 128), *STRIDES)
CHUNKS_MEMORY = (8192, 2048, 512)  # n, the wide window and the narrow one
THREADS = ((8192, 512, 8), (8192, 512, 1), (23040, 2048, 1))  # n, window, heads
MEMORY = ((2048, 32), (2048, 512), (8192, 512), (2048, 8192), (23040, 2048))


@dataclass(frozen=True)
class Figure:
    """One thing measured. `most`: whether `wanted` is an upper limit."""

    group: str
    what: str
    passes: str
    measured: float
    wanted: float
    most: bool

    @property
    def met(self) -> bool:
        """Whether the measured number is on the right side of the wanted one."""
        return self.measured <= self.wanted if self.most else self.measured >= self.wanted


def make_case(
    sequence: int,
    window: int,
    *,
    backend: str = "tvm",
    heads: int = 8,
    stride: int = 1,
    dropout: float = 0.0,
) -> Case:
    """Return a case with relative terms and heads of 64."""
    return Case(backend, sequence, window, 1, heads, 64, (stride,) * heads, dropout, True)


def speed(options: argparse.Namespace) -> Iterator[Figure]:
    """Shares of torch.mm's speed."""
    for (sequence, window, dropout), wanted in SPEED.items():
        case = make_case(sequence, window, dropout=dropout)
        runs: dict[Any, Timed] = {"mm": matrix_product(options.threads)}
        runs |= case_runs([case], options.threads)
        seconds = time_in_turns(runs, options.repetitions, options.clock, options.seconds)
        peak = MM_FLOPS / seconds["mm"]
        what = f"{sequence}, {window}" + (f", dropout {dropout}" if dropout else "")
        for passes, share in zip(PASSES, wanted, strict=True):
            measured = case.flops(passes) / seconds[case, passes] / peak
            yield Figure("speed", what, passes, measured, share, most=False)


def strides(options: argparse.Namespace) -> Iterator[Figure]:
    """Strided heads beside plain ones, per visible pair."""
    yield from _strides("strides", STRIDES, "tvm", options)


def _strides(
    group: str, sizes: Sequence[tuple[int, int]], backend: str, options: argparse.Namespace
) -> Iterator[Figure]:
    for sequence, window in sizes:
        plain, strided = (
            make_case(sequence, window, backend=backend, stride=stride) for stride in (1, 4)
        )
        runs = case_runs([plain, strided], options.threads)
        seconds = time_in_turns(runs, options.repetitions, options.clock, options.seconds)
        for passes in PASSES:
            each = [seconds[case, passes] / case.flops(passes) for case in (strided, plain)]
            what = f"{sequence}, {window}"
            yield Figure(group, what, passes, each[0] / each[1], 1.1, most=True)


def threads(options: argparse.Namespace) -> Iterator[Figure]:
    """Two threads beside one; the clock is on the wall."""
    for sequence, window, heads in THREADS:
        case = make_case(sequence, window, heads=heads)
        by_count = {count: case_runs([case], count) for count in (1, 2)}
        runs: dict[Any, Timed] = {
            (count, p): run for count, run_of in by_count.items() for (_, p), run in run_of.items()
        }
        runs |= {(count, "mm"): matrix_product(count) for count in (1, 2)}
        seconds = time_in_turns(runs, options.repetitions, "wall", options.seconds)
        what = f"{sequence}, {window}, " + ("1 head" if heads == 1 else f"{heads} heads")
        for passes in PASSES:
            gain = seconds[1, passes] / seconds[2, passes]
            yield Figure("threads", what, passes, gain, 1.8, most=False)
        say(f"         torch.mm itself: {seconds[1, 'mm'] / seconds[2, 'mm']:.2f}")


def memory(options: argparse.Namespace) -> Iterator[Figure]:
    """Peak memory beside copies of k and r."""
    for sequence, window in MEMORY:
        case = make_case(sequence, window, dropout=0.2)
        limits = {
            "forward": 3 * case.key_bytes + 2 * case.relative_bytes,
            "both": 8 * case.key_bytes + 4 * case.relative_bytes,
        }
        for passes in PASSES:
            figures = measure_memory(case, passes, options.threads)
            if figures is None:
                say(_NO_MEMORY)
                return
            share = figures["temporary"] / limits[passes]
            yield Figure("memory", f"{sequence}, {window}", passes, share, 1.0, most=True)


def chunks(options: argparse.Namespace) -> Iterator[Figure]:
    """Of the chunks backend: strided heads beside plain ones, and how memory grows with windows."""
    yield from _strides("chunks", CHUNKS_STRIDES, "chunks", options)
    sequence, *windows = CHUNKS_MEMORY
    wide, narrow = (make_case(sequence, window, backend="chunks") for window in windows)
    for passes in PASSES:
        peaks = [measure_memory(case, passes, options.threads) for case in (wide, narrow)]
        if peaks[0] is None or peaks[1] is None:
            say(_NO_MEMORY)
            return
        growth = peaks[0]["temporary"] / peaks[1]["temporary"]
        what = f"{sequence}, {windows[0]} / {windows[1]}, memory"
        yield Figure("chunks", what, passes, growth, 1.2, most=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench.targets",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)} (all)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=5, help="timed turns (5)")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="shortest time for one group of turns (5)"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    options = parser.parse_args(arguments)
    groups = options.groups or GROUPS
    if unknown := set(groups) - set(GROUPS):
        raise SystemExit(f"there is no group {unknown.pop()!r}; choose of {', '.join(GROUPS)}")
    say(f"torch {torch.__version__}, {options.threads} threads, {options.clock} clock")
    say(f"{'':<9}{'n, window':<26}{'passes':<9}{'measured':>9}{'wanted':>9}")
    measure = dict(zip(GROUPS, (speed, strides, threads, memory, chunks), strict=True))
    figures = []
    for group in groups:
        for figure in measure[group](options):
            figures.append({**asdict(figure), "met": figure.met, "threads": options.threads})
            say(
                f"{figure.group:<9}{figure.what:<26}{figure.passes:<9}{figure.measured:>9.2f}"
                f"{'<=' if figure.most else '>=':>4}{figure.wanted:>5.2f}"
                f"{'' if figure.met else '  missed'}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
