"""The matrix products of the CUDA programs, on panels in shared memory, summed in registers.

With the relative terms a thread's tile touches only the rows + columns - 1 distances on its
diagonals. So r is read along them from a window of distances (for the gradient of r: k and v from a
window of keys); nothing is skewed or copied, and nothing outside the tile is computed.
"""

from collections.abc import Iterator

from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels.cuda.layout import Panel, Tile
from kernels.cuda.tiles import Block, Value, add, at, registers


def dot_rows(block: Block, out: Buffer, left: Panel, right: Panel) -> None:
    """Add the dot products of a thread's rows of two panels: out[i, j] += left[i] . right[j]."""
    tile = block.tile
    lefts, rights = registers(tile.rows * 4), registers(tile.columns * 4)
    with T.serial(0, tile.dim // 4) as chunk:
        for i in range(tile.rows):
            block.read(lefts, 4 * i, at(left, block.y, i, chunk * 4), 4)
        for j in range(tile.columns):
            block.read(rights, 4 * j, at(right, block.x, j, chunk * 4), 4)
        for i, j, n in _products(tile):
            add(out, i * tile.columns + j, lefts[4 * i + n] * rights[4 * j + n])


def dot_diagonals(block: Block, out: Buffer, left: Panel, window: Panel) -> None:
    """Add the dot products of a thread's rows and the window's rows on its diagonals.

    out[i, j] += left[row i] . window[row i - column j + block_columns]
    """
    tile = block.tile
    lefts = registers(tile.rows * 4)
    diagonals = registers((tile.rows + tile.columns - 1) * 4)
    with T.serial(0, tile.dim // 4) as chunk:
        for i in range(tile.rows):
            block.read(lefts, 4 * i, at(left, block.y, i, chunk * 4), 4)
        for d in range(1 - tile.columns, tile.rows):
            place = at(window, _first_diagonal(block), d, chunk * 4)
            block.read(diagonals, 4 * (d + tile.columns - 1), place, 4)
        for i, j, n in _products(tile):
            diagonal = diagonals[4 * (i - j + tile.columns - 1) + n]
            add(out, i * tile.columns + j, lefts[4 * i + n] * diagonal)


def add_weighted(
    block: Block,
    out: Buffer,
    weights: Panel,
    values: Panel,
    window: Panel | None,
    fours: tuple[Value, Value],
) -> None:
    """Add rows of `values`, and of a window along the diagonals, by a tile of weights.

    out[i, :] += sum over columns c of
                 weights[row i, c] * (values[c] + window[row i - c + block_columns])

    for the columns 4 * fours[0] <= c < 4 * fours[1].
    """
    tile = block.tile
    factors = registers(tile.rows * 4)
    row = registers(tile.width)
    # Window rows on the diagonals -3 to rows - 1 of the present four columns. The next four need
    # those four rows higher: the last three are kept, four are read.
    diagonals = registers((tile.rows + 3) * tile.width)
    first, stop = fours
    if window is not None:
        for d in range(1, tile.rows):
            _read_diagonal(block, diagonals, window, first, d)
    with T.serial(0, stop - first) as step:
        four = first + step
        for i in range(tile.rows):
            block.read(factors, 4 * i, at(weights, block.y, i, four * 4), 4)
        if window is not None:
            for d in range(-3, 1):
                _read_diagonal(block, diagonals, window, four, d)
        for n in range(4):
            _read_row(block, row, values, four, n)
            for i in range(tile.rows):
                for c in range(tile.width):
                    value = row[c]
                    if window is not None:
                        value = value + diagonals[(i - n + 3) * tile.width + c]
                    add(out, i * tile.width + c, factors[4 * i + n] * value)
        if window is not None:
            for c in reversed(range((tile.rows - 1) * tile.width)):
                T.buffer_store(diagonals, diagonals[c], [c + 4 * tile.width])


def add_transposed(
    block: Block, out: Buffer, weights: Panel, values: Panel, fours: tuple[Value, Value]
) -> None:
    """Add rows of `values` by the transpose of a tile of weights.

    out[j, :] += sum over rows a of weights[a, y * columns + j] * values[a], for thread (y, x) and
    the rows 4 * fours[0] <= a < 4 * fours[1].
    """
    tile = block.tile
    factors = registers(tile.columns)
    row = registers(tile.width)
    first, stop = fours
    with T.serial(0, stop - first) as step:
        four = first + step
        for n in range(4):
            place = at(weights, four * (4 // weights.group), n, block.y * tile.columns)
            block.read(factors, 0, place, tile.columns)
            _read_row(block, row, values, four, n)
            for j in range(tile.columns):
                for c in range(tile.width):
                    add(out, j * tile.width + c, factors[j] * row[c])


def _products(tile: Tile) -> Iterator[tuple[int, int, int]]:
    return ((i, j, n) for n in range(4) for i in range(tile.rows) for j in range(tile.columns))


def _first_diagonal(block: Block) -> Value:
    """Return the group of window rows in which the thread's first row and column meet."""
    tile = block.tile
    rows, columns = tile.rows // tile.group, tile.columns // tile.group
    return block.y * rows - block.x * columns + tile.block_columns // tile.group


def _read_diagonal(block: Block, target: Buffer, window: Panel, four: Value, d: int) -> None:
    """Read the window's row for the thread's first row + d and the column 4 * four."""
    tile = block.tile
    group = block.y * (tile.rows // tile.group) - four * (4 // tile.group)
    group = group + tile.block_columns // tile.group
    for register, column in block.pieces():
        place = at(window, group, d, column)
        block.read(target, (d + 3) * tile.width + register, place, tile.lanes)


def _read_row(block: Block, target: Buffer, values: Panel, four: Value, n: int) -> None:
    """Read the thread's columns of row 4 * four + n."""
    for register, column in block.pieces():
        place = at(values, four * (4 // values.group), n, column)
        block.read(target, register, place, block.tile.lanes)
