"""The second part of the backward pass: shares of gradients that several tasks add to.

What lies where. A task of the backward program (tvm_backward.py) leaves behind, in buffers that
belong to the thread,

    part_query      [query][dim]   its share of the gradient of q, before scaling
    part_relative   [row of r, reversed as in the strips][dim], then du [dim], then dp [dim]

The queries that see keys of one task only are written by the program itself. The others lie at the
two ends of the task: those that see keys of earlier tasks too, and those that come after its keys.
"""

from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, PrimFunc

from kernels.cpu.pack import TASK_FIELDS, Sequence, read_task
from kernels.cpu.program import SIZES, build_kernel
from kernels.cpu.scores import Shape
from kernels.cpu.tiles import load, opaque, store

LN2 = 0.6931471805599453  # turns sums made with factors of log2(e) into gradients


def query_range(
    a: SimpleNamespace, sequence: Sequence, first_key: Expr, end_key: Expr
) -> tuple[Expr, Expr]:
    """Return the first query that sees a key of the task and the element after the last one."""
    offset = T.max(a.key_count - a.query_count - sequence.residue, 0)
    first_query = T.truncdiv(offset + sequence.stride - 1, sequence.stride)
    begin = opaque(T.max(first_query, first_key))
    return begin, opaque(T.min(elements(a, sequence), end_key + a.window))


def elements(a: SimpleNamespace, sequence: Sequence) -> Expr:
    """Return how many elements a sequence has."""
    span = a.key_count - sequence.residue + sequence.stride - 1
    return opaque(T.truncdiv(span, sequence.stride))


def first_fresh(a: SimpleNamespace, first_key: Expr) -> Expr:
    """Return the first query that sees no key before the task's."""
    return opaque(T.Select(first_key > 0, first_key + a.window, T.int32(0)))


def write_queries(
    shape: Shape,
    a: SimpleNamespace,
    sequence: Sequence,
    begin: Expr,
    queries: tuple[Expr, Expr],
    add: bool = False,
) -> None:
    """Write a task's share of the gradients of some queries, or add it to what lies there.

    Row 0 of the share is that of the query `begin`.
    """
    dim, lanes = shape.dim, shape.tile.lanes
    with T.serial(*queries) as query:
        at = sequence.query_row(a, query)
        row = opaque((query - begin) * dim)
        for d in range(0, dim, lanes):
            share = load(a.part_query, row + d, lanes) * T.broadcast(a.scale, lanes)
            store(a.d_q, at + d, load(a.d_q, at + d, lanes) + share if add else share, lanes)


def finish(shape: Shape) -> PrimFunc:
    """Return the kernel that brings the shares of a run of tasks of one head to the gradients.

    Runs of one head must come in the order of the table of tasks, whatever threads they were
    computed on: sums then have the same bits every time. Rows of d_q that no earlier task has seen
    are written, others added to; d_r, d_content and d_position are added to and must begin as zero.
    """
    dim = shape.dim
    relative = {
        "part_relative": lambda a: (a.strip_count * shape.tile.lanes + 2) * dim,
        "d_r": lambda a: a.heads * (a.window + 1) * dim,
        "d_content": lambda a: a.heads * dim,
        "d_position": lambda a: a.heads * dim,
    }

    def body(a: SimpleNamespace) -> None:
        a.dim = dim
        sequence, first_key, end_key = read_task(a.tasks, a.begin)
        begin, end = query_range(a, sequence, first_key, end_key)
        fresh = first_fresh(a, first_key)
        shared = (begin, opaque(T.min(fresh, end)))
        write_queries(shape, a, sequence, begin, shared, add=True)
        later = opaque(T.max(T.max(fresh, end_key), begin))
        write_queries(shape, a, sequence, begin, (later, end))
        if shape.relative:
            _add_relative_gradients(shape, a, sequence.head)

    return build_kernel(
        "finish",
        {
            "tasks": lambda a: a.task_count * TASK_FIELDS,
            "part_query": lambda a: a.part_rows * dim,
            "d_q": lambda a: a.batch * a.query_count * a.heads * dim,
        }
        | (relative if shape.relative else {}),
        dict.fromkeys(("begin", *SIZES, "part_rows"), "int32") | {"scale": "float32"},
        body,
    )


def _add_relative_gradients(shape: Shape, a: SimpleNamespace, head: Expr) -> None:
    dim, lanes = shape.dim, shape.tile.lanes

    def add(target: Buffer, at: Expr, source: Expr, factor: Expr) -> None:
        for d in range(0, dim, lanes):
            share = load(a.part_relative, source + d, lanes) * T.broadcast(factor, lanes)
            store(target, at + d, load(target, at + d, lanes) + share, lanes)

    newest = opaque((head * (a.window + 1) + a.window) * dim)
    with T.serial(0, a.window + 1) as m:
        # (q + p) carries scale * log2(e); the scale belongs here, log2(e) does not.
        add(a.d_r, opaque(newest - m * dim), opaque(m * dim), T.float32(LN2))
    biases = opaque(a.strip_count * (shape.tile.lanes * dim))
    add(a.d_content, opaque(head * dim), biases, a.scale)
    add(a.d_position, opaque(head * dim), opaque(biases + dim), a.scale)
