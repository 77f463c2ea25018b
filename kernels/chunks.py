"""The paper's chunks, made causal and strided: dense matrix products over blocks of the band.

Torch alone, and the backend of choice where TVM cannot run. The work goes head by head and, in
each, a few blocks at a time (kernels/tiles.py), so that memory beyond inputs and outputs is that
of one head and of a tile. Forward keeps the output and one log-sum-exp per row and head; backward
recomputes the weights from them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.call import Call
from kernels.dropout import keep_words
from kernels.heads import Head, Scratch, pack_head, pack_queries
from kernels.streams import streams_of, unpack
from kernels.tiles import Slab, Tile


def can_run(call: Call) -> str | None:
    """Return None: the chunks run everywhere."""
    return None


def attend(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    """Return banded attention, computed block by block."""
    out: Tensor = _Chunks.apply(call.settings, *call.tensors)
    return out


class _Chunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: dict[str, Any], *tensors: Tensor) -> Tensor:
        call = Call.from_tensors(settings, tensors)
        out, lse = _forward(call)
        ctx.settings = settings
        ctx.save_for_backward(*tensors, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        call = Call.from_tensors(ctx.settings, tuple(tensors))
        with torch.autocast(dout.device.type, enabled=False):
            return None, *_backward(call, out, lse, dout)


def _scores(head: Head, tile: Tile, scratch: Scratch) -> Slab:
    """Return the scores of a tile; those outside the band are left as they come."""
    slab = Slab(tile, head.window, scratch.flat("scores", Slab.elements(tile)))
    content, keys = tile.on_queries(head.content), tile.on_keys(head.k).mT
    if head.r is None:
        torch.bmm(content, keys, out=slab.square)
    else:
        position = tile.on_queries(head.position).flatten(0, 1)
        torch.mm(position, head.r[-slab.top - 1 :].mT, out=slab.band.flatten(0, 1))
        slab.square.baddbmm_(content, keys)
    slab.hide(-torch.inf)
    return slab


def _exponentiate(slab: Slab, shift: Float[Tensor, "count length 1"]) -> None:
    """Turn the scores into exp(score - shift), zero outside the band.

    Weights too small to matter are cut off well above the smallest normal number: denormal ones
    slow exp and the matrix products down twentyfold.
    """
    floor = 0.7 * math.log(torch.finfo(shift.dtype).tiny)
    slab.band.sub_(shift).clamp_min_(floor).exp_()
    slab.hide(0.0)
    slab.clear_outside()


def _kept(head: Head, slab: Slab, scratch: Scratch) -> Int32[Tensor, "count length distances"]:
    """Return which weights of the band dropout keeps, as zeros and ones."""
    assert head.dropout_rows is not None
    words = scratch.shaped("words", *slab.band.shape, dtype=torch.int32)
    work = scratch.shaped("work", *slab.band.shape, dtype=torch.int32)
    delta = torch.arange(slab.top, -1, -1, device=words.device)
    rows = slab.tile.on_queries(head.dropout_rows)
    return keep_words(head.dropout, rows, delta, words, work)


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of each row, [batch, queries, heads, 1]."""
    scratch = Scratch(call.q)
    out = call.q.new_empty(call.q.shape)
    lse = call.q.new_empty((*call.q.shape[:3], 1))
    for streams in streams_of(call):
        head = pack_head(call, streams, scratch)
        packed_out = scratch.shaped("out", *head.content.shape)
        packed_lse = scratch.shaped("lse", *head.content.shape[:2], 1)
        for tile in head.tiles():
            slab = _scores(head, tile, scratch)
            peak = slab.band.amax(-1, keepdim=True)
            _exponentiate(slab, peak)
            total = slab.band.sum(-1, keepdim=True)
            tile.on_queries(packed_lse).copy_(peak.add_(total.log()))
            if head.dropout > 0:
                slab.band.mul_(_kept(head, slab, scratch))
                total.mul_(1 - head.dropout)
            rows = tile.on_queries(packed_out)
            torch.bmm(slab.square, tile.on_keys(head.v), out=rows)
            rows.div_(total)
        unpack(packed_out, streams.query_rows(out))
        unpack(packed_lse, streams.query_rows(lse))
    return out, lse


