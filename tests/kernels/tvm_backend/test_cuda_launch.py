"""The host's side of the CUDA programs: what is chosen, refused and passed on. Needs no GPU."""

import contextlib
import ctypes
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import reference
from kernels.band import Band, Relative
from kernels.call import Call, make_call
from kernels.cuda.layout import Tile
from kernels.cuda.program import (
    PROGRAMS,
    Parameter,
    Program,
    choose_program,
    read_parameters,
)
from kernels.tvm_backend import cuda, cuda_driver
from kernels.tvm_backend.cuda_passes import Settings
from tests.kernels.cuda import emulation as cuda_emulation

H100, A100, RTX = 232448, 166912, 101376  # a block's greatest shared memory, in bytes
DEVICE = torch.device("cuda", 0)


def settings(**changes: Any) -> Settings:
    base = Settings(
        batch=2,
        queries=1000,
        keys=1000,
        heads=2,
        dim=64,
        window=512,
        strides=(1, 3),
        scale=0.125,
        dropout=0.1,
        seed=0,
        relative=True,
        shared_limit=H100,
    )
    return replace(base, **changes)


# Parameters and programs


def test_parameters_are_read_from_the_signature():
    program = Program("forward", Tile(64, 4, 4, relative=True, dropout=True))
    text = "void __launch_bounds__(256, 2) forward_kernel(float4* __restrict__ q_ptr, int keys) {"
    assert read_parameters(program, text) == (
        Parameter("q", "float4", True),
        Parameter("keys", "int", False),
    )


@pytest.mark.parametrize("parameter", ["float* q", "int keys_ptr", "float", "float q[4]"])
def test_a_parameter_that_is_not_understood_is_an_error(parameter):
    program = Program("forward", Tile(64, 4, 4, relative=True, dropout=True))
    with pytest.raises(ValueError, match="cannot read"):
        read_parameters(program, f"forward_kernel({parameter})")


def test_a_source_without_the_kernel_is_an_error():
    program = Program("forward", Tile(64, 4, 4, relative=True, dropout=True))
    with pytest.raises(ValueError, match="no kernel forward_kernel"):
        read_parameters(program, "void backward_kernel(int keys)")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_found_for_every_head_size(name):
    devices, windows = (H100, A100, RTX), (0, 32, 33, 8192)
    for limit, window, dim in product(devices, windows, range(16, 129, 16)):
        program = choose_program(name, dim, window, relative=True, dropout=True, shared_limit=limit)
        assert program is not None, (limit, window, dim)
        assert program.shared_bytes <= limit


def test_large_windows_take_the_largest_tiles_and_small_ones_narrow_tiles():
    def tile(name: str, window: int, limit: int = H100) -> tuple[int, int]:
        chosen = choose_program(name, 64, window, True, True, limit)
        assert chosen is not None
        return chosen.tile.rows, chosen.tile.columns

    assert [tile(name, 512) for name in PROGRAMS] == [(4, 4)] * 4
    assert [tile(name, 32) for name in PROGRAMS] == [(4, 2), (4, 2), (2, 4), (4, 2)]
    assert tile("forward", 512, limit=90_000) == (4, 2)
    assert choose_program("forward", 128, 512, True, True, 48 * 1024) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": 2**30 + 1}, r"k has 1073741825 positions; .* limit is 1073741824"),
        ({"batch": 2**30}, r"forward needs \d+ blocks; the limit of a launch is 2147483647"),
        ({"dim": 128, "shared_limit": 49152}, r"heads of 128 dimensions need .* 49152 bytes"),
    ],
)
def test_what_the_programs_cannot_run_is_named(changes, reason):
    assert settings().why_not() is None
    found = settings(**changes).why_not()
    assert found is not None
    assert re.search(reason, found)
    assert "\n" not in found


def test_strides_beyond_the_keys_make_no_more_classes_than_keys():
    q = torch.zeros(1, 10, 2, 64)
    made = Settings.of(make_call(q, q, q, Band(3, (1, 10**9))), H100)
    assert made.strides == (1, 10)


@pytest.mark.parametrize("window", [0, 32, 63, 512, 8192])
def test_the_shares_of_the_gradient_of_r_stay_few(window):
    """At most one share besides what 512 blocks hold together: memory does not grow with n."""
    wanted = settings(queries=23040, keys=23040, heads=8, window=window, strides=(1,) * 8)
    program = wanted.program("backward_distances")
    tiles, blocks = wanted.grid(program)
    assert blocks == tiles * wanted.heads * wanted.parts(program)
    assert blocks <= max(tiles * wanted.heads, 512 + tiles * wanted.heads)
    assert wanted.parts(program) >= 1


def test_no_more_shares_than_tiles_of_queries():
    wanted = settings(batch=1, queries=1, heads=1, window=0, strides=(1,))
    assert wanted.parts(wanted.program("backward_distances")) == 1


# The function with gradients, on the emulated device


@pytest.fixture
def emulated(monkeypatch) -> None:
    pytest.importorskip("tvm")
    if (reason := cuda_emulation.missing_compiler()) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(cuda, "_launch", cuda_emulation.launch)
    monkeypatch.setattr(cuda, "_hardware", lambda device: cuda._Hardware((9, 0), H100))


