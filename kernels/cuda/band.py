"""The band as the CUDA programs see it: where a block works, and what its tiles may see.

A head of stride s never mixes the residue classes of the positions modulo s. Each class is a plain
band over its own steps t = 0, 1, ...; step t of class c stands at position c + s * t. A block works
on one class of one head of one sequence (a stream), and rows and columns of tiles are steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels import dropout_tir as tvm_random
from kernels.cuda.layout import (
    THREADS,
    ForwardMemory,
    KeyMemory,
    Panel,
    QueryMemory,
    Tile,
)
from kernels.cuda.products import dot_diagonals, dot_rows
from kernels.cuda.tiles import (
    Block,
    Value,
    add,
    array,
    ceil_div,
    fill,
    hold,
    load_panel,
    wide,
)

_CELLS = "local"  # where TVM keeps a GPU thread's own numbers


@dataclass(frozen=True)
class Problem:
    """The parameters that all programs share.

    q [batch, queries, heads, dim], k and v [batch, keys, heads, dim] and r [heads, window + 1, dim]
    are seen as vectors of 4 floats, like `content` [heads, dim], the content bias. `bias` [heads,
    window + 1] is what the other bias changes: (position bias - content bias) . r * factor.
    `factor` is scale * log2(e): scores are in base 2. `size` stands for the sizes of all arrays.
    """

    size: Value
    q: Buffer
    k: Buffer
    v: Buffer
    r: Buffer
    content: Buffer
    bias: Buffer
    strides: Buffer
    heads: Value
    queries: Value
    keys: Value
    window: Value
    factor: Value
    seed_low: Value
    seed_high: Value
    threshold: Value
    keep_scale: Value

    @property
    def offset(self) -> Value:
        """The position of the first query."""
        return self.keys - self.queries


def declare_problem() -> Problem:
    """Declare the shared parameters; those that a body does not use, its kernel does not have."""
    size = T.arg("size", T.int64())
    vectors = {name: array(name, size, "float32x4") for name in ("q", "k", "v", "r", "content")}
    integers = ("heads", "queries", "keys", "window", "seed_low", "seed_high", "threshold")
    return Problem(
        size=size,
        **vectors,
        bias=array("bias", size),
        strides=array("strides", size, "int32"),
        **{name: T.arg(name, T.int32()) for name in integers},
        factor=T.arg("factor", T.float32()),
        keep_scale=T.arg("keep_scale", T.float32()),
    )


class Stream(NamedTuple):
    """One head of one sequence: number = batch index * heads + head."""

    number: Value
    batch: Value
    head: Value
    stride: Value


def locate_stream(problem: Problem, number: Value) -> Stream:
    """Return the stream of a number in [0, batch * heads)."""
    batch = hold(T.truncdiv(number, problem.heads))
    head = hold(number - batch * problem.heads)
    return Stream(number, batch, head, hold(problem.strides[head]))


class Steps(NamedTuple):
    """Steps of one residue class: a tile's are those from `first` on, before `stop`."""

    residue: Value
    stride: Value
    first: Value
    stop: Value

    def position(self, step: Value) -> Value:
        """Return the absolute position of a step; beyond the class, of its nearest one."""
        inside = T.max(T.min(step, self.stop - 1), 0)
        return self.residue + self.stride * inside


def ceil_steps(position: Value, residue: Value, stride: Value) -> Value:
    """Return the number of steps of a residue class that stand before a position."""
    return T.truncdiv(position + stride - 1 - residue, stride)


def locate_steps(stride: Value, start: Value, stop: Value, size: int, tile: Value) -> Steps:
    """Return one tile of a head's positions [start, stop), counted class after class.

    A number past the last class, which blocks of a head with a small stride have, has no steps.
    """
    tiles = hold(ceil_div(ceil_div(stop - start, stride), size))
    residue = hold(T.truncdiv(tile, tiles))
    first = ceil_steps(start, residue, stride) + (tile - residue * tiles) * size
    exists = residue < stride
    return Steps(
        residue=hold(T.Select(exists, residue, 0)),
        stride=stride,
        first=hold(T.Select(exists, first, 0)),
        stop=hold(T.Select(exists, ceil_steps(stop, residue, stride), 0)),
    )


