"""Ground of the CUDA programs: threads, registers and panels of vectors in shared memory.

A block has 256 threads in 16 rows of 16 (cuda_layout.py says which numbers are whose). So a warp
owns two neighbouring rows of threads, whose part of the band is narrow, and may leave out what lies
beyond it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels.cuda.layout import SIDE, THREADS, WARPS, Panel, Tile

Value: TypeAlias = Expr | int  # an expression, or a number that is known at build time


@dataclass(frozen=True)
class Block:
    """The threads of a block and its shared memory."""

    tile: Tile
    thread: Value
    shared: Buffer

    @property
    def x(self) -> Value:
        """The thread's place in its row of threads."""
        return T.truncmod(self.thread, SIDE)

    @property
    def y(self) -> Value:
        """The number of the thread's row of threads."""
        return T.truncdiv(self.thread, SIDE)

    @property
    def warp_row(self) -> Value:
        """The first row of the warp's part of the tile."""
        return T.truncdiv(self.thread, 32) * self.tile.warp_rows

    @property
    def first_row(self) -> Value:
        """The first row of the thread's tile."""
        return self.y * self.tile.rows

    @property
    def first_column(self) -> Value:
        """The first column of the thread's tile."""
        return self.x * self.tile.columns

    def pieces(self) -> Iterator[tuple[int, Value]]:
        """Yield the vectors of an output row that a thread holds: first register, first column."""
        lanes = self.tile.lanes
        for piece in range(self.tile.width // lanes):
            yield piece * lanes, (self.x + SIDE * piece) * lanes

    def read(self, target: Buffer, first: int, place: Value, lanes: int) -> None:
        """Copy neighbouring floats of shared memory into registers."""
        unpack(target, first, self.shared[span(place, lanes)], lanes)

    def write(self, source: Buffer, first: int, place: Value, lanes: int) -> None:
        """Copy neighbouring registers into shared memory."""
        T.buffer_store(self.shared, pack(source, first, lanes), [span(place, lanes)])

    def write_tile(self, panel: Panel, values: Buffer) -> None:
        """Copy the thread's tile into a panel whose groups are the threads' rows."""
        columns = self.tile.columns
        for i in range(self.tile.rows):
            self.write(values, i * columns, at(panel, self.y, i, self.first_column), columns)

    def store_row(
        self, target: Buffer, row: Value, values: Buffer, first: int, factor: Value | None
    ) -> None:
        """Write the thread's columns of a row of `target` [rows, dim], registers `first` on."""
        lanes = self.tile.lanes
        for register, column in self.pieces():
            vector = pack(values, first + register, lanes)
            if factor is not None:
                vector = vector * (T.broadcast(factor, lanes) if lanes > 1 else factor)
            T.buffer_store(target, vector, [self.place(row, column)])

    def place(self, row: Value, column: Value) -> Value:
        """Return the index of one of the thread's vectors in an array [rows, dim]."""
        lanes = self.tile.lanes
        vectors = row * (self.tile.dim // lanes) + wide(T.truncdiv(column, lanes))
        return T.ramp(vectors * lanes, T.int64(1), lanes) if lanes > 1 else vectors


def at(panel: Panel, group: Value, offset: int, column: Value) -> Value:
    """Return the place of `column` in the panel's row group * panel.group + offset."""
    whole, row = divmod(offset, panel.group)
    fixed = panel.start + whole * panel.pitch + row * panel.width
    return group * panel.pitch + column + fixed


def at_row(panel: Panel, row: Value, column: Value) -> Value:
    """Return the place of `column` in a row that is known at run time only."""
    group = T.truncdiv(row, panel.group) * panel.pitch
    return group + T.truncmod(row, panel.group) * panel.width + column + panel.start


def span(first: Value, lanes: int) -> Value:
    """Return the index of `lanes` neighbouring numbers."""
    return T.ramp(first, 1, lanes) if lanes > 1 else first


def unpack(target: Buffer, first: int, vector: Value, lanes: int) -> None:
    """Store a vector in registers from number `first` on."""
    vector = T.bind(vector)
    for lane in range(lanes):
        value = T.Shuffle([vector], [lane]) if lanes > 1 else vector
        T.buffer_store(target, value, [first + lane])


def pack(source: Buffer, first: int, lanes: int) -> Value:
    """Return registers from number `first` on as a vector."""
    values = [source[first + lane] for lane in range(lanes)]
    return T.Shuffle(values, list(range(lanes))) if lanes > 1 else values[0]


def array(name: str, size: Value, dtype: str = "float32") -> Buffer:
    """Declare a parameter that points to global memory; the CUDA source calls it {name}_ptr."""
    return IRBuilder.name(name, T.match_buffer(T.arg(name, T.handle()), (size,), dtype))


def registers(count: int, dtype: str = "float32") -> Buffer:
    """Return numbers of one thread; every index must be known at build time."""
    return T.alloc_buffer((count,), dtype, scope="local")


def shared_memory(floats: int) -> Buffer:
    """Return the block's shared memory; the CUDA source calls it panels_ptr."""
    return IRBuilder.name("panels", T.alloc_buffer((floats,), "float32", scope="shared.dyn"))


def fill(buffer: Buffer, count: int, value: float) -> None:
    """Set the first numbers of a buffer in registers."""
    for i in range(count):
        T.buffer_store(buffer, T.float32(value), [i])


def filled(count: int, value: float = 0.0) -> Buffer:
    """Return registers that hold one number each."""
    buffer = registers(count)
    fill(buffer, count, value)
    return buffer


def add(buffer: Buffer, i: int, value: Value) -> None:
    """Add to one number in registers."""
    T.buffer_store(buffer, buffer[i] + value, [i])


def scale(buffer: Buffer, i: int, factor: Value) -> None:
    """Multiply one number in registers."""
    T.buffer_store(buffer, buffer[i] * factor, [i])


def hold(value: Value, dtype: str = "int32") -> Value:
    """Return an integer kept in a register, which TVM's simplifier cannot look into.

    Run-time divisions nested into each other would occupy it for minutes.
    """
    cell = registers(1, dtype)
    T.buffer_store(cell, value, [0])
    return cell[0]


def ceil_div(a: Value, b: Value) -> Value:
    """Return a / b rounded up, for a >= 0 and b >= 1."""
    return T.truncdiv(a + b - 1, b)


def wide(value: Value) -> Value:
    """Return a 64-bit index: arrays may have more than 2**31 numbers."""
    return T.cast(value, "int64")


def barrier() -> None:
    """Wait for all threads of the block; must not stand inside a condition."""
    T.evaluate(T.tvm_storage_sync("shared.dyn"))


def warp_barrier() -> None:
    """Wait for all threads of the warp."""
    T.evaluate(T.call_extern("void", "__syncwarp"))


def exchange(value: Value, distance: int) -> Value:
    """Return the number that the thread at lane ^ distance of the warp passes in."""
    every_lane = T.uint32(0xFFFFFFFF)
    return T.tvm_warp_shuffle_xor(every_lane, value, distance, 32, 32)


def across(value: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Return the combination of the numbers of the 16 threads in a row of the block."""
    for distance in (8, 4, 2, 1):
        value = T.bind(combine(value, exchange(value, distance)))
    return value


def plus(a: Value, b: Value) -> Value:
    """Return the sum; for `across`."""
    return a + b


def sum_columns(block: Block, sums: Buffer, start: int) -> None:
    """Leave the sum over all threads of each column at shared float `start` + column.

    `sums` holds each thread's part of its columns. Takes (WARPS + 1) * block_columns floats, and
    barriers before and after it are the caller's.
    """
    columns = block.tile.block_columns
    parts = start + columns
    for j in range(block.tile.columns):
        total = T.bind(sums[j] + exchange(sums[j], 16))
        place = T.truncdiv(block.thread, 32) * columns + block.first_column + (parts + j)
        with T.If(T.truncmod(block.thread, 32) < SIDE), T.Then():
            T.buffer_store(block.shared, total, [place])
    barrier()
    with T.If(block.thread < columns), T.Then():
        total = block.shared[block.thread + parts]
        for warp in range(1, WARPS):
            total = total + block.shared[block.thread + (parts + warp * columns)]
        T.buffer_store(block.shared, total, [block.thread + start])


def load_panel(
    block: Block,
    panel: Panel,
    source: Buffer,
    row_at: Callable[[Value], Value],
    change: Callable[[Value, Value], Value] | None = None,
) -> None:
    """Copy rows of `source`, seen as vectors of 4 floats, into a panel.

    `row_at` gives the row of `source` for each row of the panel. It must stay inside the array:
    then loads need no condition and are under way together, and what a tile must not see is left
    out of its weights instead. `change(vector, number in the row)` is applied on the way.
    """
    chunks = panel.width // 4
    total = panel.rows * chunks

    def copy(item: Value) -> None:
        row, chunk = T.truncdiv(item, chunks), T.truncmod(item, chunks)
        vector = source[wide(row_at(row)) * chunks + wide(chunk)]
        vector = vector if change is None else change(vector, chunk)
        T.buffer_store(block.shared, vector, [span(at_row(panel, row, chunk * 4), 4)])

    for first in range(0, total, THREADS):
        if first + THREADS <= total:
            copy(block.thread + first)
        else:
            with T.If(block.thread + first < total), T.Then():
                copy(block.thread + first)
