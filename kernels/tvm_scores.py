"""What the forward and the backward program share: loading queries, and tiles of scores.

What lies where. Both programs work on blocks of `tile.block` queries against packed keys of the
same sequence. A row of scores is

    [left margin | columns of the keys | right margin]

and key `base` would lie in its column 0. The tile of relative panel m for the rows t, t + 1, ... is
stored skewed: its first column belongs to key t - window for row t, t + 1 - window for the next.
That is arithmetic on addresses only; the margins take what it writes beyond the keys.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels import tvm_random
from kernels.targets import Tile
from kernels.tvm_pack import Sequence
from kernels.tvm_tiles import accumulate, fill, iota, load, opaque, registers, spill, splat, store


@dataclass(frozen=True)
class Variant:
    """What a program is compiled for."""

    tile: Tile
    dim: int
    relative: bool
    dropout: bool

    @property
    def margin(self) -> int:
        """Columns left and right of the scores that skewed tiles may write to."""
        return self.tile.panel + self.tile.lanes


@dataclass(frozen=True)
class Block:
    """A block of queries and a block of keys, as elements of their sequence."""

    sequence: Sequence
    query: Expr  # the first query
    end_query: Expr  # the element after the last query of the task
    first_row: Expr  # where the first query lies among the loaded ones
    first_key: Expr
    end_key: Expr
    base: Expr  # the key that would lie in column 0 of the scores
    row_length: int

    def column(self, row: Expr, key: Expr) -> Expr:
        """Return where the score of a row of the block and a key lies."""
        return row * self.row_length + key - self.base


def load_queries(
    variant: Variant,
    a: SimpleNamespace,
    sequence: Sequence,
    element: Expr,
    valid: Expr,
    row: Expr,
    targets: tuple[Buffer, Buffer | None],
) -> None:
    """Write (q + u) and (q + p) of one element, times the factor, to a row of `targets`.

    Where `valid` is false zeros are written; the element must exist all the same.
    """
    dim, lanes = variant.dim, variant.tile.lanes
    position = opaque(sequence.position(element) - (a.key_count - a.query_count))
    at = sequence.address(position, a.query_count, a.heads, dim)
    factor = T.bind(T.broadcast(T.Select(valid, a.factor, T.float32(0)), lanes))
    bias = opaque(sequence.head * dim)
    content, place = targets
    for d in range(0, dim, lanes):
        query = T.bind(load(a.q, at + d, lanes))
        if variant.relative:
            with_content = query + load(a.content_bias, bias + d, lanes)
            with_place = query + load(a.position_bias, bias + d, lanes)
            store(place, row * dim + d, with_place * factor, lanes)
            store(content, row * dim + d, with_content * factor, lanes)
        else:
            store(content, row * dim + d, query * factor, lanes)


def product_tile(
    variant: Variant, rows: Buffer, row_at: Expr, panels: Buffer, panel_at: Expr
) -> list[list[Buffer]]:
    """Return a tile of the products of rows and the columns of a panel, summed over dim."""
    tile, dim, lanes = variant.tile, variant.dim, variant.tile.lanes
    sums = registers(tile.rows, tile.columns, lanes)
    fill(sums, lambda i, v: splat(0.0, lanes), lanes)
    accumulate(
        sums,
        0,
        dim,
        lambda i, d: rows[row_at + i * dim + d],
        lambda d, v: load(panels, panel_at + d * tile.panel + v * lanes, lanes),
        lanes,
    )
    return sums


def position_scores(
    variant: Variant, a: SimpleNamespace, block: Block, place: Buffer, scores: Buffer
) -> None:
    """Write (q + p) . r to the columns of the keys, row by row; a.packed holds r in panels."""
    tile, dim, lanes = variant.tile, variant.dim, variant.tile.lanes
    packed = opaque(block.sequence.head * a.panel_count * (dim * tile.panel))
    with (
        T.serial(0, a.panel_count) as panel,
        T.serial(0, tile.block // tile.rows) as group,
    ):
        query = opaque(block.query + group * tile.rows)
        key = opaque(query - a.window + panel * tile.panel)  # of row 0, column 0
        inside = T.And(key < block.end_key, key + tile.rows + tile.panel > block.first_key)
        with T.If(T.And(inside, query < block.end_query)), T.Then():
            sums = product_tile(
                variant,
                place,
                opaque((block.first_row + group * tile.rows) * dim),
                a.packed,
                opaque(packed + panel * (dim * tile.panel)),
            )
            at = opaque(block.column(group * tile.rows, key))
            step = block.row_length + 1
            spill(sums, lambda i, v, x: store(scores, at + i * step + v * lanes, x, lanes), lanes)


def sees(block: Block, a: SimpleNamespace, tile: Tile, query: Expr) -> Expr:
    """Whether a row of the tile at `query` exists and sees a key of the block."""
    return T.And(
        T.And(query < block.end_query, query - a.window < block.end_key),
        query + tile.rows > block.first_key,
    )


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
