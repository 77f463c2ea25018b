"""The CUDA program of the backward pass for the relative terms: gradients of r and its bias.

A block holds a tile of distances of one head and walks over tiles of queries of all sequences;
columns are distances here, and k and v are read along the diagonals from windows of keys. Few
distances make few blocks, so the queries are split over several blocks whose sums are added up
afterwards, always in the same order.
"""

from typing import NamedTuple

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels.cuda.backward import LN_2, find_slopes, query_rows
from kernels.cuda.band import (
    Problem,
    Steps,
    Stream,
    Vertical,
    Work,
    ceil_steps,
    declare_problem,
)
from kernels.cuda.layout import THREADS, DistanceMemory, Panel, Tile, plan_distances
from kernels.cuda.products import add_transposed, dot_diagonals, dot_rows
from kernels.cuda.tiles import (
    Block,
    Value,
    add,
    array,
    barrier,
    ceil_div,
    fill,
    filled,
    hold,
    load_panel,
    registers,
    shared_memory,
    sum_columns,
    wide,
)


class _Place(NamedTuple):
    """Where a block works: its head, its first distance, and its part of the queries' tiles."""

    head: Value
    stride: Value
    delta: Value
    part: Value
    tiles: Value  # tiles of queries in each residue class
    first: Value
    turns: Value


def backward_distances(tile: Tile) -> None:
    """Write the body of the program.

    It writes dr [parts, heads, window + 1, dim] = scale * dS^T (q + content bias), and
    distance_sums [parts, heads, window + 1], the sums of dS. Grid: parts x heads x tiles of
    distances, the last innermost.
    """
    problem = declare_problem()
    names = ("batch", "blocks", "parts", "tiles")
    batch, blocks, parts, tiles = (T.arg(name, T.int32()) for name in names)
    log_sums, dots = array("log_sums", problem.size), array("dots", problem.size)
    grad = array("grad", problem.size, "float32x4")
    dr, distance_sums = array("dr", problem.size), array("distance_sums", problem.size)
    memory = plan_distances(tile)
    with (
        T.launch_thread("blockIdx.x", blocks) as index,
        T.launch_thread("threadIdx.x", THREADS) as thread,
    ):
        shared = shared_memory(memory.floats)
        block = Block(tile, thread, shared)
        place = _locate(problem, tile, index, batch, parts, tiles)
        _load_distances(block, memory.r, problem, place)
        biases = _own_biases(block, problem, place)
        dr_sums, columns = filled(tile.columns * tile.width), filled(tile.columns)
        with T.serial(0, place.turns) as turn:
            work = _query_tile(block, problem, place, hold(place.first + turn))
            work.load_scaled_queries(memory.q, work.steps.first)
            work.load_queries(memory.grad, grad, work.steps.first)
            _add_slopes(work, memory, place, biases, (log_sums, dots), (dr_sums, columns))
        barrier()
        _write(block, problem, place, memory, (dr_sums, columns), (dr, distance_sums))


def _locate(
    problem: Problem, tile: Tile, index: Value, batch: Value, parts: Value, tiles: Value
) -> _Place:
    row = hold(T.truncdiv(index, tiles))
    part = hold(T.truncdiv(row, problem.heads))
    head = hold(row - part * problem.heads)
    delta = hold((index - row * tiles) * tile.block_columns)
    stride = hold(problem.strides[head])
    # The queries before step `delta` of their class see nothing at these distances.
    longest = ceil_div(problem.keys, stride) - delta
    longest = T.min(ceil_div(problem.queries, stride), T.max(longest, 0))
    each = hold(ceil_div(longest, tile.block_rows))
    every = hold(batch * stride * each)
    share = hold(ceil_div(every, parts))
    first = hold(part * share)
    turns = hold(T.max(T.min(share, every - first), 0))
    return _Place(head, stride, delta, part, each, first, turns)


