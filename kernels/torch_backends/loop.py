"""The paper's loop over deltas: exact, little memory, slow; for tests.

One diagonal of one head at a time, with a running maximum forward and recomputation from the
saved log-sum-exp backward, so that nothing larger than the inputs is ever held.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.call import Call
from kernels.dropout import keep_mask, row_keys


def can_run(call: Call) -> str | None:
    """Return None: the loop runs everywhere."""
    return None


def attend(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    """Return banded attention, computed diagonal by diagonal."""
    out: Tensor = _Loop.apply(call.settings, *call.tensors)
    return out


class _Diagonal(NamedTuple):
    """The pairs of one head at one delta: rows of the queries, rows of the keys."""

    head: int
    delta: int
    rows: slice
    keys: slice


def _diagonals(call: Call) -> Iterator[_Diagonal]:
    queries, keys = call.q.shape[1], call.k.shape[1]
    for head, stride in enumerate(call.band.strides):
        for delta in range(call.band.window + 1):
            first = max(0, delta * stride - call.offset)
            if first < queries:
                key = call.offset + first - delta * stride
                yield _Diagonal(head, delta, slice(first, None), slice(key, keys - delta * stride))


def _keep(call: Call, at: _Diagonal) -> Float[Tensor, "batch rows 1"] | float:
    """Return what the weights are multiplied with: 0 or 1 / (1 - dropout)."""
    if call.dropout == 0:
        return 1.0
    batch, queries, heads, _ = call.q.shape
    device = call.q.device
    streams = torch.arange(batch, device=device)[:, None] * heads + at.head
    positions = torch.arange(queries, device=device)[at.rows] + call.offset
    delta = torch.tensor(at.delta, device=device)
    keep = keep_mask(call.dropout, row_keys(call.seed, streams, positions), delta)
    return keep[..., None].to(call.q.dtype) / (1 - call.dropout)


def _terms(call: Call, at: _Diagonal) -> tuple[Tensor, Tensor, Tensor, Tensor | float]:
    """Return q + u, q + p [B, rows, D], the keys, and r[delta] [D] (0 without relative terms)."""
    q, k = call.q[:, at.rows, at.head], call.k[:, at.keys, at.head]
    if call.relative is None:
        return q, q, k, 0.0
    r, content_bias, position_bias = call.relative
    return q + content_bias[at.head], q + position_bias[at.head], k, r[at.head, at.delta]


def _score(call: Call, at: _Diagonal) -> Float[Tensor, "batch rows 1"]:
    content, position, k, r = _terms(call, at)
    return (content * k + position * r).sum(-1, keepdim=True) * call.scale


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: dict[str, Any], *tensors: Tensor) -> Tensor:
        call = Call.from_tensors(settings, tensors)
        out = call.q.new_zeros(call.q.shape)
        peak = call.q.new_full((*call.q.shape[:3], 1), -torch.inf)
        total = torch.zeros_like(peak)
        for at in _diagonals(call):
            here = (slice(None), at.rows, at.head)
            score = _score(call, at)
            new_peak = torch.maximum(peak[here], score)
            shrink, weight = (peak[here] - new_peak).exp(), (score - new_peak).exp()
            peak[here] = new_peak
            total[here] = total[here] * shrink + weight
            out[here] = out[here] * shrink + weight * _keep(call, at) * call.v[:, at.keys, at.head]
        out /= total
        ctx.settings = settings
        ctx.save_for_backward(*tensors, out, peak + total.log())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        call = Call.from_tensors(ctx.settings, tuple(tensors))
        dq, dk, dv, *relative = grads = [x.new_zeros(x.shape) for x in tensors]
        for at in _diagonals(call):
            here, there = (slice(None), at.rows, at.head), (slice(None), at.keys, at.head)
            content, position, k, r = _terms(call, at)
            weight, keep = (_score(call, at) - lse[here]).exp(), _keep(call, at)
            dscore = (dout[here] * call.v[there]).sum(-1, keepdim=True) * keep
            dscore -= (dout[here] * out[here]).sum(-1, keepdim=True)
            dscore *= weight * call.scale
            dq[here] += dscore * (k + r)
            dk[there] += dscore * content
            dv[there] += weight * keep * dout[here]
            if relative:
                dr, dcontent_bias, dposition_bias = relative
                dr[at.head, at.delta] += (dscore * position).sum((0, 1))
                dcontent_bias[at.head] += (dscore * k).sum((0, 1))
                dposition_bias[at.head] += dscore.sum() * r
        return None, *grads
