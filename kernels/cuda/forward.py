"""The CUDA program of the forward pass: flash-style attention over a band.

A block holds a tile of queries and walks over the tiles of keys that they see, with a running
maximum and sum per query; no score leaves the chip. Besides the output it writes one log-sum-exp
(base 2) per query and head, from which the backward programs find the weights again.
"""

from typing import NamedTuple

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels.cuda.band import (
    Diagonal,
    Problem,
    Work,
    declare_problem,
    find_scores,
    kept,
    locate_steps,
    locate_stream,
    row_keys,
    tile_distances,
    warp_sees,
)
from kernels.cuda.layout import THREADS, ForwardMemory, Tile, plan_forward
from kernels.cuda.products import add_weighted
from kernels.cuda.tiles import (
    Block,
    Value,
    across,
    add,
    array,
    barrier,
    ceil_div,
    filled,
    hold,
    plus,
    registers,
    scale,
    shared_memory,
    warp_barrier,
)

_LOWEST = -(2.0**100)  # where running maxima start
_MASKED = -(2.0**127)  # so far below them that its exponential is 0


class _Softmax(NamedTuple):
    """The running softmax of a thread's queries; `sums` are of the thread's own columns."""

    highest: Buffer
    sums: Buffer
    out: Buffer


def forward(tile: Tile) -> None:
    """Write the program's body.

    Grid: streams x tiles, the tiles of a stream's queries side by side.
    """
    problem = declare_problem()
    tiles, blocks = T.arg("tiles", T.int32()), T.arg("blocks", T.int32())
    out, log_sums = array("out", problem.size), array("log_sums", problem.size)
    memory = plan_forward(tile)
    with (
        T.launch_thread("blockIdx.x", blocks) as index,
        T.launch_thread("threadIdx.x", THREADS) as thread,
    ):
        shared = shared_memory(memory.floats)
        work = query_tile(Block(tile, thread, shared), problem, index, tiles)
        work.load_scaled_queries(memory.q, work.steps.first)
        softmax = _Softmax(
            filled(tile.rows, _LOWEST), filled(tile.rows), filled(tile.rows * tile.width)
        )
        steps = thread_steps(work)
        keys = row_keys(work, steps)
        first, count = key_tiles(work)
        with T.serial(0, count) as turn:
            column = hold(first + turn * tile.block_columns)
            base = hold(work.steps.first - column)
            _load_columns(work, memory, column, base)
            barrier()
            with T.If(warp_sees(work.block, base, problem.window)), T.Then():
                _add_columns(work, memory, softmax, keys, base)
            barrier()
        for i, step in enumerate(steps):
            _finish_row(work, softmax, i, step, (out, log_sums))


def query_tile(block: Block, problem: Problem, index: Value, tiles: Value) -> Work:
    """Return the place of a block that works on a tile of queries."""
    number = hold(T.truncdiv(index, tiles))
    stream = locate_stream(problem, number)
    place = hold(index - number * tiles)
    rows = block.tile.block_rows
    steps = locate_steps(stream.stride, problem.offset, problem.keys, rows, place)
    return Work(block, problem, stream, steps)


def thread_steps(work: Work) -> list[Value]:
    """Return the steps of a thread's rows in a tile of queries."""
    first = hold(work.steps.first + work.block.first_row)
    return [first + i for i in range(work.tile.rows)]


def key_tiles(work: Work) -> tuple[Value, Value]:
    """Return the first key that a tile of queries sees, and the number of tiles of keys."""
    steps, tile = work.steps, work.tile
    first = hold(T.max(steps.first - work.problem.window, 0))
    stop = T.min(steps.first + tile.block_rows, steps.stop)
    count = ceil_div(stop - first, tile.block_columns)
    return first, hold(T.Select(steps.first < steps.stop, count, 0))


def seen_columns(block: Block, base: Value, window: Value) -> tuple[Value, Value]:
    """Return the columns of a tile that a warp's rows see, in groups of four: first and stop."""
    first = T.max(base + block.warp_row - window, 0)
    stop = T.min(base + block.warp_row + block.tile.warp_rows, block.tile.block_columns)
    return hold(T.truncdiv(first, 4)), hold(ceil_div(stop, 4))


def _load_columns(work: Work, memory: ForwardMemory, column: Value, base: Value) -> None:
    work.load_keys(memory.k, work.problem.k, column)
    work.load_keys(memory.v, work.problem.v, column)
    if memory.window is not None and memory.biases is not None:
        distance = hold(base - work.tile.block_columns)
        work.load_distances(memory.window, distance)
        work.load_biases(memory.biases, memory.window.rows, distance)


def _add_columns(
    work: Work, memory: ForwardMemory, softmax: _Softmax, keys: list[Value], base: Value
) -> None:
    """Take a tile of keys into the running softmax of a warp's queries."""
    block, window = work.block, work.problem.window
    scores, spare = (registers(work.tile.rows * work.tile.columns) for _ in range(2))
    find_scores(block, memory, scores, spare)
    distances = tile_distances(block, base)
    for i in range(work.tile.rows):
        _weigh_row(work, softmax, scores, i, distances)
        if keys:
            for j in range(work.tile.columns):
                factor = kept(work, keys[i], distances.delta(i, j))
                scale(scores, i * work.tile.columns + j, factor)
    block.write_tile(memory.weights, scores)
    warp_barrier()
    columns = seen_columns(block, base, window)
    add_weighted(block, softmax.out, memory.weights, memory.v, None, columns)


def _weigh_row(work: Work, softmax: _Softmax, scores: Buffer, i: int, distances: Diagonal) -> None:
    """Turn row i of a thread's scores into weights relative to the row's new maximum."""
    tile = work.tile
    row = range(i * tile.columns, (i + 1) * tile.columns)
    highest = softmax.highest[i]
    for j, n in enumerate(row):
        delta = distances.delta(i, j)
        seen = T.And(delta >= 0, delta <= work.problem.window)
        T.buffer_store(scores, T.Select(seen, scores[n], T.float32(_MASKED)), [n])
        highest = T.max(highest, scores[n])
    highest = across(T.bind(highest), T.max)
    shrink = T.bind(T.exp2(softmax.highest[i] - highest))
    T.buffer_store(softmax.highest, highest, [i])
    scale(softmax.sums, i, shrink)
    for c in range(tile.width):
        scale(softmax.out, i * tile.width + c, shrink)
    for n in row:
        T.buffer_store(scores, T.exp2(scores[n] - highest), [n])
        add(softmax.sums, i, scores[n])


def _finish_row(
    work: Work, softmax: _Softmax, i: int, step: Value, targets: tuple[Buffer, Buffer]
) -> None:
    """Write the output and the log-sum-exp of a thread's row i."""
    out, log_sums = targets
    total = across(softmax.sums[i], plus)
    with T.If(step < work.steps.stop), T.Then():
        inverse = T.bind(T.float32(1) / total)
        row = work.query_row(step)
        work.block.store_row(out, row, softmax.out, i * work.tile.width, inverse)
        with T.If(work.block.x == 0), T.Then():
            log_sum = softmax.highest[i] + T.log2(total)
            T.buffer_store(log_sums, log_sum, [work.statistic(step)])
