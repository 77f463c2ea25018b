"""What the CPU programs are compiled for: the instruction set and the shapes of register tiles.

torch has already asked the processor what it can do (and follows ATEN_CPU_CAPABILITY), so the same
answer is used here. The instruction set is named by its features, not by a model of processor: a
virtual machine may carry the name of a model and lack its features, and asking LLVM would mean
importing TVM. The AVX-512 tiles compile to the same loop when LLVM is told the model instead.
"""

import itertools
import platform
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """The shapes of the register tiles, chosen for a vector unit.

    lanes: floats per register. rows: query rows of a tile. columns: registers per row of a tile of
    scores, so that it has columns * lanes keys. dims: at most so many registers per
    row of a tile along the head's dimension. keys: rows of a tile of key gradients. block: query
    rows that are worked on together, a multiple of rows.
    """

    lanes: int
    rows: int
    columns: int
    dims: int
    keys: int
    block: int

    def split(self, dim: int) -> list[range]:
        """Return the registers of a row of `dim` floats in groups of at most `dims`."""
        vectors = dim // self.lanes
        groups = -(-vectors // self.dims)
        bounds = [vectors * i // groups for i in range(groups + 1)]
        return [range(a, b) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Target:
    """An instruction set for LLVM and the tiles that suit it."""

    name: str
    cpu: str
    tile: Tile


# 32 registers of 16 floats, 16 of 8, and 16 (or 32) of 4: a tile and its operands fill them.
AVX512 = Target("avx512", "x86-64-v4", Tile(lanes=16, rows=6, columns=3, dims=4, keys=4, block=48))
AVX2 = Target("avx2", "x86-64-v3", Tile(lanes=8, rows=4, columns=2, dims=2, keys=4, block=48))
SSE = Target("sse", "x86-64", Tile(lanes=4, rows=4, columns=2, dims=2, keys=4, block=48))
GENERIC = Target("generic", "generic", Tile(lanes=4, rows=6, columns=2, dims=4, keys=4, block=48))


def machine_target() -> Target:
    """Return the target of the processor that this runs on."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return GENERIC
    return {"AVX512": AVX512, "AVX2": AVX2}.get(torch.backends.cpu.get_cpu_capability(), SSE)
