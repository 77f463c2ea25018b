"""Banded attention: one public function, a plain reference, fast implementations."""

import os
import sys
from contextlib import nullcontext

# OpenMP reads this when torch is imported. By default torch's threads spin between two operations,
# and take the cores from the kernels' threads (workers.py).
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # Between the small operations of a step, waking up takes longer than a short wait.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.backends import BackendError, choose_backend, describe_choice
from kernels.band import Band, Relative
from kernels.call import make_call

__all__ = ["BackendError", "Band", "Relative", "banded_attention", "describe_choice"]


def banded_attention(
    q: Float[Tensor, "batch queries heads dim"],
    k: Float[Tensor, "batch keys heads dim"],
    v: Float[Tensor, "batch keys heads dim"],
    band: Band,
    *,
    relative: Relative | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Float[Tensor, "batch queries heads dim"]:
    """Return causal attention over a band of keys (Longformer, sections 3 and 4).

    The queries are the last ones of the keys' positions: query row a stands at position
    i = keys - queries + a and sees the keys j = i - delta * stride_h with 0 <= delta <= window
    and j >= 0. With the relative terms (r, u, p) of Transformer-XL its scores are

        ((q_i + u_h) . k_j + (q_i + p_h) . r_h[delta]) * scale

    else q_i . k_j * scale; a softmax over the visible keys weighs the values. `scale` is dim**-0.5
    by default. `r` may have more rows than are needed. With `dropout` each weight is kept with
    probability 1 - dropout and then divided by it; the mask's seed is drawn from torch's CPU
    generator, so recomputation under torch.utils.checkpoint sees the same mask.

    Arithmetic is in float32, or float64 for float64 inputs, also under autocast; the output has
    q's type. Gradients reach q, k, v and the three relative tensors. The tensors may have any
    strides in memory. `backend` is auto (the fastest that can run), tvm, chunks, loop or dense.

    Raises ValueError for wrong arguments, BackendError when `backend` cannot run.
    """
    seed = _draw_seed() if dropout > 0 else 0
    call = make_call(q, k, v, band, relative=relative, dropout=dropout, seed=seed, scale=scale)
    _, chosen = choose_backend(call, backend)
    device = q.device.type
    guarded = torch.is_autocast_enabled(device)  # else small calls would feel the guard
    with torch.autocast(device, enabled=False) if guarded else nullcontext():
        return chosen.attend(call).to(q.dtype)


def _draw_seed() -> int:
    return int(torch.randint(2**62, (), device="cpu"))
