"""Time and memory of the attention backends: python -m kernels.bench --help."""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kernels import Band
from kernels.backends import FASTEST_FIRST, why_not
from kernels.bench.cases import (
    CLOCKS,
    MM_FLOPS,
    Case,
    Timed,
    case_runs,
    matrix_product,
    say,
    time_in_turns,
)
from kernels.bench.memory import measure_memory
from kernels.call import make_call

_DESCRIPTION = """\
Time and memory of banded attention, for each pair n,w of sequence length and window.

All backends and passes of one pair are timed in turns, round after round, together with torch.mm
of two 1024 x 1024 matrices, so that whatever slows the machine slows them alike; the figures are
medians. Blocks of memory below 32 MiB are kept when they are freed, so that no pass waits for the
system to hand them out. Useful work counts the visible (query, key) pairs alone: 4 dim operations
each (6 with relative terms), and three times that for forward and backward together. "of mm" is the
useful work per second as a share of torch.mm's in the same rounds.

Memory is the peak of resident memory while one pass runs, beyond the inputs, in a fresh process
for each case; "temporary" is what is left of it without the output and the gradients. Scratch that
a thread of the tvm backend keeps from call to call, some 2 MiB, is counted for helpers alone.

The row `sdpa` is a peer: blocks of the window's length through scaled_dot_product_attention with
a boolean mask. It has no relative terms, dropout or strides, and appears where none is asked for.
"""


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sizes", nargs="*", default=["2048,32", "2048,512", "8192,512"], metavar="n,w",
        help="sequence length and window, e.g. 8192,2048 (default: 2048,32 2048,512 8192,512)",
    )  # fmt: skip
    parser.add_argument(
        "--backends", nargs="+", choices=(*FASTEST_FIRST, "sdpa"),
        help="default: tvm where it can run, chunks, and sdpa where it applies",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument(
        "--strides", type=int, nargs="+", default=[1], help="one for all heads, or one per head"
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--relative", action=argparse.BooleanOptionalAction, default=True,
        help="with the relative terms r and its biases",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=7, help="timed turns (default: 7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall",
        help="cpu: this process's processor time, for one thread on a machine that others use too",
    )  # fmt: skip
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    return parser.parse_args(arguments)


def _cases(options: argparse.Namespace, size: str) -> list[Case]:
    try:
        sequence, window = (int(number) for number in size.split(","))
    except ValueError:
        raise SystemExit(f"the size {size!r} is not n,w: two integers, e.g. 8192,512") from None
    strides = tuple(options.strides)
    strides = strides * options.heads if len(strides) == 1 else strides
    shape = (sequence, window, options.batch, options.heads, options.dim, strides)
    plain = not options.relative and options.dropout == 0 and set(strides) == {1}
    names = options.backends or ["tvm", "chunks", *(["sdpa"] if plain else [])]
    cases = [Case(name, *shape, options.dropout, options.relative) for name in names]
    return [case for case in cases if _runs(case, plain, asked=options.backends is not None)]


def _runs(case: Case, plain: bool, asked: bool) -> bool:
    if case.backend == "sdpa":
        reason = None if plain else "it has no relative terms, dropout or strides"
    else:
        probe = torch.zeros(1, 1, case.heads, case.dim)
        reason = why_not(case.backend, make_call(probe, probe, probe, Band(0, case.strides)))
    if reason is not None:
        text = f"{case.backend} cannot run here: {reason}"
        if asked:
            raise SystemExit(text)
        say(text)
    return reason is None


def _rows(options: argparse.Namespace, cases: list[Case]) -> list[dict[str, Any]]:
    runs = case_runs(cases, options.threads)
    every: dict[Any, Timed] = {"mm": matrix_product(options.threads), **runs}
    seconds_of = time_in_turns(every, options.repetitions, options.clock)
    peak = MM_FLOPS / seconds_of["mm"]
    rows = []
    for case, passes in runs:
        seconds = seconds_of[case, passes]
        rate = case.flops(passes) / seconds
        memory = measure_memory(case, passes, options.threads) if options.memory else None
        rows.append(
            {
                **asdict(case),
                "passes": passes,
                "threads": options.threads,
                "clock": options.clock,
                "milliseconds": seconds * 1e3,
                "gflops": rate / 1e9,
                "mm_gflops": peak / 1e9,
                "of_mm": rate / peak,
                **(memory or {}),
            }
        )
    return rows


def _format(row: dict[str, Any]) -> str:
    memory = [
        f"{row[key] / 2**20:10.1f}" if key in row else f"{'-':>10}"
        for key in ("beyond_inputs", "temporary")
    ]
    return (
        f"{row['sequence']:>7}{row['window']:>7}  {row['backend']:<8}{row['passes']:<9}"
        f"{row['milliseconds']:>9.1f}{row['gflops']:>9.1f}{row['of_mm']:>8.2f}"
        f"{memory[0]}{memory[1]}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    options = _parse(arguments)
    say(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, "
        f"{options.threads} threads, {options.clock} clock, batch {options.batch}, "
        f"{options.heads} heads of {options.dim}, strides {options.strides}, "
        f"dropout {options.dropout}, relative {'on' if options.relative else 'off'}"
    )
    say(
        f"{'n':>7}{'w':>7}  {'backend':<8}{'passes':<9}{'ms':>9}{'GFLOP/s':>9}{'of mm':>8}"
        f"{'MiB':>10}{'temporary':>10}"
    )
    rows = []
    for size in options.sizes:
        for row in _rows(options, _cases(options, size)):
            say(_format(row))
            rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
