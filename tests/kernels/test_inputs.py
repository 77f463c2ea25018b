"""What may come in: tensors of any layout and type. And what is refused, before any work."""

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

import kernels
from kernels import Band, Relative, banded_attention
from tests.kernels.tester import Case, Comparison, assert_close, error

CASE = Case(40, 9, (1, 3), queries=25, batch=2, dropout=0.2)


def misaligned(*shape: int) -> Tensor:
    """Four bytes off any boundary."""
    return torch.randn(math.prod(shape) + 1)[1:].view(shape)


def transposed(*shape: int) -> Tensor:
    return torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))


def heads_first(*shape: int) -> Tensor:
    """As q.transpose(1, 2) of a tensor [batch, heads, positions, dim]."""
    if len(shape) < 4:
        return torch.randn(shape)
    return torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)


def sliced(*shape: int) -> Tensor:
    wide = torch.randn([2 * size + 1 for size in shape])
    return wide[tuple(slice(1, None, 2) for _ in shape)]


def expanded(*shape: int) -> Tensor:
    """All batches, or all heads, are one in memory."""
    return torch.randn(1, *shape[1:]).expand(shape)


@pytest.mark.parametrize("layout", [misaligned, transposed, heads_first, sliced, expanded])
def test_any_layout(layout: Callable[..., Tensor], backend: str) -> None:
    tensors = [layout(*x.shape) for x in CASE.tensors()]
    dout = layout(*tensors[0].shape)
    if layout is expanded:
        dout = torch.randn(()).expand(dout.shape)  # as from a sum
    if layout is misaligned:
        assert all(x.data_ptr() % 8 for x in tensors)
    else:
        assert not any(x.is_contiguous() for x in tensors[:3])
    found = CASE.run(backend, [x.detach().requires_grad_() for x in tensors], dout)
    expected = Comparison(CASE, tuple(x.double() for x in tensors), dout.double()).expected
    assert_close(found, expected, 5e-6)


