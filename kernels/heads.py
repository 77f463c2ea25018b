"""One head's inputs, packed for the chunks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from kernels.call import Call
from kernels.dropout import row_keys
from kernels.streams import Streams, pack
from kernels.tiles import Tile, tiles_of


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
    """One head's packed streams, [streams, positions, dim].

    `content` and `position` are the queries with their biases, times the scale; one tensor where
    there are no relative terms. `r` is [window + 1, dim], the largest distance first.
    `dropout_rows` are the keys of the dropout mask, [streams, queries, 1].
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
        return tiles_of(s.count, s.queries, s.keys, self.window, self.k.element_size())


def pack_head(call: Call, streams: Streams, scratch: Scratch) -> Head:
    """Pack one head's streams into buffers that the next call of this function uses again."""
    dim, head = call.q.shape[3], streams.head
    window = min(call.band.window, streams.keys - 1)
    content, r = pack_queries(call.q, "content", streams, scratch), None
    position = content
    if call.relative is not None:
        rows, content_bias, position_bias = (x[head] for x in call.relative)
        position = scratch.shaped("position", *content.shape)
        torch.add(content, position_bias, out=position).mul_(call.scale)
        content.add_(content_bias)
        r = rows[: window + 1].flip(0)
    content.mul_(call.scale)
    k, v = (
        pack(streams.key_rows(x), scratch.shaped(name, streams.count, streams.keys, dim))
        for name, x in (("k", call.k), ("v", call.v))
    )
    dropout_rows = _dropout_rows(call, streams) if call.dropout > 0 else None
    return Head(streams, window, content, position, k, v, r, call.dropout, dropout_rows)


def pack_queries(x: Tensor, name: str, streams: Streams, scratch: Scratch) -> Tensor:
    """Pack a tensor that is laid out as q into the buffer of this name."""
    into = scratch.shaped(name, streams.count, streams.queries, *x.shape[3:])
    return pack(streams.query_rows(x), into)


def _dropout_rows(call: Call, streams: Streams) -> Int64[Tensor, "streams queries 1"]:
    device = call.q.device
    stream = streams.batch_index(device) * len(call.band.strides) + streams.head
    return row_keys(call.seed, stream, streams.positions(device))[..., None]
