"""The dropout mask's hash as TIR expressions, for scalars and vectors, on CPUs and GPUs.

The mask itself is defined in dropout.py; this is the same arithmetic in 32-bit words. Operands are
32-bit integers of either sign (or vectors of them) and are taken as bits; results are uint32.
Nothing lies in memory: a row's key is one word, an entry of the mask is computed where it is used.
`scope` is where a word being mixed is kept: "global" is the stack on a CPU, "local" on a GPU; both
compile to a register.
"""

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

DELTA_FACTOR = 0x01000193


def word(value: int, lanes: int = 1) -> Expr:
    """Return a uint32 constant, in every lane of a vector if lanes > 1."""
    scalar = T.uint32(value)
    return T.broadcast(scalar, lanes) if lanes > 1 else scalar


def bits(value: Expr, lanes: int = 1) -> Expr:
    """Return the bits of an int32 as uint32.

    A cast would be folded through negative constants, which TVM's uint32 cannot hold.
    """
    return T.reinterpret(f"uint32x{lanes}" if lanes > 1 else "uint32", value)


def fmix(x: Expr, lanes: int = 1, scope: str = "global") -> Expr:
    """Return murmur3's finaliser of a uint32.

    The word goes through a cell in memory (a register after compilation): nested as one
    expression, where every step names its operand twice, it would outgrow TVM's passes.
    """
    cell = T.alloc_buffer((lanes,), "uint32", scope=scope)
    place = T.ramp(0, 1, lanes) if lanes > 1 else 0

    def update(value: Expr) -> Expr:
        T.buffer_store(cell, value, [place])
        return cell[place]

    x = update(x)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = update(T.bitwise_xor(x, T.shift_right(x, word(shift, lanes))))
        x = update(x * word(factor, lanes))
    return T.bind(update(T.bitwise_xor(x, T.shift_right(x, word(16, lanes)))))


def seed_key(low: Expr, high: Expr, scope: str = "global") -> Expr:
    """Return the key of a seed given as its two 32-bit halves (int32 arguments of a kernel)."""
    inner = fmix(T.bitwise_xor(bits(low), word(0x9E3779B9)), scope=scope)
    return fmix(T.bitwise_xor(inner, bits(high)), scope=scope)


def row_key(key: Expr, stream: Expr, position: Expr, scope: str = "global") -> Expr:
    """Return the key of an attention row: stream is batch * heads + head, both int32."""
    inner = fmix(T.bitwise_xor(key, bits(stream)), scope=scope)
    return fmix(T.bitwise_xor(inner, bits(position)), scope=scope)


def keep(row: Expr, delta: Expr, threshold: Expr, lanes: int = 1, scope: str = "global") -> Expr:
    """Return whether weights are kept, for a row's key and int32 deltas, all of `lanes` lanes.

    `threshold` is round(dropout * 2**24), an int32.
    """
    product = bits(delta, lanes) * word(DELTA_FACTOR, lanes)
    mixed = fmix(T.bitwise_xor(row, product), lanes, scope)
    return T.shift_right(mixed, word(8, lanes)) >= bits(threshold, lanes)
