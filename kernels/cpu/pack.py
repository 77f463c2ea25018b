"""Copies into the layouts that the tiles read.

What lies where. The callers' tensors are [batch, positions, heads, dim], contiguous. A head of
stride c falls apart into c independent sequences, one per residue rho = position mod c: their
element t is position rho + c * t, and in t the band is a plain window. Packing follows that rule,
so nothing behind it knows of strides. Local copies, all of one sequence:

    rows     [element][dim]                          left operands, right operands along dim
    strips   [element // lanes][dim][lanes]          right operands along keys: K or V transposed,
                                                     one strip of `lanes` keys after the other

The relative rows are packed once per call for all heads, reversed: column m of the strips is the
row of delta = window - m, so that column m of a query t belongs to key t - window + m, and scores
of content and position run in the same direction. One strip more than is needed is there to be
read, since tiles are wider than a strip.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, PrimFunc

from kernels.cpu.program import build_kernel
from kernels.cpu.targets import Tile
from kernels.cpu.tiles import load, opaque, prefetch, store, transpose

TASK_FIELDS = 6  # batch, head, residue, stride, first element, element after the last

Row = Callable[[Expr], tuple[Buffer, Expr]]
"""From the number of a row: the buffer that holds it and the index at which it begins."""


@dataclass(frozen=True)
class Sequence:
    """One residue class of one head of one batch entry, in the kernel that is being built."""

    batch: Expr
    head: Expr
    residue: Expr
    stride: Expr

    def position(self, element: Expr) -> Expr:
        """Return the position in the text of an element of the sequence."""
        return self.residue + self.stride * element

    def key_row(self, a: SimpleNamespace, element: Expr) -> Expr:
        """Return where an element's row of k, v or their gradients begins."""
        return self._row(self.position(element), a.key_count, a)

    def query_row(self, a: SimpleNamespace, element: Expr) -> Expr:
        """Return where an element's row of q, the output or their gradients begins."""
        return self._row(self.query(a, element), a.query_count, a)

    def query(self, a: SimpleNamespace, element: Expr) -> Expr:
        """Return the index among the queries: they are the last positions of the keys."""
        return self.position(element) - (a.key_count - a.query_count)

    def lse_place(self, a: SimpleNamespace, element: Expr) -> Expr:
        """Return where an element's log-sum-exp lies in [batch, heads, queries]."""
        row = self.batch * a.heads + self.head
        return opaque(row * a.query_count + self.query(a, element))

    def _row(self, position: Expr, positions: Expr, a: SimpleNamespace) -> Expr:
        return opaque(((self.batch * positions + position) * a.heads + self.head) * a.dim)


def read_task(tasks: Buffer, task: Expr) -> tuple[Sequence, Expr, Expr]:
    """Return the sequence of a row of the table of tasks, its first element and its end."""
    fields = [opaque(tasks[task * TASK_FIELDS + i]) for i in range(TASK_FIELDS)]
    return Sequence(*fields[:4]), fields[4], fields[5]


def pack_strips(
    tile: Tile,
    dim: int,
    target: Buffer,
    strips: tuple[Expr | int, Expr],
    count: Expr,
    source: Row,
    *,
    factor: Expr | None = None,
    base: Expr | int = 0,
) -> None:
    """Transpose rows into the strips from the first to before the second of `strips`.

    Row r lies in strip r // lanes. There are `count` rows; where a strip has more, the last one is
    repeated. Strip 0 begins at `base` of `target`. Entries are multiplied by `factor`.
    """
    lanes = tile.lanes
    with T.serial(*strips) as strip:
        rows = [source(opaque(T.min(strip * lanes + i, count - 1))) for i in range(lanes)]
        corner = opaque(base + strip * (dim * lanes))
        with T.serial(0, dim // lanes) as part:
            square = [T.bind(load(buffer, at + part * lanes, lanes)) for buffer, at in rows]
            for d, vector in enumerate(transpose(square, lanes)):
                scaled = vector if factor is None else vector * T.broadcast(factor, lanes)
                store(target, corner + (part * lanes + d) * lanes, scaled, lanes)


def pack_rows(
    tile: Tile, dim: int, target: Buffer, rows: tuple[Expr | int, Expr], source: Row
) -> None:
    """Copy the rows from the first to before the second of `rows`, one behind the other."""
    with T.serial(*rows) as row:
        buffer, at = source(row)
        for d in range(0, dim, tile.lanes):
            store(target, row * dim + d, load(buffer, at + d, tile.lanes), tile.lanes)


def ask_for_rows(
    rows: int, dim: int, buffers: list[Buffer], place: Callable[[int], Expr], write: bool = False
) -> None:
    """Prefetch rows of tensors of equal layout; `place` gives where each of them begins."""
    for i in range(rows):
        at = place(i)
        for buffer in buffers:
            prefetch(buffer, at, dim, write)


def relative_strips(tile: Tile, dim: int) -> PrimFunc:
    """Return the kernel that packs r [heads, window + 1, dim] into reversed strips, per head."""
    lanes = tile.lanes

    def body(a: SimpleNamespace) -> None:
        with T.serial(a.begin, a.end) as head:

            def row(column: Expr) -> tuple[Buffer, Expr]:
                return a.r, opaque((head * (a.window + 1) + a.window - column) * dim)

            pack_strips(
                tile,
                dim,
                a.packed,
                (0, a.strip_count),
                a.window + 1,
                row,
                base=opaque(head * a.strip_count * (dim * lanes)),
            )

    return build_kernel(
        "relative_strips",
        {
            "r": lambda a: a.heads * (a.window + 1) * dim,
            "packed": lambda a: a.heads * a.strip_count * (dim * lanes),
        },
        dict.fromkeys(("begin", "end", "heads", "window", "strip_count"), "int32"),
        body,
    )
