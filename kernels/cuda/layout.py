"""Sizes of the CUDA programs: tiles of threads, and where panels lie in shared memory.

Needs no TVM, so that a compiled program can be chosen and launched without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

THREADS = 256
SIDE = 16  # the block's threads stand in a square of this side
WARPS = THREADS // 32
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Tile:
    """What one program is built for: numbers per thread and the terms that it computes.

    Thread (y, x) of a block holds `rows` x `columns` numbers: rows y * rows + i, columns
    x * columns + j. `dim` is the heads' size, a multiple of 16.
    """

    dim: int
    rows: int
    columns: int
    relative: bool
    dropout: bool

    @property
    def block_rows(self) -> int:
        """Rows of a block's tile."""
        return SIDE * self.rows

    @property
    def block_columns(self) -> int:
        """Columns of a block's tile."""
        return SIDE * self.columns

    @property
    def warp_rows(self) -> int:
        """Rows of a warp's part of the tile."""
        return 2 * self.rows

    @property
    def group(self) -> int:
        """The greatest step of rows that divides a thread's rows and its columns."""
        return min(self.rows, self.columns)

    @property
    def width(self) -> int:
        """Columns of an output of `dim` columns that one thread holds."""
        return self.dim // SIDE

    @property
    def lanes(self) -> int:
        """How many of these columns stand side by side and move as one vector."""
        return next(n for n in (4, 2, 1) if self.width % n == 0)

    @property
    def residency(self) -> int:
        """Blocks that are to run on one multiprocessor side by side.

        One loads while the other computes; beyond 64 dimensions shared memory has room for one.
        """
        return 2 if self.dim <= 64 else 1

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield row, column and register of each number of a thread's tile."""
        for i in range(self.rows):
            for j in range(self.columns):
                yield i, j, i * self.columns + j


@dataclass(frozen=True)
class Panel:
    """A matrix in shared memory, from float number `start`.

    Each group of rows, as many as a thread holds, is followed by 4 floats that are not used: then
    threads side by side, which read rows a group apart, read from different banks.
    """

    start: int
    rows: int
    width: int
    group: int

    @property
    def pitch(self) -> int:
        """Floats from one group to the next."""
        return self.group * self.width + 4

    @property
    def stop(self) -> int:
        """The float after the last."""
        return self.start + self.rows // self.group * self.pitch


class ForwardMemory(NamedTuple):
    """Shared memory of `forward`."""

    q: Panel
    k: Panel
    v: Panel
    weights: Panel
    window: Panel | None
    biases: int | None
    floats: int


def plan_forward(tile: Tile) -> ForwardMemory:
    """Return the layout for a tile of queries by keys."""
    rows, columns, dim = tile.block_rows, tile.block_columns, tile.dim
    q = Panel(0, rows, dim, tile.rows)
    k = Panel(q.stop, columns, dim, tile.columns)
    v = Panel(k.stop, columns, dim, tile.columns)
    weights = Panel(v.stop, rows, columns, tile.rows)
    if not tile.relative:
        return ForwardMemory(q, k, v, weights, None, None, weights.stop)
    window = Panel(weights.stop, rows + columns, dim, tile.group)
    floats = window.stop + window.rows
    return ForwardMemory(q, k, v, weights, window, window.stop, floats)


class QueryMemory(NamedTuple):
    """Shared memory of `backward_queries`; the slopes take the place of v."""

    q: Panel
    grad: Panel
    k: Panel
    v: Panel
    slopes: Panel
    window: Panel | None
    biases: int | None
    floats: int


def plan_queries(tile: Tile) -> QueryMemory:
    """Return the layout for a tile of queries by keys."""
    rows, columns, dim = tile.block_rows, tile.block_columns, tile.dim
    q = Panel(0, rows, dim, tile.rows)
    grad = Panel(q.stop, rows, dim, tile.rows)
    k = Panel(grad.stop, columns, dim, tile.columns)
    v = Panel(k.stop, columns, dim, tile.columns)
    slopes = Panel(k.stop, rows, columns, tile.rows)
    stop = max(v.stop, slopes.stop)
    if not tile.relative:
        return QueryMemory(q, grad, k, v, slopes, None, None, stop)
    window = Panel(stop, rows + columns, dim, tile.group)
    floats = window.stop + window.rows
    return QueryMemory(q, grad, k, v, slopes, window, window.stop, floats)


class KeyMemory(NamedTuple):
    """Shared memory of `backward_keys`; weights and slopes take the place of the window.

    In the end the sums of the columns take that of q and of the gradient.
    """

    k: Panel
    v: Panel
    q: Panel
    grad: Panel
    weights: Panel
    slopes: Panel
    window: Panel | None
    biases: int | None
    floats: int


def plan_keys(tile: Tile) -> KeyMemory:
    """Return the layout for a tile of queries by keys."""
    rows, columns, dim = tile.block_rows, tile.block_columns, tile.dim
    k = Panel(0, columns, dim, tile.columns)
    v = Panel(k.stop, columns, dim, tile.columns)
    q = Panel(v.stop, rows, dim, tile.rows)
    grad = Panel(q.stop, rows, dim, tile.rows)
    assert grad.stop - q.start >= (WARPS + 1) * columns
    weights = Panel(grad.stop, rows, columns, tile.rows)
    slopes = Panel(weights.stop, rows, columns, tile.rows)
    if not tile.relative:
        return KeyMemory(k, v, q, grad, weights, slopes, None, None, slopes.stop)
    window = Panel(grad.stop, rows + columns, dim, tile.group)
    stop = max(window.stop, slopes.stop)
    return KeyMemory(k, v, q, grad, weights, slopes, window, stop, stop + window.rows)


class DistanceMemory(NamedTuple):
    """Shared memory of `backward_distances`.

    The window holds keys, then values; then the slopes take its place. In the end the sums of the
    columns take that of q and of the gradient.
    """

    r: Panel
    q: Panel
    grad: Panel
    window: Panel
    slopes: Panel
    floats: int


def plan_distances(tile: Tile) -> DistanceMemory:
    """Return the layout for a tile of queries by distances."""
    rows, columns, dim = tile.block_rows, tile.block_columns, tile.dim
    r = Panel(0, columns, dim, tile.columns)
    q = Panel(r.stop, rows, dim, tile.rows)
    grad = Panel(q.stop, rows, dim, tile.rows)
    assert grad.stop - q.start >= (WARPS + 1) * columns
    window = Panel(grad.stop, rows + columns, dim, tile.group)
    slopes = Panel(grad.stop, rows, columns, tile.rows)
    return DistanceMemory(r, q, grad, window, slopes, max(window.stop, slopes.stop))