@dataclass(frozen=True)
class _Gradients:
    """One head's packed gradients, laid out as `Head`'s tensors, and what they are made from.

    `dout` is divided by the share of weights that dropout keeps; `dot` is the sum of dout * out.
    """

    dout: Tensor
    dot: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dr: Tensor | None
    biases: Tensor | None


def _backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> list[Tensor]:
    """Return the gradients of the call's tensors."""
    scratch = Scratch(call.q)
    gradients = [x.new_zeros(x.shape) for x in call.tensors]
    for streams in streams_of(call):
        head = pack_head(call, streams, scratch)
        g = _pack_gradients(call, head, scratch, out, lse, dout)
        for tile in head.tiles():
            _backward_tile(head, g, tile, scratch)
        unpack(g.dq.mul_(call.scale), streams.query_rows(gradients[0]))
        unpack(g.dk, streams.key_rows(gradients[1]))
        unpack(g.dv, streams.key_rows(gradients[2]))
        if g.dr is not None and g.biases is not None:
            dr, dcontent_bias, dposition_bias = (x[streams.head] for x in gradients[3:])
            dr[: head.window + 1] += g.dr.flip(0)
            dcontent_bias.add_(g.biases[0], alpha=call.scale)
            dposition_bias.add_(g.biases[1], alpha=call.scale)
    return gradients


def _pack_gradients(
    call: Call, head: Head, scratch: Scratch, out: Tensor, lse: Tensor, dout: Tensor
) -> _Gradients:
    streams = head.streams
    packed_dout = pack_queries(dout, "dout", streams, scratch)
    dq = pack_queries(out, "dq", streams, scratch)
    dot = dq.mul_(packed_dout).sum(-1, keepdim=True)
    packed_dout.div_(1 - call.dropout)
    relative = head.r is not None
    return _Gradients(
        dout=packed_dout,
        dot=dot,
        lse=pack_queries(lse, "lse", streams, scratch),
        dq=dq,
        dk=scratch.shaped("dk", *head.k.shape).zero_(),
        dv=scratch.shaped("dv", *head.v.shape).zero_(),
        dr=torch.zeros_like(head.r) if head.r is not None else None,
        biases=call.q.new_zeros(2, call.q.shape[3]) if relative else None,
    )


def _backward_tile(head: Head, g: _Gradients, tile: Tile, scratch: Scratch) -> None:
    weights = _scores(head, tile, scratch)
    _exponentiate(weights, tile.on_queries(g.lse))
    dout = tile.on_queries(g.dout)
    scores = Slab(tile, head.window, scratch.flat("gradients", Slab.elements(tile)))
    torch.bmm(dout, tile.on_keys(head.v).mT, out=scores.square)
    scores.hide(0.0)
    if head.dropout > 0:
        kept = _kept(head, weights, scratch)
        scores.band.mul_(kept)
    scores.band.sub_(tile.on_queries(g.dot)).mul_(weights.band)
    scores.clear_outside()
    if head.dropout > 0:
        weights.band.mul_(kept)
    _add_to_keys(g.dv, tile, weights, dout, scratch)
    _add_to_keys(g.dk, tile, scores, tile.on_queries(head.content), scratch)
    dq = tile.on_queries(g.dq)
    torch.bmm(scores.square, tile.on_keys(head.k), out=dq)
    if head.r is not None and g.dr is not None and g.biases is not None:
        by_distance = scores.band.flatten(0, 1)
        position_dq = by_distance @ head.r[-scores.top - 1 :]
        g.biases[0] += dq.sum((0, 1))
        g.biases[1] += position_dq.sum(0)
        dq.add_(position_dq.view_as(dq))
        position = tile.on_queries(head.position).flatten(0, 1)
        g.dr[-scores.top - 1 :].addmm_(by_distance.mT, position)


def _add_to_keys(total: Tensor, tile: Tile, slab: Slab, rows: Tensor, scratch: Scratch) -> None:
    """Add the slab's transpose times the rows to the keys that the tile's blocks see."""
    if tile.disjoint:
        tile.on_keys(total).baddbmm_(slab.square.mT, rows)
        return
    part = scratch.shaped("part", tile.count, tile.keys, rows.shape[2])
    torch.bmm(slab.square.mT, rows, out=part)
    tile.add_to_keys(total, part)
