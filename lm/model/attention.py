"""Banded multi-head self-attention with Transformer-XL's relative positions (Longformer, 4.1-4.2).

Shapes: B batch, N positions of this call, H heads, D head width, M model width, W window.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kernels import Band, Relative, banded_attention


@runtime_checkable
class KeyValueCache(Protocol):
    """What attention needs of a cache of past keys and values (lm.model.stream has one)."""

    distance_keys: Tensor

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new keys and values; return all that the new queries may see."""


class BandedAttention(nn.Module):
    """Projections, relative terms, and one call into the kernels.

    Args:
        width: M. heads: H, which divides M. band: window and one stride per head.
        dropout: on the attention weights. bias: whether q, k, v and o have biases.
        unit: "characters" gives the relative term the true distance delta * stride;
            "steps" gives it delta, whatever the stride.
        backend: of `kernels.banded_attention`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        band: Band,
        *,
        dropout: float = 0.0,
        bias: bool = False,
        unit: str = "characters",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.heads = heads
        self.band = band
        self.dropout = dropout
        self.unit = unit
        self.backend = backend
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, width, bias=bias)
        self.v = nn.Linear(width, width, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)
        self.r = nn.Linear(width, width, bias=False)

    def distance_keys(
        self, table: Float[Tensor, "distances M"], keys: int
    ) -> Float[Tensor, "H deltas D"]:
        """r_h[delta] = W_kR^h R_m at the distance m of each delta (at most `keys` of them).

        Always float32, outside autocast: the relative term reaches over thousands of positions.
        """
        deltas = min(self.band.window, keys - 1) + 1
        strides = self.band.strides if self.unit == "characters" else (1,) * self.heads
        weight = self.r.weight.view(self.heads, -1, table.shape[1])
        with torch.autocast(table.device.type, enabled=False):
            groups = []
            for stride in sorted(set(strides)):
                heads = [h for h, s in enumerate(strides) if s == stride]
                rows = table[: (deltas - 1) * stride + 1 : stride]
                groups.append((heads, torch.einsum("tm,hdm->htd", rows, weight[heads])))
        if len(groups) == 1:
            return groups[0][1]
        order = [h for heads, _ in groups for h in heads]
        inverse = torch.tensor(order, device=table.device).argsort()
        return torch.cat([r for _, r in groups])[inverse]

    def forward(
        self,
        x: Float[Tensor, "B N M"],
        table: Float[Tensor, "distances M"],
        content_bias: Float[Tensor, "H D"],
        position_bias: Float[Tensor, "H D"],
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "B N M"]:
        """Attend to the positions of `x` and, with a cache, to those before it."""
        if torch.is_autocast_enabled(x.device.type):  # else each projection casts it for itself
            x = x.to(torch.get_autocast_dtype(x.device.type))
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)) for part in (self.q, self.k, self.v))
        if cache is None:
            r = self.distance_keys(table, x.shape[1])
        else:
            r = cache.distance_keys
            k, v = cache.extend(k, v)
        out = banded_attention(
            q,
            k,
            v,
            self.band,
            relative=Relative(r, content_bias, position_bias),
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return self.o(out.flatten(-2))
