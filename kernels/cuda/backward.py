"""The CUDA programs of the backward pass: gradients of the queries, and of keys and values.

Both find the weights again from the scores and the forward's log-sum-exp. Blocks share nothing and
nothing is added atomically, so the result has the same bits every time. With P the weights, K what
dropout multiplies them by, and o the output:

    slopes dS = P * (K * (do . v) - do . o)      dq = scale * dS (k + r)
    dv = (P * K)^T do                            dk = scale * dS^T (q + content bias)

The gradient of the content bias is the sum over dS^T's rows times k, found per tile of keys. Those
of r and of the position bias have their own program (tvm_cuda_distances.py).
"""

from typing import NamedTuple

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels.cuda.band import (
    Diagonal,
    Vertical,
    Work,
    declare_problem,
    find_scores,
    kept,
    row_keys,
    tile_distances,
    warp_sees,
)
from kernels.cuda.forward import key_tiles, query_tile, seen_columns, thread_steps
from kernels.cuda.layout import THREADS, Panel, QueryMemory, Tile, plan_queries
from kernels.cuda.products import add_weighted, dot_rows
from kernels.cuda.tiles import (
    Block,
    Value,
    across,
    array,
    at,
    barrier,
    fill,
    filled,
    hold,
    plus,
    registers,
    shared_memory,
    unpack,
    warp_barrier,
)

LN_2 = 0.6931471805599453  # the left side of the scores holds log2(e)


class Rows(NamedTuple):
    """What the backward knows of a thread's rows, one entry per row."""

    log_sums: list[Value]
    dots: list[Value]  # do . o
    limits: list[Value]  # the greatest distance that is seen; -1 for a row past the end
    keys: list[Value]  # for dropout


def query_rows(work: Work, steps: list[Value], log_sums: Buffer, dots: list[Value]) -> Rows:
    """Return what is known of the queries at a thread's steps."""
    limits = [T.Select(step < work.steps.stop, work.problem.window, -1) for step in steps]
    return Rows(
        [T.bind(log_sums[work.statistic(step)]) for step in steps],
        dots,
        [hold(limit) for limit in limits],
        row_keys(work, steps),
    )


def find_slopes(
    work: Work, rows: Rows, scores: Buffer, slopes: Buffer, distances: Diagonal | Vertical
) -> None:
    """Turn scores into weights after dropout, and products do . v into slopes."""
    for i, j, n in work.tile.places():
        delta = distances.delta(i, j)
        seen = T.And(delta >= 0, delta <= rows.limits[i])
        weight = T.exp2(scores[n] - rows.log_sums[i])
        weight = T.bind(T.Select(seen, weight, T.float32(0)))
        factor = T.bind(kept(work, rows.keys[i], delta)) if rows.keys else T.float32(1)
        T.buffer_store(slopes, weight * (slopes[n] * factor - rows.dots[i]), [n])
        T.buffer_store(scores, weight * factor, [n])


def backward_queries(tile: Tile) -> None:
    """Write the body of the program for dq.

    It also writes dots [batch, heads, queries] = do . o for the other programs. The grid is the
    forward's.
    """
    problem = declare_problem()
    tiles, blocks = T.arg("tiles", T.int32()), T.arg("blocks", T.int32())
    factor = T.arg("scale", T.float32())
    out, log_sums = array("out", problem.size), array("log_sums", problem.size)
    grad = array("grad", problem.size, "float32x4")
    dots, dq = array("dots", problem.size), array("dq", problem.size)
    memory = plan_queries(tile)
    with (
        T.launch_thread("blockIdx.x", blocks) as index,
        T.launch_thread("threadIdx.x", THREADS) as thread,
    ):
        shared = shared_memory(memory.floats)
        work = query_tile(Block(tile, thread, shared), problem, index, tiles)
        work.load_scaled_queries(memory.q, work.steps.first)
        work.load_queries(memory.grad, grad, work.steps.first)
        barrier()
        steps = thread_steps(work)
        own_dots = [_dot_output(work, memory.grad, i, step, out) for i, step in enumerate(steps)]
        rows = query_rows(work, steps, log_sums, own_dots)
        sums = filled(tile.rows * tile.width)
        first, count = key_tiles(work)
        with T.serial(0, count) as turn:
            _add_query_slopes(work, memory, rows, sums, hold(first + turn * tile.block_columns))
        for i, step in enumerate(steps):
            with T.If(step < work.steps.stop), T.Then():
                work.block.store_row(dq, work.query_row(step), sums, i * tile.width, factor)
                with T.If(work.block.x == 0), T.Then():
                    T.buffer_store(dots, own_dots[i], [work.statistic(step)])


def _dot_output(work: Work, grad: Panel, i: int, step: Value, out: Buffer) -> Value:
    """Return do . o of a thread's row i."""
    tile, block = work.tile, work.block
    ours, theirs = registers(tile.width), registers(tile.width)
    for register, column in block.pieces():
        place = block.place(work.query_row(step), column)
        unpack(ours, register, out[place], tile.lanes)
        block.read(theirs, register, at(grad, block.y, i, column), tile.lanes)
    products = [ours[c] * theirs[c] for c in range(tile.width)]
    return across(T.bind(sum(products[1:], products[0])), plus)


def _add_query_slopes(
    work: Work, memory: QueryMemory, rows: Rows, sums: Buffer, column: Value
) -> None:
    """Add what a tile of keys gives to dq."""
    tile, block, problem = work.tile, work.block, work.problem
    base = hold(work.steps.first - column)
    work.load_keys(memory.k, problem.k, column)
    work.load_keys(memory.v, problem.v, column)
    if memory.window is not None and memory.biases is not None:
        distance = hold(base - tile.block_columns)
        work.load_distances(memory.window, distance)
        work.load_biases(memory.biases, memory.window.rows, distance)
    scores, slopes = (registers(tile.rows * tile.columns) for _ in range(2))
    barrier()
    with T.If(warp_sees(block, base, problem.window)), T.Then():
        find_scores(block, memory, scores, slopes)
        fill(slopes, tile.rows * tile.columns, 0)
        dot_rows(block, slopes, memory.grad, memory.v)
        find_slopes(work, rows, scores, slopes, tile_distances(block, base))
    barrier()
    with T.If(warp_sees(block, base, problem.window)), T.Then():
        block.write_tile(memory.slopes, slopes)
        warp_barrier()
        columns = seen_columns(block, base, problem.window)
        add_weighted(block, sums, memory.slopes, memory.k, memory.window, columns)
    barrier()
