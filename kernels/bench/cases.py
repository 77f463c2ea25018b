"""What the benchmarks run, and how it is timed."""

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kernels import Band, Relative, banded_attention

Key = TypeVar("Key", bound=Hashable)
PASSES = ("forward", "both")
WARM_UP = 3  # turns before those that count: the first compiles, then freed memory falls into place
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


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

    def flops(self, passes: str) -> int:
        """The useful operations of a pass of PASSES."""
        return self.forward_flops * (1 if passes == "forward" else 3)

    @property
    def key_bytes(self) -> int:
        """The size of k."""
        return 4 * self.batch * self.sequence * self.heads * self.dim

    @property
    def relative_bytes(self) -> int:
        """The size of r without rows that no query needs; 0 without relative terms."""
        rows = min(self.window, self.sequence - 1) + 1
        return 4 * self.heads * rows * self.dim if self.relative else 0


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


@dataclass(frozen=True)
class Timed:
    """A call to time, on so many of torch's threads."""

    threads: int
    call: Callable[[], object]


def time_in_turns(
    runs: Mapping[Key, Timed], repetitions: int, clock: str, at_least: float = 0.0
) -> dict[Key, float]:
    """Return the median seconds of each run. All take turns, so what slows one slows all.

    There are `repetitions` turns, and more until `at_least` seconds have passed: two virtual cores
    may lie on one real one for a second, and then two threads do the work of one.
    """
    keep_freed_memory()
    end = time.perf_counter() + at_least
    now = CLOCKS[clock]
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    before = torch.get_num_threads()
    for turn in itertools.count(-WARM_UP):
        if turn >= repetitions and time.perf_counter() >= end:
            break
        for key, run in runs.items():
            torch.set_num_threads(run.threads)
            start = now()
            run.call()
            if turn >= 0:
                seconds[key].append(now() - start)
    torch.set_num_threads(before)
    return {key: statistics.median(values) for key, values in seconds.items()}


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MiB, the limit that it comes to by itself.

    Else it may happen, or not, that the heap's top gives pages back after each call, and the next
    one waits for them: a third of the time of a forward pass at (2048, 32).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 2**25)


def case_runs(cases: list[Case], threads: int) -> dict[tuple[Case, str], Timed]:
    """Return the passes of each case."""
    inputs = [make_inputs(case) for case in cases]
    return {(i.case, p): Timed(threads, partial(i.run, p)) for i in inputs for p in PASSES}


MM_FLOPS = 2 * 1024**3


def matrix_product(threads: int) -> Timed:
    """Return a call of torch.mm on 1024 x 1024 matrices, MM_FLOPS operations, to compare with."""
    matrix = torch.randn(1024, 1024)
    return Timed(threads, lambda: matrix @ matrix)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)  # noqa: T201 (a command's output)
