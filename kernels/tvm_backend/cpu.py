"""The tvm backend: the CPU programs as a function with gradients.

Forward keeps q, k, v, r, the biases, the output, and one log-sum-exp per row and head; backward
computes scores again. Tasks are spread over a crew of threads (workers.py). A task's shares of
gradients that other tasks also add to wait in buffers of their own and are added in a fixed order.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.build.library import Kernels, Variant, load_kernels, variant_for, why_not
from kernels.call import Call
from kernels.cpu.tasks import backward_tasks, forward_tasks
from kernels.tvm_backend import cuda
from kernels.tvm_backend.threads import WORTH_WAKING, Turns, spread

_LIMIT = 2**31 - 2**16  # elements that a kernel's 32-bit indices reach, with room for the last tile


def can_run(call: Call) -> str | None:
    """Return None if the TVM kernels can run the call here, else the reason in one line."""
    if call.q.device.type == "cuda":
        return cuda.can_run(call)
    if call.q.device.type != "cpu":
        return f"the kernels are for CPUs and CUDA devices; the tensors are on {call.q.device}"
    if call.q.dtype != torch.float32:
        return f"it computes in float32; the tensors are {call.q.dtype}"
    if call.q.shape[3] % 16:
        return f"the head size must be a multiple of 16; it is {call.q.shape[3]}"
    rows = [] if call.relative is None else [("relative.r", call.relative.r)]
    for name, tensor in [("q", call.q), ("k", call.k), *rows]:
        if tensor.numel() > _LIMIT:
            return f"{name} has {tensor.numel()} elements; the kernels' limit is {_LIMIT}"
    reason = why_not(_variant(call, "forward"))
    if reason is None and torch.is_grad_enabled() and any(x.requires_grad for x in _inputs(call)):
        reason = why_not(_variant(call, "backward"))
    return reason


def attend(call: Call) -> Float[Tensor, "batch queries heads dim"]:
    """Return banded attention; gradients reach q, k, v and the relative tensors."""
    if call.q.device.type == "cuda":
        return cuda.attend(call)
    settings = _Settings.of(call)
    inputs = [tensor.contiguous() for tensor in _inputs(call)]
    return _Attention.apply(settings, *inputs)


def _inputs(call: Call) -> list[Tensor]:
    return [call.q, call.k, call.v, *(call.relative or ())]


def _variant(call: Call, kind: str) -> Variant:
    return variant_for(kind, call.q.shape[3], call.relative is not None, call.dropout > 0)


class _Settings(NamedTuple):
    """The numbers of a call, as the kernels want them."""

    batch: int
    queries: int
    keys: int
    heads: int
    dim: int
    window: int
    strides: tuple[int, ...]
    scale: float
    dropout: float
    seed: int
    relative: bool

    @staticmethod
    def of(call: Call) -> "_Settings":
        batch, queries, heads, dim = call.q.shape
        window, strides = call.band.window, call.band.strides
        relative = call.relative is not None
        numbers = (call.scale, call.dropout, call.seed, relative)
        return _Settings(batch, queries, call.k.shape[1], heads, dim, window, strides, *numbers)

    def variant(self, kind: str) -> Variant:
        return variant_for(kind, self.dim, self.relative, self.dropout > 0)

    def strips(self, lanes: int) -> int:
        """The number of strips of one head's relative rows."""
        return -(-(self.window + 1) // lanes) + 1

    def sizes(self, lanes: int, tasks: int) -> tuple[int, ...]:
        """The kernels' arguments from `batch` to `task_count`."""
        shape = (self.batch, self.queries, self.keys, self.heads, self.window)
        return (*shape, self.strips(lanes), tasks)

    @property
    def work(self) -> float:
        """About how many multiplications and additions a forward pass takes."""
        rows = self.batch * self.heads * self.queries
        return 3.0 * self.dim * rows * (min(self.window, self.keys) + 32)

    @property
    def random(self) -> tuple[int, int, int]:
        """The halves of the seed and the threshold of the dropout mask."""
        return _signed(self.seed), _signed(self.seed >> 32), round(self.dropout * 2**24)

    @property
    def kept(self) -> float:
        """What a kept weight is multiplied by."""
        return 1.0 / (1.0 - self.dropout)

    @property
    def factor(self) -> float:
        """The factor of scores in base 2."""
        return self.scale * math.log2(math.e)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: _Settings, *inputs: Tensor) -> Tensor:
        out, lse = _forward(settings, inputs)
        ctx.settings = settings
        ctx.save_for_backward(*inputs, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        gradients = _backward(ctx.settings, inputs, out, lse, d_out.contiguous())
        wanted = ctx.needs_input_grad[1:]
        return None, *(g if need else None for g, need in zip(gradients, wanted, strict=True))


def _forward(settings: _Settings, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    q, k, v, *relative = inputs
    variant = settings.variant("forward")
    kernels, tile = load_kernels(variant), variant.target.tile
    tasks = forward_tasks(
        settings.batch,
        settings.queries,
        settings.keys,
        settings.strides,
        settings.window,
        settings.dim,
        tile.block,
    )
    out = torch.empty_like(q)
    lse = q.new_empty(settings.batch, settings.heads, settings.queries)
    rows = _pack_relative(kernels, settings, variant, relative) if relative else []
    tensors = _flat(q, k, v, *rows, out, lse, tasks.table)
    numbers = (
        *settings.sizes(tile.lanes, tasks.count),
        *settings.random,
        settings.factor,
        settings.kept,
    )
    kernel = kernels["forward"]

    def do(number: int) -> None:
        run = tasks.runs[number]
        kernel(*tensors, run.begin, run.end, *numbers)

    spread(len(tasks.runs), lambda: do, work=settings.work)
    return out, lse


def _backward(
    settings: _Settings, inputs: list[Tensor], out: Tensor, lse: Tensor, d_out: Tensor
) -> list[Tensor]:
    q, k, v, *relative = inputs
    variant = settings.variant("backward")
    kernels, tile = load_kernels(variant), variant.target.tile
    tasks = backward_tasks(
        settings.batch, settings.keys, settings.strides, settings.window, settings.dim, tile.lanes
    )
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_relative = [torch.zeros_like(tensor) for tensor in relative]
    part_rows = min(tasks.longest + settings.window, settings.keys) + tile.block
    sizes = (*settings.sizes(tile.lanes, tasks.count), part_rows)
    fixed = _flat(q, out, d_out, d_q, k, v, d_k, d_v, lse, tasks.table)
    if relative:
        packed = _flat(*_pack_relative(kernels, settings, variant, relative), relative[0])
    turns = Turns()

    def prepare() -> Callable[[int], None]:
        part_query = q.new_empty(part_rows * settings.dim)
        parts, rows, targets = [], [], []
        if relative:
            count = settings.strips(tile.lanes) * tile.lanes + 2
            parts = [q.new_empty(count * settings.dim)]
            rows, targets = [*packed, *parts], [*parts, *_flat(*d_relative)]
        numbers = (*sizes, *settings.random, settings.factor, settings.scale, settings.kept)
        compute = functools.partial(kernels["backward"], *fixed, part_query, *rows)
        tail = (*sizes, settings.scale)
        add = functools.partial(kernels["finish"], tasks.table, part_query, d_q.view(-1), *targets)

        def do(number: int) -> None:
            run = tasks.runs[number]
            compute(run.begin, run.end, *numbers)
            turns.take(run.head, run.turn, lambda: add(run.begin, *tail))

        return do

    spread(len(tasks.runs), prepare, failed=turns.break_off, work=settings.work)
    return [d_q, d_k, d_v, *d_relative]


def _pack_relative(
    kernels: Kernels, settings: _Settings, variant: Variant, relative: list[Tensor]
) -> list[Tensor]:
    """Return r in strips, and the biases."""
    r, content_bias, position_bias = relative
    lanes = variant.target.tile.lanes
    strips = settings.strips(lanes)
    packed = r.new_empty(settings.heads * strips * settings.dim * lanes)
    kernel, tensors = kernels["relative_strips"], _flat(r, packed)
    numbers = (settings.heads, settings.window, strips)
    # Copying an entry takes as long as about ten multiplications.
    work = 10.0 * packed.numel()
    if work < WORTH_WAKING:
        kernel(*tensors, 0, settings.heads, *numbers)
    else:
        spread(settings.heads, lambda: lambda head: kernel(*tensors, head, head + 1, *numbers))
    return [packed, content_bias, position_bias]


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [tensor.view(-1) for tensor in tensors]


def _signed(word: int) -> int:
    """Return the low 32 bits as a signed number."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
