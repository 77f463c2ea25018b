"""What the forward and the backward program share: loading queries, and tiles of scores.

What lies where. A group is `tile.rows` successive queries. Its rows of scores are

    [left margin | columns of the keys | right margin]

and key `base` would lie in column 0. Tiles cover whole strips of keys (see tvm_pack.py), `columns`
of them or one less. The tile of relative strip m for the rows t, t + 1, ... is stored skewed: its
first column belongs to key t - window for row t, t + 1 - window for the next. That is arithmetic on
addresses only; the margins take what it writes beyond the keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels import dropout_tir as tvm_random
from kernels.cpu.pack import Sequence
from kernels.cpu.targets import Tile
from kernels.cpu.tiles import (
    accumulate,
    fill,
    iota,
    load,
    opaque,
    registers,
    spill,
    splat,
    store,
)


@dataclass(frozen=True)
class Shape:
    """What a program is compiled for."""

    tile: Tile
    dim: int
    relative: bool
    dropout: bool

    @property
    def margin(self) -> int:
        """Columns left and right of the scores that skewed and wide tiles may write to."""
        return 2 * self.tile.lanes + -(-8 // self.tile.lanes) * self.tile.lanes


@dataclass(frozen=True)
class Group:
    """A group of queries against a run of keys, as elements of their sequence."""

    sequence: Sequence
    query: Expr  # the first query
    row: Expr  # where it lies among the loaded queries
    first_key: Expr  # of the packed keys
    end_key: Expr
    left: Expr  # the first strip that the group sees, and the one after the last
    right: Expr
    scores: Expr  # where the score of its first row and of key 0 would lie
    row_length: int

    @staticmethod
    def strips(
        a: SimpleNamespace, tile: Tile, query: Expr, first_key: Expr, end_key: Expr
    ) -> tuple[Expr, Expr]:
        """Return the strips of packed keys that the group at `query` sees."""
        oldest = T.max(query - a.window - first_key, 0)
        newest = T.min(query + tile.rows, end_key) - first_key
        left = opaque(T.truncdiv(oldest, tile.lanes))
        return left, opaque(T.truncdiv(newest + tile.lanes - 1, tile.lanes))


def load_query(
    shape: Shape,
    a: SimpleNamespace,
    sequence: Sequence,
    element: Expr,
    valid: Expr,
    row: Expr,
    targets: tuple[Buffer, Buffer],
) -> None:
    """Write (q + u) and (q + p) of one element, times the factor, to a row of `targets`.

    Where `valid` is false zeros are written; the element must exist all the same.
    """
    dim, lanes = shape.dim, shape.tile.lanes
    at = sequence.query_row(a, element)
    factor = T.bind(T.broadcast(T.Select(valid, a.factor, T.float32(0)), lanes))
    bias = opaque(sequence.head * dim)
    content, place = targets
    for d in range(0, dim, lanes):
        query = T.bind(load(a.q, at + d, lanes))
        if shape.relative:
            with_content = query + load(a.content_bias, bias + d, lanes)
            with_place = query + load(a.position_bias, bias + d, lanes)
            store(place, row * dim + d, with_place * factor, lanes)
            store(content, row * dim + d, with_content * factor, lanes)
        else:
            store(content, row * dim + d, query * factor, lanes)


def product_tiles(
    shape: Shape,
    rows: tuple[Buffer, Expr],
    strips: tuple[Buffer, Expr],
    span: tuple[Expr, Expr],
    write: Callable[[Expr, int, int, Expr], None],
) -> None:
    """Multiply a group's rows with strips from the first to before the second of `span`.

    `rows` and `strips` are buffers and the places of the group's first row and of strip 0. Sums go
    to write(strip, row, vector, value): `vector` counts the strips from `strip`, a tile's first.
    One strip more than asked for may be computed.
    """
    tile, dim, lanes = shape.tile, shape.dim, shape.tile.lanes
    left, right = span
    count = opaque(right - left)

    def tiles(begin: Expr, number: Expr, columns: int) -> None:
        with T.serial(0, number) as i:
            strip = opaque(begin + i * columns)
            first = opaque(strips[1] + strip * (dim * lanes))
            sums = registers(tile.rows, columns, lanes)
            fill(sums, lambda i, v: splat(0.0, lanes), lanes)
            accumulate(
                sums,
                0,
                dim,
                lambda i, d: rows[0][rows[1] + i * dim + d],
                lambda d, v: load(strips[0], first + (v * dim + d) * lanes, lanes),
                lanes,
            )
            spill(sums, lambda i, v, value: write(strip, i, v, value), lanes)

    wide = tile.columns
    if wide == 2:
        tiles(left, T.truncdiv(count + 1, 2), 2)
    else:
        # As many narrow tiles as the wide ones leave a remainder for: none is a single strip.
        narrow = opaque(T.truncmod(wide - T.truncmod(count, wide), wide))
        narrow = opaque(T.min(narrow, T.truncdiv(count + wide - 2, wide - 1)))
        rest = opaque(T.max(T.truncdiv(count - narrow * (wide - 1), wide), 0))
        tiles(left, rest, wide)
        tiles(opaque(left + rest * wide), narrow, wide - 1)


def position_scores(
    shape: Shape, a: SimpleNamespace, group: Group, place: Buffer, scores: Buffer
) -> None:
    """Write (q + p) . r to the columns of the keys, row by row; a.packed holds r in strips."""
    tile, dim, lanes = shape.tile, shape.dim, shape.tile.lanes
    packed = opaque(group.sequence.head * a.strip_count * (dim * lanes))
    first = opaque(group.query - a.window)  # the key of row 0, column 0
    oldest = T.max(group.first_key - first - (tile.rows - 1), 0)
    newest = T.min(group.end_key - first, a.window + 1)
    span = (
        opaque(T.truncdiv(oldest, lanes)),
        opaque(T.truncdiv(newest + lanes - 1, lanes)),
    )
    corner = opaque(group.scores + first)
    step = group.row_length + 1

    def write(strip: Expr, i: int, v: int, value: Expr) -> None:
        store(scores, corner + (strip + v) * lanes + i * step, value, lanes)

    product_tiles(shape, (place, opaque(group.row * dim)), (a.packed, packed), span, write)


def deltas(first: Expr, lanes: int) -> Expr:
    """Return delta of the lanes of a vector whose first one is `first`: it falls by one a lane."""
    return T.bind(T.broadcast(first, lanes) - iota(lanes))


def visible(delta: Expr, window: Expr, lanes: int) -> Expr:
    """Return 0 <= delta <= window, as one comparison of unsigned numbers."""
    return tvm_random.bits(delta, lanes) <= T.broadcast(tvm_random.bits(window), lanes)


def dropout_row(a: SimpleNamespace, sequence: Sequence, seed: Expr, element: Expr) -> Expr:
    """Return the key of a row of the dropout mask."""
    stream = opaque(sequence.batch * a.heads + sequence.head)
    return tvm_random.row_key(seed, stream, opaque(sequence.position(element)))
