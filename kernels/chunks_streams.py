"""Residue streams: attention with stride s is plain attention on s interleaved sequences.

Position i with stride s only ever meets positions of its own residue i mod s. Taken out one
residue at a time, the positions form streams whose windows are plain; nothing of the gaps is
computed. Residues whose streams have equal lengths are packed together, so nothing is padded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kernels.call import Call


@dataclass(frozen=True)
class Streams:
    """The streams of one head and of successive residues, all of one length.

    `queries` and `keys` count the positions of one stream; its queries are the last of its keys'
    positions. `offset` is the position of the call's first query.
    """

    head: int
    stride: int
    residues: range
    batch: int
    queries: int
    keys: int
    offset: int

    @property
    def count(self) -> int:
        """How many streams there are: residues, and for each the whole batch."""
        return len(self.residues) * self.batch

    def first_query(self, residue: int) -> int:
        """Return the row of q where the stream of this residue begins."""
        return (residue - self.offset) % self.stride

    def query_rows(
        self, x: Float[Tensor, "batch queries heads *dim"]
    ) -> list[Float[Tensor, "batch stream *dim"]]:
        """Return the rows of each residue as a view of a tensor that is laid out as q."""
        return [x[:, self.first_query(e) :: self.stride, self.head] for e in self.residues]

    def key_rows(
        self, x: Float[Tensor, "batch keys heads *dim"]
    ) -> list[Float[Tensor, "batch stream *dim"]]:
        """Return the rows of each residue as a view of a tensor that is laid out as k."""
        return [x[:, e :: self.stride, self.head] for e in self.residues]

    def batch_index(self, device: torch.device) -> Int64[Tensor, "streams 1"]:
        """Return which element of the batch each stream is from."""
        return torch.arange(self.count, device=device)[:, None] % self.batch

    def positions(self, device: torch.device) -> Int64[Tensor, "streams queries"]:
        """Return the absolute position of each query of each stream."""
        first = torch.tensor(
            [self.offset + self.first_query(e) for e in self.residues], device=device
        ).repeat_interleave(self.batch)
        return first[:, None] + self.stride * torch.arange(self.queries, device=device)


def streams_of(call: Call) -> Iterator[Streams]:
    """Yield the streams that hold at least one query, head by head."""
    for head, stride in enumerate(call.band.strides):
        residues = range(min(stride, call.k.shape[1]))
        for (queries, keys), group in groupby(residues, partial(_lengths, call, stride)):
            members = list(group)
            if queries > 0:
                together = range(members[0], members[-1] + 1)
                batch = call.q.shape[0]
                yield Streams(head, stride, together, batch, queries, keys, call.offset)


def _lengths(call: Call, stride: int, residue: int) -> tuple[int, int]:
    first_query = (residue - call.offset) % stride
    queries, keys = call.q.shape[1], call.k.shape[1]
    return len(range(first_query, queries, stride)), len(range(residue, keys, stride))


def pack(
    rows: list[Float[Tensor, "batch stream *dim"]], into: Float[Tensor, "streams stream *dim"]
) -> Float[Tensor, "streams stream *dim"]:
    """Copy the residues' rows one after another into a contiguous tensor."""
    for part, row in zip(parts(into, len(rows)), rows, strict=True):
        part.copy_(row)
    return into


def unpack(
    packed: Float[Tensor, "streams stream *dim"], rows: list[Float[Tensor, "batch stream *dim"]]
) -> None:
    """Copy back what `pack` laid out, into the residues' rows, unless it is those rows itself."""
    if packed is not rows[0]:
        for part, row in zip(parts(packed, len(rows)), rows, strict=True):
            row.copy_(part)


def parts(
    packed: Float[Tensor, "streams stream *dim"], residues: int
) -> tuple[Float[Tensor, "batch stream *dim"], ...]:
    """Return the part of a packed tensor that belongs to each of so many residues."""
    return packed.unflatten(0, (residues, -1)).unbind(0)


def is_packed(rows: list[Float[Tensor, "batch stream *dim"]]) -> bool:
    """Return whether the rows serve as they are: one residue's, each row's numbers in a line."""
    return len(rows) == 1 and rows[0].stride(-1) == 1 and rows[0].stride(1) >= rows[0].shape[-1]
