"""Bits per character: a float64 sum of losses and an int64 count, never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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


class Tally:
    """Adds up the losses of scored characters, in total and by how much context each was given.

    Args:
        left_out: a byte value whose losses do not count (it stays in the context).
        edges: rising numbers of context characters; bin b of the curve holds the characters that
            were given edges[b] <= context < edges[b + 1]. Smaller contexts count in total only.
    """

    def __init__(self, left_out: int | None = None, edges: Sequence[int] = ()) -> None:
        self.score = Score()
        self.ignored = 0
        self.left_out = left_out
        self.edges = np.asarray(edges, dtype=np.int64)
        self.curve_nats = np.zeros(len(edges), dtype=np.float64)
        self.curve_counts = np.zeros(len(edges), dtype=np.int64)

    def add(
        self,
        nats: Float64[Tensor, "batch positions"],
        targets: Integer[Tensor, "batch positions"],
        context: range,
    ) -> None:
        """Count the losses of `targets`; target t of each row was given context[t] characters."""
        losses, kept = nats.cpu().numpy(), np.ones(tuple(nats.shape), dtype=bool)
        if self.left_out is not None:
            kept = targets.cpu().numpy() != self.left_out
        count = int(kept.sum())
        self.score += Score(float(losses[kept].sum()), count)
        self.ignored += kept.size - count
        if len(self.edges):
            bins = np.searchsorted(self.edges, np.arange(context.start, context.stop), "right") - 1
            bins = np.broadcast_to(bins, losses.shape)
            inside = kept & (bins >= 0)
            size = len(self.edges)
            self.curve_nats += np.bincount(bins[inside], losses[inside], minlength=size)
            self.curve_counts += np.bincount(bins[inside], minlength=size)

    def sum_over_processes(self) -> None:
        """Replace every number by its sum over all processes."""
        self.score = summed(self.score)
        self.ignored = int(summed_tensor(torch.tensor([self.ignored])))
        self.curve_nats = summed_tensor(torch.from_numpy(self.curve_nats)).numpy()
        self.curve_counts = summed_tensor(torch.from_numpy(self.curve_counts)).numpy()


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
