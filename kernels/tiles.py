"""Tiles of a band: dense blocks of scores that fit a processor's cache.

A block is `length` successive queries of a stream with all the keys that any of them sees. A tile
is a batch of equal blocks, either successive blocks of one stream or the same block of successive
streams; both are strided windows on the packed tensors, overlapping where the keys overlap, so
nothing is copied or padded. The first blocks of a stream see fewer keys and are computed with
those only.

The scores of a tile are stored skewed: each row one place further to the left, so that a
diagonal of the block is a column and the band is a rectangle. Queries times keys go in through a
view that runs along the diagonals, queries times r straight into the rectangle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_TILE_BYTES = 2**20
_ALIGNMENT = 16  # elements; the diagonal view's rows start on whole cache lines


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

    def on_queries(self, x: Float[Tensor, "streams stream dim"]) -> Float[Tensor, "count rows dim"]:
        """Return the blocks' queries as a view of a packed tensor."""
        return self._window(x, self.query, self.length)

    def on_keys(self, x: Float[Tensor, "streams stream dim"]) -> Float[Tensor, "count keys dim"]:
        """Return the blocks' keys as a view of a packed tensor."""
        return self._window(x, self.key, self.keys)

    def add_to_keys(
        self, total: Float[Tensor, "streams stream dim"], part: Float[Tensor, "count keys dim"]
    ) -> None:
        """Add to the keys what each block found for them, where the windows overlap too."""
        for start in range(0, self.keys, self.length):
            rows = min(self.length, self.keys - start)
            self._window(total, self.key + start, rows).add_(part[:, start : start + rows])

    def _window(self, x: Tensor, first: int, rows: int) -> Tensor:
        step = x.stride(0) if self.across else self.length * x.stride(1)
        start = x.storage_offset() + self.stream * x.stride(0) + first * x.stride(1)
        return x.as_strided((self.count, rows, x.shape[2]), (step, *x.stride()[1:]), start)


def tiles_of(streams: int, queries: int, keys: int, window: int, itemsize: int) -> Iterator[Tile]:
    """Yield the tiles of `streams` packed streams, which cover every query once."""
    size = block_length(window)
    offset = keys - queries
    budget = _TILE_BYTES // itemsize

    def capacity(length: int, reach: int) -> int:
        return max(1, budget // (length * (reach + 2 * length)))

    def across(place: int, length: int) -> Iterator[Tile]:
        reach = min(place, window)
        step = capacity(length, reach)
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
        step = capacity(size, window)
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
    return 64 if window < 256 else 128


@dataclass(frozen=True)
class Slab:
    """The scores of one tile, skewed, in a flat buffer.

    `band` column x is the distance top - x, `top` the largest that the tile has.
    """

    tile: Tile
    window: int
    buffer: Tensor

    @staticmethod
    def elements(tile: Tile) -> int:
        """Return how many elements the tile's slab needs."""
        return _ALIGNMENT + tile.count * tile.length * _row_stride(tile)

    @property
    def top(self) -> int:
        """The largest distance in the tile."""
        return min(self.window, self.tile.keys - 1)

    @cached_property
    def square(self) -> Float[Tensor, "count length keys"]:
        """The scores as the matrix products have them: a row for each query, a column each key."""
        tile, width = self.tile, _row_stride(self.tile)
        start = self._start + tile.length - 1
        shape = (tile.count, tile.length, tile.keys)
        return self.buffer.as_strided(shape, (tile.length * width, width - 1, 1), start)

    @cached_property
    def band(self) -> Float[Tensor, "count length distances"]:
        """The scores in the band: a row for each query, a column each distance, falling to 0."""
        first = self.tile.keys - 1 - self.top
        return self._rows[..., first : first + self.top + 1]

    @cached_property
    def hidden(self) -> Bool[Tensor, "length corner"] | None:
        """Where the band's first columns lie before the first key; None if no part does."""
        corner = self.top - self.tile.reach
        if corner == 0:
            return None
        device = self.buffer.device
        row = torch.arange(self.tile.length, device=device)[:, None]
        return row + torch.arange(corner, device=device) < corner

    def hide(self, value: float) -> None:
        """Set the scores before the first key, also where the buffer was never written."""
        if self.hidden is not None:
            self.band[..., : self.hidden.shape[1]].masked_fill_(self.hidden, value)

    def clear_outside(self) -> None:
        """Set the scores of the pairs outside the band to zero."""
        first = self.tile.keys - 1 - self.top
        self._rows[..., :first].zero_()
        self._rows[..., first + self.top + 1 :].zero_()

    @property
    def _start(self) -> int:
        return (1 - self.tile.length) % _ALIGNMENT

    @cached_property
    def _rows(self) -> Tensor:
        tile, width = self.tile, _row_stride(self.tile)
        shape = (tile.count, tile.length, width)
        return self.buffer.as_strided(shape, (tile.length * width, width, 1), self._start)


def _row_stride(tile: Tile) -> int:
    distances = tile.keys + tile.length - 1
    return distances + (1 - distances) % _ALIGNMENT
