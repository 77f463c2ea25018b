"""Time and memory of the attention backends: python -m kernels.bench --help."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kernels import Band, Relative, banded_attention
from kernels.backends import FASTEST_FIRST, why_not
from kernels.call import make_call

_DESCRIPTION = """\
Time and memory of banded attention, for each pair n,w of sequence length and window.

All backends and passes of one pair are timed in turns, round after round, together with torch.mm
of two 1024 x 1024 matrices, so that whatever slows the machine slows them alike; the figures are
medians. Useful work counts the visible (query, key) pairs alone: 4 dim operations each (6 with
relative terms), and three times that for forward and backward together. "of mm" is the useful
work per second as a share of torch.mm's in the same rounds.

Memory is the peak of resident memory while one pass runs, beyond the inputs, in a fresh process
for each case; "temporary" is what is left of it without the output and the gradients.

The row `sdpa` is a peer: blocks of the window's length through scaled_dot_product_attention with
a boolean mask. It has no relative terms, dropout or strides, and appears where none is asked for.
"""
_PASSES = ("forward", "both")


@dataclass(frozen=True)
class Case:
    """What is run: a backend (or `sdpa`) and the shape of its inputs."""

    backend: str
    sequence: int
    window: int
    batch: int
    heads: int
    dim: int
    strides: tuple[int, ...]
    dropout: float
    relative: bool

    @property
    def forward_flops(self) -> int:
        """The useful operations of a forward pass."""
        pairs = sum(
            min(self.window, position // stride) + 1
            for stride in self.strides
            for position in range(self.sequence)
        )
        return self.batch * pairs * (6 if self.relative else 4) * self.dim


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case and the gradient of its output."""

    case: Case
    tensors: tuple[Tensor, ...]
    dout: Tensor

    def run(self, passes: str) -> None:
        """Run one forward pass, or one forward and backward pass."""
        if passes == "forward":
            with torch.no_grad():
                self._attend()
            return
        for tensor in self.tensors:
            tensor.grad = None
        self._attend().backward(self.dout)

    def output_bytes(self, passes: str) -> int:
        """Return the size of what the passes leave behind: the output, or output and gradients."""
        kept = [self.dout] if passes == "forward" else [self.dout, *self.tensors]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    def _attend(self) -> Tensor:
        q, k, v, *relative = self.tensors
        if self.case.backend == "sdpa":
            return sdpa_band(q, k, v, self.case.window)
        band = Band(self.case.window, self.case.strides)
        terms = Relative(*relative) if relative else None
        return banded_attention(
            q, k, v, band, relative=terms, dropout=self.case.dropout, backend=self.case.backend
        )


def make_inputs(case: Case) -> Inputs:
    """Return random inputs of the case's shape, in float32."""
    shape = (case.batch, case.sequence, case.heads, case.dim)
    rows = min(case.window, case.sequence - 1) + 1
    shapes: list[tuple[int, ...]] = [shape] * 3
    if case.relative:
        shapes += [(case.heads, rows, case.dim), (case.heads, case.dim), (case.heads, case.dim)]
    tensors = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    return Inputs(case, tensors, torch.randn(shape))


def sdpa_band(
    q: Float[Tensor, "batch sequence heads dim"],
    k: Float[Tensor, "batch sequence heads dim"],
    v: Float[Tensor, "batch sequence heads dim"],
    window: int,
) -> Float[Tensor, "batch sequence heads dim"]:
    """Return a plain causal band through scaled_dot_product_attention, block by block.

    A block is as long as the window and sees itself and the block before it.
    """
    batch, sequence, heads, dim = q.shape
    size = max(window, 1)
    blocks = -(-sequence // size)
    q, k, v = (F.pad(x.transpose(1, 2), (0, 0, 0, blocks * size - sequence)) for x in (q, k, v))
    k, v = (F.pad(x, (0, 0, size, 0)).unfold(2, 2 * size, size).mT for x in (k, v))
    q = q.unflatten(2, (blocks, size))
    row, column = torch.arange(size)[:, None], torch.arange(2 * size)
    distance = row + size - column
    visible = ((distance >= 0) & (distance <= window)).repeat(blocks, 1, 1)
    visible[0, :, :size] = False
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible.repeat(batch, 1, 1)[:, None])
    out = out.unflatten(0, (batch, blocks)).transpose(2, 3).reshape(batch, -1, heads, dim)
    return out[:, :sequence]