def leaves() -> list[Tensor]:
    """Return q, k, v, r, u, p that are dense nowhere and off every boundary of 16 bytes."""

    def odd(*shape: int) -> Tensor:
        size = torch.Size(shape).numel()
        return (
            torch.randn(size + 1)[1:].view(*reversed(shape)).permute(*reversed(range(len(shape))))
        )

    heads, dim = 2, 64
    shapes = [(2, 45, heads, dim), (2, 130, heads, dim), (2, 130, heads, dim)]
    shapes += [(heads, 21, dim), (heads, dim), (heads, dim)]
    return [odd(*shape).requires_grad_() for shape in shapes]


def attend(module: Any, tensors: list[Tensor]) -> Tensor:
    q, k, v, *relative = tensors
    band = Band(20, (1, 4))
    call = make_call(q, k, v, band, relative=Relative(*relative), dropout=0.3, seed=5)
    return module.attend(call)


def test_gradients_reach_every_input(emulated):
    tensors = leaves()
    grad = torch.randn(2, 45, 2, 64)
    mine = torch.autograd.grad(attend(cuda, tensors), tensors, grad)
    theirs = torch.autograd.grad(attend(reference, tensors), tensors, grad)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))


def test_inputs_without_gradient_get_none(emulated):
    tensors = leaves()
    for tensor in tensors[1:]:
        tensor.requires_grad_(False)
    attend(cuda, tensors).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [True] + [False] * 5


# can_run


@pytest.fixture
def hardware(monkeypatch) -> None:
    monkeypatch.setattr(cuda, "_hardware", lambda device: cuda._Hardware((9, 0), H100))
    monkeypatch.setattr(cuda, "why_not", lambda program, arch: None)


def fake_call(dim: int = 64, dtype: torch.dtype = torch.float32) -> Call:
    """Return a call whose tensors say that they are on a CUDA device, and hold nothing."""
    with FakeTensorMode():
        x = torch.empty(1, 8, 1, dim, device=DEVICE, dtype=dtype)
        return make_call(x, x, x, Band(3, (1,)))


def test_runs_on_cuda_tensors_only(hardware):
    assert cuda.can_run(fake_call()) is None
    x = torch.zeros(1, 8, 1, 64)
    reason = cuda.can_run(make_call(x, x, x, Band(3, (1,))))
    assert reason == "the CUDA kernels need tensors on a CUDA device; these are on cpu"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "it computes in float32; the tensors are torch.float64"),
        ({"dim": 24}, "the head size must be a multiple of 16 up to 128; it is 24"),
        ({"dim": 144}, "the head size must be a multiple of 16 up to 128; it is 144"),
    ],
)
def test_refuses_other_tensors_by_name(hardware, changes, reason):
    assert cuda.can_run(fake_call(**changes)) == reason


def test_refuses_old_devices_and_passes_on_other_reasons(hardware, monkeypatch):
    monkeypatch.setattr(cuda, "why_not", lambda program, arch: f"no compiler for {arch}")
    assert cuda.can_run(fake_call()) == "no compiler for sm_90"
    monkeypatch.setattr(cuda, "_hardware", lambda device: cuda._Hardware((6, 1), H100))
    assert cuda.can_run(fake_call()) == "the CUDA kernels need sm_70 or newer; cuda:0 is sm_61"


# The driver


class FakeDriver:
    """Takes the driver's calls down; `fails` names one that is refused."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuGetErrorName":
                ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_X"
                return 0
            return 209 if name == self.fails else 0

        return call


@pytest.fixture
def driver(monkeypatch) -> FakeDriver:
    fake = FakeDriver()
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(cuda_driver, "_library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    cuda_driver._context.cache_clear()
    return fake


def test_a_launch_goes_to_the_current_stream_in_the_devices_context(driver):
    kernel = cuda_driver.load_kernel(b"code", "forward_kernel", 100_000, DEVICE)
    values = [ctypes.c_int32(5)]
    cuda_driver.launch_kernel(kernel, 12, 256, 100_000, values, DEVICE)
    names = [name for name, _ in driver.calls]
    assert names[-2:] == ["cuCtxSetCurrent", "cuLaunchKernel"]
    _, blocks, _, _, threads, _, _, shared, stream, pointers, _ = driver.calls[-1][1]
    assert (blocks, threads, shared, stream.value) == (12, 256, 100_000, 77)
    assert ctypes.cast(pointers[0], ctypes.POINTER(ctypes.c_int32))[0] == 5
    assert ("cuFuncSetAttribute", 8, 100_000) in [(n, *a[1:]) for n, a in driver.calls]


def test_a_refusal_names_the_call_the_device_and_the_versions(driver):
    driver.fails = "cuModuleLoadData"
    with pytest.raises(
        cuda_driver.DriverError,
        match=r"cuModuleLoadData failed with CUDA_ERROR_X on a device \(sm_90\), torch for CUDA",
    ):
        cuda_driver.load_kernel(b"code", "forward_kernel", 100_000, DEVICE)
