"""Tiles of a band: dense blocks of scores that fit a processor's cache.

A block is `length` successive queries of a stream with all the keys that any of them sees. A tile
is a batch of equal blocks, either successive blocks of one stream or the same block of successive
streams; both are strided windows on the packed tensors, overlapping where the keys overlap, so
nothing is copied. The first blocks of a stream see fewer keys and are computed with those only.

Several streams may lie one after another in a line, which then serves as a stream: its blocks go
on from one to the next, so that a tile is filled whatever the streams' lengths. Of the first blocks
of each, the keys of the stream before are hidden.

In memory a diagonal of a block of scores is a column of a view whose rows are one place longer.
So the band, a parallelogram in the block, is a rectangle in that view: the relative term, softmax
and dropout see only it, with one column for each distance, and no mask is needed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float, Shaped
from torch import Tensor

TILE_BYTES = 2**20
LEAST_WINDOWS = 16  # streams so many times as long as the window, and as a block, lie in a line


@dataclass(frozen=True)
class Tile:
    """`count` blocks of `length` queries, each with the `reach` keys before it and its own.

    `stream` is the first block's; `query` and `key` are the places in it of its first query and
    its first key. With `across` the blocks lie in successive streams, else one after another. In a
    line a stream begins at each multiple of `pitch`.
    """

    stream: int
    count: int
    across: bool
    query: int
    key: int
    length: int
    reach: int
    pitch: int | None

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

    def first_blocks(self, window: int) -> Iterator[tuple[slice, int]]:
        """Yield blocks with fewer than `window` keys of their own stream before them.

        Those that have as many come together, with the number of these keys.
        """
        place = self.key + self.reach  # of the first query among the keys
        if self.pitch is None or self.across:
            before = place if self.pitch is None else place % self.pitch
            if before < window:
                yield slice(None), before
            return
        for before in range(0, window, self.length):
            block = (before - place) % self.pitch // self.length
            if block < self.count:
                yield slice(block, None, self.pitch // self.length), before

    def _window(self, x: Tensor, first: int, rows: int) -> Tensor:
        step = x.stride(0) if self.across else self.length * x.stride(1)
        start = x.storage_offset() + self.stream * x.stride(0) + first * x.stride(1)
        return x.as_strided((self.count, rows, x.shape[2]), (step, *x.stride()[1:]), start)


def line_pitch(queries: int, keys: int, window: int) -> int | None:
    """Return the distance between the first rows of streams that are best put in a line, else None.

    It leaves room after each stream, to begin the next with a block. This and the hidden keys are
    computed in vain: up to a block for each stream, and `window` keys for each of its first blocks.
    That is little where a stream is much longer than both.
    """
    size = block_length(window)
    much_longer = queries == keys >= LEAST_WINDOWS * max(window, size)
    return -(-keys // size) * size if much_longer else None


def tiles_of(
    streams: int, queries: int, keys: int, window: int, itemsize: int, pitch: int | None
) -> Iterator[Tile]:
    """Yield the tiles of `streams` packed streams, or lines, which cover every query once."""
    size = block_length(window)
    offset = keys - queries

    def across(place: int, length: int) -> Iterator[Tile]:
        reach = min(place, window)
        for stream, count in _shares(streams, length, reach, itemsize):
            yield Tile(stream, count, True, place - offset, place - reach, length, reach, pitch)

    place = offset
    while place < min(window, keys):
        length = min(size, keys - place)
        yield from across(place, length)
        place += length
    blocks = (keys - place) // size
    if blocks >= streams:
        for stream in range(streams):
            for block, count in _shares(blocks, size, window, itemsize):
                at = place + block * size
                yield Tile(stream, count, False, at - offset, at - window, size, window, pitch)
    else:
        for block in range(blocks):
            yield from across(place + block * size, size)
    place += blocks * size
    if place < keys:
        yield from across(place, keys - place)


def _shares(blocks: int, length: int, reach: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Cut blocks into tiles; yield the first block of each and how many it gets.

    All get about as many, since threads share a tile's blocks.
    """
    fitting = max(1, TILE_BYTES // itemsize // (length * (reach + length)))
    tiles = -(-blocks // fitting)
    for tile in range(tiles):
        first, end = (blocks * i // tiles for i in (tile, tile + 1))
        yield first, end - first


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
        """Set the scores before a stream's first key, also where the buffer was never written."""
        shape = (self.tile.count, self.tile.length, self.width)
        rows = self.buffer[: math.prod(shape)].view(shape)
        for blocks, before in self.tile.first_blocks(self.top):
            rows[blocks, :, : self.top - before] = value

    def clear_outside(self) -> None:
        """Set the scores of the pairs outside the band to zero."""
        self._diagonal(self.top + 1, self.tile.length - 1, self.tile.length).zero_()

    def _diagonal(self, start: int, rows: int, columns: int) -> Tensor:
        shape = (self.tile.count, rows, columns)
        strides = (self.tile.length * self.width, self.width + 1, 1)
        return self.buffer.as_strided(shape, strides, start)
