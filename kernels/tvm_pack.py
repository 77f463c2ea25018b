"""Copies into the layouts that the tiles read.

What lies where. The callers' tensors are [batch, positions, heads, dim], contiguous. A head of
stride c falls apart into c independent sequences, one per residue rho = position mod c: their
element t is position rho + c * t, and in t the band is a plain window. Packing follows that rule,
so nothing behind it knows of strides. Local copies, all of one sequence:

    rows     [element][dim]                          left operands, right operands along dim
    panels   [element // panel][dim][panel keys]     right operands along keys: K or V transposed,
                                                     one panel after the other

The relative rows are packed once per call for all heads, reversed: column m of panel storage is
the row of delta = window - m, so that column m of a query t belongs to key t - window + m, and
scores of content and position run in the same direction.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, PrimFunc

from kernels.targets import Tile
from kernels.tvm_program import build_kernel
from kernels.tvm_tiles import load, opaque, store, transpose

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

    def address(self, position: Expr, positions: Expr, heads: Expr, dim: int) -> Expr:
        """Return where a row of a [batch, positions, heads, dim] tensor begins."""
        return opaque(((self.batch * positions + position) * heads + self.head) * dim)


def read_task(tasks: Buffer, task: Expr) -> tuple[Sequence, Expr, Expr]:
    """Return the sequence of a row of the table of tasks, its first element and its end."""
    fields = [opaque(tasks[task * TASK_FIELDS + i]) for i in range(TASK_FIELDS)]
    return Sequence(*fields[:4]), fields[4], fields[5]


def pack_panels(
    tile: Tile,
    dim: int,
    target: Buffer,
    count: Expr,
    source: Row,
    factor: Expr | None = None,
    base: Expr | int = 0,
) -> None:
    """Transpose rows 0 .. count - 1 into panels that begin at `base`, each entry times `factor`.

    Panels are filled in strips of `lanes` keys: what is left of the last strip repeats a row, and
    strips behind it stay as they were.
    """
    lanes = tile.lanes
    with T.serial(0, T.truncdiv(count + lanes - 1, lanes)) as strip:
        rows = [source(opaque(T.min(strip * lanes + i, count - 1))) for i in range(lanes)]
        panel = opaque(T.truncdiv(strip, tile.columns))
        corner = opaque(base + panel * (dim * tile.panel) + (strip - panel * tile.columns) * lanes)
        with T.serial(0, dim // lanes) as part:
            square = [T.bind(load(buffer, at + part * lanes, lanes)) for buffer, at in rows]
            for d, vector in enumerate(transpose(square, lanes)):
                scaled = vector if factor is None else vector * T.broadcast(factor, lanes)
                store(target, corner + (part * lanes + d) * tile.panel, scaled, lanes)


def pack_rows(tile: Tile, dim: int, target: Buffer, count: Expr, source: Row) -> None:
    """Copy rows 0 .. count - 1, one behind the other."""
    with T.serial(0, count) as row:
        buffer, at = source(row)
        for d in range(0, dim, tile.lanes):
            store(target, row * dim + d, load(buffer, at + d, tile.lanes), tile.lanes)


def relative_panels(tile: Tile, dim: int) -> PrimFunc:
    """Return the kernel that packs r [heads, window + 1, dim] into reversed panels, per head."""

    def body(a: SimpleNamespace) -> None:
        with T.serial(a.begin, a.end) as head:
            base = opaque(head * a.panel_count * (dim * tile.panel))

            def row(column: Expr) -> tuple[Buffer, Expr]:
                return a.r, opaque((head * (a.window + 1) + a.window - column) * dim)

            pack_panels(tile, dim, a.packed, a.window + 1, row, base=base)

    return build_kernel(
        "relative_panels",
        {
            "r": lambda a: a.heads * (a.window + 1) * dim,
            "packed": lambda a: a.heads * a.panel_count * (dim * tile.panel),
        },
        dict.fromkeys(("begin", "end", "heads", "window", "panel_count"), "int32"),
        body,
    )
