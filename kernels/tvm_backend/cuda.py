"""The CUDA side of the tvm backend: the programs as a function with gradients.

Forward keeps its inputs, the output and one log-sum-exp per row and head; backward computes scores
again. Both are deterministic: no atomics, and the order of every sum depends on sizes alone.
"""

import ctypes
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.build.cubins import load_cubin, why_not
from kernels.call import Call
from kernels.cuda.layout import THREADS
from kernels.cuda.program import Parameter, Program
from kernels.tvm_backend.cuda_driver import launch_kernel, load_kernel, shared_limit
from kernels.tvm_backend.cuda_passes import Settings, run_backward, run_forward

_OLDEST = (7, 0)  # the first architecture whose warps are synchronised as the programs assume
_MOST_DIM = 128
_VECTOR_BYTES = 16
_SCALARS: dict[str, Any] = {"int": ctypes.c_int32, "float": ctypes.c_float}


def can_run(call: Call) -> str | None:
    """Return None if the CUDA programs can run the call here, else the reason in one line."""
    reason = _wrong_tensors(call)
    if reason is not None:
        return reason
    hardware = _hardware(call.q.device)
    if hardware.capability < _OLDEST:
        return f"the CUDA kernels need sm_70 or newer; {call.q.device} is {hardware.arch}"
    settings = Settings.of(call, hardware.shared_bytes)
    reason = settings.why_not()
    if reason is not None:
        return reason
    reasons = (why_not(settings.program(name), hardware.arch) for name in settings.programs)
    return next((reason for reason in reasons if reason is not None), None)


def _wrong_tensors(call: Call) -> str | None:
    device, dim = call.q.device, call.q.shape[3]
    if device.type != "cuda":
        return f"the CUDA kernels need tensors on a CUDA device; these are on {device}"
    if torch.version.hip is not None:
        return "the CUDA kernels do not run on AMD devices"
    if call.q.dtype != torch.float32:
        return f"it computes in float32; the tensors are {call.q.dtype}"
    if dim % 16 or dim > _MOST_DIM:
        return f"the head size must be a multiple of 16 up to {_MOST_DIM}; it is {dim}"
    return None


def attend(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    """Return banded attention; gradients reach q, k, v and the relative tensors.

    Raises CompileError or DriverError if the device or its compiler refuses a program.
    """
    settings = Settings.of(call, _hardware(call.q.device).shared_bytes)
    inputs = [_aligned(tensor) for tensor in (call.q, call.k, call.v, *(call.relative or ()))]
    out: Tensor = _Attention.apply(settings, *inputs)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: Settings, *inputs: Tensor) -> Tensor:
        out, log_sums = run_forward(settings, list(inputs), _launch)
        ctx.settings = settings
        ctx.save_for_backward(*inputs, out, log_sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, log_sums = ctx.saved_tensors
        gradients = run_backward(ctx.settings, inputs, (out, log_sums), _aligned(grad), _launch)
        wanted = ctx.needs_input_grad[1:]
        return None, *(g if need else None for g, need in zip(gradients, wanted, strict=True))


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor dense in memory and on a boundary that vector loads need."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _VECTOR_BYTES else tensor


class _Hardware(NamedTuple):
    capability: tuple[int, int]
    shared_bytes: int

    @property
    def arch(self) -> str:
        return "sm_{}{}".format(*self.capability)


@functools.cache
def _hardware(device: torch.device) -> _Hardware:
    return _Hardware(torch.cuda.get_device_capability(device), shared_limit(device))


class _Loaded(NamedTuple):
    kernel: ctypes.c_void_p
    parameters: tuple[Parameter, ...]


@functools.cache
def _load(program: Program, device: torch.device) -> _Loaded:
    cubin = load_cubin(program, _hardware(device).arch)
    kernel = load_kernel(cubin.code, program.kernel, program.shared_bytes, device)
    return _Loaded(kernel, cubin.parameters)


def _launch(program: Program, blocks: int, arguments: Mapping[str, Tensor | int | float]) -> None:
    """Start a program on torch's current stream of the tensors' device."""
    q = arguments["q"]
    assert isinstance(q, Tensor)
    loaded = _load(program, q.device)
    values = [_c_value(arguments[p.name], p) for p in loaded.parameters]
    launch_kernel(loaded.kernel, blocks, THREADS, program.shared_bytes, values, q.device)


def _c_value(value: Tensor | int | float, parameter: Parameter) -> Any:
    if isinstance(value, Tensor):
        assert parameter.pointer and value.is_contiguous()
        return ctypes.c_void_p(value.data_ptr())
    return _SCALARS[parameter.kind](value)
