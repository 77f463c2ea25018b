"""Exactness on the longest windows that are evaluated: 32,256 positions, a band of 512.

Sampled against the dense oracle in float64, on slices. Inside one residue class of a head a band
is plain, so queries [t, t + 512] of a class, with the keys from t - 512 on, have all that the rows
of these queries depend on, and the key at t, all that sees it.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import Band, Relative, banded_attention
from tests.kernels.tester import assert_close, types_of

LENGTH, WINDOW, STRIDES = 32_256, 512, (1, 2, 3, 4)


@dataclass(frozen=True)
class Sample:
    """Queries of one head and class: places in the class, from `first` on."""

    head: int
    residue: int
    first: int

    @property
    def rows(self) -> slice:
        """Positions of the queries."""
        stride = STRIDES[self.head]
        start = self.residue + self.first * stride
        return slice(start, start + WINDOW * stride + 1, stride)

    @property
    def keys(self) -> slice:
        """Positions of all keys that these queries see."""
        stride = STRIDES[self.head]
        start = self.residue + max(self.first - WINDOW, 0) * stride
        return slice(start, self.rows.stop, stride)


def samples() -> list[Sample]:
    """For each head the first queries of a class, the last ones, and some between."""
    found = []
    for head, stride in enumerate(STRIDES):
        residue = stride - 1
        last = len(range(residue, LENGTH, stride)) - WINDOW - 1
        found += [Sample(head, residue, first) for first in (0, last // 3 + 7 * head, last)]
    return found


@pytest.fixture(scope="module")
def tensors() -> list[Tensor]:
    """q, k, v, the gradient of the output, r and the biases."""
    torch.manual_seed(0)
    heads, dim = len(STRIDES), 16
    shape = (1, LENGTH, heads, dim)
    shapes = [shape, shape, shape, shape, (heads, WINDOW + 1, dim), (heads, dim), (heads, dim)]
    return [torch.randn(shape) for shape in shapes]


def oracle(sample: Sample, tensors: list[Tensor]) -> list[Tensor]:
    """The output and dq of the sample's rows, dk and dv of the key at its first row."""
    head = slice(sample.head, sample.head + 1)
    q, k, v, dout, *relative = tensors
    rows, keys = sample.rows, sample.keys
    leaves = [
        x[:, places, head].double().requires_grad_()
        for x, places in ((q, rows), (k, keys), (v, keys))
    ]
    terms = Relative(*(x[head].double() for x in relative))
    out = banded_attention(*leaves, Band(WINDOW, (1,)), relative=terms, backend="dense")
    out.backward(dout[:, rows, head].double())
    dq, dk, dv = (leaf.grad for leaf in leaves)
    assert dq is not None and dk is not None and dv is not None
    place = (rows.start - keys.start) // STRIDES[sample.head]
    return [out.detach(), dq, dk[:, place], dv[:, place]]


def check(backend: str, tensors: list[Tensor], backward: bool) -> None:
    types_of(backend)
    q, k, v, dout, *relative = tensors
    leaves = [x.clone().requires_grad_(backward) for x in (q, k, v)]
    band = Band(WINDOW, STRIDES)
    out = banded_attention(*leaves, band, relative=Relative(*relative), backend=backend)
    if backward:
        out.backward(dout)
    for sample in samples():
        rows = (slice(None), sample.rows, slice(sample.head, sample.head + 1))
        key = (slice(None), sample.rows.start, rows[2])
        found = [out.detach()[rows]]
        if backward:
            dq, dk, dv = (leaf.grad for leaf in leaves)
            assert dq is not None and dk is not None and dv is not None
            found += [dq[rows], dk[key], dv[key]]
        assert_close(found, oracle(sample, tensors)[: len(found)], 5e-6)


@pytest.mark.parametrize("backend", ["tvm", "chunks"])
def test_forward(backend: str, tensors: list[Tensor]) -> None:
    check(backend, tensors, backward=False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tvm", "chunks"])
def test_forward_and_backward(backend: str, tensors: list[Tensor]) -> None:
    check(backend, tensors, backward=True)
