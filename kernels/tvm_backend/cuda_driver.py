"""Loading and launching CUDA machine code through the driver's own library.

Few of its functions are used, none of which has changed for many versions. TVM's CUDA runtime is
not needed, and a launch goes to the stream that torch is on.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

_SHARED_LIMIT = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class DriverError(RuntimeError):
    """The CUDA driver refused; the message names the call, the device and the CUDA version."""


def shared_limit(device: torch.device) -> int:
    """Return the most shared memory, in bytes, that a block on the device may ask for."""
    limit = ctypes.c_int()
    _call(device, "cuDeviceGetAttribute", ctypes.byref(limit), _SHARED_LIMIT, _ordinal(device))
    return limit.value


def load_kernel(code: bytes, name: str, shared_bytes: int, device: torch.device) -> ctypes.c_void_p:
    """Load a kernel onto a device; it stays loaded until the process ends.

    Raises DriverError.
    """
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _enter(device)
        _call(device, "cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
        _call(device, "cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
        # Without this a block gets no more than 48 KiB.
        _call(device, "cuFuncSetAttribute", kernel, _SHARED_BYTES, shared_bytes)
    return kernel


def launch_kernel(
    kernel: ctypes.c_void_p,
    blocks: int,
    threads: int,
    shared_bytes: int,
    values: Sequence[Any],
    device: torch.device,
) -> None:
    """Start a kernel on torch's current stream of the device; `values` are ctypes objects.

    Raises DriverError for a launch that is refused. A fault in the kernel shows later, as one of
    torch's own does.
    """
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    with torch.cuda.device(device):
        _enter(device)
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        sizes = (blocks, 1, 1, threads, 1, 1, shared_bytes)
        _call(device, "cuLaunchKernel", kernel, *sizes, stream, pointers, None)


def _enter(device: torch.device) -> None:
    """Make the device's context this thread's own: autograd runs backward in threads of its own."""
    _call(device, "cuCtxSetCurrent", _context(device))


@functools.cache
def _context(device: torch.device) -> ctypes.c_void_p:
    """Return the context that the CUDA runtime, and so torch, uses on a device."""
    context = ctypes.c_void_p()
    _call(device, "cuDevicePrimaryCtxRetain", ctypes.byref(context), _ordinal(device))
    return context


def _ordinal(device: torch.device) -> ctypes.c_int:
    ordinal = ctypes.c_int()
    _call(device, "cuInit", 0)
    _call(device, "cuDeviceGet", ctypes.byref(ordinal), device.index)
    return ordinal


def _call(device: torch.device, name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise DriverError(f"{name} failed with {_describe(status)} on {_describe_device(device)}")


def _describe(status: int) -> str:
    text = ctypes.c_char_p()
    if _library().cuGetErrorName(status, ctypes.byref(text)) or text.value is None:
        return f"error {status}"
    return text.value.decode()


def _describe_device(device: torch.device) -> str:
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return f"{torch.cuda.get_device_name(device)} ({arch}), torch for CUDA {torch.version.cuda}"


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
