"""Residue streams: attention with stride s is plain attention on s interleaved sequences.

Position i with stride s only ever meets positions of its own residue i mod s. Taken out one
residue at a time, the positions form streams whose windows are plain; nothing of the gaps is
computed. Residues whose streams have equal lengths are packed together: as a stack of streams or,
where that is faster, with those of each element of the batch in a line (chunks_tiles.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeAlias

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from kernels.call import Call
from kernels.torch_backends.tiles import line_pitch

Rows: TypeAlias = Shaped[Tensor, "residues batch stream *dim"]
Packed: TypeAlias = Shaped[Tensor, "streams_or_lines places *dim"]


@dataclass(frozen=True)
class Streams:
    """The streams of one head and of successive residues, all of one length.

    Taken together they are one view with a row for each residue, and are copied in one go.

    `queries` and `keys` count the positions of one stream; its queries are the last of its keys'
    positions. `offset` is the position of the call's first query. `pitch` is the distance between
    the first places of two streams in a line, or None where they are stacked.
    """

    head: int
    stride: int
    residues: range
    batch: int
    queries: int
    keys: int
    offset: int
    pitch: int | None

    @property
    def count(self) -> int:
        """How many streams there are: residues, and for each the whole batch."""
        return len(self.residues) * self.batch

    def packed_shape(self, length: int) -> tuple[int, int]:
        """How many streams, or lines, a packed tensor has, and how many places each has."""
        if self.pitch is None:
            return self.count, length
        return self.batch, len(self.residues) * self.pitch

    @property
    def first_query(self) -> int:
        """The row of q where the first residue's stream begins."""
        return (self.residues[0] - self.offset) % self.stride

    def query_rows(self, x: Float[Tensor, "batch queries heads *dim"]) -> Rows:
        """Return the streams as a view of a tensor that is laid out as q."""
        return self._rows(x, self.first_query)

    def key_rows(self, x: Float[Tensor, "batch keys heads *dim"]) -> Rows:
        """Return the streams as a view of a tensor that is laid out as k."""
        return self._rows(x, self.residues[0])

    def _rows(self, x: Tensor, first: int) -> Rows:
        together = x[:, first:, self.head].unfold(1, len(self.residues), self.stride)
        return together.movedim(-1, 0)

    def apart(self, packed: Packed) -> Rows:
        """Return a packed tensor's streams by residue and batch, without the room in lines."""
        if self.pitch is None:
            return packed.unflatten(0, (len(self.residues), self.batch))
        by_batch = packed.unflatten(1, (len(self.residues), self.pitch))
        return by_batch[:, :, : self.queries].transpose(0, 1)

    def clear_room(self, packed: Packed) -> None:
        """Set what lies after each stream of a line to zero."""
        if self.pitch not in (None, self.queries):
            by_batch = packed.unflatten(1, (len(self.residues), self.pitch))
            by_batch[:, :, self.queries :].zero_()

    def pack(self, rows: Rows, into: Packed) -> Packed:
        """Copy streams into a packed tensor; return it."""
        self.apart(into).copy_(rows)
        return into

    def unpack(self, packed: Packed, rows: Rows) -> None:
        """Copy back what `pack` laid out, unless `packed` is the rows themselves."""
        if packed.data_ptr() != rows.data_ptr():
            rows.copy_(self.apart(packed))

    def batch_index(self, device: torch.device) -> Int64[Tensor, "streams 1"]:
        """Return which element of the batch each stream is from."""
        return torch.arange(self.count, device=device)[:, None] % self.batch

    def positions(self, device: torch.device) -> Int64[Tensor, "streams queries"]:
        """Return the absolute position of each query of each stream."""
        first = torch.arange(len(self.residues), device=device).repeat_interleave(self.batch)
        start = self.offset + self.first_query
        return start + first[:, None] + self.stride * torch.arange(self.queries, device=device)


def streams_of(call: Call) -> Iterator[Streams]:
    """Yield the streams that hold at least one query, head by head."""
    for head, stride in enumerate(call.band.strides):
        residues = range(min(stride, call.k.shape[1]))
        for (queries, keys, _), group in groupby(residues, partial(_alike, call, stride)):
            members = list(group)
            if queries > 0:
                together = range(members[0], members[-1] + 1)
                pitch = line_pitch(queries, keys, call.band.window) if len(together) > 1 else None
                yield Streams(
                    head, stride, together, call.q.shape[0], queries, keys, call.offset, pitch
                )


def _alike(call: Call, stride: int, residue: int) -> tuple[int, int, bool]:
    """What the residues of one `Streams` share: lengths, and that their queries lie in a row."""
    first_query = (residue - call.offset) % stride
    queries, keys = call.q.shape[1], call.k.shape[1]
    lengths = len(range(first_query, queries, stride)), len(range(residue, keys, stride))
    return *lengths, residue < call.offset % stride


def is_packed(rows: Rows) -> bool:
    """Return whether rows serve as they are: one residue's, the numbers of each side by side."""
    return rows.shape[0] == 1 and rows.stride(-1) == 1 and rows.stride(2) >= rows.shape[-1]
