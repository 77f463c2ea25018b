"""One tester for all backends: the oracle runs once in float64, every backend against it."""

import os
import signal
import time
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from torch import Tensor

from kernels import Band, Relative, banded_attention
from kernels.backends import BackendError, why_not
from kernels.call import make_call

BACKENDS = ("loop", "chunks", "tvm")
NAMES = ("q", "k", "v", "r", "content_bias", "position_bias")
# Of the output absolutely, of a gradient relative to its largest entry.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6}
NONE = (0.0,) * 7
ZERO = 1e-9  # a gradient that is analytically zero is below this in float64


@dataclass(frozen=True)
class Case:
    """A shape and the options of one call."""

    keys: int
    window: int
    strides: tuple[int, ...] = (1,)
    queries: int | None = None
    batch: int = 1
    dim: int = 16
    relative: bool = True
    dropout: float = 0.0
    scale: float | None = None
    size: float = 1.0  # of the entries of q and k
    extra_rows: int = 0  # of r, beyond what the window needs

    def __str__(self) -> str:
        queries = self.keys if self.queries is None else self.queries
        strides = "".join(map(str, self.strides))
        options = "-rel" * self.relative + "-drop" * (self.dropout > 0)
        shape = f"b{self.batch}-{queries}of{self.keys}-d{self.dim}"
        return f"{shape}-w{self.window}-s{strides}{options}"

    @property
    def band(self) -> Band:
        return Band(self.window, self.strides)

    def tensors(self) -> tuple[Tensor, ...]:
        """Random inputs, float32 numbers held in float64."""
        heads, dim = len(self.strides), self.dim
        queries = self.keys if self.queries is None else self.queries
        shapes = [(self.batch, rows, heads, dim) for rows in (queries, self.keys, self.keys)]
        if self.relative:
            rows = min(self.window, self.keys - 1) + 1 + self.extra_rows
            shapes += [(heads, rows, dim), (heads, dim), (heads, dim)]
        q, k, *others = (torch.randn(shape).double() for shape in shapes)
        return q * self.size, k * self.size, *others

    def run(self, backend: str, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
        """The output, and the gradients of the leaves, which are laid out as they come."""
        q, k, v, *relative = leaves
        torch.manual_seed(12345)
        out = banded_attention(
            q,
            k,
            v,
            self.band,
            relative=Relative(*relative) if relative else None,
            dropout=self.dropout,
            scale=self.scale,
            backend=backend,
        )
        assert out.dtype == q.dtype
        out.backward(dout)
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(gradients) == len(leaves)
        return [out.detach(), *gradients]


@dataclass(frozen=True)
class Comparison:
    """A case with inputs, and what the oracle says of it."""

    case: Case
    inputs: tuple[Tensor, ...]
    dout: Tensor

    @classmethod
    def of(cls, case: Case) -> "Comparison":
        inputs = case.tensors()
        return cls(case, inputs, torch.randn(inputs[0].shape).double())

    def run(self, backend: str, dtype: torch.dtype) -> list[Tensor]:
        """The output and all gradients."""
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in self.inputs]
        return self.case.run(backend, leaves, self.dout.to(dtype))

    @cached_property
    def expected(self) -> list[Tensor]:
        return self.run("dense", torch.float64)

    def check(self, backend: str, dtype: torch.dtype, least: tuple[float, ...] = NONE) -> None:
        """The backend agrees with the oracle, in the output and in every gradient."""
        assert_close(self.run(backend, dtype), self.expected, TOLERANCES[dtype], least)

    @property
    def remains(self) -> tuple[float, ...]:
        """What rounding to float32 alone may leave in the output and each gradient, if it is small.

        A score's gradient is P * (dout . v - dout . out). Where chance makes the two sums nearly
        equal, as it can in a row of two keys, the difference keeps the rounding of the sums. The
        gradients of r and the biases collect it from all rows. Those of the values have none.
        """
        v, factors = self.inputs[2], (self.inputs[0], self.inputs[1], *self.inputs[3:])
        sums = self.dout.norm(dim=-1).max() * v.norm(dim=-1).max() / (1 - self.case.dropout)
        scale = self.case.dim**-0.5 if self.case.scale is None else self.case.scale
        factor = scale * max(x.abs().max().item() for x in factors)
        one = torch.finfo(torch.float32).eps * sums.item() * factor
        batch, queries = self.inputs[0].shape[:2]
        return (0.0, one, one, 0.0, *[one * (batch * queries) ** 0.5] * 3)

    def check_in_every_type(self, backend: str) -> None:
        """The backend agrees, or refuses a head size that it does not have by its name."""
        for dtype in types_of(backend):
            if backend == "tvm" and self.case.dim % 16:
                with pytest.raises(BackendError, match="head size must be a multiple of 16"):
                    self.run(backend, dtype)
            else:
                self.check(backend, dtype)

    def check_large_scores(self, backend: str) -> None:
        """In float32, finite and right within what the rounding of the scores themselves costs."""
        q, k = self.inputs[:2]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / self.case.dim**0.5
        tolerance = 2 * torch.finfo(torch.float32).eps * scores.abs().max().item()
        assert_close(self.run(backend, torch.float32), self.expected, tolerance)


def error(found: Tensor, true: Tensor) -> float:
    assert found.shape == true.shape
    return (found.double() - true).abs().max().item()


def assert_close(
    found: list[Tensor],
    expected: list[Tensor],
    tolerance: float,
    least: tuple[float, ...] = NONE,
) -> None:
    """Within the tolerance, of a gradient's largest entry; errors up to `least` do not count."""
    for name, x, true, remains in zip(("out", *NAMES), found, expected, least, strict=False):
        largest = true.abs().max().item()
        limit = max(remains, tolerance * (1.0 if name == "out" or largest < ZERO else largest))
        # not <=: the error of a result that is not a number is not a number
        assert error(x, true) <= limit, f"{name} is off by {error(x, true):.2e} > {limit:.2e}"


def types_of(backend: str) -> tuple[torch.dtype, ...]:
    """The types that a backend takes, the widest last."""
    probe = torch.zeros(1, 1, 1, 64)
    call = make_call(probe, probe, probe, Band(0, (1,)))
    if (reason := why_not(backend, call)) is not None:
        pytest.skip(f"{backend} cannot run: {reason}")
    wide = replace(call, q=probe.double(), k=probe.double(), v=probe.double())
    return (torch.float32,) if why_not(backend, wide) else (torch.float32, torch.float64)


def ended_well(child: int, seconds: float) -> bool:
    """Whether a forked child ends with status 0 in time; one that does not end is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
