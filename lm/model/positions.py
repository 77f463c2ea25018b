"""Sinusoidal positions at true distances (Transformer-XL's R, used by Longformer section 4.1)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def sinusoidal_table(distances: int, width: int) -> Float[Tensor, "distances width"]:
    """Rows R_m = [sin(m f), cos(m f)] for m = 0 .. distances - 1, f_t = 10000^(-2t / width).

    Built in float64 and rounded once to float32: in float32 throughout, the angle itself is off
    by 2e-3 at distance 32,768.
    """
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(distances, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()
