"""One head's inputs, packed for the chunks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from kernels.call import Call
from kernels.dropout import row_keys
from kernels.torch_backends.streams import Packed, Rows, Streams, is_packed
from kernels.torch_backends.tiles import Tile, tiles_of


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
    """One head's streams, packed: [streams or lines, places, dim].

    `content` and `position` are the queries with their biases, times scale / ln 2, which makes
    powers of 2 of the softmax; one tensor where there are no relative terms. `r` is
    [window + 1, dim], the largest distance first. `dropout_rows`, with a dim of 1, are the keys
    of the dropout mask.
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
        (streams, queries), keys = self.content.shape[:2], self.k.shape[1]
        size = self.k.element_size()
        return tiles_of(streams, queries, keys, self.window, size, self.streams.pitch)


@dataclass(frozen=True)
class Buffers:
    """Makes buffers for one head's streams, laid out as its tiles want them."""

    streams: Streams
    scratch: Scratch

    def new(self, rows: Rows, name: str, dtype: torch.dtype | None = None) -> Packed:
        """Return a buffer for the streams, uninitialised but for the room in lines, which is zero.

        What is computed along with the others there is then finite, and adds nothing to a gradient.
        """
        streams, places = self.streams.packed_shape(rows.shape[2])
        buffer = self.scratch.shaped(name, streams, places, *rows.shape[3:], dtype=dtype)
        self.streams.clear_room(buffer)
        return buffer

    def packed(self, rows: Rows, name: str) -> Packed:
        """Return streams as one tensor to read: as they are or packed into a buffer."""
        return rows[0] if is_packed(rows) else self.streams.pack(rows, self.new(rows, name))

    def writable(self, rows: Rows, name: str) -> Packed:
        """Return a tensor to fill and then `unpack` into the streams: a buffer or they."""
        return rows[0] if is_packed(rows) else self.new(rows, name)


def make_head(call: Call, buffers: Buffers) -> Head:
    """Return one head's streams, packed into buffers that the next head will use again."""
    streams = buffers.streams
    window = min(call.band.window, streams.keys - 1)
    rows, factor = streams.query_rows(call.q), call.scale / math.log(2)
    content = position = buffers.new(rows, "content")
    into = streams.apart(content)
    if call.relative is None:
        r = None
        torch.mul(rows, factor, out=into)
    else:
        r, content_bias, position_bias = (x[streams.head] for x in call.relative)
        r = r[: window + 1].flip(0)
        torch.add(content_bias * factor, rows, alpha=factor, out=into)
        position = buffers.new(rows, "position")  # from the other: to read q again takes longer
        torch.add(into, (position_bias - content_bias) * factor, out=streams.apart(position))
    k, v = (buffers.packed(streams.key_rows(x), name) for x, name in ((call.k, "k"), (call.v, "v")))
    dropout_rows = _dropout_rows(call, buffers) if call.dropout > 0 else None
    return Head(streams, window, content, position, k, v, r, call.dropout, dropout_rows)


def _dropout_rows(call: Call, buffers: Buffers) -> Int64[Tensor, "streams_or_lines places 1"]:
    streams, device = buffers.streams, call.q.device
    stream = streams.batch_index(device) * len(call.band.strides) + streams.head
    keys = row_keys(call.seed, stream, streams.positions(device))[..., None]
    rows = keys.unflatten(0, (len(streams.residues), streams.batch))
    return streams.pack(rows, buffers.new(rows, "dropout", keys.dtype))
