"""Bits per character: a float64 sum of losses and an int64 count, never a mean of means."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float, Float64, Integer
from torch import Tensor

NATS_PER_BIT = math.log(2)


@dataclass(frozen=True)
class Score:
    """How well a number of characters was predicted.

    Attributes:
        nats: sum of -ln p over the scored characters.
        count: how many characters were scored.
    """

    nats: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a negative count."""
        if self.count < 0:
            raise ValueError(f"count is {self.count}; it must be at least 0")

    def __add__(self, other: Score) -> Score:
        """The score of both sets of characters together."""
        return Score(self.nats + other.nats, self.count + other.count)

    @property
    def bpc(self) -> float:
        """Bits per character (a character is a byte). Raises ValueError if none was scored."""
        if self.count == 0:
            raise ValueError("no character was scored, so there is no number of bits per character")
        return self.nats / NATS_PER_BIT / self.count


def character_nats(
    logits: Float[Tensor, "*batch symbols"], targets: Integer[Tensor, "*batch"]
) -> Float64[Tensor, "*batch"]:
    """-ln p of each target, in nats: a float32 softmax, widened to float64 for summing."""
    symbols = logits.shape[-1]
    losses = F.cross_entropy(
        logits.float().reshape(-1, symbols), targets.reshape(-1).long(), reduction="none"
    )
    return losses.double().view(targets.shape)


def summed(score: Score) -> Score:
    """The scores of all processes added up; `score` itself where there is one process."""
    nats = summed_tensor(torch.tensor([score.nats], dtype=torch.float64))
    count = summed_tensor(torch.tensor([score.count], dtype=torch.int64))
    return Score(float(nats), int(count))


def summed_tensor(values: Tensor) -> Tensor:
    """Elementwise sum over all processes, on the CPU."""
    if not (dist.is_available() and dist.is_initialized()):
        return values
    # NCCL adds only what lies on its device.
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    values = values.to(device, copy=True)
    dist.all_reduce(values)
    return values.cpu()
