"""The dropout mask of the attention weights, a pure function of the seed and the place.

A counter-based hash: every backend finds the same mask in any order of work, and backward and
recomputation find it again. With 32-bit unsigned arithmetic and murmur3's finaliser fmix:

    key  = fmix(fmix(low(seed) ^ 0x9E3779B9) ^ high(seed))
    row  = fmix(fmix(key ^ (batch * heads + head)) ^ position)
    keep = (fmix(row ^ (delta * 0x01000193)) >> 8) >= round(dropout * 2**24)

The seed, the head and the position pass through the finaliser one after another: were they added,
the mask of one seed would be that of another, shifted by rows.
"""

import torch
from jaxtyping import Bool, Int32, Int64
from torch import Tensor

_WORD = 0xFFFFFFFF
_FACTOR_1, _FACTOR_2 = 0x85EBCA6B, 0xC2B2AE35
_DELTA_FACTOR = 0x01000193


def row_keys(
    seed: int, stream: Int64[Tensor, "*streams"], position: Int64[Tensor, "*positions"]
) -> Int64[Tensor, "*rows"]:
    """Return the key of each attention row, in [0, 2**32), for operands that broadcast.

    `stream` is batch index * heads + head index, `position` the query's absolute position.
    """
    low, high = seed & _WORD, seed >> 32 & _WORD
    key = _fmix_int(_fmix_int(low ^ 0x9E3779B9) ^ high)
    return _fmix(_fmix(stream ^ key) ^ position)


def keep_mask(
    dropout: float, rows: Int64[Tensor, "*rows"], delta: Int64[Tensor, "*deltas"]
) -> Bool[Tensor, "*places"]:
    """Return which weights are kept, for rows (from `row_keys`) and deltas that broadcast."""
    return (_fmix(rows ^ (delta * _DELTA_FACTOR & _WORD)) >> 8) >= round(dropout * 2**24)


def keep_words(
    dropout: float,
    rows: Int64[Tensor, "*rows 1"],
    delta: Int64[Tensor, " deltas"],
    words: Int32[Tensor, "*rows deltas"],
    work: Int32[Tensor, "*rows deltas"],
) -> Int32[Tensor, "*rows deltas"]:
    """Return `keep_mask` as zeros and ones, computed in place in `words`.

    Several times as fast for large blocks: in 32 bits, where a shift to the right must be masked,
    and with the first step of the finaliser, which is linear, done before rows meet deltas.
    """
    row, column = (x ^ x >> 16 for x in (rows, delta * _DELTA_FACTOR & _WORD))
    torch.bitwise_xor(_signed(row), _signed(column), out=words)
    words.mul_(_FACTOR_1 - 2**32)
    words.bitwise_xor_(_shift_right(words, 13, work))
    words.mul_(_FACTOR_2 - 2**32)
    words.bitwise_xor_(_shift_right(words, 16, work))
    return _shift_right(words, 8, words).ge_(round(dropout * 2**24))


def _signed(x: Int64[Tensor, "*places"]) -> Int32[Tensor, "*places"]:
    return (x - (x >> 31 << 32)).to(torch.int32)


def _shift_right(
    x: Int32[Tensor, "*places"], bits: int, out: Int32[Tensor, "*places"]
) -> Int32[Tensor, "*places"]:
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_(_WORD >> bits)


def _fmix_int(x: int) -> int:
    x ^= x >> 16
    x = x * _FACTOR_1 & _WORD
    x ^= x >> 13
    x = x * _FACTOR_2 & _WORD
    return x ^ x >> 16


def _fmix(x: Int64[Tensor, "*places"]) -> Int64[Tensor, "*places"]:
    # The products pass 2**63 and wrap; their low 32 bits, all that is kept, are right.
    x = x ^ x >> 16
    x = x * _FACTOR_1 & _WORD
    x = x ^ x >> 13
    x = x * _FACTOR_2 & _WORD
    return x ^ x >> 16
