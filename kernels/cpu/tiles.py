"""Register tiles: the words in which the CPU programs are written.

What lies where. A tile is a small matrix that never leaves the vector registers while a product
runs: `rows` x `vectors` registers of `lanes` floats each. One step of the product takes one vector
per column of the tile from the right operand (contiguous in memory), one float per row from the
left operand (broadcast over the lanes), and multiplies and adds every pair:

                  right(k, 0)   right(k, 1)        memory: contiguous lanes
    left(0, k)    tile[0][0]    tile[0][1]
    left(1, k)    tile[1][0]    tile[1][1]         registers
    ...
    memory: one float each, anywhere

Where a float or a vector of an operand lies is said by a Python function of the loop variable, so
rows, columns, transposed and skewed (diagonal) operands are all the same product.

Each function here adds statements to the TIR function that is being built, or returns a TIR
expression; Python loops around them unroll at build time.
"""

from collections.abc import Callable

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

# 2**x on [-1/2, 1/2]: minimax polynomial in relative error (9e-8) with 2**0 exact; coefficients of
# x**5 down to x**0.
_EXP2 = (
    0.0013264727247111333,
    0.009671512688150714,
    0.055507337435741995,
    0.2402224208463512,
    0.6931469775987166,
    1.0,
)
_LINE = 16  # floats of a cache line
_ROUNDER = 1.5 * 2**23  # its bits end in 22 zeros


def splat(value: Expr | float, lanes: int) -> Expr:
    """Return a vector of `lanes` equal floats or integers."""
    return T.broadcast(T.float32(value) if isinstance(value, float) else value, lanes)


def load(buffer: Buffer, index: Expr | int, lanes: int) -> Expr:
    """Return `lanes` neighbouring entries."""
    return buffer[T.ramp(index, 1, lanes)]


def store(buffer: Buffer, index: Expr | int, value: Expr, lanes: int) -> None:
    """Write `lanes` neighbouring entries."""
    T.buffer_store(buffer, value, [T.ramp(index, 1, lanes)])


def prefetch(buffer: Buffer, index: Expr, count: int, write: bool = False) -> None:
    """Ask for the cache lines of `count` floats.

    Rows of one head are a stride apart that hardware does not foresee: writing them took up to
    three times as long without this.
    """
    for offset in range(0, count, _LINE):
        place = T.address_of(buffer[index + offset])
        hint = (T.int32(int(write)), T.int32(3), T.int32(1))  # into the nearest cache, of data
        T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", place, *hint))


def opaque(value: Expr) -> Expr:
    """Return a 32-bit integer that TVM's simplifier cannot look into.

    Expressions of symbolic divisions make it run for minutes; after a round trip through the stack,
    which LLVM removes, it sees a plain load.
    """
    cell = T.alloc_buffer((1,), "int32", scope="global")
    T.buffer_store(cell, value, [0])
    return T.bind(cell[0])


def variable(value: Expr, dtype: str = "float32") -> Buffer:
    """Return a one-entry buffer on the stack, a variable that loops may change."""
    cell = T.alloc_buffer((1,), dtype, scope="global")
    T.buffer_store(cell, value, [0])
    return cell


def registers(rows: int, vectors: int, lanes: int) -> list[list[Buffer]]:
    """Return a tile of registers.

    Only buffers of scope "global" below 1 KiB become stack variables, which LLVM keeps in
    registers; scope "local" would be memory from the heap.
    """
    return [
        [T.alloc_buffer((lanes,), "float32", scope="global") for _ in range(vectors)]
        for _ in range(rows)
    ]


def fill(tile: list[list[Buffer]], value: Callable[[int, int], Expr], lanes: int) -> None:
    """Set each register (row, vector) of a tile."""
    for i, row in enumerate(tile):
        for v, register in enumerate(row):
            store(register, 0, value(i, v), lanes)


def spill(tile: list[list[Buffer]], keep: Callable[[int, int, Expr], None], lanes: int) -> None:
    """Hand each register's value to keep(row, vector, value)."""
    for i, row in enumerate(tile):
        for v, register in enumerate(row):
            keep(i, v, load(register, 0, lanes))


def accumulate(
    tile: list[list[Buffer]],
    start: Expr | int,
    stop: Expr | int,
    left: Callable[[int, Expr], Expr],
    right: Callable[[Expr, int], Expr],
    lanes: int,
) -> None:
    """Add the product to a tile: tile[i][v] += sum over k of left(i, k) * right(k, v).

    `left` gives floats, `right` vectors. Each entry is summed in the order of k.
    """
    with T.serial(start, stop) as k:
        columns = [T.bind(right(k, v)) for v in range(len(tile[0]))]
        for i, row in enumerate(tile):
            weight = T.bind(T.broadcast(left(i, k), lanes))
            for register, column in zip(row, columns, strict=True):
                store(register, 0, load(register, 0, lanes) + weight * column, lanes)


def exp2(x: Expr, lanes: int) -> Expr:
    """Return 2**x of a vector, for x up to 127, to about 2e-7; what falls below 2**-126 is 2**-126.

    TVM's own exp2 of a vector calls the C library once per lane.
    """
    x = T.bind(T.max(x, splat(-126.0, lanes)))
    # The sum's low bits are the nearest integer. It goes through a cell: TVM cancels (x + a) - a.
    cell = registers(1, 1, lanes)[0][0]
    store(cell, 0, x + splat(_ROUNDER, lanes), lanes)
    rounded = T.bind(load(cell, 0, lanes))
    fraction = T.bind(x - (rounded - splat(_ROUNDER, lanes)))
    value = splat(_EXP2[0], lanes)
    for coefficient in _EXP2[1:]:
        value = value * fraction + splat(coefficient, lanes)
    # Shifting drops the rounder's own bits and brings the integer into the exponent.
    exponent = T.shift_left(T.reinterpret(f"int32x{lanes}", rounded), splat(T.int32(23), lanes))
    bits = T.reinterpret(f"int32x{lanes}", T.bind(value)) + exponent
    return T.bind(T.reinterpret(f"float32x{lanes}", bits))


def reduce(value: Expr, combine: Callable[[Expr, Expr], Expr], lanes: int) -> Expr:
    """Return the combination of all lanes, in every lane, by a butterfly of shuffles."""
    step = lanes // 2
    while step:
        value = T.bind(value)
        swapped = T.Shuffle([value], [T.int32(i ^ step) for i in range(lanes)])
        value = combine(value, swapped)
        step //= 2
    return T.bind(value)


def first(value: Expr) -> Expr:
    """Return the first lane of a vector."""
    return T.bind(T.Shuffle([value], [T.int32(0)]))


def iota(lanes: int, start: Expr | int = 0) -> Expr:
    """Return the integers start, start + 1, ... in a vector."""
    return T.ramp(T.int32(start) if isinstance(start, int) else start, 1, lanes)


def transpose(vectors: list[Expr], lanes: int) -> list[Expr]:
    """Return the transposed of a square of `lanes` vectors, by log2(lanes) rounds of shuffles.

    Round s swaps, between vectors i and i + s, the blocks of s lanes off the diagonal.
    """
    step = lanes // 2
    while step:
        low = [T.int32(j if j & step == 0 else lanes + j - step) for j in range(lanes)]
        high = [T.int32(j + step if j & step == 0 else lanes + j) for j in range(lanes)]
        result = list(vectors)
        for i in range(lanes):
            if i & step == 0:
                pair = [vectors[i], vectors[i + step]]
                result[i] = T.bind(T.Shuffle(pair, low))
                result[i + step] = T.bind(T.Shuffle(pair, high))
        vectors = result
        step //= 2
    return vectors
