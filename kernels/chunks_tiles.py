"""Tiles of a band: dense blocks of scores that fit a processor's cache.

A block is `length` successive queries of a stream with all the keys that any of them sees. A tile
is a batch of equal blocks, either successive blocks of one stream or the same block of successive
streams; both are strided windows on the packed tensors, overlapping where the keys overlap, so
nothing is copied or padded. The first blocks of a stream see fewer keys and are computed with
those only.

In memory a diagonal of a block of scores is a column of a view whose rows are one place longer.
So the band, a parallelogram in the block, is a rectangle in that view: the relative term, softmax
and dropout see only it, with one column for each distance, and no mask is needed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

TILE_BYTES = 2**20


@dataclass(frozen=True)
class Tile:
    """`count` blocks of `length` queries, each with the `reach` keys before it and its own.

    `stream` is the first block's; `query` and `key` are the places in it of its first query and
    its first key. With `across` the blocks lie in successive streams, else one after another.
    """

    stream: int
    count: int
    across: bool
    query: int
    key: int
    length: int
    reach: int

    @property
    def keys(self) -> int:
        """How many keys a block has."""
        return self.reach + self.length

    @property
    def disjoint(self) -> bool:
        """Whether the blocks' windows on the keys share no key."""
        return self.across or self.count == 1

    def on_queries(
        self, x: Shaped[Tensor, "streams stream dim"]
    ) -> Shaped[Tensor, "count rows dim"]:
        """Return the blocks' queries as a view of a packed tensor."""
        return self._window(x, self.query, self.length)

    def on_keys(self, x: Float[Tensor, "streams stream dim"]) -> Float[Tensor, "count keys dim"]:
        """Return the blocks' keys as a view of a packed tensor."""
        return self._window(x, self.key, self.keys)

    def add_to_keys(
        self,
        total: Float[Tensor, "streams stream dim"],
        part: Float[Tensor, "count keys dim"],
        factor: float,
    ) -> None:
        """Add to the keys what each block found for them, also where the windows overlap."""
        for start in range(0, self.keys, self.length):
            rows = min(self.length, self.keys - start)
            self._window(total, self.key + start, rows).add_(
                part[:, start : start + rows], alpha=factor
            )

    def _window(self, x: Tensor, first: int, rows: int) -> Tensor:
        step = x.stride(0) if self.across else self.length * x.stride(1)
        start = x.storage_offset() + self.stream * x.stride(0) + first * x.stride(1)
        return x.as_strided((self.count, rows, x.shape[2]), (step, *x.stride()[1:]), start)


def tiles_of(streams: int, queries: int, keys: int, window: int, itemsize: int) -> Iterator[Tile]:
    """Yield the tiles of `streams` packed streams, which cover every query once."""
    size = block_length(window)
    offset = keys - queries
    budget = TILE_BYTES // itemsize

    def share(blocks: int, length: int, reach: int) -> int:
        """How many blocks a tile gets, all about as many, since threads share a tile's blocks."""
        fitting = max(1, budget // (length * (reach + length)))
        return -(-blocks // -(-blocks // fitting))

    def across(place: int, length: int) -> Iterator[Tile]:
        reach = min(place, window)
        step = share(streams, length, reach)
        for stream in range(0, streams, step):
            count = min(step, streams - stream)
            yield Tile(stream, count, True, place - offset, place - reach, length, reach)

    place = offset
    while place < min(window, keys):
        length = min(size, keys - place)
        yield from across(place, length)
        place += length
    blocks = (keys - place) // size
    if blocks >= streams:
        step = share(blocks, size, window)
        for stream in range(streams):
            for block in range(0, blocks, step):
                first = place + block * size
                count = min(step, blocks - block)
                yield Tile(stream, count, False, first - offset, first - window, size, window)
    else:
        for block in range(blocks):
            yield from across(place + block * size, size)
    place += blocks * size
    if place < keys:
        yield from across(place, keys - place)


def block_length(window: int) -> int:
    """Return how many queries a block has; a block computes that many keys more than needed."""
    return 32 if window < 48 else 64


@dataclass(frozen=True)
class Slab:
    """The scores of one tile in a flat buffer, row after row, each of `width` places.

    The band runs down the diagonal of every block, so as a view it is a rectangle whose rows are
    width + 1 apart, and what lies between two of its rows is outside the band.
    """

    tile: Tile
    window: int
    buffer: Tensor

    @staticmethod
    def elements(tile: Tile, window: int) -> int:
        """Return how many elements the tile's slab needs."""
        return tile.count * tile.length * (min(window, tile.keys - 1) + tile.length)

    @property
    def top(self) -> int:
        """The largest distance in the tile."""
        return min(self.window, self.tile.keys - 1)

    @property
    def width(self) -> int:
        """The places of a row: the block's keys, and as many before as the band is wider."""
        return self.top + self.tile.length

    @cached_property
    def square(self) -> Float[Tensor, "count length keys"]:
        """The scores as the matrix products have them: a row for each query, a column each key."""
        shape = (self.tile.count, self.tile.length, self.tile.keys)
        strides = (self.tile.length * self.width, self.width, 1)
        return self.buffer.as_strided(shape, strides, self.width - self.tile.keys)

    @cached_property
    def band(self) -> Float[Tensor, "count length distances"]:
        """The scores in the band: a row for each query, a column each distance, falling to 0."""
        return self._diagonal(0, self.tile.length, self.top + 1)

    def hide(self, value: float) -> None:
        """Set the scores before the first key, also where the buffer was never written."""
        corner = self.top - self.tile.reach
        if corner > 0:
            device = self.buffer.device
            row = torch.arange(self.tile.length, device=device)[:, None]
            hidden = row + torch.arange(corner, device=device) < corner
            self.band[..., :corner].masked_fill_(hidden, value)

    def clear_outside(self) -> None:
        """Set the scores of the pairs outside the band to zero."""
        self._diagonal(self.top + 1, self.tile.length - 1, self.tile.length).zero_()

    def _diagonal(self, start: int, rows: int, columns: int) -> Tensor:
        shape = (self.tile.count, rows, columns)
        strides = (self.tile.length * self.width, self.width + 1, 1)
        return self.buffer.as_strided(shape, strides, start)
