"""CUDA C++ from the TIR programs, with no GPU and no CUDA compiler.

TVM's usual pipeline would add barriers of its own, which these programs must not have; the passes
below lower the programs as they are written.
"""

import re
from collections.abc import Callable

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import ir as I
from tvm.script.ir_builder import tirx as T
from tvm.tirx import transform

from kernels.cuda.backward import backward_queries
from kernels.cuda.distances import backward_distances
from kernels.cuda.forward import forward
from kernels.cuda.keys import backward_keys
from kernels.cuda.layout import THREADS, Tile

_PROGRAMS: dict[str, Callable[[Tile], None]] = {
    "forward": forward,
    "backward_queries": backward_queries,
    "backward_keys": backward_keys,
    "backward_distances": backward_distances,
}


def cuda_source(program: str, tile: Tile) -> str:
    """Return the CUDA C++ of a program: one kernel, {program}_kernel, that includes nothing."""
    with IRBuilder() as builder, I.ir_module(), T.prim_func():
        T.func_name(program)
        T.func_attr({"tirx.noalias": True})
        _PROGRAMS[program](tile)
    # The text is the same for every architecture; one has to be named.
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_80"}, host={"kind": "llvm"})
    passes = [
        transform.BindTarget(target),
        transform.LowerTIRxOpaque(),
        transform.FlattenBuffer(),
        transform.VectorizeLoop(True),
        transform.AnnotateEntryFunc(),
        transform.SplitHostDevice(),
        transform.MakePackedAPI(),
        transform.Filter(lambda function: function.attrs["target"].kind.name == "cuda"),
        transform.LowerIntrin(),
    ]
    module = tvm.ir.transform.Sequential(passes)(builder.get())
    text = tvm.get_global_func("target.build.cuda")(module, target).inspect_source()
    start = re.search(r'^extern "C" __global__', text, re.MULTILINE)
    assert start is not None
    return _plain(text[start.start() :], tile)


def _plain(kernel: str, tile: Tile) -> str:
    """Return the kernel without names that TVM's preamble would define by including headers.

    A run-time compiler has no headers. Two blocks of 256 threads fit on a multiprocessor only if
    the compiler keeps to 128 registers, which it has to be told.
    """
    for alias, name in (("int64_t", "long long"), ("uint", "unsigned int")):
        kernel = re.sub(rf"\b{alias}\b", name, kernel)
    bounds = f"__launch_bounds__({THREADS}"
    return kernel.replace(f"{bounds})", f"{bounds}, {tile.residency})")
