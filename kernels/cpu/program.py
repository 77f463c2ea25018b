"""Opening a TIR function: its arguments by name."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import PrimFunc

Size = Callable[[SimpleNamespace], Expr]

# The numbers that every program takes: the shape of the call, strips of relative rows, tasks.
SIZES = ("batch", "query_count", "key_count", "heads", "window", "strip_count", "task_count")


def build_kernel(
    name: str,
    tensors: Mapping[str, Size],
    numbers: Mapping[str, str],
    body: Callable[[SimpleNamespace], None],
) -> PrimFunc:
    """Return the function `name` of the tensors and then the numbers, in the order given.

    `numbers` maps names to types. `tensors` maps names to sizes, given as functions of the numbers
    (a kernel refuses a tensor of another size); they are flat float32, or int32 for `tasks`, and
    may begin at any multiple of four bytes. `body` receives all of them as attributes.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(name)
        T.func_attr({"tirx.noalias": True})
        handles = {tensor: T.arg(tensor, T.handle()) for tensor in tensors}
        arguments = SimpleNamespace(
            **{
                number: T.arg(number, T.int32() if dtype == "int32" else T.float32())
                for number, dtype in numbers.items()
            }
        )
        for tensor, size in tensors.items():
            dtype = "int32" if tensor == "tasks" else "float32"
            buffer = T.match_buffer(handles[tensor], (size(arguments),), dtype, align=4)
            setattr(arguments, tensor, buffer)
        body(arguments)
    return builder.get()