def test_parts_of_one_projection(backend: str) -> None:
    """As a model makes them: q, k and v are views of one tensor, and so share its gradient."""
    projection = torch.randn(2, 30, 3, 2, 16)

    def run(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaf = projection.to(dtype, copy=True).requires_grad_()
        q, k, v = leaf.unbind(2)
        out = banded_attention(q, k, v, Band(7, (2, 1)), backend=backend)
        out.square().sum().backward()
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    assert_close(run(backend, torch.float32), run("dense", torch.float64), 5e-6)


def test_one_tensor_for_all(backend: str) -> None:
    x = torch.randn(1, 20, 1, 16)

    def run(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        out = banded_attention(leaf, leaf, leaf, Band(4, (1,)), backend=backend)
        out.square().sum().backward()
        assert leaf.grad is not None
        return [out.detach(), leaf.grad]

    assert_close(run(backend, torch.float32), run("dense", torch.float64), 5e-6)


def half_leaves(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """q, k and v of a half type, and float32 for the relative terms: what autocast makes."""
    q, k, v, *relative = case.tensors()
    halves = [x.to(dtype) for x in (q, k, v)]
    return [x.requires_grad_() for x in (*halves, *(x.float() for x in relative))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_half_types(dtype: torch.dtype, size: float, backend: str) -> None:
    """Off by the rounding of inputs and results to the half type, and by nothing else.

    At size 30 the scores are several hundred: more than a half type could hold apart.
    """
    case = Case(40, 9, (1, 3), batch=2, size=size)
    leaves = half_leaves(case, dtype)
    dout = torch.randn(leaves[0].shape).to(dtype)
    found = case.run(backend, leaves, dout)
    assert [x.dtype for x in found] == [dtype] * 4 + [torch.float32] * 3
    exact = Comparison(case, tuple(x.detach().double() for x in leaves), dout.double())
    q, k = exact.inputs[:2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * case.dim**-0.5
    single = max(5e-6, 2 * torch.finfo(torch.float32).eps * scores.abs().max().item())
    for name, x, true in zip(("out", *"qkvrup"), found, exact.expected, strict=True):
        rounding = torch.finfo(dtype).eps / 2 if x.dtype == dtype else 0.0
        smallest = torch.finfo(dtype).smallest_normal if x.dtype == dtype else 0.0
        largest = 1.0 if name == "out" else true.abs().max().item()
        limit = rounding * true.abs() + single * largest * (1 + rounding) + smallest
        assert ((x.double() - true).abs() <= limit).all(), f"{name}: {error(x, true):.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype, backend: str) -> None:
    """Not one bit, also where the backward pass runs under it too, which torch advises against."""
    case = Case(40, 9, (1, 3), batch=2, dropout=0.2)
    leaves = half_leaves(case, dtype)
    dout = torch.randn(leaves[0].shape).to(dtype)
    plain = case.run(backend, leaves, dout)
    again = [x.detach().requires_grad_() for x in leaves]
    with torch.autocast("cpu", dtype):
        under = case.run(backend, again, dout)
    for one, other in zip(plain, under, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_autocast_does_not_change_the_oracle() -> None:
    q, k, v, *terms = (x.detach() for x in half_leaves(CASE, torch.bfloat16))
    outs = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            relative = Relative(*terms)
            outs.append(banded_attention(q, k, v, CASE.band, relative=relative, backend="dense"))
    assert torch.equal(*outs)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As for a user: nothing checks types at run time, so what is wrong arrives."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def arguments(**changes: Any) -> dict[str, Any]:
    """Those of a right call, 4 queries on 6 keys, with changes."""
    given = {
        "q": torch.zeros(1, 4, 2, 16),
        "k": torch.zeros(1, 6, 2, 16),
        "v": torch.zeros(1, 6, 2, 16),
        "band": Band(3, (1, 2)),
        "relative": Relative(torch.zeros(2, 4, 16), torch.zeros(2, 16), torch.zeros(2, 16)),
    }
    terms = {name: changes.pop(name) for name in Relative._fields if name in changes}
    given["relative"] = given["relative"]._replace(**terms)
    return {**given, **changes}


FOUR_SIZES = "it must have the four sizes [batch, positions, heads, dim], each at least 1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 2, 16)}, f"q has shape (4, 2, 16); {FOUR_SIZES}"),
        ({"k": torch.zeros(1, 0, 2, 16)}, f"k has shape (1, 0, 2, 16); {FOUR_SIZES}"),
        ({"v": torch.zeros(1, 1, 6, 2, 16)}, f"v has shape (1, 1, 6, 2, 16); {FOUR_SIZES}"),
        (
            {"q": torch.zeros(1, 4, 2, 16).int()},
            "q has type torch.int32; it must be a floating-point tensor",
        ),
        (
            {"k": torch.zeros(1, 6, 2, 16).double()},
            "k is torch.float64 on cpu but q is torch.float32 on cpu; they must agree",
        ),
        (
            {"v": torch.zeros(1, 6, 2, 16, device="meta")},
            "v is torch.float32 on meta but q is torch.float32 on cpu; they must agree",
        ),
        (
            {"k": torch.zeros(1, 6, 3, 16)},
            "k has shape (1, 6, 3, 16); with q of shape (1, 4, 2, 16) it must be [1, keys, 2, 16]",
        ),
        (
            {"v": torch.zeros(1, 5, 2, 16)},
            "v has shape (1, 5, 2, 16); it must have k's, (1, 6, 2, 16)",
        ),
        ({"q": torch.zeros(1, 7, 2, 16)}, "q has 7 positions but k only 6;"),
        (
            {"band": Band(3, (1, 2, 3))},
            "band.strides has 3 entries; q has 2 heads, and each needs one stride",
        ),
        (
            {"r": torch.zeros(2, 3, 16)},
            "relative.r has shape (2, 3, 16); it must be [2, rows, 16] with at least 4 rows",
        ),
        (
            {"r": torch.zeros(2, 64)},
            "relative.r has shape (2, 64); it must be [2, rows, 16] with at least 4 rows",
        ),
        (
            {"r": torch.zeros(2, 4, 16).double()},
            "relative.r has type torch.float64; with q of torch.float32 the arithmetic is in "
            "torch.float32, and it must be a floating-point type no wider than that",
        ),
        (
            {"content_bias": torch.zeros(1, 16)},
            "relative.content_bias has shape (1, 16); it must be [2, 16]",
        ),
        (
            {"position_bias": torch.zeros(2, 16, device="meta")},
            "relative.position_bias is on meta; it must be on q's, cpu",
        ),
        ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and below 1"),
        ({"dropout": -0.1}, "dropout is -0.1; it must be at least 0 and below 1"),
        ({"dropout": math.nan}, "dropout is nan; it must be at least 0 and below 1"),
        ({"scale": math.inf}, "scale is inf; it must be a finite number"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value[:30]) if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "choose_backend", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        banded_attention(**arguments(**changes))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("window", "strides", "message"),
    [
        (-1, (1,), "band.window is -1; it must be an integer >= 0"),
        (2.5, (1,), "band.window is 2.5; it must be an integer >= 0"),
        (3, [1], "band.strides is [1]; it must be a tuple with one stride per head"),
        (3, (), "band.strides is (); it must be a tuple with one stride per head"),
        (3, (1, 0), "band.strides[1] is 0; a stride must be an integer >= 1"),
        (3, (1.5,), "band.strides[0] is 1.5; a stride must be an integer >= 1"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_bands(window: Any, strides: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Band(window, strides)


@pytest.mark.usefixtures("unchecked")
def test_the_unchanged_arguments_are_right() -> None:
    assert banded_attention(**arguments()).shape == (1, 4, 2, 16)
