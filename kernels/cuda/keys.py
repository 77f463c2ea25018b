"""The CUDA program of the backward pass for keys and values (formulas in tvm_cuda_backward.py)."""

from typing import NamedTuple

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels.cuda.backward import LN_2, find_slopes, query_rows
from kernels.cuda.band import (
    Work,
    ceil_steps,
    declare_problem,
    find_scores,
    locate_steps,
    locate_stream,
    tile_distances,
    warp_sees,
)
from kernels.cuda.layout import THREADS, KeyMemory, Tile, plan_keys
from kernels.cuda.products import add_transposed, dot_rows
from kernels.cuda.tiles import (
    Block,
    Value,
    add,
    array,
    at_row,
    barrier,
    ceil_div,
    fill,
    filled,
    hold,
    registers,
    shared_memory,
    sum_columns,
    wide,
)


def backward_keys(tile: Tile) -> None:
    """Write the body of the program for dk and dv.

    With relative terms it also writes content [blocks, dim]: what each block's keys add to the
    gradient of the content bias, but for the factor `scale`. Grid: streams x tiles, the tiles of a
    stream's keys side by side.
    """
    problem = declare_problem()
    tiles, blocks = T.arg("tiles", T.int32()), T.arg("blocks", T.int32())
    log_sums, dots = array("log_sums", problem.size), array("dots", problem.size)
    grad = array("grad", problem.size, "float32x4")
    dk, dv = array("dk", problem.size), array("dv", problem.size)
    content_sums = array("content_sums", problem.size)
    memory = plan_keys(tile)
    with (
        T.launch_thread("blockIdx.x", blocks) as index,
        T.launch_thread("threadIdx.x", THREADS) as thread,
    ):
        shared = shared_memory(memory.floats)
        block = Block(tile, thread, shared)
        number = hold(T.truncdiv(index, tiles))
        stream = locate_stream(problem, number)
        place = hold(index - number * tiles)
        steps = locate_steps(stream.stride, 0, problem.keys, tile.block_columns, place)
        work = Work(block, problem, stream, steps)
        work.load_keys(memory.k, problem.k, steps.first)
        work.load_keys(memory.v, problem.v, steps.first)
        sums = _KeySums(*(filled(tile.columns * n) for n in (tile.width, tile.width, 1)))
        first, count = _query_tiles(work)
        with T.serial(0, count) as turn:
            row = hold(first + turn * tile.block_rows)
            work.load_scaled_queries(memory.q, row)
            work.load_queries(memory.grad, grad, row)
            _add_key_slopes(work, memory, sums, row, (log_sums, dots))
        for j in range(tile.columns):
            step = hold(steps.first + block.y * tile.columns + j)
            with T.If(step < steps.stop), T.Then():
                target = work.key_row(step)
                work.block.store_row(dk, target, sums.dk, j * tile.width, T.float32(LN_2))
                work.block.store_row(dv, target, sums.dv, j * tile.width, None)
        if tile.relative:
            _write_content(work, memory, sums.columns, index, content_sums)


class _KeySums(NamedTuple):
    """Sums of a thread's columns: of dk and dv, and of the slopes."""

    dk: Buffer
    dv: Buffer
    columns: Buffer


def _query_tiles(work: Work) -> tuple[Value, Value]:
    """Return the first query that sees a tile of keys, and the number of tiles of queries."""
    steps, tile, problem = work.steps, work.tile, work.problem
    start = ceil_steps(problem.offset, steps.residue, steps.stride)
    first = hold(T.max(steps.first, start))
    stop = T.min(steps.first + tile.block_columns + problem.window, steps.stop)
    count = ceil_div(T.max(stop - first, 0), tile.block_rows)
    return first, hold(T.Select(steps.first < steps.stop, count, 0))


def _add_key_slopes(
    work: Work, memory: KeyMemory, sums: _KeySums, row: Value, statistics: tuple[Buffer, Buffer]
) -> None:
    """Add what a tile of queries, whose first step is `row`, gives to dk and dv."""
    tile, block, problem = work.tile, work.block, work.problem
    base = hold(row - work.steps.first)
    if memory.window is not None and memory.biases is not None:
        distance = hold(base - tile.block_columns)
        work.load_distances(memory.window, distance)
        work.load_biases(memory.biases, memory.window.rows, distance)
    scores, slopes = (registers(tile.rows * tile.columns) for _ in range(2))
    barrier()
    with T.If(warp_sees(block, base, problem.window)):
        with T.Then():
            steps = [hold(row + block.first_row + i) for i in range(tile.rows)]
            log_sums, dots = statistics
            own_dots = [T.bind(dots[work.statistic(step)]) for step in steps]
            rows = query_rows(work, steps, log_sums, own_dots)
            find_scores(block, memory, scores, slopes)
            fill(slopes, tile.rows * tile.columns, 0)
            dot_rows(block, slopes, memory.grad, memory.v)
            find_slopes(work, rows, scores, slopes, tile_distances(block, base))
        with T.Else():
            fill(scores, tile.rows * tile.columns, 0)
            fill(slopes, tile.rows * tile.columns, 0)
    barrier()
    block.write_tile(memory.weights, scores)
    block.write_tile(memory.slopes, slopes)
    for _, j, n in tile.places():
        add(sums.columns, j, slopes[n])
    barrier()
    seen = _seen_rows(block, base, problem.window)
    add_transposed(block, sums.dv, memory.weights, memory.grad, seen)
    add_transposed(block, sums.dk, memory.slopes, memory.q, seen)
    barrier()


def _seen_rows(block: Block, base: Value, window: Value) -> tuple[Value, Value]:
    """Return the rows of a tile that see a warp's columns, in groups of four: first and stop."""
    columns = 2 * block.tile.columns
    column = T.truncdiv(block.thread, 32) * columns
    first = T.max(column - base, 0)
    stop = T.min(column + columns + window - base, block.tile.block_rows)
    return hold(T.truncdiv(first, 4)), hold(ceil_div(T.max(stop, 0), 4))


def _write_content(
    work: Work, memory: KeyMemory, columns: Buffer, index: Value, target: Buffer
) -> None:
    """Write the sum over a block's keys of a key times the sum of its slopes."""
    tile, block = work.tile, work.block
    start = memory.q.start
    sum_columns(block, columns, start)
    barrier()
    with T.If(block.thread < tile.dim), T.Then():
        total = filled(1)
        with T.serial(0, tile.block_columns) as column:
            key = block.shared[at_row(memory.k, column, block.thread)]
            add(total, 0, block.shared[column + start] * key)
        T.buffer_store(target, total[0], [wide(index) * tile.dim + wide(block.thread)])
