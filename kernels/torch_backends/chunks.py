"""The paper's chunks, made causal and strided: dense matrix products over blocks of the band.

Torch alone, and the backend of choice where TVM cannot run. The work goes head by head and, in
each, a few blocks at a time (tiles.py), so that memory beyond inputs and outputs is that of one
head and of a tile. Forward keeps the output and one log-sum-exp per row and head;
backward recomputes the weights from them.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.band import Relative
from kernels.call import Call
from kernels.dropout import keep_words
from kernels.torch_backends.heads import Buffers, Head, Scratch, make_head
from kernels.torch_backends.streams import Rows, streams_of
from kernels.torch_backends.tiles import Slab, Tile

_LN_2 = math.log(2)  # the packed queries carry 1 / ln 2, so dk and dr come out too large by it


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
    """Return the scores of a tile in base 2; those outside the band are left as they come."""
    slab = Slab(tile, head.window, scratch.flat("scores", Slab.elements(tile, head.window)))
    torch.bmm(tile.on_queries(head.content), tile.on_keys(head.k).mT, out=slab.square)
    if head.r is not None:
        position = tile.on_queries(head.position).flatten(0, 1)
        by_distance = scratch.shaped("by_distance", *slab.band.shape)
        torch.mm(position, head.r[-slab.top - 1 :].mT, out=by_distance.flatten(0, 1))
        slab.band.add_(by_distance)
    slab.hide(-torch.inf)
    return slab


def _exponentiate(slab: Slab, shift: Float[Tensor, "count length 1"]) -> None:
    """Turn the scores into 2**(score - shift), zero outside the band.

    Weights too small to matter become zero well above the smallest normal number: denormal ones
    slow the matrix products down forty times. exp2 rather than exp, since torch's exp is slow for
    very negative numbers, for short rows, and for strided rows on several threads.
    """
    slab.band.sub_(shift).exp2_()
    torch.threshold_(slab.band, torch.finfo(shift.dtype).tiny ** 0.7, 0.0)
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
    """Return the output and the log-sum-exp, in base 2, of each row [batch, queries, heads, 1]."""
    scratch = Scratch(call.q)
    out = call.q.new_empty(call.q.shape)
    lse = call.q.new_empty((*call.q.shape[:3], 1))
    for streams in streams_of(call):
        buffers = Buffers(streams, scratch)
        head = make_head(call, buffers)
        out_rows, lse_rows = streams.query_rows(out), streams.query_rows(lse)
        sums, totals = buffers.new(out_rows, "sums"), buffers.new(lse_rows, "totals")
        head_lse = buffers.writable(lse_rows, "lse")
        for tile in head.tiles():
            _forward_tile(head, tile, scratch, sums, totals, head_lse)
        torch.div(streams.apart(sums), streams.apart(totals), out=out_rows)
        streams.unpack(head_lse, lse_rows)
    return out, lse


def _forward_tile(
    head: Head, tile: Tile, scratch: Scratch, sums: Tensor, totals: Tensor, lse: Tensor
) -> None:
    """Compute the weighted sums of values, what they are to be divided by, and the log-sum-exp."""
    slab = _scores(head, tile, scratch)
    peak = slab.band.amax(-1, keepdim=True)
    _exponentiate(slab, peak)
    total = tile.on_queries(totals)
    torch.sum(slab.band, -1, keepdim=True, out=total)
    torch.add(peak, total.log2(), out=tile.on_queries(lse))
    if head.dropout > 0:
        slab.band.mul_(_kept(head, slab, scratch))
        total.mul_(1 - head.dropout)
    torch.bmm(slab.square, tile.on_keys(head.v), out=tile.on_queries(sums))


@dataclass(frozen=True)
class _Gradients:
    """One head's gradients, laid out as `Head`'s tensors, and what they are made from.

    `dout` is divided by the share of weights that dropout keeps; `dot` is the sum of dout * out.
    """

    scale: float
    dout: Tensor
    dot: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    relative: Relative | None


def _backward(call: Call, out: Tensor, lse: Tensor, dout: Tensor) -> list[Tensor]:
    """Return the gradients of the call's tensors."""
    scratch = Scratch(call.q)
    gradients = [x.new_zeros(x.shape) for x in call.tensors]
    for streams in streams_of(call):
        buffers = Buffers(streams, scratch)
        head = make_head(call, buffers)
        dq_rows = streams.query_rows(gradients[0])
        dk_rows, dv_rows = (streams.key_rows(x) for x in gradients[1:3])
        dout_rows, out_rows, lse_rows = (streams.query_rows(x) for x in (dout, out, lse))
        head_dout, dot = _output_gradient(dout_rows, out_rows, call.dropout, buffers)
        g = _Gradients(
            scale=call.scale,
            dout=head_dout,
            dot=dot,
            lse=buffers.packed(lse_rows, "lse"),
            dq=buffers.writable(dq_rows, "dq"),
            dk=buffers.writable(dk_rows, "dk").zero_(),
            dv=buffers.writable(dv_rows, "dv").zero_(),
            relative=_relative_rows(gradients, head),
        )
        for tile in head.tiles():
            _backward_tile(head, g, tile, scratch)
        streams.unpack(g.dq, dq_rows)
        streams.unpack(g.dk, dk_rows)
        streams.unpack(g.dv, dv_rows)
        if g.relative is not None:
            gradients[3][streams.head, : head.window + 1] += g.relative.r.flip(0)
    return gradients


