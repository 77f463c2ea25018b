"""One head's inputs, packed for the chunks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from torch import Tensor

from kernels.call import Call
from kernels.chunks_streams import Packed, Rows, Streams, apart, is_packed, pack
from kernels.chunks_tiles import Tile, tiles_of
from kernels.dropout import row_keys


class Scratch:
    """Buffers by name, used again for each head and tile.

    Fresh memory would have to be mapped in and cleared by the system every time.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._flat: dict[str, Tensor] = {}

    def flat(self, name: str, elements: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return at least so many elements, uninitialised; the type is the inputs' by default."""
        if name not in self._flat or self._flat[name].numel() < elements:
            self._flat.pop(name, None)
            self._flat[name] = self._like.new_empty(elements, dtype=dtype)
        return self._flat[name]

    def shaped(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a contiguous tensor, uninitialised."""
        return self.flat(name, math.prod(shape), dtype)[: math.prod(shape)].view(shape)


@dataclass(frozen=True)
class Head:
    """One head's streams, [streams, positions, dim].

    `content` and `position` are the queries with their biases, times scale / ln 2, which makes
    powers of 2 of the softmax; one tensor where there are no relative terms. `r` is
    [window + 1, dim], the largest distance first. `dropout_rows`, [streams, queries, 1],
    are the keys of the dropout mask.
    """

    streams: Streams
    window: int
    content: Tensor
    position: Tensor
    k: Tensor
    v: Tensor
    r: Tensor | None
    dropout: float
    dropout_rows: Tensor | None

    def tiles(self) -> Iterator[Tile]:
        """Yield the tiles of the head's streams."""
        s = self.streams
        return tiles_of(s.count, s.queries, s.keys, s.pitch, self.window, self.k.element_size())


@dataclass(frozen=True)
class Buffers:
    """Makes buffers for one head's streams, laid out as its tiles want them."""

    streams: Streams
    scratch: Scratch

    def new(self, rows: Rows, name: str) -> Packed:
        """Return an uninitialised buffer for streams.

        The room after each stream of a line is zero, so that its rows, computed along with the
        others, add nothing to any gradient.
        """
        residues, batch, length, *dim = rows.shape
        pitch = self.streams.pitch or length
        buffer = self.scratch.shaped(name, residues * batch, pitch, *dim)
        buffer[:, length:].zero_()
        return buffer[:, :length]

    def packed(self, rows: Rows, name: str) -> Packed:
        """Return streams as one tensor to read: as they are or packed into a buffer."""
        return rows[0] if is_packed(rows) else pack(rows, self.new(rows, name))

    def writable(self, rows: Rows, name: str) -> Packed:
        """Return a tensor to fill and then `unpack` into the streams: a buffer or they."""
        return rows[0] if is_packed(rows) else self.new(rows, name)


def make_head(call: Call, buffers: Buffers) -> Head:
    """Return one head's streams, packed into buffers that the next head will use again."""
    streams = buffers.streams
    window = min(call.band.window, streams.keys - 1)
    rows, factor = streams.query_rows(call.q), call.scale / math.log(2)
    content_bias = position_bias = r = None
    if call.relative is not None:
        r, content_bias, position_bias = (x[streams.head] for x in call.relative)
        r = r[: window + 1].flip(0)
    content = _queries(rows, content_bias, factor, buffers.new(rows, "content"))
    position = content
    if position_bias is not None:
        position = _queries(rows, position_bias, factor, buffers.new(rows, "position"))
    k, v = (buffers.packed(streams.key_rows(x), name) for x, name in ((call.k, "k"), (call.v, "v")))
    dropout_rows = _dropout_rows(call, streams) if call.dropout > 0 else None
    return Head(streams, window, content, position, k, v, r, call.dropout, dropout_rows)


def _queries(rows: Rows, bias: Tensor | None, factor: float, into: Packed) -> Packed:
    if bias is None:
        torch.mul(rows, factor, out=apart(into, rows))
    else:
        torch.add(bias * factor, rows, alpha=factor, out=apart(into, rows))
    return into


def _dropout_rows(call: Call, streams: Streams) -> Int64[Tensor, "streams queries 1"]:
    device = call.q.device
    stream = streams.batch_index(device) * len(call.band.strides) + streams.head
    keys = row_keys(call.seed, stream, streams.positions(device))
    return F.pad(keys, (0, (streams.pitch or streams.queries) - streams.queries))[..., None]