def _query_tile(block: Block, problem: Problem, place: _Place, number: Value) -> Work:
    """Return one tile of queries that see the block's first distance."""
    row = hold(T.truncdiv(number, place.tiles))
    batch = hold(T.truncdiv(row, place.stride))
    residue = hold(row - batch * place.stride)
    start = T.max(ceil_steps(problem.offset, residue, place.stride), place.delta)
    steps = Steps(
        residue=residue,
        stride=place.stride,
        first=hold(start + (number - row * place.tiles) * block.tile.block_rows),
        stop=hold(ceil_steps(problem.keys, residue, place.stride)),
    )
    stream = Stream(hold(batch * problem.heads + place.head), batch, place.head, place.stride)
    return Work(block, problem, stream, steps)


def _distance_row(problem: Problem, place: _Place, column: Value) -> Value:
    """Return the row of r [heads * (window + 1), dim] of a column, or of the last one."""
    delta = T.min(place.delta + column, problem.window)
    return wide(place.head) * wide(problem.window + 1) + wide(delta)


def _load_distances(block: Block, panel: Panel, problem: Problem, place: _Place) -> None:
    load_panel(block, panel, problem.r, lambda row: _distance_row(problem, place, row))


def _own_biases(block: Block, problem: Problem, place: _Place) -> list[Value]:
    """Return the biases of a thread's columns."""
    columns = [block.first_column + j for j in range(block.tile.columns)]
    return [T.bind(problem.bias[_distance_row(problem, place, column)]) for column in columns]


def _add_slopes(
    work: Work,
    memory: DistanceMemory,
    place: _Place,
    biases: list[Value],
    statistics: tuple[Buffer, Buffer],
    sums: tuple[Buffer, Buffer],
) -> None:
    """Add what a tile of queries gives to dr and to the sums of the slopes."""
    tile, block, problem = work.tile, work.block, work.problem
    dr_sums, columns = sums
    log_sums, dots = statistics
    scores, slopes = (registers(tile.rows * tile.columns) for _ in range(2))
    key = hold(work.steps.first - place.delta - tile.block_columns)
    work.load_keys(memory.window, problem.k, key)
    barrier()
    for _, j, n in tile.places():
        T.buffer_store(scores, biases[j], [n])
    dot_rows(block, scores, memory.q, memory.r)
    fill(slopes, tile.rows * tile.columns, 0)
    dot_diagonals(block, slopes, memory.q, memory.window)
    for _, _, n in tile.places():
        add(scores, n, slopes[n])
    barrier()
    work.load_keys(memory.window, problem.v, key)
    barrier()
    fill(slopes, tile.rows * tile.columns, 0)
    dot_diagonals(block, slopes, memory.grad, memory.window)
    steps = [hold(work.steps.first + block.first_row + i) for i in range(tile.rows)]
    rows = query_rows(work, steps, log_sums, [T.bind(dots[work.statistic(s)]) for s in steps])
    limits = [T.min(limit, step) for limit, step in zip(rows.limits, steps, strict=True)]
    rows = rows._replace(limits=[hold(limit) for limit in limits])
    find_slopes(work, rows, scores, slopes, Vertical(hold(place.delta + block.first_column)))
    for _, j, n in tile.places():
        add(columns, j, slopes[n])
    barrier()
    block.write_tile(memory.slopes, slopes)
    barrier()
    add_transposed(block, dr_sums, memory.slopes, memory.q, (0, tile.block_rows // 4))
    barrier()


def _write(
    block: Block,
    problem: Problem,
    place: _Place,
    memory: DistanceMemory,
    sums: tuple[Buffer, Buffer],
    targets: tuple[Buffer, Buffer],
) -> None:
    """Write a block's sums for the distances up to the window."""
    tile = block.tile
    dr_sums, columns = sums
    dr, distance_sums = targets
    heads = wide(place.part) * wide(problem.heads) + wide(place.head)
    first = heads * wide(problem.window + 1) + wide(place.delta)
    for j in range(tile.columns):
        column = hold(block.y * tile.columns + j)
        with T.If(place.delta + column <= problem.window), T.Then():
            row = first + wide(column)
            block.store_row(dr, row, dr_sums, j * tile.width, T.float32(LN_2))
    start = memory.q.start
    sum_columns(block, columns, start)
    barrier()
    last = T.And(block.thread < tile.block_columns, place.delta + block.thread <= problem.window)
    with T.If(last), T.Then():
        total = block.shared[block.thread + start]
        T.buffer_store(distance_sums, total, [first + wide(block.thread)])