def _relative_rows(gradients: list[Tensor], head: Head) -> Relative | None:
    """Return where the head's relative gradients are summed: a new r in the head's order, ..."""
    if head.r is None:
        return None
    content_bias, position_bias = (x[head.streams.head] for x in gradients[4:])
    return Relative(torch.zeros_like(head.r), content_bias, position_bias)


def _output_gradient(
    dout_rows: Rows, out_rows: Rows, dropout: float, buffers: Buffers
) -> tuple[Tensor, Tensor]:
    """Return dout divided by the share that dropout keeps, and the sum of dout * out per row."""
    sums = out_rows[..., :1]
    dot = buffers.new(sums, "dot")
    torch.sum(dout_rows * out_rows, -1, keepdim=True, out=buffers.streams.apart(dot))
    if dropout == 0:
        return buffers.packed(dout_rows, "dout"), dot
    return buffers.streams.pack(dout_rows, buffers.new(dout_rows, "dout")).div_(1 - dropout), dot


def _backward_tile(head: Head, g: _Gradients, tile: Tile, scratch: Scratch) -> None:
    weights = _scores(head, tile, scratch)
    _exponentiate(weights, tile.on_queries(g.lse))
    dout = tile.on_queries(g.dout)
    scores = Slab(tile, head.window, scratch.flat("gradients", Slab.elements(tile, head.window)))
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
    _add_to_keys(g.dk, tile, scores, tile.on_queries(head.content), scratch, factor=_LN_2)
    dq = scratch.shaped("rows", tile.count, tile.length, g.dq.shape[2])
    torch.bmm(scores.square, tile.on_keys(head.k), out=dq)
    if g.relative is not None:
        dq.add_(_relative_gradient(head, g, scores, dq, scratch))
    torch.mul(dq, g.scale, out=tile.on_queries(g.dq))


def _relative_gradient(
    head: Head, g: _Gradients, scores: Slab, content_dq: Tensor, scratch: Scratch
) -> Tensor:
    """Add to the relative gradients; return, unscaled, dq through the position term."""
    assert head.r is not None and g.relative is not None
    first = -scores.top - 1
    by_distance = scratch.shaped("by_distance", *scores.band.shape).copy_(scores.band).flatten(0, 1)
    position_dq = by_distance @ head.r[first:]
    position = scores.tile.on_queries(head.position).flatten(0, 1)
    g.relative.r[first:].addmm_(by_distance.mT, position, alpha=_LN_2)
    g.relative.content_bias.add_(content_dq.sum((0, 1)), alpha=g.scale)
    g.relative.position_bias.add_(position_dq.sum(0), alpha=g.scale)
    return position_dq.view_as(content_dq)


def _add_to_keys(
    total: Tensor, tile: Tile, slab: Slab, rows: Tensor, scratch: Scratch, factor: float = 1.0
) -> None:
    """Add the slab's transpose times the rows to the keys that the tile's blocks see."""
    if tile.disjoint:
        tile.on_keys(total).baddbmm_(slab.square.mT, rows, alpha=factor)
        return
    part = scratch.shaped("part", tile.count, tile.keys, rows.shape[2])
    torch.bmm(slab.square.mT, rows, out=part)
    tile.add_to_keys(total, part, factor)
