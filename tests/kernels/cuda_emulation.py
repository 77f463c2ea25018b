"""Runs the generated CUDA source on the CPU, compiled by g++ with cuda_emulation.hpp."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cuda_program import Parameter, Program, read_parameters

HEADER = Path(__file__).with_name("cuda_emulation.hpp")
OUTPUTS = {
    "forward": {"out", "log_sums"},
    "backward_queries": {"dq", "dots"},
    "backward_keys": {"dk", "dv", "content_sums"},
    "backward_distances": {"dr", "distance_sums"},
}
_FAILURES = {
    1: "threads of one block or warp wait in different places",
    2: "an access outside an array",
    3: "a write outside the shared memory that the program asks for",
}
_SCALARS: dict[str, Any] = {"int": ctypes.c_int32, "float": ctypes.c_float}


class EmulationError(AssertionError):
    """The program does what no GPU program may."""


def launch(program: Program, blocks: int, arguments: Mapping[str, Tensor | int | float]) -> None:
    """Run a program twice, with different orders of threads, and demand equal bits.

    Each array stands against a page that may not be touched, after its end in one run and before
    its start in the other. Outputs and shared memory begin as NaN.
    """
    library = compiled(program)
    parameters = read_parameters(program, cuda_text(program))
    results = [_run(library, program, parameters, blocks, arguments, order) for order in (0, 1)]
    for name in OUTPUTS[program.name] & results[0].keys():
        first, second = (result[name] for result in results)
        if not np.array_equal(first.view(np.int32), second.view(np.int32)):
            raise EmulationError(f"{program.name}: {name} depends on the order of the threads")
        if np.isnan(first).any():
            raise EmulationError(f"{program.name}: {name} has entries that nothing wrote")
        target = arguments[name]
        assert isinstance(target, Tensor)
        target.copy_(torch.from_numpy(first).view(target.shape))


def _run(
    library: ctypes.CDLL,
    program: Program,
    parameters: tuple[Parameter, ...],
    blocks: int,
    arguments: Mapping[str, Tensor | int | float],
    order: int,
) -> dict[str, np.ndarray]:
    arrays: dict[str, tuple[int, np.ndarray]] = {}
    try:
        for parameter in parameters:
            if parameter.pointer:
                value = arguments[parameter.name]
                assert isinstance(value, Tensor)
                blank = parameter.name in OUTPUTS[program.name]
                arrays[parameter.name] = _guarded_copy(library, value, blank, upper=order == 0)
        values = [_c_value(p, arguments, {n: a for n, (a, _) in arrays.items()}) for p in parameters]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        floats = program.shared_bytes // 4
        status = getattr(library, f"launch_{program.name}")(
            pointers, 0, blocks, order, ctypes.c_size_t(floats)
        )
        if status:
            raise EmulationError(f"{program.name}: {_FAILURES[status]}")
        return {name: array.copy() for name, (_, array) in arrays.items()}
    finally:
        for address, array in arrays.values():
            library.guarded_free(ctypes.c_void_p(address), ctypes.c_size_t(array.nbytes))


def _guarded_copy(
    library: ctypes.CDLL, value: Tensor, blank: bool, upper: bool
) -> tuple[int, np.ndarray]:
    assert value.is_contiguous()
    source = value.detach().numpy().reshape(-1)
    address = library.guarded_new(ctypes.c_size_t(source.nbytes), int(upper))
    memory = (ctypes.c_char * source.nbytes).from_address(address)
    array = np.frombuffer(memory, dtype=source.dtype)
    array[:] = np.nan if blank else source
    return address, array


def _c_value(
    parameter: Parameter,
    arguments: Mapping[str, Tensor | int | float],
    addresses: Mapping[str, int],
) -> Any:
    if parameter.pointer:
        return ctypes.c_void_p(addresses[parameter.name])
    return _SCALARS[parameter.kind](arguments[parameter.name])


@functools.cache
def cuda_text(program: Program) -> str:
    """Return the generated source."""
    from kernels.tvm_cuda_source import cuda_source

    return cuda_source(program.name, program.tile)


@functools.cache
def compiled(program: Program) -> ctypes.CDLL:
    """Compile a program for the CPU; what was compiled before is found again by its content."""
    text = f'#include "{HEADER.name}"\n{cuda_text(program)}\n{_launcher(program)}'
    key = hashlib.sha256(HEADER.read_bytes() + text.encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"longchar-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            source, fresh = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
            source.write_text(text)
            flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-w", "-shared", "-fPIC"]
            command = ["g++", *flags, "-I", str(HEADER.parent), str(source), "-o", str(fresh)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            fresh.replace(path)
    library = ctypes.CDLL(str(path))
    library.guarded_new.restype = ctypes.c_void_p
    return library


def _launcher(program: Program) -> str:
    """Return C++ that calls the kernel with arguments given by address."""
    parameters = read_parameters(program, cuda_text(program))
    casts = [
        f"*({p.kind}{'*' * p.pointer}*)arguments[{i}]" for i, p in enumerate(parameters)
    ]
    return f"""
static void** arguments;
static void call_kernel() {{ {program.kernel}({", ".join(casts)}); }}
extern "C" int launch_{program.name}(void** given, int first, int count, int order, size_t floats) {{
  arguments = given;
  return emulation::launch(call_kernel, first, count, order, floats);
}}
"""


def missing_compiler() -> str | None:
    """Return None if the emulation can be compiled here, else the reason."""
    return None if shutil.which("g++") else "g++ is not installed"
