"""One checked call of banded attention: what every backend receives."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.band import Band, Relative


@dataclass(frozen=True)
class Call:
    """The arguments of banded attention after checking, clipping and promotion.

    All tensors are on one device and of one type, float32 or float64. They may be views with any
    strides in memory and may require gradients. The queries are the last ones of the keys'
    positions: query row a stands at position `offset + a`.

    `band.window` is at most keys - 1, a stride at most keys (with either a head sees no less), and
    `relative.r` has exactly `band.window + 1` rows.
    `seed` keys the dropout mask and is 0 without dropout.
    """

    q: Float[Tensor, "batch queries heads dim"]
    k: Float[Tensor, "batch keys heads dim"]
    v: Float[Tensor, "batch keys heads dim"]
    band: Band
    relative: Relative | None
    dropout: float
    seed: int
    scale: float

    @property
    def offset(self) -> int:
        """The position of the first query."""
        return self.k.shape[1] - self.q.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return q, k, v and, with relative terms, r and the two biases: all that has gradients."""
        return self.q, self.k, self.v, *(self.relative or ())

    @property
    def settings(self) -> dict[str, Any]:
        """Return all but the tensors, which autograd must hold for checkpointing to free them."""
        return {
            "band": self.band,
            "dropout": self.dropout,
            "seed": self.seed,
            "scale": self.scale,
        }

    @classmethod
    def from_tensors(cls, settings: dict[str, Any], tensors: tuple[Tensor, ...]) -> "Call":
        """Return the call again from its `settings` and `tensors`."""
        q, k, v, *relative = tensors
        return cls(q=q, k=k, v=v, relative=Relative(*relative) if relative else None, **settings)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    *,
    relative: Relative | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    scale: float | None = None,
) -> Call:
    """Check the arguments of `banded_attention` and bring them into a backend's form.

    Raises ValueError that names the argument, what came and what is needed.
    """
    _check_inputs(q, k, v)
    if len(band.strides) != q.shape[2]:
        raise ValueError(
            f"band.strides has {len(band.strides)} entries; q has {q.shape[2]} heads, "
            "and each needs one stride"
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; it must be a finite number")

    # What need not change is passed on untouched: small calls feel each operation of torch.
    keys = k.shape[1]
    if band.window >= keys or max(band.strides) > keys:
        strides = tuple(min(stride, keys) for stride in band.strides)
        band = replace(band, window=min(band.window, keys - 1), strides=strides)
    dtype = torch.promote_types(q.dtype, torch.float32)
    if relative is not None:
        rows = band.window + 1
        _check_relative(relative, q, dtype, rows)
        r, content_bias, position_bias = (_as(tensor, dtype) for tensor in relative)
        relative = Relative(r if r.shape[1] == rows else r[:, :rows], content_bias, position_bias)
    return Call(
        q=_as(q, dtype),
        k=_as(k, dtype),
        v=_as(v, dtype),
        band=band,
        relative=relative,
        dropout=float(dropout),
        seed=seed,
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
    )


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have the four sizes "
                "[batch, positions, heads, dim], each at least 1"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has type {tensor.dtype}; it must be a floating-point tensor")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} but q is {q.dtype} on {q.device}; "
                "they must agree"
            )
    batch, queries, heads, dim = q.shape
    if (k.shape[0], *k.shape[2:]) != (batch, heads, dim):
        raise ValueError(
            f"k has shape {tuple(k.shape)}; with q of shape {tuple(q.shape)} "
            f"it must be [{batch}, keys, {heads}, {dim}]"
        )
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must have k's, {tuple(k.shape)}")
    if queries > k.shape[1]:
        raise ValueError(
            f"q has {queries} positions but k only {k.shape[1]}; the queries are the last ones "
            "of the keys' positions, so there must be at least as many keys"
        )


def _check_relative(relative: Relative, q: Tensor, dtype: torch.dtype, rows: int) -> None:
    heads, dim = q.shape[2:]
    for field, tensor in zip(Relative._fields, relative, strict=True):
        if tensor.dtype != dtype and (
            not tensor.is_floating_point() or torch.promote_types(tensor.dtype, dtype) != dtype
        ):
            raise ValueError(
                f"relative.{field} has type {tensor.dtype}; with q of {q.dtype} the arithmetic is "
                f"in {dtype}, and it must be a floating-point type no wider than that"
            )
        if tensor.device != q.device:
            raise ValueError(
                f"relative.{field} is on {tensor.device}; it must be on q's, {q.device}"
            )
    r, *biases = relative
    if r.ndim != 3 or (r.shape[0], r.shape[2]) != (heads, dim) or r.shape[1] < rows:
        raise ValueError(
            f"relative.r has shape {tuple(r.shape)}; it must be [{heads}, rows, {dim}] with at "
            f"least {rows} rows, one for each delta from 0 to the window or the first key"
        )
    for field, bias in zip(Relative._fields[1:], biases, strict=True):
        if bias.shape != (heads, dim):
            raise ValueError(
                f"relative.{field} has shape {tuple(bias.shape)}; it must be [{heads}, {dim}]"
            )
