"""Runs the generated CUDA source on the CPU, compiled by g++ with cuda_emulation.hpp."""

import ctypes
import functools
import hashlib
import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.cuda.program import Parameter, Program, read_parameters

HEADER = Path(__file__).with_name("cuda_emulation.hpp")
BUILDS = Path(__file__).resolve().parents[3] / ".pytest_cache" / "longchar" / "emulation"
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

Arguments = Mapping[str, Tensor | int | float]


class EmulationError(AssertionError):
    """The program does what no GPU program may."""


def missing_compiler() -> str | None:
    """Return None if the emulation can be compiled here, else the reason."""
    return None if shutil.which("g++") else "g++ is not installed"


def launch(program: Program, blocks: int, arguments: Arguments) -> None:
    """Run the generated source of a program; see `run_source`."""
    run_source(cuda_text(program), program, blocks, arguments)


def run_source(source: str, program: Program, blocks: int, arguments: Arguments) -> None:
    """Run a kernel twice, with different orders of threads, and demand equal bits.

    Each array stands against a page that may not be touched, after its end in one run and before
    its start in the other. Outputs and shared memory begin as NaN, and no NaN may be left.
    """
    emulation = compiled(source, program)
    first, second = (_run_guarded(emulation, blocks, arguments, order) for order in (0, 1))
    for name in sorted(OUTPUTS[program.name] & first.keys()):
        if not np.array_equal(first[name].view(np.int32), second[name].view(np.int32)):
            raise EmulationError(f"{program.name}: {name} depends on the order of the threads")
        if np.isnan(first[name]).any():
            raise EmulationError(f"{program.name}: {name} has entries that nothing wrote")
        target = arguments[name]
        assert isinstance(target, Tensor)
        target.copy_(torch.from_numpy(first[name]).view(target.shape))


class Emulation:
    """A kernel compiled for the CPU."""

    def __init__(self, library: ctypes.CDLL, program: Program, source: str) -> None:
        self.library = library
        self.program = program
        self.parameters = read_parameters(program, source)

    def run(
        self, blocks: range, arguments: Arguments, addresses: Mapping[str, int], order: int
    ) -> None:
        """Run some blocks; arrays are given by address. Raises EmulationError."""
        values = [_c_value(parameter, arguments, addresses) for parameter in self.parameters]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        floats = ctypes.c_size_t(self.program.shared_bytes // 4)
        run = self.library.run_kernel
        if status := run(pointers, blocks.start, len(blocks), order, floats):
            raise EmulationError(f"{self.program.name}: {_FAILURES[status]}")


def _run_guarded(
    emulation: Emulation, blocks: int, arguments: Arguments, order: int
) -> dict[str, np.ndarray]:
    library, outputs = emulation.library, OUTPUTS[emulation.program.name]
    arrays: dict[str, np.ndarray] = {}
    addresses: dict[str, int] = {}
    try:
        for parameter in emulation.parameters:
            if parameter.pointer:
                name = parameter.name
                value = arguments[name]
                assert isinstance(value, Tensor) and value.is_contiguous()
                content = value.detach().numpy().reshape(-1)
                size = ctypes.c_size_t(content.nbytes)
                addresses[name] = library.guarded_new(size, int(order == 0))
                memory = (ctypes.c_char * content.nbytes).from_address(addresses[name])
                arrays[name] = np.frombuffer(memory, dtype=content.dtype)
                arrays[name][:] = np.nan if name in outputs else content
        emulation.run(range(blocks), arguments, addresses, order)
        return {name: array.copy() for name, array in arrays.items()}
    finally:
        for name, array in arrays.items():
            address, size = ctypes.c_void_p(addresses[name]), ctypes.c_size_t(array.nbytes)
            library.guarded_free(address, size)


def _c_value(parameter: Parameter, arguments: Arguments, addresses: Mapping[str, int]) -> Any:
    if parameter.pointer:
        return ctypes.c_void_p(addresses[parameter.name])
    return _SCALARS[parameter.kind](arguments[parameter.name])


@functools.cache
def cuda_text(program: Program) -> str:
    """Return the generated source."""
    from kernels.cuda.source import cuda_source

    return cuda_source(program.name, program.tile)


@functools.cache
def compiled(source: str, program: Program) -> Emulation:
    """Compile a kernel for the CPU; what was compiled before is found again by its content."""
    text = f'#include "{HEADER.name}"\n{source}\n{_launcher(source, program)}'
    made_of = f"{HEADER.read_text()}{text}{_flags()}"
    key = hashlib.sha256(made_of.encode()).hexdigest()[:24]
    path = BUILDS / f"{key}.so"
    if not path.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILDS) as work:
            file, fresh = Path(work) / "kernel.cpp", Path(work) / "kernel.so"
            file.write_text(text)
            command = ["g++", *_flags(), "-I", str(HEADER.parent), str(file), "-o", str(fresh)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            fresh.replace(path)
    library = ctypes.CDLL(str(path))
    library.guarded_new.restype = ctypes.c_void_p
    return Emulation(library, program, source)


@functools.cache
def _flags() -> list[str]:
    """Return the options; with fused multiply-adds, which nvcc makes too, where there are any."""
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    cpu = Path("/proc/cpuinfo")
    fused = cpu.exists() and " fma " in cpu.read_text()
    return [*flags, "-mfma", "-fexpensive-optimizations"] if fused else flags


def _launcher(source: str, program: Program) -> str:
    """Return C++ that calls the kernel with arguments given by address."""
    parameters = read_parameters(program, source)
    casts = [f"*({p.kind}{'*' * p.pointer}*)arguments[{i}]" for i, p in enumerate(parameters)]
    return f"""
static void** arguments;
static void call_kernel() {{ {program.kernel}({", ".join(casts)}); }}
extern "C" int run_kernel(void** given, int first, int count, int order, size_t floats) {{
  arguments = given;
  return emulation::launch(call_kernel, first, count, order, floats);
}}
"""


def untouched_array(elements: int) -> np.ndarray:
    """Return float32 zeros that take memory only where they are touched. Raises OSError."""
    no_reserve = 0x4000  # MAP_NORESERVE on Linux; Python 3.11 has no name for it
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, elements * 4, flags=flags), dtype=np.float32)
