"""What depends on what, gradients by finite differences, and recomputation."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import Band, Relative, banded_attention
from tests.kernels.tester import Case

STRIDES = (1, 2, 3, 4)
KEYS, WINDOW, FIRST = 60, 5, 7  # the first query stands at position 7
BAND = Band(WINDOW, STRIDES)


def sees(head: int, i: int, j: int) -> bool:
    """The definition, for a query and a key at these positions."""
    distance = i - j
    return distance % STRIDES[head] == 0 and 0 <= distance <= WINDOW * STRIDES[head]


def visible() -> Tensor:
    """[queries, heads, keys]"""
    rows = [
        [[sees(head, i, j) for j in range(KEYS)] for head in range(len(STRIDES))]
        for i in range(FIRST, KEYS)
    ]
    return torch.tensor(rows)


def inputs() -> list[Tensor]:
    """q, k, v, r and the biases."""
    heads, dim = len(STRIDES), 16
    shapes = [(1, rows, heads, dim) for rows in (KEYS - FIRST, KEYS, KEYS)]
    shapes += [(heads, WINDOW + 1, dim), (heads, dim), (heads, dim)]
    return [torch.randn(shape) / 4 for shape in shapes]


def attend(tensors: list[Tensor], backend: str) -> Tensor:
    q, k, v, *relative = tensors
    return banded_attention(q, k, v, BAND, relative=Relative(*relative), backend=backend)


def test_rows_weigh_exactly_the_keys_of_the_band(backend: str) -> None:
    """With vectors of a basis for values the output is the weights, of as many keys at once."""
    tensors = inputs()
    parts = []
    for basis in torch.eye(KEYS, 64).split(16, dim=1):
        tensors[2] = basis[None, :, None].expand(1, KEYS, len(STRIDES), 16)
        parts.append(attend(tensors, backend)[0])
    weights = torch.cat(parts, dim=-1)[..., :KEYS]
    assert torch.equal(weights > 0, visible())
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("place", [0, 17, 34, KEYS - 1])
def test_a_key_reaches_exactly_the_rows_that_see_it(place: int, backend: str) -> None:
    """The others keep every bit, however large the change is."""
    tensors = inputs()
    before = attend(tensors, backend)
    tensors[1] = tensors[1].clone()
    tensors[1][:, place] += 40.0
    changed = (attend(tensors, backend) != before).any(-1)[0]  # [queries, heads]
    # where a row has one key alone its weight is 1 whatever the key is
    others = visible().sum(-1) > 1
    assert torch.equal(changed, visible()[..., place] & others)


def test_a_query_reaches_its_own_row_alone(backend: str) -> None:
    tensors = inputs()
    before = attend(tensors, backend)
    tensors[0] = tensors[0].clone()
    tensors[0][:, 20] += 40.0
    changed = (attend(tensors, backend) != before).any(-1)[0]
    assert torch.equal(changed, (torch.arange(KEYS - FIRST) == 20)[:, None].expand_as(changed))


@pytest.mark.parametrize("delta", [0, 1, WINDOW])
def test_a_row_of_r_reaches_exactly_the_rows_with_a_key_at_its_delta(
    delta: int, backend: str
) -> None:
    tensors = inputs()
    before = attend(tensors, backend)
    tensors[3] = tensors[3].clone()
    tensors[3][:, delta] += 40.0
    changed = (attend(tensors, backend) != before).any(-1)[0]
    place = torch.arange(FIRST, KEYS)[:, None]
    stride = torch.tensor(STRIDES)
    assert torch.equal(changed, (place >= delta * stride) & (place >= stride))


@pytest.mark.parametrize("backend", ["dense", "loop", "chunks"])
@pytest.mark.parametrize("relative", [True, False])
def test_gradients_by_finite_differences(relative: bool, backend: str) -> None:
    case = Case(7, 2, (1, 2), queries=6, dim=3, relative=relative, dropout=0.3)
    leaves = [x.requires_grad_() for x in case.tensors()]

    def run(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)  # the same mask every time
        q, k, v, *terms = tensors
        given: dict[str, Any] = {"relative": Relative(*terms)} if terms else {}
        return banded_attention(q, k, v, case.band, dropout=0.3, backend=backend, **given)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)  # random directions


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_sees_the_same_mask(reentrant: bool, backend: str) -> None:
    case = Case(50, 8, (1, 3), batch=2, dropout=0.4)
    leaves = [x.float().requires_grad_() for x in case.tensors()]
    dout = torch.randn(leaves[0].shape)
    calls = []

    def run(*tensors: Tensor) -> Tensor:
        q, k, v, *terms = tensors
        calls.append(torch.get_rng_state())
        given = {"relative": Relative(*terms), "dropout": 0.4, "backend": backend}
        return banded_attention(q, k, v, case.band, **given)

    torch.manual_seed(7)
    plain = run(*leaves)
    expected = torch.autograd.grad(plain, leaves, dout)
    torch.manual_seed(7)
    out = checkpoint(run, *leaves, use_reentrant=reentrant)
    torch.manual_seed(8)  # whatever else draws numbers before the recomputation
    out.backward(dout)
    assert torch.equal(out, plain)
    assert len(calls) == 3  # once without, and twice with recomputation
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, gradient)
    assert not torch.equal(run(*leaves), plain)  # the next call has another mask
