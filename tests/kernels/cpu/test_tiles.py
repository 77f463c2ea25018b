"""The register tiles alone, for every instruction set that this machine has."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

tvm = pytest.importorskip("tvm")
from tvm.script.ir_builder import tirx as T  # noqa: E402

from kernels import dropout_tir as tvm_random  # noqa: E402
from kernels.cpu import tiles as tvm_tiles  # noqa: E402
from kernels.cpu.pack import relative_strips  # noqa: E402
from kernels.cpu.program import build_kernel  # noqa: E402
from kernels.cpu.targets import AVX2, AVX512, SSE, Target, machine_target  # noqa: E402
from kernels.dropout import keep_mask, row_keys  # noqa: E402

_X86 = [SSE, AVX2, AVX512]
_RUNNABLE = _X86[: _X86.index(machine_target()) + 1] if machine_target() in _X86 else []


@pytest.fixture(params=_RUNNABLE, ids=lambda target: target.name)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


def compile_kernel(
    target: Target, tensors: dict[str, int], body: Callable[[SimpleNamespace], None]
) -> Any:
    """Compile a kernel of flat tensors of the given sizes and one number n."""
    sizes = {name: lambda a, size=size: T.int32(size) for name, size in tensors.items()}
    function = build_kernel("kernel", sizes, {"n": "int32"}, body)
    return tvm.compile(function, target={"kind": "llvm", "mcpu": target.cpu})["kernel"]


def test_tile_is_a_plain_product(target: Target) -> None:
    tile, depth = target.tile, 37
    lanes, width = tile.lanes, tile.columns * tile.lanes

    def body(a: SimpleNamespace) -> None:
        sums = tvm_tiles.registers(tile.rows, tile.columns, lanes)
        tvm_tiles.fill(sums, lambda i, v: tvm_tiles.splat(1.0, lanes), lanes)
        tvm_tiles.accumulate(
            sums,
            0,
            a.n,
            lambda i, k: a.left[i * depth + k],
            lambda k, v: tvm_tiles.load(a.right, k * width + v * lanes, lanes),
            lanes,
        )

        def write(i: int, v: int, value: Any) -> None:
            tvm_tiles.store(a.out, i * width + v * lanes, value, lanes)

        tvm_tiles.spill(sums, write, lanes)

    sizes = {"left": tile.rows * depth, "right": depth * width, "out": tile.rows * width}
    kernel = compile_kernel(target, sizes, body)
    left, right = torch.randn(tile.rows, depth), torch.randn(depth, width)
    out = torch.full((tile.rows, width), torch.nan)
    kernel(left.view(-1), right.view(-1), out.view(-1), depth)
    torch.testing.assert_close(out.double(), left.double() @ right.double() + 1, atol=1e-5, rtol=0)
    kernel(left.view(-1), right.view(-1), out.view(-1), 0)
    assert torch.equal(out, torch.ones_like(out))


def test_vector_functions(target: Target) -> None:
    lanes = target.tile.lanes

    def body(a: SimpleNamespace) -> None:
        with T.serial(0, a.n) as i:
            x = T.bind(tvm_tiles.load(a.x, i * lanes, lanes))
            tvm_tiles.store(a.power, i * lanes, tvm_tiles.exp2(x, lanes), lanes)
            tvm_tiles.store(a.top, i * lanes, tvm_tiles.reduce(x, T.max, lanes), lanes)
            total = tvm_tiles.first(tvm_tiles.reduce(x, lambda p, q: p + q, lanes))
            T.buffer_store(a.total, total, [i])
        square = [T.bind(tvm_tiles.load(a.x, i * lanes, lanes)) for i in range(lanes)]
        for i, column in enumerate(tvm_tiles.transpose(square, lanes)):
            tvm_tiles.store(a.turned, i * lanes, column, lanes)

    rows = 40
    sizes = dict.fromkeys(("x", "power", "top"), rows * lanes)
    kernel = compile_kernel(target, sizes | {"total": rows, "turned": lanes * lanes}, body)
    x = torch.empty(rows, lanes).uniform_(-120, 120)
    x[0, :4] = torch.tensor([0.0, 1.0, -1000.0, 127.0])
    power, top, total = torch.empty_like(x), torch.empty_like(x), torch.empty(rows)
    turned = torch.empty(lanes, lanes)
    kernel(*(t.view(-1) for t in (x, power, top, total, turned)), rows)
    expected = torch.exp2(x.double().clamp(min=-126))
    assert ((power - expected) / expected).abs().max() < 2.5e-7
    assert power[0, 0] == 1.0
    assert torch.equal(top, x.amax(1, keepdim=True).expand_as(x))
    torch.testing.assert_close(total.double(), x.double().sum(1), atol=1e-3, rtol=0)
    assert torch.equal(turned, x[:lanes].T)


@pytest.mark.parametrize("seed", [0, 2**61 + 12345, 0xFFFFFFFF])
def test_dropout_hash_is_the_contracts(seed: int) -> None:
    target = machine_target()
    lanes = target.tile.lanes

    def body(a: SimpleNamespace) -> None:
        key = tvm_random.seed_key(a.tasks[0], a.tasks[1])
        row = T.bind(tvm_random.row_key(key, a.tasks[2], a.tasks[3]))
        with T.serial(0, a.n) as i:
            delta = tvm_tiles.iota(lanes, i * lanes)
            threshold = T.broadcast(a.tasks[4], lanes)
            kept = tvm_random.keep(T.broadcast(row, lanes), delta, threshold, lanes)
            ones, zeros = tvm_tiles.splat(1.0, lanes), tvm_tiles.splat(0.0, lanes)
            tvm_tiles.store(a.kept, i * lanes, T.Select(kept, ones, zeros), lanes)

    kernel = compile_kernel(target, {"tasks": 5, "kept": 64 * lanes}, body)
    numbers = [seed & 0xFFFFFFFF, seed >> 32, 5, 31_999, round(0.3 * 2**24)]
    words = torch.tensor(numbers).to(torch.int32)
    kept = torch.empty(64 * lanes)
    kernel(words, kept, 64)
    rows = row_keys(seed, torch.tensor(5), torch.tensor(31_999))
    assert torch.equal(kept.bool(), keep_mask(0.3, rows, torch.arange(64 * lanes)))


def test_relative_strips(target: Target) -> None:
    tile, dim, heads = target.tile, 32, 2
    function = relative_strips(tile, dim)
    options = {"kind": "llvm", "mcpu": target.cpu}
    kernel = tvm.compile(function, target=options)["relative_strips"]
    for window in (0, 14, 15, 16, 40):
        strips = -(-(window + 1) // tile.lanes) + 1
        r = torch.randn(heads, window + 1, dim)
        packed = torch.full((heads, strips, dim, tile.lanes), torch.nan)
        kernel(r.view(-1), packed.view(-1), 0, heads, heads, window, strips)
        columns = packed.transpose(2, 3).flatten(1, 2)  # [heads, columns, dim]
        assert torch.equal(columns[:, : window + 1], r.flip(1))
        assert not columns.isnan().any()
