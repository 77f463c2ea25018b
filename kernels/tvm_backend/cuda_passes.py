"""The forward and the backward pass as launches of the CUDA programs, with what lies between.

Nothing here touches a device: `launch` does, or an emulation of one.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.call import Call
from kernels.cuda.program import PROGRAMS, Program, choose_program

_MOST_KEYS = 2**30  # positions are 32-bit numbers, with room for a tile and a stride
_MOST_BLOCKS = 2**31 - 1
_ENOUGH_BLOCKS = 512  # some blocks for each multiprocessor of any device, the same on all of them

Argument = Tensor | int | float


# Starts the blocks of a program on the device; returns before they end, and later launches wait
# for them. The arguments are those that the program's kernel has, by name, and others.
Launch = Callable[[Program, int, Mapping[str, Argument]], None]


@dataclass(frozen=True)
class Settings:
    """The numbers of a call; `shared_limit` is a block's greatest shared memory in bytes."""

    batch: int
    queries: int
    keys: int
    heads: int
    dim: int
    window: int
    strides: tuple[int, ...]
    scale: float
    dropout: float
    seed: int
    relative: bool
    shared_limit: int

    @staticmethod
    def of(call: Call, shared_limit: int) -> "Settings":
        """Return a call's numbers."""
        batch, queries, heads, dim = call.q.shape
        return Settings(
            batch=batch,
            queries=queries,
            keys=call.k.shape[1],
            heads=heads,
            dim=dim,
            window=call.band.window,
            strides=call.band.strides,
            scale=call.scale,
            dropout=call.dropout,
            seed=call.seed,
            relative=call.relative is not None,
            shared_limit=shared_limit,
        )

    @property
    def programs(self) -> tuple[str, ...]:
        """The names of the programs that a forward and a backward pass take."""
        return PROGRAMS if self.relative else PROGRAMS[:-1]

    def program(self, name: str) -> Program:
        """Return the program to run; `why_not` has found that there is one."""
        program = self._choose(name)
        assert program is not None
        return program

    def why_not(self) -> str | None:
        """Return None if the programs can run these sizes, else the reason in one line."""
        if self.keys > _MOST_KEYS:
            return f"k has {self.keys} positions; the CUDA kernels' limit is {_MOST_KEYS}"
        for name in self.programs:
            program = self._choose(name)
            if program is None:
                return (
                    f"heads of {self.dim} dimensions need more shared memory than the "
                    f"{self.shared_limit} bytes that a block may have on this device"
                )
            blocks = self.grid(program)[1]
            if blocks > _MOST_BLOCKS:
                return f"{name} needs {blocks} blocks; the limit of a launch is {_MOST_BLOCKS}"
        return None

    def grid(self, program: Program) -> tuple[int, int]:
        """Return the tiles in a stream (for distances: in a head), and all blocks."""
        tile = program.tile
        if program.name == "backward_distances":
            tiles = -(-(self.window + 1) // tile.block_columns)
            return tiles, tiles * self.heads * self.parts(program)
        by_keys = program.name == "backward_keys"
        length, size = (
            (self.keys, tile.block_columns) if by_keys else (self.queries, tile.block_rows)
        )
        tiles = max(stride * -(-_longest(length, stride) // size) for stride in set(self.strides))
        return tiles, tiles * self.batch * self.heads

    def parts(self, program: Program) -> int:
        """Return how many blocks share the queries of one tile of distances.

        It depends on the sizes alone: so do the bits of the result.
        """
        tiles = -(-(self.window + 1) // program.tile.block_columns)
        wanted = -(-_ENOUGH_BLOCKS // (tiles * self.heads))
        return max(1, min(wanted, self.batch * -(-self.queries // program.tile.block_rows)))

    def _choose(self, name: str) -> Program | None:
        dropout = self.dropout > 0
        return choose_program(
            name, self.dim, self.window, self.relative, dropout, self.shared_limit
        )


def run_forward(settings: Settings, inputs: list[Tensor], launch: Launch) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp (base 2) [batch, heads, queries].

    `inputs` are q, k, v and, with relative terms, r, content bias, position bias; contiguous.
    """
    q = inputs[0]
    out = torch.empty_like(q)
    log_sums = q.new_empty(settings.batch, settings.heads, settings.queries)
    program = settings.program("forward")
    arguments = _common(settings, inputs) | {"out": out, "log_sums": log_sums}
    _start(settings, program, arguments, launch)
    return out, log_sums


def run_backward(
    settings: Settings,
    inputs: list[Tensor],
    saved: tuple[Tensor, Tensor],
    grad: Tensor,
    launch: Launch,
) -> list[Tensor]:
    """Return the gradients of the inputs, given what the forward returned; `grad` is contiguous."""
    q, k, v, *relative = inputs
    out, log_sums = saved
    dots = torch.empty_like(log_sums)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    common = _common(settings, inputs)
    common |= {"out": out, "log_sums": log_sums, "grad": grad, "dots": dots}

    program = settings.program("backward_queries")
    _start(settings, program, common | {"dq": dq, "scale": settings.scale}, launch)

    program = settings.program("backward_keys")
    arguments = common | {"dk": dk, "dv": dv}
    if not relative:
        _start(settings, program, arguments, launch)
        return [dq, dk, dv]
    tiles, _ = settings.grid(program)
    content_sums = q.new_empty(settings.batch, settings.heads, tiles, settings.dim)
    _start(settings, program, arguments | {"content_sums": content_sums}, launch)
    d_content = content_sums.sum((0, 2)) * settings.scale
    dr, d_position = _relative_gradients(settings, relative, common, launch)
    return [dq, dk, dv, dr, d_content, d_position]


def _relative_gradients(
    settings: Settings, relative: list[Tensor], common: dict[str, Argument], launch: Launch
) -> tuple[Tensor, Tensor]:
    r, content_bias, position_bias = relative
    program = settings.program("backward_distances")
    parts = settings.parts(program)
    dr_parts = r.new_empty(parts, *r.shape)
    distance_sums = r.new_empty(parts, *r.shape[:2])
    numbers = {"parts": parts, "batch": settings.batch}
    arguments = common | {"dr": dr_parts, "distance_sums": distance_sums} | numbers
    _start(settings, program, arguments, launch)
    sums = distance_sums.sum(0).unsqueeze(-1) * settings.scale
    # The programs hold q + content bias; r meets q + position bias.
    dr = dr_parts.sum(0).addcmul_(sums, (position_bias - content_bias).unsqueeze(1))
    return dr, (sums * r).sum(1)


def _common(settings: Settings, inputs: list[Tensor]) -> dict[str, Argument]:
    """Return the arguments that all programs take."""
    q, k, v, *relative = inputs
    factor = settings.scale * math.log2(math.e)
    arguments: dict[str, Argument] = {
        "q": q,
        "k": k,
        "v": v,
        "strides": _on_device(settings.strides, q.device),
        "heads": settings.heads,
        "queries": settings.queries,
        "keys": settings.keys,
        "window": settings.window,
        "factor": factor,
        "seed_low": _signed(settings.seed),
        "seed_high": _signed(settings.seed >> 32),
        "threshold": round(settings.dropout * 2**24),
        "keep_scale": 1 / (1 - settings.dropout),
    }
    if relative:
        r, content_bias, position_bias = relative
        bias = ((position_bias - content_bias).unsqueeze(1) * r).sum(-1) * factor
        arguments |= {"r": r, "content": content_bias, "bias": bias}
    return arguments


def _start(
    settings: Settings, program: Program, arguments: dict[str, Argument], launch: Launch
) -> None:
    tiles, blocks = settings.grid(program)
    launch(program, blocks, arguments | {"tiles": tiles, "blocks": blocks})


@functools.cache
def _on_device(strides: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(strides, dtype=torch.int32, device=device)


def _longest(length: int, stride: int) -> int:
    """Return the number of positions of the longest residue class."""
    return -(-length // stride)


def _signed(word: int) -> int:
    """Return the low 32 bits as a signed number."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
