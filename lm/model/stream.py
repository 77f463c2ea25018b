"""The model run piece by piece: a bounded cache of keys and values per layer, r computed once.

A position's logits depend on no more than the receptive field before it: the sum over layers of
the reach, window * largest stride. So a text of any length is read in memory bounded by the reach,
with the same result as one forward pass over all of it.

Shapes: B batch, N new positions, H heads, D head width, W window, M model width.
"""

from __future__ import annotations

from itertools import accumulate
from typing import cast

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from lm.model.attention import BandedAttention
from lm.model.language_model import Block, LanguageModel


class LayerCache:
    """The last `reach` keys and values of one layer, and its projected distances.

    The tensors live in a buffer of at most twice the reach (or the reach and one piece, if that
    is more). It grows by doubling, and when it is full its last `reach` positions move to its
    front, so appending costs amortised constant time per position.

    Args:
        reach: distance to the farthest key that a query sees.
        distance_keys: r of the whole window.
    """

    def __init__(self, reach: int, distance_keys: Float[Tensor, "H deltas D"]) -> None:
        self.reach = reach
        self.distance_keys = distance_keys
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._end = 0

    @property
    def capacity(self) -> int:
        """Positions for which the buffer has room."""
        return 0 if self._keys is None else self._keys.shape[1]

    def clear(self, *, keep_buffer: bool = True) -> None:
        """Forget all positions; without the buffer, the next texts may be more or fewer."""
        self._end = 0
        if not keep_buffer:
            self._keys = self._values = None

    def extend(
        self, k: Float[Tensor, "B N H D"], v: Float[Tensor, "B N H D"]
    ) -> tuple[Float[Tensor, "B keys H D"], Float[Tensor, "B keys H D"]]:
        """Append keys and values; return them behind the `reach` positions before them."""
        new = k.shape[1]
        if self._end + new > self.capacity:
            self._make_room(k, v)
        assert self._keys is not None and self._values is not None
        start, end = max(0, self._end - self.reach), self._end + new
        self._keys[:, self._end : end] = k
        self._values[:, self._end : end] = v
        self._end = end
        return self._keys[:, start:end], self._values[:, start:end]

    def _make_room(self, k: Tensor, v: Tensor) -> None:
        kept, new = min(self._end, self.reach), k.shape[1]
        capacity = max(self.capacity, kept + max(new, kept))
        self._keys = self._moved(self._keys, k, kept, capacity)
        self._values = self._moved(self._values, v, kept, capacity)
        self._end = kept

    def _moved(self, buffer: Tensor | None, like: Tensor, kept: int, capacity: int) -> Tensor:
        """A buffer of the given capacity that begins with the last `kept` positions."""
        if buffer is None:
            return like.new_empty(like.shape[0], capacity, *like.shape[2:])
        last = buffer[:, self._end - kept : self._end]
        if capacity == buffer.shape[1]:
            buffer[:, :kept] = last.clone()  # the two ranges may overlap
            return buffer
        grown = buffer.new_empty(buffer.shape[0], capacity, *buffer.shape[2:])
        grown[:, :kept] = last
        return grown


class StreamState:
    """A model in the middle of reading `batch` texts of equal length.

    Args:
        model: in evaluation mode; its weights may not change while the state is in use.
        batch: how many texts are read side by side.

    Raises:
        ValueError: if the model is in training mode, where dropout would falsify the numbers.
    """

    def __init__(self, model: LanguageModel, batch: int = 1) -> None:
        if model.training:
            raise ValueError("the model is in training mode; call model.eval() before streaming")
        self.model = model
        self.batch = batch
        self.position = 0
        self.blocks = cast(list[Block], list(model.blocks))
        self.caches = [self._cache(block.attention) for block in self.blocks]

    @torch.inference_mode()
    def _cache(self, attention: BandedAttention) -> LayerCache:
        band = attention.band
        return LayerCache(band.reach, attention.distance_keys(self.model.table, band.window + 1))

    def restart(self, batch: int) -> None:
        """Begin `batch` new texts at position 0; r stays, and so do the buffers if they fit."""
        for cache in self.caches:
            cache.clear(keep_buffer=batch == self.batch)
        self.batch = batch
        self.position = 0

    @torch.inference_mode()
    def advance(
        self, tokens: Integer[Tensor, "B N"], first: int = 0
    ) -> Float[Tensor, "B predicted 256"]:
        """Read the next bytes; logits of the byte after each position from `first` on.

        Args:
            tokens: the next N byte values of each text.
            first: the first position, counted from the texts' beginning, whose logits are
                wanted, now or later. Each layer skips the positions that neither it nor one
                after it can see. Pass the same value until that position has been read.
        """
        if tokens.shape[0] != self.batch:
            raise ValueError(f"tokens has {tokens.shape[0]} rows, the state has {self.batch}")
        end = self.position + tokens.shape[1]
        self.position = end
        x = self.model.embed(tokens)
        starts = first_positions([cache.reach for cache in self.caches], first)
        x = x[:, max(0, starts[0] - (end - x.shape[1])) :]
        for layer, (block, cache) in enumerate(zip(self.blocks, self.caches, strict=True)):
            skipped = max(0, starts[layer + 1] - (end - x.shape[1]))
            if skipped and x.shape[1]:
                cache.extend(*keys_and_values(block, x[:, :skipped]))
            x = x[:, skipped:]
            if not x.shape[1]:
                break
            x = block(x, self.model.table, *self.model.position_biases(layer), cache)
        return self.model.predict(x)


def first_positions(reaches: list[int], first: int) -> list[int]:
    """The first position at which each layer's input, and last its output, is needed.

    The output of the top layer is needed from `first` on; the input of a layer `reach` positions
    before its output.
    """
    outputs = accumulate(
        reversed(reaches), lambda start, reach: max(0, start - reach), initial=first
    )
    return list(outputs)[::-1]


def receptive_field(model: LanguageModel) -> int:
    """How many positions before a character's own input can reach its prediction."""
    return sum(cast(Block, block).attention.band.reach for block in model.blocks)


def keys_and_values(
    block: Block, x: Float[Tensor, "B N M"]
) -> tuple[Float[Tensor, "B N H D"], Float[Tensor, "B N H D"]]:
    """What later positions of the layer need of these: their keys and values."""
    attention, normed = block.attention, block.attention_norm(x)
    k, v = (
        part(normed).unflatten(-1, (attention.heads, -1)) for part in (attention.k, attention.v)
    )
    return k, v
