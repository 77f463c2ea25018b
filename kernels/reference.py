"""The dense oracle: every score of every pair, masked. Slow, large and plainly right."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kernels.call import Call
from kernels.dropout import keep_mask, row_keys


def can_run(call: Call) -> str | None:
    """Return None: the oracle runs everywhere."""
    return None


def attend(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    """Return banded attention from the full matrix of scores; gradients are autograd's."""
    delta, visible = band_pattern(call)
    query, key, value = (x.transpose(1, 2) for x in (call.q, call.k, call.v))  # [B, H, N, D]
    scores = _scores(call, query, key, delta) * call.scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    if call.dropout > 0:
        weights = weights * _keep(call, delta) / (1 - call.dropout)
    return (weights @ value).transpose(1, 2)


def band_pattern(
    call: Call,
) -> tuple[Int64[Tensor, "heads queries keys"], Bool[Tensor, "heads queries keys"]]:
    """Return delta of each (head, query, key), 0 where it is not visible, and what is visible."""
    device = call.q.device
    keys = torch.arange(call.k.shape[1], device=device)
    queries = keys[call.offset :]
    stride = torch.tensor(call.band.strides, device=device)[:, None, None]
    distance = (queries[:, None] - keys).expand(len(call.band.strides), -1, -1)
    delta = distance // stride
    visible = (distance % stride == 0) & (delta >= 0) & (delta <= call.band.window)
    return delta.where(visible, 0), visible


def _scores(
    call: Call,
    query: Float[Tensor, "batch heads queries dim"],
    key: Float[Tensor, "batch heads keys dim"],
    delta: Int64[Tensor, "heads queries keys"],
) -> Float[Tensor, "batch heads queries keys"]:
    if call.relative is None:
        return query @ key.mT
    r, content_bias, position_bias = call.relative
    content = (query + content_bias[:, None]) @ key.mT
    position = (query + position_bias[:, None]) @ r.mT  # [B, H, queries, window + 1]
    return content + position.gather(3, delta.expand_as(content))


def _keep(
    call: Call, delta: Int64[Tensor, "heads queries keys"]
) -> Bool[Tensor, "batch heads queries keys"]:
    batch, queries, heads, _ = call.q.shape
    device = call.q.device
    streams = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    positions = torch.arange(call.offset, call.offset + queries, device=device).view(-1, 1)
    return keep_mask(call.dropout, row_keys(call.seed, streams, positions), delta)
