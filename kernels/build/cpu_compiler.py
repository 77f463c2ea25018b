"""Compiling the CPU kernels, ahead of time too: python -m kernels.build [--list] [--dims 64 ...].

Without this command a variant is compiled when it is first needed, in a few seconds, and kept.
"""

import argparse
import functools
import importlib
import itertools
import logging
import os
import shutil
import time
from pathlib import Path

from kernels.build.library import (
    Variant,
    cache_folder,
    find_library,
    load_kernels,
    variant_for,
    why_not,
)

KINDS = ("forward", "backward")


def compile_library(variant: Variant, path: Path) -> None:
    """Compile the variant's kernels into a shared library at `path`."""
    import tvm

    from kernels.cpu import backward as tvm_backward
    from kernels.cpu import finish as tvm_finish
    from kernels.cpu import forward as tvm_forward
    from kernels.cpu import pack as tvm_pack
    from kernels.cpu import scores as tvm_scores

    shape = tvm_scores.Shape(variant.target.tile, variant.dim, variant.relative, variant.dropout)
    if variant.kind == "forward":
        functions = [tvm_forward.forward(shape)]
    else:
        functions = [tvm_backward.backward(shape), tvm_finish.finish(shape)]
    if variant.relative:
        functions.append(tvm_pack.relative_strips(shape.tile, variant.dim))
    module = tvm.IRModule({str(f.attrs["global_symbol"]): f for f in functions})
    # This pass fits buffers to what is accessed. Ours fit already, and it took most of the time.
    with tvm.ir.transform.PassContext(disabled_pass=["s_tir.CompactBufferAllocation"]):
        executable = tvm.compile(module, target={"kind": "llvm", "mcpu": variant.target.cpu})
    executable.export_library(str(path))


@functools.cache
def why_no_compiler() -> str | None:
    """Return None if kernels can be compiled here, else the reason in one line."""
    try:
        importlib.import_module("tvm")
        codegen = importlib.import_module("tvm.target.codegen")
    except (ImportError, OSError, RuntimeError) as error:
        return f"TVM cannot be imported: {error}".splitlines()[0]
    if not codegen.llvm_version_major(allow_none=True):
        return "this TVM was built without LLVM"
    names = [os.environ.get("CXX") or os.environ.get("CC")]
    names = names if names[0] else ["g++", "gcc", "clang++", "clang", "c++", "cc"]
    if not any(shutil.which(name) for name in names if name):
        return "no C compiler was found, and this variant of the kernels is not compiled yet"
    return None


def main() -> None:
    """Compile the kernels for some head sizes, or list what is there."""
    parser = argparse.ArgumentParser(prog="python -m kernels.build", description=__doc__)
    parser.add_argument("--dims", type=int, nargs="+", default=[64], help="head sizes (64)")
    parser.add_argument("--list", action="store_true", help="only say which are compiled")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    print(f"folder: {cache_folder()}")  # noqa: T201
    flags = (False, True)
    for dim, kind, relative, dropout in itertools.product(options.dims, KINDS, flags, flags):
        variant = variant_for(kind, dim, relative, dropout)
        print(f"{variant.stem}  {_state(variant, options.list)}")  # noqa: T201


def _state(variant: Variant, only_look: bool) -> str:
    if find_library(variant) is not None:
        return "compiled"
    if only_look:
        return "not compiled"
    if (reason := why_not(variant)) is not None:
        raise SystemExit(f"kernels cannot be compiled: {reason}")
    start = time.perf_counter()
    load_kernels(variant)
    return f"compiled in {time.perf_counter() - start:.1f} s"


if __name__ == "__main__":
    main()