def measure_times(
    cases: list[Case], repetitions: int, clock: Callable[[], float]
) -> tuple[dict[tuple[Case, str], float], float]:
    """Return the median seconds of each case and pass, and of torch.mm, measured in turns."""
    matrix = torch.randn(1024, 1024)
    runs: dict[Any, Callable[[], object]] = {"mm": lambda: matrix @ matrix}
    for case in cases:
        inputs = make_inputs(case)
        for passes in _PASSES:
            runs[case, passes] = partial(inputs.run, passes)
    seconds: dict[Any, list[float]] = {key: [] for key in runs}
    for turn in range(repetitions + 1):
        for key, run in runs.items():
            start = clock()
            run()
            if turn > 0:  # the first turn compiles and warms up
                seconds[key].append(clock() - start)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    mm = medians.pop("mm")
    return medians, mm


def measure_memory(case: Case, passes: str, threads: int) -> dict[str, int] | None:
    """Return the peak bytes of one pass beyond its inputs; None where /proc cannot tell."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    # Freed memory returns to the system at once, so that what is resident is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    order = json.dumps({"case": asdict(case), "passes": passes, "threads": threads})
    command = [sys.executable, "-m", "kernels.bench", "--memory-of", order]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the memory measurement of {case} failed:\n{done.stderr}")
    result: dict[str, int] = json.loads(done.stdout)
    return result


def memory_of(order: str) -> dict[str, int]:
    """Measure one pass in this process, which should be fresh."""
    request = json.loads(order)
    torch.set_num_threads(request["threads"])
    case = Case(**{**request["case"], "strides": tuple(request["case"]["strides"])})
    small = Case(**{**asdict(case), "sequence": 8 * max(case.strides), "window": 3})
    for passes in _PASSES:
        make_inputs(small).run(passes)
    inputs = make_inputs(case)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    inputs.run(request["passes"])
    beyond = _status("VmHWM") - before
    return {
        "beyond_inputs": beyond,
        "temporary": beyond - inputs.output_bytes(request["passes"]),
    }


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}")


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
        "--clock", choices=("wall", "cpu"), default="wall",
        help="cpu: this process's processor time, for one thread on a machine that others use too",
    )  # fmt: skip
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
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
        _say(text)
    return reason is None


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _rows(options: argparse.Namespace, cases: list[Case]) -> list[dict[str, Any]]:
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    medians, mm = measure_times(cases, options.repetitions, clock)
    peak = 2 * 1024**3 / mm
    rows = []
    for (case, passes), seconds in medians.items():
        rate = case.forward_flops * (1 if passes == "forward" else 3) / seconds
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
    if options.memory_of is not None:
        _say(json.dumps(memory_of(options.memory_of)))
        return
    torch.set_num_threads(options.threads)
    _say(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, "
        f"{options.threads} threads, {options.clock} clock, batch {options.batch}, "
        f"{options.heads} heads of {options.dim}, strides {options.strides}, "
        f"dropout {options.dropout}, relative {'on' if options.relative else 'off'}"
    )
    _say(
        f"{'n':>7}{'w':>7}  {'backend':<8}{'passes':<9}{'ms':>9}{'GFLOP/s':>9}{'of mm':>8}"
        f"{'MiB':>10}{'temporary':>10}"
    )
    rows = []
    for size in options.sizes:
        for row in _rows(options, _cases(options, size)):
            _say(_format(row))
            rows.append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
