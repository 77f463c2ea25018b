"""Speed of the register tiles alone, beside torch.mm's: python -m kernels.bench.tiles --help.

It is the ceiling of the attention programs, which spend most of their time in these products.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from kernels.bench.cases import CLOCKS, MM_FLOPS, Timed, matrix_product, say, time_in_turns
from kernels.cpu.program import build_kernel
from kernels.cpu.targets import Tile, machine_target
from kernels.cpu.tiles import accumulate, fill, load, opaque, registers, spill, splat, store

_DESCRIPTION = """\
Speed of the register tiles that the CPU programs are made of, on one thread, as useful operations
per second and as a share of torch.mm's of two 1024 x 1024 matrices, timed in turns.

scores: queries times keys, packed in strips. rows: weights times values. columns: the gradients of
keys or values, from columns of weights. Operands lie in the second-level cache.
"""
KEYS = 384  # a multiple of every tile's width; with heads of 64 an operand has 96 KiB
_WORK = 1e9  # operations of one timed call


def scores(tile: Tile, dim: int, a: SimpleNamespace) -> None:
    """Multiply `tile.rows` queries in a.left [row][dim] with a.right in strips, into a.out."""
    lanes = tile.lanes
    with T.serial(0, KEYS // (lanes * tile.columns)) as number:
        strip = opaque(number * tile.columns)
        sums = registers(tile.rows, tile.columns, lanes)
        fill(sums, lambda i, v: splat(0.0, lanes), lanes)

        def right(d: Expr, v: int) -> Expr:
            return load(a.right, ((strip + v) * dim + d) * lanes, lanes)

        accumulate(sums, 0, dim, lambda i, d: a.left[i * dim + d], right, lanes)

        def write(i: int, v: int, value: Expr) -> None:
            store(a.out, i * KEYS + (strip + v) * lanes, value, lanes)

        spill(sums, write, lanes)


def rows(tile: Tile, dim: int, a: SimpleNamespace) -> None:
    """Multiply `tile.rows` rows of weights, a.left [row][key], with a.right [key][dim]."""
    for part in tile.split(dim):
        _product(
            (tile.rows, part, tile.lanes),
            (0, KEYS),
            (lambda i, key: a.left[i * KEYS + key], lambda key, d: key * dim + d),
            lambda i, d: i * dim + d,
            a,
        )


def columns(tile: Tile, dim: int, a: SimpleNamespace) -> None:
    """Multiply columns of weights, a.left [row][key], with a block of rows, a.right [row][dim]."""
    with T.serial(0, KEYS // tile.keys) as number:
        key = opaque(number * tile.keys)
        for part in tile.split(dim):
            _product(
                (tile.keys, part, tile.lanes),
                (0, tile.block),
                (lambda i, row: a.left[row * KEYS + key + i], lambda row, d: row * dim + d),
                lambda i, d: (key + i) * dim + d,
                a,
            )


def _product(
    shape: tuple[int, range, int],
    span: tuple[int, int],
    operands: tuple[Callable[[int, Expr], Expr], Callable[[Expr, int], Expr]],
    place: Callable[[int, int], Expr | int],
    a: SimpleNamespace,
) -> None:
    """Add a product to `shape` (rows, registers of a row, lanes) of a.out at `place`."""
    count, part, lanes = shape
    left, right = operands
    sums = registers(count, len(part), lanes)
    fill(sums, lambda i, v: load(a.out, place(i, part[v] * lanes), lanes), lanes)
    accumulate(
        sums, *span, left, lambda k, v: load(a.right, right(k, part[v] * lanes), lanes), lanes
    )
    spill(sums, lambda i, v, x: store(a.out, place(i, part[v] * lanes), x, lanes), lanes)


Body = Callable[[Tile, int, SimpleNamespace], None]


def products(tile: Tile, dim: int) -> dict[str, tuple[Body, str, tuple[int, int, int], int]]:
    """Return, by name: the program, its tile in words, sizes of left, right and out, operations."""
    wide = max(len(part) for part in tile.split(dim)) * tile.lanes
    keys = KEYS * dim
    weights = tile.rows * KEYS
    return {
        "scores": (
            scores,
            f"{tile.rows} x {tile.columns * tile.lanes}",
            (tile.rows * dim, keys, weights),
            2 * tile.rows * keys,
        ),
        "rows": (
            rows,
            f"{tile.rows} x {wide}",
            (weights, keys, tile.rows * dim),
            2 * tile.rows * keys,
        ),
        "columns": (
            columns,
            f"{tile.keys} x {wide}",
            (tile.block * KEYS, tile.block * dim, keys),
            2 * tile.block * keys,
        ),
    }


def compile_product(body: Body, tile: Tile, dim: int, sizes: tuple[int, int, int], cpu: str) -> Any:
    """Return the kernel of left, right, out and the number of repetitions."""
    import tvm

    def repeat(a: SimpleNamespace) -> None:
        with T.serial(0, a.n):
            body(tile, dim, a)

    names = ("left", "right", "out")
    tensors = {name: lambda a, n=n: T.int32(n) for name, n in zip(names, sizes, strict=True)}
    function = build_kernel("product", tensors, {"n": "int32"}, repeat)
    return tvm.compile(function, target={"kind": "llvm", "mcpu": cpu})["product"]


def measure(dim: int, repetitions: int, clock: str) -> list[dict[str, Any]]:
    """Return a row of figures for each product."""
    target = machine_target()
    runs = {"mm": matrix_product(1)}
    all_products = products(target.tile, dim)
    flops = {"mm": float(MM_FLOPS)}
    for name, (body, _, sizes, operations) in all_products.items():
        kernel = compile_product(body, target.tile, dim, sizes, target.cpu)
        # Small numbers: sums stay finite however often they are added to.
        tensors = [torch.rand(size) * 1e-3 for size in sizes]
        times = max(1, round(_WORK / operations))
        flops[name] = float(operations * times)
        runs[name] = Timed(1, functools.partial(kernel, *tensors, times))
    seconds = time_in_turns(runs, repetitions, clock)
    peak = flops["mm"] / seconds["mm"]
    return [
        {
            "product": name,
            "tile": words,
            "dim": dim,
            "target": target.name,
            "clock": clock,
            "gflops": flops[name] / seconds[name] / 1e9,
            "mm_gflops": peak / 1e9,
            "of_mm": flops[name] / seconds[name] / peak,
        }
        for name, (_, words, _, _) in all_products.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench.tiles",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dim", type=int, default=64, help="head size (64)")
    parser.add_argument("--repetitions", type=int, default=15, help="timed turns (15)")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="cpu",
        help="cpu (default): this process's processor time; or wall",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all figures there")
    options = parser.parse_args(arguments)
    if options.dim < 16 or options.dim % 16:
        raise SystemExit(f"--dim is {options.dim}; head sizes are multiples of 16")
    figures = measure(options.dim, options.repetitions, options.clock)
    mm = figures[0]["mm_gflops"]
    say(f"{machine_target().name}, heads of {options.dim}, torch.mm {mm:.1f} GFLOP/s")
    say(f"{'product':<10}{'tile':<10}{'GFLOP/s':>9}{'of mm':>8}")
    for row in figures:
        say(f"{row['product']:<10}{row['tile']:<10}{row['gflops']:>9.1f}{row['of_mm']:>8.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
