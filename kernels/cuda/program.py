"""A CUDA program as the host sees it: its name, its sizes and its kernel's parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kernels.cuda.layout import (
    FLOAT_BYTES,
    DistanceMemory,
    ForwardMemory,
    KeyMemory,
    QueryMemory,
    Tile,
    plan_distances,
    plan_forward,
    plan_keys,
    plan_queries,
)

_Memory = ForwardMemory | QueryMemory | KeyMemory | DistanceMemory
_PLANS: dict[str, Callable[[Tile], _Memory]] = {
    "forward": plan_forward,
    "backward_queries": plan_queries,
    "backward_keys": plan_keys,
    "backward_distances": plan_distances,
}
PROGRAMS = tuple(_PLANS)
_SMALL_WINDOW = 32  # up to here, tiles of 32 keys (distances, queries) leave less of a tile unused


class Parameter(NamedTuple):
    """A parameter of a kernel: `kind` is the C type, that of the elements for a pointer."""

    name: str
    kind: str
    pointer: bool


@dataclass(frozen=True)
class Program:
    """One of PROGRAMS, built for a tile."""

    name: str
    tile: Tile

    @property
    def kernel(self) -> str:
        """The kernel's name in the CUDA source."""
        return f"{self.name}_kernel"

    @property
    def shared_bytes(self) -> int:
        """The shared memory that a block takes."""
        return _PLANS[self.name](self.tile).floats * FLOAT_BYTES


def read_parameters(program: Program, source: str) -> tuple[Parameter, ...]:
    """Return the kernel's parameters in order, read from its signature.

    TVM leaves out what a kernel does not use and puts the others into an order of its own.
    """
    signature = re.search(rf"\b{program.kernel}\(([^)]*)\)", source)
    if signature is None:
        raise ValueError(f"the CUDA source of {program.name} has no kernel {program.kernel}")
    return tuple(_read_parameter(text) for text in signature[1].split(","))


def _read_parameter(text: str) -> Parameter:
    match = re.fullmatch(r"\s*(\w+)(\*\s*__restrict__)?\s+(\w+?)(_ptr)?\s*", text)
    if match is None or bool(match[2]) != bool(match[4]):
        raise ValueError(f"cannot read the kernel's parameter {text.strip()!r}")
    return Parameter(match[3], match[1], bool(match[2]))


def choose_program(
    name: str, dim: int, window: int, relative: bool, dropout: bool, shared_limit: int
) -> Program | None:
    """Return the program with the largest tiles that a block's shared memory has room for.

    None if not even the smallest fit.
    """
    for rows, columns in _tiles(name, window):
        program = Program(name, Tile(dim, rows, columns, relative, dropout))
        if program.shared_bytes <= shared_limit:
            return program
    return None


def _tiles(name: str, window: int) -> list[tuple[int, int]]:
    """Return rows and columns per thread, the best first.

    The keys that a tile of queries sees are in the columns, and so are the distances of a tile of
    `backward_distances`; a tile of keys of `backward_keys` sees queries, in the rows.
    """
    narrow = (2, 4) if name == "backward_keys" else (4, 2)
    small = [narrow, (2, 2)]
    return small if window <= _SMALL_WINDOW else [(4, 4), *small]