@dataclass(frozen=True)
class Work:
    """A block at work on a stream; all steps belong to the class of `steps`."""

    block: Block
    problem: Problem
    stream: Stream
    steps: Steps

    @property
    def tile(self) -> Tile:
        """What the program is built for."""
        return self.block.tile

    def query_row(self, step: Value) -> Value:
        """Return the row of q [batch * queries * heads, dim] of a step."""
        row = T.max(self.steps.position(step) - self.problem.offset, 0)
        row = wide(self.stream.batch) * wide(self.problem.queries) + wide(row)
        return row * wide(self.problem.heads) + wide(self.stream.head)

    def key_row(self, step: Value) -> Value:
        """Return the row of k [batch * keys * heads, dim] of a step."""
        row = wide(self.stream.batch) * wide(self.problem.keys) + wide(self.steps.position(step))
        return row * wide(self.problem.heads) + wide(self.stream.head)

    def statistic(self, step: Value) -> Value:
        """Return the place of a query's number in an array [batch, heads, queries]."""
        row = T.max(self.steps.position(step) - self.problem.offset, 0)
        return wide(self.stream.number) * wide(self.problem.queries) + wide(row)

    def distance_row(self, delta: Value) -> Value:
        """Return the row of r [heads * (window + 1), dim] of the distance nearest to delta."""
        inside = T.max(T.min(delta, self.problem.window), 0)
        return wide(self.stream.head) * wide(self.problem.window + 1) + wide(inside)

    def load_queries(self, panel: Panel, source: Buffer, first: Value) -> None:
        """Copy rows of an array like q, from step `first` on."""
        load_panel(self.block, panel, source, lambda row: self.query_row(first + row))

    def load_scaled_queries(self, panel: Panel, first: Value) -> None:
        """Copy rows of q as the left side of the scores: (q + content bias) * factor."""

        def change(vector: Value, chunk: Value) -> Value:
            if self.tile.relative:
                bias = wide(self.stream.head) * (self.tile.dim // 4) + wide(chunk)
                vector = vector + self.problem.content[bias]
            return vector * T.broadcast(self.problem.factor, 4)

        row_at = lambda row: self.query_row(first + row)  # noqa: E731
        load_panel(self.block, panel, self.problem.q, row_at, change)

    def load_keys(self, panel: Panel, source: Buffer, first: Value) -> None:
        """Copy rows of an array like k, from step `first` on."""
        load_panel(self.block, panel, source, lambda row: self.key_row(first + row))

    def load_distances(self, panel: Panel, first: Value) -> None:
        """Copy rows of r, from distance `first` on."""
        load_panel(self.block, panel, self.problem.r, lambda row: self.distance_row(first + row))

    def load_biases(self, start: int, count: int, first: Value) -> None:
        """Copy biases, from distance `first` on, to shared memory from float `start` on."""
        for i in range(0, count, THREADS):
            item = self.block.thread + i
            with T.If(item < count), T.Then():
                bias = self.problem.bias[self.distance_row(first + item)]
                T.buffer_store(self.block.shared, bias, [item + start])


class Diagonal(NamedTuple):
    """The distances of a tile: row i and column j of a thread are `first` + i - j apart."""

    first: Value

    def delta(self, i: int, j: int) -> Value:
        """Return the distance of a thread's row and column."""
        return self.first + (i - j)


class Vertical(NamedTuple):
    """The distances of a tile whose columns are distances: `first` + j in column j."""

    first: Value

    def delta(self, i: int, j: int) -> Value:
        """Return the distance that a thread's column stands for."""
        return self.first + j


def tile_distances(block: Block, base: Value) -> Diagonal:
    """Return a thread's distances, given that of the tile's first row and first column."""
    return Diagonal(hold(base + block.first_row - block.first_column))


def warp_sees(block: Block, base: Value, window: Value) -> Value:
    """Return whether any place of a warp's part of a tile lies in the band."""
    last = hold(base + block.warp_row + (block.tile.warp_rows - 1))
    span_ = block.tile.warp_rows + block.tile.block_columns - 2
    return T.And(last >= 0, last - span_ <= window)


def find_scores(
    block: Block, memory: ForwardMemory | QueryMemory | KeyMemory, scores: Buffer, spare: Buffer
) -> None:
    """Set a thread's tile to its scores; `spare` is another tile of registers.

    Products with keys and with distances are summed apart and added in the end: sums half as long
    lose less to rounding.
    """
    tile = block.tile
    fill(scores, tile.rows * tile.columns, 0)
    dot_rows(block, scores, memory.q, memory.k)
    if memory.window is None or memory.biases is None:
        return
    middle = block.first_row - block.first_column + (memory.biases + tile.block_columns)
    biases = {d: T.bind(block.shared[middle + d]) for d in range(1 - tile.columns, tile.rows)}
    for i, j, n in tile.places():
        T.buffer_store(spare, biases[i - j], [n])
    dot_diagonals(block, spare, memory.q, memory.window)
    for _, _, n in tile.places():
        add(scores, n, spare[n])


def row_keys(work: Work, steps: Sequence[Value]) -> list[Value]:
    """Return the dropout keys of a thread's rows (kernels/dropout.py), none without dropout."""
    if not work.tile.dropout:
        return []
    key = tvm_random.seed_key(work.problem.seed_low, work.problem.seed_high, _CELLS)
    return [
        tvm_random.row_key(key, work.stream.number, work.steps.position(step), _CELLS)
        for step in steps
    ]


def kept(work: Work, row_key: Value, delta: Value) -> Value:
    """Return what dropout multiplies a weight by: 1 / (1 - dropout), or 0."""
    keep = tvm_random.keep(row_key, delta, work.problem.threshold, scope=_CELLS)
    return T.Select(keep, work.problem.keep_scale, T.float32(0))
