"""The emulation itself: it must find the faults that it is there to find."""

import re
from typing import Any

import pytest
import torch

from kernels.band import Band
from kernels.call import make_call
from kernels.cuda.program import Program
from kernels.tvm_backend.cuda_passes import Settings, run_forward
from tests.kernels.cuda import emulation as cuda_emulation
from tests.kernels.cuda.emulation import EmulationError, cuda_text, run_source, untouched_array

pytest.importorskip("tvm")
if (reason := cuda_emulation.missing_compiler()) is not None:
    pytest.skip(reason, allow_module_level=True)

BARRIER = re.compile(r"^ *__syncthreads\(\);$", re.MULTILINE)
WARP_BARRIER = re.compile(r"^ *__syncwarp\(\);$", re.MULTILINE)


def forward(change: Any = lambda source: source, **changes: Any) -> None:
    """Run the forward program on 90 keys, with another source or other arguments."""

    def launch(program: Program, blocks: int, arguments: dict[str, Any]) -> None:
        given = {name: changes[name](value) for name, value in arguments.items() if name in changes}
        run_source(change(cuda_text(program)), program, blocks, {**arguments, **given})

    q, k, v = (torch.randn(1, 90, 1, 32) for _ in range(3))
    call = make_call(q, k, v, Band(20, (1,)))
    run_forward(Settings.of(call, 232448), [q, k, v], launch)


def without(pattern: re.Pattern[str], number: int) -> Any:
    def change(source: str) -> str:
        places = list(pattern.finditer(source))
        start, stop = places[number].span()
        return source[:start] + source[stop:]

    return change


def test_a_right_program_passes():
    forward()
    assert len(BARRIER.findall(cuda_text(_program()))) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_finds_a_missing_barrier(number):
    with pytest.raises(EmulationError, match="order of the threads|nothing wrote"):
        forward(without(BARRIER, number))


def test_finds_a_missing_warp_barrier():
    with pytest.raises(EmulationError, match="order of the threads|nothing wrote"):
        forward(without(WARP_BARRIER, 0))


@pytest.mark.parametrize("condition", ["threadIdx.x < 128", "threadIdx.x != 3"])
def test_finds_a_barrier_that_some_threads_leave_out(condition):
    with pytest.raises(EmulationError, match="wait in different places"):
        forward(lambda source: BARRIER.sub(f"if ({condition}) __syncthreads();", source, 1))


def test_finds_a_shuffle_that_some_threads_leave_out():
    with pytest.raises(EmulationError, match="wait in different places"):
        forward(lambda source: WARP_BARRIER.sub("if (threadIdx.x % 2) __syncwarp();", source, 1))


@pytest.mark.parametrize("rows", [slice(1, None), slice(None, -1)])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_finds_reads_outside_an_array(name, rows):
    # The guarding pages stand a few bytes away from what is no whole number of pages: 32 rows.
    with pytest.raises(EmulationError, match="outside an array"):
        forward(**{name: lambda x: x[:, :58][:, rows].contiguous()})


def test_finds_writes_outside_an_array():
    with pytest.raises(EmulationError, match="outside an array"):
        forward(out=lambda x: x[:, :-32].contiguous())


def test_finds_writes_outside_shared_memory(monkeypatch):
    bytes_needed = _program().shared_bytes
    monkeypatch.setattr(Program, "shared_bytes", bytes_needed - 32)
    with pytest.raises(EmulationError, match="outside the shared memory"):
        forward()


def test_finds_outputs_that_nobody_writes():
    with pytest.raises(EmulationError, match="nothing wrote"):
        forward(blocks=lambda blocks: blocks, out=lambda x: torch.empty(1, 91, 1, 32))


def test_indices_are_64_bits_wide():
    """The last block of arrays of 2**35 numbers, which exist only where they are touched."""
    keys, heads, dim, window = 2**27, 4, 64, 40
    shape = (1, keys, heads, dim)
    try:
        arrays = {n: untouched_array(keys * heads * dim) for n in ("q", "k", "v", "out")}
        arrays["log_sums"] = untouched_array(heads * keys)
    except OSError as error:
        pytest.skip(f"cannot reserve addresses: {error}")
    tensors = {n: torch.from_numpy(a).view(shape) for n, a in arrays.items() if n != "log_sums"}
    last = slice(keys - 64 - window, keys)
    for name in ("q", "k", "v"):
        tensors[name][:, last, -1] = torch.randn(1, 64 + window, dim)

    call = make_call(tensors["q"], tensors["k"], tensors["v"], Band(window, (1,) * heads))
    settings = Settings.of(call, 232448)
    assert settings.why_not() is None
    numbers = _numbers(settings, call.scale)
    strides = torch.ones(heads, dtype=torch.int32)
    addresses = {n: a.ctypes.data for n, a in arrays.items()} | {"strides": strides.data_ptr()}
    program = settings.program("forward")
    emulation = cuda_emulation.compiled(cuda_text(program), program)
    blocks = settings.grid(program)[1]
    emulation.run(range(blocks - 1, blocks), numbers, addresses, order=0)

    q, k, v = (tensors[n][0, last, -1].double() for n in ("q", "k", "v"))
    scores = (q @ k.T * call.scale)[-64:]
    delta = torch.arange(64 + window)[-64:, None] - torch.arange(64 + window)
    scores = scores.masked_fill((delta < 0) | (delta > window), -torch.inf)
    torch.testing.assert_close(
        tensors["out"][0, -64:, -1].double(), scores.softmax(1) @ v, rtol=0, atol=5e-6
    )


def _program() -> Program:
    q = torch.zeros(1, 90, 1, 32)
    return Settings.of(make_call(q, q, q, Band(20, (1,))), 232448).program("forward")


def _numbers(settings: Settings, scale: float) -> dict[str, int | float]:
    tiles, blocks = settings.grid(settings.program("forward"))
    return {
        "heads": settings.heads,
        "queries": settings.queries,
        "keys": settings.keys,
        "window": settings.window,
        "factor": scale * 1.4426950408889634,
        "tiles": tiles,
        "blocks": blocks,
    }
